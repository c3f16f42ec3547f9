"""The layouts that arrays may take in a loop over stages: the mesh axis of the stages splits their dim, and nothing
else.

In a tick each device computes one stage. Any other use of the axis there brings the arrays of a stage to all devices
and back, so that a search need not look for it.
"""

import numpy as np

from shardrules.programs.autoplan.graph.home import Home
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.training.stages.run import STAGE_AXIS


def stage_layouts(problem: Problem, stages: int, ticks: int) -> list[np.ndarray]:
    """Returns for each node the indices of the layouts that are left for it."""
    axis, program = problem.machine.axes.index(STAGE_AXIS), problem.program
    possible: dict[int, dict[int, None]] = {}
    for op_index, operation in enumerate(program.operations):
        operands = [array for array in operation.operands if array is not None]
        # What no stage has computed, such as a mask, may have a dim of this size by chance.
        is_of_stages = any(stages in program.arrays[array].shape for array in operands)
        if not is_of_stages or not _is_in_ticks(problem, operation.region, ticks):
            continue
        homes: list[tuple[int, Home | None]] = [
            (array, problem.homes.get(array)) for array in operation.results if array is not None
        ]
        homes += [
            (operand, problem.operand_homes.get((op_index, slot)))
            for slot, operand in enumerate(operation.operands)
            if operand is not None and operation.role != "enter"
        ]
        for array, home in homes:
            if home is None:
                continue
            dims = possible.setdefault(home.node, {})
            for dim, size in enumerate(program.arrays[array].shape):
                node_dim = home.dims[dim]
                if size == stages and node_dim is not None:
                    dims[node_dim] = None
    keep = []
    for index, node in enumerate(problem.nodes):
        rows = np.arange(len(node.layouts))
        if possible.get(index):
            left = rows[np.isin(node.layouts[:, axis], list(possible[index]))]
            # A node of which nothing is left keeps all of its layouts: a solver has to choose one.
            rows = left if len(left) else rows
        keep.append(rows)
    return keep


def _is_in_ticks(problem: Problem, region: int, ticks: int) -> bool:
    """A part of the program is the loop over ticks, or inside of it."""
    regions = problem.program.regions
    while regions[region].parent >= 0:
        parent = regions[region].parent
        if regions[parent].parent < 0 and regions[region].run_count == ticks:
            return True
        region = parent
    return False
