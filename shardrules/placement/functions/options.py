"""The options of `filter_jit`."""

import types
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
@attrs.frozen(cache_hash=True)
class Options:
    """Options of compiling a function, by which compiled programs are kept."""

    mesh: AnyMesh | None = attrs.field(eq=False)
    in_shardings: HowEach = attrs.field(eq=False)
    out_shardings: HowEach = attrs.field(eq=False)
    donate: tuple[int | str, ...] | str = attrs.field(eq=False)
    axis_types: AxisTypes = attrs.field(eq=False)
    key: Hashable = attrs.field(repr=False)
    """A key of the other fields, some of which have no hash."""

    @staticmethod
    def of(
        mesh: AnyMesh | None, in_shardings: HowEach, out_shardings: HowEach, donate: Donate, axis_types: AxisTypes
    ) -> "Options":
        """Returns the options from the arguments of `filter_jit`."""
        chosen = _as_donate(donate)
        key = (mesh, _key(in_shardings), _key(out_shardings), chosen, _key(axis_types))
        return Options(mesh, in_shardings, out_shardings, chosen, axis_types, key)

    @property
    def are_equinox(self) -> bool:
        """Returns whether `equinox.filter_jit` has all that is asked for."""
        settings = (self.mesh, self.in_shardings, self.out_shardings)
        return all(value is None for value in settings) and isinstance(self.donate, str)


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
