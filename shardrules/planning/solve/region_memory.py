"""What regions have in memory while they run, beside their operands and results."""

from collections.abc import Iterator, Sequence

import attrs
from jax.extend.core import ClosedJaxpr

from shardrules.planning.graph.build import build_problem
from shardrules.planning.graph.home import Home
from shardrules.planning.graph.machine import Machine
from shardrules.planning.graph.problem import Problem
from shardrules.planning.solve.memory import Occupancy, Stay
from shardrules.planning.traced.order import program_order
from shardrules.planning.traced.program import read_jaxpr


def occupancy_of(problem: Problem, positions: Sequence[int]) -> Occupancy:
    """Returns what is in memory when, with what regions need, if operations run at some positions."""
    occupancy = Occupancy.of(problem, positions)
    return attrs.evolve(occupancy, stays=(*occupancy.stays, *_region_stays(problem, positions)))


def _region_stays(problem: Problem, positions: Sequence[int]) -> Iterator[Stay]:
    costs = problem.region_costs
    for op_index, node in problem.region_nodes.items():
        operation = problem.program.operations[op_index]
        sizes: list[float] = []
        for layout, alternative in zip(
            problem.nodes[node].layouts.tolist(), problem.nodes[node].alternatives, strict=True
        ):
            program = costs.price(operation, layout, alternative).program
            if id(program) not in costs.temporary_bytes:
                costs.temporary_bytes[id(program)] = _temporary_bytes(program, costs.device)
            sizes.append(costs.temporary_bytes[id(program)])
        if any(sizes):
            yield Stay(Home(node, ()), 0, positions[op_index], positions[op_index], sizes=tuple(sizes))


def _temporary_bytes(program: ClosedJaxpr, device: Machine) -> float:
    """The most bytes in memory while one device runs a program, beside operands and results."""
    traced = read_jaxpr(program)
    problem = build_problem(traced, device, [""] * len(traced.arguments), {}, {}, tie=False)
    occupancy = Occupancy.of(problem, program_order(traced))
    peak = occupancy.peak([0] * len(problem.nodes)) / occupancy.temporaries
    return max(0.0, peak - sum(aval.size * aval.dtype.itemsize for aval in (*program.in_avals, *program.out_avals)))
