"""Flash attention kernels of JAX, declared: splash attention for TPUs and a Triton kernel for GPUs.

A kernel attends within one example and one head, so that both may be split, and sequences may not. Without the
declaration every device would gather all examples and heads in front of the kernel. On CPUs Pallas interprets them.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.gpu import attention as gpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec as P

import shardrules as sr


@sr.region(
    "batch heads queries dim, batch heads keys dim, batch heads keys dim -> batch heads queries dim",
    split="batch heads",
)
def splash_attention(q: Array, k: Array, v: Array, interpret: bool = False) -> Array:
    """Causal attention on TPUs. The mask is made here, for as many heads as a device has."""
    _, heads, queries, dim = q.shape
    mask = masks.MultiHeadMask([masks.CausalMask((queries, k.shape[2])) for _ in range(heads)])
    attend = splash.make_splash_mha_single_device(mask, interpret=interpret)
    return cast(Array, jax.vmap(attend)(q * dim**-0.5, k, v))  # without residuals it is no tuple


@sr.region(
    "batch queries heads dim, batch keys heads dim, batch keys heads dim -> batch queries heads dim",
    split="batch heads",
)
def triton_attention(q: Array, k: Array, v: Array, interpret: bool = False) -> Array:
    """Causal attention on GPUs; heads come after the sequence."""
    return gpu.mha(q, k, v, None, q.shape[-1] ** -0.5, True, interpret=interpret)


def plain_attention(q: Array, k: Array, v: Array) -> Array:
    """The same in JAX, heads before the sequence."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = sr.create_mesh("data:4,model:2")

    def loss(q: Array, k: Array, v: Array) -> Array:
        return (splash_attention(q, k, v, interpret=True) ** 2).sum()

    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (4, 4, 256, 64)) for key in keys)
    placed = [sr.filter_shard(x, P("data", "model"), mesh) for x in (q, k, v)]
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    gradients = step(*placed)
    expected = jax.grad(lambda *qkv: (plain_attention(*qkv) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)
    report = sr.audit(step, *placed, mesh=mesh)
    print("sent:", *((collective.kind, collective.axes) for collective in report.collectives))
    print("differs by:", max(float(abs(a - b).max()) for a, b in zip(gradients, expected, strict=True)))


if __name__ == "__main__":
    main()
