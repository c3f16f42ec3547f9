"""How often computations run, beside what XLA prints and what JAX was called with; and where values come from."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.flow import Times, Value
from shardrules.programs.compiled.program import CompiledProgram, read_program
from tests.programs.examples import CPU, TARGETS, array, compiled, mesh_on, program_of


def inner(w: Any) -> Callable[[Any], Any]:
    return lambda x: jnp.tanh(x @ w)


def counted(x: Any, w: Any) -> Any:
    return lax.fori_loop(2, 13, lambda i, x: inner(w)(x) * i, x)


def nested(x: Any, w: Any) -> Any:
    def outer(x: Any, _: None) -> Any:
        return lax.scan(lambda x, _: (inner(w)(x), None), x, None, length=5)[0] + 1, None

    return lax.scan(outer, x, None, length=7)[0]


def backwards(x: Any, w: Any) -> Any:
    return lax.while_loop(lambda c: c[1] > 0, lambda c: (inner(w)(c[0]), c[1] - 3), (x, 20))[0]


def up_to(x: Any, w: Any) -> Any:
    return lax.while_loop(lambda c: jnp.greater_equal(10, c[1]), lambda c: (inner(w)(c[0]), c[1] + 4), (x, -3))[0]


def never(x: Any, w: Any) -> Any:
    return lax.while_loop(lambda c: c[1] > 0, lambda c: (inner(w)(c[0]), c[1] - 1), (x, 0))[0]


def until(x: Any, w: Any) -> Any:
    return lax.while_loop(lambda x: x.sum() < 100, inner(w), x)


def until_argument(x: Any, w: Any) -> Any:
    return lax.fori_loop(0, x[0, 0].astype(int), lambda _, x: inner(w)(x), x)


LOOPS = {counted: 11, nested: 35, backwards: 7, up_to: 4}
UNKNOWN = (until, until_argument)


def program(fn: Callable[..., Any], target: str, printed: bool = True) -> CompiledProgram:
    mesh = mesh_on(target, "data:8")
    text = compiled(fn, array(mesh, (64, 128), "data"), array(mesh, (128, 128))).as_text()
    return read_program(text if printed else text.replace("known_trip_count", "not_printed"))


def matmul_times(program: CompiledProgram) -> list[Times]:
    return [matmul.times for matmul in find_matmuls(program)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fn", LOOPS)
def test_loops_multiply(fn: Callable[..., Any], target: str) -> None:
    compiled_program = program(fn, target)
    assert matmul_times(compiled_program) == [Times(LOOPS[fn])]
    assert compiled_program.unknown_loops == ()


@pytest.mark.parametrize("fn", LOOPS)
def test_counted_rounds_agree_with_xla(fn: Callable[..., Any]) -> None:
    compiled_program = program(fn, CPU, printed=False)
    assert dict(compiled_program.flow.trips) == dict(program(fn, CPU).flow.trips)
    assert None not in compiled_program.flow.trips.values()


@pytest.mark.parametrize("target", TARGETS)
def test_loops_of_no_rounds_cost_nothing(target: str) -> None:
    assert sum(times.count for times in matmul_times(program(never, target))) == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fn", UNKNOWN)
def test_loops_of_unknown_length_are_one_round_and_listed(fn: Callable[..., Any], target: str) -> None:
    compiled_program = program(fn, target)
    assert matmul_times(compiled_program) == [Times(1, unknown=True)]
    assert [loop.op for loop in compiled_program.unknown_loops] == ["while"]
    (condition,) = compiled_program.unknown_loops[0].references("condition")
    assert compiled_program.times(condition) == Times(1, unknown=True)


@pytest.mark.parametrize("target", TARGETS)
def test_every_branch_counts(target: str) -> None:
    def choose(x: Any, w: Any) -> Any:
        return lax.switch(x[0, 0].astype(int), [lambda x: x, inner(w), lambda x: inner(w)(inner(w)(x))], x)

    times = matmul_times(
        program(lambda x, w: lax.scan(lambda x, _: (choose(x, w), None), x, None, length=3)[0], target)
    )
    assert times == [Times(3, conditional=True)] * 3


LOOP = """HloModule m

%step (p: (s32[], s32[], s32[])) -> (s32[], s32[], s32[]) {
  %p = (s32[], s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %by = s32[] get-tuple-element(%p), index=1
  %end = s32[] get-tuple-element(%p), index=2
  %next = s32[] STEP
  ROOT %t = (s32[], s32[], s32[]) tuple(%next, %by, %end)
}

%test (p.1: (s32[], s32[], s32[])) -> pred[] {
  %p.1 = (s32[], s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %end.1 = s32[] get-tuple-element(%p.1), index=2
  ROOT %c = pred[] compare(SIDES), direction=DIRECTION
}

ENTRY %main () -> (s32[], s32[], s32[]) {
  %start = s32[] constant(START)
  %by.1 = s32[] constant(BY)
  %end.2 = s32[] constant(END)
  %copied = s32[] copy(%end.2)
  %init = (s32[], s32[], s32[]) tuple(%start, %by.1, %copied)
  ROOT %loop = (s32[], s32[], s32[]) while(%init), condition=%test, body=%step
}
"""


def rounds(start: int, end: int, by: int, direction: str, add: bool, mirrored: bool) -> tuple[str, int]:
    relation = {
        "LT": lambda i: i < end,
        "LE": lambda i: i <= end,
        "GT": lambda i: i > end,
        "GE": lambda i: i >= end,
        "NE": lambda i: i != end,
    }[direction]
    mirror = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}[direction]
    text = (
        LOOP.replace("STEP", "add(%by, %i)" if add else "subtract(%i, %by)")
        .replace("SIDES", "%end.1, %i.1" if mirrored else "%i.1, %end.1")
        .replace("DIRECTION", mirror if mirrored else direction)
        .replace("START", str(start))
        .replace("BY", str(by))
        .replace("END", str(end))
    )
    count, i = 0, start
    while relation(i) and count < 100:
        count, i = count + 1, i + (by if add else -by)
    return text, count


@pytest.mark.sample(100)
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("by", [1, 3, -1, -2])
@pytest.mark.parametrize("direction", ["LT", "LE", "GT", "GE", "NE"])
@pytest.mark.parametrize(("start", "end"), [(0, 12), (12, 0), (-5, 7), (3, 3)])
def test_rounds_agree_with_brute_force(
    start: int, end: int, direction: str, by: int, add: bool, mirrored: bool
) -> None:
    """The step and the end of the counter are in the state of the loop, where the TPU compiler often puts them."""
    text, count = rounds(start, end, by, direction, add, mirrored)
    trips = read_program(text).flow.trips["loop"]
    assert trips == count if count < 100 else trips is None


def test_rounds_beyond_64_bits_are_counted() -> None:
    text = LOOP.replace("STEP", "add(%by, %i)").replace("SIDES", "%i.1, %end.1").replace("DIRECTION", "LT")
    text = text.replace("START", "0").replace("BY", "1").replace("END", str(2**64 - 1))
    assert read_program(text).flow.trips["loop"] == 2**64 - 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tuple(%next, %by, %end)", "tuple(%next, %by, %next)"),  # the end changes
        ("constant(12)", "parameter(0)"),  # the end is unknown
        ("constant(0)", "parameter(0)"),  # the start is unknown
        ("add(%by, %i)", "multiply(%by, %i)"),
        ("add(%by, %i)", "add(%i, %i)"),
        ("compare(%i.1, %end.1), direction=LT", "and(%i.1, %end.1)"),
        ("compare(%i.1, %end.1)", "compare(%end.1, %end.1)"),
    ],
)
def test_other_loops_are_unknown(old: str, new: str) -> None:
    text, _ = rounds(0, 12, 1, "LT", add=True, mirrored=False)
    assert read_program(text).flow.trips == {"loop": 12}
    assert old in text
    assert read_program(text.replace(old, new)).flow.trips == {"loop": None}


def test_calls_fusions_and_asynchronous_calls_count_once_each() -> None:
    text = """HloModule m

%deep (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  ROOT %d = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused (b: f32[4,4]) -> f32[4,4] {
  %b = f32[4,4]{1,0} parameter(0)
  ROOT %f = f32[4,4]{1,0} fusion(%b), kind=kLoop, calls=%deep
}

%unused (u: f32[4,4]) -> f32[4,4] {
  %u = f32[4,4]{1,0} parameter(0)
  ROOT %v = f32[4,4]{1,0} dot(%u, %u), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0), metadata={op_name="x"}
  %one = f32[4,4]{1,0} call(%x), to_apply=%fused
  %two = ((f32[4,4]{1,0}), f32[4,4]{1,0}, u32[]) async-start(%one), calls=%fused
  %up = ((f32[4,4]{1,0}), f32[4,4]{1,0}, u32[]) async-update(%two), calls=%fused
  ROOT %three = f32[4,4]{1,0} async-done(%up), calls=%fused
}
"""
    compiled_program = read_program(text)
    assert compiled_program.times("main") == Times(1)
    assert compiled_program.times("deep") == Times(2)
    assert compiled_program.times("unused") == Times(0)
    assert [(call.caller, call.role) for call in compiled_program.callers("deep")] == [("fused", "calls")]
    assert sum(matmul.total_flops for matmul in find_matmuls(compiled_program)) == 2 * 2 * 4 * 4 * 4


def test_deep_chains_need_no_recursion() -> None:
    depth = 5000
    computations = [f"%f{i} (p{i}: f32[]) -> f32[] {{\n  %p{i} = f32[] parameter(0)" for i in range(depth)]
    bodies = ["  ROOT %r0 = f32[] negate(%p0)"] + [
        f"  ROOT %r{i} = f32[] call(%p{i}), to_apply=%f{i - 1}" for i in range(1, depth)
    ]
    parts = [f"{head}\n{body}\n}}\n" for head, body in zip(computations, bodies, strict=True)]
    copies = "".join(f"  %c{i + 1} = f32[] copy(%c{i})\n" for i in range(depth))
    entry = (
        f"ENTRY %main (c0: f32[]) -> f32[] {{\n  %c0 = f32[] parameter(0)\n{copies}"
        f"  ROOT %e = f32[] call(%c{depth}), to_apply=%f{depth - 1}\n}}\n"
    )
    compiled_program = read_program("\n".join(["HloModule m\n", *parts, entry]))
    assert compiled_program.times("f0") == Times(1)
    assert compiled_program.flow.origin(Value("main", "e")) == Value("f0", "r0")
    assert compiled_program.flow.origin(Value("f0", "p0")) == Value("main", "c0")


def test_computed_values_are_not_arguments() -> None:
    compiled_program = program_of(lambda x: jnp.sin(x) @ x, jnp.ones((8, 8)))
    (computation, dot), *_ = [
        (computation, instruction) for computation, instruction in compiled_program.walk() if instruction.op == "dot"
    ]
    assert [compiled_program.argument_path(Value(computation.name, name)) for name in dot.operands] == ["", "x"]
