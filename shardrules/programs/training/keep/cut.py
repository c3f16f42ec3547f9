"""The cheapest arrays to keep so that the backward pass gets all that it needs, at a price for each kept byte.

This is a minimum cut. An array is available if it is kept or computed again; a step that is computed again needs its
operands to be available. Keeping costs seconds of memory traffic and the price of its bytes, or sending them to the
host and back; computing again costs seconds. Both depend on pairs of choices only, so that the cut is the cheapest.
"""

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

import attrs
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

_SCALE = 10**9
"""Capacities are whole numbers up to this, below the 2**31 of SciPy. With a tenth as many, steps that take less than a
billionth of all count nothing; with ten times as many the sum overflows."""


@final
@attrs.frozen
class UnitValue:
    """An array that a unit computes or takes. It is kept as often as the unit runs; so are its figures."""

    position: tuple[int, int]
    """The index of its equation and which result it is; -1 and which input of the unit."""
    nbytes: int
    keep_seconds: float
    """The seconds of writing it to memory, beyond the bytes that are written anyway."""
    host_seconds: float
    """The seconds of sending it to the host and back; infinite if that is impossible."""


@final
@attrs.frozen
class UnitStep:
    """An equation that can be computed again: which values it takes and returns."""

    seconds: float
    operands: tuple[int, ...]
    results: tuple[int, ...]


@final
@attrs.frozen(eq=False)
class KeepProblem:
    """The arrays that the backward pass of a unit needs, and the ways to get them."""

    values: tuple[UnitValue, ...]
    steps: tuple[UnitStep, ...]
    needed: tuple[int, ...]
    """The values that the backward pass reads."""
    forced: tuple[int, ...]
    """The steps that are computed again in any case, since they hold what cannot be kept from outside."""

    @functools.cached_property
    def producers(self) -> dict[int, int]:
        """The step of each value that is computed."""
        return {value: index for index, step in enumerate(self.steps) for value in step.results}


@final
@attrs.frozen
class KeptValues:
    """The kept values of a unit, as indices, and their cost."""

    kept: tuple[int, ...]
    offloaded: tuple[int, ...]
    repeated: tuple[int, ...]
    """The steps that are computed again."""
    nbytes: int
    host_bytes: int
    seconds: float

    @classmethod
    def of(
        cls, problem: KeepProblem, kept: Sequence[int], offloaded: Sequence[int], repeated: Iterable[int]
    ) -> "KeptValues":
        values, seconds = problem.values, [problem.steps[index].seconds for index in repeated]
        return cls(
            tuple(sorted(kept)),
            tuple(sorted(offloaded)),
            tuple(sorted(repeated)),
            sum(values[index].nbytes for index in kept),
            sum(values[index].nbytes for index in offloaded),
            sum(values[index].keep_seconds for index in kept)
            + sum(values[index].host_seconds for index in offloaded)
            + sum(seconds),
        )


def cheapest(problem: KeepProblem, price: float) -> KeptValues:
    """Returns what to keep if a byte of device memory costs `price` seconds.

    ```python
    from shardrules.programs.training.keep.cut import KeepProblem, UnitStep, UnitValue, cheapest

    never = float("inf")
    values = UnitValue((-1, 0), 4, 0.0, never), UnitValue((0, 0), 16, 0.0, never)
    problem = KeepProblem(values, (UnitStep(1.0, (0,), (1,)),), needed=(1,), forced=())
    assert cheapest(problem, 0.01).kept == (1,) and cheapest(problem, 1.0).kept == (0,)
    ```
    """
    costs = [min(value.keep_seconds + price * value.nbytes, value.host_seconds) for value in problem.values]
    available, repeated = _cut(problem, costs)
    kept, offloaded = [], []
    # At this price a value is cheapest on the device or on the host, and the cut counted the cheaper one.
    for index in available:
        value = problem.values[index]
        is_kept = value.keep_seconds + price * value.nbytes <= value.host_seconds
        if problem.producers.get(index) not in repeated:
            (kept if is_kept else offloaded).append(index)
    return KeptValues.of(problem, kept, offloaded, repeated)


def kept_values(problem: KeepProblem, kept: Collection[int]) -> KeptValues:
    """Returns the choice to keep some values, as far as they are needed, and inputs that all else is computed from."""
    pending = [*problem.needed, *(value for step in problem.forced for value in problem.steps[step].operands)]
    repeated, read = dict.fromkeys(problem.forced), dict[int, None]()
    # Back from what gradients need, to kept values and inputs.
    while pending:
        value = pending.pop()
        step = problem.producers.get(value)
        if value in kept or step is None:
            read[value] = None
        elif step not in repeated:
            repeated[step] = None
            pending += problem.steps[step].operands
    return KeptValues.of(
        problem, sorted(value for value in read if problem.producers.get(value) not in repeated), (), repeated
    )


def _cut(problem: KeepProblem, costs: list[float]) -> tuple[list[int], Mapping[int, None]]:
    """The values that are available and the steps that are computed again, given what keeping each value costs."""
    first_step = 2 + len(problem.values)
    # Keeping all that is needed is a cut, and the cheapest costs no more: so costs are scaled to integers by it.
    most = sum(costs[value] for value in problem.needed) + sum(problem.steps[step].seconds for step in problem.forced)
    most += sum(costs[value] for step in problem.forced for value in problem.steps[step].operands)
    unit = _SCALE / most if most > 0 else 0.0
    edges: dict[tuple[int, int], int] = {}

    def connect(start: int, end: int, cost: float) -> None:
        # Of equal cuts that with fewer steps is taken: each costs at least the least that counts.
        edges[start, end] = 2 * _SCALE if cost == math.inf else min(2 * _SCALE, round(cost * unit) + 1)

    for value, cost in enumerate(costs):
        step = problem.producers.get(value)
        connect(2 + value, 1 if step is None else first_step + step, cost)
    for index, step in enumerate(problem.steps):
        connect(first_step + index, 1, step.seconds)
        for value in step.operands:
            connect(first_step + index, 2 + value, math.inf)
    for value in problem.needed:
        connect(0, 2 + value, math.inf)
    for step in problem.forced:
        connect(0, first_step + step, math.inf)
    size = first_step + len(problem.steps)
    starts, ends = np.array(list(edges), np.int32).reshape(-1, 2).T
    graph = csr_array((np.array(list(edges.values()), np.int32), (starts, ends)), shape=(size, size))
    left = (graph - maximum_flow(graph, 0, 1).flow).tocsr()
    left.eliminate_zeros()
    reached = sorted(breadth_first_order(left, 0, return_predecessors=False).tolist())
    available = [node - 2 for node in reached if 2 <= node < first_step]
    return available, dict.fromkeys(node - first_step for node in reached if node >= first_step)
