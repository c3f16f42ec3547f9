"""Rules and plans, the two nouns that make each other: a rule makes a plan, a plan can be used as a rule.

Data flows one way. A tree is taken apart into leaves (`core/tree.py`), a rule decides them, and the decisions with
their leaves are a plan. There are three ways to write a rule, each a subclass of the one before:

- `ShardingRule`: a tree of arrays to a tree of specs (`apply`). The engine knows nothing of what happens inside.
- `LeavesShardingRule`: all leaves at once, for rules that compose others or look at the whole tree.
- `LeafShardingRule`: one leaf at a time. Most rules are of this kind.

Three rules stand in this module rather than in `rules/`, because a rule or a plan returns them: `a | b` is a
`ChainShardingRule`, `plan.as_rule()` a `SpecTreeShardingRule`, and `plan.mirror(tree)` asks a `MirrorShardingRule`.
"""

import abc
import collections
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, final

import attrs
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, check_mesh, mesh_sizes, mesh_text
from shardrules.core.check import bytes_text, check_leaves
from shardrules.core.context import current_mesh
from shardrules.core.errors import (
    NoMeshError,
    PatternError,
    PlanError,
    RuleError,
    RuleTypeError,
    ShardRulesError,
    SpecError,
    TreeError,
    suggest,
)
from shardrules.core.finding import Finding, merged, plan_error, shape_text, template
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.mirror import Planned, homes, mirror
from shardrules.core.spec import canonical, checked_spec, code, spec_key, spec_repr
from shardrules.core.storage import codec
from shardrules.core.tree import PathStyle, ReadsIndex, Survey, array_kind, flatten_specs, leaf_paths, survey, widest
from shardrules.core.views.diff import Placement, Placements, PlanDiff
from shardrules.core.views.pictures import blocks_of, plan_picture
from shardrules.core.views.table import (
    Row,
    Totals,
    device_bytes,
    placement_text,
    rows,
    rule_text,
    table_html,
    table_text,
)
from shardrules.drawing.blocks import Blocks
from shardrules.drawing.picture import Picture


class ShardingRule(abc.ABC):
    """A strategy that turns any pytree into PartitionSpecs.

    Subclass it and write `apply` for a rule that looks at the whole tree; inside composites an empty spec from such a
    rule counts as no opinion. For a rule that decides one leaf at a time subclass `LeafShardingRule` instead.

    ```python
    class EverythingOver(sr.ShardingRule):
        def __init__(self, axis):
            self.axis = axis

        def apply(self, pytree):
            return jax.tree.map(lambda x: P(self.axis) if x.ndim else P(), pytree)

    assert EverythingOver("data").apply({"w": np.ones((8, 4))}) == {"w": P("data")}
    ```
    """

    mesh: AnyMesh | None = None
    """The rule's own mesh. It comes before the one that `plan` is given, and before the one in force."""

    parts: tuple["ShardingRule", ...] = ()
    """The rules inside this one."""

    reads_index: ReadsIndex = "value"
    """What the rule reads of list indices in paths. `"no"` lets the engine decide equal layers once."""

    tree_budgets: tuple[int, ...] = ()
    """Limits, in bytes per device, on all arrays of the tree together. A plan that misses one has an error."""

    @abc.abstractmethod
    def apply(self, pytree: Any) -> Any:
        """Returns a PartitionSpec for every array of `pytree`.

        **Arguments:**

        - `pytree`: arrays, `ShapeDtypeStruct`s, Equinox modules, optimizer states; any pytree.

        **Returns:**

        A tree of the same structure. Python numbers get `P()`; callables and other static leaves stay what they are.
        A leaf on which the rule has no opinion gets `P()`: `plan` tells the two apart.
        """

    def plan(self, pytree: Any, mesh: AnyMesh | None = None, *, path_style: PathStyle = "attr") -> "ShardingPlan":
        """Returns the plan for `pytree`: every leaf with its spec, and the reason why. Only shapes are read.

        **Arguments:**

        - `pytree`: as for `apply`.
        - `mesh`: a `Mesh` or an `AbstractMesh`. The rule's own mesh comes first; without either it is the mesh that
            the arrays are on, else the one set by `jax.set_mesh` (or a legacy `with mesh:`). Rules that need no mesh
            work without any.
        - `path_style`: whether fields of named tuples appear in paths by name (`"attr"`) or by position (`"index"`).

        **Returns:**

        A `ShardingPlan`. It may hold findings that are errors: `plan.check()` raises them.

        **Raises:**

        `PlanError`, listing every leaf that the rule could not decide.

        ```python
        plan = sr.FSDPShardingRule("data", min_size_mb=0).plan({"w": np.ones((8, 6))}, sr.mesh_shape("data:4"))
        assert plan.specs == {"w": P("data", None)}
        ```
        """
        found, verdict = _decided(self, pytree, mesh, path_style)
        noted = (*verdict.findings, *_ambiguous(found), *_over_budget(self, found, verdict))
        own = {mesh_text(rule.mesh): rule.mesh for rule in _within(self) if rule.mesh is not None}
        for text, one in own.items():
            if mesh is not None and mesh_sizes(mesh) != mesh_sizes(one):
                message = f"the rule's own mesh ({text}) was taken, not the one given ({mesh_text(mesh)})"
                noted = (*noted, Finding("warning", "mesh-ignored", message, remedy="Give the mesh in one place"))
        return ShardingPlan(found.mesh, found.kinds, verdict.decisions, found, noted, self)

    def __or__(self, other: "ShardingRule") -> "ChainShardingRule":
        """Returns the chain of two rules: `other` refines what this one decided."""
        return ChainShardingRule(self, other) if isinstance(other, ShardingRule) else NotImplemented


class LeavesShardingRule(ShardingRule):
    """A rule that decides many leaves together. Subclass it to compose rules, or to look at the tree as a whole.

    ```python
    @attrs.frozen
    class Biggest(sr.LeavesShardingRule):
        axis: str

        def decide_all(self, leaves):
            biggest = max(leaf.size for leaf in leaves.items)
            return sr.Verdict(tuple(
                leaf.shard(0, self.axis) if leaf.size == biggest else leaf.skip("not the biggest")
                for leaf in leaves.items
            ))

    assert Biggest("data").apply({"a": np.ones(4), "b": np.ones(8)}) == {"a": P(), "b": P("data")}
    ```
    """

    @abc.abstractmethod
    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns one decision for each of `leaves.items`.

        **Arguments:**

        - `leaves`: what to decide, with what is known of the rest of the tree.

        **Returns:**

        A `Verdict`.
        """

    def apply(self, pytree: Any) -> Any:
        """Returns a PartitionSpec for every array of `pytree`.

        **Arguments:**

        - `pytree`: arrays, `ShapeDtypeStruct`s, Equinox modules, optimizer states; any pytree.

        **Returns:**

        A tree of the same structure. Python numbers get `P()`; callables and other static leaves stay what they are.

        **Raises:**

        `PlanError`, listing every leaf that the rule could not decide.
        """
        found, verdict = _decided(self, pytree, None, "attr")
        return found.unflatten([_spec_of(decision) for decision in verdict.decisions], PartitionSpec())


class LeafShardingRule(LeavesShardingRule):
    """A rule that decides one leaf at a time. Subclass it and write `decide`.

    ```python
    @attrs.frozen
    class Rows(sr.LeafShardingRule):
        axis: str
        reads_index = "no"  # the engine may decide equal layers once

        def decide(self, leaf):
            return leaf.shard(0, self.axis) if leaf.fits(0, self.axis) else leaf.skip("rows do not divide")

    specs = Rows("data").plan({"w": np.ones((8, 4)), "b": np.ones(3)}, sr.mesh_shape("data:4")).specs
    assert specs == {"w": P("data", None), "b": P()}
    ```
    """

    @abc.abstractmethod
    def decide(self, leaf: Leaf) -> Decision:
        """Returns what this rule says about one leaf.

        **Arguments:**

        - `leaf`: the array, with what has been decided about it so far.

        **Returns:**

        `leaf.shard(dim, axis)`, `leaf.replicate(why)`, `leaf.skip(why)`, or a `Decision` of your own.
        """

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns one decision for each leaf; what `decide` raises becomes a finding.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`.
        """
        decisions: list[Decision] = []
        findings: list[Finding] = []
        for leaf, count in zip(leaves.items, leaves.counts, strict=True):
            try:
                decision = self.decide(leaf)
            except RuleError as error:
                findings.append(_conflict(error, self, count))
                decision = leaf.skip(error.why)
            decisions.append(decision)
        return Verdict(tuple(decisions), tuple(findings))


def _conflict(error: RuleError, rule: ShardingRule, count: int) -> Finding:
    text = error.rule or repr(rule)
    return Finding(
        "error", "conflict", error.why, error.path, error.hint, error.shape, axis=error.axis, count=count, rule=text
    )


def refined(
    rule: ShardingRule, leaf: Leaf, count: int, spec: PartitionSpec, reason: str, findings: list[Finding]
) -> Decision:
    """Returns `leaf.refine(spec, reason)`; a conflict becomes a finding, so that those of all leaves are told at once.

    **Arguments:**

    - `rule`: the rule that decides.
    - `leaf`, `count`: the leaf, and how many there are of its kind.
    - `spec`, `reason`: what is decided, and why.
    - `findings`: a conflict is appended here.

    **Returns:**

    A `Decision`; no opinion after a conflict.
    """
    try:
        return leaf.refine(spec, reason)
    except RuleError as error:
        findings.append(_conflict(error, rule, count))
        return leaf.skip(error.why)


def _spec_of(decision: Decision) -> PartitionSpec:
    return decision.blank if decision.spec is None else decision.spec


def decide(rule: ShardingRule, leaves: Leaves) -> Verdict:
    """Asks any rule about some leaves: the one place that knows the three ways to write a rule.

    **Arguments:**

    - `rule`: the rule.
    - `leaves`: the leaves.

    **Returns:**

    A `Verdict` whose decisions all name the rule that made them.
    """
    if not leaves.items:
        return Verdict(())
    if rule.mesh is not None:
        leaves = leaves.replace(attrs.evolve(leaf, mesh=rule.mesh) for leaf in leaves.items)
    if leaves.heard is None:
        return _verdict(rule, leaves)
    inside: list[_Heard] = []
    verdict = _verdict(rule, attrs.evolve(leaves, heard=inside))
    leaves.heard.append(_Heard(rule, leaves, verdict, inside))
    return verdict


def _verdict(rule: ShardingRule, leaves: Leaves) -> Verdict:
    if not isinstance(rule, LeavesShardingRule):
        return _decide_by_apply(rule, leaves)
    try:
        verdict = rule.decide_all(leaves)
    except RuleError as error:
        return Verdict(tuple([leaf.skip(error.why) for leaf in leaves.items]), (_conflict(error, rule, 1),))
    if not isinstance(verdict, Verdict):
        raise RuleTypeError(f"{rule!r}: decide_all returned {verdict!r:.80}, not a Verdict(decisions, findings)")
    if len(verdict.decisions) != len(leaves.items):
        raise PlanError(f"{rule!r} gave {len(verdict.decisions)} decisions for {len(leaves.items)} leaves")
    problems: list[Finding] = []
    named = tuple(
        [
            one
            if isinstance(one, Decision) and (one.rule is not None or one.spec is None)
            else _named(rule, leaves, place, one, problems)
            for place, one in enumerate(verdict.decisions)
        ]
    )
    return Verdict(named, (*verdict.findings, *problems), verdict.idle)


def _named(rule: ShardingRule, leaves: Leaves, place: int, said: Any, problems: list[Finding]) -> Decision:
    """What a rule said of a leaf, with its name on it; what cannot be meant becomes a finding."""
    leaf, hint = leaves.items[place], ""
    if isinstance(said, Decision):
        try:
            return Decision(checked_spec(said.spec), said.reason, rule, said.findings)
        except SpecError as error:
            why = str(error)
    else:
        why = f"decide returned {said!r}, not a Decision"
        hint = "Return leaf.shard(dim, axis), leaf.replicate(why), leaf.skip(why) or Decision(spec, reason)"
    problems.append(_conflict(leaf.error(None, why, hint), rule, leaves.counts[place]))
    return leaf.skip(why)


def _decide_by_apply(rule: ShardingRule, leaves: Leaves) -> Verdict:
    """Asks a rule that only has `apply`: it is shown the whole tree, and an empty spec is no opinion.

    Rules inside it find the mesh on the shapes, which comes before the one in force.
    """
    found = leaves.survey
    shown = list(found.kinds)
    for leaf, place in zip(leaves.items, leaves.places, strict=True):
        shown[place] = leaf
    specs = flatten_specs(
        rule.apply(found.structs(shown, leaves.items[0].mesh)), found.treedef, f"what {rule!r} returned"
    )
    by_place = {kind: spec for kind, spec in zip(found.kind_of, specs, strict=True) if kind >= 0}
    decisions: list[Decision] = []
    problems: list[Finding] = []
    for leaf, place in zip(leaves.items, leaves.places, strict=True):
        try:
            spec = PartitionSpec() if by_place[place] is None else checked_spec(by_place[place])
        except SpecError as error:
            problems.append(_conflict(leaf.error(None, f"apply returned no placement: {error}"), rule, 1))
            spec = PartitionSpec()
        if canonical(spec) == PartitionSpec():
            decisions.append(leaf.skip("apply returned an empty spec"))
            continue
        decisions.append(refined(rule, leaf, 1, spec, "from apply", problems))
    return Verdict(
        tuple([Decision(one.spec, one.reason, rule) if one.spec is not None else one for one in decisions]),
        tuple(problems),
    )


def _inner_mesh(rule: ShardingRule) -> AnyMesh | None:
    if rule.mesh is not None:
        return rule.mesh
    return next((mesh for mesh in map(_inner_mesh, rule.parts) if mesh is not None), None)


def _decided(rule: ShardingRule, pytree: Any, mesh: AnyMesh | None, path_style: PathStyle) -> tuple[Survey, Verdict]:
    where = next((one for one in (rule.mesh, mesh, _inner_mesh(rule)) if one is not None), None)
    check_mesh(where)
    in_force = current_mesh() if where is None else None
    found = survey(pytree, where, in_force=in_force, reads_index=rule.reads_index, path_style=path_style)
    verdict = decide(rule, _all_leaves(found))
    if verdict.idle and found.kinds:
        verdict = Verdict(verdict.decisions, (*verdict.findings, *_never_used(rule, verdict)))
    problems = [finding for finding in verdict.findings if finding.code == "conflict"]
    if problems:
        count = sum(finding.count for finding in problems)
        title = f"{count} {'leaf' if count == 1 else 'leaves'} cannot be decided"
        raise plan_error(title, _with_patterns(problems, found))
    return found, verdict


def _ambiguous(found: Survey) -> Iterator[Finding]:
    """An error for each path that two leaves share, which a key with a slash in it can bring about."""
    if not found.slashed:
        return
    for path, count in collections.Counter(found.paths()).items():
        if count > 1:
            key = "a key holds a slash or is empty"
            why = f"{count} leaves have this path, since {key}; a plan tells leaves apart by their paths"
            yield Finding("error", "ambiguous-path", why, path, "Rename one of the keys")


def _over_budget(rule: ShardingRule, found: Survey, verdict: Verdict) -> Iterator[Finding]:
    """An error for each limit on the whole tree that the plan misses, because of leaves that other rules decided."""
    if not rule.tree_budgets:
        return
    sizes = mesh_sizes(found.mesh)
    counts = _all_leaves(found).counts
    held = sum(
        device_bytes(leaf, decision, sizes) * count
        for leaf, decision, count in zip(found.kinds, verdict.decisions, counts, strict=True)
    )
    for limit in dict.fromkeys(rule.tree_budgets):
        if held > limit:
            why = f"all arrays together take {held:,} bytes per device, the limit for the tree is {limit:,}"
            remedy = "Let the rule with the limit come last in a CompositeShardingRule, so that it sees all the others"
            yield Finding("error", "over-budget", why, remedy=remedy)


def _within(rule: ShardingRule) -> Iterator[ShardingRule]:
    yield rule
    for part in rule.parts:
        yield from _within(part)


def _never_used(rule: ShardingRule, verdict: Verdict) -> Iterator[Finding]:
    """The findings about patterns that win nothing in any of the places where their rule stands."""
    rules = list(_within(rule))
    said: list[tuple[ShardingRule, int]] = []
    for owner, number, finding in verdict.idle:
        said.append((owner, number))
        # A rule that stands inside one which does not tell of its parts counts as having one place.
        if said.count((owner, number)) == max(1, rules.count(owner)):
            yield finding


def _all_leaves(found: Survey) -> Leaves:
    counted = collections.Counter(found.kind_of)
    places = range(len(found.kinds))
    return Leaves(found.kinds, tuple([counted[place] for place in places]), tuple(places), found)


def _with_patterns(findings: Iterable[Finding], found: Survey) -> Iterator[Finding]:
    """Findings about a kind of leaf name its first one; here they get the path that stands for all of them."""
    paths: dict[str, str] | None = None
    for finding in findings:
        if finding.count == 1:
            yield finding
            continue
        if paths is None:
            paths = dict(zip((leaf.path for leaf in found.kinds), found.patterns(), strict=True))
        yield attrs.evolve(finding, path=paths.get(finding.path, finding.path))


def derived(make: Callable[[Any], Any]) -> Any:
    """Returns the attrs field of a rule that follows from its other fields, and counts neither for repr nor equality.

    **Arguments:**

    - `make`: from the rule to the value.

    **Returns:**

    An attrs field.
    """
    return attrs.field(init=False, repr=False, eq=False, default=attrs.Factory(make, takes_self=True))


def budgets_of(rules: Iterable[ShardingRule]) -> tuple[int, ...]:
    """Returns the limits on the whole tree that several rules have together.

    **Arguments:**

    - `rules`: the rules inside another.

    **Returns:**

    A tuple of bytes per device.

    ```python
    assert budgets_of([sr.MemoryConstrainedShardingRule(8, scope="tree"), sr.ReplicateShardingRule()]) == (8,)
    ```
    """
    return tuple([limit for rule in rules for limit in rule.tree_budgets])


def as_rule(owner: str) -> Callable[[Any], ShardingRule]:
    """Returns a converter that lets a rule pass.

    **Arguments:**

    - `owner`: the class it is for, for the message.

    **Returns:**

    A function that returns its argument, and raises `RuleTypeError` for what is no rule.
    """
    return lambda rule: as_rules((rule,), owner)[0]


def as_rules(rules: tuple[Any, ...], owner: str) -> tuple[ShardingRule, ...]:
    """Returns `rules` after checking that each is one.

    **Arguments:**

    - `rules`: what was passed.
    - `owner`: the class it was passed to, for the message.

    **Returns:**

    The rules.

    **Raises:**

    `RuleTypeError` for anything else, a text form among them.
    """
    for rule in rules:
        if not isinstance(rule, ShardingRule):
            raise RuleTypeError(f"{owner} takes ShardingRules, got {rule!r}. A text form is read by parse_rule(text).")
    return rules


@final
@attrs.frozen(init=False, repr=False)
class ChainShardingRule(LeavesShardingRule):
    """Rules in a row, each refining what those before it decided. `a | b` is `ChainShardingRule(a, b)`.

    **Arguments:**

    - `rules`: two or more rules. A conflict with what is decided already is an error that names the leaf.

    ```python
    rule = sr.DimShardingRule("model", -1) | sr.FSDPShardingRule("data", min_size_mb=0)
    plan = rule.plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:4,model:2"))
    assert plan.specs == {"w": P("data", "model")}
    ```
    """

    rules: tuple[ShardingRule, ...]
    parts: tuple[ShardingRule, ...] = derived(lambda self: self.rules)
    reads_index: ReadsIndex = derived(lambda self: widest(rule.reads_index for rule in self.rules))
    tree_budgets: tuple[int, ...] = derived(lambda self: budgets_of(self.rules))

    def __init__(self, *rules: ShardingRule) -> None:
        flat: list[ShardingRule] = []
        for rule in as_rules(rules, "ChainShardingRule"):
            flat += rule.rules if isinstance(rule, ChainShardingRule) else [rule]
        self.__attrs_init__(tuple(flat))  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        return f"ChainShardingRule({', '.join(map(repr, self.rules))})"

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns what the rules make of each leaf, one after the other.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`; a decision that several rules made names the chain, and joins their reasons.
        """
        made: list[list[Decision]] = [[] for _ in leaves.items]
        declined: list[list[str]] = [[] for _ in leaves.items]
        findings: list[Finding] = []
        idle: list[tuple[ShardingRule, int, Finding]] = []
        for rule in self.rules:
            verdict = decide(rule, leaves)
            findings += verdict.findings
            idle += verdict.idle
            items = list(leaves.items)
            for number, decision in enumerate(verdict.decisions):
                if decision.spec is None:
                    declined[number].append(decision.reason)
                    continue
                leaf = items[number]
                # Some rules know nothing of what was decided before. The chain sees to it that it stays.
                both = refined(rule, leaf, leaves.counts[number], decision.spec, "", findings)
                if both.spec is not None:
                    made[number].append(attrs.evolve(decision, spec=both.spec))
                    items[number] = attrs.evolve(leaf, spec=both.spec)
            leaves = leaves.replace(items)
        return Verdict(
            tuple([self._joined(*one) for one in zip(made, declined, leaves.items, strict=True)]),
            tuple(findings),
            tuple(idle),
        )

    def _joined(self, made: list[Decision], declined: list[str], leaf: Leaf) -> Decision:
        if not made:
            return leaf.skip("; ".join(dict.fromkeys(declined)))
        findings = tuple(finding for decision in made for finding in decision.findings)
        rule = made[0].rule if len(made) == 1 else self
        return Decision(made[-1].spec, "; ".join(decision.reason for decision in made), rule, findings)


def _as_pinned(specs: Any) -> tuple[tuple[str, PartitionSpec | None], ...]:
    if isinstance(specs, tuple | list) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in specs
    ):
        pairs = list(specs)
    else:
        is_spec: Callable[[Any], bool] = lambda node: node is None or isinstance(node, PartitionSpec)  # noqa: E731
        flat, treedef = jtu.tree_flatten(specs, is_leaf=is_spec)
        paths = leaf_paths(jtu.tree_unflatten(treedef, [0] * len(flat)))
        # `plan.specs` holds the static leaves of a model: what looks like no placement at all is one of those.
        given = (pair for pair in zip(paths, flat, strict=True) if pair[1] is not None)
        pairs = [pair for pair in given if _may_be_meant(pair[1])]
    found: list[tuple[str, PartitionSpec | None]] = []
    wrong: list[str] = []
    for path, given in pairs:
        spec = given.spec if isinstance(given, NamedSharding) else given
        try:
            found.append((path, None if spec is None else checked_spec(spec)))
        except SpecError as error:
            wrong.append(f"  {path or 'the tree'}: {error}")
    if wrong:
        raise SpecError(
            "SpecTreeShardingRule takes a tree of PartitionSpecs, of NamedShardings, or (path, spec) pairs:\n"
            + "\n".join(wrong)
        )
    return tuple(found)


def _may_be_meant(leaf: Any) -> bool:
    """Whether what stands in a tree of specs is there for an array, well or badly."""
    return isinstance(leaf, PartitionSpec | Sharding | str | int | float) or array_kind(leaf) is not None


@final
@attrs.frozen
class SpecTreeShardingRule(LeavesShardingRule):
    """A decided plan used as a rule: to pin, to override, to compose. `plan.as_rule()` makes one.

    **Arguments:**

    - `specs`: a tree of PartitionSpecs or `NamedSharding`s, or a prefix of one (a spec stands for all leaves below it);
        `None` in it is no opinion. Or `(path, spec)` pairs, which is what it is kept as: the fields of named tuples
        have their names there, in plans of either path style.

    ```python
    rule = sr.SpecTreeShardingRule({"embed": P("model"), "layers": P(None, "data")})
    specs = rule.apply({"embed": np.ones(8), "layers": [np.ones((4, 4))], "head": np.ones(8)})
    assert specs == {"embed": P("model"), "layers": [P(None, "data")], "head": P()}
    ```
    """

    specs: tuple[tuple[str, PartitionSpec | None], ...] = attrs.field(converter=_as_pinned, eq=spec_key, repr=code)

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns for each leaf the spec pinned at its path, or at the nearest path above it.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`, with a finding for every pin that no leaf of the tree is at or below.
        """
        pinned = dict(self.specs)
        hit: dict[str, None] = {}
        decisions: list[Decision] = []
        problems: list[Finding] = []
        known = leaves.names()
        for leaf, path, count in zip(leaves.items, known, leaves.counts, strict=True):
            while path not in pinned and path:
                path = path.rpartition("/")[0]
            spec = pinned.get(path)
            hit[path] = None
            if spec is None:
                decisions.append(leaf.skip("not pinned"))
            else:
                decisions.append(refined(self, leaf, count, spec, "pinned", problems))
        # A tree of specs usually pins leaves that other rules of a composite have taken already.
        taken = dict.fromkeys(template(leaf.path) for leaf, _ in leaves.settled)
        unused = [path for path in pinned if path not in hit and template(path) not in taken]
        for number, path in enumerate(unused):
            # To look for the nearest name takes a look at every leaf. Who misses many pins has another tree.
            near = suggest(path, known) if number < _SUGGESTIONS else ""
            why = f"{spec_repr(pinned[path])} is pinned at {path!r}, where the tree has no leaf{near}"
            remedy = "Correct the path, or take the pin out"
            problems.append(Finding("warning", "dead-pin", why, path, remedy, rule="SpecTreeShardingRule"))
        return Verdict(tuple(decisions), tuple(problems))


_SUGGESTIONS = 8  # so many dead pins are told which path comes nearest


def _as_planned(plan: Any) -> tuple[tuple[str, tuple[int, ...], PartitionSpec], ...]:
    if isinstance(plan, ShardingPlan):
        return plan.planned()
    if not isinstance(plan, tuple | list) or not all(isinstance(one, tuple) and len(one) == 3 for one in plan):
        raise RuleTypeError(
            f"MirrorShardingRule takes a plan, or its (path, shape, spec) triples; got {plan!r:.80}. For a tree of "
            "specs, plan first: SpecTreeShardingRule(specs).plan(params, mesh)"
        )
    return tuple([(path, tuple(shape), checked_spec(spec)) for path, shape, spec in plan])


@final
@attrs.frozen
class MirrorShardingRule(LeavesShardingRule):
    """Gives the leaves of an optimizer state, of gradients or of an average the specs of the leaves they mirror.

    A leaf mirrors the planned leaf with the longest path that ends its own: `0/mu/layers/0/w` mirrors `layers/0/w`. Of
    factored states (rows, columns) each takes the dimensions it kept. The rest is replicated, each with a note; in a
    chain it stays what the rules before have made of it.

    **Arguments:**

    - `plan`: the plan of the parameters; it is kept as `(path, shape, spec)` triples.

    ```python
    params = {"w": np.ones((8, 4))}
    plan = sr.DimShardingRule("data", 0).plan(params, sr.mesh_shape("data:4"))
    state = {"mu": params, "count": np.int32(0)}
    assert sr.MirrorShardingRule(plan).apply(state) == {"mu": {"w": P("data", None)}, "count": P()}
    ```
    """

    # A field called `plan` would hide the method of that name.
    planned: tuple[tuple[str, tuple[int, ...], PartitionSpec], ...] = attrs.field(
        alias="plan", converter=_as_planned, eq=spec_key, repr=code
    )

    def __repr__(self) -> str:
        return f"MirrorShardingRule({code(self.planned)})"

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns for each leaf what it takes from the planned leaf that it mirrors.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`.
        """
        known: dict[str, Planned] = {path: (shape, spec) for path, shape, spec in self.planned}
        names = leaves.names()
        found = homes(names, known)
        return Verdict(
            tuple([mirror(leaf, name, known, found) for leaf, name in zip(leaves.items, names, strict=True)])
        )


@final
@attrs.frozen(repr=False, eq=False)
class ShardingPlan:
    """Every leaf of a tree with its decision, the mesh, and the findings. `rule.plan(tree, mesh)` makes one.

    A plan holds shapes and no arrays. It prints as a table, is the same on every host and under every hash seed, and
    two plans are equal when they say the same of the same leaves, for the same reasons.

    **Arguments:**

    - `mesh`: the mesh it is for, or `None`.
    - `kinds`: one leaf for each kind: equal leaves of equal layers are one kind.
    - `decisions`: one for each kind.
    - `survey`: the structure of the tree.
    - `noted`: the findings that came from rules.
    - `rule`: the rule that made it; `None` for a plan that was read from JSON.

    ```python
    plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4), np.float32)}, sr.mesh_shape("data:4"))
    assert plan.specs == {"w": P("data", None)}
    assert plan.memory().device_bytes == 32
    ```
    """

    mesh: AnyMesh | None
    kinds: tuple[Leaf, ...]
    decisions: tuple[Decision, ...]
    survey: Survey
    noted: tuple[Finding, ...] = ()
    rule: ShardingRule | None = None

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """How many leaves of the tree are of each kind."""
        counted = collections.Counter(self.survey.kind_of)
        return tuple([counted[place] for place in range(len(self.kinds))])

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The path of every array of the tree, in order."""
        return self.survey.paths()

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every array of the tree, in the order of `paths`."""
        return tuple(
            [
                attrs.evolve(self.kinds[kind], path=path)
                for path, kind in zip(self.paths, self.kind_indices, strict=True)
            ]
        )

    @functools.cached_property
    def kind_indices(self) -> tuple[int, ...]:
        """The index of the kind of every array, in the order of `paths`."""
        return tuple([kind for kind in self.survey.kind_of if kind >= 0])

    @functools.cached_property
    def _by_path(self) -> dict[str, int]:
        return dict(zip(self.paths, self.kind_indices, strict=True))

    @property
    def specs(self) -> Any:
        """The tree of PartitionSpecs. Numbers get `P()`; callables and other static leaves stay what they are.

        **Raises:**

        `PlanError` for a plan that was read from JSON without its tree.
        """
        return self._tree(self.kind_specs, PartitionSpec())

    def shardings(self, mesh: AnyMesh | None = None) -> Any:
        """Returns the tree of `NamedSharding`s, for `jax.jit`, `jax.device_put` and checkpoints.

        **Arguments:**

        - `mesh`: the mesh to place on; by default that of the plan.

        **Returns:**

        A tree of the structure of the planned tree, with a sharding at every array and number.

        **Raises:**

        `PlanError` when the plan is unsound, `NoMeshError` without a mesh.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:4"))
        assert plan.shardings()["w"].spec == P("data", None)
        ```
        """
        check_mesh(mesh)
        where = mesh if mesh is not None else self.mesh
        if where is None:
            raise NoMeshError("shardings need a mesh: pass one, plan.shardings(mesh), or plan with one")
        attrs.evolve(self, mesh=where).check()
        table = [NamedSharding(where, spec) for spec in self.kind_specs]
        return self._tree(table, NamedSharding(where, PartitionSpec()))

    def _tree(self, values: Sequence[Any], number: Any) -> Any:
        if self.survey.treedef is None:
            raise PlanError(
                "this plan was read from JSON and knows no tree: read it with ShardingPlan.from_json(text, tree), or "
                "use plan.as_rule().plan(tree, mesh)"
            )
        return self.survey.unflatten(values, number)

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """All that is worth knowing about the plan, errors first, one finding for all equal layers."""
        found = [*check_leaves(self.kinds, self.decisions, self.counts, self.mesh), *self.noted]
        return merged(_with_patterns(found, self.survey))

    def check(self) -> Self:
        """Returns the plan itself when it is sound.

        **Returns:**

        The plan.

        **Raises:**

        `PlanError`, listing every finding that is an error.

        ```python
        try:
            sr.DimShardingRule("data", 0).plan({"w": np.ones(6)}, sr.mesh_shape("data:4")).check()
        except sr.errors.PlanError as error:
            assert [finding.code for finding in error.findings] == ["indivisible"]
        ```
        """
        problems = [finding for finding in self.findings if finding.severity == "error"]
        if problems:
            many = f"{len(problems)} error{'s' * (len(problems) > 1)}"
            raise plan_error(f"the plan has {many} (mesh {mesh_text(self.mesh)})", problems)
        return self

    def memory(self) -> Totals:
        """Returns what the planned arrays take, in all and on one device.

        **Returns:**

        `Totals`: `leaf_count`, `total_bytes`, `device_bytes`.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4), np.int8)}, sr.mesh_shape("data:4"))
        assert (plan.memory().total_bytes, plan.memory().device_bytes) == (32, 8)
        ```
        """
        sizes = mesh_sizes(self.mesh)
        triples = list(zip(self.kinds, self.decisions, self.counts, strict=True))
        return Totals(
            sum(self.counts),
            sum(leaf.nbytes * count for leaf, _, count in triples),
            sum(device_bytes(leaf, decision, sizes) * count for leaf, decision, count in triples),
            self.mesh,
        )

    def decision(self, path: str) -> Decision:
        """Returns what was decided about the leaf at `path`.

        **Arguments:**

        - `path`: its path, as the table and `plan.paths` write it.

        **Returns:**

        A `Decision`.

        **Raises:**

        `TreeError` when there is no such leaf.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones(8)}, sr.mesh_shape("data:4"))
        assert plan.decision("w").spec == P("data")
        ```
        """
        kind = self._by_path.get(path)
        if kind is None:
            raise TreeError(f"the plan has no leaf at {path!r}{suggest(path, self.paths)}")
        return self.decisions[kind]

    def explain(self, path: str) -> str:
        """Returns who decided a leaf, why, and what each other rule said.

        **Arguments:**

        - `path`: the path of a leaf, or a regular expression that is searched in all paths.

        **Returns:**

        A text, one block for each kind of leaf that was found.

        **Raises:**

        `TreeError` when nothing matches.

        ```python
        rule = sr.CompositeShardingRule(sr.RegexShardingRule([("bias", P())]), sr.DimShardingRule("data", 0))
        print(rule.plan({"weight": np.ones((8, 4)), "bias": np.ones(8)}, sr.mesh_shape("data:4")).explain("weight"))
        ```
        """
        if path in self._by_path:
            chosen = {self._by_path[path]: path}
        else:
            try:
                pattern = re.compile(path)
            except re.error as error:
                raise PatternError(f"no leaf of the plan is at {path!r}, and it is no pattern: {error}") from error
            chosen = {}
            for one, kind in self._by_path.items():
                if kind not in chosen and pattern.search(one):
                    chosen[kind] = one
        if not chosen:
            raise TreeError(f"no leaf of the plan is at, or matches, {path!r}{suggest(path, self.paths)}")
        return "\n\n".join("\n".join(self._explained(kind, one)) for kind, one in chosen.items())

    def _explained(self, kind: int, path: str) -> Iterator[str]:
        leaf, decision = self.kinds[kind], self.decisions[kind]
        share = device_bytes(leaf, decision, mesh_sizes(self.mesh))
        name = path or "(the tree)"
        yield f"{name}  {shape_text(leaf.shape)} {leaf.dtype}  ({self.counts[kind]} of this kind)"
        yield f"  {spec_repr(decision.spec)}, {bytes_text(share)} of {bytes_text(leaf.nbytes)} per device"
        yield f"  decided by {rule_text(decision.rule)}: {decision.reason}"
        if self.rule is not None:
            yield "  rule by rule:"
            yield from self._heard[0].lines(kind, "    ")

    @functools.cached_property
    def _heard(self) -> "list[_Heard]":
        heard: list[_Heard] = []
        if self.rule is not None:
            decide(self.rule, attrs.evolve(_all_leaves(self.survey), heard=heard))
        return heard

    def blocks(self, path: str) -> Blocks:
        """Returns which device holds which block of a leaf. Notebooks draw it.

        **Arguments:**

        - `path`: its path, as the table and `plan.paths` write it.

        **Returns:**

        `Blocks`; `.picture()` draws them as SVG or with matplotlib.

        **Raises:**

        `TreeError` when there is no such leaf, `NoMeshError` for a plan without a mesh, `PlanError` where its spec is
        unsound.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:4"))
        assert plan.blocks("w").block((3, 0)).bounds == ((6, 8), (0, 4))
        ```
        """
        decision = self.decision(path)
        return blocks_of(path, self.kinds[self._by_path[path]], decision, mesh_sizes(self.mesh))

    def placed_blocks(self) -> Iterator[Blocks]:
        """Yields which device holds which block, for each leaf in order.

        **Raises:**

        As `blocks`.
        """
        own = [
            blocks_of(leaf.path, leaf, one, mesh_sizes(self.mesh))
            for leaf, one in zip(self.kinds, self.decisions, strict=True)
        ]
        yield from (own[kind] for kind in self.kind_indices)

    def treemap(self) -> Picture:
        """Draws what each leaf takes on one device as an area, those of a module together, coloured by spec.

        **Returns:**

        A `Picture`, which notebooks show. `.to_svg()` and `.to_figure()` give it as SVG and with matplotlib.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:4"))
        assert "P(&#x27;data&#x27;, None)" in plan.treemap().to_svg()
        ```
        """
        return plan_picture(self.paths, self.kind_indices, self.kinds, self.decisions, mesh_sizes(self.mesh))

    def tally(self) -> dict[str, int]:
        """Returns how many leaves each reason decided, so that a pattern that takes too many is seen.

        **Returns:**

        From rule and reason to the number of leaves, most first.

        ```python
        plan = sr.RegexShardingRule([("w", P())]).plan({"down": np.ones(8), "w": np.ones(8), "bias": np.ones(8)})
        assert plan.tally() == {"RegexShardingRule: matches 'w'": 2, "-: no pattern matches": 1}
        ```
        """
        counted: collections.Counter[str] = collections.Counter()
        for decision, count in zip(self.decisions, self.counts, strict=True):
            counted[f"{rule_text(decision.rule)}: {decision.reason}"] += count
        return dict(counted.most_common())

    def diff(self, other: "ShardingPlan") -> PlanDiff:
        """Returns what is different in `other`.

        **Arguments:**

        - `other`: another plan, of the same tree or of another one.

        **Returns:**

        A `PlanDiff`; it is false when nothing differs, and prints as a table.

        ```python
        tree, mesh = {"w": np.ones((8, 4))}, sr.mesh_shape("data:4")
        old, new = (sr.DimShardingRule("data", dim).plan(tree, mesh) for dim in (0, 1))
        assert [change.path for change in old.diff(new).changes] == ["w"]
        ```
        """
        return PlanDiff.between(self.placements(), other.placements())

    def placements(self) -> Placements:
        """Returns how each leaf is placed: what `diff` compares.

        **Returns:**

        `Placements`.
        """
        sizes = mesh_sizes(self.mesh)
        said = [
            Placement(leaf.shape, str(leaf.dtype), placement_text(decision), device_bytes(leaf, decision, sizes))
            for leaf, decision in zip(self.kinds, self.decisions, strict=True)
        ]
        return Placements(mesh_text(self.mesh), {path: said[kind] for path, kind in self._by_path.items()})

    def planned(self) -> tuple[tuple[str, tuple[int, ...], PartitionSpec], ...]:
        """Returns path, shape and spec of every leaf; a leaf on which no rule had an opinion is replicated.

        **Returns:**

        A tuple of triples, in the order of the tree. The fields of named tuples have their names, whatever the path
        style of the plan.

        **Raises:**

        `TreeError` for a plan with the other path style that was read from JSON without its tree.
        """
        return tuple((path, self.kinds[kind].shape, _spec_of(self.decisions[kind])) for path, kind in self._by_name())

    def _by_name(self) -> Iterator[tuple[str, int]]:
        """The path of every leaf, fields of named tuples by name, and the number of its kind."""
        paths = self.survey.by_name().paths()
        return zip(paths, self.kind_indices, strict=True)

    def as_rule(self) -> SpecTreeShardingRule:
        """Returns the plan as a rule: it has an opinion on every leaf on which a rule had one.

        **Returns:**

        A `SpecTreeShardingRule`.

        **Raises:**

        `TreeError` for a plan with `path_style="index"` that was read from JSON without its tree.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones(8)}, sr.mesh_shape("data:4"))
        assert plan.as_rule().apply({"w": np.ones(8)}) == plan.specs
        ```
        """
        pairs = ((path, self.decisions[kind].spec) for path, kind in self._by_name())
        return SpecTreeShardingRule(tuple((path, spec) for path, spec in pairs if spec is not None))

    def mirror(self, pytree: Any) -> "ShardingPlan":
        """Returns the plan for an optimizer state, for gradients or for an average of what is planned here.

        **Arguments:**

        - `pytree`: `optim.init(params)`, or `jax.eval_shape` of it.

        **Returns:**

        A plan for the same mesh, and with the same path style.

        **Raises:**

        `TreeError` for a plan with `path_style="index"` that was read from JSON without its tree.

        ```python
        import optax

        params = {"w": np.ones((8, 4), np.float32)}
        plan = sr.DimShardingRule("data", 0).plan(params, sr.mesh_shape("data:4"))
        assert plan.mirror(optax.adam(1e-3).init(params)).decision("0/mu/w").spec == P("data", None)
        ```
        """
        return MirrorShardingRule(self).plan(pytree, self.mesh, path_style=self.survey.path_style)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of mesh, paths, shapes, dtypes and placements: equal on all hosts that hold the same plan."""
        kinds = zip(self.kinds, self.decisions, strict=True)
        said = [f"|{leaf.shape}|{leaf.dtype}|{placement_text(decision)}" for leaf, decision in kinds]
        lines = sorted([path + said[kind] for path, kind in self._by_path.items()])
        return hashlib.sha256("\n".join([mesh_text(self.mesh), *lines]).encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the plan as text that `from_json` reads; equal plans of one tree give equal text.

        **Returns:**

        JSON, laid out so that a change of one leaf is a change of few lines.
        """
        # Grouped anew: how leaves were grouped for planning depends on what the rule reads of indices.
        groups: dict[Any, tuple[list[str], int]] = {}
        for path, kind in self._by_path.items():
            leaf, one = self.kinds[kind], self.decisions[kind]
            key = (
                template(path),
                leaf.shape,
                leaf.dtype,
                leaf.axes,
                spec_repr(one.spec),
                one.reason,
                rule_text(one.rule),
                tuple([attrs.evolve(finding, path=template(finding.path)) for finding in one.findings]),
            )
            groups.setdefault(key, ([], kind))[0].append(path)
        parts = [(paths, self.kinds[kind], self.decisions[kind]) for paths, kind in groups.values()]
        return codec.dumps(
            mesh=None if self.mesh is None else mesh_sizes(self.mesh),
            leaves=[codec.leaf_to_json(paths, leaf, one, rule_text(one.rule)) for paths, leaf, one in parts],
            findings=tuple(_with_patterns(self.noted, self.survey)),
            path_style=self.survey.path_style,
            fingerprint=self.fingerprint,
        )

    @staticmethod
    def from_json(text: str, tree: Any = None) -> "ShardingPlan":
        """Returns the plan that `to_json` wrote.

        **Arguments:**

        - `text`: the JSON.
        - `tree`: the tree it is for. Without it the plan has no `specs`, but can be compared, printed and used as a
            rule: JSON cannot say how an Equinox module is built.

        **Returns:**

        A plan equal to the one written.

        **Raises:**

        `PlanError` when the text is no plan, or was changed by hand so that its fingerprint is another; `TreeError`
        listing all leaves in which `tree` differs.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones(8)}, sr.mesh_shape("data:4"))
        assert sr.ShardingPlan.from_json(plan.to_json()) == plan
        ```
        """
        read = codec.loads(text)
        leaves = tuple([leaf for _, leaf, _ in read.groups])
        decisions = tuple([decision for _, _, decision in read.groups])
        paths = [path for group, _, _ in read.groups for path in group]
        kinds = [kind for kind, (group, _, _) in enumerate(read.groups) for _ in group]
        found = Survey(leaves, kinds, None, (), (), (paths, kinds), path_style=read.path_style)
        plan = ShardingPlan(read.mesh, leaves, decisions, found, read.findings)
        if plan.fingerprint != read.fingerprint:
            raise PlanError(
                f"this plan was changed after it was written: its fingerprint is {read.fingerprint!r}, and that of "
                f"what it says now is {plan.fingerprint!r}. Change the rules, plan anew and write that"
            )
        return plan if tree is None else plan.bind(tree, dtypes=True)

    @property
    def kind_specs(self) -> tuple[PartitionSpec, ...]:
        """The spec of each kind of leaf; `P()` where no rule had an opinion."""
        return tuple([_spec_of(decision) for decision in self.decisions])

    def bind(self, tree: Any, *, dtypes: bool = False) -> "ShardingPlan":
        """Returns this plan for another tree of the same paths and shapes: new values, or the tree of a plan from JSON.

        **Arguments:**

        - `tree`: arrays, or their shapes.
        - `dtypes`: whether the dtypes must be those that were planned, too.

        **Returns:**

        A plan whose `specs` have the structure of `tree`.

        **Raises:**

        `TreeError`, listing all leaves in which the two differ.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones(8)}, sr.mesh_shape("data:4"))
        assert plan.bind({"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}).specs == {"w": P("data")}
        ```
        """
        found = survey(tree, self.mesh)
        if not dtypes and self._fits(found):
            return self
        if any(leaf.path not in self._by_path for leaf in found.kinds):
            by_place = survey(tree, self.mesh, path_style="index")
            found = by_place if all(leaf.path in self._by_path for leaf in by_place.kinds) else found
        problems: list[str] = []
        decisions: list[Decision] = []
        for leaf in found.kinds:
            kind = self._by_path.get(leaf.path)
            if kind is None:
                problems.append(f"  {leaf.path} {shape_text(leaf.shape)}: the plan has no such leaf")
                continue
            known = self.kinds[kind]
            if known.shape != leaf.shape or (dtypes and known.dtype != leaf.dtype):
                problems.append(
                    f"  {leaf.path}: {shape_text(leaf.shape)} {leaf.dtype} in the tree, "
                    f"{shape_text(known.shape)} {known.dtype} in the plan"
                )
            decisions.append(_moved(self.decisions[kind], leaf.path))
        present = {leaf.path: None for leaf in found.kinds}
        problems += [f"  {path}: in the plan, not in the tree" for path in self.paths if path not in present]
        if problems:
            raise TreeError("the tree is not the one that was planned:\n" + "\n".join(problems))
        return ShardingPlan(self.mesh, found.kinds, tuple(decisions), found, self.noted)

    def _fits(self, found: Survey) -> bool:
        """Whether `found` is the very tree that was planned, whatever its dtypes."""
        own = self.survey
        return (
            own.treedef is not None
            and found.treedef == own.treedef
            and all(
                (a < 0) == (b < 0) and (a < 0 or found.kinds[a].shape == self.kinds[b].shape)
                for a, b in zip(found.kind_of, own.kind_of, strict=True)
            )
        )

    @functools.cached_property
    def _content(self) -> tuple[Any, ...]:
        said = tuple([(one.reason, rule_text(one.rule), spec_repr(one.spec)) for one in self.decisions])
        leaves = sorted(
            (path, self.kinds[kind].shape, str(self.kinds[kind].dtype), *said[kind])
            for path, kind in self._by_path.items()
        )
        return mesh_text(self.mesh), tuple(leaves)

    def __eq__(self, other: object) -> bool:
        return self._content == other._content if isinstance(other, ShardingPlan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the table: leaves that differ in nothing but the indices in their paths are one."""
        return rows(self.survey.patterns(), self.kinds, self.decisions, self.counts, self.mesh)

    def __str__(self) -> str:
        return table_text(self.rows, self.memory(), self.findings)

    def __repr__(self) -> str:
        return f"<ShardingPlan {self.memory()}, {len(self.findings)} findings, {self.fingerprint[:12]}>"

    def _repr_html_(self) -> str:
        picture = self.treemap().to_svg() if self.memory().device_bytes else ""
        return picture + table_html(self.rows, self.memory(), self.findings)


def _moved(decision: Decision, path: str) -> Decision:
    """A decision about one leaf of several as one about another of them."""
    if not decision.findings:
        return decision
    return attrs.evolve(decision, findings=tuple([attrs.evolve(found, path=path) for found in decision.findings]))


@final
@attrs.frozen(eq=False)
class _Heard:
    """What one rule was asked and said, and what the rules inside it said on the way."""

    rule: ShardingRule
    leaves: Leaves
    verdict: Verdict
    inside: "list[_Heard]"

    def about(self, kind: int) -> Decision | None:
        """What it said about one kind of leaf; `None` when it was not asked about that."""
        if kind not in self.leaves.places:
            return None
        return self.verdict.decisions[self.leaves.places.index(kind)]

    def lines(self, kind: int, indent: str) -> Iterator[str]:
        decision = self.about(kind)
        if decision is None:
            yield f"{indent}{rule_text(self.rule)}: not asked"
            return
        yield f"{indent}{rule_text(self.rule)}: {spec_repr(decision.spec)}, {decision.reason}"
        for part in self.rule.parts:
            asked = [one for one in self.inside if one.rule is part and one.about(kind) is not None]
            if asked:
                yield from asked[0].lines(kind, indent + "  ")
            else:
                yield f"{indent}  {rule_text(part)}: not asked; {self._alone(part, kind)}"

    def _alone(self, part: ShardingRule, kind: int) -> str:
        """What a rule would have said, had no rule before it decided."""
        alone = attrs.evolve(self.leaves.select([self.leaves.places.index(kind)]), settled=(), heard=None)
        try:
            verdict = decide(part, alone)
        except ShardRulesError as error:
            return f"asked alone it cannot say: {error}"
        if verdict.findings and verdict.findings[0].code == "conflict":
            return f"asked alone it would refuse: {verdict.findings[0].message}"
        return f"alone it would say {spec_repr(verdict.decisions[0].spec)}, {verdict.decisions[0].reason}"
