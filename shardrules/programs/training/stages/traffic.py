"""The traffic between hosts that no layout of a step avoids, with its layers in stages and without.

Each layer either has its gradient added up over the hosts that compute it, or is split over them, and then its inputs
go from host to host. Stages of one host each need neither; what they compute goes to the next stage.
"""

from typing import Any, Self, final

import attrs
import jax.numpy as jnp
from jax.extend.core import Literal

from shardrules.programs.jaxprs.bodies import scan_of
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.stages.layers import LayerLoop

_MESSAGES = 4
"""The messages of a tick: what a stage has computed and what waits, forward, and the gradients of both."""


@final
@attrs.frozen
class StageTraffic:
    """The bytes of a step that have to go between hosts at least, and the network for them."""

    layer_bytes: int
    """The layers that are trained."""
    other_bytes: int
    """What else is trained."""
    carried_bytes: int
    """What a layer hands on to the next, for all examples."""
    layer_count: int
    cluster: Cluster

    @classmethod
    def of(cls, layers: LayerLoop, microbatches: int, trained_bytes: int, cluster: Cluster) -> Self:
        """Reads the loop over layers of one of several microbatches."""
        loop, operands = scan_of(layers.equation), layers.equation.invars
        carried = [var for var in operands[loop.carry] if var in layers.by_microbatch]
        layer_bytes = min(trained_bytes, _float_bytes(operands[loop.pieces]))
        other_bytes = trained_bytes - layer_bytes
        return cls(layer_bytes, other_bytes, microbatches * _float_bytes(carried), layers.layer_count, cluster)

    def reducing_seconds(self, stages: int = 1) -> float:
        """The least time in which the network adds up gradients."""
        hosts = self.cluster.count // self.cluster.granule
        layers = min(self.layer_bytes, self.layer_count * self.carried_bytes) / stages
        # A table of words or a head may be split over hosts, which then exchange what they need of it.
        others = min(self.other_bytes, self.carried_bytes / 2)
        return sum(self._all_reduce_seconds(*part) for part in ((layers, max(1, hosts // stages)), (others, hosts)))

    def sending_seconds(self, stages: int, rounds: float) -> float:
        """The least time in which stages send microbatches to each other, of so many rounds for each microbatch."""
        cluster = self.cluster
        if cluster.count == cluster.granule:
            return 0.0
        return _MESSAGES * rounds * self.carried_bytes * stages / cluster.count / self._bytes_per_second

    def _all_reduce_seconds(self, nbytes: float, hosts: int) -> float:
        return 2 * (hosts - 1) / hosts * nbytes / self.cluster.granule / self._bytes_per_second

    @property
    def _bytes_per_second(self) -> float:
        hardware = self.cluster.hardware
        return hardware.network_bytes_per_second * hardware.network_fraction


def _float_bytes(variables: list[Any]) -> int:
    avals = [var.aval for var in variables if not isinstance(var, Literal)]
    return sum(aval.size * aval.dtype.itemsize for aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact))
