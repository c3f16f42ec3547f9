"""Plans of published models, from shapes: time, bytes, and each element of the target counted once."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.axes import mesh_sizes
from shardrules.moves.sync.plan import SyncPlan
from shardrules.moves.sync.strided import TARGET
from shardrules.presets.huggingface import HuggingFaceShardingRule

SAMPLERS = ("tp:8", "dp:2,tp:4")

Shapes = dict[str, Any]


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def llama(layers: int, hidden: int, mlp: int, kv: int, vocab: int) -> tuple[Shapes, Shapes, list[Any]]:
    """A trainer's float32 by layer, a sampler's bfloat16 in stacks with q, k, v fused by head group."""
    by_layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.down_proj": (hidden, mlp),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (kv, hidden),
    }
    source = {
        f"model.layers.{index}.{name}.weight": struct(*shape, dtype=jnp.float32)
        for index in range(layers)
        for name, shape in by_layer.items()
    }
    for name, shape in (
        ("lm_head", (vocab, hidden)),
        ("model.embed_tokens", (vocab, hidden)),
        ("model.norm", (hidden,)),
    ):
        source[f"{name}.weight"] = struct(*shape, dtype=jnp.float32)
    target = {
        "lm_head": struct(vocab, hidden),
        "embed": struct(vocab, hidden),
        "norm": struct(hidden),
        "layers": {
            "norm1": struct(layers, hidden),
            "norm2": struct(layers, hidden),
            "qkv": struct(layers, hidden + 2 * kv, hidden),
            "out": struct(layers, hidden, hidden),
            "gate_up": struct(layers, 2 * mlp, hidden),
            "down": struct(layers, hidden, mlp),
        },
    }
    layer, cast = "model.layers.{i}.", "cast('bfloat16')"
    names = [
        ("lm_head.weight", "lm_head", cast),
        ("model.embed_tokens.weight", "embed", cast),
        ("model.norm.weight", "norm", cast),
        (f"{layer}input_layernorm.weight", "layers/norm1", f"stack('i') | {cast}"),
        (f"{layer}post_attention_layernorm.weight", "layers/norm2", f"stack('i') | {cast}"),
        (
            [f"{layer}self_attn.{each}_proj.weight" for each in "qkv"],
            "layers/qkv",
            f"reshape(8, -1, {hidden}) | concat(1) | reshape(-1, {hidden}) | stack('i') | {cast}",
        ),
        (f"{layer}self_attn.o_proj.weight", "layers/out", f"stack('i') | {cast}"),
        (
            [f"{layer}mlp.{each}_proj.weight" for each in ("gate", "up")],
            "layers/gate_up",
            f"concat(0) | interleave(0, 2) | stack('i') | {cast}",
        ),
        (f"{layer}mlp.down_proj.weight", "layers/down", f"stack('i') | {cast}"),
    ]
    return source, target, names


def gemma(
    layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, dim: int, vocab: int
) -> tuple[Shapes, Shapes, list[Any]]:
    """A scanned trainer with kernels (in, out) and heads as a dim; a sampler by layer; the head is tied."""
    source = {
        "embedder": struct(vocab, hidden),
        "norm": struct(hidden),
        "layers": {
            "q": struct(layers, hidden, heads, dim),
            "kv": struct(2, layers, hidden, kv_heads, dim),
            "out": struct(layers, heads, dim, hidden),
            "gate": struct(layers, hidden, 2, mlp),
            "down": struct(layers, mlp, hidden),
            "norms": struct(layers, 4, hidden),
        },
    }
    names_of_norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    by_layer = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        **{f"{name}_layernorm": (hidden,) for name in names_of_norms},
    }
    target = {
        f"model.layers.{index}.{name}.weight": struct(*shape)
        for index in range(layers)
        for name, shape in by_layer.items()
    }
    target |= {"model.embed_tokens.weight": struct(vocab, hidden), "lm_head.weight": struct(vocab, hidden)}
    target["model.norm.weight"] = struct(hidden)
    layer = "model.layers.{i}."
    names = [
        ("embedder", "model.embed_tokens.weight"),
        ("embedder", "lm_head.weight", "tied()"),
        ("norm", "model.norm.weight"),
        (
            "layers/q",
            f"{layer}self_attn.q_proj.weight",
            f"unstack('i') | reshape({hidden}, -1) | transpose(1, 0)",
        ),
        (
            "layers/kv",
            [f"{layer}self_attn.{each}_proj.weight" for each in "kv"],
            f"unstack('i', 1) | split(0) | reshape({hidden}, -1) | transpose(1, 0)",
        ),
        ("layers/out", f"{layer}self_attn.o_proj.weight", f"unstack('i') | reshape(-1, {hidden}) | transpose(1, 0)"),
        (
            "layers/gate",
            [f"{layer}mlp.{each}_proj.weight" for each in ("gate", "up")],
            f"unstack('i') | split(1) | reshape({hidden}, -1) | transpose(1, 0)",
        ),
        ("layers/down", f"{layer}mlp.down_proj.weight", "unstack('i') | transpose(1, 0)"),
        (
            "layers/norms",
            [f"{layer}{name}_layernorm.weight" for name in names_of_norms],
            "unstack('i') | split(0) | reshape(-1)",
        ),
    ]
    return source, target, names


def deepseek(
    layers: int, dense: int, hidden: int, experts: int, padded: int, width: int, mlp: int
) -> tuple[Shapes, Shapes, list[Any]]:
    """A tensor for each expert; a sampler with experts and layers in stacks, gate and up fused, experts padded."""
    source: Shapes = {}
    latent, queries, keys, key_outputs, outputs = (size * hidden // 7168 for size in (1536, 24576, 576, 32768, 16384))
    values, vocab = 512 * hidden // 7168, 129280 * hidden // 7168
    attention = {
        "input_layernorm": ("norm1", (hidden,)),
        "post_attention_layernorm": ("norm2", (hidden,)),
        "self_attn.q_a_proj": ("q_a", (latent, hidden)),
        "self_attn.q_a_layernorm": ("q_norm", (latent,)),
        "self_attn.q_b_proj": ("q_b", (queries, latent)),
        "self_attn.kv_a_proj_with_mqa": ("kv_a", (keys, hidden)),
        "self_attn.kv_a_layernorm": ("kv_norm", (values,)),
        "self_attn.kv_b_proj": ("kv_b", (key_outputs, values)),
        "self_attn.o_proj": ("out", (hidden, outputs)),
    }
    for index in range(layers):
        layer = f"model.layers.{index}."
        modules = {"mlp.": mlp} if index < dense else {"mlp.shared_experts.": width}
        if index >= dense:
            modules |= {f"mlp.experts.{expert}.": width for expert in range(experts)}
            source[f"{layer}mlp.gate.weight"] = struct(experts, hidden)
            source[f"{layer}mlp.gate.e_score_correction_bias"] = struct(experts)
        source |= {f"{layer}{name}.weight": struct(*shape) for name, (_, shape) in attention.items()}
        for module, size in modules.items():
            source[f"{layer}{module}gate_proj.weight"] = source[f"{layer}{module}up_proj.weight"] = struct(size, hidden)
            source[f"{layer}{module}down_proj.weight"] = struct(hidden, size)
    source |= {f"{name}.weight": struct(vocab, hidden) for name in ("model.embed_tokens", "lm_head")}
    source["model.norm.weight"] = struct(hidden)

    target: Shapes = {"embed": struct(vocab, hidden), "head": struct(vocab, hidden), "norm": struct(hidden)}
    first, rest = f"model.layers.{{i:0-{dense - 1}}}.", f"model.layers.{{i:{dense}-{layers - 1}}}."
    expert = f"{rest}mlp.experts.{{e}}."
    pad = f"stack('e') | pad(0, 0, {padded - experts}) | stack('i')"
    names: list[Any] = [
        ([f"{expert}gate_proj.weight", f"{expert}up_proj.weight"], "moe/w13", f"concat(0) | {pad}"),
        (f"{expert}down_proj.weight", "moe/w2", pad),
        (f"{rest}mlp.gate.weight", "moe/router", "stack('i')"),
        (f"{rest}mlp.gate.e_score_correction_bias", "moe/bias", "stack('i')"),
        ("model.embed_tokens.weight", "embed"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "norm"),
    ]
    for kind, count, pattern, module, size in (
        ("dense", dense, first, "mlp.", mlp),
        ("moe", layers - dense, rest, "mlp.shared_experts.", width),
    ):
        target[kind] = {short: struct(count, *shape) for short, shape in attention.values()}
        target[kind] |= {"gate_up": struct(count, 2 * size, hidden), "down": struct(count, hidden, size)}
        names += [
            (f"{pattern}{name}.weight", f"{kind}/{short}", "stack('i')") for name, (short, _) in attention.items()
        ]
        pair = [f"{pattern}{module}gate_proj.weight", f"{pattern}{module}up_proj.weight"]
        names += [(pair, f"{kind}/gate_up", "concat(0) | stack('i')")]
        names += [(f"{pattern}{module}down_proj.weight", f"{kind}/down", "stack('i')")]
    moe = layers - dense
    target["moe"] |= {"router": struct(moe, experts, hidden), "bias": struct(moe, experts)}
    target["moe"] |= {"w13": struct(moe, padded, 2 * width, hidden), "w2": struct(moe, padded, hidden, width)}
    return source, target, names


STACKED = sr.RegexShardingRule(
    [
        ("^(lm_head|embed|head)$", P("tp", None)),
        ("w13|w2", P(None, "tp")),
        ("qkv|gate_up|q_b|kv_b", P(None, "tp", None)),
        ("out|down", P(None, None, "tp")),
        ("", P()),
    ]
)
SCANNED = sr.RegexShardingRule(
    [
        ("embedder", P("tp", "fsdp")),
        ("layers/(q|out|down)$", P(None, "fsdp", "tp")),
        ("layers/gate", P(None, "fsdp", None, "tp")),
        ("layers/kv", P(None, None, "fsdp", "tp")),
        ("", P()),
    ]
)
MODELS: dict[str, tuple[Any, sr.ShardingRule, sr.ShardingRule, float]] = {
    "Llama 70B": (llama(80, 8192, 28672, 1024, 128256), HuggingFaceShardingRule(), STACKED, 1),
    "Gemma 27B": (gemma(62, 5376, 21504, 32, 16, 128, 262144), SCANNED, HuggingFaceShardingRule(fsdp=None), 1),
    "DeepSeek-V3": (deepseek(61, 3, 7168, 256, 264, 2048, 18432), HuggingFaceShardingRule(), STACKED, 5),
}


def elements_by_shard(plan: SyncPlan) -> np.ndarray:
    """The elements that are written for each target array on each device, by a count of contents."""
    counts = np.zeros((len(plan.target), len(plan.devices)), np.int64)
    for flow, route in zip(plan.flows, plan.schedule.routes, strict=True):
        size = int(np.prod([step.size for step in flow.inner], dtype=np.int64))
        rows = np.broadcast_to(flow.parts.arrays[TARGET][:, None, None], route.receivers.shape)
        np.add.at(counts, (rows.reshape(-1), route.receivers.reshape(-1)), size)
    return counts


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.slow] if name == "DeepSeek-V3" else []) for name in MODELS]
)
def test_a_published_model_is_planned_in_time(model: str, sampler: str) -> None:
    (source, target, names), old_rule, new_rule, seconds = MODELS[model]
    old = old_rule.plan(source, sr.mesh_shape("fsdp:8,tp:8")).check()
    new = new_rule.plan(target, sr.mesh_shape(sampler)).check()
    start = time.process_time()
    plan = sr.plan_sync(old, new, names=names)
    # Of this process: others may be busy, too. Twice what it takes alone, at most.
    assert time.process_time() - start < 2 * seconds
    # No device of the sampler has anything: each needs all of its shard, and every number has two bytes.
    needed = 8 * new.memory().device_bytes
    copies = 8 // mesh_sizes(new.mesh)["tp"]
    assert plan.lower_bound_bytes <= needed
    if model != "DeepSeek-V3":  # which has padding, that nobody sends
        assert plan.lower_bound_bytes == needed
    assert plan.moved_bytes <= 1.1 * plan.lower_bound_bytes
    # What two copies need crosses between hosts once, except for vectors that all eight devices of a host need.
    assert sum(plan.network_bytes.values()) <= 1.01 * needed / copies
    expected = np.zeros((len(plan.target), len(plan.devices)), np.int64)
    for index, layout in enumerate(map(plan.target.layouts.__getitem__, plan.target.layout_of.tolist())):
        expected[index, layout.owners.reshape(-1)] = np.prod(layout.cell, dtype=np.int64)
    assert (elements_by_shard(plan) == expected).all()
    sent = list(plan.sent_bytes.values())[:64]
    assert max(sent) <= 2 * min(sent)


def llama_values(values: Shapes) -> dict[str, np.ndarray]:
    q, k, v, gate, up = (
        np.stack([values[f"model.layers.{index}.{name}_proj.weight"] for index in range(2)])
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    )
    groups = [
        np.concatenate([x[:, 4 * g : 4 * g + 4], k[:, g : g + 1], v[:, g : g + 1]], 1) for x in [q] for g in range(8)
    ]
    gate_up = np.empty((2, 96, 32), np.float32)
    gate_up[:, ::2], gate_up[:, 1::2] = gate, up
    return {"layers/qkv": np.concatenate(groups, 1), "layers/gate_up": gate_up}


def gemma_values(values: Shapes) -> dict[str, np.ndarray]:
    layers = values["layers"]
    return {
        "lm_head.weight": values["embedder"],
        "model.embed_tokens.weight": values["embedder"],
        "model.layers.1.self_attn.q_proj.weight": layers["q"][1].reshape(8, 16).T,
        "model.layers.1.self_attn.v_proj.weight": layers["kv"][1, 1].reshape(8, 8).T,
        "model.layers.0.self_attn.o_proj.weight": layers["out"][0].reshape(16, 8).T,
        "model.layers.0.mlp.up_proj.weight": layers["gate"][0, :, 1].T,
        "model.layers.1.post_attention_layernorm.weight": layers["norms"][1, 1],
    }


def deepseek_values(values: Shapes) -> dict[str, np.ndarray]:
    def experts(layer: int, name: str) -> np.ndarray:
        tensors = [values[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] for expert in range(4)]
        return np.stack([*tensors, *[np.zeros_like(tensors[0])] * 4])

    return {
        "moe/w13": np.stack([np.concatenate([experts(i, "gate"), experts(i, "up")], 1) for i in (1, 2, 3)]),
        "moe/w2": np.stack([experts(i, "down") for i in (1, 2, 3)]),
        "dense/gate_up": np.concatenate([values[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")])[None],
        "moe/q_a": np.stack([values[f"model.layers.{i}.self_attn.q_a_proj.weight"] for i in (1, 2, 3)]),
    }


TOYS: dict[str, tuple[Any, Any]] = {
    "Llama": (llama(2, 32, 48, 8, 16), llama_values),
    "Gemma": (gemma(2, 8, 16, 4, 2, 4, 32), gemma_values),
    "DeepSeek": (deepseek(4, 1, 112, 4, 8, 16, 32), deepseek_values),
}


@pytest.mark.parametrize("model", list(TOYS))
def test_the_same_tables_at_toy_size_are_as_numpy_makes_them(model: str) -> None:
    (source, target, names), reference = TOYS[model]
    mesh = sr.create_mesh("fsdp:2,tp:2", devices=jax.devices()[:4])
    other = sr.create_mesh("tp:4", devices=jax.devices()[4:])
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: rng.integers(-9, 9, leaf.shape).astype(leaf.dtype), source)
    placed = sr.filter_shard(values, sr.AutoShardingRule(), mesh)
    plan = sr.plan_sync(placed, sr.AutoShardingRule().plan(target, other), names=names)
    result = plan.run(placed, check="sums")
    assert jax.tree.structure(result) == jax.tree.structure(target)
    arrays = dict(zip(sr.leaf_paths(target), jax.tree.leaves(result), strict=True))
    for path, array in reference(values).items():
        np.testing.assert_array_equal(np.asarray(arrays[path]), array.astype(arrays[path].dtype), err_msg=path)
