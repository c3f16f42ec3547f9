"""From a mesh with many shards to another mesh with few: gather among neighbours first, then send each part once.

An array in 8 row blocks becomes 4 column blocks on other devices. Sent directly, it goes in 32 small pieces, from all 8
devices. So pairs of neighbours first put their row blocks together, over the fast links inside of the source, which
leaves 4 distinct parts, each on 2 devices. One device of each pair then sends, and the other is done.

Such an *intermediate sharding* splits the array into as many distinct parts as the destination has, so every part is on
`source parts / destination parts` devices, a whole number. That is the least gathering which leaves no more parts than
the destination has. Each device keeps its old part within its new one, hence all of the gathering is a plain all-gather
among neighbours. Only dimensions that the destination leaves whole are gathered: whatever is put together along them
goes to the same devices.

Of several intermediates the one that moves the fewest bytes is chosen, gathering and sending together, counted device
by device: a device that is in both meshes need not be sent what it has. Among equals it is the one with the lowest peak
of bytes on any device, then the one that splits the fewest mesh axes, then the one that splits the last ones, whose
devices tend to be the nearest.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from shardrules.core.axes import mesh_sizes, mesh_text
from shardrules.core.errors import MeshError, NoIntermediateShardingError, NoIntermediateShardingNeededError, TreeError
from shardrules.core.finding import Finding, listing, merged
from shardrules.core.jax_state import device_put, jit
from shardrules.core.spec import UNCONSTRAINED, Entries, Entry, entries, make_spec, spec_repr
from shardrules.core.tree import array_kind, leaf_paths, spread
from shardrules.moves.bits import buffers_of, with_sharding
from shardrules.moves.move import reshard
from shardrules.moves.prepare import MoveOptions, is_deleted, prepare
from shardrules.moves.schedule import Box, box_shape, boxes_of
from shardrules.moves.split import split_by_mesh_axis

_REPLICA = "_intermediate_replica"
_SPLIT = "_intermediate_split"

_GATHERED_TOGETHER = 100
"""The most arrays that one program gathers: more take long to compile, and XLA runs programs with collectives one after
the other. Chosen by hand."""


def find_intermediate_sharding(
    in_sharding: Sharding, out_sharding: Sharding, ndim: int | None = None
) -> tuple[NamedSharding, list[str]]:
    """Returns how to lay out an array of rank `ndim` on its own devices before it goes to a mesh with fewer shards, and
    the axes of that mesh along which it then holds copies. Without `ndim` the rank is the length of the longer spec.

    The mesh of the intermediate sharding has the devices of the source and begins with those axes. An axis `fsdp` of
    the source that was split is `fsdp_intermediate_replica` and `fsdp_intermediate_split`, both of its type; every
    other axis keeps its name. Only copies that gathering adds are listed, not those along axes that the source does not
    use. Devices that will hold the same part held neighbouring ones and stand side by side along the replica axes, so
    the mesh lists them in another order than the source does. `jax.jit` does not accept arguments on devices in another
    order; `jax.device_put` does, and `reshard_with_intermediate_sharding` takes care of all of it.

    Raises `NoIntermediateShardingNeededError` where the numbers of parts along some dimension have a common factor: no
    part goes everywhere, and a plain `reshard` is fine. In all other cases it raises its base,
    `NoIntermediateShardingError`: not both are NamedShardings on devices; a spec leaves a dimension open or is
    unreduced; the parts of the source are not a multiple of the destination's; no dimension can be gathered.

    ```python
    from shardrules.presets.pathways import find_intermediate_sharding

    many = jax.sharding.NamedSharding(sr.create_mesh("fsdp:8"), P("fsdp", None))
    few = jax.sharding.NamedSharding(sr.create_mesh("tp:4", devices=jax.devices()[:4]), P(None, "tp"))
    between, replica_axes = find_intermediate_sharding(many, few)
    assert dict(between.mesh.shape) == {"fsdp_intermediate_replica": 2, "fsdp_intermediate_split": 4}
    assert between.spec == P("fsdp_intermediate_split", None)
    assert replica_axes == ["fsdp_intermediate_replica"]
    ```
    """
    best = _find(in_sharding, out_sharding, ndim)
    return best.sharding, list(best.replica_axes)


@final
@attrs.frozen(eq=False)
class _Intermediate:
    """An intermediate `sharding`, the axes of its mesh that hold copies, and the source's sharding on that mesh."""

    sharding: NamedSharding
    replica_axes: tuple[str, ...]
    before: NamedSharding


def _find(in_sharding: Any, out_sharding: Any, ndim: int | None) -> _Intermediate:
    both = (in_sharding, out_sharding)
    if not all(isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) for sharding in both):
        raise NoIntermediateShardingError(
            "an intermediate sharding is found between two NamedShardings on devices, got "
            f"{in_sharding!r} and {out_sharding!r}"
        )
    between = f"between {_sharding_text(in_sharding)} and {_sharding_text(out_sharding)}"
    rank = max(len(sharding.spec.partitions) for sharding in both) if ndim is None else ndim
    source, target = (_spec_entries(sharding, rank, between) for sharding in both)
    sizes = mesh_sizes(in_sharding.mesh)
    old_parts, new_parts = _part_counts(source, sizes), _part_counts(target, mesh_sizes(out_sharding.mesh))
    _check_parts(old_parts, new_parts, between)
    _check_names(source, sizes, between)
    copies = math.prod(old_parts) // math.prod(new_parts)
    # Only dimensions that the destination leaves whole may have fewer parts; together they have `copies` times fewer.
    factors = [_divisors(old) if new == 1 else [1] for old, new in zip(old_parts, new_parts, strict=True)]
    choices = [_replicas(source, each, sizes) for each in itertools.product(*factors) if math.prod(each) == copies]
    if not choices:
        raise NoIntermediateShardingError(
            f"no suitable dimension to split {between}: the source has {old_parts} parts along the dimensions, the "
            f"destination {new_parts}, {copies} times fewer in all. Only a dimension that the destination leaves whole "
            f"can be gathered, and these do not come to {copies}; reshard directly"
        )
    intermediates = [(replicas, _lay_out(in_sharding, source, replicas)) for replicas in choices]
    if len(intermediates) == 1:
        return intermediates[0][1]
    # The coarsest grid whose cells no part of the array cuts: costs are counted in cells.
    grid = tuple(map(math.lcm, old_parts, new_parts))

    def rank_choice(choice: tuple[dict[str, int], _Intermediate]) -> Any:
        replicas, intermediate = choice
        cost = _cost(in_sharding, intermediate, out_sharding, grid)
        return *cost, len(replicas), [replicas.get(name, 1) for name in sizes]

    return min(intermediates, key=rank_choice)[1]


def _sharding_text(sharding: NamedSharding) -> str:
    return f"{spec_repr(sharding.spec)} on the mesh {mesh_text(sharding.mesh)}"


def _spec_entries(sharding: NamedSharding, rank: int, between: str) -> Entries:
    """The entries of a spec, one for each dimension, if each says how its dimension is split."""
    spec = sharding.spec
    why = ""
    if spec.unreduced or spec.reduced:
        why = "is unreduced or reduced, which is not a placement"
    elif UNCONSTRAINED in spec.partitions:
        why = "leaves a dimension to the compiler; say how it is split, or None"
    elif len(spec.partitions) > rank:
        why = f"has {len(spec.partitions)} entries for an array of {rank} dimensions"
    if why:
        raise NoIntermediateShardingError(f"no intermediate sharding {between}: {spec_repr(spec)} {why}")
    return entries(spec, rank)


def _part_counts(spec_entries: Entries, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[name] for name in entry) for entry in spec_entries)


def _check_parts(old_parts: tuple[int, ...], new_parts: tuple[int, ...], between: str) -> None:
    """Refuses shardings that need no intermediate, or cannot have one, by their parts along each dimension."""
    many, few = math.prod(old_parts), math.prod(new_parts)
    counts = f"the source has {old_parts} parts along the dimensions, the destination {new_parts}"
    if max(old_parts, default=1) % max(new_parts, default=1):
        raise NoIntermediateShardingError(
            f"undividable shardings {between}: {counts}, and the most along one dimension, {max(old_parts)}, is not a "
            f"multiple of {max(new_parts)}; reshard directly"
        )
    if many <= few:
        raise NoIntermediateShardingError(
            f"no intermediate sharding {between}: the source sharding is not larger than the target sharding: "
            f"{counts}, {many} against {few}; reshard directly"
        )
    if many % few:
        raise NoIntermediateShardingError(
            f"no intermediate sharding {between}: {counts}, and {many} is not divisible by {few}; reshard directly"
        )
    for dim, (old, new) in enumerate(zip(old_parts, new_parts, strict=True)):
        if math.gcd(old, new) > 1:
            raise NoIntermediateShardingNeededError(
                f"no intermediate sharding is needed {between}: dimension {dim} is in {old} parts and will be in "
                f"{new}, so no part goes everywhere and a plain reshard is fine"
            )


def _check_names(spec_entries: Entries, sizes: Mapping[str, int], between: str) -> None:
    new = [name + end for entry in spec_entries for name in entry for end in (_REPLICA, _SPLIT)]
    clashes = [name for name in new if name in sizes]
    if clashes:
        raise NoIntermediateShardingError(
            f"no intermediate sharding {between}: the source mesh has an axis {clashes[0]!r} already; "
            "rename it with rename_axes"
        )


def _divisors(size: int) -> list[int]:
    return [factor for factor in range(1, size + 1) if size % factor == 0]


def _replicas(spec_entries: Entries, factors: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
    """The copies that each axis holds so that every dimension has its factor fewer parts: on as few axes as possible,
    and the last ones of each dimension first."""
    result: dict[str, int] = {}
    for entry, factor in zip(spec_entries, factors, strict=True):
        ways = itertools.product(*[_divisors(math.gcd(sizes[name], factor)) for name in entry])
        fitting = [way for way in ways if math.prod(way) == factor]
        # Ties go to copies on the last axes: `way` begins with the first ones.
        best = min(fitting, key=lambda way: (sum(copies > 1 for copies in way), way))
        result |= {name: copies for name, copies in zip(entry, best, strict=True) if copies > 1}
    return result


def _lay_out(source: NamedSharding, spec_entries: Entries, replicas: Mapping[str, int]) -> _Intermediate:
    mesh = source.mesh
    assert isinstance(mesh, Mesh)

    def split_names(names: Sequence[str]) -> Entry:
        return tuple(name + _SPLIT if name in replicas else name for name in names)

    def replica_names(names: Sequence[str]) -> Entry:
        return tuple(name + _REPLICA for name in names if name in replicas)

    names = mesh.axis_names
    axes = (*replica_names(names), *split_names(names))
    sizes: dict[str, int] = {}
    types: dict[str, AxisType] = {}
    for (name, size), axis_type in zip(mesh_sizes(mesh).items(), mesh.axis_types, strict=True):
        copies = replicas.get(name, 1)
        sizes |= {split_names([name])[0]: size // copies} | dict.fromkeys(replica_names([name]), copies)
        types |= dict.fromkeys((*split_names([name]), *replica_names([name])), axis_type)
    # Along a dimension the parts count up over its axes, the last one fastest. Cut so that the copies count fastest,
    # neighbouring parts become one.
    gathered = [entry for entry in spec_entries if replica_names(entry)]
    rest = [name for name in names if not any(name in entry for entry in gathered)]
    cut = [axis for entry in gathered for axis in (*split_names(entry), *replica_names(entry))] + rest
    devices = mesh.devices.transpose([names.index(name) for name in (*itertools.chain(*gathered), *rest)])
    devices = devices.reshape([sizes[axis] for axis in cut]).transpose([cut.index(axis) for axis in axes])
    new_mesh = Mesh(devices, axes, axis_types=tuple(types[axis] for axis in axes))

    def sharding_of(new_entries: Sequence[Entry]) -> NamedSharding:
        return NamedSharding(new_mesh, make_spec(tuple(new_entries)), memory_kind=source.memory_kind)

    before = sharding_of([(*split_names(entry), *replica_names(entry)) for entry in spec_entries])
    return _Intermediate(sharding_of([split_names(entry) for entry in spec_entries]), replica_names(names), before)


def _cost(source: NamedSharding, between: _Intermediate, target: NamedSharding, grid: tuple[int, ...]) -> Any:
    """The cells that move, and the most that any device holds, of a grid that no part of an array cuts."""
    old, gathered, new = (boxes_of(sharding, grid) for sharding in (source, between.sharding, target))
    mesh = between.sharding.mesh
    assert isinstance(mesh, Mesh)
    # After gathering only the first replica of each part stays; the others are freed.
    kept = {device: gathered[device] for device in mesh.devices[(0,) * len(between.replica_axes)].flat}
    moved = sum(_cells(box) - _shared_cells(box, old.get(device)) for device, box in gathered.items())
    moved += sum(_cells(box) - _shared_cells(box, kept.get(device)) for device, box in new.items())
    peak = max(
        _cells(old.get(device)) + max(_cells(gathered.get(device)), _cells(kept.get(device)) + _cells(new.get(device)))
        for device in (*old, *new)
    )
    return moved, peak


def _cells(box: Box | None) -> int:
    return 0 if box is None else math.prod(box_shape(box))


def _shared_cells(a: Box, b: Box | None) -> int:
    if b is None:
        return 0
    ends = zip(a, b, strict=True)
    return math.prod(max(0, min(stop, other_stop) - max(start, other)) for (start, stop), (other, other_stop) in ends)


def reshard_with_intermediate_sharding(
    x: Any,
    in_sharding: Any,
    out_sharding: Any,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
    cache_resharding_plans: bool = False,
) -> Any:
    """Moves arrays to a mesh with fewer shards: gathers them among neighbours, then sends each part once. `in_sharding`
    is their sharding now, `out_sharding` the new one, each a sharding, a tree or a prefix of a tree.

    Use it for arrays that many devices hold in small parts, and that go to devices which split another dimension. An
    array that has no intermediate sharding, or needs none, is moved directly, as `reshard` does; to know which, call
    `find_intermediate_sharding`. With `donate` each array is deleted as soon as it has been gathered. `may_alias` and
    `cache_resharding_plans` are passed on to `reshard`, which does the sending. Leaves that are not arrays stay as they
    are, and weak types become strong. Raises `TreeError` for arrays that do not have `in_sharding`, or shardings that
    are not a prefix of `x`, and what `reshard` raises.

    ```python
    from shardrules.presets.pathways import reshard_with_intermediate_sharding

    many = jax.sharding.NamedSharding(sr.create_mesh("fsdp:8"), P("fsdp", None))
    few = jax.sharding.NamedSharding(sr.create_mesh("tp:4", devices=jax.devices()[:4]), P(None, "tp"))
    x = jax.device_put(np.arange(64.0).reshape(8, 8), many)
    moved = reshard_with_intermediate_sharding(x, many, few)
    assert moved.sharding == few and np.array_equal(moved, x)
    ```
    """

    def send(arrays: list[jax.Array], shardings: list[Sharding], *, donate: bool) -> list[jax.Array]:
        return reshard(
            arrays, shardings, donate=donate, may_alias=may_alias, cache_resharding_plans=cache_resharding_plans
        )

    def check(caller: str) -> None:
        prepare(x, out_sharding, MoveOptions(), caller=caller)

    return _reshard(x, in_sharding, out_sharding, donate, send, "reshard_with_intermediate_sharding", check)


def reshard_with_intermediate_sharding_generic(
    x: Any,
    in_sharding: Any,
    out_sharding: Any,
    *,
    jax_array_reshard_fn: Callable[..., Sequence[jax.Array]],
    donate: bool = False,
    may_alias: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Moves arrays as `reshard_with_intermediate_sharding` does, and sends the parts by a function of your own.

    It is called as `jax_array_reshard_fn(arrays, shardings, donate=..., **kwargs)` for arrays on the same devices, and
    returns them in those shardings; `MeshError` if it does not. With `donate=True` nothing else holds these arrays, and
    it may delete them: so it is for what was gathered, whether `x` is donated or not. With `may_alias=False` an array
    that it returns in the memory of one it was given, which is still needed, is copied.

    ```python
    from shardrules.presets.pathways import reshard_with_intermediate_sharding_generic

    def send(arrays, shardings, *, donate):
        return jax.device_put(arrays, shardings, donate=donate)

    many = jax.sharding.NamedSharding(sr.create_mesh("fsdp:8"), P("fsdp", None))
    few = jax.sharding.NamedSharding(sr.create_mesh("tp:4", devices=jax.devices()[:4]), P(None, "tp"))
    x = jax.device_put(np.arange(64.0).reshape(8, 8), many)
    moved = reshard_with_intermediate_sharding_generic(x, many, few, jax_array_reshard_fn=send)
    assert moved.sharding == few
    ```
    """

    def send(arrays: list[jax.Array], shardings: list[Sharding], *, donate: bool) -> list[jax.Array]:
        # Before the function may delete them.
        shapes = [array.shape for array in arrays]
        needed = arrays if may_alias is False and not donate else []
        needed_buffers = dict.fromkeys(name for array in needed for name in buffers_of(array))
        moved = list(jax_array_reshard_fn(arrays, shardings, donate=donate, **kwargs))
        for shape, sharding, new in zip(shapes, shardings, moved, strict=True):
            if new.shape != shape or not new.sharding.is_equivalent_to(sharding, new.ndim):
                raise MeshError(
                    f"jax_array_reshard_fn must return {shape} in {sharding}, but returned {new.shape} in "
                    f"{new.sharding}"
                )
        return [
            device_put(new, new.sharding, may_alias=False)
            if any(name in needed_buffers for name in buffers_of(new))
            else new
            for new in moved
        ]

    caller = "reshard_with_intermediate_sharding_generic"
    return _reshard(x, in_sharding, out_sharding, donate, send, caller, lambda _: None)


def _reshard(
    x: Any,
    in_sharding: Any,
    out_sharding: Any,
    donate: bool,
    send: Callable[..., list[jax.Array]],
    caller: str,
    check: Callable[[str], None],
) -> Any:
    values, treedef = jax.tree.flatten(x)
    sources, targets = (
        spread(shardings, x, _is_sharding, caller, "shardings") for shardings in (in_sharding, out_sharding)
    )
    arrays = [
        index for index, value in enumerate(values) if isinstance(value, int | float | complex) or array_kind(value)
    ]
    _check_sources(x, values, sources, arrays, caller)
    check(caller)
    intermediates = _find_all(values, sources, targets, arrays)
    # Arrays with one intermediate mesh are gathered by one program; arrays that go directly are sent by their devices.
    groups: dict[Any, list[int]] = {}
    for index in arrays:
        direct = index not in intermediates
        key = tuple(boxes_of(sources[index], values[index].shape)) if direct else intermediates[index].sharding.mesh
        groups.setdefault(key, []).append(index)
    # Arrays of a tree may share buffers, so uses are counted by buffer and not by array.
    users = Counter(name for index in arrays for name in buffers_of(values[index]))
    result = list(values)
    for group in groups.values():
        for start in range(0, len(group), _GATHERED_TOGETHER):
            batch = group[start : start + _GATHERED_TOGETHER]
            parts = [values[index] for index in batch]
            users.subtract(name for part in parts for name in buffers_of(part))
            # An array may be in a tree twice, and share memory with another: free it after its last use.
            last = [part for part in parts if donate and not any(users[name] for name in buffers_of(part))]
            new_shardings = [targets[index] for index in batch]
            if batch[0] in intermediates:
                gathered = _gather(parts, [intermediates[index] for index in batch])
                for part in {id(part): part for part in last}.values():
                    part.delete()
                moved = send(gathered, new_shardings, donate=True)
            else:
                # A batch is donated as a whole, and only if this is the last use of every array in it.
                moved = send(parts, new_shardings, donate=len(last) == len(parts))
            for index, array in zip(batch, moved, strict=True):
                result[index] = array
    return treedef.unflatten(result)


def _is_sharding(node: Any) -> bool:
    return node is None or isinstance(node, Sharding)


def _check_sources(
    tree: Any, values: Sequence[Any], sources: Sequence[Any], arrays: Sequence[int], caller: str
) -> None:
    problems: list[tuple[int, Finding]] = []
    for index in arrays:
        value, source = values[index], sources[index]
        if isinstance(value, Tracer):
            why, remedy = "it is being traced", "Call it outside of jit: inside, arrays have no shards yet"
        elif not isinstance(value, jax.Array):
            why = f"it is a {type(value).__name__}, not a JAX array"
            remedy = "It is on no devices that could gather it: reshard places it"
        elif is_deleted(value):
            why, remedy = "it has been deleted or donated", "Use the array that replaced it"
        elif not (isinstance(source, Sharding) and value.sharding.is_equivalent_to(source, value.ndim)):
            why, remedy = f"its sharding is {value.sharding}, but in_sharding is {source}", "Pass its own sharding"
        else:
            continue
        shape = tuple(value.shape) if isinstance(value, jax.Array) else None
        problems.append((index, Finding("error", "other-source", why, "", remedy, shape)))
    if problems:
        paths = leaf_paths(tree)
        findings = merged(attrs.evolve(finding, path=paths[index]) for index, finding in problems)
        raise TreeError(f"{caller}: in_sharding does not match x:\n{listing(findings)}")


def _find_all(
    values: Sequence[Any], sources: Sequence[Any], targets: Sequence[Any], arrays: Sequence[int]
) -> dict[int, _Intermediate]:
    """The intermediate of each array that has one and moves less with it."""
    cache: dict[Any, _Intermediate | None] = {}
    result: dict[int, _Intermediate] = {}
    for index in arrays:
        key = values[index].shape, sources[index], targets[index]
        if key not in cache:
            try:
                cache[key] = _find(sources[index], targets[index], values[index].ndim)
                targets[index].shard_shape(values[index].shape)
            except ValueError:
                # No intermediate, or none for this shape: `reshard` says what is wrong with it.
                cache[key] = None
        # Those without one go directly.
        if (intermediate := cache[key]) is not None:
            result[index] = intermediate
    return result


def _gather(values: Sequence[jax.Array], intermediates: Sequence[_Intermediate]) -> list[jax.Array]:
    """Returns the arrays as the first replica of the intermediate sharding holds them, all of them on one mesh."""
    mesh = intermediates[0].sharding.mesh
    assert isinstance(mesh, Mesh)
    # One mesh throughout: `jax.jit` does not accept devices in two orders, and XLA sees plain collectives.
    before = [with_sharding(value, each.before) for value, each in zip(values, intermediates, strict=True)]
    pairs = [(array, each.sharding) for array, each in zip(before, intermediates, strict=True)]
    nonempty = [(array, sharding) for array, sharding in pairs if array.size]
    # Otherwise a mesh that is in force would count as the mesh of this program.
    with jax.set_mesh(mesh):
        program = jit(_identity, out_shardings=[sharding for _, sharding in nonempty])
        results = iter(program([array for array, _ in nonempty]))
    # JAX 0.10 compiles empty arrays into shards of wrong shapes.
    gathered = [next(results) if array.size else device_put(array, sharding) for array, sharding in pairs]
    # Programs with collectives that queue up can starve each other of threads.
    jax.block_until_ready(gathered)
    for axis in intermediates[0].replica_axes:
        gathered = split_by_mesh_axis(gathered, axis, [1])[0]
    return gathered


def _identity(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays
