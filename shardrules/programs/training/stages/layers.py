"""The loop over the layers of a program, which stages can share, and what comes before and after it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardrules.core.errors import MicrobatchError
from shardrules.core.source import equation_line, short_line
from shardrules.programs.compiling.model_flops import model_flops
from shardrules.programs.jaxprs.bodies import scan_of
from shardrules.programs.jaxprs.calls import is_cond, is_scan
from shardrules.programs.jaxprs.segments import is_float, segment_program
from shardrules.programs.jaxprs.walk import inner_runs, open_jaxpr, reads, runs
from shardrules.programs.training.stages.rolled import rolled

_MOST_OUTSIDE = 0.5
"""The part of a program's FLOPs that may be outside of its layers: with more, most of the work is in no stage."""


@final
@attrs.frozen(eq=False)
class LayerLoop:
    """The program of a microbatch, cut at the loop over its layers."""

    inputs: Sequence[Any]
    """The inputs of the program."""
    equation: Any
    before: Jaxpr
    """From some inputs of the program to what the loop and `after` need."""
    after: Jaxpr
    """From inputs of the program, results of `before` and of the loop, to the program's results."""
    by_microbatch: frozenset[Any]
    """The variables that differ from microbatch to microbatch; all others are the same for the batch."""

    @property
    def layer_count(self) -> int:
        return inner_runs(self.equation)

    def sources(self, count: int) -> Mapping[Any, frozenset[int]]:
        """The first inputs of the program, by index, that flow into each float before the loop."""
        sources = {var: frozenset((index,)) for index, var in enumerate(self.inputs[:count])}
        for equation in self.before.eqns:
            origins = frozenset(index for var in reads([equation]) for index in sources.get(var, ()))
            sources |= {var: origins for var in equation.outvars if is_float(var)}
        return sources

    @classmethod
    def of(cls, program: ClosedJaxpr, batched: Sequence[bool]) -> "LayerLoop":
        """Cuts a program `with_layer_loop`; `batched` marks the inputs that are a microbatch's."""
        jaxpr = program.jaxpr
        index, _ = _main_loop(program)
        equation = jaxpr.eqns[index]
        needed, first, rest = set(reads([equation])), [], [*jaxpr.eqns[index + 1 :]]
        # Only what the loop needs runs before it: the loss and the like have to wait for the last stage.
        for each in reversed(jaxpr.eqns[:index]):
            if any(var in needed for var in each.outvars):
                needed.update(reads([each]))
                first.insert(0, each)
            else:
                rest.insert(0, each)
        outputs = [var for var in jaxpr.outvars if not isinstance(var, Literal)]
        read = dict.fromkeys((*reads([equation, *rest]), *outputs))
        computed = dict.fromkeys(var for each in first for var in each.outvars)
        by_microbatch = {var for var, flag in zip(jaxpr.invars, batched, strict=True) if flag}
        # A value depends on the microbatch as soon as one of its operands does.
        for each in (*first, equation, *rest):
            if any(var in by_microbatch for var in reads([each])):
                by_microbatch.update(each.outvars)
        _check_layers(equation, by_microbatch)
        before = segment_program(first, [var for var in read if var in computed])
        return cls(jaxpr.invars, equation, before, segment_program(rest, jaxpr.outvars), frozenset(by_microbatch))


def with_layer_loop(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose layers are a loop that does most of its work: itself, or with equal layers as a loop."""
    index, part = _main_loop(program)
    if part < 1 - _MOST_OUTSIDE:
        with_loop = rolled(program)
        if with_loop is None:
            scans = f" (no jax.lax.scan outside of others has more than {part:.0%} of its FLOPs)" if part else ""
            raise MicrobatchError(
                f"its layers are neither one loop over stacked parameters{scans} nor equal ones with parameters of "
                "their own that follow each other: of what layers compute, each may read only what the one before has, "
                "and none may have effects, or a derivative or jax.checkpoint policy of its own that the others lack"
            )
        program = with_loop
        index, part = _main_loop(program)
        if part < 1 - _MOST_OUTSIDE:
            count = inner_runs(program.jaxpr.eqns[index])
            raise MicrobatchError(
                f"its largest loop, of {count} layers, has {part:.0%} of its FLOPs; with less than "
                f"{1 - _MOST_OUTSIDE:.0%} in stages, most of the work would be outside of them"
            )
    if program.jaxpr.eqns[index].params["reverse"]:
        raise MicrobatchError("its loop over layers runs from the last to the first")
    return program


def _main_loop(program: ClosedJaxpr) -> tuple[int, float]:
    """The index of the loop that does most of the work of a program, and its part of that."""
    loops = {
        index: inner_runs(equation) * model_flops(scan_of(equation).body)
        for index, equation in enumerate(program.jaxpr.eqns)
        # A loop without pieces has no stacked parameters.
        if is_scan(equation) and equation.invars[scan_of(equation).pieces]
    }
    if not loops:
        return -1, 0.0
    index, total = max(loops, key=lambda index: loops[index]), model_flops(program)
    return index, loops[index] / total if total else 1.0


def _check_layers(loop: Any, by_microbatch: Collection[Any]) -> None:
    """Raises an error for layers that compute something else where several are computed at once."""

    def is_kernel(equation: Any) -> bool:
        return equation.primitive.name == "pallas_call"  # several at once have a larger grid

    if not any(var in by_microbatch for var in reads([loop])):
        raise MicrobatchError("its loop over layers reads nothing of the batch")
    body, const_count = open_jaxpr(scan_of(loop).body), scan_of(loop).const_count
    # What differs from stage to stage: all but constants that are the same for the batch.
    differs = dict.fromkeys(
        inner
        for index, (var, inner) in enumerate(zip(loop.invars, body.invars, strict=True))
        if index >= const_count or (not isinstance(var, Literal) and var in by_microbatch)
    )
    for equation in body.eqns:
        if any(var in differs for var in reads([equation])):
            differs.update(dict.fromkeys(equation.outvars))
            if any(is_cond(run.equation) for run in runs([equation], is_kernel)):
                line = equation_line(equation)
                raise MicrobatchError(
                    "its layers branch (jax.lax.cond), and stages that compute at once would compute all branches"
                    + (f" ({short_line(line)})" if line else "")
                )
    inside = [run.equation for run in runs(body.eqns, is_kernel)]
    avals = [var.aval for equation in inside for var in (*equation.invars, *equation.outvars)]
    if any("rbg" in str(getattr(aval, "dtype", "")) for aval in avals):
        raise MicrobatchError("its layers draw random numbers by rbg, which draws others for several stages at once")
