"""From a mesh with many shards to another mesh with few: gather among neighbours first, then send each part once.

An array in 8 row blocks is to become 4 column blocks on other devices. Sent as it is, it goes in 32 small pieces, from
all 8 devices. So pairs of neighbours first put their row blocks together, over the fast links inside of the source, and
there are 4 distinct parts, each on 2 devices. One device of each pair then sends, and the other is done.

Such an *intermediate sharding* splits the array into as many distinct parts as the destination has, so every part lies
on `source parts / destination parts` devices, a whole number. That is the least gathering which leaves no more parts
than the destination has. Each device keeps its old part within its new one, hence all of the gathering is a plain
all-gather among neighbours. Only dimensions that the destination leaves whole are gathered: there, whatever is put
together goes the same way.

Several intermediates may do. The choice falls on the one that moves the fewest bytes, gathering and sending together,
counted device by device: a device that is in both meshes need not be sent what it has. Among equals it is the one with
the lowest peak of bytes on any device, then the one that splits the fewest mesh axes, then the one that splits the
last ones, whose devices tend to be the nearest.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from shardrules.core.axes import mesh_sizes, mesh_text
from shardrules.core.errors import (
    MeshError,
    NoIntermediateShardingError,
    NoIntermediateShardingNeededError,
    TreeError,
)
from shardrules.core.finding import Finding, listing, merged
from shardrules.core.spec import UNCONSTRAINED, Entries, Entry, entries, make_spec, spec_repr
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.reshard.bits import memory_of
from shardrules.reshard.move import reshard
from shardrules.reshard.prepare import is_deleted, prepare
from shardrules.reshard.schedule import Box, box_shape, boxes_of
from shardrules.reshard.split import split_by_mesh_axis

_REPLICA = "_intermediate_replica"
_SPLIT = "_intermediate_split"

_NUMBERS = (int, float, complex)

_TOGETHER = 100
"""How many arrays are gathered by one program. Many more take long to compile; one program for each would flood XLA."""


def find_intermediate_sharding(
    in_sharding: Sharding, out_sharding: Sharding, ndim: int | None = None
) -> tuple[NamedSharding, list[str]]:
    """Finds how to lay out an array on its own devices before it goes to a mesh with fewer shards.

    **Arguments:**

    - `in_sharding`: where the array is.
    - `out_sharding`: where it is to be.
    - `ndim`: the rank of the array; by default the length of the longer spec.

    **Returns:**

    The intermediate sharding, and the axes of its mesh along which it holds copies. Its mesh has the devices of the
    source and begins with those axes. An axis `fsdp` of the source that was split is `fsdp_intermediate_replica` and
    `fsdp_intermediate_split`, both of its type; every other axis keeps its name. The copies are what gathering adds:
    an axis that the source does not use holds copies already, and is not listed.

    Devices that will hold the same part are those that held neighbouring ones. They stand side by side along the
    replica axes, so the mesh lists them in another order than the source does. `jax.jit` takes no arguments on devices
    in another order; `jax.device_put` does, and `reshard_with_intermediate_sharding` sees to all of it.

    **Raises:**

    `NoIntermediateShardingNeededError` where the two have along some dimension numbers of parts with a common factor:
    no part goes everywhere, and a plain `reshard` is fine. `NoIntermediateShardingError`, of which it is a kind, in all
    other cases: not both are NamedShardings on devices; a spec leaves a dimension open or speaks of reductions; the
    source does not have more parts than the destination, and a whole multiple of them; no dimension can be gathered.

    ```python
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
    """An intermediate `sharding`, the axes of its mesh that hold copies, and how the source lies on that mesh."""

    sharding: NamedSharding
    replica_axes: tuple[str, ...]
    before: NamedSharding


def _find(in_sharding: Any, out_sharding: Any, ndim: int | None) -> _Intermediate:
    both = (in_sharding, out_sharding)
    if not all(isinstance(one, NamedSharding) and isinstance(one.mesh, Mesh) for one in both):
        raise NoIntermediateShardingError(
            "an intermediate sharding is found between two NamedShardings on devices, got "
            f"{in_sharding!r} and {out_sharding!r}"
        )
    between = f"between {_told(in_sharding)} and {_told(out_sharding)}"
    rank = max(len(one.spec.partitions) for one in both) if ndim is None else ndim
    source, target = (_entries(one, rank, between) for one in both)
    sizes = mesh_sizes(in_sharding.mesh)
    have, want = _parts(source, sizes), _parts(target, mesh_sizes(out_sharding.mesh))
    _check_parts(have, want, between)
    _check_names(source, sizes, between)
    copies = math.prod(have) // math.prod(want)
    factors = [_divisors(many) if few == 1 else [1] for many, few in zip(have, want, strict=True)]
    chosen = [_replicas(source, each, sizes) for each in itertools.product(*factors) if math.prod(each) == copies]
    if not chosen:
        raise NoIntermediateShardingError(
            f"no suitable dimension to split {between}: the source has {have} parts along the dimensions, the "
            f"destination {want}, {copies} times fewer in all. Only a dimension that the destination leaves whole can "
            f"be gathered, and those do not come to {copies}; reshard directly"
        )
    found = [(replicas, _lay_out(in_sharding, source, replicas)) for replicas in chosen]
    if len(found) == 1:
        return found[0][1]
    grid = tuple(map(math.lcm, have, want))

    def rank_of(one: tuple[dict[str, int], _Intermediate]) -> Any:
        replicas, intermediate = one
        least = _cost(in_sharding, intermediate, out_sharding, grid)
        return *least, len(replicas), [replicas.get(name, 1) for name in sizes]

    return min(found, key=rank_of)[1]


def _told(sharding: NamedSharding) -> str:
    return f"{spec_repr(sharding.spec)} on the mesh {mesh_text(sharding.mesh)}"


def _entries(sharding: NamedSharding, rank: int, between: str) -> Entries:
    """The entries of a spec, one for each dimension, if each says how its dimension is split."""
    spec = sharding.spec
    why = ""
    if spec.unreduced or spec.reduced:
        why = "speaks of reductions, which are no placement"
    elif UNCONSTRAINED in spec.partitions:
        why = "leaves a dimension to the compiler; say how it is split, or None"
    elif len(spec.partitions) > rank:
        why = f"has {len(spec.partitions)} entries for an array of {rank} dimensions"
    if why:
        raise NoIntermediateShardingError(f"no intermediate sharding {between}: {spec_repr(spec)} {why}")
    return entries(spec, rank)


def _parts(found: Entries, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[name] for name in entry) for entry in found)


def _check_parts(have: tuple[int, ...], want: tuple[int, ...], between: str) -> None:
    """Refuses what needs no intermediate, or can have none, by the number of parts along each dimension."""
    many, few = math.prod(have), math.prod(want)
    counted = f"the source has {have} parts along the dimensions, the destination {want}"
    if max(have, default=1) % max(want, default=1):
        raise NoIntermediateShardingError(
            f"undividable shardings {between}: {counted}, and the most along one dimension, {max(have)}, is no "
            f"multiple of {max(want)}; reshard directly"
        )
    if many <= few:
        raise NoIntermediateShardingError(
            f"no intermediate sharding {between}: the source sharding is not larger than the target sharding: "
            f"{counted}, {many} against {few}; reshard directly"
        )
    if many % few:
        raise NoIntermediateShardingError(
            f"no intermediate sharding {between}: {counted}, and {many} is not divisible by {few}; reshard directly"
        )
    for dim, (old, new) in enumerate(zip(have, want, strict=True)):
        if math.gcd(old, new) > 1:
            raise NoIntermediateShardingNeededError(
                f"no intermediate sharding is needed {between}: dimension {dim} is in {old} parts and will be in "
                f"{new}, so no part goes everywhere and a plain reshard is fine"
            )


def _check_names(found: Entries, sizes: Mapping[str, int], between: str) -> None:
    new = [name + end for entry in found for name in entry for end in (_REPLICA, _SPLIT)]
    taken = [name for name in new if name in sizes]
    if taken:
        raise NoIntermediateShardingError(
            f"no intermediate sharding {between}: the source mesh has an axis {taken[0]!r} already; "
            "rename_axes gives it another name"
        )


def _divisors(size: int) -> list[int]:
    return [factor for factor in range(1, size + 1) if size % factor == 0]


def _replicas(found: Entries, factors: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
    """How many copies each axis will hold so that every dimension has its factor fewer parts: as few axes as will do,
    and the last ones of each dimension first."""
    result: dict[str, int] = {}
    for entry, factor in zip(found, factors, strict=True):
        ways = itertools.product(*[_divisors(math.gcd(sizes[name], factor)) for name in entry])
        fitting = [way for way in ways if math.prod(way) == factor]
        best = min(fitting, key=lambda way: (sum(copies > 1 for copies in way), way))
        result |= {name: copies for name, copies in zip(entry, best, strict=True) if copies > 1}
    return result


def _lay_out(source: NamedSharding, found: Entries, replicas: Mapping[str, int]) -> _Intermediate:
    mesh = source.mesh
    assert isinstance(mesh, Mesh)

    def left(names: Sequence[str]) -> Entry:
        return tuple(name + _SPLIT if name in replicas else name for name in names)

    def gathered(names: Sequence[str]) -> Entry:
        return tuple(name + _REPLICA for name in names if name in replicas)

    names = mesh.axis_names
    axes = (*gathered(names), *left(names))
    sizes: dict[str, int] = {}
    types: dict[str, AxisType] = {}
    for (name, size), kind in zip(mesh_sizes(mesh).items(), mesh.axis_types, strict=True):
        copies = replicas.get(name, 1)
        sizes |= {left([name])[0]: size // copies} | dict.fromkeys(gathered([name]), copies)
        types |= dict.fromkeys((*left([name]), *gathered([name])), kind)
    # Along a dimension the parts count up over its axes, the last one fastest. Cut so that the copies count fastest,
    # neighbouring parts become one.
    whole = [entry for entry in found if gathered(entry)]
    rest = [name for name in names if not any(name in entry for entry in whole)]
    cut = [axis for entry in whole for axis in (*left(entry), *gathered(entry))] + rest
    devices = mesh.devices.transpose([names.index(name) for name in (*itertools.chain(*whole), *rest)])
    devices = devices.reshape([sizes[axis] for axis in cut]).transpose([cut.index(axis) for axis in axes])
    new = Mesh(devices, axes, axis_types=tuple(types[axis] for axis in axes))

    def placed(found: Sequence[Entry]) -> NamedSharding:
        return NamedSharding(new, make_spec(tuple(found)), memory_kind=source.memory_kind)

    after = placed([left(entry) for entry in found])
    return _Intermediate(after, gathered(names), placed([(*left(entry), *gathered(entry)) for entry in found]))


def _cost(source: NamedSharding, between: _Intermediate, target: NamedSharding, grid: tuple[int, ...]) -> Any:
    """What moves, and the most that any device holds, in cells of a grid that no part of an array cuts."""
    old, held, new = (boxes_of(one, grid) for one in (source, between.sharding, target))
    mesh = between.sharding.mesh
    assert isinstance(mesh, Mesh)
    kept = {device: held[device] for device in mesh.devices[(0,) * len(between.replica_axes)].flat}
    moved = sum(_cells(box) - _shared(box, old.get(device)) for device, box in held.items())
    moved += sum(_cells(box) - _shared(box, kept.get(device)) for device, box in new.items())
    peak = max(
        _cells(old.get(device)) + max(_cells(held.get(device)), _cells(kept.get(device)) + _cells(new.get(device)))
        for device in (*old, *new)
    )
    return moved, peak


def _cells(box: Box | None) -> int:
    return 0 if box is None else math.prod(box_shape(box))


def _shared(a: Box, b: Box | None) -> int:
    """The cells that two boxes share."""
    if b is None:
        return 0
    return math.prod(
        max(0, min(pair[1] for pair in both) - max(pair[0] for pair in both)) for both in zip(a, b, strict=True)
    )


def reshard_with_intermediate_sharding(
    x: Any,
    in_sharding: Any,
    out_sharding: Any,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
    cache_resharding_plans: bool = False,
) -> Any:
    """Moves arrays to a mesh with fewer shards: first gathered among neighbours, then each part sent once.

    Use it for arrays that many devices hold in small parts, and that go to others which split another dimension. An
    array that has no intermediate sharding, or needs none, is moved directly, as `reshard` does; to know which,
    ask `find_intermediate_sharding`.

    ```python
    many = jax.sharding.NamedSharding(sr.create_mesh("fsdp:8"), P("fsdp", None))
    few = jax.sharding.NamedSharding(sr.create_mesh("tp:4", devices=jax.devices()[:4]), P(None, "tp"))
    x = jax.device_put(np.arange(64.0).reshape(8, 8), many)
    moved = reshard_with_intermediate_sharding(x, many, few)
    assert moved.sharding == few and np.array_equal(moved, x)
    ```

    **Arguments:**

    - `x`: an array, or a pytree of arrays, on devices. PRNG keys are arrays, too.
    - `in_sharding`: how they lie: a sharding, or a tree or prefix of them.
    - `out_sharding`: how they are to lie: the same.
    - `donate`: whether `x` may be used up. Each array is then deleted as soon as it has been gathered.
    - `may_alias`, `cache_resharding_plans`: handed to `reshard`, which does the sending.

    **Returns:**

    The tree in its new place. Leaves that are no arrays stay as they are, and weak types become strong.

    **Raises:**

    `TreeError` for what does not lie by `in_sharding`, or a tree of shardings that is no prefix of `x`; what `reshard`
    raises.
    """

    def send(arrays: list[jax.Array], shardings: list[Sharding], *, donate: bool) -> list[jax.Array]:
        return reshard(
            arrays,
            shardings,
            donate=donate,
            may_alias=may_alias,
            cache_resharding_plans=cache_resharding_plans,
        )

    who = "reshard_with_intermediate_sharding"
    return _reshard(x, in_sharding, out_sharding, donate, send, who, lambda: prepare(x, out_sharding, who=who))


def reshard_with_intermediate_sharding_generic(
    x: Any,
    in_sharding: Any,
    out_sharding: Any,
    *,
    jax_array_reshard_fn: Callable[..., Sequence[jax.Array]],
    donate: bool = False,
) -> Any:
    """Moves arrays as `reshard_with_intermediate_sharding` does, and sends the parts by a function of yours.

    **Arguments:**

    - `x`, `in_sharding`, `out_sharding`: the arrays, how they lie, and how they are to lie.
    - `jax_array_reshard_fn`: called as `jax_array_reshard_fn(arrays, shardings, donate=...)` for arrays that lie on the
        same devices, returns them in their new places. With `donate=True` nobody else has them, and it may use them up:
        so it is for what was gathered, whether `x` is donated or not.
    - `donate`: whether `x` may be used up.

    **Returns:**

    The tree of what `jax_array_reshard_fn` returned.

    **Raises:**

    What `reshard_with_intermediate_sharding` raises, and what `jax_array_reshard_fn` does; `MeshError` when an array is
    elsewhere afterwards.

    ```python
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
        shapes = [array.shape for array in arrays]  # while they are there
        moved = list(jax_array_reshard_fn(arrays, shardings, donate=donate))
        for shape, one, new in zip(shapes, shardings, moved, strict=True):
            if new.shape != shape or not new.sharding.is_equivalent_to(one, new.ndim):
                raise MeshError(
                    f"jax_array_reshard_fn was to bring {shape} to {one}, and brought {new.shape} to {new.sharding}"
                )
        return moved

    return _reshard(x, in_sharding, out_sharding, donate, send, "reshard_with_intermediate_sharding_generic")


_Send: TypeAlias = Callable[..., list[jax.Array]]


def _reshard(
    x: Any,
    in_sharding: Any,
    out_sharding: Any,
    donate: bool,
    send: _Send,
    who: str,
    check: Callable[[], object] = lambda: None,
) -> Any:
    values, treedef = jax.tree.flatten(x)
    sources, targets = (_spread(one, x, who) for one in (in_sharding, out_sharding))
    arrays = [number for number, value in enumerate(values) if isinstance(value, _NUMBERS) or array_kind(value)]
    _check_sources(x, values, sources, arrays, who)
    check()
    found = _find_all(values, sources, targets, arrays)
    groups: dict[Any, list[int]] = {}  # what one program gathers, or goes as it is from the same devices
    for number in arrays:
        where = (
            found[number].sharding.mesh if number in found else tuple(boxes_of(sources[number], values[number].shape))
        )
        groups.setdefault(where, []).append(number)
    users = Counter(name for number in arrays for name in memory_of(values[number]))
    result = list(values)
    for numbers in groups.values():
        for start in range(0, len(numbers), _TOGETHER):
            some = numbers[start : start + _TOGETHER]
            parts = [values[number] for number in some]
            users.subtract(name for part in parts for name in memory_of(part))
            # An array may stand in a tree twice, and share memory with another.
            last = [part for part in parts if donate and not any(users[name] for name in memory_of(part))]
            if some[0] in found:
                gathered = _gather(parts, [found[number] for number in some])
                for part in {id(part): part for part in last}.values():
                    part.delete()
                moved = send(gathered, [targets[number] for number in some], donate=True)
            else:
                moved = send(parts, [targets[number] for number in some], donate=len(last) == len(parts))
            for number, array in zip(some, moved, strict=True):
                result[number] = array
    return treedef.unflatten(result)


def _spread(shardings: Any, tree: Any, who: str) -> list[Any]:
    """One sharding for each leaf of the tree, or `None` for what is no array."""
    stated, structure = jax.tree.flatten(shardings, is_leaf=lambda node: node is None or isinstance(node, Sharding))
    try:
        parts = structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise TreeError(f"{who}: the shardings are not a tree like x, nor a prefix of one: {error}") from error
    return [one for one, part in zip(stated, parts, strict=True) for _ in jax.tree.leaves(part)]


def _check_sources(tree: Any, values: Sequence[Any], sources: Sequence[Any], arrays: Sequence[int], who: str) -> None:
    wrong: list[tuple[int, Finding]] = []
    for number in arrays:
        value, source = values[number], sources[number]
        why = ""
        if isinstance(value, Tracer):
            why = "it is being traced", "Call it outside of jit: inside there are no shards yet"
        elif not isinstance(value, jax.Array):
            why = f"{type(value).__name__} is no JAX array", "It lies on no devices to gather among: reshard places it"
        elif is_deleted(value):
            why = "it has been deleted or donated", "Use the array that took its place"
        elif not (isinstance(source, Sharding) and value.sharding.is_equivalent_to(source, value.ndim)):
            why = f"it lies by {value.sharding}, and in_sharding says {source}", "Pass its own sharding"
        if why:
            shape = tuple(value.shape) if isinstance(value, jax.Array) else None
            wrong.append((number, Finding("error", "other-source", why[0], "", why[1], shape)))
    if wrong:
        raise TreeError(f"{who}: in_sharding does not say how x lies:\n{_listed(tree, wrong)}")


def _find_all(
    values: Sequence[Any], sources: Sequence[Any], targets: Sequence[Any], arrays: Sequence[int]
) -> dict[int, _Intermediate]:
    """The intermediate of each array that has one and is better off with it."""
    known: dict[Any, _Intermediate | None] = {}
    for number in arrays:
        key = values[number].shape, sources[number], targets[number]
        if key not in known:
            try:
                known[key] = _find(sources[number], targets[number], values[number].ndim)
                targets[number].shard_shape(values[number].shape)
            except ValueError:  # there is none, or none for this shape: `reshard` says what is wrong with that
                known[key] = None
    every = {number: known[values[number].shape, sources[number], targets[number]] for number in arrays}
    return {number: one for number, one in every.items() if one is not None}


def _listed(tree: Any, wrong: Sequence[tuple[int, Finding]]) -> str:
    paths = leaf_paths(tree)
    return listing(merged(attrs.evolve(finding, path=paths[number]) for number, finding in wrong))


def _gather(values: Sequence[jax.Array], found: Sequence[_Intermediate]) -> list[jax.Array]:
    """Returns the arrays as the first replica of the intermediate sharding holds them, all of them on one mesh."""
    mesh = found[0].sharding.mesh
    assert isinstance(mesh, Mesh)
    # Arrays and results on one mesh: `jax.jit` takes no devices in two orders, and the collectives are plain to XLA.
    before = [_wrapped(value, one.before) for value, one in zip(values, found, strict=True)]
    pairs = [(array, one.sharding) for array, one in zip(before, found, strict=True)]
    full = [(array, sharding) for array, sharding in pairs if array.size]
    with jax.set_mesh(mesh):  # any other that is in force would be taken for the mesh of this
        program = jax.jit(_identity, out_shardings=[sharding for _, sharding in full])
        made = iter(program([array for array, _ in full]))
    # JAX 0.10 compiles empty arrays into shards of wrong shapes.
    gathered = [next(made) if array.size else jax.device_put(array, sharding) for array, sharding in pairs]
    jax.block_until_ready(gathered)  # programs with collectives that queue up can starve each other of threads
    for axis in found[0].replica_axes:
        gathered = split_by_mesh_axis(gathered, axis, [1])[0]
    return gathered


def _identity(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


def _wrapped(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same shards under another name."""
    shards = {shard.device: shard.data for shard in value.addressable_shards}
    order = sharding.addressable_devices_indices_map(value.shape)
    return jax.make_array_from_single_device_arrays(
        value.shape, sharding, [shards[device] for device in order], dtype=value.dtype
    )
