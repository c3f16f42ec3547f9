"""The running of a sync, round by round, between devices of one process or of many."""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, final

import attrs
import jax
from jax.sharding import NamedSharding, Sharding

from shardrules.core.axes import mesh_text
from shardrules.core.errors import ConfigError, DisagreementError, NoMeshError, TreeError
from shardrules.core.finding import Finding, plan_error
from shardrules.core.jax_state import process_count
from shardrules.core.spec import spec_repr
from shardrules.mesh.processes import exchange
from shardrules.moves.bits import local_shards
from shardrules.moves.donor import Donor, live_buffers
from shardrules.moves.pieces import exchange_pieces
from shardrules.moves.prepare import is_deleted
from shardrules.moves.schedule import Piece
from shardrules.moves.sync.arrays import Arrays, PlannedDevice, side_name
from shardrules.moves.sync.checksums import WAIT_SECONDS, Checksums
from shardrules.moves.sync.flows import PartFlow, itemsize
from shardrules.moves.sync.schedule import Leg, SyncSchedule
from shardrules.moves.sync.shards import DeviceShards, HostShards, ShardKind
from shardrules.moves.sync.strided import SOURCE, TARGET


def run_schedule(
    schedule: SyncSchedule,
    fingerprint: str,
    tree: Any,
    into: Any = None,
    *,
    donate: bool = False,
    check: Literal["sums"] | None = None,
) -> Any:
    """Returns the target tree of a source tree. All is checked before anything moves."""
    if check not in (None, "sums"):
        raise ConfigError(f"check must be 'sums' or None, got {check!r:.60}")
    _check_devices(schedule)
    used = [flow.parts.arrays[SOURCE].tolist() for flow in schedule.flows if flow.source is not None]
    read = sorted(set().union(*used))
    values = _values(schedule.source, tree, 0, read)
    old = None if into is None else _values(schedule.target, into, 1, range(len(schedule.target)))
    sources = {} if old is None else dict.fromkeys(buffer for value in values for buffer in live_buffers(value))
    if any(buffer in sources for array in old or () for buffer in live_buffers(array)):
        raise ConfigError("run: `into` has arrays of the source, which would be given up before they are read")
    _check_agreement(fingerprint)
    # 64-bit arrays keep their width, even if JAX's x64 mode is off again by now.
    dtypes = dict.fromkeys((*[schedule.source.dtypes[index] for index in read], *schedule.target.dtypes))
    wide = max(map(itemsize, dtypes), default=0) > 4
    with jax.transfer_guard("allow"), jax.enable_x64(True) if wide else contextlib.nullcontext():
        run = _Run.of(schedule, values, old, donate, check == "sums")
        result = run.run()
    return schedule.target.unflatten(result)


def _check_devices(schedule: SyncSchedule) -> None:
    planned = [device for device in schedule.devices if isinstance(device, PlannedDevice)]
    if planned:
        raise NoMeshError(
            f"run needs devices, and {len(planned)} of {len(schedule.devices)} of this plan's are made up for the "
            "shape of a mesh. Plan with meshes of devices: sr.create_mesh"
        )


def _values(arrays: Arrays, tree: Any, side: int, used: Sequence[int]) -> list[Any]:
    """The arrays of a tree, after comparing those that are used with the plan."""
    try:
        values = arrays.flatten(tree)
    except (ValueError, TypeError, IndexError) as error:
        raise TreeError(f"run: the tree does not have the structure of the plan's {side_name(side)}: {error}") from None
    findings: list[Finding] = []
    for index in used:
        path, shape = arrays.paths[index], arrays.shapes[index]
        why = _difference(values[index], shape, arrays.dtypes[index], arrays.shardings[index])
        if why:
            findings.append(Finding("error", "other-array", why, path, "Plan with this tree, or place it", shape))
    if findings:
        raise plan_error(f"run: arrays differ from the plan's {side_name(side)}", findings)
    return values


def _difference(value: Any, shape: tuple[int, ...], dtype: Any, sharding: Any) -> str:
    if not isinstance(value, jax.Array):
        return f"its type is {type(value).__name__}, not jax.Array"
    if is_deleted(value):
        return "it was deleted or donated"
    if value.shape != shape or value.dtype != dtype:
        return f"it is {value.dtype}{list(value.shape)}, the plan has {dtype}{list(shape)}"
    if isinstance(sharding, Sharding) and not value.sharding.is_equivalent_to(sharding, len(shape)):
        return f"its sharding is {_text(value.sharding)}, the plan has {_text(sharding)}"
    return ""


def _text(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return f"{sharding!r:.100}"
    return f"{spec_repr(sharding.spec)} on {mesh_text(sharding.mesh)}"


def _check_agreement(fingerprint: str) -> None:
    """Processes that run different plans would wait for each other forever."""
    if process_count() == 1:
        return
    prints = exchange(fingerprint, "the sync of every process", "run", WAIT_SECONDS)
    if len(dict.fromkeys(prints)) > 1:
        raise DisagreementError(
            f"run: {len(prints)} processes have {len(dict.fromkeys(prints))} different plans, so nothing moves. Make "
            "the plan from the same trees, meshes and names on all of them"
        )


@final
@attrs.define(eq=False)
class _Run:
    schedule: SyncSchedule
    values: list[Any]
    """The source; `None` once an array is freed."""
    old: list[Any] | None
    """The arrays of the target that are replaced."""
    donor: Donor | None
    last_reads: dict[int, list[int]]
    """For each round the arrays that it reads last, where they are given up."""
    sums: "Checksums | None"
    kind: ShardKind
    here: int
    opened: dict[int, dict[Any, Any]] = attrs.field(factory=dict)
    shards: dict[int, dict[Any, Any]] = attrs.field(factory=dict)
    result: list[Any] = attrs.field(factory=list)

    @staticmethod
    def of(schedule: SyncSchedule, values: list[Any], old: list[Any] | None, donate: bool, check: bool) -> "_Run":
        is_host = all(device.platform == "cpu" for device in schedule.devices)
        donor, last_reads = (Donor.of(values), schedule.last_reads()) if donate else (None, {})
        sums = Checksums.of(schedule) if check else None
        return _Run(
            schedule,
            values,
            old,
            donor,
            last_reads,
            sums,
            HostShards() if is_host else DeviceShards(),
            jax.process_index(),
        )

    def run(self) -> list[Any]:
        deliveries = self.schedule.deliveries
        self.result = [None] * len(self.schedule.target)
        arrays = [flow.parts.arrays[TARGET] for flow in self.schedule.flows]
        done = 0
        for number, chosen in enumerate(deliveries.rounds()):
            legs = list(self.schedule.legs(chosen))
            self._move([leg for leg in legs if not leg.is_relayed], [leg for leg in legs if leg.is_relayed])
            # Devices run behind: the next round would be on its way, too.
            jax.block_until_ready([shard for shards in self.shards.values() for shard in shards.values()])
            # Contents come target by target: those before the next one's are complete.
            following = chosen.stop
            first = len(self.result)
            if following < len(deliveries.flow):
                flow, row = int(deliveries.flow[following]), int(deliveries.row[following])
                first = int(arrays[flow][row])
            for index in range(done, first):
                self._finish(index)
            done = max(done, first)
            if self.donor is not None:
                for index in self.last_reads.get(number, ()):
                    self.opened.pop(index, None)
                    self.donor.release(self.values[index])
                self.donor.free()
        for index in range(done, len(self.result)):
            self._finish(index)
        if self.sums is not None:
            self.sums.compare(self.schedule.target.paths)
        return self.result

    def _move(self, direct: Sequence[Leg], relayed: Sequence[Leg]) -> None:
        """Moves the contents of a round: first those that are cut out of shards, then what is passed on."""
        passed: dict[tuple[int, int, int, int], Any] = {}
        relays = dict.fromkeys((id(leg.flow), leg.row, leg.content, leg.sender) for leg in relayed)
        for legs in (direct, relayed):
            far: dict[Any, list[Leg]] = {}
            for leg in legs:
                if self._process(leg.sender) != self._process(leg.receiver):
                    far.setdefault(self._form(leg), []).append(leg)
                elif self._process(leg.sender) == self.here:
                    content = self._content(leg, passed)
                    if leg.sender != leg.receiver:
                        content = self.kind.send(content, self.schedule.devices[leg.receiver])
                    self._arrive(leg, content, relays, passed)
            for (shape, dtype), group in far.items():
                self._exchange(group, shape, dtype, relays, passed)

    def _exchange(
        self, legs: Sequence[Leg], shape: tuple[int, ...], dtype: Any, relays: Any, passed: dict[Any, Any]
    ) -> None:
        """Exchanges contents of one form between processes. All processes go through the same turns."""
        rest = list(legs)
        devices = self.schedule.devices
        while rest:
            senders: dict[int, Leg] = {}
            receivers: dict[int, Leg] = {}
            later: list[Leg] = []
            for leg in rest:
                # In a turn a device sends one content at most, and receives one.
                if leg.sender in senders or leg.receiver in receivers:
                    later.append(leg)
                else:
                    senders[leg.sender] = receivers[leg.receiver] = leg
            rest = later
            contents = {
                devices[sender]: self.kind.to_device(self._content(leg, passed), devices[sender])
                for sender, leg in senders.items()
                if self._process(sender) == self.here
            }
            pieces = [Piece((), devices[leg.sender], devices[leg.receiver]) for leg in senders.values()]
            arrived = exchange_pieces([contents], pieces, shape, dtype)[0]
            for receiver, leg in receivers.items():
                if devices[receiver] in arrived:
                    self._arrive(leg, self.kind.from_device(arrived[devices[receiver]]), relays, passed)

    def _process(self, device: int) -> int:
        return self.schedule.devices[device].process_index

    def _form(self, leg: Leg) -> tuple[tuple[int, ...], Any]:
        """The shape and the dtype of a content on its way."""
        arrays, side = (self.schedule.target, TARGET) if leg.flow.casts_first else (self.schedule.source, SOURCE)
        dtype = arrays.dtypes[int(leg.flow.parts.arrays[side][leg.row])]
        return tuple(step.size for step in leg.flow.inner), dtype

    def _content(self, leg: Leg, passed: dict[Any, Any]) -> Any:
        """A content in the form in which it travels, on the device that sends it."""
        content = passed[id(leg.flow), leg.row, leg.content, leg.sender] if leg.is_relayed else self._cut(leg)
        if self.sums is not None:
            self.sums.add_sent(leg, self._changed(leg.flow, content))
        return content

    def _changed(self, flow: PartFlow, content: Any) -> Any:
        """A content as it is written, after it has come."""
        return (
            content if flow.source is not None and flow.casts_first else self.kind.change(content, flow.parts.changes)
        )

    def _cut(self, leg: Leg) -> Any:
        flow = leg.flow
        if flow.source is None:
            return None
        index = int(flow.parts.arrays[SOURCE][leg.row])
        shards = self.opened.get(index)
        if shards is None:
            shards = self.opened[index] = {
                device: self.kind.open(shard) for device, shard in local_shards(self.values[index]).items()
            }
        shard = shards[self.schedule.devices[leg.sender]]
        changes = flow.parts.changes if flow.casts_first else ()
        return self.kind.cut(shard, flow, flow.offsets(SOURCE, leg.row, leg.content), changes)

    def _arrive(self, leg: Leg, content: Any, relays: Any, passed: dict[Any, Any]) -> None:
        flow = leg.flow
        if (id(flow), leg.row, leg.content, leg.receiver) in relays:
            passed[id(flow), leg.row, leg.content, leg.receiver] = content
        content = self._changed(flow, content)
        index, device = int(flow.parts.arrays[TARGET][leg.row]), self.schedule.devices[leg.receiver]
        if index not in self.shards:
            self.shards[index] = self._begin(index)
        offset = flow.offsets(TARGET, leg.row, leg.content)
        shards = self.shards[index]
        shards[device] = self.kind.join(shards[device], content, flow, offset)

    def _begin(self, index: int) -> dict[Any, Any]:
        """The shards of a new array, those of the array that it replaces where devices can fill them."""
        target = self.schedule.target
        sharding, shape = target.shardings[index], target.shapes[index]
        assert sharding is not None
        old = None if self.old is None else self.old[index]
        # An array at two paths is taken by the first.
        if old is not None and isinstance(self.kind, DeviceShards) and not is_deleted(old):
            return dict(local_shards(old))
        if old is not None:
            old.delete()
        cell = sharding.shard_shape(shape)
        return {
            device: self.kind.blank(cell, target.dtypes[index], device)
            for device in sharding.addressable_devices_indices_map(shape)
        }

    def _finish(self, index: int) -> None:
        target = self.schedule.target
        sharding = target.shardings[index]
        assert sharding is not None
        shards = self.shards.pop(index) if index in self.shards else self._begin(index)
        if self.sums is not None:
            self.sums.add_arrived(index, shards)
        self.result[index] = self.kind.finish(target.shapes[index], target.dtypes[index], sharding, shards)
