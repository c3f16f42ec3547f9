"""`plan_reshard`, and what it shares with `reshard`: a move is checked as a whole before any of it is made."""

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.tree_util as jtu
import numpy as np
from jax.extend.backend import register_backend_cache
from jax.sharding import Mesh, NamedSharding, Sharding

from shardrules.core.axes import AnyMesh
from shardrules.core.boxes import share_variables, shared_leaves
from shardrules.core.context import current_mesh
from shardrules.core.errors import ConfigError, PlanError, TreeError, printable
from shardrules.core.fields import byte_count
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.core.spec import device_dtype
from shardrules.core.tree import array_kind, leaf_paths, prefix_parts
from shardrules.core.views.blocks import ranges
from shardrules.moves.assemble import moves_in_memory
from shardrules.moves.bits import local_shards, physical
from shardrules.moves.plan import LeafMove, ReshardPlan
from shardrules.moves.schedule import Schedule, box_shape, boxes_of, make_schedule
from shardrules.placement.destination import Destination, not_placeable, resolve_destination
from shardrules.placement.traced import host_memory
from shardrules.rules.how import How, is_entry, refusal, refuse_leaves

IN_FLIGHT_BYTES = 256 * 2**20
"""The default of `max_bytes_in_flight`, over all devices: large enough that devices rarely wait for the host, and small
beside any model. Chosen by hand."""

CACHED_SCHEDULES = 4096
"""The most schedules, with their programs, that are kept for later calls: more than twice the distinct arrays of any
model that was measured."""


def _limit_bytes(value: int | None) -> int:
    return IN_FLIGHT_BYTES if value is None else byte_count("max_bytes_in_flight")(value)


@final
@attrs.frozen
class MoveOptions:
    """The options that `reshard` and `plan_reshard` share; `reshard` says what each means."""

    donate: bool = False
    may_alias: bool | None = None
    cache_resharding_plans: bool = False
    max_bytes_in_flight: int = attrs.field(default=None, converter=_limit_bytes)


def _schedule_shardings(
    shape: tuple[int, ...], dtype: Any, source: Sharding, target: Sharding, alive: tuple[Any, ...] | None
) -> Schedule:
    data_shape, data_dtype = physical(shape, dtype)
    # The integers of a PRNG key are never split.
    key_dims = tuple((0, size) for size in data_shape[len(shape) :])
    old_boxes, new_boxes = (
        {device: (*box, *key_dims) for device, box in boxes_of(sharding, shape).items()}
        for sharding in (source, target)
    )
    return make_schedule(data_shape, data_dtype, old_boxes, new_boxes, alive)


_cached_schedule = functools.lru_cache(CACHED_SCHEDULES)(_schedule_shardings)
register_backend_cache(_cached_schedule, "shardrules: schedules of moves")


@final
@attrs.frozen(eq=False)
class Prepared:
    """A move that has been checked and may begin."""

    destination: Destination
    leaf_indices: tuple[int, ...]
    """The indices of the arrays among the leaves of the tree."""
    shards: tuple[Mapping[Any, jax.Array], ...]
    """The shards of each array on devices of this process; none for what comes from the host."""
    plan: ReshardPlan
    """With a `LeafMove` for each of `leaf_indices`."""
    cached: bool
    """True where schedules and programs are kept for later calls."""


def prepare(
    tree: Any,
    how: How,
    options: MoveOptions,
    *,
    mesh: AnyMesh | None = None,
    alive: tuple[Any, ...] | None = None,
    values: bool = True,
    caller: str,
) -> Prepared:
    """Checks a move, and refuses it with one `PlanError` if any array cannot be moved.

    Only devices in `alive` can send; without `values`, shapes are accepted too.
    """
    arrays, how, problems = read_how(tree, how, mesh, caller)
    try:
        destination = resolve_destination(arrays, how, mesh, caller=caller, strict=False)
    except PlanError as error:
        # A plan's own findings do not cover deleted arrays: list these too.
        paths = leaf_paths(arrays)
        deleted = [(index, leaf) for index, leaf in enumerate(jax.tree.leaves(arrays)) if is_deleted(leaf)]
        findings = [attrs.evolve(_DELETED, path=paths[index], shape=leaf.shape) for index, leaf in deleted]
        listed = [finding for finding in error.findings if isinstance(finding, Finding)]
        raise refusal(caller, [*listed, *findings]) from None
    problems += destination.problems
    problems += not_placeable(destination, values=values)
    refused = {index for index, _ in problems}
    # Within one call equal arrays always share a schedule.
    schedule_of = _cached_schedule if options.cache_resharding_plans else functools.cache(_schedule_shardings)
    paths = leaf_paths(arrays)
    indices: list[int] = []
    moves: list[LeafMove] = []
    shards: list[Mapping[Any, jax.Array]] = []
    for index, (value, sharding) in enumerate(zip(destination.values, destination.shardings, strict=True)):
        # A leaf without a sharding is no array, unless it was refused: then what else is wrong with it is listed, too.
        if sharding is None and not (index in refused and isinstance(value, jax.Array)):
            continue
        own_problems = list(_problems(value, None if index in refused else sharding, alive))
        problems += [(index, problem) for problem in own_problems]
        if own_problems or index in refused:
            continue
        source = _source(value)
        schedule = None if source is None else schedule_of(tuple(value.shape), value.dtype, source, sharding, alive)
        moves.append(_leaf_move(paths[index], value, sharding, schedule, options))
        problems += [(index, finding) for finding in _lost_parts(moves[-1])]
        indices.append(index)
        shards.append(local_shards(value) if source is not None and isinstance(value, jax.Array) else {})
    refuse_leaves(caller, arrays, sorted(problems, key=lambda pair: pair[0]))
    plan = ReshardPlan(tuple(moves), _batches(moves, options), options.donate)
    return Prepared(destination, tuple(indices), tuple(shards), plan, options.cache_resharding_plans)


def read_how(tree: Any, how: How, mesh: AnyMesh | None, caller: str) -> tuple[Any, How, list[tuple[int, Finding]]]:
    """Returns a tree with arrays for its numbers, where they go, and problems by leaf index.

    Specs need a `mesh`, or one in force; without, they raise a `ConfigError`, as does what is not a sharding.
    """
    # As in `resolve`: a module may hold shardings and be callable, too.
    if callable(how) and jtu.all_leaves([how]):
        how = how(tree)
    arrays, problems = _numbers_to_arrays(tree, how)
    _check_entries(arrays, how, caller, has_mesh=mesh is not None or current_mesh() is not None)
    return arrays, how, problems


def _numbers_to_arrays(tree: Any, shardings: How) -> tuple[Any, list[tuple[int, Finding]]]:
    """Makes arrays of the Python numbers in a tree, except flags, and returns problems by leaf index.

    Under a rule or a plan numbers stay numbers, as they do in `filter_shard`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    problems: list[tuple[int, Finding]] = []
    if isinstance(shardings, ShardingRule | ShardingPlan):
        return tree, problems
    for index, leaf in enumerate(leaves):
        # A bool is an int in Python; numbers of numpy have a dtype of their own, and are arrays already.
        if isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic):
            number_type = next(each for each in (int, float, complex) if isinstance(leaf, each))
            dtype = device_dtype(np.dtype(number_type))
            try:
                leaves[index] = np.asarray(leaf, dtype)
            except OverflowError:
                why = f"{leaf} is too large for {dtype}"
                remedy = "Turn on jax_enable_x64, or leave it out of the tree"
                problems.append((index, Finding("error", "overflow", why, "", remedy)))
                # The zero keeps the tree whole, so that everything else that is wrong with it is found as well.
                leaves[index] = np.zeros((), dtype)
    return share_variables(treedef.unflatten(leaves), shared_leaves(tree)), problems


def _check_entries(tree: Any, shardings: How, caller: str, *, has_mesh: bool) -> None:
    """Raises a `ConfigError` that lists everything in `shardings` that says no place, alone or with the mesh."""
    if isinstance(shardings, ShardingRule | ShardingPlan):
        return
    try:
        parts = prefix_parts(shardings, tree, is_entry, caller, "shardings")
    except TreeError:
        # `resolve_destination` refuses a prefix that does not fit.
        return
    wrong = [
        f"{value!r:.60} at {printable(path) or 'the top'}"
        for path, value, part in parts
        if not isinstance(value, Sharding | jax.Device)
        and not (has_mesh and is_entry(value))
        # An entry above no array places nothing, so it cannot be wrong.
        and any(array_kind(leaf) is not None for leaf in jax.tree.leaves(part))
    ]
    if wrong:
        raise ConfigError(
            f"{caller}: the shardings must contain only `jax.sharding.Sharding`, got {', '.join(wrong)}. "
            "Specs need a mesh: pass it as the third argument, or call inside jax.set_mesh(mesh)"
        )


_DELETED = Finding(
    "error", "deleted", "it was deleted or donated", "", "Move it before it is donated, or keep the array it became"
)


def is_deleted(value: Any, alive: Collection[Any] | None = None) -> bool:
    """Returns whether an array has lost a shard on a device of `alive`. It may lose single ones if it shares them."""
    return isinstance(value, jax.Array) and (
        value.is_deleted()
        or any(shard.is_deleted() for device, shard in local_shards(value).items() if alive is None or device in alive)
    )


def _problems(value: Any, sharding: Sharding | None, alive: Collection[Any] | None) -> Iterator[Finding]:
    """Returns what is wrong with an array and with its new sharding, as far as that is known."""
    shape = tuple(value.shape)

    def problem(code: str, message: str, remedy: str) -> Finding:
        return Finding("error", code, message, "", remedy, shape)

    # A deleted array has nothing else to check.
    if is_deleted(value, alive):
        yield attrs.evolve(_DELETED, shape=shape)
        return
    source = _source(value)
    if isinstance(source, NamedSharding) and not isinstance(source.mesh, Mesh):
        why = "its sharding is on the shape of a mesh, so its devices are unknown"
        yield problem("not-placeable", why, "Give it a sharding on a mesh of devices, or none")
        return
    if sharding is None:
        return
    dead = [] if alive is None else sorted(device.id for device in sharding.device_set if device not in alive)
    if dead:
        why = f"its new sharding needs device{'s' * (len(dead) > 1)} {ranges(dead)}, not alive"
        yield problem("dead-device", why, "Make a mesh of living devices: surviving_mesh")
    for each in (source, sharding):
        if isinstance(each, NamedSharding) and (each.spec.unreduced or each.spec.reduced):
            yield problem("unreduced", f"{each.spec} holds unreduced sums", "Reduce it inside jit first")
    old_platforms = sorted({device.platform for device in source.device_set}) if source is not None else []
    new_platforms = sorted({device.platform for device in sharding.device_set})
    if old_platforms and old_platforms != new_platforms:
        why = f"it is on {'/'.join(old_platforms)} devices, and its new sharding on {'/'.join(new_platforms)} devices"
        yield problem("other-backend", why, "Go through the host: filter_shard(filter_gather(tree), shardings)")


def _lost_parts(move: LeafMove) -> Iterator[Finding]:
    """The parts of an array that were lost together with their devices."""
    if move.schedule is None or not move.schedule.lost:
        return
    lost_elements = sum(math.prod(box_shape(box)) for box in move.schedule.lost)
    share = lost_elements / math.prod(move.schedule.shape)
    lost = [f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]" for box in move.schedule.lost]
    why = f"no living device holds {share:.1%} of it: {', '.join(lost[:2])}{', ...' * (len(lost) > 2)}"
    yield Finding("error", "lost", why, "", "Load it from a checkpoint: load_equinox, load_orbax", move.shape)


def _leaf_move(path: str, value: Any, sharding: Any, schedule: Schedule | None, options: MoveOptions) -> LeafMove:
    shape, source = tuple(value.shape), _source(value)
    copy_reason = "already in place; copied because may_alias is False" if options.may_alias is False else ""
    if schedule is None or source is None:
        return LeafMove(path, shape, device_dtype(value.dtype), None, sharding, None, copy_reason)
    # An alias would keep the shards of the other devices alive.
    if options.donate and any(device not in schedule.target for device in schedule.source):
        copy_reason = "each device has its part already; copied, so that the rest can be freed"
    if host_memory(source) != host_memory(sharding):
        copy_reason = f"from {source.memory_kind} memory to {sharding.memory_kind} memory"
    return LeafMove(path, shape, value.dtype, source, sharding, schedule, copy_reason)


def _source(value: Any) -> Sharding | None:
    """The sharding of an array or shape; `None` on the host.

    An uncommitted array counts as on the host: each process has its own copy, on another device.
    """
    if isinstance(value, jax.Array) and not value.committed:
        return None
    # Numpy arrays and most shapes have none.
    sharding = getattr(value, "sharding", None)
    return sharding if isinstance(sharding, Sharding) else None


def _batches(moves: Sequence[LeafMove], options: MoveOptions) -> tuple[tuple[int, ...], ...]:
    """Arrays on the same devices, together as long as they and what is in flight are within the limit.

    What is put together in memory arrives at once: freeing it in smaller batches costs nothing, and leaves room for
    what JAX itself keeps about each shard.
    """
    limit = options.max_bytes_in_flight
    groups: dict[Any, list[int]] = {}
    sizes: dict[Any, tuple[int, int, int]] = {}
    devices: dict[Any, Any] = {}
    for index, move in enumerate(moves):
        if move.source not in devices:
            devices[move.source] = move.source and tuple(sorted(device.id for device in move.source.device_set))
        groups.setdefault(devices[move.source], []).append(index)
    batches: list[tuple[int, ...]] = []
    for group in groups.values():
        batch: list[int] = []
        total = most_staging = 0
        for index in group:
            move = moves[index]
            key = (move.target, move.shape, str(move.dtype)) if move.schedule is None else id(move.schedule)
            if key not in sizes:
                new, old = move.new_bytes(), move.old_bytes()
                at_once = options.donate and move.schedule is not None and moves_in_memory(move.schedule)
                # A quarter: with less, JAX's own bookkeeping per batch outweighs what is freed earlier.
                most_bytes = limit // 4 if at_once else limit
                sizes[key] = sum(new.values()), move.staging_bytes * len({**new, **old}), most_bytes
            size, staging, most_bytes = sizes[key]
            if batch and total + size + max(most_staging, staging) > most_bytes:
                batches.append(tuple(batch))
                batch, total, most_staging = [], 0, 0
            batch.append(index)
            total, most_staging = total + size, max(most_staging, staging)
        batches.append(tuple(batch))
    return tuple(batches)


def plan_reshard(
    tree: Any,
    how: How,
    mesh: AnyMesh | None = None,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
    cache_resharding_plans: bool = False,
    max_bytes_in_flight: int | None = None,
) -> ReshardPlan:
    """Says what `reshard` would carry, by which route, and what every device would hold meanwhile. Nothing moves.

    The plan is for the devices that the shardings name. CPU devices of one process share their memory and are on one
    network, so less is in flight between them, and nothing is passed on.

    **Arguments:**

    - `tree`: a pytree of arrays, or of `jax.ShapeDtypeStruct`s with shardings in their place.
    - `how`, `mesh`, `donate`, `may_alias`, `cache_resharding_plans`, `max_bytes_in_flight`: as in `reshard`.

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
    options = MoveOptions(donate, may_alias, cache_resharding_plans, max_bytes_in_flight)
    return prepare(tree, how, options, mesh=mesh, values=False, caller="plan_reshard").plan
