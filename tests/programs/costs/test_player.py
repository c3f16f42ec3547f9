"""Schedules whose times have closed forms."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrules.programs.costs import player
from shardrules.programs.costs.schedule import PlayedSchedule
from tests.programs.costs.handmade import CLOCK, STATE, at, blocking, body, done, kernel, loop, play, start

close = pytest.approx


def parts(schedule: PlayedSchedule) -> tuple[float, float, float, float]:
    """All seconds; computing, sending, waiting for what is sent."""
    time = schedule.time
    return time.seconds, time.compute_seconds, time.communication_seconds, time.exposed_seconds


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (kernel("k", 3), (3, 3, 0, 0)),
        (kernel("k", 3) + blocking("c", 4) + kernel("l", 5), (12, 8, 4, 4)),
        (start("s", 4) + kernel("k", 6) + done("d", "s", 4), (6, 6, 4, 0)),
        (start("s", 4) + kernel("k", 3) + done("d", "s", 4) + kernel("l", 2), (6, 5, 4, 1)),
        (start("s", 4) + done("d", "s", 4) + kernel("k", 3), (7, 3, 4, 4)),
        # Nothing in the program waits for it, but the call is not over before it is.
        (kernel("k", 1) + start("s", 4), (5, 1, 4, 4)),
    ],
    ids=["a kernel", "blocking", "hidden", "hidden in part", "exposed", "without an end"],
)
def test_one_collective(entry: str, expected: tuple[float, ...]) -> None:
    assert parts(play(entry)) == close(expected)


TWO = start("s", 4, channel=1) + start("t", 5, channel=2) + kernel("k", 6) + done("d", "s", 4) + done("e", "t", 5)


def test_collectives_on_one_link_run_one_after_the_other() -> None:
    schedule = play(TWO)
    assert parts(schedule) == close((9, 6, 9, 3))
    assert dict(schedule.resources) == close({"links": 9})


def test_collectives_on_different_links_overlap() -> None:
    torus = attrs.evolve(CLOCK, torus_dims=2, link_bytes_per_second=16.0)
    schedule = play(
        TWO, hardware=torus, change=lambda each: {"torus_dims": 1, "torus_along": (0 if each.name == "s" else 1,)}
    )
    assert parts(schedule) == close((6, 6, 5, 0))
    assert dict(schedule.resources) == close({"links x+": 4, "links x-": 4, "links y+": 5, "links y-": 5})


def test_a_group_along_two_dimensions_takes_the_links_of_both() -> None:
    torus = attrs.evolve(CLOCK, torus_dims=2, link_bytes_per_second=16.0)
    dims = {"s": (0, 1), "t": (1,)}
    schedule = play(
        TWO, hardware=torus, change=lambda each: {"torus_dims": len(dims[each.name]), "torus_along": dims[each.name]}
    )
    assert parts(schedule) == close((9, 6, 9, 3))
    assert dict(schedule.resources) == close({"links x+": 4, "links x-": 4, "links y+": 9, "links y-": 9})


def test_permutes_in_opposite_directions_overlap() -> None:
    torus = attrs.evolve(CLOCK, torus_dims=1, link_bytes_per_second=8.0)

    def play_with(first: int, second: int) -> PlayedSchedule:
        ways = {"s": (first,), "t": (second,)}
        return play(TWO, hardware=torus, change=lambda each: {"torus_along": (0,), "torus_ways": ways[each.name]})

    assert parts(play_with(1, -1)) == close((6, 6, 5, 0))
    for ways in ((1, 1), (0, 1), (-1, 0)):
        assert parts(play_with(*ways)) == close((9, 6, 9, 3))


def test_the_network_and_links_overlap() -> None:
    schedule = play(TWO, change=lambda each: {"host_count": 2 if each.name == "t" else 1})
    assert parts(schedule) == close((6, 6, 5, 0))
    assert dict(schedule.resources) == close({"links": 4, "network": 5})


SHARED = attrs.evolve(CLOCK, overlap_fraction=0.5)


@pytest.mark.parametrize(
    ("sent", "computed", "expected"),
    [
        (4, 2, (4, 4, 4, 0)),  # all of it beside the collective, at half the speed
        (4, 6, (8, 8, 4, 0)),  # two of the six seconds beside it
        (9, 2, (9, 4, 9, 5)),
    ],
)
def test_kernels_beside_collectives_are_slower(sent: int, computed: int, expected: tuple[float, ...]) -> None:
    entry = start("s", sent) + kernel("k", computed) + done("d", "s", sent)
    assert parts(play(entry, hardware=SHARED)) == close(expected)


def test_kernels_are_slower_only_while_something_is_sent() -> None:
    entry = start("s", 2, channel=1) + kernel("k", 1) + start("t", 4, channel=2) + kernel("l", 9)
    assert parts(play(entry, hardware=SHARED)) == close((2 + 11, 2 + 11, 6, 0))
    assert parts(play(entry)) == close((10, 10, 6, 0))


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 100, 10**6])
def test_rounds_of_a_loop_that_waits_for_what_it_sends(rounds: int) -> None:
    inside = start("s", 4) + kernel("k", 3) + done("d", "s", 4) + kernel("l", 2)
    schedule = play(STATE + kernel("before", 7) + loop("w", rounds, "b"), body("b", inside))
    assert parts(schedule) == close((7 + 6 * rounds, 7 + 5 * rounds, 4 * rounds, rounds))
    assert len(schedule.timeline.events) < 40


BUFFER = "f32[{n}]{{0}}, f32[{n}]{{0}}, u32[], u32[]"


def double_buffered(sent: int, computed: int, rounds: int) -> PlayedSchedule:
    """Each round starts what the next one waits for; the first is started before the loop, the last is not used."""
    buffer = f"(f32[{sent}]{{0}}, f32[{sent}]{{0}}, u32[], u32[])"
    types = f"s32[], {buffer}"
    inside = (
        f"  %old = {buffer} get-tuple-element(%b.p), index=1\n"
        + done("d", "old", sent)
        + start("s", sent)
        + kernel("k", computed)
    )
    before = "  %zero = s32[] constant(0)\n" + start("first", sent) + f"  %state = ({types}) tuple(%zero, %first)\n"
    after = f"  %last = {buffer} get-tuple-element(%w), index=1\n" + done("e", "last", sent)
    return play(
        before + loop("w", rounds, "b", types=types) + after,
        body("b", inside, f"  ROOT %b.out = ({types}) tuple(%b.i, %s)\n", types),
    )


@pytest.mark.parametrize("rounds", [1, 2, 5, 1000])
def test_rounds_that_start_what_the_next_one_waits_for(rounds: int) -> None:
    # Computing is longer: only the first collective is exposed.
    assert parts(double_buffered(4, 6, rounds)) == close((4 + 6 * rounds, 6 * rounds, 4 * (rounds + 1), 4))
    # Sending is longer: every round takes as long as what it sends.
    total = 6 * (rounds + 1)
    assert parts(double_buffered(6, 4, rounds)) == close((total, 4 * rounds, total, total - 4 * rounds))


def test_what_began_before_a_loop_ends_when_it_ends() -> None:
    entry = STATE + start("s", 500) + loop("w", 1000, "b") + done("d", "s", 500)
    assert parts(play(entry, body("b", kernel("k", 3)))) == close((3000, 3000, 500, 0))
    # On the same link the first round waits for it.
    assert parts(play(entry, body("b", kernel("k", 3) + blocking("c", 2)))) == close(
        (502 + 999 * 5, 3000, 2500, 499 + 999 * 2)
    )
    late = STATE + start("s", 4000) + loop("w", 1000, "b") + done("d", "s", 4000)
    assert parts(play(late, body("b", kernel("k", 3)))) == close((4000, 3000, 4000, 1000))


def test_nested_loops_multiply() -> None:
    inner = body("inner", start("s", 4) + kernel("k", 3) + done("d", "s", 4))
    state = "  %inner.state = (s32[]) tuple(%outer.i)\n"
    outer = body("outer", state + kernel("l", 2) + loop("v", 50, "inner", "inner.state"))
    schedule = play(STATE + loop("w", 40, "outer"), inner, outer)
    assert parts(schedule) == close((40 * (2 + 50 * 4), 40 * (2 + 50 * 3), 40 * 50 * 4, 40 * 50))


def test_what_nothing_waits_for_piles_up_on_its_link() -> None:
    schedule = play(STATE + loop("w", 1000, "b"), body("b", start("s", 4) + kernel("k", 3)))
    assert parts(schedule) == close((4000, 3000, 4000, 1000))


def test_a_conditional_takes_its_longest_branch() -> None:
    branches = [
        f"%{name} ({name}.p: f32[1]) -> f32[1] {{\n  ROOT %{name}.p = f32[1]{{0}} parameter(0)\n{lines}}}\n\n"
        for name, lines in (("short", kernel("k", 2)), ("long", kernel("l", 3) + blocking("c", 4)), ("none", ""))
    ]
    choose = (
        "  %i = s32[] constant(0)\n  %x = f32[1]{0} constant({1})\n"
        "  %c = f32[1]{0} conditional(%i, %x, %x, %x), branch_computations={%short, %long, %none}\n"
    )
    assert parts(play(choose + kernel("m", 1), *branches)) == close((8, 4, 4, 4))


def test_calls_are_played_where_they_stand() -> None:
    buffer = "(f32[4]{0}, f32[4]{0}, u32[], u32[])"
    called = (
        f"%f (f.p: {buffer}) -> f32[4] {{\n  %f.p = {buffer} parameter(0)\n"
        + kernel("k", 3)
        + done("d", "f.p", 4).replace("  %d", "  ROOT %d")
        + "}\n\n"
    )
    entry = start("s", 4) + "  %y = f32[4]{0} call(%s), to_apply=%f\n" + kernel("l", 2)
    assert parts(play(entry, called)) == close((6, 5, 4, 1))


def test_another_stream_runs_beside_the_kernels() -> None:
    called = "%f () -> f32[5] {\n" + kernel("k", 5).replace("  %k", "  ROOT %k") + "}\n\n"
    entry = (
        "  %s = ((), f32[5]{0}, u32[]) call-start(), to_apply=%f\n"
        + kernel("l", 3)
        + "  %d = f32[5]{0} call-done(%s)\n"
    )
    schedule = play(entry, called)
    assert parts(schedule) == close((5, 5, 0, 0))
    assert dict(schedule.resources) == close({"other stream": 5})


def test_collectives_of_another_core_take_links_as_others_do() -> None:
    """As the compiler for TPUs writes what their SparseCores do: a computation that calls another one."""
    moved = blocking("c", 5, channel=9).replace("  %c =", "  ROOT %c =").replace(f", {at(2)}", "")
    called = f"%f () -> f32[5] {{\n{moved}}}\n\n%g () -> f32[5] {{\n  ROOT %r = f32[5]{{0}} call(), to_apply=%f\n}}\n\n"
    entry = (
        f'  %s = ((), f32[5]{{0}}) async-start(), async_execution_thread="sparsecore", calls=%g, {at(7)}\n'
        + start("t", 4)
        + kernel("k", 6)
        + done("e", "t", 4)
        + "  %d = f32[5]{0} async-done(%s)\n"
    )
    schedule = play(entry, called)
    assert parts(schedule) == close((9, 6, 9, 3)), "both take the same link, one after the other"
    assert dict(schedule.resources) == close({"links": 9})
    sent = {line.line.rpartition(":")[2]: line.communication_seconds for line in schedule.lines}
    assert sent == close({"1": 0, "2": 4, "7": 5})


PAIRS = '_xla_send_recv_source_target_pairs="{{0,1},{1,0}}"'
SLICES = (
    '_xla_host_transfer_rendezvous="all-gather.1_0",_xla_megascale_target={{100000->100001}},'
    '_xla_megascale_transfer_type="ONE_TO_ONE"'
)


@pytest.mark.parametrize(
    ("channels", "fields"), [((7, 7), PAIRS), ((7, 8), SLICES)], ids=["between GPUs", "between slices"]
)
def test_a_receive_ends_with_the_send_that_it_meets(channels: tuple[int, int], fields: str) -> None:
    sent, received = (f"channel_id={channel}, frontend_attributes={{{fields}}}" for channel in channels)
    entry = (
        "  %x = f32[4]{0} constant({...})\n  %t = token[] after-all()\n"
        f"  %r = (f32[4]{{0}}, u32[], token[]) recv(%t), {received}\n"
        f"  %s = (f32[4]{{0}}, u32[], token[]) send(%x, %t), {sent}\n"
        + kernel("k", 3)
        + f"  %rd = (f32[4]{{0}}, token[]) recv-done(%r), channel_id={channels[1]}\n"
        + "  %y = f32[4]{0} get-tuple-element(%rd), index=0\n"
        + f"  %used = f32[1]{{0}} slice(%y), slice={{[0:1]}}, {at(30)}\n"
        + kernel("l", 1)
        + f"  %sd = token[] send-done(%s), channel_id={channels[0]}\n"
    )
    schedule = play(entry, change=lambda each: {"group_size": 2, "between_slices": False, "host_count": 1})
    seconds, compute, sending, exposed = parts(schedule)
    assert (sending, exposed) == close((4, 1))
    assert seconds == close(compute + 1)
    # The send has no line of its own: it is that of what uses its result.
    assert [line.line for line in schedule.lines if line.communication_seconds] == ["/home/me/m.py:30"]


FUSED = """%{name} (p.{name}: f32[4]) -> f32[4] {{
  %p.{name} = f32[4]{{0}} parameter(0)
  %g.{name} = f32[4]{{0}} collective-permute(%p.{name}), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}, \
backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %r.{name} = f32[4]{{0}} {root}
}}

"""


def test_collectives_in_fusions_run_beside_the_fusions_between_them() -> None:
    computations = [
        FUSED.format(name="a", root='custom-call(%g.a), custom_call_target="AsyncCollectiveStart"'),
        FUSED.format(name="b", root="negate(%p.b)"),
        FUSED.format(name="c", root='custom-call(%g.c), custom_call_target="AsyncCollectiveDone"'),
    ]
    calls = "  %x = f32[4]{0} constant({...})\n" + "".join(
        f"  %f.{name} = f32[4]{{0}} fusion(%x), kind=kCustom, calls=%{name}\n" for name in "abc"
    )
    # The kernel in the middle reads four elements and writes four.
    assert parts(play(calls + kernel("k", 1), *computations)) == close((9, 9, 4, 0))
    # Where the round of a loop before has begun it, no start is printed.
    later = calls.replace("  %f.a = f32[4]{0} fusion(%x), kind=kCustom, calls=%a\n", "")
    assert parts(play(later + kernel("k", 1), *computations[1:])) == close((9, 9, 4, 0))


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """Kernels and collectives in any order, some of them in a loop."""

    def lines(prefix: str) -> str:
        text, open_starts = "", list[tuple[str, int]]()
        for index in range(draw(st.integers(0, 6))):
            name, seconds = f"{prefix}{index}", draw(st.integers(1, 9))
            kind = draw(st.sampled_from(["kernel", "blocking", "start", "done"]))
            if kind == "start":
                text += start(name, seconds, channel=index + 1)
                open_starts.append((name, seconds))
            elif kind == "done" and open_starts:
                of, size = open_starts.pop(draw(st.integers(0, len(open_starts) - 1)))
                text += done(name, of, size)
            else:
                text += blocking(name, seconds) if kind == "blocking" else kernel(name, seconds)
        return text

    rounds = draw(st.integers(0, 30))
    return STATE + lines("a") + loop("w", rounds, "b") + lines("c"), (body("b", lines("d")),)


@given(programs(), st.sampled_from(["one link", "two", "shared"]))
def test_laws_of_schedules(program: tuple[str, tuple[str, ...]], links: str) -> None:
    entry, computations = program
    hardware = {"one link": CLOCK, "two": attrs.evolve(CLOCK, torus_dims=2), "shared": SHARED}[links]
    schedule = play(
        entry,
        *computations,
        hardware=hardware,
        change=lambda each: {"torus_dims": 1, "torus_along": (len(each.name) % 2,)} if links == "two" else {},
    )
    time, resources, slack = schedule.time, dict(schedule.resources), 1e-6
    assert time.seconds + slack >= time.compute_seconds
    assert all(time.seconds + slack >= busy for busy in resources.values())
    assert time.seconds <= time.compute_seconds + sum(resources.values()) + slack
    assert max(resources.values(), default=0.0) - slack <= time.communication_seconds <= sum(resources.values()) + slack
    assert 0 <= time.exposed_seconds <= time.communication_seconds + slack
    assert sum(line.seconds for line in schedule.lines) == close(time.seconds)
    assert sum(line.critical_seconds for line in schedule.lines) == close(time.seconds)
    assert schedule.timeline.seconds == close(time.seconds)


@given(programs())
def test_rounds_that_are_not_played_take_as_long_as_if_they_were(program: tuple[str, tuple[str, ...]]) -> None:
    entry, computations = program
    short = play(entry, *computations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(player, "_MAX_ROUNDS", 1000)
        patch.setattr(player, "_is_steady", lambda *_: False)
        full = play(entry, *computations)
    assert parts(short) == close(parts(full), abs=1e-6)
    assert dict(short.resources) == close(dict(full.resources))
    # Not so the critical path: where two paths are equally long, either is right.
    assert {line.line: line.seconds for line in short.lines} == close({line.line: line.seconds for line in full.lines})
