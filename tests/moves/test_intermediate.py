"""Intermediate shardings, compared with brute force, and arrays moved through them."""

import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardrules.core.errors import (
    MeshError,
    NoIntermediateShardingError,
    NoIntermediateShardingNeededError,
    PlanError,
    ShardRulesError,
    TreeError,
)
from shardrules.mesh.creation import create_mesh
from shardrules.mesh.shape import mesh_shape
from shardrules.moves.bits import buffers_of
from shardrules.moves.intermediate import (
    find_intermediate_sharding,
    reshard_with_intermediate_sharding,
    reshard_with_intermediate_sharding_generic,
)
from tests.mesh.cluster import Ended, run_processes

Counts = tuple[int, ...]


def mesh_of(text: str, devices: Any = None, axis_type: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of these devices in this order, by default of the first ones."""
    sizes = {name: int(size) for name, size in (part.split(":") for part in text.split(","))}
    available = jax.devices() if devices is None else devices
    chosen = np.array(available[: math.prod(sizes.values())], dtype=object).reshape(tuple(sizes.values()))
    return Mesh(chosen, tuple(sizes), axis_types=(axis_type,) * len(sizes))


def placed(text: str, *partitions: Any, devices: Any = None, axis_type: AxisType = AxisType.Auto) -> NamedSharding:
    return NamedSharding(mesh_of(text, devices, axis_type), P(*partitions))


def other_names(text: str, *partitions: Any) -> NamedSharding:
    """A destination on the last devices."""
    size = math.prod(int(part.split(":")[1]) for part in text.split(","))
    return placed(text, *partitions, devices=jax.devices()[-size:])


def devices_of(sharding: Any) -> Any:
    """The array of devices of its mesh."""
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh.devices


def printed_lines(ended: Ended) -> list[str]:
    """The lines that a process printed."""
    assert ended.code == 0, ended.out + ended.err
    return ended.out.splitlines()


# Which one is chosen.


FSDP = ("fsdp:8,tp:1", "fsdp")
PAIRS = {"fsdp_intermediate_replica": 2, "fsdp_intermediate_split": 4, "tp": 1}
EVENS_THEN_ODDS = [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize(
    ("source", "target", "sizes", "spec", "axes", "ids"),
    [
        (
            (*FSDP, "tp"),
            ("fsdp:1,tp:4", "fsdp", "tp"),
            PAIRS,
            ("fsdp_intermediate_split", "tp"),
            ["fsdp_intermediate_replica"],
            EVENS_THEN_ODDS,
        ),
        (
            FSDP,
            ("tp:4", None, "tp"),
            PAIRS,
            ("fsdp_intermediate_split", None),
            ["fsdp_intermediate_replica"],
            EVENS_THEN_ODDS,
        ),
        (
            ("a:4,b:2", ("a", "b"), None),
            ("tp:4", None, "tp"),
            {"b_intermediate_replica": 2, "a": 4, "b_intermediate_split": 1},
            (("a", "b_intermediate_split"), None),
            ["b_intermediate_replica"],
            EVENS_THEN_ODDS,
        ),
        (
            ("a:3,b:2", "a", "b"),
            ("x:1", None, "x"),
            {
                "a_intermediate_replica": 3,
                "b_intermediate_replica": 2,
                "a_intermediate_split": 1,
                "b_intermediate_split": 1,
            },
            ("a_intermediate_split", "b_intermediate_split"),
            ["a_intermediate_replica", "b_intermediate_replica"],
            [*range(6)],
        ),
    ],
    ids=["two axes", "specs of two lengths", "two axes of one dimension", "both dimensions"],
)
def test_axes_and_devices_of_the_intermediate(
    source: Any, target: Any, sizes: dict[str, int], spec: Any, axes: list[str], ids: list[int]
) -> None:
    between, replica_axes = find_intermediate_sharding(placed(*source), other_names(*target))
    assert list(between.mesh.shape.items()) == list(sizes.items())
    assert (between.spec, replica_axes) == (P(*spec), axes)
    assert [device.id for device in devices_of(between).flat] == ids


@pytest.mark.parametrize(
    ("source", "target", "texts"),
    [
        (("fsdp:8,tp:1",), ("tp:4", None, "tp"), ["undividable shardings", "1, is not a multiple of 4"]),
        (("fsdp:8", "fsdp"), ("x:4,y:1", ("x", "y")), ["in 8 parts and will be in 4", "a plain reshard is fine"]),
        (("a:4,b:2", "a", "b"), ("x:2,y:3", "x", "y"), ["undividable", "the most along one dimension, 4,"]),
        (("a:4,b:2", "a", "b", None), ("x:3", None, None, "x"), ["undividable", "is not a multiple of 3"]),
    ],
)
def test_refusals_have_the_numbers(source: Any, target: Any, texts: list[str]) -> None:
    with pytest.raises(NoIntermediateShardingError) as caught:  # noqa: PT011  compared below
        find_intermediate_sharding(placed(*source), other_names(*target))
    assert [text for text in texts if text not in str(caught.value)] == [], str(caught.value)


def test_messages_name_both_shardings() -> None:
    source, target = placed("fsdp:4,tp:1", "fsdp", None), other_names("tp:4", None, "tp")
    with pytest.raises(NoIntermediateShardingError) as caught:  # noqa: PT011  all of it is compared below
        find_intermediate_sharding(source, target)
    assert str(caught.value) == (
        "no intermediate sharding between P('fsdp', None) on the mesh fsdp:4,tp:1 and P(None, 'tp') on the mesh tp:4: "
        "the source sharding is not larger than the target sharding: the source has (4, 1) parts along the dimensions, "
        "the destination (1, 4), 4 against 4; reshard directly"
    )


def test_the_errors_are_related_and_pickle() -> None:
    assert issubclass(NoIntermediateShardingNeededError, NoIntermediateShardingError)
    assert issubclass(NoIntermediateShardingError, ShardRulesError)
    assert issubclass(NoIntermediateShardingError, ValueError)
    again = pickle.loads(pickle.dumps(NoIntermediateShardingNeededError("why")))
    assert (type(again), str(again)) == (NoIntermediateShardingNeededError, "why")


SOURCE = ("fsdp:8,tp:1", "fsdp", "tp")


def test_both_halves_of_an_axis_have_its_type() -> None:
    devices = np.array(jax.devices()).reshape(4, 2)
    types = (AxisType.Explicit, AxisType.Auto)
    source = NamedSharding(Mesh(devices, ("a", "b"), axis_types=types), P("a", "b", None))
    between, axes = find_intermediate_sharding(source, other_names("x:2", None, None, "x"))
    assert axes == ["a_intermediate_replica"]
    assert dict(zip(between.mesh.axis_names, between.mesh.axis_types, strict=True)) == {
        "a_intermediate_replica": AxisType.Explicit,
        "a_intermediate_split": AxisType.Explicit,
        "b": AxisType.Auto,
    }


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_memory_kinds_are_kept(memory: str) -> None:
    between, _ = find_intermediate_sharding(placed(*SOURCE).with_memory_kind(memory), other_names("tp:4", None, "tp"))
    assert between.memory_kind == memory


def test_replicas_held_neighbouring_parts() -> None:
    devices = list(reversed(jax.devices()))
    between, _ = find_intermediate_sharding(placed(*SOURCE, devices=devices), other_names("tp:4", None, "tp"))
    assert [device.id for device in devices_of(between)[:, 0, 0]] == [7, 6]
    assert [device.id for device in devices_of(between)[:, 3, 0]] == [1, 0]


def test_the_rank_may_exceed_the_specs() -> None:
    source, target = placed("a:4", "a"), other_names("b:2", None, "b")
    assert find_intermediate_sharding(source, target, 4)[0].spec == P("a_intermediate_split", None, None, None)
    with pytest.raises(NoIntermediateShardingError, match=r"P\(None, 'b'\) has 2 entries for an array of 1 dimensions"):
        find_intermediate_sharding(source, target, 1)


def test_parts_in_place_decide_the_choice() -> None:
    source = placed("a:2,b:2", "a", "b", None)  # device 2 a + b
    target = "x:2", None, None, "x"
    for devices, axis in (((0, 2), "b"), ((0, 1), "a")):
        on = [jax.devices()[device_index] for device_index in devices]
        assert find_intermediate_sharding(source, placed(*target, devices=on))[1] == [f"{axis}_intermediate_replica"]


def abstract(text: str, *partitions: Any) -> NamedSharding:
    return NamedSharding(mesh_shape(text), P(*partitions))


@pytest.mark.parametrize(
    ("source", "target", "match"),
    [
        (lambda: SingleDeviceSharding(jax.devices()[0]), lambda: placed("a:2", "a"), "two NamedShardings on devices"),
        (lambda: placed("a:2", "a"), lambda: P("a"), "two NamedShardings on devices"),
        (lambda: abstract("a:8", "a"), lambda: placed("b:2", None, "b"), "two NamedShardings on devices"),
        (
            lambda: placed("a:8", P.UNCONSTRAINED),
            lambda: placed("b:2", None, "b"),
            "leaves a dimension to the compiler",
        ),
        (
            lambda: NamedSharding(
                mesh_of("a:4,b:2", axis_type=AxisType.Explicit), P("a", None, unreduced=frozenset({"b"}))
            ),
            lambda: placed("b:2", None, "b"),
            "is unreduced or reduced",
        ),
        (
            lambda: placed("a:4,a_intermediate_split:2", "a"),
            lambda: placed("b:2", None, "b"),
            "already; rename it with rename_axes",
        ),
    ],
)
def test_unusable_shardings_are_refused(source: Callable[[], Any], target: Callable[[], Any], match: str) -> None:
    with pytest.raises(NoIntermediateShardingError, match=match):
        find_intermediate_sharding(source(), target())


# Brute force: cells of a grid as numpy masks, device by device.


def meshes() -> Iterator[Counts]:
    for axes in (1, 2, 3):
        for sizes in itertools.product(range(1, 9), repeat=axes):
            if 2 <= math.prod(sizes) <= 8 and sizes.count(1) <= (axes == 2):  # an axis of one device adds little
                yield sizes


def specs(axes: int, rank: int) -> Iterator[tuple[Counts, ...]]:
    """Every way to give axes, by index, to dimensions, in every order within one."""
    for where in itertools.product(range(rank + 1), repeat=axes):  # the last value: no dimension
        by_dim = [[axis for axis in range(axes) if where[axis] == dim] for dim in range(rank)]
        yield from itertools.product(*[itertools.permutations(axes_of_dim) for axes_of_dim in by_dim])


def targets(rank: int) -> Iterator[Counts]:
    return (counts for counts in itertools.product(range(1, 9), repeat=rank) if math.prod(counts) <= 8)


def where_of(sizes: Counts, spec: tuple[Counts, ...], coordinates: Counts) -> Counts:
    """Returns the part, along each dimension, that the device at some coordinates of the mesh holds."""
    parts = []
    for entry in spec:
        part = 0
        for axis in entry:
            part = part * sizes[axis] + coordinates[axis]
        parts.append(part)
    return tuple(parts)


def mask(grid: Counts, parts: Counts, where: Counts) -> Any:
    cells = np.zeros(grid, dtype=bool)
    cells[
        tuple(
            slice(index * size // many, (index + 1) * size // many)
            for size, many, index in zip(grid, parts, where, strict=True)
        )
    ] = True
    return cells


@attrs.frozen
class Question:
    """A source on devices 0, 1, ... and a destination on `devices`, in numbers."""

    sizes: Counts
    spec: tuple[Counts, ...]
    want: Counts
    devices: Counts

    @property
    def have(self) -> Counts:
        return tuple(math.prod(self.sizes[axis] for axis in entry) for entry in self.spec)

    @property
    def copies(self) -> int:
        return math.prod(self.have) // math.prod(self.want)

    def expected_error(self) -> str:
        have, want = self.have, self.want
        if max(have) % max(want):
            return "undividable"
        if math.prod(have) <= math.prod(want):
            return "not larger"
        if math.prod(have) % math.prod(want):
            return "not divisible"
        if any(math.gcd(*pair) > 1 for pair in zip(have, want, strict=True)):
            return "is needed"
        return "" if self.factors() else "no suitable dimension"

    def factors(self) -> list[Counts]:
        choices = [range(1, many + 1 if few == 1 else 2) for many, few in zip(self.have, self.want, strict=True)]
        return [
            chosen
            for chosen in itertools.product(*choices)
            if math.prod(chosen) == self.copies
            and not any(many % factor for many, factor in zip(self.have, chosen, strict=True))
        ]

    def fewest_axes(self, factors: Counts) -> int:
        used = [axis for entry in self.spec for axis in entry]
        for count in range(len(used) + 1):
            for axes in itertools.combinations(used, count):
                # Axes together can take a factor if, in each dimension, it divides their product.
                sizes = [math.prod(self.sizes[axis] for axis in entry if axis in axes) for entry in self.spec]
                if not any(size % factor for size, factor in zip(sizes, factors, strict=True)):
                    return count
        raise AssertionError(factors)

    def places(self) -> Iterator[tuple[int, Counts]]:
        for device_index, coordinates in enumerate(np.ndindex(*self.sizes)):
            yield device_index, where_of(self.sizes, self.spec, coordinates)

    def senders(self, factors: Counts) -> list[int]:
        """The first device of each group that gathers one part."""
        return [
            device_index
            for device_index, where in self.places()
            if not any(index % factor for index, factor in zip(where, factors, strict=True))
        ]

    def cost(self, factors: Counts) -> tuple[int, int]:
        grid = tuple(math.lcm(*pair) for pair in zip(self.have, self.want, strict=True))
        fewer = tuple(many // factor for many, factor in zip(self.have, factors, strict=True))
        old, gathered, new = {}, {}, {}
        for device_index, where in self.places():
            old[device_index] = mask(grid, self.have, where)
            gathered[device_index] = mask(
                grid, fewer, tuple(index // factor for index, factor in zip(where, factors, strict=True))
            )
        for device_index, where in zip(self.devices, np.ndindex(*self.want), strict=True):
            new[device_index] = mask(grid, self.want, where)
        kept = {device_index: gathered[device_index] for device_index in self.senders(factors)}
        nothing = np.zeros(grid, dtype=bool)
        moved = sum(int((gathered[device_index] & ~old[device_index]).sum()) for device_index in gathered)
        moved += sum(int((new[device_index] & ~kept.get(device_index, nothing)).sum()) for device_index in new)
        peak = 0
        for device_index in {**old, **new}:
            first = [old.get(device_index, nothing), gathered.get(device_index, nothing)]
            then = [old.get(device_index, nothing), kept.get(device_index, nothing), new.get(device_index, nothing)]
            peak = max(peak, *(sum(int(cells.sum()) for cells in step) for step in (first, then)))
        return moved, peak

    def shardings(self) -> tuple[NamedSharding, NamedSharding]:
        names = "abc"[: len(self.sizes)]
        own_devices = np.array(jax.devices()[: math.prod(self.sizes)]).reshape(self.sizes)
        others = np.array([jax.devices()[device_index] for device_index in self.devices]).reshape(self.want)
        source = NamedSharding(
            Mesh(own_devices, tuple(names)), P(*[tuple(names[axis] for axis in entry) for entry in self.spec])
        )
        axes = "xyz"[: len(self.want)]
        return source, NamedSharding(Mesh(others, tuple(axes)), P(*axes))


def questions() -> Iterator[Question]:
    refused: dict[tuple[Counts, Counts], None] = {}
    for rank in (1, 2, 3):
        new_counts = list(targets(rank))
        for sizes in meshes():
            for spec in specs(len(sizes), rank):
                for want in new_counts:
                    few = math.prod(want)
                    question = Question(sizes, spec, want, tuple(range(few)))
                    if not question.expected_error():
                        yield question
                        if len(question.factors()) > 1:
                            yield attrs.evolve(question, devices=tuple(range(8 - few, 8)))
                            yield attrs.evolve(question, devices=tuple(range(0, 8, 8 // few))[:few])
                    elif (question.have, want) not in refused:  # only the counts matter
                        refused[question.have, want] = None
                        yield question


def box(index: tuple[slice, ...], grid: Counts) -> tuple[tuple[int, int], ...]:
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, grid, strict=True))


def test_the_best_intermediate_is_chosen() -> None:
    refused_count = chosen_count = 0
    for question in questions():
        source, target = question.shardings()
        why = question.expected_error()
        if why:
            refused_count += 1
            with pytest.raises(NoIntermediateShardingError, match=why) as caught:
                find_intermediate_sharding(source, target)
            assert isinstance(caught.value, NoIntermediateShardingNeededError) == (why == "is needed")
            continue
        chosen_count += 1
        between, axes = find_intermediate_sharding(source, target)
        sizes = dict(between.mesh.shape)
        assert math.prod(sizes[axis] for axis in axes) == question.copies, question
        assert list(sizes)[: len(axes)] == axes
        grid = tuple(math.lcm(*pair) for pair in zip(question.have, question.want, strict=True))
        chosen = tuple(
            many // math.prod(between.mesh.shape[name] for name in names)
            for many, names in zip(question.have, named(between.spec, len(grid)), strict=True)
        )
        old = {device: box(index, grid) for device, index in source.devices_indices_map(grid).items()}
        new = {device: box(index, grid) for device, index in between.devices_indices_map(grid).items()}
        assert list(new) == list(devices_of(between).flat)
        assert sorted(device.id for device in new) == sorted(device.id for device in old)
        # No smaller factor leaves as few parts as the destination has, and this one leaves just as many.
        assert len(dict.fromkeys(new.values())) == math.prod(question.want)
        for device, inner in old.items():
            assert all(a <= c <= d <= b for (a, b), (c, d) in zip(new[device], inner, strict=True)), question
        senders = devices_of(between)[(0,) * len(axes)]
        assert sorted(device.id for device in senders.flat) == question.senders(chosen)
        kept_boxes = [new[device] for device in senders.flat]
        unused = math.prod(question.sizes) // math.prod(question.have)
        assert sorted(kept_boxes) == sorted(list(dict.fromkeys(new.values())) * unused)
        costs = {factors: question.cost(factors) for factors in question.factors()}
        best = min(costs.values())
        assert costs[chosen] == best, (question, chosen, costs)
        fewest = min(question.fewest_axes(factors) for factors, cost in costs.items() if cost == best)
        assert len(axes) == fewest, (question, axes)
    assert refused_count > 1000
    assert chosen_count > 1000


def named(spec: P, rank: int) -> list[tuple[str, ...]]:
    parts = [*spec.partitions, *[None] * (rank - len(spec.partitions))]
    return [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in parts]


# Arrays moved through an intermediate.

THROUGH = pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        (("fsdp:8,tp:1", "fsdp", "tp"), ("fsdp:1,tp:4", "fsdp", "tp"), (8, 8)),
        (("fsdp:8", "fsdp"), ("tp:4", None, "tp"), (8, 8)),
        (("a:4,b:2", ("a", "b")), ("x:4", None, "x"), (8, 4)),
        (("a:4,b:2", None, ("b", "a")), ("x:2,rep:2", "x"), (2, 8)),
        (("a:2,b:3", ("a", "b"), None), ("x:3", None, "x"), (6, 6)),  # the pairs are not along one axis
        (("a:2,c:2,b:2", ("b", "a"), "c", None), ("x:2", None, None, "x"), (4, 2, 6)),
        (("a:4,b:2", "a", "b"), ("x:1,rep:2",), (4, 2)),
        (("fsdp:4,rep:2", "fsdp"), ("x:2,y:2", None, "x"), (4, 4)),
        (("a:8", "a"), ("x:4", None, "x"), (8, 0)),
    ],
    ids=str,
)


@THROUGH
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("donate", [False, True])
def test_values_survive(source: Any, target: Any, shape: Counts, kind: AxisType, donate: bool) -> None:
    source, target = placed(*source, axis_type=kind), other_names(*target)
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    x = jax.device_put(values, source)
    moved = reshard_with_intermediate_sharding(x, source, target, donate=donate)
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, values)
    assert x.is_deleted() == donate
    if not donate:
        np.testing.assert_array_equal(x, values)


def test_values_survive_between_axis_types() -> None:
    types = (AxisType.Explicit, AxisType.Auto)
    source = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=types), P(("a", "b")))
    target = placed("x:4", None, "x", axis_type=AxisType.Explicit)
    values = np.arange(64).reshape(8, 8)
    moved = reshard_with_intermediate_sharding(jax.device_put(values, source), source, target)
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, values)


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "int4", "complex64", "key"])
def test_every_dtype(dtype: str) -> None:
    source, target = placed("fsdp:8", "fsdp"), other_names("tp:4", None, "tp")
    is_key = dtype == "key"
    values = jax.random.split(jax.random.key(0), (8, 4)) if is_key else (jnp.arange(64) % 5).astype(dtype).reshape(8, 8)
    x = jax.device_put(values, source)
    moved = reshard_with_intermediate_sharding(x, source, target)
    assert (moved.dtype, moved.sharding) == (x.dtype, target)
    if is_key:
        moved, x = jax.random.key_data(moved), jax.random.key_data(x)
    np.testing.assert_array_equal(moved, x)


@pytest.mark.parametrize(("old", "new"), [("pinned_host", "device"), ("device", "pinned_host")])
def test_kinds_of_memory(old: str, new: str) -> None:
    source = placed("fsdp:8", "fsdp").with_memory_kind(old)
    target = other_names("tp:4", None, "tp").with_memory_kind(new)
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    moved = reshard_with_intermediate_sharding(jax.device_put(values, source), source, target)
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, values)


def test_the_mesh_in_force_is_ignored() -> None:
    source, target = placed("fsdp:8", "fsdp", axis_type=AxisType.Explicit), other_names("tp:4", None, "tp")
    x = jax.device_put(np.arange(64).reshape(8, 8), source)
    with jax.set_mesh(create_mesh("data:4,model:2")):
        moved = reshard_with_intermediate_sharding(x, source, target)
    np.testing.assert_array_equal(moved, np.arange(64).reshape(8, 8))


def test_moves_to_disjoint_devices() -> None:
    (ended,) = run_processes(
        """
        from shardrules.moves.intermediate import *
        from jax.sharding import Mesh
        devices = np.array(jax.devices())
        square = NamedSharding(Mesh(devices[:8].reshape(4, 2), ("a", "b")), P("a", "b", None))
        far = NamedSharding(Mesh(devices[8:], ("x",)), P(None, None, "x"))
        print(find_intermediate_sharding(square, far)[1])  # of equals the last axis is split
        here = NamedSharding(Mesh(devices[:8].reshape(8, 1), ("fsdp", "tp")), P("fsdp", "tp"))
        there = NamedSharding(Mesh(devices[8:].reshape(1, 4), ("fsdp", "tp")), P("fsdp", "tp"))
        values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
        x = jax.device_put(values, here)
        sent = []

        def send(arrays, shardings, *, donate):
            sent.extend([[shard.device.id, shard.data.shape] for shard in array.addressable_shards] for array in arrays)
            return jax.device_put(arrays, shardings, donate=donate)

        for moved in (
            reshard_with_intermediate_sharding(x, here, there),
            reshard_with_intermediate_sharding_generic(x, here, there, jax_array_reshard_fn=send),
        ):
            print(moved.sharding == there, np.array_equal(moved, values), np.array_equal(x, values))
            print([[shard.device.id, shard.data.shape] for shard in moved.addressable_shards])
        print(sent)
        """,
        processes=1,
        devices=12,
    )
    columns = f"{[[device, (8, 2)] for device in (8, 9, 10, 11)]}"
    rows = f"{[[[device, (2, 8)] for device in (0, 2, 4, 6)]]}"
    assert printed_lines(ended) == ["['b_intermediate_replica']"] + ["True True True", columns] * 2 + [rows]


def test_shardings_may_be_prefixes() -> None:
    rows, target = placed("fsdp:8", "fsdp"), other_names("tp:4", None, "tp")
    cube, small = placed("a:4,b:2", None, "a", "b"), other_names("x:2", "x")
    put = jax.device_put
    tree = {
        "rows": {"w": put(jnp.ones((8, 8)), rows), "v": put(jnp.arange(32).reshape(8, 4), rows)},
        "cube": put(jnp.arange(64).reshape(2, 4, 8), cube),
        "act": jax.nn.relu,
        "none": None,
    }
    ins = {"rows": rows, "cube": cube, "act": rows, "none": None}
    outs = {"rows": target, "cube": small, "act": target, "none": None}
    moved = reshard_with_intermediate_sharding(tree, ins, outs)
    assert (moved["act"], moved["none"]) == (jax.nn.relu, None)
    assert moved["rows"]["w"].sharding == moved["rows"]["v"].sharding == target
    assert moved["cube"].sharding == small
    for new, old in zip(jax.tree.leaves(moved), jax.tree.leaves(tree), strict=True):
        if isinstance(old, jax.Array):
            np.testing.assert_array_equal(new, old)


def test_many_arrays_take_several_programs() -> None:
    source, target = placed("fsdp:2", "fsdp"), placed("tp:1,x:1")
    arrays = [jax.device_put(np.full((2,), device_index), source) for device_index in range(101)]
    moved = reshard_with_intermediate_sharding([*arrays, arrays[0]], source, target, donate=True)
    assert [int(array[1]) for array in moved] == [*range(101), 0]
    assert all(array.is_deleted() for array in arrays)


def test_nothing_is_compiled_twice(caplog: pytest.LogCaptureFixture) -> None:
    source, target = placed("fsdp:8", "fsdp"), other_names("tp:4", None, "tp")
    x = jax.device_put(np.ones((8, 44)), source)  # a shape that no other test has
    with jax.log_compiles():
        reshard_with_intermediate_sharding(x, source, target)
        assert "jit(_identity)" in caplog.text
        caplog.clear()
        reshard_with_intermediate_sharding(x, source, target)
        assert "Compiling" not in caplog.text


def test_equivalent_in_shardings_are_accepted() -> None:
    x = jax.device_put(np.arange(64).reshape(8, 8), placed("data:8", "data"))
    target = other_names("tp:4", None, "tp")
    moved = reshard_with_intermediate_sharding(x, placed("fsdp:4,tp:2", ("fsdp", "tp"), None), target)
    np.testing.assert_array_equal(moved, x)


# The generic form.


def test_transfers_get_the_first_copy_to_donate() -> None:
    source, target = placed("fsdp:4,rep:2", "fsdp"), other_names("x:2", None, "x")
    x = jax.device_put(np.arange(16).reshape(4, 4), source)
    got: list[Any] = []

    def send(arrays: list[jax.Array], shardings: list[Sharding], *, donate: bool) -> list[jax.Array]:
        (array,) = arrays
        assert isinstance(array.sharding, NamedSharding)
        got.append((dict(array.sharding.mesh.shape), [device.id for device in devices_of(array.sharding).flat], donate))
        host = np.asarray(array)
        array.delete()
        return [jax.device_put(host, shardings[0])]

    moved = reshard_with_intermediate_sharding_generic({"w": x}, source, target, jax_array_reshard_fn=send)
    axes = {"fsdp_intermediate_replica": 1, "fsdp_intermediate_split": 2, "rep": 2}
    assert got == [(axes, [0, 1, 4, 5], True)]
    assert moved["w"].sharding == target
    np.testing.assert_array_equal(moved["w"], x)


@pytest.mark.parametrize("may_alias", [None, True, False])
@pytest.mark.parametrize("goes_directly", [False, True])
def test_results_share_memory_with_arguments_unless_told_not_to(goes_directly: bool, may_alias: bool | None) -> None:
    source = placed("fsdp:8", "fsdp")
    target = source if goes_directly else other_names("tp:4", None, "tp")
    x = jax.device_put(np.arange(64).reshape(8, 8), source)
    arguments: list[Any] = []

    def send(arrays: list[jax.Array], shardings: list[Sharding], *, donate: bool, **kwargs: Any) -> list[jax.Array]:
        arguments.append(kwargs)
        return jax.device_put(arrays, shardings, donate=donate)

    moved = reshard_with_intermediate_sharding_generic(
        x, source, target, jax_array_reshard_fn=send, may_alias=may_alias, retries=3
    )
    assert arguments == [{"retries": 3}]
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, x)
    is_shared = any(name in [*buffers_of(x)] for name in buffers_of(moved))
    assert is_shared == (goes_directly and may_alias is not False)


def test_wrong_transfers_raise() -> None:
    source, target = placed("fsdp:8", "fsdp"), other_names("tp:4", None, "tp")
    x = jax.device_put(np.arange(64).reshape(8, 8), source)
    with pytest.raises(MeshError, match=r"jax_array_reshard_fn must return \(8, 8\) in Named"):
        reshard_with_intermediate_sharding_generic(
            x, source, target, jax_array_reshard_fn=lambda arrays, shardings, donate: arrays
        )


# What is refused.


@pytest.mark.parametrize("donate", [False, True])
def test_arrays_without_intermediate_go_directly(donate: bool) -> None:
    source = placed("fsdp:8", "fsdp")
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    tree = {name: jax.device_put(values + 0, source) for name in "abc"}  # three arrays: XLA may share what numpy made
    outs = {"a": other_names("tp:4", None, "tp"), "b": other_names("tp:4", "tp"), "c": source}
    moved = reshard_with_intermediate_sharding(tree, source, outs, donate=donate)
    for name, array in moved.items():
        assert array.sharding == outs[name]
        np.testing.assert_array_equal(array, values)
    assert moved["c"] is tree["c"]
    assert {name: array.is_deleted() for name, array in tree.items()} == {"a": donate, "b": donate, "c": False}


def test_tied_arrays_are_freed_once() -> None:
    source = placed("fsdp:8", "fsdp")
    x = jax.device_put(np.ones((8, 8)), source)
    outs = [other_names("tp:4", None, "tp"), other_names("tp:4", "tp")]
    moved = reshard_with_intermediate_sharding([x, x], source, outs, donate=True)
    assert [array.sharding for array in moved] == outs
    assert x.is_deleted()


def test_uneven_parts_are_refused() -> None:
    source, target = placed("fsdp:8", "fsdp"), other_names("tp:4", None, "tp")
    x = jax.device_put(np.ones((8, 6)), source)
    with pytest.raises(PlanError, match=r"^reshard_with_interm(?s:.)*b \(8, 6\): .*tp size 4: dimension 1 is 6"):
        reshard_with_intermediate_sharding({"b": x}, source, target)


def deleted(sharding: NamedSharding) -> jax.Array:
    array = jax.device_put(np.ones((8, 8)), sharding)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        (lambda source: np.ones((8, 8)), "w: it is a ndarray, not a JAX array"),
        (lambda source: 1.5, "w: it is a float, not a JAX array"),
        (deleted, r"w \(8, 8\): it has been deleted"),
        (
            lambda source: jnp.ones((8, 8)),
            r"w \(8, 8\): its sharding is SingleDeviceSharding.*in_sharding is NamedSharding",
        ),
        (
            lambda source: jax.device_put(np.ones((8, 8)), placed("fsdp:8", None, "fsdp")),
            "its sharding is NamedSharding",
        ),
        (
            lambda source: jax.device_put(np.ones((8, 8)), source.with_memory_kind("pinned_host")),
            "its sharding is NamedSharding",
        ),
    ],
)
def test_in_sharding_must_match(leaf: Callable[[NamedSharding], Any], match: str) -> None:
    source, target = placed("fsdp:8", "fsdp"), other_names("tp:4", None, "tp")
    tree = {"sound": jax.device_put(np.ones((8, 8)), source), "w": leaf(source)}
    with pytest.raises(TreeError, match=match) as caught:
        reshard_with_intermediate_sharding(tree, source, target)
    assert "sound" not in str(caught.value)


def test_traced_arrays_are_refused() -> None:
    source, target = placed("fsdp:8", "fsdp"), other_names("tp:4", None, "tp")
    x = jax.device_put(np.ones((8, 8)), source)
    with pytest.raises(TreeError, match="it is being traced"):
        jax.jit(lambda x: reshard_with_intermediate_sharding(x, source, target))(x)


def test_shardings_must_be_prefixes() -> None:
    source, target = placed("fsdp:8", "fsdp"), other_names("tp:4", None, "tp")
    x = jax.device_put(np.ones((8, 8)), source)
    for ins, outs in (({"v": source}, target), (source, [target, target]), (source, None)):
        with pytest.raises(ValueError, match=r"or of a prefix of it|must contain only"):
            reshard_with_intermediate_sharding({"w": x}, ins, outs)


def test_arrays_that_share_memory_are_freed_together() -> None:
    source, target = placed("fsdp:8", "fsdp", None), other_names("tp:4", None, "tp")
    x = jax.device_put(np.arange(64.0).reshape(8, 8), source)
    same = jax.device_put(x, placed("fsdp:8", "fsdp"))  # another array of the same shards
    moved = reshard_with_intermediate_sharding({"a": x, "b": same}, source, target, donate=True)
    for array in moved.values():
        np.testing.assert_array_equal(array, np.arange(64.0).reshape(8, 8))
    kept = jax.device_put(moved["a"], other_names("tp:4", None, "tp"))
    np.testing.assert_array_equal(kept, moved["b"])


def test_other_leaves_need_no_sharding() -> None:
    source, target = placed("fsdp:8", "fsdp"), other_names("tp:4", None, "tp")
    x = jax.device_put(np.arange(64.0).reshape(8, 8), source)
    moved = reshard_with_intermediate_sharding(
        {"f": jnp.tanh, "w": x}, {"f": None, "w": source}, {"f": None, "w": target}
    )
    assert moved["f"] is jnp.tanh
    assert moved["w"].sharding == target
