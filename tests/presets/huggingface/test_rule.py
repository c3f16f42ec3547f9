"""`HuggingFaceShardingRule`: which dimension of which parameter is split, on which axis, and what is reported."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.check import LARGE_BYTES
from shardrules.presets.huggingface import HuggingFaceShardingRule
from shardrules.presets.huggingface.shapes import checkpoint_shapes
from tests.presets.huggingface.checkpoints import CHECKPOINTS

MESH = sr.mesh_shape("data:16,model:8")
DTYPES = {"BF16": jnp.bfloat16, "F32": jnp.float32, "U8": jnp.uint8, "F8_E4M3": jnp.float8_e4m3fn}
LAYER = "model.layers.0."


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def published(name: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the tensors of a published checkpoint, of four layers and two experts each."""
    checkpoint = CHECKPOINTS[name]
    names = [
        name for name in checkpoint.names if not re.search(r"layers\.([4-9]|[1-5]\d|6[02-9])\.|experts\.[2-9]", name)
    ]
    names = [name for name in names if not re.search(r"experts\.1\d", name)]
    shapes = checkpoint_shapes(checkpoint.config, names)
    return {name: jax.ShapeDtypeStruct(shape, DTYPES[dtype]) for name, (dtype, shape) in shapes.items()}


def split(tree: Any, mesh: Any = MESH, **options: Any) -> dict[str, P]:
    return HuggingFaceShardingRule(**options).plan(tree, mesh).check().specs


def codes(plan: sr.ShardingPlan) -> list[str]:
    quiet = ("unused-axis", "unmatched")
    return [finding.code for finding in plan.findings if finding.severity != "note" and finding.code not in quiet]


# ---- published checkpoints ----


@pytest.mark.parametrize("mesh", ["data:16,model:8", "fsdp:32,tp:4", "dp:64", "tensor:4", "data:2,fsdp:8,mp:2"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_large_parameter_is_split(name: str, mesh: str) -> None:
    plan = HuggingFaceShardingRule().plan(published(name), sr.mesh_shape(mesh)).check()
    for leaf, decision in zip(plan.kinds, plan.decisions, strict=True):
        assert decision.spec is not None, leaf.path
        assert leaf.nbytes < LARGE_BYTES or any(decision.spec) or "a_proj" in leaf.path, leaf.path
    assert not {"large-replicated", "other-dim"} & set(codes(plan))


@pytest.mark.parametrize(
    ("name", "path", "spec"),
    [
        ("llama 3 8b", "model.embed_tokens.weight", P("model", "data")),
        ("llama 3 8b", "lm_head.weight", P("model", "data")),
        ("llama 3 8b", "model.layers.0.self_attn.q_proj.weight", P("model", "data")),
        ("llama 3 8b", "model.layers.0.self_attn.k_proj.weight", P("model", "data")),
        ("llama 3 8b", "model.layers.0.self_attn.o_proj.weight", P("data", "model")),
        ("llama 3 8b", "model.layers.0.mlp.gate_proj.weight", P("model", "data")),
        ("llama 3 8b", "model.layers.0.mlp.down_proj.weight", P("data", "model")),
        ("llama 3 8b", "model.layers.0.input_layernorm.weight", P()),
        ("qwen 2.5 14b", "model.layers.0.self_attn.q_proj.bias", P("model")),
        ("qwen 3 8b", "model.layers.0.self_attn.q_norm.weight", P()),
        ("qwen 3 30b a3b", "model.layers.0.mlp.experts.0.gate_proj.weight", P("model", "data")),
        ("qwen 3 30b a3b", "model.layers.0.mlp.gate.weight", P()),
        ("mixtral 8x7b", "model.layers.0.block_sparse_moe.experts.0.w1.weight", P("model", "data")),
        ("mixtral 8x7b", "model.layers.0.block_sparse_moe.experts.0.w2.weight", P("data", "model")),
        ("gemma 3 27b", "language_model.model.layers.0.mlp.up_proj.weight", P("model", "data")),
        ("gemma 3 27b", "vision_tower.vision_model.encoder.layers.0.mlp.fc2.weight", P("data", "model")),
        ("gemma 3 27b", "multi_modal_projector.mm_input_projection_weight", P("data", "model")),
        ("deepseek v3", "model.layers.3.mlp.experts.0.up_proj.weight", P("model", "data")),
        ("deepseek v3", "model.layers.3.mlp.shared_experts.down_proj.weight", P("data", "model")),
        ("deepseek v3", "model.layers.0.self_attn.q_b_proj.weight", P("model", "data")),
        ("deepseek v3", "model.layers.0.self_attn.q_b_proj.weight_scale_inv", P("model", None)),
        ("deepseek v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", P(None, "data")),
        ("deepseek v3", "model.layers.61.eh_proj.weight", P("model", "data")),
        ("gpt-oss 20b", "model.layers.0.mlp.experts.gate_up_proj_blocks", P("model", "data", None, None)),
        ("gpt-oss 20b", "model.layers.0.mlp.experts.gate_up_proj_scales", P("model", "data", None)),
        ("gpt-oss 20b", "model.layers.0.mlp.experts.down_proj_bias", P("model", None)),
        ("gpt-oss 20b", "model.layers.0.self_attn.sinks", P("model")),
        ("gpt-oss 20b", "model.layers.0.self_attn.o_proj.bias", P()),
        ("gpt-oss 20b", "model.layers.0.mlp.router.weight", P()),
        ("phi 3 mini", "model.layers.0.self_attn.qkv_proj.weight", P("model", "data")),
    ],
)
def test_parameters_are_split_by_their_role(name: str, path: str, spec: P) -> None:
    assert split(published(name))[path] == spec


def test_dots_and_slashes_mean_the_same() -> None:
    dotted = published("mixtral 8x7b")
    specs = split({name.replace(".", "/"): struct for name, struct in dotted.items()})
    assert list(specs.values()) == list(split(dotted).values())


# ---- other layouts of parameters ----


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("layers/self_attn/q_proj/weight", (32, 4096, 4096), P(None, "model", "data")),
        ("layers/self_attn/q_proj/bias", (32, 4096), P(None, "model")),
        ("layers/input_layernorm/weight", (32, 4096), P()),
        ("layers/mlp/experts/gate_proj/weight", (4, 64, 1024, 2048), P(None, "model", None, "data")),
        ("model.layers.1.feed_forward.experts.down_proj", (16, 8192, 5120), P("model", "data", None)),
        ("model.layers.1.mlp.experts.gate_up_proj", (20, 2880, 5760), P(None, "data", "model")),
        ("transformer.h.0.attn.c_attn.weight", (768, 2304), P("model", "data")),
        ("gpt_neox.layers.0.attention.query_key_value.weight", (6144, 2048), P("model", "data")),
        ("transformer.h.0.mlp.dense_4h_to_h.weight", (4096, 16384), P("data", "model")),
        ("bert.encoder.layer.0.attention.output.dense.weight", (1024, 1024), P("data", "model")),
        ("bert.encoder.layer.0.output.LayerNorm.weight", (1024,), P()),
        ("base_model.model.model.layers.0.mlp.down_proj.base_layer.weight", (4096, 14336), P("data", "model")),
        ("visual.patch_embed.proj.weight", (1280, 3, 2, 14, 14), P("data", None, None, None, None)),
    ],
)
def test_other_layouts_of_parameters(path: str, shape: tuple[int, ...], spec: P) -> None:
    assert split({path: bf16(*shape)}) == {path: spec}


@pytest.mark.parametrize(
    ("shapes", "options", "specs"),
    [
        (
            {"o.lora_A": (16, 4096), "o.lora_B": (4096, 16), "q.lora_A": (16, 4096), "q.lora_B": (4096, 16)},
            {"fsdp": None, "roles": {"o": "rows", "q": "heads"}},
            [P(None, "model"), P(), P(), P("model", None)],  # the rank stays whole
        ),
        (
            {
                "self_attn.o_proj.lora_A": (16, 4096),
                "self_attn.o_proj.lora_B": (4096, 16),
                "self_attn.q_proj.lora_A": (16, 4096),
                "self_attn.q_proj.lora_B": (4096, 16),
            },
            {"fsdp": None},
            [P(None, "model"), P(), P(), P("model", None)],
        ),
        # Matrices of GPT-2 are (in, out), and so are packed ones of GPTQ.
        ({"mlp.c_fc": (768, 3072), "mlp.c_proj": (3072, 768)}, {}, [P("data", "model"), P("model", "data")]),
    ],
    ids=["adapters", "adapters of projections", "gpt2"],
)
def test_parameters_of_one_layer(shapes: dict[str, tuple[int, ...]], options: Any, specs: list[P]) -> None:
    tree = {f"{LAYER}{name}.weight": bf16(*shape) for name, shape in shapes.items()}
    assert list(split(tree, **options).values()) == specs


def test_packed_matrices_of_gptq_are_in_out() -> None:
    layer = {"qweight": (512, 14336), "scales": (32, 14336), "g_idx": (4096,)}
    specs = split({f"{LAYER}mlp.up_proj.{name}": bf16(*shape) for name, shape in layer.items()})
    assert list(specs.values()) == [P(), P("data", "model"), P("data", "model")]


# ---- what does not divide ----


def attention(kv_heads: int = 8, head_dim: int = 128, heads: int = 32, **vectors: int) -> dict[str, Any]:
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    tree = {f"{LAYER}self_attn.{name}_proj.weight": bf16(count * head_dim, 4096) for name, count in sizes.items()}
    return tree | {f"{LAYER}self_attn.{name}": bf16(size) for name, size in vectors.items()}


NORM, SINKS, WHOLE = {"q_norm": 128}, {"sinks": 64}, ["whole-heads", "whole-heads"]


@pytest.mark.parametrize(
    ("tree", "mesh", "head_dim", "expected", "words"),
    [
        (
            attention(),
            "data:4,model:16",
            128,
            WHOLE,
            "8 key and value heads of 128 do not divide over 'model' of size 16",
        ),
        (attention(), "data:4,model:3", None, [*WHOLE, "other-dim"], "so they are whole on it"),
        (attention(4, **NORM), "data:16,model:8", None, WHOLE, "4 key and value heads of 128"),
        (attention(8, 64, 64, **SINKS), "data:16,model:8", None, [], ""),
        (attention(), "data:4,model:16", None, ["cut-heads", "cut-heads"], "Pass head_dim"),
        (attention(8, 128, 40), "model:16", 128, [*WHOLE, "cut-heads"], "40 query heads of 128 do not divide over"),
        ({"lm_head.weight": bf16(49155, 1025)}, "data:16,model:8", None, ["other-dim", "large-replicated"], ""),
        ({"model.layers.0.mystery.weight": bf16(8192, 8192)}, "data:16,model:8", None, ["large-replicated"], ""),
    ],
    ids=["few", "no part", "norm", "sinks", "unknown size", "queries", "nothing divides", "unknown name"],
)
def test_heads_and_large_parameters_that_do_not_divide(
    tree: Any, mesh: str, head_dim: int | None, expected: list[str], words: str
) -> None:
    plan = HuggingFaceShardingRule(head_dim=head_dim).plan(tree, sr.mesh_shape(mesh))
    assert sorted(codes(plan)) == sorted(expected)
    assert words in str(plan)
    for name in "kv" if "whole-heads" in expected else "":
        assert "model" not in plan.specs[f"{LAYER}self_attn.{name}_proj.weight"]


def test_a_vocabulary_that_does_not_divide_is_reported() -> None:
    plan = HuggingFaceShardingRule().plan({"lm_head.weight": bf16(151665, 5120)}, MESH)
    assert plan.check().specs == {"lm_head.weight": P(None, ("model", "data"))}
    (finding,) = [finding for finding in plan.findings if finding.code == "other-dim"]
    assert (
        finding.message == "'model' of size 8 does not divide dimension 0, vocabulary, and splits dimension 1 instead"
    )
    assert finding.remedy == "Pad it to 151672"


# ---- axes, and composing ----


@pytest.mark.parametrize(
    ("mesh", "options", "spec"),
    [
        ("dp:2,tp:4", {}, P("tp", "dp")),
        ("data:2,fsdp:2,tensor:2", {}, P("tensor", "fsdp")),
        ("fsdp:8,tp:1", {}, P("fsdp", None)),
        ("x:2,y:4", {"tensor": "y", "fsdp": "x"}, P("y", "x")),
        ("x:2,y:4", {"tensor": ("x", "y")}, P(("x", "y"), None)),
        ("data:2,model:4", {"fsdp": None}, P("model", None)),
        ("data:2,model:4", {"tensor": None}, P("data", None)),
    ],
)
def test_axes_come_from_the_mesh_or_the_arguments(mesh: str, options: Any, spec: P) -> None:
    assert split({"mlp.up_proj.weight": bf16(64, 32)}, sr.mesh_shape(mesh), **options) == {"mlp.up_proj.weight": spec}


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("mlp.experts.down_proj", (16, 8192, 5120), P("expert", "model", "data")),
        ("mlp.experts.gate_up_proj", (32, 2880, 5760), P("expert", "data", "model")),
        ("block_sparse_moe.input_linear.weight", (32, 1024, 1024), P("expert", "model", "data")),
        ("block_sparse_moe.output_linear.weight", (32, 1024, 512), P("expert", "data", "model")),
        ("mlp.switch_mlp.up_proj.weight", (32, 768, 2048), P("expert", "model", "data")),
    ],
)
def test_experts_are_in_out_unless_a_module_has_them(name: str, shape: tuple[int, ...], spec: P) -> None:
    assert list(split({f"{LAYER}{name}": bf16(*shape)}, sr.mesh_shape("data:4,expert:8,model:2")).values()) == [spec]


def test_a_mesh_without_a_usual_axis_is_an_error() -> None:
    with pytest.raises(sr.errors.PlanError, match=r"none of the mesh's axes, x:4, is known .*\n.*tensor=\.\.\."):
        HuggingFaceShardingRule().plan({"mlp.up_proj.weight": bf16(64, 32)}, sr.mesh_shape("x:4")).check()


def test_roles_extend_the_rule() -> None:
    tree = {"block.0.up.weight": bf16(64, 32), "block.0.q_proj.weight": bf16(64, 32)}
    roles = {"up": "columns", "block/q_proj": "rows"}
    assert list(split(tree, roles=roles).values()) == [P("data", "model"), P("model", "data")]


@pytest.mark.parametrize(
    ("roles", "error", "message"),
    [
        ({"up": "column"}, sr.errors.ConfigError, r"'up' has unknown role 'column' \(did you mean 'columns'\?\)"),
        (["gate"], sr.errors.ConfigTypeError, "roles must map names of modules to roles"),
        ({3: "rows"}, sr.errors.ConfigTypeError, "roles must map names of modules to roles"),
    ],
)
def test_invalid_roles_are_refused(roles: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HuggingFaceShardingRule(roles=roles)


def test_other_rules_override_and_complete_it() -> None:
    rule = sr.CompositeShardingRule(
        sr.RegexShardingRule([("embed_tokens", P(None, "model"))]),
        HuggingFaceShardingRule(),
        sr.FSDPShardingRule("data"),
    )
    tree = {
        "model.embed_tokens.weight": bf16(32000, 4096),
        "mystery": bf16(4096, 4096),
        "lm_head.weight": bf16(32000, 64),
    }
    assert list(rule.plan(tree, MESH).specs.values()) == [P("model", "data"), P(None, "model"), P(None, "data")]


def test_a_chain_keeps_what_is_decided_before() -> None:
    rule = sr.DimShardingRule("data", 0) | HuggingFaceShardingRule()
    tree = {"mlp.up_proj.weight": bf16(64, 32), "norm.weight": bf16(64)}
    assert list(rule.plan(tree, MESH).check().specs.values()) == [P("data", "model"), P("data")]
