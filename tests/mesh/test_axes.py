"""Questions about axes, inside `jax.shard_map` and outside."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = "data:2,model:2,expert:2"


def mapped(ask: Callable[[], Any]) -> list[float]:
    """What every device answers, in mesh order."""
    axes = ("data", "model", "expert")
    found = jax.shard_map(lambda x: x + ask(), mesh=sr.create_mesh(MESH), in_specs=P(axes), out_specs=P(axes))
    return found(np.zeros(8)).tolist()


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
def test_sizes_and_places(names: Any, size: int, index: list[int]) -> None:
    assert sr.meshes.get_axes_size_in_mesh(names, sr.mesh_shape(MESH)) == size
    assert mapped(lambda: sr.meshes.get_mesh_axis_size(names)) == [size] * 8
    assert mapped(lambda: sr.meshes.get_submesh_device_index(names)) == index


def test_the_size_of_an_axis_is_known_while_tracing() -> None:
    assert mapped(lambda: np.ones(sr.meshes.get_mesh_axis_size("data")).sum()) == [2] * 8


@pytest.mark.parametrize("names", [None, 3, {"data"}, ("data", None), [["data"]]], ids=str)
@pytest.mark.parametrize(
    "ask", [sr.meshes.get_axes_size_in_mesh, sr.meshes.get_mesh_axis_size, sr.meshes.get_submesh_device_index]
)
def test_what_is_no_name_is_refused(ask: Callable[[Any], Any], names: Any) -> None:
    with pytest.raises(sr.errors.AxisTypeError, match="given by name"):
        ask(names)


def test_no_axes_make_an_array_too() -> None:
    for names in ((), ("data",)):
        found: list[Any] = []
        mapped(lambda names=names, found=found: found.append(sr.meshes.get_submesh_device_index(names)) or 0)
        assert (found[0].shape, found[0].dtype) == ((), np.int32)


@pytest.mark.parametrize(
    "ask", [sr.meshes.get_mesh_axis_names, lambda mesh: sr.meshes.get_axes_size_in_mesh("a", mesh)]
)
def test_what_is_no_mesh_is_refused(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(
        sr.errors.AxisTypeError, match=r"a mesh is a Mesh or an AbstractMesh, got 'a:8'; sr\.mesh_shape"
    ):
        ask("a:8")


@pytest.mark.parametrize("ask", [sr.meshes.get_mesh_axis_size, sr.meshes.get_submesh_device_index])
@pytest.mark.parametrize("names", ["data", ("data", "model")], ids=str)
def test_outside_a_device_has_no_place(ask: Callable[[Any], Any], names: Any) -> None:
    with pytest.raises(sr.errors.UnboundAxisError, match=r"inside jax\.shard_map") as caught:
        ask(names)
    assert isinstance(caught.value, NameError)


def test_an_axis_that_the_mesh_has_not_is_refused() -> None:
    with pytest.raises(
        sr.errors.UnknownAxisError, match=r"mesh data:2,model:2,expert:2 has no axis 'modle' \(did you mean 'model'"
    ):
        sr.meshes.get_axes_size_in_mesh(("data", "modle"), sr.mesh_shape(MESH))
