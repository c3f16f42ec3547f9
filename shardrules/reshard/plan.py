"""What a move carries, from where to where, and what it takes, before it is made."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
from jax.sharding import NamedSharding, Sharding

from shardrules.core.axes import mesh_text
from shardrules.core.check import bytes_text
from shardrules.core.finding import common_path, shape_text, template
from shardrules.core.spec import array_bytes, spec_repr
from shardrules.drawing.blocks import ranges
from shardrules.placement.traced import host_memory
from shardrules.reshard.assemble import adopts
from shardrules.reshard.pieces import staging_bytes
from shardrules.reshard.schedule import Box, Schedule

Route: TypeAlias = Literal["alias", "local", "direct", "intermediate", "host"]
"""How an array moves; `LeafMove.route` says what each means."""


@final
@attrs.frozen(eq=False)
class LeafMove:
    """How one array goes to its new sharding.

    **Arguments:**

    - `path`, `shape`, `dtype`: the array.
    - `source`: where it is; `None` on the host.
    - `target`: where it goes.
    - `schedule`: which device sends what to which; `None` for what comes from the host.
    - `copied`: why a new array is made even where nothing moves, or nothing.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    source: Sharding | None
    target: Sharding
    schedule: Schedule | None = attrs.field(default=None, repr=False)
    copied: str = ""

    @property
    def route(self) -> Route:
        """`"alias"`: it stays what it is; `"local"`: each device has its new shard within its old one; `"direct"`:
        pieces go from devices that have them to those that are to have them; `"intermediate"`: some are received by one
        device of a network and passed on inside it; `"host"`: it comes from the host."""
        if self.schedule is None:
            return "host"
        route = self.schedule.sums.route
        if self.copied and route == "alias":
            return "local"
        return "intermediate" if route == "relayed" else route

    @property
    def moved_bytes(self) -> int:
        """What goes from one device to another, or from the host to devices, over all of them."""
        return sum(self.received_bytes().values())

    @property
    def kept_bytes(self) -> int:
        """What devices of the new sharding have already, over all of them."""
        return 0 if self.schedule is None else sum(self.schedule.sums.kept.values())

    def received_bytes(self) -> Mapping[Any, int]:
        """Returns what each device receives.

        **Returns:**

        A dict that holds only devices that receive something.
        """
        if self.schedule is not None:
            return self.schedule.sums.received
        shard_bytes = array_bytes(self.target.shard_shape(self.shape), self.dtype)
        return dict.fromkeys(self.target.devices_indices_map(self.shape), shard_bytes)

    def old_bytes(self) -> dict[int, int]:
        """Returns what each device holds of the array before the move.

        **Returns:**

        A dict from the device's id to bytes.
        """
        return {} if self.schedule is None else _held(self.schedule, self.schedule.source)

    def new_bytes(self) -> dict[int, int]:
        """Returns what the move adds on each device: its new shard, or nothing where the array stays what it is.

        **Returns:**

        A dict from the device's id to bytes.
        """
        if self.schedule is None:
            return {device.id: amount for device, amount in self.received_bytes().items()}
        return {} if self.route == "alias" else _held(self.schedule, self.schedule.target)

    def freed_bytes(self) -> dict[int, int]:
        """Returns what each device gives up when the array is donated.

        **Returns:**

        A dict from the device's id to bytes.
        """
        return {} if self.route == "alias" else self.old_bytes()

    @property
    def staging_bytes(self) -> int:
        """What may be under way on a device beside that; an upper bound."""
        if self.schedule is None or self.route == "alias" or adopts(self.schedule):
            return 0
        on_host = (
            (self.old_bytes, host_memory(self.source) if self.source else None),
            (self.new_bytes, host_memory(self.target)),
        )
        return staging_bytes(self.schedule) + sum(max(held().values()) for held, kind in on_host if kind is not None)

    @property
    def reason(self) -> str:
        """Why it takes this route."""
        match self.route:
            case "alias":
                return "lies there already"
            case "local" if self.copied:
                return self.copied
            case "local":
                return "each device has its part already"
            case "host":
                return "from the host, each device its part"
        assert self.schedule is not None  # all others come from the host
        sums = self.schedule.sums
        pieces = f"{sums.piece_count} piece{'s' * (sums.piece_count > 1)}"
        if self.route == "direct":
            return f"{pieces}, each straight from a device that has it"
        once = bytes_text(self.moved_bytes - sums.relayed_bytes)
        return f"{pieces}; {once} come from afar, {bytes_text(sums.relayed_bytes)} are passed on nearby"


def processes_of(move: LeafMove) -> frozenset[int]:
    """Returns the processes that have a part in a move.

    **Arguments:**

    - `move`: the move of an array.

    **Returns:**

    Their numbers.
    """
    if move.schedule is not None:
        return move.schedule.processes
    return frozenset(device.process_index for device in move.target.device_set)


def _held(move: Schedule, boxes: Mapping[Any, Box]) -> dict[int, int]:
    return {device.id: move.box_bytes(box) for device, box in boxes.items()}


@final
@attrs.frozen(eq=False)
class ReshardPlan:
    """What a move carries and takes, before it is made. Printed, it is a table.

    **Arguments:**

    - `moves`: one `LeafMove` for each array, in the order of the tree.
    - `batches`: the numbers of the arrays that move together, in the order in which they do.
    - `donate`: whether each array is given up once it has moved.
    """

    moves: tuple[LeafMove, ...]
    batches: tuple[tuple[int, ...], ...] = attrs.field(repr=False)
    donate: bool = False

    @property
    def moved_bytes(self) -> int:
        """What goes from device to device or from the host to devices, over all of them."""
        return sum(one.moved_bytes * count for one, count in self._kinds())

    @property
    def kept_bytes(self) -> int:
        """What devices have already of what they are to have, over all of them."""
        return sum(one.kept_bytes * count for one, count in self._kinds())

    @property
    def sent_bytes(self) -> dict[int, int]:
        """What each device sends to others, by its id."""
        return self._summed(lambda one: {} if one.schedule is None else one.schedule.sums.sent)

    @property
    def received_bytes(self) -> dict[int, int]:
        """What each device receives from others and from the host, by its id."""
        return self._summed(LeafMove.received_bytes)

    @property
    def peak_bytes(self) -> dict[int, int]:
        """The most that each device holds at any moment of the move, by its id: the arrays that are still where they
        were, those that are where they should be, and what is under way. It is an upper bound."""
        live: dict[int, int] = {}
        staging: dict[int, int] = {}
        for move, count in self._kinds():
            _add(live, move.old_bytes(), count)
            staging[id(move.schedule)] = max(staging.get(id(move.schedule), 0), move.staging_bytes)
        peak = dict(live)
        for batch in self.batches:
            coming: dict[int, int] = {}
            leaving: dict[int, int] = {}
            for move, count in _kinds([self.moves[number] for number in batch]):
                _add(coming, move.new_bytes(), count)
                _add(leaving, move.old_bytes(), count)
            most = max(staging[id(self.moves[number].schedule)] for number in batch)
            for device in dict.fromkeys((*leaving, *coming)):
                peak[device] = max(peak.get(device, 0), live.get(device, 0) + coming.get(device, 0) + most)
            _add(live, coming, 1)
            if self.donate:
                for move, count in _kinds([self.moves[number] for number in batch]):
                    _add(live, move.freed_bytes(), -count)
        return dict(sorted(peak.items()))

    def to_json(self) -> str:
        """Returns the plan as JSON: a list of arrays and a table of devices.

        **Returns:**

        A text, the same for equal plans.
        """
        arrays = [
            {
                "path": one.path,
                "shape": list(one.shape),
                "dtype": str(one.dtype),
                "source": _place_text(one.source),
                "target": _place_text(one.target),
                "route": one.route,
                "reason": one.reason,
                "moved_bytes": one.moved_bytes,
                "kept_bytes": one.kept_bytes,
            }
            for one in self.moves
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
        return json.dumps({"arrays": arrays, "devices": devices, "donate": self.donate}, indent=1)

    def __str__(self) -> str:
        rows = _rows(self.moves)
        widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(len(_HEAD))]
        lines = [
            "  ".join(
                cell.rjust(width) if column in _RIGHT else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (_HEAD, tuple("-" * width for width in widths), *rows)
        ]
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

    def _kinds(self) -> list[tuple[LeafMove, int]]:
        return _kinds(self.moves)

    def _summed(self, amounts: Callable[[LeafMove], Mapping[Any, int]]) -> dict[int, int]:
        result: dict[int, int] = {}
        for one, count in self._kinds():
            _add(result, {device.id: amount for device, amount in amounts(one).items()}, count)
        return dict(sorted(result.items()))


def _kinds(moves: Sequence[LeafMove]) -> list[tuple[LeafMove, int]]:
    """Moves that are alike, counted: what they carry is added up once for each kind."""
    kinds: dict[Any, tuple[LeafMove, int]] = {}
    for one in moves:
        key = one.target, one.shape, str(one.dtype), id(one.schedule), one.copied
        kinds[key] = one, kinds.get(key, (one, 0))[1] + 1
    return list(kinds.values())


_HEAD = ("path", "shape", "dtype", "from", "to", "moves", "stays", "route", "why")
_RIGHT = (5, 6)


def _add(sums: dict[int, int], amounts: Mapping[int, int], count: int) -> None:
    for device, amount in amounts.items():
        sums[device] = sums.get(device, 0) + count * amount


def _rows(moves: Sequence[LeafMove]) -> list[tuple[str, ...]]:
    """One row for arrays that differ in nothing but the indices in their paths."""
    groups: dict[Any, tuple[str, LeafMove, int]] = {}
    for one in moves:
        places = _place_text(one.source), _place_text(one.target)
        key = template(one.path), one.shape, str(one.dtype), places, one.route, one.reason
        path, _, count = groups.get(key, (one.path, one, 0))
        groups[key] = (common_path(path, one.path) if count else path), one, count + 1
    return [
        (
            f"{path or '(the tree)'}{f'  x{count}' if count > 1 else ''}",
            shape_text(one.shape),
            str(one.dtype),
            _place_text(one.source),
            _place_text(one.target),
            bytes_text(count * one.moved_bytes),
            bytes_text(count * one.kept_bytes),
            one.route,
            one.reason,
        )
        for path, one, count in groups.values()
    ]


def _place_text(sharding: Sharding | None) -> str:
    if sharding is None:
        return "the host"
    ids = sorted(device.id for device in sharding.device_set)
    kind = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    if len(ids) == 1:
        return f"device {ids[0]}{kind}"
    what = (
        f"{spec_repr(sharding.spec)} on {mesh_text(sharding.mesh)}" if isinstance(sharding, NamedSharding) else "split"
    )
    return f"{what} (devices {ranges(ids)}){kind}"
