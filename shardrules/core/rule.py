"""Rules and plans, the two nouns that make each other: a rule makes a plan, a plan can be used as a rule.

Data flows one way. A tree is taken apart into leaves (`core/tree.py`), a rule decides them, and the decisions with
their leaves are a plan. There are three ways to write a rule, each a subclass of the one before:

- `ShardingRule`: a tree of arrays to a tree of specs (`apply`). The engine cannot look inside.
- `LeavesShardingRule`: all leaves at once, for rules that compose others or look at the whole tree.
- `LeafShardingRule`: one leaf at a time. Most rules are of this kind.

Three rules are in this module rather than in `rules/`, because a rule or a plan returns them: `a | b` is a
`ChainShardingRule`, `plan.as_rule()` a `SpecTreeShardingRule`, and `plan.mirror(tree)` uses a `MirrorShardingRule`.
"""

import abc
import collections
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar, final

import attrs
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.axes import AnyMesh, Axis, check_mesh, mesh_sizes, mesh_text, shown_mesh
from shardrules.core.check import ambiguous_paths, check_leaves, idle_patterns, over_budget, with_templates
from shardrules.core.context import current_mesh
from shardrules.core.counterparts.bind import bind_decisions, same_arrays
from shardrules.core.counterparts.mirror import PlannedLeaf, mirror_leaves
from shardrules.core.errors import (
    ConfigError,
    ConfigTypeError,
    NoMeshError,
    PlanError,
    RuleError,
    RuleTypeError,
    TreeError,
    suggest,
)
from shardrules.core.finding import UNDECIDED_CODES, Finding, merged, plan_error, shape_text
from shardrules.core.leaf import Decision, Leaf, rule_text, undecided
from shardrules.core.leaves import Leaves, RuleCall, Verdict
from shardrules.core.pins import as_pinned, pinned_verdict
from shardrules.core.spec import checked_spec, spec_code, spec_key, spec_repr
from shardrules.core.storage import codec
from shardrules.core.tree import PathStyle, ReadsIndex, Survey, survey, widest
from shardrules.core.verdicts import checked_verdict, conflicts, name_rule, verdict_by_apply
from shardrules.core.views.blocks import Blocks, blocks_of
from shardrules.core.views.diff import Placements, PlanDiff, placements
from shardrules.core.views.explain import explain_kind, find_kinds
from shardrules.core.views.table import MOST_ROWS, Row, Totals, rows, table_html, table_text, totals

T = TypeVar("T")


@final
@attrs.frozen(eq=False)
class _FromFields:
    """A class attribute that each rule computes from its fields, unless its class or the rule itself assigns a value.

    It is computed whenever it is read: not all rules are frozen, and a kept value would outlive a change of a field.
    """

    compute: Callable[[Any], Any]

    def __get__(self, rule: Any, owner: type | None = None) -> Any:
        return self if rule is None else self.compute(rule)


def from_fields(compute: Callable[[Any], T]) -> T:
    """Returns a class attribute that each rule computes from its fields, unless its class assigns a value."""
    attribute: Any = _FromFields(compute)
    return attribute


def _rules_in_fields(rule: "ShardingRule") -> tuple["ShardingRule", ...]:
    """The rules in the attributes of a rule, in order, also those inside tuples, lists and dictionaries."""
    names: Iterable[str] = ()
    if attrs.has(type(rule)):
        names = [field.name for field in attrs.fields(type(rule))]
    elif dataclasses.is_dataclass(rule):
        names = [field.name for field in dataclasses.fields(rule)]
    # Fields may be in slots; what else `__init__` of a subclass sets is not.
    # A field that `__init__` leaves for later has no value yet.
    return tuple(_rules_in({name: getattr(rule, name, None) for name in names} | vars(rule)))


def _rules_in(container: Any, around: tuple[int, ...] = ()) -> Iterator["ShardingRule"]:
    for value in container.values() if isinstance(container, Mapping) else container:
        if isinstance(value, ShardingRule):
            yield value
        elif isinstance(value, tuple | list | Mapping) and id(value) not in around:  # a list may hold itself
            yield from _rules_in(value, (*around, id(value)))


def inner_values(rule: "ShardingRule", name: str) -> Iterator[Any]:
    """Yields the attribute `name` of the rules inside, and of those further inside where it only joins theirs."""
    seen = {id(rule)}  # a rule may refer to the rule around it
    parts = list(reversed(rule.parts))
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        is_joined = getattr(type(part), name) is getattr(LeavesShardingRule, name) and name not in vars(part)
        if is_joined and part.parts:
            parts += reversed(part.parts)
        else:
            yield getattr(part, name)


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
    """The rule's own mesh. It takes precedence over the one passed to `plan`, and over the one in force."""

    parts: tuple["ShardingRule", ...] = from_fields(_rules_in_fields)
    """The rules in the fields of this one. A class that says so itself saves every plan from looking for them."""

    reads_index: ReadsIndex = "value"
    """The part of list indices in paths that the rule reads. `"no"` lets the engine decide equal layers once."""

    tree_budgets: tuple[int, ...] = from_fields(
        lambda rule: tuple(itertools.chain.from_iterable(inner_values(rule, "tree_budgets")))
    )
    """Limits, in bytes per device, on all arrays of the tree together. A plan that misses one has an error."""

    named_axes: tuple[Axis | PartitionSpec | None, ...] = ()
    """The axes and specs in the fields of the rule itself, which a mesh must have."""

    @abc.abstractmethod
    def apply(self, pytree: Any) -> Any:
        """Returns a PartitionSpec for every array of `pytree`.

        **Arguments:**

        - `pytree`: arrays, `ShapeDtypeStruct`s, Equinox modules, optimizer states; any pytree.

        **Returns:**

        A tree of the same structure. Python numbers and leaves on which the rule has no opinion get `P()`; callables
        and other static leaves stay what they are.

        **Raises:**

        `PlanError`, listing every leaf that the rule could not decide.
        """

    def plan(self, pytree: Any, mesh: AnyMesh | None = None, *, path_style: PathStyle = "attr") -> "ShardingPlan":
        """Returns the plan for `pytree`: every leaf with its spec, and the reason why. Only shapes are read.

        **Arguments:**

        - `pytree`: as for `apply`.
        - `mesh`: a `Mesh` or an `AbstractMesh`. The rule's own mesh takes precedence; without either it is the mesh
            that the arrays are on, else the one set by `jax.set_mesh` (or a legacy `with mesh:`). Rules that need no
            mesh work without any.
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
        leaves, verdict = _decide_tree(self, pytree, mesh, path_style)
        tree_survey = leaves.survey
        rule_findings = [*verdict.findings, *idle_patterns(leaves.calls), *ambiguous_paths(tree_survey)]
        budgets = self.tree_budgets
        if budgets:
            rule_findings += over_budget(budgets, leaves, verdict.decisions)
        # Equal meshes of several rules are reported once.
        own_meshes = {mesh_text(rule.mesh): rule.mesh for rule in _nested(self) if rule.mesh is not None}
        for own_mesh in own_meshes.values():
            if mesh is not None and mesh_sizes(mesh) != mesh_sizes(own_mesh):
                own_text, passed_text = shown_mesh(own_mesh), shown_mesh(mesh)
                message = f"the rule's own mesh ({own_text}) is used, not the one passed to plan ({passed_text})"
                rule_findings.append(Finding("warning", "mesh-ignored", message, remedy="Pass the mesh in one place"))
        return ShardingPlan(tree_survey.mesh, verdict.decisions, tree_survey, tuple(rule_findings), self)

    def __or__(self, other: "ShardingRule") -> "ChainShardingRule":
        """Returns the chain of two rules: `other` refines what this one decided."""
        return ChainShardingRule(self, other) if isinstance(other, ShardingRule) else NotImplemented


class LeavesShardingRule(ShardingRule):
    """A rule that decides many leaves together. Subclass it to compose rules, or to look at the tree as a whole.

    ```python
    import attrs

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

    A rule around others reads as much of the indices in paths as they do. One that also looks at `leaf.path` itself
    must say so, or every layer gets what the first one got:

    ```python
    @attrs.frozen
    class FirstLayerWhole(sr.LeavesShardingRule):
        rule: sr.ShardingRule
        reads_index = "value"  # decide_all looks at leaf.path

        def decide_all(self, leaves):
            verdict = sr.decide(self.rule, leaves)
            pairs = zip(leaves.items, verdict.decisions, strict=True)
            return attrs.evolve(verdict, decisions=tuple(
                leaf.replicate("first layer") if leaf.path.startswith("layers/0/") else decision
                for leaf, decision in pairs
            ))

    specs = FirstLayerWhole(sr.DimShardingRule("data", 0)).apply({"layers": [{"w": np.ones(4)}, {"w": np.ones(4)}]})
    assert specs == {"layers": [{"w": P()}, {"w": P("data")}]}
    ```
    """

    reads_index: ReadsIndex = from_fields(lambda rule: widest([*inner_values(rule, "reads_index")] or ["value"]))
    """The part of list indices in paths that the rule reads: by default as the rules in its fields, else `"value"`.

    A rule around others that looks at `leaf.path` itself must assign `"value"`.
    """

    @abc.abstractmethod
    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns one decision for each of `leaves.items`; `leaves` also has what is known of the rest of the tree."""

    def apply(self, pytree: Any) -> Any:
        leaves, verdict = _decide_tree(self, pytree, None, "attr")
        return leaves.survey.unflatten([decision.applied_spec for decision in verdict.decisions], PartitionSpec())


class LeafShardingRule(LeavesShardingRule):
    """A rule that decides one leaf at a time. Subclass it and write `decide`.

    ```python
    import attrs

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

    reads_index: ReadsIndex = "value"
    """The part of list indices in paths that the rule reads. `"no"` lets the engine decide equal layers once."""

    @abc.abstractmethod
    def decide(self, leaf: Leaf) -> Decision:
        """Returns what this rule decides for one `leaf`, which has what was decided about it so far.

        That is `leaf.shard(dim, axis)`, `leaf.replicate(why)`, `leaf.skip(why)`, or a `Decision` of your own.
        """

    def decide_all(self, leaves: Leaves) -> Verdict:
        decisions: list[Decision] = []
        for leaf in leaves.items:
            try:
                decisions.append(self.decide(leaf))
            # A leaf that cannot be decided is recorded: the others are decided, and all are reported together.
            except RuleError as error:
                decisions.append(undecided(error))
            except Exception as error:
                # Any other exception is a mistake in the rule. It goes on to the caller, with the rule and the leaf in
                # a note.
                name_rule(error, self, f" for {leaf.path or 'the tree'} {shape_text(leaf.shape)}")
                raise
        return Verdict(tuple(decisions))


def decide(rule: ShardingRule, leaves: Leaves) -> Verdict:
    """Returns the verdict of any `rule` about some `leaves`; each decision names the rule that made it."""
    if not leaves.items:
        return Verdict(())
    # A rule with its own mesh must see that one, also inside rules that are planned for another.
    if rule.mesh is not None:
        leaves = leaves.replace(attrs.evolve(leaf, mesh=rule.mesh) for leaf in leaves.items)
    _check_reads_index(rule, leaves.survey)
    inner = leaves.recording([])
    ask = (
        rule.decide_all
        if isinstance(rule, LeavesShardingRule)
        else functools.partial(verdict_by_apply, rule, rule.apply)
    )
    verdict = checked_verdict(rule, inner, ask)
    leaves.calls.append(RuleCall(rule, inner, verdict))
    # The record has the idle patterns: a rule around this one must not hand them on a second time.
    return attrs.evolve(verdict, idle=()) if verdict.idle else verdict


def _check_reads_index(rule: ShardingRule, tree_survey: Survey) -> None:
    reads_index = rule.reads_index
    if widest((reads_index, tree_survey.reads_index)) != tree_survey.reads_index:
        raise ConfigError(
            f"{rule_text(rule)} reads list indices in paths (reads_index is {reads_index!r}), and the rule "
            f"that asks it has reads_index {tree_survey.reads_index!r}, so that leaves that differ only in it get one "
            "decision. Keep the inner rule in a field of the outer one, or set "
            f"reads_index = {reads_index!r} there"
        )


def _nested(rule: ShardingRule) -> Iterator[ShardingRule]:
    """The rule itself, then all rules inside it, each once."""
    seen: dict[int, ShardingRule] = {}
    rules = [rule]
    while rules:
        inner = rules.pop()
        if id(inner) not in seen:
            seen[id(inner)] = inner
            yield inner
            rules += reversed(inner.parts)


def _decide_tree(
    rule: ShardingRule, pytree: Any, mesh: AnyMesh | None, path_style: PathStyle
) -> tuple[Leaves, Verdict]:
    # The rule's own mesh, then the one passed to `plan`, then the mesh of a rule inside.
    target_mesh = mesh if rule.mesh is None else rule.mesh
    if target_mesh is None:
        target_mesh = next((part.mesh for part in _nested(rule) if part.mesh is not None), None)
    check_mesh(target_mesh)
    in_force = current_mesh() if target_mesh is None else None
    tree_survey = survey(pytree, target_mesh, in_force=in_force, reads_index=rule.reads_index, path_style=path_style)
    leaves = _all_leaves(tree_survey)
    verdict = decide(rule, leaves)
    problems = [finding for finding in verdict.findings if finding.code in UNDECIDED_CODES]
    if problems:
        count = sum(finding.count for finding in problems)
        title = f"{count} {'leaf' if count == 1 else 'leaves'} cannot be decided"
        # All errors are raised at once, so that they can be fixed together.
        checks = check_leaves(tree_survey.kinds, verdict.decisions, leaves.counts, tree_survey.mesh)
        errors = [finding for finding in checks if finding.severity == "error"]
        title += f", and there are {sum(finding.count for finding in errors)} other errors" if errors else ""
        raise plan_error(title, with_templates([*problems, *errors], tree_survey))
    return leaves, verdict


def _all_leaves(tree_survey: Survey) -> Leaves:
    counter = collections.Counter(tree_survey.kind_of)
    kind_indices = tuple(range(len(tree_survey.kinds)))
    return Leaves(
        tree_survey.kinds, tuple([counter[kind_index] for kind_index in kind_indices]), kind_indices, tree_survey
    )


def as_rule(owner: str) -> Callable[[Any], ShardingRule]:
    """Returns a converter for fields of the class `owner`: it raises `RuleTypeError` for anything but a rule."""
    return lambda rule: as_rules((rule,), owner)[0]


def as_rules(rules: tuple[Any, ...], owner: str) -> tuple[ShardingRule, ...]:
    """Returns `rules`, after checking that each is one; `owner` is the class that takes them, for the message."""
    for rule in rules:
        if not isinstance(rule, ShardingRule):
            raise RuleTypeError(f"{owner} takes ShardingRules, got {rule!r}. Read a text form with parse_rule(text).")
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
    parts = from_fields(lambda rule: rule.rules)

    def __init__(self, *rules: ShardingRule) -> None:
        flat: list[ShardingRule] = []
        for rule in as_rules(rules, "ChainShardingRule"):
            # `a | b | c` is one chain of three, whatever the brackets: only then are its reprs and decisions equal.
            flat += rule.rules if isinstance(rule, ChainShardingRule) else [rule]
        self.__attrs_init__(tuple(flat))  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        return f"ChainShardingRule({', '.join(map(repr, self.rules))})"

    def decide_all(self, leaves: Leaves) -> Verdict:
        opinions: list[list[Decision]] = [[] for _ in leaves.items]
        declined: list[list[str]] = [[] for _ in leaves.items]
        findings: list[Finding] = []
        for rule in self.rules:
            verdict = decide(rule, leaves)
            findings += verdict.findings
            items = list(leaves.items)
            for position, decision in enumerate(verdict.decisions):
                if decision.spec is None:
                    declined[position].append(decision.reason)
                    continue
                # Some rules ignore earlier decisions, so the chain makes sure that they stay.
                refined = items[position].try_refine(decision.spec, "")
                if refined.spec is None:
                    findings += conflicts(rule, (refined,), (leaves.counts[position],))
                else:
                    opinions[position].append(attrs.evolve(decision, spec=refined.spec))
                    items[position] = attrs.evolve(items[position], spec=refined.spec)
            leaves = leaves.replace(items)
        return Verdict(tuple(map(self._joined, opinions, declined, leaves.items)), tuple(findings))

    def _joined(self, opinions: list[Decision], declined: list[str], leaf: Leaf) -> Decision:
        """One decision for several: it names the chain, and joins their reasons."""
        if not opinions:
            return leaf.skip("; ".join(dict.fromkeys(declined)))
        findings = tuple(finding for decision in opinions for finding in decision.findings)
        # A leaf that only one rule split is shown with that rule, not with the chain.
        rule = opinions[0].rule if len(opinions) == 1 else self
        return Decision(opinions[-1].spec, "; ".join(decision.reason for decision in opinions), rule, findings)


@final
@attrs.frozen
class SpecTreeShardingRule(LeavesShardingRule):
    """A decided plan used as a rule: to pin, to override, to compose. `plan.as_rule()` makes one.

    **Arguments:**

    - `specs`: a tree of PartitionSpecs or `NamedSharding`s, or a prefix of one (a spec is for all leaves below it);
        `None` in it means no opinion. Or `(path, spec)` pairs, which is how it is stored: with the fields of named
        tuples by name, in plans of either path style.

    ```python
    rule = sr.SpecTreeShardingRule({"embed": P("model"), "layers": P(None, "data")})
    specs = rule.apply({"embed": np.ones(8), "layers": [np.ones((4, 4))], "head": np.ones(8)})
    assert specs == {"embed": P("model"), "layers": [P(None, "data")], "head": P()}
    ```
    """

    specs: tuple[tuple[str, PartitionSpec | None], ...] = attrs.field(converter=as_pinned, eq=spec_key, repr=spec_code)
    parts = ()  # spares the search for rules among many thousand pins
    named_axes = from_fields(lambda rule: tuple(spec for _, spec in rule.specs))

    def decide_all(self, leaves: Leaves) -> Verdict:
        return pinned_verdict(self.specs, leaves)


def _as_planned(plan: Any) -> tuple[tuple[str, tuple[int, ...], PartitionSpec], ...]:
    if isinstance(plan, ShardingPlan):
        return plan.planned()
    if not isinstance(plan, tuple | list) or not all(isinstance(item, tuple) and len(item) == 3 for item in plan):
        raise ConfigTypeError(
            f"MirrorShardingRule takes a plan, or its (path, shape, spec) triples; got {plan!r:.80}. For a tree of "
            "specs, plan first: SpecTreeShardingRule(specs).plan(params, mesh)"
        )
    return tuple([(path, tuple(shape), checked_spec(spec)) for path, shape, spec in plan])


@final
@attrs.frozen
class MirrorShardingRule(LeavesShardingRule):
    """Gives the leaves of an optimizer state, of gradients or of an average the specs of the leaves they mirror.

    A leaf mirrors the planned leaf with the longest path that ends its own: `0/mu/layers/0/w` mirrors `layers/0/w`. In
    factored states (rows, columns) each leaf takes the dimensions that it kept, and stacks of leaves (histories,
    ensembles) keep the dimensions of the stack whole. A state of all that is planned below one name, such as the
    `params` of a linen model, mirrors it without that name. Other leaves are replicated, each with a note, and a
    warning from 16 MiB on; in a chain they stay as earlier rules have decided.

    **Arguments:**

    - `plan`: the plan of the parameters; it is stored as `(path, shape, spec)` triples.

    ```python
    params = {"w": np.ones((8, 4))}
    plan = sr.DimShardingRule("data", 0).plan(params, sr.mesh_shape("data:4"))
    state = {"mu": params, "count": np.int32(0)}
    assert sr.MirrorShardingRule(plan).apply(state) == {"mu": {"w": P("data", None)}, "count": P()}
    ```
    """

    # A field called `plan` would hide the method of that name.
    planned: tuple[tuple[str, tuple[int, ...], PartitionSpec], ...] = attrs.field(
        alias="plan", converter=_as_planned, eq=spec_key, repr=spec_code
    )
    parts = ()  # spares the search for rules among many thousand leaves

    def __repr__(self) -> str:
        return f"MirrorShardingRule({spec_code(self.planned)})"

    def decide_all(self, leaves: Leaves) -> Verdict:
        # A dictionary, since every leaf of the state looks up several paths.
        planned: dict[str, PlannedLeaf] = {path: (shape, spec) for path, shape, spec in self.planned}
        return Verdict(mirror_leaves(leaves.items, leaves.attr_paths(), planned))


@final
@attrs.frozen(repr=False, eq=False)
class ShardingPlan:
    """Every leaf of a tree with its decision, the mesh, and the findings. `rule.plan(tree, mesh)` makes one.

    A plan holds shapes and no arrays. It prints as a table, is the same on every host and under every hash seed, and
    two plans are equal when they place the same leaves alike, for the same reasons.

    **Arguments:**

    - `mesh`: the mesh it is for, or `None`.
    - `decisions`: one for each of `kinds`: leaves that differ in list indices only may be decided together.
    - `survey`: the structure of the tree.
    - `rule_findings`: the findings that came from rules.
    - `rule`: the rule that made it; `None` for a plan that was read from JSON.
    - `argument_names`: what the first parts of paths are also called, in a plan of the arguments of a function.

    ```python
    plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4), np.float32)}, sr.mesh_shape("data:4"))
    assert plan.specs == {"w": P("data", None)}
    assert plan.memory().device_bytes == 32
    ```
    """

    mesh: AnyMesh | None
    decisions: tuple[Decision, ...]
    survey: Survey
    rule_findings: tuple[Finding, ...] = ()
    rule: ShardingRule | None = None
    argument_names: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[Leaf, ...]:
        """The first leaf of each kind; the leaves of a kind were decided together."""
        return self.survey.kinds

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of leaves of each kind."""
        return _all_leaves(self.survey).counts

    @functools.cached_property
    def kind_indices(self) -> tuple[int, ...]:
        """The index of the kind of every array, in the order of `paths`."""
        return tuple([kind_index for kind_index in self.survey.kind_of if kind_index >= 0])  # -1: not an array

    @property
    def kind_specs(self) -> tuple[PartitionSpec, ...]:
        """The spec of each kind; `P()` where no rule had an opinion."""
        return tuple([decision.applied_spec for decision in self.decisions])

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The path of every array of the tree, in order."""
        return self.survey.paths()

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every array of the tree, in the order of `paths`."""
        pairs = zip(self.paths, self.kind_indices, strict=True)
        return tuple([attrs.evolve(self.kinds[kind_index], path=path) for path, kind_index in pairs])

    @functools.cached_property
    def _kind_by_path(self) -> dict[str, int]:
        return dict(zip(self.paths, self.kind_indices, strict=True))

    @property
    def named_paths(self) -> tuple[str, ...]:
        """The paths with the names of arguments instead of their indices, in a plan of the arguments of a function."""
        if not self.argument_names:
            return self.paths
        parts = [path.partition("/") for path in self.paths]
        return tuple([f"{self.argument_names[int(index)]}{slash}{rest}" for index, slash, rest in parts])

    @property
    def specs(self) -> Any:
        """The tree of PartitionSpecs. Numbers get `P()`; callables and other static leaves stay what they are.

        A plan from JSON without its tree raises a `PlanError`.
        """
        return self.survey.unflatten(self.kind_specs, PartitionSpec())

    def shardings(self, mesh: AnyMesh | None = None) -> Any:
        """Returns the tree of `NamedSharding`s on `mesh`, by default the plan's.

        **Raises:**

        `PlanError` when the plan is unsound, `NoMeshError` without a mesh.
        """
        check_mesh(mesh)
        target_mesh = mesh if mesh is not None else self.mesh
        if target_mesh is None:
            raise NoMeshError("shardings need a mesh: pass one, plan.shardings(mesh), or plan with one")
        # A plan that is sound for its own mesh may not be for this one.
        attrs.evolve(self, mesh=target_mesh).check()
        shardings = [NamedSharding(target_mesh, spec) for spec in self.kind_specs]
        return self.survey.unflatten(shardings, NamedSharding(target_mesh, PartitionSpec()))

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The findings about the plan, errors first. Equal layers share one finding."""
        findings = [*check_leaves(self.kinds, self.decisions, self.counts, self.mesh), *self.rule_findings]
        return merged(with_templates(findings, self.survey))

    def check(self) -> Self:
        """Returns the plan itself when it is sound; otherwise a `PlanError` lists every finding that is an error.

        ```python
        try:
            sr.DimShardingRule("data", 0).plan({"w": np.ones(6)}, sr.mesh_shape("data:4")).check()
        except sr.errors.PlanError as error:
            assert [finding.code for finding in error.findings] == ["indivisible"]
        ```
        """
        errors = [finding for finding in self.findings if finding.severity == "error"]
        if errors:
            count_text = f"{len(errors)} error{'s' * (len(errors) > 1)}"
            raise plan_error(f"the plan has {count_text} (mesh {shown_mesh(self.mesh)})", errors)
        return self

    def memory(self) -> Totals:
        """Returns what the planned arrays take: `leaf_count`, `total_bytes` and `device_bytes`."""
        return totals(self.kinds, self.decisions, self.counts, self.mesh)

    def decision(self, path: str) -> Decision:
        """Returns what was decided about the leaf at `path`, one of `plan.paths`; another path is a `TreeError`."""
        kind_index = self._kind_by_path.get(path)
        if kind_index is None:
            raise TreeError(f"the plan has no leaf at {path!r}{suggest(path, self.paths)}")
        return self.decisions[kind_index]

    def explain(self, path: str) -> str:
        """Returns which rule decided a leaf, why, and what each other rule would have decided, as text.

        **Arguments:**

        - `path`: the path of a leaf, or a regular expression that is searched in all paths. In a plan of arguments,
            paths may begin with the name of an argument instead of its index. Nothing that matches is a `TreeError`.
        """
        sizes, leaves = mesh_sizes(self.mesh), _all_leaves(self.survey)
        matches = find_kinds(path, self._kind_by_path | dict(zip(self.named_paths, self.kind_indices, strict=True)))
        # A plan does not keep the calls of its rules: deciding again records them in `leaves`.
        if self.rule is not None:
            decide(self.rule, leaves)
        blocks = (
            explain_kind(leaves, kind_index, kind_path, self.decisions[kind_index], sizes, decide)
            for kind_index, kind_path in itertools.islice(matches.items(), MOST_ROWS)
        )
        more = len(matches) - MOST_ROWS
        end = [f"and {more:,} more kinds: pass the path of one, or a narrower pattern"] if more > 0 else []
        return "\n\n".join([*map("\n".join, blocks), *end])

    def blocks(self, path: str) -> Blocks:
        """Returns which device holds which block of the leaf at `path`. `shardrules.picture` draws it.

        **Raises:**

        `TreeError` without such a leaf, `NoMeshError` without a mesh, `PlanError` where the spec is unsound.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones((8, 4))}, sr.mesh_shape("data:4"))
        assert plan.blocks("w").block((3, 0)).bounds == ((6, 8), (0, 4))
        ```
        """
        decision = self.decision(path)
        return blocks_of(path, self.kinds[self._kind_by_path[path]], decision, mesh_sizes(self.mesh))

    def tally(self) -> dict[str, int]:
        """Returns how many leaves each reason decided, most first: it shows a pattern that takes too many.

        ```python
        plan = sr.RegexShardingRule([("w", P())]).plan({"down": np.ones(8), "w": np.ones(8), "bias": np.ones(8)})
        assert plan.tally() == {"RegexShardingRule: matches 'w'": 2, "-: no pattern matches": 1}
        ```
        """
        tally: collections.Counter[str] = collections.Counter()
        for decision, count in zip(self.decisions, self.counts, strict=True):
            tally[f"{decision.rule_name}: {decision.reason}"] += count
        return dict(tally.most_common())

    def diff(self, other: "ShardingPlan") -> PlanDiff:
        """Returns what differs in `other`, a plan of the same tree or of another one; it prints as a table."""
        return PlanDiff.between(self.placements(), other.placements())

    def placements(self) -> Placements:
        """Returns how each leaf is placed: what `diff` compares."""
        return placements(self._kind_by_path, self.kinds, self.decisions, self.mesh)

    def planned(self) -> tuple[tuple[str, tuple[int, ...], PartitionSpec], ...]:
        """Returns path, shape and spec of every leaf, with the fields of named tuples by name in its path.

        A plan with `path_style="index"` that was read from JSON without its tree raises a `TreeError`.
        """
        specs = self.kind_specs
        return tuple((path, self.kinds[kind].shape, specs[kind]) for path, kind in self._attr_paths())

    def _attr_paths(self) -> Iterator[tuple[str, int]]:
        """Each path, with the fields of named tuples by name, and the index of its kind."""
        return zip(self.survey.in_attr_style().paths(), self.kind_indices, strict=True)

    def as_rule(self) -> SpecTreeShardingRule:
        """Returns the plan as a rule: it has an opinion on every leaf on which a rule had one; raises as `planned`.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones(8)}, sr.mesh_shape("data:4"))
        assert plan.as_rule().apply({"w": np.ones(8)}) == plan.specs
        ```
        """
        pairs = ((path, self.decisions[kind_index].spec) for path, kind_index in self._attr_paths())
        return SpecTreeShardingRule(tuple((path, spec) for path, spec in pairs if spec is not None))

    def to_rules(self) -> ShardingRule:
        """Returns a short list of patterns that gives every array the spec of this plan, for people to read and edit.

        It is a `RegexShardingRule`: families of arrays from the exceptions to what is left, with specs, or rules such
        as `FSDPShardingRule` that say several of them in fewer words. Specs are equal as placements, `P("data")` and
        `P("data", None)` alike; what no rule had an opinion on is whole. Patterns are for paths with the fields of
        named tuples by name. Optimizer state needs no rules where it has the specs of its parameters: use `mirror`.

        **Raises:**

        `PlanError` if several arrays with different specs have one path, which a key with a slash can cause.

        ```python
        params = [{"wq": np.ones((8, 8)), "wo": np.ones((8, 8)), "norm": np.ones(8)} for _ in range(4)]
        specs = {"wq": P("data", "model"), "wo": P("model", "data"), "norm": P()}
        plan = sr.SpecTreeShardingRule([specs] * 4).plan(params, sr.mesh_shape("data:4,model:2"))
        print(plan.to_rules())
        assert plan.to_rules().plan(params, plan.mesh).specs == plan.specs
        ```
        """
        # Rules of patterns stand above this room: a dotted name is the one way up.
        return importlib.import_module("shardrules.rules.from_plan.rules_of").rules_of(self)

    def mirror(self, pytree: Any) -> "ShardingPlan":
        """Returns the plan for an optimizer state, for gradients or for an average of what is planned here.

        `pytree` is `optim.init(params)`, or `jax.eval_shape` of it. The plan has the same mesh and path style; it
        raises as `planned`.

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
        return codec.fingerprint(self._kind_by_path, self.kinds, self.decisions, self.mesh)

    def to_json(self) -> str:
        """Returns the plan as JSON that `from_json` reads, laid out so that a change of one leaf changes few lines."""
        return codec.dumps(
            mesh=None if self.mesh is None else mesh_sizes(self.mesh),
            leaves=codec.group_leaves(self._kind_by_path, self.kinds, self.decisions),
            findings=tuple(with_templates(self.rule_findings, self.survey)),
            path_style=self.survey.path_style,
            fingerprint=self.fingerprint,
            argument_names=self.argument_names,
        )

    @staticmethod
    def from_json(text: str, tree: Any = None) -> "ShardingPlan":
        """Returns a plan equal to the one that `to_json` wrote as `text`.

        **Arguments:**

        - `tree`: the tree it is for. Without it the plan has no `specs`, but can be compared, printed and used as a
            rule: JSON cannot say how an Equinox module is built.

        **Raises:**

        `PlanError` when the text is not a plan, or was edited so that its fingerprint no longer matches; `TreeError`
        listing all leaves in which `tree` differs.
        """
        saved = codec.loads(text)
        decisions = tuple([decision for _, _, decision in saved.groups])
        names = saved.argument_names
        plan = ShardingPlan(saved.mesh, decisions, saved.survey(), saved.findings, argument_names=names)
        if plan.fingerprint != saved.fingerprint:
            raise PlanError(
                f"this plan was changed after it was written: its fingerprint is {saved.fingerprint!r}, its content "
                f"has {plan.fingerprint!r}. Change the rules, plan again and save that"
            )
        return plan if tree is None else plan.bind(tree, dtypes=True)

    def bind(self, tree: Any, *, dtypes: bool = False) -> "ShardingPlan":
        """Returns this plan for another `tree` of the same paths and shapes: new values, or that of a plan from JSON.

        With `dtypes`, the dtypes must be the planned ones, too.

        **Raises:**

        `TreeError`, listing all leaves in which the two differ.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"w": np.ones(8)}, sr.mesh_shape("data:4"))
        assert plan.bind({"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}).specs == {"w": P("data")}
        ```
        """
        tree_survey = survey(tree, self.mesh)
        if not dtypes and same_arrays(tree_survey, self.survey):
            return self
        # The usual case returned above: comparing structures needs no paths, which are slow to spell out.
        tree_survey, decisions = bind_decisions(
            tree, tree_survey, self._kind_by_path, self.kinds, self.decisions, dtypes=dtypes
        )
        return ShardingPlan(self.mesh, decisions, tree_survey, self.rule_findings, argument_names=self.argument_names)

    @functools.cached_property
    def _content(self) -> tuple[Any, ...]:
        # Rules are compared by name, since a plan from JSON has only their names.
        texts = [(decision.reason, decision.rule_name, spec_repr(decision.spec)) for decision in self.decisions]
        leaves = sorted(
            (path, self.kinds[kind_index].shape, str(self.kinds[kind_index].dtype), *texts[kind_index])
            for path, kind_index in self._kind_by_path.items()
        )
        return mesh_text(self.mesh), tuple(leaves)

    def __eq__(self, other: object) -> bool:
        return self._content == other._content if isinstance(other, ShardingPlan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the table: one for leaves that differ in nothing but the indices in their paths."""
        return rows(self.survey.templates(), self.kinds, self.decisions, self.counts, self.mesh)

    def table(self, most: int | None = None) -> str:
        """Returns what the plan prints, with all rows of its table; with `most`, at most so many.

        ```python
        plan = sr.DimShardingRule("data", 0).plan({"a": np.ones((8, 4)), "b": np.ones(8)}, sr.mesh_shape("data:4"))
        assert plan.table() == str(plan) and "and 1 more row" in plan.table(1)
        ```
        """
        return table_text(self.rows, self.memory(), self.findings, most)

    def __str__(self) -> str:
        return self.table(MOST_ROWS)

    def __repr__(self) -> str:
        return f"<ShardingPlan {self.memory()}, {len(self.findings)} findings, {self.fingerprint[:12]}>"

    def _repr_html_(self) -> str:
        return table_html(self.rows, self.memory(), self.findings)
