"""A request to a compiler: a function and where its arrays should be, for any arguments and any machine."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, final

import attrs
from jax.sharding import Mesh

from shardrules.checks.placed import mesh_for
from shardrules.core.axes import AnyMesh
from shardrules.mesh.axis_types import AxisTypes, normalize_axis_types
from shardrules.programs.compiling.arguments import Arguments, donated_arguments, read_arguments
from shardrules.programs.compiling.compile import Compiled, compile_for, trace
from shardrules.programs.compiling.flags import compiler_options
from shardrules.programs.compiling.roles import Role, read_roles
from shardrules.programs.machine.targets import Target


@final
@attrs.frozen(eq=False)
class CompileResult:
    """A compiled function, on a mesh of the target's devices."""

    mesh: Mesh
    arguments: Arguments
    roles: tuple[Role, ...]
    compiled: Compiled
    seconds: float
    """The seconds that it took, with tracing and lowering."""


class CompileOptions(TypedDict, total=False):
    """The keyword arguments of `audit` that say how to compile a function."""

    plan: Any
    in_shardings: Any
    out_shardings: Any
    donate_argnums: int | Sequence[int]
    roles: Any
    axis_types: AxisTypes


@final
@attrs.frozen(eq=False)
class CompileRequest:
    """A function and where its arrays should be; the fields are the arguments of `audit`."""

    fn: Callable[..., Any]
    plan: Any = None
    in_shardings: Any = None
    out_shardings: Any = None
    donate_argnums: int | Sequence[int] = ()
    roles: Any = None
    axis_types: AxisTypes = "auto"

    def mesh_for(self, mesh: AnyMesh | None, args: Callable[[], tuple[Any, ...]]) -> AnyMesh:
        """Returns the given mesh, else the plan's, else the mesh of the arrays or the one in force."""
        explicit = mesh if mesh is not None else getattr(self.plan, "mesh", None)  # specs and most rules have none
        return mesh_for(explicit, args, "no mesh to compile for: pass mesh=sr.mesh_shape('data:8')")

    def compile(self, args: tuple[Any, ...], mesh: AnyMesh, target: Target, *, tolerant: bool = False) -> CompileResult:
        """Compiles the function for a target.

        With `tolerant`, a compiler that refuses programs that do not fit compiles them all the same, if it can.
        """
        start = time.perf_counter()
        options = compiler_options(target)  # refused flags are reported before anything is traced
        target_mesh = self._with_axis_types(target.mesh(mesh))
        # A function may name the mesh that it was written for, so it is traced on that one and moved afterwards.
        trace_mesh = self._with_axis_types(mesh) if isinstance(mesh, Mesh) else target_mesh
        arguments = read_arguments(self.fn, args, target_mesh, self.plan, self.in_shardings)
        donated_args = donated_arguments(self.donate_argnums, len(args))
        roles = read_roles(arguments, self.roles)
        traced = trace(self.fn, arguments, trace_mesh)
        # A jitted function may have specs of its own, which are known only after tracing.
        arguments = arguments.with_shardings(traced.input_shardings, target_mesh)
        donated_arrays = [array_index for array_index, owner in enumerate(arguments.owners) if owner in donated_args]
        compiled = compile_for(
            traced, arguments, target_mesh, self.out_shardings, donated_arrays, tolerant=tolerant, options=options
        )
        return CompileResult(target_mesh, arguments, roles, compiled, time.perf_counter() - start)

    def _with_axis_types(self, mesh: Mesh) -> Mesh:
        if self.axis_types is None:
            return mesh
        return Mesh(mesh.devices, mesh.axis_names, axis_types=normalize_axis_types(self.axis_types, mesh.axis_names))
