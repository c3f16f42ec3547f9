"""The operations of a line of a name table: `transpose(1, 0) | split(0, [64, 8, 8])`.

Most change each array. `stack`, `unstack`, `concat` and `split` change how many there are. `concat` and `split` go with
a list of patterns in place of one.
"""

import abc
import ast
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, final

import attrs
import jax.numpy as jnp
import numpy as np

from shardrules.core.errors import ConfigError, suggest
from shardrules.core.fields import integer
from shardrules.moves.sync.items import Items, OperationError
from shardrules.moves.sync.strided import SOURCE, TARGET, Parts, crop, permute, reshape, shift

Lists: TypeAlias = tuple[tuple[Items, ...], ...]
"""For each pattern of a list, the arrays that it matches; those of one shape and dtype together."""


def _integers(name: str) -> Any:
    def convert(values: Any) -> tuple[int, ...]:
        if not isinstance(values, list | tuple):
            raise ConfigError(f"{name} must be a list of integers, got {values!r:.60}")
        return tuple(map(integer(name), values))

    return convert


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"expected a finite number, got {value!r:.60}")
    return value


def _capture(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ConfigError(f"expected the name of a capture, such as 'layer', got {value!r:.60}")
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


def _each(lists: Lists, change: Callable[[Items], Items]) -> Lists:
    return tuple(tuple(change(items) for items in group) for group in lists)


@final
@attrs.frozen
class Transpose(NameOperation):
    """`transpose(1, 0)`: permutes dims, as NumPy does."""

    dims: tuple[int, ...] = attrs.field(converter=_integers("dims"))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            dims = [dim + len(items.shape) if dim < 0 else dim for dim in self.dims]
            if sorted(dims) != list(range(len(items.shape))):
                raise OperationError(f"shape {items.shape} has no permutation {self.dims} of its dims")
            return items.mapped([items.shape[dim] for dim in dims], lambda parts: [permute(parts, dims)])

        return _each(lists, change)


@final
@attrs.frozen
class Reshape(NameOperation):
    """`reshape(32, 128, -1)`: another shape with as many elements, of which one dim may be -1."""

    shape: tuple[int, ...] = attrs.field(converter=_integers("shape"))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            shape, size = list(self.shape), math.prod(items.shape)
            others = math.prod(length for length in shape if length != -1)
            if shape.count(-1) == 1 and others and size % others == 0:
                shape[shape.index(-1)] = size // others
            if math.prod(shape) != size or min(shape, default=0) < 0:
                raise OperationError(f"shape {items.shape}, {size} elements, cannot become {self.shape}")
            return items.mapped(shape, lambda parts: reshape(parts, items.shape, shape))

        return _each(lists, change)


@final
@attrs.frozen
class Interleave(NameOperation):
    """`interleave(0, 2)`: the halves of a dim, element by element in turns; any number of parts."""

    dim: int = attrs.field(converter=integer("dim"))
    count: int = attrs.field(converter=integer("count", 1))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        return _each(lists, lambda items: _interleaved(items, self.dim, self.count, False))


@final
@attrs.frozen
class Deinterleave(NameOperation):
    """`deinterleave(0, 2)`: every second element of a dim, and then the others: `interleave` backwards."""

    dim: int = attrs.field(converter=integer("dim"))
    count: int = attrs.field(converter=integer("count", 1))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        return _each(lists, lambda items: _interleaved(items, self.dim, self.count, True))


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

        return _each(lists, change)


def _fill(items: Items, dim: int, start: int, length: int, value: float) -> Parts:
    """The constant at some positions of a dim of every array."""
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
            return attrs.evolve(_cut(items, dim, self.start, self.stop), unused=(*items.unused, *unused))

        return _each(lists, change)


def _cut(items: Items, dim: int, start: int, stop: int) -> Items:
    shape = (*items.shape[:dim], stop - start, *items.shape[dim + 1 :])
    return items.mapped(shape, lambda parts: (shift(each, dim, -start) for each in crop(parts, dim, start, stop)))


@final
@attrs.frozen
class Cast(NameOperation):
    """`cast('bfloat16')`: another dtype, rounded to the nearest as NumPy and JAX do."""

    dtype: str

    def __attrs_post_init__(self) -> None:
        try:
            jnp.dtype(self.dtype)
        except TypeError:
            raise ConfigError(f"unknown dtype {self.dtype!r:.60}") from None

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            new = jnp.dtype(self.dtype)
            if not _can_hold(items.dtype, new):
                raise OperationError(f"{items.dtype} has values that {new} has no near ones for")
            cast = ("cast", new)
            return items.mapped(
                items.shape, lambda parts: [attrs.evolve(parts, changes=(*parts.changes, cast))], dtype=new
            )

        return _each(lists, change)


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _can_hold(old: Any, new: Any) -> bool:
    ranks = [next(rank for rank, kind in enumerate(_KINDS) if jnp.issubdtype(each, kind)) for each in (old, new)]
    return ranks[0] <= ranks[1]


@final
@attrs.frozen
class Scale(NameOperation):
    """`scale(0.5)`: multiplies floats by a number, which is rounded to their dtype first."""

    factor: float = attrs.field(converter=_number)

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        def change(items: Items) -> Items:
            if not jnp.issubdtype(items.dtype, jnp.inexact):
                raise OperationError(f"{items.dtype} cannot be scaled; cast it to floats first")
            scale = ("scale", self.factor)
            return items.mapped(items.shape, lambda parts: [attrs.evolve(parts, changes=(*parts.changes, scale))])

        return _each(lists, change)


@final
@attrs.frozen
class Tied(NameOperation):
    """`tied()`: the sources of this line are sources of other lines as well."""

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        return lists


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
    present = sorted(values[groups == int(np.argmax(sizes != len(expected)))].tolist())
    missing = [number for number in expected if number not in present]
    is_run = present == list(range(present[0], present[-1] + 1))
    hint = f"; write {{{capture}:{present[0]}-{present[-1]}}} if those are all" if numbers is None and is_run else ""
    raise OperationError(f"{{{capture}}} lacks {_listed(missing)} of {len(expected)} numbers{hint}")


def _listed(numbers: Sequence[int], most: int = 5) -> str:
    return ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


@final
@attrs.frozen
class Unstack(NameOperation):
    """`unstack('layer', 0)`: an array for each position along a dim, whose number a capture of the target has."""

    capture: str = attrs.field(converter=_capture)
    dim: int = attrs.field(default=0, converter=integer("dim"))

    def apply(self, lists: Lists, line: LineTarget) -> Lists:
        return _each(lists, lambda items: self._unstack(items, line.numbers.get(self.capture)))

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
        for each in items.renumbered(new):
            chosen = each.arrays[TARGET] >= 0
            parts.append(shift(each if chosen.all() else each.rows(chosen), dim, start))
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
    sizes: tuple[int, ...] = attrs.field(default=(), converter=_integers("sizes"))

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
                cut = _cut(items, dim, start, start + length)
                # What has been cut off is counted once.
                group.append(cut if start == 0 else attrs.evolve(cut, unused=()))
                start += length
        return tuple(map(tuple, result))


OPERATIONS: Mapping[str, Any] = MappingProxyType(
    {
        "cast": Cast,
        "concat": Concat,
        "crop": Crop,
        "deinterleave": Deinterleave,
        "interleave": Interleave,
        "pad": Pad,
        "reshape": lambda *shape: Reshape(shape),
        "scale": Scale,
        "split": Split,
        "stack": Stack,
        "tied": Tied,
        "transpose": lambda *dims: Transpose(dims),
        "unstack": Unstack,
    }
)
"""The operations by their names in a text."""


def read_operations(text: str) -> tuple[tuple[str, NameOperation], ...]:
    """Returns the operations of a text, each with its indices text; a `ConfigError` says what is wrong with it."""
    if not isinstance(text, str):
        raise ConfigError(f"the operations of a line must be text, got {text!r:.60}")
    if not text.strip():
        return ()
    try:
        pending = [ast.parse(text.strip(), mode="eval").body]
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{text!r:.120} is not a list of operations, op(args) | op(args): {error}") from None
    calls: list[ast.expr] = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            pending += [node.right, node.left]
        else:
            calls.append(node)
    return tuple((ast.unparse(call), _operation(call, text)) for call in calls)


def _operation(node: ast.expr, text: str) -> NameOperation:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ConfigError(f"{text!r:.120} has a part that is not an operation, such as transpose(1, 0)")
    name = node.func.id
    if name not in OPERATIONS:
        names = ", ".join(OPERATIONS)
        raise ConfigError(f"unknown operation {name!r}{suggest(name, OPERATIONS)}; the operations are {names}")
    try:
        args = [ast.literal_eval(arg) for arg in node.args]
        named = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in node.keywords}
        return OPERATIONS[name](*args, **named)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except ValueError:
        raise ConfigError(f"{name}: the arguments must be literals") from None
    except TypeError:
        form = ", ".join(inspect.signature(OPERATIONS[name]).parameters)
        raise ConfigError(f"{ast.unparse(node)} is not {name}({form})") from None
