"""Random arrays between random shardings, both ways in which arrays move, and a check of every shard of the result."""

import contextlib
import importlib
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, final

import attrs
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.house.source import REPOSITORY

WAYS = pytest.mark.parametrize("way", ["in memory", "by pieces"])
"""On CPU devices of one process shards are put together in memory; everywhere else they are sent in pieces."""

RELAYED = "by pieces, relayed"
"""As if the devices were on networks of three, inside which pieces from other networks are passed on."""

KEYS = ("threefry2x32", "rbg")
DTYPES = ("float32", "bfloat16", "int8", "int4", "bool", "float8_e4m3fn", "float8_e5m2", "complex64", *KEYS)


@contextlib.contextmanager
def moving(way: str) -> Iterator[None]:
    """Inside, arrays move this way."""
    with pytest.MonkeyPatch.context() as patch:
        modules = {name: importlib.import_module(f"shardrules.moves.{name}") for name in ("move", "plan", "schedule")}
        if way != "in memory":
            for name in ("move", "plan"):
                patch.setattr(modules[name], "moves_in_memory", lambda schedule: False)
        if way == RELAYED:
            patch.setattr(
                modules["schedule"], "networks", lambda devices: {device: device.id // 3 for device in devices}
            )
        yield


def run_alone(code: str, *arguments: str, timeout: float = 120) -> str:
    """Runs `code` in a process of its own with 8 devices, warnings being errors; returns what it printed.

    Arrays move the way that the first of the arguments names.
    """
    prelude = """
        import sys
        import jax, numpy as np, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        import shardrules as sr
        from tests.moves import cases
        way, *arguments = sys.argv[1:]
        force = cases.moving(way)
        force.__enter__()
    """
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(prelude) + textwrap.dedent(code), *arguments],
        # Freed memory is returned at once, so that the memory of the process can be measured.
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


# ---- values ----


def random_values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Any bits that the dtype can hold, on the host; PRNG keys on devices."""
    rng = np.random.default_rng(seed)
    if dtype in KEYS:
        numbers = rng.integers(0, 2**32, (*shape, 2 if dtype == "threefry2x32" else 4), np.uint32)
        return jax.random.wrap_key_data(jax.numpy.asarray(numbers), impl=dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype == "int4":
        return rng.integers(-8, 8, shape).astype(ml_dtypes.int4)
    numpy_dtype = jax.numpy.dtype(dtype)
    size = math.prod(shape) * numpy_dtype.itemsize
    return np.frombuffer(rng.bytes(size), np.uint8).view(numpy_dtype).reshape(shape)


def bits_of(values: Any) -> np.ndarray:
    """Values as unsigned integers: two NaNs may differ, and a NaN equals itself."""
    if jax.numpy.issubdtype(values.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(values))
    array = np.asarray(values)
    if array.dtype == ml_dtypes.int4:
        return array.astype(np.int8)  # the upper half of the byte is undefined
    return array.reshape((*array.shape, 1)).view(np.uint8)


def check_shards(array: jax.Array, sharding: Sharding, values: Any) -> None:
    """Compares every shard on every device with the whole, bit by bit."""
    whole = bits_of(values)
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):  # JAX always writes their specs out: P(None) for P()
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert array.sharding.memory_kind == sharding.memory_kind
    else:
        assert array.sharding == sharding
    assert (array.shape, array.dtype) == (values.shape, values.dtype)
    assert array.committed
    assert {shard.device for shard in array.addressable_shards} == sharding.device_set
    where = sharding.devices_indices_map(array.shape)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(bits_of(shard.data), whole[where[shard.device]])


def pointers(array: jax.Array) -> dict[int, int]:
    """Returns the address in memory of each device's shard."""
    return {shard.device.id: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


# ---- shardings ----


@final
@attrs.frozen
class FakeDevice:
    """The facts that a schedule reads of a device, for networks that no test machine has."""

    id: int
    process_index: int = 0
    slice_index: int | None = None
    platform: str = "tpu"


@final
@attrs.frozen
class Place:
    """A sharding that prints in full: the ids of its devices, their mesh, and which axes split which dim.

    Without axes it is a `SingleDeviceSharding`.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[str, int, AxisType], ...]
    split: tuple[tuple[str, ...], ...]
    memory: str = "device"

    @property
    def sharding(self) -> Sharding:
        devices = [jax.devices()[index] for index in self.devices]
        if not self.axes:
            return SingleDeviceSharding(devices[0], memory_kind=self.memory)
        names, sizes, types = zip(*self.axes, strict=True)
        mesh = Mesh(np.array(devices).reshape(sizes), names, axis_types=types)
        return NamedSharding(mesh, P(*self.split), memory_kind=self.memory)

    def ways(self, dim: int) -> int:
        """Into how many parts a dim is cut."""
        sizes = {name: size for name, size, _ in self.axes}
        return math.prod(sizes[name] for name in (*self.split, *[()] * (dim + 1))[dim])


@final
@attrs.frozen
class Case:
    """An array on its way from one sharding to another."""

    shape: tuple[int, ...]
    dtype: str
    source: Place
    target: Place
    seed: int

    def values(self) -> Any:
        return random_values(self.shape, self.dtype, self.seed)


DEVICE_SETS = ("same", "other order", "fewer", "more", "overlapping", "disjoint")
_SIZES = {1: [(1,)], 2: [(2,), (2, 1)], 3: [(3,)], 4: [(4,), (2, 2), (2, 1, 2)], 6: [(6,), (3, 2)]}
_SIZES[8] = [(8,), (2, 4), (4, 2), (2, 2, 2)]


@st.composite
def device_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The devices of two shardings, in one of the six relations."""
    line = draw(st.permutations(range(8)))
    how = draw(st.sampled_from(DEVICE_SETS))
    if how == "same":
        source = target = line[: draw(st.sampled_from([1, 2, 4, 6, 8]))]
    elif how == "other order":
        source = line[: draw(st.sampled_from([2, 4, 6, 8]))]
        target = source[::-1] if draw(st.booleans()) else draw(st.permutations(source))
    elif how in ("fewer", "more"):
        few, many = draw(st.sampled_from([(1, 2), (1, 8), (2, 3), (2, 4), (3, 8), (4, 6), (4, 8), (6, 8)]))
        start = draw(st.integers(0, many - few))
        source, target = line[start : start + few], line[:many]
        if how == "fewer":
            source, target = target, source
    elif how == "overlapping":
        count, start = draw(st.sampled_from([(2, 1), (4, 2), (4, 3), (6, 2), (3, 1)]))
        source, target = line[:count], line[start : start + draw(st.sampled_from([2, 4]))]
    else:
        count, other = draw(st.sampled_from([(1, 1), (1, 4), (4, 4), (4, 2), (2, 6), (6, 2), (3, 4)]))
        source, target = line[:count], line[count : count + other]
    return tuple(source), tuple(target)


@st.composite
def places(draw: st.DrawFn, devices: tuple[int, ...], ndim: int) -> Place:
    """A sharding on these devices, for arrays of that rank."""
    memory = draw(st.sampled_from(["device"] * 7 + ["pinned_host"]))
    if len(devices) == 1 and draw(st.booleans()):
        return Place(devices, (), ((),) * ndim, memory)
    sizes = draw(st.sampled_from(_SIZES[len(devices)]))
    names = draw(st.sampled_from(["abc", "xyz"]))
    types = st.sampled_from([AxisType.Auto, AxisType.Explicit])
    axes = tuple((name, size, draw(types)) for name, size in zip(names[: len(sizes)], sizes, strict=True))
    split: list[tuple[str, ...]] = [()] * ndim
    if ndim:
        for name, _, _ in draw(st.permutations(axes)):
            dim = draw(st.integers(-1, ndim - 1))
            if dim >= 0:
                split[dim] = (*split[dim], name)
    while split and not split[-1] and draw(st.booleans()):
        split.pop()
    return Place(devices, axes, tuple(split), memory)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES, largest: int = 3) -> Case:
    """Any array between any two shardings that fit it."""
    old, new = draw(device_pairs())
    ndim = draw(st.integers(0, 4))
    source, target = draw(places(old, ndim)), draw(places(new, ndim))
    shape = tuple(
        math.lcm(source.ways(dim), target.ways(dim)) * draw(st.integers(0 if dim == 0 else 1, largest))
        for dim in range(ndim)
    )
    return Case(shape, draw(st.sampled_from(dtypes)), source, target, draw(st.integers(0, 2**16)))
