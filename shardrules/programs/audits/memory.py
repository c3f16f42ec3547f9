"""The memory that one device needs for a compiled program, by purpose."""

from typing import final, get_args

import attrs

from shardrules.core.errors import ConfigError
from shardrules.core.text import bytes_text
from shardrules.programs.compiling.roles import Role

_REMEDIES = {
    "parameters": "Split the parameters over more axes, or over a larger mesh",
    "optimizer state": "Split the optimizer's state as the parameters are, or over more axes",
    "batch": "Make the batch smaller, or split it over more axes",
    "padding": "Pick sizes that fill the tiles of the hardware",
    "outputs": "Donate the arguments that results replace (donate_argnums)",
    "temporaries": "Make the batch smaller, split activations, or recompute them (jax.checkpoint)",
}
"""Remedies for categories of memory that are too large."""


@final
@attrs.frozen
class MemoryUse:
    """The memory that one device needs for a program, by purpose. It adds up to the compiler's own figure.

    ```python
    assert sr.reports.MemoryUse(8, 16, 4, 0, 2, 10).peak_bytes == 40
    ```
    """

    parameters_bytes: int
    state_bytes: int
    batch_bytes: int
    padding_bytes: int
    """The padding in the layouts of the arguments: TPUs pad arrays to tiles."""
    outputs_bytes: int
    """The results that are not written over arguments."""
    temporaries_bytes: int
    """Everything in between: activations, gathered parameters, buffers of collectives."""

    @property
    def peak_bytes(self) -> int:
        """The sum of all categories."""
        return sum(self.shares().values())

    def shares(self) -> dict[str, int]:
        """Returns the bytes of each category, by the name that is printed."""
        return dict(zip((*get_args(Role), "padding", "outputs", "temporaries"), attrs.astuple(self), strict=True))

    @property
    def largest_share(self) -> tuple[str, int]:
        """The largest category by its name, and its bytes."""
        return max(self.shares().items(), key=lambda item: item[1])

    @property
    def remedy(self) -> str:
        """A remedy for the largest category."""
        return _REMEDIES[self.largest_share[0]]

    def shares_text(self) -> str:
        """Returns the categories with their bytes and shares, the largest first."""
        order = sorted(self.shares().items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {bytes_text(size)} ({size / self.peak_bytes:.0%})" for name, size in order if size)


def usable_bytes(available: int, reserve: int) -> int:
    """Returns the available bytes less a reserve; a larger reserve is a `ConfigError`."""
    if reserve > available:
        raise ConfigError(f"reserve is {bytes_text(reserve)}, more than the available {bytes_text(available)}")
    return available - reserve
