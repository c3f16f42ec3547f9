"""What is kept and computed again, in words."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from shardrules.analysis.compiling.model_flops import model_flops
from shardrules.analysis.compiling.source import equation_line, short_line
from shardrules.core.check import bytes_text
from shardrules.planning.traced.fusion import VIEWS
from shardrules.training.keep.cut import KeptValues
from shardrules.training.keep.needs import is_dear_equation
from shardrules.training.keep.problem import UnitProblem
from shardrules.training.keep.segments import segment_program

_LISTED = 5
"""How many arrays and operations are listed of each unit; the others are counted. With twice as many, a line wraps."""

_NAMES = {
    "dot_general": "matmul",
    "conv_general_dilated": "convolution",
    "ragged_dot_general": "ragged matmul",
    "scan": "loop",
    "while": "loop",
    "custom_vjp_call": "kernel",
    "pallas_call": "kernel",
}
"""What primitives are called; others by their own names."""

_FORMS = (*VIEWS, "transpose", "convert_element_type", "split", "slice", "broadcast_in_dim")
"""Primitives whose results are what they take, in another form: an array is named by what computes it."""


def keep_text(problems: Sequence[UnitProblem], chosen: Sequence[KeptValues]) -> str:
    """Says what each unit keeps, what goes to the host and what is computed again."""
    parts = []
    for problem, kept in zip(problems, chosen, strict=True):
        count = f"{problem.unit.run_count} layers: " if len(problems) > 1 else ""
        if kept is problem.as_written:
            parts.append(f"{count}keeps everything ({bytes_text(kept.nbytes)})")
            continue
        texts = [f"keeps {_values_text(problem, kept.kept)} ({bytes_text(kept.nbytes)})"] if kept.kept else []
        if kept.offloaded:
            offloaded = _values_text(problem, kept.offloaded)
            texts.append(f"keeps {offloaded} on the host ({bytes_text(kept.host_bytes)})")
        texts.append(f"recomputes {_steps_text(problem, kept.repeated)}")
        parts.append(count + "; ".join(texts))
    return "; ".join(parts) or "keeps everything"


def repeated_flops(problems: Sequence[UnitProblem], chosen: Sequence[KeptValues]) -> int:
    """The FLOPs that are computed again."""
    return sum(
        problem.unit.run_count * _flops(problem.unit.body.eqns[step])
        for problem, kept in zip(problems, chosen, strict=True)
        for step in kept.repeated
    )


def _flops(equation: Any) -> int:
    return model_flops(segment_program([equation], []))


def _values_text(problem: UnitProblem, values: Iterable[int]) -> str:
    """Values by what computes them, those with most bytes first."""
    producers = {var: equation for equation in problem.unit.body.eqns for var in equation.outvars}
    nbytes: dict[str, int] = {}
    for index in values:
        value = problem.problem.values[index]
        equation_index = value.position[0]
        if equation_index < 0:
            text = "the input of each layer"
        else:
            text = _equation_text(_origin(problem.unit.body.eqns[equation_index], producers))
        nbytes[text] = nbytes.get(text, 0) + value.nbytes
    # What takes less than a hundredth, such as the statistics of norms, is not worth a word.
    least = 0.01 * max(nbytes.values(), default=0)
    return _listed([text for text, size in sorted(nbytes.items(), key=lambda item: -item[1]) if size >= least])


def _steps_text(problem: UnitProblem, steps: Iterable[int]) -> str:
    """The dear ones of some steps, those that take longest first."""
    equations = problem.unit.body.eqns
    dear = [step for step in steps if is_dear_equation(equations[step])]
    dear.sort(key=lambda step: -problem.problem.steps[step].seconds)
    texts = list(dict.fromkeys(_equation_text(equations[step]) for step in dear))
    return _listed(texts) if texts else "elementwise operations"


def _origin(equation: Any, producers: dict[Any, Any]) -> Any:
    """The operation that computes what an equation passes on in another form."""
    while equation.primitive.name in _FORMS and len(equation.invars) == 1 and equation.invars[0] in producers:
        equation = producers[equation.invars[0]]
    return equation


def _equation_text(equation: Any) -> str:
    name = equation.params.get("name") if equation.primitive.name == "name" else None
    text = str(name) if name else _NAMES.get(equation.primitive.name, equation.primitive.name)
    line = short_line(equation_line(equation))
    size = "x".join(map(str, math.prod(equation.outvars[0].aval.shape) and equation.outvars[0].aval.shape))
    return f"{text} {line or size}".rstrip()


def _listed(texts: Sequence[str]) -> str:
    shown = list(texts[:_LISTED])
    if len(texts) > _LISTED:
        shown.append(f"{len(texts) - _LISTED} more")
    return ", ".join(shown) or "nothing"
