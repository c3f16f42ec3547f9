"""Which operations a compiler fuses into one kernel, and so which arrays it writes to memory.

There are three kinds of kernels:

- one operation that reads elements in another order, such as a matmul or a sort;
- a reduction, with the elementwise operations that compute what it reduces;
- a chain of elementwise operations. It ends where an operation of another kind uses its result, or the function
  returns it.

Results inside of a kernel are never written. A kernel that needs one computes it again, even if another kernel does
the same. This is a model: XLA decides by heuristics, which differ between backends.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Self, final

import attrs

from shardrules.planning.traced.copies import copied_parts
from shardrules.planning.traced.program import Operation, TracedProgram, changes_memory

_WHOLE = """
scatter scatter-add scatter-mul scatter-min scatter-max sort top_k approx_top_k while fft dynamic_update_slice cumsum
cumprod cummax cummin cumlogsumexp reduce_window reduce_window_sum reduce_window_max reduce_window_min
select_and_scatter select_and_scatter_add triangular_solve cholesky qr lu eigh svd
"""
"""Primitives that are kernels of their own, although they are not matmuls. They read elements in another order than
they write them, so their operands have to be in memory."""

_ENDS = "transpose random_bits threefry2x32 rng_bit_generator random_split random_fold_in argmax argmin"
"""Primitives at which a chain ends, as it does at all reductions: their operands may be computed in the same kernel,
and their results are written."""

_VIEWS = "reshape squeeze copy copy_p name stop_gradient pvary device_put optimization_barrier reshard relayout"
"""Primitives whose results are their operands, in the same memory."""

_PARTIAL_READS = "gather dynamic_slice slice split"
"""Primitives that read only as many elements of their first operand as they return."""

_IN_PLACE = "scatter scatter-add scatter-mul scatter-min scatter-max dynamic_update_slice"
"""Primitives that write their result over their first operand, and only the elements that change."""

_LONGEST_ROW = 16384
"""How long the rows may be that one kernel reduces and then computes from, in elements. XLA for GPUs keeps rows of
attention, of norms and of small vocabularies on chip, and reads longer ones again for each reduction: of losses that
were compiled for H100s with 16,384 scores or less all were kept, with 20,000 none. With half of it, peaks of those with
12,000 scores are up to a third too low; with twice as much, those of 20,000 up to a half too high."""

_OFTEN = 4
"""How many kernels have to take a value for which one of them reduces several dims, so that it is written. With one
more, most of what XLA for GPUs keeps of a U-Net is missing; with one less, it is too much."""

_COSTLY = "exp exp2 log log1p expm1 tanh logistic erf erf_inv erfc pow sin cos tan atan2"
_EXPENSIVE = frozenset(_COSTLY.split())
"""Elementwise primitives that compilers do not compute twice."""


WHOLE, ENDS, VIEWS, PARTIAL_READS, IN_PLACE = (
    frozenset(names.split()) for names in (_WHOLE, _ENDS, _VIEWS, _PARTIAL_READS, _IN_PLACE)
)


@final
@attrs.frozen(eq=False)
class FusedProgram:
    """What a compiler makes of a program."""

    program: TracedProgram
    written: frozenset[int]
    """The arrays that are in memory: written by a kernel, or arguments."""
    sources: Mapping[int, int]
    """For each view the array in whose memory it is."""
    read_counts: Mapping[tuple[int, int], int]
    """How many kernels read an operand, at `(op_index, operand_index)`. If several operations of a kernel read an
    array, only the first of them counts it."""
    kernels: frozenset[int]
    """The operations at which a kernel ends."""
    widened: Mapping[int, int]
    """For transposed arrays that are only used after a conversion to a wider dtype: how many times wider that is. They
    are written in the wider dtype."""
    copied: Mapping[int, float]
    """For each operation that copies its first operand instead of overwriting it: how often it does in one run."""
    shifted: frozenset[int]
    """Rows less their maximum that are written because several kernels take them. Where rows are split, the maximum
    comes from other devices, and each kernel computes them again."""

    @classmethod
    def of(cls, program: TracedProgram, feedback: Mapping[int, int] | None = None) -> "FusedProgram":
        """Returns what a compiler makes of a program. The arguments that results replace, in `feedback`, are donated;
        without it, all are."""
        written = _with_normalised(program, _written(program))
        shifted = frozenset(array for array in _shifted_rows(program) if array in written)
        sources = _sources(program)
        kernels_of = _kernels_of(program, written)
        joined = _Joined()
        _join_optimizer(program, kernels_of, sources, joined)
        rows = frozenset(array for array in written - shifted if not _is_updated(program, array))
        _join_rows(program, kernels_of, sources, rows, joined)
        _join_dots(program, kernels_of, sources, joined)
        read_counts: dict[tuple[int, int], int] = {}
        counted: set[tuple[int, int]] = set()
        for op_index, operation in enumerate(program.operations):
            if _is_view(operation):
                continue
            ends = dict.fromkeys(joined.leader(kernel) for kernel in sorted(kernels_of[op_index]))
            for operand_index, operand in enumerate(operation.operands):
                source = None if operand is None else sources.get(operand, operand)
                if source is None or source not in written:
                    continue
                keys = [(kernel, source) for kernel in ends if (kernel, source) not in counted]
                counted.update(keys)
                read_counts[op_index, operand_index] = len(keys)
        ending = frozenset(
            joined.leader(op_index) for op_index, kernels in enumerate(kernels_of) if kernels == {op_index}
        )
        copied = copied_parts(program, sources, feedback, IN_PLACE)
        return cls(program, written, sources, read_counts, ending, _widened(program), copied, shifted)

    @property
    def with_split_rows(self) -> Self:
        """The same where rows are split over devices."""
        return attrs.evolve(self, written=self.written - self.shifted, shifted=frozenset())

    def writes(self, op_index: int, result: int) -> bool:
        """Whether an operation writes a result to memory that it does not share with an operand."""
        return result in self.written and not _is_view(self.program.operations[op_index])

    def is_elementwise(self, op_index: int) -> bool:
        """Whether a chain of elementwise operations ends at an operation."""
        operation = self.program.operations[op_index]
        return op_index in self.kernels and operation.role == "compute" and not _ends_chain(operation)

    def taken(self, op_index: int) -> Iterator[tuple[int, int, bool]]:
        """Yields the arrays in memory that the kernel of a chain takes: first as it takes them, perhaps as a view.

        The last is whether rows of zeros are appended on the way, as in the gradient of a slice.
        """
        chain, visited = [(op_index, False)], set[int]()
        while chain:
            index, is_padded = chain.pop()
            operation = self.program.operations[index]
            is_padded |= operation.name == "pad" and _appends(operation)
            for operand in operation.operands:
                if operand is None or operand in visited:
                    continue
                visited.add(operand)
                array = self.sources.get(operand, operand)
                producer = self.program.producers.get(array)
                if array in self.written or producer is None:
                    yield operand, array, is_padded
                else:
                    chain.append((producer, is_padded))

    def keeps_rows(self, op_index: int, array: int) -> bool:
        """Whether the kernel of a chain reduces the rows of an array that it takes, to compute from both at once.

        Where elements of the rows are looked up or were updated, the reduction is a kernel of its own.
        """
        program, shape = self.program, self.program.arrays[array].shape
        reductions = [
            producer
            for _, reduced, _ in self.taken(op_index)
            if (producer := program.producers.get(reduced)) is not None
            and _reduced_rows(program.operations[producer]) == shape
            and any(source == array for _, source, _ in self.taken(producer))
        ]
        return bool(reductions) and not _is_updated(program, array) and not _is_looked_up(program, array)

    def read_bytes(self, op_index: int, operand_index: int) -> int:
        """Returns the bytes of an operand that all kernels together read at an operation, in one run."""
        operation, arrays = self.program.operations[op_index], self.program.arrays
        operand = operation.operands[operand_index]
        count = self.read_counts.get((op_index, operand_index), 0)
        if not count or operand is None:
            return 0
        nbytes = self.nbytes(operand)
        if operand_index == 0 and (operation.name in PARTIAL_READS or operation.role == "enter"):
            nbytes = min(nbytes, sum(arrays[result].nbytes for result in operation.results))
        elif operand_index == 0 and operation.name == "dynamic_update_slice":
            return 0  # what it writes over is not read
        elif operand_index == 0 and operation.name in IN_PLACE:
            nbytes = min(nbytes, arrays[_update(operation)].nbytes)
        return count * nbytes

    def written_bytes(self, op_index: int, result_index: int) -> int:
        """Returns the bytes of a result that an operation writes, in one run."""
        operation, arrays = self.program.operations[op_index], self.program.arrays
        result = operation.results[result_index]
        if operation.role == "leave":  # piece by piece, one in each round
            (piece,) = operation.operands
            return 0 if piece is None else arrays[piece].device_bytes
        if operation.role == "join" or not self.writes(op_index, result):
            return 0
        if operation.name in IN_PLACE:
            return min(arrays[result].nbytes, arrays[_update(operation)].nbytes)
        return self.nbytes(result)

    def copied_bytes(self, op_index: int) -> float:
        """Returns the bytes of its first operand that an operation copies, in one run."""
        operand = self.program.operations[op_index].operands[0] if op_index in self.copied else None
        return 0.0 if operand is None else self.copied[op_index] * self.nbytes(operand)

    def touches_part(self, op_index: int, operand_index: int) -> bool:
        """Whether an operation reads, or overwrites, only some elements of an operand."""
        name = self.program.operations[op_index].name
        return operand_index == 0 and (name in IN_PLACE or name in PARTIAL_READS)

    def nbytes(self, array: int) -> int:
        """Returns the bytes of an array as it is written."""
        return self.program.arrays[array].device_bytes * self.widened.get(array, 1)


def _appends(operation: Operation) -> bool:
    """Whether a pad only adds elements at the end of dims."""
    return all(low == between == 0 for low, _, between in operation.equation.params["padding_config"])


def _update(operation: Operation) -> int:
    """The operand that is written into the first one: the second of `dynamic_update_slice`, the last of a scatter."""
    update = operation.operands[1 if operation.name == "dynamic_update_slice" else 2]
    first = operation.operands[0]
    chosen = update if update is not None else first
    assert chosen is not None, "one of the two is an array"
    return chosen


def _is_view(operation: Operation) -> bool:
    """Whether the results of an operation are its operands, in the same memory."""
    if operation.role in ("exit", "fixed", "return"):
        return True
    if operation.role == "enter":
        return operation.factors.operands[0] == operation.factors.results[0]
    if operation.name == "reshape" and operation.equation.params.get("dimensions") is not None:
        return False  # it transposes first
    if changes_memory(operation):
        return False
    return operation.role == "compute" and (operation.name in VIEWS or _is_free_transpose(operation))


def _is_free_transpose(operation: Operation) -> bool:
    """Whether a transpose only swaps two neighboring groups of dims, the last of all. That moves nothing: matmuls can
    read and write matrices with either dim first."""
    if operation.name != "transpose":
        return False
    permutation = operation.equation.params["permutation"]
    first = next((dim for dim, source in enumerate(permutation) if dim != source), len(permutation))
    rest = permutation[first:]
    return all((source - rest[0]) % len(rest) == dim for dim, source in enumerate(rest))


def _view_pairs(operation: Operation) -> Iterator[tuple[int, int]]:
    """Yields the operands of a view with the results that they become."""
    for operand, result in zip(operation.operands, operation.results, strict=False):
        if operand is not None:
            yield operand, result


def _updated_on_the_way(program: TracedProgram, array: int) -> bool:
    """Whether an array is a piece that a loop reads, and only an update takes it: then it is not copied before."""
    producer, users = program.producers.get(array), program.users.get(array, ())
    if producer is None or len(users) != 1 or users[0][1] != 0:
        return False
    operation = program.operations[producer]
    return operation.role == "enter" and not _is_view(operation) and program.operations[users[0][0]].name in IN_PLACE


def _takes_whole(operation: Operation) -> bool:
    """Whether the operands of an operation have to be in memory before it runs."""
    if operation.role in ("join", "opaque"):
        return True
    is_whole = operation.name in WHOLE or changes_memory(operation)
    return operation.role == "compute" and (is_matmul(operation) or is_whole)


def is_matmul(operation: Operation) -> bool:
    """Whether an operation is a kernel for matmuls or convolutions. Of a dot with a vector, or of one that adds nothing
    up, compilers make elementwise operations and a reduction."""
    if operation.name != "dot_general":
        return bool(operation.flops)
    summed, batch = operation.equation.params["dimension_numbers"]
    shapes = [var.aval.shape for var in operation.equation.invars]
    others = [
        [size for dim, size in enumerate(shape) if dim not in (*summed[side], *batch[side]) and size > 1]
        for side, shape in enumerate(shapes)
    ]
    return all(others) and any(shapes[0][dim] > 1 for dim in summed[0])


def reduced_runs(operation: Operation) -> int:
    """How many runs of neighboring dims an operation reduces. Dims of one element do not count: to reduce only these,
    as gradients of a mean that keeps its dims do, computes nothing.

    ```python
    from shardrules.planning.traced.fusion import reduced_runs
    from shardrules.planning.traced.program import read_jaxpr

    program = read_jaxpr(jax.make_jaxpr(lambda x: jnp.sum(x, (1, 2, 4)))(jnp.ones((2, 3, 3, 2, 3))))
    assert reduced_runs(program.operations[0]) == 2
    ```
    """
    axes = operation.equation.params.get("axes", ())
    if not operation.name.startswith("reduce_") or not axes:
        return 1
    kept = [dim in axes for dim, size in enumerate(operation.equation.invars[0].aval.shape) if size != 1]
    return sum(is_reduced for is_reduced, _ in itertools.groupby(kept))


def _reduced_rows(operation: Operation) -> tuple[int, ...]:
    """The shape of what an operation reduces along its last dim; empty unless such rows are short enough for a chip."""
    if not operation.name.startswith("reduce_") or "axes" not in operation.equation.params:
        return ()
    shape = operation.equation.invars[0].aval.shape
    return shape if operation.equation.params["axes"] == (len(shape) - 1,) and shape[-1] <= _LONGEST_ROW else ()


def _ends_chain(operation: Operation) -> bool:
    """Whether the results of an operation are written, whatever uses them."""
    name = operation.name
    adds_up = name == "dot_general" and bool(operation.factors.reduced)
    reduces = adds_up or (name.startswith("reduce_") and name != "reduce_precision" and reduced_runs(operation) > 0)
    return _takes_whole(operation) or operation.role == "leave" or name in ENDS or reduces


def _widened(program: TracedProgram) -> dict[int, int]:
    """For each transposed array that is only used after a conversion to a wider dtype, how many times wider that is."""
    widened: dict[int, int] = {}
    for operation in program.operations:
        if operation.name != "transpose" or _is_view(operation):
            continue
        users = [program.operations[op_index] for op_index, _ in program.users.get(operation.results[0], ())]
        if users and all(user.name == "convert_element_type" for user in users):
            nbytes = program.arrays[operation.results[0]].nbytes
            widest = max(program.arrays[user.results[0]].nbytes for user in users)
            if widest > nbytes > 0:
                widened[operation.results[0]] = widest // nbytes
    return widened


def _written(program: TracedProgram) -> frozenset[int]:
    """The arrays in memory. The walk goes backwards, because an array has to be in memory if a view of it has to be."""
    written: set[int] = {*program.arguments, *program.constants, *program.kept}
    for operation in reversed(program.operations):
        if _is_view(operation):
            is_returned = operation.role == "return"
            written.update(operand for operand, result in _view_pairs(operation) if is_returned or result in written)
        elif _takes_whole(operation):
            # What is written into the first operand may be computed on the way.
            whole_operands = operation.operands[:1] if operation.name in IN_PLACE else operation.operands
            written.update(operand for operand in whole_operands if operand is not None)
            first = operation.operands[0]
            if operation.name in IN_PLACE and first is not None and _updated_on_the_way(program, first):
                written.discard(first)
        if _ends_chain(operation):
            written.update(operation.results)
    # Views of arrays that turned out to be in memory only later in that walk, as in loops, are in memory too.
    for operation in program.operations:
        if _is_view(operation):
            written.update(result for operand, result in _view_pairs(operation) if operand in written)
    return frozenset(written)


def _with_normalised(program: TracedProgram, written: frozenset[int]) -> frozenset[int]:
    """Adds what compilers keep for a norm over several dims, such as that of a group of channels, and its gradient.

    A reduction over several dims with the last among them is a kernel of its own, unlike that of a row. What it and
    several other kernels take, some of which compute much from it, is written once instead of being computed by each.
    Rows less their maximum, as in the logarithm of a softmax, are written by the kernel that finds the maximum as soon
    as two others take them.
    """
    kept = set(written)
    shifted = _shifted_rows(program)
    taken_by: dict[int, frozenset[int]] = {}
    is_expensive: dict[int, bool] = {}
    for op_index in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[op_index]
        if _is_view(operation):
            for operand, result in _view_pairs(operation):
                taken_by[operand] = taken_by.get(operand, frozenset()) | taken_by.get(result, frozenset())
                is_expensive[operand] = is_expensive.get(operand, False) or is_expensive.get(result, False)
            continue
        is_end = _ends_chain(operation) or any(result in kept for result in operation.results)
        kernels = frozenset((op_index,)) if is_end and operation.role != "join" else frozenset[int]()
        if not is_end:
            kernels = kernels.union(*(taken_by.get(result, frozenset()) for result in operation.results))
            user_count = sum(len(program.users.get(result, ())) for result in operation.results)
            is_taken_often = len(kernels) >= _OFTEN and user_count > 1 and _computes_as_much(program, operation)
            costs_much = any(is_expensive.get(result, False) for result in operation.results)
            is_normalised = (
                is_taken_often and costs_much and any(_reduces_several_dims(program, kernel) for kernel in kernels)
            )
            is_shifted = len(kernels) > 1 and any(result in shifted for result in operation.results)
            if is_normalised or is_shifted:
                kept.update(operation.results)
                kernels = frozenset((op_index,))
        is_costly = operation.name in _EXPENSIVE
        is_costly |= not is_end and any(is_expensive.get(result, False) for result in operation.results)
        for operand in operation.operands:
            if operand is not None:
                taken_by[operand] = taken_by.get(operand, frozenset()) | kernels
                is_expensive[operand] = is_expensive.get(operand, False) or is_costly
    for operation in program.operations:
        if _is_view(operation):
            kept.update(result for operand, result in _view_pairs(operation) if operand in kept)
    return frozenset(kept)


def _is_updated(program: TracedProgram, array: int) -> bool:
    """Whether an update in place returns an array: compilers fuse nothing with it that keeps rows on chip."""
    producer = program.producers.get(array)
    return producer is not None and program.operations[producer].name in IN_PLACE


def _is_looked_up(program: TracedProgram, array: int) -> bool:
    """Whether single elements of an array, or of what is computed from it element by element, are looked up."""
    shape, chain, visited = program.arrays[array].shape, [array], set[int]()
    while chain:
        link = chain.pop()
        for reader, operand_index in program.users.get(link, ()) if link not in visited else ():
            operation = program.operations[reader]
            if operation.name == "gather" and operand_index == 0:
                return True
            if not _ends_chain(operation):
                chain += [result for result in operation.results if program.arrays[result].shape == shape]
        visited.add(link)
    return False


def _shifted_rows(program: TracedProgram) -> dict[int, None]:
    """The rows less their maximum of which a loss looks up elements, where a kernel keeps such rows on chip."""
    shifted: dict[int, None] = {}
    for operation in program.operations:
        if operation.name != "sub" or None in operation.operands:
            continue
        rows, link = operation.operands
        assert rows is not None, "compared above"
        while link is not None and (index := program.producers.get(link)) is not None:
            producer = program.operations[index]
            if producer.name == "reduce_max":
                is_row = producer.operands[0] == rows and _reduced_rows(producer)
                if is_row and _is_looked_up(program, operation.results[0]):
                    shifted[operation.results[0]] = None
                break
            arrays = [operand for operand in producer.operands if operand is not None]
            # What is between broadcasts the maximum, or compares it with a number.
            link = arrays[0] if len(arrays) == 1 and producer.role == "compute" else None
    return shifted


def _computes_as_much(program: TracedProgram, operation: Operation) -> bool:
    """Whether an operation computes no more elements than it takes: repeating a small array is never written."""
    elements = [math.prod(program.arrays[operand].shape) for operand in operation.operands if operand is not None]
    results = [math.prod(program.arrays[result].shape) for result in operation.results]
    return operation.role == "compute" and max(elements, default=0) >= max(results, default=1)


def _reduces_several_dims(program: TracedProgram, op_index: int) -> bool:
    """Whether an operation reduces several dims of an array with the last among them."""
    operation = program.operations[op_index]
    operand = operation.operands[0] if operation.operands else None
    if operand is None or not operation.name.startswith("reduce_") or "axes" not in operation.equation.params:
        return False
    axes = operation.equation.params["axes"]
    return (
        len(axes) > 1
        and len(program.arrays[operand].shape) - 1 in axes
        and len(axes) < len(program.arrays[operand].shape)
    )


def _sources(program: TracedProgram) -> dict[int, int]:
    """For each view the array in whose memory it is."""
    sources: dict[int, int] = {}
    for operation in program.operations:
        if _is_view(operation):
            for operand, result in _view_pairs(operation):
                sources[result] = sources.get(operand, operand)
    return sources


def _kernels_of(program: TracedProgram, written: frozenset[int]) -> list[frozenset[int]]:
    """For each operation the kernels in which it is computed, by the operations at which they end."""
    taken_by: dict[int, frozenset[int]] = {}
    kernels_of: list[frozenset[int]] = [frozenset()] * len(program.operations)
    for op_index in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[op_index]
        if _is_view(operation):
            for operand, result in _view_pairs(operation):
                taken_by[operand] = taken_by.get(operand, frozenset()) | taken_by.get(result, frozenset())
            continue
        kernels: frozenset[int] = frozenset()
        if operation.role == "join":
            pass  # moves nothing: what goes round stays in its memory
        elif _ends_chain(operation) or any(result in written for result in operation.results):
            kernels = frozenset((op_index,))
        else:
            for result in operation.results:
                kernels |= taken_by.get(result, frozenset())
        kernels_of[op_index] = kernels
        for operand in operation.operands:
            if operand is not None:
                taken_by[operand] = taken_by.get(operand, frozenset()) | kernels
    return kernels_of


@final
@attrs.frozen(eq=False)
class _Joined:
    """Kernels that are one: a union-find over the operations at which they end."""

    leaders: dict[int, int] = attrs.field(factory=dict)

    def leader(self, kernel: int) -> int:
        while self.leaders.get(kernel, kernel) != kernel:
            kernel = self.leaders[kernel]
        return kernel

    def join(self, first: int, second: int) -> None:
        low, high = sorted((self.leader(first), self.leader(second)))
        if low != high:
            self.leaders[high] = low


def _join_optimizer(
    program: TracedProgram, kernels_of: list[frozenset[int]], sources: Mapping[int, int], joined: _Joined
) -> None:
    """Joins kernels that end at results of the function and compute them from each other, as an optimizer does."""
    returned: dict[int, int] = {}
    for operation in program.operations:
        if operation.role == "return" and operation.operands[0] is not None:
            array = sources.get(operation.operands[0], operation.operands[0])
            producer = program.producers.get(array)
            if producer is not None and not _ends_chain(program.operations[producer]):
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


def _join_dots(
    program: TracedProgram, kernels_of: list[frozenset[int]], sources: Mapping[int, int], joined: _Joined
) -> None:
    """Joins dots with vectors with the elementwise kernel that writes what they add up, as in a loop over time."""
    for op_index, operation in enumerate(program.operations):
        if operation.name != "dot_general" or is_matmul(operation):
            continue
        for operand in operation.operands:
            producer = None if operand is None else program.producers.get(sources.get(operand, operand))
            if producer is None or kernels_of[producer] != {producer}:
                continue
            written_here = program.operations[producer]
            if written_here.region == operation.region and not _ends_chain(written_here):
                joined.join(producer, op_index)


def _join_rows(
    program: TracedProgram,
    kernels_of: list[frozenset[int]],
    sources: Mapping[int, int],
    written: frozenset[int],
    joined: _Joined,
) -> None:
    """Joins reductions of rows with the kernel that takes them and the same rows again, as in a softmax or a norm."""
    read_by: dict[int, set[int]] = {}
    for operation, kernels in zip(program.operations, kernels_of, strict=True):
        for operand in operation.operands:
            source = None if operand is None else sources.get(operand, operand)
            if source is not None and source in written:
                for kernel in kernels:
                    read_by.setdefault(kernel, set()).add(source)
    taken_by: dict[int, list[int]] = {}
    for op_index, operation in enumerate(program.operations):
        for operand in operation.operands:
            if operand is not None:
                taken_by.setdefault(sources.get(operand, operand), []).append(op_index)
    for op_index, operation in enumerate(program.operations):
        operand = operation.operands[0] if operation.operands else None
        shape = _reduced_rows(operation)
        if operand is None or not shape:
            continue
        rows = {source for source in read_by.get(op_index, ()) if program.arrays[source].shape == shape}
        for user in taken_by.get(operation.results[0], ()):
            nearest = min(kernels_of[user], default=None)
            is_near = nearest is not None and program.operations[nearest].region == operation.region
            if (
                nearest is not None
                and is_near
                and rows & read_by.get(nearest, set())
                and not _takes_whole(program.operations[nearest])
            ):
                joined.join(op_index, nearest)
                break
