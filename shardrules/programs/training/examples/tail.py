"""The end of a loss, from the sums over its examples: scales, regularizers, and results of aux."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

from shardrules.core.source import equation_line, short_line
from shardrules.programs.jaxprs.rewrite import reading, replaced
from shardrules.programs.jaxprs.segments import evaluated, struct
from shardrules.programs.jaxprs.walk import reads, without_dead_code
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
    return ClosedJaxpr(without_dead_code(ClosedJaxpr(body, program.consts)), program.consts)


@final
@attrs.frozen(eq=False)
class Tail:
    """A function from the arguments of a loss and its sums to the loss and the results of aux."""

    program: ClosedJaxpr
    argument_count: int
    trainable_count: int
    is_trained: tuple[bool, ...]
    """For each sum, whether the loss has a derivative by it: not by counts, nor by sums that only aux has."""

    @classmethod
    def of(cls, program: ClosedJaxpr, argument_count: int, trainable_count: int) -> "Tail":
        """Returns the tail that a program of arguments and sums is."""
        is_trained = tuple(
            jnp.issubdtype(aval.dtype, jnp.inexact) and _depends(program, [argument_count + index], 1)
            for index, aval in enumerate(program.in_avals[argument_count:])
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
        if not self.reaches(range(self.trainable_count), 1):
            return None

        def loss(trainable: Sequence[Any]) -> Any:
            return self([*trainable, *arguments[self.trainable_count :]], sums)[0]

        return jax.grad(loss)(list(arguments[: self.trainable_count]))

    def reaches(self, inputs: Sequence[int], result_count: int) -> bool:
        """The first results depend on some of the inputs."""
        return _depends(self.program, inputs, result_count)

    def nonlinear_step(self) -> str:
        """Returns which equation makes the loss no sum of its sums; empty where their weights are constants."""
        # Those without derivatives, such as counts of right answers, may be no weights either.
        sums = range(self.argument_count, self.argument_count + len(self.is_trained))

        def weights(*values: Any) -> list[Any]:
            return self.coefficients(values[: self.argument_count], values[self.argument_count :])

        gradient = jax.make_jaxpr(weights)(*map(struct, self.program.jaxpr.invars))
        if not _depends(gradient, sums, len(gradient.out_avals)):
            return ""
        return _first_nonlinear(self.program, sums)


def _depends(program: ClosedJaxpr, inputs: Sequence[int], result_count: int) -> bool:
    jaxpr = program.jaxpr
    body = jaxpr.replace(outvars=jaxpr.outvars[:result_count])
    live = without_dead_code(ClosedJaxpr(body, program.consts))
    needed = {*reads(live.eqns)}
    needed.update(var for var in live.outvars if not isinstance(var, Literal))
    return any(live.invars[index] in needed for index in inputs)


def _first_nonlinear(program: ClosedJaxpr, inputs: Sequence[int]) -> str:
    """The first equation on the way from the inputs to the loss whose derivative is no constant."""
    loss = program.jaxpr.replace(outvars=program.jaxpr.outvars[:1])
    program = ClosedJaxpr(without_dead_code(ClosedJaxpr(loss, program.consts)), program.consts)
    reached: dict[Any, None] = {program.jaxpr.invars[index]: None for index in inputs}
    for equation in program.jaxpr.eqns:
        indices = [
            index for index, var in enumerate(equation.invars) if not isinstance(var, Literal) and var in reached
        ]
        if not indices:
            continue
        reached.update(dict.fromkeys(equation.outvars))
        operands = [
            var.val if isinstance(var, Literal) else jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
            for var in equation.invars
        ]
        if not _is_linear(equation, operands, indices):
            line = short_line(equation_line(equation))
            return f"{name_of_step(equation)} ({line})" if line else name_of_step(equation)
    return "its derivative"


def _is_linear(equation: Any, operands: list[Any], indices: Sequence[int]) -> bool:
    def change(values: list[Any], tangents: list[Any]) -> Any:
        def run(*moved: Any) -> Any:
            merged = list(operands)
            for index, value in zip(indices, moved, strict=True):
                merged[index] = value
            rest = [
                value if not isinstance(value, jax.ShapeDtypeStruct) else jnp.zeros(value.shape, value.dtype)
                for value in merged
            ]
            return evaluated(equation, rest)

        return jax.jvp(run, tuple(values), tuple(tangents))[1]

    shapes = [operands[index] for index in indices]
    if not all(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in equation.outvars):
        return False  # a comparison or a count
    try:
        program = jax.make_jaxpr(change)(shapes, shapes)
    except TypeError:  # results that are integers or booleans have no derivative
        return False
    return not _depends(program, range(len(shapes)), len(program.out_avals))
