"""`SyncPlan`: the report of a sync, before anything moves."""

import functools
import hashlib
import html
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, final

import attrs
import numpy as np

from shardrules.core.storage.records import Format
from shardrules.core.text import bytes_text
from shardrules.core.views.table import MOST_ROWS
from shardrules.moves.sync.arrays import Arrays
from shardrules.moves.sync.flows import PartFlow, itemsize
from shardrules.moves.sync.match import Matches
from shardrules.moves.sync.rounds import Deliveries
from shardrules.moves.sync.rows import COLUMNS, SyncRow, row_lines, sync_rows
from shardrules.moves.sync.run import run_schedule
from shardrules.moves.sync.schedule import SyncSchedule
from shardrules.moves.sync.strided import SOURCE, TARGET
from shardrules.moves.sync.table import NameTable
from shardrules.moves.sync.transfers import Transfer, transfers_of

_FORMAT = Format("shardrules_sync", 1)


class Links(Protocol):
    """The figures of a `Hardware` that a sync reads."""

    @property
    def link_bytes_per_second(self) -> float: ...

    @property
    def link_latency_seconds(self) -> float: ...

    @property
    def network_bytes_per_second(self) -> float: ...

    @property
    def network_latency_seconds(self) -> float: ...


@final
@attrs.frozen(eq=False, repr=False, slots=False)
class SyncPlan:
    """The plan of a sync: which device sends what to which, in which order, and what that takes. Prints as a table.

    It is made from shapes, alike on all hosts. It holds no arrays.
    """

    table: NameTable
    schedule: SyncSchedule
    matches: Matches
    max_bytes_in_flight: int
    hardware: tuple[Links, Links] | None = None

    def run(self, tree: Any, *, into: Any = None, donate: bool = False, check: Literal["sums"] | None = None) -> Any:
        """Moves the arrays of a tree, and returns the target's tree. All processes call it together.

        `tree` has the structure, shapes, dtypes and shardings of the source. `into` is a tree of the target that is
        given up: each of its arrays is overwritten, or freed before the new one is made. With `donate` arrays of the
        source are freed once nothing else is read from them. The `check` `"sums"` compares a checksum of all that was
        sent for each array with one of what has arrived.

        Raises, before anything moves, `PlanError` for arrays that differ from the plan, `TreeError` for another
        structure, `NoMeshError` for a plan without devices, `DisagreementError` where processes have different plans;
        and in the end `CheckpointError` where checksums differ.
        """
        return run_schedule(self.schedule, self.fingerprint, tree, into, donate=donate, check=check)

    @property
    def source(self) -> Arrays:
        """The arrays of the source."""
        return self.schedule.source

    @property
    def target(self) -> Arrays:
        """The arrays of the target."""
        return self.schedule.target

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of both sides. A mesh without devices has made-up ones, eight on each host."""
        return self.schedule.devices

    @property
    def flows(self) -> tuple[PartFlow, ...]:
        """Parts of arrays by how they are cut."""
        return self.schedule.flows

    @property
    def networks(self) -> np.ndarray:
        """The network of each device, as a number: devices on one are near each other."""
        return self.schedule.networks

    @property
    def deliveries(self) -> Deliveries:
        """The contents of flows in rounds."""
        return self.schedule.deliveries

    @functools.cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """The bytes between each two devices, sender first, by their ids."""
        return {
            (self.devices[sender].id, self.devices[receiver].id): amount
            for (sender, receiver), amount in self._counts.items()
            if sender != receiver
        }

    @functools.cached_property
    def _counts(self) -> dict[tuple[int, int], int]:
        """The bytes between each two devices, by index; from a device to itself what it has already."""
        count = len(self.devices)
        sums: dict[int, int] = {}
        for flow, route in zip(self.flows, self.schedule.routes, strict=True):
            if flow.source is None:
                continue
            pairs = (route.senders * count + route.receivers).reshape(-1)
            values, counts = np.unique(pairs, return_counts=True)
            for pair, number in zip(values.tolist(), counts.tolist(), strict=True):
                sums[pair] = sums.get(pair, 0) + number * flow.content_bytes
        return {divmod(pair, count): amount for pair, amount in sorted(sums.items())}

    @property
    def sent_bytes(self) -> dict[int, int]:
        """The bytes that each device sends to others, by its id."""
        return self._by_device(0)

    @property
    def received_bytes(self) -> dict[int, int]:
        """The bytes that each device receives from others, by its id."""
        return self._by_device(1)

    def _by_device(self, end: int) -> dict[int, int]:
        result: dict[int, int] = {}
        for pair, amount in self.link_bytes.items():
            result[pair[end]] = result.get(pair[end], 0) + amount
        return dict(sorted(result.items()))

    @property
    def moved_bytes(self) -> int:
        """The bytes from one device to another, over all of them."""
        return sum(self.link_bytes.values())

    @property
    def kept_bytes(self) -> int:
        """The bytes of the target that devices have already."""
        return sum(amount for (sender, receiver), amount in self._counts.items() if sender == receiver)

    @functools.cached_property
    def lower_bound_bytes(self) -> int:
        """The least that can move: what devices of the target need for each of its arrays and do not have.

        Elements are counted in the narrower dtype, and constants not at all. What two arrays of a device need, such as
        a table that is tied, counts for both.
        """
        total = 0
        for flow in self.flows:
            if flow.source is None:
                continue
            takers = flow.target.owners[flow.cells(TARGET)]
            holders = flow.source.owners[flow.cells(SOURCE)]
            has = (takers[..., :, None] == holders[..., None, :]).any(axis=-1)
            total += int((~has).sum()) * flow.content_bytes
        return total

    @property
    def network_bytes(self) -> dict[tuple[int, int], int]:
        """The bytes from one network to another, by their numbers. A network is a host, or a slice of several."""
        result: dict[tuple[int, int], int] = {}
        for (sender, receiver), amount in self._counts.items():
            pair = int(self.networks[sender]), int(self.networks[receiver])
            if pair[0] != pair[1]:
                result[pair] = result.get(pair, 0) + amount
        return dict(sorted(result.items()))

    @functools.cached_property
    def peak_bytes(self) -> dict[int, int]:
        """The most that each device holds while a sync runs, by its id: shards of both trees, and what is in flight.

        It is an upper bound: with `donate=True` arrays of the source are freed on the way.
        """
        amounts = self.deliveries.in_flight.copy()
        for arrays in (self.source, self.target):
            counts = Counter(zip(arrays.layout_of.tolist(), arrays.dtypes, strict=True))
            for (index, dtype), count in counts.items():
                if index >= 0:  # others are not used, and their devices are not known
                    layout = arrays.layouts[index]
                    amounts[np.unique(layout.owners)] += count * itemsize(dtype) * math.prod(layout.cell)
        return {device.id: int(amount) for device, amount in zip(self.devices, amounts, strict=True)}

    @property
    def round_count(self) -> int:
        """The number of rounds."""
        return self.deliveries.round_count

    @property
    def seconds(self) -> float | None:
        """The modelled time: of the slowest device, over links and networks; `None` where no hardware is known.

        Devices send and receive at the same time, links and networks carry at the same time, and each round waits for
        one message over each.
        """
        if self.hardware is None:
            return None
        sides = np.zeros(len(self.devices), np.int64)
        for layout in self.target.layouts:
            sides[layout.owners.reshape(-1)] = 1
        busy: dict[tuple[int, int, bool], int] = {}
        for (sender, receiver), amount in self._counts.items():
            if sender == receiver:
                continue
            is_far = bool(self.networks[sender] != self.networks[receiver])
            for device, end in ((sender, 0), (receiver, 1)):
                busy[device, end, is_far] = busy.get((device, end, is_far), 0) + amount
        times = [
            amount / (links.network_bytes_per_second if is_far else links.link_bytes_per_second)
            for (device, _, is_far), amount in busy.items()
            for links in [self.hardware[int(sides[device])]]
        ]
        latencies = [
            max(links.network_latency_seconds if is_far else links.link_latency_seconds for links in self.hardware)
            for is_far in dict.fromkeys(key[2] for key in busy)
        ]
        return max(times, default=0.0) + self.round_count * max(latencies, default=0.0)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of arrays, layouts, devices, operations and the schedule: both sides can compare it."""
        digest = hashlib.sha256(self.table.to_toml().encode(errors="surrogatepass"))
        for arrays in (self.source, self.target):
            # Layouts are numbered as they appear, so that equal trees have equal numbers.
            lines = zip(arrays.paths, arrays.shapes, map(str, arrays.dtypes), arrays.layout_of.tolist(), strict=True)
            digest.update("\n".join(map(str, lines)).encode(errors="surrogatepass"))
            for layout in arrays.layouts:
                digest.update(f"{layout.cell} {layout.grid} {layout.owners.tolist()}".encode())
        digest.update(str([(device.id, device.process_index) for device in self.devices]).encode())
        for route in self.schedule.routes:
            digest.update(route.senders.tobytes())
        digest.update(str(self.deliveries.bounds).encode())
        return digest.hexdigest()

    def transfers(self) -> Iterator[Transfer]:
        """Yields what goes from one device to another, in order, for a transport of your own.

        What a device has already is not among them, and neither are constants.
        """
        return transfers_of(self.schedule)

    @functools.cached_property
    def _rows(self) -> list[SyncRow]:
        return sync_rows(self.schedule, self.table, self.matches.line_of)

    def _summary(self, way: str = "") -> list[str]:
        sent, received, peak = self.sent_bytes, self.received_bytes, self.peak_bytes
        crossing, flight = sum(self.network_bytes.values()), int(self.deliveries.in_flight.max(initial=0))
        most = [bytes_text(max(amounts.values(), default=0)) for amounts in (sent, received, peak)]
        rounds = f"{self.round_count:,} round{'s' * (self.round_count != 1)}"
        lines = [
            f"{len(self.source):,} arrays become {len(self.target):,}{way}",
            (
                f"{bytes_text(self.moved_bytes)} move, of which {bytes_text(self.lower_bound_bytes)} must and "
                f"{bytes_text(crossing)} cross between hosts; {bytes_text(self.kept_bytes)} stay"
            ),
            (
                f"{rounds}; a device sends at most {most[0]}, receives {most[1]}, has {bytes_text(flight)} in flight, "
                f"and holds {most[2]}"
            ),
        ]
        if self.seconds is not None:
            lines.append(f"modelled time: {self.seconds:.3g} s")
        if self.table.unused:
            lines.append(f"unused: {', '.join(self.table.unused)}")
        return lines

    def __str__(self) -> str:
        rows = self._rows
        lines, way = row_lines(rows[:MOST_ROWS])
        lines += [f"and {len(rows) - MOST_ROWS:,} more"] * (len(rows) > MOST_ROWS)
        return "\n".join([*lines, *self._summary(way)])

    def __repr__(self) -> str:
        return f"<SyncPlan of {len(self.source):,} to {len(self.target):,} arrays, {bytes_text(self.moved_bytes)}>"

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(each.cells(), "td") for each in self._rows[:MOST_ROWS])
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in self._summary())
        return f"<table><thead>{row(COLUMNS, 'th')}</thead><tbody>{body}</tbody></table>{notes}"

    def to_json(self) -> str:
        """Returns the plan as JSON: arrays, devices, links, networks and totals. It is the same for equal plans."""
        sent, received, peak = self.sent_bytes, self.received_bytes, self.peak_bytes
        devices = {
            str(device.id): {
                "sent_bytes": sent.get(device.id, 0),
                "received_bytes": received.get(device.id, 0),
                "in_flight_bytes": int(amount),
                "peak_bytes": peak[device.id],
                "network": int(network),
            }
            for device, amount, network in zip(self.devices, self.deliveries.in_flight, self.networks, strict=True)
        }
        return _FORMAT.write(
            {
                "fingerprint": self.fingerprint,
                "arrays": [attrs.asdict(row) for row in self._rows],
                "devices": devices,
                "links": _pairs(self.link_bytes),
                "networks": _pairs(self.network_bytes),
                "moved_bytes": self.moved_bytes,
                "lower_bound_bytes": self.lower_bound_bytes,
                "kept_bytes": self.kept_bytes,
                "max_bytes_in_flight": self.max_bytes_in_flight,
                "rounds": self.round_count,
                "seconds": self.seconds,
                "names": self.table.to_toml(),
            }
        )


def _pairs(amounts: Mapping[tuple[int, int], int]) -> dict[str, int]:
    return {f"{sender} -> {receiver}": amount for (sender, receiver), amount in amounts.items()}
