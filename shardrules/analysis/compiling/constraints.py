"""What a traced function says of itself: the arrays whose sharding it constrains, and where."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import attrs
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from shardrules.analysis.compiling.jaxprs import equations
from shardrules.analysis.compiling.source import called_from, equation_stack, users_line
from shardrules.analysis.program.program import Source
from shardrules.core.check import check_spec
from shardrules.core.finding import Finding, shape_text
from shardrules.core.spec import spec_repr

Constraint: TypeAlias = tuple[tuple[int, ...], PartitionSpec, list[Source]]
"""An array whose sharding a function constrains: its shape, the spec, and the lines of code, the innermost first."""


def constraints(program: ClosedJaxpr) -> Iterator[Constraint]:
    """Yields shape, spec and lines of every array whose sharding a function constrains.

    **Arguments:**

    - `program`: the traced function.

    **Returns:**

    An iterator.

    ```python
    mesh = sr.create_mesh("data:8")
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, P("data")))(jnp.ones(16))
    assert [(shape, spec) for shape, spec, _ in constraints(program)] == [((16,), P("data"))]
    ```
    """
    for equation in equations(program):
        if equation.primitive.name in ("sharding_constraint", "reshard"):
            sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
            if isinstance(sharding, NamedSharding):
                yield equation.invars[0].aval.shape, sharding.spec, equation_stack(equation)


def weakened(said: Iterable[Constraint], sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Yields a finding for each constraint that JAX weakens without a word, because it does not divide.

    **Arguments:**

    - `said`: the constraints of a function.
    - `sizes`: the axes of the mesh.

    **Returns:**

    An iterator.
    """
    for shape, spec, stack in said:
        for one in check_spec("", shape, spec, sizes):
            if one.code == "weakened":
                message = (
                    f"{spec_repr(spec)} on an array of shape {shape_text(shape)}: {one.message}{called_from(stack)}"
                )
                yield attrs.evolve(one, message=message, shape=None, source=users_line(stack))
