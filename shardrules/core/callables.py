"""Names of callables: functions, methods, partial functions, modules, and wrappers of any of them.

Wrappers of Equinox, as `eqx.filter_vmap(module)` returns one, have the attributes of a function as fields, and copies
of them a sentinel for each that is missing, which Python refuses as a function's name.
"""

import functools
from collections.abc import Callable
from typing import Any

_KINDS: dict[str, Any] = {"__module__": str, "__name__": str, "__qualname__": str, "__doc__": str | None}
_KINDS |= {"__annotations__": dict, "__type_params__": tuple}
"""Types of the attributes of a function."""


def name_of(fn: Any) -> str:
    """Returns what programs, messages and reports call a callable: by what it wraps, or the type of that."""
    while not isinstance(name := getattr(fn, "__name__", None), str):
        wrapped = getattr(fn, "__wrapped__", None)
        wrapped = getattr(fn, "func", None) if wrapped is None else wrapped  # of partial functions
        if not callable(wrapped):
            return type(fn).__name__
        fn = wrapped
    return name


def update_wrapper(wrapper: Callable[..., Any], fn: Any) -> Callable[..., Any]:
    """Returns `wrapper` with the attributes of a callable, as far as a function may have them, and the callable."""
    assigned = [
        name for name in functools.WRAPPER_ASSIGNMENTS if isinstance(getattr(fn, name, None), _KINDS.get(name, object))
    ]
    return functools.update_wrapper(wrapper, fn, assigned, updated=())
