"""Pallas kernels on pieces: with a smaller grid, over the blocks that a device has."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.programs.autoplan.run.ragged import entry, sizes_among
from shardrules.programs.jaxprs.walk import closed_like, open_jaxpr
from shardrules.programs.traced.factors.grids import params_of_pieces
from shardrules.programs.traced.factors.grouped import TABLES, is_grouped, kernel_loops, sums_rows, tile_rows
from shardrules.programs.traced.factors.table import op_signature


def kernel_of_pieces(
    equation: Any, operands: Sequence[jax.Array], specs: Sequence[PartitionSpec]
) -> Sequence[jax.Array]:
    """Returns what a Pallas kernel computes from pieces of its operands."""
    op = op_signature(equation, [True] * len(equation.outvars))
    assert op is not None, "a kernel that is split has arrays"
    loops = kernel_loops(op)
    assert loops is not None, "a kernel that is split has loops"
    params = params_of_pieces(op, loops, [operand.shape for operand in operands])
    first = len(operands) - params["grid_mapping"].num_inputs
    row_axes = entry(specs[first], 0) if is_grouped(params) else None
    if row_axes is not None:
        index = lax.axis_index(row_axes)
        operands = [*_tables(operands, params, index, _group_count(op)), *operands[first:]]
    # Equations remember the mesh that they were traced under, which was that of the plan: here it is that of a device.
    context = jax.make_jaxpr(jnp.sin)(0.0).eqns[0].ctx
    return equation.primitive.bind(*operands, **_in_context(params, context))


def _in_context(value: Any, context: Any) -> Any:
    """Returns parameters whose programs, with the maps of blocks, are in a context."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        program = open_jaxpr(value)
        changed = [each.replace(ctx=context, params=_in_context(each.params, context)) for each in program.eqns]
        return closed_like(value, program.replace(eqns=changed))
    if isinstance(value, tuple | list):
        # Named tuples hold no programs.
        return type(value)(_in_context(item, context) for item in value) if type(value) in (tuple, list) else value
    if isinstance(value, NamedSharding):
        # That of an array of zeros in the kernel, say, which is split over no axis.
        return NamedSharding(context.cur_abstract_mesh, value.spec)
    if isinstance(value, dict):
        return {name: _in_context(item, context) for name, item in value.items()}
    if hasattr(value, "block_mappings"):
        blocks = tuple(
            block.replace(index_map_jaxpr=_in_context(block.index_map_jaxpr, context)) for block in value.block_mappings
        )
        return value.replace(block_mappings=blocks)
    return value


def _group_count(op: Any) -> int:
    """For how many groups a kernel of `megablox` has matrices."""
    return (op.results[0] if sums_rows(op.params) else op.operands[TABLES.stop + 1])[0]


def _tables(operands: Sequence[jax.Array], params: Any, index: Any, group_count: int) -> list[jax.Array]:
    """Returns the number of tiles, and the tables, of a device's own rows: as long as the tables of all rows."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

    starts, groups, tiles, first_group = operands[TABLES]
    rows = operands[TABLES.stop].shape[0]
    sizes = sizes_among(jnp.diff(starts), rows, index)
    tables, count = make_group_metadata(
        group_sizes=sizes,
        m=rows,
        tm=tile_rows(params),
        start_group=first_group[0],
        num_nonzero_groups=group_count,
        visit_empty_groups=sums_rows(params),
    )
    own_starts, *others = tables
    padded = (
        jnp.pad(table, (0, whole.size - table.size)) for table, whole in zip(others, (groups, tiles), strict=True)
    )
    return [count, own_starts, *padded, first_group]
