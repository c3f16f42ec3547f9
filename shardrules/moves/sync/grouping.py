"""The operations of a line of a name table that change how many arrays there are.

`stack` and `unstack` go with a capture that one side has alone, `concat` and `split` with a list of patterns.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np

from shardrules.core.errors import ConfigError, suggest
from shardrules.core.fields import integer
from shardrules.moves.sync.items import Items, OperationError
from shardrules.moves.sync.operations import LineTarget, Lists, NameOperation, cut, each, integers
from shardrules.moves.sync.strided import SOURCE, TARGET, Parts, shift

_MOST_LISTED = 5
"""The numbers without an array that a message lists. Chosen by hand."""


def _capture(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ConfigError(f"expected the name of a capture, such as 'layer', got {value!r:.60}")
    return value


@final
@attrs.frozen
class Stack(NameOperation):
    """`stack('layer', 0)`: one array of those that differ in a capture, along a new dim in the order of its numbers."""

    capture: str = attrs.field(converter=_capture)
    dim: int = attrs.field(default=0, converter=integer("dim"))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        return tuple(self._stack(group, line.numbers.get(self.capture)) for group in lists)

    def _stack(self, group: Sequence[Items], numbers: range | None) -> tuple[Items, ...]:
        owners: dict[tuple[int, ...], Items] = {}
        for items in group:
            if self.capture not in items.names:
                raise OperationError(
                    f"the source has no capture {{{self.capture}}}{suggest(self.capture, items.names)}"
                )
            rest = np.delete(items.keys, items.names.index(self.capture), axis=1)
            for key in map(tuple, rest.tolist()):
                other = owners.setdefault(key, items)
                if other is not items:
                    pair = f"{other.dtype}{list(other.shape)} and {items.dtype}{list(items.shape)}"
                    raise OperationError(f"arrays along {{{self.capture}}} differ: {pair}")
        return tuple(self._stack_equal(items, numbers) for items in group)

    def _stack_equal(self, items: Items, numbers: range | None) -> Items:
        column = items.names.index(self.capture)
        values = items.keys[:, column]
        keys, place = np.unique(np.delete(items.keys, column, axis=1), axis=0, return_inverse=True)
        place = place.reshape(-1)
        _check_run(values, place, len(keys), self.capture, numbers)
        dim = items.dim(self.dim, 1)
        shape = (*items.shape[:dim], len(items) // max(len(keys), 1), *items.shape[dim:])
        index = values if numbers is None else (values - numbers.start) // numbers.step

        def change(parts: Parts) -> Iterator[Parts]:
            indices = parts.arrays[TARGET]
            target = np.insert(parts.bases[TARGET], dim, index[indices], axis=1)
            steps = tuple(
                step.moved(TARGET, step.dims[TARGET] + (step.dims[TARGET] >= dim), step.strides[TARGET])
                for step in parts.steps
            )
            arrays = parts.arrays[SOURCE], place[indices]
            yield attrs.evolve(parts, steps=steps, arrays=arrays, bases=(parts.bases[SOURCE], target))

        names = items.names[:column] + items.names[column + 1 :]
        return items.mapped(shape, change, names=names, keys=keys)


def _check_run(values: np.ndarray, groups: np.ndarray, count: int, capture: str, numbers: range | None) -> None:
    """Raises an error unless each group has each number once: those of a range, or those from 0 on."""
    if not len(values):
        return
    if values.min() < 0:
        raise OperationError(f"{{{capture}}} is not a number in all paths, so they have no order to stack them in")
    expected = range(int(values.max()) + 1) if numbers is None else numbers
    sizes = np.bincount(groups, minlength=count)
    if (sizes == len(expected)).all():
        return
    present = np.sort(values[groups == int(np.argmax(sizes != len(expected)))]).tolist()
    members = dict.fromkeys(present)
    missing = list(itertools.islice((number for number in expected if number not in members), _MOST_LISTED))
    rest = len(expected) - len(present) - len(missing)
    listed = ", ".join(map(str, missing)) + (f" and {rest} more" if rest else "")
    is_run = present == list(range(present[0], present[0] + len(present)))
    hint = f"; write {{{capture}:{present[0]}-{present[-1]}}} if those are all" if numbers is None and is_run else ""
    raise OperationError(f"{{{capture}}} lacks {listed} of {len(expected)} numbers{hint}")


@final
@attrs.frozen
class Unstack(NameOperation):
    """`unstack('layer', 0)`: an array for each position along a dim, whose number a capture of the target has."""

    capture: str = attrs.field(converter=_capture)
    dim: int = attrs.field(default=0, converter=integer("dim"))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        return each(lists, lambda items: self._unstack(items, line.numbers.get(self.capture)))

    def _unstack(self, items: Items, numbers: range | None) -> Items:
        if self.capture in items.names:
            raise OperationError(f"the source has the capture {{{self.capture}}}, too")
        dim = items.dim(self.dim)
        count = items.shape[dim]
        values = range(count) if numbers is None else numbers
        if len(values) != count:
            raise OperationError(
                f"dim {dim} of shape {items.shape} has {count} positions, and {{{self.capture}}} {len(values)} numbers"
            )
        keys = np.insert(np.repeat(items.keys, count, axis=0), len(items.names), np.tile(values, len(items)), axis=1)

        def change(parts: Parts) -> Iterator[Parts]:
            while indices := parts.along(TARGET, dim):
                parts = parts.expanded(indices[0])
            base = parts.bases[TARGET]
            steps = tuple(
                step.moved(TARGET, step.dims[TARGET] - (step.dims[TARGET] > dim), step.strides[TARGET])
                for step in parts.steps
            )
            arrays = parts.arrays[SOURCE], parts.arrays[TARGET] * count + base[:, dim]
            bases = parts.bases[SOURCE], np.delete(base, dim, axis=1)
            yield attrs.evolve(parts, steps=steps, arrays=arrays, bases=bases)

        shape = items.shape[:dim] + items.shape[dim + 1 :]
        return items.mapped(shape, change, names=(*items.names, self.capture), keys=keys)


@final
@attrs.frozen
class Concat(NameOperation):
    """`concat(0)`: one array of those of a list of patterns, one after the other along a dim."""

    dim: int = attrs.field(default=0, converter=integer("dim"))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        if len(lists) < 2:
            raise OperationError("there is one pattern, and concat needs a list of them")
        names = next((items.names for group in lists for items in group), ())
        # The arrays of each list by the values of their captures.
        places: list[dict[tuple[int, ...], tuple[int, int]]] = []
        for group in lists:
            orders = [[items.names.index(name) for name in names if name in items.names] for items in group]
            if any(
                len(order) != len(names) or len(items.names) != len(names)
                for order, items in zip(orders, group, strict=True)
            ):
                raise OperationError("the patterns that concat joins have different captures")
            places.append(
                {
                    tuple(key): (variant, row)
                    for variant, (items, order) in enumerate(zip(group, orders, strict=True))
                    for row, key in enumerate(items.keys[:, order].tolist())
                }
            )
        keys = list(dict.fromkeys(key for place in places for key in place))
        lacking = [index for index, place in enumerate(places) if len(place) != len(keys)]
        if lacking:
            counts = ", ".join(str(len(place)) for place in places)
            raise OperationError(f"the patterns of the list match {counts} arrays, which should be the same ones")
        variants: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for key in keys:
            variants.setdefault(tuple(place[key][0] for place in places), []).append(key)
        joined = [
            _joined(
                [group[index] for group, index in zip(lists, chosen, strict=True)], places, members, names, self.dim
            )
            for chosen, members in variants.items()
        ]
        return (tuple(joined),)


def _joined(
    arrays: Sequence[Items],
    places: Sequence[Mapping[tuple[int, ...], tuple[int, int]]],
    keys: Sequence[tuple[int, ...]],
    names: tuple[str, ...],
    dim: int,
) -> Items:
    dim = arrays[0].dim(dim)
    rests = [(*items.shape[:dim], *items.shape[dim + 1 :]) for items in arrays]
    if any(len(items.shape) != len(arrays[0].shape) for items in arrays) or any(rest != rests[0] for rest in rests):
        shapes = ", ".join(map(str, [items.shape for items in arrays]))
        raise OperationError(f"shapes {shapes} cannot be joined along dim {dim}")
    if any(items.dtype != arrays[0].dtype for items in arrays):
        raise OperationError(f"dtypes {', '.join(str(items.dtype) for items in arrays)} cannot be joined; cast them")
    parts: list[Parts] = []
    start = 0
    for items, place in zip(arrays, places, strict=True):
        new = np.full(len(items), -1)
        new[[place[key][1] for key in keys]] = np.arange(len(keys))
        for moved in items.renumbered(new):
            chosen = moved.arrays[TARGET] >= 0
            parts.append(shift(moved if chosen.all() else moved.rows(chosen), dim, start))
        start += items.shape[dim]
    shape = (*arrays[0].shape[:dim], start, *arrays[0].shape[dim + 1 :])
    unused = tuple(part for items in arrays for part in items.unused)
    table = np.array(keys, np.int64).reshape(len(keys), len(names))
    return Items(shape, arrays[0].dtype, names, table, tuple(parts), unused)


@final
@attrs.frozen
class Split(NameOperation):
    """`split(0, [4096, 1024, 1024])`: an array for each pattern of the target's list; without sizes, equal parts."""

    dim: int = attrs.field(default=0, converter=integer("dim"))
    sizes: tuple[int, ...] = attrs.field(default=(), converter=integers("sizes"))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        if len(lists) != 1:
            raise OperationError("a list of patterns cannot be split; join it first")
        count = line.count
        if count < 2:
            raise OperationError("the target has one pattern, and split needs a list of them")
        result: list[list[Items]] = [[] for _ in range(count)]
        for items in lists[0]:
            dim = items.dim(self.dim)
            size = items.shape[dim]
            sizes = self.sizes or (size // count,) * count
            if len(sizes) != count or sum(sizes) != size or min(sizes) < 0:
                goal = f"sizes {list(sizes)}" if self.sizes else f"{count} equal parts"
                raise OperationError(f"dim {dim} of shape {items.shape} cannot be split into {goal}")
            start = 0
            for group, length in zip(result, sizes, strict=True):
                part = cut(items, dim, start, start + length)
                # What has been cut off is counted once.
                group.append(part if start == 0 else attrs.evolve(part, unused=()))
                start += length
        return tuple(map(tuple, result))
