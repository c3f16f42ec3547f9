"""Axis sizes and device positions, inside `jax.shard_map` and outside."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = "data:2,model:2,expert:2"


def untyped(value: Any) -> Any:
    """A value that a type checker would refuse."""
    return value


def mapped(query: Callable[[], Any]) -> list[float]:
    """The result of a function on every device, in mesh order."""
    axes = ("data", "model", "expert")
    function = jax.shard_map(lambda x: x + query(), mesh=sr.create_mesh(MESH), in_specs=P(axes), out_specs=P(axes))
    return function(np.zeros(8)).tolist()


@pytest.mark.parametrize(
    ("names", "size", "index"),
    [
        ("data", 2, [0, 0, 0, 0, 1, 1, 1, 1]),
        ("expert", 2, [0, 1] * 4),
        (("data", "expert"), 4, [0, 1, 0, 1, 2, 3, 2, 3]),
        (["expert", "data"], 4, [0, 2, 0, 2, 1, 3, 1, 3]),
        (("expert", "model", "data"), 8, [0, 4, 2, 6, 1, 5, 3, 7]),
        ((), 1, [0] * 8),
    ],
    ids=str,
)
def test_sizes_and_indices_of_axes(names: Any, size: int, index: list[int]) -> None:
    assert sr.meshes.get_axes_size_in_mesh(names, sr.mesh_shape(MESH)) == size
    assert mapped(lambda: sr.meshes.get_mesh_axis_size(names)) == [size] * 8
    assert mapped(lambda: sr.meshes.get_submesh_device_index(names)) == index


@pytest.mark.parametrize("names", [None, 3, {"data"}, ("data", None), [["data"]]], ids=str)
@pytest.mark.parametrize(
    "query", [sr.meshes.get_axes_size_in_mesh, sr.meshes.get_mesh_axis_size, sr.meshes.get_submesh_device_index]
)
def test_axes_must_be_names(query: Callable[[Any], Any], names: Any) -> None:
    with pytest.raises(sr.errors.AxisTypeError, match="expected an axis name"):
        query(names)


def test_a_size_is_static_and_an_index_an_array() -> None:
    assert mapped(lambda: np.ones(sr.meshes.get_mesh_axis_size("data")).sum()) == [2] * 8
    assert mapped(lambda: sr.meshes.get_submesh_device_index(()).astype(np.int32)) == [0] * 8


@pytest.mark.parametrize(
    ("query", "error", "match"),
    [
        (lambda: sr.meshes.get_mesh_axis_names(untyped("a:8")), TypeError, "a mesh must be a Mesh or an AbstractMesh"),
        (lambda: sr.meshes.get_axes_size_in_mesh("a", untyped("a:8")), TypeError, r"got 'a:8'; sr\.mesh_shape"),
        (
            lambda: sr.meshes.get_axes_size_in_mesh(("data", "modle"), sr.mesh_shape(MESH)),
            sr.errors.UnknownAxisError,
            r"unknown axis 'modle' \(did you mean 'model'\?\); the mesh is data:2,model:2,expert:2",
        ),
    ],
)
def test_a_mesh_with_the_axes_is_needed(query: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        query()


@pytest.mark.parametrize("query", [sr.meshes.get_mesh_axis_size, sr.meshes.get_submesh_device_index])
@pytest.mark.parametrize("names", ["data", ("data", "model")], ids=str)
def test_mapped_axes_are_needed(query: Callable[[Any], Any], names: Any) -> None:
    with pytest.raises(sr.errors.UnboundAxisError, match=r"inside jax\.shard_map") as caught:
        query(names)
    assert isinstance(caught.value, NameError)
