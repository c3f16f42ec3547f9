"""`shardrules diff`: what changed between two plans, or two audits, and what it costs."""

import argparse
import functools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from shardrules.analysis.audits.report import AuditReport
from shardrules.cli.command import FINE, FOUND, Command
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import read_text
from shardrules.cli.models import read_plan
from shardrules.cli.terminal import show
from shardrules.core.axes import mesh_sizes
from shardrules.core.check import bytes_text
from shardrules.core.errors import ReportError
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import entries
from shardrules.drawing.blocks import Blocks
from shardrules.planning.graph.layouts import WHOLE, moves
from shardrules.planning.graph.machine import COLLECTIVE_KINDS, Machine


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", type=Path, help="the JSON of a plan, of an autoplan, or of an audit")
    parser.add_argument("new", metavar="NEW", type=Path, help="another of the same kind")
    parser.add_argument("--exit-code", action="store_true", help="1 where they differ, as git diff has it")


def _run(args: argparse.Namespace) -> int:
    kinds = [_is_audit(file) for file in (args.old, args.new)]
    if kinds[0] != kinds[1]:
        audit, plan = (args.old, args.new) if kinds[0] else (args.new, args.old)
        raise UsageError(f"{audit} is an audit and {plan} is not: two audits can be compared, or two plans")
    if kinds[0]:
        changes: Any = _audit(args.old).diff(_audit(args.new))
        show(str(changes))
    else:
        old, new = read_plan(args.old), read_plan(args.new)
        changes = old.diff(new)
        show("\n".join([str(changes), *(_bill(old, new) if changes else ())]))
    return FOUND if changes and args.exit_code else FINE


def _is_audit(file: Path) -> bool:
    try:
        data = json.loads(read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{file} is no JSON: {one_line(error)}") from error
    return isinstance(data, dict) and "shardrules_audit" in data


def _audit(file: Path) -> AuditReport:
    try:
        return AuditReport.from_json(read_text(file))
    except ReportError as error:
        raise UsageError(f"{file}: {one_line(error)}") from error


def _bill(old: ShardingPlan, new: ShardingPlan) -> Iterator[str]:
    """What it takes to bring arrays from where they are under one plan to where the other wants them."""
    if old.mesh is None or new.mesh is None:
        return
    if [*mesh_sizes(old.mesh).items()] != [*mesh_sizes(new.mesh).items()]:
        yield from _between_meshes(old, new)
        return
    sent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    machine = Machine.of(new.mesh)
    after = {path: (shape, spec) for path, shape, spec in new.planned()}
    sizes = {path: leaf.nbytes for path, leaf in zip(old.paths, old.leaves, strict=True)}
    for path, shape, spec in old.planned():
        there = after.get(path)
        if there is None or there[0] != shape:
            continue
        for kind, part in _between(_layout(spec, machine), _layout(there[1], machine), machine):
            sent[kind] += round(part * sizes[path])
            counts[kind] += 1
    if not sent:
        yield "to go from one to the other no device has to send anything"
        return
    parts = [f"{counts[kind]:,} x {kind} {bytes_text(sent[kind])}" for kind in COLLECTIVE_KINDS if kind in sent]
    yield f"to go from one to the other each device sends {', '.join(parts)}"


def _between_meshes(old: ShardingPlan, new: ShardingPlan) -> Iterator[str]:
    """What devices lack of what they are to hold, if those of one mesh are the first of the other."""
    before, after = (dict(zip(plan.paths, plan.leaf_blocks(), strict=True)) for plan in (old, new))
    sizes = dict(zip(new.paths, new.leaves, strict=True))
    lacking: Counter[int] = Counter()
    known: dict[tuple[Blocks, Blocks], list[tuple[int, int]]] = {}
    for path, blocks in after.items():
        there = before.get(path)
        if there is None or [size for size, _ in there.dims] != [size for size, _ in blocks.dims]:
            continue
        if (there, blocks) not in known:
            known[there, blocks] = _lacking(there, blocks)
        size = math.prod(sizes[path].shape)
        for device, count in known[there, blocks]:
            lacking[device] += round(count * sizes[path].nbytes / size) if size else 0
    if not any(lacking.values()):
        yield "to go from one to the other nothing has to be sent, if both meshes begin with the same devices"
        return
    yield (
        f"to go from one to the other devices are sent {bytes_text(sum(lacking.values()))} in all, one of them "
        f"{bytes_text(max(lacking.values()))}, if both meshes begin with the same devices: reshard sends just that"
    )


def _lacking(old: Blocks, new: Blocks) -> list[tuple[int, int]]:
    """For each device how many elements it is to hold and does not have."""
    held = {device: block.bounds for block in old.all() for device in block.devices}
    found: list[tuple[int, int]] = []
    for block in new.all():
        size = math.prod(stop - start for start, stop in block.bounds)
        for device in block.devices:
            own = held.get(device)
            common = (
                0
                if own is None
                else math.prod(
                    max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(own, block.bounds, strict=True)
                )
            )
            found.append((device, size - common))
    return found


def _layout(spec: PartitionSpec, machine: Machine) -> tuple[int, ...]:
    where = {name: dim for dim, entry in enumerate(entries(spec)) if isinstance(entry, tuple) for name in entry}
    return tuple(where.get(axis, WHOLE) for axis in machine.axes)


@functools.cache
def _between(old: tuple[int, ...], new: tuple[int, ...], machine: Machine) -> list[tuple[str, float]]:
    bill = moves(np.array([old]), np.array([new]), machine).sent[:, 0, 0]
    return [(kind, float(part)) for kind, part in zip(COLLECTIVE_KINDS, bill, strict=True) if part > 0]


COMMAND = Command(
    "diff",
    "Shows what changed between two plans or two audits, in bytes and collectives.",
    "OLD NEW [--exit-code]",
    ("diff before.json after.json",),
    _declare,
    _run,
)
"""What `shardrules diff` is."""
