"""The audit: compiles a user's function for a target, and reports what the compiled program will do."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.callables import name_of
from shardrules.core.spec import spec_repr
from shardrules.mesh.axis_types import AxisTypes
from shardrules.programs.audits.arguments import AuditedArguments, spec_text
from shardrules.programs.audits.checks.run import run_checks
from shardrules.programs.audits.function import TracedFunction
from shardrules.programs.audits.modules import module_costs
from shardrules.programs.audits.movement import Movement
from shardrules.programs.audits.report import AuditedArray, AuditReport
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.flops import flops_by_dtype
from shardrules.programs.compiled.kernel_costs import KernelCost, KernelFacts, read_kernel_costs
from shardrules.programs.compiling.kernel_calls import find_kernel_calls
from shardrules.programs.compiling.request import CompileRequest
from shardrules.programs.costs.kernels import kernel_seconds
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.machine.targets import Target


def audit(
    fn: Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | None = None,
    plan: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    target: Target | str = "cpu",
    roles: Any = None,
    hardware: Hardware | str | None = None,
    axis_types: AxisTypes = "auto",
    kernel_costs: Sequence[KernelCost] = (),
) -> AuditReport:
    """Compiles a function for a target, and reports what the compiled program will do. Nothing runs.

    **Arguments:**

    - `fn`: the function, a whole train step for instance. A jitted function keeps its own shardings and donation.
        If it names a mesh with the same axes, the target's mesh replaces it.
    - `args`: its arguments; `jax.ShapeDtypeStruct`s are accepted for arrays. Anything else is static.
    - `mesh`: the mesh; by default that of the plan, else the mesh of the arrays, else the mesh in force.
    - `plan`: a plan or a rule for the tuple of all arguments, or for the only one. Or a plan of the first
        argument; then the others take what mirrors it, as an optimizer's state does.
    - `in_shardings`: a tuple with one item per argument, or one item for all of them: a rule, a plan, a
        PartitionSpec, or a tree or prefix of specs and shardings. `None`: what the plan says, else where the
        argument already is, else what the compiler chooses.
    - `out_shardings`: the same for the result; a tuple is for the items of a tuple.
    - `donate_argnums`: the arguments whose memory results may reuse.
    - `target`: what to compile for: a `Target`, or `"cpu"`, `"tpu:v5e:4x4"`, `"cuda:h100:8"`.
    - `roles`: what the arguments are for, a tree or prefix of `"parameters"`, `"optimizer state"` and `"batch"`. By
        default they are guessed: arrays that are repeated under equal paths and shapes are parameters, and the
        repetitions are state.
    - `hardware`: the sheet of the device, or the name of one (`"cuda:h100"`); by default the target's.
    - `axis_types`: the types of the axes while `fn` is traced; `None`: the mesh's own.
    - `kernel_costs`: what kernels cost that do not say it, from `kernel_cost`. The first that matches counts.

    **Returns:**

    A `shardrules.reports.AuditReport`.

    **Raises:**

    `PlanError`, which lists every array whose requested sharding is impossible, or names the line of the function
    that uses an unknown axis; `MissingCompilerError` with the command that installs it; `TargetError` for a
    mesh of another size than the target; `DoesNotFitError` where a compiler refuses a program that needs too much
    memory; `NoMeshError`.

    ```python
    def step(params, batch):
        return jax.grad(lambda w: jnp.tanh(batch @ w).sum())(params)

    mesh = sr.mesh_shape("data:8")
    weights, batch = jnp.ones((16, 16)), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    report = sr.audit(step, weights, batch, mesh=mesh, in_shardings=(P(), P("data")))
    assert [collective.kind for collective in report.collectives] == ["all-reduce"] and not report.problems
    ```
    """
    request = CompileRequest(fn, plan, in_shardings, out_shardings, donate_argnums, roles, axis_types)
    return audit_request(request, args, request.mesh_for(mesh, lambda: args), target, hardware, kernel_costs)


def audit_request(
    request: CompileRequest,
    args: tuple[Any, ...],
    mesh: AnyMesh,
    target: Target | str,
    hardware: Hardware | str | None = None,
    kernel_costs: Sequence[KernelCost] = (),
) -> AuditReport:
    """Compiles a function for a target and reads the compiled program. Nothing runs, and no device is needed."""
    target = Target.parse(target)
    sheet = target.hardware if hardware is None else Hardware.of(hardware)
    costs = read_kernel_costs(kernel_costs)
    # Tolerant: a program that does not fit still has a report, which says what takes the memory.
    result = request.compile(args, mesh, target, tolerant=True)
    kernel_facts = KernelFacts(costs, find_kernel_calls(result.compiled.jaxpr))
    timing = Timing.of(result, target, sheet, kernel_facts)
    program, matmuls = timing.program, timing.matmuls
    sizes = mesh_sizes(result.mesh)
    arguments = AuditedArguments(result.compiled, program, result.arguments.arrays, result.roles, sizes)
    function = TracedFunction(result.compiled, sizes, matmuls, program.partition_count)
    schedule = timing.schedule
    return AuditReport(
        name=name_of(request.fn),
        target=target,
        hardware=sheet,
        mesh=mesh_text(result.mesh),
        device_count=result.mesh.size,
        arrays=_audited_arrays(arguments),
        collectives=tuple(
            attrs.evolve(collective, arguments=arguments.paths_of(collective.arguments))
            for collective in timing.collectives
        ),
        modules=module_costs(timing.collectives, matmuls),
        memory=arguments.memory,
        flops_by_dtype=tuple(flops_by_dtype(matmuls).items()),
        model_flops=function.flops,
        time=schedule.time,
        lines=schedule.lines,
        findings=run_checks(Movement(program, arguments, function, timing), kernel_facts),
        compile_seconds=result.seconds,
        hlo_text=result.compiled.text,
        kernel_seconds=tuple(
            (kernel.name, kernel_seconds(kernel, timing.hardware))
            for kernel in timing.kernels
            if kernel.names or any(matmul.origin != "library" for matmul in kernel.matmuls)
        ),
        timeline=attrs.evolve(schedule.timeline, name=f"{name_of(request.fn)} on {target}"),
    )


def _audited_arrays(arguments: AuditedArguments) -> tuple[AuditedArray, ...]:
    # An alias is a result that the compiler writes over an argument: only then has donation saved memory.
    inputs = (
        AuditedArray(
            array.path,
            array.shape,
            str(array.dtype),
            role,
            "" if array.spec is None else spec_repr(array.spec),
            spec_text(sharding),
            size,
            array_index in arguments.aliased,
        )
        for array_index, ((array, role, sharding), size) in enumerate(
            zip(arguments, arguments.device_bytes, strict=True)
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
        for array, output in zip(arguments.compiled.results, arguments.program.outputs, strict=True)
    )
    return (*inputs, *results)
