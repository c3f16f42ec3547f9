"""Parts of arrays, each with its place in a source and in a target array.

Splitting, merging, permuting and cutting dims turn a box of one array into a strided part of another. A part is a base
in each of the two arrays and some *steps*: a step of size n visits n positions, a fixed stride apart along one dim of
each array. Parts that differ in their bases alone are the rows of one `Parts`, so that the arrays of equal layers are
computed together.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
import numpy as np

SOURCE: Literal[0] = 0
TARGET: Literal[1] = 1
Side: TypeAlias = Literal[0, 1]
"""The index of the source or the target in what has both."""

_MODULUS = 2**61 - 1
"""A prime: polynomials of degree N that differ agree at a random point with a chance of N in this."""

_POINT = 0x1A2B3C4D5E6F788
"""The point at which polynomials are compared. Chosen by hand."""


@final
@attrs.frozen
class StridedStep:
    """A visit of `size` positions, `strides` apart along one of the `dims` of the source and one of the target."""

    size: int
    dims: tuple[int, int]
    strides: tuple[int, int]

    def resized(self, size: int, factor: int = 1) -> "StridedStep":
        """Returns a step of another size, with its strides times `factor`."""
        source, target = self.strides
        return StridedStep(size, self.dims, (source * factor, target * factor))

    def moved(self, side: Side, dim: int, stride: int) -> "StridedStep":
        """Returns the step along another dim of one side."""
        dims, strides = list(self.dims), list(self.strides)
        dims[side], strides[side] = dim, stride
        return StridedStep(self.size, (dims[0], dims[1]), (strides[0], strides[1]))


@final
@attrs.frozen(eq=False)
class Parts:
    """Parts of arrays that have equal steps. Row by row: the arrays that it is a part of, and its place in each."""

    steps: tuple[StridedStep, ...]
    arrays: tuple[np.ndarray, np.ndarray]
    """The index of the source and the target array of each row."""
    bases: tuple[np.ndarray, np.ndarray]
    """The first position in the source and in the target, one column for each dim."""
    changes: tuple[tuple[str, Any], ...] = ()
    """The changes of each value on its way, in order: `("cast", dtype)`, `("scale", number)`, `("fill", number)`."""

    @staticmethod
    def whole(shape: Sequence[int], indices: np.ndarray) -> "Parts":
        """Returns arrays of one shape as parts of themselves; empty arrays have none."""
        if 0 in shape:
            indices = indices[:0]
        steps = tuple(StridedStep(size, (dim, dim), (1, 1)) for dim, size in enumerate(shape) if size != 1)
        base = np.zeros((len(indices), len(shape)), np.int64)
        return Parts(steps, (indices, np.arange(len(indices))), (base, base))

    def __len__(self) -> int:
        return len(self.arrays[SOURCE])

    @property
    def size(self) -> int:
        """The elements of each row."""
        return math.prod(step.size for step in self.steps)

    @property
    def is_fill(self) -> bool:
        """True for a constant: then there is no source."""
        return bool(self.changes) and self.changes[0][0] == "fill"

    def rows(self, chosen: np.ndarray) -> "Parts":
        """Returns some of the rows."""
        return attrs.evolve(self, arrays=_each(self.arrays, chosen), bases=_each(self.bases, chosen))

    def along(self, side: Side, dim: int) -> list[int]:
        """Returns the indices of the steps along a dim, the largest stride first."""
        chosen = [index for index, step in enumerate(self.steps) if step.dims[side] == dim]
        return sorted(chosen, key=lambda index: -self.steps[index].strides[side])

    def shifted(self, step: StridedStep, count: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bases after a number of strides of a step, the same for all rows."""
        bases = [base.copy() for base in self.bases]
        for base, dim, stride in zip(bases, step.dims, step.strides, strict=True):
            if dim >= 0:
                base[:, dim] += count * stride
        return bases[0], bases[1]

    def replaced(self, index: int, first: int, steps: Sequence[StridedStep]) -> "Parts":
        """Returns what other steps in place of one visit, beginning with its position `first`."""
        rest = [step for step in steps if step.size != 1]
        new = (*self.steps[:index], *rest, *self.steps[index + 1 :])
        return attrs.evolve(self, steps=new, bases=self.shifted(self.steps[index], first))

    def range(self, index: int, start: int, stop: int) -> "Parts":
        """Returns the positions `start` to `stop` of one step."""
        return self.replaced(index, start, [self.steps[index].resized(stop - start)])

    def expanded(self, index: int) -> "Parts":
        """Returns one row for each position of a step."""
        step = self.steps[index]
        rows = np.repeat(np.arange(len(self)), step.size)
        spread = self.rows(rows)
        bases = spread.shifted(step, np.tile(np.arange(step.size), len(self)))
        return attrs.evolve(spread, steps=self.steps[:index] + self.steps[index + 1 :], bases=bases)

    def grouped(self, index: int, count: int, first: int = 0) -> Iterator["Parts"]:
        """Yields the positions of a step in groups of `count`: two steps, and what is in front and behind of them.

        The first group begins at position `first`.
        """
        step = self.steps[index]
        first = min(first, step.size)
        groups = (step.size - first) // count
        if first:
            yield self.range(index, 0, first)
        if groups:
            yield self.replaced(index, first, [step.resized(groups, count), step.resized(count)])
        if first + groups * count < step.size:
            yield self.range(index, first + groups * count, step.size)


def _each(arrays: tuple[np.ndarray, np.ndarray], chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return arrays[0][chosen], arrays[1][chosen]


def _by_value(parts: Parts, values: np.ndarray) -> Iterator[tuple[int, Parts]]:
    """Yields the rows of each value."""
    if len(values) and (values == values[0]).all():
        yield int(values[0]), parts
        return
    for value in np.unique(values):
        yield int(value), parts.rows(values == value)


def align(parts: Parts, side: Side, dim: int, cell: int) -> Iterator[Parts]:
    """Cuts parts so that along a dim each step stays inside of a cell, or goes from cell to cell.

    Cells are `cell` positions long. The positions in their order are digits of base `cell`: of each step the stride is
    a multiple of `cell`, or all such steps together never carry.
    """
    low = [index for index in parts.along(side, dim) if parts.steps[index].strides[side] % cell]
    span = sum((parts.steps[index].size - 1) * parts.steps[index].strides[side] for index in low)
    rest = parts.bases[side][:, dim] % cell
    fits = rest + span < cell
    if fits.any():
        yield parts if fits.all() else parts.rows(fits)
    if fits.all():
        return
    step, stride = parts.steps[low[0]], parts.steps[low[0]].strides[side]
    inner = span - (step.size - 1) * stride
    for first, rows in _by_value(parts.rows(~fits), rest[~fits]):
        if cell % stride == 0 and first % stride + inner < stride:
            count = cell // stride
            yield from rows.grouped(low[0], count, -(first // stride) % count)
        else:  # cells begin in the middle of a position: each position is looked at
            yield from align(rows.expanded(low[0]), side, dim, cell)


def crop(parts: Parts, dim: int, start: int, stop: int) -> Iterator[Parts]:
    """Yields what lies between two positions of a dim of the target, in the coordinates of the whole."""
    order = parts.along(TARGET, dim)
    span = sum((parts.steps[index].size - 1) * parts.steps[index].strides[TARGET] for index in order)
    base = parts.bases[TARGET][:, dim]
    inside = (base >= start) & (base + span < stop)
    if inside.any():
        yield parts.rows(inside)
    partly = ~inside & (base < stop) & (base + span >= start)
    if not partly.any():
        return
    step, stride = parts.steps[order[0]], parts.steps[order[0]].strides[TARGET]
    inner = span - (step.size - 1) * stride
    for first, rows in _by_value(parts.rows(partly), base[partly]):
        # Positions whose whole inside is between start and stop stay together; others are looked at one by one.
        lower = max(0, -((first - start) // stride))
        upper = min(step.size, (stop - 1 - inner - first) // stride + 1)
        if lower < upper:
            yield rows.range(order[0], lower, upper)
        for position in range(step.size) if lower >= upper else (*range(lower), *range(upper, step.size)):
            low = first + position * stride
            if low < stop and low + inner >= start:
                yield from crop(rows.range(order[0], position, position + 1), dim, start, stop)


def reshape(parts: Parts, old: Sequence[int], new: Sequence[int]) -> Iterator[Parts]:
    """Yields parts of an array after it is reshaped, elements in row-major order as in NumPy."""
    if tuple(old) == tuple(new):
        yield parts
        return
    if 0 in new:  # nothing is part of an empty array
        return
    # The array as a vector first: all dims of the target as one.
    factors = row_major(old)
    steps = [step.moved(TARGET, 0, step.strides[TARGET] * factors[step.dims[TARGET]]) for step in parts.steps]
    flat = parts.bases[TARGET] @ np.array(factors, np.int64).reshape(-1)
    bases = parts.bases[SOURCE], flat.astype(np.int64)[:, None]
    pieces = [attrs.evolve(parts, steps=tuple(steps), bases=bases)]
    cells = row_major(new)
    for cell in dict.fromkeys(cells):
        pieces = list(itertools.chain.from_iterable(align(each, TARGET, 0, cell) for each in pieces))
    for each in pieces:
        steps = []
        for step in each.steps:
            stride = step.strides[TARGET]
            # A dim of size 1 has the cell of the next one, and no position but 0.
            dim = next(dim for dim, cell in enumerate(cells) if stride % cell == 0 and new[dim] != 1)
            steps.append(step.moved(TARGET, dim, stride // cells[dim]))
        columns = [each.bases[TARGET][:, 0] // cell % size for cell, size in zip(cells, new, strict=True)]
        target = np.stack(columns, axis=1) if columns else np.zeros((len(each), 0), np.int64)
        yield attrs.evolve(each, steps=tuple(steps), bases=(each.bases[SOURCE], target))


def row_major(shape: Sequence[int]) -> list[int]:
    """Returns the elements between neighbours along each dim."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def permute(parts: Parts, dims: Sequence[int]) -> Parts:
    """Returns parts of an array after its dims are permuted, as by `numpy.transpose`."""
    place = {dim: index for index, dim in enumerate(dims)}
    steps = tuple(step.moved(TARGET, place[step.dims[TARGET]], step.strides[TARGET]) for step in parts.steps)
    return attrs.evolve(parts, steps=steps, bases=(parts.bases[SOURCE], parts.bases[TARGET][:, list(dims)]))


def shift(parts: Parts, dim: int, amount: int) -> Parts:
    """Returns parts whose place in the target is `amount` further along a dim."""
    target = parts.bases[TARGET].copy()
    target[:, dim] += amount
    return attrs.evolve(parts, bases=(parts.bases[SOURCE], target))


def covered(parts: Iterable[Parts], side: Side, shapes: Sequence[Sequence[int]], times: np.ndarray) -> np.ndarray:
    """Returns which arrays of one side are covered by parts, each element a number of times.

    The elements of an array are the powers of a polynomial, 1 + z + z² + ..., and so are those of each part: that the
    sums are equal at one point modulo a prime proves that they are, but for a chance of N in 2**61.
    """
    powers: dict[int, int] = {}

    def power(exponent: int) -> int:
        value = powers.get(exponent)
        if value is None:
            value = powers[exponent] = pow(_POINT, exponent, _MODULUS)
        return value

    def series(count: int, stride: int) -> int:
        """1 + z**stride + z**(2 * stride) + ..., `count` terms."""
        if not stride:
            return count
        return (power(count * stride) - 1) * pow(power(stride) - 1, -1, _MODULUS) % _MODULUS

    sums = [0] * len(shapes)
    for each in parts:
        arrays = each.arrays[side].tolist()
        if not arrays:
            continue
        factors = row_major(shapes[arrays[0]])
        by_shape = [shapes[array] for array in dict.fromkeys(arrays)]
        assert all(tuple(shape) == tuple(by_shape[0]) for shape in by_shape)
        inner = 1
        for step in each.steps:
            inner = inner * series(step.size, step.strides[side] * factors[step.dims[side]]) % _MODULUS
        starts = each.bases[side] @ np.array(factors, np.int64).reshape(-1)
        for array, start in zip(arrays, starts.astype(np.int64).tolist(), strict=True):
            sums[array] += power(start) * inner
    sizes = list(map(math.prod, shapes))
    whole = {size: series(size, 1) for size in dict.fromkeys(sizes)}
    totals = [whole[size] * count % _MODULUS for size, count in zip(sizes, times.tolist(), strict=True)]
    return np.array([total % _MODULUS == value for total, value in zip(sums, totals, strict=True)], bool)
