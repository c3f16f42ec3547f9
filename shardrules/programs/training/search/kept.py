"""The part on each device of the arrays that the backward pass keeps."""

from shardrules.core.axes import mesh_sizes
from shardrules.core.spec import shard_bytes
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.programs.training.keep.apply import is_kept_name
from shardrules.programs.training.keep.keep import Keep
from shardrules.programs.training.step import Recipe


def kept_on_device(planned: AutoPlan, recipe: Recipe, batch_splits: int) -> Keep:
    """Returns what the backward pass keeps, with the bytes of each device by the layouts of a plan.

    Values kept by parts that stay as written have no name: they count as split like those that have one, or like the
    batch if none has.
    """
    keep, sizes, program = recipe.keep, mesh_sizes(planned.mesh), planned.task.problem.program
    whole_bytes = local_bytes = 0
    for operation in program.operations:
        if operation.name == "name" and is_kept_name(operation.equation):
            (index,) = operation.results
            array, count = program.arrays[index], operation.run_count
            whole_bytes += count * array.nbytes
            local_bytes += count * shard_bytes(array.shape, array.dtype, planned.spec_of(index), sizes)
    kept_bytes = keep.kept_bytes + keep.host_bytes
    if not kept_bytes:
        return keep
    # Stages keep what all microbatches need, and those that wait compute, too.
    rounds = recipe.rounds / recipe.chunks
    return keep.scaled(rounds * (local_bytes / whole_bytes if whole_bytes else 1 / (recipe.stages * batch_splits)))
