"""`SyncSchedule`: all that running a sync takes, and what its report adds up."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.moves.sync.arrays import Arrays
from shardrules.moves.sync.flows import PartFlow, Routes
from shardrules.moves.sync.rounds import Deliveries
from shardrules.moves.sync.strided import SOURCE


@final
@attrs.frozen(eq=False)
class Leg:
    """One content on its way to one device."""

    flow: PartFlow
    row: int
    content: int
    sender: int
    """The index of the device that sends it."""
    origin: int
    """The index of the device from whose shard it was cut: another one than the sender where it is relayed."""
    receiver: int

    @property
    def is_relayed(self) -> bool:
        """True where the sender has received it in the same round."""
        return self.sender != self.origin


@final
@attrs.frozen(eq=False)
class SyncSchedule:
    """The arrays and devices of both sides, and what is sent between them in which round."""

    source: Arrays
    target: Arrays
    devices: tuple[Any, ...]
    networks: np.ndarray
    """The network of each device, as a number: devices on one are near each other."""
    flows: tuple[PartFlow, ...]
    routes: tuple[Routes, ...]
    deliveries: Deliveries

    def last_reads(self) -> dict[int, list[int]]:
        """Returns for each round the source arrays that it reads last."""
        last = np.full(len(self.source), -1)
        rounds = np.repeat(np.arange(self.deliveries.round_count), np.diff(self.deliveries.bounds))
        for number, flow in enumerate(self.flows):
            if flow.source is not None:
                chosen = self.deliveries.flow == number
                np.maximum.at(last, flow.parts.arrays[SOURCE][self.deliveries.row[chosen]], rounds[chosen])
        reads: dict[int, list[int]] = {}
        for index in np.flatnonzero(last >= 0).tolist():
            reads.setdefault(int(last[index]), []).append(index)
        return reads

    def legs(self, chosen: Sequence[int]) -> Iterator[Leg]:
        """Yields the legs of some deliveries; what is relayed comes behind what it is received by."""
        order = self.deliveries
        for flow_index, row, content in zip(
            order.flow[chosen].tolist(), order.row[chosen].tolist(), order.content[chosen].tolist(), strict=True
        ):
            flow, route = self.flows[flow_index], self.routes[flow_index]
            senders, receivers = route.senders[row, content].tolist(), route.receivers[row, content].tolist()
            relayed = route.relayed[row, content].tolist()
            origins = {
                receiver: sender
                for sender, receiver, is_relayed in zip(senders, receivers, relayed, strict=True)
                if not is_relayed
            }
            for phase in (False, True):
                for sender, receiver, is_relayed in zip(senders, receivers, relayed, strict=True):
                    if is_relayed == phase:
                        origin = origins[sender] if is_relayed else sender
                        yield Leg(flow, row, content, sender, origin, receiver)
