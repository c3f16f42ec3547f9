"""shardrules: write rules; they turn any pytree of arrays into a sharding plan you can read, prove and apply.

What you compose with is here. The rest is in five rooms: `errors`, `reports` (what functions return), `meshes` and
`specs` (helpers), and `presets` (what users of other libraries come from). Importing touches no device, flag or
environment variable, and every name is imported when it is first used.
"""

import functools
import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardrules import errors, meshes, presets, reports, specs
    from shardrules.checkpoints.equinox import load_equinox, save_equinox
    from shardrules.checkpoints.orbax import load_orbax, save_orbax
    from shardrules.checkpoints.safetensors import load_safetensors, save_safetensors
    from shardrules.checks.analyzer import ShardingAnalyzer
    from shardrules.core.finding import Finding
    from shardrules.core.leaf import Decision, Leaf
    from shardrules.core.leaves import Leaves, Verdict
    from shardrules.core.rule import (
        ChainShardingRule,
        LeafShardingRule,
        LeavesShardingRule,
        MirrorShardingRule,
        ShardingPlan,
        ShardingRule,
        SpecTreeShardingRule,
        decide,
    )
    from shardrules.core.tree import leaf_paths
    from shardrules.drawing.plans import picture
    from shardrules.mesh.creation import create_mesh
    from shardrules.mesh.processes import barrier_sync
    from shardrules.mesh.shape import mesh_shape
    from shardrules.moves.elastic import recover
    from shardrules.moves.move import reshard
    from shardrules.moves.prepare import plan_reshard
    from shardrules.page.page import report_page
    from shardrules.placement.agree import check_same_plan
    from shardrules.placement.batches.batch import place_batch
    from shardrules.placement.batches.prefetch import place_batches
    from shardrules.placement.constrain import constrain, logical_axes, with_sharding_constraint
    from shardrules.placement.functions.jit import filter_jit
    from shardrules.placement.functions.shard_map import filter_shard_map
    from shardrules.placement.gather import filter_gather
    from shardrules.placement.init import filter_init
    from shardrules.placement.shard import filter_shard
    from shardrules.placement.source import ArraySource
    from shardrules.programs.attention.attention import sharded_attention
    from shardrules.programs.audits.audit import audit
    from shardrules.programs.audits.expect import assert_collectives, assert_fits, assert_plan_matches
    from shardrules.programs.audits.fits import fits, largest_batch
    from shardrules.programs.autoplan.autoplan import autoplan
    from shardrules.programs.autoplan.graph.machine import Assumptions
    from shardrules.programs.compiled.kernel_costs import kernel_cost
    from shardrules.programs.experts.expert_exchange import expert_exchange
    from shardrules.programs.machine.hardware import Hardware
    from shardrules.programs.machine.targets import Target
    from shardrules.programs.pipelines.pipeline import pipeline
    from shardrules.programs.pipelines.schedule import PipelineSchedule
    from shardrules.programs.regions.check import check_region
    from shardrules.programs.regions.region import alternatives, region
    from shardrules.programs.training.plan_training import plan_training
    from shardrules.rules.auto import AutoShardingRule
    from shardrules.rules.composite import CompositeShardingRule
    from shardrules.rules.dim import DimShardingRule
    from shardrules.rules.files.load import load_rules
    from shardrules.rules.fitted import FittedShardingRule
    from shardrules.rules.fsdp import FSDPShardingRule
    from shardrules.rules.logical.rule import LogicalShardingRule
    from shardrules.rules.memory import MemoryConstrainedShardingRule
    from shardrules.rules.regex import RegexShardingRule
    from shardrules.rules.replicate import ReplicateShardingRule
    from shardrules.rules.shape_based import ShapeBasedShardingRule
    from shardrules.rules.stacked import StackedShardingRule
    from shardrules.rules.text import DEFAULT_OPS, parse_rule, register_op

__version__ = "0.1.0"

_LOCK = threading.RLock()
"""Threads that import different names at once would find modules half imported, JAX's own among them."""


@functools.cache
def _modules() -> dict[str, str]:
    """From name to module, read off the imports under `TYPE_CHECKING`: the one list of what is imported late."""
    import ast
    import inspect

    blocks = [node for node in ast.parse(inspect.getsource(sys.modules[__name__])).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # `inspect` and others look for such names, and must not import the rooms
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _LOCK:
        return _imported(name)


def _imported(name: str) -> Any:
    if name not in __all__:
        rooms = [importlib.import_module(f"{__name__}.{room}") for room in ("errors", "meshes", "specs")]
        home = next((room.__name__ for room in rooms if name in room.__all__), "")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (home and f"; use {home}.{name}"))
    module = _modules()[name]
    if module == __name__:
        return importlib.import_module(f"{module}.{name}")  # a room
    globals()[name] = value = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    # Leaves
    "Leaf",
    "Decision",
    "Leaves",
    "Verdict",
    "leaf_paths",
    # Rules
    "ShardingRule",
    "LeafShardingRule",
    "LeavesShardingRule",
    "AutoShardingRule",
    "ChainShardingRule",
    "CompositeShardingRule",
    "DimShardingRule",
    "FittedShardingRule",
    "FSDPShardingRule",
    "LogicalShardingRule",
    "MemoryConstrainedShardingRule",
    "MirrorShardingRule",
    "RegexShardingRule",
    "ReplicateShardingRule",
    "ShapeBasedShardingRule",
    "SpecTreeShardingRule",
    "StackedShardingRule",
    "decide",
    # Rules as text
    "load_rules",
    "parse_rule",
    "register_op",
    "DEFAULT_OPS",
    # Plans
    "ShardingPlan",
    "Finding",
    # Meshes
    "create_mesh",
    "mesh_shape",
    # Placement
    "filter_shard",
    "filter_init",
    "filter_jit",
    "filter_shard_map",
    "filter_gather",
    "place_batch",
    "place_batches",
    "with_sharding_constraint",
    "constrain",
    "logical_axes",
    # Checkpoints
    "load_equinox",
    "load_orbax",
    "load_safetensors",
    "save_equinox",
    "save_orbax",
    "save_safetensors",
    "ArraySource",
    # Moves
    "reshard",
    "plan_reshard",
    "recover",
    # Processes
    "barrier_sync",
    "check_same_plan",
    # Analysis
    "ShardingAnalyzer",
    "audit",
    "Target",
    "Hardware",
    "kernel_cost",
    # Regions
    "alternatives",
    "region",
    "check_region",
    "sharded_attention",
    "expert_exchange",
    # Pipelines
    "pipeline",
    "PipelineSchedule",
    "fits",
    "largest_batch",
    "assert_plan_matches",
    "assert_collectives",
    "assert_fits",
    # Autoplan
    "autoplan",
    "plan_training",
    "Assumptions",
    # Pages
    "picture",
    "report_page",
    # Rooms
    "errors",
    "meshes",
    "presets",
    "reports",
    "specs",
]
