"""The end of a loss, from the sums over its examples: scales, regularizers, and results of aux."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

from shardrules.core.source import equation_line, short_line
from shardrules.programs.jaxprs.rewrite import reading, replaced
from shardrules.programs.jaxprs.segments import in_operands, struct
from shardrules.programs.jaxprs.walk import needed_inputs, without_dead_code
from shardrules.programs.training.examples.facts import name_of_step


def cut(program: ClosedJaxpr, inputs: Sequence[Var], outputs: Sequence[Any]) -> ClosedJaxpr:
    """Returns the part of a program that computes some of its arrays from its arguments and from other arrays of it."""
    fresh = {var: Var(var.aval) for var in inputs}
    jaxpr = program.jaxpr
    body = jaxpr.replace(
        invars=[*jaxpr.invars, *fresh.values()],
        outvars=[replaced(var, fresh) for var in outputs],
        eqns=reading(jaxpr.eqns, fresh),
    )
    return without_dead_code(ClosedJaxpr(body, program.consts))


@final
@attrs.frozen(eq=False)
class Tail:
    """A function from the arguments of a loss and its sums to the loss and the results of aux."""

    program: ClosedJaxpr
    argument_count: int
    trainable_count: int
    is_trained: tuple[bool, ...]
    """The sums by which the loss has a derivative: not counts, nor sums that only aux has."""

    @classmethod
    def of(cls, program: ClosedJaxpr, argument_count: int, trainable_count: int) -> "Tail":
        """Returns the tail that a program of arguments and sums is."""
        is_trained = tuple(
            jnp.issubdtype(aval.dtype, jnp.inexact) and is_needed
            for aval, is_needed in [*zip(program.in_avals, needed_inputs(program, 1), strict=True)][argument_count:]
        )
        return cls(program, argument_count, trainable_count, is_trained)

    def __call__(self, arguments: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
        """Returns the loss, then the results of aux."""
        return jaxpr_as_fun(self.program)(*arguments, *sums)

    def coefficients(self, arguments: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
        """Returns the derivative of the loss by each trained sum, which does not depend on these sums."""
        trained = [value for value, flag in zip(sums, self.is_trained, strict=True) if flag]

        def loss(values: Sequence[Any]) -> Any:
            remaining = iter(values)
            merged = [next(remaining) if flag else value for value, flag in zip(sums, self.is_trained, strict=True)]
            return self(arguments, merged)[0]

        return jax.grad(loss)(trained)

    def regularizer_gradients(self, arguments: Sequence[Any], sums: Sequence[Any]) -> list[Any] | None:
        """Returns the gradients of what the loss adds that no example reaches; `None` where it adds nothing."""
        if not any(needed_inputs(self.program, 1)[: self.trainable_count]):
            return None

        def loss(trainable: Sequence[Any]) -> Any:
            return self([*trainable, *arguments[self.trainable_count :]], sums)[0]

        return jax.grad(loss)(list(arguments[: self.trainable_count]))

    def nonlinear_step(self) -> str:
        """Returns which equation makes the loss no sum of its sums; empty where their weights are constants."""

        # Those without derivatives, such as counts of right answers, may be no weights either.
        def weights(*values: Any) -> list[Any]:
            return self.coefficients(values[: self.argument_count], values[self.argument_count :])

        gradient = jax.make_jaxpr(weights)(*map(struct, self.program.jaxpr.invars))
        return _first_nonlinear(self) if any(needed_inputs(gradient)[self.argument_count :]) else ""


def _first_nonlinear(tail: Tail) -> str:
    """The first equation on the way from the sums to the loss whose derivative is no constant."""
    loss = cut(tail.program, (), tail.program.jaxpr.outvars[:1]).jaxpr
    reached = dict.fromkeys(loss.invars[tail.argument_count :])
    for equation in loss.eqns:
        indices = [
            index for index, var in enumerate(equation.invars) if not isinstance(var, Literal) and var in reached
        ]
        if indices and not _is_linear(equation, indices):
            line = short_line(equation_line(equation))
            return f"{name_of_step(equation)} ({line})" if line else name_of_step(equation)
        reached.update(dict.fromkeys(equation.outvars if indices else ()))
    return "its derivative"


def _is_linear(equation: Any, indices: Sequence[int]) -> bool:
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars]
    if not all(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in equation.outvars):
        return False  # a comparison or a count

    def change(values: list[Any], tangents: list[Any]) -> Any:
        # The values of the other operands do not matter: zeros stand for them.
        others = [
            var.val if isinstance(var, Literal) else jnp.zeros(shape.shape, shape.dtype)
            for var, shape in zip(equation.invars, shapes, strict=True)
        ]
        return jax.jvp(in_operands(equation, others, indices), tuple(values), tuple(tangents))[1]

    moved = [shapes[index] for index in indices]
    try:
        program = jax.make_jaxpr(change)(moved, moved)
    except TypeError:  # results that are integers or booleans have no derivative
        return False
    return not any(needed_inputs(program)[: len(moved)])
