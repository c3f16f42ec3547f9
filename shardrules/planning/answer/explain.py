"""Why a plan is as it is: which dims go together and what splits them, what uses an argument, what else could be."""

from collections.abc import Sequence
from typing import TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.analysis.compiling.source import equation_line, short_line
from shardrules.core.check import bytes_text
from shardrules.core.finding import template
from shardrules.core.spec import spec_repr
from shardrules.planning.graph.layouts import spec_of
from shardrules.planning.graph.machine import COLLECTIVE_KINDS
from shardrules.planning.graph.problem import Problem
from shardrules.planning.traced.program import TracedProgram

_SHOWN = 3
"""How many dims of arguments name a family of dims: more make lines that are hard to read."""

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
    """The mesh axes that split it in most of the products, by their FLOPs."""
    stored: tuple[str, ...] = ()
    """The mesh axes that split it in arguments beyond that."""

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
    """What a device sends for that."""
    seconds: float

    def __str__(self) -> str:
        location = f" at {self.line}" if self.line else ""
        moved = ""
        if self.kinds:
            moved = f" by {' and '.join(self.kinds)}: {bytes_text(self.wire_bytes)}, {1000 * self.seconds:.3g} ms"
        return f"{self.operation}{location} takes it as {spec_repr(self.spec)}{moved}"


@final
@attrs.frozen
class Alternative:
    """The best plan in which an argument has another layout, and how much more it takes than the plan."""

    spec: PartitionSpec
    seconds: float
    wire_bytes: int
    peak_bytes: int


def alternative_text(other: Alternative | None) -> str:
    """Returns one line about the next best plan."""
    if other is None:
        return "no other layout of it fits"
    wire = f"{'+' if other.wire_bytes >= 0 else '-'}{bytes_text(abs(other.wire_bytes))} on the wire"
    peak = f"{'+' if other.peak_bytes >= 0 else '-'}{bytes_text(abs(other.peak_bytes))} of memory"
    return f"next best: {spec_repr(other.spec)}, {1000 * other.seconds:+.3g} ms, {wire}, {peak}"


def array_uses(problem: Problem, choice: Sequence[int], argument_index: int) -> tuple[ArrayUse, ...]:
    """Returns the operations that use an argument."""
    program = problem.program
    array = program.arguments[argument_index]
    # An array that enters a loop has another index inside: uses there count as its own.
    aliases = dict.fromkeys([array])
    uses = []
    for op_index, operation in enumerate(program.operations):
        for position, operand in enumerate(operation.operands):
            if operand not in aliases:
                continue
            if operation.role in ("enter", "join"):  # inside the loop it has another index
                aliases[operation.results[0]] = None
            if (op_index, position) not in problem.operand_homes or operation.role == "return":
                continue
            layout = problem.layout(problem.operand_homes[op_index, position], choice)
            seconds, kinds, wire_bytes = _move(problem, choice, op_index, position)
            if operation.role != "compute" and not kinds:
                continue
            line = "" if operation.equation is None else short_line(equation_line(operation.equation))
            spec = spec_of(layout, len(program.arrays[operand].shape), problem.machine)
            uses.append(ArrayUse(operation.name, line, spec, kinds, int(wire_bytes), seconds))
    # Repeated layers use it alike: each use is listed once.
    return tuple(dict.fromkeys(uses))


def _move(
    problem: Problem, choice: Sequence[int], op_index: int, position: int
) -> tuple[float, tuple[str, ...], float]:
    """Returns the seconds, collectives and bytes that it takes to bring an operand to an operation."""
    edge_index = problem.edge_indices.get((op_index, position))
    if edge_index is None:
        return 0.0, (), 0.0
    edge = problem.edges[edge_index]
    row, column = edge.from_codes[choice[edge.start]], edge.to_codes[choice[edge.end]]
    sent = edge.moves.sent[:, row, column] * edge.nbytes * edge.move_count
    kinds = tuple(kind for kind, sent_bytes in zip(COLLECTIVE_KINDS, sent, strict=True) if sent_bytes)
    return float(edge.seconds[row, column]) * edge.move_count, kinds, float(sent.sum())


def split_dims(problem: Problem, choice: Sequence[int], paths: Sequence[str]) -> tuple[SplitDim, ...]:
    """Returns the families of dims that any axis splits, the most computed with first."""
    families = _Families(problem.program)
    flops = _flops_by_axes(problem, choice, families)
    names, stored = _stored_axes(problem, choice, paths, families)
    rows = []
    for root in dict.fromkeys([*flops, *stored]):
        # Operations may split the same dim by different axes: those that split it in most of the FLOPs name it.
        axes = max(flops[root].items(), key=lambda item: item[1])[0] if root in flops else ()
        beyond = tuple(axis for axis in problem.machine.axes if axis in stored.get(root, ()) and axis not in axes)
        if axes or beyond:
            size = problem.program.arrays[root[0]].shape[root[1]]
            total_flops = sum(flops.get(root, {}).values())
            rows.append((total_flops, SplitDim(_family_name(names.get(root, [])), size, axes, beyond)))
    rows.sort(key=lambda row: (not row[1].axes, -row[0], row[1].name))
    # Repeated layers have a family each: they become one line, unless there is only one of them.
    similar: dict[SplitDim, list[SplitDim]] = {}
    for _, dim in rows:
        similar.setdefault(attrs.evolve(dim, name=template(dim.name)), []).append(dim)
    return tuple(dims[0] if len(dims) == 1 else common for common, dims in similar.items())


def _flops_by_axes(
    problem: Problem, choice: Sequence[int], families: "_Families"
) -> dict[_Dim, dict[tuple[str, ...], float]]:
    """Returns for each family of dims the FLOPs that are done with it split over some axes."""
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
                    split_by.setdefault(families.root((operand, dim)), _axes_on(problem, layout, dim))
        for root, axes in split_by.items():
            by_axes = flops.setdefault(root, {})
            by_axes[axes] = by_axes.get(axes, 0.0) + operation.flops * operation.run_count
    return flops


def _stored_axes(
    problem: Problem, choice: Sequence[int], paths: Sequence[str], families: "_Families"
) -> tuple[dict[_Dim, list[str]], dict[_Dim, dict[str, None]]]:
    """Returns for each family the arguments that have it, and the axes that split it in them."""
    names: dict[_Dim, list[str]] = {}
    stored: dict[_Dim, dict[str, None]] = {}
    for path, array in zip(paths, problem.program.arguments, strict=True):
        home = problem.homes.get(array)
        if home is None:
            continue
        layout = problem.layout(home, choice)
        for dim, size in enumerate(problem.program.arrays[array].shape):
            if size > 1:
                root = families.root((array, dim))
                names.setdefault(root, []).append(f"{path}[{dim}]")
                axes = _axes_on(problem, layout, dim)
                if axes:
                    stored.setdefault(root, {}).update(dict.fromkeys(axes))
    return names, stored


def _axes_on(problem: Problem, layout: Sequence[int], dim: int) -> tuple[str, ...]:
    return tuple(axis for axis, split_dim in zip(problem.machine.axes, layout, strict=True) if split_dim == dim)


def _family_name(names: list[str]) -> str:
    distinct = list(dict.fromkeys(names))
    if not distinct:
        return "inside"
    return ", ".join(distinct[:_SHOWN]) + (" ..." if len(distinct) > _SHOWN else "")


@final
class _Families:
    """Which dims of arrays go together: a union-find over the factors of operations."""

    def __init__(self, program: TracedProgram) -> None:
        self.parents: dict[_Dim, _Dim] = {}
        for operation in program.operations:
            groups: dict[int, list[_Dim]] = {}
            sides = [*zip(operation.operands, operation.factors.operands, strict=True)]
            sides += [*zip(operation.results, operation.factors.results, strict=True)]
            for array, factors in sides:
                if array is None:
                    continue
                for dim, factor in enumerate(factors):
                    if factor is not None and program.arrays[array].shape[dim] > 1:
                        groups.setdefault(factor, []).append((array, dim))
            for first, *others in groups.values():
                for other in others:
                    self.join(first, other)

    def root(self, dim: _Dim) -> _Dim:
        """Returns the dim that represents its family."""
        path = []
        while self.parents.get(dim, dim) != dim:
            path.append(dim)
            dim = self.parents[dim]
        # Path compression keeps later look-ups short.
        for step in path:
            self.parents[step] = dim
        return dim

    def join(self, first: _Dim, second: _Dim) -> None:
        """Joins two families; the dim that comes first in the program represents both."""
        # Sorted, so that names do not depend on the order of joins.
        low, high = sorted((self.root(first), self.root(second)))
        self.parents[high] = low
