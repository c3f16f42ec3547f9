"""Factors by hand, and against what XLA makes of every operation."""

import itertools
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.run.local import LocalSplit, local_jaxpr
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.program import read_program
from shardrules.programs.traced.factors import table
from shardrules.programs.traced.factors.loops import LoopRule, Loops
from shardrules.programs.traced.factors.table import RULES, Factors, op_factors
from tests.programs.autoplan.operations import CASES, UNSPLIT, Case, bound
from tests.programs.examples import mesh_on

AXES = sr.mesh_shape("x:2,y:2")
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Collectives are decided long before machine code."""

Split = dict[int, str]
"""The factors that are split, each over a mesh axis."""

SMALLEST = 4
"""To ask whether all have converged takes a byte, or a word."""


def case_named(name: str) -> Case:
    (match,) = [case for case in (*CASES, *UNSPLIT) if case.name == name]
    return match


def equation(case: Case) -> Any:
    (eqn,) = jax.make_jaxpr(case.fn)(*case.args).eqns
    return eqn


def factors(case: Case) -> Factors:
    case_factors = op_factors(equation(case))
    assert case_factors is not None
    return case_factors


def splits(factors: Factors) -> list[Split]:
    """Every factor over an axis, and every one with the next over two."""
    even = [factor for factor, size in enumerate(factors.sizes) if size % 2 == 0]
    pairs = list(itertools.combinations(even, 2)) if len(even) < 4 else [*zip(even, even[1:] + even[:1], strict=True)]
    return [{factor: "x"} for factor in even] + [{first: "x", second: "y"} for first, second in pairs]


def sharding(mesh: Mesh, names: Sequence[int | None], split: Split) -> NamedSharding:
    return NamedSharding(mesh, P(*(None if name is None else split.get(name) for name in names)))


def all_ways(case: Case, mesh: Mesh) -> tuple[Any, list[Split]]:
    """The operation once for every way to split it, each with operands of its own; and these ways."""
    ways, each = splits(factors(case)), len(case.args)
    fns = [local(case, mesh, way) if factors(case).is_local else case.fn for way in ways]

    def fn(*args: Any) -> list[Any]:
        return [jax.tree.leaves(fn(*args[way * each : (way + 1) * each])) for way, fn in enumerate(fns)]

    return fn, ways


def local(case: Case, mesh: Mesh, way: Split) -> Any:
    """The operation as each device runs it on its pieces."""
    case_factors = factors(case)
    operands, results = (
        tuple(sharding(mesh, names, way).spec for names in side)
        for side in (case_factors.operands, case_factors.results)
    )
    summed = tuple(
        tuple(axis for factor, axis in way.items() if factor in case_factors.summed(index))
        for index in range(len(case_factors.results))
    )
    return jaxpr_as_fun(local_jaxpr(equation(case), LocalSplit(operands, results, summed), mesh))


def shardings(case: Case, mesh: Mesh) -> tuple[list[Any], list[list[Any]]]:
    """The shardings of the operands and of the results, for every way to split the operation."""
    case_factors, eqn = factors(case), equation(case)
    # Constants of the equation are not passed as arguments.
    passed = [names for names, var in zip(case_factors.operands, eqn.invars, strict=True) if isinstance(var, Var)]
    ways = splits(case_factors)
    return (
        [sharding(mesh, names, way) for way in ways for names in passed],
        [[sharding(mesh, names, way) for names in case_factors.results] for way in ways],
    )


def compiled(case: Case, mesh: Mesh) -> Any:
    fn, ways = all_ways(case, mesh)
    operands, results = shardings(case, mesh)
    pairs = zip(case.args * len(ways), operands, strict=True)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=operand) for x, operand in pairs]
    return jax.jit(fn, out_shardings=results).lower(*args).compile(QUICK)


def reduced_bytes(case: Case, *, at_once: bool) -> int:
    """The bytes that all-reduces have to complete: the results, as far as not split.

    Over two factors compilers reduce one after the other, or, for GPUs, `at_once`.
    """
    case_factors, total = factors(case), 0
    for way in splits(case_factors):
        pieces = [sum(name in way for name in names) for names in case_factors.results]
        arrays = zip((var.aval for var in equation(case).outvars), pieces, strict=True)
        nbytes = sum(math.prod(aval.shape) * aval.dtype.itemsize // 2**split for aval, split in arrays)
        times = sum(factor in way for factor in case_factors.reduced)
        total += nbytes * (min(times, 1) if at_once else times)
    return total


def check_collectives(case: Case, text: str, reduced: int) -> None:
    """Only what is reduced moves."""
    collectives = find_collectives(read_program(text), AXES)
    moved = [collective for collective in collectives if not case.converges or collective.payload_bytes > SMALLEST]
    assert [collective for collective in moved if collective.kind != "all-reduce"] == []
    assert sum(collective.payload_bytes for collective in moved) == reduced


def numbers(tree: Any) -> Iterator[np.ndarray]:
    for leaf in jax.tree.leaves(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        yield np.asarray(jax.random.key_data(leaf) if is_key else leaf).astype(np.complex128)


def named(cases: Sequence[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@pytest.mark.sample(30)
@named(CASES)
def test_a_split_operation_moves_nothing_but_sums(case: Case) -> None:
    mesh = sr.create_mesh("x:2,y:2", devices=jax.devices()[:4])
    program = compiled(case, mesh)
    # What devices run on their own pieces has its parts side by side, over all factors.
    check_collectives(case, program.as_text(), reduced_bytes(case, at_once=factors(case).is_local))

    operands, results = shardings(case, mesh)
    args = [jax.device_put(x, operand) for x, operand in zip(case.args * len(results), operands, strict=True)]
    expected = list(numbers(case.fn(*case.args)))
    for way in program(*args):
        for array, other in zip(numbers(way), expected, strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-5)


ON_GPUS = (
    *(
        "dot in batches",
        "dot of two sums",
        "ragged_dot",
        "ragged_dot, its gradient",
        "conv",
        "conv of separate channels",
        "conv of separate channels, its gradient",
        "conv of groups of channels",
        "conv of groups of the batch",
        "fft",
        "top_k",
    ),
    *("lu", "svd", "random_bits", "random_bits of keys, rbg", "random_gamma", "random_gamma of rows"),
    *("gather rows, fill", "gather elements"),
    *("gather in batches", "gather windows of one", "scatter_add rows", "scatter_max rows", "scatter_sub rows"),
    *("scatter elements", "scatter_add in batches", "dynamic_update_slice in batches, clip", "reduce_and", "argmax"),
    *("sort", "tile", "reshape: regroup"),
)
"""Operations that compilers for GPUs may treat in ways of their own."""


@pytest.mark.slow
@named([case_named(name) for name in ON_GPUS])
def test_a_split_operation_moves_nothing_but_sums_on_gpus(case: Case) -> None:
    text = compiled(case, mesh_on("cuda:h100:4", "x:2,y:2")).as_text()
    check_collectives(case, text, reduced_bytes(case, at_once=True))


@named(UNSPLIT)
def test_operations_that_xla_gathers_are_whole(case: Case) -> None:
    assert splits(factors(case)) == []


def test_the_check_of_collectives_can_fail() -> None:
    """For a collective that is not expected, and for an all-reduce of more bytes."""
    case = Case("cumsum", lambda x: lax.cumsum(x, 1), (jnp.ones((8, 16)),))
    with pytest.raises(AssertionError, match="all-gather"):
        check_collectives(case, split_on_purpose(case, P(None, "x"), P(None, "x")), 0)
    case = Case("sum", lambda x: lax.reduce_sum(x, (1,)), (jnp.ones((8, 16)),))
    with pytest.raises(AssertionError, match="32 == 0"):
        check_collectives(case, split_on_purpose(case, P(None, "x"), P()), 0)


def split_on_purpose(case: Case, operand: P, result: P) -> str:
    mesh = sr.create_mesh("x:2,y:2", devices=jax.devices()[:4])
    (x,) = case.args
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, operand))
    text = jax.jit(case.fn, out_shardings=NamedSharding(mesh, result)).lower(struct).compile().as_text()
    assert text
    return text


# By hand. Dims are written as letters, one for each factor, and as "." where they are whole.


def einsum_text(factors: Factors) -> str:
    """Factors as an einsum: `"ab,bc->ac"`, with the reduced ones after a slash."""
    letters = "abcdefghijkl"
    sides = [
        ",".join("".join("." if name is None else letters[name] for name in names) for names in side)
        for side in (factors.operands, factors.results)
    ]
    return "->".join(sides) + "".join(["/", *(letters[name] for name in factors.reduced)] if factors.reduced else [])


BY_HAND = {
    "add": "ab,ab->ab",
    "add a scalar": "ab,->ab",
    "select by a scalar": ",ab,ab->ab",
    "clamp": ",ab,->ab",
    "barrier": "ab,cd->ab,cd",
    "iota": "->ab",
    "broadcast": "a->bac",
    "broadcast a dim of one": "a.->ab",
    "broadcast a scalar": "->ab",
    "transpose": "abc->cab",
    "reshape: heads": "ab->ab.",
    "reshape: one dim": "a.->a",
    "reshape: merge the last": "ab.->ab",
    "reshape: regroup": "a.->a.",
    "reshape: regroup more": "a.bc->ab..c",
    "reshape: ones": "ab->.a.b",
    "squeeze": "a.b->ab",
    "rev": "a.->a.",
    "slice": "a.->a.",
    "slice with steps": "a.->a.",
    "dynamic_slice": "a.,,->a.",
    "dynamic_update_slice": "a.,a.,,->a.",
    "dynamic_update_slice of one": "a.bc,a.bc,,,,->a.bc",
    "pad": "a.,->a.",
    "concatenate": "a.,a.->a.",
    "split": "a.->a.,a.",
    "stack": "ab,ab->a.b",
    "unstack": "a.->a,a,a,a",
    "tile": "a.->ab",
    "bitcast to bytes": "ab->ab.",
    "bitcast of bytes": "ab.->ab",
    "reduce_sum": "abc->ac/b",
    "reduce_sum of all": "ab->/ab",
    "reduce_xor": ".a->a",
    "reduce by any function": "a.,->a",
    "argmax": "a.->a",
    "sort several": ".a,.a->.a,.a",
    "cumsum": "a.->a.",
    "dot": "ab,bc->ac/b",
    "dot with a vector": "ab,b->a/b",
    "dot in batches": "abcd,aecd->acbe/d",
    "dot of two sums": "abc,bcd->ad/bc",
    "ragged_dot": "ab,cbd,.->ad/bc",
    "ragged_dot, transposed": "ab,cdb,.->ad/bc",
    "ragged_dot, its gradient": "ab,ac,.->dbc/a",
    "conv": "a..b,..bc->a..c/b",
    "conv, channels first": "ab..,cb..->ac../b",
    "conv of separate channels": "a..b,...b->a..b",
    "conv of each channel to two": "a.b,..b->a.b",
    "conv of groups of channels": "a.b,..b->a.b",
    "conv of groups of the batch": "a.b,.ba->..a/b",
    "conv of separate channels, its gradient": "a.b,a.b->..b/a",
    "reduce_window_sum": "a..b->a..b",
    "select_and_scatter_add": "a..b,a..b->a..b",
    "fft": "ab.->ab.",
    "fft of two dims": "a..->a..",
    "top_k": "a.->a.,a.",
    "approx_max_k": "a.->a.,a.",
    "psum under vmap": "ab->b/a",
    "pmax under vmap": "ab->b/a",
    "reshape: transposed": "ab.->ba",
    "reshard": "ab->ab",
    "cholesky": "ab..->ab..",
    "triangular_solve": "a..,a..->a..",
    "lu": "a..->a..,a.,a.",
    "svd": "a..->a.,a..,a..",
    "tridiagonal_solve": "a.,a.,a.,a..->a..",
    "pivots": "a.->a.",
    "random_bits": "->ab",
    "random_bits of keys": "a->abc",
    "random_bits of keys, rbg": ".->abc",
    "random_split of keys": "a->ab",
    "random_fold_in": "a,a->a",
    "random_fold_in, rbg": ".,.->.",
    "random_gamma": "a,a->a",
    "random_gamma of one key": ",a->a",
    "random_gamma of rows": "a,a.->a.",
    "random_unwrap": "a->a.",
    "random_wrap": "a.->a",
    "gather rows, fill": "ab,cd.->cdb/a",
    "gather columns": "ab,c.->ac/b",
    "gather elements": "ab,cd.->cd/ab",
    "gather a window": ".a,.->.a",
    "gather windows": ".a,b.->b.a",
    "gather windows of one": "ab,c.->c.b/a",
    "gather in batches": "abc,ad.->adc/b",
    "dynamic_slice in batches, clip": "abcd,a.->a.cd/b",
    "scatter_add rows": "ab,cd.,cdb->ab/cd",
    "scatter_sub rows": "ab,...,..b->ab",
    "scatter rows": "ab,...,..b->ab",
    "scatter_add elements": "ab,c.,c->ab/c",
    "scatter_add in batches": "abc,ad.,adc->abc/d",
    "scatter in batches": "abc,a..,a.c->abc",
    "scatter a window": ".a,.,.a->.a",
    "scatter_add windows": ".a,b.,b.a->.a/b",
    "dynamic_update_slice in batches, clip": "abcd,a.,a.cd->abcd",
}


def test_one_key_gives_others_at_each_position() -> None:
    names = "random_gamma", "random_gamma of one key", "random_gamma of rows"
    assert [factors(case_named(name)).positional for name in names] == [(), (0,), ()]


@pytest.mark.parametrize("name", BY_HAND)
def test_factors_are_as_written_by_hand(name: str) -> None:
    assert einsum_text(factors(case_named(name))) == BY_HAND[name]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("reshape: heads", (8, 4)),
        ("reshape: one dim", (8,)),
        ("reshape: regroup", (2,)),
        ("reshape: regroup more", (4, 2, 12)),
        ("tile", (8, 2)),
        ("conv of each channel to two", (4, 6)),
        ("conv of groups of channels", (4, 2)),
        ("conv of groups of the batch", (4, 6)),
        ("dot", (8, 16, 4)),
    ],
)
def test_sizes_are_what_pieces_have_to_divide(name: str, sizes: tuple[int, ...]) -> None:
    assert factors(case_named(name)).sizes == sizes


def test_empty_arrays_have_no_factors() -> None:
    (reshape,) = jax.make_jaxpr(lambda x: lax.reshape(x, (0, 8)))(jnp.ones((4, 0, 2))).eqns
    assert op_factors(reshape) == Factors(((None,) * 3,), ((None, None),), sizes=())


def test_scalars_have_no_factors() -> None:
    (sin,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    assert op_factors(sin) == Factors(((),), ((),), sizes=())


# What no rule covers.


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.jit(jnp.sin)(x),
        lambda x: lax.fori_loop(0, 3, lambda _, y: y + 1, x),
        lambda x: lax.cond(True, jnp.sin, jnp.cos, x),
        lambda x: jax.device_put(x, jax.devices()[0]),
        lambda x: lax.with_sharding_constraint(x, NamedSharding(sr.create_mesh("x:8"), P())),
        lambda x: lax.after_all(lax.create_token()),
    ],
    ids=["jit", "loop", "cond", "device_put to a device", "constraint", "token"],
)
def test_other_primitives_have_no_factors(fn: Any) -> None:
    assert op_factors(jax.make_jaxpr(fn)(jnp.ones(8)).eqns[-1]) is None


@pytest.mark.sample(50)
@pytest.mark.parametrize("name", RULES)
def test_other_forms_of_a_primitive_raise_nothing(name: str) -> None:
    """As if another version of JAX had other parameters, and more arrays."""
    struct = SimpleNamespace(aval=ShapedArray((4, 2), jnp.dtype("float32")))
    for operands, results in ((1, 1), (5, 1), (0, 1), (2, 3), (1, 0)):
        primitive = SimpleNamespace(name=name)
        eqn = SimpleNamespace(primitive=primitive, invars=[struct] * operands, outvars=[struct] * results, params={})
        eqn_factors = op_factors(eqn)
        if eqn_factors is not None:
            assert (len(eqn_factors.operands), len(eqn_factors.results)) == (operands, results)


@pytest.mark.sample(40)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_rule_needs_its_parameters(case: Case) -> None:
    """As if another version of JAX had renamed them."""
    eqn = equation(case)
    for name in RULES[eqn.primitive.name].params:
        params = {key: value for key, value in eqn.params.items() if key != name}
        renamed = SimpleNamespace(primitive=eqn.primitive, invars=eqn.invars, outvars=eqn.outvars, params=params)
        assert op_factors(renamed) is None


def test_bugs_in_rules_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {**RULES, "sin": LoopRule(lambda op: Loops([op.params["missing"]], []))}
    monkeypatch.setattr(table, "RULES", rules)
    with pytest.raises(KeyError, match="missing"):
        op_factors(jax.make_jaxpr(jnp.sin)(jnp.ones(4)).eqns[0])


# Reshapes against NumPy.


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same elements."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3, 5]), max_size=6))
    return draw(grouped(primes)), draw(grouped(draw(st.permutations(primes))))


@st.composite
def grouped(draw: st.DrawFn, primes: list[int]) -> tuple[int, ...]:
    cuts = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=4)))
    sides = zip([0, *cuts], [*cuts, len(primes)], strict=True)
    return tuple(math.prod(primes[start:stop]) for start, stop in sides)


@given(reshapes())
def test_pieces_of_a_reshape_hold_the_same_elements(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, result = shapes
    x = np.arange(math.prod(shape)).reshape(shape)
    reshape = op_factors(
        equation(Case("reshape", bound(lax.reshape_p, new_sizes=result, dimensions=None, sharding=None), (x,)))
    )
    assert reshape is not None
    (before,), (after,) = reshape.operands, reshape.results
    for factor, size in enumerate(reshape.sizes):
        for count in (divisor for divisor in range(1, size + 1) if size % divisor == 0):
            pieces = np.split(x, count, before.index(factor))
            others = np.split(x.reshape(result), count, after.index(factor))
            for piece, other in zip(pieces, others, strict=True):
                assert sorted(piece.ravel()) == sorted(other.ravel())
                # And what a device does with its piece is a reshape, too.
                assert (piece.reshape(other.shape) == other).all()


@given(reshapes())
def test_no_dim_of_a_reshape_is_left_out(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """A dim with the same pieces as a dim of the result goes with it, unless an earlier dim of its run does."""
    shape, result = shapes
    x = np.arange(math.prod(shape)).reshape(shape)
    reshape = op_factors(
        equation(Case("reshape", bound(lax.reshape_p, new_sizes=result, dimensions=None, sharding=None), (x,)))
    )
    assert reshape is not None
    for dim, size in enumerate(shape):
        for other, length in enumerate(result):
            if size == length > 1 and math.prod(shape[:dim]) == math.prod(result[:other]):
                assert reshape.operands[0][dim] == reshape.results[0][other] is not None
