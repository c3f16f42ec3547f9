"""One function traced with two numbers of examples: the same equations, with other sizes.

Both programs are walked together. Where they differ in more than sizes, the loss depends on how many examples there are
in a way that no part of the batch could follow, and it is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardrules.core.errors import MicrobatchError
from shardrules.core.source import equation_line
from shardrules.programs.jaxprs.calls import OPEN
from shardrules.programs.jaxprs.equality import equal_values
from shardrules.programs.jaxprs.walk import open_jaxpr
from shardrules.programs.traced.factors.grids import params_of_pieces
from shardrules.programs.traced.factors.grouped import kernel_loops
from shardrules.programs.traced.factors.retraced import SIZED, is_made_again
from shardrules.programs.traced.factors.table import op_signature

_SIZES = (
    *("shape", "new_sizes", "start_indices", "limit_indices", "slice_sizes", "sizes", "length", "axis_size", "reps"),
    "padding_config",
)
"""Parameters that hold sizes, which may grow with the number of examples."""

_TEXTS = (("region", "rule"),)
"""Parameters of primitives that only print others: the declaration of a region, with the FLOPs of its function."""


@final
@attrs.frozen
class Counts:
    """The numbers of examples: of the whole batch, of a part, and of the trace that stands for the part."""

    whole: int
    part: int
    trace: int
    part_runs: int = 1
    """The runs of examples, one after another in the batch, that a part has."""

    @property
    def parts(self) -> int:
        return self.whole // self.part

    @property
    def runs(self) -> int:
        """The number of runs of examples of the batch: an array of several examples has to divide into them."""
        return self.parts * self.part_runs

    def is_scaled(self, whole: int, trace: int) -> bool:
        """A size of the whole program grows with the number of examples, to the trace's."""
        return whole != trace and whole * self.trace == trace * self.whole

    def part_size(self, whole: int, trace: int) -> int:
        return whole // self.parts if whole != trace else trace


@final
@attrs.frozen(eq=False)
class Pair:
    """A body of the whole program, and the same body of the trace."""

    whole: Jaxpr
    trace: Jaxpr
    whole_consts: tuple[Any, ...]
    differences: Mapping[int, str]
    """For the index of an equation with other parameters than sizes: what differs. Only the whole can compute it."""

    @classmethod
    def of(cls, whole: ClosedJaxpr | Jaxpr, trace: ClosedJaxpr | Jaxpr, counts: Counts) -> "Pair":
        """Pairs two bodies, which must have the same equations; the bodies of loops in them are paired later."""
        first, second = open_jaxpr(whole), open_jaxpr(trace)
        partner: dict[Any, Any] = {}
        for vars_of_whole, vars_of_trace in ((first.constvars, second.constvars), (first.invars, second.invars)):
            if len(vars_of_whole) != len(vars_of_trace):
                raise MicrobatchError(_message(counts, "the numbers of arrays differ"))
            partner.update(zip(vars_of_whole, vars_of_trace, strict=True))
        differences: dict[int, str] = {}
        # The first difference says more than unequal lengths, so those are compared afterwards.
        for index, (equation, other) in enumerate(zip(first.eqns, second.eqns, strict=False)):
            why = _difference(equation, other, partner)
            if why:
                raise MicrobatchError(_message(counts, why))
            partner.update(zip(equation.outvars, other.outvars, strict=True))
            # Other parameters do no harm where only the whole batch needs the equation, so they are kept for its use.
            why = _other_params(equation, other, counts)
            if why:
                differences[index] = _message(counts, why)
        if len(first.eqns) != len(second.eqns):
            longer = max(first.eqns, second.eqns, key=len)
            extra = longer[min(len(first.eqns), len(second.eqns))]
            raise MicrobatchError(_message(counts, f"only one of them has {_text(extra)}"))
        if not all(
            _same_operand(var, other, partner) for var, other in zip(first.outvars, second.outvars, strict=True)
        ):
            raise MicrobatchError(_message(counts, "the results differ"))
        return cls(first, second, tuple(getattr(whole, "consts", ())), differences)


def equal_literals(whole: Sequence[Any], trace: Sequence[Any]) -> bool:
    return all(
        not isinstance(var, Literal) or np.array_equal(np.asarray(var.val), np.asarray(other.val), equal_nan=True)
        for var, other in zip(whole, trace, strict=True)
    )


def part_params(equation: Any, other: Any, counts: Counts) -> dict[str, Any]:
    """The parameters that an equation has for a part of the batch."""
    if counts.trace == counts.part:
        return other.params
    if equation.primitive.name == "pallas_call":
        return _kernel_params(equation, other, counts)

    def resized(value: Any, trace_value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return counts.part_size(value, trace_value)
        if isinstance(value, tuple):
            return tuple(resized(first, second) for first, second in zip(value, trace_value, strict=True))
        return value

    return {
        name: resized(value, other.params[name]) if name in _SIZES else value for name, value in equation.params.items()
    }


def _kernel_params(equation: Any, other: Any, counts: Counts) -> dict[str, Any]:
    """The parameters of a Pallas kernel for a part of the batch: a smaller grid."""
    op = op_signature(equation, [True] * len(equation.outvars))
    loops = None if op is None else kernel_loops(op)
    if op is None or loops is None:
        return other.params
    shapes = [
        tuple(map(counts.part_size, var.aval.shape, partner.aval.shape))
        for var, partner in zip(equation.invars, other.invars, strict=True)
    ]
    return params_of_pieces(op, loops, shapes)


def _difference(equation: Any, other: Any, partner: dict[Any, Any]) -> str:
    """The difference of two equations, other than in parameters; empty if they read the same and do the same."""
    name = equation.primitive.name
    if name != other.primitive.name or len(equation.invars) != len(other.invars):
        return f"the first has {_text(equation)} where the second has {_text(other)}"
    if not all(_same_operand(var, pair, partner) for var, pair in zip(equation.invars, other.invars, strict=True)):
        return f"{_text(equation)} has other operands"
    if len(equation.outvars) != len(other.outvars):
        return f"{_text(equation)} has other results"
    if equation.params.keys() != other.params.keys():
        return f"{_text(equation)} has other parameters"
    return ""


def _other_params(equation: Any, other: Any, counts: Counts) -> str:
    """The parameters in which two equations differ by more than sizes."""
    if equation.primitive.name == "pallas_call":
        return _other_kernel(equation, other, counts)
    if equation.primitive.name == "region" and not _is_same_region(equation, other):
        return f"{_text(equation)} computes something else in each, which depends on how many examples there are"
    for key, value in equation.params.items():
        if (equation.primitive.name, key) in _TEXTS:
            continue
        # The program of `jax.lax.reduce`, say, combines two elements, however many examples there are.
        has_bodies = equation.primitive.name in _PAIRED or (equation.primitive.name, key) == ("region", "program")
        if not _alike(value, other.params[key], counts, key in _SIZES, has_bodies):
            return f"{key} of {_text(equation)} is {value} in the first and {other.params[key]} in the second"
    return ""


_PAIRED = OPEN | {"custom_partitioning"}
"""Primitives whose programs are paired later, or that no part of a batch has."""


def _is_same_region(equation: Any, other: Any) -> bool:
    """The function of one region computes what that of another does, from the same operands.

    What it makes of the number of rows that it gets is its own affair; what it was given by its caller is not.
    """
    try:
        _, program = equation.params["function"].traced([var.aval for var in other.invars])
    except Exception:  # noqa: BLE001  the function of a user, on operands that it was not called with
        return False
    return equal_values(program, other.params["program"])


_SIZES_OF_KERNELS = ("grid_mapping", "out_avals", "cost_estimate")
"""Parameters of Pallas kernels that hold sizes, or what follows from them."""


def _other_kernel(equation: Any, other: Any, counts: Counts) -> str:
    """The difference of two Pallas kernels; empty if they do the same with each block, at more or fewer positions."""
    params, others = equation.params, other.params
    op = op_signature(equation, [True] * len(equation.outvars))
    if op is not None and is_made_again(op, [var.aval.shape for var in other.invars], others):
        params = {**params, **{name: others[name] for name in SIZED}}
    names = [
        "program" if name == "jaxpr" else name
        for name in params
        if name not in _SIZES_OF_KERNELS and not equal_values(params[name], others[name])
    ]
    mapping, partner = params["grid_mapping"], others["grid_mapping"]
    of_same_size = mapping
    if len(mapping.block_mappings) == len(partner.block_mappings):
        blocks = zip(mapping.block_mappings, partner.block_mappings, strict=True)
        blocks_of_same_size = tuple(block.replace(array_aval=twin.array_aval) for block, twin in blocks)
        of_same_size = mapping.replace(grid=partner.grid, block_mappings=blocks_of_same_size)
    # With the sizes of the second, the first has to read and write the same blocks at each position.
    if not equal_values(of_same_size, partner):
        names.append("map of blocks")
    # A grid may only be longer along axes whose positions are computed one by one, as examples are.
    if mapping.grid != partner.grid:
        loops = None if op is None else kernel_loops(op)
        axes = {} if loops is None else loops.sizes
        lengths = zip(mapping.grid, partner.grid, strict=False)
        changed = [(axis, *pair) for axis, pair in enumerate(lengths) if pair[0] != pair[1]]
        if not all(axis in axes and counts.is_scaled(whole, trace) for axis, whole, trace in changed):
            names.append("grid")
    return f"{_text(equation)} has another {', another '.join(names)} in each" if names else ""


def _same_operand(var: Any, other: Any, partner: dict[Any, Any]) -> bool:
    if isinstance(var, Literal) or isinstance(other, Literal):
        return isinstance(var, Literal) and isinstance(other, Literal)
    return partner.get(var) is other


def _alike(value: Any, other: Any, counts: Counts, is_size: bool, has_bodies: bool) -> bool:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        return isinstance(other, ClosedJaxpr | Jaxpr) and (has_bodies or equal_values(value, other))
    if isinstance(value, bool | int | str | float) or value is None:
        if value == other or (value != value and other != other):  # NaN differs from itself
            return True
        return is_size and isinstance(other, int) and counts.is_scaled(int(value or 0), other)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return equal_values(value, other)
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return len(value) == len(other) and all(
            _alike(first, second, counts, is_size, has_bodies) for first, second in zip(value, other, strict=True)
        )
    # Functions of custom derivatives, structures of arguments, policies: equal Python code has made both.
    return type(value) is type(other)


def _text(equation: Any) -> str:
    line = equation_line(equation)
    return f"{equation.primitive.name} ({line})" if line else equation.primitive.name


def _message(counts: Counts, why: str) -> str:
    return f"the programs for {counts.whole} and for {counts.trace} examples differ: {why}"
