"""Compiled for GPUs and TPUs, each way sends what its closed form says."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.experts.shards import Shard, by_all_to_all, by_dense, by_ragged, by_ring
from shardrules.programs.experts.stacked import unstack
from tests.programs.examples import mesh_on

GROUPS, LENGTH, CHOICES, EXPERTS, WIDTH, HIDDEN, CAPACITY = 32, 64, 2, 32, 256, 256, 5
DEVICES = {"cuda:h100:8": 8, "tpu:v5e:4x4": 16}


def expert(params: Any, rows: Any) -> Any:
    return jnp.tanh(rows @ params["up"]) @ params["down"]


def grouped(params: Any, rows: Any, sizes: Any) -> Any:
    return jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(rows, params["up"], sizes)), params["down"], sizes)


def sent_bytes(target: str, way: Any, capacity: int | None, with_gradients: bool = False) -> float:
    """The bytes that a device sends, by an audit of the compiled program."""
    mesh = mesh_on(target, f"expert:{DEVICES[target]}")

    def split(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P("expert")))

    def run(tokens: Any, weights: Any, params: Any, routes: Any) -> Any:
        experts, arrays = unstack(jax.tree_util.Partial(grouped if capacity is None else expert, params))

        def on_shards(*operands: Any) -> Any:
            return way(Shard.of(operands, ("expert",), experts, capacity))

        specs = (jax.P("expert"),) * (4 + len(arrays))
        mapped = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=jax.P("expert"), check_vma=False)
        results = mapped(tokens, routes, weights, jnp.arange(EXPERTS, dtype=jnp.int32), *arrays)
        return (results.astype(jnp.float32) ** 2).mean() if with_gradients else results

    params = {"up": split((EXPERTS, WIDTH, HIDDEN)), "down": split((EXPERTS, HIDDEN, WIDTH))}
    lead = GROUPS, LENGTH
    arrays = split((*lead, WIDTH)), split((*lead, CHOICES)), params, split((*lead, CHOICES), jnp.int32)
    step = jax.grad(run, (0, 1, 2)) if with_gradients else run
    report = sr.audit(step, *arrays, mesh=mesh, target=target)
    return sum(collective.total_wire_bytes for collective in report.collectives)


def closed_form(way: Any, devices: int, capacity: int | None) -> float:
    """Bytes in bfloat16, in the forward pass."""
    groups, row = GROUPS // devices, 2 * WIDTH
    if way is by_ring:
        return (devices - 1) * EXPERTS // devices * 2 * WIDTH * HIDDEN * 2
    if way is by_ragged:
        rows, counts = groups * LENGTH * CHOICES, 4 * EXPERTS * (devices - 1)
        rows = rows if capacity is None else min(rows, EXPERTS * groups * capacity)
        return 2 * (devices - 1) / devices * rows * row + counts
    assert capacity is not None
    return 2 * (devices - 1) / devices * EXPERTS * groups * capacity * row


@pytest.mark.slow
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize(
    ("way", "capacity"),
    [*((way, CAPACITY) for way in (by_all_to_all, by_dense, by_ragged, by_ring)), (by_ragged, None), (by_ring, None)],
)
def test_wire_bytes(target: str, way: Any, capacity: int | None) -> None:
    assert sent_bytes(target, way, capacity) == pytest.approx(closed_form(way, DEVICES[target], capacity), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "times"), [(by_all_to_all, 2), (by_ring, 3)])
def test_wire_bytes_with_gradients(way: Any, times: int) -> None:
    expected = times * closed_form(way, 8, CAPACITY)
    assert sent_bytes("cuda:h100:8", way, CAPACITY, with_gradients=True) == pytest.approx(expected, rel=0.01)
