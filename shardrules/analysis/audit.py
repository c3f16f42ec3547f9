"""The audit: a user's own function, compiled for a target, and what the compiled program will really do."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from jax.sharding import Mesh

from shardrules.analysis.arguments import read_arguments
from shardrules.analysis.audit_report import AuditedArray, AuditReport
from shardrules.analysis.collectives import find_collectives
from shardrules.analysis.compiling import Compiled, compile_for, name_of, trace
from shardrules.analysis.evidence import Evidence, spec_text
from shardrules.analysis.flops import find_matmuls, flops_by_dtype
from shardrules.analysis.hardware import Hardware
from shardrules.analysis.hlo import read_program
from shardrules.analysis.model_flops import matmul_flops
from shardrules.analysis.modules import module_costs
from shardrules.analysis.roles import read_roles
from shardrules.analysis.roofline import step_time
from shardrules.analysis.surprises import surprises
from shardrules.analysis.targets import Target
from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.errors import TreeError
from shardrules.core.spec import spec_repr
from shardrules.mesh.creation import AxisTypes, normalize_axis_types


def audit(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: AnyMesh,
    target: Target | str,
    *,
    plan: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    roles: Any = None,
    hardware: Hardware | None = None,
    axis_types: AxisTypes = "auto",
) -> AuditReport:
    """Compiles a function for a target and reads what came out. Nothing is run, and nothing has to be there.

    **Arguments:**

    - `fn`, `args`: the function and its arguments; see `ShardingAnalyzer.audit`, which has the rest too.
    - `mesh`: the axes to compile for.
    - `target`: the machine.
    - `plan`, `in_shardings`, `out_shardings`, `donate_argnums`, `roles`, `hardware`, `axis_types`: as there.

    **Returns:**

    An `AuditReport`.

    **Raises:**

    As `ShardingAnalyzer.audit`.
    """
    target = Target.parse(target)
    there = _typed(target.mesh(mesh), axis_types)
    known = _typed(mesh, axis_types) if isinstance(mesh, Mesh) else there
    start = time.perf_counter()
    found = read_arguments(fn, args, there, plan, in_shardings)
    traced = trace(fn, found, known)
    found = found.told(traced.said())
    tracing = time.perf_counter() - start
    given = _given(donate_argnums, len(args))
    donated = [number for number, owner in enumerate(found.owners) if owner in given]
    compiled = compile_for(traced, found, there, out_shardings, donated, tolerant=True)
    program = read_program(compiled.text)
    matmuls = find_matmuls(program)
    sheet = target.hardware if hardware is None else hardware
    known = Evidence(
        compiled,
        program,
        found.arrays,
        read_roles(found, roles),
        find_collectives(program, there, target),
        matmuls,
        mesh_sizes(there),
        sheet,
    )
    named = tuple(attrs.evolve(one, arguments=known.named(one.arguments)) for one in known.collectives)
    return AuditReport(
        name_of(fn),
        target,
        sheet,
        mesh_text(there),
        there.size,
        _arrays(known),
        named,
        module_costs(known.collectives, matmuls),
        known.memory,
        tuple(flops_by_dtype(matmuls).items()),
        _own_flops(compiled),
        step_time(program, known.collectives, matmuls, sheet),
        surprises(known),
        tracing + compiled.seconds,
        compiled.text,
    )


def _own_flops(compiled: Compiled) -> int | None:
    asked = list(matmul_flops(compiled.jaxpr))
    return sum(one.flops for one in asked) if all(one.is_certain for one in asked) else None


def _typed(mesh: Mesh, axis_types: AxisTypes) -> Mesh:
    if axis_types is None:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=normalize_axis_types(axis_types, mesh.axis_names))


def _given(donate_argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    wrong = [number for number in numbers if not -count <= number < count]
    if wrong:
        raise TreeError(f"donate_argnums names argument {wrong[0]}, and there are {count}, counted from 0")
    return tuple(number % count for number in numbers)


def _arrays(known: Evidence) -> tuple[AuditedArray, ...]:
    over = {one.parameter: None for one in known.program.aliases}
    taken = (
        AuditedArray(
            one.path,
            one.shape,
            str(one.dtype),
            role,
            "" if one.spec is None else spec_repr(one.spec),
            spec_text(at),
            size,
            number in over,
        )
        for number, (one, role, at, size) in enumerate(
            zip(known.arguments, known.roles, known.compiled.arguments, known.device_bytes, strict=True)
        )
    )
    returned = (
        AuditedArray(
            f"result/{one.path}".rstrip("/"),
            tuple(one.struct.shape),
            str(one.struct.dtype),
            "result",
            "" if one.asked is None else spec_repr(one.asked.spec),
            spec_text(one.at),
            size.nbytes,
        )
        for one, size in zip(known.compiled.results, known.program.outputs, strict=True)
    )
    return (*taken, *returned)
