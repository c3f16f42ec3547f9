"""Shapes match if a compiler may have made one from the other, and not if only their sizes agree."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrules.programs.audits.shape_matching import ShapeSet, split_shapes

SHAPES = st.lists(st.sampled_from((1, 2, 3, 4, 6, 8)), min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("shape_in_set", "shape", "is_alike"),
    [
        ((8, 16), (16, 8), True),
        ((8, 16), (1, 8, 1, 16), True),
        ((8, 16), (128,), True),
        ((4, 6, 8), (24, 8), True),
        ((4, 6, 8), (8, 24), True),
        ((4, 6, 8), (6, 32), True),
        ((4, 6, 8), (12, 16), False),  # the sizes agree
        ((64, 64), (32, 128), False),
        ((8, 16), (2, 4, 16), False),  # several of its dimensions are one of the known shape
        ((), (), True),
        ((), (1,), True),
        ((8,), (4,), False),
    ],
)
def test_matching_shapes(shape_in_set: tuple[int, ...], shape: tuple[int, ...], is_alike: bool) -> None:
    assert ShapeSet.of([shape_in_set]).matches(shape) is is_alike


def test_split_dims_match_only_on_request() -> None:
    assert ShapeSet.of([(8, 16)]).matches((2, 4, 16), split_dims=True)
    assert not ShapeSet.of([(8, 16)]).matches((2, 8, 4, 4), split_dims=True)


def test_an_empty_set_matches_nothing() -> None:
    assert not ShapeSet.of([]).matches((8,))


@given(SHAPES, st.data())
def test_merged_and_transposed_shapes_match(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = data.draw(st.permutations(shape))
    cuts = data.draw(st.lists(st.booleans(), min_size=len(shape) - 1, max_size=len(shape) - 1))
    groups: list[list[int]] = [[order[0]]]
    for size, starts in zip(order[1:], cuts, strict=True):
        if starts:
            groups.append([size])
        else:
            groups[-1].append(size)
    assert ShapeSet.of([shape]).matches(map(math.prod, groups))


@given(SHAPES, SHAPES)
def test_only_equal_sizes_match(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    if math.prod(shape) != math.prod(other):
        assert not ShapeSet.of([shape]).matches(other, split_dims=True)


@given(st.lists(st.sampled_from((1, 4, 8, 12)), max_size=3).map(tuple))
def test_split_shapes_cover_every_assignment_of_axes(shape: tuple[int, ...]) -> None:
    sizes = {"a": 2, "b": 3, "one": 1}
    expected = set()
    for dim_a, dim_b in itertools.product((None, *range(len(shape))), repeat=2):
        local = list(shape)
        for dim, ways in ((dim_a, 2), (dim_b, 3)):
            if dim is not None:
                local[dim] = math.ceil(local[dim] / ways)
        expected.add(tuple(local))
    assert set(split_shapes(shape, sizes)) == expected
