"""Plans as JSON: plain lists and strings, laid out for people who read diffs."""

import json
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, final, get_args

import attrs
import jax
from jax.sharding import AbstractMesh, AxisType

from shardrules.core.errors import PlanError
from shardrules.core.finding import Finding, Severity
from shardrules.core.leaf import Decision, Leaf, LogicalName
from shardrules.core.spec import spec_from_json, spec_to_json
from shardrules.core.tree import PathStyle

FORMAT = 1
"""The version of the layout. A change that older readers would misread raises it."""

_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@final
@attrs.frozen
class Written:
    """What the text of a plan says.

    **Arguments:**

    - `mesh`: the mesh.
    - `groups`: for each kind of leaf its paths, the leaf and its decision.
    - `findings`: those that came from rules and are about no decision.
    - `path_style`: how fields of named tuples appear in paths.
    - `fingerprint`: that of the plan when it was written.
    """

    mesh: AbstractMesh | None
    groups: tuple[tuple[list[str], Leaf, Decision], ...]
    findings: tuple[Finding, ...]
    path_style: PathStyle
    fingerprint: str


def leaf_to_json(paths: Sequence[str], leaf: Leaf, decision: Decision, rule: str) -> dict[str, Any]:
    """Returns one kind of leaf as plain data.

    **Arguments:**

    - `paths`: where in the tree the leaves of this kind are.
    - `leaf`, `decision`: the kind, and what was decided.
    - `rule`: the name of the rule that decided.

    **Returns:**

    A dictionary of plain values.
    """
    return {
        "paths": list(paths),
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "axes": None if leaf.axes is None else list(leaf.axes),
        "spec": None if decision.spec is None else spec_to_json(decision.spec),
        "rule": rule,
        "reason": decision.reason,
        "findings": [finding_to_json(finding) for finding in decision.findings],
    }


def dumps(
    mesh: Mapping[str, int] | None,
    leaves: Sequence[Mapping[str, Any]],
    findings: Sequence[Finding],
    path_style: PathStyle,
    fingerprint: str,
) -> str:
    """Returns the text of a plan.

    **Arguments:**

    - `mesh`: the size of each axis.
    - `leaves`: what `leaf_to_json` gave.
    - `findings`: those that came from rules and are about no decision.
    - `path_style`: how fields of named tuples appear in paths.
    - `fingerprint`: that of the plan.

    **Returns:**

    JSON.
    """
    data = {
        "shardrules": FORMAT,
        "fingerprint": fingerprint,
        "mesh": None if mesh is None else dict(mesh),
        "path_style": path_style,
        "leaves": list(leaves),
        "findings": [finding_to_json(finding) for finding in findings],
    }
    return json.dumps(data, indent=1)


def loads(text: str) -> Written:
    """Returns what `dumps` wrote.

    **Arguments:**

    - `text`: JSON.

    **Returns:**

    What it says.

    **Raises:**

    `PlanError` when the text is not a plan.
    """
    try:
        data = json.loads(text)
        if data["shardrules"] != FORMAT:
            raise PlanError(f"this plan is of format {data['shardrules']!r}, this version reads {FORMAT}")
        mesh = None if data["mesh"] is None else _mesh(data["mesh"])
        groups = tuple(_leaf_from_json(one, mesh) for one in _read(data["leaves"], list))
        style = data["path_style"]
        if style not in get_args(PathStyle):
            raise ValueError(f"{style!r} is no path style")
        return Written(mesh, groups, _findings(data["findings"]), style, _read(data["fingerprint"], str))
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"this text is not a plan: {type(error).__name__}: {error}") from error


def _read(value: Any, kind: type | UnionType) -> Any:
    """Returns `value`, which people may have edited, after a look at its type."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r} where {kind.__name__ if isinstance(kind, type) else kind} is wanted")
    return value


def _tuple(value: Any, kind: type | UnionType, least: int = 0) -> tuple[Any, ...]:
    found = tuple(_read(one, kind) for one in _read(value, list))
    if any(isinstance(one, int) and one < least for one in found):
        raise ValueError(f"{value!r} has a number below {least}")
    return found


def _mesh(sizes: Any) -> AbstractMesh:
    axis_types = (AxisType.Auto,) * len(_read(sizes, dict))  # which some versions of JAX do not give by default
    return AbstractMesh(_tuple(list(sizes.values()), int, 1), tuple(sizes), axis_types=axis_types)


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """Returns a finding as JSON has it.

    **Arguments:**

    - `finding`: the finding.

    **Returns:**

    A dictionary. A source that is not known is left out: findings of plans have none.
    """
    return attrs.asdict(finding, filter=lambda field, value: field.name != "source" or bool(value))


def _findings(data: Any) -> tuple[Finding, ...]:
    return tuple(finding_from_json(one) for one in _read(data, list))


def finding_from_json(data: Any) -> Finding:
    """Returns what `finding_to_json` wrote.

    **Arguments:**

    - `data`: a dictionary, which people may have edited.

    **Returns:**

    The finding.

    **Raises:**

    `LookupError`, `TypeError` or `ValueError` where it is none.
    """
    for field in ("code", "message", "path", "remedy", "rule"):
        _read(data[field], str)
    if "source" in data:
        _read(data["source"], str)
    _read(data["dim"], int | None)
    _read(data["axis"], str | None)
    _read(data["count"], int)
    if data["severity"] not in get_args(Severity):
        raise ValueError(f"{data['severity']!r} is no severity")
    return Finding(**{**data, "shape": None if data["shape"] is None else _tuple(data["shape"], int)})


def _leaf_from_json(data: Any, mesh: AbstractMesh | None) -> tuple[list[str], Leaf, Decision]:
    spec = None if data["spec"] is None else spec_from_json(_read(data["spec"], list))
    axes = None if data["axes"] is None else tuple(map(_name, _read(data["axes"], list)))
    paths, rule = list(_tuple(data["paths"], str)), _read(data["rule"], str)
    leaf = Leaf(paths[0], _tuple(data["shape"], int), _dtype(_read(data["dtype"], str)), mesh, None, axes)
    reason, findings = _read(data["reason"], str), _findings(data["findings"])
    return paths, leaf, Decision(spec, reason, None if rule == "-" else rule, findings)


def _name(data: Any) -> LogicalName:
    return _tuple(data, str) if isinstance(data, list) else _read(data, str | None)


def _dtype(name: str) -> Any:
    if not name.startswith("key<"):
        return jax.numpy.dtype(name)
    known = [jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype for impl in _KEY_IMPLS]
    found = [dtype for dtype in known if str(dtype) == name]
    if not found:
        raise PlanError(f"a PRNG key type {name!r} that JAX does not bring; known are {', '.join(map(str, known))}")
    return found[0]
