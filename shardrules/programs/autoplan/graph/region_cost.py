"""The time of a region in each layout: the program of one device, with its exchanges by hand."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from shardrules.mesh.shape import mesh_shape
from shardrules.programs.autoplan.graph.compute_cost import ComputeCosts
from shardrules.programs.autoplan.graph.layouts import dim_axes, dim_shard_count
from shardrules.programs.autoplan.graph.machine import COLLECTIVE_KINDS, Machine
from shardrules.programs.autoplan.graph.problem import RegionPrice
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.costs.matmul import flops_seconds
from shardrules.programs.costs.memory import traffic_seconds
from shardrules.programs.regions.declaration import ShardAxes
from shardrules.programs.regions.exchanges import exchanges_of
from shardrules.programs.regions.function import ShardFunction, kernel_flops
from shardrules.programs.traced.program import Operation, TracedProgram, read_jaxpr


def shard_axes(operation: Operation, layout: Sequence[int], machine: Machine) -> ShardAxes:
    """The axes of a region's letters in a layout of its node."""
    declaration, factors = operation.equation.params["function"].declaration, operation.factors

    letters: dict[str, tuple[str, ...]] = {}
    terms = zip((*declaration.operands, *declaration.results), (*factors.operands, *factors.results), strict=True)
    for letter, factor in (pair for term, dims in terms for pair in zip(term, dims, strict=True)):
        if letter in declaration.split and (axes := dim_axes(layout, factor, machine)):
            letters[letter] = axes
    exchange = dim_axes(layout, factors.exchange, machine)
    return ShardAxes(letters, exchange, machine.axes)


def _one_device(costs: "RegionCosts") -> Machine:
    return Machine.of(mesh_shape("data:1"), costs.machine.hardware, costs.machine.assumptions)


@final
@attrs.define(eq=False)
class RegionCosts:
    """The prices of regions on a machine. Equal calls are priced once."""

    machine: Machine
    device: Machine = attrs.field(init=False, default=attrs.Factory(_one_device, takes_self=True))
    """A device of the machine by itself."""
    _prices: dict[Any, RegionPrice] = attrs.field(factory=dict, init=False)

    def rows(self, operation: Operation, layouts: np.ndarray) -> tuple[list[int], list[int]]:
        """The layouts that a region can be split in, each for every alternative that runs in it: indices of both.

        Pieces are even. Of alternatives that run the same program, as many do that send nothing, the first is enough.
        """
        indices, alternatives = [], []
        has_alternatives = bool(operation.equation.params["function"].alternatives)  # printing programs takes long
        for index, layout in enumerate(layouts.tolist()):
            programs: dict[Any, None] = {}
            for price in self.prices(operation, layout) if self._is_allowed(operation, layout) else ():
                key = price.seconds, str(price.program) if has_alternatives else ""
                if key not in programs:
                    programs[key] = None
                    indices.append(index)
                    alternatives.append(price.alternative)
        if not indices:
            function: ShardFunction = operation.equation.params["function"]
            function.refuse([f"it cannot be exchanged over {', '.join(function.over or ())}: pieces would be uneven"])
        return indices, alternatives

    def price(self, operation: Operation, layout: Sequence[int], alternative: int) -> RegionPrice:
        """The price of one call in a layout that an alternative runs in."""
        function: ShardFunction = operation.equation.params["function"].alternative(alternative)
        axes = shard_axes(operation, layout, self.machine)
        program = function.shard_program(axes, self._sizes, operation.equation.params["program"].in_avals)
        key = id(program), axes.exchange
        if key not in self._prices:
            self._prices[key] = self._price(alternative, function, program)
        return self._prices[key]

    def prices(self, operation: Operation, layout: Sequence[int]) -> list[RegionPrice]:
        """The prices of all alternatives that are possible in a layout."""
        function, avals = operation.equation.params["function"], operation.equation.params["program"].in_avals
        possible = function.candidates(shard_axes(operation, layout, self.machine), self._sizes, avals)
        return [self.price(operation, layout, alternative) for alternative in possible]

    def _is_allowed(self, operation: Operation, layout: Sequence[int]) -> bool:
        """Shards are exchanged over all required axes, and dims that are split in two ways have enough elements for
        both."""
        factors, over = operation.factors, operation.equation.params["function"].over
        required = [axis for axis in self.machine.axes if axis in (over or ())]
        if over is not None and [*shard_axes(operation, layout, self.machine).exchange] != required:
            return False
        together = 1 if factors.exchange is None else dim_shard_count(layout, factors.exchange, self.machine)
        return all(
            factors.sizes[factor] % (dim_shard_count(layout, factor, self.machine) * together) == 0
            for factor in factors.joint
        )

    @property
    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.machine.axes, self.machine.sizes, strict=True))

    def _price(self, index: int, function: ShardFunction, program: ClosedJaxpr) -> RegionPrice:
        sent, seconds = np.zeros(len(COLLECTIVE_KINDS)), 0.0
        for exchange in exchanges_of(program, self._sizes):
            mask = sum(1 << self.machine.axes.index(name) for name in exchange.axes if name in self.machine.axes)
            rates = self.machine.rates[exchange.kind]
            seconds += exchange.count * (rates.fixed[mask] + rates.per_byte[mask] * exchange.sent_bytes)
            sent[COLLECTIVE_KINDS.index(exchange.kind)] += exchange.count * exchange.sent_bytes
        compute = self._compute_seconds(function, program)
        return RegionPrice(index, function.name, compute, seconds, program, tuple(sent.tolist()))

    def _compute_seconds(self, function: ShardFunction, program: ClosedJaxpr) -> float:
        seconds = self._kernel_seconds(function, program)
        return seconds if function.cost is not None else max(seconds, self._program_seconds(program))

    def _kernel_seconds(self, function: ShardFunction, program: ClosedJaxpr) -> float:
        """The time of computing by the FLOPs that the author, or a kernel, declares; 0 without a declaration."""
        flops = kernel_flops(program) if function.cost is None else function.flops(program)
        if not flops:
            return 0.0
        hardware = self.machine.hardware
        avals = [*program.in_avals, *program.out_avals]
        dtype = next((aval.dtype for aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact)), np.dtype(np.float32))
        moved = sum(aval.size * aval.dtype.itemsize for aval in avals)
        return max(flops_seconds(flops, dtype, "default", hardware), moved * traffic_seconds(1, hardware))

    def _program_seconds(self, program: ClosedJaxpr) -> float:
        """The time of a program's operations on one device. Of branches the longest counts."""
        traced = read_jaxpr(program)
        costs = ComputeCosts(FusedProgram.of(traced, self.device.compiler), self.device)
        seconds = [0.0] * len(traced.regions)
        for op_index, operation in enumerate(traced.operations):
            if operation.name == "region":  # inside of another it runs as it stands
                params = operation.equation.params
                inner = self._compute_seconds(params["function"].alternative(0), params["program"])
                seconds[operation.region] += inner * operation.run_count
            else:
                seconds[operation.region] += costs.seconds_of_one(op_index)
        return _longest(traced, seconds)


def _longest(traced: TracedProgram, seconds: list[float]) -> float:
    """The seconds of a program that runs only its longest branches, given the seconds of each of its parts by
    itself."""
    joins = {operation.equation_index for operation in traced.operations if operation.joins_branches}
    condition_of = {
        operation.region: operation.equation_index
        for operation in traced.operations
        if operation.role == "enter" and operation.equation_index in joins
    }
    counted: dict[int, float] = {}  # of the branches of each condition so far
    for region in range(len(traced.regions) - 1, 0, -1):  # parts inside of another come after it
        condition, more = condition_of.get(region), seconds[region]
        if condition is not None:
            more = max(0.0, more - counted.get(condition, 0.0))
            counted[condition] = counted.get(condition, 0.0) + more
        seconds[traced.regions[region].parent] += more
    return seconds[0]
