"""Unions of intervals of time."""

from collections.abc import Iterable
from typing import TypeAlias

Intervals: TypeAlias = list[tuple[float, float]]
"""Intervals in the order of time, none of which meets another."""


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Returns the union of intervals."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def length(intervals: Intervals) -> float:
    """Returns the length of intervals together."""
    return sum(end - start for start, end in intervals)


def outside(intervals: Intervals, others: Intervals) -> float:
    """Returns the length of the intervals that none of `others` covers."""
    covered, index = 0.0, 0
    for start, end in intervals:
        while index < len(others) and others[index][1] <= start:
            index += 1
        position = index
        while position < len(others) and others[position][0] < end:
            covered += min(end, others[position][1]) - max(start, others[position][0])
            position += 1
    return length(intervals) - covered
