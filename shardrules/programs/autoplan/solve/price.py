"""Finds choices that fit in memory by putting a price on it: a Lagrangian relaxation.

A price for each byte only changes what layouts and moves cost. The higher the prices, the less memory the cheapest
choice takes; and what it costs, prices included, is a lower bound for every choice that fits. The prices are chosen
where that bound is highest, as far as the choices met so far show (Kelley's cutting planes).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import final

import attrs
import numpy as np
from scipy.optimize import linprog

from shardrules.core.deadline import Deadline
from shardrules.programs.autoplan.solve.formulation import MemoryConstraint
from shardrules.programs.autoplan.solve.memory import peaks
from shardrules.programs.autoplan.solve.messages import Messages, MessageState
from shardrules.programs.autoplan.solve.solver import CLOSE
from shardrules.programs.autoplan.solve.trials import Trial, Trials

_ROUNDS = 16
"""The prices that are tried. Searches that come within `CLOSE` end earlier."""

_FREE_SWEEPS, _PRICED_SWEEPS = 100, 30
"""The sweeps of messages without prices, and in each round: most programs settle in 30 and 15. With fewer, bounds are
lower; searches that settle end earlier."""

CLOSER = 1e-5
"""The part by which a choice may cost more than the bound at some prices to end their round: sweeps are cheap, and most
programs come that close. With `CLOSE`, plans would be worse by up to that."""

_SWEEPS = 5
"""The sweeps after which a choice is read from the messages."""

_RAISES, _RAISED_SWEEPS = 10, 10
"""The number of times that prices are raised or lowered by the excess over the limit, and the sweeps of messages each
time. Chosen by hand."""

_FIRST_RAISE, _STEEPER, _LOWER = 0.25, 2.0, 0.5
"""The rise of the price at first where memory is fullest, if 1 makes memory as a whole cost as much as the
cheapest choice; by what it rises faster each time that nothing fits; and to what part prices fall if it does. With
larger steps, choices are smaller than they need be; with smaller ones, some limits are not reached."""

APART = 0.004
"""Gaps that are smaller count as closed where looking further takes seconds: models of costs are further off. With
0.01, some plans cost up to 0.9 % more, for as much processor time."""

_HIGHEST, _HIGHER = 1.0, 16.0
"""The highest price of all moments together: memory as a whole at so many times what the cheapest choice costs. If
nothing fits at that, it rises by `_HIGHER`. Lower, more rounds are spent on raising it; higher, the choices met are
smaller than they need be, and those between are not met at all."""

_TOP = 1e6
"""Times what the cheapest choice costs, no price is higher: with 16 digits, what a choice costs would be lost beside
what its memory costs."""


@final
@attrs.frozen(eq=False)
class Budget:
    """Bounds of a budget of memory."""

    bound: float = -np.inf
    """The least cost of every choice that fits."""
    price: float = 0.0
    """The seconds that one more byte would save."""
    free_bound: float = -np.inf
    """The least cost of every choice, whether it fits or not."""
    extra: tuple[np.ndarray, ...] = ()
    """For each node and layout how much above `bound` every choice is that takes it."""
    is_hopeless: bool = False
    """`bound` proves that nothing fits: no choice costs as much."""


def within_budget(messages: Messages, trials: Trials, deadline: Deadline, moments: dict[int, None]) -> Budget:
    """Finds choices that fit, which are added to `trials`, and what every one that does costs at least.

    `moments` are the operations at which memory is watched; those at which it is full are added.
    """
    return _Pricing(messages, trials, deadline, moments).run()


@final
@attrs.define(eq=False)
class _Pricing:
    """The state of the rounds."""

    messages: Messages
    trials: Trials
    deadline: Deadline
    moments: dict[int, None]
    budget: Budget = attrs.field(factory=Budget)
    constraints: dict[int, MemoryConstraint] = attrs.field(factory=dict)
    met: list[Trial] = attrs.field(factory=list)
    latest: Trial | None = None
    """The last of them that was met, for the first time or again."""
    free_state: MessageState | None = None
    """The state of the messages without prices."""
    total: float = 0.0
    """The prices in force, added up."""
    is_certain: bool = True
    """Memory counts only arrays that are always there, so that bounds hold, instead of all that may be there."""

    @functools.cached_property
    def highest_cost(self) -> float:
        """A cost that no choice exceeds: a bound above it proves that nothing fits."""
        return self.messages.problem.highest_cost()

    def run(self) -> Budget:
        self._run_rounds()
        self.budget = attrs.evolve(self.budget, is_hopeless=self.budget.bound > self.highest_cost)
        # Bounds count only the copies that are there in any case. Where more are, prices that lead to choices that fit
        # are higher: a second time, all copies that may be there have a price, and nothing is bounded.
        if not self._is_done() and self.constraints and not self._is_close(APART):
            self.is_certain = False
            self.constraints = {}
            for moment in self.moments:
                self._watch(moment)
            self._raise_prices()
        return self.budget

    def _run_rounds(self) -> None:
        prices: dict[int, float] = dict.fromkeys(self.constraints, 0.0)
        height, stale_rounds = _HIGHEST, 0
        for round_index in range(_ROUNDS):
            count, bound = len(self.met), self.budget.bound
            self._solve(prices, _PRICED_SWEEPS if round_index else _FREE_SWEEPS)
            self.free_state = self.free_state or self.messages.state()
            has_new = self._watch_peaks()
            if self._is_done() or not self.constraints or not self.met:  # it fits, or memory never mattered
                break
            is_new = has_new or len(self.met) > count or self.budget.bound > bound * (1 + CLOSE)
            stale_rounds = 0 if is_new else stale_rounds + 1
            # Prices rise from round to round: after one without news a small choice may still come.
            if stale_rounds == 3:
                break
            cheapest = min(trial.cost for trial in self.met)
            highest = height * max(cheapest, 1e-9) / max(trial.peak_bytes for trial in self.met)
            if round_index == 0 and len(self.met) == 1:
                # From one choice no slope is known. High prices give a small choice, the other end.
                prices = dict.fromkeys(self.constraints, highest / len(self.constraints))
                continue
            prices, value = self._best_prices(highest)
            is_highest = sum(prices.values()) >= highest * (1 - CLOSE)
            # No prices give a bound that is higher by much.
            if value <= self.budget.bound * (1 + CLOSE) and not has_new and not is_highest:
                break
            if is_highest:
                height = min(height * _HIGHER ** (1 + stale_rounds), _TOP)

    def _raise_prices(self) -> None:
        """Raises the prices of what exceeds the limit until a choice fits, then lowers them until none does, and so on.

        Mixtures of choices may fit where each of them exceeds the limit at another operation: prices that bound costs
        best lead to none that fits, then, and only higher ones do.
        """
        cheapest = min(trial.cost for trial in self.met)
        limit_bytes = self.trials.limit_bytes
        unit = cheapest / max(1.0, limit_bytes)
        prices, step = dict.fromkeys(self.constraints, 0.0), _FIRST_RAISE
        latest = min(self.met, key=lambda trial: trial.peak_bytes)
        for _ in range(_RAISES):
            if self.trials.fits(latest):
                prices = {moment: _LOWER * prices.get(moment, 0.0) for moment in self.constraints}
                step = _FIRST_RAISE
            else:
                excess = {moment: float(latest.timeline[moment]) - limit_bytes for moment in self.constraints}
                for moment, nbytes in excess.items():
                    increase = step * max(0.0, nbytes) / (latest.peak_bytes - limit_bytes)
                    prices[moment] = min(prices.get(moment, 0.0) + increase * unit, _TOP * unit)
                step *= _STEEPER
            self._solve(prices, _RAISED_SWEEPS)
            if self._is_done():
                break
            latest = self.latest or latest
            self._watch_peaks()

    def _is_done(self) -> bool:
        return self._is_close(CLOSE) or self.budget.bound > self.highest_cost or self.deadline.is_over

    def _is_close(self, part: float) -> bool:
        best = self.trials.best
        return best is not None and best.cost <= self.budget.bound * (1 + part)

    def _watch(self, moment: int) -> None:
        occupancy = self.trials.occupancy
        self.constraints[moment] = occupancy.constraint(moment, self.trials.limit_bytes, self.is_certain)
        self.moments[moment] = None

    def _watch_peaks(self) -> bool:
        """Watches the operations at which the last choices exceed the limit; returns whether there is a new one."""
        count = len(self.constraints)
        for trial in self.met[-2:]:
            if self.trials.fits(trial):
                continue
            for moment in peaks(trial.timeline, self.trials.limit_bytes):
                if moment not in self.constraints:
                    self._watch(moment)
        return len(self.constraints) > count

    def _solve(self, prices: Mapping[int, float], sweeps: int) -> None:
        """Passes messages at some prices, until a choice is met that costs hardly more than the bound."""
        total = sum(prices.values())
        # Passes only ever raise bounds, and those at high prices end far from where those at low ones would.
        # Where prices have fallen by half, choices read from messages at high prices are bad ones: it starts again.
        if self.free_state is not None and total < 0.5 * self.total:
            self.messages.restore(self.free_state)
        self.total = total
        paid = self.messages.charge(list(self.constraints.values()), [prices[moment] for moment in self.constraints])
        before = bound = -np.inf
        for _ in range(0, sweeps, _SWEEPS):
            bound = self.messages.settle(_SWEEPS, self.deadline) - paid
            # Every price gives a bound. The best counts, not the last.
            if self.is_certain and bound > self.budget.bound:
                free_bound = self.budget.free_bound if total else bound
                self.budget = Budget(bound, total, free_bound, self.messages.extra())
            if self._meet(self.messages.decoded(), prices, bound) or self.deadline.is_over:
                return
            if bound - before < 1e-5 * abs(bound):  # the part that it has to rise in these sweeps, chosen by hand
                break
            before = bound
        self._meet(self.messages.narrowed(8, self.deadline), prices, bound)

    def _meet(self, choice: tuple[int, ...], prices: Mapping[int, float], bound: float) -> bool:
        """Adds a choice; returns whether it costs hardly more than the bound, prices included."""
        trial = self.trials.add(choice)
        if np.isfinite(trial.cost):
            self.latest = trial
            if trial not in self.met:
                self.met.append(trial)
        return trial.cost + self._charges(prices, choice) <= bound + CLOSER * abs(bound)

    def _charges(self, prices: Mapping[int, float], choice: Sequence[int]) -> float:
        """The price that a choice pays for memory beyond the most that one that fits pays."""
        problem = self.messages.problem
        return sum(
            price * (self.constraints[moment].used_bytes(problem, choice) - self.constraints[moment].limit_bytes)
            for moment, price in prices.items()
            if price
        )

    def _best_prices(self, highest: float) -> tuple[dict[int, float], float]:
        """Returns the prices at which the cheapest of the choices met costs most, and what it costs then."""
        # Variables: that cost, in units of the first choice's, and each price as a part of the highest. HiGHS takes
        # what is very small for 0, so all of them are about 1.
        unit = max(self.met[0].cost, 1e-12)
        constraints = self.constraints
        # What there really is, with all copies, which the constraints do not count: prices rise until that fits.
        excess = [
            [float(trial.timeline[moment]) - self.trials.limit_bytes for moment in constraints] for trial in self.met
        ]
        below_each = np.hstack([np.ones((len(self.met), 1)), -highest / unit * np.array(excess)])
        result = linprog(
            [-1.0, *[0.0] * len(constraints)],
            A_ub=np.vstack([below_each, [0.0, *[1.0] * len(constraints)]]),
            b_ub=[*(trial.cost / unit for trial in self.met), 1.0],
            bounds=[(None, None), *[(0.0, 1.0)] * len(constraints)],
            method="highs-ds",
        )
        value, *parts = result.x
        prices = {moment: float(part) * highest for moment, part in zip(constraints, parts, strict=True)}
        return prices, float(value) * unit
