"""The sharding constraints in a traced function, and the lines of code that ask for them."""

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.core.check import check_spec
from shardrules.core.finding import Finding, shape_text
from shardrules.core.source import Source, called_from, equation_stack, user_line
from shardrules.core.spec import spec_repr
from shardrules.programs.jaxprs.calls import InlinedCall
from shardrules.programs.jaxprs.walk import equations, open_jaxpr, programs_in

Constraint: TypeAlias = tuple[tuple[int, ...], PartitionSpec, list[Source]]
"""An array whose sharding a function constrains: its shape, the spec, and the lines of code, innermost first."""


def find_constraints(program: ClosedJaxpr) -> Iterator[Constraint]:
    """Returns the shape, spec and lines of every array whose sharding a function constrains."""
    return (constraint for constraint in map(_constraint, equations(program)) if constraint is not None)


def _constraint(equation: Any) -> Constraint | None:
    # On Auto axes a constraint is the one, on Explicit axes the other.
    if equation.primitive.name not in ("sharding_constraint", "reshard"):
        return None
    sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
    is_named = isinstance(sharding, NamedSharding)
    return (equation.invars[0].aval.shape, sharding.spec, equation_stack(equation)) if is_named else None


def weakened_constraints(constraints: Iterable[Constraint], sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Yields a finding for each constraint that does not divide its array: JAX weakens these silently."""
    for shape, spec, stack in constraints:
        for finding in check_spec("", shape, spec, sizes):
            if finding.code == "weakened":
                message = (
                    f"{spec_repr(spec)} on an array of shape {shape_text(shape)}: {finding.message}{called_from(stack)}"
                )
                yield attrs.evolve(finding, message=message, shape=None, source=user_line(stack))


def follow_arguments(program: ClosedJaxpr) -> tuple[dict[int, list[Constraint]], list[int]]:
    """Returns the constraints on what a function makes of each argument, by its index, and each result's arguments.

    The arguments that a result depends on are bits: bit 0 is the first argument's.
    """
    constraints: dict[int, list[Constraint]] = {}
    bits = [1 << index for index in range(len(program.jaxpr.invars))]
    return constraints, _collect(program.jaxpr, bits, constraints)


def _collect(program: Jaxpr, bits: Sequence[int], constraints: dict[int, list[Constraint]]) -> list[int]:
    """Adds the constraints of a program whose operands depend on `bits`; returns what its results depend on."""
    # Bits say which arguments a value depends on; literals and constants depend on none.
    depends = dict(zip(map(id, program.invars), bits, strict=True))
    for equation in program.eqns:
        operands = [depends.get(id(value), 0) for value in equation.invars]
        constraint = _constraint(equation)
        for index in range(operands[0].bit_length() if constraint is not None else 0):
            if constraint is not None and operands[0] >> index & 1:
                constraints.setdefault(index, []).append(constraint)
        everything = functools.reduce(operator.or_, operands, 0)
        results = [everything] * len(equation.outvars)
        call = InlinedCall.of(equation)
        if call is not None:
            results = _collect(open_jaxpr(call.jaxpr), [operands[index] for index in call.operands], constraints)
        # Inside of loops and branches each operand counts as depending on all: rounds may mix them.
        for jaxpr in map(open_jaxpr, () if call is not None else programs_in(equation)):
            _collect(jaxpr, [everything] * len(jaxpr.invars), constraints)
        depends |= dict(zip(map(id, equation.outvars), results, strict=True))
    return [depends.get(id(result), 0) for result in program.outvars]
