"""A call of a function as arrays and the rest: what is traced, and what a compiled program is kept by."""

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from shardrules.core.boxes import (
    ArgumentVariables,
    opaque_types,
    refuse_cycles,
    refuse_opaque,
    share_variables,
    shared_leaves,
)
from shardrules.core.callables import name_of
from shardrules.core.errors import ConfigTypeError, TreeError, printable
from shardrules.core.tree import leaf_paths
from shardrules.placement.cache import Cache, static_key
from shardrules.placement.source import ArraySource
from shardrules.rules.how import How, HowEach


@final
@attrs.frozen(eq=False)
class FlatCall:
    """A function with its arguments, flattened: a module's own arrays are traced, not compiled in as constants."""

    fn: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    treedef: Any
    arrays: Sequence[Any]
    static: Mapping[int, Any]
    """The leaves that are not arrays, by leaf index."""
    shared: Mapping[int, int]
    """The leaves of variables that occur twice, as `shared_leaves` returns them."""

    def static_keys(self, owner: Any) -> tuple[Hashable, ...]:
        """Returns the keys of the static leaves. The owner of the cache is in none, so that it can be freed."""
        return tuple((index, _key_without(owner, leaf)) for index, leaf in self.static.items())

    def array_paths(self) -> Iterator[str]:
        """Yields a name for each array: `"argument 0, w"`."""
        named = {"the function": self.fn}
        named |= {f"argument {n}": arg for n, arg in enumerate(self.args)}
        # Names are sorted, since JAX flattens a dictionary in that order.
        named |= {f"argument {name!r}": self.kwargs[name] for name in sorted(self.kwargs)}
        for name, part in named.items():
            for path, leaf in zip(leaf_paths(part), jax.tree.leaves(part), strict=True):
                if is_array(leaf):
                    yield printable(f"{name}, {path}" if path else name)

    def run(self, arrays: Iterable[Any], caller: str) -> Any:
        """Returns what the function returns for these arrays, which may be traced."""
        fn, args, kwargs = self._with_arrays(arrays)
        variables = ArgumentVariables.of((fn, args, kwargs))
        value = fn(*args, **kwargs)
        if variables.writes(caller):
            raise TreeError(
                f"{caller}: the function writes to variables of flax nnx objects in its arguments, which here are "
                "copies, and the writes would be lost. Return the objects"
            )
        return value

    def _with_arrays(self, arrays: Iterable[Any]) -> Any:
        rest, indices = iter(arrays), range(self.treedef.num_leaves)
        leaves = [self.static[index] if index in self.static else next(rest) for index in indices]
        return share_variables(self.treedef.unflatten(leaves), self.shared)

    def flat_function(self, result: "Result", donated: Sequence[int] = ()) -> Callable[..., list[Any]]:
        """Returns a function from the arrays to the arrays of the result; `result` learns the rest of it.

        What the function writes to variables of its arguments is a part of the result, and so are all variables whose
        arrays are `donated`, since these will be gone.
        """

        def run(*arrays: Any) -> list[Any]:
            fn, args, kwargs = self._with_arrays(arrays)
            variables = ArgumentVariables.of((fn, args, kwargs))
            value = fn(*args, **kwargs)
            writes = variables.writes("filter_jit", [arrays[index] for index in donated])
            result.shared = shared_leaves(value)
            result.sources = _sources(arrays, variables, writes)
            values, result.treedef = jax.tree.flatten((value, writes))
            result.static = {index: value for index, value in enumerate(values) if not is_array(value)}
            return [value for value in values if is_array(value)]

        return run


@final
@attrs.define(eq=False)
class Result:
    """The result of a trace: its structure, and its leaves that are not arrays."""

    treedef: Any = None
    static: dict[int, Any] = attrs.field(factory=dict)
    shared: dict[int, int] = attrs.field(factory=dict)
    """The leaves of variables that occur twice in the result."""
    sources: list[int | None] = attrs.field(factory=list)
    """For each array that is written to an argument, the index of the array of the call that it takes the place of, if
    the two have one shape."""

    def tree_and_writes(self, arrays: Iterable[Any]) -> tuple[Any, dict[int, Any]]:
        """Returns the result with these arrays in it, and what to write to variables of the arguments."""
        rest = iter(arrays)
        tree, writes = self.treedef.unflatten(
            [self.static[index] if index in self.static else next(rest) for index in range(self.treedef.num_leaves)]
        )
        return share_variables(tree, self.shared), writes


def _sources(arrays: Sequence[Any], variables: ArgumentVariables, writes: Mapping[int, Any]) -> list[int | None]:
    indices = {id(array): index for index, array in enumerate(arrays)}
    pairs = variables.pairs(writes)
    return [indices.get(id(old)) if np.shape(old) == np.shape(new) else None for old, new in pairs if is_array(new)]


def flatten_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: str = "filter_jit") -> FlatCall:
    """Returns a call, flattened; refuses what cannot be traced."""
    refuse_cycles((fn, args, kwargs))
    leaves, treedef = jax.tree.flatten((fn, args, kwargs))
    opaque = opaque_types()
    arrays: list[Any] = []
    static: dict[int, Any] = {}
    for index, leaf in enumerate(leaves):
        if is_array(leaf):
            arrays.append(leaf)
        elif isinstance(leaf, ArraySource):
            raise ConfigTypeError(f"{caller}: an ArraySource cannot be traced; place it with filter_shard first")
        elif issubclass(type(leaf), opaque):
            refuse_opaque([(f"{caller}, an argument", leaf)])
        else:
            static[index] = leaf
    return FlatCall(fn, args, kwargs, treedef, arrays, static, shared_leaves((fn, args, kwargs)))


def argument_parts(call: FlatCall, how: HowEach, caller: str, name: str) -> list[tuple[str, Any, How]]:
    """Returns the name and the tree of all that a call has, each with its part of `how`, which is called `name`."""
    count = len(call.args)
    items = how if isinstance(how, tuple) else (how,) * count
    if len(items) > count:
        raise TreeError(f"{caller}: {name} has {len(items)} items, and the call has {count} positional arguments")
    items += (None,) * (count - len(items))  # arguments that have defaults may be left out
    arguments = [(f"argument {n}", arg, item) for n, (arg, item) in enumerate(zip(call.args, items, strict=True))]
    return [("the function", call.fn, None), *arguments, ("the keyword arguments", call.kwargs, None)]


def result_parts(result: Any, how: HowEach, caller: str, name: str) -> list[tuple[str, Any, How]]:
    """Returns the name and the tree of each part of a result, with its part of `how`, which is called `name`."""
    if not isinstance(how, tuple) or not isinstance(result, tuple):
        return [("the result", result, how)]  # pyright: ignore[reportReturnType]  (a tuple may be a tree of specs, too)
    if len(how) != len(result):
        raise TreeError(f"{caller}: {name} has {len(how)} items, the function returns {len(result)}")
    return [(f"result {n}", part, item) for n, (part, item) in enumerate(zip(result, how, strict=True))]


def check_same_call(call: FlatCall, lowered_for: FlatCall) -> None:
    """Raises a `TreeError` if a call differs from the one that a program was lowered for in more than its arrays."""
    structures = [(each.treedef, each.static.keys(), each.shared) for each in (call, lowered_for)]
    if structures[0] != structures[1]:
        raise TreeError("filter_jit: the arguments differ in structure from those that the function was lowered for")
    # The structures are equal here, so both calls have the same indices.
    different = [
        f"{value!r:.60} instead of {lowered_for.static[index]!r:.60}"
        for index, value in call.static.items()
        if static_key(value) != static_key(lowered_for.static[index])
    ]
    if different:
        raise TreeError(
            "filter_jit: arguments that are not arrays are compiled in, and these differ from what the function was "
            f"lowered for: {'; '.join(different)}"
        )


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is traced: an array, or the shape of one."""
    return isinstance(leaf, jax.Array) if isinstance(leaf, Tracer) else _is_array_type(type(leaf))


@functools.lru_cache(maxsize=256)  # types of leaves in one program; isinstance asks the slow metaclass of jax.Array
def _is_array_type(leaf_type: type) -> bool:
    return issubclass(leaf_type, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def signature_of(fn: Any) -> inspect.Signature | None:
    """Returns the signature of a function, or `None`: builtin functions may have none."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return None


@final
@jtu.register_pytree_node_class
@attrs.define(eq=False)
class PartialCall:
    """`functools.partial` as a pytree: its arrays are traced, and equal ones compile once."""

    func: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*self.args, *args, **{**self.keywords, **kwargs})

    @property
    def __name__(self) -> str:
        return name_of(self.func)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(functools.partial(self.func, *self.args, **self.keywords))

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return (self.func, self.args, self.keywords), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Iterable[Any]) -> "PartialCall":
        return cls(*children)


def as_tree(fn: Any) -> Any:
    """Returns a function as a pytree, as far as it holds others.

    `functools.partial` would be one static leaf, and so would a method of an object of nnx, with all its weights.
    """
    if type(fn) is functools.partial:
        return PartialCall(as_tree(fn.func), fn.args, dict(fn.keywords))
    if type(fn) is types.MethodType and isinstance(fn.__self__, opaque_types()):
        return PartialCall(fn.__func__, (fn.__self__,), {})
    return fn


def _key_without(owner: Any, leaf: Any) -> Hashable:
    if leaf is owner:
        return None
    if type(leaf) is types.MethodType and leaf.__self__ is owner:
        return types.MethodType, leaf.__func__
    return static_key(leaf)


_LOCK = threading.Lock()
_OWNED: weakref.WeakKeyDictionary[Any, Cache[Any]] = weakref.WeakKeyDictionary()
_SHARED: Cache[Any] = Cache()
"""Compiled programs by function, so that all wrappers of a function share them; they go with the function. So
it is with an object that is called, or whose method is. A callable that has no such owner, a module say, shares one
bounded cache with the others."""


def cache_of(fn: Any) -> tuple[Any, Cache[Any]]:
    """Returns the function or object that owns what is compiled for `fn`, if there is one, and the cache."""
    for leaf in jax.tree.leaves(fn):
        owner = leaf.__self__ if type(leaf) is types.MethodType else leaf
        if callable(leaf) and _can_own(owner):
            with _LOCK:
                return owner, _OWNED.setdefault(owner, Cache())
    return None, _SHARED


def _can_own(value: Any) -> bool:
    """Returns whether a dictionary of weak references finds a value, and no other one, as long as it is there."""
    cls = type(value)
    return cls.__eq__ is object.__eq__ and cls.__hash__ is object.__hash__ and cls.__weakrefoffset__ > 0
