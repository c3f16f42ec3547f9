"""Findings: things worth knowing about a plan, each with where it is and what to do about it."""

import functools
import itertools
import re
from collections.abc import Iterable
from typing import Literal, TypeAlias, final

import attrs

from shardrules.core.errors import PlanError, printable, shortened

Severity: TypeAlias = Literal["error", "warning", "note"]
"""An error makes a plan unusable, a warning names the cost of using it, and a note is anything else."""

UNDECIDED_CODES = ("conflict", "unknown-axis")
"""The codes of what keeps a rule from deciding a leaf."""

UNKNOWN_AXIS_REMEDY = "Correct the name, or wrap the rule in FittedShardingRule to drop axes that a mesh lacks"

_SEVERITY_ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
_INDEX = re.compile(r"(?<![^/])[0-9]+(?![^/])|(?<=\.)[0-9]+(?=\.(?:[0-9*]+\.)*[^\W0-9])")
"""Numbers between slashes; and between dots where a name follows, so that versions and decimals are none."""


@final
@attrs.frozen
class Finding:
    """One thing worth knowing about a plan.

    **Arguments:**

    - `severity`: `"error"` (the plan cannot be used), `"warning"` (it can, at a cost) or `"note"`.
    - `code`: a stable name for the kind of finding, such as `"indivisible"`.
    - `message`: what is wrong or worth knowing, with the numbers.
    - `path`: the leaf; indices are written `*` where `count` leaves share the finding. Empty for the whole plan.
    - `remedy`: what to do about it.
    - `shape`: the shape of the leaf.
    - `dim`: the dimension of the array, if it is about one.
    - `axis`: the mesh axis, if it is about one.
    - `count`: how many leaves share it.
    - `rule`: the rule that caused it, as text.
    - `source`: the line of Python that caused it, `"model.py:12"`, if known.

    ```python
    finding = sr.Finding("warning", "unused-axis", "no leaf uses 'model'", axis="model")
    assert "unused-axis" in str(finding)
    ```
    """

    severity: Severity
    code: str
    message: str
    path: str = ""
    remedy: str = ""
    shape: tuple[int, ...] | None = None
    dim: int | None = None
    axis: str | None = None
    count: int = 1
    rule: str = ""
    source: str = ""

    def __str__(self) -> str:
        # Every text may come from a stranger's file, so each goes through `printable`.
        count = f" x{self.count}" if self.count > 1 else ""
        shape = "" if self.shape is None else f" {shape_text(self.shape)}"
        path = printable(self.path) or "the tree"
        location = f"{path}{shape}{count}: " if self.path or self.shape is not None else ""
        rule = f" [{printable(self.rule)}]" if self.rule else ""
        source = f"\n    at {printable(self.source)}" if self.source else ""
        remedy = f"\n    -> {printable(self.remedy)}" if self.remedy else ""
        return f"{self.severity} {printable(self.code)}: {location}{printable(self.message)}{rule}{source}{remedy}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Returns a shape as it is printed in tables and messages, `(8, 16)` or `(8,)`."""
    return str(tuple(shape))


def template(path: str) -> str:
    """Returns `path` with every index written as `*`: `layers/*/mlp/up` for `layers/11/mlp/up`.

    Names of parameters with dots, `layers.11.mlp.up`, are paths as well.
    """
    return _INDEX.sub("*", path)


def mark_indices(name: str, *, with_width: bool) -> str:
    """Returns a name with `#` for every index between its dots, or `with_width` for every digit of one.

    ```python
    from shardrules.core.finding import mark_indices

    assert mark_indices("layers.11.mlp.up", with_width=True) == "layers.##.mlp.up"
    assert mark_indices("0.5", with_width=False) == "0.5"
    ```
    """
    return _INDEX.sub((lambda match: "#" * len(match[0])) if with_width else "#", name)


def common_path(first: str, second: str) -> str:
    """Returns the path of both, with `*` where they differ: `layers/*/norms/1`."""
    if first == second:
        return first
    # The shorter path is filled up: a name that it lacks differs from any other.
    pairs = itertools.zip_longest(first.split("/"), second.split("/"))
    return "/".join(a if a == b else _common_name(a or "", b or "") for a, b in pairs)


def _common_name(first: str, second: str) -> str:
    """As `common_path`, for two names with dots that differ in their indices; `*` for any others."""
    if "." not in first or template(first) != template(second):
        return "*"
    return ".".join(a if a == b else "*" for a, b in zip(first.split("."), second.split("."), strict=True))


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns `findings`, errors first, findings of equal layers merged into one with the sum of their counts."""
    # Findings of equal layers differ in nothing but the indices in their paths, and their counts.
    groups: dict[Finding, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(attrs.evolve(finding, path=template(finding.path), count=1), []).append(finding)
    result = [
        attrs.evolve(
            group[0],
            path=functools.reduce(common_path, (finding.path for finding in group)),
            count=sum(finding.count for finding in group),
        )
        for group in groups.values()
    ]
    # Sorting is stable: findings of one severity stay in the order of the tree.
    return tuple(sorted(result, key=lambda finding: _SEVERITY_ORDER[finding.severity]))


def listing(findings: Iterable[Finding]) -> str:
    """Returns findings as text, one indented block for each; of many the first, and how many more there are."""
    return "\n".join(f"  {line}" for text in shortened(tuple(findings)) for line in str(text).splitlines())


def plan_error(title: str, findings: Iterable[Finding]) -> PlanError:
    """Returns the error that lists `findings` under a `title`, merged for equal layers."""
    errors = merged(findings)
    return PlanError(f"{title}:\n{listing(errors)}", errors)
