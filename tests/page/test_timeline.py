"""The drawing of a timeline: every event has its box, in its row, in the order of time."""

import re
from collections.abc import Sequence

import pytest

from shardrules.page.timeline import timeline_svg
from shardrules.programs.costs.timeline import Event, Timeline
from tests.programs.costs.handmade import STATE, body, done, kernel, loop, play, start

_RECTANGLE = re.compile(
    r'<rect class="block b(\d)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"[^>]*><title>([^<]*)</title>'
)


def boxes(svg: str) -> list[tuple[int, float, float, float, str]]:
    """Colour, x, y, width and title of each box."""
    return [(int(c), float(x), float(y), float(w), title) for c, x, y, w, title in _RECTANGLE.findall(svg)]


def no_overlap(drawn: Sequence[tuple[int, float, float, float, str]]) -> bool:
    rows: dict[float, float] = {}
    for _, x, y, width, _ in sorted(drawn, key=lambda box: box[1]):
        if x < rows.get(y, 0.0) - 0.2:  # positions are rounded to tenths of a pixel
            return False
        rows[y] = x + width
    return True


def test_each_event_has_a_box() -> None:
    timeline = play(start("s", 4) + kernel("k", 3) + done("d", "s", 4) + kernel("l", 2)).timeline
    svg = timeline_svg(timeline)
    drawn = boxes(svg)
    assert [(colour, title.partition(":")[0]) for colour, *_, title in drawn] == [
        (4, "k"),
        (5, "wait for s"),
        (4, "l"),
        (1, "s"),
    ]
    assert no_overlap(drawn)
    assert drawn[0][3] == pytest.approx(3 * drawn[1][3], abs=0.2)
    assert "k: 3 s from 0 ms on, me/m.py:1" in svg


def test_rounds_that_are_not_shown_take_little_room() -> None:
    inner = body("inner", kernel("k", 3))
    outer = body("outer", "  %inner.state = (s32[]) tuple(%outer.i)\n" + loop("v", 900, "inner", "inner.state"))
    drawn = boxes(timeline_svg(play(STATE + loop("w", 1000, "outer"), inner, outer).timeline))
    assert no_overlap(drawn)
    widths = {title.partition(":")[0]: width for _, _, _, width, title in drawn}
    assert widths["998 more rounds"] < 0.1 * widths["w"]
    assert widths["k"] > 0.05 * widths["w"]
    assert "898 more rounds" in widths


def test_thin_events_share_a_box() -> None:
    events = [Event(f"k.{index}", "", "compute", 1.0 * index, 1.0, "compute") for index in range(50_000)]
    svg = timeline_svg(Timeline("many", tuple(events)))
    drawn = boxes(svg)
    assert 5_000 < len(drawn) < 15_000
    assert no_overlap(drawn)
    assert ", and 4 more" in svg


def test_thin_events_far_apart_do_not_fill_the_time_between() -> None:
    long = Event("k", "", "compute", 0.0, 1000.0, "compute")
    thin = [Event(f"c.{index}", "", "copies", 100.0 * index, 0.01, "copy") for index in range(10)]
    drawn = [box for box in boxes(timeline_svg(Timeline("far apart", (long, *thin)))) if box[0] == 2]
    assert len(drawn) == 10
    assert max(width for _, _, _, width, _ in drawn) <= 1


def test_nothing_has_no_drawing() -> None:
    assert timeline_svg(Timeline("nothing")) == ""
