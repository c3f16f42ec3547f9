"""The loops of gathers and scatters."""

from collections.abc import Hashable, Mapping

from shardrules.planning.traced.factors.loops import Loops, Op, Rule

_ONE_BY_ONE = ("scatter", "scatter-sub")
"""Scatters of which XLA shows every update to every device: the last one wins, or is subtracted."""


def _gather(op: Op) -> Loops | None:
    """Of a dim that is looked up in, each device gives what it holds and zeros for the rest: the sum is the result."""
    numbers, lengths = op.params["dimension_numbers"], op.params["slice_sizes"]
    (shape, indices), (result,) = op.operands, op.results
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    kept = [dim for dim in range(len(shape)) if dim not in numbers.collapsed_slice_dims and dim not in batching]

    operand: list[Hashable] = [None] * len(shape)
    out: list[Hashable] = [None] * len(result)
    # The last dim of the indices holds one index: where to look, in several dims at once.
    index: list[Hashable] = [("index", dim) for dim in range(len(indices) - 1)]
    others = [dim for dim in range(len(result)) if dim not in numbers.offset_dims]
    for dim, name in zip(others, index, strict=True):
        out[dim] = name
    for dim, to in zip(kept, numbers.offset_dims, strict=True):
        if lengths[dim] == shape[dim]:
            operand[dim] = out[to] = ("window", dim)
    for dim, to in batching.items():
        operand[dim] = index[to]
    looked_up = [dim for dim in numbers.start_index_map if lengths[dim] == 1 < shape[dim]]
    for dim in looked_up:
        operand[dim] = ("looked up", dim)
    return Loops([operand, [*index, None]], [out], [operand[dim] for dim in looked_up])


def _scatter(op: Op) -> Loops | None:
    """Each device keeps what falls into its piece; or it sees a part of the updates, if results can be put together."""
    numbers = op.params["dimension_numbers"]
    shape, indices, updates = op.operands
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    kept = [dim for dim in range(len(shape)) if dim not in numbers.inserted_window_dims and dim not in batching]
    windows = dict(zip(kept, numbers.update_window_dims, strict=True))
    lengths = [updates[windows[dim]] if dim in windows else 1 for dim in range(len(shape))]

    operand: list[Hashable] = [None] * len(shape)
    given: list[Hashable] = [None] * len(updates)
    index: list[Hashable] = [
        ("index", dim) if op.name not in _ONE_BY_ONE or dim in batching.values() else None
        for dim in range(len(indices) - 1)
    ]
    others = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    for dim, name in zip(others, index, strict=True):
        given[dim] = name
    for dim in numbers.scatter_dims_to_operand_dims:
        if lengths[dim] == 1:
            operand[dim] = ("written to", dim)
    for dim, to in windows.items():
        if lengths[dim] == shape[dim]:
            operand[dim] = given[to] = ("window", dim)
    for dim, to in batching.items():
        operand[dim] = index[to]
    reduced = [name for dim, name in enumerate(index) if name is not None and dim not in batching.values()]
    return Loops([operand, [*index, None], given], [operand], reduced)


INDEX_RULES: Mapping[str, Rule] = {
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-sub": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
}
"""The rules of these operations, by primitive."""
