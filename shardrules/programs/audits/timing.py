"""The modelled times of an audited program, and the severity of findings by their cost."""

import functools
from collections.abc import Iterable
from typing import Self, final

import attrs

from shardrules.core.finding import Severity
from shardrules.programs.compiled.collectives import Collective, find_collectives
from shardrules.programs.compiled.flops import Matmul, find_matmuls
from shardrules.programs.compiled.flow import LOOP_ROLES
from shardrules.programs.compiled.kernel_costs import KernelFacts
from shardrules.programs.compiled.kernels import Kernel, find_kernels
from shardrules.programs.compiled.program import CompiledProgram, read_program
from shardrules.programs.compiling.request import CompileResult
from shardrules.programs.costs.kernels import kernel_seconds
from shardrules.programs.costs.schedule import PlayedSchedule, play_schedule
from shardrules.programs.costs.slowest import slowest_of
from shardrules.programs.costs.step_time import seconds_text
from shardrules.programs.costs.tasks import collective_seconds
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.machine.targets import Target

_WARNING_SHARE = 0.01
"""A finding that costs a smaller share of the modelled step is a note. Chosen by hand: the cheapest accident with a
published cost, a table that every layer computes again, took 1.4 % of its step."""

_WARNING_SECONDS = 1e-5
"""A finding that costs less is a note, whatever its share. Chosen by hand: a few launches of a kernel take as long."""


@final
@attrs.frozen(eq=False)
class Timing:
    """The times of a program's collectives and kernels on a device."""

    program: CompiledProgram
    collectives: tuple[Collective, ...]
    matmuls: tuple[Matmul, ...]
    hardware: Hardware

    @classmethod
    def of(cls, result: CompileResult, target: Target, hardware: Hardware, facts: KernelFacts) -> Self:
        """Reads a compiled program; `facts` are those of the kernels in it."""
        program = read_program(result.compiled.text)
        collectives = find_collectives(program, result.mesh, target)
        return cls(program, collectives, find_matmuls(program, facts), slowest_of(hardware, program.partition_count))

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        return find_kernels(self.program, self.matmuls)

    @functools.cached_property
    def schedule(self) -> PlayedSchedule:
        return play_schedule(self.program, self.collectives, self.kernels, self.hardware)

    def severity(self, seconds: float) -> Severity:
        """Returns `"warning"` for a cost that is worth a person's time, and `"note"` for any other."""
        is_worth = seconds >= _WARNING_SECONDS and seconds >= _WARNING_SHARE * self.schedule.time.seconds
        return "warning" if is_worth else "note"

    def cost_text(self, seconds: float) -> str:
        """Returns a cost for a sentence: `"modelled 3.2 ms, 4.1 % of the step"`."""
        step = self.schedule.time.seconds
        return f"modelled {seconds_text(seconds)}, {100 * seconds / step if step else 0:.2g} % of the step"

    def seconds(self, collective: Collective) -> float:
        """Returns the time of all runs of a collective in one call of the program."""
        return collective_seconds(collective, self.hardware)

    def latency_seconds(self, collective: Collective) -> float:
        """Returns the time of all runs of a collective if it sent nothing."""
        return self.seconds(attrs.evolve(collective, wire_bytes=0))

    def kernel_seconds(self, kernels: Iterable[Kernel]) -> float:
        """Returns the time of all runs of kernels in one call of the program."""
        return sum(kernel_seconds(kernel, self.hardware) * kernel.times.count for kernel in kernels)

    def exposed_seconds(self, computation: str) -> float:
        """Returns the time by which the collectives of a computation take longer than its kernels."""
        kernels = [kernel for kernel in self.kernels if kernel.computation == computation]
        seconds = sum(map(self.seconds, (each for each in self.collectives if self.round_of(each) == computation)))
        # With a perfect schedule; and no more than the program's own schedule exposes.
        return min(max(0.0, seconds - self.kernel_seconds(kernels)), self.schedule.time.exposed_seconds)

    def round_of(self, collective: Collective) -> str:
        """Returns the computation of the loop that a collective is in, or of the program: without fusions and calls."""
        name = collective.computation
        calls = self.program.callers(name)
        while len(calls) == 1 and calls[0].role not in LOOP_ROLES:
            name = calls[0].caller
            calls = self.program.callers(name)
        return name
