"""Shapes of meshes as text."""

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
def test_a_shape_is_read_as_it_is_written(names: list[str], data: st.DataObject) -> None:
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
        ("a:2,a:2", "axis 'a' comes twice"),
        ("a:x,b:0", "(?s)'a:x' is not.*'b:0' is not"),
    ],
)
def test_what_is_no_shape_is_refused(text: str, match: str) -> None:
    with pytest.raises(sr.errors.SpecError, match=match):
        sr.mesh_shape(text)


def test_a_shape_is_a_text() -> None:
    with pytest.raises(sr.errors.SpecError, match="a mesh shape is a text such as 'data:64,model:16', got 8"):
        sr.mesh_shape(8)  # pyright: ignore[reportArgumentType]


def test_a_size_may_be_left_open_where_devices_fill_it() -> None:
    assert read_axes("data:-1,model:2", least=-1) == (("data", "model"), (-1, 2))
    with pytest.raises(sr.errors.SpecError, match="or -1 for what is left"):
        read_axes("data:-2", least=-1)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_an_open_size_is_what_is_left(sizes: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(sizes) - 1))
    asked = [-1 if number == place else size for number, size in enumerate(sizes)]
    assert resolve_sizes(asked, "abcd"[: len(sizes)], math.prod(sizes)) == tuple(sizes)


@pytest.mark.parametrize(
    ("sizes", "names", "match"),
    [
        ((2, 4), ("a",), "one name for each size"),
        ((2, 4), ("a", "a"), "axis 'a' comes twice"),
        ((0, 8), ("a", "b"), "1 or more, or -1 for what is left; got 0"),
        ((-2, -4), ("a", "b"), "got -2"),
        ((-1, -1), ("a", "b"), "a:-1,b:-1: can only specify one unknown dimension"),
        ((3, -1), ("a", "b"), r"a:3,b:-1: .* \(8 devices\): .* multiply to 3"),
        ((16, -1), ("a", "b"), "multiply to 16"),
        ((2, 2), ("a", "b"), r"devices=jax.devices\(\)\[:4\] uses 4 of them"),
        ((2, 4), ("", "b"), "the name of an axis is a text that is not empty, got ''"),
        ((2, 4), ("a", 3), "the name of an axis is a text that is not empty, got 3"),
        ((2.0, 4.0), ("a", "b"), r"the sizes of a mesh: a tuple of integers is wanted, got \(2.0, 4.0\)"),
        ((4, 4), ("a", "b"), "multiply to 16. A mesh takes every device that it is given, once$"),
    ],
)
def test_sizes_that_devices_do_not_have_are_refused(sizes: Any, names: Any, match: str) -> None:
    with pytest.raises(sr.errors.MeshError, match=match):
        resolve_sizes(sizes, names, 8)


def test_without_devices_there_is_no_mesh() -> None:
    with pytest.raises(sr.errors.MeshError, match="mesh a:-1: there are no devices"):
        resolve_sizes((-1,), ("a",), 0)
