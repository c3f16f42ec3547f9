"""Layouts of meshes: pods and slices that are only descriptions, against all possible layouts."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import attrs
import jax
import numpy as np
import pytest

import shardrules as sr
from shardrules.mesh.layout import outer_shapes

NAMES = "abcd"


def cpus(count: int, *, processes: int = 1, slices: int = 1) -> list[sr.meshes.DeviceInfo]:
    """Devices without a torus, numbered process after process and slice after slice."""
    return [
        sr.meshes.DeviceInfo(
            index,
            process_index=index // (count // processes),
            slice_index=index // (count // slices) if slices > 1 else None,
        )
        for index in range(count)
    ]


def tpus(*bounds: int, kind: str, cores: int = 1, slices: int = 1) -> list[sr.meshes.DeviceInfo]:
    """The chips of slices of a TPU pod, four to a host, x fastest."""
    chips: list[sr.meshes.DeviceInfo] = []
    for slice_index in range(slices):
        for z, y, x, core in itertools.product(*map(range, reversed(bounds)), range(cores)):
            chips.append(
                sr.meshes.DeviceInfo(
                    len(chips),
                    process_index=len(chips) // (4 * cores),
                    slice_index=slice_index,
                    coords=(x, y, z),
                    core_on_chip=core,
                    platform="tpu",
                    device_kind=kind,
                )
            )
    return chips


def spans(layout: sr.meshes.Layout, granule_of: dict[int, int]) -> tuple[int, ...]:
    """The number of granules that each axis spans: in a sound layout the same on every line along it."""
    counts = []
    for dim in range(layout.ids.ndim):
        lines = np.moveaxis(layout.ids, dim, -1).reshape(-1, layout.ids.shape[dim])
        line_counts = {len({granule_of[int(device)] for device in line}) for line in lines}
        assert len(line_counts) == 1
        counts += line_counts
    return tuple(counts)


def test_a_description_agrees_with_the_device() -> None:
    for device in jax.devices():
        info = sr.meshes.DeviceInfo.of(device)
        assert (info.id, info.process_index, info.platform) == (device.id, device.process_index, device.platform)
        assert info.device_kind == device.device_kind
        assert sr.meshes.DeviceInfo.of(info) == info


def test_a_tpu_needs_coords() -> None:
    with pytest.raises(sr.errors.MeshError, match="device 3 is a TPU without coords"):
        sr.meshes.DeviceInfo(3, platform="tpu")


def divisors(size: int) -> list[int]:
    return [part for part in range(1, size + 1) if size % part == 0]


def brute_force(shape: tuple[int, ...], granules: int) -> set[tuple[int, ...]]:
    return {outer for outer in itertools.product(*map(divisors, shape)) if math.prod(outer) == granules}


def test_outer_shapes_are_complete_and_in_order() -> None:
    for rank in (1, 2, 3):
        for shape in itertools.product((1, 2, 3, 4, 6, 8), repeat=rank):
            for granules in (1, 2, 3, 4, 6, 8, 12):
                outer = list(outer_shapes(shape, granules))
                assert outer == sorted(brute_force(shape, granules), reverse=True)


def random_job(seed: int) -> tuple[tuple[int, ...], list[sr.meshes.DeviceInfo], int, tuple[int, ...] | None]:
    """A mesh, devices, the number of their granules, and perhaps `dcn_mesh_dims`, sensible or not."""
    rng = random.Random(seed)
    shape = tuple(rng.choice((1, 2, 2, 3, 4, 4, 6, 8)) for _ in range(rng.randint(1, 4)))
    count = math.prod(shape)
    parts = divisors(count)
    slices = rng.choice(parts[: max(1, len(parts) - 1)])
    processes = slices * rng.choice(divisors(count // slices))
    devices = cpus(count, processes=processes, slices=slices)
    rng.shuffle(devices)
    granules = slices if slices > 1 else processes
    if rng.random() < 0.5:
        return shape, devices, granules, None
    dcn_mesh_dims = list(rng.choice(sorted(brute_force(shape, granules))))
    for _ in range(rng.choice((0, 0, 1, 2))):
        dcn_mesh_dims[rng.randrange(len(dcn_mesh_dims))] = rng.choice((-1, -1, 0, 1, 2, 3))
    return shape, devices, granules, tuple(dcn_mesh_dims)


def possible_outer(shape: tuple[int, ...], granules: int, dcn_mesh_dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every layout that `dcn_mesh_dims` could mean."""
    if dcn_mesh_dims.count(-1) > 1:
        return []
    return [
        outer
        for outer in brute_force(shape, granules)
        if all(requested in (-1, part) for requested, part in zip(dcn_mesh_dims, outer, strict=True))
    ]


@pytest.mark.sample(70)
@pytest.mark.parametrize("seed", range(200))
def test_a_layout_is_as_requested_or_the_error_lists_others(seed: int) -> None:
    shape, devices, granules, dcn_mesh_dims = random_job(seed)
    names = NAMES[: len(shape)]
    possible = brute_force(shape, granules) if dcn_mesh_dims is None else possible_outer(shape, granules, dcn_mesh_dims)
    if not possible:
        with pytest.raises(sr.errors.MeshError, match="these work: ") as caught:
            sr.meshes.lay_out(shape, names, devices, dcn_mesh_dims=dcn_mesh_dims)
        listing = str(caught.value).rpartition("these work: ")[2]
        suggested = eval(f"[{listing}]")
        assert suggested
        assert set(suggested) <= brute_force(shape, granules)
        sr.meshes.lay_out(shape, names, devices, dcn_mesh_dims=suggested[0])
        return
    layout = sr.meshes.lay_out(shape, names, devices, dcn_mesh_dims=dcn_mesh_dims)
    assert layout.ids.shape == shape
    assert sorted(layout.ids.flat) == list(range(len(devices)))
    assert layout.outer in possible
    by_slice = any(device.slice_index for device in devices)
    granule_of = {device.id: (device.slice_index or 0) if by_slice else device.process_index for device in devices}
    assert spans(layout, granule_of) == layout.outer
    assert layout.granule == (None if granules == 1 else "slice" if by_slice else "process")


@pytest.mark.parametrize(
    ("shape", "devices", "outer"),
    [
        ((2, 4, 4), cpus(32, slices=4), (1, 4, 1)),  # slices go to the first axis that they divide
        ((2, 3, 4), cpus(24, slices=6), (2, 3, 1)),  # and are spread where there is none
        ((3, 2, 2), cpus(12, slices=4), (1, 2, 2)),
        ((2, 8), cpus(16, processes=8), (2, 4)),  # processes go to the first axes
        ((8,), jax.devices(), (1,)),
    ],
    ids=["divided", "spread", "spread over two", "processes", "jax"],
)
def test_granules_go_to_the_first_axes(shape: tuple[int, ...], devices: Any, outer: tuple[int, ...]) -> None:
    assert sr.meshes.lay_out(shape, NAMES[: len(shape)], devices).outer == outer


def test_processes_of_different_sizes_are_in_order() -> None:
    layout = sr.meshes.lay_out((3, 2), "ab", cpus(8, processes=2)[:6])
    assert layout.ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (layout.outer, layout.granule) == ((2, 1), "process")
    with pytest.raises(sr.errors.MeshError, match="the processes hold 4, 2 devices"):
        sr.meshes.lay_out((3, 2), "ab", cpus(8, processes=2)[:6], dcn_mesh_dims=(-1, 1))


@pytest.mark.parametrize(
    ("shape", "names", "devices", "match"),
    [
        ((3, 3), "ab", cpus(8, slices=2), "the sizes multiply to 9"),
        ((2, 4), ("a",), cpus(8), "one name for each size"),
        ((8,), ("a",), range(8), r"a mesh needs devices, got 0; jax\.devices\(\) lists them"),
        (8, ("a",), cpus(8), "must be a tuple of integers, got 8"),
        ((8,), "a", [attrs.evolve(info, slice_index=int(info.id > 4)) for info in cpus(8)], "the slices hold 5, 3"),
    ],
    ids=str,
)
def test_invalid_layouts_raise(shape: Any, names: Any, devices: Any, match: str) -> None:
    with pytest.raises(sr.errors.MeshError, match=match):
        sr.meshes.lay_out(shape, names, devices)


@pytest.mark.parametrize(("rank", "words"), [(2, "these work: "), (3, "these and others work: ")])
def test_a_long_list_of_layouts_is_cut(rank: int, words: str) -> None:
    shape = (8,) * rank  # eight slices go over two axes in 4 ways, and over three in 10
    with pytest.raises(sr.errors.MeshError, match=f"over 8 slices {words}") as caught:
        sr.meshes.lay_out(shape, NAMES[:rank], cpus(math.prod(shape), slices=8), dcn_mesh_dims=(3,) * rank)
    assert len(eval(f"[{str(caught.value).rpartition('work: ')[2]}]")) == (4 if rank == 2 else 8)


def test_granules_by_index_or_in_device_order() -> None:
    devices = cpus(4, processes=2)[::-1]
    assert sr.meshes.lay_out((2, 2), "ab", devices).ids.tolist() == [[1, 0], [3, 2]]
    assert sr.meshes.lay_out((2, 2), "ab", devices, should_sort_granules_by_key=False).ids.tolist() == [[3, 2], [1, 0]]


@pytest.mark.parametrize(
    ("devices", "shape"),
    [
        (tpus(4, 4, 4, kind="TPU v4"), (4, 16)),
        (tpus(4, 4, 4, kind="TPU v4"), (64,)),
        (tpus(8, 8, 4, kind="TPU v5"), (16, 16)),
        (tpus(4, 4, 1, kind="TPU v5 lite"), (2, 8)),
        (tpus(2, 2, 1, kind="TPU v3", cores=2), (2, 4)),
    ],
    ids=str,
)
def test_a_torus_is_followed_over_its_processes(devices: list[sr.meshes.DeviceInfo], shape: tuple[int, ...]) -> None:
    layout = sr.meshes.lay_out(shape, NAMES[: len(shape)], devices)
    assert layout.ids.shape == shape
    assert sorted(layout.ids.flat) == list(range(len(devices)))
    assert layout.granule is None


def test_neighbours_in_a_mesh_are_neighbours_in_the_torus() -> None:
    devices = tpus(4, 4, 4, kind="TPU v4")
    coords = {device.id: device.coords or () for device in devices}
    layout = sr.meshes.lay_out((4, 16), "ab", devices)
    # The first axis is one axis of the torus: one step along it is one hop, round the ring.
    for column in layout.ids.T:
        for device, neighbour in zip(column, np.roll(column, 1), strict=True):
            steps = [abs(a - b) for a, b in zip(coords[int(device)], coords[int(neighbour)], strict=True)]
            assert sum(min(step, 4 - step) for step in steps) == 1


def test_each_slice_is_laid_out_along_its_torus() -> None:
    devices = tpus(2, 2, 4, kind="TPU v4", slices=2)
    layout = sr.meshes.lay_out((4, 8), "ab", devices, dcn_mesh_dims=(2, 1))
    single = sr.meshes.lay_out((2, 8), "ab", tpus(2, 2, 4, kind="TPU v4"))
    assert layout.ids[:2].tolist() == single.ids.tolist()
    assert layout.ids[2:].tolist() == (single.ids + 16).tolist()
    assert layout.granule == "slice"
    by_process = sr.meshes.lay_out((4, 4), "ab", tpus(4, 4, 1, kind="TPU v4"), dcn_mesh_dims=(-1, 1))
    assert (by_process.outer, by_process.granule) == ((4, 1), "process")


def test_splitting_an_axis_of_a_torus_can_be_forbidden() -> None:
    devices = tpus(4, 4, 4, kind="TPU v4")
    assert sr.meshes.lay_out((2, 32), "ab", devices).ids.shape == (2, 32)
    with pytest.raises(sr.errors.MeshError, match="allow_split_physical_axes=True"):
        sr.meshes.lay_out((2, 32), "ab", devices, allow_split_physical_axes=False)


def host_shapes(shape: tuple[int, ...], local: int) -> list[tuple[int, ...]]:
    return [host for host in itertools.product(*map(divisors, shape)) if math.prod(host) == local]


def shapes(size: int, rank: int) -> Iterator[tuple[int, ...]]:
    """Every shape with this number of devices and axes."""
    if rank == 1:
        yield (size,)
        return
    for first in range(1, size + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in shapes(size // first, rank - 1))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_host_shapes_take_the_first_axes_first(rank: int) -> None:
    for size in range(1, 65):
        for shape, processes in itertools.product(shapes(size, rank), range(1, size + 1)):
            if size % processes == 0:
                host = sr.meshes.calculate_host_mesh_shape(shape, size // processes, processes)
                assert host == min(host_shapes(shape, size // processes))


@pytest.mark.parametrize("arguments", [((2, 4), 4, 4), ((2, 4), 3, 2), ((2, 0), 1, 1), ((8,), 8, 0)], ids=str)
def test_a_mesh_of_another_size_has_no_host_shape(arguments: Any) -> None:
    with pytest.raises(sr.errors.MeshError, match=r"Mesh size .* doesn't match available devices"):
        sr.meshes.calculate_host_mesh_shape(*arguments)
