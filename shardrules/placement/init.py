"""`filter_init`: a model computed in its shards, so that no device ever holds more than its part of it."""

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.boxes import (
    ArgumentVariables,
    refuse_cycles,
    share_variables,
    shared_leaves,
    variable_types,
    write_variables,
)
from shardrules.core.callables import update_wrapper
from shardrules.core.context import current_mesh, trace_mesh
from shardrules.core.jax_state import device_put, jit, trace_key, under_trace
from shardrules.core.keys import is_key
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.core.spec import array_bytes, device_dtype, packs_on
from shardrules.placement.cache import Cache, array_key, static_key
from shardrules.placement.destination import Destination, resolve_destination
from shardrules.placement.outline import SEED_SIZE, Outline, outline
from shardrules.placement.shard import filter_shard
from shardrules.placement.traced import note_closure
from shardrules.placement.transfer import put
from shardrules.rules.how import How

_PROGRAM_BYTES = 128 * 2**20
"""The work of one program above which it is worth compiling two. Chosen by hand."""

_CACHE_SIZE = 128
"""The most signatures of `make` that are kept: `functools.lru_cache`'s default. Each holds the constants of the traced
function, so fewer are kept than by `filter_jit`."""


def filter_init(make: Callable[..., Any], how: How, mesh: AnyMesh | None = None) -> Callable[..., Any]:
    """Returns a function that makes what `make` makes, placed from the start.

    Shapes are traced without computing anything, the plan follows from them, and each array is computed on the devices
    that will hold it. Equal layers are compiled once. Random numbers are those that `jax.jit(make)` draws, bit by bit,
    and so are Equinox layers. Where `make` computes further with them, XLA may fuse the arithmetic otherwise and a sum
    may be split, so that the last bit differs, as it does from one jit to another.

    **Arguments:**

    - `make`: a model's class, `optim.init`, or any function that returns a tree.
    - `how`: as for `filter_shard`. A function gets the tree of shapes: `plan.mirror` is one.
    - `mesh`: as for `filter_shard`.

    **Returns:**

    A function of the arguments of `make`.

    **Raises:**

    What `filter_shard` raises, before anything is computed.

    ```python
    import functools

    import optax

    mesh = sr.create_mesh("data:8")
    rule = sr.FSDPShardingRule("data", min_size_mb=0)
    make = functools.partial(eqx.nn.MLP, 8, 8, 64, 2)
    model = sr.filter_init(make, rule, mesh)(key=jax.random.key(0))
    assert model.layers[0].weight.sharding.spec == P("data", None)
    plan = rule.plan(eqx.filter(model, eqx.is_array), mesh)
    state = sr.filter_init(optax.adam(1e-3).init, plan.mirror, mesh)(eqx.filter(model, eqx.is_array))
    assert state[0].mu.layers[0].weight.sharding.spec == P("data", None)
    ```
    """
    check_mesh(mesh)
    cache: Cache[_Prepared] = Cache(_CACHE_SIZE)

    def init(*args: Any, **kwargs: Any) -> Any:
        candidates = (mesh, _mesh_of(how), current_mesh())
        mesh_in_force = next((candidate for candidate in candidates if candidate is not None), None)
        if under_trace():
            with trace_mesh(mesh_in_force):
                tree = make(*args, **kwargs)
            return filter_shard(tree, how, mesh)
        refuse_cycles((args, kwargs))
        # Arguments on Explicit axes are renamed to Auto ones, on which everything is computed.
        dynamic, static = eqx.partition(jax.tree.map(_array_on_auto_axes, (args, kwargs)), _is_array)
        shared = shared_leaves((args, kwargs))
        key = _cache_key(dynamic, static, mesh_in_force, shared)
        prepared = cache.get(key) if key is not None else None
        if prepared is None:
            prepared = _prepare(make, how, mesh, dynamic, static, mesh_in_force, shared)
            if key is not None:
                cache.add(key, prepared)
        values = _with_seeds(prepared, jax.tree.leaves(dynamic))
        with _on_auto_mesh(mesh_in_force):
            tree, writes = _computed(prepared, values)
        write_variables((args, kwargs), writes, _placed_as)
        return tree

    return update_wrapper(init, make)


@final
@attrs.frozen(eq=False)
class _Prepared:
    """All that follows from shapes: what to run, and where its results go."""

    variables: Sequence[Any]
    consts: Sequence[Any]
    destination: Destination
    work: Outline
    runs: Sequence[tuple[Callable[..., list[Any]], Sharding]]
    """For each program, the compiled function, and how its inputs are placed: whole on each device of its results."""


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _mesh_of(how: How) -> AnyMesh | None:
    """The mesh that a rule or a plan has of its own, if it has devices."""
    mesh = how.mesh if isinstance(how, ShardingRule | ShardingPlan) else None
    return mesh if isinstance(mesh, Mesh) else None


def _on_auto_mesh(mesh: AnyMesh | None) -> contextlib.AbstractContextManager[Any]:
    """On Explicit axes JAX would compute each array whole before it splits it, so all is done on Auto ones."""
    return jax.set_mesh(Mesh(mesh.devices, mesh.axis_names)) if isinstance(mesh, Mesh) else contextlib.nullcontext()


def _on_auto_axes(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _array_on_auto_axes(leaf: Any) -> Any:
    """Returns the same array on a mesh of Auto axes; nothing is moved."""
    if isinstance(leaf, jax.Array) and _on_auto_axes(leaf.sharding) != leaf.sharding:
        return device_put(leaf, _on_auto_axes(leaf.sharding))
    return leaf


def _whole(sharding: Sharding) -> Sharding:
    """Returns the sharding with a whole copy on each of the same devices."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _cache_key(dynamic: Any, static: Any, mesh: AnyMesh | None, shared: Mapping[int, int]) -> Hashable:
    """Returns what the programs depend on, or `None` where a static argument has no hash."""
    leaves, structure = jax.tree.flatten(dynamic)
    static_leaves, static_structure = jax.tree.flatten(static)
    arrays, others = tuple(map(array_key, leaves)), tuple(map(static_key, static_leaves))
    key = (structure, arrays, others, static_structure, mesh, trace_key(), tuple(shared.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _prepare(
    make: Callable[..., Any],
    how: How,
    mesh: AnyMesh | None,
    dynamic: Any,
    static: Any,
    mesh_in_force: AnyMesh | None,
    shared: Mapping[int, int],
) -> _Prepared:
    shared_results: dict[int, int] = {}

    def traced(dynamic: Any) -> Any:
        args, kwargs = share_variables(eqx.combine(dynamic, static), shared)
        variables = ArgumentVariables.of((args, kwargs))
        tree = make(*args, **kwargs)
        shared_results.update(shared_leaves(tree))
        return tree, variables.writes("filter_init")

    shaped = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else _as_struct(leaf), dynamic)
    with _on_auto_mesh(mesh_in_force):
        try:
            closed, shapes, rest = eqx.filter_make_jaxpr(traced)(shaped)
        except ValueError as error:
            note_closure(error, "filter_init")
            _note_names(error)
            raise
    tree, writes = eqx.combine(shapes, rest)
    destination = resolve_destination(share_variables(tree, shared_results), how, mesh, caller="filter_init")
    destination = _with_writes(destination, writes)
    pairs = zip(*destination.arrays(), strict=True)
    # Arrays that `make` returns without computing them, numpy constants say, are only placed.
    shardings = [_on_auto_axes(sharding) for value, sharding in pairs if isinstance(value, jax.ShapeDtypeStruct)]
    device = next((device for sharding in shardings for device in sharding.device_set), None)
    total_bytes = sum(
        array_bytes(struct.shape, struct.dtype, packed=packs_on(device, struct.dtype))
        for struct in jax.tree.leaves(shapes)
    )
    # An eighth of the model: large models take eight programs or so, none of which holds back much.
    work = outline(closed, shardings, list(map(_whole, shardings)), max(total_bytes // 8, _PROGRAM_BYTES))
    runs = [
        (jit(program.run, out_shardings=results), _whole(results[0]))
        for program in work.programs
        for results in [[shardings[index] for index in program.calls[0].outputs]]
    ]
    return _Prepared([*closed.jaxpr.constvars, *closed.jaxpr.invars], closed.consts, destination, work, runs)


def _note_names(error: ValueError) -> None:
    """Adds a remedy to flax's error about a variable whose names for dimensions are not axes of the mesh."""
    if variable_types() and "Resource axis" in str(error):
        error.add_note(
            "filter_init: flax nnx splits variables itself where they are made, by names that must be mesh axes then. "
            "nnx.use_eager_sharding(False) leaves it to the rules"
        )


def _with_writes(destination: Destination, writes: Any) -> Destination:
    """Returns a destination with what is written to the arguments beside its tree."""
    values, treedef = jax.tree.flatten(writes)
    # They are computed whole on the devices of the tree, and put where the arguments are only then.
    whole = (_whole(sharding) for sharding in destination.shardings if sharding is not None)
    anywhere = next(whole, SingleDeviceSharding(jax.local_devices()[0]))
    shardings = [anywhere if isinstance(value, jax.ShapeDtypeStruct) else None for value in values]
    return attrs.evolve(
        destination,
        values=[*destination.values, *values],
        treedef=jtu.treedef_tuple((destination.treedef, treedef)),
        shardings=[*destination.shardings, *shardings],
    )


def _as_struct(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, device_dtype(leaf.dtype))


def _with_seeds(prepared: _Prepared, inputs: list[Any]) -> dict[Any, Any]:
    """Returns the value of each variable that the programs take."""
    work = prepared.work
    values = dict(zip(prepared.variables, [*prepared.consts, *inputs], strict=True))
    # Op by op rather than in a program: these are many small steps, of few kinds.
    seeds = work.seed_run(*[values[var] for var in work.seed_inputs])
    return values | dict(zip(work.seeds, seeds, strict=True))


def _computed(prepared: _Prepared, values: dict[Any, Any]) -> Any:
    """Runs all programs and returns the tree."""
    work = prepared.work
    outputs: dict[int, Any] = {index: _copied(values[var]) for var, index in work.passed}
    on_devices: dict[tuple[Sharding, Any], Any] = {}
    for program, (run, whole) in zip(work.programs, prepared.runs, strict=True):
        needed = dict.fromkeys(var for call in program.calls for var in call.inputs if (whole, var) not in on_devices)
        missing = {var: None for var in needed if not _is_on(values[var], whole)}
        on_devices.update(((whole, var), values[var]) for var in needed if var not in missing)
        # Small inputs are copied to every device. So are those that span processes, which no process can fetch.
        small = [var for var in missing if var.aval.size <= SEED_SIZE or not whole.is_fully_addressable]
        moved = put([values[var] for var in small], [whole] * len(small))
        on_devices.update(((whole, var), array) for var, array in zip(small, moved, strict=True))
        # The compiler decides which device needs which part of a large input: a numpy array is bound to no device.
        on_devices.update(((whole, var), np.asarray(values[var])) for var in missing if (whole, var) not in on_devices)
        for call in program.calls:
            results = run(*[on_devices[whole, var] for var in call.inputs])
            outputs.update(zip(call.outputs, results, strict=True))
            if next(iter(whole.device_set)).platform == "cpu":
                jax.block_until_ready(results)  # programs that wait in a row for few cores can starve each other
    # Computed results are on Auto axes: putting them on a mesh of other axis types moves nothing.
    arrays, shardings = prepared.destination.arrays()
    index = iter(range(len(arrays)))
    computed = [outputs[next(index)] if isinstance(value, jax.ShapeDtypeStruct) else value for value in arrays]
    return prepared.destination.with_arrays(put(computed, shardings))


def _placed_as(old: Any, new: Any) -> Any:
    """Returns what is written to an argument on its devices; what was on none in particular stays so."""
    if not isinstance(new, jax.Array):
        return new
    if isinstance(old, jax.Array) and old.committed:
        return put([new], [old.sharding])[0]
    if is_key(new.dtype):
        return jax.random.wrap_key_data(_placed_as(None, jax.random.key_data(new)), impl=jax.random.key_impl(new))
    return jnp.asarray(np.asarray(new))


def _copied(value: Any) -> Any:
    """An argument that is returned as it is becomes a new array, as with `jax.jit`: the caller may donate either."""
    return device_put(value, value.sharding, may_alias=False) if isinstance(value, jax.Array) else value


def _is_on(value: Any, whole: Sharding) -> bool:
    return isinstance(value, jax.Array) and value.committed and value.sharding.device_set == whole.device_set
