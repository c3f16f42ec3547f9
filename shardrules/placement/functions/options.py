"""The options of `filter_jit`: equal options are one object, by which compiled programs are kept."""

import threading
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Literal, TypeAlias, final

import attrs
import jax

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import ConfigError
from shardrules.mesh.axis_types import AxisTypes
from shardrules.rules.how import HowEach, is_entry

Donate: TypeAlias = Literal["none", "all", "all-except-first", "warn", "warn-except-first"] | Sequence[int | str]
"""Whose memory may be reused for the results: no argument's, all arguments', or some, by position or name. As in
Equinox, `"warn"` and `"warn-except-first"` are `"all"` and `"all-except-first"` with JAX's warnings about memory that
could not be reused."""

_DONATE = ("none", "all", "all-except-first", "warn", "warn-except-first")


@final
@attrs.frozen(eq=False)
class Options:
    """Options of compiling a function; the fields are the arguments of `filter_jit`."""

    mesh: AnyMesh | None
    in_shardings: HowEach
    out_shardings: HowEach
    donate: tuple[int | str, ...] | str
    axis_types: AxisTypes

    @property
    def are_equinox(self) -> bool:
        """Returns whether `equinox.filter_jit` has all that is asked for."""
        return (
            self.mesh is None
            and self.in_shardings is None
            and self.out_shardings is None
            and isinstance(self.donate, str)
        )


_LOCK = threading.Lock()
_OPTIONS: weakref.WeakValueDictionary[Hashable, Options] = weakref.WeakValueDictionary()


def shared_options(
    mesh: AnyMesh | None, in_shardings: HowEach, out_shardings: HowEach, donate: Donate, axis_types: AxisTypes
) -> Options:
    """Returns the options, one object for equal ones."""
    options = Options(mesh, in_shardings, out_shardings, _as_donate(donate), axis_types)
    key = (mesh, _key(in_shardings), _key(out_shardings), options.donate, _key(axis_types))
    with _LOCK:
        return _OPTIONS.setdefault(key, options)


def _key(how: Any) -> Hashable:
    leaves, treedef = jax.tree.flatten(how, is_leaf=is_entry)
    return treedef, tuple(map(_leaf_key, leaves))


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, types.MethodType):  # `plan.mirror` is another object each time
        return leaf.__func__, _leaf_key(leaf.__self__)
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)  # the options keep it alive, and with it its id
    return type(leaf), leaf


def _as_donate(donate: Donate) -> tuple[int | str, ...] | str:
    if not isinstance(donate, str):
        return tuple(donate)
    if donate not in _DONATE:
        raise ConfigError(
            f"donate is {', '.join(map(repr, _DONATE))}, or a list of positions and names; got {donate!r}"
        )
    return donate
