"""Meshes derived from another: every device is kept, in the order of the axes."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = "a:2,b:2,c:2"


def untyped(value: Any) -> Any:
    """A value that a type checker would refuse."""
    return value


def ids(mesh: Mesh) -> Any:
    return np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices).tolist()


@pytest.mark.parametrize(
    ("names", "sizes", "order"),
    [
        (("a", "b"), {"x": 4, "c": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (("b", "a"), {"x": 4, "c": 2}, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (("c", "a"), {"b": 2, "x": 4}, [[0, 4, 1, 5], [2, 6, 3, 7]]),
        (("a", "b", "c"), {"x": 8}, list(range(8))),
        ("b", {"a": 2, "x": 2, "c": 2}, np.arange(8).reshape(2, 2, 2).tolist()),
        (("b",), {"a": 2, "x": 2, "c": 2}, np.arange(8).reshape(2, 2, 2).tolist()),
    ],
    ids=str,
)
def test_fold_axes_puts_the_first_most_major(names: tuple[str, ...], sizes: Any, order: Any) -> None:
    mesh = sr.meshes.fold_axes(sr.create_mesh(MESH), names, "x")
    assert list(mesh.shape.items()) == list(sizes.items())
    assert ids(mesh) == order
    assert sr.meshes.fold_axes(sr.create_mesh(MESH).abstract_mesh, names, "x") == mesh.abstract_mesh
    assert dict(sr.meshes.fold_axes(sr.mesh_shape(MESH), names, "x").shape) == sizes


def test_an_array_on_folded_axes_stays_in_place() -> None:
    mesh = sr.create_mesh(MESH)
    for names in itertools.permutations("abc", 2):
        folded = sr.meshes.fold_axes(mesh, names, "x")
        after, before = NamedSharding(folded, P("x")), NamedSharding(mesh, P(names))
        assert after.devices_indices_map((8,)) == before.devices_indices_map((8,))


def test_split_axis_undoes_fold_axes() -> None:
    mesh = sr.create_mesh(MESH)
    assert sr.meshes.split_axis(sr.meshes.fold_axes(mesh, ("a", "b"), "x"), "x", {"a": 2, "b": -1}) is mesh
    assert sr.meshes.split_axis(mesh, "c", {"d": 2, "e": 1}).axis_names == ("a", "b", "d", "e")


def test_rename_axes_can_swap_names() -> None:
    mesh = sr.create_mesh(MESH)
    swapped = sr.meshes.rename_axes(mesh, {"a": "c", "c": "a"})
    assert swapped.axis_names == ("c", "b", "a")
    assert ids(swapped) == ids(mesh)
    assert sr.meshes.rename_axes(swapped, {"a": "c", "c": "a"}) is mesh


def test_axis_types_are_kept() -> None:
    mesh = sr.create_mesh(MESH, axis_types=("auto", "auto", "explicit"))
    auto, explicit = mesh.axis_types[0], mesh.axis_types[2]
    assert sr.meshes.fold_axes(mesh, ("a", "b"), "x").axis_types == (auto, explicit)
    assert sr.meshes.split_axis(mesh, "c", {"d": 2, "e": 1}).axis_types == (auto, auto, explicit, explicit)
    assert sr.meshes.rename_axes(mesh, {"c": "z"}).axis_types == mesh.axis_types
    assert sr.meshes.submesh(mesh, mesh.devices[0].flat).axis_types == mesh.axis_types
    assert isinstance(sr.meshes.split_axis(mesh.abstract_mesh, "c", {"d": -1}), AbstractMesh)
    with pytest.raises(
        sr.errors.MeshError, match="'b' is Auto, 'c' is Explicit; only axes of the same type can be folded"
    ):
        sr.meshes.fold_axes(mesh, ("b", "c"), "x")


@pytest.mark.parametrize(
    ("part", "sizes"),
    [
        (np.s_[:1], {"a": 1, "b": 2, "c": 2}),
        (np.s_[:, 1], {"a": 2, "b": 1, "c": 2}),
        (np.s_[1, 1, 1:], {"a": 1, "b": 1, "c": 1}),
        (np.s_[::-1, :, 0], {"a": 2, "b": 2, "c": 1}),  # in the order of the mesh
    ],
    ids=str,
)
def test_submesh_of_a_box_of_devices(part: Any, sizes: dict[str, int]) -> None:
    mesh = sr.create_mesh(MESH)
    box = sr.meshes.submesh(mesh, mesh.devices[part].flat)
    assert dict(box.shape) == sizes
    assert list(np.ravel(ids(box))) == sorted(device.id for device in mesh.devices[part].flat)
    line = sr.create_mesh("a:8")
    assert ids(sr.meshes.submesh(line, line.devices[::3])) == [0, 3, 6]  # it may have gaps


MESH_ERROR, UNKNOWN, derive = sr.errors.MeshError, sr.errors.UnknownAxisError, sr.meshes


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m: derive.fold_axes(m, ("a", "z"), "x"), UNKNOWN, "unknown axis 'z'; the mesh is a:2,b:2,c:2"),
        (lambda m: derive.split_axis(m, "z", {"x": 2}), UNKNOWN, "unknown axis 'z'"),
        (lambda m: derive.rename_axes(m, {"z": "b"}), UNKNOWN, "unknown axis 'z'"),
        (lambda m: derive.fold_axes(m, (), "x"), MESH_ERROR, "at least one axis, and each only once"),
        (lambda m: derive.fold_axes(m, ("a", "a"), "x"), MESH_ERROR, "each only once; got"),
        (lambda m: derive.fold_axes(m, ("a", "b"), "c"), MESH_ERROR, "'c' is not a non-empty string, or occurs twice"),
        (lambda m: derive.rename_axes(m, {"a": "b"}), MESH_ERROR, "'b' is not a non-empty string, or occurs twice"),
        (lambda m: derive.split_axis(m, "a", {"b": 2}), MESH_ERROR, "'b' is not a non-empty string, or occurs twice"),
        (lambda m: derive.split_axis(m, "a", {"x": 3}), MESH_ERROR, "axis 'a' of size 2 cannot be split into x:3"),
        (lambda m: derive.split_axis(m, "a", {"x": -1, "y": -1}), MESH_ERROR, "cannot be split into x:-1,y:-1"),
        (lambda m: derive.split_axis(m, "a", {"x": -1, "y": 3}), MESH_ERROR, "cannot be split into x:-1,y:3"),
        (lambda m: derive.split_axis(m, "a", {"x": 0, "y": -1}), MESH_ERROR, "cannot be split into x:0,y:-1"),
        (lambda m: derive.split_axis(m, "a", {}), MESH_ERROR, "cannot be split into no axes"),
        (lambda m: derive.split_axis(m, "a", untyped({"x": "2", "y": -1})), MESH_ERROR, "a tuple of integers"),
        (
            lambda m: derive.split_axis(m, "a", untyped(2)),
            MESH_ERROR,
            "the name and the size of each new axis, .*; got 2",
        ),
        (lambda m: derive.submesh(m, m.devices.flat[0]), MESH_ERROR, "devices must be a list of devices, got"),
        (lambda m: derive.submesh(m, []), MESH_ERROR, "devices is empty"),
        (lambda m: derive.submesh(m, m.devices.flat[1:4]), MESH_ERROR, "3 devices do not form a mesh: .* 4 positions"),
        (lambda m: derive.submesh(m, [object()]), MESH_ERROR, "is not one of its devices"),
        (lambda m: derive.submesh(m.abstract_mesh, jax.devices()), MESH_ERROR, "without devices"),
    ],
)
def test_invalid_derivations_raise(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call(sr.create_mesh(MESH))
