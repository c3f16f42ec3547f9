"""The parts of a traced function that are repeated, such as its layers: what the backward pass keeps is decided there.

A unit is the body of a scan, or a run of equal segments: stretches of equations that follow each other and compute the
same, as layers do that a loop of Python calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardrules.programs.compiling.model_flops import flops_of
from shardrules.programs.jaxprs.bodies import scan_of
from shardrules.programs.jaxprs.calls import is_scan
from shardrules.programs.jaxprs.segments import (
    WITHOUT_DERIVATIVE,
    is_float,
    nbytes_of,
    segment_program,
    segment_results,
    signature,
)
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
    """For each input of the body whether it is in memory anyway, as parameters are, and constants of a scan."""
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
    return list(_Finder().units_in(program.jaxpr, traced, resident, (), 1))


@final
class _Finder:
    """Methods take the variables of a body that are `traced`, whose gradients are needed, and those `resident`."""

    def units_in(
        self, body: Jaxpr, traced: dict[Any, None], resident: dict[Any, None], path: tuple[int, ...], count: int
    ) -> Iterator[Unit]:
        """Yields the units of a body that runs `count` times."""
        weights = _computed_from(body, resident)
        _spread(body, traced)
        runs = find_runs(body, 0, len(body.eqns)) if not path else []
        index = 0
        while index < len(body.eqns):
            run = next((run for run in runs if run.start == index), None)
            if run is not None:
                unit = self.unit_of_run(body, run, traced, weights)
                if unit is not None:
                    yield unit
                index += run.length * run.repeats
                continue
            equation = body.eqns[index]
            if is_scan(equation):
                yield from self.units_of_scan(equation, traced, weights, (*path, index), count)
            index += 1

    def units_of_scan(
        self,
        equation: Any,
        traced: Mapping[Any, None],
        weights: Mapping[Any, None],
        path: tuple[int, ...],
        count: int,
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
            for var, result in zip(carry, inner.outvars[: loop.carry_count], strict=True):
                if result in inside:
                    inside.setdefault(var)
            if len(inside) == before:
                break
        if not inside:
            return
        rounds = count * inner_runs(equation)
        is_resident = [
            index < loop.const_count or (index >= loop.pieces.start and _is_among(var, weights))
            for index, var in enumerate(equation.invars)
        ]
        sliced = equation.invars[loop.pieces]
        has_weights = any(_is_among(var, weights) and _is_among(var, traced) for var in sliced)
        has_layers, resident = False, dict[Any, None]()
        if not has_weights:
            # Its rounds are no layers, but parts of the batch or time steps: layers are inside, if there are any.
            resident = dict.fromkeys(var for var, flag in zip(inner.invars, is_resident, strict=True) if flag)
            inner_weights = dict.fromkeys(var for var in _computed_from(inner, resident) if var in inside)
            has_layers = any(_scans_any(each, inner_weights) for each in inner.eqns)
        if has_layers:
            yield from self.units_in(inner, inside, resident, path, rounds)
            return
        is_traced = tuple(var in inside for var in inner.invars)
        yield Unit(
            UnitPosition(path, 0, len(inner.eqns), 1), inner, is_traced, tuple(is_resident), rounds, is_loop=True
        )

    def unit_of_run(
        self, body: Jaxpr, run: UnitPosition, traced: Mapping[Any, None], weights: Mapping[Any, None]
    ) -> Unit | None:
        """The unit of a run of equal segments, from the first that needs a gradient on; `None` if none does."""
        starts = range(run.start, run.start + run.length * run.repeats, run.length)
        operands = [dict.fromkeys(reads(body.eqns[start : start + run.length])) for start in starts]
        needing = [
            start for start, variables in zip(starts, operands, strict=True) if any(var in traced for var in variables)
        ]
        if not needing:
            return None
        # The second stands for all: what the first takes may differ.
        start = needing[min(1, len(needing) - 1)]
        segment = segment_program(
            body.eqns[start : start + run.length], segment_results(body, start, start + run.length)
        )
        before = dict.fromkeys(var for equation in body.eqns[: run.start] for var in equation.outvars)
        is_resident = tuple(var in weights or var in before for var in segment.invars)
        is_traced = tuple(var in traced for var in segment.invars)
        position = attrs.evolve(run, start=needing[0], repeats=len(needing))
        return Unit(position, segment, is_traced, is_resident, len(needing), is_loop=False)


def _spread(body: Jaxpr, traced: dict[Any, None]) -> None:
    """Adds what is computed from traced variables, as far as it has a gradient."""
    for equation in body.eqns:
        if equation.primitive.name in WITHOUT_DERIVATIVE:
            continue
        if any(_is_among(var, traced) for var in equation.invars):
            traced.update(dict.fromkeys(filter(is_float, equation.outvars)))


_COPIES = (
    "convert_element_type",
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "squeeze",
    "slice",
    "copy",
    "concatenate",
    "stack",
)
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


def find_runs(body: Jaxpr, start: int, stop: int, *, as_loops: bool = False) -> list[UnitPosition]:
    """Returns the runs of equal segments among some equations, in order.

    For loops, cuts of a run are better that leave it more segments, and constants count as arrays.
    """
    signatures = _signatures(body.eqns[start:stop], has_literals=not as_loops)
    flops = np.array([*map(flops_of, body.eqns[start:stop])], float)
    if not flops.any():
        return []
    best: tuple[float, int, int, int] | None = None  # FLOPs, then period, start and stop
    total = np.concatenate([[0.0], np.cumsum(flops)])
    for period in range(1, len(signatures) // 2 + 1):
        equal = np.flatnonzero(signatures[:-period] != signatures[period:])
        edges = np.concatenate([[-1], equal, [len(signatures) - period]])
        for low, high in zip(edges[:-1] + 1, edges[1:], strict=True):
            if high - low < period:
                continue
            repeats = (high - low) // period + 1
            covered = float(total[low + period * repeats] - total[low])
            if total[low + period] == total[low]:
                continue
            # A segment of fewer equations is taken if its run has hardly fewer FLOPs, chosen by hand: with less, parts
            # of a layer that are equal by chance may be taken for layers; with more, pairs of layers.
            if best is None or 0.9 * covered > best[0]:
                best = covered, period, int(low), int(high) + period
    if best is None:
        return []
    _, period, low, high = best
    # Of a loop, up to four times as many bytes may go from segment to segment for one more of them, chosen by hand:
    # layers that narrow in the middle are whole then.
    run = _best_rotation(body, start + low, start + high, period, 4.0 if as_loops else 1.0)
    if run is None:
        return []
    end = run.start + run.length * run.repeats
    before = find_runs(body, start, run.start, as_loops=as_loops)
    return [*before, run, *find_runs(body, end, stop, as_loops=as_loops)]


def _best_rotation(body: Jaxpr, start: int, stop: int, period: int, wider: float) -> UnitPosition | None:
    """The run that is cut where the fewest bytes go from one segment to the next.

    With `wider`, it is the longest of those at which so many times as many bytes do.
    """
    last_use: dict[Any, int] = {}
    for index, equation in enumerate(body.eqns):
        last_use.update((var, index) for var in reads([equation]))
    last_use.update((var, len(body.eqns)) for var in body.outvars if not isinstance(var, Literal))
    crossing = np.zeros(stop - start + 1)
    for index in range(start, stop):
        for var in body.eqns[index].outvars:
            # It is read behind each cut after this equation, up to its last use.
            last = min(last_use.get(var, index), stop)
            crossing[index + 1 - start : last + 1 - start] += nbytes_of(var)
    cuts: list[tuple[float, int, int]] = []  # bytes, offset and repeats
    for offset in range(period):
        repeats = (stop - start - offset) // period
        if repeats >= 2 and _is_wired_alike(body, start + offset, period, repeats):
            cuts.append((max(crossing[offset + period * index] for index in range(1, repeats)), offset, repeats))
    if not cuts:
        return None
    most = wider * min(cuts)[0]
    _, offset, repeats = min((cut for cut in cuts if cut[0] <= most), key=lambda cut: (-cut[2], cut))
    return UnitPosition((), start + offset, period, repeats)


def _is_wired_alike(body: Jaxpr, start: int, period: int, repeats: int) -> bool:
    """The equations of all segments read each other in the same way."""
    return len({_wiring(body.eqns[start + period * index :][:period]) for index in range(repeats)}) == 1


def _wiring(equations: Sequence[Any]) -> tuple[Any, ...]:
    """For each operand in a segment which result of the segment it is; `None` if it comes from outside."""
    producers: dict[Any, tuple[int, int]] = {}
    wiring: list[Any] = []
    for index, equation in enumerate(equations):
        wiring.append(tuple(None if isinstance(var, Literal) else producers.get(var) for var in equation.invars))
        producers.update((var, (index, position)) for position, var in enumerate(equation.outvars))
    return tuple(wiring)


def _signatures(equations: Sequence[Any], has_literals: bool) -> np.ndarray:
    """For each equation a number that equations share which compute the same from arrays of the same shapes."""
    numbers: dict[Any, int] = {}
    return np.array(
        [numbers.setdefault(signature(equation, has_literals), len(numbers)) for equation in equations], np.int64
    )
