"""The rule that a plan becomes, proved equal on every array."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardrules.core.finding import Finding, plan_error
from shardrules.core.leaf import Leaf
from shardrules.core.rule import ShardingPlan
from shardrules.rules.from_plan.families import families, single
from shardrules.rules.from_plan.search import EVERYTHING, shortest
from shardrules.rules.from_plan.values import gives, placement
from shardrules.rules.regex import RegexShardingRule


def rules_of(plan: ShardingPlan, *parts: ShardingPlan) -> RegexShardingRule:
    """Returns the shortest readable rule met that gives every array the spec of the plan: see `plan.to_rules`.

    `parts` are plans of parts of the tree, to whose arrays the rule gives their specs, too, when it is applied to the
    part alone; but not to an array whose path the whole tree has as well.
    """
    paths, leaves, specs = _arrays(plan)
    for part in parts:
        path_set = set(paths)
        for path, leaf, spec in zip(*_arrays(part), strict=True):
            if path not in path_set:
                paths.append(path)
                leaves.append(leaf)
                specs.append(spec)
    text_by_spec: dict[object, str] = {}
    for spec in specs:
        if spec.partitions not in text_by_spec:
            text_by_spec[spec.partitions] = placement(spec)
    texts = [text_by_spec[spec.partitions] for spec in specs]
    if len(set(paths)) < len(paths):
        _refuse_ambiguous(paths, texts)
    if not leaves:
        return RegexShardingRule([(EVERYTHING, PartitionSpec())])
    every = list(families(paths, texts))
    while True:
        rule = RegexShardingRule(shortest(every, paths, leaves, specs))
        wrong = _wrong(rule, paths, leaves, specs, texts)
        if not wrong:
            return rule
        # Patterns are chosen by samples: an array for which they decide otherwise becomes one of them.
        every += [single(paths[index], index) for index in wrong]


def _arrays(plan: ShardingPlan) -> tuple[list[str], list[Leaf], list[PartitionSpec]]:
    """The paths, with the fields of named tuples by name, the leaves and the specs of all arrays of a plan."""
    kinds, kind_specs = plan.kinds, plan.kind_specs
    leaves = [kinds[kind] for kind in plan.kind_indices]
    return list(plan.survey.in_attr_style().paths()), leaves, [kind_specs[kind] for kind in plan.kind_indices]


def _wrong(
    rule: RegexShardingRule,
    paths: Sequence[str],
    leaves: Sequence[Leaf],
    specs: Sequence[PartitionSpec],
    texts: Sequence[str],
) -> list[int]:
    """The arrays to which a rule gives another spec than the planned one."""
    values: list[Any] = [value for _, value in rule.rules]
    answers: dict[tuple[object, ...], bool] = {}
    wrong: list[int] = []
    for index, (winner, leaf, text) in enumerate(zip(rule.winners(paths), leaves, texts, strict=True)):
        value = values[winner]
        key = (winner, text) if isinstance(value, PartitionSpec) else (winner, text, leaf.shape, leaf.dtype)
        is_right = answers.get(key)
        if is_right is None:
            is_right = answers[key] = gives(value, leaf, specs[index])
        if not is_right:
            wrong.append(index)
    return wrong


def _refuse_ambiguous(paths: Sequence[str], texts: Sequence[str]) -> None:
    distinct = dict.fromkeys(zip(paths, texts, strict=True))
    by_path: dict[str, list[str]] = {}
    for path, text in distinct:
        by_path.setdefault(path, []).append(text)
    why = "several arrays have this path, with the specs"
    errors = [
        Finding("error", "ambiguous-path", f"{why} {' and '.join(several)}", path, "Rename one of the keys")
        for path, several in by_path.items()
        if len(several) > 1
    ]
    if errors:
        raise plan_error("no pattern can tell these arrays apart", errors)
