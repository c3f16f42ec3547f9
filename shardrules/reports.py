"""What functions of shardrules return: reports, differences, pictures and plans of whole functions."""

from shardrules.analysis.audits.diff import ArrayChange, AuditDiff, CollectivesChange, FigureChange
from shardrules.analysis.audits.memory import MemoryUse
from shardrules.analysis.audits.modules import ModuleCost
from shardrules.analysis.audits.report import AuditedArray, AuditReport
from shardrules.analysis.fits import BatchSearch, Fit
from shardrules.analysis.profile.comparison import ComparedTime, DeviceTime, MissingPart, TraceComparison, UnmatchedTime
from shardrules.analysis.program.collectives import Collective, Total
from shardrules.analysis.program.kernel_costs import KernelCost
from shardrules.analysis.program.program import Source
from shardrules.analysis.report import AxisUse, ReplicatedLeaf, ShardingReport
from shardrules.analysis.schedule.schedule import LineTime
from shardrules.analysis.schedule.step_time import StepTime
from shardrules.analysis.schedule.timeline import Event, Timeline
from shardrules.core.views.diff import Change, Placement, Placements, PlanDiff
from shardrules.core.views.table import Row, Totals
from shardrules.drawing.blocks import Block, Blocks
from shardrules.drawing.picture import Picture
from shardrules.experts.expert_exchange import ExpertLoad
from shardrules.moves.plan import LeafMove, ReshardPlan
from shardrules.pipelines.simulate import PipelineTimes
from shardrules.placement.batches.prefetch import PlacedBatches
from shardrules.placement.functions.jit import FilterJit
from shardrules.placement.functions.shard_map import FilterShardMap
from shardrules.placement.functions.stages import CompiledFunction, LoweredFunction
from shardrules.planning.answer.diff import AutoPlanDiff
from shardrules.planning.answer.explain import Alternative, ArrayUse, RegionUse, SplitDim
from shardrules.planning.answer.frontier import Frontier, FrontierPoint
from shardrules.planning.answer.plan import AutoPlan, Candidate, CompiledPlan
from shardrules.planning.answer.report import AutoPlanReport
from shardrules.planning.run.replay import PlannedFunction
from shardrules.regions.region import RegionFunction
from shardrules.rules.files.rules_file import Limits, RulesFile
from shardrules.training.answer.plan import TrainingPlan
from shardrules.training.answer.prove import ProvedPlan
from shardrules.training.answer.report import Advice, TrainingCandidate, TrainingPlanReport

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
    "Change",
    "Collective",
    "CollectivesChange",
    "ComparedTime",
    "CompiledFunction",
    "CompiledPlan",
    "DeviceTime",
    "Event",
    "ExpertLoad",
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
    "Picture",
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
    "SplitDim",
    "StepTime",
    "Timeline",
    "Total",
    "Totals",
    "TraceComparison",
    "TrainingCandidate",
    "TrainingPlan",
    "TrainingPlanReport",
    "UnmatchedTime",
]
