"""Walks through a traced program and the programs inside its equations."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval

from shardrules.programs.jaxprs.calls import SCAN


def open_jaxpr(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """A program without its constants."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def closed_like(like: Any, body: Jaxpr) -> Any:
    """A body with the constants of `like`, if that is closed."""
    return ClosedJaxpr(body, like.consts) if isinstance(like, ClosedJaxpr) else body


def programs_in(equation: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Yields all programs in the parameters of an equation: bodies, branches, kernels, and rules of derivatives."""
    # Every primitive has its own names for them, so that all parameters are looked at.
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item


@final
class EquationRun(NamedTuple):
    equation: Any
    times: int  # on whole arrays
    around: tuple[Any, ...]  # the equations whose programs it is in


def runs(
    equations: Iterable[Any], is_leaf: Callable[[Any], bool] = lambda equation: False, times: int = 1, around: Any = ()
) -> Iterator[EquationRun]:
    """Yields all equations, and those of the programs inside of them, but not of leaves.

    A loop of unknown length runs once, and so does every branch.
    """
    for equation in equations:
        yield EquationRun(equation, times, around)
        if not is_leaf(equation):
            inner_times = times * inner_runs(equation)
            for inner in programs_in(equation):
                yield from runs(open_jaxpr(inner).eqns, is_leaf, inner_times, (*around, equation))


def equations(program: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """Yields all equations of a traced program and of the programs inside it."""
    return (run.equation for run in runs(open_jaxpr(program).eqns))


def inner_runs(equation: Any) -> int:
    """Returns how often the programs inside an equation run on whole arrays: in each round, and on each device."""
    name, params = equation.primitive.name, equation.params
    if name == SCAN:
        return params["length"]
    if name == "pallas_call":
        return math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    if name == "shard_map":  # inside is the program of one device
        sizes = dict(params["mesh"].shape)
        return math.prod(sizes[name] for name in params["newly_manual_axes"])
    return 1


def reads(equations: Iterable[Any]) -> Iterator[Any]:
    """Yields the operands of equations, apart from literals."""
    return (var for equation in equations for var in equation.invars if not isinstance(var, Literal))


def without_dead_code(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program without the equations that no result depends on, which gradients leave behind."""
    live, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(live, program.consts)


def needed_inputs(program: ClosedJaxpr, result_count: int | None = None) -> list[bool]:
    """Returns for each input of a program whether results need it, or the first of them."""
    count = len(program.jaxpr.outvars)
    return partial_eval.dce_jaxpr(program.jaxpr, [index < (result_count or count) for index in range(count)])[1]
