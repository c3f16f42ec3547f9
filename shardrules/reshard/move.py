"""`reshard`: arrays from where they are to where they should be."""

import contextlib
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, final

import attrs
import jax
from jax.extend.backend import register_backend_cache
from jax.sharding import Sharding, SingleDeviceSharding

from shardrules.core.errors import DisagreementError, MeshError
from shardrules.core.jax_state import process_count, process_id, under_trace
from shardrules.mesh.processes import exchange
from shardrules.placement.destination import How
from shardrules.placement.shard import filter_shard
from shardrules.placement.traced import host_memory
from shardrules.placement.transfer import put
from shardrules.reshard.assemble import Recipe, adopts, assembled, give_back, recipe
from shardrules.reshard.bits import from_bits, is_key, memory_of, renamed, shards
from shardrules.reshard.pieces import Mover
from shardrules.reshard.plan import LeafMove, ReshardPlan, processes_of
from shardrules.reshard.prepare import KEPT, Prepared, check_shardings, prepare, with_numbers
from shardrules.reshard.schedule import Device, Schedule


def reshard(
    tree: Any,
    shardings: How,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
    cache_resharding_plans: bool = False,
    max_bytes_in_flight: int | None = None,
) -> Any:
    """Moves every array of a tree to its sharding, between any two meshes: other axes, other devices, fewer or more.

    Every piece goes straight from a device that has it to the one that is to have it, and nothing is gathered on the
    way. What cannot be moved is one error that lists every such array, and then nothing has moved. `plan_reshard` says
    beforehand what a move carries and takes. Where several processes hold arrays together, all of them call it.

    **Arguments:**

    - `tree`: a pytree of arrays and numbers, on devices or on the host. Where a sharding says where they go, numbers
        become arrays; `True` and `False` are flags, and stay. Under a rule or a plan all numbers stay. Weak types
        become strong.
    - `shardings`: a sharding, a tree or prefix of them, or a rule or plan, on the mesh it has or the one in force.
    - `donate`: give up each array as soon as it has moved. One that stays as it is, is kept, and so is one that shares
        memory with another that is needed.
    - `may_alias`: `False` asks for new arrays even where nothing moves. Else the result may share memory with an array
        that lies as it should already, and goes when that is deleted.
    - `cache_resharding_plans`: keep what was worked out for each shape and pair of shardings, for later calls: at most
        4,096 of them, until `jax.clear_caches()`.
    - `max_bytes_in_flight`: arrays are moved in batches of so many bytes, over all devices and with what is under way,
        and a batch begins when the one before has arrived. An array that is larger makes a batch of its own. By default
        256 MiB.

    **Returns:**

    The tree on devices. An array that lies as it should is returned as it is, unless `may_alias` is `False`.

    **Raises:**

    `PlanError`, listing every array that cannot be moved: dimensions that do not divide, deleted arrays, devices of
    another backend; `TreeError` for something that is no sharding, or a tree that is no prefix; `DisagreementError`
    where processes are about to make different moves.

    ```python
    mesh = sr.create_mesh("data:8")
    half = sr.create_mesh("model:4", devices=jax.devices()[4:])
    x = sr.filter_shard(np.arange(64.0).reshape(8, 8), P("data"), mesh)
    y = sr.reshard({"w": x}, jax.NamedSharding(half, P(None, "model")))["w"]
    assert y.sharding.spec == P(None, "model") and (np.asarray(y) == np.asarray(x)).all()
    ```
    """
    if under_trace():
        arrays, _ = with_numbers(tree, shardings)
        check_shardings(arrays, shardings, "reshard")
        return filter_shard(arrays, shardings)
    prepared = prepare(
        tree,
        shardings,
        donate=donate,
        may_alias=may_alias,
        cache_resharding_plans=cache_resharding_plans,
        max_bytes_in_flight=max_bytes_in_flight,
        who="reshard",
    )
    return moved(prepared)


def moved(prepared: Prepared) -> Any:
    """Carries a move out.

    **Arguments:**

    - `prepared`: the move.

    **Returns:**

    The tree, in its new place.

    **Raises:**

    `DisagreementError` where processes are about to make different moves.
    """
    values, plan = prepared.target.values, prepared.plan
    _agree(plan)
    result = list(values)
    donor = _Donor.of(prepared) if plan.donate else None
    tool = _kept_tool if prepared.kept else functools.cache(_make_tool)
    with jax.transfer_guard("allow"):  # it was asked for
        for batch in plan.batches:
            groups: dict[int, list[int]] = {}  # arrays with one schedule, which travel together
            for one in batch:
                groups.setdefault(id(plan.moves[one].schedule), []).append(one)
            for group in groups.values():
                moves = [plan.moves[one] for one in group]
                old = [values[prepared.numbers[one]] for one in group]
                new = _carried(old, [prepared.held[one] for one in group], moves, tool)
                _verify(moves, new)
                for one, array in zip(group, new, strict=True):
                    result[prepared.numbers[one]] = array
            arrived = [result[prepared.numbers[one]] for one in batch]
            if donor is not None or batch is not plan.batches[-1]:
                jax.block_until_ready(arrived)
            if donor is not None:
                donor.give_up(batch, arrived)
    return prepared.target.treedef.unflatten(result)


def _agree(plan: ReshardPlan) -> None:
    """Processes that make different moves would wait for each other for ever."""
    if process_count() == 1 or all(len(processes_of(one)) <= 1 for one in plan.moves):
        return
    told = [f"{one.path} {one.shape} {one.dtype} {one.source} {one.target} {one.copied}" for one in plan.moves]
    names = "the move of every process"
    marks = exchange(hashlib.sha256("\n".join(told).encode()).hexdigest(), names, "reshard", 200)
    count = len(dict.fromkeys(marks))
    if count > 1:
        raise DisagreementError(
            f"reshard: {len(marks)} processes are about to make {count} different moves, so none of them is made. "
            f"Process {process_id()} begins with: {told[0] if told else None}. All processes call it with the same "
            "tree and shardings; an array that each of them has on a device of its own is not the same one"
        )


def _carried(
    values: Sequence[Any],
    held: Sequence[Mapping[Device, jax.Array]],
    moves: Sequence[LeafMove],
    tool: Callable[[Schedule], Recipe | Mover],
) -> list[Any]:
    """Arrays that have one schedule (or come from the host), in their new shardings."""
    move, target = moves[0].schedule, moves[0].target
    if move is None:
        given = [value.copy() if one.copied else value for value, one in zip(values, moves, strict=True)]
        return put(given, [one.target for one in moves])
    if moves[0].route == "alias":
        return [value if value.sharding == target else renamed(value, target) for value in values]
    made_of = [shards(one, values[0].dtype, move.source) for one in held]
    by = tool(move)
    wide = jax.dtypes.itemsize_bits(move.dtype) > 32  # it stays so when JAX's x64 mode is off again
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        if isinstance(by, Mover):
            new = _by_pieces(made_of, by, values[0].sharding, target)
        else:
            new = [assembled(one, by, move, move.dtype, target) for one in made_of]
    return [from_bits(one, value, target) for one, value in zip(new, values, strict=True)]


def _make_tool(move: Schedule) -> Recipe | Mover:
    """What carries out moves of one schedule: shards are put together in memory, or sent in pieces."""
    return recipe(move) if adopts(move) else Mover(move)


_kept_tool = functools.lru_cache(KEPT)(_make_tool)
register_backend_cache(_kept_tool, "shardrules: tools of moves")


def _by_pieces(
    arrays: Sequence[Mapping[Device, jax.Array]], mover: Mover, source: Sharding, target: Sharding
) -> list[jax.Array]:
    """Programs cut and join in the memory of devices: what lies in the host's goes there first, and back in the end."""
    dtype = mover.move.dtype
    if host_memory(source) is not None:
        arrays = [
            {
                device: jax.device_put(one, SingleDeviceSharding(device, memory_kind=_default_memory(device)))
                for device, one in held.items()
            }
            for held in arrays
        ]
    if host_memory(target) is None:
        return mover(arrays, dtype, target)
    on_devices = target.with_memory_kind(_default_memory(next(iter(mover.move.target))))
    return jax.device_put(mover(arrays, dtype, on_devices), target)


def _default_memory(device: Device) -> str:
    return device.default_memory().kind


def _verify(moves: Sequence[LeafMove], arrays: Sequence[jax.Array]) -> None:
    """Looks where arrays lie in the end: each by its sharding, and one of them by its shards."""
    for move, array in zip(moves, arrays, strict=True):
        # JAX writes the specs of keys in their full length.
        same = array.sharding.is_equivalent_to(move.target, array.ndim) if is_key(move.dtype) else None
        if not (array.sharding == move.target if same is None else same) or array.shape != move.shape:
            raise MeshError(f"reshard: {move.path} {move.shape} was to lie by {move.target}, and is {array!r:.200}")
        if array.dtype != move.dtype:
            raise MeshError(f"reshard: {move.path} {move.shape} was {move.dtype} and is {array.dtype}")
    held = [shard.device for shard in arrays[0].addressable_shards]
    wanted = list(moves[0].target.addressable_devices_indices_map(moves[0].shape))
    if held != wanted:
        raise MeshError(f"reshard: {moves[0].path} was to lie on {wanted}, and lies on {held}")


@final
@attrs.frozen(eq=False)
class _Donor:
    """Gives arrays up, once nothing needs what they are made of: arrays may share shards, within the tree and with what
    became of it."""

    prepared: Prepared
    uses: Counter[Hashable]
    waiting: list[int]

    @classmethod
    def of(cls, prepared: Prepared) -> "_Donor":
        every = (memory_of(prepared.target.values[number]) for number in prepared.numbers)
        return cls(prepared, Counter(one for shards in every for one in shards), [])

    def give_up(self, batch: Sequence[int], arrived: Sequence[jax.Array]) -> None:
        values = [self.prepared.target.values[self.prepared.numbers[one]] for one in batch]
        for one, value, new in zip(batch, values, arrived, strict=True):
            if not isinstance(value, jax.Array):
                continue
            self.uses.subtract(memory_of(value))
            self.uses.update(memory_of(new))
            if self.prepared.plan.moves[one].route != "alias":
                self.waiting.append(one)
        waiting, self.waiting[:] = list(self.waiting), []
        for one in waiting:
            value = self.prepared.target.values[self.prepared.numbers[one]]
            if value.is_deleted():
                continue
            if any(self.uses[shard] for shard in memory_of(value)):
                self.waiting.append(one)
            else:
                value.delete()
        give_back()
