"""No finding above a note on healthy programs: published steps, models of the zoo, an example of the docs.

The published steps have their structures, at toy dimensions but with as many tokens.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import shardrules as sr
from docs.examples import train_gpt
from shardrules.programs.audits.report import AuditReport
from tests.programs.audits.audited import AXES, Program, audit, con, cross_entropy, f32, i32, normed
from tests.programs.examples import CPU
from tests.zoo import TREES, as_shapes

WIDTH, HEAD_SIZE, HEADS, HIDDEN, LAYERS, VOCABULARY = 256, 64, 4, 1024, 2, 1024
BATCH_AXES = ("data", "fsdp")

POLICIES: Mapping[str, Any] = MappingProxyType(
    {
        "full": jax.checkpoint_policies.nothing_saveable,
        "minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
        "qkv": jax.checkpoint_policies.save_only_these_names("query", "key", "value"),
        "all but mlp": jax.checkpoint_policies.save_only_these_names("query", "key", "value", "heads", "out"),
    }
)


@final
@attrs.frozen
class Decoder:
    """A decoder's train step: how it is split, what it keeps for the backward pass, and its kind of layers."""

    mesh: str
    remat: str
    batch: int  # sequences on each device that has examples of its own
    length: int = 128
    kv_heads: int = HEADS
    is_gated: bool = True

    def shapes(self) -> dict[str, Any]:
        layers = {
            "query": f32(LAYERS, WIDTH, HEADS, HEAD_SIZE),
            "key": f32(LAYERS, WIDTH, self.kv_heads, HEAD_SIZE),
            "value": f32(LAYERS, WIDTH, self.kv_heads, HEAD_SIZE),
            "out": f32(LAYERS, HEADS, HEAD_SIZE, WIDTH),
            "up": f32(LAYERS, WIDTH, HIDDEN),
            "down": f32(LAYERS, HIDDEN, WIDTH),
        }
        gate = {"gate": f32(LAYERS, WIDTH, HIDDEN)} if self.is_gated else {}
        return {"embed": f32(VOCABULARY, WIDTH), "head": f32(WIDTH, VOCABULARY), "layers": layers | gate}

    def specs(self) -> dict[str, Any]:
        columns, rows = P(None, "fsdp", "tensor"), P(None, "tensor", None, "fsdp")
        layers = dict.fromkeys(self.shapes()["layers"], columns) | {"out": rows, "down": P(None, "tensor", "fsdp")}
        return {"embed": P("tensor", "fsdp"), "head": P("fsdp", "tensor"), "layers": layers}

    def layer(self, x: Any, weights: Any, angles: Any) -> tuple[Any, None]:
        weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        y = normed(x)
        query, key, value = (
            con(jnp.einsum("bse,ehd->bshd", y, weights[name]), BATCH_AXES, None, "tensor")
            for name in ("query", "key", "value")
        )
        query, key = checkpoint_name(rotated(query, angles), "query"), checkpoint_name(rotated(key, angles), "key")
        heads = jax.nn.dot_product_attention(query, key, checkpoint_name(value, "value"), is_causal=True)
        out = jnp.einsum("bshd,hde->bse", checkpoint_name(heads, "heads"), weights["out"])
        x = con(x + checkpoint_name(out, "out"), BATCH_AXES)
        y = normed(x)
        hidden = con(y @ weights["up"], BATCH_AXES, None, "tensor")
        if self.is_gated:
            hidden = jax.nn.silu(con(y @ weights["gate"], BATCH_AXES, None, "tensor")) * hidden
        else:
            hidden = jax.nn.gelu(hidden)
        return con(x + hidden @ weights["down"], BATCH_AXES), None

    def loss(self, weights: Any, tokens: Any) -> Any:
        table = con(weights["embed"].astype(jnp.bfloat16), "tensor")  # whole rows, which are looked up
        x = con(table[tokens[:, :-1]], BATCH_AXES)
        angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))

        def layer(x: Any, weights: Any) -> tuple[Any, None]:
            return self.layer(x, weights, angles)

        kept = POLICIES.get(self.remat)
        x, _ = lax.scan(jax.checkpoint(layer, policy=kept, prevent_cse=False) if kept else layer, x, weights["layers"])
        logits = con(normed(x) @ weights["head"].astype(jnp.bfloat16), BATCH_AXES, None, "tensor").astype(jnp.float32)
        return cross_entropy(logits, tokens[:, 1:])

    def audit(self) -> AuditReport:
        optimizer = optax.adamw(1e-4)

        def step(weights: Any, state: Any, tokens: Any) -> Any:
            value, grads = jax.value_and_grad(self.loss)(weights, tokens)
            updates, state = optimizer.update(grads, state, weights)
            return optax.apply_updates(weights, updates), state, value

        mesh, shapes = sr.mesh_shape(self.mesh), self.shapes()
        plan = sr.SpecTreeShardingRule(self.specs()).plan(shapes, mesh)
        examples = self.batch * mesh.shape["data"] * mesh.shape["fsdp"]
        return audit(
            step,
            shapes,
            jax.eval_shape(optimizer.init, shapes),
            i32(examples, self.length + 1),
            axes=self.mesh,
            target=CPU,
            plan=plan,
            in_shardings=(None, None, P(BATCH_AXES)),
            out_shardings=(plan, plan.mirror, None),
            donate_argnums=(0, 1),
        )


def rotated(x: Any, angles: Any) -> Any:
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


FSDP, BOTH, REPLICATED = "data:1,fsdp:8,tensor:1", "data:1,fsdp:4,tensor:2", "data:2,fsdp:4,tensor:1"

PUBLISHED: Mapping[str, Decoder] = MappingProxyType(
    {
        "GPT3-175B on v6e": Decoder(FSDP, "full", 48, is_gated=False),
        "data and fsdp, recomputed": Decoder(REPLICATED, "full", 96),
        "fsdp and tensor, small batch": Decoder(BOTH, "minimal", 48),
        "fsdp and tensor, recomputed": Decoder(BOTH, "full", 96),
        "Llama2-7B on H100": Decoder(FSDP, "minimal", 64),
        "Llama3-70B on H100": Decoder(FSDP, "qkv", 16, 1024, 2),
        "Llama2-70B on H100": Decoder(REPLICATED, "all but mlp", 64, 128, 2),
        "MPT-7B on H100": Decoder(FSDP, "none", 96, is_gated=False),
    }
)
"""Steps by the published step or the layout whose structure they have, compiled for CPUs, which is quickest."""


def data_parallel(name: str, call: Callable[[Any, Any], Any], *shape: int) -> AuditReport:
    """A train step of a model of the zoo: whole weights, and a batch that is split."""
    model = as_shapes(TREES[name]())
    optimizer = optax.adam(1e-3)

    def step(model: Any, state: Any, x: Any) -> Any:
        grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(lambda row: call(model, row))(x) ** 2))(model)
        updates, new_state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), new_state

    arrays = eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    state = jax.eval_shape(optimizer.init, arrays)
    return Program(step, (model, state, f32(*shape)), (P(), P(), P("data")), "data:8").audit(CPU)


def gpt() -> AuditReport:
    """The step of the example, on windows of text that are split over the batch."""
    optimizer = optax.adamw(1e-3)
    mesh = sr.mesh_shape(AXES)
    state = eqx.filter_eval_shape(train_gpt.make_state, optimizer, 0)
    where = train_gpt.RULES.plan(state.model, mesh).mirror(state)

    def step(state: Any, windows: Any) -> Any:
        with sr.logical_axes(train_gpt.AXES):
            grads = eqx.filter_grad(train_gpt.loss_of)(state.model, windows)
            params = eqx.filter(state.model, eqx.is_inexact_array)
            updates, moments = optimizer.update(grads, state.optimizer, params)
            return train_gpt.State(eqx.apply_updates(state.model, updates), moments, state.step + 1, state.key)

    windows = jax.ShapeDtypeStruct((train_gpt.BATCH, train_gpt.CONTEXT + 1), jnp.uint8)
    return Program(step, (state, windows), (where, P("data")), out=where).audit(CPU)


OTHERS: Mapping[str, Callable[[], AuditReport]] = MappingProxyType(
    {
        "multilayer perceptron": lambda: data_parallel("mlp", lambda model, row: model(row), 64, 8),
        "attention": lambda: data_parallel("attention", lambda model, row: model(row, row, row), 16, 8, 16),
        "convolution": lambda: data_parallel("conv", lambda model, row: model(row), 16, 4, 16, 16),
        "layer norm": lambda: data_parallel("layer_norm", lambda model, row: model(row), 64, 16),
        "example GPT": gpt,
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PUBLISHED, *OTHERS])
def test_healthy_programs_have_no_problems(name: str) -> None:
    report = PUBLISHED[name].audit() if name in PUBLISHED else OTHERS[name]()
    assert report.problems == ()
