"""The loops of matmuls, convolutions, reductions, windows and decompositions."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import attrs

from shardrules.programs.traced.factors.loops import (
    ONE,
    SOME,
    TWO,
    LoopRule,
    Loops,
    OpSignature,
    leading_dims,
    same_dims,
    whole,
)

_DimPairs: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Dims of the left operand, and the dims of the right operand that they go with."""


def _dot(op: OpSignature) -> Loops | None:
    """Any dim may be split. Where a summed one is, devices hold parts of a sum."""
    contracted, batch = op.params["dimension_numbers"]
    left, right = dot_names(op, contracted, batch)
    result = [left[dim] for dim in batch[0]] + without_dims(left, contracted[0], batch[0])
    result += without_dims(right, contracted[1], batch[1])
    return Loops([left, right], [result], [left[dim] for dim in contracted[0]])


def dot_names(op: OpSignature, contracted: _DimPairs, batch: _DimPairs) -> tuple[list[Hashable], list[Hashable]]:
    left: list[Hashable] = [("left", dim) for dim in range(len(op.operands[0]))]
    right: list[Hashable] = [("right", dim) for dim in range(len(op.operands[1]))]
    for dim, other in [*zip(*contracted, strict=True), *zip(*batch, strict=True)]:
        right[other] = left[dim]
    return left, right


def without_dims(names: list[Hashable], *omitted: Sequence[int]) -> list[Hashable]:
    return [name for dim, name in enumerate(names) if not any(dim in dims for dims in omitted)]


def _ragged_dot(op: OpSignature) -> Loops | None:
    """Rows, columns, summed dims and groups may be split: each device finds which of its rows are in which group.

    Where groups are split, a device leaves zeros in the rows of the others: the result is a sum.
    """
    numbers = op.params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    rows, groups = list(numbers.lhs_ragged_dimensions), list(numbers.rhs_group_dimensions)
    if any(dim in batch[0] for dim in rows):
        return None
    left, right = dot_names(op, contracted, batch)
    # With sizes for each element of a batch, every device would have other rows of each.
    is_batched = len(op.operands[2]) > 1
    unsplit = [left[dim] for dim in (*batch[0], *(rows if is_batched else ()))]
    left, right = ([None if name in unsplit else name for name in names] for names in (left, right))
    for dim in groups:
        right[dim] = None if is_batched else "group"
    # Where the rows are what is summed over, there is a sum for each group, and the groups come first.
    sums_rows = any(dim in contracted[0] for dim in rows)
    group_dims: list[Hashable] = [None if is_batched else "group"] if sums_rows else []
    result = [*group_dims, *(left[dim] for dim in batch[0]), *without_dims(left, contracted[0], batch[0])]
    result += without_dims(right, contracted[1], batch[1], groups)
    reduced = [left[dim] for dim in contracted[0] if left[dim] is not None]
    reduced += [] if sums_rows or is_batched else ["group"]
    operands = [left, right, *(whole(shape) for shape in op.operands[2:])]
    return Loops(operands, [result], reduced, is_local=True)


def _convolution(op: OpSignature) -> Loops | None:
    """Batch and channels may be split, or whole groups of either. Space is whole: windows would need its neighbours."""
    numbers, params = op.params["dimension_numbers"], op.params
    channel_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    (batch, channels), (out, into) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    left: list[Hashable] = [None] * len(op.operands[0])
    right: list[Hashable] = [None] * len(op.operands[1])
    result: list[Hashable] = [None] * len(op.results[0])
    sizes: dict[Hashable, int] = {}
    if channel_groups > 1:
        left[batch] = result[numbers.out_spec[0]] = "batch"
        left[channels] = right[out] = result[numbers.out_spec[1]] = "group"
        sizes = {"group": channel_groups}
    elif batch_groups > 1:
        left[batch] = right[out] = result[numbers.out_spec[1]] = "group"
        left[channels] = right[into] = "in"
        sizes = {"group": batch_groups}
    else:
        left[batch] = result[numbers.out_spec[0]] = "batch"
        right[out] = result[numbers.out_spec[1]] = "out"
        left[channels] = right[into] = "in"
    # XLA gathers everything for groups of several channels, and adds too much up for groups of the batch.
    each_channel_alone = channel_groups == op.operands[0][channels]
    is_local = batch_groups > 1 or (channel_groups > 1 and not each_channel_alone)
    return Loops([left, right], [result], ["in"] if "in" in left else [], sizes, is_local)


def _reduction(op: OpSignature) -> Loops | None:
    """Any dim may be split. Where a reduced one is, an all-reduce completes the result."""
    dims, axes = range(len(op.operands[0])), op.params["axes"]
    return Loops([dims], [[dim for dim in dims if dim not in axes]], sorted(axes))


def _mapped_reduction(op: OpSignature) -> Loops | None:
    """An axis of `vmap` is a dim of the operand, and reduced as any other. Axes of a mesh have no rule."""
    axes = op.params["axes"]
    is_plain = op.params.get("axis_index_groups") is None and all(isinstance(axis, int) for axis in axes)
    return _reduction(op) if is_plain else None


def _unsplit_reduction(op: OpSignature) -> Loops | None:
    """Dims that are not reduced may be split: XLA has no all-reduce that would complete the others."""
    dims = op.params["axes"] if "axes" in op.params else op.params["dimensions"]
    names = [dim if dim not in dims else None for dim in range(len(op.operands[0]))]
    rest = [name for name in names if name is not None]
    return Loops([names if shape else () for shape in op.operands], [rest for _ in op.results])


def _along_dim(op: OpSignature) -> Loops | None:
    """Dims other than the one that they work along may be split."""
    dim = op.params["dimension"] if "dimension" in op.params else op.params["axis"]
    return same_dims(op, [other != dim for other in range(len(op.operands[0]))])


def _window(op: OpSignature) -> Loops | None:
    """Dims along which the window is one element long, without steps and padding, may be split."""
    dims, params = op.params["window_dimensions"], op.params
    # Some primitives lack some of these, and some have `None` for them.
    steps = (params.get(name) or (1,) * len(dims) for name in ("window_strides", "base_dilation", "window_dilation"))
    along = zip(dims, *steps, params["padding"], strict=True)
    return same_dims(op, [sizes == [1, 1, 1, 1] and tuple(margins) == (0, 0) for *sizes, margins in along])


def _transform(op: OpSignature) -> Loops | None:
    """Dims that are not transformed may be split.

    Before JAX 0.12 XLA gathers them by itself.
    """
    count = len(op.params["fft_lengths"])
    return attrs.evolve(leading_dims(op, len(op.operands[0]) - count), is_local=True)


def _greatest(op: OpSignature) -> Loops | None:
    """Dims other than the one that they search may be split.

    XLA gathers them by itself.
    """
    dim = op.params["axis"] if "axis" in op.params else op.params["reduction_dimension"]
    ndim = len(op.operands[0])
    return attrs.evolve(same_dims(op, [other != dim % ndim for other in range(ndim)]), is_local=True)


def _matrices(op: OpSignature) -> Loops | None:
    """The dims of a stack of matrices may be split, and each matrix is whole.

    Compilers for TPUs gather the stacks of some by themselves.
    """
    count = len(op.operands[0]) - 2
    return attrs.evolve(leading_dims(op, count), is_local=op.name in _GATHERED_BY_TPUS)


def _vectors(op: OpSignature) -> Loops | None:
    """The dims of a stack of vectors may be split, and each vector is whole."""
    return leading_dims(op, len(op.operands[0]) - 1)


_REDUCTIONS = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
_RUNNING = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_WINDOWS = (
    *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
    *("select_and_scatter", "select_and_scatter_add", "select_and_gather_add"),
)
_GATHERED_BY_TPUS = ("lu", "eigh", "svd")
_DECOMPOSITIONS = (
    *("cholesky", "cholesky_update", "triangular_solve", "symmetric_product", "tridiagonal"),
    *("qr", "geqrf", "ormqr", "householder_product", "eig", "schur", "hessenberg", *_GATHERED_BY_TPUS),
)
_CONVOLUTION_PARAMS = ("dimension_numbers", "feature_group_count", "batch_group_count")

LINEAR_RULES: Mapping[str, LoopRule] = {
    "dot_general": LoopRule(_dot, TWO, ONE, ("dimension_numbers",)),
    "ragged_dot_general": LoopRule(_ragged_dot, SOME, ONE, ("ragged_dot_dimension_numbers",)),
    "conv_general_dilated": LoopRule(_convolution, TWO, ONE, _CONVOLUTION_PARAMS),
    **dict.fromkeys(_REDUCTIONS, LoopRule(_reduction, ONE, ONE, ("axes",))),
    **dict.fromkeys(("psum", "pmax", "pmin"), LoopRule(_mapped_reduction, ONE, ONE, ("axes",))),
    **dict.fromkeys(("argmax", "argmin", "reduce_xor"), LoopRule(_unsplit_reduction, params=("axes",))),
    "reduce": LoopRule(_unsplit_reduction, params=("dimensions",)),
    "sort": LoopRule(_along_dim, params=("dimension",)),
    **dict.fromkeys(_RUNNING, LoopRule(_along_dim, params=("axis",))),
    **dict.fromkeys(_WINDOWS, LoopRule(_window, params=("window_dimensions", "padding"))),
    "fft": LoopRule(_transform, ONE, ONE, ("fft_lengths",)),
    "top_k": LoopRule(_greatest, ONE, TWO, ("axis",)),
    "approx_top_k": LoopRule(_greatest, ONE, TWO, ("reduction_dimension",)),
    **dict.fromkeys(_DECOMPOSITIONS, LoopRule(_matrices)),
    **dict.fromkeys(("tridiagonal_solve", "lu_pivots_to_permutation"), LoopRule(_vectors)),
}
"""The rules of these operations, by primitive."""
