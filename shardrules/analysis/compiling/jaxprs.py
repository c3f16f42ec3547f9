"""Walking through what JAX traced: a program, and the programs inside of its operations."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def programs_in(equation: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Yields the programs inside of an operation: the body of a loop, the branches of a conditional.

    **Arguments:**

    - `equation`: one of the `eqns` of a jaxpr.

    **Returns:**

    An iterator.
    """
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr | Jaxpr):
                yield one


def equations(program: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """Yields all equations of a traced program, those of programs inside of it too.

    **Arguments:**

    - `program`: the program.

    **Returns:**

    An iterator.
    """
    inner = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    for equation in inner.eqns:
        yield equation
        for one in programs_in(equation):
            yield from equations(one)
