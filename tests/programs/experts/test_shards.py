"""On every mesh, each way to bring tokens and experts together computes what loops over tokens do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shardrules.programs.experts.shards import Shard, by_all_to_all, by_dense, by_ragged, by_ring, by_sum
from shardrules.programs.experts.stacked import unstack
from tests.programs.experts.mixtures import (
    EXPERTS,
    experts_of,
    is_kept,
    mixture,
    parameters,
    routes_of,
    tokens_and_weights,
)

CAPACITY = 3
LEAD = 8, 3
WAYS: tuple[tuple[Callable[[Shard], jax.Array], int | None], ...] = (
    *((way, CAPACITY) for way in (by_all_to_all, by_dense, by_ragged, by_ring, by_sum)),
    *((way, None) for way in (by_ragged, by_ring, by_sum)),
)
MESHES = {"data:8": (8,), "data:4,expert:2": (4, 2), "data:2,expert:2,model:2": (2, 2, 2)}


def on_mesh(way: Callable[[Shard], jax.Array], capacity: int | None, mesh: Mesh) -> Callable[..., jax.Array]:
    """The way on all of a mesh: tokens over all axes, experts over the last two."""
    axes = mesh.axis_names[-2:]
    token_axes = tuple(name for name in mesh.axis_names if way is not by_sum or name not in axes)

    def run(tokens: Any, weights: Any, params: Any, routes: Any) -> jax.Array:
        experts, arrays = unstack(experts_of(params, capacity))

        def on_shards(*operands: Any) -> jax.Array:
            results = way(Shard.of(operands, None if way is by_sum else axes, experts, capacity))
            results = results.reshape(operands[0].shape)
            return jax.lax.psum(results, axes) if way is by_sum else results

        specs = (*[P(token_axes)] * 3, *[P(axes)] * (1 + len(arrays)))
        mapped = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=P(token_axes), check_vma=False)
        return mapped(tokens, routes, weights, jnp.arange(EXPERTS, dtype=jnp.int32), *arrays)

    return run


def gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    """The results, and the gradients of a sum that weighs them differently."""

    def value(tokens: Any, weights: Any, params: Any, *tables: Any) -> Any:
        results = run(tokens, weights, params, *tables).astype(jnp.float32)
        return (results * jnp.cos(jnp.arange(results.size)).reshape(results.shape)).sum(), results

    return jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))


EXPECTED = gradients(mixture)


def close(actual: Any, expected: Any, dtype: Any) -> None:
    tolerance = 2e-5 if dtype == jnp.float32 else 4e-2
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(leaf), np.float32(other), atol=tolerance * max(1.0, np.abs(other).max()))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("mesh_text", "dtype"), [*((text, jnp.float32) for text in MESHES), ("data:2,expert:2,model:2", jnp.bfloat16)]
)
@pytest.mark.parametrize(("way", "capacity"), WAYS)
def test_results_and_gradients(way: Any, capacity: int | None, mesh_text: str, dtype: Any) -> None:
    sizes = MESHES[mesh_text]
    names = tuple(part.split(":")[0] for part in mesh_text.split(","))
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    (tokens, weights), params = tokens_and_weights(*LEAD, dtype=dtype), parameters(dtype)
    run = gradients(on_mesh(way, capacity, mesh))
    for kind in ("any expert", "one expert", "few experts"):
        routes = routes_of(kind, *LEAD)
        actual = run(tokens, weights, params, routes)
        close(actual, EXPECTED(tokens, weights, params, routes, is_kept(routes, capacity)), dtype)
