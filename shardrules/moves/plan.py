"""The plan of a move: its bytes, from where to where, and its cost, before it is made."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
from jax.sharding import NamedSharding, Sharding

from shardrules.core.axes import mesh_text
from shardrules.core.finding import common_path, shape_text, template
from shardrules.core.spec import array_bytes, packs_on, spec_repr
from shardrules.core.storage.records import Format
from shardrules.core.text import bytes_text
from shardrules.core.views.blocks import ranges
from shardrules.core.views.table import MOST_ROWS, aligned
from shardrules.moves.assemble import moves_in_memory
from shardrules.moves.pieces import staging_bytes
from shardrules.moves.schedule import Box, Schedule
from shardrules.placement.traced import host_memory

Route: TypeAlias = Literal["alias", "local", "direct", "intermediate", "host"]
"""The route of an array; `LeafMove.route` says what each means."""


@final
@attrs.frozen(eq=False)
class LeafMove:
    """The move of one array to its new sharding."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    source: Sharding | None
    """`None` for what comes from the host."""
    target: Sharding
    schedule: Schedule | None = attrs.field(default=None, repr=False)
    """The pieces that devices send to others; `None` for what comes from the host."""
    copy_reason: str = ""
    """The reason for which the array is copied even if nothing moves; empty where it is not."""

    @property
    def route(self) -> Route:
        """`"alias"`: the array stays; `"local"`: each device has its new shard within its old one; `"direct"`: pieces
        go from devices that have them to devices that need them; `"intermediate"`: some are received by one device of a
        network and passed on inside it; `"host"`: the array comes from the host."""
        if self.schedule is None:
            return "host"
        route = self.schedule.sums.route
        if self.copy_reason and route == "alias":
            return "local"
        return "intermediate" if route == "relayed" else route

    @property
    def moved_bytes(self) -> int:
        """The bytes from one device to another, or from the host to devices, over all of them."""
        return sum(self.received_bytes().values())

    @property
    def kept_bytes(self) -> int:
        """The bytes that devices of the new sharding have already, over all of them."""
        return 0 if self.schedule is None else sum(self.schedule.sums.kept.values())

    def received_bytes(self) -> Mapping[Any, int]:
        """Returns the bytes that each device receives; devices that receive nothing are left out."""
        if self.schedule is not None:
            return self.schedule.sums.received
        devices = list(self.target.devices_indices_map(self.shape))
        packed = packs_on(devices[0], self.dtype)
        return dict.fromkeys(devices, array_bytes(self.target.shard_shape(self.shape), self.dtype, packed=packed))

    def old_bytes(self) -> dict[int, int]:
        """Returns the bytes of the array on each device before the move, by the device's id."""
        return {} if self.schedule is None else _box_bytes(self.schedule, self.schedule.source)

    def new_bytes(self) -> dict[int, int]:
        """Returns the bytes that the move adds on each device: its new shard, or nothing where the array stays."""
        if self.schedule is None:
            return {device.id: amount for device, amount in self.received_bytes().items()}
        return {} if self.route == "alias" else _box_bytes(self.schedule, self.schedule.target)

    def freed_bytes(self) -> dict[int, int]:
        """Returns the bytes that each device frees when the array is donated, by the device's id."""
        return {} if self.route == "alias" else self.old_bytes()

    @property
    def staging_bytes(self) -> int:
        """An upper bound of what is in flight on a device, beside old and new shards."""
        if self.schedule is None or self.route == "alias" or moves_in_memory(self.schedule):
            return 0
        # Programs work in the memory of devices: shards in the host's memory are copied there, and back.
        copies = (
            (self.old_bytes, host_memory(self.source) if self.source else None),
            (self.new_bytes, host_memory(self.target)),
        )
        on_host = sum(max(shard_bytes().values()) for shard_bytes, memory in copies if memory is not None)
        return staging_bytes(self.schedule) + on_host

    @property
    def reason(self) -> str:
        """The reason for this route."""
        match self.route:
            case "alias":
                return "already in place"
            case "local" if self.copy_reason:
                return self.copy_reason
            case "local":
                return "each device has its part already"
            case "host":
                return "each device gets its part from the host"
        # All others come from the host.
        assert self.schedule is not None
        sums = self.schedule.sums
        pieces = f"{sums.piece_count} piece{'s' * (sums.piece_count > 1)}"
        if self.route == "direct":
            return f"{pieces}, each straight from a device that has it"
        once = bytes_text(self.moved_bytes - sums.relayed_bytes)
        return f"{pieces}; {once} from other networks, {bytes_text(sums.relayed_bytes)} passed on within one"


def processes_of(move: LeafMove) -> frozenset[int]:
    """Returns the indices of the processes that take part in a move."""
    if move.schedule is not None:
        return move.schedule.processes
    return frozenset(device.process_index for device in move.target.device_set)


def _box_bytes(schedule: Schedule, boxes: Mapping[Any, Box]) -> dict[int, int]:
    return {device.id: schedule.box_bytes(box) for device, box in boxes.items()}


@final
@attrs.frozen(eq=False)
class ReshardPlan:
    """The bytes and the cost of a move, before it is made. Printed, it is a table."""

    moves: tuple[LeafMove, ...]
    """One for each array, in the order of the tree."""
    batches: tuple[tuple[int, ...], ...] = attrs.field(repr=False)
    """The indices of the moves that are made together, in their order."""
    donate: bool = False
    """True where each array is given up once it has moved."""

    @property
    def moved_bytes(self) -> int:
        """The bytes from device to device or from the host to devices, over all of them."""
        return sum(move.moved_bytes * count for move, count in _count_equal(self.moves))

    @property
    def kept_bytes(self) -> int:
        """The bytes that devices have already of their new shards, over all of them."""
        return sum(move.kept_bytes * count for move, count in _count_equal(self.moves))

    @property
    def sent_bytes(self) -> dict[int, int]:
        """The bytes that each device sends to others, by its id."""
        return self._sum_by_device(lambda move: {} if move.schedule is None else move.schedule.sums.sent)

    @property
    def received_bytes(self) -> dict[int, int]:
        """The bytes that each device receives from others and from the host, by its id."""
        return self._sum_by_device(LeafMove.received_bytes)

    @property
    def peak_bytes(self) -> dict[int, int]:
        """The most that each device holds at any moment of the move, by its id: the arrays that have not moved yet,
        those that have, and what is in flight. It is an upper bound."""
        # Arrays between batches, and what the moves of a schedule take beside them while they run.
        live: dict[int, int] = {}
        staging: dict[int, int] = {}
        for move, count in _count_equal(self.moves):
            _add(live, move.old_bytes(), count)
            staging[id(move.schedule)] = max(staging.get(id(move.schedule), 0), move.staging_bytes)
        peak = dict(live)
        for batch in self.batches:
            arriving: dict[int, int] = {}
            leaving: dict[int, int] = {}
            for move, count in _count_equal([self.moves[index] for index in batch]):
                _add(arriving, move.new_bytes(), count)
                _add(leaving, move.old_bytes(), count)
            # Moves of a batch run one after the other, so only the largest staging counts.
            most = max(staging[id(self.moves[index].schedule)] for index in batch)
            for device in dict.fromkeys((*leaving, *arriving)):
                # A batch arrives before anything of it is freed.
                peak[device] = max(peak.get(device, 0), live.get(device, 0) + arriving.get(device, 0) + most)
            _add(live, arriving, 1)
            if self.donate:
                for move, count in _count_equal([self.moves[index] for index in batch]):
                    _add(live, move.freed_bytes(), -count)
        return dict(sorted(peak.items()))

    def to_json(self) -> str:
        """Returns the plan as JSON, a list of arrays and a table of devices: the same text for equal plans."""
        arrays = [
            {
                "path": move.path,
                "shape": list(move.shape),
                "dtype": str(move.dtype),
                "source": _sharding_text(move.source),
                "target": _sharding_text(move.target),
                "route": move.route,
                "reason": move.reason,
                "moved_bytes": move.moved_bytes,
                "kept_bytes": move.kept_bytes,
            }
            for move in self.moves
        ]
        sent, received = self.sent_bytes, self.received_bytes
        devices = {
            str(device): {
                "sent_bytes": sent.get(device, 0),
                "received_bytes": received.get(device, 0),
                "peak_bytes": peak,
            }
            for device, peak in self.peak_bytes.items()
        }
        return _FORMAT.write({"arrays": arrays, "devices": devices, "donate": self.donate})

    def __str__(self) -> str:
        rows = list(_rows(self.moves))
        lines = aligned([_HEAD, *rows[:MOST_ROWS]], _RIGHT)
        lines += [f"and {len(rows) - MOST_ROWS:,} more: `moves` has all"] * (len(rows) > MOST_ROWS)
        arrays = "1 array" if len(self.moves) == 1 else f"{len(self.moves):,} arrays"
        lines.append(f"{arrays}: {bytes_text(self.moved_bytes)} move, {bytes_text(self.kept_bytes)} stay")
        peak = self.peak_bytes
        if peak:
            worst = max(peak, key=lambda device: peak[device])
            lines.append(
                f"a device sends at most {bytes_text(max(self.sent_bytes.values(), default=0))}, receives at most "
                f"{bytes_text(max(self.received_bytes.values(), default=0))}, and holds at most "
                f"{bytes_text(peak[worst])} at any moment (device {worst})"
            )
        return "\n".join(lines)

    def _sum_by_device(self, amounts: Callable[[LeafMove], Mapping[Any, int]]) -> dict[int, int]:
        result: dict[int, int] = {}
        for move, count in _count_equal(self.moves):
            _add(result, {device.id: amount for device, amount in amounts(move).items()}, count)
        return dict(sorted(result.items()))


def _count_equal(moves: Sequence[LeafMove]) -> list[tuple[LeafMove, int]]:
    """Moves that are alike, counted: what they carry is added up once for each kind."""
    counts: dict[Any, tuple[LeafMove, int]] = {}
    for move in moves:
        key = move.target, move.shape, str(move.dtype), id(move.schedule), move.copy_reason
        counts[key] = move, counts.get(key, (move, 0))[1] + 1
    return list(counts.values())


_FORMAT = Format("shardrules_moves", 1)

_HEAD = ("path", "shape", "dtype", "from", "to", "moves", "stays", "route", "why")
_RIGHT = (5, 6)


def _add(sums: dict[int, int], amounts: Mapping[int, int], count: int) -> None:
    for device, amount in amounts.items():
        sums[device] = sums.get(device, 0) + count * amount


def _rows(moves: Sequence[LeafMove]) -> list[tuple[str, ...]]:
    """One row for arrays that differ in nothing but the indices in their paths."""
    groups: dict[Any, tuple[str, LeafMove, int]] = {}
    for move in moves:
        shardings = _sharding_text(move.source), _sharding_text(move.target)
        key = template(move.path), move.shape, str(move.dtype), shardings, move.route, move.reason
        path, _, count = groups.get(key, (move.path, move, 0))
        groups[key] = (common_path(path, move.path) if count else path), move, count + 1
    return [
        (
            f"{path or '(the tree)'}{f'  x{count}' if count > 1 else ''}",
            shape_text(move.shape),
            str(move.dtype),
            _sharding_text(move.source),
            _sharding_text(move.target),
            bytes_text(count * move.moved_bytes),
            bytes_text(count * move.kept_bytes),
            move.route,
            move.reason,
        )
        for path, move, count in groups.values()
    ]


def _sharding_text(sharding: Sharding | None) -> str:
    if sharding is None:
        return "the host"
    ids = sorted(device.id for device in sharding.device_set)
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    if len(ids) == 1:
        return f"device {ids[0]}{memory}"
    layout = (
        f"{spec_repr(sharding.spec)} on {mesh_text(sharding.mesh)}" if isinstance(sharding, NamedSharding) else "split"
    )
    return f"{layout} (devices {ranges(ids)}){memory}"
