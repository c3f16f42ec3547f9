"""The program that `filter_jit` compiles for one kind of call, of arrays alone, and where its arrays are."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import jax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from shardrules.core.axes import AnyMesh
from shardrules.core.callables import name_of
from shardrules.core.errors import ConfigError, PlanError
from shardrules.core.finding import shape_text
from shardrules.core.jax_state import jit, under_trace
from shardrules.core.spec import device_dtype, spec_repr
from shardrules.placement.destination import resolve_destination
from shardrules.placement.functions.callbacks import CallbackErrors
from shardrules.placement.functions.calls import (
    FlatCall,
    Result,
    argument_parts,
    is_array,
    result_parts,
    signature_of,
)
from shardrules.placement.functions.options import Options
from shardrules.placement.traced import note_closure
from shardrules.placement.transfer import is_placed, put_some
from shardrules.rules.how import How


@final
@attrs.frozen
class Meshes:
    """One mesh with two sets of axis types: as arguments and results have it, and as the function sees it."""

    outside: AnyMesh | None
    inside: AnyMesh | None

    def all_inside(self, values: Sequence[Any]) -> Sequence[Any]:
        """Returns arrays that are on the mesh outside as the same arrays on the mesh inside; nothing is moved."""
        return _all_on_mesh(values, self.outside, self.inside)

    def all_outside(self, values: Sequence[Any]) -> Sequence[Any]:
        """Returns arrays that are on the mesh inside as the same arrays on the mesh outside."""
        return _all_on_mesh(values, self.inside, self.outside)


@final
@attrs.frozen(eq=False)
class Program:
    """The facts that follow from structure, shapes and dtypes of one kind of call."""

    run: Any
    """The jitted function, from the arrays of the call to those of the result."""
    shardings: Sequence[Sharding | None]
    """Of the arrays of the call, on the mesh inside."""
    result: Result
    errors: CallbackErrors | None
    """The errors of the program's callbacks; `None` if it has none."""
    is_silent: bool
    """True where JAX's warnings about donated memory that could not be reused are suppressed."""

    def call(self, run: Callable[..., Any], call: FlatCall, arrays: Sequence[Any]) -> list[Any]:
        """Runs the program, jitted or compiled; raises what its callbacks raise."""
        if self.errors is None:
            return self._call(run, call, arrays)
        return self.errors.run(lambda: (self._call(run, call, arrays), True))

    def _call(self, run: Callable[..., Any], call: FlatCall, arrays: Sequence[Any]) -> list[Any]:
        with warnings.catch_warnings() if self.is_silent else contextlib.nullcontext():
            if self.is_silent:
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable*")
            try:
                return run(*arrays)
            except ValueError as error:
                _raise_misplaced(arrays, call, self.shardings, error)
                raise


def compile_call(
    call: FlatCall, arrays: list[Any], shardings: list[Sharding | None], meshes: Meshes, options: Options
) -> Program:
    """Traces a call of which the arrays are where they belong. The mesh inside is in force."""
    result, errors = Result(), None
    donated = _donated_indices(options.donate, call)
    # Traced before it is compiled, since `out_shardings` may be a rule, which needs the shapes of the results.
    try:
        traced = jit(call.flat_function(result, donated), in_shardings=tuple(shardings)).trace(*arrays)
    except Exception as error:  # JAX has no public class for errors about shardings
        _add_hint(error, meshes)
        raise
    parts = result_parts(
        result.tree_and_writes(traced.out_info)[0], options.out_shardings, "filter_jit", "out_shardings"
    )
    out_shardings = _shardings(parts, options.mesh)
    # What is written to an argument is where `in_shardings` has the argument.
    out_shardings += [None if source is None else shardings[source] for source in result.sources]
    program = traced.jaxpr
    if not under_trace():  # else what is being traced runs the callbacks
        errors = CallbackErrors()
        guarded = errors.guard(program)
        program, errors = guarded, None if guarded is program else errors
    # What is compiled holds neither the function nor its arguments: they are freed when the caller drops them.
    compute = jaxpr_as_fun(program)

    def run(*arrays: Any) -> list[Any]:
        return compute(*arrays)

    # Compiled programs, profiles and audits show the user's name.
    run.__name__ = run.__qualname__ = name_of(call.fn)
    jitted = jit(run, in_shardings=tuple(shardings), out_shardings=out_shardings, donate_argnums=tuple(donated))
    is_silent = options.donate in ("all", "all-except-first")
    return Program(jitted, shardings, result, errors, is_silent)


def in_shardings_of(call: FlatCall, options: Options) -> list[Sharding | None]:
    """Returns the sharding that `in_shardings` gives each array of a call; `None` leaves the array where it is."""
    parts = argument_parts(call, options.in_shardings, "filter_jit", "in_shardings")
    return _shardings(parts, options.mesh)


def on_mesh(sharding: Any, old: AnyMesh | None, new: AnyMesh | None) -> Any:
    """Returns a sharding on `old` as the same sharding on `new`, which has the same devices."""
    if old is new or not isinstance(sharding, NamedSharding) or sharding.mesh != old or not isinstance(new, Mesh):
        return sharding
    return NamedSharding(new, sharding.spec, memory_kind=sharding.memory_kind)


def _all_on_mesh(values: Sequence[Any], old: AnyMesh | None, new: AnyMesh | None) -> Sequence[Any]:
    """Returns arrays on `old` as the same arrays on `new`; nothing is moved."""
    if old is new:
        return values
    shardings = {
        index: (value.sharding, on_mesh(value.sharding, old, new))
        for index, value in enumerate(values)
        if isinstance(value, jax.Array | jax.ShapeDtypeStruct)
    }
    # A sharding that is not on `old` comes back as the same object, and its array is left alone.
    return put_some(values, {index: after for index, (before, after) in shardings.items() if after is not before})


def as_struct(value: Any) -> Any:
    """Returns the shape of an array, with its sharding if it is placed; other values as they are."""
    if not is_array(value) or isinstance(value, jax.ShapeDtypeStruct | Tracer):
        return value
    sharding = value.sharding if is_placed(value) else None
    weak = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(value.shape, device_dtype(value.dtype), sharding=sharding, weak_type=weak)


def _add_hint(error: Exception, meshes: Meshes) -> None:
    """Adds a note to an error that probably comes from the types of axes."""
    if not isinstance(meshes.inside, Mesh):
        return
    note_closure(error, "filter_jit")
    axis_types = dict(zip(meshes.inside.axis_names, meshes.inside.axis_types, strict=True))
    # Such errors have no class of their own: the words of the message are all that tells them apart.
    explicit = [name for name, axis_type in axis_types.items() if axis_type == AxisType.Explicit]
    if explicit and any(word in str(error) for word in ("sharding", *explicit)):
        error.add_note(
            f"filter_jit: on Explicit axes ({', '.join(explicit)}) JAX wants model code to say how such results are "
            "split. filter_jit(..., axis_types='auto') leaves it to the compiler"
        )
    elif meshes.inside is not meshes.outside and "type Auto" in str(error):
        error.add_note("filter_jit: the function sees Auto axes; axis_types=None keeps the mesh's own types")


def _shardings(parts: Sequence[tuple[str, Any, How]], mesh: AnyMesh | None) -> list[Sharding | None]:
    """Returns the sharding of each array of some trees, each with its name; `None` where nothing is said of a tree."""
    shardings: list[Sharding | None] = []
    for name, tree, how in parts:
        if how is None:
            shardings += [None for leaf in jax.tree.leaves(tree) if is_array(leaf)]
        else:
            shardings += resolve_destination(tree, how, mesh, caller=f"filter_jit, {name}").arrays()[1]
    return shardings


def _donated_indices(donate: tuple[int | str, ...] | str, call: FlatCall) -> list[int]:
    """Returns the indices of donated arrays among all arrays of a call."""
    args, kwargs = call.args, call.kwargs
    everything, rest = donate in ("all", "warn"), donate in ("all-except-first", "warn-except-first")
    signature = signature_of(call.fn)
    parameters = [] if signature is None else list(signature.parameters)
    names = parameters[: len(args)]
    items = [names.index(item) if item in names else item for item in donate] if isinstance(donate, tuple) else []
    items = [item for item in items if item not in parameters or item in kwargs]  # defaults that the call leaves out
    unknown = [item for item in items if item not in range(-len(args), len(args)) and item not in kwargs]
    if unknown:
        raise ConfigError(f"filter_jit: donate names {unknown}; the arguments are {', '.join([*names, *kwargs])}")
    chosen = [item % len(args) if isinstance(item, int) else item for item in items]
    # The function's own arrays count as rest, as in Equinox.
    parts: list[tuple[Any, bool]] = [(call.fn, everything or rest)]
    parts += [(arg, everything or (rest and n > 0) or n in chosen) for n, arg in enumerate(args)]
    # In the order in which JAX flattens a dictionary.
    parts += [(kwargs[name], everything or rest or name in chosen) for name in sorted(kwargs)]
    flags = [is_donated for part, is_donated in parts for leaf in jax.tree.leaves(part) if is_array(leaf)]
    return [index for index, is_donated in enumerate(flags) if is_donated]


def _raise_misplaced(
    arrays: Sequence[Any], call: FlatCall, shardings: Sequence[Sharding | None], error: ValueError
) -> None:
    """Raises an error that lists the arguments placed otherwise than `in_shardings` says, if there are any."""
    misplaced = [
        f"  {path} {shape_text(array.shape)}: is {_sharding_text(array.sharding)}, not {_sharding_text(expected)}"
        for array, path, expected in zip(arrays, call.array_paths(), shardings, strict=True)
        if expected is not None
        and isinstance(array, jax.Array)
        # An array that is not committed goes wherever a program wants it.
        and array.committed
        and not array.sharding.is_equivalent_to(expected, array.ndim)
    ]
    if misplaced:
        raise PlanError(
            "filter_jit: arguments are not placed as in_shardings says; place them once with filter_shard:\n"
            + "\n".join(misplaced)
        ) from error


def _sharding_text(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    return f"{spec_repr(sharding.spec)} on {','.join(f'{name}:{size}' for name, size in sharding.mesh.shape.items())}"
