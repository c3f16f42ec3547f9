"""A file of rules as text, from a plan."""

from typing import Any

from jax.sharding import PartitionSpec

from shardrules.cli.errors import UsageError
from shardrules.cli.init.text import rules_head
from shardrules.cli.rules_out import comments
from shardrules.core.axes import mesh_sizes, mesh_text
from shardrules.core.errors import printable
from shardrules.core.rule import ShardingPlan, SpecTreeShardingRule
from shardrules.core.spec import axis_names
from shardrules.rules.files.writer import rules_text


def part_of(planned: ShardingPlan, file: str, tree: Any, whole: ShardingPlan) -> ShardingPlan:
    """Returns the plan of a model, which is all that is planned, or one of the arguments of a step.

    `whole` is any plan of the model on the mesh that is asked for.
    """
    specs = {path: (shape, spec) for path, shape, spec in planned.planned()}
    axes = dict.fromkeys(name for _, spec in specs.values() for name in axis_names(spec))
    lost = [name for name in axes if name not in mesh_sizes(whole.mesh)]
    if lost:
        raise UsageError(
            f"{file} splits over {', '.join(lost)}, which the mesh {mesh_text(whole.mesh)} lacks: leave --mesh out, or "
            "plan for this mesh"
        )
    arguments = dict.fromkeys(path.partition("/")[0] for path in specs)
    missing: list[tuple[str, tuple[int, ...]]] = []
    for start in ("", *(f"{name}/" for name in arguments)):
        places = [((start + path).rstrip("/"), path, shape) for path, shape, _ in whole.planned()]
        lacking = [(path, shape) for full, path, shape in places if specs.get(full, ((-1,), None))[0] != shape]
        if not lacking:
            pairs = tuple((path, specs[full][1]) for full, path, _ in places)
            return SpecTreeShardingRule(pairs).plan(tree, whole.mesh).check()
        missing = lacking if not missing or len(lacking) < len(missing) else missing
    path, shape = missing[0]
    raise UsageError(
        f"{file} has no plan for {len(missing)} of {len(whole.paths)} arrays of the model, first {path} {shape}: plan "
        "the same model, or a step that takes it as an argument"
    )


def rules_of_plan(
    name: str, file: str, plan: ShardingPlan, golden: str, optimizer: str | None
) -> tuple[str, tuple[PartitionSpec, ...]]:
    """Returns a file with the rules of a plan, and the spec of each path, as `guess_rules` does."""
    rule: Any = plan.to_rules()
    title = f"# Rules for {printable(name)} on {mesh_text(plan.mesh)}: those of {printable(file)}, yours to edit."
    head = rules_head(title, mesh_text(plan.mesh), golden, optimizer)
    text = "".join(f"{line}\n" for line in rules_text(rule, comments(plan, rule)))
    kind_specs = plan.kind_specs
    return head + text, tuple(kind_specs[kind] for kind in plan.kind_indices)
