"""A plan as the room of patches reads it."""

from typing import Any

from jax.extend.core import ClosedJaxpr

from shardrules.core.rule import ShardingPlan
from shardrules.programs.autoplan.run.call import auto_mesh, axis_names_of, read_call
from shardrules.programs.autoplan.run.replay import PlannedFunction
from shardrules.programs.autoplan.run.rewrite import chosen_layouts, with_layouts
from shardrules.programs.patches.planned import PlannedProgram


def planned_program(function: PlannedFunction, args: tuple[Any, ...], arguments: ShardingPlan) -> PlannedProgram:
    """Returns what patches need to know of a planned function. `TreeError` if it is not the one that was planned."""
    call, mesh, problem = function.planned, function.mesh, function.problem

    def trace() -> ClosedJaxpr:
        weak_types = [array.weak_type for array in call.structs]
        return read_call(function.fn, args, mesh, call.name, call.on_host, weak_types).jaxpr

    layouts = chosen_layouts(problem, function.choice)
    with axis_names_of(mesh):
        planned = with_layouts(call.jaxpr, layouts, auto_mesh(mesh))
    return PlannedProgram(
        call.name,
        args,
        mesh,
        problem.machine.hardware,
        call.jaxpr,
        planned,
        layouts,
        arguments,
        call.structs,
        function.specs,
        function.result_specs,
        trace,
    )
