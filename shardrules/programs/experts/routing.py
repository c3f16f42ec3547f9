"""The rows of the experts' input that tokens go to, and back: tokens are sorted by expert.

Rows of an expert are in the order of groups, then of choices, then of tokens. With a capacity the first rows of each
group are kept, so that all first choices come before any second choice.
"""

from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp


@final
class Segments(NamedTuple):
    """The tokens of one device, sorted by expert and group of tokens: a segment for each pair of these."""

    order: jax.Array
    """[choices * tokens]: indices of choices, sorted by expert."""
    ranks: jax.Array
    """[choices * tokens]: the position of each choice in `order`."""
    keys: jax.Array
    """[choices * tokens]: the segment of each choice; past the last for a choice of no expert here."""
    counts: jax.Array
    """[experts, groups]"""


@final
class Table(NamedTuple):
    """The token in each row, and the row of each choice."""

    tokens: jax.Array
    """[rows]: the token of a row; past the last where the row is empty."""
    choices: jax.Array
    """[rows, 1]: the choice of a row, in the order of `rows`; past the last where the row is empty."""
    rows: jax.Array
    """[tokens, choices]: the row of a choice; past the last where it is dropped."""

    def dispatch(self, tokens: jax.Array) -> jax.Array:
        return _pick(tokens, self.tokens, self.rows)

    def combine(self, results: jax.Array, weights: jax.Array) -> jax.Array:
        """For each token the weighted sum of what its rows became, added up in float32."""
        wide = jnp.promote_types(jnp.result_type(results, weights), jnp.float32)
        chosen = _pick(results, self.rows, self.choices)
        return jnp.einsum("tkd,tk->td", chosen.astype(wide), weights.astype(wide)).astype(results.dtype)


def sort_by_expert(routes: jax.Array, expert_count: int) -> Segments:
    """Sorts [groups, tokens, choices] routes; those that are not among the experts come last."""
    groups = routes.shape[0]
    is_routed = (routes >= 0) & (routes < expert_count)
    keys = jnp.where(is_routed, routes * groups + jnp.arange(groups)[:, None, None], expert_count * groups)
    keys = jnp.moveaxis(keys, 2, 0).reshape(-1)
    # A stable sort keeps first choices before second ones, since choices are the outermost dim here.
    order = jnp.argsort(keys, stable=True)
    return Segments(order, jnp.argsort(order), keys, group_counts(routes, expert_count).T)


def group_counts(routes: jax.Array, expert_count: int) -> jax.Array:
    """[..., experts]: how many choices in [..., tokens, choices] are of each expert."""
    return (routes[..., None] == jnp.arange(expert_count)).sum((-3, -2), dtype=jnp.int32)


def as_indices(routes: jax.Array, expert_count: int) -> jax.Array:
    """Routes in int32, which can count experts and groups; wider routes to no expert are -1."""
    if routes.dtype.itemsize < 4 or routes.dtype == jnp.int32:
        return routes.astype(jnp.int32)
    is_routed = (routes >= 0) & (routes < expert_count)
    return jnp.where(is_routed, routes.astype(jnp.int32), -1)


def compact_table(segments: Segments, choice_count: int, capacity: int | None) -> tuple[Table, jax.Array]:
    """Rows without gaps, and how many of them each expert has."""
    total, size = segments.order.size, segments.counts.size
    row_count = total if capacity is None else min(total, size * capacity)
    counts = segments.counts.reshape(-1)
    kept = counts if capacity is None else jnp.minimum(counts, capacity)
    starts, ends = _starts(kept), jnp.cumsum(kept)
    rows = jnp.arange(row_count)
    if capacity is None:
        # Choices of no expert here are last in the order, and get no row.
        positions = jnp.where(rows < ends[-1], rows, total)
    else:
        keys = jnp.searchsorted(ends, rows, side="right")  # skips empty segments
        shifts = (_starts(counts) - starts).at[keys].get(mode="fill", fill_value=total)
        positions = rows + shifts
    table = _table(segments, choice_count, positions, starts, kept)
    return table, kept.reshape(segments.counts.shape).sum(1)


def slot_table(segments: Segments, choice_count: int, capacity: int) -> Table:
    """Rows in slots, [experts, groups, capacity]: empty where a segment has fewer."""
    counts = segments.counts.reshape(-1, 1)
    slots = jnp.arange(capacity)
    positions = jnp.where(slots < counts, _starts(counts[:, 0])[:, None] + slots, segments.order.size)
    kept = jnp.minimum(counts[:, 0], capacity)
    return _table(segments, choice_count, positions.reshape(-1), jnp.arange(kept.size) * capacity, kept)


def _table(segments: Segments, choice_count: int, positions: jax.Array, starts: Any, kept: jax.Array) -> Table:
    """The table of rows that hold these positions of the order, where segments start at these rows."""
    total, row_count = segments.order.size, positions.size
    token_count = total // choice_count
    choices = segments.order.at[positions].get(mode="fill", fill_value=total)
    first = _starts(segments.counts.reshape(-1))
    in_segment = segments.ranks - first.at[segments.keys].get(mode="fill", fill_value=0)
    is_kept = in_segment < kept.at[segments.keys].get(mode="fill", fill_value=0)
    rows = jnp.where(is_kept, starts.at[segments.keys].get(mode="fill", fill_value=0) + in_segment, row_count)
    is_empty = choices == total
    tokens = jnp.where(is_empty, token_count, choices % token_count)
    # Choices are numbered by choice first in the order, and by token first in `rows`.
    flat = jnp.where(is_empty, total, tokens * choice_count + choices // token_count)
    return Table(tokens, flat[:, None], rows.reshape(choice_count, token_count).T)


def _starts(counts: jax.Array) -> jax.Array:
    return jnp.cumsum(counts) - counts


@jax.custom_vjp
def _pick(rows: jax.Array, sources: jax.Array, uses: jax.Array) -> jax.Array:
    """Returns `rows[sources]`, and zeros for a source past the last row. Its gradient picks, too.

    Scattered additions, as JAX's own gradient has them, are slow on GPUs and TPUs.
    `uses` says for each row which elements of `sources`, flat, are this row; past the last of them for none.
    """
    return _rows_or_zeros(rows, sources)


def _forward(rows: jax.Array, sources: jax.Array, uses: jax.Array) -> tuple[jax.Array, Any]:
    return _pick(rows, sources, uses), (sources, uses)


def _backward(tables: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    sources, uses = tables
    flat = gradient.reshape(sources.size, *gradient.shape[sources.ndim :])
    parts = _rows_or_zeros(flat, uses)
    return parts.sum(1, dtype=jnp.promote_types(parts.dtype, jnp.float32)).astype(parts.dtype), None, None


def _rows_or_zeros(rows: jax.Array, sources: jax.Array) -> jax.Array:
    return rows.at[sources].get(mode="fill", fill_value=0)


_pick.defvjp(_forward, _backward)
