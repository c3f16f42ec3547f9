"""The audit: a user's own function, compiled for a target, and what the compiled program will really do."""

from typing import Any

import attrs

from shardrules.analysis.audits.evidence import Evidence, spec_text
from shardrules.analysis.audits.modules import module_costs
from shardrules.analysis.audits.report import AuditedArray, AuditReport
from shardrules.analysis.audits.roofline import step_time
from shardrules.analysis.audits.surprises import surprises
from shardrules.analysis.compiling.compile import name_of
from shardrules.analysis.compiling.question import Question
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.collectives import find_collectives
from shardrules.analysis.program.flops import find_matmuls, flops_by_dtype
from shardrules.analysis.program.program import read_program
from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.errors import HardwareError
from shardrules.core.spec import spec_repr


def audit(
    question: Question,
    args: tuple[Any, ...],
    mesh: AnyMesh,
    target: Target | str,
    hardware: Hardware | None = None,
) -> AuditReport:
    """Compiles a function for a target and reads what came out. Nothing is run, and nothing has to be there.

    **Arguments:**

    - `question`: the function, and where its arrays are to be.
    - `args`: its arguments.
    - `mesh`: the axes to compile for.
    - `target`: the machine.
    - `hardware`: the sheet of the device; by default that of the target.

    **Returns:**

    An `AuditReport`.

    **Raises:**

    As `ShardingAnalyzer.audit`.
    """
    target = Target.parse(target)
    sheet = target.hardware if hardware is None else hardware
    if not isinstance(sheet, Hardware):
        raise HardwareError(
            f"hardware is a Hardware, got {sheet!r:.60}; that of a target is Target.parse(...).hardware"
        )
    answer = question.ask(args, mesh, target, tolerant=True)
    there, compiled = answer.mesh, answer.compiled
    program = read_program(compiled.text)
    matmuls = find_matmuls(program)
    known = Evidence(
        compiled,
        program,
        answer.arguments.arrays,
        answer.roles,
        find_collectives(program, there, target),
        matmuls,
        mesh_sizes(there),
        sheet,
    )
    named = tuple(attrs.evolve(one, arguments=known.named(one.arguments)) for one in known.collectives)
    asked = known.asked_matmuls
    return AuditReport(
        name_of(question.fn),
        target,
        sheet,
        mesh_text(there),
        there.size,
        _arrays(known),
        named,
        module_costs(known.collectives, matmuls),
        known.memory,
        tuple(flops_by_dtype(matmuls).items()),
        sum(one.flops for one in asked) if all(one.is_certain for one in asked) else None,
        step_time(program, known.collectives, matmuls, sheet),
        surprises(known),
        answer.seconds,
        compiled.text,
    )


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
