"""Typed PRNG keys, which are no numbers."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(dtype: Any) -> bool:
    """Returns whether arrays of this dtype hold PRNG keys.

    ```python
    from shardrules.core.keys import is_key

    assert is_key(jax.random.key(0).dtype) and not is_key(jax.random.PRNGKey(0).dtype)
    ```
    """
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
