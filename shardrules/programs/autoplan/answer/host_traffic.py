"""Memory of hosts that a plan uses, and its traffic with devices."""

from collections.abc import Sequence
from typing import Self, final

import attrs
import numpy as np

from shardrules.programs.autoplan.graph.host_moves import host_move
from shardrules.programs.autoplan.graph.layouts import shard_counts
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.costs.memory import host_seconds


@final
@attrs.frozen
class HostTraffic:
    """The traffic of one device with its host in one call."""

    argument_bytes: int
    """The arguments that are on the host."""
    kept_bytes: int
    """The bytes that the function sends to the host in between: each time that an array is sent counts."""
    exchanged_bytes: int
    """The bytes sent to the host and fetched from it."""
    exposed_seconds: float
    """The time for which the device waits for them."""

    @property
    def host_bytes(self) -> int:
        """The bytes of a device on its host, if nothing that is sent there is written over in the same call."""
        return self.argument_bytes + self.kept_bytes

    @classmethod
    def of(cls, problem: Problem, choice: Sequence[int]) -> Self:
        program, machine = problem.program, problem.machine

        def device_bytes(array: int) -> float:
            home, nbytes = problem.homes.get(array), program.arrays[array].nbytes
            if home is None:
                return nbytes
            layout = np.array([problem.layout(home, choice)], np.int8)
            return nbytes / float(shard_counts(layout, machine)[0])

        arguments = sum(device_bytes(array) for array in program.arguments if program.arrays[array].on_host)
        kept = exchanged = seconds = 0.0
        for op_index in range(len(program.operations)):
            move = host_move(program, op_index, machine.assumptions)
            if move is not None:
                nbytes = move.count * device_bytes(move.array)
                kept += nbytes if move.to_host and not move.is_lasting else 0.0
                exchanged += nbytes
                seconds += move.exposed * host_seconds(nbytes, machine.hardware)
        return cls(round(arguments), round(kept), round(exchanged), seconds)
