"""Plans as JSON: plain lists and strings, laid out for people who read diffs."""

import hashlib
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, final, get_args

import attrs
import jax
from jax.sharding import AbstractMesh, AxisType

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import PlanError
from shardrules.core.finding import Finding, template
from shardrules.core.leaf import Decision, Leaf, LogicalName
from shardrules.core.spec import spec_from_json, spec_repr, spec_to_json
from shardrules.core.storage.records import Format, record
from shardrules.core.tree import PathStyle, Survey

PLAN = Format("shardrules", 1, "a plan", PlanError)

_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@final
@attrs.frozen
class SavedPlan:
    """The text of a plan as values: for each kind of leaf its paths, the leaf and its decision."""

    mesh: AbstractMesh | None
    groups: tuple[tuple[list[str], Leaf, Decision], ...]
    findings: tuple[Finding, ...]
    path_style: PathStyle
    fingerprint: str
    argument_names: tuple[str, ...] = ()

    def survey(self) -> Survey:
        """Returns the paths and kinds as a survey; it has no structure to build a tree with."""
        kinds = tuple([leaf for _, leaf, _ in self.groups])
        paths = [path for paths, _, _ in self.groups for path in paths]
        kind_of = [kind for kind, (paths, _, _) in enumerate(self.groups) for _ in paths]
        return Survey(kinds, kind_of, None, (), (), (paths, kind_of), path_style=self.path_style)


def group_leaves(
    kind_by_path: Mapping[str, int], kinds: Sequence[Leaf], decisions: Sequence[Decision]
) -> list[dict[str, Any]]:
    """Returns the leaves of a plan as plain data, those that differ in the indices of their paths as one.

    They are grouped again, since the kinds of a plan depend on what its rules read of indices, and equal plans must
    give equal text.
    """
    keys = [
        (
            leaf.shape,
            leaf.dtype,
            leaf.axes,
            spec_repr(decision.spec),
            decision.reason,
            decision.rule_name,
            tuple([attrs.evolve(finding, path=template(finding.path)) for finding in decision.findings]),
        )
        for leaf, decision in zip(kinds, decisions, strict=True)
    ]
    groups: dict[Any, tuple[list[str], int]] = {}
    for path, kind in kind_by_path.items():
        groups.setdefault((template(path), keys[kind]), ([], kind))[0].append(path)
    return [leaf_to_json(paths, kinds[kind], decisions[kind]) for paths, kind in groups.values()]


def fingerprint(
    kind_by_path: Mapping[str, int], kinds: Sequence[Leaf], decisions: Sequence[Decision], mesh: AnyMesh | None
) -> str:
    """Returns a hash of mesh, paths, shapes, dtypes and placements."""
    pairs = zip(kinds, decisions, strict=True)
    texts = [f"|{leaf.shape}|{leaf.dtype}|{decision.placement}" for leaf, decision in pairs]
    # Sorted, so that the order of dictionaries on different hosts does not count.
    lines = sorted([path + texts[kind] for path, kind in kind_by_path.items()])
    # The keys of dictionaries may hold lone surrogates.
    return hashlib.sha256("\n".join([mesh_text(mesh), *lines]).encode(errors="surrogatepass")).hexdigest()


def leaf_to_json(paths: Sequence[str], leaf: Leaf, decision: Decision) -> dict[str, Any]:
    """Returns one kind of leaf as plain data, with the paths of all leaves of the kind."""
    return {
        "paths": list(paths),
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "axes": None if leaf.axes is None else list(leaf.axes),
        "spec": None if decision.spec is None else spec_to_json(decision.spec),
        "rule": decision.rule_name,
        "reason": decision.reason,
        "findings": [finding_to_json(finding) for finding in decision.findings],
    }


def dumps(
    mesh: Mapping[str, int] | None,
    leaves: Sequence[Mapping[str, Any]],
    findings: Sequence[Finding],
    path_style: PathStyle,
    fingerprint: str,
    argument_names: Sequence[str] = (),
) -> str:
    """Returns the text of a plan: `leaves` are what `group_leaves` gives, `findings` come from rules."""
    data = {
        "fingerprint": fingerprint,
        "mesh": None if mesh is None else dict(mesh),
        "path_style": path_style,
        **({"argument_names": list(argument_names)} if argument_names else {}),
        "leaves": list(leaves),
        "findings": [finding_to_json(finding) for finding in findings],
    }
    return PLAN.write(data)


def loads(text: str) -> SavedPlan:
    """Returns what `dumps` wrote; a `PlanError` when the text is not a plan."""
    with PLAN.read(text) as data:
        mesh = None if data["mesh"] is None else _mesh_from_json(data["mesh"])
        groups = tuple(_leaf_from_json(item, mesh) for item in _typed(data["leaves"], list))
        style = data["path_style"]
        if style not in get_args(PathStyle):
            raise ValueError(f"unknown path style {style!r}")
        findings = record(tuple[Finding, ...], data["findings"], "findings")
        names = _typed_tuple(data.get("argument_names", []), str)
        _check_argument_names(names, groups)
        return SavedPlan(mesh, groups, findings, style, _typed(data["fingerprint"], str), names)


def _check_argument_names(names: Sequence[str], groups: Sequence[tuple[list[str], Leaf, Decision]]) -> None:
    indices = [path.partition("/")[0] for paths, _, _ in groups for path in paths]
    expected = {str(index) for index in range(len(names))}
    if names and not expected.issuperset(indices):
        raise ValueError(f"paths do not begin with the index of one of {len(names)} arguments")


def _typed(value: Any, kind: type | UnionType) -> Any:
    """Returns `value`, which people may have edited, after checking its type."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"expected {kind.__name__ if isinstance(kind, type) else kind}, got {value!r}")
    return value


def _typed_tuple(value: Any, kind: type | UnionType, least: int = 0) -> tuple[Any, ...]:
    items = tuple(_typed(item, kind) for item in _typed(value, list))
    if any(isinstance(item, int) and item < least for item in items):
        raise ValueError(f"{value!r} has a number below {least}")
    return items


def _mesh_from_json(sizes: Any) -> AbstractMesh:
    axis_types = (AxisType.Auto,) * len(_typed(sizes, dict))  # some versions of JAX have another default
    return AbstractMesh(_typed_tuple(list(sizes.values()), int, 1), tuple(sizes), axis_types=axis_types)


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """Returns a finding as plain data, without `source` where that is unknown: findings of plans have none."""
    return attrs.asdict(finding, filter=lambda field, value: field.name != "source" or bool(value))


def _leaf_from_json(data: Any, mesh: AbstractMesh | None) -> tuple[list[str], Leaf, Decision]:
    spec = None if data["spec"] is None else spec_from_json(_typed(data["spec"], list))
    axes = None if data["axes"] is None else tuple(map(_logical_name, _typed(data["axes"], list)))
    paths, rule = list(_typed_tuple(data["paths"], str)), _typed(data["rule"], str)
    dtype = _dtype_from_name(_typed(data["dtype"], str))
    leaf = Leaf(paths[0], _typed_tuple(data["shape"], int), dtype, mesh, None, axes)
    reason, findings = _typed(data["reason"], str), record(tuple[Finding, ...], data["findings"], "findings")
    return paths, leaf, Decision(spec, reason, None if rule == "-" else rule, findings)


def _logical_name(data: Any) -> LogicalName:
    return _typed_tuple(data, str) if isinstance(data, list) else _typed(data, str | None)


def _dtype_from_name(name: str) -> Any:
    if not name.startswith("key<"):
        return jax.numpy.dtype(name)
    # The dtypes of PRNG keys cannot be built from their names.
    dtypes = [jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype for impl in _KEY_IMPLS]
    matches = [dtype for dtype in dtypes if str(dtype) == name]
    if not matches:
        raise PlanError(f"unknown PRNG key type {name!r}; JAX has {', '.join(map(str, dtypes))}")
    return matches[0]
