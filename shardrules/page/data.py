"""What the page shows, as JSON: numbers and texts of a plan, an audit and an autoplan. The page only paints them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs

from shardrules.analysis.audits.report import AuditReport
from shardrules.analysis.audits.text import by_cost, count_text, group_collectives
from shardrules.analysis.program.collectives import totals_by_kind
from shardrules.core.axes import mesh_sizes
from shardrules.core.check import bytes_text
from shardrules.core.errors import NoMeshError, PlanError
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import spec_repr
from shardrules.core.storage.codec import finding_to_json
from shardrules.core.views.pictures import blocks_of, split_dims
from shardrules.core.views.table import Row
from shardrules.drawing.blocks import Blocks
from shardrules.drawing.treemap import Treemap, treemap
from shardrules.planning.answer.frontier import Frontier
from shardrules.planning.answer.report import AutoPlanReport

WIDTH, HEIGHT = 1600.0, 720.0
"""The size of the treemap, which the page scales."""

_DRAWN = 500
"""So many kinds of leaves are drawn at most, those that take the most."""

_COLLECTIVES = 300
"""So many collectives are listed at most, the dearest first."""


@final
@attrs.frozen
class Part:
    """A plan on the page, and what stands before its paths: the page may show a model beside its optimizer.

    **Arguments:**

    - `plan`: the plan.
    - `prefix`: `"optimizer/"`, or nothing.
    """

    plan: ShardingPlan
    prefix: str = ""


def page_data(
    title: str, parts: Sequence[Part], audit: AuditReport | None, planned: AutoPlanReport | None, version: str
) -> dict[str, Any]:
    """Returns all that the page shows.

    **Arguments:**

    - `title`: its heading.
    - `parts`: the plans, that of the model first.
    - `audit`, `planned`: an audit and an autoplan, if there are any.
    - `version`: that of shardrules.

    **Returns:**

    A dictionary of plain values.
    """
    first = parts[0].plan
    sizes = mesh_sizes(first.mesh)
    sums = [part.plan.memory() for part in parts]
    drawings = _Drawings(sizes)
    rows: list[dict[str, Any]] = []
    paths: list[str] = []
    row_of: list[int] = []
    amounts: list[int] = []
    largest = sorted((row.device_bytes for part in parts for row in part.plan.rows), reverse=True)
    least = largest[_DRAWN - 1] if len(largest) > _DRAWN else 0
    for part in parts:
        own = {kind: len(rows) + number for number, row in enumerate(part.plan.rows) for kind in row.kinds}
        each = [row.decision.device_bytes(row.leaf, sizes) for row in part.plan.rows]
        for path, kind in zip(part.plan.paths, part.plan.kind_indices, strict=True):
            paths.append(part.prefix + path)
            row_of.append(own[kind])
            amounts.append(each[own[kind] - len(rows)])
        rows += [_row(row, size, part.prefix, drawings, least) for row, size in zip(part.plan.rows, each, strict=True)]
    return {
        "title": title,
        "made_by": f"shardrules {version}",
        "mesh": list(sizes.items()),
        "device_count": math.prod(sizes.values()),
        "totals": {
            "arrays": sum(one.leaf_count for one in sums),
            "total_bytes": sum(one.total_bytes for one in sums),
            "device_bytes": sum(one.device_bytes for one in sums),
        },
        "fingerprint": first.fingerprint,
        "rows": rows,
        "paths": paths,
        "row_of": row_of,
        "treemap": _tree(treemap(paths, amounts, WIDTH, HEIGHT)),
        "drawings": drawings.made,
        "findings": [finding_to_json(one) for part in parts for one in _findings(part)],
        "audit": None if audit is None else _audit(audit),
        "autoplan": None if planned is None else _autoplan(planned),
    }


def _findings(part: Part) -> Iterator[Finding]:
    for one in part.plan.findings:
        yield attrs.evolve(one, path=(part.prefix + one.path).rstrip("/")) if part.prefix else one


@final
@attrs.define
class _Drawings:
    """Pictures of blocks, each once: leaves of equal shape and spec have the same."""

    sizes: Mapping[str, int]
    made: list[str] = attrs.Factory(list)
    known: dict[Blocks, int] = attrs.Factory(dict)

    def of(self, row: Row) -> int | None:
        try:
            blocks = blocks_of(row.path, row.leaf, row.decision, self.sizes)
        except (NoMeshError, PlanError):  # the findings tell of it
            return None
        if blocks not in self.known:
            self.known[blocks] = len(self.made)
            self.made.append(blocks.picture().to_svg())
        return self.known[blocks]


def _row(row: Row, size: int, prefix: str, drawings: _Drawings, least: int) -> dict[str, Any]:
    dims = split_dims(row.leaf, row.decision)
    return {
        "path": prefix + (row.path or "(the tree)"),
        "count": row.count,
        "shape": list(row.leaf.shape),
        "dtype": str(row.leaf.dtype),
        "spec": spec_repr(row.decision.spec),
        "bytes": row.leaf.nbytes,
        "device_bytes": size,
        "rule": row.decision.rule_name,
        "reason": row.decision.reason,
        "dims": [[whole, math.prod(drawings.sizes.get(axis, 1) for axis in axes), list(axes)] for whole, axes in dims],
        "drawing": drawings.of(row) if row.device_bytes >= least else None,
    }


def _tree(found: Treemap) -> dict[str, Any]:
    def short(values: Sequence[float]) -> list[float]:
        return [round(value, 2) for value in values]

    return {
        "width": found.width,
        "height": found.height,
        "modules": [[one.path, one.depth, *short(one.rectangle), one.amount, one.count] for one in found.modules],
        "boxes": [value for place in found.leaves for value in short(place)],
    }


def _audit(report: AuditReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "target": str(report.target),
        "hardware": report.hardware.name,
        "mesh": report.mesh,
        "device_count": report.device_count,
        "figures": [
            ["matmuls", f"{count_text(report.flops)}FLOP"],
            ["wire", bytes_text(report.wire_bytes)],
            ["memory", f"{bytes_text(report.peak_bytes)} of {bytes_text(report.hardware.memory_bytes)}"],
            ["time", str(report.time)],
        ],
        "memory": [[name, size] for name, size in report.memory.shares().items() if size],
        "peak_bytes": report.peak_bytes,
        "capacity_bytes": report.hardware.memory_bytes,
        "axes": [_along(name, report) for name, total in report.totals_by_axes().items() if total.wire_bytes],
        "collectives": [attrs.asdict(group) for group in group_collectives(report.collectives)[:_COLLECTIVES]],
        "modules": [[one.path, one.flops, one.wire_bytes] for one in by_cost(report.modules)],
        "findings": [finding_to_json(one) for one in report.findings],
    }


def _along(axes: str, report: AuditReport) -> dict[str, Any]:
    """What goes along some axes, by kind."""
    own = [one for one in report.collectives if one.axes_text == axes and one.wire_bytes]
    kinds = [[kind, total.run_count, total.wire_bytes] for kind, total in totals_by_kind(own).items()]
    counted, sent = (sum(column) for column in zip(*(one[1:] for one in kinds), strict=True))
    return {"axes": axes, "count": counted, "wire_bytes": sent, "kinds": kinds}


def _autoplan(report: AutoPlanReport) -> dict[str, Any]:
    sent = ", ".join(f"{kind} {bytes_text(amount)}" for kind, amount in report.sent_bytes if amount) or "nothing"
    frontier = Frontier(report.name, report.mesh, report.frontier)
    return {
        "name": report.name,
        "mesh": report.mesh,
        "status": report.status,
        "figures": [
            ["time", f"{1000 * report.cost:.4g} ms a call, {1000 * report.bound:.4g} ms at the least"],
            ["compute", f"{1000 * report.time.compute_seconds:.4g} ms"],
            ["communication", f"{1000 * report.time.communication_seconds:.4g} ms"],
            ["memory", f"{bytes_text(report.peak_bytes)} of {bytes_text(report.memory_limit)}"],
            ["wire", sent],
        ],
        "split_dims": [attrs.asdict(one) for one in report.split_dims],
        "frontier": {"svg": frontier.to_svg(), "points": [attrs.asdict(one) for one in report.frontier]}
        if report.frontier
        else None,
        "candidates": [attrs.asdict(one) for one in report.candidates],
        "findings": [finding_to_json(one) for one in report.findings],
    }
