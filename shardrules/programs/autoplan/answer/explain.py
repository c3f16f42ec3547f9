"""Explanations of a plan: which dims go together and what splits them, what uses an argument, what the next best is."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.finding import template
from shardrules.core.source import equation_line, short_line
from shardrules.core.spec import spec_repr
from shardrules.core.text import bytes_text
from shardrules.programs.autoplan.graph.layouts import dim_axes, spec_of
from shardrules.programs.autoplan.graph.machine import COLLECTIVE_KINDS
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.autoplan.graph.region_cost import shard_axes
from shardrules.programs.costs.step_time import seconds_text
from shardrules.programs.traced.program import TracedProgram
from shardrules.programs.traced.unions import Unions

_Dim: TypeAlias = tuple[int, int]
"""The index of an array and one of its dims."""


@final
@attrs.frozen
class SplitDim:
    """Dims that go together through a function, as batch or heads do, and the axes that split them."""

    name: str
    """Arguments that have such a dim, `"w[1], x[0]"`; `"inside"` if none has."""
    size: int
    axes: tuple[str, ...]
    """The mesh axes that split it in most of the computation, by FLOPs."""
    stored: tuple[str, ...] = ()
    """Further mesh axes, which split it only in the arguments."""

    def __str__(self) -> str:
        axes = ", ".join(self.axes) or "whole"
        stored = f" (stored over {', '.join(self.stored)})" if self.stored else ""
        return f"{self.name} ({self.size}) -> {axes}{stored}"


@final
@attrs.frozen
class ArrayUse:
    """An operation that uses an argument, and what bringing the array there costs in one call."""

    operation: str
    line: str
    """The line of Python behind it; empty if unknown."""
    spec: PartitionSpec
    """The layout in which it takes the array."""
    kinds: tuple[str, ...]
    """The collectives that bring the array there."""
    wire_bytes: int
    """The bytes that a device sends for that."""
    seconds: float
    alternatives: tuple[tuple[str, float], ...] = ()
    """The seconds of each other alternative of a region in the same layout."""

    def __str__(self) -> str:
        location = f" at {self.line}" if self.line else ""
        moved = ""
        if self.kinds:
            moved = f" by {' and '.join(self.kinds)}: {bytes_text(self.wire_bytes)}, {1000 * self.seconds:.3g} ms"
        return f"{self.operation}{location} takes it as {spec_repr(self.spec)}{moved}{_others_text(self.alternatives)}"


def _others_text(alternatives: Sequence[tuple[str, float]]) -> str:
    return "".join(f"; {name} {seconds_text(seconds)}" for name, seconds in alternatives)


@final
@attrs.frozen
class RegionUse:
    """A `shardrules.region` as a plan runs it."""

    name: str
    """The name of the function, or of the alternative that runs."""
    line: str
    """The line of Python that calls it; empty if unknown."""
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    """For each letter that is split the mesh axes."""
    exchange: tuple[str, ...]
    """The mesh axes along which it communicates."""
    seconds: float
    """The time in one call of the planned function."""
    wire_bytes: int
    """The bytes that a device sends in the region's own collectives."""
    alternatives: tuple[tuple[str, float], ...]
    """The seconds of each other alternative in the same layout, where they differ."""

    def __str__(self) -> str:
        location = f" at {self.line}" if self.line else ""
        split = ", ".join(f"{letter} over {' and '.join(names)}" for letter, names in self.axes)
        if self.exchange:
            exchanged = f"exchanged over {' and '.join(self.exchange)}"
            split = f"{split}, {exchanged}" if split else exchanged
        sent = f", sends {bytes_text(self.wire_bytes)}" if self.exchange else ""
        time, others = seconds_text(self.seconds), _others_text(self.alternatives)
        return f"{self.name}{location}: {split or 'whole'}, {time}{sent}{others}"


def region_uses(problem: Problem, choice: Sequence[int]) -> tuple[RegionUse, ...]:
    """Returns the regions of a function. Those of one line that run alike are listed once, with all their seconds."""
    uses: dict[RegionUse, int] = {}
    for op_index in problem.region_nodes:
        operation, layout = problem.program.operations[op_index], problem.region_layout(op_index, choice)
        price = problem.region_price(op_index, choice)
        axes = shard_axes(operation, layout, problem.machine)
        count = operation.run_count
        use = RegionUse(
            price.name,
            short_line(equation_line(operation.equation)),
            tuple(axes.letters.items()),
            axes.exchange,
            float(count * price.seconds),
            round(count * sum(price.sent)),
            _other_alternatives(problem, choice, op_index),
        )
        uses[use] = uses.get(use, 0) + 1
    return tuple(_times(use, count) for use, count in uses.items())


def _other_alternatives(problem: Problem, choice: Sequence[int], op_index: int) -> tuple[tuple[str, float], ...]:
    operation = problem.program.operations[op_index]
    prices = problem.region_costs.prices(operation, problem.region_layout(op_index, choice))
    chosen = problem.region_price(op_index, choice)
    return tuple(
        (price.name, float(operation.run_count * price.seconds)) for price in prices if price.seconds != chosen.seconds
    )


def _times(use: RegionUse, count: int) -> RegionUse:
    return attrs.evolve(
        use,
        seconds=count * use.seconds,
        wire_bytes=count * use.wire_bytes,
        alternatives=tuple((name, count * seconds) for name, seconds in use.alternatives),
    )


@final
@attrs.frozen
class Alternative:
    """The best plan in which an argument has another layout, and how much more it takes than the plan."""

    spec: PartitionSpec
    seconds: float
    wire_bytes: int
    peak_bytes: int


def alternative_text(alternative: Alternative | None) -> str:
    if alternative is None:
        return "no other layout fits"
    wire = f"{'+' if alternative.wire_bytes >= 0 else '-'}{bytes_text(abs(alternative.wire_bytes))} on the wire"
    peak = f"{'+' if alternative.peak_bytes >= 0 else '-'}{bytes_text(abs(alternative.peak_bytes))} of memory"
    # Chosen by hand: no device takes so little time for anything.
    time = "as fast" if abs(alternative.seconds) < 1e-8 else f"{1000 * alternative.seconds:+.3g} ms"
    return f"next best: {spec_repr(alternative.spec)}, {time}, {wire}, {peak}"


def array_uses(problem: Problem, choice: Sequence[int], argument_index: int) -> tuple[ArrayUse, ...]:
    program = problem.program
    uses: list[ArrayUse] = []
    for op_index, position, array in _operands_of(program, argument_index):
        operation = program.operations[op_index]
        if (op_index, position) not in problem.operand_homes or operation.role == "return":
            continue
        layout = problem.layout(problem.operand_homes[op_index, position], choice)
        seconds, sent, move_count = problem.operand_move(choice, op_index, position)
        kinds = tuple(kind for kind, nbytes in zip(COLLECTIVE_KINDS, sent, strict=True) if nbytes)
        # Other roles, such as entering a loop, compute nothing: they count only where the array has to be moved.
        if operation.role != "compute" and not kinds:
            continue
        line = "" if operation.equation is None else short_line(equation_line(operation.equation))
        spec = spec_of(layout, len(program.arrays[array].shape), problem.machine)
        name, others = operation.name, ()
        if op_index in problem.region_nodes:
            price = problem.region_price(op_index, choice)
            name = f"region {price.name} {seconds_text(operation.run_count * price.seconds)}"
            others = _other_alternatives(problem, choice, op_index)
        wire_bytes = int(move_count * sent.sum())
        uses.append(ArrayUse(name, line, spec, kinds, wire_bytes, move_count * seconds, others))
    # Repeated layers use it alike: each use is listed once.
    return tuple(dict.fromkeys(uses))


def _operands_of(program: TracedProgram, argument_index: int) -> Iterator[tuple[int, int, int]]:
    """Yields what takes an argument: the operation, which of its operands it is, and the array there."""
    # An array that enters a loop has another index inside: uses there count as its own.
    aliases = {program.arguments[argument_index]}
    for op_index, operation in enumerate(program.operations):
        for position, operand in enumerate(operation.operands):
            if operand is not None and operand in aliases:
                if operation.role in ("enter", "join"):
                    aliases.add(operation.results[0])
                yield op_index, position, operand


@final
@attrs.frozen
class OtherRegion:
    """An alternative that does not run, of a region that takes an argument."""

    chosen: str
    """The alternative that runs."""
    name: str
    node: int
    rows: tuple[int, ...]
    """The layouts of the node in which it would run, by index."""

    def text(self, seconds: float | None) -> str:
        """Returns one line about the best plan with it, which takes so much longer; `None` if none fits."""
        cost = "no plan fits" if seconds is None else f"{1000 * seconds:+.3g} ms"
        return f"region {self.name} instead of {self.chosen}: {cost}"


def other_regions(problem: Problem, choice: Sequence[int], argument_index: int) -> tuple[OtherRegion, ...]:
    """Returns the alternatives that do not run, of all regions that take an argument. Equal layers count as one."""
    others: list[OtherRegion] = []
    for op_index, _, _ in _operands_of(problem.program, argument_index):
        if op_index not in problem.region_nodes:
            continue
        functions = problem.program.operations[op_index].equation.params["function"].alternatives
        node = problem.region_nodes[op_index]
        alternatives = problem.nodes[node].alternatives
        chosen = alternatives[choice[node]]
        for index, function in enumerate(functions):
            rows = tuple(row for row, alternative in enumerate(alternatives) if alternative == index)
            if index != chosen and rows:
                others.append(OtherRegion(functions[chosen].name, function.name, node, rows))
    return tuple(dict.fromkeys(others))


def split_dims(problem: Problem, choice: Sequence[int], paths: Sequence[str]) -> tuple[SplitDim, ...]:
    """Returns the families of dims that any axis splits, those with the most FLOPs first."""
    families = _families(problem.program)
    flops = _flops_by_axes(problem, choice, families)
    names, argument_axes = _argument_axes(problem, choice, paths, families)
    rows: list[tuple[float, SplitDim]] = []
    for root in dict.fromkeys([*flops, *argument_axes]):
        # Operations may split the same dim by different axes: those with most of the FLOPs are shown.
        axes = max(flops[root].items(), key=lambda item: item[1])[0] if root in flops else ()
        family_axes = argument_axes.get(root, ())
        stored = tuple(axis for axis in problem.machine.axes if axis in family_axes and axis not in axes)
        if axes or stored:
            size = problem.program.arrays[root[0]].shape[root[1]]
            total_flops = sum(flops.get(root, {}).values())
            rows.append((total_flops, SplitDim(_family_name(names.get(root, [])), size, axes, stored)))
    # Dims that are split only in arguments come last.
    rows.sort(key=lambda row: (not row[1].axes, -row[0], row[1].name))
    # Repeated layers have a family each: several alike become one line, with `*` for their indices.
    similar_dims: dict[SplitDim, list[SplitDim]] = {}
    for _, split_dim in rows:
        similar_dims.setdefault(attrs.evolve(split_dim, name=template(split_dim.name)), []).append(split_dim)
    return tuple(members[0] if len(members) == 1 else common for common, members in similar_dims.items())


def _flops_by_axes(
    problem: Problem, choice: Sequence[int], families: Unions[_Dim]
) -> dict[_Dim, dict[tuple[str, ...], float]]:
    """Returns for each family of dims the FLOPs of the operations on it, by the axes that split it there."""
    program = problem.program
    flops: dict[_Dim, dict[tuple[str, ...], float]] = {}
    for op_index, operation in enumerate(program.operations):
        if not operation.flops:
            continue
        split_by: dict[_Dim, tuple[str, ...]] = {}
        for position, operand in enumerate(operation.operands):
            if operand is None or (op_index, position) not in problem.operand_homes:
                continue
            layout = problem.layout(problem.operand_homes[op_index, position], choice)
            for dim, factor in enumerate(operation.factors.operands[position]):
                if factor is not None and program.arrays[operand].shape[dim] > 1:
                    split_by.setdefault(families.root((operand, dim)), dim_axes(layout, dim, problem.machine))
        for root, axes in split_by.items():
            by_axes = flops.setdefault(root, {})
            by_axes[axes] = by_axes.get(axes, 0.0) + operation.flops * operation.run_count
    return flops


def _argument_axes(
    problem: Problem, choice: Sequence[int], paths: Sequence[str], families: Unions[_Dim]
) -> tuple[dict[_Dim, list[str]], dict[_Dim, dict[str, None]]]:
    """Returns for each family the arguments that have it, and the axes that split it in them."""
    names: dict[_Dim, list[str]] = {}
    argument_axes: dict[_Dim, dict[str, None]] = {}
    for path, array_index in zip(paths, problem.program.arguments, strict=True):
        home = problem.homes.get(array_index)
        if home is None:
            continue
        layout = problem.layout(home, choice)
        for dim, size in enumerate(problem.program.arrays[array_index].shape):
            if size > 1:
                root = families.root((array_index, dim))
                names.setdefault(root, []).append(f"{path}[{dim}]")
                axes = dim_axes(layout, dim, problem.machine)
                if axes:
                    argument_axes.setdefault(root, {}).update(dict.fromkeys(axes))
    return names, argument_axes


def _family_name(names: list[str]) -> str:
    distinct = list(dict.fromkeys(names))
    if not distinct:
        return "inside"
    return ", ".join(distinct[:3]) + (" ..." if len(distinct) > 3 else "")


def _families(program: TracedProgram) -> Unions[_Dim]:
    families = Unions[_Dim]()
    for operation in program.operations:
        firsts: dict[int, _Dim] = {}
        sides = [*zip(operation.operands, operation.factors.operands, strict=True)]
        sides += [*zip(operation.results, operation.factors.results, strict=True)]
        for array_index, factors in sides:
            if array_index is None:
                continue
            for dim, factor in enumerate(factors):
                if factor is not None and program.arrays[array_index].shape[dim] > 1:
                    families.join(firsts.setdefault(factor, (array_index, dim)), (array_index, dim))
    return families
