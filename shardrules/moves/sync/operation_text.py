"""The text of the operations of a line: `transpose(1, 0) | split(0, [64, 8, 8])`. It is parsed and never run."""

import ast
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardrules.core.errors import ConfigError, suggest
from shardrules.moves.sync.grouping import Concat, Split, Stack, Unstack
from shardrules.moves.sync.operations import (
    Cast,
    Crop,
    Deinterleave,
    Interleave,
    NameOperation,
    Pad,
    Reshape,
    Scale,
    Tied,
    Transpose,
)
from shardrules.rules.text import chained

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
        chain = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{text!r:.120} is not a list of operations, op(args) | op(args): {error}") from None
    return tuple((ast.unparse(call), _operation(call, text)) for call in chained(chain))


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
