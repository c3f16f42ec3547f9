"""Programs without plain calls: what `jax.jit` wraps stands where it is called."""

from typing import Any, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import Sharding

from shardrules.analysis.compiling.jaxprs import CHECKPOINTS
from shardrules.planning.traced.calls import InlinedCall, open_jaxpr

_PLAIN = ("jit", "pjit", "call", "closed_call", "core_call", "eval_jaxpr")
_BODIES = ("scan", "while", "cond", *CHECKPOINTS)


def flattened(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with what its plain calls run in their stead, in loops, branches and checkpoints, too.

    ```python
    from shardrules.training.examples.flatten import flattened

    program = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + 1)(1.0)
    assert [equation.primitive.name for equation in flattened(program).eqns] == ["sin", "add"]
    ```
    """
    return _Flattening(True).run(program.jaxpr, list(program.consts))


@final
@attrs.define(eq=False)
class _Flattening:
    """The equations so far. What is called twice gets variables of its own at each call."""

    may_add_consts: bool
    equations: list[Any] = attrs.field(factory=list)
    constvars: list[Var] = attrs.field(factory=list)
    consts: list[Any] = attrs.field(factory=list)

    def run(self, jaxpr: Jaxpr, consts: list[Any]) -> ClosedJaxpr:
        self.constvars, self.consts = list(jaxpr.constvars), consts
        current: dict[Any, Any] = {}
        self.add(jaxpr, current)
        outvars = [_substitute(var, current) for var in jaxpr.outvars]
        flat = jaxpr.replace(constvars=self.constvars, eqns=self.equations, outvars=outvars)
        return ClosedJaxpr(flat, self.consts)

    def add(self, jaxpr: Jaxpr, current: dict[Any, Any], is_called: bool = False) -> None:
        for equation in jaxpr.eqns:
            inputs = [_substitute(var, current) for var in equation.invars]
            call = InlinedCall.of(equation) if equation.primitive.name in _PLAIN else None
            if call is not None and self.is_plain(call):
                callee = open_jaxpr(call.jaxpr)
                inside: dict[Any, Any] = dict(zip(callee.invars, inputs, strict=True))
                for var, value in zip(callee.constvars, getattr(call.jaxpr, "consts", ()), strict=True):
                    inside[var] = Var(var.aval)
                    self.constvars.append(inside[var])
                    self.consts.append(value)
                self.add(callee, inside, True)
                results = [_substitute(var, inside) for var in callee.outvars]
                current.update(zip(equation.outvars, results, strict=True))
                continue
            outputs = equation.outvars
            if is_called:
                outputs = [Var(var.aval) if type(var) is Var else var for var in outputs]
                current.update(zip(equation.outvars, outputs, strict=True))
            params = equation.params
            if equation.primitive.name in _BODIES:
                params = {name: _flat_value(value) for name, value in params.items()}
            self.equations.append(equation.replace(invars=inputs, outvars=outputs, params=params))

    def is_plain(self, call: InlinedCall) -> bool:
        """Whether a call says nothing about shardings, and its constants have somewhere to go."""
        params = call.equation.params
        shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
        has_consts = bool(open_jaxpr(call.jaxpr).constvars)
        return not any(isinstance(sharding, Sharding) for sharding in shardings) and (
            self.may_add_consts or not has_consts
        )


def _flat_value(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return _Flattening(True).run(value.jaxpr, list(value.consts))
    if isinstance(value, Jaxpr):
        return _Flattening(False).run(value, []).jaxpr
    return tuple(map(_flat_value, value)) if type(value) is tuple else value


def _substitute(var: Any, current: dict[Any, Any]) -> Any:
    return var if isinstance(var, Literal) else current.get(var, var)
