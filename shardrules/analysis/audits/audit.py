"""The audit: compiles a user's function for a target, and reports what the compiled program will do."""

from collections.abc import Sequence
from typing import Any

import attrs

from shardrules.analysis.audits.checks.run import run_checks
from shardrules.analysis.audits.facts import AuditFacts, spec_text
from shardrules.analysis.audits.modules import module_costs
from shardrules.analysis.audits.report import AuditedArray, AuditReport
from shardrules.analysis.compiling.kernel_calls import find_kernel_calls
from shardrules.analysis.compiling.request import CompileRequest
from shardrules.analysis.costs.kernels import kernel_seconds
from shardrules.analysis.machine.hardware import Hardware
from shardrules.analysis.machine.targets import Target
from shardrules.analysis.program.collectives import find_collectives
from shardrules.analysis.program.flops import find_matmuls, flops_by_dtype
from shardrules.analysis.program.kernel_costs import KernelCost, KernelFacts, read_kernel_costs
from shardrules.analysis.program.program import read_program
from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.callables import name_of
from shardrules.core.errors import ConfigTypeError
from shardrules.core.spec import spec_repr


def audit(
    request: CompileRequest,
    args: tuple[Any, ...],
    mesh: AnyMesh,
    target: Target | str,
    hardware: Hardware | None = None,
    kernel_costs: Sequence[KernelCost] = (),
) -> AuditReport:
    """Compiles a function for a target and reads the compiled program. Nothing runs, and no device is needed."""
    target = Target.parse(target)
    sheet = target.hardware if hardware is None else hardware
    if not isinstance(sheet, Hardware):
        raise ConfigTypeError(f"hardware must be a Hardware, such as Target.parse(...).hardware; got {sheet!r:.60}")
    costs = read_kernel_costs(kernel_costs)
    # Tolerant: a program that does not fit still has a report, which says what takes the memory.
    result = request.compile(args, mesh, target, tolerant=True)
    program = read_program(result.compiled.text)
    kernel_facts = KernelFacts(costs, find_kernel_calls(result.compiled.jaxpr))
    matmuls = find_matmuls(program, kernel_facts)
    facts = AuditFacts(
        result.compiled,
        program,
        result.arguments.arrays,
        result.roles,
        find_collectives(program, result.mesh, target),
        matmuls,
        mesh_sizes(result.mesh),
        sheet,
        kernel_facts,
    )
    schedule = facts.schedule
    return AuditReport(
        name=name_of(request.fn),
        target=target,
        hardware=sheet,
        mesh=mesh_text(result.mesh),
        device_count=result.mesh.size,
        arrays=_audited_arrays(facts),
        collectives=tuple(
            attrs.evolve(collective, arguments=facts.paths_of(collective.arguments)) for collective in facts.collectives
        ),
        modules=module_costs(facts.collectives, matmuls),
        memory=facts.memory,
        flops_by_dtype=tuple(flops_by_dtype(matmuls).items()),
        model_flops=facts.model_flops,
        time=schedule.time,
        lines=schedule.lines,
        findings=run_checks(facts),
        compile_seconds=result.seconds,
        hlo_text=result.compiled.text,
        kernel_seconds=tuple(
            (kernel.name, kernel_seconds(kernel, sheet))
            for kernel in facts.kernels
            if kernel.names or any(matmul.origin != "library" for matmul in kernel.matmuls)
        ),
        timeline=attrs.evolve(schedule.timeline, name=f"{name_of(request.fn)} on {target}"),
    )


def _audited_arrays(facts: AuditFacts) -> tuple[AuditedArray, ...]:
    # An alias is a result that the compiler writes over an argument: only then has donation saved memory.
    arguments = (
        AuditedArray(
            array.path,
            array.shape,
            str(array.dtype),
            role,
            "" if array.spec is None else spec_repr(array.spec),
            spec_text(sharding),
            size,
            array_index in facts.aliased,
        )
        for array_index, (array, role, sharding, size) in enumerate(
            zip(facts.arguments, facts.roles, facts.compiled.argument_shardings, facts.device_bytes, strict=True)
        )
    )
    results = (
        AuditedArray(
            f"result/{array.path}".rstrip("/"),
            tuple(array.struct.shape),
            str(array.struct.dtype),
            "result",
            "" if array.requested is None else spec_repr(array.requested.spec),
            spec_text(array.sharding),
            output.nbytes,
        )
        for array, output in zip(facts.compiled.results, facts.program.outputs, strict=True)
    )
    return (*arguments, *results)
