"""The loop over the layers of a program, which stages can share, and what comes before and after it."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardrules.analysis.compiling.jaxprs import scan_counts
from shardrules.analysis.compiling.model_flops import model_flops
from shardrules.core.errors import MicrobatchError
from shardrules.training.keep.segments import segment_program

_MOST_OUTSIDE = 0.5
"""The part of a program's FLOPs that may be outside of its layers: with more, most of the work is in no stage."""


@final
@attrs.frozen(eq=False)
class LayerLoop:
    """The program of a microbatch, cut at the loop over its layers."""

    equation: Any
    before: Jaxpr
    """From some inputs of the program to what the loop and `after` need."""
    after: Jaxpr
    """From inputs of the program, results of `before` and of the loop, to the program's results."""
    by_microbatch: frozenset[Any]
    """The variables that differ from microbatch to microbatch; all others are the same for the batch."""

    @property
    def layer_count(self) -> int:
        """How many layers there are."""
        return self.equation.params["length"]

    @classmethod
    def of(cls, program: ClosedJaxpr, batched: Sequence[bool]) -> "LayerLoop":
        """Cuts a program; `batched` says which of its inputs are those of a microbatch."""
        jaxpr = program.jaxpr
        index = _layer_index(program)
        equation = jaxpr.eqns[index]
        needed, first, rest = set(_reads([equation])), [], [*jaxpr.eqns[index + 1 :]]
        for each in reversed(jaxpr.eqns[:index]):
            if any(var in needed for var in each.outvars):
                needed.update(_reads([each]))
                first.insert(0, each)
            else:
                rest.insert(0, each)
        outputs = [var for var in jaxpr.outvars if not isinstance(var, Literal)]
        read = dict.fromkeys((*_reads([equation, *rest]), *outputs))
        computed = dict.fromkeys(var for each in first for var in each.outvars)
        by_microbatch = {var for var, flag in zip(jaxpr.invars, batched, strict=True) if flag}
        for each in (*first, equation, *rest):
            if any(var in by_microbatch for var in _reads([each])):
                by_microbatch.update(each.outvars)
        before = segment_program(first, [var for var in read if var in computed])
        return cls(equation, before, segment_program(rest, jaxpr.outvars), frozenset(by_microbatch))


def _layer_index(program: ClosedJaxpr) -> int:
    """The index of the loop that does most of the work of a program."""
    loops = {
        index: equation.params["length"] * model_flops(equation.params["jaxpr"])
        for index, equation in enumerate(program.jaxpr.eqns)
        if equation.primitive.name == "scan" and len(equation.invars) > sum(scan_counts(equation.params))
    }
    total = model_flops(program)
    index = max(loops, key=lambda index: loops[index], default=None)
    if index is None or loops[index] < total * (1 - _MOST_OUTSIDE):
        part = 0 if index is None or not total else loops[index] / total
        raise MicrobatchError(
            "its layers are not one loop over stacked parameters: no jax.lax.scan has more than "
            f"{part:.0%} of its FLOPs"
        )
    if program.jaxpr.eqns[index].params["reverse"]:
        raise MicrobatchError("its loop over layers runs from the last to the first")
    return index


def _reads(equations: Sequence[Any]) -> Iterator[Any]:
    return (var for equation in equations for var in equation.invars if not isinstance(var, Literal))
