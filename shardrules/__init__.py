"""shardrules: write rules; they turn any pytree of arrays into a sharding plan you can read, prove and apply.

What you compose with is here. The rest is in five rooms: `errors`, `reports` (what functions return), `meshes` and
`specs` (helpers), and `presets` (what users of other libraries come from). Importing touches no device, flag or
environment variable, and every name is imported when it is first used.
"""

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardrules.core.context import current_mesh
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
    from shardrules.mesh.creation import create_mesh
    from shardrules.mesh.processes import barrier_sync
    from shardrules.mesh.shape import mesh_shape
    from shardrules.placement.agree import check_same_plan
    from shardrules.placement.constrain import constrain, logical_axes, with_sharding_constraint
    from shardrules.placement.functions.jit import filter_jit
    from shardrules.placement.functions.shard_map import filter_shard_map
    from shardrules.placement.gather import filter_gather
    from shardrules.placement.init import filter_init
    from shardrules.placement.shard import filter_shard
    from shardrules.placement.source import ArraySource
    from shardrules.reshard.elastic import recover
    from shardrules.reshard.move import reshard
    from shardrules.reshard.prepare import plan_reshard
    from shardrules.rules.auto import AutoShardingRule
    from shardrules.rules.composite import CompositeShardingRule
    from shardrules.rules.dim import DimShardingRule
    from shardrules.rules.fitted import FittedShardingRule
    from shardrules.rules.fsdp import FSDPShardingRule
    from shardrules.rules.logical.rule import LogicalShardingRule
    from shardrules.rules.memory import MemoryConstrainedShardingRule
    from shardrules.rules.regex import RegexShardingRule
    from shardrules.rules.replicate import ReplicateShardingRule
    from shardrules.rules.shape_based import ShapeBasedShardingRule
    from shardrules.rules.stacked import StackedShardingRule
    from shardrules.rules.text import DEFAULT_OPS, Ops, parse_rule, register_op

if TYPE_CHECKING:
    from shardrules import errors, meshes, presets, reports, specs
    from shardrules.analysis.analyzer import ShardingAnalyzer
    from shardrules.analysis.expect import assert_collectives, assert_fits, assert_plan_matches
    from shardrules.analysis.fits import fits, largest_batch
    from shardrules.analysis.machine.hardware import Hardware
    from shardrules.analysis.machine.targets import Target
    from shardrules.page.page import report_page
    from shardrules.placement.batches.batch import place_batch
    from shardrules.placement.batches.prefetch import place_batches
    from shardrules.placement.checkpoints.equinox import load_equinox
    from shardrules.placement.checkpoints.orbax import load_orbax
    from shardrules.placement.checkpoints.safetensors import load_safetensors
    from shardrules.placement.checkpoints.save_equinox import save_equinox
    from shardrules.placement.checkpoints.save_orbax import save_orbax
    from shardrules.placement.checkpoints.save_safetensors import save_safetensors
    from shardrules.planning.autoplan import autoplan
    from shardrules.planning.graph.machine import Assumptions
    from shardrules.rules.files.load import load_rules

__version__ = "0.1.0"

# Python puts a folder into its package when it is first imported. `reshard` is also the name of a function, which the
# folder would replace at some later time: so it is imported now, and its name is left to the function.
importlib.import_module(f"{__name__}.reshard")
del globals()["reshard"]


@functools.cache
def _imports() -> tuple[dict[str, str], dict[str, str]]:
    """From name to module, read off the two blocks under `TYPE_CHECKING`: the one list of what is imported late.

    The names of the first block are imported together, with the first of them, and those of the second one by one.
    """
    import ast
    import inspect

    blocks = [node for node in ast.parse(inspect.getsource(sys.modules[__name__])).body if isinstance(node, ast.If)]
    imports = [[node for node in block.body if isinstance(node, ast.ImportFrom)] for block in blocks]
    together, alone = ({alias.name: str(node.module) for node in nodes for alias in node.names} for nodes in imports)
    return together, alone


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # `inspect` and others look for such names, and must not import the rooms
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in __all__:
        rooms = [importlib.import_module(f"{__name__}.{room}") for room in ("errors", "meshes", "specs")]
        home = next((room.__name__ for room in rooms if name in room.__all__), "")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (home and f"; use {home}.{name}"))
    together, alone = _imports()
    if alone.get(name) == __name__:
        return importlib.import_module(f"{__name__}.{name}")  # a room
    for late, module in together.items() if name in together else [(name, alone[name])]:
        globals()[late] = getattr(importlib.import_module(module), late)
    return globals()[name]


def _bind(package: Any, name: str, value: Any) -> None:
    """Python binds the folder `reshard` when it imports it, which must not hide the function of that name."""
    if name != "reshard" or not isinstance(value, type(sys)):
        type(sys).__setattr__(package, name, value)


sys.modules[__name__].__class__ = type("Package", (type(sys),), {"__setattr__": _bind})


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
    "Ops",
    # Plans
    "ShardingPlan",
    "Finding",
    # Meshes
    "create_mesh",
    "mesh_shape",
    "current_mesh",
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
    "Target",
    "Hardware",
    "fits",
    "largest_batch",
    "assert_plan_matches",
    "assert_collectives",
    "assert_fits",
    # Autoplan
    "autoplan",
    "Assumptions",
    # Pages
    "report_page",
    # Rooms
    "errors",
    "meshes",
    "presets",
    "reports",
    "specs",
]
