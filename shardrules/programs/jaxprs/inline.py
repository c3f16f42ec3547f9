"""A traced program without inner calls of `jit`, so that its equations stand in one list."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import Sharding

from shardrules.core.source import equation_stack, user_frames
from shardrules.programs.jaxprs.calls import CHECKPOINTS, COND, PLAIN_CALLS, SCAN, WHILE, InlinedCall
from shardrules.programs.jaxprs.rewrite import Writer, fresh, with_programs
from shardrules.programs.jaxprs.walk import open_jaxpr

_BODIES = (SCAN, WHILE, COND, *CHECKPOINTS)


def flattened(program: ClosedJaxpr, replace_checkpoints: bool = False) -> ClosedJaxpr:
    """Returns a program with what `jit` calls in it, and in what loops, branches and checkpoints run, in its place.

    Calls with shardings stay, and so does `jax.checkpoint` without `replace_checkpoints`.

    ```python
    from shardrules.programs.jaxprs.inline import flattened

    program = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + 1)(1.0)
    assert [equation.primitive.name for equation in flattened(program).eqns] == ["sin", "add"]
    ```
    """
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    equations: list[Any] = []
    results = _inline(program.jaxpr, Writer({}, equations), constants, replace_checkpoints)
    jaxpr = program.jaxpr.replace(constvars=list(constants), eqns=equations, outvars=results)
    return ClosedJaxpr(jaxpr, list(constants.values()))


def _inline(
    jaxpr: Jaxpr, writer: Writer, constants: dict[Any, Any], replace_checkpoints: bool, caller: Any = None
) -> list[Any]:
    """Writes the equations of a program, and returns its results."""

    def flat(inner: ClosedJaxpr | Jaxpr) -> ClosedJaxpr | Jaxpr:
        if isinstance(inner, ClosedJaxpr):
            return flattened(inner, replace_checkpoints)
        body = flattened(ClosedJaxpr(inner, ()), replace_checkpoints)
        # The body of a checkpoint has no constants: one that would need them stays as it is.
        return inner if body.consts else body.jaxpr

    for equation in jaxpr.eqns:
        operands, name = writer.read(equation.invars), equation.primitive.name
        if caller is not None:
            # As JAX does when it evaluates a jaxpr: names of scopes add up.
            stack = caller.source_info.name_stack + equation.source_info.name_stack
            source = equation.source_info.replace(name_stack=stack)
            if not user_frames(equation_stack(equation)):
                # A function of a library, which may have been traced for another line before.
                source = source.replace(traceback=caller.source_info.traceback)
            equation = equation.replace(source_info=source)
        is_inlined = name in PLAIN_CALLS or (replace_checkpoints and name in CHECKPOINTS)
        if is_inlined and not _has_shardings(equation):
            call = InlinedCall.of(equation)
            assert call is not None, "what is inlined is a call"
            inner = open_jaxpr(call.jaxpr)
            inside = Writer(dict(zip(inner.invars, operands, strict=True)), writer.equations)
            if isinstance(call.jaxpr, ClosedJaxpr):
                for var, value in zip(inner.constvars, call.jaxpr.consts, strict=True):
                    inside.current[var] = Var(var.aval)
                    constants[inside.current[var]] = value
            results = _inline(inner, inside, constants, replace_checkpoints, equation)
            writer.current.update(zip(equation.outvars, results, strict=True))
            continue
        # A program that is called twice is inlined twice.
        outvars = equation.outvars if caller is None else fresh(equation.outvars)
        writer.current.update(zip(equation.outvars, outvars, strict=True))
        equation = with_programs(equation, flat) if name in _BODIES else equation
        writer.add(equation.replace(invars=operands, outvars=outvars))
    return writer.read(jaxpr.outvars)


def _has_shardings(equation: Any) -> bool:
    # Shardings are orders to the partitioner.
    keys = ("in_shardings", "out_shardings")
    return any(isinstance(sharding, Sharding) for key in keys for sharding in equation.params.get(key, ()))
