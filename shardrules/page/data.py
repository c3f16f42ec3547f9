"""The data of the page, as JSON: numbers and texts of a plan, an audit and an autoplan. The script only draws them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs

from shardrules.core.axes import mesh_sizes
from shardrules.core.errors import NoMeshError, PlanError
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan
from shardrules.core.source import short_line
from shardrules.core.spec import spec_repr
from shardrules.core.storage.codec import finding_to_json
from shardrules.core.text import bytes_text
from shardrules.core.views.blocks import Blocks, blocks_of, split_dims
from shardrules.core.views.table import Row
from shardrules.drawing.blocks import blocks_picture
from shardrules.drawing.treemap import Treemap, treemap
from shardrules.page.timeline import KINDS, timeline_svg
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.audits.text import by_cost, count_text, group_collectives
from shardrules.programs.autoplan.answer.frontier import Frontier
from shardrules.programs.autoplan.answer.report import AutoPlanReport
from shardrules.programs.compiled.collectives import totals_by_kind
from shardrules.programs.costs.schedule import LineTime
from shardrules.programs.pipelines.schedule import PipelineSchedule
from shardrules.programs.training.answer.report import TrainingPlanReport

WIDTH, HEIGHT = 1600.0, 720.0
"""The size of the treemap in pixels, which the page scales: about a full screen."""

_DRAWN_KINDS = 500
"""At most this many kinds of leaves get a picture of their blocks, the largest first. Chosen by hand."""


@final
@attrs.frozen
class Part:
    """A plan on the page, and the prefix of its paths: the page may show a model beside its optimizer."""

    plan: ShardingPlan
    prefix: str = ""


def page_data(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns what the page shows of plans, as plain values. The first of `parts` is the model."""
    first = parts[0].plan
    sizes = mesh_sizes(first.mesh)
    memories = [part.plan.memory() for part in parts]
    drawings = _Drawings(sizes)
    rows: list[dict[str, Any]] = []
    paths: list[str] = []
    row_indices: list[int] = []
    leaf_bytes: list[int] = []
    largest = sorted((row.device_bytes for part in parts for row in part.plan.rows), reverse=True)
    least_drawn = largest[_DRAWN_KINDS - 1] if len(largest) > _DRAWN_KINDS else 0
    for part in parts:
        # Rows are numbered over all parts.
        row_of_kind = {kind: len(rows) + index for index, row in enumerate(part.plan.rows) for kind in row.kinds}
        # `row.device_bytes` is for all leaves of a row; the treemap needs the bytes of one leaf.
        sizes_of_rows = [row.decision.device_bytes(row.leaf, sizes) for row in part.plan.rows]
        for path, kind in zip(part.plan.paths, part.plan.kind_indices, strict=True):
            paths.append(part.prefix + path)
            row_indices.append(row_of_kind[kind])
            leaf_bytes.append(sizes_of_rows[row_of_kind[kind] - len(rows)])
        rows += [
            _row(row, size, part.prefix, drawings, least_drawn)
            for row, size in zip(part.plan.rows, sizes_of_rows, strict=True)
        ]
    return {
        "mesh": list(sizes.items()),
        "device_count": math.prod(sizes.values()),
        "totals": {
            "arrays": sum(memory.leaf_count for memory in memories),
            "total_bytes": sum(memory.total_bytes for memory in memories),
            "device_bytes": sum(memory.device_bytes for memory in memories),
        },
        "fingerprint": first.fingerprint,
        "rows": rows,
        "paths": paths,
        "row_of": row_indices,
        "treemap": _treemap_data(treemap(paths, leaf_bytes, WIDTH, HEIGHT)),
        "drawings": drawings.svgs,
        "findings": [finding_to_json(finding) for part in parts for finding in _findings(part)],
    }


def _findings(part: Part) -> Iterator[Finding]:
    for finding in part.plan.findings:
        yield attrs.evolve(finding, path=(part.prefix + finding.path).rstrip("/")) if part.prefix else finding


@final
@attrs.define
class _Drawings:
    """Pictures of blocks, each once: leaves of equal shape and spec share one."""

    sizes: Mapping[str, int]
    svgs: list[str] = attrs.Factory(list)
    indices: dict[Blocks, int] = attrs.Factory(dict)

    def index_of(self, row: Row) -> int | None:
        """Returns the index of a row's picture, which is drawn if it is new; `None` for an unsound decision."""
        try:
            blocks = blocks_of(row.path, row.leaf, row.decision, self.sizes)
        except (NoMeshError, PlanError):
            # The findings show why.
            return None
        if blocks not in self.indices:
            self.indices[blocks] = len(self.svgs)
            self.svgs.append(blocks_picture(blocks).to_svg())
        return self.indices[blocks]


def _row(row: Row, size: int, prefix: str, drawings: _Drawings, least_drawn: int) -> dict[str, Any]:
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
        "drawing": drawings.index_of(row) if row.device_bytes >= least_drawn else None,
    }


def _treemap_data(tiles: Treemap) -> dict[str, Any]:
    def rounded(values: Sequence[float]) -> list[float]:
        # Hundredths of a pixel: half the bytes of the page.
        return [round(value, 2) for value in values]

    return {
        "width": tiles.width,
        "height": tiles.height,
        "modules": [
            [module.path, module.depth, *rounded(module.rectangle), module.amount, module.count]
            for module in tiles.modules
        ],
        "boxes": [value for rectangle in tiles.leaves for value in rounded(rectangle)],
    }


def audit_data(report: AuditReport) -> dict[str, Any]:
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
        "axes": [_axes_data(name, report) for name, total in report.totals_by_axes().items() if total.wire_bytes],
        # The most expensive first: the rest is far below 1 % of the time.
        "collectives": [attrs.asdict(group) for group in group_collectives(report.collectives)[:300]],
        "modules": [[module.path, module.flops, module.wire_bytes] for module in by_cost(report.modules)],
        "seconds": report.step_time(),
        "lines": [_line_data(line) for line in report.lines[:100] if line.seconds or line.communication_seconds],
        "timeline": timeline_svg(report.timeline),
        "timeline_kinds": [kind for kind in KINDS if any(event.kind == kind for event in report.timeline.events)],
        "findings": [finding_to_json(finding) for finding in report.findings],
    }


def _line_data(line: LineTime) -> list[Any]:
    return [
        short_line(line.line) or "(unknown)",
        line.seconds,
        line.compute_seconds,
        line.communication_seconds,
        line.exposed_seconds,
        line.copy_seconds,
        line.critical_seconds,
        short_line(line.hidden_by),
    ]


def _axes_data(axes: str, report: AuditReport) -> dict[str, Any]:
    """The collectives over some axes, by kind."""
    collectives = [each for each in report.collectives if each.axes_text == axes and each.wire_bytes]
    kinds = [[kind, total.run_count, total.wire_bytes] for kind, total in totals_by_kind(collectives).items()]
    count, sent = (sum(column) for column in zip(*(figures for _, *figures in kinds), strict=True))
    return {"axes": axes, "count": count, "wire_bytes": sent, "kinds": kinds}


def autoplan_data(report: AutoPlanReport) -> dict[str, Any]:
    sent = ", ".join(f"{kind} {bytes_text(amount)}" for kind, amount in report.sent_bytes if amount) or "nothing"
    return {
        "name": report.name,
        "mesh": report.mesh,
        "status": report.status,
        "figures": [
            ["time", f"{1000 * report.cost:.4g} ms a call, {1000 * report.bound:.4g} ms at the least"],
            ["compute", f"{1000 * report.time.compute_seconds:.4g} ms"],
            ["communication", f"{1000 * report.time.communication_seconds:.4g} ms"],
            ["memory", f"{report.peak} of {bytes_text(report.memory_limit)}"],
            ["wire", sent],
        ],
        "split_dims": [attrs.asdict(dim) for dim in report.split_dims],
        "frontier": _frontier_data(Frontier(report.name, report.mesh, report.frontier)),
        "candidates": [attrs.asdict(candidate) for candidate in report.candidates],
        "findings": [finding_to_json(finding) for finding in report.findings],
    }


def _frontier_data(frontier: Frontier) -> dict[str, Any] | None:
    points = [attrs.asdict(point) for point in frontier.points]
    return {"svg": frontier.to_svg(), "points": points} if points else None


def _schedule_data(schedule: PipelineSchedule | None) -> dict[str, str] | None:
    if schedule is None:
        return None
    # Chosen by hand: of more microbatches, boxes are soon narrower than a pixel.
    is_drawn = schedule.stages * schedule.microbatches <= 1_024
    return {"svg": schedule.picture().to_svg() if is_drawn else "", "label": schedule.summary}


def training_data(report: TrainingPlanReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "cluster": report.cluster,
        "mesh": report.mesh,
        "figures": [list(row) for row in report.rows() if row[0] not in ("layout", "mesh")],
        "split_dims": [attrs.asdict(dim) for dim in report.split_dims],
        "memory": [list(part) for part in report.memory],
        "peak_bytes": report.peak_bytes,
        "capacity_bytes": report.memory_limit,
        "schedule": _schedule_data(report.schedule),
        "frontier": _frontier_data(report.as_frontier()),
        "candidates": [{**attrs.asdict(candidate), "batch": candidate.batch_text} for candidate in report.candidates],
        "findings": [finding_to_json(finding) for finding in report.findings],
    }
