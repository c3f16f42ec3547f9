"""The loops of `jax.experimental.pallas.ops.tpu.megablox`: matmuls of groups of rows, each with a matrix of its own.

Beside the dims of their grids, rows may be split. The kernels read from tables which tiles of rows are in which group:
a device makes those of its own rows.
"""

from collections.abc import Hashable
from typing import Any

from shardrules.programs.traced.factors.grids import grid_loops
from shardrules.programs.traced.factors.loops import Loops, OpSignature, whole
from shardrules.programs.traced.factors.retraced import is_from

ROWS = "rows"
"""The loop over tiles of rows."""

TABLES = slice(1, 5)
"""The first rows of groups, the group and the rows of each tile, and the first group; before them is the number of
tiles."""

ROWS_OPERAND = TABLES.stop
"""The operand whose rows are in groups."""

_OPERANDS = range(2, 4)
"""Both sides of the matmul, and for some what results are added to."""


def kernel_loops(op: OpSignature) -> Loops | None:
    """Dims of the grid may be split where each position reads and writes blocks of its own, and the kernel does not ask
    for its position; rows of `megablox`, into whole tiles; and loops for whose pieces JAX makes the kernel again.
    Others are whole."""
    loops = grid_loops(op)
    if not is_grouped(op.params):
        return loops
    operands: list[list[Hashable]] = [list(whole(shape)) for shape in op.operands]
    results: list[list[Hashable]] = [list(whole(shape)) for shape in op.results]
    if loops is not None:
        operands, results = ([list(names) for names in side] for side in (loops.operands, loops.results))
    first, stacks = len(op.operands) - op.params["grid_mapping"].num_inputs, sums_rows(op.params)
    # What the sums over rows are added to would be added by each device.
    if stacks and len(op.operands) > first + 2:
        return loops
    operands[first][0] = ROWS
    for names in [operands[first + 1]] if stacks else [*operands[first + 2 :], *results]:
        names[0] = ROWS
    tiles = op.operands[first][0] // tile_rows(op.params)
    sizes: dict[Hashable, int] = {ROWS: tiles, **(loops.sizes if loops is not None else {})}
    return Loops(operands, results, [ROWS] if stacks else [], sizes, is_local=True)


def is_grouped(params: Any) -> bool:
    """A Pallas kernel is one of `megablox`, as JAX has them."""
    mapping = params["grid_mapping"]
    if not is_from(params, "tpu/megablox/gmm.py") or mapping.num_inputs not in _OPERANDS:
        return False
    aliases = dict(params["input_output_aliases"])
    # Operands are numbered with the tables, without the number of tiles.
    added = mapping.num_index_operands + 2
    has_added = mapping.num_inputs > 2
    is_same = not has_added or mapping.block_mappings[2].array_aval.shape == params["out_avals"][0].shape
    return (
        is_same
        and aliases == ({added: 0} if has_added else {})
        and (mapping.num_index_operands, mapping.num_outputs) == (4, 1)
        and mapping.num_dynamic_grid_bounds == 1
    )


def sums_rows(params: Any) -> bool:
    """A kernel of `megablox` sums over rows, and returns a matrix for each group."""
    return len(params["out_avals"][0].shape) == 3


def tile_rows(params: Any) -> int:
    return params["grid_mapping"].block_mappings[0].block_shape[0].block_size
