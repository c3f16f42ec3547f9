"""`filter_init`: a model made where it is to be, so that no device ever holds more than its shard of it."""

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any, final

import attrs
import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.core.axes import AnyMesh, check_mesh
from shardrules.core.context import current_mesh, trace_mesh
from shardrules.core.jax_state import trace_key, under_trace
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.core.spec import array_bytes, device_dtype
from shardrules.placement.cache_keys import array_key, static_key
from shardrules.placement.destination import Destination, How, resolve_destination
from shardrules.placement.outline import SEED_SIZE, Outline, outline
from shardrules.placement.shard import filter_shard
from shardrules.placement.traced import note_closure
from shardrules.placement.transfer import put

_PROGRAM_BYTES = 128 * 2**20
"""As much as one program may make before it is worth compiling two."""


def filter_init(make: Callable[..., Any], how: How, mesh: AnyMesh | None = None) -> Callable[..., Any]:
    """Returns a function that makes what `make` makes, placed from the start.

    The shapes are found without making anything, the plan is made from them, and each array is computed on the devices
    that are to hold it. Equal layers are compiled once. Random numbers are those that
    `jax.jit(make)` draws, bit by bit, and so are the layers of Equinox. Where `make` goes on computing with them, XLA
    may fuse that otherwise and a sum may be split, so that the last bit differs, as it does from one jit to another.

    **Arguments:**

    - `make`: a model's class, `optim.init`, or any function that returns a tree.
    - `how`: as for `filter_shard`; also a function from the tree (of shapes) to any of those, such as `plan.mirror`.
    - `mesh`: as for `filter_shard`.

    **Returns:**

    A function of the arguments of `make`.

    **Raises:**

    What `filter_shard` raises, before anything is computed.

    ```python
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
    known: dict[Hashable, _Prepared] = {}

    def init(*args: Any, **kwargs: Any) -> Any:
        where = next((one for one in (mesh, _own_mesh(how), current_mesh()) if one is not None), None)
        if under_trace():
            with trace_mesh(where):
                made = make(*args, **kwargs)
            return filter_shard(made, how, mesh)
        dynamic, static = eqx.partition(jax.tree.map(_on_auto_axes, (args, kwargs)), _is_traced)
        key = _key(dynamic, static, where)
        prepared = known.get(key) if key is not None else None
        if prepared is None:
            prepared = _prepare(make, how, mesh, dynamic, static, where)
            if key is not None:
                known[key] = prepared
        values = _with_seeds(prepared, jax.tree.leaves(dynamic))
        with _on_auto_mesh(where):
            return _made(prepared, values)

    return functools.update_wrapper(init, make, updated=())


@final
@attrs.frozen(eq=False)
class _Prepared:
    """All that follows from shapes: what to run, and where its results are to be."""

    tops: list[Any]
    consts: list[Any]
    found: Destination
    work: Outline
    runs: list[tuple[Callable[..., list[Any]], Sharding]]


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _own_mesh(how: How) -> AnyMesh | None:
    """The mesh that a rule or a plan brings with it, if it has devices."""
    own = how.mesh if isinstance(how, ShardingRule | ShardingPlan) else None
    return own if isinstance(own, Mesh) else None


def _auto(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names)


def _on_auto_mesh(mesh: AnyMesh | None) -> contextlib.AbstractContextManager[Any]:
    """On Explicit axes JAX would compute each array whole before it splits it, so all is done on Auto ones."""
    return jax.set_mesh(_auto(mesh)) if isinstance(mesh, Mesh) else contextlib.nullcontext()


def _on_auto(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    return NamedSharding(_auto(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def _on_auto_axes(leaf: Any) -> Any:
    """The same array under another name for its mesh; nothing is moved."""
    if isinstance(leaf, jax.Array) and _on_auto(leaf.sharding) != leaf.sharding:
        return jax.device_put(leaf, _on_auto(leaf.sharding))
    return leaf


def _place(sharding: Sharding) -> tuple[int, ...]:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(device.id for device in sharding.mesh.devices.flat)
    return tuple(sorted(device.id for device in sharding.device_set))


def _whole(sharding: Sharding) -> Sharding:
    """The sharding that holds a whole copy on each of the same devices."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def _key(dynamic: Any, static: Any, mesh: AnyMesh | None) -> Hashable:
    """What the work follows from; `None` where a static argument has no hash."""
    leaves, structure = jax.tree.flatten(dynamic)
    others, rest = jax.tree.flatten(static)
    key = (structure, tuple(map(array_key, leaves)), tuple(map(static_key, others)), rest, mesh, trace_key())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _prepare(
    make: Callable[..., Any], how: How, mesh: AnyMesh | None, dynamic: Any, static: Any, where: AnyMesh | None
) -> _Prepared:
    def traced(dynamic: Any) -> Any:
        args, kwargs = eqx.combine(dynamic, static)
        return make(*args, **kwargs)

    shaped = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else _struct(leaf), dynamic)
    with _on_auto_mesh(where):
        try:
            closed, shapes, rest = eqx.filter_make_jaxpr(traced)(shaped)
        except ValueError as error:
            note_closure(error, "filter_init")
            raise
    found = resolve_destination(eqx.combine(shapes, rest), how, mesh, caller="filter_init")
    pairs = zip(*found.arrays(), strict=True)
    shardings = [_on_auto(one) for value, one in pairs if isinstance(value, jax.ShapeDtypeStruct)]
    total_bytes = sum(array_bytes(struct.shape, struct.dtype) for struct in jax.tree.leaves(shapes))
    work = outline(closed, shardings, list(map(_place, shardings)), max(total_bytes // 8, _PROGRAM_BYTES))
    runs = [
        (jax.jit(program.run, out_shardings=wanted), _whole(wanted[0]))
        for program in work.programs
        for wanted in [[shardings[number] for number in program.calls[0].outputs]]
    ]
    return _Prepared([*closed.jaxpr.constvars, *closed.jaxpr.invars], closed.consts, found, work, runs)


def _struct(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, device_dtype(leaf.dtype))


def _with_seeds(prepared: _Prepared, inputs: list[Any]) -> dict[Any, Any]:
    """The value of each variable that goes into the programs."""
    work = prepared.work
    values = dict(zip(prepared.tops, [*prepared.consts, *inputs], strict=True))
    # One by one rather than in a program: these are many small steps, of few kinds.
    seeds = work.seed_run(*[values[var] for var in work.seed_inputs])
    return values | dict(zip(work.seeds, seeds, strict=True))


def _made(prepared: _Prepared, values: dict[Any, Any]) -> Any:
    work = prepared.work
    made: dict[int, Any] = {number: _copied(values[var]) for var, number in work.passed}
    there: dict[tuple[Sharding, Any], Any] = {}
    for program, (run, whole) in zip(work.programs, prepared.runs, strict=True):
        needed = dict.fromkeys(var for call in program.calls for var in call.inputs if (whole, var) not in there)
        away = {var: None for var in needed if not _is_on(values[var], whole)}
        there.update(((whole, var), values[var]) for var in needed if var not in away)
        small = [var for var in away if var.aval.size <= SEED_SIZE or not whole.is_fully_addressable]
        moved = put([values[var] for var in small], [whole] * len(small))
        there.update(((whole, var), array) for var, array in zip(small, moved, strict=True))
        # Of a large one the compiler decides who needs which part: from the host, where it is bound to no device.
        there.update(((whole, var), np.asarray(values[var])) for var in away if (whole, var) not in there)
        for call in program.calls:
            results = run(*[there[whole, var] for var in call.inputs])
            made.update(zip(call.outputs, results, strict=True))
            if next(iter(whole.device_set)).platform == "cpu":
                jax.block_until_ready(results)  # programs that wait in a row for few cores can starve each other
    arrays, shardings = prepared.found.arrays()
    turn = iter(range(len(arrays)))
    whole_list = [made[next(turn)] if isinstance(value, jax.ShapeDtypeStruct) else value for value in arrays]
    return prepared.found.with_arrays(put(whole_list, shardings))


def _copied(value: Any) -> Any:
    """What is handed through is a new array, as from `jax.jit`: the caller may give either away."""
    return jax.device_put(value, value.sharding, may_alias=False) if isinstance(value, jax.Array) else value


def _is_on(value: Any, whole: Sharding) -> bool:
    return isinstance(value, jax.Array) and value.committed and value.sharding.device_set == whole.device_set
