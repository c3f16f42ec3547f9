"""The work of each device: the ways to bring tokens and experts together, as functions of shards."""

import math
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from shardrules.programs.experts.exchange import send, ways_of
from shardrules.programs.experts.ring import Params, Visit, go_round
from shardrules.programs.experts.routing import Segments, Table, compact_table, slot_table, sort_by_expert
from shardrules.programs.experts.stacked import StackedExperts


@final
@attrs.frozen(eq=False)
class Shard:
    """The tokens of a device, and the experts that they can reach: its own, and the experts of devices along
    `axis_name`."""

    tokens: jax.Array
    """[tokens, width]"""
    routes: jax.Array
    """[groups, tokens of a group, choices], from 0 for the first expert that they can reach."""
    weights: jax.Array
    """[tokens, choices]"""
    params: Params
    experts: StackedExperts
    axis_name: tuple[str, ...] | None
    capacity: int | None

    @classmethod
    def of(
        cls, operands: Any, axis_name: tuple[str, ...] | None, experts: StackedExperts, capacity: int | None
    ) -> "Shard":
        tokens, routes, weights, ids, *params = operands
        *lead, width = tokens.shape
        choices = routes.shape[-1]
        if axis_name is not None and lax.axis_size(axis_name) == 1:
            axis_name = None
        # Devices along the axis have as many experts each, in order: from this one's follows the first of all.
        first = ids[0] if axis_name is None else ids[0] - lax.axis_index(axis_name) * len(ids)
        group_shape = (-1, lead[-1], choices) if capacity is not None else (1, math.prod(lead), choices)
        return cls(
            tokens.reshape(-1, width),
            (routes - first).reshape(group_shape),
            weights.reshape(-1, choices),
            params,
            experts,
            axis_name,
            capacity,
        )

    @property
    def local_count(self) -> int:
        return len(self.params[0])

    @property
    def expert_count(self) -> int:
        return self.local_count * (1 if self.axis_name is None else lax.axis_size(self.axis_name))

    @property
    def choice_count(self) -> int:
        return self.routes.shape[-1]

    def segments(self) -> Segments:
        return sort_by_expert(self.routes, self.expert_count)

    def apply_to_slots(self, slots: jax.Array) -> jax.Array:
        """[experts, slots, width] through the experts, on their devices if they are elsewhere."""
        if self.axis_name is None:
            return self.experts.one_by_one(self.params, slots)
        # On the way there experts are split and slots joined, on the way back the other way round.
        arrived = lax.all_to_all(slots, self.axis_name, 0, 1, tiled=True)
        return lax.all_to_all(self.experts.one_by_one(self.params, arrived), self.axis_name, 1, 0, tiled=True)


def by_dense(shard: Shard) -> jax.Array:
    """Products with one-hot tensors bring tokens to slots of experts, and back."""
    assert shard.capacity is not None
    groups, tokens, _ = shard.routes.shape
    one_hot, count = _slots_of_choices(shard.routes, shard.expert_count, shard.capacity), shard.expert_count
    x = shard.tokens.reshape(groups, tokens, -1)
    dispatched = jnp.einsum("gskec,gsd->egcd", one_hot.astype(x.dtype), x)
    results = shard.apply_to_slots(dispatched.reshape(count, groups * shard.capacity, -1))
    results = results.reshape(count, groups, shard.capacity, -1)
    # Weighted sums over choices are taken in 32 bits or more, as the other ways take them.
    wide = jnp.promote_types(jnp.result_type(results, shard.weights), jnp.float32)
    combine = jnp.einsum(
        "gskec,gsk->gsec", one_hot.astype(wide), shard.weights.reshape(groups, tokens, -1).astype(wide)
    )
    combined = jnp.einsum("gsec,egcd->gsd", combine.astype(results.dtype), results, preferred_element_type=wide)
    return combined.reshape(groups * tokens, -1).astype(results.dtype)


def _slots_of_choices(routes: jax.Array, expert_count: int, capacity: int) -> jax.Array:
    """[groups, tokens, choices, experts, capacity]: whether a choice has this slot."""
    groups, tokens, choices = routes.shape
    # All first choices of a group come before its second ones: with a capacity they are dropped last.
    is_chosen = jnp.moveaxis(routes, 2, 1)[..., None] == jnp.arange(expert_count)
    before = jnp.cumsum(is_chosen.reshape(groups, choices * tokens, expert_count), 1, dtype=jnp.int32)
    slots = jnp.where(is_chosen, before.reshape(is_chosen.shape) - 1, capacity)
    return jnp.moveaxis(slots[..., None] == jnp.arange(capacity), 1, 2)


def by_all_to_all(shard: Shard) -> jax.Array:
    """Tokens go to slots of the experts' devices, as many as fit, and come back."""
    assert shard.capacity is not None
    table = slot_table(shard.segments(), shard.choice_count, shard.capacity)
    slots = table.dispatch(shard.tokens).reshape(shard.expert_count, -1, shard.tokens.shape[1])
    return table.combine(_flat(shard.apply_to_slots(slots)), shard.weights)


def by_ragged(shard: Shard) -> jax.Array:
    """Tokens go to the experts' devices, as many as there are, and come back."""
    if shard.axis_name is None:
        return _without_exchange(shard)
    table, sizes = compact_table(shard.segments(), shard.choice_count, shard.capacity)
    devices, rows = lax.axis_size(shard.axis_name), table.dispatch(shard.tokens)
    stride = None if shard.capacity is None else devices * shard.routes.shape[0] * shard.capacity
    # All tokens of all devices may go to the experts of one.
    row_count = devices * len(rows) if stride is None else shard.local_count * stride
    ways = ways_of(sizes, shard.axis_name, stride)
    arrived: jax.Array = send(rows, ways.outward, ways.back, row_count, shard.axis_name)
    if stride is None:
        results = shard.experts.in_groups(shard.params, arrived, ways.sizes)
    else:
        slots = arrived.reshape(shard.local_count, stride, -1)
        results = _flat(shard.experts.one_by_one(shard.params, slots))
    returned: jax.Array = send(results, ways.back, ways.outward, len(rows), shard.axis_name)
    return table.combine(returned, shard.weights)


def by_ring(shard: Shard) -> jax.Array:
    """Tokens stay, and the experts come by."""
    if shard.axis_name is None:
        return _without_exchange(shard)
    table: Table
    if shard.capacity is None:
        table, sizes = compact_table(shard.segments(), shard.choice_count, None)
        visit, tables = _visit_in_groups(shard.experts, shard.local_count), (sizes, jnp.cumsum(sizes) - sizes)
    else:
        table = slot_table(shard.segments(), shard.choice_count, shard.capacity)
        visit, tables = _visit_slots(shard.experts, shard.local_count, shard.routes.shape[0] * shard.capacity), ()
    rows = table.dispatch(shard.tokens)
    return table.combine(go_round(visit, shard.axis_name, tables, shard.params, rows), shard.weights)


def by_sum(shard: Shard) -> jax.Array:
    """Tokens stay, and of other devices' experts nothing is added: what devices return is a part of a sum."""
    return _without_exchange(shard)


def _without_exchange(shard: Shard) -> jax.Array:
    if shard.capacity is not None:
        return by_all_to_all(shard)
    table, sizes = compact_table(shard.segments(), shard.choice_count, None)
    results = shard.experts.in_groups(shard.params, table.dispatch(shard.tokens), sizes)
    return table.combine(results, shard.weights)


def _visit_slots(experts: StackedExperts, local_count: int, slot_count: int) -> Visit:
    block = local_count * slot_count

    def take(tables: Any, rows: jax.Array, device: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(rows, device * block, block)

    def put(tables: Any, rows: jax.Array, device: jax.Array, part: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(rows, part, device * block, 0)

    def apply(tables: Any, params: Params, part: jax.Array, device: jax.Array) -> jax.Array:
        return _flat(experts.one_by_one(params, part.reshape(local_count, slot_count, -1)))

    return Visit(take, put, apply)


def _visit_in_groups(experts: StackedExperts, local_count: int) -> Visit:
    def take(tables: Any, rows: jax.Array, device: jax.Array) -> jax.Array:
        sizes, starts = _of_device(tables, device)
        return _where_first(jnp.roll(rows, -starts[0], 0), sizes.sum())

    def put(tables: Any, rows: jax.Array, device: jax.Array, part: jax.Array) -> jax.Array:
        sizes, starts = _of_device(tables, device)
        # The rows of other devices are zeros in the part, and its own are still zeros in the rows.
        return rows + jnp.roll(_where_first(part, sizes.sum()), starts[0], 0)

    def apply(tables: Any, params: Params, part: jax.Array, device: jax.Array) -> jax.Array:
        return experts.in_groups(params, part, _of_device(tables, device)[0])

    def _of_device(tables: Any, device: jax.Array) -> list[jax.Array]:
        return [lax.dynamic_slice_in_dim(table, device * local_count, local_count) for table in tables]

    return Visit(take, put, apply)


def _where_first(rows: jax.Array, count: jax.Array) -> jax.Array:
    """Rows, with zeros from the `count`-th on."""
    return jnp.where((jnp.arange(len(rows)) < count)[:, None], rows, 0)


def _flat(slots: jax.Array) -> jax.Array:
    return slots.reshape(-1, slots.shape[-1])
