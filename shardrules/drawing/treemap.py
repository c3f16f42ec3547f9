"""Treemaps: what takes how much, as rectangles in rectangles. Areas are exact: nothing is spent on frames.

Within a module the largest part comes first, and parts go into rows along the shorter side as long as that makes them
squarer, after Bruls, Huizing and van Wijk.
"""

from collections.abc import Sequence
from typing import TypeAlias, final

import attrs

from shardrules.drawing.picture import Box, Picture, label_width

Rectangle: TypeAlias = tuple[float, float, float, float]
"""`x`, `y`, width and height."""


@final
@attrs.frozen
class Module:
    """What several leaves lie in."""

    path: str
    depth: int
    place: Rectangle
    amount: float
    count: int


@final
@attrs.frozen
class Treemap:
    """Rectangles for modules and leaves."""

    width: float
    height: float
    paths: tuple[str, ...]
    leaves: tuple[Rectangle, ...]
    modules: tuple[Module, ...]

    def picture(self, titles: Sequence[str], colours: Sequence[int | None], *, least: float = 24) -> Picture:
        """Draws it. Leaves too small to be seen are one box with others of their module."""
        boxes: list[Box] = []
        crowded: dict[str, int | None] = {}
        seen = {one.path: one for one in self.modules if one.place[2] * one.place[3] >= least}
        for path, place, title, colour in zip(self.paths, self.leaves, titles, colours, strict=True):
            if place[2] * place[3] >= least:
                boxes.append(Box(*place, colour, _label(path, place[2]), title))
            elif place[2] * place[3] > 0:
                while path and path not in seen:
                    path = path.rpartition("/")[0]
                crowded.setdefault(path, colour)
        below = [
            Box(*seen[path].place, colour, "", f"{path}: {seen[path].count:,} arrays")
            for path, colour in crowded.items()
            if path in seen
        ]
        return Picture(self.width, self.height, (*below, *boxes), f"what {len(self.paths):,} arrays take, as areas")


def _label(path: str, width: float) -> str:
    """As much of the end of a path as there is room for."""
    parts = path.split("/")
    tails = ("/".join(parts[cut:]) for cut in range(len(parts)))
    return next((one for one in tails if label_width(one) <= width), parts[-1])


def treemap(paths: Sequence[str], amounts: Sequence[float], width: float = 960, height: float = 480) -> Treemap:
    """Lays leaves out by what they take, those of a module together.

    ```python
    found = treemap(["layers/0/w", "layers/1/w", "head"], [2, 2, 4], 8, 4)
    assert sorted(w * h for _, _, w, h in found.leaves) == [8, 8, 16]
    assert [one.path for one in found.modules] == ["layers", "layers/0", "layers/1"]
    ```
    """
    root = _Node("", 0)
    for number, (path, amount) in enumerate(zip(paths, amounts, strict=True)):
        root.add(path.split("/"), number, amount)
    modules: list[Module] = []
    leaves: list[Rectangle] = [(0.0, 0.0, 0.0, 0.0)] * len(paths)
    waiting: list[tuple[_Node, Rectangle]] = [(root, (0.0, 0.0, width, height))]
    while waiting:
        node, place = waiting.pop()
        if node.leaf is not None:
            leaves[node.leaf] = place
            continue
        if node.depth:
            modules.append(Module(node.path, node.depth, place, node.amount, node.count))
        parts = sorted((one for one in node.parts.values() if one.amount > 0), key=lambda one: -one.amount)
        waiting += reversed([*zip(parts, rows([one.amount for one in parts], place), strict=True)])
    return Treemap(width, height, tuple(paths), tuple(leaves), tuple(modules))


@final
@attrs.define
class _Node:
    """A module, or a leaf."""

    path: str
    depth: int
    amount: float = 0.0
    count: int = 0
    leaf: int | None = None
    parts: "dict[tuple[str, bool], _Node]" = attrs.Factory(dict)

    def add(self, names: Sequence[str], leaf: int, amount: float) -> None:
        node = self
        for depth, name in enumerate(names, 1):
            node.amount += amount
            node.count += 1
            last = depth == len(names)
            path = f"{node.path}/{name}" if node.path else name
            # A leaf may have the name of a module beside it.
            node = node.parts.setdefault((name, last), _Node(path, depth))
        node.amount += amount
        node.leaf = leaf


def rows(amounts: Sequence[float], place: Rectangle) -> list[Rectangle]:
    """Lays amounts out in a rectangle, in rows along its shorter side.

    ```python
    assert rows([2, 1, 1], (0, 0, 4, 2)) == [(0, 0, 2, 2), (2, 0, 2, 1), (2, 1, 2, 1)]
    ```
    """
    x, y, width, height = place
    total = sum(amounts)
    scale = width * height / total if total else 0.0
    areas = [amount * scale for amount in amounts]
    found: list[Rectangle] = []
    begin = 0
    while begin < len(areas):
        side = min(width, height)
        end, held = begin + 1, areas[begin]
        while end < len(areas) and _longest(areas[begin], areas[end], held + areas[end], side) <= _longest(
            areas[begin], areas[end - 1], held, side
        ):
            held += areas[end]
            end += 1
        thick = held / side if side else 0.0
        along = 0.0
        for area in areas[begin:end]:
            long = area / thick if thick else 0.0
            found.append((x, y + along, thick, long) if width >= height else (x + along, y, long, thick))
            along += long
        if width >= height:
            x, width = x + thick, max(0.0, width - thick)
        else:
            y, height = y + thick, max(0.0, height - thick)
        begin = end
    return found


def _longest(most: float, least: float, held: float, side: float) -> float:
    """How far the worst part of a row is from a square: how many times as long as it is wide."""
    if not held or not side or not least:
        return float("inf")
    thick = held / side
    return max(most / thick**2, thick**2 / least)
