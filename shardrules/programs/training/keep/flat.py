"""A traced function without inner calls of `jit`, so that its equations stand in one list."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import Sharding

from shardrules.core.source import equation_stack, user_frames
from shardrules.programs.autoplan.traced.calls import InlinedCall, open_jaxpr
from shardrules.programs.jaxprs.walk import CHECKPOINTS

_TRANSPARENT = ("jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr")
"""Primitives that only call another jaxpr, without derivatives of their own."""

_BODIES = ("scan", "while", "cond", *CHECKPOINTS)


def flattened(program: ClosedJaxpr, replace_checkpoints: bool = False) -> ClosedJaxpr:
    """Returns a program with what `jit` calls in it, and in what loops, branches and checkpoints run, in its place.

    Calls with shardings stay, and so does `jax.checkpoint` without `replace_checkpoints`.

    ```python
    from shardrules.programs.training.keep.flat import flattened

    program = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + 1)(1.0)
    assert [equation.primitive.name for equation in flattened(program).eqns] == ["sin", "add"]
    ```
    """
    transparent = (*_TRANSPARENT, *CHECKPOINTS) if replace_checkpoints else _TRANSPARENT
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    equations: list[Any] = []
    results = _inline(program.jaxpr, {}, equations, constants, transparent)
    jaxpr = program.jaxpr.replace(constvars=list(constants), eqns=equations, outvars=results)
    return ClosedJaxpr(jaxpr, list(constants.values()))


def _flat_value(value: Any, replace_checkpoints: bool) -> Any:
    """The parameter of a loop, of branches or of a checkpoint, with the programs in it flattened."""
    if isinstance(value, ClosedJaxpr):
        return flattened(value, replace_checkpoints)
    if isinstance(value, Jaxpr):
        body = flattened(ClosedJaxpr(value, ()), replace_checkpoints)
        # The body of a checkpoint has no constants: one that would need them stays as it is.
        return value if body.consts else body.jaxpr
    return tuple(_flat_value(item, replace_checkpoints) for item in value) if type(value) is tuple else value


def replaced(var: Any, variables: Mapping[Any, Any]) -> Any:
    """The variable in the place of another; itself without one."""
    return var if isinstance(var, Literal) else variables.get(var, var)


def _inline(
    jaxpr: Jaxpr,
    variables: dict[Any, Any],
    equations: list[Any],
    constants: dict[Any, Any],
    transparent: Sequence[str],
    caller: Any = None,
) -> list[Any]:
    """Appends the equations of a jaxpr with other `variables`, and returns its results."""
    for equation in jaxpr.eqns:
        operands = [replaced(var, variables) for var in equation.invars]
        if caller is not None:
            # As JAX does when it evaluates a jaxpr: names of scopes add up.
            stack = caller.source_info.name_stack + equation.source_info.name_stack
            source = equation.source_info.replace(name_stack=stack)
            if not user_frames(equation_stack(equation)):
                # A function of a library, which may have been traced for another line before.
                source = source.replace(traceback=caller.source_info.traceback)
            equation = equation.replace(source_info=source)
        if equation.primitive.name in transparent and not _has_shardings(equation):
            call = InlinedCall.of(equation)
            assert call is not None, "what is transparent is a call"
            inner = open_jaxpr(call.jaxpr)
            inside = dict(zip(inner.invars, operands, strict=True))
            if isinstance(call.jaxpr, ClosedJaxpr):
                for var, value in zip(inner.constvars, call.jaxpr.consts, strict=True):
                    inside[var] = Var(var.aval)
                    constants[inside[var]] = value
            results = _inline(inner, inside, equations, constants, transparent, equation)
            variables.update(zip(equation.outvars, results, strict=True))
            continue
        params = equation.params
        if equation.primitive.name in _BODIES:
            params = {name: _flat_value(value, transparent != _TRANSPARENT) for name, value in params.items()}
        if caller is None:
            outvars = equation.outvars
        else:
            # A jaxpr that is called twice is inlined twice. What nothing uses keeps the class that says so.
            outvars = [Var(var.aval) if type(var) is Var else var for var in equation.outvars]
            variables.update(zip(equation.outvars, outvars, strict=True))
        equations.append(equation.replace(invars=operands, outvars=outvars, params=params))
    return [replaced(var, variables) for var in jaxpr.outvars]


def _has_shardings(equation: Any) -> bool:
    """A call asks for shardings, which are orders to the partitioner."""
    keys = ("in_shardings", "out_shardings")
    return any(isinstance(sharding, Sharding) for key in keys for sharding in equation.params.get(key, ()))
