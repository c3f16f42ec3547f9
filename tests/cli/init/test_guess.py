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


@pytest.mark.parametrize(
    ("tree", "mesh", "expected"),
    [
        (
            TORCH,
            "data:4,model:2",
            {
                "embed_tokens/weight": P("model", "data"),
                "layers/0/self_attn/q_proj/weight": P("model", "data"),
                "layers/0/self_attn/o_proj/weight": P("data", "model"),
                "layers/0/mlp/up_proj/weight": P("model", "data"),
                "layers/0/mlp/down_proj/weight": P("data", "model"),
                "layers/0/norm/weight": P(),
                "lm_head/weight": P("model", "data"),
            },
        ),
        (
            FLAX,
            "data:4,model:2",
            {
                "wte/embedding": P("model", "data"),
                "h/0/c_attn/kernel": P("data", "model"),
                "h/0/c_proj/kernel": P("model", "data"),
                "h/0/c_fc/kernel": P("data", "model"),
                "head/kernel": P("data", "model"),
                "head/bias": P(),
            },
        ),
        (
            HEADS,
            "fsdp:4,tp:2",
            {"query/kernel": P("fsdp", "tp"), "out/kernel": P("tp", None, "fsdp"), "query/bias": P(), "out/bias": P()},
        ),
        (
            HEADS,
            "fsdp:4,tp:32",  # more than there are heads
            {"query/kernel": P("fsdp", None, "tp"), "out/kernel": P(None, "tp", "fsdp")},
        ),
        (HEADS, "fsdp:4,tp:6", {"query/kernel": P("fsdp")}),
        (
            BARE,
            "data:4,model:2",
            {
                "mlp/up": P("data", "model"),
                "mlp/down": P("model", "data"),
                "attention/q": P("data", "model"),
                "attention/o": P("model", "data"),
            },
        ),
        (
            TRANSPOSED,
            "data:4,model:2",
            {
                "mlp/up": P("model", "data"),
                "mlp/down": P("data", "model"),
                "attention/q": P("model", "data"),
                "attention/o": P("data", "model"),
            },
        ),
        (
            EXPERTS,
            "data:4,expert:8,model:2",
            {
                "experts/up": P("expert", "data", "model"),
                "experts/down": P("expert", "model", "data"),
                "up": P(("data", "expert"), "model"),  # what has no experts uses all devices, too
                "norm": P(),
            },
        ),
        (EXPERTS, "data:4,model:2", {"experts/up": P(None, "data", "model"), "experts/down": P(None, "model", "data")}),
        (
            STACKED,
            "stage:4,data:4,model:2",
            {
                "layers/up/kernel": P("stage", "data", "model"),
                "layers/down/kernel": P("stage", "model", "data"),
                "layers/norm/scale": P(),
            },
        ),
        (STACKED, "data:4,model:2", {"layers/up/kernel": P(None, "data", "model"), "layers/norm/scale": P()}),
        (
            CONVOLUTIONS,
            "data:4,model:2",
            {"flax/conv/kernel": P(None, None, "data", "model"), "torch/conv/weight": P("model", "data")},
        ),
        # A layer as wide as the vocabulary is not the head, and the head may have its outputs first.
        (
            {"embed": (512, 256), "blocks": [{"up": (256, 512), "down": (512, 256)}], "lm_head": (512, 256)},
            "data:4,model:2",
            {
                "blocks/0/up": P("data", "model"),
                "blocks/0/down": P("model", "data"),
                "lm_head": P("model", "data"),
            },
        ),
        (
            {"experts": {"up": (32, D, H), "up_bias": (32, H), "down": (32, H, D)}},
            "data:4,expert:2,model:2",
            {"experts/up": P("expert", "data", "model"), "experts/up_bias": P()},
        ),
        # GPT-2's 50257 rows are odd, so its features are split over all axes.
        ({"wte": {"embedding": (50257, 768)}}, "data:4,model:2", {"wte/embedding": P(None, ("model", "data"))}),
        ({"w": (7, 4096)}, "data:4,model:2", {"w": P(None, ("model", "data"))}),
        ({"w": (7, 5)}, "data:4,model:2", {"w": P()}),
        ({"w": (8,), "b": (2**20,)}, "data:4", {"w": P(), "b": P("data")}),
        ({"up": (D, H), "down": (H, D)}, "data:4", {"up": P("data"), "down": P(None, "data")}),
    ],
)
def test_layers_are_split_as_in_megatron(tree: Any, mesh: str, expected: dict[str, P]) -> None:
    specs = guessed(shapes(tree), mesh)
    assert [(path, specs[path]) for path, spec in expected.items() if not same(specs[path], spec)] == []


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
