"""Plans Llama 3 8B for 64 devices, from shapes alone: no memory is allocated and no device is asked for.

The model is planned twice with one set of rules: its 32 blocks as a list, and stacked as `jax.lax.scan` wants them.
Planning needs the parameters only, so the forward pass is left out.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import PRNGKeyArray

import shardrules as sr

VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS = 128_256, 4096, 14_336, 32, 32, 8


def linear(inputs: int, outputs: int, key: PRNGKeyArray) -> eqx.nn.Linear:
    return eqx.nn.Linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, key=key)


def norm() -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(WIDTH, use_bias=False, dtype=jnp.bfloat16)


class Attention(eqx.Module):
    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray) -> None:
        q, k, v, o = jax.random.split(key, 4)
        self.q_proj = linear(WIDTH, WIDTH, q)
        self.k_proj = linear(WIDTH, WIDTH // HEADS * KV_HEADS, k)
        self.v_proj = linear(WIDTH, WIDTH // HEADS * KV_HEADS, v)
        self.o_proj = linear(WIDTH, WIDTH, o)


class MLP(eqx.Module):
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray) -> None:
        gate, up, down = jax.random.split(key, 3)
        self.gate, self.up = linear(WIDTH, HIDDEN, gate), linear(WIDTH, HIDDEN, up)
        self.down = linear(HIDDEN, WIDTH, down)


class Block(eqx.Module):
    attention_norm: eqx.nn.RMSNorm
    attention: Attention
    mlp_norm: eqx.nn.RMSNorm
    mlp: MLP

    def __init__(self, key: PRNGKeyArray) -> None:
        attention, mlp = jax.random.split(key)
        self.attention_norm, self.attention = norm(), Attention(attention)
        self.mlp_norm, self.mlp = norm(), MLP(mlp)


class Llama(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block] | Block
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, seed: int, stacked: bool) -> None:
        embedding, head, blocks = jax.random.split(jax.random.key(seed), 3)
        keys = jax.random.split(blocks, LAYERS)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, dtype=jnp.bfloat16, key=embedding)
        self.blocks = eqx.filter_vmap(Block)(keys) if stacked else [Block(key) for key in keys]
        self.norm, self.head = norm(), linear(WIDTH, VOCAB, head)


def main() -> None:
    mesh = sr.mesh_shape("data:16,model:4")
    rules = sr.CompositeShardingRule(
        sr.RegexShardingRule([(r"(attention/o_proj|mlp/down)/weight", P("data", "model")), (r"norm", P())]),
        sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data"),
    )
    stacked_rules = sr.RegexShardingRule([(r"^blocks/", sr.StackedShardingRule(rules)), (r".*", rules)])

    unrolled = rules.plan(eqx.filter_eval_shape(Llama, seed=0, stacked=False), mesh)
    stacked = stacked_rules.plan(eqx.filter_eval_shape(Llama, seed=0, stacked=True), mesh)
    print(unrolled, stacked, sep="\n\n")

    one, other = unrolled.memory(), stacked.memory()
    same = "the same" if one.device_bytes == other.device_bytes else "not the same"
    print(
        f"\nunrolled: {one.leaf_count} arrays, {one.device_bytes:,} bytes per device; "
        f"stacked: {other.leaf_count} arrays, {other.device_bytes:,} bytes per device: {same}"
    )


if __name__ == "__main__":
    main()
