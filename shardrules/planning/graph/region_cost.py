"""What a region takes in each layout: the program of one device, with what it sends by hand."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from shardrules.analysis.costs.matmul import flops_seconds
from shardrules.analysis.costs.memory import traffic_seconds
from shardrules.mesh.shape import mesh_shape
from shardrules.planning.graph.compute_cost import ComputeCosts
from shardrules.planning.graph.home import Home
from shardrules.planning.graph.machine import COLLECTIVE_KINDS, Machine
from shardrules.planning.traced.fusion import FusedProgram
from shardrules.planning.traced.program import Operation, TracedProgram, read_jaxpr
from shardrules.regions.declaration import ShardAxes
from shardrules.regions.exchanges import exchanges_of
from shardrules.regions.function import ShardFunction, kernel_flops


@final
@attrs.frozen(eq=False)
class RegionPrice:
    """What one call of a region takes on a device."""

    alternative: int
    """Which of the alternatives it is the price of."""
    name: str
    compute_seconds: float
    exchange_seconds: float
    program: ClosedJaxpr
    """What the device runs."""
    sent: tuple[float, ...]
    """The bytes that a device sends, by kind of collective (`COLLECTIVE_KINDS`)."""

    @property
    def seconds(self) -> float:
        """All of it, if nothing overlaps."""
        return self.compute_seconds + self.exchange_seconds


def shard_axes(operation: Operation, layout: Sequence[int], machine: Machine) -> ShardAxes:
    """The axes of a region's letters in a layout of its node."""
    declaration, factors = operation.equation.params["function"].declaration, operation.factors

    def axes(factor: int | None) -> tuple[str, ...]:
        return tuple(axis for axis, dim in zip(machine.axes, layout, strict=True) if dim == factor)

    letters: dict[str, tuple[str, ...]] = {}
    terms = zip((*declaration.operands, *declaration.results), (*factors.operands, *factors.results), strict=True)
    for letter, factor in (pair for term, dims in terms for pair in zip(term, dims, strict=True)):
        if letter in declaration.split and factor is not None and axes(factor):
            letters[letter] = axes(factor)
    exchange = () if factors.exchange is None else axes(factors.exchange)
    return ShardAxes(letters, exchange, machine.axes)


@final
@attrs.define(eq=False)
class RegionCosts:
    """The prices of regions on a machine. Equal calls are priced once."""

    machine: Machine
    temporary_bytes: dict[int, float] = attrs.field(factory=dict, init=False)
    """What programs of a device have in memory beside operands and results, by their `id`; for those in prices."""
    _prices: dict[Any, RegionPrice] = attrs.field(factory=dict, init=False)

    def possible(self, operation: Operation, layouts: np.ndarray) -> np.ndarray:
        """Which layouts a region can be split in: those whose pieces are even, and that an alternative runs in."""
        factors, params = operation.factors, operation.equation.params
        rows = [tuple(map(int, row)) for row in layouts]
        sizes = dict(zip(self.machine.axes, self.machine.sizes, strict=True))
        flags = []
        for row in rows:
            counts = [self._count(row, factor) for factor in range(len(factors.sizes))]
            together = 1 if factors.exchange is None else counts[factors.exchange]
            is_even = all(factors.sizes[factor] % (counts[factor] * together) == 0 for factor in factors.joint)
            axes = shard_axes(operation, row, self.machine)
            flags.append(is_even and bool(params["function"].candidates(axes, sizes, params["program"].in_avals)))
        return np.array(flags, bool)

    def seconds(self, operation: Operation, layouts: np.ndarray) -> np.ndarray:
        """What one call takes in each layout, of the fastest alternative."""
        rows = [tuple(map(int, row)) for row in layouts]
        return np.array([self.fastest(operation, row).seconds for row in rows])

    def fastest(self, operation: Operation, layout: Sequence[int]) -> RegionPrice:
        """The alternative that is fastest in a layout, the first of equal ones."""
        return min(self.prices(operation, layout), key=lambda price: price.seconds)

    def prices(self, operation: Operation, layout: Sequence[int]) -> list[RegionPrice]:
        """What each alternative that is possible in a layout takes."""
        function: ShardFunction = operation.equation.params["function"]
        avals = operation.equation.params["program"].in_avals
        sizes = dict(zip(self.machine.axes, self.machine.sizes, strict=True))
        axes = shard_axes(operation, layout, self.machine)
        prices = []
        for index in function.candidates(axes, sizes, avals):
            alternative = function.alternative(index)
            program = alternative.shard_program(axes, sizes, avals)
            key = id(program), axes.exchange
            if key not in self._prices:
                self._prices[key] = self._price(index, alternative, program, sizes)
            prices.append(self._prices[key])
        return prices

    def _count(self, layout: Sequence[int], factor: int) -> int:
        sizes = zip(layout, self.machine.sizes, strict=True)
        return int(np.prod([size for dim, size in sizes if dim == factor], dtype=np.int64))

    def _price(
        self, index: int, function: ShardFunction, program: ClosedJaxpr, sizes: Mapping[str, int]
    ) -> RegionPrice:
        sent, seconds = np.zeros(len(COLLECTIVE_KINDS)), 0.0
        for exchange in exchanges_of(program, sizes):
            mask = sum(1 << self.machine.axes.index(name) for name in exchange.axes if name in self.machine.axes)
            rates = self.machine.rates[exchange.kind]
            seconds += exchange.count * (rates.fixed[mask] + rates.per_byte[mask] * exchange.sent_bytes)
            sent[COLLECTIVE_KINDS.index(exchange.kind)] += exchange.count * exchange.sent_bytes
        compute = self._kernel_seconds(function, program)
        if function.cost is None:
            compute = max(compute, self._program_seconds(program))
        return RegionPrice(index, function.name, compute, seconds, program, tuple(sent.tolist()))

    def _kernel_seconds(self, function: ShardFunction, program: ClosedJaxpr) -> float:
        """What computing takes by the FLOPs that the author, or a kernel, declares; 0 where nothing is declared."""
        flops = kernel_flops(program) if function.cost is None else function.flops(program)
        if not flops:
            return 0.0
        hardware = self.machine.hardware
        avals = [*program.in_avals, *program.out_avals]
        dtype = next((aval.dtype for aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact)), np.dtype(np.float32))
        moved = sum(aval.size * aval.dtype.itemsize for aval in avals)
        return max(flops_seconds(flops, dtype, "default", hardware), moved * traffic_seconds(1, hardware))

    def _program_seconds(self, program: ClosedJaxpr) -> float:
        """What the operations of a program take on one device. Of branches the longest counts."""
        traced = read_jaxpr(program)
        costs = ComputeCosts(FusedProgram.of(traced), self.device, {})
        layout = np.zeros((1, 0), np.int8)
        seconds = [0.0] * len(traced.regions)
        for op_index, operation in enumerate(traced.operations):
            homes = {
                (op_index, index): Home(0, (None,) * len(traced.arrays[operand].shape))
                for index, operand in enumerate(operation.operands)
                if operand is not None
            }
            seconds[operation.region] += float(costs.seconds(op_index, 0, layout, homes)[0][0])
        return _longest(traced, seconds)

    @functools.cached_property
    def device(self) -> Machine:
        """A device of the machine by itself."""
        return Machine.of(mesh_shape("data:1"), self.machine.hardware, self.machine.assumptions)


def _longest(traced: TracedProgram, seconds: list[float]) -> float:
    """The seconds of a program of which only the longest branches run, given those of each of its parts by itself."""
    joins = {operation.equation_index for operation in traced.operations if operation.name == "cond"}
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
