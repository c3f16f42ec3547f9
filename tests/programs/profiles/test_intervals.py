"""Unions of intervals, against counting points."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardrules.programs.profiles.intervals import length, outside, union

INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair))))


def points(intervals: list[tuple[float, float]]) -> set[float]:
    return {point for point in range(20) if any(start <= point < end for start, end in intervals)}


@given(INTERVALS, INTERVALS)
def test_lengths_are_those_of_the_points(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> None:
    merged, others = union(left), union(right)
    assert points(merged) == points(left)
    assert length(merged) == len(points(left))
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(merged))
    assert outside(merged, others) == len(points(left) - points(right))
