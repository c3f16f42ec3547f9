"""The traffic between hosts that no layout of a step avoids, with its layers in stages and without.

Each layer either has its gradient added up over the hosts that compute parts of the batch for it, or is split over
them, and then its inputs go from host to host; or hosts compute the same. Stages of one host each need none of these;
what they compute goes to the next stage.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self, final

import attrs
from jax.extend.core import Literal

from shardrules.mesh.divisors import divisors
from shardrules.programs.jaxprs.bodies import scan_of
from shardrules.programs.jaxprs.segments import is_float
from shardrules.programs.jaxprs.walk import equations, programs_in
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.stages.layers import LayerLoop


@final
@attrs.frozen
class StageTraffic:
    """The bytes of a step that have to go between hosts at least, and the network for them."""

    layer_bytes: int
    """The parts of layers that are trained."""
    other_bytes: int
    """All else that is trained."""
    carried_bytes: int
    """The arrays that a layer hands on to the next, for all examples."""
    layer_count: int
    cluster: Cluster
    trained_part: float = 1.0
    """The part of the layers' bytes that is trained."""

    @classmethod
    def of(cls, layers: LayerLoop, microbatches: int, trained: Sequence[Any], cluster: Cluster) -> Self:
        """Reads the loop over layers of one of several microbatches, and the shapes that are trained."""
        loop, operands = scan_of(layers.equation), layers.equation.invars
        read = [var for var in operands if not isinstance(var, Literal)]
        carried = _floats(var for var in operands[loop.carry] if var in read and var in layers.by_microbatch)
        pieces = [var for var in operands[loop.pieces] if var in read and is_float(var)]
        sources = layers.sources(len(trained))
        trained_pieces = [var for var in pieces if sources.get(var)]
        # Parameters with more bits are converted first, and then gathered, and so are their gradients.
        bodies = programs_in(layers.equation)
        inside = _floats(var for body in bodies for inner in equations(body) for var in inner.outvars)
        width = min((aval.dtype.itemsize for aval in (*carried, *inside)), default=1)
        indices = dict.fromkeys(index for var in trained_pieces for index in sources[var])
        trained_bytes, piece_bytes = _bytes(trained, width), _bytes(_floats(trained_pieces), width)
        # Gradients of what weights are computed from, such as factors of low rank, may be added up instead.
        layer_bytes = min(piece_bytes, _bytes([trained[index] for index in indices], width))
        carried_bytes = microbatches * _bytes(carried, width)
        part = piece_bytes / max(1, _bytes(_floats(pieces), width))
        return cls(layer_bytes, trained_bytes - layer_bytes, carried_bytes, layers.layer_count, cluster, part)

    def least_seconds(self, computing: float, hidden: float, stages: int = 1, rounds: float = 1.0) -> float:
        """The least time of a step, if computing takes so long where no two hosts compute the same.

        Computing may hide a part of how gradients are added up, and nothing of what stages send each other. They send
        in so many rounds for each microbatch.
        """
        hosts = max(1, self.hosts // stages)
        sending = self.sending_seconds(stages, rounds) if stages > 1 else 0.0
        times = []
        for count in divisors(hosts):
            reducing = self.reducing_seconds(count, stages)
            times.append(max(computing * hosts / count + sending + (1 - hidden) * reducing, sending + reducing))
        return min(times)

    @property
    def hosts(self) -> int:
        return self.cluster.count // self.cluster.granule

    def reducing_seconds(self, hosts: int, stages: int = 1) -> float:
        """The least time in which the network adds up gradients of stages over so many hosts each."""
        layers = min(self.layer_bytes, self.layer_count * self.carried_bytes) / stages
        # A table of words or a head may be split over hosts, which then exchange examples and their gradients.
        others = min(self.other_bytes, self.carried_bytes)
        return sum(
            self._all_reduce_seconds(*part) for part in ((layers, hosts), (others, min(self.hosts, hosts * stages)))
        )

    def sending_seconds(self, stages: int, rounds: float) -> float:
        """The least time in which stages send microbatches to each other."""
        if self.hosts == 1:
            return 0.0
        # What a stage has computed and what waits goes one stage on once, the gradient of each twice, as plans are
        # priced. Instead of the latter, stages may exchange their arrays and back, of which a part stays in hosts.
        moved, exchanged = 1 - 1 / stages, 1 - 1 / min(stages, self.hosts)
        messages = 2 * moved + 2 * 2 * min(moved, exchanged)
        return messages * rounds * self.carried_bytes * stages / self.cluster.count / self._bytes_per_second

    def _all_reduce_seconds(self, nbytes: float, hosts: int) -> float:
        return 2 * (hosts - 1) / hosts * nbytes / self.cluster.granule / self._bytes_per_second

    @property
    def _bytes_per_second(self) -> float:
        hardware = self.cluster.hardware
        return hardware.network_bytes_per_second * hardware.network_fraction


def _floats(variables: Iterable[Any]) -> list[Any]:
    return [var.aval for var in variables if is_float(var)]


def _bytes(avals: Sequence[Any], width: int) -> int:
    """The bytes of arrays in a dtype of so many bytes, or fewer."""
    return sum(aval.size * min(width, aval.dtype.itemsize) for aval in avals)
