"""Functions with derivatives of their own (`jax.custom_vjp`): what their forward rules leave for the backward rules.

A name outside of such a function cannot keep what the backward rule reads, as the row sums of a kernel for attention
are: it has to be given inside of the forward rule.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self, final

import attrs
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, Literal

from shardrules.programs.jaxprs.rewrite import Writer
from shardrules.programs.jaxprs.walk import closed_like, open_jaxpr


def has_rule(equation: Any) -> bool:
    """An equation calls a function with a backward rule of its own."""
    return "fwd_jaxpr_thunk" in equation.params and "num_consts" in equation.params


def forward_rule(equation: Any, is_traced: Sequence[bool]) -> ClosedJaxpr:
    """Returns the forward rule. It returns what the backward rule reads, then the results."""
    jaxpr, consts = equation.params["fwd_jaxpr_thunk"].call_wrapped(*is_traced[equation.params["num_consts"] :])
    return ClosedJaxpr(open_jaxpr(jaxpr), consts)


@final
@attrs.frozen
class RuleValues:
    """The values that can be kept inside of a forward rule. Positions are indices of its results."""

    types: tuple[tuple[int, Any], ...]
    """Results that are computed, with their types. What the equation returns stands for itself where the backward rule
    reads it."""
    reads: tuple[int, ...]
    """The positions that the backward rule reads."""
    first: int
    """The index of the first result of the equation."""

    @classmethod
    def of(cls, equation: Any, is_traced: Sequence[bool]) -> Self:
        """Reads the forward rule of an equation."""
        rule = forward_rule(equation, is_traced).jaxpr
        first = len(rule.outvars) - len(equation.outvars)
        inputs = dict.fromkeys((*rule.invars, *rule.constvars))
        indices: dict[Any, int] = {}
        # Results come first, so that one which the backward rule reads as well has its position there.
        for index in (*range(first, len(rule.outvars)), *range(first)):
            var = rule.outvars[index]
            if not isinstance(var, Literal) and var not in inputs:
                indices.setdefault(var, index)
        read = [var for var in rule.outvars[:first] if not isinstance(var, Literal)]
        return cls(
            tuple((index, var.aval) for var, index in indices.items()),
            tuple(dict.fromkeys(indices[var] for var in read if var in indices)),
            first,
        )


def with_named_rule(equation: Any, name: Callable[[Any, int], Any | None]) -> Any:
    """Returns the equation with names in its forward rule: `name` returns the equation that gives one to a result of
    the rule, at an index, or `None`."""
    thunk = equation.params["fwd_jaxpr_thunk"]

    def rule(*is_traced: bool) -> tuple[Any, Any]:
        jaxpr, consts = thunk.call_wrapped(*is_traced)
        inner = open_jaxpr(jaxpr)
        writer = Writer(equations=list(inner.eqns))
        for index, var in enumerate(inner.outvars):
            naming = None if isinstance(var, Literal) else name(var, index)
            if naming is not None and var not in writer.current:
                (writer.current[var],) = writer.add(naming)
        return closed_like(jaxpr, writer.program(inner)), consts

    wrapped = linear_util.wrap_init(rule, debug_info=thunk.debug_info)
    return equation.replace(params={**equation.params, "fwd_jaxpr_thunk": wrapped})
