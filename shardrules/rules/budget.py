"""The arrays to split, and how far, so that a whole tree fits a budget at the least cost.

Every leaf has options: the more bytes a device holds, the fewer it must receive to see the array whole. One option per
leaf, the bytes within the budget, the sum of costs least: a multiple-choice knapsack. A model has many leaves that
share few sets of options, so leaves come in groups, and the answer says how many of a group take each option.

All leaves start at their fewest bytes, and the rest of the budget is spent on upgrades. If fractions of an upgrade were
allowed, the best order would be simple: most cost saved per byte first, along the convex hull of each group's options.
That order gives every partial choice a lower bound (with the fraction) and a feasible choice (without it); the two
differ by one upgrade of one leaf. The search decides chunks of leaves, largest leaves first, keeps the partial choices
that no other beats in bytes and cost, and drops those whose lower bound is above the best feasible choice. Proven:

- Until it has looked at `_EFFORT` partial choices it drops none that could win, so the answer is the optimum.
  Trees of 8 leaves with 4 options each always end here.
- After that it stops when the best choice is within 1/400 of the lowest bound, which happens at the latest when no
  remaining leaf has an upgrade worth more than 1/400 of the cost.
- Until then, each of the n steps cuts the costs c into classes of equal floor(1000 n log(1 + c)) and keeps the fewest
  bytes of each class. That replaces 1 + c by at most (1 + c) e^(1/1000n), hence c by at most c e^(2/1000n), and 0 by 0:
  over n steps a factor of e^(1/500). Together with the stop that is 1.0046, so the cost is within 0.5 % of the optimum,
  and no step keeps more than 1000 n log(1 + c) + 1 partial choices, which is polynomial.

`scipy.optimize.milp` (HiGHS) does not replace it: it finds the least cost as fast, but within tolerances, and may
return a choice that holds a byte too many.
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Self, final

import attrs
import numpy as np

_EFFORT = 1 << 17
"""Partial choices to look at before anything but the optimum is accepted, some 50 ms. Chosen by hand."""

_STEP_EFFORT = 256
"""The least that a step counts, in partial choices: its NumPy calls take as long. Chosen by hand."""

_LIMIT = 1 << 62
"""Above all sums, which are int64 and are added in pairs: larger trees are refused."""


@final
@attrs.frozen
class Option:
    """One way to split a leaf: the bytes that each device holds, and those that it receives to see the array whole."""

    held_bytes: int = attrs.field(validator=attrs.validators.ge(0))
    cost_bytes: int = attrs.field(validator=attrs.validators.ge(0))


@final
@attrs.frozen
class LeafGroup:
    """`count` leaves that have the same options."""

    count: int = attrs.field(validator=attrs.validators.ge(0))
    options: tuple[Option, ...] = attrs.field(converter=tuple, validator=attrs.validators.min_len(1))


def smallest_budget(groups: Sequence[LeafGroup]) -> int:
    """Returns the smallest budget that `choose` can meet: every leaf at its fewest bytes."""
    return sum(group.count * min(option.held_bytes for option in group.options) for group in groups)


def choose(groups: Sequence[LeafGroup], budget_bytes: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns, for each group, how many of its leaves take each option so that all fit the budget at the least cost.

    `None` if the budget is below `smallest_budget`. The cost is within 0.5 % of the least, and is the least when the
    problem is small (see the module). Of equal costs it takes the one with fewer leaves that cost anything, then the
    one where these are in later groups.

    ```python
    from shardrules.rules.budget import LeafGroup, Option, choose

    # 14 bytes hold two leaves whole (4 + 4) and three halves (2 + 2 + 2).
    assert choose([LeafGroup(5, (Option(4, 0), Option(2, 2)))], 14) == ((2, 3),)
    ```
    """
    spare = budget_bytes - smallest_budget(groups)
    if spare < 0:
        return None
    leaves = sum(group.count for group in groups)
    # Among equal costs, a leaf that costs anything weighs more than the positions of all leaves together.
    weights = [leaves * len(groups) + len(groups) - index for index in range(len(groups))]
    for sizes in (
        [group.count * max(option.held_bytes for option in group.options) for group in groups],
        [group.count * max(option.cost_bytes for option in group.options) for group in groups],
        [group.count * weight for group, weight in zip(groups, weights, strict=True)],
    ):
        if sum(sizes) >= _LIMIT:
            raise OverflowError(f"the sizes of {leaves} leaves add up to {sum(sizes)}, the limit is {_LIMIT}")
    fronts = [_pareto_front(group, weight) for group, weight in zip(groups, weights, strict=True)]
    ladder = _Ladder.of(fronts, scale=sum(weights) * leaves + 1)
    # Sums of bytes move in multiples of the greatest common divisor: a budget rounded down to one makes bounds tight.
    unit = math.gcd(*(way.extra_bytes for front in fronts for way in front)) or 1
    # Bytes beyond the largest options of all leaves cannot be spent.
    spare = min(spare, sum(group.count * front[-1].extra_bytes for group, front in zip(groups, fronts, strict=True)))
    spare -= spare % unit

    open_leaves = [group.count for group in groups]
    counts: Counter[tuple[int, int]] = Counter()
    for group_index, way, size in _search(fronts, open_leaves, ladder, spare):
        counts[group_index, way.option] += size
        open_leaves[group_index] -= size
        spare -= size * way.extra_bytes
    # All other leaves are upgraded in the order that the bounds of the search assumed.
    rest = Counter({(index, front[0].option): open_leaves[index] for index, front in enumerate(fronts)})
    for group_index, old, new in ladder.rungs:
        size = min(rest[group_index, old.option], spare // (new.extra_bytes - old.extra_bytes))
        rest[group_index, old.option] -= size
        rest[group_index, new.option] += size
        spare -= size * (new.extra_bytes - old.extra_bytes)
    counts += rest
    return tuple(
        tuple(counts[index, option] for option in range(len(group.options))) for index, group in enumerate(groups)
    )


@final
@attrs.frozen
class _Way:
    """An option that no other beats: its `extra_bytes` over the fewest; `tie` decides among equal costs."""

    option: int
    extra_bytes: int
    cost: int
    tie: int


def _pareto_front(group: LeafGroup, weight: int) -> tuple[_Way, ...]:
    fewest = min(option.held_bytes for option in group.options)
    ways = [
        _Way(index, option.held_bytes - fewest, option.cost_bytes, weight if option.cost_bytes else 0)
        for index, option in enumerate(group.options)
    ]
    front: list[_Way] = []
    # In the order of bytes, an option is worth its bytes only if it costs less than all before it.
    for way in sorted(ways, key=lambda way: (way.extra_bytes, way.cost)):
        if not front or way.cost < front[-1].cost:
            front.append(way)
    return tuple(front)


def _hull(front: tuple[_Way, ...], scale: int) -> list[_Way]:
    """Returns the ways on the lower convex hull of (extra bytes, cost and tie), without those inside an edge."""
    hull: list[_Way] = []
    for way in front:
        while len(hull) > 1 and _saved_per_byte(hull[-1], way, scale) >= _saved_per_byte(hull[-2], hull[-1], scale):
            hull.pop()
        hull.append(way)
    return hull


def _saved_per_byte(old: _Way, new: _Way, scale: int) -> Fraction:
    """Returns what the upgrade saves per byte. `scale` is above every sum of ties, so that costs come first."""
    return Fraction((old.cost - new.cost) * scale + old.tie - new.tie, new.extra_bytes - old.extra_bytes)


def _chunks(count: int, ways: int) -> list[int]:
    """Cuts `count` leaves into few chunks from which every split of the leaves over `ways` ways can be made.

    Give the largest chunk to any way that still needs so many, then the next. If no way needs `size` leaves, at most
    `ways * (size - 1)` are still needed; but the smaller chunks hold at least `(ways - 1) * (size - 1)`, so with this
    chunk there are more than that.
    """
    sizes: list[int] = []
    while ways > 1 and count > 0:
        sizes.append(min(count, 1 + sum(sizes) // (ways - 1)))
        count -= sizes[-1]
    return sorted(sizes, reverse=True)


@final
@attrs.frozen(eq=False)
class _Ladder:
    """Every upgrade of a leaf along the hulls, most saved per byte first."""

    rungs: tuple[tuple[int, _Way, _Way], ...]  # group index, and the ways before and after the upgrade
    base: np.ndarray  # per group: the cost and the tie of a leaf without an upgrade
    group: np.ndarray  # this and the next two: per rung
    extra_bytes: np.ndarray
    saved: np.ndarray  # cost and tie

    @classmethod
    def of(cls, fronts: Sequence[tuple[_Way, ...]], scale: int) -> Self:
        """Sorts the upgrades. Equal ones of earlier groups come first."""
        # Along a hull each upgrade saves less per byte than the one before, so sorting keeps those of a group in order.
        rungs = [(index, old, new) for index, front in enumerate(fronts) for old, new in pairwise(_hull(front, scale))]
        rungs.sort(key=lambda rung: _saved_per_byte(rung[1], rung[2], scale), reverse=True)
        base = [(front[0].cost, front[0].tie) for front in fronts]
        saved = [(old.cost - new.cost, old.tie - new.tie) for _, old, new in rungs]
        return cls(
            rungs=tuple(rungs),
            base=np.array(base, np.int64).reshape(-1, 2),
            group=np.array([index for index, _, _ in rungs], np.int64),
            extra_bytes=np.array([new.extra_bytes - old.extra_bytes for _, old, new in rungs], np.int64),
            saved=np.array(saved, np.int64).reshape(-1, 2),
        )

    def bounds(self, open_leaves: np.ndarray, spare: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the cost and tie of the open leaves once `spare` is spent in order, and what a fraction would save.

        Where that fraction is 0, the feasible choice is the best for these leaves.
        """
        count = open_leaves[self.group]
        bytes_before = np.append(0, np.cumsum(count * self.extra_bytes))
        saved_before = np.vstack([[0, 0], np.cumsum(count[:, None] * self.saved, axis=0)])
        # The rung on which the spare bytes run out; past the last one there is nothing to buy.
        rung = np.searchsorted(bytes_before, spare, side="right") - 1
        step_bytes, saved = np.append(self.extra_bytes, _LIMIT)[rung], np.vstack([self.saved, [0, 0]])[rung]
        size, rest = np.divmod(spare - bytes_before[rung], step_bytes)
        feasible = open_leaves @ self.base - saved_before[rung] - size[:, None] * saved
        # rest * saved / bytes without a product above int64, rounded up by at least the error of the float.
        per_byte, remainder = np.divmod(saved[:, 0], step_bytes)
        rounded = np.ceil(rest * (remainder / step_bytes)).astype(np.int64) + (saved[:, 0] >> 50)
        fraction = rest * per_byte + np.where(remainder > 0, rounded, 0)
        return feasible[:, 0], feasible[:, 1], np.where(rung < len(self.extra_bytes), fraction, 0)


def _search(
    fronts: Sequence[tuple[_Way, ...]], counts: Sequence[int], ladder: _Ladder, spare: int
) -> list[tuple[int, _Way, int]]:
    """Returns what the best choice decides: so many leaves of a group take a way. The ladder does the rest."""
    # Costs go down along a front: the group whose leaves save most comes first.
    largest_first = sorted(range(len(fronts)), key=lambda index: fronts[index][-1].cost - fronts[index][0].cost)
    chunks = [(index, size) for index in largest_first for size in _chunks(counts[index], len(fronts[index]))]
    ways = [np.array([(way.extra_bytes, way.cost, way.tie) for way in front], np.int64) for front in fronts]
    open_leaves = np.array(counts, np.int64)
    # Partial choices are rows of (extra bytes, cost, tie), the sums of what they decide. The first decides nothing.
    rows = np.zeros((1, 3), np.int64)
    best, best_step, best_row = (_LIMIT, _LIMIT), 0, 0
    origins: list[np.ndarray] = []
    effort = 0
    for step in range(len(chunks) + 1):
        if step:
            group_index, size = chunks[step - 1]
            open_leaves[group_index] -= size
            rows = (rows[:, None] + size * ways[group_index]).reshape(-1, 3)
        effort += _STEP_EFFORT + len(rows)
        origin = np.flatnonzero(rows[:, 0] <= spare)
        rows = rows[origin]
        cost, tie, fraction = ladder.bounds(open_leaves, spare - rows[:, 0])
        cost, tie = cost + rows[:, 1], tie + rows[:, 2]
        winner = np.lexsort((tie, cost))[0]
        feasible = int(cost[winner]), int(tie[winner])
        if feasible < best:
            best, best_step, best_row = feasible, step, int(origin[winner])
        # Where no fraction is missing nothing better can follow. Equal costs stay, for they may win the tie.
        live = np.flatnonzero((fraction > 0) & (cost - fraction <= best[0]))
        # Sorted by cost, then tie, then bytes, a choice is beaten unless it has fewer bytes than all before it.
        live = live[np.lexsort((rows[live, 0], rows[live, 2], rows[live, 1]))]
        live = live[rows[live, 0] < np.minimum.accumulate(np.append(_LIMIT, rows[live, 0]))[:-1]]
        if len(live) == 0:
            break
        if effort > _EFFORT:
            lowest = int((cost - fraction)[live].min())
            # 1/400 and, below, 1000 classes to a factor of e: together they are the 0.5 % that the module proves.
            if best[0] - lowest <= lowest // 400:
                break
            classes = np.floor(np.log1p(rows[live, 1]) * (1000 * len(chunks)))
            live = live[np.append(classes[1:] != classes[:-1], True)]  # the last of a class has the fewest bytes
        origins.append(origin[live])
        rows = rows[live]

    # Walk back from the best row: each origin says which row, and which way, it was made from.
    step, row = best_step, best_row
    decided: list[tuple[int, _Way, int]] = []
    while step:
        group_index, size = chunks[step - 1]
        row, way = divmod(row, len(fronts[group_index]))
        decided.append((group_index, fronts[group_index][way], size))
        step -= 1
        row = int(origins[step][row])
    return decided
