"""A function and its arguments, as the planner takes them: traced from shapes, and what it returns put together."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import attrs
import jax
import jax.tree_util as jtu
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardrules.analysis.compiling.arguments import argument_names
from shardrules.analysis.compiling.jaxprs import equations
from shardrules.analysis.compiling.model_flops import without_dead_code
from shardrules.core.axes import AnyMesh
from shardrules.core.spec import device_dtype
from shardrules.core.tree import array_kind, leaf_paths


@final
@attrs.frozen(eq=False)
class Call:
    """A traced function.

    **Arguments:**

    - `name`: of the function.
    - `jaxpr`: its program, without what nothing depends on.
    - `structs`: shape and dtype of each array of the arguments.
    - `paths`: what they are called.
    - `names`: those of the arguments.
    - `owners`: the number of the argument that each array is in.
    - `returned`: the leaves of what it returns; those that are no arrays are there, for others `None`.
    - `treedef`: the structure of what it returns.
    - `fingerprint`: the same for two programs only if they are the same.
    - `arguments`: the structure of each argument, and shape and dtype of each of its leaves.
    """

    name: str
    jaxpr: ClosedJaxpr
    structs: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]
    names: tuple[str, ...]
    owners: tuple[int, ...]
    returned: tuple[Any, ...]
    treedef: Any
    fingerprint: str
    arguments: tuple[tuple[Any, list[Any]], ...]

    @property
    def feedback(self) -> dict[int, int]:
        """For numbers of results the arguments that they are to be in the next call.

        These are results with the structure, shapes and dtypes of a whole argument.
        """
        kinds = [None if one is not None else (tuple(s.shape), s.dtype) for one, s in self._results()]
        whole = self.treedef
        items = whole.children()
        found: dict[int, int] = {}
        places: list[tuple[Any, int, int]] = []
        start = 0
        for item in items:
            places.append((item, start, start + item.num_leaves))
            start += item.num_leaves
        places.append((whole, 0, whole.num_leaves))
        taken: list[bool] = [False] * len(places)
        arrays: list[int] = []
        count = 0
        for kind in kinds:
            arrays.append(count)
            count += kind is not None
        for number, (treedef, own) in enumerate(self.arguments):
            for at, (item, first, last) in enumerate(places):
                if taken[at] or item != treedef or kinds[first:last] != own or not any(own):
                    continue
                taken[at] = True
                firsts = [position for position, owner in enumerate(self.owners) if owner == number]
                results = [arrays[place] for place in range(first, last) if kinds[place] is not None]
                found.update(zip(results, firsts, strict=True))
                break
        return found

    def _results(self) -> Iterator[tuple[Any, Any]]:
        rest = iter(self.jaxpr.out_avals)
        for leaf in self.returned:
            yield (None, next(rest)) if leaf is None else (leaf, None)

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """Returns what the function returns.

        **Arguments:**

        - `arrays`: the arrays in it.

        **Returns:**

        A tree.
        """
        rest = iter(arrays)
        return self.treedef.unflatten([next(rest) if leaf is None else leaf for leaf in self.returned])


def read_call(fn: Callable[..., Any], args: tuple[Any, ...], mesh: AnyMesh, name: str) -> Call:
    """Traces a function; nothing is run.

    **Arguments:**

    - `fn`: the function.
    - `args`: its arguments; shapes will do.
    - `mesh`: the mesh, which the function may name the axes of.
    - `name`: what it is called.

    **Returns:**

    A `Call`.

    **Raises:**

    Whatever `fn` and JAX raise.
    """
    leaves, treedef = jtu.tree_flatten(args)
    kept = [leaf for leaf in leaves if array_kind(leaf) is not None]
    outcome: list[Any] = []

    def run(*arrays: Any) -> list[Any]:
        rest = iter(arrays)
        outcome.append(fn(*treedef.unflatten([leaf if array_kind(leaf) is None else next(rest) for leaf in leaves])))
        return [leaf for leaf in jtu.tree_leaves(outcome[-1]) if array_kind(leaf) is not None]

    structs = tuple(struct(leaf) for leaf in kept)
    with naming(mesh):
        traced = jax.make_jaxpr(run)(*structs)
    program = ClosedJaxpr(without_dead_code(traced), traced.consts)
    returned, whole = jtu.tree_flatten(outcome[-1])
    names = argument_names(fn, len(args))
    paths: list[str] = []
    owners: list[int] = []
    arguments: list[tuple[Any, list[Any]]] = []
    for number, (label, arg) in enumerate(zip(names, args, strict=True)):
        own = jtu.tree_leaves(arg)
        arguments.append((jtu.tree_structure(arg), [_kind(leaf) for leaf in own]))
        for leaf, path in zip(own, leaf_paths(arg), strict=True):
            if array_kind(leaf) is not None:
                paths.append(f"{label}/{path}".rstrip("/"))
                owners.append(number)
    return Call(
        name,
        program,
        structs,
        tuple(paths),
        tuple(names),
        tuple(owners),
        tuple(None if array_kind(leaf) is not None else leaf for leaf in returned),
        whole,
        fingerprint(program),
        tuple(arguments),
    )


def struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an array.

    **Arguments:**

    - `leaf`: it, or what stands for it.

    **Returns:**

    A `jax.ShapeDtypeStruct` without a sharding.
    """
    shape, dtype = array_kind(leaf) or ((), None)
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(shape, device_dtype(dtype), weak_type=weak)


def _kind(leaf: Any) -> Any:
    if array_kind(leaf) is None:
        return None
    one = struct(leaf)
    return tuple(one.shape), one.dtype


def automatic(mesh: AnyMesh) -> AnyMesh:
    """Returns a mesh whose axes are all left to the compiler.

    **Arguments:**

    - `mesh`: the mesh.

    **Returns:**

    It, with Auto axes.
    """
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=types)


def naming(mesh: AnyMesh) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which functions may name the axes of a mesh.

    **Arguments:**

    - `mesh`: the mesh.

    **Returns:**

    A context manager.
    """
    there = automatic(mesh)
    return jax.sharding.use_abstract_mesh(there.abstract_mesh if isinstance(there, Mesh) else there)


def fingerprint(program: ClosedJaxpr) -> str:
    """Returns a text that is the same for two programs only if they do the same on the same shapes.

    **Arguments:**

    - `program`: the program.

    **Returns:**

    Some letters and digits.
    """
    digest = hashlib.sha256()
    for equation in equations(program):
        shapes = [
            (tuple(one.aval.shape), str(one.aval.dtype))
            for one in equation.outvars
            if isinstance(one.aval, ShapedArray)
        ]
        params = sorted((name, repr(value)) for name, value in equation.params.items() if _is_plain(value))
        digest.update(f"{equation.primitive.name}{shapes}{params}".encode())
    return digest.hexdigest()[:16]


def _is_plain(value: Any) -> bool:
    """Whether a parameter is written alike wherever it means the same."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
