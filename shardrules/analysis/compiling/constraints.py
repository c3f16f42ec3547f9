"""The sharding constraints in a traced function, and the lines of code that ask for them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import attrs
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.analysis.compiling.jaxprs import equations
from shardrules.analysis.compiling.source import called_from, equation_stack, user_line
from shardrules.analysis.program.program import Source
from shardrules.core.check import check_spec
from shardrules.core.finding import Finding, shape_text
from shardrules.core.spec import spec_repr

Constraint: TypeAlias = tuple[tuple[int, ...], PartitionSpec, list[Source]]
"""An array whose sharding a function constrains: its shape, the spec, and the lines of code, innermost first."""


def find_constraints(program: ClosedJaxpr) -> Iterator[Constraint]:
    """Yields the shape, spec and lines of every array whose sharding a function constrains.

    ```python
    from shardrules.analysis.compiling.constraints import find_constraints

    mesh = sr.create_mesh("data:8")
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, P("data")))(jnp.ones(16))
    assert [(shape, spec) for shape, spec, _ in find_constraints(program)] == [((16,), P("data"))]
    ```
    """
    for equation in equations(program):
        # On Auto axes a constraint is the one, on Explicit axes the other.
        if equation.primitive.name in ("sharding_constraint", "reshard"):
            sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
            if isinstance(sharding, NamedSharding):
                yield equation.invars[0].aval.shape, sharding.spec, equation_stack(equation)


def weakened_constraints(constraints: Iterable[Constraint], sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Yields a finding for each constraint that does not divide its array: JAX weakens these silently."""
    for shape, spec, stack in constraints:
        for finding in check_spec("", shape, spec, sizes):
            if finding.code == "weakened":
                message = (
                    f"{spec_repr(spec)} on an array of shape {shape_text(shape)}: {finding.message}{called_from(stack)}"
                )
                yield attrs.evolve(finding, message=message, shape=None, source=user_line(stack))
