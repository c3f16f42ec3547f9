"""The parts of a traced function that are repeated, such as its layers: what the backward pass keeps is decided there.

A unit is the body of a scan, or a run of equal segments: stretches of equations that follow each other and compute the
same, as layers do that a loop of Python calls.
"""

from collections.abc import Iterator, Mapping
from typing import Any, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardrules.programs.compiling.model_flops import flops_of
from shardrules.programs.jaxprs.bodies import scan_of
from shardrules.programs.jaxprs.calls import is_scan
from shardrules.programs.jaxprs.repeats import EqualSegments, find_runs
from shardrules.programs.jaxprs.segments import WITHOUT_DERIVATIVE, is_float, segment_program, segment_results
from shardrules.programs.jaxprs.walk import inner_runs, open_jaxpr, reads


@final
@attrs.frozen
class UnitPosition:
    """The position of a unit in a program whose calls are flattened: the same for other sizes of the batch."""

    path: tuple[int, ...]
    """The index of each scan on the way to its equations, in the program around it."""
    start: int
    length: int
    """The number of its equations."""
    repeats: int
    """The number of equal segments that follow each other from `start` on; 1 in a scan."""


@final
@attrs.frozen(eq=False)
class Unit:
    """A unit, and one of its equal segments as a program."""

    position: UnitPosition
    body: Jaxpr
    is_traced: tuple[bool, ...]
    """The inputs of the body that need a gradient, or are computed from arrays that need one."""
    is_resident: tuple[bool, ...]
    """The inputs of the body that are in memory anyway, as parameters are, and constants of a scan."""
    run_count: int
    """The number of runs of the body."""
    is_loop: bool


def find_units(program: ClosedJaxpr, trainable_count: int | None = None) -> list[Unit]:
    """Returns the units of a program in order. Its first inputs are trainable: all of them without a count.

    ```python
    from shardrules.programs.training.keep.units import find_units

    def layers(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    (unit,) = find_units(jax.make_jaxpr(layers)(jnp.ones((6, 4, 4)), jnp.ones((8, 4))))
    assert unit.run_count == 6 and unit.position.path == (0,)
    ```
    """
    inputs = program.jaxpr.invars
    count = len(inputs) if trainable_count is None else trainable_count
    traced = dict.fromkeys(var for var in inputs[:count] if is_float(var))
    resident = dict.fromkeys((*program.jaxpr.constvars, *inputs))
    return list(_units_in(program.jaxpr, traced, resident, (), 1))


def _units_in(
    body: Jaxpr, traced: dict[Any, None], resident: dict[Any, None], path: tuple[int, ...], count: int
) -> Iterator[Unit]:
    """Yields the units of a body that runs `count` times, by its variables whose gradients are needed (`traced`) and
    those that are in memory anyway (`resident`)."""
    weights = _computed_from(body, resident)
    _spread(body, traced)
    # Equal segments are looked for at the top alone: in a loop its body is the unit.
    runs = {} if path else {run.start: run for run in find_runs(body, [*map(flops_of, body.eqns)])}
    index = 0
    while index < len(body.eqns):
        equation = body.eqns[index]
        if index in runs:
            unit = _unit_of_run(body, runs[index], traced, weights)
            if unit is not None:
                yield unit
            index = runs[index].stop
            continue
        if is_scan(equation):
            yield from _units_of_scan(equation, traced, weights, (*path, index), count)
        index += 1


def _units_of_scan(
    equation: Any, traced: Mapping[Any, None], weights: Mapping[Any, None], path: tuple[int, ...], count: int
) -> Iterator[Unit]:
    """Yields the body of a scan, or the units in it."""
    loop = scan_of(equation)
    inner = open_jaxpr(loop.body)
    inside = dict.fromkeys(
        inner_var for var, inner_var in zip(equation.invars, inner.invars, strict=True) if _is_among(var, traced)
    )
    carry = inner.invars[loop.carry]
    while True:  # what goes round may need gradients only from the second round on
        before = len(inside)
        _spread(inner, inside)
        inside.update(
            (var, None) for var, result in zip(carry, inner.outvars, strict=False) if _is_among(result, inside)
        )
        if len(inside) == before:
            break
    if not inside:
        return
    rounds = count * inner_runs(equation)
    is_resident = tuple(
        index < loop.const_count or (index >= loop.pieces.start and _is_among(var, weights))
        for index, var in enumerate(equation.invars)
    )
    if not any(_is_among(var, weights) and _is_among(var, traced) for var in equation.invars[loop.pieces]):
        # Its rounds are no layers, but parts of the batch or time steps: layers are inside, if there are any.
        resident = dict.fromkeys(var for var, flag in zip(inner.invars, is_resident, strict=True) if flag)
        inner_weights = dict.fromkeys(var for var in _computed_from(inner, resident) if var in inside)
        if any(_scans_any(each, inner_weights) for each in inner.eqns):
            yield from _units_in(inner, inside, resident, path, rounds)
            return
    is_traced = tuple(var in inside for var in inner.invars)
    yield Unit(UnitPosition(path, 0, len(inner.eqns), 1), inner, is_traced, is_resident, rounds, is_loop=True)


def _unit_of_run(
    body: Jaxpr, run: EqualSegments, traced: Mapping[Any, None], weights: Mapping[Any, None]
) -> Unit | None:
    """The unit of a run of equal segments, from the first that needs a gradient on; `None` if none does."""
    needing = [
        start
        for start in range(run.start, run.stop, run.length)
        if any(var in traced for var in reads(body.eqns[start : start + run.length]))
    ]
    if not needing:
        return None
    # The second stands for all: what the first takes may differ.
    start = needing[min(1, len(needing) - 1)]
    stop = start + run.length
    segment = segment_program(body.eqns[start:stop], segment_results(body, start, stop))
    before = dict.fromkeys(var for equation in body.eqns[: run.start] for var in equation.outvars)
    is_resident = tuple(var in weights or var in before for var in segment.invars)
    is_traced = tuple(var in traced for var in segment.invars)
    position = UnitPosition((), needing[0], run.length, len(needing))
    return Unit(position, segment, is_traced, is_resident, len(needing), is_loop=False)


def _spread(body: Jaxpr, traced: dict[Any, None]) -> None:
    """Adds what is computed from traced variables, as far as it has a gradient."""
    for equation in body.eqns:
        if equation.primitive.name in WITHOUT_DERIVATIVE:
            continue
        if any(_is_among(var, traced) for var in equation.invars):
            traced.update(dict.fromkeys(filter(is_float, equation.outvars)))


_VIEWS = "convert_element_type reshape transpose broadcast_in_dim squeeze slice copy concatenate stack"
_COPIES = frozenset(_VIEWS.split())
"""Primitives whose results of parameters are parameters in another form."""


def _computed_from(body: Jaxpr, resident: Mapping[Any, None]) -> dict[Any, None]:
    """The variables in memory while a body runs, and other forms of them."""
    weights = dict(resident)
    for equation in body.eqns:
        if equation.primitive.name in _COPIES and all(var in weights for var in reads([equation])):
            weights.update(dict.fromkeys(equation.outvars))
    return weights


def _is_among(var: Any, variables: Mapping[Any, None]) -> bool:
    """An operand is one of some variables; constants have no hash."""
    return not isinstance(var, Literal) and var in variables


def _scans_any(equation: Any, weights: Mapping[Any, None]) -> bool:
    """An equation is a scan that reads some weights round by round."""
    return is_scan(equation) and any(_is_among(var, weights) for var in equation.invars[scan_of(equation).pieces])
