"""The worth of memory: the best plans over a range of budgets."""

from typing import final

import attrs
import numpy as np

from shardrules.core.check import bytes_text
from shardrules.core.errors import printable
from shardrules.core.views.table import aligned
from shardrules.drawing.picture import Line, Picture, Words, label_width
from shardrules.programs.autoplan.solve.deadline import Deadline
from shardrules.programs.autoplan.solve.limits import search_within
from shardrules.programs.autoplan.solve.search import SearchResult, Task
from shardrules.programs.autoplan.solve.trials import Trial, Trials

_STEP = 1.01
"""The factor between the least memory met, which is a little below what fits, and the first budget, and at least
between two budgets; chosen by hand."""


@final
@attrs.frozen
class FrontierPoint:
    """The best plan within a budget."""

    limit_bytes: int
    seconds: float
    """The modelled time of a call."""
    peak_bytes: int
    price: float | None
    """The seconds a call that one more byte would save; `None` where that is unknown."""


@final
@attrs.frozen
class Frontier:
    """The worth of memory: the best plan for each budget, the smallest first. `AutoPlan.frontier` makes them.

    ```python
    from shardrules.reports import Frontier, FrontierPoint

    points = FrontierPoint(2**30, 0.012, 2**30, 1e-12), FrontierPoint(2**31, 0.01, 2**31, 0)
    frontier = Frontier("step", "data:8", points)
    assert "1.0 GiB" in str(frontier) and frontier.to_svg().startswith("<svg")
    ```
    """

    name: str
    """The function."""
    mesh: str
    points: tuple[FrontierPoint, ...]

    def __str__(self) -> str:
        rows = [("budget", "time", "peak", "one more GiB saves")]
        rows += [
            (
                bytes_text(point.limit_bytes),
                f"{1000 * point.seconds:.4g} ms",
                bytes_text(point.peak_bytes),
                "" if point.price is None else f"{1000 * 2**30 * point.price:.3g} ms",
            )
            for point in self.points
        ]
        return "\n".join([printable(f"{self.name} on {self.mesh}"), "", *aligned(rows, (0, 1, 2, 3))])

    def picture(self, width: float = 560, height: float = 320) -> Picture:
        """Returns the plot, memory to the right and time upwards; `.to_figure()` draws it with matplotlib."""
        peaks = [point.peak_bytes for point in self.points] or [0, 1]
        times = [point.seconds for point in self.points] or [0.0, 1.0]
        # Margins for the words below: two lines under the axis, one above it, and the longer time at the left.
        left = max(72.0, *(label_width(f"{1000 * seconds:.4g} ms") for seconds in (min(times), max(times))))
        title = f"{self.name} on {self.mesh}: time of a call"
        width = max(width, label_width(title))
        low, top, right = height - 44, 28.0, width - 24
        dots = tuple(
            (
                left + (right - left) * _fraction(point.peak_bytes, peaks),
                low - (low - top) * _fraction(point.seconds, times),
            )
            for point in self.points
        )
        labels = tuple(f"{bytes_text(point.peak_bytes)}: {1000 * point.seconds:.4g} ms" for point in self.points)
        marks = (
            Line(((left, top), (left, low), (right, low))),
            Line(dots, 2, labels),
            Words(left, low + 18, bytes_text(min(peaks))),
            Words(right, low + 18, bytes_text(max(peaks)), "end"),
            Words(left - 6, low, f"{1000 * min(times):.4g} ms", "end"),
            Words(left - 6, top + 4, f"{1000 * max(times):.4g} ms", "end"),
            Words((left + right) / 2, height - 8, "memory of a device", "middle"),
            Words(width / 2, 16, title, "middle"),
        )
        return Picture(width, height, marks, "time of a call over memory")

    def to_svg(self, width: float = 560, height: float = 320) -> str:
        """Returns the plot as SVG."""
        return self.picture(width, height).to_svg()

    def _repr_html_(self) -> str:
        return self.to_svg()


def frontier_points(task: Task, count: int, deadline: Deadline) -> tuple[FrontierPoint, ...]:
    """Returns the best choice for each of `count` budgets.

    Searches end by themselves, so that points depend on the time only once it is up. From then on, they are the best of
    what was met.
    """
    met, patterns = Trials(task.occupancy, np.inf), dict[Trial, None]()

    def search(limit_bytes: float) -> SearchResult:
        result = search_within(task, limit_bytes, deadline, tuple(dict.fromkeys((*met.front(), *patterns))))
        patterns.update(dict.fromkeys(result.patterns))
        for trial in (*result.candidates, *result.patterns):
            met.add(trial.choice, trial.origin)
        return result

    # The ends of the frontier: what the fastest plan takes, and the least that anything does.
    fastest, smallest = search(np.inf), search(0.0)
    first = max(1.0, smallest.peak_bytes * _STEP)
    last = max(fastest.peak_bytes, first * _STEP)
    points: list[FrontierPoint] = []
    best = task.problem.cost(smallest.choice), smallest.peak_bytes
    # Geometric steps: near the least memory, where plans change most, budgets are close together.
    for limit in np.geomspace(first, last, count):
        result = None if deadline.is_over or limit == last else search(float(limit))
        trials = met.within(limit)
        # What fits in less fits in more, and may be the better of them.
        if trials.best is not None:
            best = min(best, (trials.best.cost, trials.best.peak_bytes))
        if result is not None and result.fits:
            best = min(best, (task.problem.cost(result.choice), result.peak_bytes))
        price = trials.saving if result is None else result.price
        points.append(FrontierPoint(int(limit), best[0], int(best[1]), price))
    return tuple(points)


def _fraction(value: float, among: list[int] | list[float]) -> float:
    """Returns where a value is between the least and the most of some; in the middle if they are the same."""
    low, high = min(among), max(among)
    return 0.5 if high == low else (value - low) / (high - low)
