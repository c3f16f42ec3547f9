"""The operations that a compiler fuses into one kernel, and so the arrays that it writes to memory.

There are three kinds of kernels:

- one operation that reads elements in another order, such as a matmul or a sort;
- a reduction, with the elementwise operations that compute what it reduces;
- a chain of elementwise operations. It ends where an operation of another kind uses its result, or the function
  returns it.

Results inside of a kernel are never written. A kernel that needs one computes it again, even if another kernel does
the same. This is a model: XLA decides by heuristics, which differ between backends.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import final

import attrs

from shardrules.programs.compilers.compiler import Compiler
from shardrules.programs.compilers.kernels import (
    IN_PLACE,
    PARTIAL_READS,
    ends_chain,
    find_kernels,
    is_view,
    reduced_rows,
    takes_whole,
    view_pairs,
    with_views,
)
from shardrules.programs.compilers.norms import NormGradients, with_copied, with_costly
from shardrules.programs.traced.program import Operation, TracedProgram
from shardrules.programs.traced.unions import Unions


@final
@attrs.frozen(eq=False)
class FusedProgram:
    """The kernels that a compiler makes of a program."""

    program: TracedProgram
    written: frozenset[int]
    """The arrays that are in memory: written by a kernel, or arguments."""
    sources: Mapping[int, int]
    """For each view the array in whose memory it is."""
    read_counts: Mapping[tuple[int, int], int]
    """The number of kernels that read an operand, at `(op_index, operand_index)`. If several operations of a kernel
    read an array, only the first of them counts it."""
    kernels: frozenset[int]
    """The operations at which a kernel ends."""
    gradients: NormGradients

    @classmethod
    def of(cls, program: TracedProgram, compiler: Compiler, device_count: int = 1) -> "FusedProgram":
        """Returns what a compiler makes of a program that runs on some devices."""
        sources = _sources(program)
        takers = _takers(program, sources)
        written = with_copied(program, _written(program, sources, takers), compiler.most_copies)
        written = with_costly(program, written, compiler.keeps_costly)
        gradients = NormGradients.of(program, written, device_count)
        written |= gradients.siblings.keys()
        kernels_of = find_kernels(program, {*written})
        joined = Unions[int]()  # kernels that are one, by the operations at which they end
        _join_optimizer(program, kernels_of, sources, joined)
        _join_rows(program, kernels_of, sources, takers, written, joined)
        read_counts: dict[tuple[int, int], int] = {}
        counted: set[tuple[int, int]] = set()
        for op_index, operation in enumerate(program.operations):
            if is_view(operation):
                continue
            ends = dict.fromkeys(joined.root(kernel) for kernel in sorted(kernels_of[op_index]))
            for operand_index, operand in enumerate(operation.operands):
                source = None if operand is None else sources.get(operand, operand)
                if source is None or source not in written:
                    continue
                keys = [(kernel, source) for kernel in ends if (kernel, source) not in counted]
                counted.update(keys)
                read_counts[op_index, operand_index] = len(keys)
        ending = frozenset(
            joined.root(op_index) for op_index, kernels in enumerate(kernels_of) if kernels == {op_index}
        )
        return cls(program, written, sources, read_counts, ending, gradients)

    def writes(self, op_index: int, result: int) -> bool:
        """An operation writes a result to memory that it does not share with an operand."""
        return result in self.written and not is_view(self.program.operations[op_index])

    def is_elementwise(self, op_index: int) -> bool:
        """A chain of elementwise operations ends at an operation."""
        operation = self.program.operations[op_index]
        return op_index in self.kernels and operation.role == "compute" and not ends_chain(operation)

    def taken(self, op_index: int) -> Iterator[tuple[int, int]]:
        """Yields the arrays in memory that the kernel of a chain takes: first as it takes them, perhaps as a view."""
        chain, visited = [op_index], set[int]()
        while chain:
            for operand in self.program.operations[chain.pop()].operands:
                if operand is None or operand in visited:
                    continue
                visited.add(operand)
                array = self.sources.get(operand, operand)
                producer = self.program.producers.get(array)
                if array in self.written or producer is None:
                    yield operand, array
                else:
                    chain.append(producer)

    def read_bytes(self, op_index: int, operand_index: int) -> int:
        operation, arrays = self.program.operations[op_index], self.program.arrays
        operand = operation.operands[operand_index]
        count = self.read_counts.get((op_index, operand_index), 0)
        if not count or operand is None:
            return 0
        nbytes = arrays[operand].device_bytes
        if operand_index == 0 and (operation.name in PARTIAL_READS or operation.role == "enter"):
            nbytes = min(nbytes, sum(arrays[result].nbytes for result in operation.results))
        elif operand_index == 0 and operation.name == "dynamic_update_slice":
            return 0  # what it writes over is not read
        elif operand_index == 0 and operation.name in IN_PLACE:
            nbytes = min(nbytes, arrays[_update(operation)].nbytes)
        return count * nbytes

    def written_bytes(self, op_index: int, result_index: int) -> int:
        operation, arrays = self.program.operations[op_index], self.program.arrays
        result = operation.results[result_index]
        if operation.role == "leave":  # piece by piece, one in each round
            (piece,) = operation.operands
            return 0 if piece is None else arrays[piece].device_bytes
        if operation.role == "join" or not self.writes(op_index, result):
            return 0
        if operation.name in IN_PLACE:
            return min(arrays[result].nbytes, arrays[_update(operation)].nbytes)
        return arrays[result].device_bytes

    def touches_part(self, op_index: int, operand_index: int) -> bool:
        """An operation reads, or overwrites, only some elements of an operand."""
        name = self.program.operations[op_index].name
        return operand_index == 0 and (name in IN_PLACE or name in PARTIAL_READS)


def _update(operation: Operation) -> int:
    """The operand that is written into the first one: the second of `dynamic_update_slice`, the last of a scatter."""
    update = operation.operands[1 if operation.name == "dynamic_update_slice" else 2]
    first = operation.operands[0]
    chosen = update if update is not None else first
    assert chosen is not None, "one of the two is an array"
    return chosen


def _written(program: TracedProgram, sources: Mapping[int, int], takers: Mapping[int, list[int]]) -> frozenset[int]:
    """The arrays in memory. The walk goes backwards, because an array has to be in memory if a view of it has to be."""
    written: set[int] = {*program.arguments, *program.constants, *program.kept}
    for operation in reversed(program.operations):
        if is_view(operation):
            is_returned = operation.role == "return"
            written.update(operand for operand, result in view_pairs(operation) if is_returned or result in written)
        elif takes_whole(operation):
            # What is written into the first operand may be computed on the way.
            whole_operands = operation.operands[:1] if operation.name in IN_PLACE else operation.operands
            written.update(operand for operand in whole_operands if operand is not None)
        if ends_chain(operation):
            written.update(operation.results)
    written.update(_normalized(program, sources, takers))
    # Arrays turn out to be in memory later in that walk than their views, as in loops.
    return with_views(program, written)


def _normalized(program: TracedProgram, sources: Mapping[int, int], takers: Mapping[int, list[int]]) -> Iterator[int]:
    """Yields rows from which a reduction of them was taken, as in a softmax, and of which little is used.

    That is an element of each, or the sum of all: two sums in a row are one, which is none of rows. A kernel that keeps
    rows on chip ends there, so they are written.
    """
    spread = set[int]()  # reductions of rows, spread over the rows again
    for operation in program.operations:
        operand_sources = [sources.get(operand, operand) for operand in operation.operands if operand is not None]
        if reduced_rows(operation):
            (result,) = operation.results
            users = [program.operations[taker].name for taker in takers.get(result, ())]
            if operation.name == "reduce_sum" and users == ["reduce_sum"]:
                yield from spread.intersection(operand_sources)
            spread.add(result)
            continue
        if is_view(operation) or ends_chain(operation) or takes_whole(operation):
            continue
        if not spread.isdisjoint(operand_sources):
            result = operation.results[0]
            spread.add(result)
            names = [program.operations[taker].name for taker in takers.get(result, ())]
            if names and all(name in PARTIAL_READS for name in names):
                yield result


def _sources(program: TracedProgram) -> dict[int, int]:
    sources: dict[int, int] = {}
    for operation in program.operations:
        if is_view(operation):
            for operand, result in view_pairs(operation):
                sources[result] = sources.get(operand, operand)
    return sources


def _takers(program: TracedProgram, sources: Mapping[int, int]) -> dict[int, list[int]]:
    """Returns for each array the operations that take it, or a view of it."""
    takers: dict[int, list[int]] = {}
    for op_index, operation in enumerate(program.operations):
        if is_view(operation):
            continue
        for operand in operation.operands:
            if operand is not None:
                takers.setdefault(sources.get(operand, operand), []).append(op_index)
    return takers


def _join_optimizer(
    program: TracedProgram, kernels_of: list[frozenset[int]], sources: Mapping[int, int], joined: Unions[int]
) -> None:
    """Joins kernels that end at results of the function and compute them from each other, as an optimizer does."""
    returned: dict[int, int] = {}
    for operation in program.operations:
        if operation.role == "return" and operation.operands[0] is not None:
            array = sources.get(operation.operands[0], operation.operands[0])
            producer = program.producers.get(array)
            if producer is not None and not ends_chain(program.operations[producer]):
                returned[producer] = array
    shapes = {kernel: program.arrays[array].shape for kernel, array in returned.items()}
    for operation, kernels in zip(program.operations, kernels_of, strict=True):
        ends = [kernel for kernel in sorted(kernels) if kernel in returned]
        # Scalars, such as the rate of learning, are computed along with everything that takes them.
        if not any(program.arrays[result].shape for result in operation.results):
            continue
        for operand in operation.operands:
            producer = None if operand is None else program.producers.get(sources.get(operand, operand))
            if producer in returned:
                ends.append(producer)
        for first, second in itertools.pairwise(ends):
            if shapes[first] == shapes[second]:
                joined.join(first, second)


def _join_rows(
    program: TracedProgram,
    kernels_of: list[frozenset[int]],
    sources: Mapping[int, int],
    takers: Mapping[int, list[int]],
    written: frozenset[int],
    joined: Unions[int],
) -> None:
    """Joins reductions of rows with the kernel that takes them and the same rows again, as in a softmax or a norm."""
    read_by: dict[int, set[int]] = {}
    for operation, kernels in zip(program.operations, kernels_of, strict=True):
        for operand in operation.operands:
            source = None if operand is None else sources.get(operand, operand)
            if source is not None and source in written:
                for kernel in kernels:
                    read_by.setdefault(kernel, set()).add(source)
    for op_index, operation in enumerate(program.operations):
        operand = operation.operands[0] if operation.operands else None
        shape = reduced_rows(operation)
        if operand is None or not shape:
            continue
        rows = {source for source in read_by.get(op_index, ()) if program.arrays[source].shape == shape}
        for taker in takers.get(operation.results[0], ()):
            nearest = min(kernels_of[taker], default=None)
            is_near = nearest is not None and program.operations[nearest].region == operation.region
            if (
                nearest is not None
                and is_near
                and rows & read_by.get(nearest, set())
                and not takes_whole(program.operations[nearest])
            ):
                joined.join(op_index, nearest)
                break
