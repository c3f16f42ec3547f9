"""Arrays that no argument reaches, such as masks, computed where loops read them.

JAX computes them once, in front of a loop. Compilers then keep all of them in memory, and read them in each round; in
the loop they are part of the kernel that reads them, and take nothing.
"""

from collections.abc import Container, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Var

from shardrules.programs.jaxprs.bodies import bodies_of, scan_of, with_bodies
from shardrules.programs.jaxprs.calls import InlinedCall, is_scan
from shardrules.programs.jaxprs.rewrite import Writer
from shardrules.programs.jaxprs.walk import open_jaxpr, reads
from shardrules.programs.traced.factors.table import is_elementwise

_SPREADS = ("broadcast_in_dim", "reshape", "squeeze")
"""Primitives that are part of the kernel that reads them, besides elementwise ones."""

_COMPUTED = """
add and clamp convert_element_type div eq ge gt iota le lt max min mul name ne neg not or reduce_precision rem select_n
sign stop_gradient sub xor
"""
"""Primitives that compute an element in less time than it takes to read one."""

_CHEAP = frozenset(_COMPUTED.split())

_LEAST_BYTES = 2**20
"""The smallest array that is worth it: chosen by hand."""


def with_masks_inside(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a program whose loops compute such arrays; what no longer needs them is dead code."""
    makers: list[Any] = []
    constants: set[Any] = set()
    equations = []
    for equation in jaxpr.eqns:
        if constants.issuperset(reads([equation])) and _is_cheap(equation):
            makers.append(equation)
            constants.update(equation.outvars)
        else:
            equation = _with_body(_with_makers(equation, makers, constants))
        equations.append(equation)
    is_same = all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True))
    return jaxpr if is_same else jaxpr.replace(eqns=equations)


def _with_body(equation: Any) -> Any:
    """The equation of a call or a loop whose programs compute their own masks."""
    programs = [open_jaxpr(body.program) for body in bodies_of(equation)]
    changed = [with_masks_inside(program) for program in programs]
    is_same = all(new is old for new, old in zip(changed, programs, strict=True))
    return equation if is_same else with_bodies(equation, changed)


def _is_cheap(equation: Any) -> bool:
    call = InlinedCall.of(equation)
    if call is not None:
        return all(map(_is_cheap, open_jaxpr(call.jaxpr).eqns))
    return equation.primitive.name in _CHEAP or equation.primitive.name in _SPREADS


def _with_makers(scan: Any, makers: Sequence[Any], constants: Container[Any]) -> Any:
    """The equation of a scan whose body begins with what makes the large arrays among its constants."""
    if not is_scan(scan):
        return scan
    loop = scan_of(scan)
    body = open_jaxpr(loop.body)
    inside: dict[Any, Any] = {}
    inputs = list(body.invars)
    for index, (var, inner) in enumerate(zip(scan.invars[loop.consts], body.invars, strict=False)):
        is_large = var.aval.size * var.aval.dtype.itemsize >= _LEAST_BYTES
        if is_large and var in constants and var not in inside and _is_read_in_passing(body, inner):
            inside[var] = inner
            inputs[index] = Var(inner.aval)
    if not inside:
        return scan
    return with_bodies(scan, [body.replace(invars=inputs, eqns=[*_copies(makers, inside), *body.eqns])])


def _copies(makers: Sequence[Any], inside: dict[Any, Any]) -> list[Any]:
    """Copies of what makes some variables, which return their partners inside of a loop."""
    needed, chain = set(inside), []
    for maker in reversed(makers):
        if not needed.isdisjoint(maker.outvars):
            chain.append(maker)
            needed.update(reads([maker]))
    writer = Writer(inside)
    for maker in reversed(chain):
        results = [inside.setdefault(var, Var(var.aval)) for var in maker.outvars]
        writer.add(maker.replace(invars=writer.read(maker.invars), outvars=results))
    return writer.equations


def _is_read_in_passing(jaxpr: Jaxpr, var: Any) -> bool:
    """All that reads a variable is a kernel that its maker can be part of."""
    if any(result is var for result in jaxpr.outvars):
        return False
    for equation in jaxpr.eqns:
        for index, operand in enumerate(equation.invars):
            if operand is not var:
                continue
            bodies = bodies_of(equation)
            for body in bodies:
                inner, place = open_jaxpr(body.program), body.operands.index(index) if index in body.operands else None
                if place is None or place >= body.fixed_count or not _is_read_in_passing(inner, inner.invars[place]):
                    return False
            is_passing = is_elementwise(equation.primitive.name) or equation.primitive.name in _SPREADS
            if not bodies and not is_passing:
                return False
    return True
