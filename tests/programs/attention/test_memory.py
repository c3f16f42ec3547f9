"""The memory of attention does not grow with the number of blocks of keys."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

HEADS, SHARD = 4, 512


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ring", "gather"])
def test_gradients_keep_the_scores_of_few_blocks(how: Any) -> None:
    def temporary_bytes(devices: int) -> int:
        mesh = sr.create_mesh(f"sequence:{devices}", devices=jax.devices()[:devices])
        shape = (1, SHARD * devices, HEADS, 16)
        array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(None, "sequence")))

        def loss(q: Any, k: Any, v: Any) -> Any:
            return (sr.sharded_attention(q, k, v, causal=True, axis="sequence", how=how) ** 2).sum()

        with jax.set_mesh(mesh):
            compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(array, array, array).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    # Four devices more are four blocks of scores more, of which causal attention computes half.
    assert temporary_bytes(8) - temporary_bytes(4) < 4 * HEADS * SHARD**2
