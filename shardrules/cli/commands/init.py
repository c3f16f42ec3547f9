"""`shardrules init`: a first guess of rules for a model, with a golden plan and a workflow that checks both."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import AbstractMesh, PartitionSpec

from shardrules.cli.command import FINDINGS, SUCCESS, Command
from shardrules.cli.errors import UsageError
from shardrules.cli.files import check_writable, named_path, write
from shardrules.cli.init.from_plan import part_of, rules_of_plan
from shardrules.cli.init.text import guess_rules
from shardrules.cli.init.workflow import WORKFLOW, repository_of, workflow_text
from shardrules.cli.models import Model, load_model, read_plan
from shardrules.cli.optimizers import optimizer_state
from shardrules.cli.subject import add_model, make_plan, read_mesh
from shardrules.cli.terminal import finding_line, show, working
from shardrules.core.axes import mesh_text
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import same
from shardrules.rules.files.reader import read_rules_text
from shardrules.rules.replicate import ReplicateShardingRule

RULES, GOLDEN = Path("rules.toml"), Path("plan.json")
"""The files that are written beside the workflow."""


def _declare(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--mesh", metavar="MESH", help="axes and sizes, data:16,model:4; by default that of --plan")
    parser.add_argument("--plan", metavar="JSON", help="begin with the rules of a plan, as autoplan -o writes it")
    parser.add_argument("--optimizer", metavar="NAME", help="counts its state, too: adamw, adafactor, lion, sgd, ...")
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def _run(args: argparse.Namespace) -> int:
    workflow = Path(os.path.relpath(repository_of(Path.cwd()) / WORKFLOW))
    files = (RULES, GOLDEN, workflow)
    existing = [str(file) for file in files if file.exists()]
    if existing and not args.force:
        raise UsageError(
            f"{', '.join(existing)} {'exist' if existing[1:] else 'exists'}: --force replaces what is there"
        )
    if args.mesh is None and args.plan is None:
        raise UsageError("no mesh: pass --mesh data:16,model:4, axes and sizes; or a --plan, which has one")
    planned = None if args.plan is None else read_plan(named_path(args.plan))
    if args.mesh is None and planned is not None and planned.mesh is None:
        raise UsageError(f"{args.plan} has no mesh: pass --mesh data:16,model:4, axes and sizes")
    mesh = read_mesh(args.mesh or mesh_text(None if planned is None else planned.mesh))
    name = _portable(args.model)
    with working(f"loading {args.model}"):
        model = load_model(args.model)
    with working("guessing rules" if planned is None else f"reading {args.plan}"):
        whole = ReplicateShardingRule().plan(model.tree, mesh).check()
        if args.optimizer is not None:
            optimizer_state(args.optimizer, model.tree)
        if planned is None:
            text, specs = guess_rules(name, whole, str(GOLDEN), args.optimizer)
        else:
            part = part_of(planned, str(args.plan), model.tree, whole)
            text, specs = rules_of_plan(name, str(args.plan), part, str(GOLDEN), args.optimizer)
        # The plan is made from the text as it is written, so that the golden plan is what a check will find.
        plan = _plan_as_written(text, specs, model, mesh)
    subject = [name, "--rules", str(RULES)]
    texts = {
        RULES: text,
        GOLDEN: f"{plan.to_json()}\n",
        workflow: workflow_text(Path.cwd(), subject, [] if args.optimizer is None else ["optax"]),
    }
    for file in texts:
        # Before anything is written: all files, or none.
        check_writable(file, makes_folders=True)
    for file, content in texts.items():
        write(file, content, makes_folders=True)
    listed = [finding for finding in plan.findings if finding.severity != "note"]
    for finding in listed:
        show(finding_line(finding))
    show(_summary(plan, subject, workflow, "a first guess" if planned is None else f"those of {args.plan}"))
    return FINDINGS if listed else SUCCESS


def _portable(model: str) -> str:
    """The name of a model with a path that other machines have, too, if it is in this repository."""
    path = Path(model)
    is_inside = path.is_absolute() and path.is_relative_to(repository_of(Path.cwd()))
    return os.path.relpath(path) if is_inside else model


def _plan_as_written(text: str, specs: Sequence[PartitionSpec], model: Model, mesh: AbstractMesh) -> ShardingPlan:
    """The plan that `check` makes of the text, which must decide every array as it was guessed."""
    plan = make_plan(read_rules_text(text, RULES).rules, model.tree, mesh).check()
    for leaf, path, spec in zip(plan.leaves, plan.paths, specs, strict=True):
        if not same(plan.decision(path).applied_spec, spec):
            raise UsageError(f"no pattern can tell {leaf.path!r} from other arrays: rename it, or write rules by hand")
    return plan


def _summary(plan: ShardingPlan, subject: list[str], workflow: Path, origin: str) -> str:
    return (
        f"{RULES}: rules for {plan.memory()}\n"
        f"{GOLDEN}: their plan, with which each later one is compared\n"
        f"{workflow}: checks the plan on every pull request\n\n"
        f"The rules are {origin}. Next:\n"
        f"  {shlex.join(['shardrules', 'plan', *subject])}  # read what they do, and edit {RULES}\n"
        f"  {shlex.join(['shardrules', 'check', *subject, '--update'])}  # accept what you edited\n"
        f"  git add {shlex.join([str(RULES), str(GOLDEN), str(workflow)])}\n"
        f'In Python, shardrules.load_rules("{RULES}") reads the same file.'
    )


COMMAND = Command(
    "init",
    "Writes a first guess of rules, a golden plan, and a workflow that checks them.",
    "MODEL (--mesh MESH | --plan JSON) [options]",
    (
        "init docs/examples/train_gpt.py:GPT --mesh data:4,model:2",
        "init docs/examples/train_gpt.py:GPT --plan before.json --force",
    ),
    _declare,
    _run,
    "findings",
)
