"""The loops of gathers and scatters."""

from collections.abc import Hashable, Mapping

from shardrules.programs.traced.factors.loops import ONE, THREE, TWO, LoopRule, Loops, OpSignature

_UPDATE_BY_UPDATE = ("scatter", "scatter-sub")
"""Scatters for which XLA gives every update to every device: the last update wins, or updates are subtracted."""


def _gather(op: OpSignature) -> Loops | None:
    """Any dim may be split unless longer parts of it are read. Where one that is looked up in is split, devices give
    what they have, and an all-reduce completes the result."""
    numbers, lengths = op.params["dimension_numbers"], op.params["slice_sizes"]
    (shape, indices), (result,) = op.operands, op.results
    batch_dims = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    window_dims = [
        dim for dim in range(len(shape)) if dim not in numbers.collapsed_slice_dims and dim not in batch_dims
    ]

    operand_names: list[Hashable] = [None] * len(shape)
    result_names: list[Hashable] = [None] * len(result)
    # The last dim of the indices is one index: where to look, in several dims at once.
    index_names: list[Hashable] = [("index", dim) for dim in range(len(indices) - 1)]
    result_index_dims = [dim for dim in range(len(result)) if dim not in numbers.offset_dims]
    for dim, name in zip(result_index_dims, index_names, strict=True):
        result_names[dim] = name
    for dim, result_dim in zip(window_dims, numbers.offset_dims, strict=True):
        # Only a window over all of a dim has the same pieces in the operand and in the result.
        if lengths[dim] == shape[dim]:
            operand_names[dim] = result_names[result_dim] = ("window", dim)
    for dim, index_dim in batch_dims.items():
        operand_names[dim] = index_names[index_dim]
    lookup_dims = [dim for dim in numbers.start_index_map if lengths[dim] == 1 < shape[dim]]
    for dim in lookup_dims:
        operand_names[dim] = ("lookup", dim)
    return Loops([operand_names, [*index_names, None]], [result_names], [operand_names[dim] for dim in lookup_dims])


def _scatter(op: OpSignature) -> Loops | None:
    """Dims of the operand may be split, and each device writes what falls into its piece. So may the updates of sums,
    products, maxima and minima: an all-reduce combines the results."""
    numbers = op.params["dimension_numbers"]
    shape, indices, updates = op.operands
    batch_dims = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    window_dims = [
        dim for dim in range(len(shape)) if dim not in numbers.inserted_window_dims and dim not in batch_dims
    ]
    update_dims = dict(zip(window_dims, numbers.update_window_dims, strict=True))
    lengths = [updates[update_dims[dim]] if dim in update_dims else 1 for dim in range(len(shape))]

    operand_names: list[Hashable] = [None] * len(shape)
    update_names: list[Hashable] = [None] * len(updates)
    index_names: list[Hashable] = [
        ("index", dim) if op.name not in _UPDATE_BY_UPDATE or dim in batch_dims.values() else None
        for dim in range(len(indices) - 1)
    ]
    update_index_dims = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    for dim, name in zip(update_index_dims, index_names, strict=True):
        update_names[dim] = name
    for dim in numbers.scatter_dims_to_operand_dims:
        if lengths[dim] == 1:
            operand_names[dim] = ("target", dim)
    for dim, update_dim in update_dims.items():
        if lengths[dim] == shape[dim]:
            operand_names[dim] = update_names[update_dim] = ("window", dim)
    for dim, index_dim in batch_dims.items():
        operand_names[dim] = index_names[index_dim]
    # Updates of one position may be on several devices: these hold parts of it, which an all-reduce combines.
    reduced = [name for dim, name in enumerate(index_names) if name is not None and dim not in batch_dims.values()]
    return Loops([operand_names, [*index_names, None], update_names], [operand_names], reduced)


_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")

INDEX_RULES: Mapping[str, LoopRule] = {
    "gather": LoopRule(_gather, TWO, ONE, ("dimension_numbers", "slice_sizes")),
    **dict.fromkeys(_SCATTERS, LoopRule(_scatter, THREE, ONE, ("dimension_numbers",))),
}
"""The rules of these operations, by primitive."""
