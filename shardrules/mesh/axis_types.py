"""The types of mesh axes, by value or by name."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.sharding import AxisType

from shardrules.core.errors import AxisTypeError, MeshError, suggest

AxisTypes: TypeAlias = AxisType | str | Sequence[AxisType | str] | None
"""The type of every axis, or of each: `AxisType.Explicit`, `"explicit"`, `("auto", "explicit")`; `None` is Auto."""

_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}


def normalize_axis_types(axis_types: AxisTypes, axis_names: Sequence[str]) -> tuple[AxisType, ...]:
    """Returns the type of each axis, from one type for all or one for each; `None` is Auto."""
    if axis_types is None:
        return (AxisType.Auto,) * len(axis_names)
    types = tuple(map(_axis_type, axis_types if isinstance(axis_types, list | tuple) else (axis_types,)))
    if len(types) == 1:
        return types * len(axis_names)
    if len(types) != len(axis_names):
        raise MeshError(
            f"axis_types length must match axis_names length. Got {len(types)} types for {len(axis_names)} axis names"
        )
    return types


def _axis_type(value: Any) -> AxisType:
    if isinstance(value, AxisType):
        return value
    if not isinstance(value, str):
        raise AxisTypeError(
            f"axis_types must be names or values of AxisType, got {value!r} of type {type(value).__name__}"
        )
    name = value.strip().lower()
    if name not in _TYPES:
        raise MeshError(
            f"axis_types must be one of {', '.join(map(repr, _TYPES))} or AxisType, got {value!r}"
            f"{suggest(name, _TYPES)}"
        )
    return _TYPES[name]
