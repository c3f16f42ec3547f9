"""The order in which pieces travel: rounds in which every device sends at most one and receives at most one."""

from collections.abc import Iterable, Iterator
from typing import Any, final

import attrs

from shardrules.moves.schedule import Box, Piece, Schedule, box_shape

_MIN_PIECE_BYTES = 2**20
"""Pieces of up to 1 MiB are not cut: below it the cost of a launch outweighs the copy. Doubled, small arrays have twice
as much in flight; halved, they take twice as many launches."""

_PIECES_PER_SHARD = 64
"""A larger shard travels in about 64 pieces, so that the six that a round keeps on a device are a tenth of it. Doubled,
half as much is in flight and twice as many programs are launched; halved, the reverse."""


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
    middle = (start + stop) // 2
    for half in ((start, middle), (middle, stop)):
        yield from _cut(schedule, (*box[:dim], half, *box[dim + 1 :]), limit)
