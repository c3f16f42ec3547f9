"""How many FLOPs a function asks for, before any compiler has seen it: those of its matmuls and convolutions.

Counted in the function's own program (its jaxpr), on whole arrays, with every loop as often as it runs. What a compiled
program does on one device, times the devices, can be compared with this: far more means that devices do the same work.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from shardrules.analysis.compiling.jaxprs import programs_in


def model_flops(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Returns the FLOPs of the matmuls and convolutions of a program: two for each product that is summed.

    A loop whose length is not written in the program counts once, and so does every branch: what a compiler prints
    does not tell either which of them is taken.

    **Arguments:**

    - `jaxpr`: the program, as `jax.make_jaxpr` gives it.

    **Returns:**

    A whole number.

    ```python
    jaxpr = jax.make_jaxpr(lambda a, b: jnp.tanh(a @ b))(jnp.ones((4, 8)), jnp.ones((8, 16)))
    assert model_flops(jaxpr) == 2 * 4 * 8 * 16
    ```
    """
    return sum(one.flops for one in matmul_flops(jaxpr))


def without_dead_code(program: ClosedJaxpr) -> Jaxpr:
    """Returns a program without what nothing depends on: gradients leave much of that behind.

    **Arguments:**

    - `program`: the program.

    **Returns:**

    What a compiler has to do.

    ```python
    program = jax.make_jaxpr(lambda a: (a @ a, 2 * a)[1])(jnp.ones((8, 8)))
    assert model_flops(program) == 1024 and model_flops(without_dead_code(program)) == 0
    ```
    """
    return partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)[0]


@final
@attrs.frozen(eq=False)
class AskedMatmul:
    """A matmul or a convolution that a function asks for.

    **Arguments:**

    - `equation`: it, in the function's program.
    - `flops`: what it is on whole arrays, as often as it runs.
    - `is_certain`: whether the program tells how often it runs, and how much of it is work.
    """

    equation: Any
    flops: int
    is_certain: bool


def matmul_flops(jaxpr: ClosedJaxpr | Jaxpr, times: int = 1, is_certain: bool = True) -> Iterator[AskedMatmul]:
    """Yields every matmul and convolution of a program, those of loops as often as they run.

    **Arguments:**

    - `jaxpr`: the program.
    - `times`: how often the program runs.
    - `is_certain`: whether that is known.

    **Returns:**

    An iterator.
    """
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for equation in inner.eqns:
        name = equation.primitive.name
        count = _COUNTED.get(name)
        if count is not None:
            yield AskedMatmul(equation, times * count(equation), is_certain and not _is_rewritten(equation))
        else:
            inside = times * _rounds(equation) * _devices(equation)
            for program in programs_in(equation):
                yield from matmul_flops(program, inside, is_certain and name not in ("while", "pallas_call"))


def equation_flops(equation: Any) -> int:
    """Returns the FLOPs of one operation, if it is a matmul or a convolution.

    **Arguments:**

    - `equation`: one of the `eqns` of a jaxpr.

    **Returns:**

    Two for each product that is summed; 0 for any other operation.

    ```python
    (dot,) = jax.make_jaxpr(jnp.matmul)(jnp.ones((4, 8)), jnp.ones((8, 16))).eqns
    assert equation_flops(dot) == 2 * 4 * 8 * 16
    ```
    """
    count = _COUNTED.get(equation.primitive.name)
    return 0 if count is None else count(equation)


def _is_rewritten(equation: Any) -> bool:
    """Whether backends may do other work for it: for independent products one large one with zeros in it, say."""
    params = equation.params
    groups = params.get("feature_group_count", 1) * params.get("batch_group_count", 1)
    wide = equation.outvars[0].aval.dtype.itemsize > 4  # of which TPUs make many smaller ones
    return equation.primitive.name == "ragged_dot_general" or groups > 1 or wide


def _rounds(equation: Any) -> int:
    """How often what is inside runs: loops go round, and a kernel has a grid."""
    if equation.primitive.name == "pallas_call":
        return math.prod(size for size in equation.params["grid_mapping"].grid if isinstance(size, int))
    return equation.params["length"] if equation.primitive.name == "scan" else 1


def _devices(equation: Any) -> int:
    """Inside `shard_map` a program is that of one device."""
    if equation.primitive.name != "shard_map":
        return 1
    sizes = dict(equation.params["mesh"].shape)
    return math.prod(sizes[name] for name in equation.params["newly_manual_axes"])


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[dim] for dim in contracted)


def _convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    out_features = equation.params["dimension_numbers"].rhs_spec[0]
    per_output = math.prod(kernel) // max(1, kernel[out_features])
    # Zeros that dilation puts between inputs are multiplied by nobody. What padding adds at the edges is counted.
    zeros = math.prod(equation.params["lhs_dilation"])
    return 2 * math.prod(equation.outvars[0].aval.shape) * per_output // zeros


def _ragged_dot(equation: Any) -> int:
    """Groups of rows, each with a matrix of its own. Where rows are summed over, each group gives a result."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    shape, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    over_rows = any(dim in contracted for dim in numbers.lhs_ragged_dimensions)
    flops = 2 * math.prod(result) * math.prod(shape[dim] for dim in contracted)
    return flops // (result[0] if over_rows else 1)


_COUNTED: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged_dot,
}
