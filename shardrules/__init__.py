"""shardrules: you write rules; it turns them into a plan you can read, prove, and apply to any pytree of arrays.

Everything public is importable from here, grouped by noun. Importing touches no device, flag or environment variable.
What asks compilers, and what plans by itself, is loaded when it is first used: that is half of the package.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardrules.analysis.analyzer import ShardingAnalyzer, analyze_sharding_strategy
from shardrules.analysis.monitor import create_monitored_function
from shardrules.analysis.report import AxisUse, ShardingReport, Weight
from shardrules.core.axes import Axis
from shardrules.core.diff import Change, Placement, Placements, PlanDiff
from shardrules.core.errors import (
    AxisTypeError,
    BarrierError,
    BarrierTimeoutError,
    CheckpointError,
    DisagreementError,
    IndivisibleError,
    MeshError,
    NoMeshError,
    PatternError,
    PlanError,
    RuleError,
    RuleTypeError,
    ShardingWarning,
    ShardRulesError,
    SpecError,
    TreeError,
    UnboundAxisError,
    UnknownAxisError,
    UnknownOpError,
)
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
from shardrules.core.spec import canonical, same, shard_bytes, shard_shape
from shardrules.core.spec_trees import (
    NoSpecError,
    extract_sharding_structure,
    extract_shardings,
    get_names_from_partition_spec,
    get_partition_spec,
    get_shardings_with_structure,
)
from shardrules.core.table import Totals
from shardrules.core.tree import leaf_paths
from shardrules.drawing.blocks import Block, Blocks
from shardrules.drawing.picture import Picture
from shardrules.mesh.axes import (
    get_axes_size_in_mesh,
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_submesh_device_index,
)
from shardrules.mesh.context import current_mesh, get_incontext_mesh, names_in_current_mesh
from shardrules.mesh.creation import (
    AxisTypes,
    MeshWarning,
    calculate_host_mesh_shape,
    cpu_context,
    create_cpu_mesh,
    create_device_mesh,
    create_mesh,
    force_cpu,
    parse_mesh_from_string,
)
from shardrules.mesh.derived import fold_axes, rename_axes, split_axis, submesh
from shardrules.mesh.layout import DeviceInfo, Layout, lay_out
from shardrules.mesh.processes import barrier_sync, is_primary
from shardrules.mesh.shape import mesh_shape
from shardrules.placement.agree import check_same_plan
from shardrules.placement.checkpoints.equinox import load_equinox
from shardrules.placement.checkpoints.orbax import load_orbax
from shardrules.placement.checkpoints.safetensors import load_safetensors
from shardrules.placement.constrain import constrain, logical_axes, with_sharding_constraint
from shardrules.placement.gather import filter_gather, make_shard_and_gather_fns
from shardrules.placement.init import filter_init
from shardrules.placement.jit import FilterJit, filter_jit
from shardrules.placement.shard import filter_shard
from shardrules.placement.source import ArraySource
from shardrules.reshard.elastic import group_devices, recover, scale_batch, surviving_mesh
from shardrules.reshard.intermediate import (
    NoIntermediateShardingError,
    NoIntermediateShardingNeededError,
    find_intermediate_sharding,
    reshard_with_intermediate_sharding,
    reshard_with_intermediate_sharding_generic,
)
from shardrules.reshard.move import reshard
from shardrules.reshard.plan import LeafMove, ReshardPlan
from shardrules.reshard.prepare import plan_reshard
from shardrules.reshard.split import concatenate_by_mesh_axis, split_by_mesh_axis
from shardrules.rules.auto import AutoShardingRule
from shardrules.rules.composite import CompositeShardingRule
from shardrules.rules.dim import DimShardingRule
from shardrules.rules.fitted import FittedShardingRule
from shardrules.rules.fsdp import FSDPShardingRule
from shardrules.rules.logical import LogicalShardingRule
from shardrules.rules.logical_axes import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    DP,
    EMBED,
    EMPTY,
    EP,
    EXPERT,
    EXPERT_GATE,
    FSDP,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    MODE_DECODE,
    MODE_INSERT,
    MODE_PREFILL,
    MODE_TRAIN,
    QUERY_LENGTH,
    SP,
    TP,
    VOCAB,
    AttnKVSharding,
    AttnQSharding,
    ColumnWise,
    DynamicShardingAxes,
    ExpertActivations,
    ExpertActivationsAlt,
    ExpertColumnWise,
    ExpertColumnWiseAlt,
    ExpertRowWise,
    ExpertRowWiseAlt,
    ExpertTensorParallel,
    HiddenStateSharding,
    Replicated,
    RowWise,
    SColumnWise,
    SRowWise,
    UnifiedExpertColumnWise,
    UnifiedExpertRowWise,
)
from shardrules.rules.memory import MemoryConstrainedShardingRule
from shardrules.rules.partition_axis import PartitionAxis, RegisteredAxis
from shardrules.rules.partition_manager import PartitionManager
from shardrules.rules.presets.big_vision import (
    BIG_VISION_OPS,
    check_and_compile_patterns,
    infer_sharding,
    make_mask_trees,
    parse_name,
    tree_broadcast,
    tree_filter,
    tree_flatten_with_names,
)
from shardrules.rules.presets.eformer import (
    auto_partition_spec,
    create_pattern_based_partition_spec,
    match_partition_rules,
)
from shardrules.rules.regex import RegexShardingRule
from shardrules.rules.replicate import ReplicateShardingRule
from shardrules.rules.shape_based import ShapeBasedShardingRule
from shardrules.rules.stacked import StackedShardingRule
from shardrules.rules.text import DEFAULT_OPS, Ops, parse_rule, register_op

if TYPE_CHECKING:
    from shardrules.analysis.audit_diff import ArrayChange, AuditDiff, CollectivesChange, FigureChange
    from shardrules.analysis.audit_report import AuditedArray, AuditError, AuditReport
    from shardrules.analysis.collectives import Collective
    from shardrules.analysis.compiling import DoesNotFitError
    from shardrules.analysis.evidence import MemoryUse
    from shardrules.analysis.expect import ExpectationError, assert_collectives, assert_fits, assert_plan_matches
    from shardrules.analysis.fits import BatchSearch, Fit, fits, largest_batch
    from shardrules.analysis.hardware import Hardware, HardwareError
    from shardrules.analysis.modules import ModuleCost
    from shardrules.analysis.roofline import StepTime
    from shardrules.analysis.targets import MissingCompilerError, Target, TargetError, UnavailableTargetError
    from shardrules.page.page import report_page
    from shardrules.planning.auto_plan import AutoPlan, Candidate
    from shardrules.planning.auto_report import AutoPlanReport, AutoPlanReportError
    from shardrules.planning.autoplan import autoplan
    from shardrules.planning.explain import Alternative, SplitDim, Use
    from shardrules.planning.frontier import Frontier, FrontierPoint
    from shardrules.planning.machine import Assumptions
    from shardrules.planning.plan_diff import AutoPlanDiff
    from shardrules.planning.replay import PlannedFunction

__version__ = "0.1.0"

_LATER = {
    "AutoPlan": "shardrules.planning.auto_plan",
    "Candidate": "shardrules.planning.auto_plan",
    "AutoPlanReport": "shardrules.planning.auto_report",
    "AutoPlanReportError": "shardrules.planning.auto_report",
    "report_page": "shardrules.page.page",
    "AutoPlanDiff": "shardrules.planning.plan_diff",
    "Alternative": "shardrules.planning.explain",
    "SplitDim": "shardrules.planning.explain",
    "Use": "shardrules.planning.explain",
    "Frontier": "shardrules.planning.frontier",
    "FrontierPoint": "shardrules.planning.frontier",
    "Assumptions": "shardrules.planning.machine",
    "PlannedFunction": "shardrules.planning.replay",
    "autoplan": "shardrules.planning.autoplan",
    "ArrayChange": "shardrules.analysis.audit_diff",
    "AuditDiff": "shardrules.analysis.audit_diff",
    "CollectivesChange": "shardrules.analysis.audit_diff",
    "FigureChange": "shardrules.analysis.audit_diff",
    "AuditError": "shardrules.analysis.audit_report",
    "AuditReport": "shardrules.analysis.audit_report",
    "AuditedArray": "shardrules.analysis.audit_report",
    "Collective": "shardrules.analysis.collectives",
    "DoesNotFitError": "shardrules.analysis.compiling",
    "MemoryUse": "shardrules.analysis.evidence",
    "ExpectationError": "shardrules.analysis.expect",
    "assert_collectives": "shardrules.analysis.expect",
    "assert_fits": "shardrules.analysis.expect",
    "assert_plan_matches": "shardrules.analysis.expect",
    "BatchSearch": "shardrules.analysis.fits",
    "Fit": "shardrules.analysis.fits",
    "fits": "shardrules.analysis.fits",
    "largest_batch": "shardrules.analysis.fits",
    "Hardware": "shardrules.analysis.hardware",
    "HardwareError": "shardrules.analysis.hardware",
    "ModuleCost": "shardrules.analysis.modules",
    "StepTime": "shardrules.analysis.roofline",
    "MissingCompilerError": "shardrules.analysis.targets",
    "Target": "shardrules.analysis.targets",
    "TargetError": "shardrules.analysis.targets",
    "UnavailableTargetError": "shardrules.analysis.targets",
}
"""Where to find what is loaded later."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    # Leaves
    "Decision",
    "Leaf",
    "leaf_paths",
    "Axis",
    # Rules
    "ChainShardingRule",
    "LeafShardingRule",
    "LeavesShardingRule",
    "MirrorShardingRule",
    "ShardingRule",
    "SpecTreeShardingRule",
    "decide",
    "Leaves",
    "Verdict",
    "AutoShardingRule",
    "CompositeShardingRule",
    "DimShardingRule",
    "FittedShardingRule",
    "FSDPShardingRule",
    "LogicalShardingRule",
    "MemoryConstrainedShardingRule",
    "RegexShardingRule",
    "ReplicateShardingRule",
    "ShapeBasedShardingRule",
    "StackedShardingRule",
    "DEFAULT_OPS",
    "Ops",
    "parse_rule",
    "register_op",
    # Plans
    "ShardingPlan",
    "Change",
    "PlanDiff",
    "Placement",
    "Placements",
    "Finding",
    "Totals",
    # Analysis
    "ShardingAnalyzer",
    "analyze_sharding_strategy",
    "create_monitored_function",
    "AxisUse",
    "ShardingReport",
    "Weight",
    # Audits
    "AuditReport",
    "AuditedArray",
    "ArrayChange",
    "AuditDiff",
    "CollectivesChange",
    "FigureChange",
    "Collective",
    "MemoryUse",
    "ModuleCost",
    "StepTime",
    "assert_collectives",
    "assert_fits",
    "assert_plan_matches",
    "BatchSearch",
    "Fit",
    "fits",
    "largest_batch",
    "Target",
    "Hardware",
    # Planning
    "autoplan",
    "AutoPlan",
    "PlannedFunction",
    "Candidate",
    "SplitDim",
    "Use",
    "Alternative",
    "Frontier",
    "FrontierPoint",
    "AutoPlanDiff",
    "AutoPlanReport",
    "Assumptions",
    # Pictures
    "report_page",
    "Blocks",
    "Block",
    "Picture",
    # Meshes
    "current_mesh",
    "get_incontext_mesh",
    "names_in_current_mesh",
    "mesh_shape",
    "DeviceInfo",
    "Layout",
    "lay_out",
    "AxisTypes",
    "MeshWarning",
    "calculate_host_mesh_shape",
    "cpu_context",
    "create_cpu_mesh",
    "create_device_mesh",
    "create_mesh",
    "force_cpu",
    "parse_mesh_from_string",
    "fold_axes",
    "rename_axes",
    "split_axis",
    "submesh",
    "get_axes_size_in_mesh",
    "get_mesh_axis_names",
    "get_mesh_axis_size",
    "get_submesh_device_index",
    # Processes
    "barrier_sync",
    "is_primary",
    "check_same_plan",
    # Placement
    "filter_shard",
    "filter_init",
    "filter_jit",
    "FilterJit",
    "filter_gather",
    "make_shard_and_gather_fns",
    "with_sharding_constraint",
    "constrain",
    "logical_axes",
    "ArraySource",
    "load_equinox",
    "load_orbax",
    "load_safetensors",
    # Moves
    "reshard",
    "LeafMove",
    "ReshardPlan",
    "plan_reshard",
    "find_intermediate_sharding",
    "reshard_with_intermediate_sharding",
    "reshard_with_intermediate_sharding_generic",
    "concatenate_by_mesh_axis",
    "split_by_mesh_axis",
    "group_devices",
    "recover",
    "scale_batch",
    "surviving_mesh",
    # Specs
    "canonical",
    "same",
    "shard_bytes",
    "shard_shape",
    "extract_sharding_structure",
    "extract_shardings",
    "get_names_from_partition_spec",
    "get_partition_spec",
    "get_shardings_with_structure",
    # Presets
    "BIG_VISION_OPS",
    "check_and_compile_patterns",
    "infer_sharding",
    "make_mask_trees",
    "parse_name",
    "tree_broadcast",
    "tree_filter",
    "tree_flatten_with_names",
    "auto_partition_spec",
    "create_pattern_based_partition_spec",
    "match_partition_rules",
    # Logical axes
    "PartitionAxis",
    "RegisteredAxis",
    "PartitionManager",
    "BATCH",
    "BIAS_HEAD_SEQ",
    "BIAS_KV_SEQ",
    "DP",
    "EMBED",
    "EMPTY",
    "EP",
    "EXPERT",
    "EXPERT_GATE",
    "FSDP",
    "HEAD",
    "HEAD_DIM",
    "KV_HEAD",
    "KV_HEAD_DIM",
    "KV_LENGTH",
    "LENGTH",
    "MLP_INTERMEDIATE",
    "MODE_DECODE",
    "MODE_INSERT",
    "MODE_PREFILL",
    "MODE_TRAIN",
    "QUERY_LENGTH",
    "SP",
    "TP",
    "VOCAB",
    "AttnKVSharding",
    "AttnQSharding",
    "ColumnWise",
    "DynamicShardingAxes",
    "ExpertActivations",
    "ExpertActivationsAlt",
    "ExpertColumnWise",
    "ExpertColumnWiseAlt",
    "ExpertRowWise",
    "ExpertRowWiseAlt",
    "ExpertTensorParallel",
    "HiddenStateSharding",
    "Replicated",
    "RowWise",
    "SColumnWise",
    "SRowWise",
    "UnifiedExpertColumnWise",
    "UnifiedExpertRowWise",
    # Errors
    "ExpectationError",
    "AuditError",
    "AutoPlanReportError",
    "DoesNotFitError",
    "HardwareError",
    "MissingCompilerError",
    "TargetError",
    "UnavailableTargetError",
    "NoIntermediateShardingError",
    "NoIntermediateShardingNeededError",
    "NoSpecError",
    "AxisTypeError",
    "BarrierError",
    "BarrierTimeoutError",
    "CheckpointError",
    "DisagreementError",
    "IndivisibleError",
    "ShardingWarning",
    "MeshError",
    "UnboundAxisError",
    "NoMeshError",
    "PatternError",
    "PlanError",
    "RuleError",
    "RuleTypeError",
    "ShardRulesError",
    "SpecError",
    "TreeError",
    "UnknownAxisError",
    "UnknownOpError",
]
