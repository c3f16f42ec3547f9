"""What of the arrays that the backward pass keeps is on each device."""

from shardrules.core.axes import mesh_sizes
from shardrules.core.spec import shard_bytes
from shardrules.planning.answer.plan import AutoPlan
from shardrules.training.keep.apply import is_kept_name
from shardrules.training.keep.keep import Keep
from shardrules.training.step import Recipe


def kept_on_device(planned: AutoPlan, recipe: Recipe, batch_splits: int) -> Keep:
    """Returns what the backward pass keeps, with the bytes of each device by the layouts of a plan.

    Named arrays are in the program; the inputs of layers are not named, and are split as the batch is.
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
    # Each microbatch names its own.
    named = min(1.0, whole_bytes / recipe.microbatches / kept_bytes)
    share = named * local_bytes / whole_bytes if whole_bytes else 0.0
    return keep.scaled(share + (1 - named) / batch_splits)
