"""The operations of a line of a name table that change each array: `transpose(1, 0)`, `pad(0, 0, 128)`."""

import abc
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, final

import attrs
import jax.numpy as jnp
import numpy as np

from shardrules.core.errors import ConfigError
from shardrules.core.fields import integer
from shardrules.moves.sync.items import Items, OperationError
from shardrules.moves.sync.strided import SOURCE, TARGET, Parts, crop, permute, reshape, shift

Lists: TypeAlias = tuple[tuple[Items, ...], ...]
"""For each pattern of a list, the arrays that it matches; those of one shape and dtype together."""


def integers(name: str) -> Any:
    def convert(values: Any) -> tuple[int, ...]:
        if not isinstance(values, list | tuple):
            raise ConfigError(f"{name} must be a list of integers, got {values!r:.60}")
        return tuple(map(integer(name), values))

    return convert


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"expected a finite number, got {value!r:.60}")
    return value


@final
@attrs.frozen
class LineTarget:
    """The part of a line that its operations read."""

    numbers: Mapping[str, range]
    """The ranges of the captures that have one."""
    count: int
    """The patterns of the target."""


class NameOperation(abc.ABC):
    """One operation of a line. Its fields are the arguments in the text."""

    @abc.abstractmethod
    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        """Returns the arrays after the operation of a line with this target."""


def each(lists: Lists, change: Callable[[Items], Items]) -> Lists:
    return tuple(tuple(change(items) for items in group) for group in lists)


@final
@attrs.frozen
class Transpose(NameOperation):
    """`transpose(1, 0)`: permutes dims, as NumPy does."""

    dims: tuple[int, ...] = attrs.field(converter=integers("dims"))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            dims = [dim + len(items.shape) if dim < 0 else dim for dim in self.dims]
            if sorted(dims) != list(range(len(items.shape))):
                raise OperationError(f"shape {items.shape} has no permutation {self.dims} of its dims")
            return items.mapped([items.shape[dim] for dim in dims], lambda parts: [permute(parts, dims)])

        return each(lists, change)


@final
@attrs.frozen
class Reshape(NameOperation):
    """`reshape(32, 128, -1)`: another shape with as many elements, of which one dim may be -1."""

    shape: tuple[int, ...] = attrs.field(converter=integers("shape"))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            shape, size = list(self.shape), math.prod(items.shape)
            others = math.prod(length for length in shape if length != -1)
            if shape.count(-1) == 1 and others and size % others == 0:
                shape[shape.index(-1)] = size // others
            if math.prod(shape) != size or min(shape, default=0) < 0:
                raise OperationError(f"shape {items.shape}, {size} elements, cannot become {self.shape}")
            return items.mapped(shape, lambda parts: reshape(parts, items.shape, shape))

        return each(lists, change)


@final
@attrs.frozen
class Interleave(NameOperation):
    """`interleave(0, 2)`: the halves of a dim, element by element in turns; any number of parts."""

    dim: int = attrs.field(converter=integer("dim"))
    count: int = attrs.field(converter=integer("count", 1))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        return each(lists, lambda items: _interleaved(items, self.dim, self.count, False))


@final
@attrs.frozen
class Deinterleave(NameOperation):
    """`deinterleave(0, 2)`: every second element of a dim, and then the others: `interleave` backwards."""

    dim: int = attrs.field(converter=integer("dim"))
    count: int = attrs.field(converter=integer("count", 1))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        return each(lists, lambda items: _interleaved(items, self.dim, self.count, True))


def _interleaved(items: Items, dim: int, count: int, is_inverse: bool) -> Items:
    dim = items.dim(dim)
    size = items.shape[dim]
    if size % count:
        raise OperationError(f"dim {dim} of shape {items.shape} does not divide by {count}")
    pair = (size // count, count) if is_inverse else (count, size // count)
    split = (*items.shape[:dim], *pair, *items.shape[dim + 1 :])
    order = [*range(dim), dim + 1, dim, *range(dim + 2, len(split))]
    swapped = [split[index] for index in order]

    def change(parts: Parts) -> Iterator[Parts]:
        for each in reshape(parts, items.shape, split):
            yield from reshape(permute(each, order), swapped, items.shape)

    return items.mapped(items.shape, change)


@final
@attrs.frozen
class Pad(NameOperation):
    """`pad(0, 0, 128)`: puts elements of one value before and after those of a dim."""

    dim: int = attrs.field(converter=integer("dim"))
    before: int = attrs.field(converter=integer("before", 0))
    after: int = attrs.field(converter=integer("after", 0))
    value: float = attrs.field(default=0, converter=_number)

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            dim = items.dim(self.dim)
            shape = list(items.shape)
            shape[dim] += self.before + self.after
            padded = items.mapped(shape, lambda parts: [shift(parts, dim, self.before)])
            fills = [
                _fill(items, dim, start, length, self.value)
                for start, length in ((0, self.before), (self.before + items.shape[dim], self.after))
                if length
            ]
            return attrs.evolve(padded, parts=(*padded.parts, *fills))

        return each(lists, change)


def _check_value(value: float, dtype: Any) -> None:
    """Raises an error for a number that is not one of a dtype, or not near one of them."""
    with np.errstate(over="ignore", invalid="ignore"):
        new = np.asarray(value).astype(dtype)
        is_near = bool(np.isfinite(new)) if jnp.issubdtype(dtype, jnp.inexact) else bool(new == value)
    if not is_near:
        raise OperationError(f"{dtype} has no value {value}")


def _fill(items: Items, dim: int, start: int, length: int, value: float) -> Parts:
    """The constant at some positions of a dim of every array."""
    _check_value(value, items.dtype)
    shape = list(items.shape)
    shape[dim] = length
    whole = Parts.whole(shape, np.full(len(items), -1))
    steps = tuple(step.moved(SOURCE, -1, 0) for step in whole.steps)
    bases = np.zeros((len(items), 0), np.int64), whole.bases[TARGET]
    return shift(Parts(steps, whole.arrays, bases, (("fill", value), ("cast", np.dtype(items.dtype)))), dim, start)


@final
@attrs.frozen
class Crop(NameOperation):
    """`crop(0, 0, 32000)`: the positions of a dim from the first number up to the second; the others are not used."""

    dim: int = attrs.field(converter=integer("dim"))
    start: int = attrs.field(converter=integer("start", 0))
    stop: int = attrs.field(converter=integer("stop", 0))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            dim = items.dim(self.dim)
            if not self.start <= self.stop <= items.shape[dim]:
                raise OperationError(f"dim {dim} of shape {items.shape} has no positions {self.start} to {self.stop}")
            rest = [(0, self.start), (self.stop, items.shape[dim])]
            unused = [part for each in items.parts for ends in rest for part in crop(each, dim, *ends)]
            return attrs.evolve(cut(items, dim, self.start, self.stop), unused=(*items.unused, *unused))

        return each(lists, change)


def cut(items: Items, dim: int, start: int, stop: int) -> Items:
    shape = (*items.shape[:dim], stop - start, *items.shape[dim + 1 :])
    return items.mapped(shape, lambda parts: (shift(each, dim, -start) for each in crop(parts, dim, start, stop)))


@final
@attrs.frozen
class Cast(NameOperation):
    """`cast('bfloat16')`: another dtype, rounded to the nearest as NumPy and JAX do."""

    dtype: str

    def __attrs_post_init__(self) -> None:
        try:
            is_number = isinstance(self.dtype, str) and _rank(jnp.dtype(self.dtype)) >= 0
        except TypeError:
            is_number = False
        if not is_number:
            raise ConfigError(f"expected the name of a dtype of numbers, such as 'bfloat16', got {self.dtype!r:.60}")

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            new = jnp.dtype(self.dtype)
            if not 0 <= _rank(items.dtype) <= _rank(new):
                raise OperationError(f"{items.dtype} has values that {new} has no near ones for")
            cast = ("cast", new)
            return items.mapped(
                items.shape, lambda parts: [attrs.evolve(parts, changes=(*parts.changes, cast))], dtype=new
            )

        return each(lists, change)


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _rank(dtype: Any) -> int:
    """The kind of a dtype, those with more values behind others; -1 where it is not of numbers."""
    return next((rank for rank, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), -1)


@final
@attrs.frozen
class Scale(NameOperation):
    """`scale(0.5)`: multiplies floats by a number, which is rounded to their dtype first."""

    factor: float = attrs.field(converter=_number)

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            if not jnp.issubdtype(items.dtype, jnp.inexact):
                raise OperationError(f"{items.dtype} cannot be scaled; cast it to floats first")
            _check_value(self.factor, items.dtype)
            scale = ("scale", self.factor)
            return items.mapped(items.shape, lambda parts: [attrs.evolve(parts, changes=(*parts.changes, scale))])

        return each(lists, change)


@final
@attrs.frozen
class Tied(NameOperation):
    """`tied()`: the sources of this line are sources of other lines as well."""

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        return lists
