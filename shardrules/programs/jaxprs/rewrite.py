"""Programs with other equations, operands or bodies in the place of some. Lines of code stay."""

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from shardrules.programs.jaxprs.walk import closed_like, open_jaxpr


def replaced(var: Any, variables: Mapping[Any, Any]) -> Any:
    """The operand in the place of a variable; itself if there is none."""
    return var if isinstance(var, Literal) else variables.get(var, var)


def fresh(variables: Iterable[Any]) -> list[Any]:
    """New variables in the place of some; what nothing uses keeps the class that says so."""
    return [Var(var.aval) if type(var) is Var else var for var in variables]


def reading(equations: Iterable[Any], variables: Mapping[Any, Any]) -> list[Any]:
    return [each.replace(invars=[replaced(var, variables) for var in each.invars]) for each in equations]


@final
@attrs.define(eq=False)
class Writer:
    """A program that is written: its equations so far, and the operands in the place of variables of the old one."""

    current: dict[Any, Any] = attrs.field(factory=dict)
    equations: list[Any] = attrs.field(factory=list)
    _results: dict[Hashable, Any] = attrs.field(factory=dict)

    def read(self, variables: Iterable[Any]) -> list[Any]:
        return [replaced(var, self.current) for var in variables]

    def add(self, equation: Any) -> list[Any]:
        """Adds an equation, and returns its results."""
        self.equations.append(equation)
        return equation.outvars

    def once(self, key: Hashable, add: Callable[[], Any]) -> Any:
        """Returns what `add` does: for equal keys, what it did the first time."""
        if key not in self._results:
            self._results[key] = add()
        return self._results[key]

    def splice(self, program: ClosedJaxpr, operands: Sequence[Any], like: Any, results: Sequence[Any]) -> None:
        """Adds the equations of a program, with operands and results of others and the line of the equation `like`."""
        jaxpr, targets = program.jaxpr, dict(zip(program.jaxpr.outvars, results, strict=True))
        # Constants, such as masks of kernels, are written into the equations: bodies of loops have none of their own.
        consts = zip(jaxpr.constvars, program.consts, strict=True)
        current: dict[Any, Any] = {var: Literal(value, var.aval) for var, value in consts}
        current |= zip(jaxpr.invars, operands, strict=True)
        for step in jaxpr.eqns:
            current |= {var: targets.get(var) or Var(var.aval) for var in step.outvars}
            invars, outvars = ([replaced(var, current) for var in side] for side in (step.invars, step.outvars))
            self.add(step.replace(invars=invars, outvars=outvars, source_info=like.source_info))

    def program(self, like: Jaxpr, **parts: Any) -> Jaxpr:
        """The program, with what `like` returns and what else it has."""
        return like.replace(**{"outvars": self.read(like.outvars), "eqns": self.equations, **parts})


def with_programs(equation: Any, change: Callable[[Any], Any]) -> Any:
    """Returns an equation with the programs in its parameters changed; itself if none is."""
    params = {name: _changed(value, change) for name, value in equation.params.items()}
    is_same = all(map(operator.is_, params.values(), equation.params.values()))
    return equation if is_same else equation.replace(params=params)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        return change(value)
    if type(value) in (tuple, list):  # named tuples hold none
        items = [_changed(item, change) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    return value


def rewritten(
    program: Any, visit: Callable[[Any], list[Any] | None], is_open: Callable[[Any], bool] = lambda equation: True
) -> Any:
    """Returns a program with other equations in the place of those for which `visit` returns some, at any depth.

    Only the programs of equations that are open are entered, those of the new equations too. A program without any
    such equations is returned as it is.
    """

    def inside(inner: Any) -> Any:
        return rewritten(inner, visit, is_open)

    jaxpr = open_jaxpr(program)
    equations: list[Any] = []
    for equation in jaxpr.eqns:
        steps = visit(equation)
        steps = [equation] if steps is None else steps
        equations += [with_programs(step, inside) if is_open(step) else step for step in steps]
    is_same = len(equations) == len(jaxpr.eqns) and all(map(operator.is_, equations, jaxpr.eqns))
    return program if is_same else closed_like(program, jaxpr.replace(eqns=equations))
