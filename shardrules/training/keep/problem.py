"""What keeping each array of a unit costs, and what computing it again."""

import math
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

from shardrules.analysis.costs.memory import host_seconds, traffic_seconds
from shardrules.analysis.machine.hardware import Hardware
from shardrules.planning.graph.machine import Assumptions
from shardrules.training.keep.cut import KeepProblem, KeptValues, UnitStep, UnitValue
from shardrules.training.keep.needs import EquationNeeds, NeedsReader
from shardrules.training.keep.seconds import equation_seconds
from shardrules.training.keep.segments import nbytes_of
from shardrules.training.keep.units import Unit


@final
@attrs.frozen(eq=False)
class UnitProblem:
    """A unit, what can be kept of it, and what it keeps as it is written."""

    unit: Unit
    problem: KeepProblem
    as_written: KeptValues


def unit_problem(unit: Unit, reader: NeedsReader, hardware: Hardware, offload: bool) -> UnitProblem:
    """Reads what the backward pass of a unit needs, and prices it by a sheet. `offload`: whether arrays may be kept in
    the memory of the host."""
    return _Builder(unit, hardware, offload).build(reader.program_needs(unit.body, unit.is_traced))


@final
@attrs.define(eq=False)
class _Builder:
    """The values and steps so far."""

    unit: Unit
    hardware: Hardware
    offload: bool
    values: list[UnitValue] = attrs.field(factory=list)
    indices: dict[Any, int] = attrs.field(factory=dict)
    """For each variable that is not in memory anyway its value."""

    def build(self, needs: Sequence[EquationNeeds]) -> UnitProblem:
        body = self.unit.body
        seconds, written = equation_seconds(ClosedJaxpr(body, ()), self.hardware)
        for index, (var, is_resident) in enumerate(zip(body.invars, self.unit.is_resident, strict=True)):
            if not is_resident:
                self.add_value(var, (-1, index), True)
        steps: list[UnitStep] = []
        needed: dict[int, None] = {}
        as_written: dict[int, None] = {}
        forced: list[int] = []
        inner_bytes = 0
        for index, (equation, each) in enumerate(zip(body.eqns, needs, strict=True)):
            operands = self.values_of(equation.invars)
            for position, var in enumerate(equation.outvars):
                if type(var) is Var:
                    self.add_value(var, (index, position), written[index][position])
            steps.append(UnitStep(seconds[index] * self.unit.run_count, operands, self.values_of(equation.outvars)))
            read = self.values_of([equation.invars[operand] for operand in each.operands])
            needed.update(dict.fromkeys(read))
            as_written.update(dict.fromkeys((*read, *self.values_of([equation.outvars[pos] for pos in each.results]))))
            # A derivative reads the results as its own equation returns them, before they have a name to be kept by.
            if each.is_inner_dear or each.results:
                forced.append(index)
            inner_bytes += self.unit.run_count * sum(map(_aval_bytes, each.inner))
        problem = KeepProblem(tuple(self.values), tuple(steps), tuple(needed), tuple(forced))
        kept = [self.values[index] for index in as_written]
        nbytes = sum(value.nbytes for value in kept) + inner_bytes
        keep_seconds = sum(value.keep_seconds for value in kept if value.keep_seconds < math.inf)
        keep_seconds += traffic_seconds(inner_bytes * (3 if self.unit.is_loop else 1), self.hardware)
        return UnitProblem(self.unit, problem, KeptValues(tuple(as_written), (), (), nbytes, 0, keep_seconds))

    def values_of(self, variables: Sequence[Any]) -> tuple[int, ...]:
        """The values of variables, without those that are in memory anyway."""
        indices = (self.indices.get(var) for var in variables if not isinstance(var, Literal))
        return tuple(dict.fromkeys(index for index in indices if index is not None))

    def add_value(self, var: Any, position: tuple[int, int], is_written: bool) -> None:
        nbytes = nbytes_of(var) * self.unit.run_count
        # A loop copies what it keeps of a round into a stack. What is fused into other kernels is written first.
        copies = 2 * self.unit.is_loop + (not is_written)
        keep_seconds = traffic_seconds(copies * nbytes, self.hardware)
        sent_seconds = math.inf
        if self.offload and nbytes_of(var) >= _LEAST_HOST_BYTES:
            exposed = 1 - Assumptions().hidden
            sent_seconds = keep_seconds + 2 * exposed * host_seconds(nbytes, self.hardware)
        if not isinstance(getattr(var.aval, "dtype", None), np.dtype) and position[0] >= 0:
            keep_seconds = sent_seconds = math.inf  # keys of random numbers cannot be named
        self.indices[var] = len(self.values)
        self.values.append(UnitValue(position, nbytes, keep_seconds, sent_seconds))


_LEAST_HOST_BYTES = 2**20
"""Smaller arrays are not sent to the host: each takes a copy of its own, both ways. With half as much, more small
copies are made for little memory; with twice as much, some arrays of small models stay on the device."""


def _aval_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
