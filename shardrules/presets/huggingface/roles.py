"""The purposes of the parameters of Hugging Face checkpoints, by their names."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias, final, get_args

import attrs

Role: TypeAlias = Literal["heads", "kv_heads", "columns", "rows", "vocab", "whole", "vector"]
"""The purpose of a module: making query heads, or key and value heads; widening or narrowing the activations; a table
of the vocabulary; whole on each device of the tensor axis; or a vector, such as a norm, that every device keeps."""

ROLE_NAMES: tuple[Role, ...] = get_args(Role)

_MODULES: Mapping[Role, str] = {
    "heads": "q_proj wq q_b_proj wq_b kv_b_proj query q_lin SelfAttention.q EncDecAttention.q self_attn.sinks",
    "kv_heads": "k_proj v_proj wk wv key self.value attention.value k_lin v_lin SelfAttention.k SelfAttention.v "
    "EncDecAttention.k EncDecAttention.v",
    "columns": "gate_proj up_proj gate_up_proj w1 w3 w13 v1 mlp.w2 fc1 fc_in c_fc c_fc_0 c_fc_1 linear_fc1 lin1 wi "
    "wi_0 wi_1 dense_h_to_4h intermediate.dense input_linear linear_1 mm_projector mm_input_projection eh_proj "
    "qkv_proj query_key_value wqkv Wqkv qkv c_attn W_pack in_proj in_proj_qkv in_proj_qkvz in_proj_z in_proj_ba "
    "in_proj_a in_proj_b dt_proj fc visual_projection text_projection project_in project_out",
    "rows": "o_proj out_proj wo down_proj w2 fc2 fc_out c_proj linear_fc2 lin2 out_lin dense_4h_to_h attention.dense "
    "self_attention.dense self_attn.dense output.dense output_linear attn.proj linear_2 x_proj SelfAttention.o "
    "EncDecAttention.o merger.mlp",
    "vocab": "embed_tokens lm_head wte word_embeddings embed_in embed_out tok_embeddings shared shared_head.head "
    "embed_tokens_per_layer backbone.embeddings output output_layer "
    "predictions.decoder",
    "whole": "q_a_proj kv_a_proj_with_mqa gate router router.layer router.classifier gate.wg shared_expert_gate "
    "indexer.wk weights_proj wpe position_embedding position_embeddings embed_positions pos_embed "
    "token_type_embeddings relative_attention_bias patch_embedding patch_embed.proj patch_embeddings.projection conv1d "
    "conv1 conv2 score classifier dense per_layer_input_gate per_layer_projection per_layer_model_projection",
    "vector": "inv_freq A_log dt_bias D e_score_correction_bias g_idx",
}

ROLES: Mapping[str, Role] = MappingProxyType({name: role for role, names in _MODULES.items() for name in names.split()})
"""The role of each module by its name, or by the module around it and its name, `self_attn.dense`."""

FUSED = ("qkv_proj", "query_key_value", "wqkv", "Wqkv", "qkv", "c_attn", "W_pack", "in_proj_qkv", "in_proj_qkvz")
"""Matrices that hold queries, keys and values one after the other."""

_STACKS = ("experts", "switch_mlp", "block_sparse_moe")
"""Modules whose parameters may have all experts in a dimension of their own."""

_WRAPPERS = ("base_layer", "default")
"""Modules that adapters put around others."""

_SUFFIX = re.compile(r"_(blocks|scales|bias|weight)$")
_NORM = re.compile(r"norm|^ln(_|$)|^ln\d", re.IGNORECASE)
_NAMES = 3
"""The names that are tried from the end: the module is the last but one, or the last but two in `weight.absmax`. With
all, a parameter of an unknown name would have the role of a module around it."""


@final
@attrs.frozen
class Parameter:
    """A parameter of a checkpoint, as its path describes it."""

    role: Role | None
    """`None` for an unknown name."""
    module: str = ""
    """The name that has the role."""
    parent: str = ""
    """The path of the module around it, without indices."""
    name: str = "weight"
    """The rest of the path: `weight`, `bias`, `weight_scale_inv`."""
    is_stacked: bool = False
    """It may have all experts in a dimension of its own."""
    is_bare: bool = False
    """The path ends with the module: there is no `weight` in it."""

    @property
    def is_vector(self) -> bool:
        """It has one number for each output, in each of stacked layers and experts."""
        return self.name in ("bias", "SCB") or self.module == "sinks"

    @property
    def rank(self) -> int:
        """The number of dimensions that it has in one layer and one expert."""
        # Weights of four bits are in blocks of 32: two in each of 16 bytes.
        return 1 if self.is_vector else 3 if self.name == "blocks" else 2


def read_path(path: str, roles: Mapping[str, Role]) -> Parameter:
    """Returns what a path says of its parameter; `roles` takes precedence over `ROLES`.

    ```python
    from shardrules.presets.huggingface.roles import read_path

    parameter = read_path("model.layers.3.mlp.experts.17.gate_proj.weight", {})
    assert (parameter.role, parameter.parent) == ("columns", "model.layers.mlp.experts")
    assert read_path("model/layers/0/mlp/experts/down_proj_blocks", {}).name == "blocks"
    ```
    """
    segments = path.replace("/", ".").split(".")
    stacks = [index for index, name in enumerate(segments) if name in _STACKS]
    # Without an index behind the last stack, its experts are one array. A slice past the end is empty, and no index.
    is_stacked = bool(stacks) and not "".join(segments[stacks[-1] + 1 : stacks[-1] + 2]).isdecimal()
    names = [name for name in segments if not name.isdecimal() and name not in _WRAPPERS]
    # The innermost module says most, so names are tried from the end.
    for last in range(len(names) - 1, max(len(names) - 1 - _NAMES, -1), -1):
        rest = ".".join(names[last + 1 :]) or "weight"
        suffix = _SUFFIX.search(names[last]) if last == len(names) - 1 else None
        parent = names[last - 1] if last else ""
        # A name is tried as it is before a suffix is cut from it: `down_proj_blocks`.
        readings = [(names[last], rest), *([(names[last][: suffix.start()], suffix[1])] if suffix else [])]
        for name, parameter_name in readings:
            qualified = f"{parent}.{name}"
            # The caller's table precedes `ROLES`, and in each of them a name with its parent precedes the name alone.
            role: Role | None = next(
                (table[key] for table in (roles, ROLES) for key in (qualified, name) if key in table), None
            )
            if role is None and _NORM.search(name):
                role = "vector"
            if role is not None:
                # An adapter's first matrix takes the inputs, its second one makes the outputs; the rank stays whole.
                if parameter_name.startswith("lora_A" if role != "rows" else "lora_B"):
                    role = "whole"
                is_bare = name == names[-1]
                return Parameter(role, name, ".".join(names[:last]), parameter_name, is_stacked, is_bare)
    return Parameter(None)
