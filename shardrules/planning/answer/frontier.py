"""What memory is worth: the best plans over a range of budgets."""

from typing import final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.views.table import aligned
from shardrules.drawing.picture import Line, Picture, Words, label_width


@final
@attrs.frozen
class FrontierPoint:
    """The best plan within a budget.

    **Arguments:**

    - `limit_bytes`: the budget.
    - `seconds`: the modelled time of a call.
    - `peak_bytes`: the most that lies in the memory of a device.
    - `price`: what one more byte would save, in seconds a call.
    """

    limit_bytes: int
    seconds: float
    peak_bytes: int
    price: float


@final
@attrs.frozen
class Frontier:
    """What memory is worth. `AutoPlan.frontier` makes them.

    **Arguments:**

    - `name`: the function.
    - `mesh`: the mesh, as text.
    - `points`: the best plan for each budget, the smallest first.

    ```python
    points = FrontierPoint(2**30, 0.012, 2**30, 1e-12), FrontierPoint(2**31, 0.01, 2**31, 0)
    frontier = Frontier("step", "data:8", points)
    assert "1.0 GiB" in str(frontier) and frontier.to_svg().startswith("<svg")
    ```
    """

    name: str
    mesh: str
    points: tuple[FrontierPoint, ...]

    def __str__(self) -> str:
        rows = [("budget", "time", "peak", "one more GiB saves")]
        rows += [
            (
                bytes_text(one.limit_bytes),
                f"{1000 * one.seconds:.4g} ms",
                bytes_text(one.peak_bytes),
                f"{1000 * 2**30 * one.price:.3g} ms",
            )
            for one in self.points
        ]
        return "\n".join([f"{self.name} on {self.mesh}", "", *aligned(rows, (0, 1, 2, 3))])

    def picture(self, width: float = 560, height: float = 320) -> Picture:
        """Draws it: memory to the right, time upwards.

        **Arguments:**

        - `width`, `height`: the size of the picture.

        **Returns:**

        A `Picture`; `.to_figure()` draws it with matplotlib.
        """
        peaks = [one.peak_bytes for one in self.points] or [0, 1]
        times = [one.seconds for one in self.points] or [0.0, 1.0]
        left = max(72.0, *(label_width(f"{1000 * one:.4g} ms") for one in (min(times), max(times))))
        low, top, right = height - 44, 28.0, width - 24
        places = tuple(
            (
                left + (right - left) * _part(one.peak_bytes, peaks),
                low - (low - top) * _part(one.seconds, times),
            )
            for one in self.points
        )
        said = tuple(f"{bytes_text(one.peak_bytes)}: {1000 * one.seconds:.4g} ms" for one in self.points)
        marks = (
            Line(((left, top), (left, low), (right, low))),
            Line(places, 2, said),
            Words(left, low + 18, bytes_text(min(peaks))),
            Words(right, low + 18, bytes_text(max(peaks)), "end"),
            Words(left - 6, low, f"{1000 * min(times):.4g} ms", "end"),
            Words(left - 6, top + 4, f"{1000 * max(times):.4g} ms", "end"),
            Words((left + right) / 2, height - 8, "memory of a device", "middle"),
            Words((left + right) / 2, 16, f"{self.name} on {self.mesh}: time of a call", "middle"),
        )
        return Picture(width, height, marks, "time of a call over memory")

    def to_svg(self, width: float = 560, height: float = 320) -> str:
        """Draws it as SVG.

        **Arguments:**

        - `width`, `height`: the size of the picture.

        **Returns:**

        The picture, as text.
        """
        return self.picture(width, height).to_svg()

    def _repr_html_(self) -> str:
        return self.to_svg()


def _part(value: float, among: list[int] | list[float]) -> float:
    low, high = min(among), max(among)
    return 0.5 if high == low else (value - low) / (high - low)
