"""Estimates against the compiler: XLA's figure for the arguments on a device, to the byte."""

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESHES: tuple[tuple[tuple[str, int], ...], ...] = (
    (("data", 8),),
    (("data", 4), ("model", 2)),
    (("data", 2), ("model", 4)),
    (("data", 2), ("one", 1), ("model", 4)),
    (("a", 2), ("b", 2), ("c", 2)),
    (("one", 1), ("a", 2), ("b", 2), ("uno", 1), ("c", 2)),
)
KEYS = tuple(jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype for impl in ("threefry2x32", "rbg"))
DTYPES: tuple[Any, ...] = (
    jnp.int2,
    jnp.uint2,
    jnp.int4,
    jnp.uint4,
    jnp.float4_e2m1fn,
    jnp.float8_e4m3fn,
    jnp.int8,
    jnp.bool_,
    jnp.bfloat16,
    jnp.float16,
    jnp.int32,
    jnp.float32,
    jnp.complex64,
    np.float64,  # JAX makes these 32 bits wide, as long as x64 is off
    np.int64,
    np.complex128,
    *KEYS,
)
SEEDS = range(42)


def make_mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape([size for _, size in axes]), [name for name, _ in axes])


def random_leaf(rng: random.Random, axes: tuple[tuple[str, int], ...]) -> tuple[Any, P]:
    """An array of rank 0 to 4, and a spec whose splits divide: names, tuples in any order, `None`, or nothing."""
    order = rng.sample(axes, len(axes))
    shape, parts = [], []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 4))):
        names: list[str] = []
        split = 1
        while order and rng.random() < 0.45:
            name, size = order.pop()
            names.append(name)
            split *= size
        shape.append(0 if rng.random() < 0.05 else split * rng.choice((1, 1, 2, 3, 5)))
        parts.append(None if not names else names[0] if len(names) == 1 and rng.random() < 0.5 else tuple(names))
    while parts and parts[-1] is None and rng.random() < 0.5:
        parts.pop()
    dtype = rng.choice(DTYPES)
    wide = dtype in (np.float64, np.int64, np.complex128)  # JAX has no shapes of these while x64 is off, NumPy has
    return np.zeros(shape, dtype) if wide else jax.ShapeDtypeStruct(tuple(shape), dtype), P(*parts)


def random_tree(seed: int) -> tuple[tuple[tuple[str, int], ...], dict[str, Any], dict[str, Any]]:
    rng = random.Random(seed)
    axes = MESHES[seed % len(MESHES)]
    pairs = [random_leaf(rng, axes) for _ in range(rng.randint(1, 14))]
    cut = rng.randint(0, len(pairs))
    tree, specs = ([pair[side] for pair in pairs] for side in (0, 1))
    return axes, {"layers": tree[:cut], "head": tuple(tree[cut:])}, {"layers": specs[:cut], "head": tuple(specs[cut:])}


def compiled_bytes(mesh: Mesh, tree: Any, specs: Any) -> int:
    """The bytes that XLA allocates on one device for the arrays of `tree` as arguments."""
    shapes = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, jax.typeof(x).dtype, sharding=NamedSharding(mesh, spec)),
        tree,
        specs,
    )
    lowered = jax.jit(lambda *xs: xs, keep_unused=True).lower(*jax.tree.leaves(shapes))
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None
    return analysis.argument_size_in_bytes


def device_bytes(mesh: Mesh, tree: Any, specs: Any) -> int:
    """The bytes that placed arrays take on the fullest device."""
    totals: dict[int, int] = {}
    for x, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        dtype = jax.typeof(x).dtype
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        sharding = NamedSharding(mesh, spec)
        array = jax.random.key_data(jax.random.split(jax.random.key(0, impl=dtype._impl.name), 1)) if is_key else None
        placed = jax.device_put(np.zeros(x.shape, dtype), sharding) if array is None else None
        for shard in [] if placed is None else placed.addressable_shards:
            totals[shard.device.id] = totals.get(shard.device.id, 0) + shard.data.on_device_size_in_bytes()
        if array is not None:
            shard = math.prod(sharding.shard_shape(x.shape)) * array.nbytes
            totals |= {device.id: totals.get(device.id, 0) + shard for device in mesh.devices.flat}
    return max(totals.values(), default=0)


@pytest.mark.sample(16)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_estimate_is_what_xla_allocates(seed: int) -> None:
    axes, tree, specs = random_tree(seed)
    mesh = make_mesh(axes)
    usage = sr.ShardingAnalyzer(mesh).estimate_memory_usage(tree, specs)
    assert usage["size_per_device"] == device_bytes(mesh, tree, specs)
    # Without devices it is what compilers say, which pack elements of fewer than 8 bits for TPUs and GPUs.
    abstract = sr.mesh_shape(",".join(f"{name}:{size}" for name, size in axes))
    packed = sr.ShardingAnalyzer(abstract).estimate_memory_usage(tree, specs)
    assert packed["size_per_device"] == compiled_bytes(mesh, tree, specs)
    for each, expected in ((mesh, usage), (abstract, packed)):
        assert expected["size_per_device"] == expected["sharded_size"] + expected["replicated_size"]
        # A plan is the same on all devices.
        plan = sr.SpecTreeShardingRule(specs).plan(tree, each).check()
        assert plan.memory().device_bytes == packed["size_per_device"]
        assert plan.memory().total_bytes == packed["total_size"]


def test_arrays_of_devices_hosts_and_keys_count_alike() -> None:
    mesh = make_mesh(MESHES[1])
    params = {"w": jnp.ones((8, 16), jnp.bfloat16), "b": np.ones(16, np.float32), "key": jax.random.key(0)}
    specs = {"w": P("data", "model"), "b": P(), "key": P()}
    usage = sr.ShardingAnalyzer(mesh).estimate_memory_usage(params, specs)
    assert usage["size_per_device"] == compiled_bytes(mesh, params, specs) == 8 * 16 * 2 // 8 + 64 + 8


@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"])
def test_elements_below_a_byte_take_on_cpus_what_arrays_take(dtype: str) -> None:
    mesh, x = make_mesh(MESHES[0]), np.zeros((64, 3), jnp.dtype(dtype))
    placed = jax.device_put(x, NamedSharding(mesh, P("data")))
    usage = sr.ShardingAnalyzer(mesh).estimate_memory_usage({"x": x}, {"x": P("data")})
    shard_bytes = placed.addressable_shards[0].data.on_device_size_in_bytes()
    assert usage["size_per_device"] == shard_bytes
    assert usage["total_size"] == 8 * shard_bytes
    if jax.__version_info__ < (0, 11):
        assert shard_bytes == 8 * 3


@pytest.mark.parametrize("target", ["tpu:v5e:2x4", "cuda:h100:8"])
@pytest.mark.parametrize(("dtype", "bits"), [("int2", 2), ("int4", 4), ("float4_e2m1fn", 4)])
def test_elements_below_a_byte_are_packed_on_tpus_and_gpus(target: str, dtype: str, bits: int) -> None:
    mesh = sr.Target.parse(target).mesh(sr.mesh_shape("data:8"))
    tree, specs = {"x": jax.ShapeDtypeStruct((1024, 1024), jnp.dtype(dtype))}, {"x": P("data")}
    usage = sr.ShardingAnalyzer(mesh).estimate_memory_usage(tree, specs)
    assert usage["size_per_device"] == compiled_bytes(mesh, tree, specs) == 1024 * 1024 * bits // 8 // 8


def test_64_bit_types_depend_on_x64_mode() -> None:
    mesh = make_mesh(MESHES[0])
    tree, specs = [np.ones((16, 3)), np.ones(5, np.int64)], [P("data"), P()]
    analyzer = sr.ShardingAnalyzer(mesh)
    for x64, expected in ((False, 2 * 3 * 4 + 5 * 4), (True, 2 * 3 * 8 + 5 * 8)):
        with jax.enable_x64(x64):
            assert analyzer.estimate_memory_usage(tree, specs)["size_per_device"] == expected
            assert compiled_bytes(mesh, tree, specs) == expected
