"""Data that a program of one device sends by hand, read off its collectives."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardrules.programs.jaxprs.calls import is_cond
from shardrules.programs.jaxprs.walk import inner_runs, open_jaxpr, programs_in

ExchangeKind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]

_KINDS: Mapping[str, ExchangeKind] = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "send_rows": "all-to-all",  # the primitive of `shardrules.expert_exchange`
    "ppermute": "collective-permute",
}
"""The collectives of `jax.lax`, by what compilers make of them."""


@final
@attrs.frozen
class Exchange:
    """A collective that a function writes itself."""

    kind: ExchangeKind
    axes: tuple[str, ...]
    sent_bytes: float
    """The bytes that a device sends each time."""
    count: int


def exchanges_of(program: ClosedJaxpr | Jaxpr, mesh_sizes: Mapping[str, int], count: int = 1) -> Iterator[Exchange]:
    """Yields the collectives of a program that runs on one device, `count` times. Of branches the one counts that sends
    most.
    """
    for equation in open_jaxpr(program).eqns:
        kind = _KINDS.get(equation.primitive.name)
        if kind is None:
            inner_count = count * inner_runs(equation)
            parts = [[*exchanges_of(inner, mesh_sizes, inner_count)] for inner in programs_in(equation)]
            if is_cond(equation):
                parts = [max(parts, key=_total_bytes)]
            yield from (exchange for part in parts for exchange in part)
            continue
        axes = _axes(equation)
        groups = equation.params.get("axis_index_groups")
        group_size = len(groups[0]) if groups else math.prod(mesh_sizes[name] for name in axes)
        if group_size > 1:
            yield Exchange(kind, axes, _sent_fraction(equation, kind, group_size) * _nbytes(equation), count)


def _nbytes(equation: Any) -> int:
    """The bytes that a device has; of ragged rows what the smaller buffer holds, of what is sent and what comes."""

    def of(variables: Sequence[Any]) -> int:
        return sum(var.aval.size * var.aval.dtype.itemsize for var in variables if hasattr(var.aval, "size"))

    if equation.primitive.name in ("ragged_all_to_all", "send_rows"):
        return min(of(equation.invars[:1]), of(equation.outvars))
    return of(equation.invars)


def _total_bytes(exchanges: Sequence[Exchange]) -> float:
    return sum(exchange.count * exchange.sent_bytes for exchange in exchanges)


def _axes(equation: Any) -> tuple[str, ...]:
    """The mesh axes of a collective. Numbers are axes of `vmap`, along which nothing is sent."""
    names = equation.params.get("axis_name", equation.params.get("axes", ()))
    names = names if isinstance(names, tuple | list) else (names,)
    return tuple(name for name in names if isinstance(name, str))


def _sent_fraction(equation: Any, kind: ExchangeKind, group_size: int) -> float:
    """The bytes that a device sends, over the bytes that it has."""
    if kind == "all-gather":
        return group_size - 1
    if kind == "collective-permute":
        return sum(source != target for source, target in equation.params["perm"]) / group_size
    return (2 if kind == "all-reduce" else 1) * (group_size - 1) / group_size
