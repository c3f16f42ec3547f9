"""The schedule of a move between two shardings: the parts of an array that each device sends to others.

A sharding gives every device a box of the array. A move fills the new boxes from the old ones: each new box is cut
where the old ones meet, and every device of the new box keeps the pieces that it has already, and gets the others from
a device that has them. Pieces travel in rounds, in which every device sends at most one and receives at most one. It is
integer arithmetic, the same on every host.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, final

import attrs
import jax
from jax.sharding import Sharding

from shardrules.core.spec import packs_on

Box: TypeAlias = tuple[tuple[int, int], ...]
"""The beginning and the end of a part of an array, in each dimension."""

Device: TypeAlias = Any
"""A device of JAX, or a stand-in with an `id`, a `process_index`, and perhaps a `slice_index`."""

_MIN_PIECE_BYTES = 2**20
"""Pieces of up to 1 MiB are not cut: below it the cost of a launch outweighs the copy. Chosen by hand."""

_PIECES_PER_SHARD = 64
"""A larger shard travels in about 64 pieces: the six that a round keeps on a device are a tenth of it."""


def box_shape(box: Box) -> tuple[int, ...]:
    """Returns the shape of the part that a box holds."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """Returns where `box` is inside `origin`, the box around it.

    ```python
    from shardrules.moves.schedule import slices

    assert slices(((4, 6),), ((2, 8),)) == (slice(2, 4),)
    ```
    """
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))


def boxes_of(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Box]:
    """Returns the box of each device of a sharding, in the sharding's order of devices."""
    return {
        device: tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape, strict=False))
        for device, index in sharding.devices_indices_map(shape).items()
    }


@final
@attrs.frozen
class Piece:
    """One part of an array on its way to one device: `box` lies inside one old box and one new box."""

    box: Box
    sender: Device
    """The receiver itself where that has the part already."""
    receiver: Device
    relayed: bool = False
    """The sender does not hold the part before the move: it passes on what it receives itself."""

    @property
    def stays(self) -> bool:
        """True where the receiver has it already."""
        return self.sender is self.receiver


@final
@attrs.frozen(eq=False)
class Sums:
    """The totals of a schedule: its route, bytes by device, and pieces that are sent."""

    route: Literal["alias", "local", "direct", "relayed"]
    """`"alias"` where every new shard is an old one on the same device, `"local"` where every device has its new shard
    within its old one, `"relayed"` where something is passed on, else `"direct"`."""
    sent: Mapping[Device, int]
    received: Mapping[Device, int]
    kept: Mapping[Device, int]
    piece_count: int
    relayed_bytes: int
    new_bytes: int
    """The largest new shard."""


def _part_bytes(box: Box, dtype: Any, packed: bool) -> int:
    # Not `array_bytes`: a 64-bit array keeps its width when JAX's x64 mode is off again.
    bits = jax.dtypes.itemsize_bits(dtype)
    return -(-math.prod(box_shape(box)) * (bits if packed else max(bits, 8)) // 8)


def _packs(devices: Iterable[Device], dtype: Any) -> bool:
    return packs_on(next(iter(devices), None), dtype)


def _sum_pieces(schedule: "Schedule") -> Sums:
    sent: dict[Device, int] = {}
    received: dict[Device, int] = {}
    kept: dict[Device, int] = {}
    sizes: dict[tuple[int, ...], int] = {}
    count = relayed_bytes = 0
    for piece in schedule.pieces:
        shape = box_shape(piece.box)
        size = sizes.get(shape)
        if size is None:
            size = sizes[shape] = schedule.box_bytes(piece.box)
        if piece.stays:
            kept[piece.receiver] = kept.get(piece.receiver, 0) + size
            continue
        count += 1
        relayed_bytes += size * piece.relayed
        sent[piece.sender] = sent.get(piece.sender, 0) + size
        received[piece.receiver] = received.get(piece.receiver, 0) + size
    # A move where every device has its new box already changes only the sharding.
    same = all(schedule.source.get(device) == box for device, box in schedule.target.items())
    route = "alias" if same else "local" if not count else "relayed" if relayed_bytes else "direct"
    new_bytes = max(map(schedule.box_bytes, dict.fromkeys(schedule.target.values())), default=0)
    return Sums(route, sent, received, kept, count, relayed_bytes, new_bytes)


@final
@attrs.frozen(eq=False)
class Schedule:
    """A move of one array: what all arrays of one shape and dtype between the same two shardings have in common."""

    shape: tuple[int, ...]
    dtype: Any
    source: Mapping[Device, Box]
    """The old box of each device that can send."""
    target: Mapping[Device, Box]
    """The new box of each device."""
    pieces: tuple[Piece, ...]
    """The parts that fill the new boxes, receiver by receiver."""
    lost: tuple[Box, ...] = ()
    """Parts that no device can send."""
    sums: Sums = attrs.field(init=False, repr=False, default=attrs.Factory(_sum_pieces, takes_self=True))

    def box_bytes(self, box: Box) -> int:
        """Returns the bytes of a part of the array."""
        return _part_bytes(box, self.dtype, _packs(self.target, self.dtype))

    @property
    def old_shape(self) -> tuple[int, ...]:
        """The shape of each old shard."""
        return box_shape(next(iter(self.source.values())))

    @property
    def new_shape(self) -> tuple[int, ...]:
        """The shape of each new shard."""
        return box_shape(next(iter(self.target.values())))

    @property
    def new_bytes(self) -> int:
        """The bytes of the largest new shard."""
        return self.sums.new_bytes

    @property
    def processes(self) -> frozenset[int]:
        """The processes whose devices hold something before or after the move."""
        return frozenset(device.process_index for device in (*self.source, *self.target))


def make_schedule(
    shape: tuple[int, ...],
    dtype: Any,
    source: Mapping[Device, Box],
    target: Mapping[Device, Box],
    alive: Collection[Device] | None = None,
) -> Schedule:
    """Decides which device sends what to which, for arrays of one shape and dtype; only devices in `alive` can send.

    A piece comes from the receiver itself if it has it; else from a device on the same fast network (a slice, or a
    process); else, where another receiver on that network gets it from afar, from that receiver, so that nothing
    crosses the slow network twice. Of several senders the least loaded so far sends, and of equals the first.
    """
    able = set(source if alive is None else alive)
    living = {device: box for device, box in source.items() if device in able}
    # Old boxes of lost devices stay, without holders: their parts are lost.
    holders: dict[Box, list[Device]] = {box: [] for box in source.values()}
    for device, box in living.items():
        holders[box].append(device)
    receivers: dict[Box, list[Device]] = {}
    for device, box in target.items():
        receivers.setdefault(box, []).append(device)
    # The intervals of old boxes, along each dimension.
    cuts = [sorted({box[dim] for box in holders}) for dim in range(len(shape))]
    names, packed = networks((*source, *target)), _packs(target, dtype)
    load: dict[Device, int] = {}
    pieces: list[Piece] = []
    lost: list[Box] = []
    for box, devices in receivers.items():
        for part, old_box in _overlaps(box, cuts):
            if not holders[old_box]:
                lost.append(part)
                continue
            pieces += _deliver(part, holders[old_box], devices, _part_bytes(part, dtype, packed), names, load)
    return Schedule(shape, dtype, living, target, tuple(pieces), tuple(dict.fromkeys(lost)))


def _overlaps(box: Box, cuts: list[list[tuple[int, int]]]) -> Iterator[tuple[Box, Box]]:
    """The parts into which old boxes cut a new one, each with the old box around it."""
    # Old boxes form a grid: per dimension the intervals that meet the new box, and every combination is one old box.
    by_dim = [
        [((max(start, cut[0]), min(stop, cut[1])), cut) for cut in cuts[dim] if cut[0] < stop and start < cut[1]]
        for dim, (start, stop) in enumerate(box)
    ]
    for chosen in itertools.product(*by_dim):
        yield tuple(part for part, _ in chosen), tuple(old for _, old in chosen)


def _deliver(
    part: Box,
    senders: list[Device],
    receivers: list[Device],
    part_bytes: int,
    names: Mapping[Device, tuple[str, int]],
    load: dict[Device, int],
) -> Iterator[Piece]:
    """Yields the pieces that bring one part to all its receivers, and adds to what each sender sends."""
    # By network: the receivers that get the part from afar.
    fetched: dict[Any, list[Device]] = {}
    for receiver in receivers:
        if receiver in senders:
            yield Piece(part, receiver, receiver)
            continue
        # Near senders come first, then a receiver of the same network that has the part, then any; the least busy of
        # them.
        near = [sender for sender in senders if names[sender] == names[receiver]]
        relays = [] if near else fetched.setdefault(names[receiver], [])
        sender = min(near or relays or senders, key=lambda device: load.get(device, 0))
        load[sender] = load.get(sender, 0) + part_bytes
        yield Piece(part, sender, receiver, relayed=bool(relays))
        if not near and not relays:
            relays.append(receiver)


def networks(devices: Iterable[Device]) -> dict[Device, tuple[str, int]]:
    """Returns which fast network each device is on: its slice where there are several, else its process.

    Pass all devices that matter at once. XLA gives slices to GPUs by their host, and a single slice to all CPUs.
    """
    # Some platforms have no slice index, and others set it to None.
    slice_indices: dict[Device, Any] = {device: getattr(device, "slice_index", None) for device in devices}
    if len(dict.fromkeys(slice_indices.values())) > 1 and None not in slice_indices.values():
        return {device: ("slice", index) for device, index in slice_indices.items()}
    return {device: ("process", device.process_index) for device in slice_indices}


def piece_bytes(schedule: Schedule) -> int:
    """Returns the size above which a piece is cut, so that little is in flight beside the array itself."""
    return max(_MIN_PIECE_BYTES, schedule.new_bytes // _PIECES_PER_SHARD)


@final
@attrs.frozen(eq=False)
class Round:
    """Pieces of one shape and size, no two from one sender or for one receiver."""

    shape: tuple[int, ...]
    bytes: int
    pieces: tuple[Piece, ...]


def rounds(schedule: Schedule, pieces: Iterable[Piece]) -> list[Round]:
    """Puts pieces of a schedule into rounds, in the order in which they run; large pieces are cut."""
    limit = piece_bytes(schedule)
    by_shape: dict[tuple[int, ...], list[list[Piece]]] = {}
    # For the sends and for the receives of a device, by shape: a bit for each round that has one.
    busy_bits: dict[Any, int] = {}
    for piece in pieces:
        for box in _cut(schedule, piece.box, limit):
            shape = box_shape(box)
            sends, receives = (shape, "sends", piece.sender), (shape, "receives", piece.receiver)
            # First fit: the first round in which both devices are free. An all-to-all then takes one round per device.
            taken_bits = busy_bits.get(sends, 0) | busy_bits.get(receives, 0)
            free_bit = ~taken_bits & (taken_bits + 1)  # the lowest bit that is not set
            busy_bits[sends] = busy_bits.get(sends, 0) | free_bit
            busy_bits[receives] = busy_bits.get(receives, 0) | free_bit
            shape_rounds = by_shape.setdefault(shape, [])
            if free_bit.bit_length() > len(shape_rounds):
                shape_rounds.append([])
            shape_rounds[free_bit.bit_length() - 1].append(attrs.evolve(piece, box=box))
    return [
        Round(shape, schedule.box_bytes(round_pieces[0].box), tuple(round_pieces))
        for shape, shape_rounds in by_shape.items()
        for round_pieces in shape_rounds
    ]


def _cut(schedule: Schedule, box: Box, limit: int) -> Iterator[Box]:
    """Halves a box along its longest dimension until it is small enough."""
    shape = box_shape(box)
    if schedule.box_bytes(box) <= limit or max(shape, default=0) < 2:
        yield box
        return
    dim = shape.index(max(shape))
    start, stop = box[dim]
    # Halves of nearly equal sizes have few shapes, each of which is a round of its own.
    middle = (start + stop) // 2
    for half in ((start, middle), (middle, stop)):
        yield from _cut(schedule, (*box[:dim], half, *box[dim + 1 :]), limit)
