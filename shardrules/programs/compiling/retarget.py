"""Moves a traced function to another mesh with the same axes.

Model code often closes over the mesh that it was written for, `NamedSharding(mesh, P("data"))` or
`shard_map(mesh=mesh)`, and JAX refuses to compile that for the devices of another machine. So a function is traced on
the mesh that it knows. The traced program has this mesh in the parameters of operations, in the types of values and in
the context of each operation, and it can be replaced in all three.

The compiler for GPUs cannot compile calls back to Python where there is no GPU. Prints are dropped there.
"""

from typing import Any, final

import attrs
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.core.jax_state import context_on


def retarget(program: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """Replaces every mesh with the same axes by `mesh`, and drops prints if `mesh` is on GPUs."""
    return _Retargeter(mesh, mesh.devices.flat[0].platform == "gpu").rewrite(program)


@final
@attrs.define(eq=False)
class _Retargeter:
    """Rewrites anything inside a program to be on `mesh`. Objects that hold no other mesh are returned unchanged."""

    mesh: Mesh
    drops_prints: bool
    variables: dict[Var, Any] = attrs.field(factory=dict)

    def rewrite(self, value: Any) -> Any:
        if isinstance(value, Mesh):
            return self.mesh if value != self.mesh and self._has_same_axes(value) else value
        if isinstance(value, AbstractMesh):
            return self._abstract(value)
        if isinstance(value, NamedSharding):
            mesh = self.rewrite(value.mesh)
            return value if mesh is value.mesh else NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)
        # JAX 0.12 has one class for open and closed jaxprs, which carries the constants: it has to be tried first.
        if isinstance(value, Jaxpr):
            constants = {"consts": value.consts} if isinstance(value, ClosedJaxpr) else {}
            return value.replace(
                **constants,
                constvars=self._variables(value.constvars),
                invars=self._variables(value.invars),
                outvars=self._variables(value.outvars),
                eqns=[self._equation(eqn) for eqn in value.eqns if not (self.drops_prints and _is_print(eqn))],
            )
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(self.rewrite(value.jaxpr), value.consts)
        # Named tuples and other subclasses are parameters of operations that JAX builds itself: they hold no meshes.
        if type(value) in (tuple, list):
            return type(value)(map(self.rewrite, value))
        return value

    def _has_same_axes(self, mesh: AnyMesh) -> bool:
        return mesh_sizes(mesh) == mesh_sizes(self.mesh)

    def _abstract(self, mesh: AbstractMesh) -> AbstractMesh:
        """An abstract mesh knows the kind of device, so it is replaced too. Its axes may be Manual here: they stay."""
        if mesh.empty or not self._has_same_axes(mesh):
            return mesh
        return self.mesh.abstract_mesh.update(axis_types=mesh.axis_types)

    def _variables(self, variables: Any) -> list[Any]:
        return [self._variable(variable) for variable in variables]

    def _variable(self, variable: Any) -> Any:
        aval = self._aval(variable.aval)
        if aval is variable.aval:
            return variable
        if isinstance(variable, Literal):
            # The value may be an array on the old mesh. A weakly typed literal has to stay a Python number.
            value = np.asarray(variable.val)
            return Literal(value.item() if aval.weak_type else value, aval)
        # The same variable is bound once and read often: each must become the same new one.
        if variable not in self.variables:
            self.variables[variable] = Var(aval)
        return self.variables[variable]

    def _aval(self, aval: Any) -> Any:
        inner = getattr(aval, "inner_aval", None)  # of a reference, as the kernels of Pallas take
        if inner is not None:
            moved_inner = self._aval(inner)
            return aval if moved_inner is inner else aval.update(inner_aval=moved_inner)
        sharding = getattr(aval, "sharding", None)  # tokens have none
        moved = self.rewrite(sharding)
        return aval if moved is sharding else aval.update(sharding=moved)

    def _equation(self, equation: Any) -> Any:
        # JAX lowers each operation in the mesh context that it was traced in, whatever mesh is set by then.
        traced_on = equation.ctx.cur_abstract_mesh
        mesh = self.rewrite(traced_on)
        return equation.replace(
            invars=self._variables(equation.invars),
            outvars=self._variables(equation.outvars),
            params={name: self.rewrite(value) for name, value in equation.params.items()},
            ctx=equation.ctx if mesh is traced_on else context_on(equation.ctx, mesh),
        )


def _is_print(equation: Any) -> bool:
    return equation.primitive.name.startswith("debug_")
