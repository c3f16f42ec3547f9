"""Layouts by hand, and moves between them against what compilers make of them."""

import collections
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.graph.layouts import (
    PARTIAL,
    WHOLE,
    all_layouts,
    dim_shard_count,
    moves,
    relayout_steps,
    shard_counts,
    spec_of,
)
from shardrules.programs.autoplan.graph.machine import COLLECTIVE_KINDS, Machine
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.flow import Value
from shardrules.programs.compiled.program import CompiledProgram, read_program
from tests.programs.examples import CPU, CUDA, mesh_on

TWO, THREE = "data:4,model:2", "a:2,b:2,c:2"
SIZE = 16

OPTIONS = {
    CPU: {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    CUDA: {
        "xla_gpu_autotune_level": 0,
        **{
            f"xla_gpu_{kind}_combine_threshold_bytes": 0
            for kind in ("all_gather", "all_reduce", "reduce_scatter", "collective_permute")
        },
    },
}
"""Moves are decided before machine code, and each array should be moved by itself."""

Layout = tuple[int, ...]
Pair = tuple[Layout, Layout]


def machine(axes: str) -> Machine:
    return Machine.of(sr.mesh_shape(axes))


def rows(axes: str, ndim: int, partial: bool = False) -> list[Layout]:
    return [tuple(row) for row in all_layouts((SIZE,) * ndim, machine(axes), partial).tolist()]


def all_pairs(axes: str, ndim: int) -> list[Pair]:
    layouts = rows(axes, ndim)
    return [(start, end) for start in layouts for end in layouts]


def modelled(axes: str, pairs: list[Pair], nbytes: int) -> dict[Pair, float]:
    starts, ends = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    sent = moves(np.array(starts), np.array(ends), machine(axes)).sent.sum(axis=0) * nbytes
    return {(start, end): float(sent[starts.index(start), ends.index(end)]) for start, end in pairs}


def compiled(axes: str, ndim: int, target: str, pairs: list[Pair], steps: bool = True) -> dict[Pair, int]:
    """Bytes that compilers send for each pair: an array has one layout, and is constrained to the other, in `steps`.

    Parts of sums are sums over extra dims, which are split.
    """
    mesh, plan = mesh_on(target, axes), machine(axes)

    def sharding(layout: Layout) -> NamedSharding:
        return NamedSharding(mesh, spec_of(layout, ndim, plan))

    def argument_in(layout: Layout) -> jax.ShapeDtypeStruct:
        summed = [axis for axis, dim in enumerate(layout) if dim == PARTIAL]
        rest = tuple(sharding(tuple(max(dim, WHOLE) for dim in layout)).spec)
        shape = (*(plan.sizes[axis] for axis in summed), *(SIZE,) * ndim)
        spec = P(*(plan.axes[axis] for axis in summed), *rest)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def run(*arrays: Any) -> list[Any]:
        results = []
        for (start, end), x in zip(pairs, arrays, strict=True):
            whole = x.sum(tuple(range(x.ndim - ndim))) if x.ndim > ndim else x
            for step in relayout_steps(start, end) if steps else [end]:
                whole = lax.with_sharding_constraint(whole, sharding(step))
            results.append(whole)
        return results

    args = [argument_in(start) for start, _ in pairs]
    lowered = jax.jit(run, out_shardings=[sharding(end) for _, end in pairs]).lower(*args)
    text = lowered.compile(compiler_options=OPTIONS[target]).as_text()
    assert isinstance(text, str)
    sent: dict[Pair, int] = dict.fromkeys(pairs, 0)
    program = read_program(text)
    for collective in find_collectives(program, mesh):
        pair = pairs[argument_index(program, Value(collective.computation, collective.name))]
        sent[pair] += collective.total_wire_bytes
    return sent


def argument_index(program: CompiledProgram, value: Value) -> int:
    """The index of the only argument that a value is computed from."""
    waiting, arguments = [program.instruction(value)], {}
    while waiting:
        instruction = waiting.pop()
        if instruction.op == "parameter":
            arguments[int(instruction.literal)] = None
        waiting += [program.instruction(Value(value.computation, name)) for name in instruction.operands]
    (index,) = arguments
    return index


@functools.cache
def compared(axes: str, ndim: int, target: str, every: int = 1) -> dict[Pair, tuple[float, int]]:
    """For all pairs of layouts the modelled and the compiled bytes."""
    pairs = all_pairs(axes, ndim)[::every]
    expected = modelled(axes, pairs, SIZE**ndim * 4)
    actual = compiled(axes, ndim, target, pairs)
    return {pair: (expected[pair], actual[pair]) for pair in pairs}


def is_plain(pair: Pair) -> bool:
    """Axes only slice, or only gather, or a single one moves to another dim."""
    kinds = [
        "slice" if start == WHOLE else "gather" if end == WHOLE else "move"
        for start, end in zip(*pair, strict=True)
        if start != end
    ]
    return kinds in ([], ["move"]) or set(kinds) in ({"slice"}, {"gather"})


EVERYTHING = [
    pytest.param(TWO, 2, CPU, 1, id="4,2: 2 dims"),
    pytest.param(TWO, 3, CPU, 1, id="4,2: 3 dims"),
    pytest.param(THREE, 2, CPU, 1, id="2,2,2: 2 dims"),
    pytest.param(THREE, 3, CPU, 11, id="2,2,2: 3 dims"),
    pytest.param(TWO, 2, CUDA, 1, id="4,2: 2 dims, GPUs", marks=pytest.mark.slow),
    pytest.param(THREE, 2, CUDA, 7, id="2,2,2: 2 dims, GPUs", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "ndim", "target", "every"), EVERYTHING)
def test_every_move_in_steps_is_modelled_to_the_byte(axes: str, ndim: int, target: str, every: int) -> None:
    both_bytes = compared(axes, ndim, target, every)
    assert len(both_bytes) > 80
    assert {pair: both for pair, both in both_bytes.items() if both[0] != both[1]} == {}


def test_compilers_move_in_their_own_ways_without_steps() -> None:
    """That is why a plan is written in steps. Moves of a single step are the same."""
    pairs = all_pairs(TWO, 2)
    expected, actual = modelled(TWO, pairs, SIZE**2 * 4), compiled(TWO, 2, CPU, pairs, steps=False)
    plain = [pair for pair in pairs if is_plain(pair)]
    assert {pair: (expected[pair], actual[pair]) for pair in plain if expected[pair] != actual[pair]} == {}
    at_once = {
        ((WHOLE, 0), (0, WHOLE)): 256,  # sent around and nothing else
        ((WHOLE, 0), (1, WHOLE)): 512,  # gathered, and then sliced
        ((0, 0), (1, 1)): 112,  # both axes exchange pieces at once: less than one after the other
    }
    assert {pair: actual[pair] for pair in at_once} == at_once


def test_steps_lead_to_the_end_and_cost_as_much_as_the_move() -> None:
    layouts, plan = rows(THREE, 2, partial=True), machine(THREE)
    for start, end in itertools.product(layouts, repeat=2):
        steps = relayout_steps(start, end)
        if PARTIAL in end:
            continue
        assert (steps or [tuple(max(dim, WHOLE) for dim in start)])[-1] == end
        if PARTIAL in start or not steps:
            continue
        ends = [start, *steps]
        parts = [moves(np.array([first]), np.array([second]), plan) for first, second in itertools.pairwise(ends)]
        whole = moves(np.array([start]), np.array([end]), plan)
        np.testing.assert_allclose(sum(part.sent for part in parts), whole.sent, rtol=1e-12)
        np.testing.assert_allclose(sum(part.seconds for part in parts), whole.seconds, rtol=1e-12)


def is_summed_in_place(pair: Pair) -> bool:
    """Only partial sums change, and all of them go to one dim, or to none."""
    start, end = pair
    targets = [dim for before, dim in zip(start, end, strict=True) if before == PARTIAL]
    others_stay = all(before == dim for before, dim in zip(start, end, strict=True) if before != PARTIAL)
    return bool(targets) and others_stay and len(set(targets)) == 1


def sums(axes: str, ndim: int) -> list[Pair]:
    starts = [row for row in rows(axes, ndim, partial=True) if PARTIAL in row]
    return [pair for pair in itertools.product(starts, rows(axes, ndim)) if is_summed_in_place(pair)]


@pytest.mark.slow
def test_sums_are_modelled_to_the_byte() -> None:
    pairs = sums(TWO, 2)
    assert len(pairs) > 15
    expected, actual = modelled(TWO, pairs, SIZE**2 * 4), compiled(TWO, 2, CUDA, pairs)
    assert {pair: (expected[pair], actual[pair]) for pair in pairs if expected[pair] != actual[pair]} == {}


@pytest.mark.slow
def test_sums_that_other_axes_slice_are_completed_first() -> None:
    pairs = [
        *(((PARTIAL, WHOLE), (WHOLE, 0)), ((PARTIAL, WHOLE), (WHOLE, 1)), ((WHOLE, PARTIAL), (0, WHOLE))),
        *(((PARTIAL, WHOLE), (0, 1)), ((WHOLE, PARTIAL), (1, 1))),  # no device keeps only its piece
    ]
    assert modelled(TWO, pairs, SIZE**2 * 4) == compiled(TWO, 2, CUDA, pairs)


def test_nothing_becomes_a_part_of_a_sum() -> None:
    layouts = np.array([[WHOLE], [0], [PARTIAL]])
    table = moves(layouts, layouts, machine("data:8"))
    assert table.allowed.tolist() == [[True, True, False], [True, True, False], [True, True, True]]
    assert np.isinf(table.seconds).tolist() == (~table.allowed).tolist()


@pytest.mark.parametrize("axes", [TWO, THREE, "x:8", "x:2,y:2,z:2,w:2"])
def test_only_changes_of_the_layout_cost_anything(axes: str) -> None:
    layouts = all_layouts((SIZE, SIZE), machine(axes), partial=True)
    table = moves(layouts, layouts, machine(axes))
    assert table.sent.shape == (len(COLLECTIVE_KINDS), len(layouts), len(layouts))
    assert (np.diagonal(table.seconds) == 0).all()
    assert (np.diagonal(table.fixed) == 0).all()
    free = table.sent.sum(axis=0) == 0
    assert (table.seconds[free & table.allowed] == 0).all()
    assert (table.seconds[~free] > 0).all()
    # Slicing an array that is whole is free.
    (whole,) = np.flatnonzero((layouts == WHOLE).all(axis=1))
    assert free[whole][table.allowed[whole]].all()


@pytest.mark.parametrize("axes", [TWO, THREE])
def test_all_layouts_that_divide_are_listed_once(axes: str) -> None:
    plan = machine(axes)
    for sizes in [(), (1,), (8,), (4, 2), (6, 4, 16), (0, 8)]:
        actual = [tuple(row) for row in all_layouts(sizes, plan).tolist()]
        expected = [
            row
            for row in itertools.product(range(-1, len(sizes)), repeat=len(plan.sizes))
            if all(
                size > 0
                and size % math.prod(n for split_dim, n in zip(row, plan.sizes, strict=True) if split_dim == dim) == 0
                for dim, size in enumerate(sizes)
                if dim in row
            )
        ]
        assert collections.Counter(actual) == collections.Counter(expected)
        assert actual[0] == (WHOLE,) * len(plan.sizes)


def test_shard_counts_and_specs_of_layouts() -> None:
    plan = machine(THREE)
    assert [dim_shard_count((1, 0, 1), dim, plan) for dim in range(3)] == [2, 4, 1]
    assert shard_counts(np.array([[WHOLE, PARTIAL, 0], [1, 0, 1], [WHOLE] * 3]), plan).tolist() == [2, 8, 1]
    assert spec_of((1, 0, 1), 3, plan) == P("b", ("a", "c"))
    assert spec_of((WHOLE, PARTIAL, 2), 3, plan) == P(None, None, "c")
    assert spec_of((WHOLE,) * 3, 2, plan) == P()


def test_pieces_of_a_sum_are_sent_to_their_place_in_the_order_of_axes() -> None:
    """A dim that a later axis splits already: the pieces that a reduce-scatter leaves are in the order of that axis."""
    sent = moves(np.array([[PARTIAL, 0], [0, PARTIAL]]), np.array([[0, 0]]), machine(TWO)).sent[:, :, 0]
    permuted = sent[COLLECTIVE_KINDS.index("collective-permute")]
    assert permuted.tolist() == [1 / 8, 0]
    assert sent[COLLECTIVE_KINDS.index("reduce-scatter")].tolist() == [1 / 2 * 3 / 4, 1 / 4 * 1 / 2]
