"""Specs that the compiled program does not have as they were requested, and batches that are not split."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding

from shardrules.core.finding import Finding
from shardrules.core.source import equation_line
from shardrules.core.spec import same, spec_repr
from shardrules.programs.audits.arguments import AuditedArguments, spec_text
from shardrules.programs.audits.function import TracedFunction
from shardrules.programs.compiling.constraints import weakened_constraints
from shardrules.programs.compiling.roles import BATCH
from shardrules.programs.jaxprs.calls import is_jit


def check_specs(arguments: AuditedArguments, function: TracedFunction) -> Iterator[Finding]:
    """Arrays that are compiled with another spec than requested, and constraints that JAX weakens."""
    for array, _, sharding in arguments:
        if array.spec is not None and isinstance(sharding, NamedSharding) and not same(sharding.spec, array.spec):
            yield _weakened(array.path, array.shape, spec_repr(array.spec), spec_repr(sharding.spec), "argument")
    for array in function.compiled.results:
        if (
            array.requested is not None
            and isinstance(array.sharding, NamedSharding)
            and not same(array.sharding.spec, array.requested.spec)
        ):
            yield _weakened(
                f"result/{array.path}".rstrip("/"),
                tuple(array.struct.shape),
                spec_repr(array.requested.spec),
                spec_repr(array.sharding.spec),
                "result",
            )
    yield from weakened_constraints(function.constraints, function.sizes)


def _weakened(path: str, shape: tuple[int, ...], requested: str, compiled: str, name: str) -> Finding:
    message = f"the {name} was requested as {requested} and is compiled as {compiled}"
    return Finding("warning", "weakened", message, path, "Request a spec that the compiler can honour", shape)


def check_batch(arguments: AuditedArguments, function: TracedFunction) -> Iterator[Finding]:
    """Batches that every device has the whole of, or that no spec says how to split."""
    device_count = function.device_count
    jaxpr = function.compiled.jaxpr.jaxpr
    # A whole batch is right where every axis splits parameters and no work is repeated: pure tensor parallelism.
    is_shared = not arguments.idle_axes and not function.repeats_work
    for array_index, (array, role, sharding) in enumerate(arguments):
        # Keys, scalars and masks of a few elements cost nothing when they are whole.
        if role != BATCH or device_count == 1 or max(array.shape, default=0) < device_count:
            continue
        if sharding.is_fully_replicated and not is_shared:
            message = f"each of the {device_count} devices gets all of it"
        elif array.spec is None and not sharding.is_fully_replicated:
            message = f"no spec says how to split it, and the compiler chose {spec_text(sharding)}"
        else:
            continue
        sizes = function.sizes
        fitting = [name for name in sizes if sizes[name] > 1 and not array.shape[0] % sizes[name]]
        yield Finding(
            "warning",
            "unsharded-batch",
            message,
            array.path,
            f"Split it: in_shardings with P({(fitting or list(sizes))[0]!r}) for this argument. If it is not data, "
            "say so with roles",
            array.shape,
            source=_first_use(jaxpr, jaxpr.invars[array_index]),
        )


def _first_use(program: Jaxpr, variable: Any) -> str:
    """The line where a value is first used, also inside functions that are jitted on their own."""
    for equation in program.eqns:
        if any(operand is variable for operand in equation.invars):
            # A variable has another name inside a call, so it is followed by its position.
            if is_jit(equation):
                operand_index = next(i for i, operand in enumerate(equation.invars) if operand is variable)
                inner = equation.params["jaxpr"].jaxpr
                return _first_use(inner, inner.invars[operand_index])
            return equation_line(equation)
    return ""
