"""The FLOPs of the matmuls and convolutions of a function, before any compiler has seen it.

They are counted in the function's jaxpr, on whole arrays, with every loop as often as it runs. A compiled program's
FLOPs on one device, times the devices, can be compared with this: far more means that devices do the same work.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardrules.programs.compiling.fused_calls import FUSED, fused_flops
from shardrules.programs.jaxprs.calls import RECOMPUTED_SCOPE, is_while
from shardrules.programs.jaxprs.walk import open_jaxpr, runs


def model_flops(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Returns the FLOPs of the matmuls and convolutions of a program: two for each product that is summed.

    A loop of unknown length counts once, and so does every branch, as they do in the text of a compiled program, which
    does not say which branch is taken either.
    """
    return sum(matmul.flops for matmul in model_matmuls(jaxpr))


@final
@attrs.frozen(eq=False)
class ModelMatmul:
    """A matmul or a convolution of a function, with its FLOPs on whole arrays for all of its runs."""

    equation: Any
    flops: int
    is_certain: bool
    """The program says how often it runs, and how much of it is work."""
    is_recomputed: bool
    """`jax.checkpoint` repeats it for the backward pass."""


def model_matmuls(program: ClosedJaxpr | Jaxpr) -> Iterator[ModelMatmul]:
    return _matmuls(open_jaxpr(program).eqns)


def _matmuls(equations: Iterable[Any]) -> Iterator[ModelMatmul]:
    for equation, times, around in runs(equations, lambda each: each.primitive.name in _COUNTERS):
        if equation.primitive.name in _COUNTERS:
            has_unknown_runs = any(is_while(each) or each.primitive.name == "pallas_call" for each in around)
            yield ModelMatmul(
                equation,
                times * equation_flops(equation),
                not has_unknown_runs and not _is_rewritten(equation),
                any(RECOMPUTED_SCOPE in str(each.source_info.name_stack) for each in (*around, equation)),
            )


def flops_of(equation: Any) -> int:
    """Returns the FLOPs of the matmuls and convolutions of an equation and of the programs inside it."""
    return sum(matmul.flops for matmul in _matmuls([equation]))


def equation_flops(equation: Any) -> int:
    """Returns the FLOPs of an equation if it is a matmul or a convolution, else 0."""
    count = _COUNTERS.get(equation.primitive.name)
    return 0 if count is None else count(equation)


def _is_rewritten(equation: Any) -> bool:
    """A backend may compile it to other FLOPs than it has here."""
    params = equation.params
    # Grouped convolutions become one dense convolution with zeros in its kernel.
    groups = params.get("feature_group_count", 1) * params.get("batch_group_count", 1)
    # TPUs emulate float64 and int64 by several products of smaller types.
    is_wide = equation.outvars[0].aval.dtype.itemsize > 4
    return equation.primitive.name == "ragged_dot_general" or groups > 1 or is_wide


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[dim] for dim in contracted)


def _convolution_flops(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    out_features = equation.params["dimension_numbers"].rhs_spec[0]
    per_output = math.prod(kernel) // max(1, kernel[out_features])
    # Dilation puts zeros between the inputs, and no backend multiplies them. Zeros that padding adds are counted.
    zeros = math.prod(equation.params["lhs_dilation"])
    return 2 * math.prod(equation.outvars[0].aval.shape) * per_output // zeros


def _ragged_dot_flops(equation: Any) -> int:
    """Groups of rows, each with its own matrix. Where rows are summed over, each group has a result of its own."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    shape, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    sums_rows = any(dim in contracted for dim in numbers.lhs_ragged_dimensions)
    flops = 2 * math.prod(result) * math.prod(shape[dim] for dim in contracted)
    return flops // (result[0] if sums_rows else 1)


_COUNTERS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_flops,
    "conv_general_dilated": _convolution_flops,
    "ragged_dot_general": _ragged_dot_flops,
    **dict.fromkeys(FUSED, fused_flops),
}
