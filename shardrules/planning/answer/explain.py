"""Why a plan is as it is: which dims go together and what splits them, who takes an argument, what else could be."""

from collections.abc import Sequence
from typing import final

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


@final
@attrs.frozen
class SplitDim:
    """Dims that go together through a function, and the axes that split them where most is computed.

    **Arguments:**

    - `name`: arguments that have such a dim, `"w[1], x[0]"`; `"inside"` where none has.
    - `size`: the size.
    - `axes`: the mesh axes that split it in most of the products, by their FLOPs.
    - `stored`: the mesh axes that split it in arguments beyond that.
    """

    name: str
    size: int
    axes: tuple[str, ...]
    stored: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = ", ".join(self.axes) or "whole"
        kept = f" (stored over {', '.join(self.stored)})" if self.stored else ""
        return f"{self.name} ({self.size}) -> {where}{kept}"


@final
@attrs.frozen
class Use:
    """An operation that takes an argument.

    **Arguments:**

    - `operation`: its name.
    - `line`: the line of Python behind it; empty where none is known.
    - `spec`: the layout in which it takes the array.
    - `kinds`: the collectives that bring it there.
    - `wire_bytes`: what a device sends for that in one call.
    - `seconds`: what that takes.
    """

    operation: str
    line: str
    spec: PartitionSpec
    kinds: tuple[str, ...]
    wire_bytes: int
    seconds: float

    def __str__(self) -> str:
        how = (
            f" by {' and '.join(self.kinds)}: {bytes_text(self.wire_bytes)}, {1000 * self.seconds:.3g} ms"
            if self.kinds
            else ""
        )
        return f"{self.operation}{f' at {self.line}' if self.line else ''} takes it as {spec_repr(self.spec)}{how}"


@final
@attrs.frozen
class Alternative:
    """The best plan in which an argument is laid out in another way, against the one that was found.

    **Arguments:**

    - `spec`: the other layout.
    - `seconds`: how much longer a call takes.
    - `wire_bytes`: how much more a device sends.
    - `peak_bytes`: how much more memory it takes.
    """

    spec: PartitionSpec
    seconds: float
    wire_bytes: int
    peak_bytes: int


def alternatives_text(other: Alternative | None) -> str:
    """Says what the next best would cost.

    **Arguments:**

    - `other`: it.

    **Returns:**

    One line.
    """
    if other is None:
        return "no other layout of it fits"
    wire = f"{'+' if other.wire_bytes >= 0 else '-'}{bytes_text(abs(other.wire_bytes))} on the wire"
    peak = f"{'+' if other.peak_bytes >= 0 else '-'}{bytes_text(abs(other.peak_bytes))} of memory"
    return f"next best: {spec_repr(other.spec)}, {1000 * other.seconds:+.3g} ms, {wire}, {peak}"


def uses(problem: Problem, choice: Sequence[int], number: int) -> tuple[Use, ...]:
    """Returns what takes an argument, and in which layout.

    **Arguments:**

    - `problem`, `choice`: the plan.
    - `number`: which argument.

    **Returns:**

    A `Use` for each operation.
    """
    program = problem.program
    array = program.arguments[number]
    followed = dict.fromkeys([array])
    found = []
    for at, operation in enumerate(program.operations):
        for place, operand in enumerate(operation.operands):
            if operand not in followed:
                continue
            if operation.role in ("enter", "join"):  # the loop takes it on
                followed[operation.results[0]] = None
            if (at, place) not in problem.operand_homes or operation.role == "return":
                continue
            layout = problem.layout(problem.operand_homes[at, place], choice)
            paid, kinds, sent = _moved(problem, choice, at, place)
            if operation.role != "compute" and not kinds:
                continue
            line = "" if operation.equation is None else short_line(equation_line(operation.equation))
            ndim = len(program.arrays[operand].shape)
            found.append(Use(operation.name, line, spec_of(layout, ndim, problem.machine), kinds, int(sent), paid))
    return tuple(dict.fromkeys(found))


def _moved(problem: Problem, choice: Sequence[int], at: int, place: int) -> tuple[float, tuple[str, ...], float]:
    """What it costs to bring an operand to an operation."""
    number = problem.edge_indices.get((at, place))
    if number is None:
        return 0.0, (), 0.0
    edge = problem.edges[number]
    row, column = edge.from_codes[choice[edge.start]], edge.to_codes[choice[edge.end]]
    sent = edge.moves.sent[:, row, column] * edge.nbytes * edge.move_count
    kinds = tuple(kind for kind, amount in zip(COLLECTIVE_KINDS, sent, strict=True) if amount)
    return float(edge.seconds[row, column]) * edge.move_count, kinds, float(sent.sum())


def split_dims(problem: Problem, choice: Sequence[int], paths: Sequence[str]) -> tuple[SplitDim, ...]:
    """Finds dims that go together, and what splits them.

    **Arguments:**

    - `problem`, `choice`: the plan.
    - `paths`: the names of the arguments.

    **Returns:**

    Those that any axis splits, the most computed with first.
    """
    family = _Families(problem.program)
    work = _work(problem, choice, family)
    names, stored = _stored(problem, choice, paths, family)
    rows = []
    for root in dict.fromkeys([*work, *stored]):
        on = max(work[root].items(), key=lambda item: item[1])[0] if root in work else ()
        beyond = tuple(name for name in problem.machine.axes if name in stored.get(root, ()) and name not in on)
        if on or beyond:
            size = problem.program.arrays[root[0]].shape[root[1]]
            weight = sum(work.get(root, {}).values())
            rows.append((weight, SplitDim(_label(names.get(root, [])), size, on, beyond)))
    rows.sort(key=lambda row: (not row[1].axes, -row[0], row[1].name))
    alike: dict[SplitDim, list[SplitDim]] = {}
    for _, row in rows:
        alike.setdefault(attrs.evolve(row, name=template(row.name)), []).append(row)
    return tuple(own[0] if len(own) == 1 else whole for whole, own in alike.items())


def _work(
    problem: Problem, choice: Sequence[int], family: "_Families"
) -> dict[tuple[int, int], dict[tuple[str, ...], float]]:
    """For dims the FLOPs that are done with them split over some axes."""
    program = problem.program
    found: dict[tuple[int, int], dict[tuple[str, ...], float]] = {}
    for at, operation in enumerate(program.operations):
        if not operation.flops:
            continue
        on: dict[tuple[int, int], tuple[str, ...]] = {}
        for place, operand in enumerate(operation.operands):
            if operand is None or (at, place) not in problem.operand_homes:
                continue
            layout = problem.layout(problem.operand_homes[at, place], choice)
            for dim, factor in enumerate(operation.factors.operands[place]):
                if factor is not None and program.arrays[operand].shape[dim] > 1:
                    on.setdefault(family.root((operand, dim)), _splitting(problem, layout, dim))
        for root, names in on.items():
            weights = found.setdefault(root, {})
            weights[names] = weights.get(names, 0.0) + operation.flops * operation.run_count
    return found


def _stored(
    problem: Problem, choice: Sequence[int], paths: Sequence[str], family: "_Families"
) -> tuple[dict[tuple[int, int], list[str]], dict[tuple[int, int], dict[str, None]]]:
    """For dims the arguments that have them, and the axes that split them there."""
    names: dict[tuple[int, int], list[str]] = {}
    stored: dict[tuple[int, int], dict[str, None]] = {}
    for path, array in zip(paths, problem.program.arguments, strict=True):
        home = problem.homes.get(array)
        if home is None:
            continue
        layout = problem.layout(home, choice)
        for dim, size in enumerate(problem.program.arrays[array].shape):
            if size > 1:
                root = family.root((array, dim))
                names.setdefault(root, []).append(f"{path}[{dim}]")
                on = _splitting(problem, layout, dim)
                if on:
                    stored.setdefault(root, {}).update(dict.fromkeys(on))
    return names, stored


def _splitting(problem: Problem, layout: Sequence[int], dim: int) -> tuple[str, ...]:
    """The axes that split a dim."""
    return tuple(name for name, own in zip(problem.machine.axes, layout, strict=True) if own == dim)


def _label(names: list[str]) -> str:
    """A few of the arguments' dims."""
    short = list(dict.fromkeys(names))
    if not short:
        return "inside"
    return ", ".join(short[:_SHOWN]) + (" ..." if len(short) > _SHOWN else "")


@final
class _Families:
    """Which dims of arrays go together."""

    def __init__(self, program: TracedProgram) -> None:
        self.above: dict[tuple[int, int], tuple[int, int]] = {}
        for operation in program.operations:
            groups: dict[int, list[tuple[int, int]]] = {}
            sides = [*zip(operation.operands, operation.factors.operands, strict=True)]
            sides += [*zip(operation.results, operation.factors.results, strict=True)]
            for array, dims in sides:
                for dim, factor in enumerate(() if array is None else dims):
                    if factor is not None and program.arrays[array or 0].shape[dim] > 1:
                        groups.setdefault(factor, []).append((array or 0, dim))
            for first, *others in groups.values():
                for other in others:
                    self.join(first, other)

    def root(self, one: tuple[int, int]) -> tuple[int, int]:
        """The dim that stands for all that go with one."""
        path = []
        while self.above.get(one, one) != one:
            path.append(one)
            one = self.above[one]
        for step in path:
            self.above[step] = one
        return one

    def join(self, first: tuple[int, int], second: tuple[int, int]) -> None:
        """Two dims go together."""
        one, other = sorted((self.root(first), self.root(second)))
        self.above[other] = one
