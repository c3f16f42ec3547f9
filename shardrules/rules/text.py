"""The text form of rules, one line per rule, for configuration files and the command line.

`"shard_dim('model', -1)|fsdp(axis='data')"` is `DimShardingRule('model', -1) | FSDPShardingRule(axis='data')`. The text
is parsed and never run: it holds names, literals and `|`, nothing else.
"""

import ast
import functools
import importlib
import inspect
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from shardrules.core.errors import ConfigError, UnknownOpError, suggest
from shardrules.core.fields import LARGEST_INTEGER
from shardrules.core.rule import ShardingRule
from shardrules.rules.auto import AutoShardingRule
from shardrules.rules.dim import DimShardingRule
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.logical import LogicalShardingRule
from shardrules.rules.memory import MemoryConstrainedShardingRule
from shardrules.rules.replicate import ReplicateShardingRule

Op: TypeAlias = Callable[..., ShardingRule]
"""A function that is called with the literal arguments in a text and returns a rule."""

Ops: TypeAlias = Mapping[str, Op]
"""Ops by name: a value to pass on, not a registry of the process."""


def hugging_face_rule(tensor: Any = "auto", fsdp: Any = "auto", head_dim: Any = None, roles: Any = ()) -> ShardingRule:
    """Returns a `HuggingFaceShardingRule`. Presets stand above this room: a dotted name is the one way up."""
    module = importlib.import_module("shardrules.presets.huggingface.rule")
    return module.HuggingFaceShardingRule(tensor, fsdp, head_dim, roles)


DEFAULT_OPS: Ops = MappingProxyType(
    {
        "auto": AutoShardingRule,
        "fsdp": FSDPShardingRule,
        "hf": hugging_face_rule,
        "logical": LogicalShardingRule,
        "memory": MemoryConstrainedShardingRule,
        "replicate": ReplicateShardingRule,
        "shard_dim": DimShardingRule,
    }
)
"""The ops that come with shardrules."""

OBJECT_NAME = re.compile(r"(?P<module>.+?):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*(?P<call>\(.*\))?", re.DOTALL)
"""The name of a Python object, which may stand where an op may: the command line imports it."""


def is_object_name(text: str) -> bool:
    """Returns whether a string has the form of an object's name, `module:name`, perhaps with arguments.

    ```python
    from shardrules.rules.text import is_object_name

    assert is_object_name("model.py:make(depth=2)") and not is_object_name("shard_dim('model', -1)")
    ```
    """
    match = OBJECT_NAME.fullmatch(text)
    # With a quote or `|` before the colon it is a rule in text form.
    return match is not None and not any(char in match["module"] for char in "'\"|")


def register_op(ops: Ops, name: str, factory: Op, *, replace: bool = False) -> Ops:
    """Returns a copy of `ops` with one more op.

    **Arguments:**

    - `ops`: the ops so far, such as `DEFAULT_OPS`.
    - `name`: the name of the new op.
    - `factory`: called with the arguments in the text, it returns a rule; a rule class is also accepted.
    - `replace`: whether to replace an op that has this name.

    **Returns:**

    A new mapping, to be passed to `parse_rule`.

    **Raises:**

    `UnknownOpError` when the name is not an identifier, or exists already.

    ```python
    ops = sr.register_op(sr.DEFAULT_OPS, "rows", lambda axis: sr.DimShardingRule(axis, 0))
    assert sr.parse_rule("rows('data')", ops) == sr.DimShardingRule("data", 0)
    ```
    """
    if not name.isidentifier():
        raise UnknownOpError(f"the name of an op must be an identifier, got {name!r}")
    if name in ops and not replace:
        raise UnknownOpError(f"op {name!r} already exists; pass replace=True to replace it")
    return MappingProxyType({**ops, name: factory})


def parse_rule(text: str, ops: Ops = DEFAULT_OPS) -> ShardingRule:
    """Returns the rule that a text describes.

    **Arguments:**

    - `text`: ops joined by `|`, each a name, with literal arguments in parentheses if it takes any.
    - `ops`: the ops that the text may use.

    **Returns:**

    A rule; a chain if the text has several ops.

    **Raises:**

    `ConfigError` when the text is not of this form, `UnknownOpError` when it names an unknown op.

    ```python
    rule = sr.parse_rule("shard_dim('model', -1)|fsdp(axis='data')")
    assert rule == sr.DimShardingRule("model", -1) | sr.FSDPShardingRule(axis="data")
    ```
    """
    return functools.reduce(operator.or_, [_make_rule(node, text, ops) for node in chained(parse_expression(text))])


def chained(node: ast.expr) -> list[ast.expr]:
    """Returns what `|` joins, in order. Parentheses are gone: `a|(b|c)` is the same chain as `a|b|c`."""
    pending, parts = [node], list[ast.expr]()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            pending += [node.right, node.left]
        else:
            parts.append(node)
    return parts


_UNCLOSED = re.compile("never closed|unterminated|unmatched|does not match")

_EXPECTED_FORM = "write op|op(args), for instance \"shard_dim('model', -1)|fsdp(axis='data')\""


def parse_call(node: ast.expr, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Returns the name, the positional and the named arguments of `name` or `name(literals)`."""
    if isinstance(node, ast.Name):
        return node.id, [], {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        part = ast.get_source_segment(text.strip(), node)
        raise ConfigError(f"invalid rule text {text!r:.200}: {part!r:.80} is not an op; {_EXPECTED_FORM}")
    try:
        args = [ast.literal_eval(arg) for arg in node.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    # {[]: 1} is a TypeError: a list cannot be a key.
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"rule text {text!r:.200}: the arguments of {node.func.id} must be literals (strings, numbers, tuples ...)"
        ) from error
    keywords = [keyword.arg for keyword in node.keywords]
    # `**mapping` is a keyword without a name.
    if None in keywords:
        raise ConfigError(f"rule text {text!r:.200}: the arguments of {node.func.id} must be literals, not **mappings")
    if repeated := [name for name in named if keywords.count(name) > 1]:
        raise ConfigError(f"rule text {text!r:.200}: {node.func.id} gets {repeated[0]} more than once")
    return node.func.id, args, named


def parse_op(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Returns the name, the positional and the named arguments of one op, such as `"adamw(b1=0.9)"`."""
    return parse_call(parse_expression(text), text)


def parse_expression(text: str) -> ast.expr:
    if not isinstance(text, str):
        raise ConfigError(f"a rule text must be a string, got {text!r:.60}; {_EXPECTED_FORM}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (MemoryError, RecursionError) as error:  # Python's parser and the making of its tree have limits
        raise ConfigError(f"invalid rule text {text!r:.60}: it nests too deeply; {_EXPECTED_FORM}") from error
    except (SyntaxError, ValueError) as error:
        column = f" at column {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        # Python is right about parentheses and strings that are not closed, and vague about all else.
        closing = f"{error.msg}; " if isinstance(error, SyntaxError) and _UNCLOSED.search(error.msg) else ""
        raise ConfigError(f"invalid rule text {text!r:.200}{column}: {closing}{_EXPECTED_FORM}") from error
    # Python reads hexadecimal integers of any length, and does not print those of 4,300 digits.
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if any(isinstance(value, int) and value > LARGEST_INTEGER for value in constants):
        raise ConfigError(f"invalid rule text {text!r:.200}: an integer does not fit in 64 bits")
    return tree


def _make_rule(node: ast.expr, text: str, ops: Ops) -> ShardingRule:
    name, args, named = parse_call(node, text)
    if name not in ops:
        raise UnknownOpError(
            f"rule text {text!r:.200}: unknown op {name!r}{suggest(name, ops)} (no 'shardings.{name}' among the "
            f"known ops: {', '.join(sorted(ops))})"
        )
    # Only a TypeError is about the call: a rule that refuses a value says so itself.
    try:
        return ops[name](*args, **named)
    except TypeError as error:
        raise ConfigError(
            f"rule text {text!r:.200}: invalid call of {name}{inspect.signature(ops[name])}: {error}"
        ) from error
