"""The beginning of most commands: a model, rules, a mesh, perhaps an optimizer; and the plans that follow from them."""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import attrs
from jax.sharding import AbstractMesh

from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.faults import STATE, faults
from shardrules.cli.models import FORMS, Model, load_model
from shardrules.cli.objects import user_code
from shardrules.cli.optimizers import optimizer_state
from shardrules.cli.rules import LoadedRules, load_rules
from shardrules.cli.terminal import working
from shardrules.core.axes import mesh_text
from shardrules.core.errors import PlanError, ShardRulesError, suggest
from shardrules.core.fields import whole_number
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.core.text import bytes_text
from shardrules.mesh.shape import mesh_shape
from shardrules.presets.huggingface.rule import with_head_dim


@final
@attrs.frozen
class Subject:
    """A planned model, with the plan of its optimizer's state, if any."""

    name: str
    """The name in headings."""
    plan: ShardingPlan
    optimizer: str = ""
    state: ShardingPlan | None = None

    @property
    def device_bytes(self) -> int:
        """The bytes of model and state on one device."""
        return sum(plan.memory().device_bytes for plan in self.plans)

    @property
    def plans(self) -> tuple[ShardingPlan, ...]:
        """The plan of the model, and the plan of the state."""
        return (self.plan,) if self.state is None else (self.plan, self.state)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of both plans. Paths in the state begin with `optimizer`."""
        return (*self.plan.findings, *self._state_findings())

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings of both plans, one for each fault."""
        return faults(self.plan.findings, self._state_findings())

    def _state_findings(self) -> Iterator[Finding]:
        for finding in self.state.findings if self.state else ():
            yield attrs.evolve(finding, path=f"{STATE}/{finding.path}" if finding.path else STATE)

    @property
    def summary(self) -> str:
        """Arrays and bytes, in one line."""
        with_state = f"; with {self.optimizer} {bytes_text(self.device_bytes)} per device" if self.state else ""
        return f"{self.plan.memory()}{with_state}"

    def state_text(self) -> str:
        """Returns two lines with the bytes of the optimizer's state and the total; nothing without an optimizer."""
        if self.state is None:
            return ""
        memory = self.state.memory()
        return (
            f"{self.optimizer}: {memory.leaf_count:,} arrays, {bytes_text(memory.total_bytes)} in all, "
            f"{bytes_text(memory.device_bytes)} per device\n"
            f"together {bytes_text(self.device_bytes)} per device"
        )


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `load_subject` reads."""
    add_model(parser)
    add_rules(parser)
    parser.add_argument("--optimizer", metavar="NAME", help="adds its state: adamw, lion, sgd, module:name, ...")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a model."""
    parser.add_argument("model", metavar="MODEL", help=FORMS)


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name rules and a mesh."""
    parser.add_argument("--rules", metavar="RULES", help="file.toml, module:rules, hf, or \"fsdp('data')\"")
    parser.add_argument("--mesh", metavar="MESH", help="axes and sizes, data:16,model:4; no devices needed")


def read_rules(args: argparse.Namespace) -> LoadedRules | None:
    """Reads what `--rules` names, if anything."""
    return None if args.rules is None else load_rules(args.rules)


def load_subject(args: argparse.Namespace, rules: LoadedRules | None = None) -> Subject:
    """Reads the arguments, and plans; `rules` are the result of `read_rules`, if they have been read."""
    with working(f"loading {args.model}"):
        rules = rules or read_rules(args)
        model = load_model(args.model)
        mesh = _mesh_of(args, rules, model)
        optimizer = args.optimizer if rules is None else args.optimizer or rules.file.optimizer
        state = None if optimizer is None else optimizer_state(optimizer, model.tree)
    with working(f"planning {args.model}"):
        plan = _plan(model, rules, mesh)
        return Subject(model.name, plan, optimizer or "", None if state is None else plan.mirror(state))


def _mesh_of(args: argparse.Namespace, rules: LoadedRules | None, model: Model) -> AbstractMesh | None:
    """The mesh on the command line, else the rules' own, else the plan's; `None` where a plan is used as it is."""
    mesh = None if args.mesh is None else read_mesh(args.mesh)
    if rules is None:
        if model.plan is None:
            raise UsageError(
                "no rules: pass --rules file.toml, --rules module:rules, or a rule as text; to start, --rules auto"
            )
        return mesh
    mesh = mesh or rules.file.mesh
    # The mesh of a plan comes last: rules and the command line say what is asked now.
    if mesh is None and model.plan is not None and model.plan.mesh is not None:
        mesh = read_mesh(mesh_text(model.plan.mesh))
    if mesh is None:
        raise UsageError("no mesh: pass --mesh data:16,model:4, axes and sizes; no devices are needed")
    rules.check_axes(mesh)
    return mesh


def _plan(model: Model, rules: LoadedRules | None, mesh: AbstractMesh | None) -> ShardingPlan:
    if mesh is None:
        assert model.plan is not None
        return model.plan
    if rules is None:
        assert model.plan is not None
        return make_plan(model.plan.as_rule(), model.tree, mesh)  # the same decisions on another mesh
    rule = rules.file.rules
    return make_plan(rule if model.head_dim is None else with_head_dim(rule, model.head_dim), model.tree, mesh)


def make_plan(
    rule: ShardingRule,
    tree: Any,
    mesh: AbstractMesh,
    planner: Callable[[ShardingRule, Any, AbstractMesh], ShardingPlan] = ShardingRule.plan,
) -> ShardingPlan:
    """Plans a tree; the plan may be unsound. Unknown axes and errors of the user's own rules are a `UsageError`."""
    try:
        with user_code("--rules: a rule", ShardRulesError):
            plan = planner(rule, tree, mesh)
    except PlanError as error:
        _refuse_unknown_axes([finding for finding in error.findings if isinstance(finding, Finding)], mesh)
        raise
    _refuse_unknown_axes([finding for finding in plan.findings if finding.code == "unknown-axis"], mesh)
    return plan


def _refuse_unknown_axes(findings: Sequence[Finding], mesh: AbstractMesh) -> None:
    """Reports each unknown axis once, and not for every array."""
    unknown = dict.fromkeys(
        finding.axis for finding in findings if finding.axis is not None and finding.axis not in mesh.axis_names
    )
    if not findings or not unknown:
        return
    names = ", ".join(f"{name!r}{suggest(name, mesh.axis_names)}" for name in unknown)
    count = sum(finding.count for finding in findings if finding.axis in unknown)
    raise UsageError(
        f"unknown axis {names}; the mesh is {mesh_text(mesh)}. The rules use it for {count} array{'s' * (count > 1)}, "
        f"first {findings[0].path}; correct the rules, or drop it with FittedShardingRule"
    )


def read_mesh(text: str) -> AbstractMesh:
    """Returns a mesh without devices from its axes and sizes, `"data:16,model:4"`."""
    if re.fullmatch(r"\s*[-+]?\d+\s*", text):
        count = whole_number(text.strip().lstrip("+"))
        remedy = f"name an axis, data:{count}" if count else "write axes and sizes, data:16,model:4"
        raise UsageError(f"--mesh {text:.60}: a mesh has named axes, each of size 1 or more; {remedy}")
    try:
        mesh = mesh_shape(text)
    except ShardRulesError as error:
        raise UsageError(f"--mesh: {one_line(error)}") from error
    if not mesh.axis_names:
        raise UsageError("--mesh is empty: write axes and sizes, data:16,model:4")
    return mesh
