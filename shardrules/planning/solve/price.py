"""Finds choices that fit in memory by putting a price on it.

Bounds on memory make a linear program slow to solve; a price for each byte does not, since all that changes is what
labels and moves cost. What is cheapest at some prices takes less memory the higher these are, and bounds what every
choice that fits costs. The prices are those at which that bound is highest, as far as it is known from the choices that
were met.
"""

import time
from collections.abc import Mapping, Sequence
from typing import final

import attrs
import numpy as np
from scipy.optimize import linprog

from shardrules.planning.solve.formulation import Formulation, Row
from shardrules.planning.solve.memory import Occupancy, peaks
from shardrules.planning.solve.solver import CLOSE, cheapest

_ROUNDS = 12
_HIGHEST = 100.0
"""The highest price, of all moments together: memory as a whole at as many times what the cheapest choice costs. If
nothing fits at that, it rises by as much again."""

_TOP = 1e8
"""No price is higher, since digits are few."""


@final
@attrs.frozen(eq=False)
class Budget:
    """What is known of a budget.

    **Arguments:**

    - `choice`: the cheapest that was met and fits; `None` where none did.
    - `cost`: what that costs.
    - `peak_bytes`: the most that lies in memory under it; without, under `emptiest`.
    - `emptiest`: the choice that was met which takes the least memory, where none fits.
    - `bound`: what every choice that fits costs at least.
    - `price`: what one more byte would save, in seconds.
    - `extra`: for each node and label how much above `bound` every choice is that takes it.
    - `is_hopeless`: whether `bound` says that nothing fits: no choice costs as much.
    """

    choice: tuple[int, ...] | None = None
    cost: float = np.inf
    peak_bytes: float = np.inf
    bound: float = -np.inf
    price: float = 0.0
    extra: tuple[np.ndarray, ...] = ()
    emptiest: tuple[int, ...] = ()
    is_hopeless: bool = False

    def after(self, choice: tuple[int, ...], cost: float, peak: float, limit: float) -> "Budget":
        """Returns what is known when another choice has been met.

        **Arguments:**

        - `choice`, `cost`, `peak`: it, what it costs, and the most that lies in memory under it.
        - `limit`: the budget, in bytes.

        **Returns:**

        A `Budget`.
        """
        if peak <= limit and cost < self.cost:
            return attrs.evolve(self, choice=choice, cost=cost, peak_bytes=peak)
        if self.choice is None and peak < self.peak_bytes and np.isfinite(cost):
            return attrs.evolve(self, peak_bytes=peak, emptiest=choice)
        return self


def within_budget(
    occupancy: Occupancy, formulation: Formulation, limit: float, deadline: float, moments: dict[int, None]
) -> Budget:
    """Finds a choice that fits, and what every one that does costs at least.

    **Arguments:**

    - `occupancy`: who lies in memory when.
    - `formulation`: what is to be chosen.
    - `limit`: the most that may lie in memory, in bytes.
    - `deadline`: when to stop, as `time.monotonic` has it.
    - `moments`: operations at which memory is watched; those at which it is full are added.

    **Returns:**

    A `Budget`.
    """
    problem = occupancy.problem
    whole = (0,) * len(problem.nodes)
    known = Budget(emptiest=whole).after(whole, problem.cost(whole), float(occupancy.timeline(whole).max()), limit)
    dearest = problem.highest_cost()
    height = _HIGHEST
    met: list[tuple[tuple[int, ...], float]] = []
    rows = {at: occupancy.row(at, limit, sure=True) for at in moments}
    prices: dict[int, float] = dict.fromkeys(rows, 0.0)
    for _ in range(_ROUNDS):
        best = cheapest(formulation, [*rows.values()], [prices[at] for at in rows], deadline)
        if best.choice is None:
            break
        if best.bound > known.bound:
            known = attrs.evolve(known, bound=best.bound, price=sum(prices.values()), extra=best.extra)
        timeline, cost = occupancy.timeline(best.choice), problem.cost(best.choice)
        known = known.after(best.choice, cost, float(timeline.max()), limit)
        if known.cost <= known.bound * (1 + CLOSE) or time.monotonic() > deadline:
            break
        met.append((best.choice, cost))
        new = [at for at in peaks(timeline, limit) if at not in rows] if timeline.max() > limit else []
        rows |= {at: occupancy.row(at, limit, sure=True) for at in new}
        moments.update(dict.fromkeys(new))
        if not rows:
            break
        highest = height * max(met[0][1], 1e-9) / float(timeline.max())
        if len(met) == 1:
            prices = dict.fromkeys(rows, highest / len(rows))
            continue
        prices, value = _prices(occupancy, rows, met, highest)
        if value <= known.bound * (1 + CLOSE) and not new:
            break
        if known.bound <= dearest and sum(prices.values()) >= highest * (1 - CLOSE):
            height = min(height * _HIGHEST, _TOP)
    return attrs.evolve(known, is_hopeless=known.bound > dearest)


def _prices(
    occupancy: Occupancy, rows: Mapping[int, Row], met: Sequence[tuple[tuple[int, ...], float]], highest: float
) -> tuple[dict[int, float], float]:
    """The prices at which the cheapest of the choices that were met is as dear as can be, and how dear that is."""
    unit = max(met[0][1], 1e-12)  # solvers know no number that is very small
    over = [[row.taken(occupancy.problem, choice) - row.limit for row in rows.values()] for choice, _ in met]
    found = linprog(
        [-1.0, *[0.0] * len(rows)],
        A_ub=np.vstack(
            [np.hstack([np.ones((len(met), 1)), -highest / unit * np.array(over)]), [0.0, *[1.0] * len(rows)]]
        ),
        b_ub=[*(cost / unit for _, cost in met), 1.0],
        bounds=[(None, None), *[(0.0, 1.0)] * len(rows)],
        method="highs-ds",
    )
    value, *parts = found.x
    return {at: float(part) * highest for at, part in zip(rows, parts, strict=True)}, float(value) * unit
