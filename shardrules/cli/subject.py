"""What most commands begin with: a model, rules, a mesh, perhaps an optimizer; and the plans that follow from them."""

import argparse
import collections
from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs
import jax
from jax.sharding import AbstractMesh

from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.models import Model, load_model
from shardrules.cli.objects import raised
from shardrules.cli.optimizers import optimizer_state
from shardrules.cli.rules import load_rules
from shardrules.cli.terminal import working
from shardrules.core.axes import mesh_text
from shardrules.core.check import bytes_text
from shardrules.core.errors import PlanError, ShardRulesError, suggest
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.mesh.shape import mesh_shape


@final
@attrs.frozen
class Subject:
    """A planned model.

    **Arguments:**

    - `name`: what it is called in headings.
    - `plan`: the plan of the model.
    - `optimizer`: the optimizer's name; empty without one.
    - `state`: the plan of its state.
    """

    name: str
    plan: ShardingPlan
    optimizer: str = ""
    state: ShardingPlan | None = None

    @property
    def device_bytes(self) -> int:
        """What model and state take on one device."""
        return sum(plan.memory().device_bytes for plan in self.plans)

    @property
    def plans(self) -> tuple[ShardingPlan, ...]:
        """The plan, and that of the state."""
        return (self.plan,) if self.state is None else (self.plan, self.state)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of both plans. The paths of the state begin with `optimizer`."""
        return (*self.plan.findings, *(self._of_state() if self.state else ()))

    def _of_state(self) -> Iterator[Finding]:
        assert self.state is not None
        for one in self.state.findings:
            yield attrs.evolve(one, path=f"optimizer/{one.path}" if one.path else "optimizer")

    @property
    def summary(self) -> str:
        """What is planned, in one line."""
        with_state = f"; with {self.optimizer} {bytes_text(self.device_bytes)} per device" if self.state else ""
        return f"{self.plan.memory()}{with_state}"

    def state_text(self) -> str:
        """Returns what the optimizer adds, and what that comes to.

        **Returns:**

        Two lines; nothing without an optimizer.
        """
        if self.state is None:
            return ""
        own = self.state.memory()
        return (
            f"{self.optimizer}: {own.leaf_count:,} arrays, {bytes_text(own.total_bytes)} in all, "
            f"{bytes_text(own.device_bytes)} per device\n"
            f"together {bytes_text(self.device_bytes)} per device"
        )


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a subject.

    **Arguments:**

    - `parser`: the command's.
    """
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module:function, file.py:function, a safetensors file or index, an orbax checkpoint, or a plan's JSON",
    )
    add_rules(parser)
    parser.add_argument("--optimizer", metavar="NAME", help="adds its state: adamw, adafactor, lion, sgd, ...")


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name rules and a mesh.

    **Arguments:**

    - `parser`: the command's.
    """
    parser.add_argument("--rules", metavar="RULES", help="file.toml, module:rules, file.py:rules, or \"fsdp('data')\"")
    parser.add_argument("--mesh", metavar="MESH", help="axes and sizes, data:16,model:4; no device is needed")


def load_subject(args: argparse.Namespace) -> Subject:
    """Plans what the arguments name.

    **Arguments:**

    - `args`: those that `add_subject` has read.

    **Returns:**

    A `Subject`.

    **Raises:**

    `UsageError` for what cannot be read; `PlanError` where the rules cannot decide.
    """
    with working(f"loading {args.model}"):
        model = load_model(args.model)
    with working(f"planning {args.model}"):
        plan = _plan(model, args.rules, args.mesh)
        if args.optimizer is None:
            return Subject(model.name, plan)
        state = optimizer_state(args.optimizer, model.tree if model.plan is None else tree_of(model.plan))
        return Subject(model.name, plan, args.optimizer, plan.mirror(state))


def _plan(model: Model, rules: str | None, mesh: str | None) -> ShardingPlan:
    if rules is None:
        if model.plan is None:
            raise UsageError(
                "rules are needed: --rules file.toml, --rules module:rules, or a text; --rules auto is a beginning"
            )
        if mesh is None:
            return model.plan
        return planned(model.plan.as_rule(), tree_of(model.plan), read_mesh(mesh))
    known = load_rules(rules)
    where = read_mesh(mesh) if mesh is not None else known.mesh
    if where is None and model.plan is not None and model.plan.mesh is not None:
        where = read_mesh(mesh_text(model.plan.mesh))
    if where is None:
        raise UsageError("a mesh is needed: --mesh data:16,model:4, axes and sizes; no device has to be there")
    known.check_axes(where)
    return planned(known.rule, model.tree if model.plan is None else tree_of(model.plan), where)


def planned(rule: ShardingRule, tree: Any, mesh: AbstractMesh) -> ShardingPlan:
    """Plans a tree.

    **Arguments:**

    - `rule`, `tree`, `mesh`: what, by which rule, and for which mesh.

    **Returns:**

    The plan; it may be unsound.

    **Raises:**

    `UsageError` where the rule speaks of an axis that the mesh lacks, `PlanError` where it cannot decide.
    """
    try:
        plan = rule.plan(tree, mesh)
    except PlanError as error:
        _refuse_axes([one for one in error.findings if isinstance(one, Finding)], mesh)
        raise
    except ShardRulesError:
        raise
    except Exception as error:  # a rule may be the user's own
        raise UsageError(f"--rules: a rule raised {raised(error)}") from error
    _refuse_axes([one for one in plan.findings if one.code == "unknown-axis"], mesh)
    return plan


def _refuse_axes(findings: Sequence[Finding], mesh: AbstractMesh) -> None:
    """Tells of an axis that the mesh lacks once, and not for every array."""
    lacking = dict.fromkeys(one.axis for one in findings if one.axis is not None and one.axis not in mesh.axis_names)
    if not findings or not lacking:
        return
    names = ", ".join(f"{name!r}{suggest(name, mesh.axis_names)}" for name in lacking)
    count = sum(one.count for one in findings if one.axis in lacking)
    raise UsageError(
        f"the mesh {mesh_text(mesh)} has no axis {names}: the rules ask for it for {count} "
        f"array{'s' * (count > 1)}, {findings[0].path} first; correct the rules, or let FittedShardingRule drop it"
    )


def read_mesh(text: str) -> AbstractMesh:
    """Reads the axes of a mesh.

    **Arguments:**

    - `text`: `"data:16,model:4"`.

    **Returns:**

    A mesh without devices.

    **Raises:**

    `UsageError` where it cannot be read, or has no axes.
    """
    try:
        mesh = mesh_shape(text)
    except ShardRulesError as error:
        raise UsageError(f"--mesh: {one_line(error)}") from error
    if not mesh.axis_names:
        raise UsageError("--mesh is empty: write axes and sizes, data:16,model:4")
    return mesh


def tree_of(plan: ShardingPlan) -> Any:
    """Returns the arrays of a plan as a tree of shapes, each under its path.

    **Arguments:**

    - `plan`: a plan, from JSON for instance.

    **Returns:**

    A dictionary.
    """
    return collections.OrderedDict((leaf.path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) for leaf in plan.leaves)
