"""Losses of the benchmark of searches with little time, as people write them: no mesh, no constraint, no checkpoint.

`MODELS[name](smoke)` gives a `Case`. Experts pass `wrap`, which is applied to the function `layer(x, weights)`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
import optax

import shardrules as sr

Layer: TypeAlias = Callable[[Any, Any], Any]
Wrap: TypeAlias = Callable[[Layer], Layer]


@final
@attrs.frozen
class Case:
    """What is trained, and where."""

    cluster: str
    loss: Callable[[Wrap], Callable[[Any, Any], Any]]
    """From what is applied to layers to the loss of a model and a batch."""
    model: Any
    batch: Any
    optimizer: Any = attrs.field(factory=lambda: optax.adamw(1e-4))
    trainable: Any = None
    """Which arrays are trained; all of them by default."""


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The shape of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens(batch: int, length: int) -> jax.ShapeDtypeStruct:
    """The shape of texts."""
    return array(batch, length, dtype=jnp.int32)


def halves(weights: Any) -> Any:
    """Weights as layers compute with them."""
    return jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), weights)


def norm(x: Any, scale: Any) -> Any:
    """An RMS norm."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def heads_of(x: Any, size: int) -> Any:
    """[examples, positions, heads, size]."""
    return x.reshape(*x.shape[:2], -1, size)


def attention(query: Any, key: Any, value: Any, *, is_causal: bool = True) -> Any:
    """Attention in plain JAX."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(query.dtype), value)


def cross_entropy(x: Any, head: Any, targets: Any) -> Any:
    """The mean loss of the next tokens."""
    logits = (x @ head.astype(x.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def gpt_list(smoke: bool) -> Case:
    """A GPT of 0.55 B in a list of ten blocks."""
    width, heads, layers, vocab, length, batch = (32, 4, 2, 64, 16, 16) if smoke else (2048, 16, 10, 16384, 2048, 512)
    matrices = dict.fromkeys(("query", "key", "value", "out"), array(width, width))
    block = matrices | {"up": array(width, 4 * width), "down": array(4 * width, width)}
    block |= {"norm_1": array(width), "norm_2": array(width)}
    model = {"embed": array(vocab, width), "positions": array(length, width), "blocks": [block] * layers}

    def layer(x: Any, weights: Any) -> Any:
        weights = halves(weights)
        y = norm(x, weights["norm_1"])
        query, key, value = (heads_of(y @ weights[name], width // heads) for name in ("query", "key", "value"))
        x = x + attention(query, key, value).reshape(x.shape) @ weights["out"]
        return x + jax.nn.gelu(norm(x, weights["norm_2"]) @ weights["up"]) @ weights["down"]

    def loss(wrap: Wrap) -> Callable[[Any, Any], Any]:
        block = wrap(layer)

        def run(model: Any, text: Any) -> Any:
            x = (model["embed"][text[:, :-1]] + model["positions"]).astype(jnp.bfloat16)
            for weights in model["blocks"]:
                x = block(x, weights)
            return cross_entropy(x, model["embed"].T, text[:, 1:])

        return run

    return Case("cpu:8" if smoke else "cuda:h100:16", loss, model, tokens(batch, length + 1))


def _llama(smoke: bool, kernel: str | None, rank: int = 0) -> Case:
    width, size, kv_heads, hidden, layers = (32, 8, 2, 64, 2) if smoke else (4096, 128, 8, 14336, 32)
    vocab, length, batch = (64, 16, 16) if smoke else (128256, 4096, 128)
    dtype = jnp.bfloat16 if rank else jnp.float32
    shapes = {"query": (width, width), "key": (width, kv_heads * size), "value": (width, kv_heads * size)}
    shapes |= {"out": (width, width), "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    stacked = {name: array(layers, *shape, dtype=dtype) for name, shape in shapes.items()}
    stacked |= dict.fromkeys(("norm_1", "norm_2"), array(layers, width, dtype=dtype))
    adapted = ("query", "value") if rank else ()
    low = {f"{name}_in": array(layers, shapes[name][0], rank) for name in adapted}
    low |= {f"{name}_out": array(layers, rank, shapes[name][1]) for name in adapted}
    base = {"embed": array(vocab, width, dtype=dtype), "layers": stacked, "head": array(width, vocab, dtype=dtype)}
    model = {"base": base, "adapters": low}

    def layer(x: Any, weights: Any) -> Any:
        weights = halves(weights)

        def project(y: Any, name: str) -> Any:
            result = y @ weights[name]
            return result + y @ weights[f"{name}_in"] @ weights[f"{name}_out"] if name in adapted else result

        y = norm(x, weights["norm_1"])
        query, key, value = (heads_of(project(y, name), size) for name in ("query", "key", "value"))
        if kernel is not None:
            context = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        else:
            repeated = (jnp.repeat(each, query.shape[2] // kv_heads, 2) for each in (key, value))
            context = attention(query, *repeated)
        x = x + context.reshape(x.shape) @ weights["out"]
        y = norm(x, weights["norm_2"])
        return x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]

    def loss(wrap: Wrap) -> Callable[[Any, Any], Any]:
        block = wrap(layer)

        def run(model: Any, text: Any) -> Any:
            base = model["base"]
            x = base["embed"][text[:, :-1]].astype(jnp.bfloat16)
            x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, base["layers"] | model["adapters"])
            return cross_entropy(x, base["head"], text[:, 1:])

        return run

    trainable = {"base": False, "adapters": True} if rank else None
    return Case("cpu:8" if smoke else "cuda:h100:64", loss, model, tokens(batch, length + 1), trainable=trainable)


def llama_cudnn(smoke: bool) -> Case:
    """A scanned Llama 3 8B with attention by cuDNN."""
    return _llama(smoke, None if smoke else "cudnn")


def llama_lora(smoke: bool) -> Case:
    """The same with attention in plain JAX, of which only adapters of rank 16 are trained."""
    return _llama(smoke, None, 2 if smoke else 16)


def encoder_decoder(smoke: bool) -> Case:
    """An encoder and a decoder of six layers each, in lists."""
    width, heads, layers, vocab = (32, 4, 1, 64) if smoke else (2048, 16, 6, 32128)
    source, target, batch = (16, 8, 16) if smoke else (1024, 512, 512)
    names = ("query", "key", "value", "out")
    reader = dict.fromkeys(names, array(width, width)) | {
        "up": array(width, 4 * width),
        "down": array(4 * width, width),
    }
    reader |= dict.fromkeys(("norm_1", "norm_2"), array(width))
    writer = reader | {f"cross_{name}": array(width, width) for name in names} | {"norm_3": array(width)}
    model = {"embed": array(vocab, width), "encoder": [reader] * layers, "decoder": [writer] * layers}

    def attend(x: Any, read: Any, weights: Any, prefix: str = "", *, is_causal: bool = False) -> Any:
        query = heads_of(x @ weights[f"{prefix}query"], width // heads)
        key, value = (heads_of(read @ weights[f"{prefix}{name}"], width // heads) for name in ("key", "value"))
        return attention(query, key, value, is_causal=is_causal).reshape(x.shape) @ weights[f"{prefix}out"]

    def mlp(x: Any, weights: Any) -> Any:
        return x + jax.nn.relu(norm(x, weights["norm_2"]) @ weights["up"]) @ weights["down"]

    def encode(x: Any, weights: Any) -> Any:
        weights = halves(weights)
        y = norm(x, weights["norm_1"])
        return mlp(x + attend(y, y, weights), weights)

    def decode(pair: Any, weights: Any) -> Any:
        (x, read), weights = pair, halves(weights)
        y = norm(x, weights["norm_1"])
        x = x + attend(y, y, weights, is_causal=True)
        return mlp(x + attend(norm(x, weights["norm_3"]), read, weights, "cross_"), weights), read

    def loss(wrap: Wrap) -> Callable[[Any, Any], Any]:
        read_layer, write_layer = wrap(encode), wrap(decode)

        def run(model: Any, texts: Any) -> Any:
            read, x = (model["embed"][text].astype(jnp.bfloat16) for text in (texts[0], texts[1][:, :-1]))
            for weights in model["encoder"]:
                read = read_layer(read, weights)
            for weights in model["decoder"]:
                x, _ = write_layer((x, read), weights)
            return cross_entropy(x, model["embed"].T, texts[1][:, 1:])

        return run

    return Case("cpu:8" if smoke else "cuda:h100:16", loss, model, (tokens(batch, source), tokens(batch, target + 1)))


def mixture(smoke: bool) -> Case:
    """Layers of 16 experts, two for each token, by `shardrules.expert_exchange`."""
    width, hidden, experts, layers = (32, 64, 8, 2) if smoke else (2048, 8192, 16, 8)
    vocab, length, batch = (64, 16, 16) if smoke else (32000, 2048, 256)
    block = {"norm_1": array(width), "router": array(width, experts)}
    block |= {"up": array(experts, width, hidden), "down": array(experts, hidden, width)}
    model = {"embed": array(vocab, width), "blocks": [block] * layers}

    def expert(weights: Any, rows: Any, sizes: Any) -> Any:
        hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, weights["up"], sizes))
        return jax.lax.ragged_dot(hidden, weights["down"], sizes)

    def layer(x: Any, weights: Any) -> Any:
        weights = halves(weights)
        y = norm(x, weights["norm_1"])
        scores, routes = jax.lax.top_k(jax.nn.softmax((y @ weights["router"]).astype(jnp.float32)), 2)
        function = jax.tree_util.Partial(expert, {name: weights[name] for name in ("up", "down")})
        return x + sr.expert_exchange(y, routes, scores.astype(y.dtype), function)[0]

    def loss(wrap: Wrap) -> Callable[[Any, Any], Any]:
        block = wrap(layer)

        def run(model: Any, text: Any) -> Any:
            x = model["embed"][text[:, :-1]].astype(jnp.bfloat16)
            for weights in model["blocks"]:
                x = block(x, weights)
            return cross_entropy(x, model["embed"].T, text[:, 1:])

        return run

    return Case("cpu:8" if smoke else "cuda:h100:16", loss, model, tokens(batch, length + 1))


MODELS: dict[str, Callable[[bool], Case]] = {
    "gpt list": gpt_list,
    "llama cudnn": llama_cudnn,
    "encoder decoder": encoder_decoder,
    "mixture": mixture,
    "llama lora": llama_lora,
}
