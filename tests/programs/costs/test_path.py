"""The critical path by line of code."""

import pytest

from shardrules.programs.costs.path import extended, repeated, seconds_by_line
from tests.programs.costs.handmade import STATE, blocking, body, done, kernel, loop, play, start

close = pytest.approx


def critical(*text: str) -> dict[str, float]:
    """How long each line is on the critical path."""
    return {line.line.rpartition(":")[2]: line.critical_seconds for line in play(*text).lines if line.critical_seconds}


def test_what_runs_beside_a_longer_collective_is_not_critical() -> None:
    hidden = start("s", 4, line=20) + kernel("k", 6, line=10) + done("d", "s", 4) + kernel("l", 1, line=11)
    assert critical(hidden) == close({"10": 6, "11": 1})
    exposed = start("s", 9, line=20) + kernel("k", 6, line=10) + done("d", "s", 9) + kernel("l", 1, line=11)
    assert critical(exposed) == close({"20": 9, "11": 1})
    late = kernel("m", 2, line=12) + exposed
    assert critical(late) == close({"12": 2, "20": 9, "11": 1})


def test_a_collective_that_waits_for_its_link_continues_the_path_of_the_link() -> None:
    entry = (
        start("s", 4, line=20, channel=1)
        + start("t", 5, line=21, channel=2)
        + kernel("k", 6, line=10)
        + done("d", "s", 4)
        + done("e", "t", 5)
    )
    assert critical(entry) == close({"20": 4, "21": 5})


@pytest.mark.parametrize("rounds", [1, 2, 3, 100])
def test_rounds_have_the_path_of_a_round(rounds: int) -> None:
    inside = start("s", 4, line=20) + kernel("k", 3, line=10) + done("d", "s", 4) + kernel("l", 2, line=11)
    assert critical(STATE + loop("w", rounds, "b"), body("b", inside)) == close({"20": 4 * rounds, "11": 2 * rounds})


def test_rounds_bound_by_a_link_have_the_path_of_the_link() -> None:
    """Nothing but the link decides how long it takes, though kernels run for most of the time."""
    inside = start("s", 4, line=20) + kernel("k", 3, line=10)
    assert critical(STATE + loop("w", 100, "b"), body("b", inside)) == close({"20": 400})


def test_loops_in_loops() -> None:
    inner = body("inner", start("s", 4, line=20) + kernel("k", 3, line=10) + done("d", "s", 4))
    outer = body(
        "outer",
        "  %inner.state = (s32[]) tuple(%outer.i)\n"
        + kernel("l", 2, line=11)
        + loop("v", 50, "inner", "inner.state")
        + blocking("c", 1, line=21),
    )
    expected = {"11": 2 * 40, "20": 4 * 50 * 40, "21": 40}
    assert critical(STATE + loop("w", 40, "outer"), inner, outer) == close(expected)


def test_inserted_rounds_move_what_comes_behind() -> None:
    path = extended(extended(extended(None, 0, 2, "a"), 2, 5, "b"), 5, 9, "c")
    moved = repeated(path, since=2, now=6, shift=8)
    assert moved is not None
    # The round was three seconds of b and one of c: eight more seconds are six and two.
    assert seconds_by_line(moved) == close({"a": 2, "b": 3 + 6, "c": 4 + 2})
    assert moved.end == 9 + 8
    assert seconds_by_line(moved, since=14) == close({"c": 3})


def test_nothing_has_no_path() -> None:
    assert extended(None, 1, 1, "a") is None
    assert repeated(None, 0, 1, 1) is None
    assert seconds_by_line(None) == {}
