"""The arrays that the backward pass keeps, as positions in a traced function."""

from collections.abc import Iterable, Sequence
from typing import final

import attrs

from shardrules.core.text import bytes_text
from shardrules.programs.training.keep.units import UnitPosition

Position = tuple[int, int]
"""An array in a unit: the index of its equation and which result it is; -1 and which input of the unit."""


def _as_positions(values: Iterable[Sequence[int]]) -> tuple[Position, ...]:
    return tuple(sorted((int(index), int(result)) for index, result in values))


@final
@attrs.frozen
class KeptUnit:
    """The arrays kept of a part of a function that is repeated. All else that gradients need is computed again."""

    unit: UnitPosition
    kept: tuple[Position, ...] = attrs.field(converter=_as_positions)
    offloaded: tuple[Position, ...] = attrs.field(default=(), converter=_as_positions)
    """The arrays kept in the memory of the host."""


@final
@attrs.frozen
class Keep:
    """The arrays that the backward pass of a function keeps: without units the same that JAX keeps of the function as
    written.

    The same for other sizes of the batch: figures and text are for the size that was read, and do not count when two
    are compared.
    """

    units: tuple[KeptUnit, ...] = attrs.field(default=(), converter=tuple)
    replaces_checkpoints: bool = False
    """The `jax.checkpoint` of the function are taken away."""
    kept_bytes: int = attrs.field(default=0, eq=False)
    """The kept bytes of units, on all devices together."""
    host_bytes: int = attrs.field(default=0, eq=False)
    seconds: float = attrs.field(default=0.0, eq=False)
    """The seconds of keeping and computing again, on one device that does all of it."""
    repeated_flops: float = attrs.field(default=0.0, eq=False)
    """The FLOPs that are computed again, as a part of the forward pass's."""
    words: tuple[str | int, ...] = attrs.field(default=("keeps everything",), eq=False)
    """The arrays that it keeps and computes again: text, and numbers of bytes in it."""

    def scaled(self, factor: float) -> "Keep":
        """Returns the same with other figures: for another size of the batch, or for one of several devices."""
        return attrs.evolve(
            self,
            kept_bytes=round(self.kept_bytes * factor),
            host_bytes=round(self.host_bytes * factor),
            words=tuple(round(word * factor) if isinstance(word, int) else word for word in self.words),
        )

    @property
    def short_text(self) -> str:
        """The arrays that it keeps and computes again, in a few words."""
        if not self.units:
            return "keeps everything"
        parts = [bytes_text(self.kept_bytes)] if self.kept_bytes or not self.host_bytes else []
        parts += [f"{bytes_text(self.host_bytes)} on the host"] if self.host_bytes else []
        return f"keeps {' and '.join(parts)}, recomputes {100 * self.repeated_flops:.0f} %"

    def __str__(self) -> str:
        return "".join(bytes_text(word) if isinstance(word, int) else word for word in self.words)
