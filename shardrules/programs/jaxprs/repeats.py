"""Runs of equal stretches of equations that follow each other, as the layers of a loop in Python."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
from jax.extend.core import Jaxpr, Literal

from shardrules.programs.jaxprs.segments import nbytes_of, signature
from shardrules.programs.jaxprs.walk import reads


@final
@attrs.frozen
class EqualSegments:
    """Equal segments of a program, each of `length` equations, from the equation at `start` on."""

    start: int
    length: int
    repeats: int

    @property
    def stop(self) -> int:
        return self.start + self.length * self.repeats


def find_runs(body: Jaxpr, flops: Sequence[float], *, as_loops: bool = False) -> list[EqualSegments]:
    """Returns the runs of equal segments of a program whose equations have these FLOPs, in order.

    For loops, cuts of a run are better that leave it more segments, and constants count as arrays.

    ```python
    from shardrules.programs.jaxprs.repeats import EqualSegments, find_runs

    program = jax.make_jaxpr(lambda x: jnp.tanh(jnp.tanh(x @ x) @ x))(jnp.ones((4, 4))).jaxpr
    assert find_runs(program, [1, 0, 1, 0]) == [EqualSegments(0, 2, 2)]
    ```
    """
    numbers: dict[Any, int] = {}
    signatures = np.array(
        [numbers.setdefault(signature(equation, not as_loops), len(numbers)) for equation in body.eqns], np.int64
    )
    # Of a loop, up to four times as many bytes may go from segment to segment for one more of them, chosen by hand:
    # layers that narrow in the middle are whole then.
    wider = 4.0 if as_loops else 1.0

    def runs_in(start: int, stop: int) -> list[EqualSegments]:
        part = np.array(flops[start:stop], float)
        if not part.any():
            return []
        stretch = _longest_stretch(signatures[start:stop], np.concatenate([[0.0], np.cumsum(part)]))
        run = (
            None if stretch is None else _best_rotation(body, start + stretch[0], start + stretch[1], stretch[2], wider)
        )
        return [] if run is None else [*runs_in(start, run.start), run, *runs_in(run.stop, stop)]

    return runs_in(0, len(body.eqns))


def _longest_stretch(signatures: np.ndarray, total: np.ndarray) -> tuple[int, int, int] | None:
    """The start, the end and the period of the periodic stretch with most FLOPs, of which `total` are the sums."""
    best: tuple[float, int, int, int] | None = None
    for period in range(1, len(signatures) // 2 + 1):
        different = np.flatnonzero(signatures[:-period] != signatures[period:])
        edges = np.concatenate([[-1], different, [len(signatures) - period]])
        for low, high in zip(edges[:-1] + 1, edges[1:], strict=True):
            if high - low < period or total[low + period] == total[low]:
                continue
            covered = float(total[low + period * ((high - low) // period + 1)] - total[low])
            # A segment of fewer equations is taken if its run has hardly fewer FLOPs, chosen by hand: with less, parts
            # of a layer that are equal by chance may be taken for layers; with more, pairs of layers.
            if best is None or 0.9 * covered > best[0]:
                best = covered, int(low), int(high) + period, period
    return None if best is None else best[1:]


def _best_rotation(body: Jaxpr, start: int, stop: int, period: int, wider: float) -> EqualSegments | None:
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
            crossing[index + 1 - start : last + 1 - start] += nbytes_of(var.aval)
    cuts: list[tuple[float, int, int]] = []  # bytes, offset and repeats
    for offset in range(period):
        run = EqualSegments(start + offset, period, (stop - start - offset) // period)
        # The equations of all segments have to read each other in the same way.
        wirings = {_wiring(body.eqns[first : first + period]) for first in range(run.start, run.stop, period)}
        if run.repeats >= 2 and len(wirings) == 1:
            most = max(crossing[offset + period * index] for index in range(1, run.repeats))
            cuts.append((most, offset, run.repeats))
    if not cuts:
        return None
    most = wider * min(cuts)[0]
    _, offset, repeats = min((cut for cut in cuts if cut[0] <= most), key=lambda cut: (-cut[2], cut))
    return EqualSegments(start + offset, period, repeats)


def _wiring(equations: Sequence[Any]) -> tuple[Any, ...]:
    """The result of a segment that each operand in it is; `None` if it comes from outside."""
    producers: dict[Any, tuple[int, int]] = {}
    wiring: list[Any] = []
    for index, equation in enumerate(equations):
        wiring.append(tuple(None if isinstance(var, Literal) else producers.get(var) for var in equation.invars))
        producers.update((var, (index, position)) for position, var in enumerate(equation.outvars))
    return tuple(wiring)
