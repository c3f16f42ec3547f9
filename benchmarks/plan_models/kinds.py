"""More kinds of train and serve steps as plain functions of dicts.

They have what the models of the benchmark do not: layers that are kept instead of recomputed, experts by sorting,
depthwise convolutions, caches that are written in place, frozen weights, gradients that are added up over microbatches.
"""

from typing import Any

import jax
import jax.numpy as jnp

from plan_models.experts import Splits, constrain, constrain_as_moments
from plan_models.parts import (
    array,
    attend,
    cross_entropy,
    in_heads,
    layer_norm,
    look_up,
    residual,
    rms_norm,
    tokens,
    train_step,
    vocabulary_scores,
    whole,
    with_moments,
)

SORTED_SPLITS: Splits = (
    (r"(^|/)(gate|up)$", -1, "tensor"),
    (r"(^|/)down$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
    (r"(^|/)head$", 1, "vocab"),
)
T5_SPLITS: Splits = (
    (r"(^|/)(cross_)?(q|k|v)$", -1, "tensor"),
    (r"(^|/)(gate|up)$", -1, "tensor"),
    (r"(^|/)((cross_)?out|down)$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
    (r"(^|/)key$", 0, None),
)
UNET_SPLITS: Splits = (
    (r"(^|/)(first|q|k|v)$", -1, "tensor"),
    (r"(^|/)(second|out)$", -2, "tensor"),
    (r"(^|/)scale_2$", 0, "tensor"),
)
MAMBA_SPLITS: Splits = (
    (r"(^|/)(into|conv)$", -1, "tensor"),
    (r"(^|/)(select|out|decay|skip)$", 0, "tensor"),
    (r"(^|/)rate$", 0, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
)
LORA_SPLITS: Splits = (
    (r"(^|/)(k|gate|up)$", -1, "tensor"),
    (r"(^|/)(q|v)(/b)?$", -1, "tensor"),
    (r"(^|/)(out|down)$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
    (r"(^|/)head$", 1, "vocab"),
)
CACHE_SPLITS: Splits = (
    (r"(^|/)(keys|values)$", 1, "batch"),
    (r"(^|/)(keys|values)$", 3, "tensor"),
)
"""The splits of a cache, beside those of the parameters."""


def _grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention in which several queries share a key, by repeating keys and values."""
    repeats = q.shape[2] // k.shape[2]
    return attend(q, jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2), causal=True)


def grouped_queries(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A Llama of four layers written out, with grouped queries; nothing is recomputed."""
    width, heads, kv_heads, hidden, layers, vocab, length, batch = 2048, 16, 4, 5632, 4, 32000, 1024, 4 * devices
    if smoke:
        width, heads, kv_heads, hidden, layers, vocab, length, batch = 64, 8, 4, 128, 2, 128, 16, devices
    size = width // heads
    layer = {
        **dict.fromkeys(("q", "out"), array(width, width)),
        **dict.fromkeys(("k", "v"), array(width, kv_heads * size)),
        **dict.fromkeys(("gate", "up"), array(width, hidden)),
        "down": array(hidden, width),
        **dict.fromkeys(("norm_1", "norm_2"), array(width)),
    }
    params = {
        "embed": array(vocab, width),
        "layers": [layer] * layers,
        "norm": array(width),
        "head": array(width, vocab),
    }

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x = look_up(p["embed"], text[:, :-1])
        for w in p["layers"]:
            y = whole(rms_norm(x, w["norm_1"]))
            q, k, v = in_heads(y @ w["q"], heads), in_heads(y @ w["k"], kv_heads), in_heads(y @ w["v"], kv_heads)
            x = mlp(w, residual(x + residual(_grouped(q, k, v) @ w["out"])))
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:])

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))


def sorted_experts(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A mixture without capacity: tokens are sorted by expert, and multiplied in groups of any length."""
    width, hidden, experts, chosen, layers, vocab, length, batch = 1024, 2048, 8, 2, 2, 32000, 1024, 4 * devices
    if smoke:
        width, hidden, experts, chosen, layers, vocab, length, batch = 32, 64, 4, 2, 1, 64, 16, devices
    layer = {
        "norm": array(width),
        "router": array(width, experts),
        **dict.fromkeys(("gate", "up"), array(experts, width, hidden)),
        "down": array(experts, hidden, width),
    }
    params = {
        "embed": array(vocab, width),
        "layers": [layer] * layers,
        "norm": array(width),
        "head": array(width, vocab),
    }

    def routed(w: Any, x: jax.Array) -> jax.Array:
        weights, ids = jax.lax.top_k(jax.nn.softmax((x @ w["router"]).astype(jnp.float32), -1), chosen)
        order = jnp.argsort(ids.reshape(-1))
        rows = constrain(x[order // chosen], "batch", None)
        sizes = jnp.bincount(ids.reshape(-1), length=experts).astype(jnp.int32)
        inner = jax.nn.silu(jax.lax.ragged_dot(rows, w["gate"], sizes)) * jax.lax.ragged_dot(rows, w["up"], sizes)
        inner = constrain(inner, "batch", "tensor")
        results = constrain(jax.lax.ragged_dot(inner, w["down"], sizes), "batch", None)
        back = results[jnp.argsort(order)].reshape(-1, chosen, width)
        return jnp.einsum("tcd,tc->td", back, weights.astype(x.dtype))

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x = constrain(look_up(p["embed"], text[:, :-1]).reshape(-1, width), "batch", None)
        for w in p["layers"]:
            x = constrain(x + jax.checkpoint(routed)(w, rms_norm(x, w["norm"])), "batch", None)
        return cross_entropy(_scores(x, p), text[:, 1:].reshape(-1))

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))


def switch_experts(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A Switch Transformer: every token goes to one of sixteen experts, by one-hot tensors within groups."""
    width, heads, hidden, layers, experts, vocab, length, batch = 768, 12, 3072, 2, 16, 32000, 512, 8 * devices
    if smoke:
        width, heads, hidden, layers, experts, vocab, length, batch = 32, 4, 64, 1, 8, 64, 16, devices
    capacity = length * 5 // (4 * experts)
    layer = {
        **dict.fromkeys(("q", "k", "v", "out"), array(width, width)),
        **dict.fromkeys(("norm_1", "norm_2"), array(width)),
        "router": array(width, experts),
        "experts_up": array(experts, width, hidden),
        "experts_down": array(experts, hidden, width),
    }
    params = {
        "embed": array(vocab, width),
        "layers": [layer] * layers,
        "norm": array(width),
        "head": array(width, vocab),
    }

    def expert_layer(w: Any, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.softmax((y @ w["router"]).astype(jnp.float32), -1)
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        slot = (jnp.cumsum(chosen, 1) * chosen - 1).max(-1).astype(jnp.int32)
        dispatch = chosen[..., None] * jax.nn.one_hot(slot, capacity)[:, :, None]
        dispatch = constrain(dispatch.astype(y.dtype), "batch", None, "experts beside batch", None)
        slots = jnp.einsum("bsec,bsd->becd", dispatch, y)
        slots = constrain(slots, "batch of experts", "experts", None, None)
        inner = jax.nn.relu(jnp.einsum("becd,edf->becf", slots, w["experts_up"]))
        inner = constrain(inner, "batch of experts", "experts", None, "tensor of experts")
        slots = jnp.einsum("becf,efd->becd", inner, w["experts_down"])
        slots = constrain(slots, "batch of experts", "experts", None, None)
        slots = constrain(slots, "batch", "experts beside batch", None, None)
        weight = jnp.max(gates, -1, keepdims=True).astype(y.dtype)
        uneven = experts * jnp.mean(jnp.mean(gates, 1) * jnp.mean(chosen, 1))
        return residual(jnp.einsum("bsec,becd->bsd", dispatch, slots) * weight), uneven

    @jax.checkpoint
    def block(w: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = whole(rms_norm(x, w["norm_1"]))
        q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
        x = residual(x + residual(attend(q, k, v, causal=True) @ w["out"]))
        y, uneven = expert_layer(w, whole(rms_norm(x, w["norm_2"])))
        return residual(x + y), uneven

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x, uneven = look_up(p["embed"], text[:, :-1]), jnp.float32(0)
        for w in p["layers"]:
            x, layer_uneven = block(w, x)
            uneven = uneven + layer_uneven
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:]) + 0.01 * uneven

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))


def relative_positions(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A T5: biases by relative position that all layers share, a gated MLP, dropout."""
    width, heads, hidden, layers, vocab, source, target, batch = 768, 12, 2048, 2, 32128, 512, 256, 8 * devices
    if smoke:
        width, heads, hidden, layers, vocab, source, target, batch = 32, 4, 64, 1, 64, 16, 8, devices
    names = ("q", "k", "v", "out")
    reader = {
        **dict.fromkeys(names, array(width, width)),
        **dict.fromkeys(("gate", "up"), array(width, hidden)),
        "down": array(hidden, width),
        **dict.fromkeys(("norm_1", "norm_2"), array(width)),
    }
    writer = {**reader, **{f"cross_{name}": reader[name] for name in names}, "norm_3": array(width)}
    params = {
        "embed": array(vocab, width),
        "bias": array(32, heads),
        "encoder": [reader] * layers,
        "decoder": [writer] * layers,
        "norm": array(width),
    }

    def attention(w: Any, x: jax.Array, read: jax.Array, bias: Any, prefix: str = "") -> jax.Array:
        q, k, v = (
            in_heads(source @ w[f"{prefix}{name}"], heads) for name, source in (("q", x), ("k", read), ("v", read))
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) + bias
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(x.dtype), v)
        return residual(constrain(mixed.reshape(x.shape), "batch", None, "tensor") @ w[f"{prefix}out"])

    def position_bias(table: jax.Array, length: int, *, causal: bool) -> jax.Array:
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
        bias = table[jnp.clip(distance, -16, 15) + 16].transpose(2, 0, 1)[None].astype(jnp.float32)
        return jnp.where(distance >= 0, bias, -1e9) if causal else bias

    def dropout(x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def mlp(w: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        y = whole(rms_norm(x, w["norm_2"]))
        y = constrain(jax.nn.gelu(y @ w["gate"]) * (y @ w["up"]), "batch", None, "tensor")
        return residual(x + dropout(residual(y @ w["down"]), key))

    def loss(p: Any, batch: Any) -> jax.Array:
        keys = iter(jax.random.split(jax.random.wrap_key_data(batch["key"]), 4 * layers))
        bias = position_bias(p["bias"], source, causal=False)
        x = look_up(p["embed"], batch["source"])
        for w in p["encoder"]:
            y = whole(rms_norm(x, w["norm_1"]))
            x = mlp(w, x + dropout(attention(w, y, y, bias), next(keys)), next(keys))
        read, bias = x, position_bias(p["bias"], target, causal=True)
        x = look_up(p["embed"], batch["target"][:, :-1])
        for w in p["decoder"]:
            y = whole(rms_norm(x, w["norm_1"]))
            x = residual(x + dropout(attention(w, y, y, bias), next(keys)))
            x = mlp(w, x + attention(w, rms_norm(x, w["norm_3"]), read, 0.0, "cross_"), next(keys))
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["embed"].T), batch["target"][:, 1:])

    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    texts = {"source": tokens(batch, source), "target": tokens(batch, target + 1), "key": key}
    return train_step(loss), (with_moments(params), texts)


def unet(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A U-Net that predicts noise: convolutions down and up again, with skips and attention at the bottom."""
    widths, image, batch, groups = (128, 256, 512), 64, 8 * devices, 32
    if smoke:
        widths, image, batch, groups = (8, 16), 8, devices, 4

    def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32).reshape(*x.shape[:3], groups, -1)
        mean, variance = jnp.mean(y, (1, 2, 4), keepdims=True), jnp.var(y, (1, 2, 4), keepdims=True)
        return ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape).astype(x.dtype) * scale

    def block(w: Any, x: jax.Array) -> jax.Array:
        y = conv(jax.nn.silu(norm(x, w["scale_1"])), w["first"])
        y = jax.nn.silu(norm(constrain(y, "batch", None, None, "tensor"), w["scale_2"]))
        y = conv(constrain(y, "batch", None, None, "tensor"), w["second"])
        return constrain(y + (conv(x, w["skip"]) if "skip" in w else x), "batch", None, None, None)

    def block_params(before: int, width: int) -> dict[str, Any]:
        w = {"first": array(3, 3, before, width), "second": array(3, 3, width, width)}
        w |= {"scale_1": array(before), "scale_2": array(width)}
        return w | ({"skip": array(1, 1, before, width)} if before != width else {})

    before = (widths[0], *widths)
    params = {
        "stem": array(3, 3, 3, widths[0]),
        "down": [
            {"block": block_params(before[n], width), "pool": array(3, 3, width, width)}
            for n, width in enumerate(widths)
        ],
        "middle": {
            **dict.fromkeys(("q", "k", "v", "out"), array(widths[-1], widths[-1])),
            "block": block_params(widths[-1], widths[-1]),
        },
        "up": [block_params(before[n + 1] + width, before[n]) for n, width in reversed([*enumerate(widths)])],
        "last": array(3, 3, widths[0], 3),
    }

    def loss(p: Any, batch: Any) -> jax.Array:
        x, skips = conv(batch["images"], p["stem"]), []
        for w in p["down"]:
            x = block(w["block"], x)
            skips.append(x)
            x = conv(x, w["pool"], 2)
        y = x.reshape(x.shape[0], -1, 1, x.shape[-1])
        q, k, v = (constrain(y @ p["middle"][name], "batch", None, None, None) for name in "qkv")
        x = block(p["middle"]["block"], x + (attend(q, k, v, causal=False) @ p["middle"]["out"]).reshape(x.shape))
        for w, skip in zip(p["up"], reversed(skips), strict=True):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = block(w, jnp.concatenate([x, skip], -1))
        return jnp.mean((conv(x, p["last"]) - batch["noise"]).astype(jnp.float32) ** 2)

    images = array(batch, image, image, 3)
    return train_step(loss), (with_moments(params), {"images": images, "noise": images})


def state_space(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A Mamba: a depthwise convolution over time, then a scan of a state that the input selects."""
    width, inner, states, layers, vocab, length, batch = 768, 1536, 16, 2, 32000, 512, 4 * devices
    if smoke:
        width, inner, states, layers, vocab, length, batch = 32, 64, 4, 1, 64, 16, devices
    layer = {
        "norm": array(width),
        "into": array(width, 2 * inner),
        "conv": array(4, 1, inner),
        "select": array(inner, 2 * states + 1),
        "rate": array(inner),
        "decay": array(inner, states),
        "skip": array(inner),
        "out": array(inner, width),
    }
    params = {"embed": array(vocab, width), "layers": [layer] * layers, "norm": array(width)}

    @jax.checkpoint
    def block(w: Any, x: jax.Array) -> jax.Array:
        y, gate = jnp.split(whole(rms_norm(x, w["norm"])) @ w["into"], 2, -1)
        y, gate = (constrain(part, "batch", None, "tensor") for part in (y, gate))
        y = jax.nn.silu(
            jax.lax.conv_general_dilated(
                y, w["conv"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=inner
            )
        )
        selected = (y @ w["select"]).astype(jnp.float32)
        rate = jax.nn.softplus(selected[..., :1] + w["rate"].astype(jnp.float32))
        keep = jnp.exp(-rate[..., None] * jnp.exp(w["decay"].astype(jnp.float32)))
        add = (rate * y)[..., None] * selected[..., None, 1 : states + 1]

        def cell(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            kept, added, read = now
            state = kept * state + added
            return state, jnp.einsum("bis,bs->bi", state, read)

        start = jnp.zeros((x.shape[0], inner, states))
        times = (keep.swapaxes(0, 1), add.swapaxes(0, 1), selected[..., states + 1 :].swapaxes(0, 1))
        _, z = jax.lax.scan(cell, start, times)
        z = z.swapaxes(0, 1).astype(x.dtype) + y * w["skip"]
        z = constrain(z * jax.nn.silu(gate), "batch", None, "tensor")
        return residual(x + residual(z @ w["out"]))

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x = look_up(p["embed"], text[:, :-1])
        for w in p["layers"]:
            x = block(w, x)
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["embed"].T), text[:, 1:])

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))


def small_decoder(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A decoder of 0.9 million parameters on characters: four layers written out, nothing is recomputed."""
    width, heads, hidden, layers, vocab, length, batch = 128, 4, 384, 4, 96, 128, 16 * devices
    if smoke:
        width, heads, hidden, layers, vocab, length, batch = 32, 4, 64, 1, 32, 16, devices
    stacked = decoder(width, hidden, layers, vocab)
    layer = {name: array(*leaf.shape[1:]) for name, leaf in stacked["layers"].items()}

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x = look_up(p["embed"], text[:, :-1])
        for w in p["layers"]:
            y = whole(rms_norm(x, w["norm_1"]))
            q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
            x = mlp(w, residual(x + residual(attend(q, k, v, causal=True) @ w["out"])))
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:])

    return train_step(loss), (with_moments({**stacked, "layers": [layer] * layers}), tokens(batch, length + 1))


def decoder(width: int, hidden: int, layers: int, vocab: int) -> dict[str, Any]:
    """The weights of a decoder whose layers are stacked."""
    layer = {
        **dict.fromkeys(("q", "k", "v", "out"), array(layers, width, width)),
        **dict.fromkeys(("gate", "up"), array(layers, width, hidden)),
        "down": array(layers, hidden, width),
        **dict.fromkeys(("norm_1", "norm_2"), array(layers, width)),
    }
    return {"embed": array(vocab, width), "layers": layer, "norm": array(width), "head": array(width, vocab)}


def mlp(w: Any, x: jax.Array) -> jax.Array:
    """The second half of a layer of a decoder."""
    y = whole(rms_norm(x, w["norm_2"]))
    y = constrain(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "batch", None, "tensor")
    return residual(x + residual(y @ w["down"]))


def _scores(x: jax.Array, p: Any) -> jax.Array:
    """Scores of single vectors."""
    x = constrain(rms_norm(x, p["norm"]), "batch beside vocab", None)
    return constrain(x @ p["head"], "batch beside vocab", "vocab")


def low_rank(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """LoRA: the weights are frozen, and only two narrow matrices beside `q` and `v` learn."""
    width, heads, hidden, layers, vocab, rank, length, batch = 2048, 16, 5632, 4, 32000, 16, 1024, 2 * devices
    if smoke:
        width, heads, hidden, layers, vocab, rank, length, batch = 64, 4, 128, 2, 128, 8, 16, devices
    frozen = decoder(width, hidden, layers, vocab)
    pair = {"a": array(layers, width, rank), "b": array(layers, rank, width)}

    def loss(adapters: Any, batch: Any) -> jax.Array:
        p, text = batch["frozen"], batch["text"]

        @jax.checkpoint
        def block(x: jax.Array, ws: Any) -> jax.Array:
            w, adapter = ws
            y = whole(rms_norm(x, w["norm_1"]))
            q, v = (y @ w[name] + (y @ adapter[name]["a"]) @ adapter[name]["b"] for name in ("q", "v"))
            q, k, v = (in_heads(each, heads) for each in (q, y @ w["k"], v))
            return mlp(w, residual(x + residual(attend(q, k, v, causal=True) @ w["out"])))

        x = look_up(p["embed"], text[:, :-1])
        x, _ = jax.lax.scan(lambda x, ws: (block(x, ws), None), x, (p["layers"], adapters))
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:])

    args = (with_moments({"q": pair, "v": pair}), {"frozen": frozen, "text": tokens(batch, length + 1)})
    return train_step(loss), args


def _layer(w: Any, x: jax.Array, heads: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """A layer of a decoder; also its keys and values."""
    y = whole(rms_norm(x, w["norm_1"]))
    q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
    return mlp(w, residual(x + residual(attend(q, k, v, causal=True) @ w["out"]))), (k, v)


def prefill(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """The first pass over prompts, which fills the cache of keys and values."""
    width, heads, hidden, layers, vocab, length, batch = 2048, 16, 5632, 4, 32000, 2048, 2 * devices
    if smoke:
        width, heads, hidden, layers, vocab, length, batch = 64, 4, 128, 2, 128, 16, devices

    def step(p: Any, text: jax.Array) -> Any:
        x, cache = jax.lax.scan(lambda x, w: _layer(w, x, heads), look_up(p["embed"], text), p["layers"])
        return _scores(x[:, -1], p), cache

    return step, (decoder(width, hidden, layers, vocab), tokens(batch, length))


def evaluation(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """The loss of a decoder without gradients, over a vocabulary that a chip can hold."""
    width, heads, hidden, layers, vocab, length, batch = 2048, 16, 5632, 4, 16000, 256, 32 * devices
    if smoke:
        width, heads, hidden, layers, vocab, length, batch = 64, 4, 128, 2, 128, 16, devices

    def step(p: Any, text: jax.Array) -> Any:
        embedded = look_up(p["embed"], text[:, :-1])
        x, _ = jax.lax.scan(lambda x, w: (_layer(w, x, heads)[0], None), embedded, p["layers"])
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:])

    return step, (decoder(width, hidden, layers, vocab), tokens(batch, length + 1))


def decode(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """One more token for each sequence, with a cache that is written in place."""
    width, heads, hidden, layers, vocab, length, batch = 2048, 16, 5632, 4, 32000, 2048, 8 * devices
    if smoke:
        width, heads, hidden, layers, vocab, length, batch = 64, 4, 128, 2, 128, 16, devices
    cache = array(layers, batch, length, heads, width // heads)

    def step(p: Any, state: Any) -> Any:
        position = state["position"]

        def block(x: jax.Array, layer: Any) -> Any:
            w, keys, values = layer
            y = whole(rms_norm(x, w["norm_1"]))
            q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, new, position, 1) for old, new in ((keys, k), (values, v))
            )
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys).astype(jnp.float32)
            scores = jnp.where(jnp.arange(length) <= position, scores, -1e9)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(x.dtype), values)
            return mlp(w, x + constrain(mixed.reshape(x.shape), "batch", None, "tensor") @ w["out"]), (keys, values)

        x, (keys, values) = jax.lax.scan(
            block, look_up(p["embed"], state["token"]), (p["layers"], state["keys"], state["values"])
        )
        token = jnp.argmax(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), -1).astype(jnp.int32)
        return {"token": token, "keys": keys, "values": values, "position": position + 1}

    state = {"token": tokens(batch, 1), "keys": cache, "values": cache, "position": tokens()}
    return step, (decoder(width, hidden, layers, vocab), state)


def accumulation(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """Gradients are added up in float32 over four microbatches, in a loop around a loop over layers."""
    width, heads, hidden, layers, vocab, length, batch, parts = 1024, 16, 4096, 4, 32000, 1024, 8 * devices, 4
    if smoke:
        width, heads, hidden, layers, vocab, length, batch, parts = 32, 4, 64, 2, 64, 16, 2 * devices, 2

    def loss(p: Any, text: jax.Array) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array, w: Any) -> jax.Array:
            y = whole(layer_norm(x, w["norm_1"], w["norm_1"]))
            q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
            return mlp(w, residual(x + residual(attend(q, k, v, causal=True) @ w["out"])))

        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), look_up(p["embed"], text[:, :-1]), p["layers"])
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:])

    def step(state: Any, text: jax.Array) -> Any:
        def add(total: Any, part: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(loss)(state["params"], part)
            gradients = constrain_as_moments(gradients)
            return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, gradients), value

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), state["params"])
        parts_of_text = constrain(text.reshape(parts, -1, text.shape[-1]), None, "batch", None)
        gradients, values = jax.lax.scan(add, constrain_as_moments(zeros), parts_of_text)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g / parts, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: (p - 1e-3 * m).astype(p.dtype), state["params"], momentum)
        return {"params": params, "momentum": momentum}, values.mean()

    params = decoder(width, hidden, layers, vocab)
    momentum = jax.tree.map(lambda leaf: array(*leaf.shape, dtype=jnp.float32), params)
    return step, ({"params": params, "momentum": momentum}, tokens(batch, length + 1))
