"""Finds choices that fit in memory by putting a price on it: a Lagrangian relaxation.

Bounds on memory make a linear program slow to solve; a price for each byte does not, since all that changes is what
layouts and moves cost. The higher the prices, the less memory the cheapest choice takes; and what it costs, prices
included, is a lower bound for every choice that fits. The prices are chosen where that bound is highest, as far as the
choices met so far show (Kelley's cutting planes).
"""

from collections.abc import Mapping, Sequence
from typing import final

import attrs
import numpy as np
from scipy.optimize import linprog

from shardrules.planning.solve.deadline import Deadline
from shardrules.planning.solve.formulation import Formulation, MemoryConstraint
from shardrules.planning.solve.memory import Occupancy, peaks
from shardrules.planning.solve.solver import CLOSE, cheapest

_ROUNDS = 12
"""How many prices are tried, each by a linear program. Searches that come within `CLOSE` end earlier. With fewer, more
is left for the exact search, which is slower; with more, the last rounds gain next to nothing."""

_HIGHEST = 100.0
"""The highest price of all moments together: memory as a whole at so many times what the cheapest choice costs. If
nothing fits at that, it rises by as much again. Lower, more rounds are spent on raising it; higher, the first choices
met are smaller than they need be."""

_TOP = 1e8
"""Times what the cheapest choice costs, no price is higher: with 16 digits, what a choice costs would be lost beside
what its memory costs."""


@final
@attrs.frozen(eq=False)
class Budget:
    """What is known about a budget of memory."""

    choice: tuple[int, ...] | None = None
    """The cheapest choice met that fits; `None` if none did."""
    cost: float = np.inf
    peak_bytes: float = np.inf
    """The peak of `choice`, or of `emptiest` if there is none."""
    bound: float = -np.inf
    """What every choice that fits costs at least."""
    price: float = 0.0
    """What one more byte would save, in seconds."""
    extra: tuple[np.ndarray, ...] = ()
    """For each node and layout how much above `bound` every choice is that takes it."""
    emptiest: tuple[int, ...] = ()
    """The choice met with the least memory, if none fits."""
    is_hopeless: bool = False
    """Whether `bound` proves that nothing fits: no choice costs as much."""

    def after(self, choice: tuple[int, ...], cost: float, peak_bytes: float, limit_bytes: float) -> "Budget":
        """Returns what is known once another choice has been met."""
        if peak_bytes <= limit_bytes and cost < self.cost:
            return attrs.evolve(self, choice=choice, cost=cost, peak_bytes=peak_bytes)
        if self.choice is None and peak_bytes < self.peak_bytes and np.isfinite(cost):
            return attrs.evolve(self, peak_bytes=peak_bytes, emptiest=choice)
        return self


def within_budget(
    occupancy: Occupancy,
    formulation: Formulation,
    limit_bytes: float,
    deadline: Deadline,
    moments: dict[int, None],
) -> Budget:
    """Finds a choice that fits, and what every one that does costs at least.

    `moments` are the operations at which memory is watched; those at which it is full are added.
    """
    problem = occupancy.problem
    # The first layouts split nothing: a choice to return even if the deadline is over already.
    first_layouts = (0,) * len(problem.nodes)
    first_peak = float(occupancy.timeline(first_layouts).max())
    budget = Budget(emptiest=first_layouts).after(first_layouts, problem.cost(first_layouts), first_peak, limit_bytes)
    highest_cost = problem.highest_cost()
    height = _HIGHEST
    met: list[tuple[tuple[int, ...], float]] = []
    constraints = {moment: occupancy.constraint(moment, limit_bytes, certain=True) for moment in moments}
    prices: dict[int, float] = dict.fromkeys(constraints, 0.0)
    for _ in range(_ROUNDS):
        relaxed = cheapest(formulation, [*constraints.values()], [prices[moment] for moment in constraints], deadline)
        if relaxed.choice is None:
            break
        # Every price gives a bound. The best counts, not the last.
        if relaxed.bound > budget.bound:
            budget = attrs.evolve(budget, bound=relaxed.bound, price=sum(prices.values()), extra=relaxed.extra)
        timeline, cost = occupancy.timeline(relaxed.choice), problem.cost(relaxed.choice)
        budget = budget.after(relaxed.choice, cost, float(timeline.max()), limit_bytes)
        if budget.cost <= budget.bound * (1 + CLOSE) or deadline.is_over:
            break
        met.append((relaxed.choice, cost))
        new = peaks(timeline, limit_bytes) if timeline.max() > limit_bytes else []
        new = [moment for moment in new if moment not in constraints]
        constraints |= {moment: occupancy.constraint(moment, limit_bytes, certain=True) for moment in new}
        moments.update(dict.fromkeys(new))
        if not constraints:  # it fits, and memory never mattered
            break
        highest = height * max(met[0][1], 1e-9) / float(timeline.max())
        if len(met) == 1:
            # From one choice no slope is known. The highest prices give the smallest choice, the other end.
            prices = dict.fromkeys(constraints, highest / len(constraints))
            continue
        prices, value = _best_prices(occupancy, constraints, met, highest)
        if value <= budget.bound * (1 + CLOSE) and not new:  # no prices give a bound that is higher by much
            break
        if budget.bound <= highest_cost and sum(prices.values()) >= highest * (1 - CLOSE):
            height = min(height * _HIGHEST, _TOP)
    return attrs.evolve(budget, is_hopeless=budget.bound > highest_cost)


def _best_prices(
    occupancy: Occupancy,
    constraints: Mapping[int, MemoryConstraint],
    met: Sequence[tuple[tuple[int, ...], float]],
    highest: float,
) -> tuple[dict[int, float], float]:
    """Returns the prices at which the cheapest of the choices met costs most, and what it costs then."""
    # Variables: that cost, in units of the first choice's, and each price as a part of the highest. HiGHS takes what
    # is very small for 0, so all of them are about 1.
    unit = max(met[0][1], 1e-12)
    excess = [
        [
            constraint.used_bytes(occupancy.problem, choice) - constraint.limit_bytes
            for constraint in constraints.values()
        ]
        for choice, _ in met
    ]
    below_each = np.hstack([np.ones((len(met), 1)), -highest / unit * np.array(excess)])
    result = linprog(
        [-1.0, *[0.0] * len(constraints)],
        A_ub=np.vstack([below_each, [0.0, *[1.0] * len(constraints)]]),
        b_ub=[*(cost / unit for _, cost in met), 1.0],
        bounds=[(None, None), *[(0.0, 1.0)] * len(constraints)],
        method="highs-ds",
    )
    value, *parts = result.x
    prices = {moment: float(part) * highest for moment, part in zip(constraints, parts, strict=True)}
    return prices, float(value) * unit
