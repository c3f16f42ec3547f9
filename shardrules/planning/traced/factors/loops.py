"""The loops of an operation, by name: what the rules for single operations are written in."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs

Shape: TypeAlias = tuple[int, ...]
"""The shape of an array."""

Names: TypeAlias = Sequence[Hashable]
"""For each dim of an array the name of the loop that it goes with, or `None` where it has to be whole."""


@final
@attrs.frozen
class Op:
    """An equation, without its variables.

    **Arguments:**

    - `name`: of the primitive.
    - `operands`, `results`: their shapes.
    - `dtypes`: of the operands, as JAX prints them.
    - `params`: of the primitive.
    """

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    params: Mapping[str, Any]


@final
@attrs.frozen
class Loops:
    """How the dims of an operation go together: those of one loop have one name, whatever it is.

    **Arguments:**

    - `operands`, `results`: the names, dim by dim.
    - `reduced`: the loops over which results are sums, or the like, of what the pieces give.
    - `sizes`: of the loops of which not every divisor of the dims' sizes is a number of pieces.
    """

    operands: Sequence[Names]
    results: Sequence[Names]
    reduced: Names = ()
    sizes: Mapping[Hashable, int] = attrs.field(factory=dict, hash=False)


Rule: TypeAlias = Callable[[Op], Loops | None]
"""Gives the loops of an operation; `None` where it has a form that the rule does not know."""


def sizes_of(loops: Loops, op: Op) -> dict[Hashable, int]:
    """Returns into how many pieces each loop can be split: into as many as divide all of its dims.

    **Arguments:**

    - `loops`: the loops.
    - `op`: their operation.

    **Returns:**

    The sizes by name, in the order in which the names appear in operands, then results.

    **Raises:**

    `ValueError` where the loops are not those of the operation.

    ```python
    op = Op("reshape", ((6, 4),), ((8, 3),), ("float32",), {})
    assert sizes_of(Loops([("rows", None)], [("rows", None)]), op) == {"rows": 2}
    ```
    """
    sizes: dict[Hashable, int] = {}
    sides = ((loops.operands, op.operands), (loops.results, op.results))
    for names, shape in (pair for side in sides for pair in zip(*side, strict=True)):
        for name, size in zip(names, shape, strict=True):
            if name is not None:
                sizes[name] = math.gcd(sizes.get(name, loops.sizes.get(name, 0)), size)
    return sizes


def whole(shape: Shape) -> tuple[None, ...]:
    """Returns the names of an array that is never split.

    **Arguments:**

    - `shape`: its shape.

    **Returns:**

    As many times `None` as it has dims.
    """
    return (None,) * len(shape)


def alike(op: Op, untouched: Sequence[bool]) -> Loops:
    """Returns the loops of an operation whose arrays all have the same dims, some of which it works along.

    **Arguments:**

    - `op`: the operation. Operands may also be scalars.
    - `untouched`: for each dim whether the operation does the same at every place along it.

    **Returns:**

    The `Loops`.
    """
    names = [dim if free else None for dim, free in enumerate(untouched)]
    return Loops([names if shape else () for shape in op.operands], [names for _ in op.results])


def leading(op: Op, count: int) -> Loops:
    """Returns the loops of an operation that does the same at every place along the first dims of all arrays.

    **Arguments:**

    - `op`: the operation. Operands may also be scalars.
    - `count`: how many dims.

    **Returns:**

    The `Loops`.
    """
    first = tuple(range(count))
    operands = [first + whole(shape[count:]) if shape else () for shape in op.operands]
    return Loops(operands, [first + whole(shape[count:]) for shape in op.results])
