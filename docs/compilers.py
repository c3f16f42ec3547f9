"""Tables of what is known of compilers, which mkdocs puts into the page on how autoplan works."""

import ast
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

from shardrules.programs.compilers import compiler
from shardrules.programs.compilers.compiler import Compiler, CpuCompiler, GpuCompiler, TpuCompiler

KNOWN_MARK = "<!-- the compilers -->"
WORTH_MARK = "<!-- the worth of rules -->"
KINDS: dict[str, Compiler] = {"GPUs": GpuCompiler(), "TPUs": TpuCompiler(), "CPUs": CpuCompiler()}
FIGURES = Path(__file__).parents[1] / "benchmarks" / "compiler_rules.json"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """The page with the tables at the marks; mkdocs calls this for every page."""
    for mark, table in ((KNOWN_MARK, known_table), (WORTH_MARK, worth_table)):
        if mark in markdown:
            markdown = markdown.replace(mark, table())
    return markdown


def sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    return " ".join(text.split("\n\n")[0].split()).removesuffix(".")


def attribute_texts() -> dict[str, str]:
    """The docstring of each attribute of a compiler, in order."""
    body = ast.parse(inspect.getsource(compiler.Compiler)).body[0].body  # type: ignore[attr-defined]
    return {
        node.target.id: sentence(text.value.value)
        for node, text in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign)
    }


def known_table() -> str:
    """What each compiler does, as markdown."""
    lines = [f"| | {' | '.join(KINDS)} |", f"|---|{'---|' * len(KINDS)}"]
    for place, orders in enumerate(itertools.zip_longest(*(kind.orders for kind in KINDS.values()))):
        cells = [sentence(order.__doc__) if order else "" for order in orders]
        lines.append(f"| {'Another order' if place else 'Likeliest order'} | {' | '.join(cells)} |")
    for name, text in attribute_texts().items():
        values = [getattr(kind, name) for kind in KINDS.values()]
        cells = [("no", "yes")[value] if isinstance(value, bool) else str(value).strip("()") for value in values]
        lines.append(f"| {text} (`{name}`) | {' | '.join(cells)} |")
    return "\n".join(lines)


COLUMNS = {
    "near": ("near", "{:.0%}"),
    "inside": ("in the range", "{:.0%}"),
    "time": ("error of times", "{:.1%}"),
    "tau": ("order", "{:.2f}"),
}
"""The figures of `compiler_rules.py` that are shown, with their headings and forms."""


def worth_table() -> str:
    """What the figures of each compiler are without each rule that moves them, for either half of the programs."""
    parts = []
    for target, figures in json.loads(FIGURES.read_text()).items():
        rows = {name: [cell for half in halves for cell in cells(half)] for name, halves in figures.items()}
        (name, everything), *rest = rows.items()
        moving = {rule: row for rule, row in rest if row != everything}
        headings = [f"{half}: {heading}" for half in ("seen", "aside") for heading, _ in COLUMNS.values()]
        parts += ["", f"For `{target}`:", "", f"| Without | {' | '.join(headings)} |", f"|---|{'--:|' * len(headings)}"]
        parts += [f"| {rule} | {' | '.join(row)} |" for rule, row in {name: everything, **moving}.items()]
        still = [rule for rule, _ in rest if rule not in moving]
        parts += ["", f"Nothing there is moved by: {'; '.join(still)}."] * bool(still)
    return "\n".join(parts)


def cells(half: dict[str, float]) -> list[str]:
    """The shown figures of a half of the programs."""
    return [form.format(half[column]) for column, (_, form) in COLUMNS.items()]
