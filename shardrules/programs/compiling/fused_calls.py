"""The fused kernels that are primitives of JAX, before any compiler has seen them: which matmuls they are.

cuDNN's attention is what `jax.nn.dot_product_attention(implementation="cudnn")` traces to. Matmuls with scales are what
`jax.nn.scaled_matmul`, `jax.nn.scaled_dot_general` and `jax.lax.scaled_dot` trace to.
"""

import math
from collections.abc import Mapping
from typing import Any

from shardrules.programs.compiled.custom_calls import masked_attention
from shardrules.programs.compiled.flops import Matmul
from shardrules.programs.compiled.flow import Times
from shardrules.programs.compiled.products import Product

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
FP8_FORWARD, FP8_BACKWARD = "dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fp8_bwd_wrapper"

ATTENTION = (FORWARD, BACKWARD, FP8_FORWARD, FP8_BACKWARD)
"""cuDNN's attention, and its gradients."""

SCALED_DOTS = ("scaled_matmul_wrapper", "scaled_dot")

FUSED = (*ATTENTION, *SCALED_DOTS)
"""All fused kernels that are primitives."""


def head_dim_of(params: Mapping[str, Any]) -> int:
    """The dim of queries, keys and values that is the heads."""
    # Layout 0 is [batch, length, heads, head size]; the other one has heads before the length.
    return 2 if params["layout"] == 0 else 1


def fused_matmul(equation: Any) -> Matmul | None:
    """Returns the matmuls of a fused kernel on whole arrays, as a compiled program has them; `None` for others."""
    name = equation.primitive.name
    if name in ATTENTION:
        return _attention(equation)
    if name == "scaled_matmul_wrapper":
        (batch, rows, inner), columns = equation.invars[0].aval.shape, equation.invars[1].aval.shape[1]
        return _matmul(equation, "__op$block_scaled_dot", (Product(batch, rows, columns, inner),))
    if name == "scaled_dot":
        (contracted, _), (batch_dims, _) = equation.params["dimension_numbers"]
        left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        inner, batch = (math.prod(left[dim] for dim in dims) for dims in (contracted, batch_dims))
        # An empty array has factors of 0, and would be divided by one.
        rows = math.prod(left) // max(1, inner * batch)
        columns = math.prod(result) // max(1, batch * rows)
        return _matmul(equation, "xla.scaled_dot", (Product(batch, rows, columns, inner),))
    return None


def fused_flops(equation: Any) -> int:
    """Returns the FLOPs of a fused kernel, 0 for others."""
    matmul = fused_matmul(equation)
    return 0 if matmul is None else matmul.flops


def _attention(equation: Any) -> Matmul:
    name, params = equation.primitive.name, equation.params
    query, key, value = (var.aval.shape for var in equation.invars[:3])
    heads = head_dim_of(params)
    length = 3 - heads
    columns = key[length]
    tables = equation.invars[8].aval.shape if name == FORWARD else ()
    if len(tables) == 4:  # of pages, each with a part of the keys
        columns *= tables[2]
    is_causal = params.get("use_causal_mask", False)
    mask = "CAUSAL" if is_causal else getattr(params.get("mask_type"), "name", "")
    phase = "backward" if name in (BACKWARD, FP8_BACKWARD) else "fwd"
    products, is_masked = masked_attention(
        query[0] * query[heads],
        (query[length], columns),
        (query[3], value[3]),
        mask,
        params.get("sliding_window_length") or 0,
        phase,
    )
    return _matmul(equation, "__cudnn$fmha", products, is_masked)


def _matmul(equation: Any, op: str, products: tuple[Product, ...], is_masked: bool = False) -> Matmul:
    flops = sum(product.flops for product in products)
    dtype = str(equation.invars[0].aval.dtype)
    return Matmul(op, flops, dtype, "default", Times(1), "", "", products=products, is_masked=is_masked)
