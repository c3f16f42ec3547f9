"""Reads, writes and copies of lookups and updates: by hand, and by XLA for GPUs."""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.run.call import read_call
from shardrules.programs.autoplan.solve.search import Task
from shardrules.programs.compiled.flops import find_matmuls
from shardrules.programs.compiled.kernels import find_kernels
from shardrules.programs.compiled.program import read_program
from shardrules.programs.traced.program import read_jaxpr
from tests.programs.examples import mesh_on

LAYERS, BATCH, LENGTH, HEADS, WIDTH = 4, 32, 256, 4, 128
ROWS, COLUMNS, LOOKUPS = 20000, 256, 2048


def half(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


CACHE, NEW, QUERY = half(BATCH, HEADS, LENGTH, WIDTH), half(BATCH, HEADS, 1, WIDTH), half(BATCH, HEADS, WIDTH)
CACHES = half(LAYERS, *CACHE.shape)
TABLE = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
INDICES = jax.ShapeDtypeStruct((LOOKUPS,), jnp.int32)
TARGETS = jax.ShapeDtypeStruct((LOOKUPS, COLUMNS), jnp.float32)
POSITION = jax.ShapeDtypeStruct((), jnp.int32)


@final
@attrs.frozen
class Case:
    """A function, and what it moves, in bytes."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    moved: int
    donated: bool = True
    """The first argument comes back as a result, and is donated."""


def nbytes(*arrays: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def write(cache: Any, new: Any, position: Any) -> Any:
    return lax.dynamic_update_slice(cache, new, (0, 0, position, 0))


def attend(cache: Any, query: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("bhd,bhsd->bhs", query, cache), -1)
    return jnp.einsum("bhs,bhsd->bhd", scores, cache)


def decode(cache: Any, new: Any, position: Any, query: Any) -> Any:
    cache = write(cache, new, position)
    return cache, attend(cache, query)


def all_go_round(caches: Any, query: Any, position: Any) -> Any:
    def layer(carry: Any, index: Any) -> Any:
        query, caches = carry
        caches = lax.dynamic_update_slice(caches, 2 * query[None, :, :, None], (index, 0, 0, position, 0))
        return (attend(lax.dynamic_index_in_dim(caches, index, keepdims=False), query), caches), None

    (query, caches), _ = lax.scan(layer, (query, caches), jnp.arange(LAYERS))
    return caches, query


def train_embedding(table: Any, indices: Any, targets: Any) -> Any:
    return table - 0.1 * jax.grad(lambda table: ((table[indices] - targets) ** 2).sum())(table)


def permute(x: Any, order: Any, w: Any) -> Any:
    """Tokens to experts and back."""
    y = jax.nn.relu(x[order] @ w)
    return jnp.zeros_like(y).at[order].set(y)


def add_rows(table: Any, indices: Any, targets: Any) -> Any:
    return table.at[indices].add(targets)


def bags(table: Any, indices: Any) -> Any:
    return table[indices].sum(1)


TOKENS, MATRIX, ORDER = half(4096, 512), half(512, 512), jax.ShapeDtypeStruct((4096,), jnp.int32)
BAGS = jax.ShapeDtypeStruct((LOOKUPS // 8, 8), jnp.int32)
ATTENTION = 3 * BATCH * HEADS * LENGTH * 2  # scores and probabilities, which count little

CASES = (
    Case("a row of a cache", write, (CACHE, NEW, POSITION), 2 * nbytes(NEW)),
    Case("a row of a cache that is kept", write, (CACHE, NEW, POSITION), nbytes(CACHE, CACHE), donated=False),
    Case("decode", decode, (CACHE, NEW, POSITION, QUERY), nbytes(CACHE, CACHE)),
    Case("decode with a cache that is kept", decode, (CACHE, NEW, POSITION, QUERY), 4 * nbytes(CACHE), donated=False),
    Case("caches that go round", all_go_round, (CACHES, QUERY, POSITION), 2 * nbytes(CACHES)),
    Case("kept caches that go round", all_go_round, (CACHES, QUERY, POSITION), 4 * nbytes(CACHES), donated=False),
    Case("rows of a table", lambda table, i: table[i], (TABLE, INDICES), 2 * nbytes(TARGETS), donated=False),
    # Zeros for the gradient, and the update of the table reads both and writes it. Rows are read, and added to others.
    Case("a step of a table", train_embedding, (TABLE, INDICES, TARGETS), 4 * nbytes(TABLE) + 4 * nbytes(TARGETS)),
    Case("rows added", add_rows, (TABLE, INDICES, TARGETS), 3 * nbytes(TARGETS)),
    Case("rows added to a kept table", add_rows, (TABLE, INDICES, TARGETS), 2 * nbytes(TABLE, TARGETS), donated=False),
    Case("bags of rows", bags, (TABLE, BAGS), nbytes(TARGETS) * 9 // 8, donated=False),
    Case("rows in another order", permute, (TOKENS, ORDER, MATRIX), 8 * nbytes(TOKENS), donated=False),
)
"""Of all of these the large arrays are counted by hand; small ones add a few per cent."""

named = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def modelled(case: Case) -> float:
    """The bytes that the model has for all operations on one device."""
    call = read_call(case.fn, case.args, sr.mesh_shape("data:2"), "fn")
    machine = Machine.of(sr.mesh_shape("data:2"), sr.Hardware.named("cuda:h100"))
    feedback = call.feedback if case.donated else {}
    problem = Task.of(read_jaxpr(call.jaxpr), machine, call.paths, feedback, {}).problem
    fusion, total = problem.fusion, 0.0
    for op_index, operation in enumerate(problem.program.operations):
        read = sum(fusion.read_bytes(op_index, index) for index in range(len(operation.operands)))
        written = sum(fusion.written_bytes(op_index, index) for index in range(len(operation.results)))
        total += operation.run_count * (read + written + 2 * fusion.copied_bytes(op_index))
    return total


@pytest.mark.sample(6)
@named
def test_updates_and_lookups_move_what_they_touch(case: Case) -> None:
    assert modelled(case) == pytest.approx(case.moved, rel=0.1)


@pytest.mark.slow
@named
def test_compiled_programs_move_as_much(case: Case) -> None:
    mesh = mesh_on("cuda:h100:1", "data:1")
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())) for x in case.args]
    jitted = jax.jit(case.fn, donate_argnums=(0,) if case.donated else ())
    program = read_program(jitted.lower(*structs).compile().as_text() or "")
    kernels = find_kernels(program, find_matmuls(program))
    assert modelled(case) == pytest.approx(sum(kernel.total_bytes * kernel.pass_count for kernel in kernels), rel=0.1)


def test_a_row_of_a_large_cache_takes_a_launch() -> None:
    cache, row = half(8, 65536, 8, 128), half(8, 1, 8, 128)
    plan = sr.autoplan(
        write, cache, row, POSITION, mesh=sr.mesh_shape("data:8"), hardware=sr.Hardware.named("cuda:h100")
    )
    assert plan.cost < 4e-6


# Which updates overwrite.


def copies(fn: Callable[..., Any], *args: Any) -> list[tuple[str, float]]:
    """The operations that copy their first operand, and how often, where the first argument is donated."""
    call = read_call(fn, args, sr.mesh_shape("data:2"), "fn")
    machine = Machine.of(sr.mesh_shape("data:2"), sr.Hardware.named("cuda:h100"))
    problem = Task.of(read_jaxpr(call.jaxpr), machine, call.paths, call.feedback, {}).problem
    return [(problem.program.operations[op_index].name, count) for op_index, count in problem.fusion.copied.items()]


def copied(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [name for name, _ in copies(fn, *args)]


def test_an_array_that_is_read_before_its_update_is_overwritten() -> None:
    assert copied(lambda table, rows: (table.at[3].add(rows), table.sum()), TABLE, jnp.ones(COLUMNS)) == []


def test_an_array_that_is_needed_after_its_update_is_copied() -> None:
    def compare(table: Any, rows: Any) -> Any:
        updated = table.at[3].add(rows)
        return updated, (table * updated).sum()

    assert copied(compare, TABLE, jnp.ones(COLUMNS)) == ["scatter-add"]
    assert copied(lambda table, rows: (table.at[3].add(rows), {"old": table}), TABLE, jnp.ones(COLUMNS)) == [
        "scatter-add"
    ]


def test_constants_and_arrays_from_outside_of_a_loop_are_copied() -> None:
    assert copied(lambda rows: (jnp.zeros((8, COLUMNS)) + 1).at[3].add(rows), jnp.ones(COLUMNS)) == []
    table = jax.random.normal(jax.random.key(0), (64, COLUMNS))
    assert copied(lambda rows: table.at[3].add(rows), jnp.ones(COLUMNS)) == ["scatter-add"]

    def loop(table: Any, rows: Any) -> Any:
        return table, lax.scan(lambda sum_, i: (sum_ + table.at[i].add(rows)[0], None), jnp.sin(rows), jnp.arange(4))[0]

    assert copied(loop, TABLE, jnp.ones(COLUMNS)) == ["scatter-add"]


def test_what_branches_pass_on_or_return_over_an_argument_is_copied() -> None:
    def branches(table: Any, *others: Callable[[Any], Any]) -> Any:
        return lax.switch(jnp.int32(table[0, 0]), others, table)

    def sort(table: Any) -> Any:
        return jnp.sort(table, 0)

    assert copies(lambda table: branches(table, sort, sort), TABLE) == [("cond", 1)]
    assert copies(lambda table: branches(table, sort, lambda table: table), TABLE) == [("cond", 2)]
    assert copies(lambda table: branches(table, sort, lambda table: table)[1:], TABLE) == [("cond", 1)]
    assert copies(lambda table: branches(table, sort, sort, sort)[1:], TABLE) == []
