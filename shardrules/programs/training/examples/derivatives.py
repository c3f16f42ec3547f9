"""Functions with derivatives of their own: these are programs, too, and may use several examples at once."""

from collections.abc import Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.jaxprs.segments import in_operands, struct
from shardrules.programs.jaxprs.walk import reads, without_dead_code
from shardrules.programs.training.examples.facts import Fact
from shardrules.programs.training.keep.rules import has_rule


def pulled_back(equation: Any, *, with_results: bool = False) -> ClosedJaxpr:
    """Returns the program from the operands of an equation and the cotangents of its results to the cotangents of its
    operands.

    Only floating-point arrays have cotangents, except for arrays that a rule closes over. `with_results`, the results
    that have some are returned first, as the rule of a derivative computes them.
    """
    results = [var for var in equation.outvars if _has_cotangent(var)]

    def run(values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        remaining = iter(values)
        operands = [var.val if isinstance(var, Literal) else next(remaining) for var in equation.invars]
        moved = _moved(equation)
        function = in_operands(equation, operands, moved)

        def floats(*inputs: Any) -> list[Any]:
            outputs = zip(equation.outvars, function(*inputs), strict=True)
            return [value for var, value in outputs if _has_cotangent(var)]

        # All other operands, such as integers, are constants of the derivative.
        computed, pull_back = jax.vjp(floats, *(operands[index] for index in moved))
        moved_back = pull_back(list(cotangents))
        return (computed, moved_back) if with_results else moved_back

    program = jax.make_jaxpr(run)([*map(struct, reads([equation]))], [*map(struct, results)])
    return without_dead_code(flattened(program))


def cotangent_facts(equation: Any, operands: Sequence[Fact], results: Sequence[Fact]) -> list[Fact]:
    """The facts of the inputs of `pulled_back`."""
    cotangents = [
        # A sum goes back to each example as it is.
        attrs.evolve(fact, form="shared", dim=None, is_whole=True) if fact.form == "sum" else fact
        for var, fact in zip(equation.outvars, results, strict=True)
        if _has_cotangent(var)
    ]
    return [
        *(fact for var, fact in zip(equation.invars, operands, strict=True) if not isinstance(var, Literal)),
        *(attrs.evolve(fact, is_trained=True, is_zero=False, index_columns=()) for fact in cotangents),
    ]


def wrong_cotangent(equation: Any, operands: Sequence[Fact], outputs: Sequence[Fact]) -> str:
    """The reason why the results of a derivative are not of single examples, or a sum over them; empty if all are."""
    for index, cotangent in zip(_moved(equation), outputs, strict=True):
        fact = operands[index]
        if cotangent.form == "refused":
            return cotangent.reason
        # Zeros are right in any form: nothing depends on their operand.
        is_zero = cotangent.form == "shared" and cotangent.is_zero
        expected = "examples" if fact.form == "examples" else "sum"
        if not is_zero and (cotangent.form != expected or (expected == "examples" and cotangent.dim != fact.dim)):
            return "it is not computed for each example"
    return ""


def _moved(equation: Any) -> list[int]:
    """The operands that have cotangents, by index."""
    closed_over = equation.params["num_consts"] if has_rule(equation) else 0
    return [
        index
        for index, var in enumerate(equation.invars)
        if index >= closed_over and not isinstance(var, Literal) and _has_cotangent(var)
    ]


def _has_cotangent(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)
