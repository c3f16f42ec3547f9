"""The order in which contents travel: rounds in which no device has more than so many bytes in flight."""

from collections.abc import Iterator, Sequence
from typing import final

import attrs
import numpy as np

from shardrules.moves.sync.flows import PartFlow, Routes
from shardrules.moves.sync.strided import TARGET


@final
@attrs.frozen(eq=False)
class Deliveries:
    """All contents of a sync, in the order in which they travel: those of one target array together."""

    flow: np.ndarray
    """The index of the flow of each."""
    row: np.ndarray
    content: np.ndarray
    bounds: tuple[int, ...]
    """The first of each round, and the number of all."""
    in_flight: np.ndarray
    """The most bytes in flight on each device."""

    @property
    def round_count(self) -> int:
        """The number of rounds."""
        return len(self.bounds) - 1

    def rounds(self) -> Iterator[range]:
        """Yields the indices of the contents of each round."""
        for start, stop in zip(self.bounds, self.bounds[1:], strict=False):
            yield range(start, stop)


def order_deliveries(
    flows: Sequence[PartFlow], routes: Sequence[Routes], limit_bytes: int, device_count: int
) -> Deliveries:
    """Returns the contents in rounds. A device counts what it receives, and what it has cut out to send or to keep."""
    flow_index = [np.full(len(flow.parts) * flow.width, index, np.int32) for index, flow in enumerate(flows)]
    rows = [np.repeat(np.arange(len(flow.parts), dtype=np.int32), flow.width) for flow in flows]
    contents = [np.tile(np.arange(flow.width, dtype=np.int32), len(flow.parts)) for flow in flows]
    arrays = [np.repeat(flow.parts.arrays[TARGET], flow.width) for flow in flows]
    if not flows:
        empty = np.zeros(0, np.int32)
        return Deliveries(empty, empty, empty, (0,), np.zeros(device_count, np.int64))
    cells = np.concatenate([flow.cells(TARGET).reshape(-1) for flow in flows])
    senders = np.concatenate([route.senders[:, :, 0].reshape(-1) for route in routes])
    order = _in_turns(np.concatenate(arrays), cells, senders)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    bounds, in_flight = _bounds(flows, routes, place, limit_bytes, device_count)
    return Deliveries(
        np.concatenate(flow_index)[order],
        np.concatenate(rows)[order],
        np.concatenate(contents)[order],
        bounds,
        in_flight,
    )


def _in_turns(arrays: np.ndarray, cells: np.ndarray, senders: np.ndarray) -> np.ndarray:
    """The order of contents by target array, in which its cells take turns, so that all devices are busy.

    In a cell senders take turns, and each cell begins with another one.
    """
    number, _ = _numbers(np.lexsort((senders, cells, arrays)), arrays, cells, senders)
    number, count = _numbers(np.lexsort((senders, number, cells, arrays)), arrays, cells)
    turn = (number + cells * count // (1 + cells.max(initial=0))) % count
    return np.lexsort((cells, turn, arrays))


def _numbers(order: np.ndarray, *keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of each content among those with equal keys, in an order that has them together; and their count."""
    starts = np.flatnonzero(np.any([np.diff(key[order], prepend=-1) != 0 for key in keys], axis=0))
    counts = np.diff(starts, append=len(order))
    numbers, sizes = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order)) - np.repeat(starts, counts)
    sizes[order] = np.repeat(counts, counts)
    return numbers, sizes


def _bounds(
    flows: Sequence[PartFlow], routes: Sequence[Routes], place: np.ndarray, limit_bytes: int, device_count: int
) -> tuple[tuple[int, ...], np.ndarray]:
    """Where each round begins, and the most that each device has in flight."""
    total = len(place)
    # By device, and for each device in order: keys and sums grow, so that one search finds a place on every device.
    by_flow: list[np.ndarray] = []
    counts: list[int] = []
    amounts: list[int] = []
    start = 0
    for flow, route in zip(flows, routes, strict=True):
        count = len(flow.parts) * flow.width
        places = place[start : start + count].reshape(len(flow.parts), flow.width, 1)
        start += count
        comes = np.full(route.receivers.shape, flow.source is not None)
        for device, chosen in (
            (route.receivers, comes),
            (route.senders, comes & (route.senders != route.receivers) & ~route.relayed),
        ):
            by_flow.append((device * total + places)[chosen])
            counts.append(len(by_flow[-1]))
            amounts.append(flow.content_bytes)
    keys, sizes = np.concatenate(by_flow), np.repeat(np.array(amounts, np.int64), counts)
    order = np.argsort(keys)
    keys, sums = keys[order], np.concatenate([[0], np.cumsum(sizes[order])])
    numbers = np.arange(device_count)
    ends = np.searchsorted(keys, (numbers + 1) * total)
    done = np.searchsorted(keys, numbers * total)
    bounds = [0]
    in_flight = np.zeros(device_count, np.int64)
    while bounds[-1] < total:
        over = np.searchsorted(sums, sums[done] + limit_bytes, side="right") - 1
        full = over < ends
        first = keys[over[full]] - numbers[full] * total
        stop = max(int(first.min(initial=total)), bounds[-1] + 1)
        reached = np.searchsorted(keys, numbers * total + stop)
        in_flight = np.maximum(in_flight, sums[reached] - sums[done])
        done = reached
        bounds.append(stop)
    return tuple(bounds), in_flight
