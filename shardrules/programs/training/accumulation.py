"""The dtype that gradients of microbatches add up in."""

from typing import Any

import jax.numpy as jnp


def accumulation_dtype(dtype: Any, requested: Any = None) -> Any:
    """Returns the dtype for sums of arrays: with fewer bits than float32, long sums would lose parts."""
    if requested is not None:
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        return jnp.promote_types(requested, jnp.complex64) if is_complex else jnp.dtype(requested)
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
