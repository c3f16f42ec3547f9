"""`sync_names`: tables between models and Hugging Face checkpoints, both ways, for published ones and small ones."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import shardrules as sr
from shardrules.presets import huggingface
from shardrules.presets.huggingface.shapes import checkpoint_shapes
from tests.presets.huggingface.checkpoints import CHECKPOINTS

DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32, "F8_E4M3": jnp.float8_e4m3fn, "U8": jnp.uint8}

Shapes = dict[str, jax.ShapeDtypeStruct]


def published(name: str) -> Shapes:
    checkpoint = CHECKPOINTS[name]
    shapes = checkpoint_shapes(checkpoint.config, checkpoint.names)
    return {name: jax.ShapeDtypeStruct(shape, DTYPES[dtype]) for name, (dtype, shape) in shapes.items()}


def stacked(checkpoint: Shapes) -> Any:
    """A model whose layers and experts are stacked wherever all of them are alike, with slashes in its paths."""
    groups: dict[str, list[str]] = {}
    for name in checkpoint:
        groups.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(name)
    counts: dict[str, int] = {}
    for name in checkpoint:
        for match in re.finditer(r"\.(\d+)(?=\.)", name):
            key = re.sub(r"\.\d+(?=\.)", ".*", name[: match.start()])
            counts[key] = max(counts.get(key, 0), int(match[1]) + 1)
    model: Shapes = {}
    for template, names in groups.items():
        fronts = [template[: match.start()] for match in re.finditer(r"\.\*", template)]
        sizes = tuple(counts[front] for front in fronts)
        first = checkpoint[names[0]]
        if int(np.prod(sizes)) == len(names):
            model[template.replace(".*", "").replace(".", "/")] = jax.ShapeDtypeStruct(
                (*sizes, *first.shape), jnp.float32 if first.dtype == jnp.bfloat16 else first.dtype
            )
        else:  # of some layers alone
            model |= {name.replace(".", "/"): checkpoint[name] for name in names}
    return model


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_checkpoints_have_tables_both_ways(name: str) -> None:
    checkpoint = published(name)
    model = stacked(checkpoint)
    rule, trainer, sampler = sr.AutoShardingRule(), sr.mesh_shape("fsdp:8,tp:8"), sr.mesh_shape("tp:8")
    forward, back = (huggingface.sync_names(model, checkpoint, reverse=reverse) for reverse in (False, True))
    plan = sr.plan_sync(rule.plan(model, trainer), rule.plan(checkpoint, sampler), names=forward)
    assert plan.moved_bytes == plan.lower_bound_bytes
    sr.plan_sync(rule.plan(checkpoint, sampler), rule.plan(model, trainer), names=back)
    # One line for all layers, and one for each array of layers that differ.
    assert len(forward.lines) == len(back.lines) < 100


def moved(tree: Any, shapes: Any, names: Any) -> Any:
    old = sr.create_mesh("fsdp:2,tp:2", devices=jax.devices()[:4])
    new = sr.create_mesh("tp:4", devices=jax.devices()[4:])
    placed = sr.filter_shard(tree, sr.AutoShardingRule(), old)
    return sr.plan_sync(placed, sr.AutoShardingRule().plan(shapes, new), names=names).run(placed, check="sums")


def test_a_flax_model_with_fused_kernels_is_a_checkpoint_and_back() -> None:
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.integers(-9, 9, shape).astype(np.float32)

    model = {
        "embed_tokens": {"embedding": values(20, 8)},
        "layers": {
            "attn": {"qkv_proj": {"kernel": values(3, 8, 16)}, "o_proj": {"kernel": values(3, 2, 4, 8)}},
            "mlp": {"up_proj": {"kernel": values(3, 8, 12)}, "gate_proj": {"kernel": values(3, 8, 12)}},
            "input_layernorm": {"scale": values(3, 8)},
        },
    }
    expected: dict[str, np.ndarray] = {"lm_head.weight": model["embed_tokens"]["embedding"][:18]}
    expected["model.embed_tokens.weight"] = expected["lm_head.weight"]
    for index in range(3):
        attn, mlp = model["layers"]["attn"], model["layers"]["mlp"]
        layer = f"model.layers.{index}."
        fused = attn["qkv_proj"]["kernel"][index].T
        for name, rows in (("q", slice(0, 8)), ("k", slice(8, 12)), ("v", slice(12, 16))):
            expected[f"{layer}self_attn.{name}_proj.weight"] = fused[rows]
        expected[f"{layer}self_attn.o_proj.weight"] = attn["o_proj"]["kernel"][index].reshape(8, 8).T
        gate_up = [mlp[f"{name}_proj"]["kernel"][index].T for name in ("gate", "up")]
        expected[f"{layer}mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
        expected[f"{layer}input_layernorm.weight"] = model["layers"]["input_layernorm"]["scale"][index]
    checkpoint = {name: jax.ShapeDtypeStruct(array.shape, jnp.bfloat16) for name, array in expected.items()}
    names = huggingface.sync_names(model, checkpoint, {"attn": "self_attn"})
    result = moved(model, checkpoint, names)
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(result[name]), array.astype(ml_dtypes.bfloat16), err_msg=name)
    back = huggingface.sync_names(model, checkpoint, {"attn": "self_attn"}, reverse=True)
    again = moved(jax.tree.map(np.asarray, result), model, back)
    model["embed_tokens"]["embedding"][18:] = 0
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, again), model)


def test_a_head_of_the_model_may_be_tied_in_the_checkpoint(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": np.ones((8, 4), np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    model = {"embed_tokens": {"weight": tensors["model.embed_tokens.weight"]}, "lm_head": {"weight": np.zeros((8, 4))}}
    table = huggingface.sync_names(model, tmp_path / "x.safetensors")
    assert (len(table.lines), table.unused) == (1, ("lm_head/weight",))
    back = huggingface.sync_names(model, tmp_path / "x.safetensors", reverse=True)
    assert [line.is_tied for line in back.lines] == [False, True]


def test_arrays_without_a_counterpart_are_errors_of_the_plan() -> None:
    model = {"layers": {"mlp": {"up_prj": jax.ShapeDtypeStruct((2, 4), jnp.float32)}}}
    checkpoint = {
        f"model.layers.{index}.mlp.up_proj.weight": jax.ShapeDtypeStruct((4,), jnp.float32) for index in (0, 1)
    }
    rule, mesh = sr.ReplicateShardingRule(), sr.mesh_shape("a:2")
    with pytest.raises(sr.errors.PlanError, match=r"unused: layers/mlp/up_prj[^$]*missing: model\.layers\.\*\.mlp"):
        sr.plan_sync(
            rule.plan(model, mesh), rule.plan(checkpoint, mesh), names=huggingface.sync_names(model, checkpoint)
        )
