"""The search over meshes and recipes, around autoplan's over layouts.

On each mesh the step is first planned as it is written and without a limit of memory: recomputing and microbatches only
add work, so that nothing on this mesh is faster. Meshes are searched in that order, and one that cannot be better than
the best plan so far is left. On a mesh, recipes are columns: so many microbatches, and from the top down less that the
backward pass keeps. The first that fits is bisected for in each, since less kept is less memory. Last come the meshes
next to the best. What is planned depends on earlier results, and on the clock only once the time is up.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import attrs

from shardrules.planning.solve.deadline import Deadline
from shardrules.training.cluster import Shape
from shardrules.training.search.problem import Outcome, TrainingProblem, plan_once
from shardrules.training.step import Recipe

_MOST_MESHES = 16
"""How many meshes are planned without a limit: about five to begin with, and their neighbours. Halved, meshes of three
axes are hardly reached; doubled, searches that change nothing take as long as all others."""

_MOST_PLANS = 90
"""How many times a step is planned: 2 to 4 seconds each for scanned layers on one core. Doubled, plans near the least
memory are a little better, and searches on slow machines end by their time limit."""

_TIE = 1e-3
"""By what part a plan has to be faster than a simpler one to be better: models of costs tell no less apart."""


@final
@attrs.define(eq=False)
class TrainingSearch:
    """The state of a search."""

    problem: TrainingProblem
    keeps: Sequence[Any]
    """What the backward pass may keep: first everything, then less and less."""
    microbatches: int | None
    """How many microbatches to plan for, if the user says so."""
    deadline: Deadline
    progress: Callable[[str], None]
    free: dict[Shape, Outcome] = attrs.field(factory=dict)
    """For each mesh the step as it is written, without a limit of memory."""
    outcomes: dict[tuple[Shape, Recipe], Outcome] = attrs.field(factory=dict)
    """Within the limit."""
    beaten: dict[tuple[Shape, Recipe], str] = attrs.field(factory=dict)
    """Why recipes were not planned within the limit."""
    longest_seconds: float = 0.0
    is_late: bool = False
    """Whether the time was up before the search was done."""

    def run(self) -> None:
        """Searches."""
        for shape in self.problem.cluster.shapes():
            self.plan_free(shape, self.first_recipe)
        self.fit_all(tuple(self.free))
        while self.center is not None and not self.is_over:
            center = self.center
            near = [shape for shape in self.problem.cluster.neighbours(center) if shape not in self.free]
            near = near[: max(0, _MOST_MESHES - len(self.free))]
            for shape in near:
                self.plan_free(shape, self.first_recipe)
            self.fit_all(near)
            if self.center == center:
                break

    @property
    def first_recipe(self) -> Recipe:
        """The recipe with most memory and least work."""
        return Recipe(keep=self.keeps[0]) if self.microbatches is None else self.recipe(self.microbatches, 1)

    @property
    def best(self) -> Outcome | None:
        """The fastest plan that fits: of several, the one with the fewest axes, microbatches and arrays recomputed."""
        fitting = [outcome for outcome in self.outcomes.values() if outcome.fits]
        if not fitting:
            return None
        most = min(outcome.seconds for outcome in fitting) * (1 + _TIE)
        alike = [outcome for outcome in fitting if outcome.seconds <= most]
        return min(alike, key=lambda outcome: (len(outcome.shape), outcome.recipe.microbatches, outcome.peak_bytes))

    @property
    def smallest(self) -> Outcome | None:
        """The plan with the least memory."""
        planned = [outcome for outcome in self.outcomes.values() if outcome.result is not None]
        return min(planned, key=lambda outcome: outcome.peak_bytes, default=None)

    @property
    def center(self) -> Shape | None:
        """The mesh whose neighbours may be better."""
        outcome = self.best or self.smallest
        return None if outcome is None else outcome.shape

    @property
    def is_over(self) -> bool:
        """Whether another plan would take longer than there is time for, or more plans were made than are worth it."""
        if self.deadline.seconds_left <= self.longest_seconds:
            self.is_late = True
        return self.is_late or len(self.outcomes) + len(self.free) >= _MOST_PLANS

    def recipe(self, microbatches: int, groups: int, keep_index: int = 0) -> Recipe:
        """Returns a recipe by the index of what it keeps."""
        return Recipe(microbatches, groups, self.keeps[keep_index])

    def plan_free(self, shape: Shape, recipe: Recipe) -> None:
        """Plans a mesh without a limit of memory."""
        if shape in self.free or (self.free and self.is_over):
            return
        outcome = self.plan(shape, recipe, float("inf"))
        self.free[shape] = outcome
        if outcome.fits or outcome.refusal:  # then a limit changes nothing
            self.outcomes[shape, recipe] = outcome

    def plan(self, shape: Shape, recipe: Recipe, limit_bytes: float | None = None) -> Outcome:
        """Plans once, and says so."""
        outcome = plan_once(self.problem, shape, recipe, limit_bytes, self.deadline)
        self.longest_seconds = max(self.longest_seconds, outcome.planning_seconds)
        count = len(self.outcomes) + len(self.free) + 1
        best = self.best
        fastest = "" if best is None else f", best so far {best.seconds:.4g} s on {best.mesh}"
        self.progress(f"{count} plans{fastest}; {outcome.mesh}, {recipe}")
        return outcome

    def fit_all(self, shapes: Sequence[Shape]) -> None:
        """Looks for the best plan that fits on each mesh, the fastest without a limit first."""
        planned = [shape for shape in shapes if shape in self.free and self.free[shape].result is not None]
        for shape in sorted(planned, key=lambda shape: self.free[shape].seconds):
            self.fit(shape)

    def fit(self, shape: Shape) -> None:
        """Looks for the best plan that fits on a mesh."""
        free = self.free[shape]
        if (shape, self.first_recipe) in self.outcomes:
            return
        for microbatches in self.counts(free.batch_splits):
            if self.loses(shape, free.recipe, free.seconds):
                return
            keeps_all = False
            for groups in dict.fromkeys((free.batch_splits, 1) if microbatches > 1 else (1,)):
                keeps_all |= self.fit_column(shape, microbatches, groups)
            # With everything kept, more microbatches only cost time.
            if keeps_all or self.is_over:
                return

    def counts(self, splits: int) -> Iterator[int]:
        """Yields numbers of microbatches: 1, 2, 4, ..., as long as all devices have examples of each."""
        if self.microbatches is not None:
            yield self.microbatches
            return
        count, examples = 1, self.problem.loss.batch_size
        while count * splits <= examples:
            if examples % (count * splits) == 0:
                yield count
            count *= 2

    def fit_column(self, shape: Shape, microbatches: int, groups: int) -> bool:
        """Bisects for the first recipe of a column that fits; returns whether it keeps everything."""
        last = len(self.keeps) - 1
        if not self.fits(shape, microbatches, groups, last):
            return False
        low, high = -1, last
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(shape, microbatches, groups, middle):
                high = middle
            else:
                low = middle
        # What just fits may pay for it with slow layouts: recomputing a little more may be faster.
        for keep_index in range(high + 1, last):
            before = self.outcomes.get((shape, self.recipe(microbatches, groups, keep_index - 1)))
            self.fits(shape, microbatches, groups, keep_index)
            after = self.outcomes.get((shape, self.recipe(microbatches, groups, keep_index)))
            if before is None or after is None or after.seconds >= before.seconds:
                break
        return high == 0

    def fits(self, shape: Shape, microbatches: int, groups: int, keep_index: int) -> bool:
        """Whether a recipe fits on a mesh."""
        recipe = self.recipe(microbatches, groups, keep_index)
        if (shape, recipe) not in self.outcomes:
            if self.is_over:
                return False
            self.outcomes[shape, recipe] = self.plan(shape, recipe)
        return self.outcomes[shape, recipe].fits

    def loses(self, shape: Shape, recipe: Recipe, bound: float) -> bool:
        """Whether a mesh that takes so long at least cannot be better than the best plan."""
        best = self.best
        if best is None or bound < best.seconds * (1 - _TIE):
            return False
        self.beaten[shape, recipe] = f"takes {bound:.4g} s or more, even with memory for everything"
        return True
