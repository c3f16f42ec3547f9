"""The text form of rules, one line per rule, for configuration files and the command line.

`"shard_dim('model', -1)|fsdp(axis='data')"` is `DimShardingRule('model', -1) | FSDPShardingRule(axis='data')`. The text
is parsed and never run: names, literals and `|`, nothing else.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from shardrules.core.errors import SpecError, UnknownOpError, suggest
from shardrules.core.rule import ShardingRule
from shardrules.rules.auto import AutoShardingRule
from shardrules.rules.dim import DimShardingRule
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.logical.rule import LogicalShardingRule
from shardrules.rules.memory import MemoryConstrainedShardingRule
from shardrules.rules.replicate import ReplicateShardingRule

Op: TypeAlias = Callable[..., ShardingRule]
"""What an op's name stands for: called with the literal arguments, it returns a rule."""

Ops: TypeAlias = Mapping[str, Op]
"""The known ops. It is a value to pass on, never a registry of the process."""

DEFAULT_OPS: Ops = MappingProxyType(
    {
        "auto": AutoShardingRule,
        "fsdp": FSDPShardingRule,
        "logical": LogicalShardingRule,
        "memory": MemoryConstrainedShardingRule,
        "replicate": ReplicateShardingRule,
        "shard_dim": DimShardingRule,
    }
)
"""The ops that come with shardrules."""


def register_op(ops: Ops, name: str, factory: Op, *, replace: bool = False) -> Ops:
    """Returns `ops` with one more op in it; what was passed stays as it is.

    **Arguments:**

    - `ops`: the ops so far, such as `DEFAULT_OPS`.
    - `name`: the name of the new one.
    - `factory`: called with the arguments in the text, it returns a rule; a rule class will do.
    - `replace`: whether `name` may be known already.

    **Returns:**

    A new mapping, to be passed to `parse_rule`.

    **Raises:**

    `UnknownOpError` when the name is not an identifier, or is known already.

    ```python
    ops = sr.register_op(sr.DEFAULT_OPS, "rows", lambda axis: sr.DimShardingRule(axis, 0))
    assert sr.parse_rule("rows('data')", ops) == sr.DimShardingRule("data", 0)
    ```
    """
    if not name.isidentifier():
        raise UnknownOpError(f"an op's name is an identifier, {name!r} is not")
    if name in ops and not replace:
        raise UnknownOpError(f"there is an op {name!r} already: pass replace=True to put another in its place")
    return MappingProxyType({**ops, name: factory})


def parse_rule(text: str, ops: Ops = DEFAULT_OPS) -> ShardingRule:
    """Returns the rule that a text describes.

    **Arguments:**

    - `text`: ops joined by `|`, each a name, with literal arguments in parentheses if it takes any.
    - `ops`: the known ops.

    **Returns:**

    A rule; a chain where there are several ops.

    **Raises:**

    `SpecError` when the text cannot be read, `UnknownOpError` when it names an op that is not known.

    ```python
    rule = sr.parse_rule("shard_dim('model', -1)|fsdp(axis='data')")
    assert rule == sr.DimShardingRule("model", -1) | sr.FSDPShardingRule(axis="data")
    ```
    """
    return functools.reduce(lambda one, two: one | two, [_rule(call, text, ops) for call in _calls(_parsed(text))])


_FORM = "write op|op(args), for instance \"shard_dim('model', -1)|fsdp(axis='data')\""


def _calls(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_calls(node.left), *_calls(node.right)]
    return [node]


def parse_call(node: ast.expr, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Returns name and arguments of `name` or `name(literals)`.

    **Arguments:**

    - `node`: the expression.
    - `text`: where it comes from, for the message.

    **Returns:**

    The name, the positional and the named arguments.

    **Raises:**

    `SpecError` for any other expression.
    """
    if isinstance(node, ast.Name):
        return node.id, [], {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise SpecError(f"rule text {text!r} cannot be read: {ast.unparse(node)!r} is no op; {_FORM}")
    try:
        args = [ast.literal_eval(arg) for arg in node.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except (ValueError, TypeError) as error:  # a TypeError for what cannot be a key, {[]: 1}
        raise SpecError(
            f"rule text {text!r}: the arguments of {node.func.id} must be literals (strings, numbers, tuples ...)"
        ) from error
    if len(named) < len(node.keywords):
        raise SpecError(f"rule text {text!r}: the arguments of {node.func.id} must be literals, not **mappings")
    return node.func.id, args, named


def parse_op(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Returns name and arguments of one op, `"adamw(b1=0.9)"` for instance.

    **Arguments:**

    - `text`: `name` or `name(literals)`.

    **Returns:**

    The name, the positional and the named arguments.

    **Raises:**

    `SpecError` for any other text.

    ```python
    assert parse_op("fsdp(axis='data')") == ("fsdp", [], {"axis": "data"})
    ```
    """
    return parse_call(_parsed(text), text)


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        where = f" at column {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        raise SpecError(f"rule text {text!r} cannot be read{where}: {_FORM}") from error


def _rule(node: ast.expr, text: str, ops: Ops) -> ShardingRule:
    name, args, named = parse_call(node, text)
    if name not in ops:
        raise UnknownOpError(
            f"rule text {text!r}: there is no op {name!r}{suggest(name, ops)} (no 'shardings.{name}' among the known "
            f"ops: {', '.join(sorted(ops))})"
        )
    try:
        return ops[name](*args, **named)
    except TypeError as error:
        raise SpecError(
            f"rule text {text!r}: {name}{inspect.signature(ops[name])} was called wrongly: {error}"
        ) from error
