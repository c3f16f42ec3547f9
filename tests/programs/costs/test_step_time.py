"""The parts of a step's time, and how they print."""

import pytest

from shardrules.programs.costs.step_time import StepTime, seconds_text


@pytest.mark.parametrize(
    ("time", "seconds", "hidden", "bound"),
    [
        (StepTime(2.0, 1.0, 0.5, 0.25), 2.25, 0.75, "compute"),
        (StepTime(2.0, 1.0, 1.5, 0.0, 0.5), 2.5, 1.0, "memory"),
        (StepTime(1.0, 2.0, 0.9, 1.5), 2.5, 0.5, "communication"),
        (StepTime(2.0, 1.0), 3.0, 0.0, "compute"),
        (StepTime(0.0, 0.0), 0.0, 0.0, "compute"),
    ],
)
def test_a_step_computes_or_waits(time: StepTime, seconds: float, hidden: float, bound: str) -> None:
    assert (time.seconds, time.hidden_seconds, time.bound) == (seconds, hidden, bound)
    assert eval(repr(time)) == time


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (StepTime(0.002, 0.0), "2 ms: compute 2 ms (0 ms of it memory-bound), communication 0 ms"),
        (
            StepTime(0.002, 0.001, 0.001, 0.0, 0.5),
            "502 ms: compute 2 ms (1 ms of it memory-bound), communication 1 ms (0 ms of it exposed), copies 500 ms",
        ),
    ],
)
def test_a_step_says_what_it_waits_for(time: StepTime, text: str) -> None:
    assert str(time) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (1.23456e-9, "1.23 ns"),
        (-4.2e-6, "-4.2 µs"),
        (0.0000996, "99.6 µs"),
        (0.0009994, "999 µs"),
        (0.0009996, "1 ms"),
        (0.0996, "99.6 ms"),
        (12.3456, "12.3 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
