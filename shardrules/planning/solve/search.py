"""Finds the best choice within a budget of memory, and what it costs at least.

A search goes from cheap to exact. A price on memory (`price.py`) gives a good choice, a lower bound, and for each
layout how far above that bound it is; layouts that cannot be part of anything better are dropped, and what is left is
solved with exact bounds on memory. Problems over several mesh axes that are too large for that are solved for two axes
at a time, with the others as they are.
"""

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
from shardrules.planning.solve.deadline import NO_DEADLINE, Deadline
from shardrules.planning.solve.formulation import Formulation
from shardrules.planning.solve.lower_bound import lower_bound
from shardrules.planning.solve.memory import Occupancy, peaks
from shardrules.planning.solve.price import within_budget
from shardrules.planning.solve.solver import CLOSE, SMALL, Solution, Status, least_memory, solve
from shardrules.planning.traced.order import late_order, program_order
from shardrules.planning.traced.program import TracedProgram

_ROUNDS = 12
"""How often an exact search may be repeated with more operations watched: each round adds the peaks of the last choice.
A search that needs more is given up for what pricing found; with half as many, more of them are."""

_LIMIT_TOLERANCE = 1e-6
"""By what part a choice may exceed the limit: HiGHS satisfies constraints to 1e-7, in units of the largest array.
Smaller, choices that fit would be searched for again; a thousand times as large, real bytes would be missing."""

_TIE = 1e-9
"""By what part, and by how many seconds, costs may differ and count as the same: what rounding leaves."""

_BETTER = 1e-6
"""By what part another choice has to be cheaper to replace the first: less is the noise of a solver, and plans would
differ between machines."""

_MAX_JOINT_SIZE = 100_000
"""Problems with more variables are solved for two axes at a time. A linear program of that size takes HiGHS seconds,
and the time grows faster than the size: raised, nothing is found in time; lowered, small problems lose their proof."""

_MAX_PROOF_SIZE = 300_000
"""With more variables left once layouts are dropped, the plan found by parts is not tried to be proved or improved:
that would take longer than finding it. Smaller, more plans are `feasible` rather than `optimal`."""

_PUT_OFF, _PUT_OFF_BUSY, _BUSY = 0.75, 0.3, 1 / 8
"""Of the memory that it would take to put off all matmuls that nothing waits for, the part that compilers take: less
where collectives between matmuls take more than `_BUSY` of the time of computing, since these use such matmuls up. XLA
for GPUs takes between nothing and all of it in the models of the benchmark; with less, some predictions are too low."""

_MOST_PUT_OFF = 2.0
"""How many times the intermediate results that have to be in memory compilers keep there by putting work off, at most:
the most that was seen is 2.1 times."""

_PREFERENCE = 1e-6
"""What a layout costs more than the one before it, in microseconds: nothing beside any real cost, and enough to decide
between choices that cost the same."""


@final
@attrs.frozen(eq=False)
class Task:
    """A program to plan on a machine, ready to be solved."""

    problem: Problem
    occupancy: Occupancy

    @functools.cached_property
    def formulation(self) -> Formulation:
        """The problem as a linear program."""
        return Formulation(self.problem, layout_preference(self.problem))

    @functools.cached_property
    def late_occupancy(self) -> Occupancy:
        """What is in memory where compilers put off what nothing waits for."""
        return Occupancy.of(self.problem, late_order(self.problem.program))

    def compiled_peak(self, choice: Sequence[int], limit_bytes: float) -> float:
        """Returns the most memory that a choice is compiled to use.

        A choice fits if it does in the order in which the program is written. Where the limit leaves room, compilers
        for GPUs put off the matmuls that nothing waits for, to have something to hide collectives behind.
        """
        least = float(self.occupancy.timeline(choice).max())
        if not self.problem.machine.puts_off or least >= limit_bytes:
            return least
        moves = self.problem.chosen_moves(choice)
        computing = self.problem.cost(choice) - sum(move.seconds * move.count for move in moves)
        between = sum(move.seconds * move.count for move in moves if move.is_between)
        part = _PUT_OFF_BUSY if between > _BUSY * computing else _PUT_OFF
        latest = max(least, float(self.late_occupancy.timeline(choice).max()))
        most = least + (_MOST_PUT_OFF - 1) * (least - self.occupancy.argument_bytes(choice))
        return min(least + part * (latest - least), most, limit_bytes)

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
        """Returns the task of a program whose arguments have these `paths`.

        `feedback` maps result indices to the indices of the arguments that they become, `pinned` argument indices to
        specs. With `tie`, operations alike are laid out alike.
        """
        feedback_arrays = {
            result: program.arguments[feedback[result_index]]
            for result_index, result in enumerate(program.results)
            if result is not None and result_index in feedback
        }
        problem = build_problem(program, machine, paths, feedback_arrays, pinned, tie)
        return cls(problem, Occupancy.of(problem, program_order(program)))

    def only(self, keep: Sequence[np.ndarray]) -> "Task":
        """Returns the task with fewer layouts: for each node the indices of those to keep."""
        problem = restrict(self.problem, keep)
        return attrs.evolve(self, problem=problem, occupancy=attrs.evolve(self.occupancy, problem=problem))

    def within(self, limit_bytes: float, deadline: Deadline = NO_DEADLINE) -> "SearchResult":
        """Finds the best choice that fits, or the one with the least memory where it finds none that fits."""
        if variable_count(self.problem) > _MAX_JOINT_SIZE and len(self.problem.machine.sizes) > 1:
            return self._answer(self._by_parts(limit_bytes, deadline))
        return self._answer(self._jointly(limit_bytes, deadline, {}))

    def _answer(self, result: "SearchResult") -> "SearchResult":
        """Returns the result of a search with a choice, whether it fits or not."""
        if result.solution is None:
            cost = self.problem.cost(result.emptiest)
            bound = min(result.bound, cost)
            solution = Solution(result.emptiest, cost, bound, "feasible", ()) if np.isfinite(cost) else None
            result = attrs.evolve(result, solution=solution, fits=False, bound=bound)
        option = Option(result.choice, _cost(result), result.peak_bytes)
        return attrs.evolve(result, candidates=(option,) if result.solution is not None else ())

    def _jointly(self, limit_bytes: float, deadline: Deadline, moments: dict[int, None]) -> "SearchResult":
        """Solves it for all axes together. `moments` are operations at which memory is watched."""
        start = time.monotonic()
        if not self.problem.nodes:
            peak = float(self.occupancy.timeline(()).max())
            solution = Solution((), 0.0, 0.0, "optimal", ()) if peak <= limit_bytes else None
            return SearchResult(solution, peak, 0.0)
        result = self._priced(limit_bytes, deadline, moments)
        # An error names the least memory that is needed, and an exact search that gave up may have missed what fits.
        # Large problems go without: minimising a maximum is much slower than minimising a sum.
        if result.solution is None and self.formulation.column_count <= SMALL:
            result = self._emptiest(result, limit_bytes, deadline, moments)
        return attrs.evolve(result, seconds=time.monotonic() - start)

    def _priced(self, limit_bytes: float, deadline: Deadline, moments: dict[int, None]) -> "SearchResult":
        """Puts a price on memory, and solves exactly what that leaves open."""
        budget = within_budget(self.occupancy, self.formulation, limit_bytes, deadline, moments)
        if budget.choice is None:
            nothing = SearchResult(None, budget.peak_bytes, budget.bound, emptiest=budget.emptiest)
            if budget.is_hopeless:
                return nothing
            # No price led to a choice that fits. Between the choices that prices reach there may be one that does.
            result = self._exactly(limit_bytes, deadline, moments)
            return attrs.evolve(nothing, is_late=result.is_late) if result.solution is None else result
        solution = Solution(budget.choice, budget.cost, budget.bound, "feasible", (budget.price,))
        best = _with_bound(SearchResult(solution, budget.peak_bytes, budget.bound), budget.bound)
        if budget.cost <= budget.bound * (1 + CLOSE) or deadline.is_over or not budget.extra:
            return best  # without `extra`, not even one linear program was solved
        # The relaxation has a gap that no prices close. The exact search closes it, over the few layouts that can still
        # be part of a better choice.
        keep = self._worthwhile(best, budget.bound, budget.extra)
        result = self.only(keep)._exactly(limit_bytes, deadline, moments)
        if result.solution is not None:
            best = _better(best, result.reindexed(keep))
        # What was dropped costs at least as much as the best so far, and what was kept at least `result.bound`.
        return _with_bound(best, max(budget.bound, min(budget.cost, result.bound)))

    def _worthwhile(self, best: "SearchResult", bound: float, extra: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the layouts of each node with which something may be better than the best so far."""
        cost = _cost(best) * (1 + _TIE) + _TIE
        keep = [np.flatnonzero(bound + layout_extra <= cost) for layout_extra in extra]
        # Whatever rounding does, the best choice itself stays.
        return [np.union1d(kept, [layout_index]) for kept, layout_index in zip(keep, best.choice, strict=True)]

    def _exactly(self, limit_bytes: float, deadline: Deadline, moments: dict[int, None]) -> "SearchResult":
        """Solves it with bounds on what is in memory at the moments, which grow until no other operation exceeds it.

        An operation is first watched with a constraint that rules out no choice that fits, so that the bound holds. One
        that exceeds the limit all the same is watched strictly from then on, and with a lower limit if even that fails.
        """
        limits = dict.fromkeys(moments, limit_bytes)
        bound = 0.0
        strict_moments: dict[int, None] = {}
        for _ in range(_ROUNDS):
            constraints = [
                self.occupancy.constraint(op_index, limit, certain=op_index not in strict_moments)
                for op_index, limit in limits.items()
            ]
            solution = solve(self.formulation, constraints, deadline)
            # Strict constraints rule out choices that fit: from then on, the program bounds nothing.
            if not strict_moments:
                bound = max(bound, solution.bound)
            if solution.choice is None:
                return SearchResult(None, np.inf, bound, is_late=solution.status != "infeasible")
            timeline = self.occupancy.timeline(solution.choice)
            peak = float(timeline.max())
            if peak <= limit_bytes * (1 + _LIMIT_TOLERANCE):
                return SearchResult(solution, peak, bound)
            for op_index in peaks(timeline, limit_bytes):
                # Strict constraints count everything: what exceeds the limit is the solver's tolerance. Ask for less.
                if op_index in strict_moments:
                    limits[op_index] -= float(timeline[op_index]) - limit_bytes
                elif op_index in limits:
                    strict_moments[op_index] = None
                limits.setdefault(op_index, limit_bytes)
                moments[op_index] = None
            if deadline.is_over:
                break
        return SearchResult(None, np.inf, bound, is_late=deadline.is_over)

    def _emptiest(
        self, result: "SearchResult", limit_bytes: float, deadline: Deadline, moments: Mapping[int, None]
    ) -> "SearchResult":
        """Finds what takes the least memory, where nothing that fits was found."""
        best = result.emptiest
        timeline = self.occupancy.timeline(best)
        least_peak = float(timeline.max())
        # The smallest choice at the moments watched may be larger at others: those are watched in the next round.
        watched = dict.fromkeys([*moments, int(timeline.argmax())])
        strict_moments: dict[int, None] = {}
        bound = 0.0
        for _ in range(_ROUNDS):
            constraints = [
                self.occupancy.constraint(op_index, 0.0, certain=op_index not in strict_moments) for op_index in watched
            ]
            choice, needed_bytes = least_memory(self.formulation, constraints, deadline)
            if choice is None:
                break
            if not strict_moments:
                bound = needed_bytes
            timeline = self.occupancy.timeline(choice)
            if timeline.max() < least_peak:
                best, least_peak = choice, float(timeline.max())
            fullest = int(timeline.argmax())
            if least_peak <= bound * (1 + CLOSE) or fullest in strict_moments or deadline.is_over:
                break
            if fullest in watched:
                strict_moments[fullest] = None
            watched[fullest] = None
        cost = self.problem.cost(best)
        if least_peak > limit_bytes or not np.isfinite(cost):
            return attrs.evolve(result, peak_bytes=least_peak, emptiest=best)
        # It does fit: the exact search gave up, but this one came across a choice.
        return SearchResult(Solution(best, cost, result.bound, "feasible", ()), least_peak, result.bound)

    def _by_parts(self, limit_bytes: float, deadline: Deadline) -> "SearchResult":
        """Solves it for two axes of three at a time, or one of two, with the others as they are, until nothing changes.

        It begins with the best choice in which two axes split everything alike, as if they were one.
        """
        start = time.monotonic()
        axes = range(len(self.problem.machine.sizes))
        # Parts share the moments: what was full in one part is watched from the start in the next.
        moments: dict[int, None] = {}
        best: SearchResult | None = None
        for pair in itertools.combinations(axes, 2):
            if best is not None and deadline.is_over:
                break
            alike = layouts_where(self.problem, lambda rows, _, pair=pair: rows[:, pair[0]] == rows[:, pair[1]])
            best = _better(best, self._part(alike, limit_bytes, deadline, moments))
        assert best is not None, "there are two axes and more"
        # Coordinate descent over pairs of axes. A pair is tried again only if another has changed the choice since.
        tried: dict[tuple[int, ...], tuple[int, ...]] = {}
        while not deadline.is_over:
            before = best
            for pair in itertools.combinations(axes, min(2, len(axes) - 1)):
                choice = best.choice
                if tried.get(pair) == choice or deadline.is_over:
                    continue
                others = [axis for axis in axes if axis not in pair]
                keep = _layouts_as_chosen(self.problem, choice, others)
                best = _better(best, self._part(keep, limit_bytes, deadline, moments))
                tried[pair] = best.choice
            if best is before:
                break
        if best.solution is not None:
            best = self._improved(best, limit_bytes, deadline, moments)
        elif deadline.is_over:
            best = attrs.evolve(best, is_late=True)
        else:  # only all layouts together can prove that nothing fits
            joint = self._jointly(limit_bytes, deadline, moments)
            best = attrs.evolve(_better(best, joint), is_late=joint.is_late)
        return attrs.evolve(best, seconds=time.monotonic() - start)

    def _improved(
        self, best: "SearchResult", limit_bytes: float, deadline: Deadline, moments: dict[int, None]
    ) -> "SearchResult":
        """Drops every layout with which nothing is as good as the best so far, and solves what is left exactly."""
        # Parts prove nothing about the whole. Message passing does, on problems too large for a linear program.
        bound = lower_bound(self.problem, deadline)
        assert np.isfinite(bound.seconds), "costs are moved, and none of them is infinite"
        keep = self._worthwhile(best, 0.0, bound.layouts)
        if variable_count(restrict(self.problem, keep)) > _MAX_PROOF_SIZE or deadline.is_over:
            return _with_bound(best, bound.seconds)
        result = self._part(keep, limit_bytes, deadline, moments)
        least = bound.seconds if result.solution is None else max(bound.seconds, min(_cost(best), result.bound))
        return _with_bound(_better(best, result), least)

    def _part(
        self, keep: Sequence[np.ndarray], limit_bytes: float, deadline: Deadline, moments: dict[int, None]
    ) -> "SearchResult":
        """Solves it for some of the layouts."""
        return self.only(keep)._jointly(limit_bytes, deadline, moments).reindexed(keep)


@final
@attrs.frozen
class Option:
    """A choice that a search met."""

    choice: tuple[int, ...]
    """For each node the index of its layout."""
    cost: float
    """What the model says that a call takes, in seconds."""
    peak_bytes: float
    """The most memory that it takes by the model."""
    origin: str = "search"
    """The pattern that it is the best of, such as `"data parallel"`."""


@final
@attrs.frozen(eq=False)
class SearchResult:
    """What a search found."""

    solution: Solution | None
    """The cheapest choice that fits by the model; where none was found, the one with the least peak. `None` only where
    every choice that was met is impossible."""
    peak_bytes: float
    """The peak of `choice`."""
    bound: float
    """What every choice that fits costs at least."""
    seconds: float = 0.0
    is_late: bool = False
    """Whether the time was up before the search was done."""
    emptiest: tuple[int, ...] = ()
    """Where nothing fits, the choice with the least memory."""
    fits: bool = True
    """Whether the peak of `choice` is within the limit."""
    candidates: tuple[Option, ...] = ()
    """The distinct choices that are worth compiling, the cheapest first: on the front of time and memory."""

    @property
    def price(self) -> float:
        """What one more byte of memory would save, in seconds."""
        return 0.0 if self.solution is None else sum(self.solution.prices, start=0.0)

    @property
    def choice(self) -> tuple[int, ...]:
        """For each node the index of its layout; where nothing fits, those with the least memory."""
        return self.emptiest if self.solution is None else self.solution.choice or ()

    def reindexed(self, keep: Sequence[np.ndarray]) -> "SearchResult":
        """Returns the result of a search over the layouts `keep`, with the indices that the whole problem has."""
        choice = tuple(int(kept[layout_index]) for kept, layout_index in zip(keep, self.choice, strict=True))
        if self.solution is None:
            return attrs.evolve(self, emptiest=choice)
        return attrs.evolve(self, solution=attrs.evolve(self.solution, choice=choice))


def layout_preference(problem: Problem) -> list[np.ndarray]:
    """Returns what decides between choices that cost the same, in microseconds: the one that splits least, and in the
    order of the mesh."""
    return [_PREFERENCE * np.arange(len(node.layouts)) for node in problem.nodes]


def _cost(result: SearchResult) -> float:
    return np.inf if result.solution is None else result.solution.cost


def _with_bound(result: SearchResult, bound: float) -> SearchResult:
    """Returns the result once it is known what every choice costs at least."""
    if result.solution is None:
        return result
    cost, bound = result.solution.cost, max(0.0, bound)
    status: Status = "optimal" if cost <= bound * (1 + CLOSE) else "feasible"
    solution = attrs.evolve(result.solution, bound=min(bound, cost), status=status)
    return attrs.evolve(result, solution=solution, bound=min(bound, cost))


def _better(first: SearchResult | None, second: SearchResult) -> SearchResult:
    """Returns the cheaper of two, or the smaller where nothing fits; the first if both are alike."""
    if first is None:
        return second
    if first.solution is None or second.solution is None:
        if first.solution is second.solution:
            return second if second.peak_bytes < first.peak_bytes else first
        return second if first.solution is None else first
    return second if second.solution.cost < first.solution.cost * (1 - _BETTER) else first


def _layouts_as_chosen(problem: Problem, choice: Sequence[int], axes: Sequence[int]) -> list[np.ndarray]:
    """Returns the layouts of each node that are as chosen along some axes."""
    nodes = problem.nodes

    def is_as_chosen(rows: np.ndarray, node_index: int) -> np.ndarray:
        return (rows[:, axes] == nodes[node_index].layouts[choice[node_index]][axes]).all(axis=1)

    return layouts_where(problem, is_as_chosen)
