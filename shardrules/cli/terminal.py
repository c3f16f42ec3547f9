"""What is shown: tables as wide as the terminal, colours where they are wanted, progress where somebody looks on.

Into pipes and files goes the same text as `print` gives, without colours and as wide as it is.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import get_args

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from shardrules.core.finding import Finding, Severity
from shardrules.core.rule import ShardingPlan
from shardrules.core.views.table import BYTES_COLUMN, COLUMNS, Row, aligned

LEVELS: tuple[str, ...] = get_args(Severity)
"""How bad findings are, the worst first."""

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def show(text: str, style: str = "") -> None:
    """Prints lines.

    **Arguments:**

    - `text`: the lines.
    - `style`: how they look, where colours are wanted.
    """
    console = Console(highlight=False, soft_wrap=True)
    try:
        if console.is_terminal:
            console.print(Text(text, style))
        else:
            print(text, flush=True)
    except BrokenPipeError:  # whoever read it has read enough; the exit code is what it would have been
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(text: str, kind: str = "error") -> None:
    """Prints a line to where errors go.

    **Arguments:**

    - `text`: what is wrong.
    - `kind`: `"error"` or `"warning"`.
    """
    line = Text.assemble((f"shardrules: {kind}:", _STYLES[kind]), " ", text)
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def complain_of(plan: ShardingPlan, codes: Sequence[str] | None = None) -> None:
    """Prints the warnings of a plan to where errors go, each as one line.

    **Arguments:**

    - `plan`: the plan.
    - `codes`: which of them; by default all.
    """
    for one in plan.findings:
        if one.severity == "warning" and (codes is None or one.code in codes):
            complain(line_of(one).removeprefix("warning "), "warning")


def line_of(found: Finding) -> str:
    """Returns a finding as one line.

    **Arguments:**

    - `found`: the finding.

    **Returns:**

    A line.

    ```python
    found = sr.Finding("error", "indivisible", "6 over 4", "w", "pad it", (6,))
    assert line_of(found) == "error indivisible: w (6,): 6 over 4 -> pad it"
    ```
    """
    return " ".join(part.strip() for part in str(found).splitlines())


def loud(findings: Sequence[Finding], level: str) -> list[Finding]:
    """Returns the findings that are at least so bad.

    **Arguments:**

    - `findings`: the findings.
    - `level`: one of `LEVELS`.

    **Returns:**

    Those at this level and above.

    ```python
    note, error = sr.Finding("note", "a", "b"), sr.Finding("error", "c", "d")
    assert loud([note, error], "warning") == [error]
    ```
    """
    return [one for one in findings if LEVELS.index(one.severity) <= LEVELS.index(level)]


def show_plan(plan: ShardingPlan) -> None:
    """Prints a plan: its table, its sums and its findings.

    **Arguments:**

    - `plan`: the plan.
    """
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        show(str(plan))
        return
    table = [row.cells() for row in plan.rows]
    lines = aligned([COLUMNS, *table], (BYTES_COLUMN,))
    if max(map(len, lines)) <= console.width:
        console.print(Text("\n".join(lines[:2]), "bold"))
        console.print(Text("\n".join(lines[2:])))
    else:
        for row in plan.rows:
            console.print(_stacked(row))
    console.print(Text(str(plan.memory()), "bold"))
    show_findings(plan.findings)


def _stacked(row: Row) -> Text:
    """A row below each other, for terminals that are narrower than the table."""
    path, shape, dtype, spec, size, rule, reason = row.cells()
    first = f"{path}\n  {shape} {dtype}  "
    return Text.assemble((first, "bold"), (spec, "cyan"), f"  {size}/device\n  {rule}: {reason}")


def show_findings(findings: Sequence[Finding]) -> None:
    """Prints findings, one after the other. Notes are what the table itself shows.

    **Arguments:**

    - `findings`: the findings.
    """
    for one in findings:
        if one.severity != "note":
            show(str(one), _STYLES[one.severity])


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows what goes on and for how long, if somebody looks on; else it is silent.

    **Arguments:**

    - `what`: what is done, `"compiling train_step"`.
    """
    console = Console(stderr=True)
    if not console.is_terminal or not sys.stderr.isatty():
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def style_of(severity: str) -> str:
    """Returns how a finding of a severity looks.

    **Arguments:**

    - `severity`: its severity.

    **Returns:**

    A style of rich.
    """
    return _STYLES[severity]
