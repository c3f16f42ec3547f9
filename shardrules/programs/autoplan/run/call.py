"""A function as the planner takes it: traced from shapes, with the structure of its arguments and results."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.tree_util as jtu
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardrules.core.axes import AnyMesh
from shardrules.core.boxes import ArgumentVariables, share_variables, shared_leaves
from shardrules.core.errors import PlanError, TreeError
from shardrules.core.finding import Finding, plan_error
from shardrules.core.spec import device_dtype
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.programs.autoplan.run.branches import without_branches
from shardrules.programs.autoplan.run.expand import expanded
from shardrules.programs.autoplan.run.fingerprint import fingerprint
from shardrules.programs.autoplan.run.masks import with_masks_inside
from shardrules.programs.compiling.arguments import argument_names
from shardrules.programs.jaxprs.walk import without_dead_code

_Kind: TypeAlias = tuple[tuple[int, ...], Any] | None
"""Shape and dtype of an array; `None` for other leaves."""


@final
@attrs.frozen(eq=False)
class Call:
    """A traced function."""

    name: str
    jaxpr: ClosedJaxpr
    """Its program, without dead code."""
    structs: tuple[jax.ShapeDtypeStruct, ...]
    """Shape and dtype of each array of the arguments, and whether it was traced as one of a weak type."""
    paths: tuple[str, ...]
    """The name of each array: `"params/layers/up"`."""
    argument_names: tuple[str, ...]
    argument_indices: tuple[int, ...]
    """The index of the argument that each array is in."""
    on_host: tuple[bool, ...]
    """The arrays that are in the memory of the host."""
    returned: tuple[Any, ...]
    """The leaves that the function returns, with `None` for arrays."""
    treedef: Any
    """The structure of what it returns."""
    fingerprint: str
    """As `fingerprint` returns it for the program."""
    arguments: tuple[tuple[Any, tuple[_Kind, ...]], ...]
    """The structure of each argument, and the kinds of its leaves."""

    @property
    def feedback(self) -> dict[int, int]:
        """Maps indices of results to the indices of the arrays that they replace in the next call.

        A training step returns its parameters and its optimizer state: results with the structure, shapes and dtypes
        of a whole argument replace it.
        """
        kinds = self._returned_kinds()
        result_indices: list[int] = []  # for each returned leaf, how many arrays come before it
        array_count = 0
        for kind in kinds:
            result_indices.append(array_count)
            array_count += kind is not None
        # An argument may come back as one item of what is returned, or as all of it. Each has a range of the leaves.
        candidates: list[tuple[Any, int, int]] = []
        start = 0
        for item in self.treedef.children():
            candidates.append((item, start, start + item.num_leaves))
            start += item.num_leaves
        candidates.append((self.treedef, 0, self.treedef.num_leaves))
        # Each is used once: of two arguments alike, such as two moments, the first comes back as the first result.
        is_used = [False] * len(candidates)
        feedback: dict[int, int] = {}
        for argument_index, (treedef, argument_kinds) in enumerate(self.arguments):
            for position, (item, first, last) in enumerate(candidates):
                is_same = item == treedef and kinds[first:last] == argument_kinds
                if is_used[position] or not is_same or not any(argument_kinds):
                    continue
                is_used[position] = True
                arrays = [index for index, owner in enumerate(self.argument_indices) if owner == argument_index]
                results = [result_indices[index] for index in range(first, last) if kinds[index] is not None]
                feedback.update(zip(results, arrays, strict=True))
                break
        return feedback

    def _returned_kinds(self) -> tuple[_Kind, ...]:
        avals = iter(self.jaxpr.out_avals)
        return tuple(_aval_kind(next(avals)) if leaf is None else None for leaf in self.returned)

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Returns what the function returns, from its arrays."""
        results = iter(arrays)
        return self.treedef.unflatten([next(results) if leaf is None else leaf for leaf in self.returned])


def read_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: AnyMesh,
    name: str,
    on_host: Sequence[bool] | None = None,
    weak_types: Sequence[bool] | None = None,
) -> Call:
    """Traces a function, which may use the axis names of a mesh; nothing is run.

    `on_host`: which arrays are in the memory of the host; by default those that are, or whose sharding says so.
    `weak_types`: which are traced as arrays of weak types, such as `jnp.array(0.1)`; by default those that are, but for
    arguments that come back as results. A rate cannot be told from a loss: scalars alone keep theirs.
    """
    if weak_types is not None:
        return _read_call(fn, args, mesh, name, on_host, weak_types)
    arrays = [[leaf for leaf in jtu.tree_leaves(arg) if array_kind(leaf) is not None] for arg in args]
    is_weak = [struct(leaf).weak_type for group in arrays for leaf in group]
    is_scalar = [len(group) == 1 and not leaf.shape for group in arrays for leaf in group]
    first = [weak and scalar for weak, scalar in zip(is_weak, is_scalar, strict=True)]
    try:
        call = _read_call(fn, args, mesh, name, on_host, first)
    except TypeError:  # carries of loops, for instance, may have their dtypes from weak types
        return _read_call(fn, args, mesh, name, on_host, is_weak)
    returned = set(call.feedback.values())
    lasting = [
        weak and (scalar or index not in returned)
        for index, (weak, scalar) in enumerate(zip(is_weak, is_scalar, strict=True))
    ]
    return call if lasting == first else _read_call(fn, args, mesh, name, on_host, lasting)


def _read_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: AnyMesh,
    name: str,
    on_host: Sequence[bool] | None,
    weak_types: Sequence[bool],
) -> Call:
    leaves, treedef = jtu.tree_flatten(args)
    array_leaves = [leaf for leaf in leaves if array_kind(leaf) is not None]
    outputs: list[Any] = []
    shared = shared_leaves(args)

    # Only arrays are traced: other leaves, such as activation functions and step counts in Python, stay as they are.
    def run(*arrays: Any) -> list[Any]:
        tracers = iter(arrays)
        call = [leaf if array_kind(leaf) is None else next(tracers) for leaf in leaves]
        call_args = share_variables(treedef.unflatten(call), shared)
        variables = ArgumentVariables.of(call_args)
        outputs.append(fn(*call_args))
        if variables.writes(name):
            raise TreeError(
                f"{name}: the function writes to variables of flax nnx in its arguments, which a planned function "
                "cannot do. Return what it writes, nnx.state(model), and update the model with that: "
                "nnx.update(model, state)"
            )
        return [leaf for leaf in jtu.tree_leaves(outputs[-1]) if array_kind(leaf) is not None]

    structs = tuple(map(strong, array_leaves))
    if len(weak_types) == len(structs):  # else another tree than was planned, which is refused later
        structs = tuple(
            jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=flag)
            for array, flag in zip(structs, weak_types, strict=True)
        )
    if on_host is None or len(on_host) != len(structs):
        on_host = [is_in_host_memory(leaf) for leaf in array_leaves]
    types = [_host_type(array) if flag else array for array, flag in zip(structs, on_host, strict=True)]
    names = argument_names(fn, len(args))
    paths: list[str] = []
    argument_indices: list[int] = []
    arguments: list[tuple[Any, tuple[_Kind, ...]]] = []
    for argument_index, (argument_name, arg) in enumerate(zip(names, args, strict=True)):
        argument_leaves = jtu.tree_leaves(arg)
        arguments.append((jtu.tree_structure(arg), tuple(map(_leaf_kind, argument_leaves))))
        for leaf, path in zip(argument_leaves, leaf_paths(arg), strict=True):
            if array_kind(leaf) is not None:
                paths.append(f"{argument_name}/{path}".rstrip("/"))
                argument_indices.append(argument_index)
    program = _program(run, types, mesh, lambda: _memory_error(paths, on_host, name) if any(on_host) else None)
    returned, returned_treedef = jtu.tree_flatten(outputs[-1])
    return Call(
        name,
        program,
        structs,
        tuple(paths),
        tuple(names),
        tuple(argument_indices),
        tuple(on_host),
        tuple(None if array_kind(leaf) is not None else leaf for leaf in returned),
        returned_treedef,
        fingerprint(program),
        tuple(arguments),
    )


def _program(
    run: Callable[..., Any], types: Sequence[Any], mesh: AnyMesh, memory_error: Callable[[], PlanError | None]
) -> ClosedJaxpr:
    """Traces a function; `memory_error` returns what to raise where arrays of two memories meet."""
    with axis_names_of(mesh):
        try:
            traced = jax.make_jaxpr(run)(*types)
        except ValueError as error:
            refusal = memory_error() if _MIXED_MEMORIES in str(error) else None
            if refusal is None:
                raise
            raise refusal from error
        program = ClosedJaxpr(with_masks_inside(without_branches(expanded(traced.jaxpr))), traced.consts)
        return without_dead_code(program)


def struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, without a sharding."""
    shape, dtype = array_kind(leaf) or ((), None)
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(shape, device_dtype(dtype), weak_type=weak)


def strong(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, without a weak type."""
    array = struct(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


HOST_MEMORY = "pinned_host"
"""The kind of memory in which devices read and write what is on their host: pages of other kinds are copied first."""


def is_in_host_memory(leaf: Any) -> bool:
    """An array, or the sharding of a shape, is in the memory of the host."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST_MEMORY


def _host_type(array: jax.ShapeDtypeStruct) -> ShapedArray:
    """The type of an array in the memory of the host."""
    return ShapedArray(array.shape, array.dtype, array.weak_type, memory_space=jax.memory.Space.Host)


_MIXED_MEMORIES = "memory_space of all inputs passed to"
"""The beginning of JAX's error about an operation with operands in the memory of the host and in that of devices."""


def _memory_error(paths: Sequence[str], on_host: Sequence[bool], name: str) -> PlanError:
    findings = [
        Finding(
            "error",
            "host-memory",
            "is in the memory of the host, and devices compute with what is in their own",
            path=path,
            remedy="Where the function first uses it, move it with jax.device_put(x, jax.memory.Space.Device)",
        )
        for path, flag in zip(paths, on_host, strict=True)
        if flag
    ]
    return plan_error(f"{name}: one operation has operands in the memory of the host and in that of devices", findings)


def _leaf_kind(leaf: Any) -> _Kind:
    return None if array_kind(leaf) is None else _aval_kind(struct(leaf))


def _aval_kind(aval: Any) -> _Kind:
    return tuple(aval.shape), aval.dtype


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh with all axes of type Auto, which leaves them to the compiler."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=types)


def axis_names_of(mesh: AnyMesh) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which functions may use the axis names of a mesh."""
    auto = auto_mesh(mesh)
    return jax.sharding.use_abstract_mesh(auto.abstract_mesh if isinstance(auto, Mesh) else auto)
