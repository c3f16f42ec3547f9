"""What is searched, and as what the compiler makes of it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.planning.query import Query, QueryOptions, read_query
from shardrules.planning.solve.deadline import NO_DEADLINE

MESH = sr.mesh_shape("data:4")
PINS = sr.SpecTreeShardingRule((P("data"), P(), P()))
ARGS = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 64), (64, 1024), (1024, 64)))


def two_matmuls(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ v


def query_of(limit_bytes: int, hardware: sr.Hardware) -> Query:
    options = QueryOptions(limit_bytes, PINS, hardware, None, 60, prove=False)
    return read_query(two_matmuls, ARGS, MESH, options)


@pytest.mark.parametrize(("name", "saves"), [("cuda:h100", True), ("tpu:v5e", False)])
def test_limits_may_be_kept_by_saving_memory(name: str, saves: bool) -> None:
    """XLA for GPUs leaves smaller gaps where a limit binds; plans that fit only so are found."""
    hardware = sr.Hardware.named(name)
    free = query_of(2**30, hardware).search(NO_DEADLINE)
    assert free.fits
    assert not free.is_tight
    query = query_of(int(0.97 * free.peak_bytes), hardware)
    result = query.search(NO_DEADLINE)
    assert (result.fits, result.is_tight) == (saves, saves)
    if saves:
        assert query.plan(result).peak_bytes <= query.limit_bytes < free.peak_bytes
    assert not query_of(int(0.8 * free.peak_bytes), hardware).search(NO_DEADLINE).fits
