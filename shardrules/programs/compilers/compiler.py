"""The compilers that are known, each with what it does to a program. Nothing else of the planner names one.

- The arrays in memory: `FusedProgram` (`fusion.py`), the same for all but for `keeps_costly` and `most_copies`.
- The order in which operations run: the first of `orders`, which the others bound.
- The arrays that it copies: rows of ragged matmuls (`ragged.py`), and what is in another order of dims
  (`reads_in_order`, `moves_summed_dims`).
- What it puts off: that is in `orders`. What it hides: `waiting.py`, the same for all.
- The room between arrays: `gaps`.
- The options that change it: `obeys_limits`.
"""

import abc
from typing import ClassVar, final

import attrs

from shardrules.programs.compilers.order import Order, early_order, late_order, program_order
from shardrules.programs.machine.hardware import Hardware


@attrs.frozen
class Compiler(abc.ABC):
    """A compiler, for one kind of hardware.

    `benchmarks/compiler_rules.py` shows what each of these figures is worth.
    """

    gaps: ClassVar[tuple[float, float, float]]
    """The least memory that intermediate results take, the likeliest and the most, over the most bytes that are there
    at once."""
    excess: ClassVar[float]
    """The largest peak over the upper end of its range, of all plans of programs that were looked at.

    `benchmarks/compiler_rules.py --margins` prints it.
    """
    has_ragged_kernels: ClassVar[bool] = False
    """It has kernels for ragged matmuls, instead of masking rows for each group."""
    narrows: ClassVar[bool] = False
    """It may keep what leaves a loop in a narrower dtype, if all that takes it converts it to that."""
    widens_bfloat16: ClassVar[bool] = False
    """It computes `bfloat16` in `float32`: results take twice their bytes, and arguments are copied for matmuls."""
    keeps_costly: ClassVar[bool] = False
    """It writes what is costly to compute, such as exponentials, where several kernels take it."""
    most_copies: ClassVar[int] = 15
    """A kernel has at most so many copies of the code that computes an array, one for each place at which its elements
    are read: `kAllowedCodeDuplication` in XLA's `fusion_node_indexing_evaluation.cc`."""
    reads_in_order: ClassVar[bool] = False
    """Its kernels for dots with vectors read in the order of dims that the result has: what is sent along a dim other
    than the first is copied before."""
    moves_summed_dims: ClassVar[bool] = False
    """It puts dims that are summed over last in memory, and may give that order to everything around."""
    writes_places: ClassVar[bool] = False
    """It computes where in windows the largest elements are, for gradients of pools, before it adds the gradients."""
    obeys_limits: ClassVar[bool] = False
    """It takes a limit of memory as an option."""

    @property
    def margin(self) -> float:
        """The factor from the upper end of a range to what is certain not to be exceeded."""
        # Chosen by hand: a program may be as far beyond the worst that was seen as that is beyond its range.
        return self.excess**2

    @property
    @abc.abstractmethod
    def orders(self) -> tuple[Order, ...]:
        """The likeliest order in which it runs operations, and the outermost of the others that it may choose."""


@final
@attrs.frozen
class GpuCompiler(Compiler):
    """XLA for GPUs."""

    # Of 124 plans of programs that were looked at, 93 % are within these.
    gaps = (0.9, 1.05, 1.3)
    excess = 1.29
    reads_in_order = True
    moves_summed_dims = True
    writes_places = True
    obeys_limits = True

    @property
    def orders(self) -> tuple[Order, ...]:
        return late_order, early_order, program_order


@final
@attrs.frozen
class TpuCompiler(Compiler):
    """XLA for TPUs."""

    gaps = (0.8, 1.05, 1.3)
    excess = 1.54
    has_ragged_kernels = True
    narrows = True
    # With associative scans in float32 and bfloat16, peaks are 0.55 of the compiled ones so, and 0.32 with 15.
    most_copies = 1

    @property
    def orders(self) -> tuple[Order, ...]:
        return early_order, program_order


@final
@attrs.frozen
class CpuCompiler(Compiler):
    """XLA for CPUs."""

    # The most is where what `jax.checkpoint` would compute again is kept: XLA for CPUs sees that it is equal.
    gaps = (0.9, 1.15, 2.5)
    excess = 1.75
    widens_bfloat16 = True
    keeps_costly = True
    writes_places = True

    @property
    def orders(self) -> tuple[Order, ...]:
        return early_order, program_order


def compiler_of(hardware: Hardware) -> Compiler:
    """Returns the compiler for a device."""
    return GpuCompiler() if hardware.is_gpu else CpuCompiler() if hardware.is_cpu else TpuCompiler()
