"""A question to a compiler: a function and where its arrays are to be, to be asked of arguments and a machine."""

import time
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
from jax.sharding import Mesh

from shardrules.analysis.compiling.arguments import Arguments, donated_arguments, read_arguments
from shardrules.analysis.compiling.compile import Compiled, compile_for, trace
from shardrules.analysis.compiling.roles import Role, read_roles
from shardrules.analysis.machine.targets import Target
from shardrules.core.axes import AnyMesh
from shardrules.mesh.creation import AxisTypes, normalize_axis_types


@final
@attrs.frozen(eq=False)
class Answer:
    """What a compiler made of a function.

    **Arguments:**

    - `mesh`: the mesh, on devices of the target.
    - `arguments`, `roles`: what the function takes, and what that is for.
    - `compiled`: what the compiler gave.
    - `seconds`: how long it took, with tracing and lowering.
    """

    mesh: Mesh
    arguments: Arguments
    roles: tuple[Role, ...]
    compiled: Compiled
    seconds: float


@final
@attrs.frozen(eq=False)
class Question:
    """A function, and where its arrays are to be.

    **Arguments:**

    - `fn`, `plan`, `in_shardings`, `out_shardings`, `donate_argnums`, `roles`, `axis_types`: as in
        `ShardingAnalyzer.audit`.
    """

    fn: Callable[..., Any]
    plan: Any = None
    in_shardings: Any = None
    out_shardings: Any = None
    donate_argnums: int | Sequence[int] = ()
    roles: Any = None
    axis_types: AxisTypes = "auto"

    def ask(self, args: tuple[Any, ...], mesh: AnyMesh, target: Target, *, tolerant: bool = False) -> Answer:
        """Compiles the function for some arguments and a machine.

        **Arguments:**

        - `args`: the arguments; shapes will do.
        - `mesh`: the axes to compile for.
        - `target`: the machine.
        - `tolerant`: whether a compiler that refuses what does not fit should be asked to go on, where it can.

        **Returns:**

        The `Answer`.

        **Raises:**

        As `ShardingAnalyzer.audit`.
        """
        start = time.perf_counter()
        there = self._typed(target.mesh(mesh))
        known = self._typed(mesh) if isinstance(mesh, Mesh) else there
        found = read_arguments(self.fn, args, there, self.plan, self.in_shardings)
        given = donated_arguments(self.donate_argnums, len(args))
        roles = read_roles(found, self.roles)
        traced = trace(self.fn, found, known)
        found = found.with_specs(traced.said, there)
        donated = [number for number, owner in enumerate(found.owners) if owner in given]
        compiled = compile_for(traced, found, there, self.out_shardings, donated, tolerant=tolerant)
        return Answer(there, found, roles, compiled, time.perf_counter() - start)

    def _typed(self, mesh: Mesh) -> Mesh:
        if self.axis_types is None:
            return mesh
        return Mesh(mesh.devices, mesh.axis_names, axis_types=normalize_axis_types(self.axis_types, mesh.axis_names))
