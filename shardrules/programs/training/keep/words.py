"""The arrays that are kept and computed again, in words."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

from shardrules.core.source import equation_line, short_line
from shardrules.programs.compilers.kernels import VIEWS
from shardrules.programs.compiling.model_flops import flops_of
from shardrules.programs.jaxprs.calls import CUSTOM_VJP, SCAN, WHILE
from shardrules.programs.training.keep.cut import KeptValues
from shardrules.programs.training.keep.needs import is_dear_equation
from shardrules.programs.training.keep.problem import UnitProblem

_LISTED = 5
"""The arrays and operations that are listed of each unit; the others are counted. A line has room for as many."""

_NAMES = {
    "dot_general": "matmul",
    "conv_general_dilated": "convolution",
    "ragged_dot_general": "ragged matmul",
    **dict.fromkeys((SCAN, WHILE), "loop"),
    CUSTOM_VJP: "kernel",
    "pallas_call": "kernel",
}
"""The names of primitives in plain words; others have their own names."""

_FORM_CHANGES = VIEWS | {"transpose", "convert_element_type", "split", "slice", "broadcast_in_dim"}
"""Primitives that only change the form of an array: it is named by what computes it before."""


UnitPart: TypeAlias = tuple[UnitProblem, KeptValues, int]
"""A unit, the arrays kept of some of its segments, and the number of these."""


def keep_words(parts: Sequence[UnitPart]) -> tuple[str | int, ...]:
    """The words for what each unit keeps, sends to the host and computes again. Numbers of bytes stay integers."""
    words: list[str | int] = []
    for problem, kept, count in parts:
        layers = count * problem.unit.run_count // problem.repeats
        words += ["; "] if words else []
        words += [f"{layers} layer{'s' * (layers != 1)}: "] if len(parts) > 1 else []
        words += _kept_words(problem, kept, count / problem.repeats)
    return tuple(words) or ("keeps everything",)


def _kept_words(problem: UnitProblem, kept: KeptValues, fraction: float) -> Iterator[str | int]:
    if kept is problem.as_written:
        yield from ("keeps everything (", round(fraction * kept.nbytes), ")")
        return
    if kept.kept:
        yield from (f"keeps {_values_text(problem, kept.kept)} (", round(fraction * kept.nbytes), "), ")
    if kept.offloaded:
        offloaded = _values_text(problem, kept.offloaded)
        yield from (f"keeps {offloaded} on the host (", round(fraction * kept.host_bytes), "), ")
    yield f"recomputes {_steps_text(problem, kept.repeated)}"


def repeated_flops(parts: Sequence[UnitPart]) -> float:
    """The FLOPs that are computed again."""
    return sum(
        problem.unit.run_count * count / problem.repeats * flops_of(problem.unit.body.eqns[step])
        for problem, kept, count in parts
        for step in kept.repeated
    )


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
    """The costly operations among some steps, the longest first."""
    equations = problem.unit.body.eqns
    dear = [step for step in steps if is_dear_equation(equations[step])]
    dear.sort(key=lambda step: -problem.problem.steps[step].seconds)
    texts = list(dict.fromkeys(_equation_text(equations[step]) for step in dear))
    return _listed(texts) if texts else "elementwise operations"


def _origin(equation: Any, producers: dict[Any, Any]) -> Any:
    """The operation that computes what an equation passes on in another form."""
    while equation.primitive.name in _FORM_CHANGES and len(equation.invars) == 1:
        (operand,) = equation.invars
        if isinstance(operand, Literal) or operand not in producers:
            break
        equation = producers[operand]
    return equation


def _equation_text(equation: Any) -> str:
    name = equation.params.get("name") if equation.primitive.name == "name" else None
    text = str(name) if name else _NAMES.get(equation.primitive.name, equation.primitive.name)
    line = short_line(equation_line(equation))
    size = "x".join(map(str, equation.outvars[0].aval.shape))
    return f"{text} {line or size}".rstrip()


def _listed(texts: Sequence[str]) -> str:
    shown = list(texts[:_LISTED])
    if len(texts) > _LISTED:
        shown.append(f"{len(texts) - _LISTED} more")
    return ", ".join(shown) or "nothing"
