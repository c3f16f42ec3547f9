"""Arrays between the source and the target of a line: each operation of the line makes others of them."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.moves.sync.strided import TARGET, Parts


@final
class OperationError(Exception):
    """An operation that arrays of these shapes do not support: the message says why. Planning catches it."""


@final
@attrs.frozen(eq=False)
class Items:
    """Arrays of one shape and dtype, which differ in the values of captures.

    The target indices of `parts` are positions in `keys`: the values of the captures `names`, row by row. Numbers are
    themselves, and other texts negative: indices in a list of the matching.
    """

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str, ...]
    keys: np.ndarray
    parts: tuple[Parts, ...]
    unused: tuple[Parts, ...] = ()
    """What operations have cut off: the source of these parts is not used."""

    def __len__(self) -> int:
        return len(self.keys)

    def mapped(self, shape: Sequence[int], change: Callable[[Parts], Iterable[Parts]], **fields: Any) -> "Items":
        """Returns these arrays in another shape, with what `change` makes of their parts."""
        parts = tuple(itertools.chain.from_iterable(change(each) for each in self.parts))
        return attrs.evolve(self, shape=tuple(shape), parts=parts, **fields)

    def dim(self, dim: int, extra: int = 0) -> int:
        """Returns a dim counted from the front; with `extra` also that behind the last one."""
        rank = len(self.shape) + extra
        if not -rank <= dim < rank:
            raise OperationError(f"shape {self.shape} has no dim {dim}")
        return dim % rank

    def renumbered(self, new: np.ndarray) -> tuple[Parts, ...]:
        """Returns the parts, each array with another position in the keys."""
        return tuple(attrs.evolve(each, arrays=(each.arrays[0], new[each.arrays[TARGET]])) for each in self.parts)
