"""Layouts by hand, and what it takes to go from one to another against what compilers make of it."""

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
from shardrules.analysis.program.collectives import find_collectives
from shardrules.analysis.program.flow import Value
from shardrules.analysis.program.program import CompiledProgram, read_program
from shardrules.planning.graph.layouts import (
    PARTIAL,
    WHOLE,
    all_layouts,
    dim_shard_count,
    moves,
    relayout_steps,
    shard_counts,
    spec_of,
)
from shardrules.planning.graph.machine import COLLECTIVE_KINDS, Machine
from tests.analysis.programs import CPU, CUDA, mesh_on

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
"""What is moved is decided before machine code, and each array is to be moved by itself."""

Layout = tuple[int, ...]
Pair = tuple[Layout, Layout]


def machine(axes: str) -> Machine:
    return Machine.of(sr.mesh_shape(axes))


def rows(axes: str, ndim: int, partial: bool = False) -> list[Layout]:
    return [tuple(row) for row in all_layouts((SIZE,) * ndim, machine(axes), partial).tolist()]


def all_pairs(axes: str, ndim: int) -> list[Pair]:
    own = rows(axes, ndim)
    return [(start, end) for start in own for end in own]


def modelled(axes: str, pairs: list[Pair], nbytes: int) -> dict[Pair, float]:
    starts, ends = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    sent = moves(np.array(starts), np.array(ends), machine(axes)).sent.sum(axis=0) * nbytes
    return {(one, two): float(sent[starts.index(one), ends.index(two)]) for one, two in pairs}


def compiled(axes: str, ndim: int, target: str, pairs: list[Pair], steps: bool = True) -> dict[Pair, int]:
    """What compilers send for each pair: an array is given in one layout, and asked for in the other, in `steps`.

    Parts of sums are sums over dims of their own, which are split.
    """
    mesh, plan = mesh_on(target, axes), machine(axes)

    def there(layout: Layout) -> NamedSharding:
        return NamedSharding(mesh, spec_of(layout, ndim, plan))

    def given(layout: Layout) -> jax.ShapeDtypeStruct:
        summed = [at for at, dim in enumerate(layout) if dim == PARTIAL]
        rest = tuple(there(tuple(max(dim, WHOLE) for dim in layout)).spec)
        shape = (*(plan.sizes[at] for at in summed), *(SIZE,) * ndim)
        spec = P(*(plan.axes[at] for at in summed), *rest)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def run(*arrays: Any) -> list[Any]:
        results = []
        for (start, end), x in zip(pairs, arrays, strict=True):
            whole = x.sum(tuple(range(x.ndim - ndim))) if x.ndim > ndim else x
            for step in relayout_steps(start, end) if steps else [end]:
                whole = lax.with_sharding_constraint(whole, there(step))
            results.append(whole)
        return results

    args = [given(start) for start, _ in pairs]
    lowered = jax.jit(run, out_shardings=[there(end) for _, end in pairs]).lower(*args)
    text = lowered.compile(compiler_options=OPTIONS[target]).as_text()
    assert isinstance(text, str)
    sent: dict[Pair, int] = dict.fromkeys(pairs, 0)
    program = read_program(text)
    for one in find_collectives(program, mesh):
        sent[pairs[argument(program, Value(one.computation, one.name))]] += one.total_wire_bytes
    return sent


def argument(program: CompiledProgram, place: Value) -> int:
    """The number of the only argument that a value is made of."""
    waiting, found = [program.instruction(place)], {}
    while waiting:
        one = waiting.pop()
        if one.op == "parameter":
            found[int(one.literal)] = None
        waiting += [program.instruction(Value(place.computation, name)) for name in one.operands]
    (number,) = found
    return number


@functools.cache
def compared(axes: str, ndim: int, target: str, every: int = 1) -> dict[Pair, tuple[float, int]]:
    """For all pairs of layouts what is modelled, and what is compiled."""
    pairs = all_pairs(axes, ndim)[::every]
    expected = modelled(axes, pairs, SIZE**ndim * 4)
    found = compiled(axes, ndim, target, pairs)
    return {pair: (expected[pair], found[pair]) for pair in pairs}


def is_plain(pair: Pair) -> bool:
    """Whether axes only come, or only go, or a single one goes elsewhere."""
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
    pytest.param(TWO, 2, CUDA, 1, id="4,2: 2 dims, GPUs"),
    pytest.param(THREE, 2, CUDA, 7, id="2,2,2: 2 dims, GPUs"),
]


@pytest.mark.parametrize(("axes", "ndim", "target", "every"), EVERYTHING)
def test_in_steps_every_change_is_modelled_to_the_byte(axes: str, ndim: int, target: str, every: int) -> None:
    found = compared(axes, ndim, target, every)
    assert len(found) > 80
    assert {pair: both for pair, both in found.items() if both[0] != both[1]} == {}


def test_at_once_compilers_find_ways_of_their_own() -> None:
    """That is why a plan is written in steps. What takes one step only is the same."""
    pairs = all_pairs(TWO, 2)
    expected, found = modelled(TWO, pairs, SIZE**2 * 4), compiled(TWO, 2, CPU, pairs, steps=False)
    plain = [pair for pair in pairs if is_plain(pair)]
    assert {pair: (expected[pair], found[pair]) for pair in plain if expected[pair] != found[pair]} == {}
    at_once = {
        ((WHOLE, 0), (0, WHOLE)): 256,  # sent around and nothing else
        ((WHOLE, 0), (1, WHOLE)): 512,  # gathered, and then sliced
        ((0, 0), (1, 1)): 112,  # both axes exchange pieces at once: less than one after the other
    }
    assert {pair: found[pair] for pair in at_once} == at_once


def test_ways_end_where_they_should_and_cost_the_same_in_parts() -> None:
    own, plan = rows(THREE, 2, partial=True), machine(THREE)
    for start, end in itertools.product(own, repeat=2):
        steps = relayout_steps(start, end)
        if PARTIAL in end:
            continue
        assert (steps or [tuple(max(dim, WHOLE) for dim in start)])[-1] == end
        if PARTIAL in start or not steps:
            continue
        ends = [start, *steps]
        parts = [moves(np.array([one]), np.array([two]), plan) for one, two in itertools.pairwise(ends)]
        whole = moves(np.array([start]), np.array([end]), plan)
        np.testing.assert_allclose(sum(one.sent for one in parts), whole.sent, rtol=1e-12)
        np.testing.assert_allclose(sum(one.seconds for one in parts), whole.seconds, rtol=1e-12)


def is_summed_in_place(pair: Pair) -> bool:
    """Whether parts of sums are all that changes, and all of them go to one dim, or to none."""
    start, end = pair
    targets = [two for one, two in zip(start, end, strict=True) if one == PARTIAL]
    others = all(one == two for one, two in zip(start, end, strict=True) if one != PARTIAL)
    return bool(targets) and others and len(set(targets)) == 1


def sums(axes: str, ndim: int) -> list[Pair]:
    starts = [row for row in rows(axes, ndim, partial=True) if PARTIAL in row]
    return [pair for pair in itertools.product(starts, rows(axes, ndim)) if is_summed_in_place(pair)]


def test_sums_are_modelled_to_the_byte() -> None:
    pairs = [(start, end) for start, end in sums(TWO, 2) if not out_of_order(start, end)]
    assert len(pairs) > 15
    expected, found = modelled(TWO, pairs, SIZE**2 * 4), compiled(TWO, 2, CUDA, pairs)
    assert {pair: (expected[pair], found[pair]) for pair in pairs if expected[pair] != found[pair]} == {}


def out_of_order(start: Layout, end: Layout) -> bool:
    """Whether a sum goes to a dim that a later axis stays on: pieces are sent around, then."""
    return any(
        one == PARTIAL and two >= 0 and two in [dim for dim, was in zip(end, start, strict=True) if was != PARTIAL]
        for one, two in zip(start, end, strict=True)
    )


def test_sums_that_other_axes_slice_are_added_up_first() -> None:
    pairs = [
        *(((PARTIAL, WHOLE), (WHOLE, 0)), ((PARTIAL, WHOLE), (WHOLE, 1)), ((WHOLE, PARTIAL), (0, WHOLE))),
        *(((PARTIAL, WHOLE), (0, 1)), ((WHOLE, PARTIAL), (1, 1))),  # of whose pieces no device keeps its own at once
    ]
    assert modelled(TWO, pairs, SIZE**2 * 4) == compiled(TWO, 2, CUDA, pairs)


def test_nothing_becomes_a_part_of_a_sum() -> None:
    own = np.array([[WHOLE], [0], [PARTIAL]])
    found = moves(own, own, machine("data:8"))
    assert found.allowed.tolist() == [[True, True, False], [True, True, False], [True, True, True]]
    assert np.isinf(found.seconds).tolist() == (~found.allowed).tolist()


@pytest.mark.parametrize("axes", [TWO, THREE, "x:8", "x:2,y:2,z:2,w:2"])
def test_who_stays_pays_nothing_and_kinds_add_up(axes: str) -> None:
    own = all_layouts((SIZE, SIZE), machine(axes), partial=True)
    found = moves(own, own, machine(axes))
    assert found.sent.shape == (len(COLLECTIVE_KINDS), len(own), len(own))
    assert (np.diagonal(found.seconds) == 0).all()
    assert (np.diagonal(found.fixed) == 0).all()
    free = found.sent.sum(axis=0) == 0
    assert (found.seconds[free & found.allowed] == 0).all()
    assert (found.seconds[~free] > 0).all()
    # Slices of what is whole are free.
    (whole,) = np.flatnonzero((own == WHOLE).all(axis=1))
    assert free[whole][found.allowed[whole]].all()


@pytest.mark.parametrize("axes", [TWO, THREE])
def test_layouts_are_all_that_divide_and_each_once(axes: str) -> None:
    plan = machine(axes)
    for sizes in [(), (1,), (8,), (4, 2), (6, 4, 16), (0, 8)]:
        own = [tuple(row) for row in all_layouts(sizes, plan).tolist()]
        wanted = [
            row
            for row in itertools.product(range(-1, len(sizes)), repeat=len(plan.sizes))
            if all(
                size > 0 and size % math.prod(n for at, n in zip(row, plan.sizes, strict=True) if at == dim) == 0
                for dim, size in enumerate(sizes)
                if dim in row
            )
        ]
        assert collections.Counter(own) == collections.Counter(wanted)
        assert own[0] == (WHOLE,) * len(plan.sizes)


def test_splits_pieces_and_specs() -> None:
    plan = machine(THREE)
    assert [dim_shard_count((1, 0, 1), dim, plan) for dim in range(3)] == [2, 4, 1]
    assert shard_counts(np.array([[WHOLE, PARTIAL, 0], [1, 0, 1], [WHOLE] * 3]), plan).tolist() == [2, 8, 1]
    assert spec_of((1, 0, 1), 3, plan) == P("b", ("a", "c"))
    assert spec_of((WHOLE, PARTIAL, 2), 3, plan) == P(None, None, "c")
    assert spec_of((WHOLE,) * 3, 2, plan) == P()


def test_axes_of_one_device_are_left_out() -> None:
    plan = machine("data:1,model:8,other:1")
    assert (plan.axes, plan.sizes) == (("model",), (8,))
    assert spec_of((0,), 2, plan) == P("model")
