"""Memory of loops over microbatches where the compiler writes two of their rounds out as one.

XLA for GPUs does so if it is told to buffer loops twice. Gradients, which go round the loop, are then in memory several
times, in the layouts that they have once they are reduced. Loops over layers take hardly more.
"""

from collections.abc import Iterator

from shardrules.core.axes import mesh_sizes
from shardrules.core.spec import shard_bytes
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.programs.traced.program import TracedProgram
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.step import Recipe

_FLAG = "xla_gpu_enable_while_loop_double_buffering"

_MORE = 4
"""The copies of gradients in memory besides, at most; chosen by hand: compiled for H100s, scanned layers took 1 to 3
times their bytes more with the flag than without, and a Llama 3 8B 2 to 4 times more than modelled."""


def pairs_rounds(cluster: Cluster, recipe: Recipe) -> bool:
    flags = {} if cluster.target is None else dict(cluster.target.flags)
    return recipe.microbatches > 1 and flags.get(_FLAG, "false").lower() in ("true", "1")


def least_paired_bytes(program: TracedProgram, recipe: Recipe, device_count: int) -> int:
    """Returns the bytes that pairs of rounds take on each device at least."""
    nbytes = sum(program.arrays[index].nbytes for index in _carried(program, recipe))
    return _MORE * nbytes // (recipe.groups * device_count)


def paired_bytes(plan: AutoPlan, recipe: Recipe) -> int:
    """Returns the bytes that pairs of rounds take on each device in the layouts of a plan."""
    program, sizes = plan.task.problem.program, mesh_sizes(plan.mesh)
    arrays = [(program.arrays[index], plan.spec_of(index)) for index in _carried(program, recipe)]
    nbytes = sum(shard_bytes(array.shape, array.dtype, spec, sizes) for array, spec in arrays)
    return _MORE * nbytes // recipe.groups


def _carried(program: TracedProgram, recipe: Recipe) -> Iterator[int]:
    """Yields the arrays that go round the loop over microbatches: the first with as many rounds, before the update."""
    first = None
    for operation in program.operations:
        region = program.regions[operation.region]
        is_outermost = region.parent >= 0 and program.regions[region.parent].parent < 0
        if operation.name == "join" and is_outermost and region.run_count == recipe.microbatches:
            first = operation.region if first is None else first
            if operation.region == first:
                yield operation.results[0]
