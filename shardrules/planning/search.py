"""Finds the best choice within a budget of memory, and what it takes at least."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.planning.build import Builder
from shardrules.planning.formulation import Formulation
from shardrules.planning.lower_bound import lower_bound
from shardrules.planning.machine import Machine
from shardrules.planning.memory import Occupancy
from shardrules.planning.problem import Problem
from shardrules.planning.program import Program
from shardrules.planning.restrict import having, restricted, size
from shardrules.planning.solver import Solution, least_memory, solve

_ROUNDS = 12
_CLOSE = 1e-3
_SAME = 1e-9
_AT_ONCE = 100_000
_PROVABLE = 300_000


@final
@attrs.frozen(eq=False)
class Task:
    """A program to plan on a machine, made ready to be solved.

    **Arguments:**

    - `problem`: what is to be chosen.
    - `occupancy`: who lies in memory when.
    - `ignored`: specs of constraints in the function that are no layouts of the mesh.
    """

    problem: Problem
    occupancy: Occupancy
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        program: Program,
        machine: Machine,
        paths: Sequence[str],
        feedback: Mapping[int, int],
        pinned: Mapping[int, Any],
        tie: bool = True,
    ) -> "Task":
        """Makes a program ready.

        **Arguments:**

        - `program`: the program.
        - `machine`: the mesh.
        - `paths`: the names of its arguments.
        - `feedback`: for numbers of results the arguments that they are to be.
        - `pinned`: for numbers of arguments the specs that they have to have.
        - `tie`: whether operations alike are to be laid out alike.

        **Returns:**

        A `Task`.
        """
        back = {
            result: program.arguments[feedback[number]]
            for number, result in enumerate(program.results)
            if result is not None and number in feedback
        }
        builder = Builder(program, machine, back, pinned)
        problem = builder.build(tie, paths)
        return cls(problem, Occupancy.of(problem, builder), tuple(builder.ignored))

    def only(self, keep: Sequence[np.ndarray]) -> "Task":
        """Returns the task with fewer labels to choose from.

        **Arguments:**

        - `keep`: for each node the numbers of the labels that stay.

        **Returns:**

        A `Task`.
        """
        problem = restricted(self.problem, keep)
        return attrs.evolve(self, problem=problem, occupancy=attrs.evolve(self.occupancy, problem=problem))

    def within(self, limit: float, deadline: float = float("inf")) -> "Found":
        """Finds the best choice that fits.

        **Arguments:**

        - `limit`: the most that may lie in memory, in bytes.
        - `deadline`: when to stop, as `time.monotonic` has it.

        **Returns:**

        What was found.
        """
        if size(self.problem) > _AT_ONCE and len(self.problem.machine.sizes) > 1:
            return self._by_parts(limit, deadline)
        return self._at_once(limit, deadline, {})

    def _at_once(self, limit: float, deadline: float, moments: dict[int, None]) -> "Found":
        """Solves it exactly. `moments` are operations at which memory is watched."""
        begun = time.monotonic()
        limits = dict.fromkeys(moments, limit)
        formulation = Formulation(self.problem, _preference(self.problem))
        bound = 0.0
        wary: dict[int, None] = {}
        late = False
        for _ in range(_ROUNDS):
            rows = [self.occupancy.row(at, allowed, sure=at not in wary) for at, allowed in limits.items()]
            solution = solve(formulation, rows, deadline)
            if not wary:  # only then do rows watch for no more than there is
                bound = max(bound, solution.bound)
            if solution.choice is None:
                late = late or solution.status != "infeasible"
                break
            timeline = self.occupancy.timeline(solution.choice)
            peak = float(timeline.max())
            if peak <= limit * (1 + _CLOSE):
                return Found(solution, peak, bound, time.monotonic() - begun, sum(solution.prices))
            for at in _peaks(timeline, limit):
                if at in wary:
                    limits[at] -= float(timeline[at]) - limit
                elif at in limits:
                    wary[at] = None
                limits.setdefault(at, limit)
                moments[at] = None
            if time.monotonic() > deadline:
                late = True
                break
        if late:
            return self._whole(limit, bound, begun)
        return Found(None, self._least(formulation, moments, deadline), np.inf, time.monotonic() - begun, 0.0)

    def _whole(self, limit: float, bound: float, begun: float) -> "Found":
        """What is known without any search: everything whole, if that fits."""
        choice = (0,) * len(self.problem.nodes)
        peak, cost = float(self.occupancy.timeline(choice).max()), self.problem.cost(choice)
        fits = peak <= limit and np.isfinite(cost)
        solution = Solution(choice, cost, bound, "feasible", (), 0.0) if fits else None
        return Found(solution, peak, bound, time.monotonic() - begun, 0.0, is_late=not fits)

    def _least(self, formulation: Formulation, moments: Mapping[int, None], deadline: float) -> float:
        """About the least memory that any choice takes, in bytes."""
        watched = dict.fromkeys(moments)
        needed = np.inf
        for _ in range(_ROUNDS):
            if time.monotonic() > deadline and np.isfinite(needed):
                break
            choice = least_memory(formulation, [self.occupancy.row(at, 0.0, sure=True) for at in watched])
            if not choice:
                break
            timeline = self.occupancy.timeline(choice)
            needed = min(needed, float(timeline.max()))
            if int(timeline.argmax()) in watched:
                break
            watched[int(timeline.argmax())] = None
        return needed

    def _by_parts(self, limit: float, deadline: float) -> "Found":
        """Solves it for two axes of three at a time, or one of two, as the others are, until that changes nothing."""
        begun = time.monotonic()
        axes = range(len(self.problem.machine.sizes))
        moments: dict[int, None] = {}
        best: Found | None = None
        for pair in itertools.combinations(axes, 2):
            together = having(self.problem, lambda labels, _, pair=pair: labels[:, pair[0]] == labels[:, pair[1]])
            best = _better(best, self._part(together, limit, deadline, moments))
        assert best is not None, "there are two axes and more"
        if best.solution is None:  # what divides by each axis need not divide by two of them
            return self._at_once(limit, deadline, moments)
        tried: dict[tuple[int, ...], tuple[int, ...]] = {}
        while time.monotonic() < deadline:
            before = best
            for pair in itertools.combinations(axes, min(2, len(axes) - 1)):
                choice = _choice(best)
                if tried.get(pair) == choice or time.monotonic() > deadline:
                    continue
                rest = [axis for axis in axes if axis not in pair]
                best = _better(best, self._part(_as_chosen(self.problem, choice, rest), limit, deadline, moments))
                tried[pair] = _choice(best)
            if best is before:
                break
        return attrs.evolve(self._proven(best, limit, deadline, moments), seconds=time.monotonic() - begun)

    def _proven(self, best: "Found", limit: float, deadline: float, moments: dict[int, None]) -> "Found":
        """Leaves out every label with which nothing is as good as the best so far, and solves what is left exactly."""
        bound = lower_bound(self.problem, deadline)
        assert best.solution is not None, "there is something to prove"
        cost, least = best.solution.cost, bound.seconds
        assert np.isfinite(least), "costs are moved, and none of them is infinite"
        keep = [np.flatnonzero(labels <= cost * (1 + _SAME) + _SAME) for labels in bound.labels]
        keep = [np.union1d(kept, [own]) for kept, own in zip(keep, _choice(best), strict=True)]
        if size(restricted(self.problem, keep)) <= _PROVABLE and time.monotonic() < deadline:
            found = self._part(keep, limit, deadline, moments)
            best = _better(best, found)
            if found.solution is not None:
                least = max(least, min(cost, found.bound))
        assert best.solution is not None, "it had one before"
        status = "optimal" if best.solution.cost <= least * (1 + _CLOSE) else "feasible"
        return attrs.evolve(best, solution=attrs.evolve(best.solution, bound=least, status=status), bound=least)

    def _part(self, keep: Sequence[np.ndarray], limit: float, deadline: float, moments: dict[int, None]) -> "Found":
        """Solves it for some of the labels."""
        found = self.only(keep)._at_once(limit, deadline, moments)
        if found.solution is None:
            return found
        choice = tuple(int(kept[label]) for kept, label in zip(keep, _choice(found), strict=True))
        return attrs.evolve(found, solution=attrs.evolve(found.solution, choice=choice))


def _choice(found: "Found") -> tuple[int, ...]:
    """For each node the number of its label; nothing where nothing fits."""
    return () if found.solution is None else found.solution.choice or ()


def _better(first: "Found | None", second: "Found") -> "Found":
    """That of two which costs less, or needs less where nothing fits; the first if both are alike."""
    if first is None:
        return second
    if first.solution is None or second.solution is None:
        if first.solution is second.solution:
            return second if second.peak_bytes < first.peak_bytes else first
        return second if first.solution is None else first
    return second if second.solution.cost < first.solution.cost * (1 - 1e-6) else first


def _as_chosen(problem: Problem, choice: Sequence[int], axes: Sequence[int]) -> list[np.ndarray]:
    """The labels of each node that are as chosen along some axes."""
    nodes = problem.nodes
    return having(problem, lambda labels, at: (labels[:, axes] == nodes[at].labels[choice[at]][axes]).all(axis=1))


@final
@attrs.frozen(eq=False)
class Found:
    """What a search found.

    **Arguments:**

    - `solution`: the best choice; `None` where nothing fits.
    - `peak_bytes`: the most that lies in memory; where nothing fits, about the least that would.
    - `bound`: what every choice that fits costs at least.
    - `seconds`: how long the search took.
    - `price`: what one more byte of memory would save, in seconds.
    - `is_late`: whether the time was up before anything was found that fits.
    """

    solution: Solution | None
    peak_bytes: float
    bound: float
    seconds: float
    price: float
    is_late: bool = False


def _preference(problem: Problem) -> list[np.ndarray]:
    """Between choices that cost the same, that which splits least, and in the order of the mesh."""
    return [1e-6 * np.arange(len(node.labels)) for node in problem.nodes]


def _peaks(timeline: np.ndarray, limit: float) -> list[int]:
    """The operations at which memory is fullest: the first of them, and others that are higher than all around."""
    found = [int(timeline.argmax())]
    size = max(1, len(timeline) // 24)
    for start in range(0, len(timeline), size):
        part = timeline[start : start + size]
        at = start + int(part.argmax())
        around = timeline[max(0, at - size) : at + size]
        if timeline[at] > limit and timeline[at] == around.max() and at not in found:
            found.append(at)
    return found
