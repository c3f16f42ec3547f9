"""What lies in the memory of a device at every operation of a program, for any choice of layouts.

Arrays that are computed along with what takes them are never written, so they take no room; what they are computed from
has to stay until then. Arrays that come into a loop stay until its end. Arguments stay throughout; results that are fed
back as arguments are written over these.
"""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np

from shardrules.planning.build import Builder
from shardrules.planning.formulation import Row
from shardrules.planning.layouts import PARTIAL, WHOLE, pieces
from shardrules.planning.problem import Home, Problem, project

_IN_PLACE = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "dynamic_update_slice")
"""What writes its result over its first operand, if nobody else needs that."""


@final
@attrs.frozen(eq=False)
class Stay:
    """An array that lies in memory for a while.

    **Arguments:**

    - `home`: what decides its layout.
    - `nbytes`: the bytes of all of it.
    - `first`, `last`: the first and the last operation at which it is there.
    """

    home: Home
    nbytes: int
    first: int
    last: int


@final
@attrs.frozen(eq=False)
class Copy:
    """An array that is brought to another layout for an operation.

    **Arguments:**

    - `array`: its number, with that of the region: copies of the same to the same layout are one.
    - `edge`: the way that it goes.
    - `at`: the operation.
    - `last`: the last operation at which the copy is there.
    - `until`: the last one at which it may be there, if others take the same copy.
    """

    array: tuple[int, int]
    edge: int
    at: int
    last: int
    until: int


@final
@attrs.frozen(eq=False)
class Occupancy:
    """Who lies in memory when.

    **Arguments:**

    - `problem`: what is to be chosen.
    - `stays`, `copies`: see above.
    - `fixed`: bytes that are there in any case.
    """

    problem: Problem
    stays: tuple[Stay, ...]
    copies: tuple[Copy, ...]
    fixed: int

    @classmethod
    def of(cls, problem: Problem, builder: Builder) -> "Occupancy":
        """Finds out who lies in memory when.

        **Arguments:**

        - `problem`: what is to be chosen.
        - `builder`: what made it.

        **Returns:**

        An `Occupancy`.
        """
        program = problem.program
        end = len(program.operations)
        ends = _ends(problem)
        made: dict[int, int] = {}
        for at, operation in enumerate(program.operations):
            for result in operation.results:
                made.setdefault(result, at)
        last: dict[int, int] = {}
        for at in range(end - 1, -1, -1):
            operation = program.operations[at]
            until = at
            for result in operation.results:
                if not builder.is_written(at, result):  # computed only where it is taken
                    until = max(until, last.get(result, at))
            for place, operand in enumerate(operation.operands):
                if operand is not None:
                    if place == 0 and operation.name in _IN_PLACE and until == at:
                        last[operand] = max(last.get(operand, 0), at - 1)
                        continue
                    born = program.operations[made[operand]].region if operand in made else 0
                    until_then = max(until, _leaves(program.regions, ends, operation.region, born))
                    last[operand] = max(last.get(operand, 0), until_then)
        stays: list[Stay] = []
        fixed = 0
        given = dict.fromkeys(builder.feedback)
        for number in program.arguments:
            home = problem.homes.get(number)
            if home is None:
                fixed += program.arrays[number].nbytes
            else:
                stays.append(Stay(home, program.arrays[number].nbytes, 0, end))
        fixed += sum(program.arrays[number].nbytes for number in program.constants)
        for at, operation in enumerate(program.operations):
            for place, result in enumerate(operation.results):
                home = problem.homes.get(result)
                if home is None or result in given:
                    continue
                nbytes = program.arrays[result].nbytes
                own = problem.settled.get((at, place))
                if own is not None:
                    stays.append(Stay(own, nbytes, at, at))
                begun = at if own is None else at + 1
                if operation.role == "return":
                    stays.append(Stay(home, nbytes, at + 1, end))  # till then what is returned is there
                elif operation.role in ("leave", "join") or builder.is_written(at, result):
                    first = _starts(problem, at) if operation.role == "leave" else begun
                    stays.append(Stay(home, nbytes, first, max(first, last.get(result, at))))
        copies = []
        for at, operation in enumerate(program.operations):
            for place in range(len(operation.operands)):
                if (at, place) not in problem.reads or not (builder.is_read(at) or operation.role == "enter"):
                    continue
                around = problem.around(at, place)
                until = end if operation.role == "return" else at
                if around != operation.region:
                    until = max(until, ends[operation.region])
                copies.append(
                    Copy((operation.operands[place] or 0, around), problem.reads[at, place], at, until, until)
                )
        kept: dict[tuple[int, int], int] = {}
        for copy in copies:
            kept[copy.array] = max(kept.get(copy.array, 0), copy.last)
        copies = [attrs.evolve(copy, until=kept[copy.array]) for copy in copies]
        return cls(problem, tuple(stays), tuple(copies), fixed)

    def room(self, stay: Stay) -> float:
        """How much more room an array takes than its bytes: what is temporary overlaps with what comes next.

        **Arguments:**

        - `stay`: the array.

        **Returns:**

        A factor.
        """
        lasting = stay.first == 0 and stay.last == len(self.problem.program.operations)
        return 1.0 if lasting else self.problem.machine.assumptions.temporaries

    def timeline(self, choice: Sequence[int]) -> np.ndarray:
        """Returns what lies in memory under a choice.

        **Arguments:**

        - `choice`: for each node the number of its label.

        **Returns:**

        Bytes, for each operation and the end.
        """
        problem = self.problem
        steps = np.zeros(len(problem.program.operations) + 2)
        for stay in self.stays:
            layout = problem.layout(stay.home, choice)
            amount = stay.nbytes * self.room(stay) / _pieces(layout, problem)
            steps[stay.first] += amount
            steps[stay.last + 1] -= amount
        for (first, last), amount in self._copied(choice):
            steps[first] += amount * problem.machine.assumptions.temporaries
            steps[last + 1] -= amount * problem.machine.assumptions.temporaries
        return np.cumsum(steps)[:-1] + self.fixed

    def _copied(self, choice: Sequence[int]) -> list[tuple[tuple[int, int], float]]:
        """Copies under a choice: from the first operation that takes one to the last, and its bytes."""
        problem = self.problem
        found: dict[tuple[tuple[int, int], bytes], tuple[int, int, float]] = {}
        for copy in self.copies:
            edge = problem.edges[copy.edge]
            row, column = edge.from_codes[choice[edge.start]], edge.to_codes[choice[edge.end]]
            target = edge.to_layouts[column]
            if (edge.from_layouts[row] == target).all():
                continue
            key = (copy.array, target.tobytes())
            first, last, _ = found.get(key, (copy.at, copy.last, 0.0))
            amount = edge.nbytes / float(pieces(target[None], problem.machine)[0])
            found[key] = (min(first, copy.at), max(last, copy.last), amount)
        return [((first, last), amount) for first, last, amount in found.values()]

    def row(self, at: int, limit: float, sure: bool = False) -> Row:
        """Returns a bound on what lies in memory at an operation.

        **Arguments:**

        - `at`: the operation.
        - `limit`: the most there may be.
        - `sure`: whether only what is there in any case counts, of copies of an array one; otherwise copies count that
            may be kept for others, too.

        **Returns:**

        A `Row`.
        """
        problem = self.problem
        seen: dict[tuple[int, int], None] = {}
        labels: dict[int, np.ndarray] = {}
        for stay in self.stays:
            if stay.first <= at <= stay.last:
                node = stay.home.node
                rows = project(problem.nodes[node].labels, stay.home)
                sizes = stay.nbytes * self.room(stay) / pieces(np.where(rows == PARTIAL, WHOLE, rows), problem.machine)
                labels[node] = labels.get(node, np.zeros(len(sizes))) + sizes
        copies: dict[int, np.ndarray] = {}
        for copy in self.copies:
            if copy.at <= at <= (copy.last if sure else copy.until) and not (copy.edge in copies and copy.at != at):
                if sure and copy.array in seen:
                    continue
                seen[copy.array] = None
                edge = problem.edges[copy.edge]
                sizes = edge.nbytes / pieces(edge.to_layouts, problem.machine)
                sizes = sizes * problem.machine.assumptions.temporaries
                copies[copy.edge] = copies.get(copy.edge, 0.0) + sizes
        return Row(labels, copies, self.fixed, limit)


def _pieces(layout: Sequence[int], problem: Problem) -> float:
    return float(pieces(np.array([layout], np.int8), problem.machine)[0])


def _ends(problem: Problem) -> dict[int, int]:
    """The last operation of each region, those inside of it too."""
    found: dict[int, int] = {}
    for at, operation in enumerate(problem.program.operations):
        region = operation.region
        while region >= 0:
            found[region] = at
            region = problem.program.regions[region][0]
    return found


def _leaves(regions: Sequence[tuple[int, int]], ends: dict[int, int], region: int, born: int) -> int:
    """When the outermost loop ends that an operation is in and an array is not."""
    found = 0
    while region >= 0 and region != born:
        around, times = regions[region]
        if around >= 0 and times != regions[around][1]:
            found = max(found, ends[region])
        region = around
    return found


def _starts(problem: Problem, at: int) -> int:
    """The first operation of the loop that an operation is in."""
    region = problem.program.operations[at].region
    return next(i for i, one in enumerate(problem.program.operations) if _inside(problem, one.region, region))


def _inside(problem: Problem, region: int, loop: int) -> bool:
    while region >= 0:
        if region == loop:
            return True
        region = problem.program.regions[region][0]
    return False
