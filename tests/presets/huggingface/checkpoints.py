"""The names in published checkpoints, their configurations, and the bytes that their indices say they take.

Names and configurations are those of the files; each total is the `total_size` that its index was published with, which
proves the shapes to the byte. DeepSeek-V3's counts its parameters and scales, as its files' headers do.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import attrs

Config: TypeAlias = dict[str, Any]


@attrs.frozen
class Checkpoint:
    """A published checkpoint."""

    config: Config
    names: tuple[str, ...]
    total_bytes: int


def config(model_type: str, hidden: int, width: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Config:
    """Returns the configuration of a text model."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        **more,
    }


NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
MLP = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
GEMMA_NORMS = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")


def experts(count: int, names: tuple[str, ...], around: str = "mlp") -> tuple[str, ...]:
    """Returns the names of experts that are tensors of their own."""
    return tuple(f"{around}.experts.{expert}.{name}.weight" for expert in range(count) for name in names)


def model(layers: int, parts: tuple[str, ...], prefix: str = "model.", head: bool = True) -> tuple[str, ...]:
    """Returns the names of a model of equal layers; without a `head` it is tied."""
    return (
        f"{prefix}embed_tokens.weight",
        *(f"{prefix}layers.{layer}.{part}" for layer in range(layers) for part in parts),
        f"{prefix}norm.weight",
        *(("lm_head.weight",) if head else ()),
    )


def deepseek() -> Iterator[str]:
    """Yields the names of DeepSeek-V3, whose layer 61 predicts a second token."""
    scaled = [f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for layer in range(62):
        mlps = ["mlp"] if layer < 3 else ["mlp.shared_experts", *(f"mlp.experts.{expert}" for expert in range(256))]
        weights = [*scaled, *(f"{mlp}.{name}_proj" for mlp in mlps for name in ("gate", "up", "down"))]
        for name in weights:
            yield f"model.layers.{layer}.{name}.weight"
            yield f"model.layers.{layer}.{name}.weight_scale_inv"
        for name in (*NORMS, "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"):
            yield f"model.layers.{layer}.{name}"
        if layer >= 3:
            yield f"model.layers.{layer}.mlp.gate.weight"
            yield f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"):
        yield f"model.layers.61.{name}.weight"


DEEPSEEK = config(
    "deepseek_v3",
    7168,
    18432,
    128,
    128,
    129280,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
)

GPT_OSS_PARTS = (
    *NORMS,
    *ATTENTION,
    *BIASES,
    "self_attn.o_proj.bias",
    "self_attn.sinks",
    "mlp.router.weight",
    "mlp.router.bias",
    *(f"mlp.experts.{name}_proj_{part}" for name in ("gate_up", "down") for part in ("blocks", "scales", "bias")),
)


def gpt_oss(layers: int, count: int) -> Config:
    """Returns the configuration of GPT-OSS."""
    more = {"head_dim": 64, "num_local_experts": count, "num_hidden_layers": layers}
    return config("gpt_oss", 2880, 2880, 64, 8, 201088, quantization_config={"quant_method": "mxfp4"}, **more)


def siglip(layers: int) -> Iterator[str]:
    """Yields the names of the vision tower of Gemma 3, and of its projector."""
    for layer in range(layers):
        for name in (
            "layer_norm1",
            "layer_norm2",
            "mlp.fc1",
            "mlp.fc2",
            *("self_attn." + n for n in VISION_PROJECTIONS),
        ):
            for part in ("weight", "bias"):
                yield f"vision_tower.vision_model.encoder.layers.{layer}.{name}.{part}"
    for name in ("embeddings.patch_embedding.weight", "embeddings.patch_embedding.bias"):
        yield f"vision_tower.vision_model.{name}"
    for name in ("embeddings.position_embedding.weight", "post_layernorm.weight", "post_layernorm.bias"):
        yield f"vision_tower.vision_model.{name}"
    yield from ("multi_modal_projector.mm_input_projection_weight", "multi_modal_projector.mm_soft_emb_norm.weight")


VISION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "patch_size": 14,
}
GEMMA_PARTS = (*NORMS, *GEMMA_NORMS, *ATTENTION, *QK_NORMS, *MLP)


def gemma(hidden: int, width: int, **more: int) -> Config:
    """Returns the configuration of a multimodal Gemma 3."""
    text = {"model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": width, **more}
    return {"model_type": "gemma3", "text_config": text, "vision_config": SIGLIP, "torch_dtype": "bfloat16"}


def mixtral_parts(count: int) -> tuple[str, ...]:
    """Returns the names in a layer of Mixtral."""
    return (*NORMS, *ATTENTION, "block_sparse_moe.gate.weight", *experts(count, ("w1", "w2", "w3"), "block_sparse_moe"))


LLAMA_PARTS = (*NORMS, *ATTENTION, *MLP)

CHECKPOINTS = {
    "llama 3 8b": Checkpoint(config("llama", 4096, 14336, 32, 8, 128256), model(32, LLAMA_PARTS), 16060522496),
    "llama 2 7b": Checkpoint(config("llama", 4096, 11008, 32, 32, 32000), model(32, LLAMA_PARTS), 13476831232),
    "mistral 7b": Checkpoint(config("mistral", 4096, 14336, 32, 8, 32000), model(32, LLAMA_PARTS), 14483464192),
    "mixtral 8x7b": Checkpoint(
        config("mixtral", 4096, 14336, 32, 8, 32000, num_local_experts=8), model(32, mixtral_parts(8)), 93405585408
    ),
    "qwen 2.5 14b": Checkpoint(
        config("qwen2", 5120, 13824, 40, 8, 152064), model(48, (*LLAMA_PARTS, *BIASES)), 29540067328
    ),
    "qwen 3 1.7b": Checkpoint(
        config("qwen3", 2048, 6144, 16, 8, 151936, head_dim=128),
        model(28, (*LLAMA_PARTS, *QK_NORMS), head=False),
        3441149952,
    ),
    "qwen 3 8b": Checkpoint(
        config("qwen3", 4096, 12288, 32, 8, 151936, head_dim=128), model(36, (*LLAMA_PARTS, *QK_NORMS)), 16381470720
    ),
    "qwen 3 30b a3b": Checkpoint(
        config("qwen3_moe", 2048, 6144, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768),
        model(
            48,
            (*NORMS, *ATTENTION, *QK_NORMS, "mlp.gate.weight", *experts(128, ("gate_proj", "up_proj", "down_proj"))),
        ),
        61064245248,
    ),
    "gemma 3 4b": Checkpoint(
        gemma(2560, 10240),
        (*model(34, GEMMA_PARTS, "language_model.model.", head=False), *siglip(27)),
        8600158944,
    ),
    "gemma 3 27b": Checkpoint(
        gemma(5376, 21504, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
        (*model(62, GEMMA_PARTS, "language_model.model.", head=False), *siglip(27)),
        54864813280,
    ),
    "deepseek v3": Checkpoint(DEEPSEEK, tuple(deepseek()), 680571043840 + 2 * 3918786560 + 4 * 41555600),
    "gpt-oss 20b": Checkpoint(gpt_oss(24, 32), model(24, GPT_OSS_PARTS), 13761264768),
    "phi 3 mini": Checkpoint(
        config("phi3", 3072, 8192, 32, 32, 32064),
        model(32, (*NORMS, "self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.gate_up_proj.weight", MLP[2])),
        7642159104,
    ),
}
