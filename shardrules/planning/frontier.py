"""What memory is worth: the best plans over a range of budgets."""

import html
from typing import final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.table import aligned


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

    def to_svg(self, width: int = 560, height: int = 320) -> str:
        """Draws it: memory to the right, time upwards.

        **Arguments:**

        - `width`, `height`: the size of the picture.

        **Returns:**

        The picture, as text.
        """
        left, low, top, right = 64, height - 44, 28, width - 24
        peaks = [one.peak_bytes for one in self.points] or [0, 1]
        times = [one.seconds for one in self.points] or [0.0, 1.0]

        def place(one: FrontierPoint) -> tuple[float, float]:
            return (
                left + (right - left) * _part(one.peak_bytes, peaks),
                low - (low - top) * _part(one.seconds, times),
            )

        places = [place(one) for one in self.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="currentColor"><title>{bytes_text(one.peak_bytes)}: '
            f"{1000 * one.seconds:.4g} ms</title></circle>"
            for one, (x, y) in zip(self.points, places, strict=True)
        )
        ends = [
            (left, low + 18, "start", bytes_text(min(peaks))),
            (right, low + 18, "end", bytes_text(max(peaks))),
            (left - 6, low, "end", f"{1000 * min(times):.4g} ms"),
            (left - 6, top + 4, "end", f"{1000 * max(times):.4g} ms"),
            ((left + right) / 2, height - 8, "middle", "memory of a device"),
            ((left + right) / 2, 16, "middle", f"{self.name} on {self.mesh}: time of a call"),
        ]
        words = "".join(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>' for x, y, anchor, text in ends
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="time of a call over memory" font-family="sans-serif" font-size="11" '
            f'fill="currentColor"><path d="M{left} {top}V{low}H{right}" fill="none" stroke="currentColor"/>'
            f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2"/>{dots}{words}</svg>'
        )

    def _repr_html_(self) -> str:
        return self.to_svg()


def _part(value: float, among: list[int] | list[float]) -> float:
    low, high = min(among), max(among)
    return 0.5 if high == low else (value - low) / (high - low)
