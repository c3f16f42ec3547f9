"""The rules of a plan as a file, with comments: for `autoplan`, `train-plan` and `init`."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from shardrules.cli.errors import UsageError
from shardrules.cli.files import check_writable, write
from shardrules.cli.init.text import READING
from shardrules.core.axes import mesh_sizes, mesh_text
from shardrules.core.errors import printable
from shardrules.core.leaf import Leaf
from shardrules.core.rule import ShardingPlan
from shardrules.core.storage.records import toml_string
from shardrules.core.text import bytes_text
from shardrules.programs.autoplan.answer.explain import alternative_text
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.rules.files.writer import proved_text, rules_text
from shardrules.rules.regex import RegexShardingRule


def add_rules_out(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `check_rules_out` and `write_rules` read."""
    parser.add_argument("--rules-out", metavar="FILE", type=Path, help="write the plan as rules, for you to edit")
    parser.add_argument("--force", action="store_true", help="replace the file of --rules-out if it exists")


def check_rules_out(args: argparse.Namespace) -> None:
    """Refuses a file that exists, or that cannot be written: before a search, whose plan would be lost."""
    if args.rules_out is None:
        return
    if args.rules_out.suffix != ".toml":
        raise UsageError(f"--rules-out {args.rules_out}: rules are read from .toml files; name one")
    if args.output is not None and args.output.resolve() == args.rules_out.resolve():
        raise UsageError(f"-o and --rules-out name one file, {args.rules_out}: name two")
    if args.rules_out.exists() and not args.force:
        raise UsageError(f"{args.rules_out} exists: --force replaces what is there")
    check_writable(args.rules_out)


def write_rules(
    file: Path,
    titles: Sequence[str],
    plan: ShardingPlan,
    rule: RegexShardingRule,
    next_best: Callable[[Leaf], str] | None = None,
    optimizer: str | None = None,
) -> None:
    """Writes the rules of a plan below some lines of `titles`.

    `next_best` says what else the largest array of a rule might be.
    """
    lines = [
        *(f"# {printable(title)}" for title in titles),
        *READING.split("\n"),
        "",
        f"mesh = {toml_string(mesh_text(plan.mesh))}",
    ]
    lines += [f"optimizer = {toml_string(optimizer)}"] if optimizer else []
    write(file, proved_text([*lines, *rules_text(rule, comments(plan, rule, next_best))], rule, file))


def comments(
    plan: ShardingPlan, rule: RegexShardingRule, next_best: Callable[[Leaf], str] | None = None
) -> Iterator[Sequence[str]]:
    """Yields the lines of a comment for each pattern: which arrays it takes, and their bytes."""
    sizes = mesh_sizes(plan.mesh)
    winners = rule.winners(plan.survey.in_attr_style().paths())
    groups: list[list[int]] = [[] for _ in rule.rules]
    for index, winner in enumerate(winners):
        groups[winner].append(index)
    leaves, kind_specs = plan.leaves, plan.kind_specs
    specs = [kind_specs[kind] for kind in plan.kind_indices]
    for indices in groups:
        members = [leaves[index] for index in indices]
        if not members:
            yield ["No array yet."]
            continue
        whole = sum(leaf.nbytes for leaf in members)
        each = sum(leaves[index].shard_bytes(specs[index], sizes) for index in indices)
        largest = max(members, key=lambda leaf: leaf.nbytes)
        count = f"{len(members):,} array{'s' * (len(members) != 1)}"
        size = f"{bytes_text(whole)} in all, {bytes_text(each)} per device"
        yield [
            f"{count}, {size}; the largest is {printable(largest.path) or 'the tree'}.",
            *([f"There, {next_best(largest)}."] if next_best is not None and largest.ndim else []),
        ]


def alternatives(planned: AutoPlan, rule_count: int) -> Callable[[Leaf], str]:
    """Returns what `comments` ask: the next best layout of an array of the arguments, by a search.

    All searches together take no longer than the one for the plan might have.
    """
    limited = attrs.evolve(planned, time_limit=planned.time_limit / max(1, rule_count))
    return lambda leaf: alternative_text(limited.alternative(leaf.path))
