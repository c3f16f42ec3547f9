"""The critical path: the chain of kernels and tasks that takes the whole step, in which each waits for the one before.

It is kept backwards: each part of it knows what came before. A collective that the device waits for continues the path
that led to its start, and the kernels that ran beside it are no part of it any more.
"""

from collections.abc import Mapping
from typing import final

import attrs


@final
@attrs.frozen(eq=False)
class PathPart:
    """A part of a path from `start` to `end`, and the path that leads to it."""

    before: "PathPart | None" = attrs.field(repr=False)
    start: float
    end: float
    shares: tuple[tuple[str, float], ...]
    """The lines of code that take it, each with its share of the time. They add up to 1."""


def extended(path: PathPart | None, start: float, end: float, line: str) -> PathPart | None:
    """Returns a path that goes on with one line of code."""
    return PathPart(path, start, end, ((line, 1.0),)) if end > start else path


def extended_by(path: PathPart | None, start: float, end: float, seconds: Mapping[str, float]) -> PathPart | None:
    """Returns a path that goes on with lines in proportion to their seconds."""
    total = sum(seconds.values())
    shares = tuple((line, each / total) for line, each in seconds.items()) if total else ()
    return PathPart(path, start, end, shares) if shares and end > start else path


def seconds_by_line(path: PathPart | None, since: float = 0.0) -> dict[str, float]:
    """Returns how long each line is on a path, from a time on."""
    seconds: dict[str, float] = {}
    while path is not None and path.end > since:
        length = path.end - max(path.start, since)
        for line, share in path.shares:
            seconds[line] = seconds.get(line, 0.0) + share * length
        path = path.before
    return seconds


def repeated(path: PathPart | None, since: float, now: float, shift: float) -> PathPart | None:
    """Returns a path into which the rounds of a loop are inserted `now` that take the seconds of `shift`.

    They are like the round that began at `since`. What the path has behind `now` comes later by as much.
    """
    later: list[PathPart] = []
    while path is not None and path.start >= now:
        later.append(path)
        path = path.before
    # A part under way now is cut in two: the inserted rounds come between.
    if path is not None and path.end > now:
        later.append(attrs.evolve(path, start=now))
        path = attrs.evolve(path, end=now)
    path = extended_by(path, now, now + shift, seconds_by_line(path, since))
    for part in reversed(later):
        path = PathPart(path, part.start + shift, part.end + shift, part.shares)
    return path
