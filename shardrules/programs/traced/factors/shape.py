"""The loops of operations that move, copy, cut and join arrays."""

from collections.abc import Hashable, Iterator, Mapping

from shardrules.programs.traced.factors.loops import (
    ANY,
    ONE,
    SOME,
    LoopRule,
    Loops,
    OpSignature,
    Shape,
    leading_dims,
    same_dims,
    whole,
)


def _broadcast(op: OpSignature) -> Loops | None:
    """Any dim may be split, new ones without splitting the operand."""
    (shape,), (result,) = op.operands, op.results
    result_dims = op.params["broadcast_dimensions"]
    names = [dim if size == result[dim] else None for dim, size in zip(result_dims, shape, strict=True)]
    return Loops([names], [range(len(result))])


def _transpose(op: OpSignature) -> Loops | None:
    """Any dim may be split."""
    return Loops([range(len(op.operands[0]))], [op.params["permutation"]])


def _squeeze(op: OpSignature) -> Loops | None:
    """Any dim may be split."""
    ndim = len(op.operands[0])
    removed = [dim % ndim for dim in op.params["dimensions"]]
    return Loops([range(ndim)], [[dim for dim in range(ndim) if dim not in removed]])


def _reshape(op: OpSignature) -> Loops | None:
    """Of dims that are merged or split up, the major one may be split: a piece of it is one run of elements."""
    (shape,), (result,) = op.operands, op.results
    dims = op.params.get("dimensions") or tuple(range(len(shape)))  # the order in which the elements are read
    operand_names: list[Hashable] = [None] * len(shape)
    result_names: list[Hashable] = [None] * len(result)
    for run, (dim, result_dim) in enumerate(_major_dims(tuple(shape[dim] for dim in dims), result)):
        operand_names[dims[dim]] = result_names[result_dim] = run
    return Loops([operand_names], [result_names])


def _major_dims(shape: Shape, result: Shape) -> Iterator[tuple[int, int]]:
    """Yields the first dims, on both sides, of the shortest runs of dims with the same elements."""
    # Dims of size 1 belong to no run. Both sides have the same elements, so their runs end together.
    left, right = ([dim for dim, size in enumerate(side) if size != 1] for side in (shape, result))
    while left and 0 not in shape:
        first, second = left.pop(0), right.pop(0)
        yield first, second
        # A run ends where both sides have passed the same number of elements.
        left_size, right_size = shape[first], result[second]
        while left_size != right_size:
            if left_size < right_size:
                left_size *= shape[left.pop(0)]
            else:
                right_size *= result[right.pop(0)]


def _reverse(op: OpSignature) -> Loops | None:
    """Dims that are not reversed may be split."""
    return same_dims(op, [dim not in op.params["dimensions"] for dim in range(len(op.operands[0]))])


def _pad(op: OpSignature) -> Loops | None:
    """Dims that are not padded may be split."""
    return same_dims(op, [tuple(padding) == (0, 0, 0) for padding in op.params["padding_config"]])


def _cut(op: OpSignature) -> Loops | None:
    """Dims that are not cut may be split: XLA gathers the others, even for one element."""
    shape = op.operands[0]
    return same_dims(op, [all(size == result[dim] for result in op.results) for dim, size in enumerate(shape)])


def _update(op: OpSignature) -> Loops | None:
    """Dims that are written to from end to end may be split.

    XLA moves nothing for an update of length one, but drops it where it starts beyond the end, instead of moving it to
    the last position.
    """
    shape, update, *starts = op.operands
    names = [dim if size == length else None for dim, (size, length) in enumerate(zip(shape, update, strict=True))]
    return Loops([names, names, *(whole(start) for start in starts)], [names])


def _concatenate(op: OpSignature) -> Loops | None:
    """All dims but the concatenated one may be split."""
    return same_dims(op, [dim != op.params["dimension"] for dim in range(len(op.results[0]))])


def _stack(op: OpSignature) -> Loops | None:
    """Dims other than the new one may be split."""
    dims = list(range(len(op.operands[0])))
    return Loops([dims for _ in op.operands], [_with_whole_dim(dims, op.params["axis"])])


def _unstack(op: OpSignature) -> Loops | None:
    """All dims but the one of the parts may be split."""
    dims = list(range(len(op.results[0])))
    return Loops([_with_whole_dim(dims, op.params["axis"])], [dims for _ in op.results])


def _with_whole_dim(names: list[int], axis: int) -> list[int | None]:
    dim = axis % (len(names) + 1)
    return [*names[:dim], None, *names[dim:]]


def _tile(op: OpSignature) -> Loops | None:
    """Any dim may be split. Copies may be on different devices; the operand then is on all of them."""
    reps = dict(enumerate(op.params["reps"]))
    # A piece of a repeated dim is a number of whole copies, so the copies have to divide, not the size.
    names = [dim if count == 1 else None for dim, count in reps.items()]
    return Loops([names], [list(reps)], sizes={dim: count for dim, count in reps.items() if count > 1})


def _bitcast(op: OpSignature) -> Loops | None:
    """Any dim may be split, but for the last one that comes or goes between dtypes of different widths."""
    return leading_dims(op, min(len(op.operands[0]), len(op.results[0])))


def _fresh(op: OpSignature) -> Loops | None:
    """Any dim may be split: each device makes its own pieces."""
    return Loops([whole(shape) for shape in op.operands], [range(len(shape)) for shape in op.results])


SHAPE_RULES: Mapping[str, LoopRule] = {
    **dict.fromkeys(("iota", "empty", "empty2", "platform_index"), LoopRule(_fresh, ANY, ANY)),
    "broadcast_in_dim": LoopRule(_broadcast, ONE, ONE, ("broadcast_dimensions",)),
    "transpose": LoopRule(_transpose, ONE, ONE, ("permutation",)),
    "squeeze": LoopRule(_squeeze, ONE, ONE, ("dimensions",)),
    "reshape": LoopRule(_reshape, ONE, ONE),
    "rev": LoopRule(_reverse, params=("dimensions",)),
    "pad": LoopRule(_pad, params=("padding_config",)),
    **dict.fromkeys(("slice", "split", "dynamic_slice"), LoopRule(_cut)),
    "dynamic_update_slice": LoopRule(_update, range(2, ANY.stop), ONE),
    "concatenate": LoopRule(_concatenate, params=("dimension",)),
    "stack": LoopRule(_stack, SOME, ONE, ("axis",)),
    "unstack": LoopRule(_unstack, ONE, SOME, ("axis",)),
    "tile": LoopRule(_tile, ONE, ONE, ("reps",)),
    "bitcast_convert_type": LoopRule(_bitcast, ONE, ONE),
}
"""The rules of these operations, by primitive."""
