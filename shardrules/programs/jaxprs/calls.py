"""The primitives of calls, loops, branches, checkpoints and derivatives, by role.

A call is read as if what it calls stood in its place.
"""

from collections.abc import Mapping
from typing import Any, Self, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr

SCAN, WHILE, COND = "scan", "while", "cond"

JITS = ("jit", "pjit")

CHECKPOINTS = ("checkpoint", "remat", "remat2")
"""Primitives of a checkpointed function."""

CHECKPOINT_SCOPE, RECOMPUTED_SCOPE = "checkpoint", "rematted_computation"
"""Parts of the names of operations of a checkpointed function, and of those repeated for the backward pass."""

PLAIN_CALLS = (*JITS, "closed_call", "core_call", "call", "eval_jaxpr")
"""Primitives that only call another program, without derivatives of their own."""

UNTIL_JAX_0_11, FROM_JAX_0_12 = ("call", "closed_call"), ("eval_jaxpr",)
"""Calls that not all versions of JAX make public."""

CUSTOM_JVP, CUSTOM_VJP = "custom_jvp_call", "custom_vjp_call"
"""The names of functions with derivatives of their own begin with these."""

CALLS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(JITS, ("jaxpr",)),
    **dict.fromkeys(("call", "closed_call", "core_call"), ("call_jaxpr",)),
    "eval_jaxpr": ("call_jaxpr", "jaxpr"),
    CUSTOM_JVP: ("call_jaxpr", "fun_jaxpr"),
    CUSTOM_VJP: ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("fun_jaxpr", "call_jaxpr"),
    "custom_vmap_call": ("call",),
    "custom_linear_solve": ("jaxprs",),
    "linear_call": ("callee",),
    "composite": ("jaxpr", "call_jaxpr"),
    "xla_metadata_call": ("jaxpr",),
    **dict.fromkeys(CHECKPOINTS, ("jaxpr",)),
}
"""Primitives that only call another program, and the parameters that may hold it, in one JAX version or another."""

OPEN = frozenset((SCAN, WHILE, COND, *CALLS))
"""Primitives whose programs are part of the one around them. Kernels and `shard_map` stay as they are."""


def is_scan(equation: Any) -> bool:
    return equation.primitive.name == SCAN


def is_while(equation: Any) -> bool:
    return equation.primitive.name == WHILE


def is_cond(equation: Any) -> bool:
    return equation.primitive.name == COND


def is_jit(equation: Any) -> bool:
    return equation.primitive.name in JITS


def is_checkpoint(equation: Any) -> bool:
    return equation.primitive.name in CHECKPOINTS


def has_custom_vjp(equation: Any) -> bool:
    return equation.primitive.name.startswith(CUSTOM_VJP)


def has_custom_derivative(equation: Any) -> bool:
    return equation.primitive.name.startswith((CUSTOM_JVP, CUSTOM_VJP))


@final
@attrs.frozen(eq=False)
class InlinedCall:
    """A program that an equation only calls."""

    equation: Any
    parameter: str
    """The name of the parameter that holds it."""
    jaxpr: ClosedJaxpr | Jaxpr
    operands: tuple[int, ...]
    """The indices of the operands of the equation that it takes."""

    @classmethod
    def of(cls, equation: Any) -> Self | None:
        """The call of an equation; `None` where it is not such a call."""
        params, count = equation.params, len(equation.invars)
        for parameter in CALLS.get(equation.primitive.name, ()):
            if parameter not in params:
                continue
            if parameter == "jaxprs":
                # Only `solve` runs: the others are for derivatives. Each has constants of its own, in this order.
                lengths = params["const_lengths"]
                first = lengths.matvec + lengths.vecmat
                operands = (*range(first, first + lengths.solve), *range(sum(lengths), count))
                return cls(equation, parameter, params["jaxprs"].solve, operands)
            return cls(equation, parameter, params[parameter], tuple(range(count)))
        return None

    def params_with(self, program: ClosedJaxpr | Jaxpr) -> dict[str, Any]:
        """The parameters of the equation with another program in the place of this one."""
        changed: Any = program
        if self.parameter == "jaxprs":
            changed = self.equation.params["jaxprs"]._replace(solve=changed)
        return {**self.equation.params, self.parameter: changed}
