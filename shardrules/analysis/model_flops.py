"""How many FLOPs a function asks for, before any compiler has seen it: those of its matmuls and convolutions.

Counted in the function's own program (its jaxpr), on whole arrays, with every loop as often as it runs. What a compiled
program does on one device, times the devices, can be compared with this: far more means that devices do the same work.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def model_flops(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Returns the FLOPs of the matmuls and convolutions of a program: two for each product that is summed.

    A loop whose length is not written in the program counts once, and of branches the dearest counts.

    **Arguments:**

    - `jaxpr`: the program, as `jax.make_jaxpr` gives it.

    **Returns:**

    A whole number.

    ```python
    jaxpr = jax.make_jaxpr(lambda a, b: jnp.tanh(a @ b))(jnp.ones((4, 8)), jnp.ones((8, 16)))
    assert model_flops(jaxpr) == 2 * 4 * 8 * 16
    ```
    """
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    total = 0
    for equation in inner.eqns:
        count = _COUNTED.get(equation.primitive.name)
        if count is not None:
            total += count(equation)
        elif equation.primitive.name == "cond":
            total += max(map(model_flops, equation.params["branches"]))
        else:
            times = equation.params["length"] if equation.primitive.name == "scan" else 1
            times *= _devices(equation)
            total += times * sum(map(model_flops, _programs(equation)))
    return total


def _programs(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr | Jaxpr):
                yield one


def _devices(equation: Any) -> int:
    """Inside `shard_map` a program is that of one device."""
    if equation.primitive.name != "shard_map":
        return 1
    sizes = dict(equation.params["mesh"].shape)
    return math.prod(sizes[name] for name in equation.params["manual_axes"])


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


_COUNTED: dict[str, Callable[[Any], int]] = {"dot_general": _dot, "conv_general_dilated": _convolution}
