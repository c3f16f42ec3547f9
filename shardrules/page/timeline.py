"""The drawing of a timeline: a row for each resource, a box for each kernel, collective, copy and wait.

Rounds of a loop that are not shown one by one would fill the drawing with one box. They get a short box, so that the
axis is not even: the labels of boxes and their titles have the true times.
"""

from collections.abc import Sequence
from typing import final

import attrs

from shardrules.core.source import short_line
from shardrules.drawing.picture import Box, Picture, Words
from shardrules.programs.costs.step_time import seconds_text
from shardrules.programs.costs.timeline import PROGRAM, Event, Timeline

KINDS = {"compute": 4, "communication": 1, "copy": 2, "wait": 5, "loop": 7, "rest": 3}
"""The colour of each kind of event, by its index in the palette."""

_WIDTHS = 1300.0, 12000.0
"""The least and the greatest width in pixels: a screen, and ten of them to scroll through."""

_NAMES_WIDTH, _ROW_HEIGHT, _GAP = 90.0, 22.0, 6.0
_LEAST_WIDTH = 1.0
"""Boxes that are thinner are drawn together: no screen shows them apart."""


def timeline_svg(timeline: Timeline) -> str:
    """Returns the drawing of a timeline as SVG; empty where nothing takes time."""
    if not timeline.events or not timeline.seconds:
        return ""
    axis = _Axis.of(timeline)
    lanes = [lane for row in timeline.rows for lane in _lanes(row, timeline)]
    boxes, names = list[Box](), list[Words]()
    for index, (name, events) in enumerate(lanes):
        y = index * (_ROW_HEIGHT + _GAP)
        names.append(Words(0.0, y + _ROW_HEIGHT / 2 + 4, name))
        boxes += _boxes(events, y, axis)
    height = len(lanes) * (_ROW_HEIGHT + _GAP)
    end = axis.position(timeline.seconds)
    scale = [
        Words(_NAMES_WIDTH, height + 14, "0 ms"),
        Words(end, height + 14, seconds_text(timeline.seconds), "end"),
    ]
    return Picture(end + 8, height + 20, (*names, *boxes, *scale), f"Timeline of {timeline.name}").to_svg()


def _lanes(row: str, timeline: Timeline) -> list[tuple[str, list[Event]]]:
    """The lines that a row is drawn on: loops in loops are drawn below each other."""
    events = [event for event in timeline.events if event.resource == row]
    if row != PROGRAM:
        return [(row, sorted(events, key=lambda event: event.start))]
    lanes: list[list[Event]] = []
    # Of two that begin together the longer one is outside.
    for event in sorted(events, key=lambda event: (event.start, -event.seconds)):
        # Times are sums of floats: the tolerance is a billionth of the step.
        free = [lane for lane in lanes if lane[-1].end <= event.start + 1e-9 * timeline.seconds]
        outside = [lane for lane in lanes if lane[-1].end > event.start + 1e-9 * timeline.seconds]
        # Below everything that it is inside of.
        if len(outside) < len(lanes) and free:
            lanes[len(outside)].append(event)
        else:
            lanes.append([event])
    return [("loops" if index == 0 else "", lane) for index, lane in enumerate(lanes)]


@final
@attrs.frozen
class _Axis:
    """Positions of times: pairs of seconds and pixels, between which it is even."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, timeline: Timeline) -> "_Axis":
        rests = sorted(
            (event.start, event.end) for event in timeline.events if event.kind == "rest" and event.resource == PROGRAM
        )
        shown = timeline.seconds - sum(end - start for start, end in rests)
        spans, now = list[tuple[float, float]](), 0.0  # seconds, and how many of them their width is
        for start, end in rests:
            # Rounds that are not shown take up to 4 % of the width, chosen by hand: their labels fit.
            spans += [(start - now, start - now), (end - start, min(end - start, 0.04 * max(shown, 0.0)))]
            now = end
        spans.append((timeline.seconds - now, timeline.seconds - now))
        fullest = max(sum(event.resource == row for event in timeline.events) for row in timeline.rows)
        width = min(max(_WIDTHS[0], 14.0 * fullest), _WIDTHS[1])  # 14 pixels for an event on average, chosen by hand
        drawn = sum(each for _, each in spans)
        points, seconds, x = [(0.0, _NAMES_WIDTH)], 0.0, _NAMES_WIDTH
        for length, each in spans:
            seconds, x = seconds + length, x + width * each / drawn
            points.append((seconds, x))
        return cls(tuple(points))

    def position(self, seconds: float) -> float:
        """Returns the pixels from the left."""
        for (start, low), (end, high) in zip(self.points, self.points[1:], strict=False):
            if seconds <= end:
                return low + (high - low) * (seconds - start) / (end - start) if end > start else low
        return self.points[-1][1]


def _boxes(events: Sequence[Event], y: float, axis: _Axis) -> list[Box]:
    """The boxes of a line; events that are too thin for a box of their own share one with their neighbours."""
    boxes: list[Box] = []
    together: list[Event] = []
    for event in events:
        x, right = axis.position(event.start), axis.position(event.end)
        # Idle time that can be seen must stay idle.
        has_gap = bool(together) and x - axis.position(together[-1].end) >= _LEAST_WIDTH
        is_wide = bool(together) and right - axis.position(together[0].start) >= _LEAST_WIDTH
        if right - x >= _LEAST_WIDTH or has_gap:
            boxes += _box(together, y, axis)
            together = [event]
        else:
            together.append(event)
        if right - x >= _LEAST_WIDTH or (is_wide and not has_gap):
            boxes += _box(together, y, axis)
            together = []
    return [*boxes, *_box(together, y, axis)]


def _box(events: Sequence[Event], y: float, axis: _Axis) -> list[Box]:
    if not events:
        return []
    longest = max(events, key=lambda event: event.seconds)
    x, right = axis.position(events[0].start), axis.position(events[-1].end)
    line = f", {short_line(longest.line)}" if longest.line else ""
    more = f", and {len(events) - 1} more" if len(events) > 1 else ""
    title = f"{longest.name}: {seconds_text(longest.seconds)} from {seconds_text(longest.start)} on{line}{more}"
    width = max(right - x, _LEAST_WIDTH / 2)
    return [Box(x, y, width, _ROW_HEIGHT, KINDS[longest.kind], longest.name, title)]
