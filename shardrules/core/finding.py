"""Findings: things worth knowing about a plan, each with where it is and what to do about it."""

import functools
import itertools
import re
from collections.abc import Iterable
from typing import Literal, TypeAlias, final

import attrs

from shardrules.core.errors import PlanError

Severity: TypeAlias = Literal["error", "warning", "note"]
"""An error makes a plan unusable, a warning says at what price it can be used, a note says something else."""

_ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
_INDEX = re.compile(r"(?<![^/])[0-9]+(?![^/])")


@final
@attrs.frozen
class Finding:
    """One thing worth knowing about a plan.

    **Arguments:**

    - `severity`: `"error"` (the plan cannot be used), `"warning"` (it can, at a price) or `"note"`.
    - `code`: a stable name for the kind of finding, such as `"indivisible"`.
    - `message`: what is the case, with the numbers.
    - `path`: the leaf; indices are written `*` where `count` leaves share the finding. Empty for the whole plan.
    - `remedy`: what to do about it.
    - `shape`: the shape of the leaf.
    - `dim`: the dimension of the array, where there is one.
    - `axis`: the mesh axis, where there is one.
    - `count`: how many leaves share it.
    - `rule`: the rule that is behind it, as text.
    - `source`: the line of Python that is behind it, `"model.py:12"`, where one is known.

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
        many = f" x{self.count}" if self.count > 1 else ""
        shape = "" if self.shape is None else f" {shape_text(self.shape)}"
        where = f"{self.path or 'the tree'}{shape}{many}: " if self.path or self.shape is not None else ""
        by = f" [{self.rule}]" if self.rule else ""
        at = f"\n    at {self.source}" if self.source else ""
        then = f"\n    -> {self.remedy}" if self.remedy else ""
        return f"{self.severity} {self.code}: {where}{self.message}{by}{at}{then}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Returns a shape as it is printed in tables and messages, `(8, 16)` or `(8,)`.

    **Arguments:**

    - `shape`: the shape of an array.

    **Returns:**

    A text.

    ```python
    assert shape_text((8, 16)) == "(8, 16)"
    ```
    """
    return str(tuple(shape))


def template(path: str) -> str:
    """Returns `path` with every index written as `*`.

    **Arguments:**

    - `path`: the path of a leaf.

    **Returns:**

    The path that it shares with its like in the other layers.

    ```python
    assert template("layers/11/mlp/up") == "layers/*/mlp/up"
    ```
    """
    return _INDEX.sub("*", path)


def common_path(one: str, two: str) -> str:
    """Returns the path of both: `*` stands where they differ.

    **Arguments:**

    - `one`, `two`: paths, which may hold `*` already.

    **Returns:**

    A path.

    ```python
    assert common_path("layers/0/norms/1", "layers/2/norms/1") == "layers/*/norms/1"
    ```
    """
    if one == two:
        return one
    return "/".join(a if a == b else "*" for a, b in itertools.zip_longest(one.split("/"), two.split("/")))


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns `findings` with the equal ones of equal layers made one, errors first, else in their own order.

    **Arguments:**

    - `findings`: findings about single leaves or groups of them.

    **Returns:**

    A tuple; the count of a merged finding is the sum of its parts.

    ```python
    twice = [sr.Finding("note", "unmatched", "no rule", path=f"layers/{i}/w") for i in range(2)]
    assert [(found.path, found.count) for found in merged(twice)] == [("layers/*/w", 2)]
    ```
    """
    groups: dict[Finding, list[Finding]] = {}
    for found in findings:
        groups.setdefault(attrs.evolve(found, path=template(found.path), count=1), []).append(found)
    result = [
        attrs.evolve(
            same[0],
            path=functools.reduce(common_path, (found.path for found in same)),
            count=sum(found.count for found in same),
        )
        for same in groups.values()
    ]
    return tuple(sorted(result, key=lambda found: _ORDER[found.severity]))


def listing(findings: Iterable[Finding]) -> str:
    """Returns findings as text, one block for each.

    **Arguments:**

    - `findings`: the findings.

    **Returns:**

    Lines joined by newlines, each block indented by two blanks.

    ```python
    assert listing([sr.Finding("note", "unmatched", "no rule", path="w")]) == "  note unmatched: w: no rule"
    ```
    """
    return "\n".join(f"  {line}" for found in findings for line in str(found).splitlines())


def plan_error(title: str, findings: Iterable[Finding]) -> PlanError:
    """Returns the error that lists findings, those of equal layers as one.

    **Arguments:**

    - `title`: what is the case, in few words.
    - `findings`: what is wrong.

    **Returns:**

    A `PlanError` to raise.

    ```python
    error = plan_error("the plan has an error", [sr.Finding("error", "unknown-axis", "no axis 'dat'", "w")])
    assert str(error).splitlines() == ["the plan has an error:", "  error unknown-axis: w: no axis 'dat'"]
    ```
    """
    listed = merged(findings)
    return PlanError(f"{title}:\n{listing(listed)}", listed)
