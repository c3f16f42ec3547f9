"""The least memory of a function, for any layouts and any compiler.

Nothing here is a model of a compiler. Only arrays count that no program for these arguments can do without: its
arguments, which are there from the beginning to the end; results that no argument has the size of; and stacks and
results of a loop, which are there when it ends, together with the arguments that are read later. Everything counts at
its finest split over the whole mesh, or as pinned.
"""

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
from jax.sharding import PartitionSpec

from shardrules.core.source import equation_line, short_line
from shardrules.core.spec import array_bytes, shard_bytes
from shardrules.core.tree import array_kind
from shardrules.mesh.divisors import prime_factors
from shardrules.programs.compilers.compiler import compiler_of
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.traced.factors.table import is_elementwise
from shardrules.programs.traced.program import Operation, TracedProgram

_CONVERSIONS = "convert_element_type broadcast_in_dim iota copy copy_p reshape squeeze transpose name device_put"
_KEPT_OTHERWISE = frozenset(_CONVERSIONS.split())
"""Primitives whose results a compiler may keep in another form: narrower, not repeated, or in the host's memory."""


@final
@attrs.frozen
class BoundArray:
    """An array that has to be in memory."""

    name: str
    """Its path, or what loops do with it."""
    nbytes: int
    """On one device."""


@final
@attrs.frozen
class MemoryBound:
    """The memory that every program for a function has in use at one operation, at least."""

    nbytes: int
    operation: str
    """The moment, as the end of a sentence: `"at the end of the loop at model.py:12"`."""
    arrays: tuple[BoundArray, ...]
    """The arrays that it counts, the largest first."""


AT_REST = "for its arguments and results"
"""The moment at which recomputing saves nothing."""


def memory_bound(
    program: TracedProgram,
    sizes: Mapping[str, int],
    hardware: Hardware,
    paths: Sequence[str],
    pinned: Mapping[int, PartitionSpec],
) -> MemoryBound:
    """Returns the highest bound that holds for a function on a mesh with axes of these sizes, with these pins.

    `paths` are the names of its arguments, `pinned` maps their indices to specs.
    """
    narrows = compiler_of(hardware).narrows
    splits, arguments = _Splits.of(program, sizes, narrows), _arguments(program, sizes, paths, pinned)
    bounds = [rest_bound(program, sizes, paths, pinned)]
    for region in _loops(program):
        lasting = [arguments[array] for array in _read_after(program, region) if array in arguments]
        text = f"at the end of {_loop_text(program, region)}"
        bounds.append(_bound(text, [*lasting, *_leaving(program, region, splits)]))
    return max(bounds, key=lambda bound: bound.nbytes)


def rest_bound(
    program: TracedProgram, sizes: Mapping[str, int], paths: Sequence[str], pinned: Mapping[int, PartitionSpec]
) -> MemoryBound:
    """Returns the bound for arguments and results alone, which holds however the function computes in between."""
    arguments = _arguments(program, sizes, paths, pinned).values()
    return _bound(AT_REST, [*arguments, *_fresh_results(program, _Splits.of(program, sizes))])


def _arguments(
    program: TracedProgram, sizes: Mapping[str, int], paths: Sequence[str], pinned: Mapping[int, PartitionSpec]
) -> dict[int, BoundArray]:
    splits, arguments = _Splits.of(program, sizes), dict[int, BoundArray]()
    for index, array in enumerate(program.arguments):
        # Arguments that are unused or only passed on need not be given to the compiled program at all.
        if all(program.operations[user].role == "return" for user, _ in program.users.get(array, ())):
            continue
        nbytes, traced = splits.least_bytes(array), program.arrays[array]
        if index in pinned and not traced.on_host:
            nbytes = shard_bytes(traced.shape, traced.dtype, pinned[index], sizes)
        arguments[array] = BoundArray(paths[index], nbytes)
    return arguments


def split_bytes(tree: Any, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of all arrays of a tree on a device, each split as finely as axes of these sizes can."""
    ordered = _ordered(sizes)
    kinds = filter(None, map(array_kind, jax.tree.leaves(tree)))
    return sum(array_bytes(shape, dtype, packed=True) // _most_pieces(shape, ordered) for shape, dtype in kinds)


def _ordered(sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in sizes.values() if size > 1))


def _bound(operation: str, arrays: Sequence[BoundArray]) -> MemoryBound:
    ordered = sorted(arrays, key=lambda array: -array.nbytes)
    return MemoryBound(sum(array.nbytes for array in ordered), operation, tuple(ordered))


def prime_sizes(count: int) -> dict[str, int]:
    """Returns the axes of the mesh of so many devices that splits arrays into the most pieces: none has factors."""
    return {f"axis {index}": prime for index, prime in enumerate(prime_factors(count))}


@final
@attrs.frozen(eq=False)
class _Splits:
    """The pieces that a mesh may split arrays into, on any dims that its axes divide."""

    program: TracedProgram
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    """The numbers of pieces that some of the axes split an array into together."""
    narrows: bool
    """The compiler may keep float32 as bfloat16, if nothing takes more of it. The one for TPUs does."""

    @classmethod
    def of(cls, program: TracedProgram, sizes: Mapping[str, int], narrows: bool = False) -> "_Splits":
        ordered = _ordered(sizes)
        counts = {1: None}
        for size in ordered:
            counts |= {size * count: None for count in counts}
        return cls(program, ordered, tuple(sorted(counts)), narrows)

    def whole_bytes(self, array: int) -> int:
        traced = self.program.arrays[array]
        return 0 if traced.dtype is None or traced.on_host else array_bytes(traced.shape, traced.dtype, packed=True)

    def least_bytes(self, array: int) -> int:
        return self.whole_bytes(array) // _most_pieces(self.program.arrays[array].shape, self.sizes)

    def shares_memory(self, first: int, second: int) -> bool:
        """A piece of one array may be exactly as large as a piece of another."""
        nbytes, other_nbytes = self.whole_bytes(first), self.whole_bytes(second)
        return any(nbytes * count == other_nbytes * other for count in self.counts for other in self.counts)


@functools.cache
def _most_pieces(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Returns into how many pieces axes of these sizes can split an array at most."""
    if not sizes:
        return 1
    size, *others = sizes
    most = _most_pieces(shape, tuple(others))
    for dim, length in enumerate(shape):
        if length % size == 0:
            shard = (*shape[:dim], length // size, *shape[dim + 1 :])
            most = max(most, size * _most_pieces(shard, tuple(others)))
    return most


def _fresh_results(program: TracedProgram, splits: _Splits) -> Iterator[BoundArray]:
    """Yields the results that are in the memory of no argument, because no argument has a piece as large as theirs."""
    for index, result in enumerate(program.results):
        if result is None or program.operations[program.producers[result]].operands[0] not in program.producers:
            continue
        if not any(splits.shares_memory(result, array) for array in program.arguments):
            yield BoundArray(f"result {index}", splits.least_bytes(result))


def _loops(program: TracedProgram) -> Iterator[int]:
    """Yields the regions that are loops of enough rounds."""
    for region in dict.fromkeys(operation.region for operation in program.operations if operation.role == "leave"):
        parent, run_count, unroll = program.regions[region]
        # A compiler may write out loops of fewer rounds, and then nothing has to be stacked.
        if run_count >= 4 * program.regions[parent].run_count * unroll:
            yield region


def _leaving(program: TracedProgram, region: int, splits: _Splits) -> Iterator[BoundArray]:
    """Yields the arrays that a loop stacks: computed in each round, and read by other operations afterwards.

    Compilers stack equal values once, and autodiff keeps many of them: `silu(h) * sigmoid(h)` computes the sigmoid
    twice. So of the elementwise functions of one matmul only one counts, the largest.
    """
    ends = {
        operation.results[0]: operation.operands[1]
        for operation in program.operations
        if operation.joins_rounds and operation.region == region
    }
    stacks: dict[int, tuple[int, int]] = {}
    for operation in program.operations:
        if operation.role != "leave" or operation.region != region:
            continue
        (piece,), (result,) = operation.operands, operation.results
        if piece is None:
            continue
        # What goes round is what the round before has computed: of the two, compilers may stack one.
        computed = ends.get(piece, piece)
        users = [program.operations[user] for user, _ in program.users.get(result, ())]
        # A result of the function may be written over an argument from the start.
        if computed is None or computed in stacks or not users or any(user.role == "return" for user in users):
            continue
        producer = program.producers.get(computed)
        if producer is not None and _is_computed(program, program.operations[producer], region):
            stacks[computed] = piece, result
    sources, counted = _Sources(program, region), dict[Hashable, None]()
    for piece, result in sorted(stacks.values(), key=lambda stack: -splits.least_bytes(stack[1])):
        key = sources.of(piece)
        if key in counted:
            continue
        counted[key] = None
        array, nbytes = program.arrays[result], splits.least_bytes(result)
        if splits.narrows and array.dtype.itemsize > 2:
            nbytes //= 2
        yield BoundArray(f"{array.dtype}{list(array.shape)}, stacked", nbytes)


@final
@attrs.define(eq=False)
class _Sources:
    """The sources of arrays in a loop, which are elementwise functions of them: results of matmuls and the like, values
    that enter, values that go round."""

    program: TracedProgram
    loop: int
    sets: dict[int, frozenset[Hashable]] = attrs.field(factory=dict)

    def of(self, array: int) -> frozenset[Hashable]:
        """Returns the sources of an array. Operations alike on the same sources are one source."""
        pending = [array]
        while pending:  # without recursion: programs are long
            current = pending[-1]
            operands, operation = self.operands(current)
            missing = [operand for operand in operands if operand not in self.sets]
            if missing:
                pending += missing
                continue
            pending.pop()
            union = frozenset[Hashable]().union(*(self.sets[operand] for operand in operands))
            if operation is None:
                self.sets[current] = frozenset((current,))
            elif operation.role in ("enter", "fixed") or is_elementwise(operation.name):
                self.sets[current] = union
            else:
                is_view = operation.name in _KEPT_OTHERWISE
                self.sets[current] = union if is_view else frozenset(((operation.name, union),))
        return self.sets[array]

    def operands(self, array: int) -> tuple[list[int], Operation | None]:
        if array not in self.program.producers:
            return [], None
        operation = self.program.operations[self.program.producers[array]]
        is_round = operation.joins_rounds
        if operation.region == self.loop and (is_round or operation.role == "enter"):
            return [], None
        # Of a loop inside, what goes round is known by what it starts from.
        operands = operation.operands[:1] if is_round else operation.operands
        return [operand for operand in operands if operand is not None], operation


def _is_computed(program: TracedProgram, operation: Operation, loop: int) -> bool:
    """An operation computes an array in each round of a loop that has to be kept as it is."""
    region = operation.region
    while region > loop:
        region = program.regions[region].parent
    return region == loop and operation.role in ("compute", "exit", "leave") and operation.name not in _KEPT_OTHERWISE


def _read_after(program: TracedProgram, loop: int) -> dict[int, None]:
    """Returns the arrays that operations read which cannot run before a loop has ended."""
    equation_index = next(
        operation.equation_index
        for operation in program.operations
        if operation.role == "leave" and operation.region == loop
    )
    entering: dict[int, list[int]] = {}
    for operation in program.operations:
        parent, run_count, _ = program.regions[operation.region]
        is_loop = parent >= 0 and run_count > program.regions[parent].run_count
        if is_loop and operation.role in ("enter", "join") and operation.operands[0] is not None:
            entering.setdefault(operation.equation_index, []).append(operation.operands[0])
    ended: dict[int, None] = {}
    read: dict[int, None] = {}
    for operation in program.operations:
        operands = [operand for operand in operation.operands if operand is not None]
        # No round of another loop can run before everything that enters it is there.
        together = entering.get(operation.equation_index, []) if operation.role in ("enter", "join") else []
        is_end = operation.equation_index == equation_index and operation.role in ("leave", "exit")
        if is_end or any(array in ended for array in (*operands, *together)):
            ended.update(dict.fromkeys(operation.results))
            read.update(dict.fromkeys([] if is_end else (*operands, *together)))
    return read


def _loop_text(program: TracedProgram, loop: int) -> str:
    """Returns what a message calls a loop: by the line of the first equation in it that has one."""
    lines = (
        equation_line(operation.equation)
        for operation in program.operations
        if operation.equation is not None and operation.region == loop
    )
    line = next(filter(None, lines), "")
    return f"the loop at {short_line(line)}" if line else "a loop"
