"""Printing: tables as wide as the terminal, with colours and progress if a person is watching.

Pipes and files get the same text as from `print`, without colours and at the text's own width.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from shardrules.core.errors import printable, printable_text
from shardrules.core.finding import Finding, Severity
from shardrules.core.rule import ShardingPlan
from shardrules.core.views.table import MOST_ROWS, Row, table_lines
from shardrules.rules.files.rules_file import Limits

LEVELS: tuple[str, ...] = get_args(Severity)
"""Severities of findings, the worst first."""

_DEFAULT_LEVEL = "warning"
"""Warnings name a cost that few mean to pay, and notes repeat what tables show."""

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
"""The colour of each severity."""


def show(text: str, style: str = "") -> None:
    """Prints lines, in a style of rich if the terminal has colours."""
    emit(Text(printable_text(text), style))


def emit(text: Text, *, is_error: bool = False) -> None:
    """Prints text as it is, to the standard output or the standard error."""
    console = Console(stderr=is_error, highlight=False, soft_wrap=True)
    try:
        # Into pipes goes what `print` gives: golden files must not depend on rich.
        if console.is_terminal:
            console.print(text)
        else:
            print(text.plain, file=console.file, flush=True)
    except (BrokenPipeError, SystemExit):
        # The reader has closed the pipe, as `head` does: drop the rest, and keep the exit code. Rich would exit with 1.
        os.dup2(os.open(os.devnull, os.O_WRONLY), console.file.fileno())


def complain(text: str, severity: str = "error") -> None:
    """Prints an error or a warning to the standard error."""
    line = Text.assemble((f"shardrules: {severity}:", STYLES[severity]), " ", printable_text(text))
    emit(line, is_error=True)


def complain_of(plan: ShardingPlan, codes: Sequence[str] | None = None) -> None:
    """Prints the warnings of a plan to the standard error, one line each: all, or those with certain codes."""
    for finding in plan.findings:
        if finding.severity == "warning" and (codes is None or finding.code in codes):
            complain(finding_line(finding).removeprefix("warning "), "warning")


def finding_line(finding: Finding) -> str:
    """Returns a finding as one line."""
    return " ".join(part.strip() for part in str(finding).splitlines())


def add_level(parser: argparse.ArgumentParser) -> None:
    """Adds the option that says which findings make a command end with 1."""
    levels = ", ".join(level + " (default)" * (level == _DEFAULT_LEVEL) for level in LEVELS)
    meaning = f"exit 1 from here up: {levels}"
    parser.add_argument("--level", choices=LEVELS, metavar="LEVEL", help=meaning)


def failing(findings: Iterable[Finding], args: argparse.Namespace, limits: Limits) -> list[Finding]:
    """Returns the findings that make a command end with 1, by `--level` or else by the file of rules."""
    least = LEVELS.index(args.level or limits.level or _DEFAULT_LEVEL)
    return [finding for finding in findings if LEVELS.index(finding.severity) <= least]


def show_plan(plan: ShardingPlan) -> None:
    """Prints a plan: its table, its sums and its findings."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        show(str(plan))
        return
    lines = table_lines(plan.rows, MOST_ROWS)
    if max(map(len, lines)) <= console.width:
        emit(Text("\n".join(lines[:2]), "bold"))
        emit(Text("\n".join(lines[2:])))
    else:
        for row in plan.rows[:MOST_ROWS]:
            emit(_stacked(row))
        for line in lines[MOST_ROWS + 2 :]:
            emit(Text(line))
    emit(Text(str(plan.memory()), "bold"))
    show_findings(plan.findings)


def _stacked(row: Row) -> Text:
    """A row in three lines, for terminals narrower than the table."""
    path, shape, dtype, spec, size, rule, reason = row.cells()
    first = f"{path}\n  {shape} {dtype}  "
    return Text.assemble((first, "bold"), (spec, "cyan"), f"  {size}/device\n  {rule}: {reason}")


def show_findings(findings: Sequence[Finding]) -> None:
    """Prints findings, except notes, which repeat what the table shows."""
    for finding in findings:
        if finding.severity != "note":
            show(str(finding), STYLES[finding.severity])


@contextlib.contextmanager
def working(task: str) -> Iterator[Callable[[str], None]]:
    """Shows a spinner with the task and the elapsed time on a terminal, and ignores the steps that it is told of.

    Elsewhere each step is a line on the standard error.
    """
    console = Console(stderr=True)
    if not console.is_terminal or not sys.stderr.isatty():
        yield lambda step: emit(Text(printable(step), "dim"), is_error=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(printable(task), total=None)
        yield lambda step: None
