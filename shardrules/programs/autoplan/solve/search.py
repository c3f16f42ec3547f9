"""Finds the best choice within a budget of memory, and what it costs at least.

A search goes from cheap to exact. What experts would write is weighed first (`patterns.py`), so that there is a choice
from the beginning. Message passing, with a price on memory (`price.py`), gives better ones, a lower bound, and for
each layout how far above that bound it is. Layouts that cannot be part of anything better are dropped, and if little is
left, it is solved with exact bounds on memory. Where the gap stays large, or nothing fits, the answer is improved part
by part. Work is counted, so that the clock decides nothing unless time is up.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.programs.autoplan.graph.build import build_problem
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.autoplan.graph.restrict import restrict, variable_count
from shardrules.programs.autoplan.solve.formulation import MICRO, Formulation
from shardrules.programs.autoplan.solve.memory import Occupancy, peaks
from shardrules.programs.autoplan.solve.messages import Messages
from shardrules.programs.autoplan.solve.patterns import patterns
from shardrules.programs.autoplan.solve.peak import Peak
from shardrules.programs.autoplan.solve.price import APART, CLOSER, Budget, within_budget
from shardrules.programs.autoplan.solve.region_memory import with_temporary_bytes
from shardrules.programs.autoplan.solve.solver import CLOSE, Work, fractions, least_memory, solve
from shardrules.programs.autoplan.solve.trials import Trial, Trials
from shardrules.programs.traced.program import TracedProgram

_ROUNDS = 12
"""The rounds of an exact search with more operations watched: each round adds the peaks of the last choice. A search
that needs more is given up for the result of pricing."""

_TIE = 1e-9
"""The part, and the seconds, by which costs may differ and count as the same: rounding errors."""

_PATTERN_SWEEPS, _PATTERN_STEPS = 6, 3
"""The sweeps of messages in each pattern, and the steps in which nodes are fixed if that gives nothing possible: most
settle in that, since they leave few layouts."""

_SMALL = 12_000
"""With no more variables left, once layouts are dropped, choices are searched exactly, by linear programs. Each takes
tens of milliseconds then."""

_PART_SIZE, _PART_WORK = 5_000, 40_000
"""About the number of variables of a part of a program that is searched around an answer, and of its linear programs
together. Chosen by hand."""

_PART_COUNT, _MISSES = 40, 5
"""The parts that are searched, and the number in a row that may find nothing better. Chosen by hand."""

_MERGED_SIZE, _MERGED_WORK, _MERGES = 6_000, 40_000, 8
"""About the number of variables of choices that are merged, the number of variables of the linear programs that merge
them together, and the merges of merged choices. Chosen by hand."""

_ALL = np.inf
"""Layouts are not dropped."""

_PARTS = (0.5, 0.25, 0.1, 0.03, 0.01, 0.001, 1e-5)
"""Of the gap, how much more than the bound a layout may cost at least to be searched exactly: the largest part that
leaves few enough variables counts. With all of the gap, the search is a proof."""


@final
@attrs.define(eq=False)
class Task:
    """A program to plan on a machine, ready to be solved."""

    problem: Problem
    occupancy: Occupancy
    others: "_Others"
    """The contents of memory in the other orders, computed once for all tasks of a program."""

    @functools.cached_property
    def formulation(self) -> Formulation:
        return Formulation(self.problem, layout_preference(self.problem))

    def peak(self, choice: Sequence[int]) -> Peak:
        """Returns the range of the most memory that a choice uses once it is compiled.

        The orders that the compiler may choose from bound it, and what is known of the gaps that it leaves.
        """
        machine, arguments = self.problem.machine, self.occupancy.argument_bytes(choice)
        compiler, hidden_bytes = machine.compiler, machine.hardware.vector_memory_bytes
        expected = self.occupancy.peak(choice)
        needed = [nbytes - arguments for nbytes in (expected, *(each.peak(choice) for each in self.other_occupancies))]
        least_gaps, likely_gaps, most_gaps = compiler.gaps
        least = max(0.0, least_gaps / likely_gaps * min(needed) - hidden_bytes)
        most = most_gaps / likely_gaps * max(needed)
        return Peak(arguments + least, expected, arguments + most, compiler.margin)

    @functools.cached_property
    def other_occupancies(self) -> tuple[Occupancy, ...]:
        return tuple(
            attrs.evolve(self.occupancy, stays=each.stays, copies=each.copies) for each in self.others.occupancies
        )

    def tight(self) -> "Task":
        """Returns the task of a compiler that has to keep a limit, and leaves no gaps; the same one if it cannot."""
        if not self.problem.machine.compiler.obeys_limits:
            return self
        occupancy = attrs.evolve(self.occupancy, temporaries=min(1.0, self.occupancy.temporaries))
        return attrs.evolve(self, occupancy=occupancy)

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
        problem = with_temporary_bytes(build_problem(program, machine, paths, feedback_arrays, pinned, tie))
        return cls(problem, Occupancy.of(problem, machine.compiler.orders[0](program)), _Others(problem))

    def with_choice(self, result: "SearchResult", choice: tuple[int, ...]) -> "SearchResult":
        price = result.price if choice == result.choice else 0.0
        return attrs.evolve(result, choice=choice, price=price, peak_bytes=self.occupancy.peak(choice))

    def only(self, keep: Sequence[np.ndarray]) -> "Task":
        """Returns the task with fewer layouts: for each node the indices of those to keep."""
        problem = restrict(self.problem, keep)
        return attrs.evolve(self, problem=problem, occupancy=attrs.evolve(self.occupancy, problem=problem))

    def within(
        self,
        limit_bytes: float,
        deadline: Deadline = NO_DEADLINE,
        met: Sequence[Trial] = (),
        *,
        shrinks: bool = True,
    ) -> "SearchResult":
        """Finds the best choice that fits, or the one with the least memory where it finds none that fits.

        Without `shrinks`, a search ends once it is certain that nothing fits, and the choice may take more. `met` are
        the candidates and patterns of another search of the same problem: what is best in a pattern does not depend on
        memory, so patterns are not weighed again.
        """
        start = time.monotonic()
        search = Search(self, Trials(self.occupancy, limit_bytes), deadline)
        search.run(met, shrinks)
        trials, is_late = search.trials, bool(self.problem.nodes) and deadline.is_over
        return _result(trials, search.budget, is_late, time.monotonic() - start)


@final
@attrs.define(eq=False)
class Search:
    """A search within a limit of memory. Its steps add choices to `trials`, and raise the bound of the budget."""

    task: Task
    trials: Trials
    deadline: Deadline = NO_DEADLINE
    budget: Budget = attrs.field(factory=lambda: Budget(0.0))
    moments: dict[int, None] = attrs.field(factory=dict)
    """The operations at which memory is watched: they become more."""

    def run(self, met: Sequence[Trial], shrinks: bool) -> None:
        """Tries choices from cheap to exact; `met` and `shrinks` are as `Task.within` takes them."""
        trials, problem = self.trials, self.task.problem
        trials.add((0,) * len(problem.nodes))
        if not problem.nodes:
            return
        for trial in met:
            trials.add(trial.choice, trial.origin)
        if not met:
            self.weigh_patterns()
        messages = Messages(problem, [extra / MICRO for extra in layout_preference(problem)])
        self.budget = within_budget(messages, trials, self.deadline, self.moments)
        best, is_hopeless = trials.best, self.budget.is_hopeless
        is_close = best is not None and best.cost <= self.budget.bound * (1 + CLOSER)
        if not is_close and not self.deadline.is_over and not is_hopeless:
            self.merge()
            self.close()
        if trials.answer is None:  # a linear program knows what is possible
            trials.add(solve(self.task.formulation, (), self.deadline).choice or ())
        if trials.best is None and not self.deadline.is_over and variable_count(problem) <= _SMALL:
            everything = [np.arange(len(node.layouts)) for node in problem.nodes]
            # More work than for the least cost, chosen by hand: a maximum is slower to minimise than a sum.
            self.empty(self.task, everything, Work(600_000), shrinks=shrinks)
        elif not is_close and (shrinks or not is_hopeless):  # where nothing can fit, what is left is to take less
            self.improve()
            self.merge()

    @property
    def is_done(self) -> bool:
        """Returns whether there is no answer to better, or no time for it, or it is close enough to the bound."""
        best = self.trials.best
        is_close = best is not None and best.cost <= self.budget.bound * (1 + APART)
        return self.trials.answer is None or self.deadline.is_over or is_close

    def weigh_patterns(self) -> None:
        trials, deadline, has_fitted = self.trials, self.deadline, False
        for pattern in patterns(self.task.problem):
            # Without any time, those that are simple are weighed until one fits.
            if deadline.is_over and (has_fitted or not pattern.is_simple):
                continue
            problem = restrict(self.task.problem, pattern.keep)
            messages = Messages(problem, [extra / MICRO for extra in layout_preference(problem)])
            messages.settle(_PATTERN_SWEEPS, deadline)
            trial = trials.add(_whole_indices(pattern.keep, messages.decoded()), pattern.name)
            if not np.isfinite(trial.cost) and not deadline.is_over:
                trial = trials.add(
                    _whole_indices(pattern.keep, messages.narrowed(_PATTERN_STEPS, deadline)), pattern.name
                )
            has_fitted = has_fitted or trials.fits(trial)

    def close(self) -> None:
        """Searches the layouts that may be part of something better exactly, or the most promising of them."""
        budget, answer, best = self.budget, self.trials.answer, self.trials.best
        choice = (0,) * len(self.task.problem.nodes) if answer is None else answer.choice
        # As long as nothing fits, no cost is too high.
        most = max(budget.bound, _TIE) if best is None else best.cost * (1 + _TIE) + _TIE - budget.bound
        for part in (_ALL if best is None else 1.0, *_PARTS):
            # Whatever rounding does, the best choice itself stays.
            worthwhile = zip(budget.extra, choice, strict=True)
            keep = [np.union1d(np.flatnonzero(extra <= part * most), [index]) for extra, index in worthwhile]
            part_task = self.task.only(keep)
            if variable_count(part_task.problem) > _SMALL:
                continue
            work = Work() if part >= 1.0 else Work(120_000)  # the most promising layouts alone prove nothing
            bound, best = self.exactly(part_task, keep, work), self.trials.best
            if part >= 1.0 and best is not None:  # else what was dropped may be better
                # What was dropped costs at least as much as the best so far, and what was kept at least `bound`.
                self.budget = attrs.evolve(budget, bound=max(budget.bound, min(bound, best.cost)))
            return

    def merge(self) -> None:
        """Searches what the best choices have between them: one is better in some parts of a program, others in others.

        Where layouts may be mixed, a linear program says which to take: those that it mixes, and the best choice's, are
        searched exactly.
        """
        trials = self.trials
        for _ in range(_MERGES):
            answer, best = trials.answer, trials.best
            if answer is None or self.is_done:
                break
            count = len(self.moments)
            keep = self.union()
            task = self.task.only(keep)
            constraints = [task.occupancy.constraint(moment, trials.limit_bytes) for moment in self.moments]
            parts = fractions(task.formulation, constraints, self.deadline)
            if parts is not None:
                keep = [
                    np.union1d(layouts[part > 1e-6], [index])
                    for layouts, part, index in zip(keep, parts, answer.choice, strict=True)
                ]
                task = self.task.only(keep)
            if best is None:
                self.empty(task, keep, Work(_MERGED_WORK))
            self.exactly(task, keep, Work(_MERGED_WORK), bounds=False)
            if trials.answer is answer and len(self.moments) == count:
                break

    def union(self) -> list[np.ndarray]:
        """Returns for each node its layouts in the best choices: in as many of these as are searched at once."""
        trials, problem = self.trials, self.task.problem

        def rank(trial: Trial) -> float:
            # The power is chosen by hand: not only choices that fit are merged, and those that nearly fit are.
            return trial.cost * max(1.0, trial.peak_bytes / max(1.0, trials.limit_bytes)) ** 3

        union = [set[int]() for _ in problem.nodes]
        for trial in sorted(trials.trials, key=lambda trial: (trial is not trials.answer, rank(trial), trial.choice)):
            more = [layouts | {index} for layouts, index in zip(union, trial.choice, strict=True)]
            size = sum(
                len({int(edge.from_codes[index]) for index in more[edge.start]})
                * len({int(edge.to_codes[index]) for index in more[edge.end]})
                for edge in problem.edges
            )
            if size > _MERGED_SIZE and trial is not trials.answer:
                break
            union = more
        return [np.array(sorted(layouts)) for layouts in union]

    def improve(self) -> None:
        """Searches parts of the program, with the rest as in the answer: its time, or where nothing fits its peak."""
        trials = self.trials
        done, misses, had_best = set[int](), 0, trials.best is not None
        for _ in range(_PART_COUNT):
            answer, best = trials.answer, trials.best
            if answer is None or self.is_done:
                break
            if best is not None and not had_best:  # from now on, time is what counts
                done, misses, had_best = set(), 0, True
            seeds = self.seeds(answer, best is not None)
            left = [node for node in seeds if node not in done]
            if not seeds or misses == _MISSES:
                break
            if not left:
                done, left = set(), seeds
            keep, opened = self.around(answer, left[0])
            done |= opened
            task = self.task.only(keep)
            if best is None:
                self.empty(task, keep, Work(_PART_WORK))
            else:
                self.exactly(task, keep, Work(_PART_WORK))
            misses = misses + 1 if trials.answer is answer else 0

    def seeds(self, answer: Trial, fits: bool) -> list[int]:
        """Returns nodes, those first that have most to gain: in time, or where nothing fits in bytes at the peak."""
        problem = self.task.problem
        gains = np.zeros(len(problem.nodes))
        if not fits:
            constraint = self.task.occupancy.constraint(int(answer.timeline.argmax()), 0.0)
            for node, sizes in constraint.layout_bytes.items():
                gains[node] += sizes[answer.choice[node]] - sizes.min()
            for edge_index, sizes in constraint.copy_bytes.items():
                edge = problem.edges[edge_index]
                gains[edge.end] += sizes[edge.codes(answer.choice)]
        else:
            for node_index, node in enumerate(problem.nodes):
                gains[node_index] = node.seconds[answer.choice[node_index]] - node.seconds.min()
            for group, count in problem.edge_groups:
                for edge in (problem.edges[index] for index in group):
                    row, column = edge.codes(answer.choice)
                    gains[edge.end] += count * edge.seconds[row, column]
        return [int(node) for node in np.argsort(-gains, kind="stable") if gains[node] > 0]

    def around(self, answer: Trial, seed: int) -> tuple[list[np.ndarray], set[int]]:
        """Returns for each node the layout of the answer, all layouts of nodes near `seed`, and which these are."""
        problem, opened, left = self.task.problem, set[int](), _PART_SIZE
        queue = [seed]
        for node in queue:
            if node in opened:
                continue
            size = 0
            for edge_index in self.edges_of[node]:
                edge = problem.edges[edge_index]
                other = edge.end if edge.start == node else edge.start
                full = len(edge.from_layouts) * len(edge.to_layouts)
                size += full if other in opened else len(edge.from_layouts if edge.start == node else edge.to_layouts)
            # The first node is opened in any case; a large one is left out, and smaller ones behind others still fit.
            if opened and size > left:
                continue
            left -= size
            opened.add(node)
            for edge_index in self.edges_of[node]:
                edge = problem.edges[edge_index]
                queue.append(edge.end if edge.start == node else edge.start)
            queue += self.ties_of.get(node, [])
        keep = [
            np.arange(len(layouts.layouts)) if node in opened else np.array([answer.choice[node]])
            for node, layouts in enumerate(problem.nodes)
        ]
        return keep, opened

    @functools.cached_property
    def edges_of(self) -> list[list[int]]:
        edges: list[list[int]] = [[] for _ in self.task.problem.nodes]
        for edge_index, edge in enumerate(self.task.problem.edges):
            for node in {edge.start, edge.end}:
                edges[node].append(edge_index)
        return edges

    @functools.cached_property
    def ties_of(self) -> dict[int, list[int]]:
        ties: dict[int, list[int]] = {}
        for first, second in self.task.problem.equal_homes:
            ties.setdefault(first.node, []).append(second.node)
            ties.setdefault(second.node, []).append(first.node)
        return ties

    def exactly(self, task: Task, keep: Sequence[np.ndarray], work: Work, *, bounds: bool = True) -> float:
        """Solves a part of the task with bounds on what is in memory at the moments, which grow until no other
        operation exceeds it.

        An operation is first watched with a constraint that rules out no choice that fits, so that the bound, which is
        returned, holds. One that exceeds the limit all the same is watched strictly from then on, and with a lower
        limit if even that fails. `keep` has the indices of its layouts in the problem of the `trials`. Without
        `bounds`, all are watched strictly.
        """
        trials, limit_bytes, bound = self.trials, self.trials.limit_bytes, 0.0
        limits = dict.fromkeys(self.moments, limit_bytes)
        strict_moments: dict[int, None] = {} if bounds else dict.fromkeys(self.moments)
        for _ in range(_ROUNDS):
            constraints = [
                task.occupancy.constraint(op_index, limit, certain=op_index not in strict_moments)
                for op_index, limit in limits.items()
            ]
            if work.left <= 0:
                break
            solution = solve(task.formulation, constraints, self.deadline, work)
            # Strict constraints rule out choices that fit: from then on, the program bounds nothing.
            if not strict_moments:
                bound = max(bound, solution.bound)
            if solution.choice is None:
                break
            trial = trials.add(_whole_indices(keep, solution.choice))
            if trials.fits(trial) or self.deadline.is_over:
                break
            timeline = task.occupancy.timeline(solution.choice)
            for op_index in peaks(timeline, limit_bytes):
                # Strict constraints count everything: what exceeds the limit is the solver's tolerance. Ask for less.
                if op_index in strict_moments:
                    limits[op_index] -= float(timeline[op_index]) - limit_bytes
                elif op_index in limits or not bounds:
                    strict_moments[op_index] = None
                limits.setdefault(op_index, limit_bytes)
                self.moments[op_index] = None
        return bound

    def empty(self, task: Task, keep: Sequence[np.ndarray], work: Work, *, shrinks: bool = True) -> None:
        """Looks for what takes the least memory, where nothing that fits was found.

        Without `shrinks`, only until something fits, or nothing can.
        """
        trials, deadline = self.trials, self.deadline
        if trials.smallest is None:
            return
        # The smallest choice at the moments watched may be larger at others: those are watched in the next round.
        watched = dict.fromkeys([*self.moments, int(trials.smallest.timeline.argmax())])
        strict_moments: dict[int, None] = {}
        bound = 0.0
        for _ in range(_ROUNDS):
            constraints = [
                task.occupancy.constraint(op_index, 0.0, certain=op_index not in strict_moments) for op_index in watched
            ]
            if work.left <= 0:
                break
            enough_bytes = None if shrinks else trials.limit_bytes
            choice, needed_bytes = least_memory(task.formulation, constraints, deadline, work, enough_bytes)
            if choice is None:
                break
            if not strict_moments:
                bound = needed_bytes
            fullest = int(trials.add(_whole_indices(keep, choice)).timeline.argmax())
            least_peak = trials.smallest.peak_bytes
            if least_peak <= bound * (1 + CLOSE) or fullest in strict_moments or deadline.is_over:
                break
            if not shrinks and (trials.best is not None or bound > trials.limit_bytes):
                break
            if fullest in watched:
                strict_moments[fullest] = None
            watched[fullest] = None


@final
@attrs.frozen(eq=False)
class _Others:
    """Orders in which a program may run, beside the likeliest."""

    problem: Problem

    @functools.cached_property
    def occupancies(self) -> tuple[Occupancy, ...]:
        _, *orders = self.problem.machine.compiler.orders
        return tuple(Occupancy.of(self.problem, order(self.problem.program), waits=True) for order in orders)


@final
@attrs.frozen(eq=False)
class SearchResult:
    """The result of a search."""

    choice: tuple[int, ...]
    """For each node the index of its layout: the cheapest choice that fits by the model; where none was found, the one
    with the least peak. It is empty only where every choice that was met is impossible."""
    peak_bytes: float
    """The peak of `choice`."""
    bound: float
    """The least cost of every choice that fits."""
    fits: bool
    """`choice` is expected to fit."""
    candidates: tuple[Trial, ...]
    """The distinct choices that are worth compiling, the cheapest first: on the front of time and memory."""
    patterns: tuple[Trial, ...] = ()
    """The best choice of each pattern that experts would write: by compilers, some may take less than is modelled."""
    seconds: float = 0.0
    is_late: bool = False
    """The time was up before the search was done."""
    is_tight: bool = False
    """It fits if the compiler has to keep the limit: memory is as in `Task.tight` then."""
    free_bound: float = 0.0
    """The least cost of every choice, with any peak."""
    price: float = 0.0
    """The seconds that one more byte of memory would save."""

    @property
    def met(self) -> tuple[Trial, ...]:
        trials = {trial.choice: trial for trial in (*self.candidates, *self.patterns)}
        return tuple(sorted(trials.values(), key=lambda trial: (trial.cost, trial.peak_bytes, trial.choice)))

    def reindexed(self, keep: Sequence[np.ndarray]) -> "SearchResult":
        """Returns the result of a search over the layouts `keep`, with the indices that the whole problem has."""

        def whole(trials: Sequence[Trial]) -> tuple[Trial, ...]:
            return tuple(attrs.evolve(trial, choice=_whole_indices(keep, trial.choice)) for trial in trials)

        choice = _whole_indices(keep, self.choice) if self.choice else ()
        return attrs.evolve(self, choice=choice, candidates=whole(self.candidates), patterns=whole(self.patterns))


def _whole_indices(keep: Sequence[np.ndarray], choice: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(kept[layout_index]) for kept, layout_index in zip(keep, choice, strict=True))


def _result(trials: Trials, budget: Budget, is_late: bool, seconds: float) -> SearchResult:
    answer, fits = trials.answer, trials.best is not None
    if answer is None:
        return SearchResult((), np.inf, max(0.0, budget.bound), False, (), (), seconds, is_late)
    bound = min(max(0.0, budget.bound), answer.cost)
    # Bounds count only what is in memory in any case: where that leaves the price at 0, plans that need more tell it.
    price = budget.price or trials.saving if fits else 0.0
    patterns = tuple(trial for trial in trials.trials if trial.origin != "search")
    free_bound = min(max(0.0, budget.free_bound), answer.cost)
    front, peak_bytes = trials.front(), answer.peak_bytes
    return SearchResult(
        *(answer.choice, peak_bytes, bound, fits, front, patterns, seconds, is_late), free_bound=free_bound, price=price
    )


def layout_preference(problem: Problem) -> list[np.ndarray]:
    """Returns what decides between choices that cost the same, in microseconds: the one that splits least, and in the
    order of the mesh."""
    # In microseconds: nothing beside any real cost, and enough to decide between choices that cost the same.
    return [1e-6 * np.arange(len(node.layouts)) for node in problem.nodes]
