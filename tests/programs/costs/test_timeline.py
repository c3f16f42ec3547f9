"""Timelines as trace viewers read them."""

import json
from pathlib import Path
from typing import Any

import pytest

import shardrules as sr
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.kernels import find_kernels
from shardrules.programs.compiled.program import read_program
from shardrules.programs.costs.schedule import play_schedule
from shardrules.programs.costs.timeline import PROGRAM, Timeline
from shardrules.programs.machine.targets import Target
from tests.programs.costs.handmade import STATE, blocking, body, done, kernel, loop, play, start
from tests.programs.examples import TARGETS, text_of

INSIDE = start("s", 4, line=20) + kernel("k", 3) + done("d", "s", 4) + kernel("l", 2)


def check_trace(timeline: Timeline) -> dict[str, list[dict[str, Any]]]:
    """Checks a trace against the format that viewers read; returns the slices of each row."""
    data = json.loads(timeline.to_json())
    assert data["displayTimeUnit"] in ("ms", "ns")
    rows: dict[int, str] = {}
    slices: dict[str, list[dict[str, Any]]] = {}
    for event in data["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                rows[event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert isinstance(event["name"], str)
            assert event["name"]
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            slices.setdefault(rows[event["tid"]], []).append(event)
    for row, events in slices.items():
        open_ends: list[float] = []
        for event in events:  # sorted by their start, those outside first
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= begin + 1e-3:
                open_ends.pop()
            assert not open_ends or row == PROGRAM, f"{event['name']} overlaps another event of {row}"
            assert not open_ends or end <= open_ends[-1] + 1e-3, f"{event['name']} is not inside its loop"
            open_ends.append(end)
    assert list(slices) == list(timeline.rows)
    return slices


def test_rows_are_resources() -> None:
    slices = check_trace(play(kernel("before", 1) + INSIDE + blocking("c", 2)).timeline)
    assert {row: [event["name"] for event in events] for row, events in slices.items()} == {
        "compute": ["before", "k", "wait for s", "l", "wait for c"],
        "links": ["s", "c"],
    }
    sent, _ = slices["links"]
    assert (sent["ts"], sent["dur"], sent["args"]["line"]) == (1e6, 4e6, "/home/me/m.py:20")


def test_loops_show_their_first_rounds_and_the_rest() -> None:
    timeline = play(STATE + loop("w", 100, "b") + kernel("after", 1), body("b", INSIDE)).timeline
    slices = check_trace(timeline)
    assert [(event["name"], event["dur"]) for event in slices[PROGRAM]] == [
        ("w", 600e6),
        ("round 1", 6e6),
        ("round 2", 6e6),
        ("98 more rounds", 588e6),
    ]
    assert [event["name"] for event in slices["compute"]][-3:] == ["l", "98 more rounds", "after"]
    assert timeline.seconds == pytest.approx(601)


def test_what_a_round_leaves_under_way_does_not_overlap_the_rest() -> None:
    """The collective of the last round that is shown ends after that round."""
    check_trace(play(STATE + loop("w", 100, "b"), body("b", start("s", 4) + kernel("k", 3))).timeline)
    check_trace(play(STATE + loop("w", 100, "b"), body("b", start("s", 4) + kernel("k", 7))).timeline)


def test_events_do_not_grow_with_rounds() -> None:
    def events(rounds: int) -> int:
        return len(play(STATE + loop("w", rounds, "b"), body("b", INSIDE)).timeline.events)

    assert events(10**6) == events(10)


def test_a_timeline_is_saved_as_json(tmp_path: Path) -> None:
    timeline = play(INSIDE).timeline
    timeline.save(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == timeline.to_json()
    assert json.loads(Timeline("nothing").to_json())["traceEvents"][0]["args"] == {"name": "nothing (modelled)"}


@pytest.mark.parametrize("target", TARGETS)
def test_traces_of_compiled_programs(target: str) -> None:
    program = read_program(text_of("scanned", target))
    collectives = find_collectives(program, sr.mesh_shape("data:4,model:2"), Target.parse(target))
    kernels = find_kernels(program, find_matmuls(program))
    schedule = play_schedule(program, collectives, kernels, Target.parse(target).hardware)
    slices = check_trace(schedule.timeline)
    assert {"compute", PROGRAM} < set(slices)
    assert schedule.timeline.seconds == pytest.approx(schedule.time.seconds)
