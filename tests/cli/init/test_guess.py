"""What is guessed for the layers of well-known models."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.cli.init.guess import axis_roles
from shardrules.cli.init.text import guess_rules
from shardrules.core.axes import AnyMesh
from shardrules.core.spec import same
from tests.zoo import MESHES, TREES


def shapes(tree: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16), tree, is_leaf=lambda node: isinstance(node, tuple)
    )


def guessed(tree: Any, mesh: str | AnyMesh) -> dict[str, P]:
    """The specs of the guessed rules, by path."""
    plan = sr.ReplicateShardingRule().plan(tree, sr.mesh_shape(mesh) if isinstance(mesh, str) else mesh)
    return dict(zip(plan.paths, guess_rules("model", plan, "plan.json")[1], strict=True))


D, H, V = 1024, 4096, 50304

TORCH = {
    "embed_tokens": {"weight": (V, D)},
    "layers": [
        {
            "self_attn": {name: {"weight": (D, D)} for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
            "mlp": {"up_proj": {"weight": (H, D)}, "down_proj": {"weight": (D, H)}},
            "norm": {"weight": (D,)},
        }
    ],
    "lm_head": {"weight": (V, D)},
}
FLAX = {
    "wte": {"embedding": (V, D)},
    "h": {"0": {"c_attn": {"kernel": (D, 3 * D)}, "c_proj": {"kernel": (D, D)}, "c_fc": {"kernel": (D, H)}}},
    "head": {"kernel": (D, V), "bias": (V,)},
}
HEADS = {
    "query": {"kernel": (D, 16, 64), "bias": (16, 64)},
    "out": {"kernel": (16, 64, D), "bias": (D,)},
}
BARE = {"mlp": {"up": (D, H), "down": (H, D)}, "attention": {"q": (D, D), "o": (D, D)}}
TRANSPOSED = {"mlp": {"up": (H, D), "down": (D, H)}, "attention": {"q": (D, D), "o": (D, D)}}
EXPERTS = {"experts": {"up": (8, D, H), "down": (8, H, D)}, "up": (D, H), "norm": (D,)}
STACKED = {"layers": {"up": {"kernel": (12, D, H)}, "down": {"kernel": (12, H, D)}, "norm": {"scale": (12, D)}}}
CONVOLUTIONS = {
    "flax": {"conv": {"kernel": (3, 3, 512, 256), "bias": (256,)}},
    "torch": {"conv": {"weight": (256, 512, 3, 3), "bias": (256, 1, 1)}},
}


GRID = "data:4,model:2"

AS_WIDE_AS_THE_VOCABULARY = {
    "embed": (512, 256),
    "blocks": [{"up": (256, 512), "down": (512, 256)}],
    "lm_head": (512, 256),
}
EXPERT_BIASES = {"experts": {"up": (32, D, H), "up_bias": (32, H), "down": (32, H, D)}}
ODD_ROWS = {"wte": {"embedding": (50257, 768)}}
SEVEN = {"w": (7, 4096)}
PRIMES = {"w": (7, 5)}
VECTORS = {"w": (8,), "b": (2**20,)}
FSDP = {"up": (D, H), "down": (H, D)}

ROWS: list[tuple[Any, str, str, P]] = [
    (TORCH, GRID, "embed_tokens/weight", P("model", "data")),
    (TORCH, GRID, "layers/0/self_attn/q_proj/weight", P("model", "data")),
    (TORCH, GRID, "layers/0/self_attn/o_proj/weight", P("data", "model")),
    (TORCH, GRID, "layers/0/mlp/up_proj/weight", P("model", "data")),
    (TORCH, GRID, "layers/0/mlp/down_proj/weight", P("data", "model")),
    (TORCH, GRID, "layers/0/norm/weight", P()),
    (TORCH, GRID, "lm_head/weight", P("model", "data")),
    (FLAX, GRID, "wte/embedding", P("model", "data")),
    (FLAX, GRID, "h/0/c_attn/kernel", P("data", "model")),
    (FLAX, GRID, "h/0/c_proj/kernel", P("model", "data")),
    (FLAX, GRID, "h/0/c_fc/kernel", P("data", "model")),
    (FLAX, GRID, "head/kernel", P("data", "model")),
    (FLAX, GRID, "head/bias", P()),
    (HEADS, "fsdp:4,tp:2", "query/kernel", P("fsdp", "tp")),
    (HEADS, "fsdp:4,tp:2", "out/kernel", P("tp", None, "fsdp")),
    (HEADS, "fsdp:4,tp:2", "query/bias", P()),
    (HEADS, "fsdp:4,tp:2", "out/bias", P()),
    (HEADS, "fsdp:4,tp:32", "query/kernel", P("fsdp", None, "tp")),
    (HEADS, "fsdp:4,tp:32", "out/kernel", P(None, "tp", "fsdp")),
    (HEADS, "fsdp:4,tp:6", "query/kernel", P("fsdp")),
    (BARE, GRID, "mlp/up", P("data", "model")),
    (BARE, GRID, "mlp/down", P("model", "data")),
    (BARE, GRID, "attention/q", P("data", "model")),
    (BARE, GRID, "attention/o", P("model", "data")),
    (TRANSPOSED, GRID, "mlp/up", P("model", "data")),
    (TRANSPOSED, GRID, "mlp/down", P("data", "model")),
    (TRANSPOSED, GRID, "attention/q", P("model", "data")),
    (TRANSPOSED, GRID, "attention/o", P("data", "model")),
    (EXPERTS, "data:4,expert:8,model:2", "experts/up", P("expert", "data", "model")),
    (EXPERTS, "data:4,expert:8,model:2", "experts/down", P("expert", "model", "data")),
    (EXPERTS, "data:4,expert:8,model:2", "up", P(("data", "expert"), "model")),
    (EXPERTS, "data:4,expert:8,model:2", "norm", P()),
    (EXPERTS, GRID, "experts/up", P(None, "data", "model")),
    (EXPERTS, GRID, "experts/down", P(None, "model", "data")),
    (STACKED, "stage:4,data:4,model:2", "layers/up/kernel", P("stage", "data", "model")),
    (STACKED, "stage:4,data:4,model:2", "layers/down/kernel", P("stage", "model", "data")),
    (STACKED, "stage:4,data:4,model:2", "layers/norm/scale", P()),
    (STACKED, GRID, "layers/up/kernel", P(None, "data", "model")),
    (STACKED, GRID, "layers/norm/scale", P()),
    (CONVOLUTIONS, GRID, "flax/conv/kernel", P(None, None, "data", "model")),
    (CONVOLUTIONS, GRID, "torch/conv/weight", P("model", "data")),
    (AS_WIDE_AS_THE_VOCABULARY, GRID, "blocks/0/up", P("data", "model")),
    (AS_WIDE_AS_THE_VOCABULARY, GRID, "blocks/0/down", P("model", "data")),
    (AS_WIDE_AS_THE_VOCABULARY, GRID, "lm_head", P("model", "data")),
    (EXPERT_BIASES, "data:4,expert:2,model:2", "experts/up", P("expert", "data", "model")),
    (EXPERT_BIASES, "data:4,expert:2,model:2", "experts/up_bias", P()),
    (ODD_ROWS, GRID, "wte/embedding", P(None, ("model", "data"))),
    (SEVEN, GRID, "w", P(None, ("model", "data"))),
    (PRIMES, GRID, "w", P()),
    (VECTORS, "data:4", "w", P()),
    (VECTORS, "data:4", "b", P("data")),
    (FSDP, "data:4", "up", P("data")),
    (FSDP, "data:4", "down", P(None, "data")),
]
"""Trees, meshes, and the spec of an array in them."""


@pytest.mark.parametrize(("tree", "mesh", "path", "spec"), ROWS, ids=[f"{mesh} {path}" for _, mesh, path, _ in ROWS])
def test_layers_are_split_as_in_megatron(tree: Any, mesh: str, path: str, spec: P) -> None:
    assert same(guessed(shapes(tree), mesh)[path], spec)


@pytest.mark.parametrize(
    ("axes", "tensor", "data", "others"),
    [
        ("data,model", "model", "data", ""),
        ("dp,fsdp,tp", "tp", "dp,fsdp", ""),
        ("fsdp", "", "fsdp", ""),
        ("x", "", "x", ""),
        ("x,y", "y", "x", ""),
        ("x,tensor", "tensor", "x", ""),
        ("pp,data,expert,sp,mp", "mp", "data,sp", "expert,pp"),
        ("tensor_parallel,DATA", "tensor_parallel", "DATA", ""),
    ],
)
def test_names_say_what_axes_are_for(axes: str, tensor: str, data: str, others: str) -> None:
    roles = axis_roles(dict.fromkeys(axes.split(","), 2))
    assert (",".join(roles["tensor"]), ",".join(roles["data"])) == (tensor, data)
    assert ",".join((*roles["expert"], *roles["stage"])) == others


GUESS_MESHES = ("line", "grid", "cube", "ones", "alone", "pod")
"""Each tree meets two of them."""


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("tree", "mesh"),
    [
        (tree, GUESS_MESHES[(index + turn) % 6])
        for index, tree in enumerate(name for name in TREES if name != "odd_keys")
        for turn in (0, 3)
    ],
)
def test_every_guess_is_sound(tree: str, mesh: str) -> None:
    specs = guessed(TREES[tree](), MESHES[mesh]())
    plan = sr.SpecTreeShardingRule(specs).plan(TREES[tree](), MESHES[mesh]())
    assert [finding for finding in plan.findings if finding.severity == "error"] == []
