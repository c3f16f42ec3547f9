"""What collectives and copies take, and on which resources."""

from typing import Any

import attrs
import pytest

from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.flow import Times
from shardrules.programs.compiled.text import read_types
from shardrules.programs.costs.memory import host_seconds, traffic_seconds
from shardrules.programs.costs.tasks import collective_resources
from tests.programs.costs.handmade import CLOCK, at, kernel, play

close = pytest.approx
V5P = attrs.evolve(CLOCK, torus_dims=3)
PCIE = attrs.evolve(CLOCK, host_link_bytes_per_second=2.0)


def collective(kind: str = "all-gather", size: int = 8, **more: Any) -> Collective:
    return Collective(kind, None, (), size, (), 4, 4, Times(1), "main", "c", **more)


def permute(*ways: int) -> Collective:
    """A permute along the first dimensions."""
    return collective("collective-permute", torus_along=tuple(range(len(ways))), torus_ways=ways)


X, Y, Z = ([f"links {dim}{way}" for way in "+-"] for dim in "xyz")


@pytest.mark.parametrize(
    ("sample", "switch", "torus"),
    [
        (collective(), ["links"], [*X, *Y, *Z]),
        (collective(torus_dims=1, torus_along=(2,)), ["links"], Z),
        (collective(torus_dims=2, torus_along=(0, 1)), ["links"], [*X, *Y]),
        (permute(1), ["links"], X[:1]),
        (permute(-1), ["links"], X[1:]),
        (permute(0), ["links"], X),
        (permute(-1, 1), ["links"], ["links x-", "links y+"]),
        (collective(size=1), [], []),
        (collective(host_count=2, torus_along=(0,)), ["links", "network"], [*X, "network"]),
        (collective(host_count=8), ["network"], ["network"]),
        (collective("collective-permute", host_count=2), ["network"], ["network"]),
        (collective(between_slices=True), ["network"], ["network"]),
    ],
    ids=[
        *("somewhere", "a line", "a plane", "up", "down", "both ways", "diagonal"),
        *("alone", "hosts", "one on each host", "to another host", "slices"),
    ],
)
def test_collectives_take_links_and_networks(sample: Collective, switch: list[str], torus: list[str]) -> None:
    assert list(collective_resources(sample, CLOCK)) == switch
    assert list(collective_resources(sample, V5P)) == torus


def test_links_of_more_than_three_dimensions() -> None:
    assert len(dict.fromkeys(collective_resources(collective(), attrs.evolve(CLOCK, torus_dims=5)))) == 10


def test_memory_spaces_are_read_from_layouts() -> None:
    text = "(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128]{1,0:T(8,128)(2,1)}, f32[4]{0:S(5)}, u32[]{:S(2)})"
    assert [array.memory_space for array in read_types(text)] == [1, 0, 5, 2]
    assert read_types("f32[4]{0:S(5)}") == read_types("f32[4]{0}"), "the same type, wherever it is"


def copied(source: str, target: str, size: int, computed: int) -> Any:
    """A copy between memories, with a kernel beside it."""
    old, new = (f"f32[{size}]{{0{f':S({space})' if space else ''}}}" for space in (source, target))
    entry = (
        f"  %x = {old} constant({{...}})\n  %s = ({new}, {old}, u32[]) copy-start(%x), {at(5)}\n"
        + kernel("k", computed)
        + f"  %d = {new} copy-done(%s)\n"
    )
    return play(entry, hardware=PCIE)


@pytest.mark.parametrize(
    ("source", "target", "resource", "seconds"),
    [
        ("", "5", "to host", host_seconds(40, PCIE)),
        ("5", "", "from host", host_seconds(40, PCIE)),
        ("", "1", "copies", traffic_seconds(40, PCIE)),
        ("1", "", "copies", traffic_seconds(40, PCIE)),
        ("", "", "copies", traffic_seconds(80, PCIE)),
    ],
)
def test_copies_run_beside_kernels(source: str, target: str, resource: str, seconds: float) -> None:
    hidden = copied(source, target, 10, 100)
    assert hidden.time.seconds == hidden.time.compute_seconds == close(100)
    assert dict(hidden.resources) == close({resource: seconds})
    exposed = copied(source, target, 10, 3)
    assert exposed.time.copy_seconds == close(seconds - 3)
    assert exposed.time.seconds == close(seconds)
    (copy,) = [line for line in exposed.lines if line.copy_seconds]
    assert copy.line.endswith("m.py:5")


def test_copies_to_the_host_and_back_overlap() -> None:
    entry = "  %x = f32[10]{0} constant({...})\n  %y = f32[10]{0:S(5)} constant({...})\n"
    entry += "  %s = (f32[10]{0:S(5)}, f32[10]{0}, u32[]) copy-start(%x)\n"
    entry += "  %t = (f32[10]{0}, f32[10]{0:S(5)}, u32[]) copy-start(%y)\n"
    entry += "  %d = f32[10]{0:S(5)} copy-done(%s)\n  %e = f32[10]{0} copy-done(%t)\n"
    schedule = play(entry, hardware=PCIE)
    assert schedule.time.seconds == close(20)
    assert dict(schedule.resources) == close({"to host": 20, "from host": 20})


def test_kernels_wait_for_copies_to_the_host_without_an_end() -> None:
    schedule = play("  %x = f32[10]{0} constant({...})\n  %y = f32[10]{0:S(5)} copy(%x)\n", hardware=PCIE)
    assert schedule.time.copy_seconds == schedule.time.seconds == close(20)


@pytest.mark.parametrize(("source", "target", "resource"), [("5", "0", "from host"), ("0", "5", "to host")])
def test_kernels_of_another_stream_that_reach_the_host_are_copies(source: str, target: str, resource: str) -> None:
    """As the compiler for GPUs writes them."""
    old, new = f"f32[10]{{0:S({source})}}", f"f32[10]{{0:S({target})}}"
    fused = f"%f (p: f32[10]) -> f32[10] {{\n  %p = {old} parameter(0)\n  ROOT %r = {new} copy(%p)\n}}\n\n"
    entry = (
        f"  %x = {old} constant({{...}})\n  %s = (({old}), {new}, u32[]) fusion-start(%x), kind=kLoop, calls=%f\n"
        + kernel("k", 15)
        + f"  %d = {new} fusion-done(%s)\n"
    )
    schedule = play(entry, fused, hardware=PCIE)
    assert dict(schedule.resources) == close({resource: 20})
    assert (schedule.time.seconds, schedule.time.copy_seconds) == close((20, 5))


@pytest.mark.parametrize(
    ("stack", "row", "made", "resource"),
    [
        ("5", "0", "f32[1,10] dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,10}", "from host"),
        ("5", "0", "f32[4,10] dynamic-update-slice(%p, %q, %i, %i)", "to host"),
    ],
)
def test_parts_that_go_to_the_host_and_back_beside_kernels(stack: str, row: str, made: str, resource: str) -> None:
    """As the compiler for TPUs writes them: a computation of its own that runs beside the device."""
    shapes = {"f32[4,10]": f"f32[4,10]{{1,0:S({stack})}}", "f32[1,10]": f"f32[1,10]{{1,0:S({row})}}"}
    result = made.split()[0]
    called = (
        f"%f (p: f32[4,10], q: f32[1,10], i: s32[]) -> {result} {{\n  %p = {shapes['f32[4,10]']} parameter(0)\n"
        f"  %q = {shapes['f32[1,10]']} parameter(1)\n  %i = s32[] parameter(2)\n"
        f"  ROOT %r = {made.replace(result, shapes[result], 1)}\n}}\n\n"
    )
    entry = (
        f"  %x = {shapes['f32[4,10]']} constant({{...}})\n  %y = {shapes['f32[1,10]']} constant({{...}})\n"
        f"  %z = s32[] constant(0)\n"
        f"  %s = ((f32[4,10], f32[1,10], s32[]), {shapes[result]}, u32[]) async-start(%x, %y, %z), calls=%f\n"
        + kernel("k", 15)
        + f"  %d = {shapes[result]} async-done(%s)\n"
    )
    schedule = play(entry, called, hardware=PCIE)
    assert dict(schedule.resources) == close({resource: 20})
    assert (schedule.time.seconds, schedule.time.compute_seconds, schedule.time.copy_seconds) == close((20, 15, 5))


def test_kernels_that_read_a_number_of_the_host_stay_kernels() -> None:
    entry = "  %x = f32[10]{0} constant({...})\n  %c = f32[]{:S(5)} constant(2)\n"
    fused = "%f (p: f32[10], q: f32[]) -> f32[10] {\n  %p = f32[10]{0} parameter(0)\n  %q = f32[]{:S(5)} parameter(1)\n"
    fused += "  %b = f32[10]{0} broadcast(%q), dimensions={}\n  ROOT %r = f32[10]{0} multiply(%p, %b)\n}\n\n"
    schedule = play(entry + "  %k = f32[10]{0} fusion(%x, %c), kind=kLoop, calls=%f\n", fused, hardware=PCIE)
    assert schedule.time.compute_seconds == schedule.time.seconds == close(20)
    # Where most of it is on the host, the link decides.
    schedule = play(
        "  %x = f32[10]{0} constant({...})\n  %y = f32[40]{0:S(5)} constant({...})\n"
        '  %k = f32[10]{0} custom-call(%x, %y), custom_call_target="mine"\n',
        hardware=PCIE,
    )
    assert dict(schedule.resources) == close({"from host": 80})


@pytest.mark.parametrize(
    ("start", "end", "size"),
    [
        (
            "((f32[40]{0}), f32[10]{0:S(1)}, s32[]) slice-start(%x), slice={[0:10]}",
            "f32[10]{0:S(1)} slice-done(%s)",
            10,
        ),
        (
            "((f32[40]{0}, s32[]), f32[10]{0:S(1)}, s32[]) dynamic-slice-start(%x, %i), dynamic_slice_sizes={10}",
            "f32[10]{0:S(1)} dynamic-slice-done(%s)",
            10,
        ),
        (
            "((f32[40]{0}, f32[5]{0:S(1)}, s32[]), f32[40]{0}, s32[]) dynamic-update-slice-start(%x, %u, %i)",
            "f32[40]{0} dynamic-update-slice-done(%s)",
            5,
        ),
    ],
)
def test_copies_of_a_part_take_as_long_as_the_part(start: str, end: str, size: int) -> None:
    entry = (
        "  %x = f32[40]{0} constant({...})\n  %u = f32[5]{0:S(1)} constant({...})\n  %i = s32[] constant(0)\n"
        f"  %s = {start}\n  %d = {end}\n"
    )
    assert play(entry).time.copy_seconds == close(size)
