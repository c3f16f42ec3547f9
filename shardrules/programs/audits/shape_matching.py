"""Matches arrays of a compiled program with arrays of the function, by their shapes alone.

Names do not survive a compiler. Shapes nearly do: compilers transpose arrays, drop dimensions of size 1, and merge
several dimensions into one. All of that matches here. Equal element counts alone do not: among powers of two they are
common.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Self, TypeAlias, final

import attrs

Dims: TypeAlias = tuple[int, ...]
"""The dimensions of an array in increasing order, without dimensions of size 1."""


def _dims(shape: Iterable[int]) -> Dims:
    return tuple(sorted(size for size in shape if size != 1))


@final
@attrs.frozen
class ShapeSet:
    """Shapes to match arrays against, by their element counts."""

    by_size: Mapping[int, tuple[Dims, ...]]

    @classmethod
    def of(cls, shapes: Iterable[Iterable[int]]) -> Self:
        by_size: dict[int, dict[Dims, None]] = {}
        for shape in shapes:
            dims = _dims(shape)
            by_size.setdefault(math.prod(dims), {})[dims] = None
        return cls({size: tuple(distinct) for size, distinct in by_size.items()})

    def matches(self, shape: Iterable[int], *, split_dims: bool = False) -> bool:
        """Returns whether an array of `shape` may be one of these, transposed, or with dimensions merged.

        `split_dims`: dimensions may be split instead, too.
        """
        dims = _dims(shape)
        return any(
            _merges(other, dims) or (split_dims and _merges(dims, other))
            for other in self.by_size.get(math.prod(dims), ())
        )

    def matches_size(self, shape: Iterable[int]) -> bool:
        """Returns whether one of these has as many elements as `shape`."""
        return math.prod(shape) in self.by_size


def _merges(many: Dims, few: Dims) -> bool:
    """Tries to multiply `many`, each used once, to `few`. Both have the same product."""
    if many == few or len(few) <= 1:
        return True
    if len(few) >= len(many):
        return False
    # Try every group of `many` for the first of `few`, and the rest for the rest. Arrays have few dimensions, so that
    # the exponential search is short.
    first, *rest = few
    for count in range(1, len(many) - len(rest) + 1):
        for group in itertools.combinations(range(len(many)), count):
            if math.prod(many[dim] for dim in group) == first:
                left = tuple(size for dim, size in enumerate(many) if dim not in group)
                if _merges(left, tuple(rest)):
                    return True
    return False


def split_shapes(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterable[tuple[int, ...]]:
    """Yields the shapes that a device may have of an array, with repetitions: each axis splits one dim or none."""
    axes = [size for size in sizes.values() if size > 1]
    for dims in itertools.product(range(-1, len(shape)), repeat=len(axes)):  # -1: the axis splits nothing
        local = list(shape)
        for dim, size in zip(dims, axes, strict=True):
            if dim >= 0:
                local[dim] = -(-local[dim] // size)
        yield tuple(local)
