"""The memory of regions while they run, beside their operands and results."""

import attrs
from jax.extend.core import ClosedJaxpr

from shardrules.programs.autoplan.graph.build import build_problem
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.autoplan.solve.memory import Occupancy
from shardrules.programs.compilers.order import program_order
from shardrules.programs.traced.program import read_jaxpr


def with_temporary_bytes(problem: Problem) -> Problem:
    nodes = list(problem.nodes)
    costs, counted = problem.region_costs, dict[int, float]()
    for op_index, node_index in problem.region_nodes.items():
        node, operation = nodes[node_index], problem.program.operations[op_index]
        sizes: list[float] = []
        for layout, alternative in zip(node.layouts.tolist(), node.alternatives, strict=True):
            program = costs.price(operation, layout, alternative).program
            if id(program) not in counted:
                counted[id(program)] = _temporary_bytes(program, costs.device)
            sizes.append(counted[id(program)])
        nodes[node_index] = attrs.evolve(node, temporary_bytes=sizes)
    return attrs.evolve(problem, nodes=nodes)


def _temporary_bytes(program: ClosedJaxpr, device: Machine) -> float:
    """The most bytes in memory while one device runs a program, beside operands and results."""
    traced = read_jaxpr(program)
    problem = build_problem(traced, device, [""] * len(traced.arguments), {}, {}, tie=False)
    occupancy = Occupancy.of(problem, program_order(traced))
    peak = occupancy.peak([0] * len(problem.nodes)) / occupancy.temporaries
    return max(0.0, peak - sum(aval.size * aval.dtype.itemsize for aval in (*program.in_avals, *program.out_avals)))
