"""Walks through a traced program and the programs inside its operations."""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

CHECKPOINTS = ("checkpoint", "remat", "remat2")
"""What versions of JAX call the equation of a checkpointed function."""


def programs_in(equation: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Yields the programs inside an operation: the body of a loop, the branches of a conditional."""
    # Every primitive has its own names for them, so that all parameters are looked at.
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item


def equations(program: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """Yields all equations of a traced program and of the programs inside it."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    for equation in jaxpr.eqns:
        yield equation
        for inner in programs_in(equation):
            yield from equations(inner)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many arrays a scan reads whole in every round, and how many go round in it."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from JAX 0.11 on
    return len(list(consts)), len(list(carry))
