"""What functions of shardrules return: reports, differences, pictures and plans of whole functions."""

from shardrules.checks.report import AxisUse, ReplicatedLeaf, ShardingReport
from shardrules.core.source import Source
from shardrules.core.views.blocks import Block, Blocks
from shardrules.core.views.diff import Change, Placement, Placements, PlanDiff
from shardrules.core.views.table import Row, Totals
from shardrules.drawing.picture import Picture
from shardrules.moves.plan import LeafMove, ReshardPlan
from shardrules.moves.sync.plan import SyncPlan
from shardrules.moves.sync.table import NameLine, NameTable
from shardrules.moves.sync.transfers import Transfer
from shardrules.placement.batches.prefetch import PlacedBatches
from shardrules.placement.functions.jit import FilterJit
from shardrules.placement.functions.shard_map import FilterShardMap
from shardrules.placement.functions.stages import CompiledFunction, LoweredFunction
from shardrules.programs.audits.diff import ArrayChange, AuditDiff, CollectivesChange, FigureChange
from shardrules.programs.audits.fits import BatchSearch, Fit
from shardrules.programs.audits.memory import MemoryUse
from shardrules.programs.audits.modules import ModuleCost
from shardrules.programs.audits.report import AuditedArray, AuditReport
from shardrules.programs.autoplan.answer.diff import AutoPlanDiff
from shardrules.programs.autoplan.answer.explain import Alternative, ArrayUse, RegionUse, SplitDim
from shardrules.programs.autoplan.answer.frontier import Frontier, FrontierPoint
from shardrules.programs.autoplan.answer.plan import AutoPlan, Candidate, CompiledPlan
from shardrules.programs.autoplan.answer.report import AutoPlanReport
from shardrules.programs.autoplan.run.replay import PlannedFunction
from shardrules.programs.autoplan.solve.peak import Certainty, Peak
from shardrules.programs.compiled.collectives import Collective, Total
from shardrules.programs.compiled.kernel_costs import KernelCost
from shardrules.programs.costs.schedule import LineTime
from shardrules.programs.costs.step_time import StepTime
from shardrules.programs.costs.timeline import Event, Timeline
from shardrules.programs.experts.expert_exchange import ExpertLoad
from shardrules.programs.patches.explicit import ExplicitCheck, TypeProblem
from shardrules.programs.patches.patch import SourcePatch
from shardrules.programs.patches.verify import Verification
from shardrules.programs.pipelines.schedule import PipelineSchedule
from shardrules.programs.pipelines.simulate import PipelineTimes
from shardrules.programs.profiles.comparison import (
    ComparedTime,
    DeviceTime,
    MissingPart,
    TraceComparison,
    UnmatchedTime,
)
from shardrules.programs.regions.region import RegionFunction
from shardrules.programs.training.answer.plan import TrainingPlan
from shardrules.programs.training.answer.prove import ProvedPlan
from shardrules.programs.training.answer.report import Advice, TrainingCandidate, TrainingPlanReport
from shardrules.rules.files.rules_file import Limits, RulesFile

__all__ = [
    "Advice",
    "Alternative",
    "ArrayChange",
    "ArrayUse",
    "AuditDiff",
    "AuditReport",
    "AuditedArray",
    "AutoPlan",
    "AutoPlanDiff",
    "AutoPlanReport",
    "AxisUse",
    "BatchSearch",
    "Block",
    "Blocks",
    "Candidate",
    "Certainty",
    "Change",
    "Collective",
    "CollectivesChange",
    "ComparedTime",
    "CompiledFunction",
    "CompiledPlan",
    "DeviceTime",
    "Event",
    "ExpertLoad",
    "ExplicitCheck",
    "FigureChange",
    "FilterJit",
    "FilterShardMap",
    "Fit",
    "Frontier",
    "FrontierPoint",
    "KernelCost",
    "LeafMove",
    "Limits",
    "LineTime",
    "LoweredFunction",
    "MemoryUse",
    "MissingPart",
    "ModuleCost",
    "NameLine",
    "NameTable",
    "Peak",
    "Picture",
    "PipelineSchedule",
    "PipelineTimes",
    "PlacedBatches",
    "Placement",
    "Placements",
    "PlanDiff",
    "PlannedFunction",
    "ProvedPlan",
    "RegionFunction",
    "RegionUse",
    "ReplicatedLeaf",
    "ReshardPlan",
    "Row",
    "RulesFile",
    "ShardingReport",
    "Source",
    "SourcePatch",
    "SplitDim",
    "StepTime",
    "SyncPlan",
    "Timeline",
    "Total",
    "Totals",
    "TraceComparison",
    "TrainingCandidate",
    "TrainingPlan",
    "TrainingPlanReport",
    "Transfer",
    "TypeProblem",
    "UnmatchedTime",
    "Verification",
]
