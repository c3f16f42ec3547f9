"""Schedules have the bubbles and the live microbatches of the closed forms, and no stage uses what has not arrived."""

import itertools
from typing import Any

import pytest

from shardrules.core.errors import ConfigError
from shardrules.drawing.picture import Words, label_width
from shardrules.programs.pipelines.schedule import NAMES, PipelineSchedule
from shardrules.programs.pipelines.simulate import StagePass
from tests.house.source import REPOSITORY

SHAPES: list[tuple[int, int, int]] = [
    (stages, chunks, rounds * stages)
    for stages, chunks, rounds in itertools.product((2, 3, 4, 8), (1, 2, 3), (1, 2, 4))
]
"""Stages, chunks and microbatches."""

SCHEDULES: tuple[tuple[Any, int], ...] = (("gpipe", 1), ("1f1b", 2), ("1f1b", 1))


@pytest.mark.parametrize("name", NAMES)
def test_bubbles_are_the_closed_form(name: Any) -> None:
    for stages, chunks, microbatches in SHAPES:
        schedule = PipelineSchedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
        in_step = PipelineSchedule(name, stages=stages, microbatches=microbatches, chunks=chunks, in_step=True)
        bubble = (stages - 1) / (chunks * microbatches + stages - 1)
        assert in_step.simulate(1.0, 1.7).bubble == pytest.approx(bubble)
        assert schedule.bubble == pytest.approx(bubble)
        assert schedule.simulate(1.0, 1.7).bubble == pytest.approx(bubble)


def test_live_microbatches_are_the_closed_form() -> None:
    for stages, microbatches in itertools.product((2, 3, 4, 8), (1, 2, 3, 4, 8, 19)):
        gpipe, interleaved, plain = (
            PipelineSchedule(name, stages=stages, microbatches=microbatches, chunks=chunks).simulate().live
            for name, chunks in SCHEDULES
        )
        assert gpipe == (microbatches,) * stages
        assert plain == tuple(min(microbatches, stages - stage) for stage in range(stages))
        if microbatches >= 2 * stages and microbatches % stages == 0:
            assert interleaved == tuple((3 * stages - 2 * stage - 1) / 2 for stage in range(stages))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 2), (3, 2), (4, 1), (4, 3)])
def test_what_a_stage_computes_has_arrived(name: Any, stages: int, chunks: int, microbatches: int) -> None:
    schedule = PipelineSchedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    arrived = {(0, StagePass(False, microbatch, 0)) for microbatch in range(microbatches)}
    computed = set()
    for phase in schedule.phases:
        for tick, row in enumerate(phase.ticks):
            messages = {}
            for stage, work in enumerate(row):
                if work is None:
                    continue
                assert (stage, work) in arrived
                assert not work.is_backward or (stage, StagePass(False, work.microbatch, work.chunk)) in computed
                assert (stage, work) not in computed
                computed.add((stage, work))
                step = -1 if work.is_backward else 1
                following, chunk = (stage + step) % stages, work.chunk + step * ((stage + step) not in range(stages))
                if chunk in range(chunks):
                    messages[stage, following] = StagePass(work.is_backward, work.microbatch, chunk)
                elif not work.is_backward:
                    arrived.add((stage, StagePass(True, work.microbatch, work.chunk)))
            pairs = phase.exchanges[tick % len(phase.exchanges)]
            assert messages.keys() <= set(pairs)
            arrived |= {(pair[1], work) for pair, work in messages.items()}
    assert len(computed) == 2 * stages * chunks * microbatches


def test_unequal_stages_wait_for_the_slowest() -> None:
    schedule = PipelineSchedule("1f1b", stages=2, microbatches=50)
    times = schedule.simulate([1.0, 3.0], [2.0, 6.0])
    assert times.seconds == pytest.approx(50 * 9 + 1 + 2)
    assert schedule.simulate(send=0.1).seconds > schedule.simulate().seconds


def test_backward_passes_may_begin_with_the_last_microbatch() -> None:
    schedule = PipelineSchedule("gpipe", stages=2, microbatches=3, last_first=True)
    assert str(schedule).endswith(
        "stage 0 | F0 F1 F2 .. .. .. B2--- B1--- B0---\nstage 1 | .. F0 F1 F2 B2--- B1--- B0--- .. .."
    )
    assert schedule.bubble == PipelineSchedule("gpipe", stages=2, microbatches=3).bubble
    assert eval(repr(schedule)) == schedule
    with pytest.raises(ConfigError, match='last_first is for "gpipe"'):
        PipelineSchedule("1f1b", stages=2, microbatches=3, last_first=True)


def test_pictures_show_every_pass() -> None:
    schedule = PipelineSchedule("1f1b", stages=2, microbatches=3)
    assert "stage 1 | .. F0 B0--- F1 B1--- F2 B2--- .." in str(schedule)
    svg = schedule.picture().to_svg()
    assert svg.count("<rect") == 12
    assert "stage 1: backward, microbatch 2, chunk 0" in svg
    drawn = PipelineSchedule("1f1b", stages=4, microbatches=8, chunks=2).picture()
    words = [mark for mark in drawn.marks if isinstance(mark, Words)]
    assert all(mark.x + label_width(mark.text) <= drawn.width for mark in words)


@pytest.mark.parametrize(
    ("file", "name", "chunks"), [("gpipe", "gpipe", 1), ("1f1b", "1f1b", 1), ("1f1b-2-chunks", "1f1b", 2)]
)
def test_pictures_of_the_docs_are_these(file: str, name: Any, chunks: int) -> None:
    schedule = PipelineSchedule(name, stages=4, microbatches=8, chunks=chunks)
    assert (REPOSITORY / "docs" / "images" / f"{file}.svg").read_text() == f"{schedule.picture().to_svg()}\n"


def test_all_that_is_wrong_is_listed() -> None:
    with pytest.raises(ConfigError, match=r"got 'zero'.*stages.*got 1; microbatches.*got 0; chunks.*got True"):
        PipelineSchedule("zero", stages=1, microbatches=0, chunks=True)  # pyright: ignore[reportArgumentType]
