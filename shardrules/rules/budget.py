"""Which arrays to split, and how far, so that a whole tree fits a budget at the least cost.

Every leaf has options: the more bytes a device holds, the fewer it must receive to see the array whole. One option per
leaf, the bytes within the budget, the sum of costs least: a multiple-choice knapsack. A model has many leaves and few
kinds of them, so leaves come in groups, and the answer says how many of a group take each option.

All leaves start at their fewest bytes, and what the budget leaves is spent on upgrades. If a fraction of an upgrade
could be had, the best order is plain: most cost saved per byte first, along the convex hull of each group's options.
That order gives every partial choice a lower bound (with the fraction) and a real choice (without it); the two differ
by one upgrade of one leaf. The search decides chunks of leaves, largest leaves first, keeps the partial choices that
no other beats in bytes and cost, and drops those whose lower bound is above the best real choice. Proven:

- Until it has looked at `_EFFORT` partial choices it drops none that could win, so the answer is the optimum.
  Trees of 8 leaves with 4 options each always end here.
- From then on it stops when the best choice is within 1/400 of the lowest bound, which must come once no leaf that is
  left has an upgrade worth more than 1/400 of the cost.
- Until that comes, each of the n steps cuts the costs c into classes of equal floor(1000 n log(1 + c)) and keeps the
  fewest bytes of each class. That replaces 1 + c by at most (1 + c) e^(1/1000n), hence c by at most c e^(2/1000n), and
  0 by 0: over n steps a factor of e^(1/500). With the stop it makes 1.0046, so the cost is within 0.5 % of the optimum,
  and no step keeps more than 1000 n log(1 + c) + 1 partial choices, which is polynomial.
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Self, final

import attrs
import numpy as np

_EFFORT = 1 << 17  # partial choices to look at while only the optimum will do: some 50 ms
_STEP_EFFORT = 256  # what a step costs, in partial choices, however few it looks at
_LIMIT = 1 << 62  # sums are int64


@final
@attrs.frozen
class Option:
    """One way to hold a leaf: the bytes on each device, and the bytes to receive to see it whole.

    **Arguments:**

    - `held_bytes`: what each device holds.
    - `cost_bytes`: what each device receives when the array is gathered; 0 when it is not split.

    ```python
    whole, half = Option(1024, 0), Option(512, 512)
    ```
    """

    held_bytes: int = attrs.field(validator=attrs.validators.ge(0))
    cost_bytes: int = attrs.field(validator=attrs.validators.ge(0))


@final
@attrs.frozen
class Group:
    """`count` leaves that have the same options.

    **Arguments:**

    - `count`: how many leaves, 0 or more.
    - `options`: what each of them may take, in any order; at least one.

    ```python
    layers = Group(126, (Option(1024, 0), Option(512, 512)))
    ```
    """

    count: int = attrs.field(validator=attrs.validators.ge(0))
    options: tuple[Option, ...] = attrs.field(converter=tuple, validator=attrs.validators.min_len(1))


def smallest_budget(groups: Sequence[Group]) -> int:
    """Returns the smallest budget that can be met: every leaf at its fewest bytes.

    **Arguments:**

    - `groups`: the leaves.

    **Returns:**

    Bytes per device, exact: `choose` answers for this budget and for none below it.

    ```python
    assert smallest_budget([Group(3, (Option(8, 0), Option(2, 6)))]) == 6
    ```
    """
    return sum(group.count * min(option.held_bytes for option in group.options) for group in groups)


def choose(groups: Sequence[Group], budget_bytes: int) -> tuple[tuple[int, ...], ...] | None:
    """Gives each leaf one option, so that all of them fit the budget together at the least cost.

    The cost is within 0.5 % of the least, and is the least when the problem is small (see the module). Of equal costs
    it takes the one with fewer leaves that cost anything, then the one where these stand in later groups.

    **Arguments:**

    - `groups`: the leaves.
    - `budget_bytes`: what all leaves together may hold on a device.

    **Returns:**

    For each group, how many of its leaves take each option; `None` if the budget is below `smallest_budget`.

    **Raises:**

    - `OverflowError`: the sizes add up to 2**62 bytes or more.

    ```python
    # 14 bytes hold two leaves whole (4 + 4) and three halves (2 + 2 + 2).
    assert choose([Group(5, (Option(4, 0), Option(2, 2)))], 14) == ((2, 3),)
    ```
    """
    spare = budget_bytes - smallest_budget(groups)
    if spare < 0:
        return None
    leaves = sum(group.count for group in groups)
    # Among equal costs, a leaf that costs anything weighs more than the places of all leaves together.
    weights = [leaves * len(groups) + len(groups) - place for place in range(len(groups))]
    for sizes in (
        [group.count * max(option.held_bytes for option in group.options) for group in groups],
        [group.count * max(option.cost_bytes for option in group.options) for group in groups],
        [group.count * weight for group, weight in zip(groups, weights, strict=True)],
    ):
        if sum(sizes) >= _LIMIT:
            raise OverflowError(f"the sizes of {leaves} leaves add up to {sum(sizes)}, the limit is {_LIMIT}")
    fronts = [_front(group, weight) for group, weight in zip(groups, weights, strict=True)]
    ladder = _Ladder.of(fronts, scale=sum(weights) * leaves + 1)
    # Sums of bytes move in multiples of the greatest common divisor: a budget rounded down to one makes bounds tight.
    unit = math.gcd(*(way.more for front in fronts for way in front)) or 1
    spare = min(spare, sum(group.count * front[-1].more for group, front in zip(groups, fronts, strict=True)))
    spare -= spare % unit

    left = [group.count for group in groups]
    taken: Counter[tuple[int, int]] = Counter()
    for place, way, size in _search(fronts, left, ladder, spare):
        taken[place, way.option] += size
        left[place] -= size
        spare -= size * way.more
    # What the search left open is upgraded in the order that its bounds assumed.
    still = Counter({(place, front[0].option): left[place] for place, front in enumerate(fronts)})
    for place, old, new in ladder.rungs:
        size = min(still[place, old.option], spare // (new.more - old.more))
        still[place, old.option] -= size
        still[place, new.option] += size
        spare -= size * (new.more - old.more)
    taken += still
    return tuple(
        tuple(taken[place, index] for index in range(len(group.options))) for place, group in enumerate(groups)
    )


@final
@attrs.frozen
class _Way:
    """An option worth having: `more` bytes than the fewest; `tie` decides among equal costs."""

    option: int
    more: int
    cost: int
    tie: int


def _front(group: Group, weight: int) -> tuple[_Way, ...]:
    """Returns the options that no other beats, from the fewest bytes to the least cost."""
    fewest = min(option.held_bytes for option in group.options)
    ways = [
        _Way(index, option.held_bytes - fewest, option.cost_bytes, weight if option.cost_bytes else 0)
        for index, option in enumerate(group.options)
    ]
    front: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.more, way.cost)):
        if not front or way.cost < front[-1].cost:
            front.append(way)
    return tuple(front)


def _hull(front: tuple[_Way, ...], scale: int) -> list[_Way]:
    """Returns the ways on the lower convex hull of (more, cost and tie), without those inside an edge."""
    hull: list[_Way] = []
    for way in front:
        while len(hull) > 1 and _saved(hull[-1], way, scale) >= _saved(hull[-2], hull[-1], scale):
            hull.pop()
        hull.append(way)
    return hull


def _saved(old: _Way, new: _Way, scale: int) -> Fraction:
    """Returns what the upgrade saves per byte. `scale` is above every sum of ties, so that costs come first."""
    return Fraction((old.cost - new.cost) * scale + old.tie - new.tie, new.more - old.more)


def _chunks(count: int, ways: int) -> list[int]:
    """Cuts `count` leaves into few chunks of which every split of the leaves over `ways` ways can be made.

    Give the largest chunk to any way that still needs so many, then the next. If none needs `size` leaves, at most
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
    """Every upgrade of a leaf along the hulls, most saved per byte first; `place` is the group of a rung."""

    rungs: tuple[tuple[int, _Way, _Way], ...]
    base: np.ndarray  # per group: the cost and the tie of a leaf without an upgrade
    place: np.ndarray  # this and the next two: per rung
    more: np.ndarray
    saved: np.ndarray  # cost and tie

    @classmethod
    def of(cls, fronts: Sequence[tuple[_Way, ...]], scale: int) -> Self:
        """Sorts the upgrades. Equal ones of earlier groups come first."""
        rungs = [(place, old, new) for place, front in enumerate(fronts) for old, new in pairwise(_hull(front, scale))]
        rungs.sort(key=lambda rung: _saved(rung[1], rung[2], scale), reverse=True)
        base = [(front[0].cost, front[0].tie) for front in fronts]
        saved = [(old.cost - new.cost, old.tie - new.tie) for _, old, new in rungs]
        return cls(
            rungs=tuple(rungs),
            base=np.array(base, np.int64).reshape(-1, 2),
            place=np.array([place for place, _, _ in rungs], np.int64),
            more=np.array([new.more - old.more for _, old, new in rungs], np.int64),
            saved=np.array(saved, np.int64).reshape(-1, 2),
        )

    def bounds(self, left: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the cost and tie of the leaves left once `room` is spent in order, and what a fraction would save.

        Where that is 0, the real choice is the best that these leaves can have.
        """
        count = left[self.place]
        bytes_before = np.append(0, np.cumsum(count * self.more))
        saved_before = np.vstack([[0, 0], np.cumsum(count[:, None] * self.saved, axis=0)])
        # The rung on which the room runs out; past the last one there is nothing to buy.
        rung = np.searchsorted(bytes_before, room, side="right") - 1
        more, saved = np.append(self.more, _LIMIT)[rung], np.vstack([self.saved, [0, 0]])[rung]
        size, rest = np.divmod(room - bytes_before[rung], more)
        real = left @ self.base - saved_before[rung] - size[:, None] * saved
        # rest * saved / more without a product above int64, rounded up by at least the error of the float.
        each, part = np.divmod(saved[:, 0], more)
        odd = np.ceil(rest * (part / more)).astype(np.int64) + (saved[:, 0] >> 50)
        fraction = rest * each + np.where(part > 0, odd, 0)
        return real[:, 0], real[:, 1], np.where(rung < len(self.more), fraction, 0)


def _search(
    fronts: Sequence[tuple[_Way, ...]], counts: Sequence[int], ladder: _Ladder, spare: int
) -> list[tuple[int, _Way, int]]:
    """Returns what the best choice decides: so many leaves of a group take a way. The ladder does the rest."""
    largest_first = sorted(range(len(fronts)), key=lambda place: fronts[place][-1].cost - fronts[place][0].cost)
    chunks = [(place, size) for place in largest_first for size in _chunks(counts[place], len(fronts[place]))]
    ways = [np.array([(way.more, way.cost, way.tie) for way in front], np.int64) for front in fronts]
    left = np.array(counts, np.int64)
    # Partial choices are rows of (more, cost, tie), the sums of what they decide. The first decides nothing.
    rows = np.zeros((1, 3), np.int64)
    best, best_at = (_LIMIT, _LIMIT), (0, 0)
    origins: list[np.ndarray] = []
    effort = 0
    for step in range(len(chunks) + 1):
        if step:
            place, size = chunks[step - 1]
            left[place] -= size
            rows = (rows[:, None] + size * ways[place]).reshape(-1, 3)
        effort += _STEP_EFFORT + len(rows)
        origin = np.flatnonzero(rows[:, 0] <= spare)
        rows = rows[origin]
        cost, tie, fraction = ladder.bounds(left, spare - rows[:, 0])
        cost, tie = cost + rows[:, 1], tie + rows[:, 2]
        winner = np.lexsort((tie, cost))[0]
        real = int(cost[winner]), int(tie[winner])
        if real < best:
            best, best_at = real, (step, int(origin[winner]))
        # Where no fraction is missing nothing better can follow. Equal costs stay, for they may win the tie.
        live = np.flatnonzero((fraction > 0) & (cost - fraction <= best[0]))
        live = live[np.lexsort((rows[live, 0], rows[live, 2], rows[live, 1]))]
        live = live[rows[live, 0] < np.minimum.accumulate(np.append(_LIMIT, rows[live, 0]))[:-1]]
        if len(live) == 0:
            break
        if effort > _EFFORT:
            lowest = int((cost - fraction)[live].min())
            if best[0] - lowest <= lowest // 400:
                break
            classes = np.floor(np.log1p(rows[live, 1]) * (1000 * len(chunks)))
            live = live[np.append(classes[1:] != classes[:-1], True)]  # the last of a class has the fewest bytes
        origins.append(origin[live])
        rows = rows[live]

    step, row = best_at
    taken: list[tuple[int, _Way, int]] = []
    while step:
        place, size = chunks[step - 1]
        row, way = divmod(row, len(fronts[place]))
        taken.append((place, fronts[place][way], size))
        step -= 1
        row = int(origins[step][row])
    return taken
