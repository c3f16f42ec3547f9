"""What a compiled thing depends on, as keys of a cache: equal only for what is the same."""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding


def static_key(value: Any) -> Hashable:
    """Returns the key of a value that is no array. Python has 1 == 1.0 == True and 0.0 == -0.0, which are not the same.

    **Arguments:**

    - `value`: a leaf of the arguments.

    **Returns:**

    A tuple; it has a hash where the value has one.

    ```python
    assert static_key(1) != static_key(True) != static_key(1.0)
    assert static_key(0.0) != static_key(-0.0)
    ```
    """
    return type(value), repr(value) if isinstance(value, float | complex) else value


def array_key(value: Any) -> Hashable:
    """Returns the key of an array: its type, and what of its place matters to where arguments and results are to be.

    **Arguments:**

    - `value`: an array, or its shape.

    **Returns:**

    A tuple. On Explicit axes the sharding is part of the type.

    ```python
    assert array_key(np.ones(3)) == array_key(np.zeros(3)) != array_key(np.ones(4))
    ```
    """
    if isinstance(value, Tracer):
        own = jax.typeof(value).sharding
    else:
        own = value.sharding if isinstance(value, jax.Array | jax.ShapeDtypeStruct) else None
    place: Hashable = None
    if isinstance(own, NamedSharding):
        place = own if AxisType.Explicit in own.mesh.axis_types else (own.mesh, own.memory_kind)
    return np.shape(value), value.dtype, getattr(value, "weak_type", False), place
