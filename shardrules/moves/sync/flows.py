"""The parts of a sync by device: cut where shards meet, and sent by one of the devices that hold them."""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs
import jax
import numpy as np

from shardrules.moves.sync.arrays import Arrays, ShardLayout
from shardrules.moves.sync.strided import SOURCE, TARGET, Parts, Side, StridedStep, align, covered

_MIN_SHARE_BYTES = 2**20
"""Parts of up to 1 MiB are not shared out to several senders: below it a launch outweighs the copy. Chosen by hand."""


@final
@attrs.frozen(eq=False, slots=False)
class PartFlow:
    """Parts between arrays of one source layout and one target layout.

    Each row of the parts travels as `width` contents: steps from cell to cell are *outer*, and for each combination of
    their positions the *inner* ones lie within one cell of each side.
    """

    parts: Parts
    source: ShardLayout | None
    """`None` for constants, which do not travel."""
    target: ShardLayout
    element_bytes: int
    """The bytes of an element on its way: in the narrower of the two dtypes."""
    casts_first: bool
    """True where the sender changes the values."""
    outer: tuple[StridedStep, ...]
    inner: tuple[StridedStep, ...]

    @property
    def whole_parts(self) -> Parts:
        """The parts with all their steps: what the flow writes."""
        return attrs.evolve(self.parts, steps=(*self.outer, *self.inner))

    @property
    def width(self) -> int:
        """The contents of each row."""
        return math.prod(step.size for step in self.outer)

    @property
    def content_bytes(self) -> int:
        """The bytes of one content."""
        return math.prod(step.size for step in self.inner) * self.element_bytes

    @functools.cached_property
    def _places(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """For each side the cell of each content, and where it begins in the cell: by row, content and dim."""
        grid = np.indices([step.size for step in self.outer]).reshape(len(self.outer), self.width)
        result: list[tuple[np.ndarray, np.ndarray]] = []
        for side, layout in ((SOURCE, self.source), (TARGET, self.target)):
            places = np.repeat(self.parts.bases[side][:, None, :], self.width, axis=1)
            for step, positions in zip(self.outer, grid, strict=True):
                if layout is not None:
                    places[:, :, step.dims[side]] += positions * step.strides[side]
            cell = np.array(() if layout is None else layout.cell, np.int64)
            result.append((places // cell, places % cell))
        return tuple(result)

    def cells(self, side: Side) -> np.ndarray:
        """Returns the index of the cell of each content, row by row."""
        layout = self.target if side == TARGET else self.source
        assert layout is not None
        return self._places[side][0] @ np.array(layout.strides, np.int64)

    def offsets(self, side: Side, row: int, content: int) -> tuple[int, ...]:
        """Returns where a content begins in its cell."""
        return tuple(self._places[side][1][row, content].tolist())


def make_flows(parts: Sequence[Parts], source: Arrays, target: Arrays, limit_bytes: int) -> list[PartFlow]:
    """Returns the flows of parts; a content takes at most `limit_bytes`, or is a single element."""
    flows: list[PartFlow] = []
    for each in parts:
        for source_index, target_index, rows in _by_layout(each, source, target):
            flows += _flows(rows, source_index, target_index, source, target, limit_bytes)
    return flows


def _by_layout(parts: Parts, source: Arrays, target: Arrays) -> Iterator[tuple[int, int, Parts]]:
    if not len(parts):
        return
    new = target.layout_of[parts.arrays[TARGET]]
    old = np.full(len(parts), -1) if parts.is_fill else source.layout_of[parts.arrays[SOURCE]]
    for pair in np.unique(np.stack([old, new], axis=1), axis=0).tolist():
        chosen = (old == pair[0]) & (new == pair[1])
        yield pair[0], pair[1], parts.rows(chosen)


def _flows(
    parts: Parts, source_index: int, target_index: int, source: Arrays, target: Arrays, limit_bytes: int
) -> Iterator[PartFlow]:
    layout_pair = None if parts.is_fill else source.layouts[source_index], target.layouts[target_index]
    pieces = [parts]
    for side in (SOURCE, TARGET):
        layout = layout_pair[side]
        for dim, count in enumerate(() if layout is None else layout.grid):
            if count > 1:
                assert layout is not None
                pieces = [cut for each in pieces for cut in align(each, side, dim, layout.cell[dim])]
    new_bytes = itemsize(target.dtypes[int(parts.arrays[TARGET][0])])
    old_bytes = new_bytes if parts.is_fill else itemsize(source.dtypes[int(parts.arrays[SOURCE][0])])
    for each in pieces:
        outer = [step for step in each.steps if _is_outer(step, layout_pair)]
        inner = [step for step in each.steps if not _is_outer(step, layout_pair)]
        element_bytes, casts_first = min(old_bytes, new_bytes), new_bytes <= old_bytes
        flow = PartFlow(each, *layout_pair, element_bytes, casts_first, tuple(outer), tuple(inner))
        shares = 1 if flow.source is None else max(flow.source.owners.shape[1], flow.target.owners.shape[1])
        # All devices of a target cell may get a content from one device: it is in flight there once for each.
        most = limit_bytes // (1 + flow.target.owners.shape[1])
        # Where several devices have a content, or pass it on, each can send its share of it.
        share = max(_MIN_SHARE_BYTES, flow.content_bytes // shares) if shares > 1 else most
        yield from _limited(flow, min(share, most))


def itemsize(dtype: Any) -> int:
    """Returns the bytes of an element."""
    return max(1, jax.dtypes.itemsize_bits(dtype) // 8)


def _limited(flow: PartFlow, limit_bytes: int) -> Iterator[PartFlow]:
    """Yields flows whose contents are small enough, or single elements."""
    if flow.content_bytes <= limit_bytes or not flow.inner:
        yield flow
        return
    step = max(flow.inner, key=lambda each: each.size)
    rest = [each for each in flow.inner if each is not step]
    count = max(1, step.size * limit_bytes // flow.content_bytes)
    # Groups of one size if a size nearly as large divides: then nothing is left over.
    whole = next(each for each in range(count, 0, -1) if step.size % each == 0)
    count = whole if 2 * whole >= count else count
    groups, left = divmod(step.size, count)
    inner = (*rest, *([step.resized(count)] if count > 1 else []))
    yield from _limited(attrs.evolve(flow, outer=(*flow.outer, step.resized(groups, count)), inner=inner), limit_bytes)
    if left:
        parts = attrs.evolve(flow.parts, bases=flow.parts.shifted(step, step.size - left))
        inner = (*rest, *([step.resized(left)] if left > 1 else []))
        yield from _limited(attrs.evolve(flow, parts=parts, inner=inner), limit_bytes)


def _is_outer(step: StridedStep, layouts: tuple[ShardLayout | None, ShardLayout]) -> bool:
    """Returns whether a step goes from cell to cell on either side. Cells are aligned, so others stay inside."""
    return any(
        layout is not None and dim >= 0 and layout.grid[dim] > 1 and stride % layout.cell[dim] == 0
        for layout, dim, stride in zip(layouts, step.dims, step.strides, strict=True)
    )


def flows_covered(flows: Sequence[PartFlow], target: Arrays) -> np.ndarray:
    """Returns which arrays of the target the flows write, each element once."""
    whole = [flow.whole_parts for flow in flows]
    return covered(whole, TARGET, target.shapes, np.ones(len(target), np.int64))


@final
@attrs.frozen(eq=False)
class Routes:
    """The devices that send and receive the contents of a flow; by row, content, and device of the target cell."""

    receivers: np.ndarray
    senders: np.ndarray
    """The receiver itself where it has the content, or where it is a constant."""
    relayed: np.ndarray
    """True where the sender has received the content for itself, and passes it on."""


def choose_routes(flows: Sequence[PartFlow], networks: np.ndarray, device_count: int) -> list[Routes]:
    """Returns which device sends each content: of those that have it the one that has the least to send.

    A receiver that has it sends nothing. One on the same network comes before one on another, and what several
    receivers of a network get from afar crosses once: the first passes it on.
    """
    load = np.zeros(device_count, np.int64)
    routes: list[Routes | None] = [None] * len(flows)
    # The largest contents first, those that few devices hold before others: the small ones even out what is left.
    order = sorted(range(len(flows)), key=lambda index: (_holders(flows[index]), -flows[index].content_bytes, index))
    for index in order:
        routes[index] = _route(flows[index], networks, load)
    return [each for each in routes if each is not None]


def _holders(flow: PartFlow) -> int:
    return 0 if flow.source is None else flow.source.owners.shape[1]


def _route(flow: PartFlow, networks: np.ndarray, load: np.ndarray) -> Routes:
    target_cells = flow.cells(TARGET)
    receivers = flow.target.owners[target_cells]
    if flow.source is None:
        return Routes(receivers, receivers, np.zeros(receivers.shape, bool))
    source_cells = flow.cells(SOURCE)
    senders = np.empty(receivers.shape, np.int64).reshape(-1, receivers.shape[2])
    relayed = np.zeros(senders.shape, bool)
    # All contents of one pair of cells have the same senders and receivers to choose from.
    pairs = (source_cells * len(flow.target.owners) + target_cells).reshape(-1)
    order = np.argsort(pairs, kind="stable")
    bounds = np.flatnonzero(np.diff(pairs[order], prepend=-1, append=-1))
    for start, stop in itertools.pairwise(bounds.tolist()):
        members = order[start:stop]
        old, new = divmod(int(pairs[members[0]]), len(flow.target.owners))
        holders, takers = flow.source.owners[old], flow.target.owners[new]
        columns = _deliver(holders, takers, len(members), flow.content_bytes, networks, load)
        senders[members], relayed[members] = columns
    return Routes(receivers, senders.reshape(receivers.shape), relayed.reshape(receivers.shape))


def _deliver(
    holders: np.ndarray, takers: np.ndarray, count: int, size: int, networks: np.ndarray, load: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns who sends each of `count` equal contents to each taker, and whether that is relayed."""
    senders = np.empty((count, len(takers)), np.int64)
    relayed = np.zeros((count, len(takers)), bool)
    distant: dict[int, list[int]] = {}
    for column, taker in enumerate(takers.tolist()):
        if taker in holders:
            senders[:, column] = taker
            continue
        near = holders[networks[holders] == networks[taker]]
        if len(near):
            senders[:, column] = _shared(near, count, size, load)
        else:
            distant.setdefault(int(networks[taker]), []).append(column)
    for columns in distant.values():
        # One taker gets the content from afar and passes it on to the others of its network.
        from_afar = _shared(holders, count, size, load)
        relays = _shared(takers[columns], count, size * (len(columns) - 1), load)
        for column in columns:
            is_relay = relays == takers[column]
            senders[:, column] = np.where(is_relay, from_afar, relays)
            relayed[:, column] = ~is_relay
    return senders, relayed


def _shared(holders: np.ndarray, count: int, size: int, load: np.ndarray) -> np.ndarray:
    """Returns a sender for each of `count` contents, the least loaded one each time, and adds to the load."""
    if len(holders) == 1:
        load[holders[0]] += count * size
        return np.full(count, holders[0])
    heap = [(int(load[holder]), int(holder)) for holder in holders]
    heapq.heapify(heap)
    largest = max(heap)[0]
    first: list[int] = []
    while len(first) < count and largest - heap[0][0] > size:
        amount, holder = heap[0]
        first.append(holder)
        heapq.heapreplace(heap, (amount + size, holder))
        largest = max(largest, amount + size)
    # From here on they are about even, and take turns.
    turns = np.resize([holder for _, holder in sorted(heap)], count - len(first))
    senders = np.concatenate([np.array(first, np.int64), turns])
    np.add.at(load, senders, size)
    return senders
