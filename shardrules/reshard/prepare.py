"""`plan_reshard`, and what it shares with `reshard`: a move is thought through, and refused whole or not at all."""

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.tree_util as jtu
import numpy as np
from jax.extend.backend import register_backend_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.core.errors import PlanError, TreeError
from shardrules.core.fields import byte_count
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.core.spec import device_dtype
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.drawing.blocks import ranges
from shardrules.placement.destination import (
    Destination,
    How,
    not_placeable,
    refusal,
    refuse_leaves,
    resolve_destination,
)
from shardrules.placement.traced import host_memory
from shardrules.reshard.assemble import adopts
from shardrules.reshard.bits import held_by, physical
from shardrules.reshard.plan import LeafMove, ReshardPlan
from shardrules.reshard.schedule import Schedule, box_shape, boxes_of, schedule

IN_FLIGHT_BYTES = 256 * 2**20
"""What is moved at once when nobody says how much."""

KEPT = 4096
"""How many schedules, and the tools made for them, are kept for later calls."""


def _schedule(
    shape: tuple[int, ...], dtype: Any, source: Sharding, target: Sharding, alive: tuple[Any, ...] | None
) -> Schedule:
    made_of, numbers = physical(shape, dtype)
    more = tuple((0, size) for size in made_of[len(shape) :])  # of the numbers that a key is made of
    old, new = ({device: (*box, *more) for device, box in boxes_of(one, shape).items()} for one in (source, target))
    return schedule(made_of, numbers, old, new, alive)


_kept_schedule = functools.lru_cache(KEPT)(_schedule)
register_backend_cache(_kept_schedule, "shardrules: schedules of moves")


@final
@attrs.frozen(eq=False)
class Prepared:
    """A move that has been thought through and may begin.

    **Arguments:**

    - `target`: the tree taken apart, with the new sharding of each array.
    - `numbers`: where the arrays stand among the leaves of the tree.
    - `held`: what the devices of this process hold of each of them now; nothing of what comes from the host.
    - `plan`: the plan, with one `LeafMove` for each of `numbers`.
    - `kept`: whether what is worked out is kept for later calls.
    """

    target: Destination
    numbers: tuple[int, ...]
    held: tuple[Mapping[Any, jax.Array], ...]
    plan: ReshardPlan
    kept: bool


def prepare(
    tree: Any,
    shardings: How,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
    cache_resharding_plans: bool = False,
    max_bytes_in_flight: int | None = None,
    alive: tuple[Any, ...] | None = None,
    values: bool = True,
    who: str,
) -> Prepared:
    """Thinks a move through and refuses it as a whole if any array cannot be moved.

    **Arguments:**

    - `tree`, `shardings`, `donate`, `may_alias`, `cache_resharding_plans`, `max_bytes_in_flight`: as in `reshard`.
    - `alive`: the devices that can still send; `None` for all.
    - `values`: whether arrays must have values; else shapes will do.
    - `who`: the caller's name, for messages.

    **Returns:**

    What is to be moved, and how.

    **Raises:**

    `PlanError`, listing everything that is wrong; `TreeError`.
    """
    limit = IN_FLIGHT_BYTES if max_bytes_in_flight is None else byte_count("max_bytes_in_flight")(max_bytes_in_flight)
    arrays, wrong = with_numbers(tree, shardings)
    check_shardings(arrays, shardings, who)
    try:
        found = resolve_destination(arrays, shardings, caller=who, problems=wrong)
    except PlanError as error:  # of a plan, which knows nothing of the arrays themselves
        paths = leaf_paths(arrays)
        gone = [(number, leaf) for number, leaf in enumerate(jax.tree.leaves(arrays)) if _is_deleted(leaf, None)]
        more = [attrs.evolve(_DELETED, path=paths[number], shape=leaf.shape) for number, leaf in gone]
        raise refusal(who, [*(one for one in error.findings if isinstance(one, Finding)), *more]) from None
    wrong += not_placeable(found, values=values)
    bad = {number for number, _ in wrong}
    schedules = _kept_schedule if cache_resharding_plans else functools.cache(_schedule)
    paths = leaf_paths(arrays)
    numbers: list[int] = []
    moves: list[LeafMove] = []
    held: list[Mapping[Any, jax.Array]] = []
    for number, (value, sharding) in enumerate(zip(found.values, found.shardings, strict=True)):
        if sharding is None and not (number in bad and isinstance(value, jax.Array)):
            continue
        problems = list(_problems(value, None if number in bad else sharding, alive))
        wrong += [(number, problem) for problem in problems]
        if problems or number in bad:
            continue
        source = _source(value)
        made = None if source is None else schedules(tuple(value.shape), value.dtype, source, sharding, alive)
        moves.append(_leaf_move(paths[number], value, sharding, made, donate, may_alias))
        wrong += [(number, gone) for gone in _lost(moves[-1])]
        numbers.append(number)
        held.append(held_by(value) if source is not None and isinstance(value, jax.Array) else {})
    refuse_leaves(who, arrays, sorted(wrong, key=lambda pair: pair[0]))
    plan = ReshardPlan(tuple(moves), _batches(moves, limit, donate), donate)
    return Prepared(found, tuple(numbers), tuple(held), plan, cache_resharding_plans)


def with_numbers(tree: Any, shardings: How) -> tuple[Any, list[tuple[int, Finding]]]:
    """Makes arrays of the numbers in a tree, where shardings say where they go. `True` and `False` are flags, and stay.

    **Arguments:**

    - `tree`, `shardings`: as in `reshard`. Under a rule or a plan numbers stay numbers, as they do in `filter_shard`.

    **Returns:**

    The tree, and what is wrong with numbers: pairs of a leaf's place and a finding.
    """
    leaves, treedef = jax.tree.flatten(tree)
    wrong: list[tuple[int, Finding]] = []
    if isinstance(shardings, ShardingRule | ShardingPlan):
        return tree, wrong
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic):
            kind = next(kind for kind in (int, float, complex) if isinstance(leaf, kind))
            dtype = device_dtype(np.dtype(kind))
            try:
                leaves[number] = np.asarray(leaf, dtype)
            except OverflowError:
                what = f"{leaf} is too large for {dtype}"
                wrong.append((number, Finding("error", "overflow", what, "", "Turn on jax_enable_x64, or keep it out")))
                leaves[number] = np.zeros((), dtype)
    return treedef.unflatten(leaves), wrong


def check_shardings(tree: Any, shardings: How, who: str) -> None:
    """Refuses what says where arrays go in any other way than by a sharding, a rule or a plan.

    **Arguments:**

    - `tree`, `shardings`: the tree and what was given for it.
    - `who`: the caller's name, for messages.

    **Raises:**

    `TreeError`, listing everything that is no sharding.
    """
    if isinstance(shardings, ShardingRule | ShardingPlan):
        return
    stated, structure = jtu.tree_flatten_with_path(
        shardings, is_leaf=lambda node: node is None or isinstance(node, Sharding | PartitionSpec)
    )
    try:
        parts = structure.flatten_up_to(tree)
    except (ValueError, TypeError):
        return  # a prefix that does not fit is refused where it is used, in better words
    wrong = [
        f"{one!r:.60} at {jtu.keystr(path, simple=True, separator='/') or 'the top'}"
        for (path, one), part in zip(stated, parts, strict=True)
        if not isinstance(one, Sharding) and any(array_kind(leaf) is not None for leaf in jax.tree.leaves(part))
    ]
    if wrong:
        raise TreeError(
            f"the shardings that {who} is given must contain only `jax.sharding.Sharding`, got {', '.join(wrong)}. "
            "filter_shard takes specs and devices, too"
        )


_DELETED = Finding(
    "error", "deleted", "it was deleted or donated", "", "Move it before it is donated, or keep what it became"
)


def is_deleted(array: jax.Array, alive: Collection[Any] | None = None) -> bool:
    """Returns whether any shard that could be asked for is gone. An array that shares shards may lose single ones.

    **Arguments:**

    - `array`: an array.
    - `alive`: the devices that will be asked; `None` for all.

    **Returns:**

    `True` or `False`.
    """
    return array.is_deleted() or any(
        shard.is_deleted() for device, shard in held_by(array).items() if alive is None or device in alive
    )


def _is_deleted(leaf: Any, alive: Collection[Any] | None) -> bool:
    return isinstance(leaf, jax.Array) and is_deleted(leaf, alive)


def _problems(value: Any, sharding: Sharding | None, alive: Collection[Any] | None) -> Iterator[Finding]:
    """What is wrong with one array that is to be moved, and with where it is to go, as far as that is known."""
    shape = tuple(value.shape)

    def problem(code: str, message: str, remedy: str) -> Finding:
        return Finding("error", code, message, "", remedy, shape)

    if _is_deleted(value, alive):
        yield attrs.evolve(_DELETED, shape=shape)
        return
    source = _source(value)
    if isinstance(source, NamedSharding) and not isinstance(source.mesh, Mesh):
        where = "its sharding is on the shape of a mesh: it says on no devices where the array lies"
        yield problem("not-placeable", where, "Give it a sharding on a mesh of devices, or none")
        return
    if sharding is None:
        return
    gone = [] if alive is None else sorted(one.id for one in sharding.device_set if one not in alive)
    if gone:
        where = f"it is to go to device{'s' * (len(gone) > 1)} {ranges(gone)}, not alive"
        yield problem("dead-device", where, "Make a mesh of living devices: surviving_mesh")
    for one in (source, sharding):
        if isinstance(one, NamedSharding) and (one.spec.unreduced or one.spec.reduced):
            yield problem("unreduced", f"{one.spec} holds sums that are not done", "Reduce it inside jit first")
    here = {device.platform for device in source.device_set} if source is not None else set()
    there = sorted({device.platform for device in sharding.device_set})
    if here and sorted(here) != there:
        what = f"it lies on {'/'.join(sorted(here))} devices and is to go to {'/'.join(there)} devices"
        yield problem("other-backend", what, "Go over the host: filter_shard(filter_gather(tree), shardings)")


def _lost(move: LeafMove) -> Iterator[Finding]:
    """That parts of an array are gone with the devices that held them."""
    if move.schedule is None or not move.schedule.lost:
        return
    gone = sum(math.prod(box_shape(box)) for box in move.schedule.lost)
    share = gone / math.prod(move.schedule.shape)
    lost = [f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]" for box in move.schedule.lost]
    what = f"no living device holds {share:.1%} of it: {', '.join(lost[:2])}{', ...' * (len(lost) > 2)}"
    yield Finding("error", "lost", what, "", "Load it from a checkpoint: load_equinox, load_orbax", move.shape)


def _leaf_move(
    path: str, value: Any, sharding: Any, made: Schedule | None, donate: bool, may_alias: bool | None
) -> LeafMove:
    shape, source = tuple(value.shape), _source(value)
    copied = "lies there already; copied, as may_alias=False asks" if may_alias is False else ""
    if made is None or source is None:
        return LeafMove(path, shape, device_dtype(value.dtype), None, sharding, None, copied)
    if donate and any(device not in made.target for device in made.source):
        copied = "each device has its part already; copied, so that the rest can be given up"
    if host_memory(source) != host_memory(sharding):
        copied = f"from {source.memory_kind} memory to {sharding.memory_kind} memory"
    return LeafMove(path, shape, value.dtype, source, sharding, made, copied)


def _source(value: Any) -> Sharding | None:
    """Where an array, or what a shape says of one, lies; `None` on the host.

    An array that nobody put anywhere counts as on the host: each process has one of its own, on another device.
    """
    if isinstance(value, jax.Array) and not value.committed:
        return None
    found = getattr(value, "sharding", None)  # neither numpy arrays nor most shapes have one
    return found if isinstance(found, Sharding) else None


def _batches(moves: Sequence[LeafMove], limit: int, donate: bool) -> tuple[tuple[int, ...], ...]:
    """Arrays that lie on the same devices, together as long as they, and what is under way, are within the limit.

    What is put together in memory has arrived at once: to give it up in smaller batches costs nothing, and leaves room
    for what JAX itself keeps about each shard.
    """
    groups: dict[Any, list[int]] = {}
    sizes: dict[Any, tuple[int, int, int]] = {}
    devices: dict[Any, Any] = {}
    for number, one in enumerate(moves):
        if one.source not in devices:
            devices[one.source] = one.source and tuple(sorted(device.id for device in one.source.device_set))
        groups.setdefault(devices[one.source], []).append(number)
    batches: list[tuple[int, ...]] = []
    for group in groups.values():
        batch: list[int] = []
        full = most = 0
        for number in group:
            one = moves[number]
            key = (one.target, one.shape, str(one.dtype)) if one.schedule is None else id(one.schedule)
            if key not in sizes:
                new, old = one.new_bytes(), one.old_bytes()
                at_once = donate and one.schedule is not None and adopts(one.schedule)
                most_bytes = limit // 4 if at_once else limit
                sizes[key] = sum(new.values()), one.staging_bytes * len({**new, **old}), most_bytes
            size, staging, most_bytes = sizes[key]
            if batch and full + size + max(most, staging) > most_bytes:
                batches.append(tuple(batch))
                batch, full, most = [], 0, 0
            batch.append(number)
            full, most = full + size, max(most, staging)
        batches.append(tuple(batch))
    return tuple(batches)


def plan_reshard(
    tree: Any,
    shardings: How,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
    cache_resharding_plans: bool = False,
    max_bytes_in_flight: int | None = None,
) -> ReshardPlan:
    """Says what `reshard` would carry, by which route, and what every device would hold meanwhile. Nothing moves.

    The bill is for the devices that the shardings name. Those of CPUs in one process share their memory and are on one
    network, so for them less is under way, and nothing is passed on.

    **Arguments:**

    - `tree`: a pytree of arrays, or of `jax.ShapeDtypeStruct`s with shardings that stand for them.
    - `shardings`, `donate`, `may_alias`, `cache_resharding_plans`, `max_bytes_in_flight`: as in `reshard`.

    **Returns:**

    A `ReshardPlan`. Print it.

    **Raises:**

    What `reshard` raises before anything moves.

    ```python
    mesh = sr.create_mesh("data:8")
    half = sr.create_mesh("model:4", devices=jax.devices()[:4])
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=jax.NamedSharding(mesh, P("data")))
    plan = sr.plan_reshard({"w": x}, jax.NamedSharding(half, P(None, "model")))
    assert (plan.moves[0].route, plan.moved_bytes, plan.kept_bytes) == ("direct", 14336, 2048)
    ```
    """
    prepared = prepare(
        tree,
        shardings,
        donate=donate,
        may_alias=may_alias,
        cache_resharding_plans=cache_resharding_plans,
        max_bytes_in_flight=max_bytes_in_flight,
        values=False,
        who="plan_reshard",
    )
    return prepared.plan
