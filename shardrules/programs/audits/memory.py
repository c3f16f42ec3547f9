"""The memory that one device needs for a compiled program, by purpose."""

import re
from collections.abc import Mapping, Sequence
from typing import final, get_args

import attrs

from shardrules.core.errors import ConfigError
from shardrules.core.text import bytes_text
from shardrules.programs.compiled.program import CompiledProgram
from shardrules.programs.compiled.text import HOST_MEMORY
from shardrules.programs.compiling.arguments import Argument
from shardrules.programs.compiling.compile import Compiled
from shardrules.programs.compiling.roles import BATCH, PARAMETERS, STATE, Role

_ARGUMENT = re.compile(r"args\[(\d+)\]")
"""The name that JAX gives to parameters of a function that takes `*args`, as the compiled functions here do."""

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


def memory_use(
    compiled: Compiled, program: CompiledProgram, arguments: Sequence[Argument], roles: Sequence[Role]
) -> MemoryUse:
    """Returns the memory that one device needs; `program` was read from the text of `compiled`."""
    by_role = dict.fromkeys(get_args(Role), 0)
    for size, role in zip(argument_bytes(compiled, program, arguments), roles, strict=True):
        by_role[role] += size
    # The arguments are counted from the program's types, and the compiler's total has their layouts too: the difference
    # is padding. Results that alias arguments are in both totals.
    reported = compiled.memory
    return MemoryUse(
        by_role[PARAMETERS],
        by_role[STATE],
        by_role[BATCH],
        reported.argument_bytes - sum(by_role.values()),
        reported.output_bytes - reported.alias_bytes,
        reported.temporary_bytes,
    )


def argument_bytes(compiled: Compiled, program: CompiledProgram, arguments: Sequence[Argument]) -> tuple[int, ...]:
    """Returns the bytes of each argument on one device, without the padding of its layout."""
    indices = argument_indices(program)
    sizes = [0] * len(arguments)
    # Some compilers count memory of the host separately. With the others it is part of the sum that ours must match.
    is_separate = compiled.memory.host_argument_bytes > 0
    for parameter in program.arguments:
        index = indices[parameter.op_name]
        is_on_host = bool(arguments[index].memory) or any(each.memory_space == HOST_MEMORY for each in parameter.types)
        sizes[index] = 0 if is_separate and is_on_host else parameter.nbytes
    return tuple(sizes)


def argument_indices(program: CompiledProgram) -> Mapping[str, int]:
    """Returns the index of the argument behind each parameter of the program, by the parameter's name."""
    # Parameters that XLA renamed have no index in their names; their position in the program is the index, since no
    # argument is dropped (`keep_unused`).
    indices = {}
    for parameter in program.arguments:
        match = _ARGUMENT.search(parameter.op_name)
        indices[parameter.op_name] = int(match[1]) if match else int(parameter.literal) - program.token_count
    return indices
