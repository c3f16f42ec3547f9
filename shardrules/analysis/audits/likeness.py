"""Whether an array in a compiled program may be one that somebody knows, by its shape: names do not survive a compiler.

Compilers transpose arrays, drop dimensions of size 1, and write several dimensions as one. All of that is allowed here,
and a mere coincidence of sizes is not: of powers of two there are many.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Self, TypeAlias, final

import attrs

Dims: TypeAlias = tuple[int, ...]
"""The dimensions of an array in increasing order, without those of size 1."""


def _dims(shape: Iterable[int]) -> Dims:
    return tuple(sorted(size for size in shape if size != 1))


@final
@attrs.frozen
class Shapes:
    """Shapes that are known.

    **Arguments:**

    - `by_size`: for each number of elements the dimensions of those shapes.

    ```python
    known = Shapes.of([(8, 256, 512)])
    assert known.has((512, 1, 8, 256)) and known.has((2048, 512)) and known.has((8 * 256 * 512,))
    assert not known.has((1024, 1024)) and not known.has((2, 4, 256, 512))
    assert known.has((2, 4, 256, 512), in_parts=True)
    ```
    """

    by_size: Mapping[int, tuple[Dims, ...]]

    @classmethod
    def of(cls, shapes: Iterable[Iterable[int]]) -> Self:
        """Gathers shapes.

        **Arguments:**

        - `shapes`: the shapes.

        **Returns:**

        The same, to be asked.
        """
        found: dict[int, dict[Dims, None]] = {}
        for shape in shapes:
            dims = _dims(shape)
            found.setdefault(math.prod(dims), {})[dims] = None
        return cls({size: tuple(known) for size, known in found.items()})

    def has(self, shape: Iterable[int], *, in_parts: bool = False) -> bool:
        """Tells whether an array may be one of these.

        **Arguments:**

        - `shape`: its shape. Some of its dimensions may be several of the known one.
        - `in_parts`: whether several of them may also be one of the known shape.

        **Returns:**

        Whether it may.
        """
        dims = _dims(shape)
        return any(
            _merges(known, dims) or (in_parts and _merges(dims, known))
            for known in self.by_size.get(math.prod(dims), ())
        )

    def has_size(self, shape: Iterable[int]) -> bool:
        """Tells whether one of these has as many elements as an array.

        **Arguments:**

        - `shape`: its shape.

        **Returns:**

        Whether one has.
        """
        return math.prod(shape) in self.by_size


def _merges(many: Dims, few: Dims) -> bool:
    """Whether products of `many`, each used once, are `few`. Both have the same product."""
    if many == few or len(few) <= 1:
        return True
    if len(few) >= len(many):
        return False
    first, *rest = few
    for count in range(1, len(many) - len(rest) + 1):
        for chosen in itertools.combinations(range(len(many)), count):
            if math.prod(many[place] for place in chosen) == first:
                left = tuple(size for place, size in enumerate(many) if place not in chosen)
                if _merges(left, tuple(rest)):
                    return True
    return False


def split_shapes(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterable[tuple[int, ...]]:
    """Yields the shapes that a device may have of an array: each axis of a mesh splits one dimension or none.

    **Arguments:**

    - `shape`: the whole array.
    - `sizes`: the axes of the mesh.

    **Returns:**

    The shapes, some of them several times.

    ```python
    assert set(split_shapes((8, 6), {"data": 2})) == {(8, 6), (4, 6), (8, 3)}
    ```
    """
    axes = [size for size in sizes.values() if size > 1]
    for places in itertools.product(range(-1, len(shape)), repeat=len(axes)):
        local = list(shape)
        for place, size in zip(places, axes, strict=True):
            if place >= 0:
                local[place] = -(-local[place] // size)
        yield tuple(local)
