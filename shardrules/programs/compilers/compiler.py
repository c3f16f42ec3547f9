"""The compilers that are known, each with what it does to a program. Nothing else of the planner names one.

- The arrays in memory: `FusedProgram` (`fusion.py`), the same for all.
- The order in which operations run: `order`, and `other_orders` that bound it.
- The arrays that it copies: rows of ragged matmuls (`ragged.py`), stacks (`fills_stacks`), and what is in another order
  of dims (`reads_in_order`, `moves_summed_dims`).
- What it puts off: that is in `order`. What it hides: `waiting.py`, the same for all.
- The room between arrays: `least_gaps`, `most_gaps`.
- The options that change it: `obeys_limits`.
"""

import abc
from typing import ClassVar, final

import attrs

from shardrules.programs.compilers.order import early_order, late_order, program_order
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.traced.program import TracedProgram


@attrs.frozen
class Compiler(abc.ABC):
    """A compiler, for one kind of hardware.

    `benchmarks/compiler_rules.py` shows what each of these figures is worth.
    """

    least_gaps: ClassVar[float]
    most_gaps: ClassVar[float]
    """The least and the most memory that intermediate results take, over the most bytes that are there at once."""
    has_ragged_kernels: ClassVar[bool] = False
    """It has kernels for ragged matmuls, instead of masking rows for each group."""
    fills_stacks: ClassVar[bool] = True
    """It fills memory with zeros before a loop stacks results in it."""
    narrows: ClassVar[bool] = False
    """It may keep what leaves a loop in a narrower dtype, if all that takes it converts it to that."""
    reads_in_order: ClassVar[bool] = False
    """Its kernels for dots with vectors read in the order of dims that the result has: what is sent along a dim other
    than the first is copied before."""
    moves_summed_dims: ClassVar[bool] = False
    """It puts dims that are summed over last in memory, and may give that order to everything around."""
    splits_reductions: ClassVar[bool] = False
    """A kernel reduces dims that are next to each other; of others each run takes one."""
    obeys_limits: ClassVar[bool] = False
    """It takes a limit of memory as an option."""

    @abc.abstractmethod
    def order(self, program: TracedProgram) -> tuple[int, ...]:
        """Returns the positions of all operations in the order that is likeliest."""

    @abc.abstractmethod
    def other_orders(self, program: TracedProgram) -> tuple[tuple[int, ...], ...]:
        """Returns the outermost of the other orders that it may choose."""

    @property
    def middle_gaps(self) -> float:
        """The memory that intermediate results are expected to take, over the most bytes that are there at once."""
        return (self.least_gaps + self.most_gaps) / 2


@final
@attrs.frozen
class GpuCompiler(Compiler):
    """XLA for GPUs."""

    # Of 114 plans of programs that were looked at, 92 % are within these.
    least_gaps = 0.9
    most_gaps = 1.3
    reads_in_order = True
    moves_summed_dims = True
    splits_reductions = True
    obeys_limits = True

    def order(self, program: TracedProgram) -> tuple[int, ...]:
        return late_order(program)

    def other_orders(self, program: TracedProgram) -> tuple[tuple[int, ...], ...]:
        return program_order(program), early_order(program)


@final
@attrs.frozen
class TpuCompiler(Compiler):
    """XLA for TPUs."""

    least_gaps = 0.8
    most_gaps = 1.3
    has_ragged_kernels = True
    fills_stacks = False
    narrows = True

    def order(self, program: TracedProgram) -> tuple[int, ...]:
        return early_order(program)

    def other_orders(self, program: TracedProgram) -> tuple[tuple[int, ...], ...]:
        return (program_order(program),)


@final
@attrs.frozen
class CpuCompiler(Compiler):
    """XLA for CPUs."""

    least_gaps = 0.9
    most_gaps = 1.3

    def order(self, program: TracedProgram) -> tuple[int, ...]:
        return early_order(program)

    def other_orders(self, program: TracedProgram) -> tuple[tuple[int, ...], ...]:
        return (program_order(program),)


def compiler_of(hardware: Hardware) -> Compiler:
    """Returns the compiler for a device: for TPUs where links are a torus, for CPUs and for GPUs."""
    return TpuCompiler() if hardware.torus_dims else CpuCompiler() if hardware.is_cpu else GpuCompiler()
