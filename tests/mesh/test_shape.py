"""Shapes of meshes: from text, and with a size left open."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import shardrules as sr
from shardrules.core.axes import mesh_text
from shardrules.mesh.shape import read_axes, resolve_sizes

NAMES = st.lists(st.text("abcxyz_", min_size=1, max_size=4), unique=True, max_size=4)


@given(NAMES, st.data())
def test_mesh_shape_undoes_mesh_text(names: list[str], data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 4096)) for _ in names]
    text = ",".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))
    mesh = sr.mesh_shape(text)
    assert mesh.axis_names == tuple(names)
    assert list(mesh.shape.values()) == sizes
    assert mesh_text(mesh) == text
    assert mesh.axis_types == (AxisType.Auto,) * len(names)
    assert sr.mesh_shape(text.replace(":", " : ").replace(",", " , ")) == mesh


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("data", "'data' is not name:size"),
        ("data:", "'data' is not name:size"),
        (":4", "'4' is not name:size"),
        ("data:x", "'data:x' is not"),
        ("data:0", "'data:0' is not"),
        ("data:-1", "size of 1 or more[.]"),
        ("data:-2", "'data:-2' is not"),
        ("data:2,", "'' is not"),
        ("data:²", "'data:²' is not"),
        ("a:2,a:2", "axis 'a' occurs twice"),
        ("a:x,b:0", "(?s)'a:x' is not.*'b:0' is not"),
        ({"data": 10**5000}, "a mesh shape must be a string .* got a value of type dict"),
        (8, "a mesh shape must be a string such as 'data:64,model:16', got 8"),
    ],
)
def test_an_invalid_shape_raises(text: Any, match: str) -> None:
    with pytest.raises(sr.errors.MeshError, match=match):
        sr.mesh_shape(text)


def test_read_axes_may_allow_an_open_size() -> None:
    assert read_axes("data:-1,model:2", least=-1) == (("data", "model"), (-1, 2))
    with pytest.raises(sr.errors.MeshError, match="or -1 for the remaining devices"):
        read_axes("data:-2", least=-1)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_an_open_size_takes_the_remaining_devices(sizes: list[int], data: st.DataObject) -> None:
    open_axis = data.draw(st.integers(0, len(sizes) - 1))
    requested = [-1 if index == open_axis else size for index, size in enumerate(sizes)]
    assert resolve_sizes(requested, "abcd"[: len(sizes)], math.prod(sizes)) == tuple(sizes)


@pytest.mark.parametrize(
    ("sizes", "names", "match"),
    [
        ((2, 4), ("a",), "one name for each size"),
        ((2, 4), ("a", "a"), "axis 'a' occurs twice"),
        ((0, 8), ("a", "b"), "1 or more, or -1 for the remaining devices; got 0"),
        ((-2, -4), ("a", "b"), "got -2"),
        ((-1, -1), ("a", "b"), "a:-1,b:-1: can only specify one unknown dimension"),
        ((3, -1), ("a", "b"), r"a:3,b:-1: .* \(8 devices\): .* multiply to 3"),
        ((16, -1), ("a", "b"), "multiply to 16"),
        ((2, 2), ("a", "b"), r"devices=jax.devices\(\)\[:4\] uses 4 of them"),
        ((2, 4), ("", "b"), "an axis name must be a non-empty string, got ''"),
        ((2, 4), ("a", 3), "an axis name must be a non-empty string, got 3"),
        ((2.0, 4.0), ("a", "b"), r"the sizes of a mesh must be a tuple of integers, got \(2.0, 4.0\)"),
        ((4, 4), ("a", "b"), "multiply to 16. A mesh uses each of its devices exactly once$"),
    ],
)
def test_sizes_that_do_not_match_the_devices_raise(sizes: Any, names: Any, match: str) -> None:
    with pytest.raises(sr.errors.MeshError, match=match):
        resolve_sizes(sizes, names, 8)
