"""`reshard`: arrays from one sharding to another."""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.backend import register_backend_cache
from jax.sharding import Sharding, SingleDeviceSharding

from shardrules.core.axes import AnyMesh
from shardrules.core.boxes import share_variables
from shardrules.core.errors import DisagreementError
from shardrules.core.jax_state import device_put, process_count, process_id, under_trace
from shardrules.mesh.processes import exchange
from shardrules.moves.assemble import Recipe, assemble, make_recipe, moves_in_memory, release_freed_memory
from shardrules.moves.bits import buffers_of, data_shards, from_data, with_sharding
from shardrules.moves.donor import Donor
from shardrules.moves.pieces import Mover, Shards
from shardrules.moves.plan import LeafMove, ReshardPlan, processes_of
from shardrules.moves.prepare import CACHED_SCHEDULES, MoveOptions, Prepared, prepare, read_how
from shardrules.moves.schedule import Device, Schedule
from shardrules.placement.shard import filter_shard
from shardrules.placement.traced import host_memory
from shardrules.placement.transfer import put
from shardrules.rules.how import How


def reshard(
    x: Any,
    sharding: How,
    mesh: AnyMesh | None = None,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
    cache_resharding_plans: bool = False,
    max_bytes_in_flight: int | None = None,
) -> Any:
    """Moves every array of a tree to its sharding, between any two meshes: other axes, other devices, fewer or more.

    Every piece goes straight from a device that has it to a device that needs it; nothing is gathered on the way. If
    any array cannot be moved, one error lists every such array, and nothing moves. `plan_reshard` says beforehand what
    a move carries and takes. Where several processes hold arrays together, all of them call it.

    **Arguments:**

    - `x`: a pytree of arrays and numbers, on devices or on the host. Where a sharding covers them, numbers become
        arrays; `True` and `False` are flags, and stay. Under a rule or a plan all numbers stay. Weak types become
        strong.
    - `sharding`: what `how` is in `filter_shard`: a sharding, a rule, a plan, a tree or prefix of specs and shardings,
        a device, or a function from the tree to one of those.
    - `mesh`: the mesh for rules, plans and specs; by default the plan's own, or the mesh in force.
    - `donate`: free each array as soon as it has moved. An array that stays in place is kept, and so is one that shares
        memory with another that is still needed.
    - `may_alias`: with `False` the result has new arrays even where nothing moves. Otherwise an array that is already
        in place may share its memory with the result, and deleting one deletes the other.
    - `cache_resharding_plans`: keep what was computed for each shape and pair of shardings for later calls: at most
        4,096 of them, until `jax.clear_caches()`.
    - `max_bytes_in_flight`: arrays move in batches of at most this many bytes, over all devices and with what is in
        flight; a batch begins when the previous one has arrived. A larger array makes a batch of its own. By default
        256 MiB.

    **Returns:**

    The tree on devices. An array that is already in place is returned as it is, unless `may_alias` is `False`.

    **Raises:**

    `PlanError`, listing every array that cannot be moved: dimensions that do not divide, deleted arrays, devices of
    another backend; `ConfigError` for something that is not a sharding; `TreeError` for a tree that is not a prefix;
    `DisagreementError` where processes are about to make different moves.

    ```python
    mesh = sr.create_mesh("data:8")
    half = sr.create_mesh("model:4", devices=jax.devices()[4:])
    x = sr.filter_shard(np.arange(64.0).reshape(8, 8), P("data"), mesh)
    y = sr.reshard({"w": x}, jax.NamedSharding(half, P(None, "model")))["w"]
    assert y.sharding.spec == P(None, "model") and (np.asarray(y) == np.asarray(x)).all()
    ```
    """
    if under_trace():
        arrays, sharding, _ = read_how(x, sharding, mesh, "reshard")
        return filter_shard(arrays, sharding, mesh)
    options = MoveOptions(donate, may_alias, cache_resharding_plans, max_bytes_in_flight)
    return move_tree(prepare(x, sharding, options, mesh=mesh, caller="reshard"))


def move_tree(prepared: Prepared) -> Any:
    """Makes a prepared move, and returns the tree in its new place."""
    values, plan = prepared.destination.values, prepared.plan
    _check_agreement(plan)
    result = list(values)
    donor = Donor.of(values[index] for index in prepared.leaf_indices) if plan.donate else None
    make_tool = _cached_tool if prepared.cached else functools.cache(_make_tool)
    # The user asked for these transfers.
    with jax.transfer_guard("allow"):
        for batch in plan.batches:
            # Moves with one schedule, which travel together.
            groups: dict[int, list[int]] = {}
            for index in batch:
                groups.setdefault(id(plan.moves[index].schedule), []).append(index)
            for group in groups.values():
                moves = [plan.moves[index] for index in group]
                old = [values[prepared.leaf_indices[index]] for index in group]
                new = _move_group(old, [prepared.shards[index] for index in group], moves, make_tool)
                for index, array in zip(group, new, strict=True):
                    result[prepared.leaf_indices[index]] = array
            arrived = [result[prepared.leaf_indices[index]] for index in batch]
            if donor is not None or batch is not plan.batches[-1]:
                jax.block_until_ready(arrived)
            if donor is not None:
                _free(donor, prepared, batch, arrived)
    return share_variables(prepared.destination.treedef.unflatten(result), prepared.destination.shared)


def _check_agreement(plan: ReshardPlan) -> None:
    """Processes that make different moves would wait for each other forever."""
    if process_count() == 1 or all(len(processes_of(move)) <= 1 for move in plan.moves):
        return
    lines = [
        f"{move.path} {move.shape} {move.dtype} {move.source} {move.target} {move.copy_reason}" for move in plan.moves
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    # 200 seconds: processes may still be compiling the step before the move.
    digests = exchange(digest, "the move of every process", "reshard", 200)
    count = len(dict.fromkeys(digests))
    if count > 1:
        raise DisagreementError(
            f"reshard: {len(digests)} processes are about to make {count} different moves, so nothing moves. "
            f"Process {process_id()} begins with: {lines[0] if lines else None}. All processes must call it with the "
            "same tree and shardings; arrays that each process has on a device of its own are different arrays"
        )


_Tool: TypeAlias = Recipe | Mover


def _move_group(
    values: Sequence[Any], shards: Sequence[Shards], moves: Sequence[LeafMove], make_tool: Callable[[Schedule], _Tool]
) -> list[Any]:
    """Arrays that have one schedule (or come from the host), in their new shardings."""
    schedule, target = moves[0].schedule, moves[0].target
    if schedule is None:
        host_values = [value.copy() if move.copy_reason else value for value, move in zip(values, moves, strict=True)]
        return put(host_values, [move.target for move in moves])
    if moves[0].route == "alias":
        # Nothing moves: at most the sharding is written differently.
        return [value if value.sharding == target else with_sharding(value, target) for value in values]
    data = [data_shards(array_shards, values[0].dtype, schedule.source) for array_shards in shards]
    tool = make_tool(schedule)
    # 64-bit arrays keep their width, even if JAX's x64 mode is off again by now.
    wide = jax.dtypes.itemsize_bits(schedule.dtype) > 32
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        if isinstance(tool, Mover):
            new = _move_by_pieces(data, tool, values[0].sharding, target)
        else:
            new = [assemble(array_shards, tool, schedule, schedule.dtype, target) for array_shards in data]
    return [from_data(array, value, target) for array, value in zip(new, values, strict=True)]


def _make_tool(schedule: Schedule) -> _Tool:
    """The mover of the arrays of one schedule: shards are put together in memory, or sent in pieces."""
    return make_recipe(schedule) if moves_in_memory(schedule) else Mover(schedule)


_cached_tool = functools.lru_cache(CACHED_SCHEDULES)(_make_tool)
register_backend_cache(_cached_tool, "shardrules: tools of moves")


def _move_by_pieces(
    arrays: Sequence[Mapping[Device, jax.Array]], mover: Mover, source: Sharding, target: Sharding
) -> list[jax.Array]:
    """Moves arrays by programs on devices: shards in the host's memory are copied to devices first, and back last."""
    if host_memory(source) is not None:
        arrays = [
            {
                device: device_put(shard, SingleDeviceSharding(device, memory_kind=device.default_memory().kind))
                for device, shard in shards.items()
            }
            for shards in arrays
        ]
    if host_memory(target) is None:
        return mover(arrays, mover.schedule.dtype, target)
    on_devices = target.with_memory_kind(next(iter(mover.schedule.target)).default_memory().kind)
    return device_put(mover(arrays, mover.schedule.dtype, on_devices), target)


def _free(donor: Donor, prepared: Prepared, batch: Sequence[int], arrived: Sequence[jax.Array]) -> None:
    """Frees the arrays of a batch that has arrived, and earlier ones whose buffers are no longer in use."""
    for index, new in zip(batch, arrived, strict=True):
        value = prepared.destination.values[prepared.leaf_indices[index]]
        # An array that stays keeps its buffers.
        if isinstance(value, jax.Array) and prepared.plan.moves[index].route != "alias":
            donor.uses.update(buffers_of(new))
            donor.release(value)
    donor.free()
    release_freed_memory()
