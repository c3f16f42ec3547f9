"""The choices that a search has tried: the best that fits, the smallest, and those that are worth compiling."""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np

from shardrules.programs.autoplan.solve.memory import Occupancy
from shardrules.programs.autoplan.solve.solver import LIMIT_TOLERANCE

BETTER = 1e-6
"""The part by which another choice has to be cheaper, or smaller, to replace the first: less is noise, and plans would
differ between machines."""


@final
@attrs.frozen
class Trial:
    """A choice that a search has met."""

    choice: tuple[int, ...]
    """For each node the index of its layout."""
    cost: float
    """The modelled seconds of a call."""
    peak_bytes: float
    """The most memory that it takes by the model."""
    origin: str = "search"
    """The pattern that it is the best of, such as `"data parallel"`."""
    timeline: np.ndarray = attrs.field(factory=lambda: np.zeros(0), eq=False, repr=False)
    """The bytes in memory at each operation."""


@final
@attrs.define(eq=False)
class Trials:
    """Collects the choices of a search."""

    occupancy: Occupancy
    limit_bytes: float
    best: Trial | None = None
    """The cheapest that fits."""
    smallest: Trial | None = None
    _trials: dict[tuple[int, ...], Trial] = attrs.field(factory=dict)

    def add(self, choice: Sequence[int], origin: str = "search") -> Trial:
        """Adds a choice, unless it is impossible."""
        key = tuple(choice)
        if key in self._trials:
            return self._trials[key]
        problem = self.occupancy.problem
        cost = problem.cost(key) if len(key) == len(problem.nodes) else np.inf
        if not np.isfinite(cost):
            return Trial(key, cost, np.inf, origin)
        timeline = self.occupancy.timeline(key)
        return self._keep(Trial(key, cost, float(timeline.max()), origin, timeline))

    def _keep(self, trial: Trial) -> Trial:
        self._trials[trial.choice] = trial
        if self.fits(trial) and (self.best is None or trial.cost < self.best.cost * (1 - BETTER)):
            self.best = trial
        if self.smallest is None or trial.peak_bytes < self.smallest.peak_bytes * (1 - BETTER):
            self.smallest = trial
        return trial

    def within(self, limit_bytes: float) -> "Trials":
        other = Trials(self.occupancy, limit_bytes)
        for trial in self._trials.values():
            other._keep(trial)
        return other

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self._trials.values())

    def fits(self, trial: Trial) -> bool:
        return trial.peak_bytes <= self.limit_bytes * (1 + LIMIT_TOLERANCE)

    @property
    def answer(self) -> Trial | None:
        """The cheapest that fits, or the smallest; `None` if every choice was impossible."""
        return self.smallest if self.best is None else self.best

    @property
    def saving(self) -> float:
        """The seconds that each byte above the limit saves, with the trial that saves most for its bytes."""
        if self.best is None:
            return 0.0
        cheaper = [trial for trial in self._trials.values() if trial.cost < self.best.cost and not self.fits(trial)]
        slopes = [(self.best.cost - trial.cost) / (trial.peak_bytes - self.limit_bytes) for trial in cheaper]
        return max(slopes, default=0.0)

    def front(self) -> tuple[Trial, ...]:
        """The trials that no other is cheaper and smaller than, the cheapest first."""
        front: list[Trial] = []
        for trial in sorted(self._trials.values(), key=lambda trial: (trial.cost, trial.peak_bytes, trial.choice)):
            if not front or trial.peak_bytes < front[-1].peak_bytes * (1 - BETTER):
                front.append(trial)
        return tuple(front)
