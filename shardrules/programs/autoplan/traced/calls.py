"""Equations that only call another jaxpr. They are read as if it stood in their place."""

from collections.abc import Mapping
from typing import Any, Self, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardrules.programs.jaxprs.walk import CHECKPOINTS

INLINED: Mapping[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    **dict.fromkeys(("call", "closed_call", "core_call"), ("call_jaxpr",)),
    "eval_jaxpr": ("call_jaxpr", "jaxpr"),
    "custom_jvp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("fun_jaxpr", "call_jaxpr"),
    "custom_vmap_call": ("call",),
    "custom_linear_solve": ("jaxprs",),
    "linear_call": ("callee",),
    "composite": ("jaxpr", "call_jaxpr"),
    "xla_metadata_call": ("jaxpr",),
    **dict.fromkeys(CHECKPOINTS, ("jaxpr",)),
}
"""Primitives that only call another jaxpr, and the parameters that may hold it, in one JAX version or another."""


@final
@attrs.frozen(eq=False)
class InlinedCall:
    """A jaxpr that an equation only calls."""

    equation: Any
    parameter: str
    """The name of the parameter that holds it."""
    jaxpr: ClosedJaxpr | Jaxpr
    operands: tuple[int, ...]
    """The operands of the equation that it takes, by index."""

    @classmethod
    def of(cls, equation: Any) -> Self | None:
        """The call of an equation; `None` where it is not such a call."""
        params, count = equation.params, len(equation.invars)
        for parameter in INLINED.get(equation.primitive.name, ()):
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

    def params_with(self, body: Jaxpr) -> dict[str, Any]:
        """The parameters of the equation with another body in place of the jaxpr."""
        changed: Any = closed_like(self.jaxpr, body)
        if self.parameter == "jaxprs":
            changed = self.equation.params["jaxprs"]._replace(solve=changed)
        return {**self.equation.params, self.parameter: changed}


def open_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """A jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def closed_like(like: Any, body: Jaxpr) -> Any:
    """A body with the constants of `like`, if that is closed."""
    return ClosedJaxpr(body, like.consts) if isinstance(like, ClosedJaxpr) else body
