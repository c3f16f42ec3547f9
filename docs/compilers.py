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
    return markdown.replace(KNOWN_MARK, known_table()).replace(WORTH_MARK, worth_table())


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
        cells = [("no", "yes")[value] if isinstance(value, bool) else ", ".join(map(str, value)) for value in values]
        lines.append(f"| {text} (`{name}`) | {' | '.join(cells)} |")
    return "\n".join(lines)


def worth_table() -> str:
    """The figures of the model with all rules, and without each, over the programs that were set aside."""
    figures = json.loads(FIGURES.read_text())
    names = list(dict.fromkeys(name for rules in figures.values() for name in rules))
    columns = {"near": "{:.0%}", "inside": "{:.0%}", "worst": "{:.2f}"}
    lines = [
        f"| Without | {' | '.join(f'`{target}`: near | in the range | worst plan' for target in figures)} |",
        f"|---|{'--:|' * len(columns) * len(figures)}",
    ]
    for name in names:
        cells = []
        for rules in figures.values():
            aside = rules.get(name, [{}, {}])[1]
            cells += [form.format(aside[column]) if column in aside else "" for column, form in columns.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
