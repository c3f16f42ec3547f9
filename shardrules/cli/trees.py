"""Trees of shapes named on the command line: a function that returns one, or the shapes themselves."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from shardrules.cli.errors import UsageError
from shardrules.cli.objects import has_arrays, load_object

_SHAPE = re.compile(r"\s*(?P<dtype>[a-z]\w*)\[(?P<dims>[0-9,\s]*)\]\s*")


def load_shapes(text: str) -> Any:
    """Returns the tree that `module:function` returns, as shapes, or the arrays in `"int32[8,16], float32[8]"`.

    ```python
    from shardrules.cli.trees import load_shapes

    assert load_shapes("float32[8,16]").shape == (8, 16)
    assert [leaf.dtype.name for leaf in load_shapes("int32[8], bfloat16[8,2]")] == ["int32", "bfloat16"]
    ```
    """
    if "[" in text and ":" not in text:
        return _read_shapes(text)
    named = load_object(text)
    tree = named.shapes() if named.is_function else named.value
    if not has_arrays(tree):
        raise UsageError(f"{text} has no array in it")
    return tree


def _read_shapes(text: str) -> Any:
    shapes: list[jax.ShapeDtypeStruct] = []
    # Commas between brackets separate sizes, the others arrays.
    for part in re.split(r",(?![^\[]*\])", text):
        match = _SHAPE.fullmatch(part)
        try:
            dtype = None if match is None else jnp.dtype(match["dtype"])
        except TypeError:
            dtype = None
        if match is None or dtype is None:
            raise UsageError(f"{part.strip()!r} is not an array's dtype and shape, as int32[512,4097] is")
        shapes.append(
            jax.ShapeDtypeStruct(tuple(int(size) for size in match["dims"].split(",") if size.strip()), dtype)
        )
    return shapes[0] if len(shapes) == 1 else tuple(shapes)
