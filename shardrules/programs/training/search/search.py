"""The search over meshes and recipes, around autoplan's over layouts.

On each mesh the step is first planned without a limit of memory, keeping what makes it fastest: microbatches and
recomputing more only add work, so that hardly anything on this mesh is faster. On the first mesh, what is likely to fit
is planned next, so that there is a good plan early, and what follows has to be better. Meshes are searched in the order
of their times, and one that cannot be better than the best plan so far is left. On a mesh, recipes are columns: so many
microbatches, and from the top down less that the backward pass keeps. The first that fits is bisected for in each,
since less kept is less memory. Then come the meshes next to the best, and last what the best plan might keep more or
less. What is planned follows from earlier results, and from the clock only once the time is up.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import attrs

from shardrules.core.deadline import Deadline
from shardrules.programs.autoplan.graph.host_moves import EXPOSED_ARGUMENTS
from shardrules.programs.costs.memory import host_seconds
from shardrules.programs.costs.step_time import seconds_text
from shardrules.programs.training.cluster import Shape
from shardrules.programs.training.search.problem import Outcome, TrainingProblem, plan_once
from shardrules.programs.training.step import Recipe

_TIE = 1e-3
"""The part by which a plan has to be faster than a simpler one to be better, chosen by hand: models of costs tell no
less apart."""


@final
@attrs.define(eq=False)
class TrainingSearch:
    """The state of a search."""

    problem: TrainingProblem
    microbatches: int | None
    """The requested number of microbatches."""
    stages: int | None
    """The requested number of stages."""
    deadline: Deadline
    progress: Callable[[str], None]
    limit_bytes: float = attrs.field(default=attrs.Factory(lambda search: search.problem.limit_bytes, takes_self=True))
    """The bytes that plans may take by the model."""
    free: dict[Shape, Outcome] = attrs.field(factory=dict)
    """The fastest recipe of each mesh, without a limit of memory."""
    columns: dict[tuple[Shape, Recipe], Outcome] = attrs.field(factory=dict)
    """For other numbers of microbatches the same."""
    outcomes: dict[tuple[Shape, Recipe], Outcome] = attrs.field(factory=dict)
    """Within the limit."""
    beaten: dict[tuple[Shape, Recipe], str] = attrs.field(factory=dict)
    """The reason that a recipe was not planned within the limit."""
    count: int = 0
    longest_seconds: float = 0.0
    answer_seconds: float = 0.0
    """The time to answer, once the search is over."""
    is_cut: bool = False
    """The time was up in the middle of a plan."""
    most_count: int = 90
    """The plans at most, chosen by hand: 2 to 4 seconds each for scanned layers on one core."""
    host_part: float = 0.0
    """The part of the optimizer's state on hosts, in recipes that are made."""
    is_late: bool = False
    """The time was up before the search was done."""
    least_seconds: float = 0.0
    """The least time of plans without stages, as far as it is known: no more are looked for where one with stages takes
    no more."""
    why_no_stages: str = ""
    """The reason that layers are not in stages; empty where they are."""

    def begin(self) -> None:
        """Plans the first meshes on which all devices compute all layers, without a limit of memory."""
        for shape in self.problem.cluster.shapes():
            is_first = self.smallest is None
            self.plan_free(shape, self.first_recipe)
            if is_first:
                self.fit_early(shape)

    def run(self) -> None:
        """Searches for plans in which all devices compute all layers."""
        if not self.free:
            self.begin()
        self.fit_all(tuple(self.free))
        while (center := self.center) is not None:
            near = [shape for shape in self.problem.cluster.neighbours(center) if shape not in self.free]
            near = near[: max(0, 16 - len(self.free))]  # chosen by hand
            for shape in near:
                self.plan_free(shape, self.first_recipe)
            self.fit_all(near)
            if self.center == center:
                break
        self.polish()
        self.offload_state()

    def fit_early(self, shape: Shape) -> None:
        """Plans what is likely to fit on a mesh, and to be hardly slower than the fastest: others have to be better.

        Memory of activations falls with the number of microbatches, and these cost little.
        """
        free = self.free[shape]
        if free.result is None or free.fits:
            return
        activation_bytes = (free.peak_bytes - free.argument_bytes) * free.recipe.microbatches
        for microbatches in self.counts(free.batch_splits):
            if microbatches > 16:  # chosen by hand: with more, recomputing is likely to take less time
                break
            least_bytes = self.problem.rest_bytes + activation_bytes / microbatches
            is_likely = free.recipe.microbatches < microbatches and least_bytes <= self.limit_bytes
            if is_likely and self.fits(shape, microbatches, 1, self.first_keep(microbatches)):
                break
        self.fit_column(shape, free.recipe.microbatches, 1)

    @property
    def first_recipe(self) -> Recipe:
        """The recipe with most memory and least work."""
        count = self.microbatches or 1
        return self.recipe(count, 1, self.first_keep(count))

    @property
    def best(self) -> Outcome | None:
        """The fastest plan that fits: of several, the one with the fewest axes, microbatches and arrays recomputed."""
        return _best_of(self.outcomes.values())

    @property
    def best_plain(self) -> Outcome | None:
        """The same of those without stages."""
        return _best_of(outcome for outcome in self.outcomes.values() if outcome.recipe.stages == 1)

    @property
    def fitting(self) -> list[Outcome]:
        """The plans that fit, the best first; of those that only the names of their axes tell apart, the first."""
        best = self.best
        others = [outcome for outcome in self.outcomes.values() if outcome.fits and outcome is not best]
        plans: list[Outcome] = []
        for outcome in [] if best is None else [best, *sorted(others, key=lambda outcome: outcome.seconds)]:
            if not any(_is_same(outcome, plan) for plan in plans):
                plans.append(outcome)
        return plans

    def leave_room(self, factor: float) -> None:
        """Searches again for plans that take less, by a factor."""
        before, self.limit_bytes = self.outcomes, factor * self.limit_bytes
        for shape, outcome in self.free.items():
            self.free[shape] = attrs.evolve(outcome, fits=outcome.fits and outcome.peak_bytes <= self.limit_bytes)
        # A plan that did not fit before fits no better now; one that now takes too much is forgotten, and may be
        # planned again.
        self.outcomes = {
            key: outcome
            for key, outcome in before.items()
            if not outcome.fits or outcome.peak_bytes <= self.limit_bytes
        }
        self.fit_all(tuple(self.free))
        self.polish()
        self.offload_state()

    @property
    def smallest(self) -> Outcome | None:
        """The plan with the least memory, whether it was looked for within the limit or not."""
        return min(self.planned, key=lambda outcome: outcome.peak_bytes, default=None)

    @property
    def planned(self) -> list[Outcome]:
        outcomes = (*self.outcomes.values(), *self.free.values(), *self.columns.values())
        return [outcome for outcome in outcomes if outcome.result is not None]

    def shrink(self) -> None:
        """Plans once more what takes the least memory, where nothing fits: for as little as it can take.

        That a recipe does not fit may be certain before anything is planned: of such recipes, the one that needs least.
        """
        if self.best is not None or not self.has_time:
            return
        refused = [outcome for outcome in self.outcomes.values() if outcome.refusal and outcome.peak_bytes]
        planned = [outcome for outcome in self.outcomes.values() if outcome.result is not None]
        outcome = min(planned or refused, key=lambda outcome: outcome.peak_bytes, default=None)
        if outcome is not None:
            key = outcome.shape, outcome.recipe
            (recipe,) = (recipe for shape, recipe in self.outcomes if (shape, recipe) == key)
            self.outcomes[key] = self.plan(outcome.shape, recipe, shrinks=True)

    @property
    def center(self) -> Shape | None:
        """The mesh whose neighbours may be better."""
        plain = [outcome for outcome in self.planned if outcome.recipe.stages == 1]
        outcome = self.best_plain or min(plain, key=lambda outcome: outcome.peak_bytes, default=None)
        return None if outcome is None else outcome.shape

    @property
    def is_over(self) -> bool:
        """Returns whether another plan would take longer than there is time for, or enough were made."""
        return self.is_out_of_time or self.count >= self.most_count

    @property
    def is_out_of_time(self) -> bool:
        """Returns whether another plan would take longer than there is time for."""
        self.is_late |= not self.has_time
        return self.is_late

    @property
    def has_time(self) -> bool:
        return self.deadline.seconds_left > self.longest_seconds + self.answer_seconds

    def first_keep(self, microbatches: int) -> int:
        """Returns the index of what is fastest to keep: writing more to memory may take longer than to recompute it."""
        keeps = self.problem.keeps(microbatches)
        return min(range(len(keeps)), key=lambda index: (keeps[index].seconds, index))

    def recipe(self, microbatches: int, groups: int, keep_index: int = 0) -> Recipe:
        """Returns a recipe by the index of what it keeps."""
        keep = self.problem.keeps(microbatches)[keep_index]
        on_host = self.problem.host_state(self.host_part) if self.host_part else ()
        return Recipe(microbatches, groups, keep, self.problem.step.recipe.accumulate_dtype, on_host)

    def plan_free(self, shape: Shape, recipe: Recipe) -> None:
        """Plans a mesh without a limit of memory; where all others were refused, also once the time is up."""
        best = self.best
        fastest = best.seconds * (1 - _TIE) if best is not None and best.recipe.stages > 1 else math.inf
        is_beaten = fastest <= self.least_seconds
        if shape in self.free or is_beaten or (self.smallest is not None and self.is_over):
            return
        outcome = self.plan(shape, recipe, is_free=True)
        self.free[shape] = outcome
        if outcome.fits or outcome.refusal:  # then a limit changes nothing
            self.outcomes[shape, recipe] = outcome

    def plan(self, shape: Shape, recipe: Recipe, is_free: bool = False, *, shrinks: bool = False) -> Outcome:
        """Plans once, and says so. With `shrinks`, what does not fit is planned too, for the least memory."""
        deadline = self.deadline.earlier(self.answer_seconds)
        # As long as nothing fits, no plan takes more than half of the time that is left.
        deadline = deadline if self.best is not None else deadline.share(2)
        outcome = plan_once(self.problem, shape, recipe, self.limit_bytes, is_free, deadline, shrinks=shrinks)
        self.is_cut |= outcome.result is not None and outcome.result.is_late
        self.longest_seconds = max(self.longest_seconds, outcome.planning_seconds)
        # Chosen by hand: GPTs of 10 and 32 listed blocks took 1.1 s beside 1.6 s, and 1.5 s beside 5 s.
        self.answer_seconds = max(self.answer_seconds, 0.7 * outcome.read_seconds)
        self.count += 1
        best = self.best
        self.problem.forget(best)
        fastest = "" if best is None else f", best so far {best.seconds:.4g} s on {best.mesh}"
        self.progress(f"{self.count} plans{fastest}; {outcome.mesh}, {outcome.recipe}")
        return outcome

    def fit_all(self, shapes: Sequence[Shape]) -> None:
        """Looks for the best plan that fits on each mesh, first where it is fastest without a limit."""
        planned = [shape for shape in shapes if shape in self.free and self.free[shape].result is not None]
        # Of meshes that are as fast, the one with the fewest axes.
        least = min((self.free[shape].seconds for shape in planned), default=0.0) * (1 + _TIE)
        for shape in sorted(planned, key=lambda shape: (max(least, self.free[shape].seconds), len(shape))):
            self.fit(shape)

    def fit(self, shape: Shape) -> None:
        free, least_bytes = self.free[shape], float("inf")
        # What takes longest to reduce, each of several microbatches, bounds nothing.
        is_bound = free.recipe.microbatches == 1
        if is_bound and (shape, free.recipe) in self.outcomes:
            return
        for microbatches in self.counts(free.batch_splits):
            if is_bound and self.loses(shape, free.recipe, free.seconds):
                return
            keeps_all = False
            splits = free.batch_splits if microbatches > 1 else 1
            divides = self.problem.loss.batch_size % (microbatches * splits) == 0
            for groups in dict.fromkeys((splits, 1) if divides else (1,)):
                keeps_all |= self.fit_column(shape, microbatches, groups)
            # More microbatches only cost time where they let the backward pass keep more.
            fewer, current = (self.on_mesh(shape, count) for count in (microbatches // 2, microbatches))
            before, least_bytes = least_bytes, min((each.peak_bytes for each in current), default=0.0)
            seconds = [[each.seconds for each in outcomes if each.fits] for outcomes in (fewer, current)]
            is_worse = min(seconds[0], default=math.inf) < min(seconds[1], default=math.inf)
            # The factor is chosen by hand: without it, searches go on to single examples for hardly a per cent.
            if keeps_all or is_worse or least_bytes > before * 0.98:
                return

    def on_mesh(self, shape: Shape, microbatches: int) -> list[Outcome]:
        """The plans on a mesh with so many microbatches."""
        plans = [
            outcome for (other, _), outcome in self.outcomes.items() if other == shape and outcome.result is not None
        ]
        return [
            outcome for outcome in plans if (outcome.recipe.microbatches, outcome.recipe.stages) == (microbatches, 1)
        ]

    def counts(self, splits: int) -> Iterator[int]:
        """Yields numbers of microbatches: 1, 2, 4, ..., as long as all devices have examples of each."""
        if self.microbatches is not None:
            yield self.microbatches
            return
        count, examples = 1, self.problem.loss.batch_size
        # A loss that cannot be split has the whole batch as its only count.
        while count * splits <= examples and (count == 1 or not self.problem.split_refusal):
            if examples % (count * splits) == 0:
                yield count
            count *= 2

    def fit_column(self, shape: Shape, microbatches: int, groups: int) -> bool:
        """Bisects for the first recipe of a column that fits; returns whether it keeps what is fastest."""
        free = self.free_column(shape, microbatches, groups)
        if free is None or free.refusal or free.fits:
            return free is not None and free.fits
        worthwhile = self.worthwhile(free)
        if not worthwhile:
            self.beaten[shape, free.recipe] = _beaten_text(free.seconds)
            return False
        first = first_fitting(worthwhile, lambda index: self.fits(shape, microbatches, groups, index))
        if first is None:
            return False
        # What just fits may pay for it with slow layouts: recomputing a little more may be faster.
        for keep_index in worthwhile[first + 1 :]:
            best = self.best
            if keep_index not in self.worthwhile(free):
                break
            self.fits(shape, microbatches, groups, keep_index)
            if self.best is best:
                break
        return first == 0

    def free_column(self, shape: Shape, microbatches: int, groups: int) -> Outcome | None:
        """Plans the fastest recipe of a column without a limit of memory; `None` where there is no time for it."""
        recipe = self.recipe(microbatches, groups, self.first_keep(microbatches))
        if self.free[shape].recipe == recipe:
            return self.free[shape]
        if (shape, recipe) not in self.columns and not self.is_over:
            self.columns[shape, recipe] = outcome = self.plan(shape, recipe, is_free=True)
            if outcome.fits:
                self.outcomes[shape, recipe] = outcome
        return self.columns.get((shape, recipe))

    def worthwhile(self, free: Outcome) -> list[int]:
        """Returns what the backward pass may keep, by index, for plans of a column to be better than the best so far.

        More recomputed takes longer, at least by what it takes if all devices share it.
        """
        keeps, first = self.problem.keeps(free.recipe.microbatches), self.first_keep(free.recipe.microbatches)
        best, count = self.best, self.problem.cluster.count
        parts = 1 if free.recipe.microbatches == 1 else 2  # of other choices, seconds are those of half the batch
        most = float("inf") if best is None else best.seconds * (1 - _TIE)
        # Of the estimated time of recomputing 0.8 count, chosen by hand: of a GPT on 16 H100s, 10.4 ms were 9.4.
        return [
            index
            for index in range(first, len(keeps))
            if free.seconds + 0.8 * (keeps[index].seconds - keeps[first].seconds) * parts / count < most
        ]

    def polish(self) -> None:
        """Plans what the best plan without stages might keep more or less, as long as that is better.

        Stages have a search of their own, which has tried what they may keep.
        """
        while (best := self.best_plain) is not None:
            count = len(self.outcomes)
            keeps = self.problem.keeps(best.recipe.microbatches)
            index = keeps.index(best.recipe.keep)
            for near in (index - 1, index + 1):
                if 0 <= near < len(keeps):
                    self.fits(best.shape, best.recipe.microbatches, best.recipe.groups, near)
            if self.best_plain is best or len(self.outcomes) == count:
                return

    def offload_state(self) -> None:
        """Plans with the optimizer's state on hosts, if nothing fits without, or that may be faster."""
        best, on_devices = self.best, self.free
        bounds = {
            shape: outcome.seconds + self.least_host_seconds(outcome)
            for shape, outcome in on_devices.items()
            if outcome.result is not None and not outcome.fits
        }
        shapes = [
            shape
            for shape in sorted(bounds, key=lambda shape: (bounds[shape], len(shape)))
            if best is None or bounds[shape] < best.seconds * (1 - _TIE)
        ][:3]  # chosen by hand
        if not shapes or not self.problem.host_state(1.0):
            return
        self.most_count, self.host_part = self.count + 30, 1.0  # chosen by hand
        if not self.is_over:
            self.free = {}
            for shape in shapes:
                self.plan_free(shape, self.first_recipe)
            self.fit_all(tuple(self.free))
            self.keep_on_devices()
            self.columns |= {(shape, outcome.recipe): outcome for shape, outcome in self.free.items()}
        self.free, self.host_part = on_devices, 0.0

    def least_host_seconds(self, free: Outcome) -> float:
        """Returns what sending and fetching takes at least of what does not fit on a mesh without a limit."""
        surplus = max(0.0, free.peak_bytes - self.limit_bytes)
        return 2 * EXPOSED_ARGUMENTS * host_seconds(surplus, self.problem.cluster.hardware)

    def keep_on_devices(self) -> None:
        """Plans for less of the state on hosts, as long as that fits: each byte of it takes time in every step."""
        low, high = 0.0, 1.0
        for _ in range(3):  # to eighths, chosen by hand
            best = self.best
            if best is None or not best.recipe.host_state or self.is_over:
                return
            middle = (low + high) / 2
            recipe = attrs.evolve(best.recipe, host_state=self.problem.host_state(middle))
            low, high = (low, middle) if self.fits_with(best.shape, recipe) else (middle, high)

    def fits(self, shape: Shape, microbatches: int, groups: int, keep_index: int) -> bool:
        return self.fits_with(shape, self.recipe(microbatches, groups, keep_index))

    def fits_with(self, shape: Shape, recipe: Recipe) -> bool:
        """Returns whether a recipe fits on a mesh; it is planned once, if there is time."""
        if (shape, recipe) not in self.outcomes:
            if self.is_over:
                return False
            self.outcomes[shape, recipe] = self.plan(shape, recipe)
        return self.outcomes[shape, recipe].fits

    def loses(self, shape: Shape, recipe: Recipe, bound: float) -> bool:
        """Returns whether a mesh that takes so long at least cannot be better than the best plan."""
        best = self.best
        if best is None:
            return False
        # Recomputing may save time by this model, though not by that of what is kept: on this mesh as on the best.
        fastest = best if best.recipe.stages > 1 else self.free.get(best.shape, best)
        saved = min(1.0, best.seconds / fastest.seconds)
        if bound * saved < best.seconds * (1 - _TIE):
            return False
        self.beaten[shape, recipe] = _beaten_text(bound)
        return True

    def fastest_of_all(self, plain: Outcome) -> list[Outcome]:
        """Returns the plan that is fastest without a limit of memory: as it is, and with the limit for the compiler.

        There is none if it is `plain`, or if its arguments alone are too large: only what else it needs is modelled.
        """
        planned = [outcome for outcome in (*self.free.values(), *self.columns.values()) if outcome.result is not None]
        fastest = min(planned, key=lambda outcome: outcome.seconds, default=None)
        if fastest is None or (plain.fits and fastest.seconds >= plain.seconds):
            return []
        limit, plan = self.problem.limit_bytes, fastest.plan(self.problem)
        if plan.task.occupancy.argument_bytes(plan.choice) > limit:
            return []
        if not plan.task.problem.machine.compiler.obeys_limits:
            return [fastest]
        # Compilers get a limit if the model says that it is kept.
        limited = attrs.evolve(plan.result, peak_bytes=min(plan.result.peak_bytes, limit))
        return [fastest, attrs.evolve(fastest, result=limited)]


def _best_of(outcomes: Iterable[Outcome]) -> Outcome | None:
    fitting = [outcome for outcome in outcomes if outcome.fits]
    if not fitting:
        return None
    # Times so near are a tie, and then the simpler plan is better.
    most = min(outcome.seconds for outcome in fitting) * (1 + _TIE)

    def simplicity(outcome: Outcome) -> tuple[float, ...]:
        recipe = outcome.recipe
        return len(recipe.host_state), len(outcome.shape), recipe.microbatches, outcome.peak_bytes

    return min((outcome for outcome in fitting if outcome.seconds <= most), key=simplicity)


def first_fitting(keep_indices: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Bisects what may be kept, the most first, for the position of the first that fits; `None` where the last does
    not."""
    if not fits(keep_indices[-1]):
        return None
    low, high = -1, len(keep_indices) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(keep_indices[middle]):
            high = middle
        else:
            low = middle
    return high


def _is_same(first: Outcome, second: Outcome) -> bool:
    pairs = (first.seconds, second.seconds), (first.peak_bytes, second.peak_bytes)
    # Sums in another order differ by less.
    return first.recipe == second.recipe and all(math.isclose(*pair, rel_tol=1e-6) for pair in pairs)


def _beaten_text(seconds: float) -> str:
    return f"no faster than the plan: {seconds_text(seconds)} without a limit of memory"
