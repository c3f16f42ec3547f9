"""Checksums of the arrays of a sync, on both sides."""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np

from shardrules.core.errors import CheckpointError
from shardrules.mesh.processes import exchange

_TIMEOUT = 200
"""The seconds that processes wait for the slowest one. Chosen by hand."""


def bit_sum(values: np.ndarray) -> int:
    """The sum of the bits of all elements, which does not depend on their order."""
    if not values.size:
        return 0
    plain = np.ascontiguousarray(values)
    size = plain.dtype.itemsize
    parts = plain.reshape(-1).view(np.uint64 if size % 8 == 0 else np.dtype(f"u{size}"))
    return int(parts.sum(dtype=np.uint64))


@final
@attrs.define(eq=False)
class Checksums:
    """Checksums of each target array: of all that was sent for it to any device, and of what the devices hold."""

    sent: list[int]
    arrived: list[int]

    @staticmethod
    def of(count: int) -> "Checksums":
        return Checksums([0] * count, [0] * count)

    def compare(self, paths: Sequence[str]) -> None:
        texts = exchange(",".join(map(str, (*self.sent, *self.arrived))), "checksums of a sync", "run", _TIMEOUT)
        tables = [list(map(int, text.split(","))) for text in texts if text]
        sums = [sum(column) % 2**64 for column in zip(*tables, strict=True)]
        sent, arrived = sums[: len(paths)], sums[len(paths) :]
        wrong = [path for path, a, b in zip(paths, sent, arrived, strict=True) if a != b]
        if wrong:
            raise CheckpointError(
                f"run: the checksums of {len(wrong)} arrays differ from what was sent: {', '.join(wrong[:5])}"
            )
