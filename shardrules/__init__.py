"""shardrules: write rules; they turn any pytree of arrays into a sharding plan you can read, prove and apply.

What you compose with is here. The rest is in five rooms: `errors`, `reports` (what functions return), `meshes` and
`specs` (helpers), and `presets` (what users of other libraries come from). Importing touches no device, flag or
environment variable, and every name is imported when it is first used.
"""

import importlib
import threading
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    # Leaves
    "Leaf": "core.leaf",
    "Decision": "core.leaf",
    "Leaves": "core.leaves",
    "Verdict": "core.leaves",
    "leaf_paths": "core.tree",
    # Rules
    "ShardingRule": "core.rule",
    "LeafShardingRule": "core.rule",
    "LeavesShardingRule": "core.rule",
    "ChainShardingRule": "core.rule",
    "MirrorShardingRule": "core.rule",
    "SpecTreeShardingRule": "core.rule",
    "decide": "core.rule",
    "AutoShardingRule": "rules.auto",
    "CompositeShardingRule": "rules.composite",
    "DimShardingRule": "rules.dim",
    "FittedShardingRule": "rules.fitted",
    "FSDPShardingRule": "rules.fsdp",
    "LogicalShardingRule": "rules.logical",
    "MemoryConstrainedShardingRule": "rules.memory",
    "RegexShardingRule": "rules.regex",
    "ReplicateShardingRule": "rules.replicate",
    "ShapeBasedShardingRule": "rules.shape_based",
    "StackedShardingRule": "rules.stacked",
    # Rules as text
    "load_rules": "rules.files.reader",
    "parse_rule": "rules.text",
    "register_op": "rules.text",
    "DEFAULT_OPS": "rules.text",
    # Plans
    "ShardingPlan": "core.rule",
    "Finding": "core.finding",
    # Meshes
    "create_mesh": "mesh.creation",
    "mesh_shape": "mesh.shape",
    # Placement
    "filter_shard": "placement.shard",
    "filter_init": "placement.init",
    "filter_jit": "placement.functions.jit",
    "filter_shard_map": "placement.functions.shard_map",
    "filter_gather": "placement.gather",
    "place_batch": "placement.batches.batch",
    "place_batches": "placement.batches.prefetch",
    "with_sharding_constraint": "placement.constrain",
    "constrain": "placement.constrain",
    "logical_axes": "placement.constrain",
    # Checkpoints
    "load_equinox": "checkpoints.equinox",
    "load_orbax": "checkpoints.orbax",
    "load_safetensors": "checkpoints.safetensors",
    "save_equinox": "checkpoints.equinox",
    "save_orbax": "checkpoints.orbax",
    "save_safetensors": "checkpoints.safetensors",
    "ArraySource": "placement.source",
    # Moves
    "reshard": "moves.move",
    "plan_reshard": "moves.prepare",
    "plan_sync": "moves.sync.plan_sync",
    "recover": "moves.elastic",
    # Processes
    "barrier_sync": "mesh.processes",
    "check_same_plan": "placement.agree",
    # Analysis
    "ShardingAnalyzer": "checks.analyzer",
    "audit": "programs.audits.audit",
    "Target": "programs.machine.targets",
    "Hardware": "programs.machine.hardware",
    "kernel_cost": "programs.compiled.kernel_costs",
    # Regions
    "alternatives": "programs.regions.region",
    "region": "programs.regions.region",
    "check_region": "programs.regions.check",
    "sharded_attention": "programs.attention.attention",
    "expert_exchange": "programs.experts.expert_exchange",
    # Pipelines
    "pipeline": "programs.pipelines.pipeline",
    "fits": "programs.audits.fits",
    "largest_batch": "programs.audits.fits",
    "assert_plan_matches": "programs.audits.expect",
    "assert_collectives": "programs.audits.expect",
    "assert_fits": "programs.audits.expect",
    # Autoplan
    "autoplan": "programs.autoplan.autoplan",
    "plan_training": "programs.training.plan_training",
    "Assumptions": "programs.autoplan.graph.machine",
    # Pages
    "picture": "drawing.plans",
    "report_page": "page.page",
    # Rooms
    "errors": "",
    "meshes": "",
    "presets": "",
    "reports": "",
    "specs": "",
}
"""The module of each export, in the order in which they are listed; `__init__.pyi` says the same to type checkers."""

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]

_LOCK = threading.RLock()
"""Threads that import different names at once would find modules half imported, JAX's own among them."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # `inspect` and others look for such names, and must not import the rooms
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _LOCK:
        return _imported(name)


def _imported(name: str) -> Any:
    if name not in _MODULES:
        rooms = [importlib.import_module(f"{__name__}.{room}") for room in ("errors", "meshes", "specs")]
        home = next((room.__name__ for room in rooms if name in room.__all__), "")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (home and f"; use {home}.{name}"))
    module = _MODULES[name]
    if not module:
        return importlib.import_module(f"{__name__}.{name}")  # a room
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
