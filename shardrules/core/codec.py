"""Plans as JSON: plain lists and strings, laid out for people who read diffs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
from jax.sharding import AbstractMesh

from shardrules.core.errors import PlanError
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.spec import spec_from_json, spec_to_json

FORMAT = 1
"""The version of the layout. A change that older readers would misread raises it."""

_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


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
    }


def dumps(
    mesh: Mapping[str, int] | None, leaves: Sequence[Mapping[str, Any]], findings: Sequence[Finding], fingerprint: str
) -> str:
    """Returns the text of a plan.

    **Arguments:**

    - `mesh`: the size of each axis.
    - `leaves`: what `leaf_to_json` gave.
    - `findings`: those that came from rules.
    - `fingerprint`: that of the plan.

    **Returns:**

    JSON.
    """
    data = {
        "shardrules": FORMAT,
        "fingerprint": fingerprint,
        "mesh": None if mesh is None else dict(mesh),
        "leaves": list(leaves),
        "findings": [attrs.asdict(finding) for finding in findings],
    }
    return json.dumps(data, indent=1)


def loads(
    text: str,
) -> tuple[AbstractMesh | None, list[tuple[list[str], Leaf, Decision]], tuple[Finding, ...]]:
    """Returns what `dumps` wrote.

    **Arguments:**

    - `text`: JSON.

    **Returns:**

    The mesh, for each kind of leaf its paths, the leaf and its decision, and the findings.

    **Raises:**

    `PlanError` when the text is not a plan.
    """
    try:
        data = json.loads(text)
        if data["shardrules"] != FORMAT:
            raise PlanError(f"this plan is of format {data['shardrules']!r}, this version reads {FORMAT}")
        sizes = data["mesh"]
        mesh = None if sizes is None else AbstractMesh(tuple(sizes.values()), tuple(sizes))
        groups = [_leaf_from_json(one, mesh) for one in data["leaves"]]
        findings = tuple(_finding(one) for one in data["findings"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"this text is not a plan: {type(error).__name__}: {error}") from error
    return mesh, groups, findings


def _finding(data: dict[str, Any]) -> Finding:
    shape = data["shape"]
    return Finding(**{**data, "shape": None if shape is None else tuple(shape)})


def _leaf_from_json(data: dict[str, Any], mesh: AbstractMesh | None) -> tuple[list[str], Leaf, Decision]:
    spec = None if data["spec"] is None else spec_from_json(data["spec"])
    axes = None if data["axes"] is None else tuple(data["axes"])
    leaf = Leaf(data["paths"][0], tuple(data["shape"]), _dtype(data["dtype"]), mesh, None, axes)
    return data["paths"], leaf, Decision(spec, data["reason"], None if data["rule"] == "-" else data["rule"])


def _dtype(name: str) -> Any:
    if not name.startswith("key<"):
        return jax.numpy.dtype(name)
    known = [jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype for impl in _KEY_IMPLS]
    found = [dtype for dtype in known if str(dtype) == name]
    if not found:
        raise PlanError(f"a PRNG key type {name!r} that JAX does not bring; known are {', '.join(map(str, known))}")
    return found[0]
