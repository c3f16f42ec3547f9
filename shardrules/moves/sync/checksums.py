"""Checksums of the arrays of a sync, on both sides."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.core.errors import CheckpointError
from shardrules.mesh.processes import exchange
from shardrules.moves.sync.schedule import Leg, SyncSchedule
from shardrules.moves.sync.strided import TARGET, row_major

WAIT_SECONDS = 200
"""The seconds that processes wait for each other: they may still be compiling what comes before. Chosen by hand."""


def bit_sum(values: np.ndarray, strides: Sequence[int], first: int) -> int:
    """The sum of the bits of all elements modulo 2**64, each times an odd number that says where it is.

    Element 0 is at `first`, and neighbours along each dim are `strides` apart.
    """
    if not values.size:
        return 0
    size = values.dtype.itemsize
    words = np.asarray(values, order="C").reshape(*values.shape, 1)
    words = words.view(np.uint64 if size % 8 == 0 else np.dtype(f"u{size}"))
    total = words[..., 0].astype(np.uint64)
    with np.errstate(over="ignore"):
        for word in range(1, words.shape[-1]):  # complex128 has two
            total = total + words[..., word] * np.uint64(2 * word + 1)
        moments = np.broadcast_to(np.uint64(0), total.shape)
        for stride in reversed(strides):
            places = np.arange(total.shape[-1], dtype=np.uint64) * np.uint64(stride)
            moments = moments.sum(axis=-1) + total @ places
            total = total.sum(axis=-1)
    return (int(total) * (2 * first + 1) + 2 * int(moments)) % 2**64


@final
@attrs.define(eq=False)
class Checksums:
    """Checksums of each target array: of all that devices send for it, and of what others hold in the end."""

    schedule: SyncSchedule
    sent: list[int]
    arrived: list[int]
    numbers: dict[Any, int]

    @staticmethod
    def of(schedule: SyncSchedule) -> "Checksums":
        count = len(schedule.target)
        numbers = {device: number for number, device in enumerate(schedule.devices)}
        return Checksums(schedule, [0] * count, [0] * count, numbers)

    def add_sent(self, leg: Leg, content: Any) -> None:
        """Adds a content as the receiver should write it."""
        flow, cell = leg.flow, leg.flow.target.cell
        factors = row_major(cell)
        strides = [step.strides[TARGET] * factors[step.dims[TARGET]] for step in flow.inner]
        offset = sum(map(operator.mul, flow.offsets(TARGET, leg.row, leg.content), factors))
        values = np.broadcast_to(np.asarray(content), [step.size for step in flow.inner])
        first = leg.receiver * math.prod(cell) + offset
        self.sent[int(flow.parts.arrays[TARGET][leg.row])] += bit_sum(values, strides, first)

    def add_arrived(self, index: int, shards: Mapping[Any, Any]) -> None:
        """Adds the finished shards of an array."""
        for device, shard in shards.items():
            values = np.asarray(shard)
            self.arrived[index] += bit_sum(values, row_major(values.shape), self.numbers[device] * values.size)

    def compare(self, paths: Sequence[str]) -> None:
        texts = exchange(",".join(map(str, (*self.sent, *self.arrived))), "checksums of a sync", "run", WAIT_SECONDS)
        tables = [list(map(int, text.split(","))) for text in texts if text]
        sums = [sum(column) % 2**64 for column in zip(*tables, strict=True)]
        sent, arrived = sums[: len(paths)], sums[len(paths) :]
        wrong = [path for path, a, b in zip(paths, sent, arrived, strict=True) if a != b]
        if wrong:
            raise CheckpointError(
                f"run: the checksums of {len(wrong)} arrays differ from what was sent: {', '.join(wrong[:5])}"
            )
