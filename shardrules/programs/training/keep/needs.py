"""The arrays of the forward pass that the backward pass of a program needs, and those among them that it cannot compute
again."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from shardrules.programs.jaxprs.calls import COND, CUSTOM_JVP, SCAN, WHILE
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.jaxprs.segments import WITHOUT_DERIVATIVE, is_float, segment_program, signature, struct
from shardrules.programs.jaxprs.walk import open_jaxpr, programs_in, reads
from shardrules.programs.training.keep.rules import RuleValues, has_rule

_DEAR = "dot_general conv_general_dilated ragged_dot_general gather random_bits threefry2x32 sort top_k fft cholesky"
_DEAR_PRIMITIVES = frozenset(_DEAR.split())
"""Primitives that are computed again only as a kernel of their own."""


def is_dear_equation(equation: Any) -> bool:
    """It is a matmul, a loop, a kernel or another operation that compilers fuse into no other."""
    if equation.primitive.name in _DEAR_PRIMITIVES or "call" in equation.primitive.name.removeprefix(CUSTOM_JVP):
        return True
    if equation.primitive.name in (SCAN, WHILE, COND, "shard_map"):
        return True
    return any(is_dear_equation(inner) for program in programs_in(equation) for inner in open_jaxpr(program).eqns)


@final
@attrs.frozen
class EquationNeeds:
    """The arrays that the derivative of an equation needs."""

    operands: tuple[int, ...]
    """The indices of the operands."""
    results: tuple[int, ...]
    """The indices of the results."""
    inner: tuple[Any, ...] = ()
    """The types of arrays that are computed inside of the equation, and are neither operands nor results."""
    is_inner_dear: bool = False
    """Only running the equation again returns those: they come from a loop, a kernel or matmuls."""
    traced_results: tuple[int, ...] = ()
    """The results that have derivatives."""
    rule: RuleValues | None = None
    """The values that can be kept inside of a function with a backward rule of its own."""


@final
@attrs.define(eq=False)
class NeedsReader:
    """Reads what derivatives need. Equal equations are read once."""

    _needs: dict[Any, EquationNeeds] = attrs.field(factory=dict)

    def program_needs(self, body: Jaxpr, is_traced: Sequence[bool]) -> list[EquationNeeds]:
        """Returns what each equation of a program needs if the inputs that are `is_traced` have derivatives."""
        traced = dict.fromkeys(var for var, flag in zip(body.invars, is_traced, strict=True) if flag)
        needs: list[EquationNeeds] = []
        for equation in body.eqns:
            flags = tuple(not isinstance(var, Literal) and var in traced for var in equation.invars)
            each = self.equation_needs(equation, flags) if any(flags) else EquationNeeds((), ())
            traced.update(dict.fromkeys(equation.outvars[index] for index in each.traced_results))
            needs.append(each)
        # A derivative that reaches no result of the program is never computed.
        useful = dict.fromkeys(var for var in body.outvars if not isinstance(var, Literal))
        for index in range(len(needs) - 1, -1, -1):
            equation = body.eqns[index]
            if any(equation.outvars[result] in useful for result in needs[index].traced_results):
                useful.update(dict.fromkeys(var for var in reads([equation]) if var in traced))
            else:
                needs[index] = EquationNeeds((), ())
        return needs

    def equation_needs(self, equation: Any, is_traced: tuple[bool, ...]) -> EquationNeeds:
        """Returns what the derivative of an equation needs with respect to the operands that are `is_traced`."""
        key = (signature(equation), is_traced, tuple(equation.invars.index(var) for var in equation.invars))
        if key not in self._needs:
            self._needs[key] = _read(equation, is_traced)
        return self._needs[key]


def _read(equation: Any, is_traced: tuple[bool, ...]) -> EquationNeeds:
    program = segment_program([equation], equation.outvars)
    run = jaxpr_as_fun(ClosedJaxpr(program, ()))
    positions = [equation.invars.index(var) for var in program.invars]
    flags = [is_traced[position] for position in positions]

    def derivative(*inputs: Any) -> Any:
        def moved(*moving: Any) -> Any:
            rest = iter(moving)
            return run(*(next(rest) if flag else value for value, flag in zip(inputs, flags, strict=True)))

        return jax.linearize(moved, *(value for value, flag in zip(inputs, flags, strict=True) if flag))

    traced = jax.make_jaxpr(derivative)(*map(struct, program.invars))
    jaxpr = flattened(traced).jaxpr
    count = len(equation.outvars)
    sources: dict[Any, tuple[str, int]] = {}
    for index, var in enumerate(jaxpr.outvars[:count]):
        if not isinstance(var, Literal):
            sources.setdefault(var, ("results", index))
    # An array that is passed on is an operand.
    sources.update((var, ("operands", position)) for var, position in zip(jaxpr.invars, positions, strict=True))
    needed, direct, inner = dict[tuple[str, int], None](), dict[tuple[str, int], None](), dict[Any, Any]()
    is_dear, producers = False, {var: each for each in jaxpr.eqns for var in each.outvars}
    for residual in jaxpr.outvars[count:]:
        if isinstance(residual, Literal) or residual in jaxpr.constvars:
            continue
        if residual in sources:
            needed[sources[residual]] = direct[sources[residual]] = None
        elif residual.aval.shape:
            inner[residual] = residual.aval
            # Back to the operands and results that it is computed from.
            pending, seen = [residual], dict[Any, None]()
            while pending:
                var = pending.pop()
                if isinstance(var, Literal) or var in seen:
                    continue
                seen[var] = None
                if var in sources:
                    needed[sources[var]] = None
                elif var in producers:
                    is_dear |= is_dear_equation(producers[var])
                    pending += producers[var].invars
    name = equation.primitive.name
    results = tuple(
        index for index, var in enumerate(equation.outvars) if name not in WITHOUT_DERIVATIVE and is_float(var)
    )
    if has_rule(equation) and not any(is_traced[: equation.params["num_consts"]]):
        # What the backward rule reads of its own forward rule can be kept, so that it needs no operands.
        operands = tuple(sorted(index for side, index in direct if side == "operands"))
        return EquationNeeds(operands, (), traced_results=results, rule=RuleValues.of(equation, is_traced))
    operands, own_results = (
        tuple(sorted(index for kind, index in needed if kind == side)) for side in ("operands", "results")
    )
    return EquationNeeds(operands, own_results, tuple(inner.values()), is_dear, results)
