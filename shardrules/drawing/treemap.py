"""Treemaps: amounts as areas of rectangles inside rectangles. Areas are exact, without frames.

Within a module the largest part comes first, and parts go into rows along the shorter side as long as that makes them
squarer: the squarified treemaps of Bruls, Huizing and van Wijk.
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
    """A subtree with several leaves, and the rectangle of all of them."""

    path: str
    depth: int
    rectangle: Rectangle
    amount: float
    count: int


@final
@attrs.frozen
class Treemap:
    """The rectangles of modules and of leaves, the latter in the order of `paths`."""

    width: float
    height: float
    paths: tuple[str, ...]
    leaves: tuple[Rectangle, ...]
    modules: tuple[Module, ...]

    def picture(self, titles: Sequence[str], colours: Sequence[int | None], *, least: float = 24) -> Picture:
        """Returns a picture of the leaves, with a title and a colour for each.

        Leaves below `least` square pixels are too small to be seen: they are one box with others of their module.
        """
        boxes: list[Box] = []
        small_colours: dict[str, int | None] = {}  # for modules with leaves that are too small: the colour of the first
        visible = {module.path: module for module in self.modules if _area(module.rectangle) >= least}
        for path, rectangle, title, colour in zip(self.paths, self.leaves, titles, colours, strict=True):
            if _area(rectangle) >= least:
                boxes.append(Box(*rectangle, colour, _label(path, rectangle[2]), title))
            elif _area(rectangle) > 0:
                while path and path not in visible:
                    path = path.rpartition("/")[0]
                small_colours.setdefault(path, colour)
        # These boxes come first, so that the larger leaves of their modules cover them.
        background = [
            Box(*visible[path].rectangle, colour, "", f"{path}: {visible[path].count:,} arrays")
            for path, colour in small_colours.items()
            if path in visible
        ]
        return Picture(
            self.width, self.height, (*background, *boxes), f"what {len(self.paths):,} arrays take, as areas"
        )


def _area(rectangle: Rectangle) -> float:
    return rectangle[2] * rectangle[3]


def _label(path: str, width: float) -> str:
    """The end of a path, as much of it as fits."""
    parts = path.split("/")
    tails = ("/".join(parts[cut:]) for cut in range(len(parts)))
    return next((tail for tail in tails if label_width(tail) <= width), parts[-1])


def treemap(paths: Sequence[str], amounts: Sequence[float], width: float = 960, height: float = 480) -> Treemap:
    """Lays out leaves by their `amounts`, the leaves of a module together.

    ```python
    from shardrules.drawing.treemap import treemap

    tree = treemap(["layers/0/w", "layers/1/w", "head"], [2, 2, 4], 8, 4)
    assert sorted(w * h for _, _, w, h in tree.leaves) == [8, 8, 16]
    assert [module.path for module in tree.modules] == ["layers", "layers/0", "layers/1"]
    ```
    """
    root = _Node("", 0)
    for leaf_index, (path, amount) in enumerate(zip(paths, amounts, strict=True)):
        root.add(path.split("/"), leaf_index, amount)
    modules: list[Module] = []
    leaves: list[Rectangle] = [(0.0, 0.0, 0.0, 0.0)] * len(paths)
    # A stack rather than recursion, since paths may be deep.
    stack: list[tuple[_Node, Rectangle]] = [(root, (0.0, 0.0, width, height))]
    while stack:
        node, rectangle = stack.pop()
        if node.leaf_index is not None:
            leaves[node.leaf_index] = rectangle
            continue
        if node.depth:
            modules.append(Module(node.path, node.depth, rectangle, node.amount, node.count))
        parts = sorted((part for part in node.parts.values() if part.amount > 0), key=lambda part: -part.amount)
        stack += reversed([*zip(parts, rows([part.amount for part in parts], rectangle), strict=True)])
    return Treemap(width, height, tuple(paths), tuple(leaves), tuple(modules))


@final
@attrs.define
class _Node:
    """A module, or a leaf."""

    path: str
    depth: int
    amount: float = 0.0
    count: int = 0
    leaf_index: int | None = None
    parts: "dict[tuple[str, bool], _Node]" = attrs.Factory(dict)

    def add(self, names: Sequence[str], leaf_index: int, amount: float) -> None:
        node = self
        for depth, name in enumerate(names, 1):
            node.amount += amount
            node.count += 1
            is_leaf = depth == len(names)
            path = f"{node.path}/{name}" if node.path else name
            # A leaf and a module may have the same name.
            node = node.parts.setdefault((name, is_leaf), _Node(path, depth))
        node.amount += amount
        node.leaf_index = leaf_index


def rows(amounts: Sequence[float], rectangle: Rectangle) -> list[Rectangle]:
    """Lays out descending `amounts` in a rectangle, in rows along its shorter side.

    ```python
    from shardrules.drawing.treemap import rows

    assert rows([2, 1, 1], (0, 0, 4, 2)) == [(0, 0, 2, 2), (2, 0, 2, 1), (2, 1, 2, 1)]
    ```
    """
    x, y, width, height = rectangle
    total = sum(amounts)
    # From amounts to pixels, so that all rows together fill the rectangle exactly.
    scale = width * height / total if total else 0.0
    areas = [amount * scale for amount in amounts]
    rectangles: list[Rectangle] = []
    begin = 0
    while begin < len(areas):
        side = min(width, height)
        end, row_area = begin + 1, areas[begin]
        # One more part makes a row thicker: it belongs in as long as the worst part of the row gets squarer.
        while end < len(areas) and _worst_ratio(areas[begin], areas[end], row_area + areas[end], side) <= _worst_ratio(
            areas[begin], areas[end - 1], row_area, side
        ):
            row_area += areas[end]
            end += 1
        thickness = row_area / side if side else 0.0
        offset = 0.0
        for area in areas[begin:end]:
            length = area / thickness if thickness else 0.0
            rectangles.append(
                (x, y + offset, thickness, length) if width >= height else (x + offset, y, length, thickness)
            )
            offset += length
        # Rounding errors must not make the rest of the rectangle negative.
        if width >= height:
            x, width = x + thickness, max(0.0, width - thickness)
        else:
            y, height = y + thickness, max(0.0, height - thickness)
        begin = end
    return rectangles


def _worst_ratio(most: float, least: float, row_area: float, side: float) -> float:
    """The largest ratio of the sides of a part, in a row whose largest and least parts have these areas."""
    if not row_area or not side or not least:
        return float("inf")
    thickness = row_area / side
    return max(most / thickness**2, thickness**2 / least)
