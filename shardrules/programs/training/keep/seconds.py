"""The seconds of computing each equation of a program again, by the sheet of a device."""

from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from shardrules.mesh.shape import mesh_shape
from shardrules.programs.autoplan.graph.compute_cost import ComputeCosts
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.jaxprs.bodies import bodies_of
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.traced.program import read_jaxpr


def equation_seconds(program: ClosedJaxpr, hardware: Hardware) -> tuple[list[float], list[tuple[bool, ...]]]:
    """Returns what each equation of a program takes on one device, and which of its results are written to memory.

    Operations that compilers fuse into others take what those read and write on their behalf.

    ```python
    from shardrules.programs.training.keep.seconds import equation_seconds

    program = jax.make_jaxpr(lambda w, x: jnp.tanh(x @ w))(jnp.ones((4096, 4096)), jnp.ones((8192, 4096)))
    (matmul, tanh), _ = equation_seconds(program, sr.Hardware.named("cuda:h100"))
    assert matmul > tanh
    ```
    """
    machine = Machine.of(mesh_shape("data:1"), hardware)
    traced = read_jaxpr(program)
    fusion = FusedProgram.of(traced, machine.compiler)
    costs = ComputeCosts(fusion, machine)
    owners = np.cumsum([0, *map(_reader_count, program.jaxpr.eqns)])
    seconds = [0.0] * len(program.jaxpr.eqns)
    written: list[list[bool]] = [[True] * len(equation.outvars) for equation in program.jaxpr.eqns]
    for op_index, operation in enumerate(traced.operations):
        # The reader enters calls: their operations belong to the equation around them.
        owner = int(np.searchsorted(owners, operation.equation_index, "right")) - 1
        if operation.equation_index >= 0:
            seconds[owner] += costs.seconds_of_one(op_index)
            if operation.equation is program.jaxpr.eqns[owner]:
                written[owner] = [result in fusion.written for result in operation.results]
    return seconds, [tuple(flags) for flags in written]


def _reader_count(equation: Any) -> int:
    """The number of equations that the reader of programs counts for one, with the equations inside of it."""
    return 1 + sum(_reader_count(inner) for body in bodies_of(equation) for inner in open_jaxpr(body.program).eqns)
