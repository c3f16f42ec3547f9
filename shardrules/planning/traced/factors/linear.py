"""The loops of matmuls, convolutions, reductions, windows and decompositions."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

from shardrules.planning.traced.factors.loops import Loops, Op, Rule, alike, leading, whole

_Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Dims of the left operand, and those of the right that they go with."""


def _dot(op: Op) -> Loops | None:
    contracted, batch = op.params["dimension_numbers"]
    left, right = _factors(op, contracted, batch)
    result = [left[dim] for dim in batch[0]] + _rest(left, contracted[0], batch[0])
    return Loops([left, right], [result + _rest(right, contracted[1], batch[1])], [left[dim] for dim in contracted[0]])


def _factors(op: Op, contracted: _Pair, batch: _Pair) -> tuple[list[Hashable], list[Hashable]]:
    left: list[Hashable] = [("left", dim) for dim in range(len(op.operands[0]))]
    right: list[Hashable] = [("right", dim) for dim in range(len(op.operands[1]))]
    for dim, other in [*zip(*contracted, strict=True), *zip(*batch, strict=True)]:
        right[other] = left[dim]
    return left, right


def _rest(names: list[Hashable], *without: Sequence[int]) -> list[Hashable]:
    return [name for dim, name in enumerate(names) if not any(dim in dims for dims in without)]


def _ragged_dot(op: Op) -> Loops | None:
    """Rows come in groups of any length, one after the other: they, and what is there for each group, are whole."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    rows, groups = list(numbers.lhs_ragged_dimensions), list(numbers.rhs_group_dimensions)
    if any(dim in batch[0] for dim in rows):
        return None
    left, right = _factors(op, contracted, batch)
    unsplit = [left[dim] for dim in (*rows, *batch[0])] + [right[dim] for dim in groups]
    left, right = ([None if name in unsplit else name for name in names] for names in (left, right))
    # Where the rows are what is summed over, there is a sum for each group, and the groups come first.
    first = [None] if any(dim in contracted[0] for dim in rows) else []
    result = [*first, *(left[dim] for dim in batch[0]), *_rest(left, contracted[0], batch[0])]
    result += _rest(right, contracted[1], batch[1], groups)
    reduced = [left[dim] for dim in contracted[0] if left[dim] is not None]
    return Loops([left, right, *(whole(shape) for shape in op.operands[2:])], [result], reduced)


def _convolution(op: Op) -> Loops | None:
    """Channels and batch, never space: devices would need the margins of their neighbours' pieces."""
    numbers, groups = op.params["dimension_numbers"], op.params["feature_group_count"]
    batch, channels = numbers.lhs_spec[:2]
    left: list[Hashable] = [None] * len(op.operands[0])
    right: list[Hashable] = [None] * len(op.operands[1])
    out: list[Hashable] = [None] * len(op.results[0])
    # XLA brings all together for other groups of channels, and adds too much up for groups of the batch.
    separate = groups == op.operands[0][channels]
    if op.params["batch_group_count"] == 1 and (groups == 1 or separate):
        left[batch] = out[numbers.out_spec[0]] = "batch"
        right[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = "out"
        left[channels] = "in" if groups == 1 else "out"
        right[numbers.rhs_spec[1]] = "in" if groups == 1 else None
    return Loops([left, right], [out], ["in"] if "in" in left else [])


def _reduction(op: Op) -> Loops | None:
    dims, axes = range(len(op.operands[0])), op.params["axes"]
    return Loops([dims], [[dim for dim in dims if dim not in axes]], sorted(axes))


def _among_all(op: Op) -> Loops | None:
    """Reductions that devices cannot complete: which of all is the greatest; any function; exclusive or.

    XLA has an all-reduce for sums, products, maxima, minima, and, or: for no others.
    """
    dims = op.params["axes"] if "axes" in op.params else op.params["dimensions"]
    names = [dim if dim not in dims else None for dim in range(len(op.operands[0]))]
    rest = [name for name in names if name is not None]
    return Loops([names if shape else () for shape in op.operands], [rest for _ in op.results])


def _along(op: Op) -> Loops | None:
    """Sorting and running sums work along one dim."""
    dim = op.params["dimension"] if "dimension" in op.params else op.params["axis"]
    return alike(op, [other != dim for other in range(len(op.operands[0]))])


def _window(op: Op) -> Loops | None:
    dims, given = op.params["window_dimensions"], op.params
    steps = (given.get(name) or (1,) * len(dims) for name in ("window_strides", "base_dilation", "window_dilation"))
    along = zip(dims, *steps, given["padding"], strict=True)
    return alike(op, [sizes == [1, 1, 1, 1] and tuple(margins) == (0, 0) for *sizes, margins in along])


def _matrices(op: Op) -> Loops | None:
    """Stacks of matrices. Compilers for TPUs bring stacks together for `lu`, `eigh` and `svd`; others do not."""
    return leading(op, len(op.operands[0]) - 2)


def _vectors(op: Op) -> Loops | None:
    return leading(op, len(op.operands[0]) - 1)


LINEAR_RULES: Mapping[str, Rule] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or"), _reduction),
    **dict.fromkeys(("argmax", "argmin", "reduce", "reduce_xor"), _among_all),
    **dict.fromkeys(("sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along),
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _window),
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "qr", "householder_product"), _matrices),
    **dict.fromkeys(("eigh", "eig", "svd", "schur", "hessenberg"), _matrices),
    **dict.fromkeys(("tridiagonal_solve", "lu_pivots_to_permutation"), _vectors),
}
"""The rules of these operations, by primitive."""
