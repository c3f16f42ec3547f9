"""A picture as a value: boxes, lines and words, which become SVG or a matplotlib figure."""

import html
from typing import Any, TypeAlias, final

import attrs

PALETTE = ("#8cc4f5", "#f0a53a", "#36b37c", "#f3e68a", "#5082cb", "#d56637", "#d096b2", "#dcebf1")
"""Fills of eight hues and eight lightnesses, which stay apart for colour-blind readers; `INK` is readable on them. The
light theme of the page has the same."""

INK = "#12151a"
"""The colour of labels in boxes."""

PLAIN = "#d9d9d9"
"""The fill of blocks that are not split."""

_FONT_SIZE = 11
"""Pixels, chosen by hand: the labels of most boxes fit."""


def label_width(text: str) -> float:
    """Returns the width that a text needs in a box."""
    # The page has a font of fixed width, whose characters are 0.6 of their height wide; 8 pixels are the margins.
    return 0.6 * _FONT_SIZE * len(text) + 8


@final
@attrs.frozen
class Box:
    """A rectangle; `colour` is an index in the palette, `title` what a page shows on hovering."""

    x: float
    y: float
    width: float
    height: float
    colour: int | None = None
    label: str = ""
    title: str = ""

    @property
    def shown_label(self) -> str:
        """The label, if the box has room for it."""
        return self.label if self.height >= _FONT_SIZE + 3 and self.width >= label_width(self.label) else ""


@final
@attrs.frozen
class Words:
    """A line of text outside of boxes, which starts, ends or is centred at its point."""

    x: float
    y: float
    text: str
    anchor: str = "start"


@final
@attrs.frozen
class Line:
    """A line through points; `dots` are the titles of dots on them."""

    points: tuple[tuple[float, float], ...]
    width: float = 1.0
    dots: tuple[str, ...] = ()


Mark: TypeAlias = Box | Words | Line
"""The elements of a picture."""


@final
@attrs.frozen
class Picture:
    """A picture that notebooks show.

    ```python
    from shardrules.drawing.picture import Box, Picture

    picture = Picture(100, 40, (Box(0, 0, 100, 40, 0, "device 0"),), "one block")
    assert picture.to_svg().startswith("<svg") and "device 0" in picture.to_svg()
    ```
    """

    width: float
    height: float
    marks: tuple[Mark, ...]
    label: str

    def to_svg(self) -> str:
        """Returns the picture as SVG with every text escaped. A page's own style takes precedence over its colours."""
        inner = "".join(map(_svg, self.marks))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_px(self.width)} {_px(self.height)}" '
            f'width="{_px(self.width)}" height="{_px(self.height)}" role="img" aria-label="{html.escape(self.label)}" '
            f'font-family="system-ui, sans-serif" font-size="{_FONT_SIZE}">{inner}</svg>'
        )

    def to_figure(self, ax: Any = None) -> Any:
        """Draws the picture on `ax`, or a new figure, with matplotlib: `pip install "shardrules[plot]"`."""
        # Only here, since matplotlib is an extra, and slow to import.
        from matplotlib import pyplot
        from matplotlib.patches import Rectangle

        if ax is None:
            _, ax = pyplot.subplots(figsize=(self.width / 72, self.height / 72), layout="constrained")
        ax.set(xlim=(0, self.width), ylim=(self.height, 0), aspect="equal")
        ax.set_axis_off()
        for mark in self.marks:
            if isinstance(mark, Box):
                corner = (mark.x, mark.y)
                ax.add_patch(Rectangle(corner, mark.width, mark.height, fc=_fill(mark), ec="white", lw=0.8))
                style = {"ha": "center", "va": "center", "size": 7, "color": INK, "clip_on": True, "parse_math": False}
                ax.text(mark.x + mark.width / 2, mark.y + mark.height / 2, mark.shown_label, **style)
            elif isinstance(mark, Words):
                side = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
                ax.text(mark.x, mark.y, mark.text, ha=side, va="baseline", size=7, parse_math=False)
            else:
                marker = "o" if mark.dots else ""
                ax.plot(*zip(*mark.points, strict=True), lw=mark.width, color="#333333", marker=marker)
        return ax.figure

    def _repr_html_(self) -> str:
        return self.to_svg()


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _fill(box: Box) -> str:
    return PLAIN if box.colour is None else PALETTE[box.colour % len(PALETTE)]


def _svg(mark: Mark) -> str:
    if isinstance(mark, Words):
        position = f'x="{_px(mark.x)}" y="{_px(mark.y)}" text-anchor="{mark.anchor}"'
        return f'<text {position} fill="currentColor">{html.escape(mark.text)}</text>'
    if isinstance(mark, Line):
        points = " ".join(f"{_px(x)},{_px(y)}" for x, y in mark.points)
        dots = "".join(
            f'<circle cx="{_px(x)}" cy="{_px(y)}" r="4" fill="currentColor"><title>{html.escape(text)}</title></circle>'
            for (x, y), text in zip(mark.points, mark.dots, strict=False)
        )
        return f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="{_px(mark.width)}"/>{dots}'
    kind = "plain" if mark.colour is None else f"b{mark.colour % len(PALETTE)}"
    rectangle = f'x="{_px(mark.x)}" y="{_px(mark.y)}" width="{_px(mark.width)}" height="{_px(mark.height)}"'
    title = f"<title>{html.escape(mark.title)}</title>" if mark.title else ""
    label = ""
    if mark.shown_label:
        middle = f'x="{_px(mark.x + mark.width / 2)}" y="{_px(mark.y + mark.height / 2 + 4)}"'
        words = html.escape(mark.label)
        label = f'<text class="label" {middle} text-anchor="middle" fill="{INK}">{words}</text>'
    style = f'class="block {kind}" {rectangle} fill="{_fill(mark)}" stroke="#ffffff" stroke-width="0.8"'
    box = f"<rect {style}>{title}</rect>"
    return f"<g>{box}{label}</g>"
