"""The trees that the benchmarks plan: published models as shapes, and the twelve rules that go with each.

A tree is nested dicts and lists of `jax.ShapeDtypeStruct`, with the names of weights in the published checkpoints. No
array is created and no device is touched. Every leaf is a separate object, as in the result of `jax.eval_shape`.

`TREES` lists the four sizes; `Tree.build` raises if a tree does not have its published number of leaves.
"""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

Rules = tuple[tuple[str, P], ...]


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _weight(*shape: int) -> dict[str, Any]:
    return {"weight": _array(*shape)}


def _affine(*shape: int) -> dict[str, Any]:
    return {"weight": _array(*shape), "bias": _array(shape[-1])}


def gpt2(layers: int = 12) -> dict[str, Any]:
    """GPT-2 (124M): 12 leaves in each of 12 layers, two embeddings and the last norm: 12 * 12 + 2 + 2 = 148.

    Its linear layers keep their weights as (in, out); the head is tied to the token embedding.
    """

    def block() -> dict[str, Any]:
        return {
            "ln_1": _affine(768),
            "attn": {"c_attn": _affine(768, 3 * 768), "c_proj": _affine(768, 768)},
            "ln_2": _affine(768),
            "mlp": {"c_fc": _affine(768, 4 * 768), "c_proj": _affine(4 * 768, 768)},
        }

    return {
        "wte": _weight(50257, 768),
        "wpe": _weight(1024, 768),
        "h": [block() for _ in range(layers)],
        "ln_f": _affine(768),
    }


def _gated_mlp(width: int, hidden: int) -> dict[str, Any]:
    return {
        "gate_proj": _weight(hidden, width),
        "up_proj": _weight(hidden, width),
        "down_proj": _weight(width, hidden),
    }


def llama_405b(layers: int = 126) -> dict[str, Any]:
    """Llama 3.1 405B, layers unrolled: 9 leaves in each of 126 layers, embedding, norm and head: 126 * 9 + 3 = 1,137.

    128 query heads and 8 key-value heads of 128, weights as (out, in).
    """
    width, hidden, keys, vocab = 16384, 53248, 8 * 128, 128256

    def block() -> dict[str, Any]:
        return {
            "input_layernorm": _weight(width),
            "self_attn": {
                "q_proj": _weight(width, width),
                "k_proj": _weight(keys, width),
                "v_proj": _weight(keys, width),
                "o_proj": _weight(width, width),
            },
            "post_attention_layernorm": _weight(width),
            "mlp": _gated_mlp(width, hidden),
        }

    return {
        "model": {
            "embed_tokens": _weight(vocab, width),
            "layers": [block() for _ in range(layers)],
            "norm": _weight(width),
        },
        "lm_head": _weight(vocab, width),
    }


def _latent_attention(width: int, heads: int) -> dict[str, Any]:
    queries, latent, nope, rope, values = 1536, 512, 128, 64, 128
    return {
        "q_a_proj": _weight(queries, width),
        "q_a_layernorm": _weight(queries),
        "q_b_proj": _weight(heads * (nope + rope), queries),
        "kv_a_proj_with_mqa": _weight(latent + rope, width),
        "kv_a_layernorm": _weight(latent),
        "kv_b_proj": _weight(heads * (nope + values), latent),
        "o_proj": _weight(width, heads * values),
    }


def deepseek_v3(layers: int = 61, dense: int = 3, experts: int = 256, last: int | None = None) -> dict[str, Any]:
    """DeepSeek-V3 without its extra next-token layer, every expert a subtree of its own: 45,395 leaves.

    Each of 61 layers has 2 norms and 7 leaves of latent attention. The first 3 have a dense MLP of 3 leaves: 12 each.
    The other 58 have a router (weight and correction bias), 256 experts of 3 leaves and a shared expert of 3:
    9 + 2 + 768 + 3 = 782 each. With embedding, norm and head: 3 * 12 + 58 * 782 + 3 = 45,395.

    The first `dense` of all `layers` have a dense MLP, the others `experts` routed experts, the last one `last`.
    """
    width, vocab, heads, hidden, expert_hidden = 7168, 129280, 128, 18432, 2048

    def mixture(count: int) -> dict[str, Any]:
        return {
            "gate": {"weight": _array(count, width), "e_score_correction_bias": _array(count, dtype=jnp.float32)},
            "experts": [_gated_mlp(width, expert_hidden) for _ in range(count)],
            "shared_experts": _gated_mlp(width, expert_hidden),
        }

    def block(layer: int) -> dict[str, Any]:
        count = last if last is not None and layer == layers - 1 else experts
        return {
            "input_layernorm": _weight(width),
            "self_attn": _latent_attention(width, heads),
            "post_attention_layernorm": _weight(width),
            "mlp": _gated_mlp(width, hidden) if layer < dense else mixture(count),
        }

    return {
        "model": {
            "embed_tokens": _weight(vocab, width),
            "layers": [block(layer) for layer in range(layers)],
            "norm": _weight(width),
        },
        "lm_head": _weight(vocab, width),
    }


def synthetic_200k() -> dict[str, Any]:
    """DeepSeek-V3 grown to 259 layers, the last with 179 experts: 3 * 12 + 255 * 782 + (14 + 3 * 179) + 3 = 200,000."""
    return deepseek_v3(layers=259, last=179)


GPT2_RULES: Rules = (
    (r"wte/weight$", P(None, "model")),
    (r"wpe/weight$", P(None, "model")),
    (r"attn/c_attn/weight$", P("data", "model")),
    (r"attn/c_attn/bias$", P("model")),
    (r"attn/c_proj/weight$", P("model", "data")),
    (r"mlp/c_fc/weight$", P("data", "model")),
    (r"mlp/c_fc/bias$", P("model")),
    (r"mlp/c_proj/weight$", P("model", "data")),
    (r"c_proj/bias$", P()),
    (r"ln_[12]/(weight|bias)$", P()),
    (r"ln_f/", P()),
    (r".*", P()),
)

LLAMA_RULES: Rules = (
    (r"embed_tokens/weight$", P("model", "data")),
    (r"lm_head/weight$", P("model", "data")),
    (r"self_attn/q_proj/weight$", P("model", "data")),
    (r"self_attn/k_proj/weight$", P("model", "data")),
    (r"self_attn/v_proj/weight$", P("model", "data")),
    (r"self_attn/o_proj/weight$", P("data", "model")),
    (r"mlp/gate_proj/weight$", P("model", "data")),
    (r"mlp/up_proj/weight$", P("model", "data")),
    (r"mlp/down_proj/weight$", P("data", "model")),
    (r"(input|post_attention)_layernorm/", P()),
    (r"model/norm/", P()),
    (r".*", P()),
)

DEEPSEEK_RULES: Rules = (
    (r"embed_tokens/weight$", P("model", "data")),
    (r"lm_head/weight$", P("model", "data")),
    (r"self_attn/(q_a_proj|kv_a_proj_with_mqa)/weight$", P(None, "data")),
    (r"self_attn/(q_b|kv_b)_proj/weight$", P("model", "data")),
    (r"self_attn/o_proj/weight$", P("data", "model")),
    (r"mlp/experts/\d+/(gate|up)_proj/weight$", P("model", "data")),
    (r"mlp/experts/\d+/down_proj/weight$", P("data", "model")),
    (r"mlp/(shared_experts/)?(gate|up)_proj/weight$", P("model", "data")),
    (r"mlp/(shared_experts/)?down_proj/weight$", P("data", "model")),
    (r"mlp/gate/weight$", P(None, "data")),
    (r"norm/weight$", P()),
    (r".*", P()),
)


@final
@attrs.frozen
class Tree:
    """A tree to plan, and the rules for it."""

    name: str
    make: Callable[[], dict[str, Any]]
    rules: Rules  # twelve pairs of pattern and spec, the most specific first; the last matches everything
    leaves: int  # the number that the tree must have

    def build(self) -> dict[str, Any]:
        """Builds the tree; raises `ValueError` if it does not have `leaves` leaves."""
        tree = self.make()
        count = len(jax.tree_util.tree_leaves(tree))
        if count != self.leaves:
            raise ValueError(f"{self.name} has {count:,} leaves, not {self.leaves:,}")
        return tree


TREES: tuple[Tree, ...] = (
    Tree("gpt2", gpt2, GPT2_RULES, 148),
    Tree("llama_405b", llama_405b, LLAMA_RULES, 1_137),
    Tree("deepseek_v3", deepseek_v3, DEEPSEEK_RULES, 45_395),
    Tree("synthetic_200k", synthetic_200k, DEEPSEEK_RULES, 200_000),
)

TOY_TREES: tuple[Tree, ...] = (
    Tree("gpt2", lambda: gpt2(layers=2), GPT2_RULES, 2 * 12 + 4),
    Tree("llama_405b", lambda: llama_405b(layers=2), LLAMA_RULES, 2 * 9 + 3),
    Tree("deepseek_v3", lambda: deepseek_v3(layers=5, experts=8), DEEPSEEK_RULES, 3 * 12 + 2 * 38 + 3),
    Tree("synthetic_200k", lambda: deepseek_v3(layers=6, experts=8, last=5), DEEPSEEK_RULES, 3 * 12 + 2 * 38 + 29 + 3),
)
