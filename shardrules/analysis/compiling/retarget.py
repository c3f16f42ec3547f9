"""A traced function moved to another mesh of the same axes.

Model code often closes over the mesh that it was written for, `NamedSharding(mesh, P("data"))` or
`shard_map(mesh=mesh)`, and JAX refuses to compile that for the devices of another machine. So a function is traced on
the mesh that it knows. In the traced program this mesh stands in parameters of operations, in the types of values and
in the context of each operation, and everywhere there another one can be put in its place.

A compiler for GPUs takes no calls back to Python where there is no GPU. Those that only print are left out for it.
"""

from typing import Any, final

import attrs
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.core.jax_state import context_on


def on_mesh(program: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """Puts a mesh in the place of every mesh on other devices that has the same axes, and silences it on GPUs.

    **Arguments:**

    - `program`: a traced function.
    - `mesh`: the mesh that is to be in it.

    **Returns:**

    The program.

    ```python
    ours, theirs = sr.create_mesh("data:8"), jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("data",))
    there = jax.sharding.NamedSharding(theirs, P("data"))
    program = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, there))(jnp.ones(8))
    assert on_mesh(program, ours).eqns[0].params["sharding"].mesh == ours
    ```
    """
    return _Move(mesh, mesh.devices.flat[0].platform == "gpu").value(program)


@final
@attrs.frozen(eq=False)
class _Move:
    """Everything in a program, with `mesh` in it. What is nowhere on another mesh is handed on as it is."""

    mesh: Mesh
    silent: bool
    variables: dict[Var, Any] = attrs.field(factory=dict)

    def value(self, value: Any) -> Any:
        """Whatever stands in a program."""
        if isinstance(value, Mesh):
            return self.mesh if value != self.mesh and self._is_alike(value) else value
        if isinstance(value, AbstractMesh):
            return self._abstract(value)
        if isinstance(value, NamedSharding):
            there = self.value(value.mesh)
            return value if there is value.mesh else NamedSharding(there, value.spec, memory_kind=value.memory_kind)
        if isinstance(value, Jaxpr):  # newer JAX has one class for both kinds, which has constants
            constants = {"consts": value.consts} if isinstance(value, ClosedJaxpr) else {}
            return value.replace(
                **constants,
                constvars=self._all(value.constvars),
                invars=self._all(value.invars),
                outvars=self._all(value.outvars),
                eqns=[self._equation(one) for one in value.eqns if not (self.silent and _is_print(one))],
            )
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(self.value(value.jaxpr), value.consts)
        if type(value) in (tuple, list):
            return type(value)(map(self.value, value))
        return value

    def _is_alike(self, mesh: AnyMesh) -> bool:
        return mesh_sizes(mesh) == mesh_sizes(self.mesh)

    def _abstract(self, mesh: AbstractMesh) -> AbstractMesh:
        """The shape of a mesh knows what kind of device it is for, and its axes may be Manual here."""
        if mesh.empty or not self._is_alike(mesh):
            return mesh
        return self.mesh.abstract_mesh.update(axis_types=mesh.axis_types)

    def _all(self, variables: Any) -> list[Any]:
        return [self._variable(one) for one in variables]

    def _variable(self, one: Any) -> Any:
        aval = self._type(one.aval)
        if aval is one.aval:
            return one
        if isinstance(one, Literal):  # whose value may know a mesh, too
            value = np.asarray(one.val)
            return Literal(value.item() if aval.weak_type else value, aval)
        if one not in self.variables:
            self.variables[one] = Var(aval)
        return self.variables[one]

    def _type(self, aval: Any) -> Any:
        own = getattr(aval, "sharding", None)  # tokens and references have none
        moved = self.value(own)
        return aval if moved is own else aval.update(sharding=moved)

    def _equation(self, equation: Any) -> Any:
        here = equation.ctx.cur_abstract_mesh
        there = self.value(here)
        return equation.replace(
            invars=self._all(equation.invars),
            outvars=self._all(equation.outvars),
            params={name: self.value(value) for name, value in equation.params.items()},
            ctx=equation.ctx if there is here else context_on(equation.ctx, there),
        )


def _is_print(equation: Any) -> bool:
    return equation.primitive.name.startswith("debug_")
