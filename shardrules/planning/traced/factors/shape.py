"""The loops of operations that move, copy, cut and join arrays."""

from collections.abc import Hashable, Iterator, Mapping

from shardrules.planning.traced.factors.loops import Loops, Op, Rule, Shape, alike, leading, whole


def _broadcast(op: Op) -> Loops | None:
    """What is repeated may be split without splitting the operand."""
    (shape,), (result,) = op.operands, op.results
    to = op.params["broadcast_dimensions"]
    names = [dim if size == result[dim] else None for dim, size in zip(to, shape, strict=True)]
    return Loops([names], [range(len(result))])


def _transpose(op: Op) -> Loops | None:
    return Loops([range(len(op.operands[0]))], [op.params["permutation"]])


def _squeeze(op: Op) -> Loops | None:
    ndim = len(op.operands[0])
    gone = [dim % ndim for dim in op.params["dimensions"]]
    return Loops([range(ndim)], [[dim for dim in range(ndim) if dim not in gone]])


def _reshape(op: Op) -> Loops | None:
    """A piece of the major-most dim is one run of elements, and on both sides the same one; that of another is not."""
    if op.params.get("dimensions") is not None:
        return None
    (shape,), (result,) = op.operands, op.results
    before: list[Hashable] = [None] * len(shape)
    after: list[Hashable] = [None] * len(result)
    for number, (left, right) in enumerate(_majors(shape, result)):
        before[left] = after[right] = number
    return Loops([before], [after])


def _majors(shape: Shape, result: Shape) -> Iterator[tuple[int, int]]:
    """Yields the major-most dims, on both sides, of the smallest runs of dims that hold the same elements."""
    left, right = ([dim for dim, size in enumerate(side) if size != 1] for side in (shape, result))
    while left and 0 not in shape:
        first, second = left.pop(0), right.pop(0)
        yield first, second
        before, after = shape[first], result[second]
        while before != after:
            if before < after:
                before *= shape[left.pop(0)]
            else:
                after *= result[right.pop(0)]


def _reverse(op: Op) -> Loops | None:
    return alike(op, [dim not in op.params["dimensions"] for dim in range(len(op.operands[0]))])


def _pad(op: Op) -> Loops | None:
    return alike(op, [tuple(one) == (0, 0, 0) for one in op.params["padding_config"]])


def _cut(op: Op) -> Loops | None:
    """What is cut has to be whole: of a dim that is split XLA brings all pieces together, even for a slice of one."""
    return alike(op, [all(size == result[dim] for result in op.results) for dim, size in enumerate(op.operands[0])])


def _update(op: Op) -> Loops | None:
    """Of a dim that is written to in part, XLA moves nothing for an update of length one, but forgets it if it starts
    beyond the end, where it should be the last one that is written: so such dims are whole too.
    """
    shape, piece, *starts = op.operands
    names = [dim if size == given else None for dim, (size, given) in enumerate(zip(shape, piece, strict=True))]
    return Loops([names, names, *(whole(start) for start in starts)], [names])


def _concatenate(op: Op) -> Loops | None:
    return alike(op, [dim != op.params["dimension"] for dim in range(len(op.results[0]))])


def _stack(op: Op) -> Loops | None:
    dims = list(range(len(op.operands[0])))
    return Loops([dims for _ in op.operands], [_with_none(dims, op.params["axis"])])


def _unstack(op: Op) -> Loops | None:
    dims = list(range(len(op.results[0])))
    return Loops([_with_none(dims, op.params["axis"])], [dims for _ in op.results])


def _with_none(names: list[int], at: int) -> list[int | None]:
    place = at % (len(names) + 1)
    return [*names[:place], None, *names[place:]]


def _tile(op: Op) -> Loops | None:
    """Copies may be on different devices; the operand then is on all of them."""
    reps = dict(enumerate(op.params["reps"]))
    names = [dim if times == 1 else None for dim, times in reps.items()]
    return Loops([names], [list(reps)], sizes={dim: times for dim, times in reps.items() if times > 1})


def _bitcast(op: Op) -> Loops | None:
    """Between types of unlike width a last dim comes or goes."""
    return leading(op, min(len(op.operands[0]), len(op.results[0])))


def _fresh(op: Op) -> Loops | None:
    return Loops([whole(shape) for shape in op.operands], [range(len(shape)) for shape in op.results])


SHAPE_RULES: Mapping[str, Rule] = {
    "iota": _fresh,
    "empty": _fresh,
    "empty2": _fresh,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "rev": _reverse,
    "pad": _pad,
    "slice": _cut,
    "split": _cut,
    "dynamic_slice": _cut,
    "dynamic_update_slice": _update,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "bitcast_convert_type": _bitcast,
}
"""The rules of these operations, by primitive."""
