"""Programs as they are read: operations, regions, how often each runs, and the indices that a replay finds again."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.traced.factors.table import Factors
from shardrules.programs.traced.program import Operation, TracedProgram, read_jaxpr
from tests.programs.autoplan.models import SMALL, TRAINED, WRITTEN, Case, bent, clipped

X, W = jnp.ones((8, 16)), jnp.ones((16, 16))


def read(fn: Callable[..., Any], *args: Any) -> TracedProgram:
    return read_jaxpr(jax.make_jaxpr(fn)(*args))


def names(program: TracedProgram) -> list[str]:
    return [op.name for op in program.operations]


def of(program: TracedProgram, *chosen: str) -> list[Operation]:
    return [op for op in program.operations if op.name in chosen or op.role in chosen]


def check(program: TracedProgram) -> None:
    producers = {array: op_index for op_index, op in enumerate(program.operations) for array in op.results}
    assert len(producers) == sum(len(op.results) for op in program.operations), "every array is produced once"
    outside = {*program.arguments, *program.constants}
    assert not outside & producers.keys()
    for op_index, op in enumerate(program.operations):
        assert len(op.read_counts) == len(op.operands) == len(op.factors.operands)
        assert len(op.results) == len(op.factors.results)
        assert op.run_count == program.regions[op.region][1]
        sides = ((op.operands, op.factors.operands), (op.results, op.factors.results))
        for array, dims in (pair for side in sides for pair in zip(*side, strict=True)):
            if array is not None:
                assert len(dims) == len(program.arrays[array].shape)
                assert all(dim is None or 0 <= dim < len(op.factors.sizes) for dim in dims)
        for operand_index, array in enumerate(op.operands):
            if array is not None and array not in outside and array in producers:
                is_end_of_round = op.role == "join" and operand_index == len(op.operands) - 1
                assert producers[array] < op_index or is_end_of_round, f"{op.name} reads what is produced after it"
    for parent, run_count, _ in program.regions[1:]:
        assert parent >= 0
        assert run_count >= 0
    keys = [(op.equation_index, op.role, op.slot) for op in program.operations if op.equation_index >= 0]
    assert len(keys) == len(set(keys)), "equation index, role and slot name an operation"


ALL = [case for case in (*SMALL, *TRAINED, *WRITTEN) if case.name != "no arrays"]


@pytest.mark.parametrize("case", ALL, ids=[case.name for case in ALL])
def test_every_program_is_sound(case: Case) -> None:
    args = case.args
    leaves, structure = jax.tree.flatten(args)
    kept = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def fn(*arrays: Any) -> Any:
        rest = iter(arrays)
        tree = structure.unflatten([next(rest) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])
        return [leaf for leaf in jax.tree.leaves(case.fn(*tree)) if isinstance(leaf, jax.Array)]

    with jax.set_mesh(sr.create_mesh(case.axes or "data:8")):
        jaxpr = jax.make_jaxpr(fn)(*kept)
    program = read_jaxpr(jaxpr)
    check(program)
    assert [program.arrays[array].shape for array in program.arguments] == [leaf.shape for leaf in kept]
    assert len(program.results) == len(jaxpr.out_avals)
    assert not any(operation.lacks_rule for operation in program.operations)


def test_operations_are_in_order_and_results_last() -> None:
    program = read(lambda w, x: (jnp.tanh(x @ w), x), W, X)
    assert [(op.role, op.name, op.equation_index) for op in program.operations] == [
        ("compute", "dot_general", 0),
        ("compute", "tanh", 1),
        ("return", "return", -1),
        ("return", "return", -1),
    ]
    dot, tanh, first, second = program.operations
    assert dot.operands == (program.arguments[1], program.arguments[0])
    assert dot.flops == 2 * 8 * 16 * 16
    assert dot.dtype == jnp.float32
    assert tanh.flops == 0
    assert tanh.operands == dot.results
    assert first.operands == tanh.results
    assert second.operands == (program.arguments[1],)
    assert program.results == (*first.results, *second.results)
    assert program.regions == ((-1, 1, 1),)


def test_scalar_and_constant_results_have_no_layout() -> None:
    program = read(lambda x: (x.sum(), 3.0, x), X)
    assert program.results[:2] == (None, None)
    assert program.results[2] is not None


def test_arrays_know_their_bytes() -> None:
    program = read(lambda a, b: (a, b), jnp.ones((4, 3), jnp.bfloat16), jax.random.split(jax.random.key(0), 4))
    assert [(array.shape, array.nbytes) for array in program.arrays[:2]] == [((4, 3), 24), ((4,), 32)]


def test_arrays_of_the_closure_are_constants() -> None:
    table = jnp.arange(8.0)
    program = read(lambda x: x + table[:, None], X)
    assert [program.arrays[array].shape for array in program.constants] == [(8,)]


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, lambda fn: jax.jit(jax.jit(fn)), jax.named_call],
    ids=["jit", "jit of jit", "named"],
)
def test_jit_is_read_as_if_its_inside_stood_outside(wrap: Any) -> None:
    program = read(wrap(lambda x: jnp.sin(x) + 1), X)
    assert names(program) == ["sin", "add", "return"]
    assert [op.region for op in program.operations] == [0, 0, 0]


def test_calls_are_counted_before_their_inside() -> None:
    """The replay counts them that way, too."""
    program = read(lambda x: jnp.exp(jax.jit(lambda y: jax.jit(jnp.sin)(y) + 1)(jnp.cos(x))), X)
    assert [(op.name, op.equation_index) for op in program.operations[:-1]] == [
        ("cos", 0),
        ("sin", 3),
        ("add", 4),
        ("exp", 5),
    ]


def test_a_function_called_twice_is_read_twice() -> None:
    inner = jax.jit(jnp.sin)
    program = read(lambda x: inner(inner(x)), X)
    assert [(op.name, op.equation_index) for op in program.operations[:-1]] == [("sin", 1), ("sin", 3)]
    check(program)


def test_checkpoints_have_regions_of_their_own() -> None:
    program = read(lambda x: jnp.cos(jax.checkpoint(jnp.sin)(x)), X)
    assert [(op.name, op.region) for op in program.operations] == [("sin", 1), ("cos", 0), ("return", 0)]
    assert program.regions == ((-1, 1, 1), (0, 1, 1))


def test_gradients_of_checkpoints_recompute_in_a_region() -> None:
    program = read(jax.grad(lambda w, x: jnp.sum(jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x))), W, X)
    check(program)
    assert len(of(program, "dot_general")) == 3
    assert len({op.region for op in of(program, "dot_general")}) > 1


@pytest.mark.parametrize(("fn", "expected"), [(clipped, ["mul"]), (bent, ["gt", "mul", "select_n"])])
def test_functions_with_custom_derivatives_are_inlined(fn: Any, expected: list[str]) -> None:
    program = read(fn, X)
    assert names(program) == [*expected, "return"]
    assert not any(operation.lacks_rule for operation in program.operations)


def test_a_scan_has_operations_at_its_edges() -> None:
    """`w` enters, `x` goes round and comes out, rows enter one by one, and what is stacked leaves."""

    def fn(w: Any, x: Any, rows: Any) -> Any:
        return lax.scan(lambda x, row: (jnp.tanh(x @ w), x * row), x, rows)

    program = read(fn, W, X, jnp.ones((5, 16)))
    check(program)
    fixed, row, rounds, last, stacked = of(program, "enter", "join", "exit", "leave")
    assert [(op.role, op.slot, op.region) for op in (fixed, row, rounds, last, stacked)] == [
        ("enter", 0, 1),
        ("enter", 1, 1),
        ("join", 0, 1),
        ("exit", 0, 0),
        ("leave", 0, 1),
    ]
    assert program.regions == ((-1, 1, 1), (0, 5, 1))
    assert {op.region for op in of(program, "compute")} == {1}
    assert {op.run_count for op in of(program, "compute")} == {5}
    assert fixed.factors == Factors(((0, 1),), ((0, 1),), (16, 16))
    assert fixed.read_counts == (1,)
    assert row.factors == Factors(((None, 0),), ((0,),), (16,))
    assert rounds.factors == Factors(((0, 1), (0, 1)), ((0, 1),), (8, 16))
    assert rounds.read_counts == (1, 5)
    assert stacked.factors == Factors(((0, 1),), ((None, 0, 1),), (8, 16))
    assert rounds.operands[0] == program.arguments[1]
    (tanh,) = of(program, "tanh")
    assert rounds.operands[1] == tanh.results[0]
    assert last.factors == Factors(((0, 1),), ((0, 1),), (8, 16))
    assert last.run_count == 1
    assert {op.equation_index for op in (fixed, row, rounds, last, stacked)} == {0}
    assert [program.arrays[op.results[0]].shape for op in (fixed, row, rounds, last, stacked)] == [
        (16, 16),
        (16,),
        (8, 16),
        (8, 16),
        (5, 8, 16),
    ]


def test_values_that_go_round_may_change_places() -> None:
    program = read(lambda x, y: lax.fori_loop(0, 4, lambda _, s: (s[1], s[0]), (x, y)), X, 2 * X)
    check(program)
    first, second = (op for op in of(program, "join") if program.arrays[op.results[0]].shape)
    assert first.operands == (program.arguments[0], second.results[0])
    assert second.operands == (program.arguments[1], first.results[0])
    assert first.read_counts == second.read_counts == (1, 4)


def test_run_counts_of_nested_loops_multiply() -> None:
    def inner(y: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, z: jnp.sin(z), y)

    program = read(lambda x: lax.scan(lambda y, _: (jnp.cos(inner(y)), None), x, length=5)[0], X)
    check(program)
    assert program.regions == ((-1, 1, 1), (0, 5, 1), (1, 15, 1))
    assert [op.run_count for op in of(program, "sin", "cos")] == [15, 5]
    outer, nested = (op for op in of(program, "join") if program.arrays[op.results[0]].shape)
    assert (outer.read_counts, nested.read_counts) == ((1, 5), (5, 15))
    (sin,) = of(program, "sin")
    assert nested.equation_index != outer.equation_index < nested.equation_index < sin.equation_index


def test_a_while_loop_counts_once() -> None:
    """Its condition reads what goes round, and arrays of its own; how often it runs is unknown."""

    def fn(bound: Any, w: Any, x: Any) -> Any:
        return lax.while_loop(lambda x: jnp.sum(x * bound) > 1, lambda x: 0.5 * x @ w, x)

    program = read(fn, X, W, X)
    check(program)
    assert [(op.role, op.slot) for op in of(program, "enter", "join")] == [("enter", 0), ("enter", 1), ("join", 0)]
    assert program.regions == ((-1, 1, 1), (0, 1, 1))
    (body,), (condition,) = of(program, "dot_general"), of(program, "reduce_sum")
    (rounds,), (last,) = of(program, "join"), of(program, "exit")
    assert of(program, "return")[0].operands == last.results
    assert condition.equation_index > body.equation_index > rounds.equation_index == 0


def test_branches_are_regions() -> None:
    """Their results are joined."""

    def fn(p: Any, w: Any, x: Any) -> Any:
        return lax.cond(p, lambda w, x: (x @ w, x), lambda w, x: (x * 2, jnp.ones_like(x)), w, x)

    program = read(fn, True, W, X)
    check(program)
    assert program.regions == ((-1, 1, 1), (0, 1, 1), (0, 1, 1))
    assert [(op.slot, op.region) for op in of(program, "enter")] == [(0, 1), (1, 1), (2, 2), (3, 2)]
    first, second = of(program, "join")
    assert (first.slot, first.region, len(first.operands)) == (0, 0, 2)
    assert (second.slot, second.region, len(second.operands)) == (1, 0, 2)
    assert [program.arrays[array].shape for array in (*first.results, *second.results)] == [(8, 16)] * 2


def test_constraints_are_fixed_and_have_their_spec() -> None:
    mesh = sr.create_mesh("data:4,model:2")
    program = read(lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "model"))) + 1, X)
    (op,) = of(program, "fixed")
    assert op.name == "sharding_constraint"
    assert op.spec == P(None, "model")
    assert op.factors == Factors(((0, 1),), ((0, 1),), (8, 16))


def test_shard_maps_are_opaque() -> None:
    mesh = sr.create_mesh("data:8")
    mapped = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    program = read(lambda x: jnp.sin(mapped(x)), X)
    (op,) = of(program, "opaque")
    operand_specs, result_specs = op.spec
    assert (tuple(operand_specs), tuple(result_specs)) == ((P("data"),), (P(),))
    assert op.factors == Factors(((None, None),), ((None, None),), ())
    assert not any(operation.lacks_rule for operation in program.operations)
    assert names(program) == ["shard_map", "sin", "return"]


def test_unknown_primitives_are_whole_and_named() -> None:
    fold = Primitive("fold_in_half")
    fold.def_abstract_eval(lambda x: ShapedArray((x.shape[0] // 2, *x.shape[1:]), x.dtype))
    program = read(lambda x: lax.scan(lambda c, _: (c, fold.bind(jnp.sin(c))), fold.bind(x), length=3), X)
    check(program)
    assert [operation.name for operation in program.operations if operation.lacks_rule] == ["fold_in_half"] * 2
    outer, inner = of(program, "fold_in_half")
    assert outer.factors == Factors(((None, None),), ((None, None),), ())
    assert outer.role == "compute"
    assert (outer.run_count, inner.run_count) == (1, 3)


def test_the_forward_part_of_a_checkpointed_loop_is_entered() -> None:
    policy = jax.checkpoint_policies.dots_saveable

    @functools.partial(jax.checkpoint, policy=policy)
    def layers(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0].sum()

    program = read_jaxpr(jax.make_jaxpr(jax.grad(layers))(jnp.ones((3, 4, 4)), jnp.ones((8, 4))))
    assert not any(operation.lacks_rule for operation in program.operations)
    assert sum(operation.name == "dot_general" for operation in program.operations) == 3
