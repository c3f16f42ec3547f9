"""The models of the benchmark of what is kept: losses whose layers experts wrap in `jax.checkpoint`.

`MODELS[name](wrap, smoke)` gives `(loss, params, batch)`, arrays as shapes; `wrap` is applied to a layer's function.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Layer: TypeAlias = Callable[[Any, Any], Any]
Wrap: TypeAlias = Callable[[Layer], Layer]
Built: TypeAlias = tuple[Callable[[Any, Any], Any], Any, Any]

NAMES = ("qkv", "context", "attention", "hidden")
"""What layers call their projections, what attention returns, and what they add."""


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def norm(x: jax.Array) -> jax.Array:
    """Scales the last dimension to a mean square of one."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Attention of heads, whose keys and values may be shared by several queries."""
    groups = q.shape[2] // k.shape[2]
    q = q.reshape(*q.shape[:2], k.shape[2], groups, q.shape[3])
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    context = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)
    return checkpoint_name(context.reshape(*context.shape[:2], -1), "context")


def project(x: jax.Array, weight: jax.Array, name: str) -> jax.Array:
    """A projection with a name."""
    return checkpoint_name(x @ weight, name)


def self_attention(x: jax.Array, weights: Any, heads: int, causal: bool) -> jax.Array:
    """What a layer adds by attention. Queries have `heads`; keys and values as many as their width allows."""
    y, width = norm(x), weights["q"].shape[1] // heads
    q, k, v = (project(y, weights[name], "qkv") for name in ("q", "k", "v"))
    q, k, v = (each.reshape(*each.shape[:2], -1, width) for each in (q, k, v))
    return project(attention(q, k, v, causal), weights["out"], "attention")


def mlp(x: jax.Array, weights: Any) -> jax.Array:
    """What a layer adds by a gated MLP, or one with GELU."""
    y = norm(x)
    up = project(y, weights["up"], "hidden")
    hidden = jax.nn.silu(project(y, weights["gate"], "hidden")) * up if "gate" in weights else jax.nn.gelu(up)
    return hidden @ weights["down"]


def layer_shapes(width: int, hidden: int, keys: int, gated: bool, *count: int) -> dict[str, Any]:
    """The weights of a layer, or of `count` stacked ones."""
    shapes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "out": (width, width)}
    shapes |= {"up": (width, hidden), "down": (hidden, width)} | ({"gate": (width, hidden)} if gated else {})
    return {name: array(*count, *shape) for name, shape in shapes.items()}


def cross_entropy(x: jax.Array, embedding: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean loss of the next token."""
    scores = (norm(x) @ embedding.T).astype(jnp.float32)
    picked = jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, -1) - picked)


def gpt(wrap: Wrap, smoke: bool) -> Built:
    """A decoder with scanned layers and GELU."""
    width, heads, count, rows, length = (64, 2, 3, 2, 32) if smoke else (2048, 16, 12, 4, 1024)

    @wrap
    def layer(x: Any, weights: Any) -> Any:
        x = x + self_attention(x, weights, heads, causal=True)
        return x + mlp(x, weights)

    def loss(params: Any, batch: Any) -> Any:
        x = params["embed"][batch]
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
        return cross_entropy(x, params["embed"], batch)

    params = {"embed": array(8 * width, width), "layers": layer_shapes(width, 4 * width, width, False, count)}
    return loss, params, array(rows, length, dtype=jnp.int32)


def llama(wrap: Wrap, smoke: bool) -> Built:
    """A decoder whose layers Python calls one by one, with grouped queries and a gated MLP."""
    width, heads, count, rows, length = (64, 4, 3, 2, 32) if smoke else (2048, 16, 4, 4, 2048)

    @wrap
    def layer(x: Any, weights: Any) -> Any:
        x = x + self_attention(x, weights, heads, causal=True)
        return x + mlp(x, weights)

    def loss(params: Any, batch: Any) -> Any:
        x = params["embed"][batch]
        for weights in params["layers"]:
            x = layer(x, weights)
        return cross_entropy(x, params["embed"], batch)

    layers = [layer_shapes(width, 11 * width // 4, width // 4, True) for _ in range(count)]
    return loss, {"embed": array(8 * width, width), "layers": layers}, array(rows, length, dtype=jnp.int32)


def mixture(wrap: Wrap, smoke: bool) -> Built:
    """Scanned layers with experts, each of which takes as many tokens as fit."""
    width, heads, count, rows, length, experts = (64, 2, 3, 2, 32, 4) if smoke else (1024, 8, 8, 4, 1024, 8)
    room = 2 * length // experts

    def routed(x: Any, weights: Any) -> Any:
        y = norm(x)
        gates = jax.nn.softmax((y @ weights["router"]).astype(jnp.float32))
        gate, expert = jax.lax.top_k(gates, 1)
        chosen = jax.nn.one_hot(expert[..., 0], experts, dtype=jnp.float32)
        position = jnp.cumsum(chosen, 1) * chosen - 1
        slots = jax.nn.one_hot(position.astype(jnp.int32), room, dtype=x.dtype) * chosen.astype(x.dtype)[..., None]
        received = checkpoint_name(jnp.einsum("bsec,bsd->ebcd", slots, y), "received")
        hidden = jax.nn.gelu(checkpoint_name(jnp.einsum("ebcd,edf->ebcf", received, weights["expert_up"]), "hidden"))
        results = jnp.einsum("ebcf,efd->ebcd", hidden, weights["expert_down"])
        return jnp.einsum("bsec,ebcd->bsd", slots * gate.astype(x.dtype)[..., None], results)

    @wrap
    def layer(x: Any, weights: Any) -> Any:
        x = x + self_attention(x, weights, heads, causal=True)
        return x + routed(x, weights)

    def loss(params: Any, batch: Any) -> Any:
        x = params["embed"][batch]
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
        return cross_entropy(x, params["embed"], batch)

    layers = {
        name: each for name, each in layer_shapes(width, 1, width, False, count).items() if name not in ("up", "down")
    }
    layers |= {"router": array(count, width, experts)}
    layers |= {
        "expert_up": array(count, experts, width, 4 * width),
        "expert_down": array(count, experts, 4 * width, width),
    }
    return loss, {"embed": array(8 * width, width), "layers": layers}, array(rows, length, dtype=jnp.int32)


def encoder_decoder(wrap: Wrap, smoke: bool) -> Built:
    """An encoder of long texts and a decoder of short ones, both with scanned layers."""
    width, heads, count, rows, length = (64, 2, 2, 2, 32) if smoke else (1024, 16, 6, 8, 1024)

    @wrap
    def encoder_layer(x: Any, weights: Any) -> Any:
        x = x + self_attention(x, weights, heads, causal=False)
        return x + mlp(x, weights)

    @wrap
    def decoder_layer(state: Any, weights: Any) -> Any:
        x, encoded = state
        x = x + self_attention(x, weights, heads, causal=True)
        q, k, v = (
            project(each, weights[name], "qkv").reshape(*each.shape[:2], heads, -1)
            for each, name in ((norm(x), "cross_q"), (encoded, "cross_k"), (encoded, "cross_v"))
        )
        x = x + project(attention(q, k, v, causal=False), weights["cross_out"], "attention")
        return x + mlp(x, weights)

    def loss(params: Any, batch: Any) -> Any:
        x = params["embed"][batch["source"]]
        x, _ = jax.lax.scan(lambda x, weights: (encoder_layer(x, weights), None), x, params["encoder"])
        encoded, y = norm(x), params["embed"][batch["target"]]
        y, _ = jax.lax.scan(lambda y, weights: (decoder_layer((y, encoded), weights), None), y, params["decoder"])
        return cross_entropy(y, params["embed"], batch["target"])

    layers = layer_shapes(width, 4 * width, width, True, count)
    cross = {f"cross_{name}": layers[name] for name in ("q", "k", "v", "out")}
    params = {"embed": array(8 * width, width), "encoder": layers, "decoder": layers | cross}
    texts = {"source": array(rows, length, dtype=jnp.int32), "target": array(rows, length // 4, dtype=jnp.int32)}
    return loss, params, texts


def conv_net(wrap: Wrap, smoke: bool) -> Built:
    """A residual net: stages of equal blocks that Python calls one by one."""
    widths, count, rows, size = ((8, 16), 3, 2, 16) if smoke else ((256, 512), 4, 64, 56)

    def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    @wrap
    def block(x: Any, weights: Any) -> Any:
        y = checkpoint_name(convolve(jax.nn.silu(norm(x)), weights["first"]), "hidden")
        y = checkpoint_name(convolve(jax.nn.silu(norm(y)), weights["second"]), "attention")
        return x + y

    def loss(params: Any, batch: Any) -> Any:
        x = convolve(batch["image"], params["stem"])
        for stage in params["stages"]:
            for weights in stage["blocks"]:
                x = block(x, weights)
            x = convolve(x, stage["down"], 2) if "down" in stage else x
        scores = jnp.mean(norm(x), (1, 2)).astype(jnp.float32) @ params["head"]
        return jnp.mean(jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, batch["label"][:, None], -1)[:, 0])

    stages = []
    for index, width in enumerate(widths):
        blocks = [{"first": array(3, 3, width, width), "second": array(3, 3, width, width)} for _ in range(count)]
        last = index + 1 == len(widths)
        stages.append({"blocks": blocks} | ({} if last else {"down": array(3, 3, width, widths[index + 1])}))
    params = {"stem": array(3, 3, 3, widths[0]), "stages": stages, "head": array(widths[-1], 16, dtype=jnp.float32)}
    return loss, params, {"image": array(rows, size, size, 3), "label": array(rows, dtype=jnp.int32)}


MODELS: dict[str, Callable[[Wrap, bool], Built]] = {
    "gpt": gpt,
    "llama": llama,
    "mixture": mixture,
    "encoder_decoder": encoder_decoder,
    "conv_net": conv_net,
}
