"""The freeing of source arrays while a sync runs."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.moves.bits import buffers_of
from shardrules.moves.prepare import is_deleted
from shardrules.moves.sync.schedule import SyncSchedule
from shardrules.moves.sync.strided import SOURCE


def live_buffers(value: Any) -> Iterable[Hashable]:
    """The buffers of an array; none if it is deleted."""
    return () if is_deleted(value) else buffers_of(value)


@final
@attrs.define(eq=False)
class SyncDonor:
    """Frees source arrays after the round that reads them last; buffers that others share stay until theirs."""

    rounds: dict[int, list[int]]
    uses: Counter[Hashable]
    waiting: list[int]

    @staticmethod
    def of(schedule: SyncSchedule, values: Sequence[Any]) -> "SyncDonor":
        last = np.full(len(values), -1)
        deliveries = schedule.deliveries
        round_of = np.repeat(np.arange(deliveries.round_count), np.diff(deliveries.bounds))
        for number, flow in enumerate(schedule.flows):
            if flow.source is not None:
                chosen = deliveries.flow == number
                np.maximum.at(last, flow.parts.arrays[SOURCE][deliveries.row[chosen]], round_of[chosen])
        rounds: dict[int, list[int]] = {}
        for index in np.flatnonzero(last >= 0).tolist():
            rounds.setdefault(int(last[index]), []).append(index)
        return SyncDonor(rounds, Counter(buffer for value in values for buffer in live_buffers(value)), [])

    def last(self, number: int) -> list[int]:
        """Returns the arrays that a round reads last."""
        return self.rounds.get(number, [])

    def free(self, values: list[Any], index: int) -> None:
        """Deletes an array, and those that waited for it."""
        self.uses.subtract(buffers_of(values[index]))
        self.waiting.append(index)
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            # One array may be at several paths of the tree.
            if values[each].is_deleted():
                continue
            if any(self.uses[buffer] for buffer in buffers_of(values[each])):
                self.waiting.append(each)
            else:
                values[each].delete()
