"""Finds the best choice within a budget of memory, and what it takes at least."""

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.planning.graph.build import build_problem
from shardrules.planning.graph.machine import Machine
from shardrules.planning.graph.problem import Problem
from shardrules.planning.graph.restrict import layouts_where, restrict, variable_count
from shardrules.planning.solve.formulation import Formulation
from shardrules.planning.solve.lower_bound import lower_bound
from shardrules.planning.solve.memory import Occupancy, peaks
from shardrules.planning.solve.price import within_budget
from shardrules.planning.solve.solver import CLOSE, SMALL, Solution, Status, least_memory, solve
from shardrules.planning.traced.program import TracedProgram

_ROUNDS = 12
_EXACT = 1e-6
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

    @functools.cached_property
    def formulation(self) -> Formulation:
        """The problem as a linear program."""
        return Formulation(self.problem, _preference(self.problem))

    @classmethod
    def of(
        cls,
        program: TracedProgram,
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
        problem = build_problem(program, machine, paths, back, pinned, tie)
        return cls(problem, Occupancy.of(problem), problem.ignored_specs)

    def only(self, keep: Sequence[np.ndarray]) -> "Task":
        """Returns the task with fewer labels to choose from.

        **Arguments:**

        - `keep`: for each node the numbers of the labels that stay.

        **Returns:**

        A `Task`.
        """
        problem = restrict(self.problem, keep)
        return attrs.evolve(self, problem=problem, occupancy=attrs.evolve(self.occupancy, problem=problem))

    def within(self, limit: float, deadline: float = float("inf")) -> "Found":
        """Finds the best choice that fits.

        **Arguments:**

        - `limit`: the most that may lie in memory, in bytes.
        - `deadline`: when to stop, as `time.monotonic` has it.

        **Returns:**

        What was found.
        """
        if variable_count(self.problem) > _AT_ONCE and len(self.problem.machine.sizes) > 1:
            return self._by_parts(limit, deadline)
        return self._at_once(limit, deadline, {})

    def _at_once(self, limit: float, deadline: float, moments: dict[int, None]) -> "Found":
        """Solves it for all axes together. `moments` are operations at which memory is watched."""
        begun = time.monotonic()
        if not self.problem.nodes:
            held = float(self.occupancy.timeline(()).max())
            solution = Solution((), 0.0, 0.0, "optimal", ()) if held <= limit else None
            return Found(solution, held, 0.0)
        found = self._priced(limit, deadline, moments)
        if found.solution is None and self.formulation.count <= SMALL:
            found = self._emptiest(found, limit, deadline, moments)
        return attrs.evolve(found, seconds=time.monotonic() - begun)

    def _priced(self, limit: float, deadline: float, moments: dict[int, None]) -> "Found":
        """Puts a price on memory, and solves exactly what that leaves open."""
        known = within_budget(self.occupancy, self.formulation, limit, deadline, moments)
        if known.choice is None:
            nothing = Found(None, known.peak_bytes, known.bound, emptiest=known.emptiest)
            if known.is_hopeless:
                return nothing
            found = self._exactly(limit, deadline, moments)
            return attrs.evolve(nothing, is_late=found.is_late) if found.solution is None else found
        solution = Solution(known.choice, known.cost, known.bound, "feasible", (known.price,))
        best = _proven(Found(solution, known.peak_bytes, known.bound), known.bound)
        if known.cost <= known.bound * (1 + CLOSE) or time.monotonic() > deadline:
            return best
        left = self._worthwhile(best, known.bound, known.extra)
        found = self.only(left)._exactly(limit, deadline, moments)
        if found.solution is not None:
            best = _better(best, found.among(left))
        return _proven(best, max(known.bound, min(known.cost, found.bound)))

    def _worthwhile(self, best: "Found", bound: float, extra: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The labels of each node with which something may be better than the best so far."""
        cost = _cost(best) * (1 + _SAME) + _SAME
        keep = [np.flatnonzero(bound + more <= cost) for more in extra]
        return [np.union1d(kept, [own]) for kept, own in zip(keep, best.choice, strict=True)]

    def _exactly(self, limit: float, deadline: float, moments: dict[int, None]) -> "Found":
        """Solves it with bounds on what lies in memory."""
        limits = dict.fromkeys(moments, limit)
        bound = 0.0
        wary: dict[int, None] = {}
        for _ in range(_ROUNDS):
            rows = [self.occupancy.row(at, allowed, sure=at not in wary) for at, allowed in limits.items()]
            solution = solve(self.formulation, rows, deadline)
            if not wary:  # only then do rows watch for no more than there is
                bound = max(bound, solution.bound)
            if solution.choice is None:
                return Found(None, np.inf, bound, is_late=solution.status != "infeasible")
            timeline = self.occupancy.timeline(solution.choice)
            peak = float(timeline.max())
            if peak <= limit * (1 + _EXACT):
                return Found(solution, peak, bound)
            for at in peaks(timeline, limit):
                if at in wary:
                    limits[at] -= float(timeline[at]) - limit
                elif at in limits:
                    wary[at] = None
                limits.setdefault(at, limit)
                moments[at] = None
            if time.monotonic() > deadline:
                break
        return Found(None, np.inf, bound, is_late=time.monotonic() > deadline)

    def _emptiest(self, found: "Found", limit: float, deadline: float, moments: Mapping[int, None]) -> "Found":
        """Finds what takes the least memory, where nothing was found that fits."""
        best = found.emptiest
        timeline = self.occupancy.timeline(best)
        least = float(timeline.max())
        watched = dict.fromkeys([*moments, int(timeline.argmax())])
        wary: dict[int, None] = {}
        bound = 0.0
        for _ in range(_ROUNDS):
            rows = [self.occupancy.row(at, 0.0, sure=at not in wary) for at in watched]
            choice, needed = least_memory(self.formulation, rows, deadline)
            if choice is None:
                break
            if not wary:
                bound = needed
            timeline = self.occupancy.timeline(choice)
            if timeline.max() < least:
                best, least = choice, float(timeline.max())
            at = int(timeline.argmax())
            if least <= bound * (1 + CLOSE) or at in wary or time.monotonic() > deadline:
                break
            if at in watched:
                wary[at] = None
            watched[at] = None
        cost = self.problem.cost(best)
        if least > limit or not np.isfinite(cost):
            return attrs.evolve(found, peak_bytes=least, emptiest=best)
        return Found(Solution(best, cost, found.bound, "feasible", ()), least, found.bound)

    def _by_parts(self, limit: float, deadline: float) -> "Found":
        """Solves it for two axes of three at a time, or one of two, as the others are, until that changes nothing."""
        begun = time.monotonic()
        axes = range(len(self.problem.machine.sizes))
        moments: dict[int, None] = {}
        best: Found | None = None
        for pair in itertools.combinations(axes, 2):
            together = layouts_where(
                self.problem, lambda labels, _, pair=pair: labels[:, pair[0]] == labels[:, pair[1]]
            )
            best = _better(best, self._part(together, limit, deadline, moments))
        assert best is not None, "there are two axes and more"
        tried: dict[tuple[int, ...], tuple[int, ...]] = {}
        while time.monotonic() < deadline:
            before = best
            for pair in itertools.combinations(axes, min(2, len(axes) - 1)):
                choice = best.choice
                if tried.get(pair) == choice or time.monotonic() > deadline:
                    continue
                rest = [axis for axis in axes if axis not in pair]
                best = _better(best, self._part(_as_chosen(self.problem, choice, rest), limit, deadline, moments))
                tried[pair] = best.choice
            if best is before:
                break
        if best.solution is None:  # only all labels together can tell that nothing fits
            everything = self._at_once(limit, deadline, moments)
            best = attrs.evolve(_better(best, everything), is_late=everything.is_late)
        else:
            best = self._reduced(best, limit, deadline, moments)
        return attrs.evolve(best, seconds=time.monotonic() - begun)

    def _reduced(self, best: "Found", limit: float, deadline: float, moments: dict[int, None]) -> "Found":
        """Leaves out every label with which nothing is as good as the best so far, and solves what is left exactly."""
        bound = lower_bound(self.problem, deadline)
        assert np.isfinite(bound.seconds), "costs are moved, and none of them is infinite"
        keep = self._worthwhile(best, 0.0, bound.labels)
        if variable_count(restrict(self.problem, keep)) > _PROVABLE or time.monotonic() > deadline:
            return _proven(best, bound.seconds)
        found = self._part(keep, limit, deadline, moments)
        least = bound.seconds if found.solution is None else max(bound.seconds, min(_cost(best), found.bound))
        return _proven(_better(best, found), least)

    def _part(self, keep: Sequence[np.ndarray], limit: float, deadline: float, moments: dict[int, None]) -> "Found":
        """Solves it for some of the labels."""
        return self.only(keep)._at_once(limit, deadline, moments).among(keep)


def _cost(found: "Found") -> float:
    """What it costs; infinitely much where nothing fits."""
    return np.inf if found.solution is None else found.solution.cost


def _proven(found: "Found", bound: float) -> "Found":
    """What was found, where it is known what every choice costs at least."""
    if found.solution is None:
        return found
    cost, bound = found.solution.cost, max(0.0, bound)
    status: Status = "optimal" if cost <= bound * (1 + CLOSE) else "feasible"
    solution = attrs.evolve(found.solution, bound=min(bound, cost), status=status)
    return attrs.evolve(found, solution=solution, bound=min(bound, cost))


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
    return layouts_where(
        problem, lambda labels, at: (labels[:, axes] == nodes[at].layouts[choice[at]][axes]).all(axis=1)
    )


@final
@attrs.frozen(eq=False)
class Found:
    """What a search found.

    **Arguments:**

    - `solution`: the best choice; `None` where nothing fits.
    - `peak_bytes`: the most that lies in memory; where nothing fits, about the least that would.
    - `bound`: what every choice that fits costs at least.
    - `seconds`: how long the search took.
    - `is_late`: whether the time was up before anything was found that fits.
    - `emptiest`: where nothing fits, the choice that takes `peak_bytes`.
    """

    solution: Solution | None
    peak_bytes: float
    bound: float
    seconds: float = 0.0
    is_late: bool = False
    emptiest: tuple[int, ...] = ()

    @property
    def price(self) -> float:
        """What one more byte of memory would save, in seconds."""
        return 0.0 if self.solution is None else sum(self.solution.prices, start=0.0)

    @property
    def choice(self) -> tuple[int, ...]:
        """For each node the number of its label; where nothing fits, those with which memory is emptiest."""
        return self.emptiest if self.solution is None else self.solution.choice or ()

    def among(self, keep: Sequence[np.ndarray]) -> "Found":
        """Returns what was found for some of the labels, in the numbers that all of them have.

        **Arguments:**

        - `keep`: for each node the numbers of these labels.

        **Returns:**

        A `Found`.
        """
        choice = tuple(int(kept[label]) for kept, label in zip(keep, self.choice, strict=True))
        if self.solution is None:
            return attrs.evolve(self, emptiest=choice)
        return attrs.evolve(self, solution=attrs.evolve(self.solution, choice=choice))


def _preference(problem: Problem) -> list[np.ndarray]:
    """Between choices that cost the same, that which splits least, and in the order of the mesh."""
    return [1e-6 * np.arange(len(node.layouts)) for node in problem.nodes]
