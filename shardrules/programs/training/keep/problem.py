"""The cost of keeping each array of a unit, and of computing it again."""

import math
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

from shardrules.programs.autoplan.graph.machine import Assumptions
from shardrules.programs.costs.memory import host_seconds, traffic_seconds
from shardrules.programs.jaxprs.segments import nbytes_of
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.training.keep.cut import KeepProblem, KeptValues, UnitStep, UnitValue, cheapest
from shardrules.programs.training.keep.needs import EquationNeeds, NeedsReader
from shardrules.programs.training.keep.seconds import equation_seconds
from shardrules.programs.training.keep.units import Unit


@final
@attrs.frozen(eq=False)
class UnitProblem:
    """A unit, what can be kept of it, and what it keeps as it is written."""

    unit: Unit
    problem: KeepProblem
    as_written: KeptValues

    @property
    def repeats(self) -> int:
        """The number of its segments that may keep different arrays: a loop has one body for all rounds."""
        return self.unit.position.repeats


def unit_problem(
    unit: Unit, reader: NeedsReader, hardware: Hardware, least_host_bytes: float = math.inf
) -> UnitProblem:
    """Reads what the backward pass of a unit needs, and prices it by a sheet. Arrays of `least_host_bytes` or more may
    be kept in the memory of the host."""
    return _Builder(unit, hardware, least_host_bytes).build(reader.program_needs(unit.body, unit.is_traced))


@final
@attrs.define(eq=False)
class _Builder:
    """The values and steps so far."""

    unit: Unit
    hardware: Hardware
    least_host_bytes: float
    values: list[UnitValue] = attrs.field(factory=list)
    indices: dict[Any, int] = attrs.field(factory=dict)
    """The value of each variable that is not in memory anyway."""
    steps: list[UnitStep] = attrs.field(factory=list)
    needed: dict[int, None] = attrs.field(factory=dict)
    read_as_written: dict[int, None] = attrs.field(factory=dict)
    """The arrays that the backward pass reads of a unit as it is written."""
    forced: list[int] = attrs.field(factory=list)
    inner_bytes: int = 0
    """The bytes that derivatives read and that are neither operands nor results of their equations."""

    def build(self, needs: Sequence[EquationNeeds]) -> UnitProblem:
        body = self.unit.body
        seconds, written = equation_seconds(ClosedJaxpr(body, ()), self.hardware)
        for index, (var, is_resident) in enumerate(zip(body.invars, self.unit.is_resident, strict=True)):
            if not is_resident:
                self.indices[var] = self.add_value(var.aval, (-1, index), True)
        for index, each in enumerate(needs):
            self.add_equation(index, each, seconds[index] * self.unit.run_count, written[index])
        problem = KeepProblem(tuple(self.values), tuple(self.steps), tuple(self.needed), tuple(self.forced))
        return UnitProblem(self.unit, problem, self.as_written(problem))

    def as_written(self, problem: KeepProblem) -> KeptValues:
        """The arrays kept without any checkpoint."""
        if not self.unit.is_loop:
            # Compilers compute again what they fuse into the kernels that read it, and keep the rest.
            steps = [attrs.evolve(step, seconds=math.inf if step.seconds else 0.0) for step in problem.steps]
            forced = [index for index in problem.forced if not problem.steps[index].seconds]
            values = [attrs.evolve(value, host_seconds=math.inf) for value in problem.values]
            kept = cheapest(KeepProblem(tuple(values), tuple(steps), problem.needed, tuple(forced)), 1.0)
            return attrs.evolve(kept, repeated=(), seconds=0.0)
        values = [self.values[index] for index in self.read_as_written]
        nbytes = sum(value.nbytes for value in values) + self.inner_bytes
        seconds = sum(value.keep_seconds for value in values if value.keep_seconds < math.inf)
        seconds += traffic_seconds(_STACK_COPIES * self.inner_bytes, self.hardware)
        return KeptValues(tuple(self.read_as_written), (), (), nbytes, 0, seconds)

    def add_equation(self, index: int, needs: EquationNeeds, seconds: float, is_written: Sequence[bool]) -> None:
        equation = self.unit.body.eqns[index]
        operands, inside = self.values_of(equation.invars), dict[int, int]()
        if needs.rule is not None:
            # What a forward rule returns is kept inside of it. Its last results are the equation's.
            count = len(equation.outvars)
            for rule_index, aval in needs.rule.types:
                inside[rule_index] = self.add_value(aval, (index, count + rule_index), True)
            sources = {needs.rule.first + result: var for result, var in enumerate(equation.outvars)}
            self.indices.update((var, inside[position]) for position, var in sources.items() if position in inside)
        for result, var in enumerate(equation.outvars):
            if type(var) is Var and var not in self.indices:
                self.indices[var] = self.add_value(var.aval, (index, result), is_written[result])
        results = tuple(dict.fromkeys((*self.values_of(equation.outvars), *inside.values())))
        self.steps.append(UnitStep(seconds, operands, results))
        read = self.values_of([equation.invars[operand] for operand in needs.operands])
        read += tuple(inside[position] for position in (needs.rule.reads if needs.rule is not None else ()))
        self.needed.update(dict.fromkeys(read))
        own_results = self.values_of([equation.outvars[result] for result in needs.results])
        self.read_as_written.update(dict.fromkeys((*read, *own_results)))
        # A derivative reads the results as its own equation returns them, before they have a name to be kept by.
        if needs.is_inner_dear or own_results:
            self.forced.append(index)
        self.inner_bytes += self.unit.run_count * sum(map(nbytes_of, needs.inner))

    def values_of(self, variables: Sequence[Any]) -> tuple[int, ...]:
        """The values of variables, without those that are in memory anyway."""
        indices = (self.indices.get(var) for var in variables if not isinstance(var, Literal))
        return tuple(dict.fromkeys(index for index in indices if index is not None))

    def add_value(self, aval: Any, position: tuple[int, int], is_written: bool) -> int:
        nbytes = nbytes_of(aval)
        # A loop copies what it keeps of a round into a stack. What is fused into other kernels is written first.
        copies = (_STACK_COPIES - 1) * self.unit.is_loop + (not is_written)
        keep_seconds = traffic_seconds(copies * nbytes * self.unit.run_count, self.hardware)
        sent_seconds = math.inf
        if nbytes >= self.least_host_bytes:
            exposed = 1 - Assumptions().hidden
            sent_seconds = keep_seconds + 2 * exposed * host_seconds(nbytes * self.unit.run_count, self.hardware)
        if not isinstance(getattr(aval, "dtype", None), np.dtype) and position[0] >= 0:
            keep_seconds = sent_seconds = math.inf  # keys of random numbers cannot be named
        self.values.append(UnitValue(position, nbytes * self.unit.run_count, keep_seconds, sent_seconds))
        return len(self.values) - 1


_STACK_COPIES = 3
"""The bytes that keeping an array of a round moves, over its own: it is written, read and written into the stack."""
