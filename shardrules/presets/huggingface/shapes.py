"""The shapes of the tensors of a checkpoint, from its `config.json` and the names in its index.

An index has names and no shapes. For the architectures below the shapes follow from the configuration; what does not is
an error, and so is a sum that differs from the `total_size` in the index.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, final

import attrs

from shardrules.core.errors import CheckpointError, suggest
from shardrules.core.fields import LARGEST_INTEGER

Shape: TypeAlias = tuple[int, ...]

_TEXT_MODELS = (
    *("llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("gemma", "gemma2", "gemma3", "gemma3_text", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss"),
)
"""The values of `model_type`."""

_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
    "siglip_vision_model": {"num_channels": 3},
}
"""Values that published configurations leave out, by `model_type`."""

_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NUMBER = re.compile(r"\.\d+\.")
_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F8_E4M3": 8, "U8": 8}

_HEADER_BYTES = (60, 512)
"""The least and the most that a tensor takes in a header: punctuation and keys alone, and a long name with many digits.
Some totals are of whole files. Chosen by hand."""

_BLOCK = 32
"""Numbers of four bits that share a scale, in 16 bytes."""


@final
@attrs.frozen
class _Config:
    """The values of a `config.json`, or of a part of it."""

    values: Mapping[str, Any]

    def size(self, *names: str) -> int:
        """Returns the first of the named sizes that is there; a `CheckpointError` says which is missing."""
        # The defaults of a model type count only where the configuration has none of the names.
        for table in (self.values, _DEFAULTS.get(str(self.values.get("model_type")), {})):
            for name in names:
                value = table.get(name)
                if value is None:
                    continue
                if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_INTEGER:
                    raise CheckpointError(f"{name!r} must be a size, got {value!r:.60}")
                return value
        raise CheckpointError(f"it has no {' or '.join(map(repr, names))}")

    def part(self, name: str) -> "_Config":
        """Returns a table in it, or itself where it has none."""
        part = self.values.get(name)
        return _Config(part) if isinstance(part, Mapping) else self

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads", "num_attention_heads")

    @property
    def head_dim(self) -> int:
        """The size of a head; by default a share of the hidden size."""
        is_default = self.values.get("head_dim") is None and "head_dim" not in _DEFAULTS.get(
            str(self.values.get("model_type")), {}
        )
        return self.hidden // max(self.heads, 1) if is_default else self.size("head_dim")

    @property
    def is_latent(self) -> bool:
        """Attention is over latent keys and values."""
        return self.values.get("kv_lora_rank") is not None

    @property
    def query_dim(self) -> int:
        """The size of a head of queries."""
        return self.size("qk_nope_head_dim") + self.size("qk_rope_head_dim") if self.is_latent else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.size("v_head_dim") if self.is_latent else self.head_dim

    @property
    def experts(self) -> int:
        return self.size("n_routed_experts", "num_local_experts", "num_experts")

    @property
    def expert_width(self) -> int:
        return self.size("moe_intermediate_size", "intermediate_size")

    def width(self, module: str) -> int:
        """The hidden size of the MLP around `module`."""
        if "experts." in module and "shared_experts." not in module:
            return self.expert_width
        if "shared_experts." in module:
            return self.size("n_shared_experts") * self.size("moe_intermediate_size")
        if "shared_expert." in module:
            return self.size("shared_expert_intermediate_size")
        return self.size("intermediate_size")


_Rule: TypeAlias = tuple[str, Callable[[_Config, str], Shape]]
"""A pattern for the end of a name, and the shape of the tensors that it matches."""

_TEXT: tuple[_Rule, ...] = (
    (r"(embed_tokens|lm_head|shared_head\.head)\.weight", lambda c, _: (c.size("vocab_size"), c.hidden)),
    (r"q_a_layernorm\.weight", lambda c, _: (c.size("q_lora_rank"),)),
    (r"kv_a_layernorm\.weight", lambda c, _: (c.size("kv_lora_rank"),)),
    (r"self_attn\.[qk]_norm\.weight", lambda c, _: (c.head_dim,)),
    (r"\w*norm\.weight", lambda c, _: (c.hidden,)),
    (r"q_a_proj\.weight", lambda c, _: (c.size("q_lora_rank"), c.hidden)),
    (r"q_a_proj\.bias", lambda c, _: (c.size("q_lora_rank"),)),
    (r"q_b_proj\.weight", lambda c, _: (c.heads * c.query_dim, c.size("q_lora_rank"))),
    (
        r"kv_a_proj_with_mqa\.weight",
        lambda c, _: (c.size("kv_lora_rank") + c.size("qk_rope_head_dim"), c.hidden),
    ),
    (
        r"kv_b_proj\.weight",
        lambda c, _: (c.heads * (c.size("qk_nope_head_dim") + c.value_dim), c.size("kv_lora_rank")),
    ),
    (r"q_proj\.weight", lambda c, _: (c.heads * c.query_dim, c.hidden)),
    (r"q_proj\.bias", lambda c, _: (c.heads * c.query_dim,)),
    (r"[kv]_proj\.weight", lambda c, _: (c.kv_heads * c.head_dim, c.hidden)),
    (r"[kv]_proj\.bias", lambda c, _: (c.kv_heads * c.head_dim,)),
    (r"o_proj\.weight", lambda c, _: (c.hidden, c.heads * c.value_dim)),
    (r"o_proj\.bias", lambda c, _: (c.hidden,)),
    (r"qkv_proj\.weight", lambda c, _: ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden)),
    (r"self_attn\.sinks", lambda c, _: (c.heads,)),
    (r"eh_proj\.weight", lambda c, _: (c.hidden, 2 * c.hidden)),
    (r"mlp\.shared_expert_gate\.weight", lambda c, _: (1, c.hidden)),
    (r"(mlp|block_sparse_moe)\.(gate|router)\.weight", lambda c, _: (c.experts, c.hidden)),
    (r"mlp\.(gate\.e_score_correction_bias|router\.bias)", lambda c, _: (c.experts,)),
    (r"experts\.gate_up_proj_blocks", lambda c, _: (c.experts, 2 * c.expert_width, c.hidden // _BLOCK, _BLOCK // 2)),
    (r"experts\.gate_up_proj_scales", lambda c, _: (c.experts, 2 * c.expert_width, c.hidden // _BLOCK)),
    (r"experts\.gate_up_proj_bias", lambda c, _: (c.experts, 2 * c.expert_width)),
    (r"experts\.gate_up_proj", lambda c, _: (c.experts, c.hidden, 2 * c.expert_width)),
    (r"experts\.down_proj_blocks", lambda c, _: (c.experts, c.hidden, c.expert_width // _BLOCK, _BLOCK // 2)),
    (r"experts\.down_proj_scales", lambda c, _: (c.experts, c.hidden, c.expert_width // _BLOCK)),
    (r"experts\.down_proj_bias", lambda c, _: (c.experts, c.hidden)),
    (r"experts\.down_proj", lambda c, _: (c.experts, c.expert_width, c.hidden)),
    (r"(gate_proj|up_proj|w1|w3)\.weight", lambda c, name: (c.width(name), c.hidden)),
    (r"(down_proj|w2)\.weight", lambda c, name: (c.hidden, c.width(name))),
    (r"mlp\.gate_up_proj\.weight", lambda c, name: (2 * c.width(name), c.hidden)),
)

_VISION: tuple[_Rule, ...] = (
    (
        r"patch_embedding\.weight",
        lambda c, _: (c.hidden, c.size("num_channels"), c.size("patch_size"), c.size("patch_size")),
    ),
    (
        r"position_embedding\.weight",
        lambda c, _: ((c.size("image_size") // max(c.size("patch_size"), 1)) ** 2, c.hidden),
    ),
    (r"self_attn\.(q_proj|k_proj|v_proj|out_proj)\.weight", lambda c, _: (c.hidden, c.hidden)),
    (r"mlp\.fc1\.weight", lambda c, _: (c.size("intermediate_size"), c.hidden)),
    (r"mlp\.fc2\.weight", lambda c, _: (c.hidden, c.size("intermediate_size"))),
    (r"mlp\.fc1\.bias", lambda c, _: (c.size("intermediate_size"),)),
    (r"(layer_norm[12]|post_layernorm)\.weight", lambda c, _: (c.hidden,)),
    (
        r"(layer_norm[12]|post_layernorm|(q|k|v|out)_proj|fc2|patch_embedding)\.bias",
        lambda c, _: (c.hidden,),
    ),
)

_TABLES = {
    table: tuple([(re.compile(rf"(?:.*\.)?{pattern}"), shape) for pattern, shape in rules])
    for table, rules in {"text": _TEXT, "vision": _VISION}.items()
}


def checkpoint_shapes(
    config: Any, names: Iterable[str], total_bytes: int | None = None
) -> dict[str, tuple[str, Shape]]:
    """Returns the dtype and the shape of each named tensor, as a file would have them.

    A `CheckpointError` says what the configuration lacks, which names it does not explain, or that all of them together
    are not the `total_bytes` of the index.

    ```python
    from shardrules.presets.huggingface.shapes import checkpoint_shapes

    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "torch_dtype": "bfloat16"}
    shapes = checkpoint_shapes(config, ["model.layers.0.mlp.down_proj.weight"])
    assert shapes == {"model.layers.0.mlp.down_proj.weight": ("BF16", (4096, 14336))}
    ```
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"it holds {config!r:.60}, not a configuration")
    model_type = config.get("model_type")
    if model_type not in _TEXT_MODELS:
        hint = suggest(str(model_type), _TEXT_MODELS)
        raise CheckpointError(
            f"the shapes of a {model_type!r} do not follow from it{hint}; they do for {', '.join(_TEXT_MODELS)}"
        )
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in (None, "fp8", "mxfp4"):
        raise CheckpointError(f"the shapes of tensors quantized by {method!r} do not follow from it")
    names = list(names)
    sizes = _sizes_of(_Config(config), names, quantization if method == "fp8" else None)
    # Scales beside a weight are tensors of their own, and are counted like the others.
    count = sum(_BITS[dtype] * math.prod(shape) // 8 for dtype, shape in sizes.values())
    least, most = _HEADER_BYTES
    surplus = 0 if total_bytes is None else total_bytes - count
    if surplus and not least * len(sizes) <= surplus <= most * len(sizes):
        raise CheckpointError(
            f"its tensors would take {count:,} bytes, and the index says that they take {total_bytes:,}"
        )
    return sizes


def head_dim_of(config: Any) -> int | None:
    """Returns the size of an attention head of a configuration's text model; `None` where it has none.

    ```python
    from shardrules.presets.huggingface.shapes import head_dim_of

    assert head_dim_of({"hidden_size": 4096, "num_attention_heads": 32}) == 128
    ```
    """
    text = _Config(config).part("text_config") if isinstance(config, Mapping) else None
    if text is None or text.is_latent:
        return None
    try:
        return text.head_dim or None
    except CheckpointError:
        return None


def _sizes_of(config: _Config, names: list[str], blocks: Mapping[str, Any] | None) -> dict[str, tuple[str, Shape]]:
    text = config.part("text_config")
    parts = {"text": text, "vision": config.part("vision_config")}
    dtype = next(
        (table.values[key] for table in (text, config) for key in ("dtype", "torch_dtype") if table.values.get(key)),
        None,
    )
    if not isinstance(dtype, str) or dtype not in _DTYPE_NAMES:
        raise CheckpointError(f"its dtype, {dtype!r:.40}, is not one of {', '.join(_DTYPE_NAMES)}")
    present = dict.fromkeys(names)
    shapes: dict[str, Shape | None] = {}
    result: dict[str, tuple[str, Shape]] = {}
    unknown: list[str] = []
    for name in names:
        weight = name.removesuffix("_scale_inv")
        # Equal layers, and the experts in them, are looked at once.
        template = _NUMBER.sub(".0.", weight)
        if template not in shapes:
            shapes[template] = _shape(parts, template, text)
        shape = shapes[template]
        if shape is None:
            unknown.append(name)
        elif weight != name:
            sides = (blocks or {}).get("weight_block_size")
            if (
                not isinstance(sides, list | tuple)
                or len(sides) != len(shape)
                or not all(isinstance(side, int) and side > 0 for side in sides)
            ):
                raise CheckpointError(f"its quantization_config has no weight_block_size for {name}")
            result[name] = "F32", tuple([-(-size // side) for size, side in zip(shape, sides, strict=True)])
        elif name.endswith(("_blocks", "_scales")):
            result[name] = "U8", shape
        elif f"{name}_scale_inv" in present:
            result[name] = "F8_E4M3", shape
        else:
            result[name] = "F32" if name.endswith("e_score_correction_bias") else _DTYPE_NAMES[dtype], shape
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise CheckpointError(f"it does not say which shape {', '.join(unknown[:3])}{more} has")
    return result


def _shape(parts: Mapping[str, _Config], name: str, text: _Config) -> Shape | None:
    if re.search(r"(^|\.)multi_modal_projector\.mm_input_projection_weight$", name):
        return parts["vision"].hidden, text.hidden
    if re.search(r"(^|\.)multi_modal_projector\.mm_soft_emb_norm\.weight$", name):
        return (parts["vision"].hidden,)
    part = "vision" if re.search(r"(^|\.)vision_tower\.", name) else "text"
    for pattern, shape in _TABLES[part]:
        if pattern.fullmatch(name):
            return shape(parts[part], name)
    return None
