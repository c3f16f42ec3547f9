"""Layouts of meshes: pods and slices that are descriptions only, against every layout there could be."""

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
    """Devices without a torus, numbered through, process after process and slice after slice."""
    return [
        sr.meshes.DeviceInfo(
            number,
            process_index=number // (count // processes),
            slice_index=number // (count // slices) if slices > 1 else None,
        )
        for number in range(count)
    ]


def tpus(*bounds: int, kind: str, cores: int = 1, slices: int = 1) -> list[sr.meshes.DeviceInfo]:
    """The chips of slices of a TPU pod, four to a host, x fastest."""
    found: list[sr.meshes.DeviceInfo] = []
    for number in range(slices):
        for z, y, x, core in itertools.product(*map(range, reversed(bounds)), range(cores)):
            found.append(
                sr.meshes.DeviceInfo(
                    len(found),
                    process_index=len(found) // (4 * cores),
                    slice_index=number,
                    coords=(x, y, z),
                    core_on_chip=core,
                    platform="tpu",
                    device_kind=kind,
                )
            )
    return found


def spans(layout: sr.meshes.Layout, granule_of: dict[int, int]) -> tuple[int, ...]:
    """How many granules one meets along each axis: in a sound layout the same on every line of it."""
    found = []
    for dim in range(layout.ids.ndim):
        lines = np.moveaxis(layout.ids, dim, -1).reshape(-1, layout.ids.shape[dim])
        met = {len({granule_of[int(device)] for device in line}) for line in lines}
        assert len(met) == 1
        found += met
    return tuple(found)


def test_what_is_read_of_a_device_is_what_jax_says() -> None:
    for device in jax.devices():
        info = sr.meshes.DeviceInfo.of(device)
        assert (info.id, info.process_index, info.platform) == (device.id, device.process_index, device.platform)
        assert info.device_kind == device.device_kind
        assert sr.meshes.DeviceInfo.of(info) == info


def test_a_description_that_no_device_has_is_refused() -> None:
    with pytest.raises(sr.errors.MeshError, match="device 3 is a TPU without coords"):
        sr.meshes.DeviceInfo(3, platform="tpu")


def divisors(size: int) -> list[int]:
    return [part for part in range(1, size + 1) if size % part == 0]


def brute_force(shape: tuple[int, ...], granules: int) -> set[tuple[int, ...]]:
    return {outer for outer in itertools.product(*map(divisors, shape)) if math.prod(outer) == granules}


def test_outer_shapes_are_all_there_are_the_first_axes_first() -> None:
    for rank in (1, 2, 3):
        for shape in itertools.product((1, 2, 3, 4, 6, 8), repeat=rank):
            for granules in (1, 2, 3, 4, 6, 8, 12):
                found = list(outer_shapes(shape, granules))
                assert found == sorted(brute_force(shape, granules), reverse=True)


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
    asked = list(rng.choice(sorted(brute_force(shape, granules))))
    for _ in range(rng.choice((0, 0, 1, 2))):
        asked[rng.randrange(len(asked))] = rng.choice((-1, -1, 0, 1, 2, 3))
    return shape, devices, granules, tuple(asked)


def works(shape: tuple[int, ...], granules: int, asked: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every layout that `dcn_mesh_dims` could mean."""
    if asked.count(-1) > 1:
        return []
    return [
        outer
        for outer in brute_force(shape, granules)
        if all(one in (-1, part) for one, part in zip(asked, outer, strict=True))
    ]


@pytest.mark.parametrize("seed", range(200))
def test_a_mesh_is_of_the_sizes_asked_for_or_an_error_says_what_works(seed: int) -> None:
    shape, devices, granules, asked = random_job(seed)
    names = NAMES[: len(shape)]
    possible = brute_force(shape, granules) if asked is None else works(shape, granules, asked)
    if not possible:
        with pytest.raises(sr.errors.MeshError, match="these work: ") as caught:
            sr.meshes.lay_out(shape, names, devices, dcn_mesh_dims=asked)
        listed = str(caught.value).rpartition("these work: ")[2]
        named = eval(f"[{listed}]")
        assert named
        assert set(named) <= brute_force(shape, granules)
        sr.meshes.lay_out(shape, names, devices, dcn_mesh_dims=named[0])
        return
    layout = sr.meshes.lay_out(shape, names, devices, dcn_mesh_dims=asked)
    assert layout.ids.shape == shape
    assert sorted(layout.ids.flat) == list(range(len(devices)))
    assert layout.outer in possible
    by_slice = any(device.slice_index for device in devices)
    granule_of = {device.id: (device.slice_index or 0) if by_slice else device.process_index for device in devices}
    assert spans(layout, granule_of) == layout.outer
    assert layout.granule == (None if granules == 1 else "slice" if by_slice else "process")


def test_the_random_jobs_are_of_all_kinds() -> None:
    jobs = [random_job(seed) for seed in range(200)]
    refused = [asked is not None and not works(shape, granules, asked) for shape, _, granules, asked in jobs]
    assert sum(refused) >= 20
    assert sum(asked is not None and not no for (*_, asked), no in zip(jobs, refused, strict=True)) >= 40
    assert sum(any(device.slice_index for device in devices) for _, devices, *_ in jobs) >= 40


def test_slices_go_to_the_first_axis_that_they_divide() -> None:
    assert sr.meshes.lay_out((2, 4, 4), "abc", cpus(32, slices=4)).outer == (1, 4, 1)


def test_slices_are_split_over_axes_where_none_is_divisible() -> None:
    assert sr.meshes.lay_out((2, 3, 4), "abc", cpus(24, slices=6)).outer == (2, 3, 1)
    assert sr.meshes.lay_out((3, 2, 2), "abc", cpus(12, slices=4)).outer == (1, 2, 2)


def test_processes_go_to_the_first_axes() -> None:
    assert sr.meshes.lay_out((2, 8), "ab", cpus(16, processes=8)).outer == (2, 4)


def test_processes_with_different_numbers_of_devices_are_taken_in_their_order() -> None:
    layout = sr.meshes.lay_out((3, 2), "ab", cpus(8, processes=2)[:6])
    assert layout.ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (layout.outer, layout.granule) == ((2, 1), "process")
    with pytest.raises(sr.errors.MeshError, match="the processes hold 4, 2 devices"):
        sr.meshes.lay_out((3, 2), "ab", cpus(8, processes=2)[:6], dcn_mesh_dims=(-1, 1))


def test_what_gpus_say_of_coordinates_is_no_torus() -> None:
    gpus = [
        sr.meshes.DeviceInfo(number, process_index=number // 4, slice_index=0, coords=(number % 4,), platform="gpu")
        for number in range(8)
    ]
    layout = sr.meshes.lay_out((2, 4), "ab", gpus)
    assert (layout.outer, layout.granule) == ((2, 1), "process")


def test_devices_of_jax_are_described() -> None:
    assert sr.meshes.lay_out((8,), ("a",), jax.devices()).ids.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("shape", "names", "devices", "match"),
    [
        ((3, 3), "ab", cpus(8, slices=2), "the sizes that are given multiply to 9"),
        ((2, 4), ("a",), cpus(8), "one name for each size"),
        ((8,), ("a",), range(8), r"a mesh is made of devices, got 0: jax\.devices\(\) lists them"),
        (8, ("a",), cpus(8), "a tuple of integers is wanted, got 8"),
    ],
    ids=str,
)
def test_what_is_no_layout_is_refused(shape: Any, names: Any, devices: Any, match: str) -> None:
    with pytest.raises(sr.errors.MeshError, match=match):
        sr.meshes.lay_out(shape, names, devices)


@pytest.mark.parametrize(("rank", "words"), [(2, "these work: "), (3, "these and others work: ")])
def test_a_list_of_what_works_says_where_it_is_cut(rank: int, words: str) -> None:
    shape = (8,) * rank  # eight slices go over two axes in 4 ways, and over three in 10
    with pytest.raises(sr.errors.MeshError, match=f"over 8 slices {words}") as caught:
        sr.meshes.lay_out(shape, NAMES[:rank], cpus(math.prod(shape), slices=8), dcn_mesh_dims=(3,) * rank)
    assert len(eval(f"[{str(caught.value).rpartition('work: ')[2]}]")) == (4 if rank == 2 else 8)


def test_granules_by_number_or_in_the_order_of_the_devices() -> None:
    devices = cpus(4, processes=2)[::-1]
    assert sr.meshes.lay_out((2, 2), "ab", devices).ids.tolist() == [[1, 0], [3, 2]]
    assert sr.meshes.lay_out((2, 2), "ab", devices, should_sort_granules_by_key=False).ids.tolist() == [[3, 2], [1, 0]]


def test_granules_of_different_sizes_are_refused() -> None:
    devices = [attrs.evolve(device, slice_index=int(device.id > 4)) for device in cpus(8)]
    with pytest.raises(sr.errors.MeshError, match="the slices hold 5, 3 devices"):
        sr.meshes.lay_out((8,), "a", devices)


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
def test_one_torus_is_followed_over_all_its_processes(
    devices: list[sr.meshes.DeviceInfo], shape: tuple[int, ...]
) -> None:
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
        for here, there in zip(column, np.roll(column, 1), strict=True):
            far = [abs(a - b) for a, b in zip(coords[int(here)], coords[int(there)], strict=True)]
            assert sum(min(step, 4 - step) for step in far) == 1


def test_slices_of_a_pod_are_laid_out_each_along_its_torus() -> None:
    devices = tpus(2, 2, 4, kind="TPU v4", slices=2)
    layout = sr.meshes.lay_out((4, 8), "ab", devices, dcn_mesh_dims=(2, 1))
    one = sr.meshes.lay_out((2, 8), "ab", tpus(2, 2, 4, kind="TPU v4"))
    assert layout.ids[:2].tolist() == one.ids.tolist()
    assert layout.ids[2:].tolist() == (one.ids + 16).tolist()
    assert layout.granule == "slice"


def test_processes_of_a_torus_can_be_asked_for() -> None:
    devices = tpus(4, 4, 1, kind="TPU v4")
    layout = sr.meshes.lay_out((4, 4), "ab", devices, dcn_mesh_dims=(-1, 1))
    assert (layout.outer, layout.granule) == ((4, 1), "process")


def test_an_axis_of_a_torus_is_split_only_where_that_is_allowed() -> None:
    devices = tpus(4, 4, 4, kind="TPU v4")
    assert sr.meshes.lay_out((2, 32), "ab", devices).ids.shape == (2, 32)
    with pytest.raises(sr.errors.MeshError, match="allow_split_physical_axes=True"):
        sr.meshes.lay_out((2, 32), "ab", devices, allow_split_physical_axes=False)


def host_shapes(shape: tuple[int, ...], local: int) -> list[tuple[int, ...]]:
    return [host for host in itertools.product(*map(divisors, shape)) if math.prod(host) == local]


def shapes(size: int, rank: int) -> Iterator[tuple[int, ...]]:
    """Every shape of that many devices and axes."""
    if rank == 1:
        yield (size,)
        return
    for first in range(1, size + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in shapes(size // first, rank - 1))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_host_shapes_are_found_whenever_there_is_one(rank: int) -> None:
    for size in range(1, 65):
        for shape, processes in itertools.product(shapes(size, rank), range(1, size + 1)):
            if size % processes == 0:
                found = sr.meshes.calculate_host_mesh_shape(shape, size // processes, processes)
                assert found == min(host_shapes(shape, size // processes))


@pytest.mark.parametrize("given", [((2, 4), 4, 4), ((2, 4), 3, 2), ((2, 0), 1, 1), ((8,), 8, 0)], ids=str)
def test_a_mesh_of_another_size_has_no_host_shape(given: Any) -> None:
    with pytest.raises(sr.errors.MeshError, match=r"Mesh size .* doesn't match available devices"):
        sr.meshes.calculate_host_mesh_shape(*given)
