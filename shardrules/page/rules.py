"""Rules as the page shows them."""

import ast

from shardrules.core.rule import ShardingPlan, ShardingRule

_MOST_CHARACTERS = 200_000
"""More than a thousand patterns take."""

_WIDTH, _INDENT = 100, 4
"""Characters of a line, as in Python files, and of a level of indentation."""


def rules_text(plan: ShardingPlan, rules: ShardingRule | str | None) -> str:
    """Returns rules as text: the text of a file as it is; a rule as code; without either, the rules that decided."""
    if isinstance(rules, str):
        text = rules.strip("\n")
    elif rules is not None:
        text = code_text(repr(rules))
    else:
        # The same rule decides many rows, and a plan that was read has its rules as text.
        deciding = [row.decision.rule for row in plan.rows if row.decision.rule is not None]
        texts = dict.fromkeys(rule if isinstance(rule, str) else repr(rule) for rule in deciding)
        text = "\n".join(map(code_text, texts))
    more = len(text) - _MOST_CHARACTERS
    return text if more <= 0 else f"{text[:_MOST_CHARACTERS]}\n... and {more:,} more characters"


def code_text(code: str) -> str:
    """Returns a Python expression with line breaks where it is long; what is none as it is.

    ```python
    from shardrules.page.rules import code_text

    assert code_text("Rule([('a', 1)])") == "Rule([('a', 1)])"
    assert code_text("f(" + "x" * 99 + ", y)") == "f(\\n    " + "x" * 99 + ",\\n    y,\\n)"
    ```
    """
    if len(code) > _MOST_CHARACTERS:
        return code
    try:
        return _broken(ast.parse(code, mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError):
        return code


def _broken(node: ast.AST, depth: int) -> str:
    """A node in one line if it fits, else with a line for each of its parts."""
    text = ast.unparse(node)
    inner = _INDENT * (depth + 1)
    if _INDENT * depth + len(text) <= _WIDTH:
        return text
    if isinstance(node, ast.Call):
        parts = [_broken(arg, depth + 1) for arg in node.args]
        parts += [f"{word.arg}={_broken(word.value, depth + 1)}" for word in node.keywords]
        begin, end = f"{ast.unparse(node.func)}(", ")"
    elif isinstance(node, ast.Tuple | ast.List):
        parts = [_broken(item, depth + 1) for item in node.elts]
        begin, end = "()" if isinstance(node, ast.Tuple) else "[]"
    elif isinstance(node, ast.Dict):
        parts = [
            f"**{_broken(value, depth + 1)}" if key is None else f"{ast.unparse(key)}: {_broken(value, depth + 1)}"
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        begin, end = "{", "}"
    else:
        # Other nodes have no parts to break at: they stay in one line, however long.
        return text
    lines = "".join(f"\n{' ' * inner}{part}," for part in parts)
    return f"{begin}{lines}\n{' ' * (inner - _INDENT)}{end}"
