"""Llama 3 405B as shapes: `shardrules plan docs/examples/llama_405b.py:shapes --rules docs/examples/llama_405b.toml`.

A model can be planned without building it: any function that returns a tree of shapes is accepted.
"""

from typing import Any

import jax
import jax.numpy as jnp

VOCAB, WIDTH, HIDDEN, LAYERS, HEAD, KV_HEADS = 128_256, 16_384, 53_248, 126, 128, 8


def weight(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def layer() -> dict[str, Any]:
    """Returns one layer, its matrices as (inputs, outputs)."""
    return {
        "attention": {
            "norm": weight(WIDTH),
            "q_proj": weight(WIDTH, WIDTH),
            "k_proj": weight(WIDTH, KV_HEADS * HEAD),
            "v_proj": weight(WIDTH, KV_HEADS * HEAD),
            "o_proj": weight(WIDTH, WIDTH),
        },
        "mlp": {
            "norm": weight(WIDTH),
            "gate": weight(WIDTH, HIDDEN),
            "up": weight(WIDTH, HIDDEN),
            "down": weight(HIDDEN, WIDTH),
        },
    }


def shapes() -> dict[str, Any]:
    """Returns the whole model: 1,137 arrays, 756 GiB."""
    return {
        "embed": weight(VOCAB, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": weight(WIDTH),
        "head": weight(WIDTH, VOCAB),
    }
