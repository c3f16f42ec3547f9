"""Kinds of train steps that mix positions without attention, or beside it: recurrences that are scanned associatively
or in chunks, long convolutions, a hybrid with experts."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import optax

from plan_models.experts import Splits, constrain
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
from plan_models.updates import optax_step

LRU_SPLITS: Splits = (
    (r"(^|/)into_(real|imaginary)$", -1, "tensor"),
    (r"(^|/)out_(real|imaginary)$", -2, "tensor"),
    (r"(^|/)(decay|angle|gain)_log$", 0, "tensor"),
    (r"(^|/)(value|gate)$", -1, "tensor"),
)
HYBRID_SPLITS: Splits = (
    (r"(^|/)(q|k|v|gate|up|into|open|rate|conv|delta)$", -1, "tensor"),
    (r"(^|/)(out|down)$", -2, "tensor"),
    (r"(^|/)(decay_log|delta_bias|skip|norm_inner)$", 0, "tensor"),
    (r"(^|/)experts_(gate|up|down)$", 0, "experts"),
    (r"(^|/)experts_(gate|up)$", 2, "tensor of experts"),
    (r"(^|/)experts_down$", 1, "tensor of experts"),
    (r"(^|/)embed$", 0, "rows"),
    (r"(^|/)head$", 1, "vocab"),
)
HYENA_SPLITS: Splits = (
    (r"(^|/)(into|short|up)$", -1, "tensor"),
    (r"(^|/)(out|down)$", -2, "tensor"),
    (r"(^|/)filter/last$", -1, "tensor"),
    (r"(^|/)filter/(decay|skip)$", 0, "tensor"),
)
GLA_SPLITS: Splits = (
    (r"(^|/)(q|k|v|open|forget_up|gate|up)$", -1, "tensor"),
    (r"(^|/)(out|down)$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
    (r"(^|/)head$", 1, "vocab"),
)


def linear_recurrence(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """An LRU: diagonal complex recurrences by associative scans, written for one sequence of pixels, in float32."""
    width, states, layers, classes, length, batch = 512, 384, 4, 10, 1024, 8 * devices
    if smoke:
        width, states, layers, classes, length, batch = 32, 16, 2, 8, 16, devices

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return array(*shape, dtype=jnp.float32)

    layer = {
        **dict.fromkeys(("norm", "shift", "skip"), weight(width)),
        **dict.fromkeys(("decay_log", "angle_log", "gain_log"), weight(states)),
        **dict.fromkeys(("into_real", "into_imaginary"), weight(width, states)),
        **dict.fromkeys(("out_real", "out_imaginary"), weight(states, width)),
        **dict.fromkeys(("value", "gate"), weight(width, width)),
    }
    params = {"into": weight(3, width), "layers": [layer] * layers, "head": weight(width, classes)}

    def combine(left: Any, right: Any) -> Any:
        return right[0] * left[0], right[0] * left[1] + right[1]

    def recurrence(w: Any, x: jax.Array) -> jax.Array:
        keep = jnp.exp(-jnp.exp(w["decay_log"]) + 1j * jnp.exp(w["angle_log"]))
        into = (w["into_real"] + 1j * w["into_imaginary"]) * jnp.exp(w["gain_log"])
        added = constrain(x @ into, None, "tensor")
        _, states = jax.lax.associative_scan(combine, (jnp.broadcast_to(keep, added.shape), added))
        states = constrain(states, None, "tensor")
        return (states @ (w["out_real"] + 1j * w["out_imaginary"])).real + w["skip"] * x

    def scores(p: Any, pixels: jax.Array) -> jax.Array:
        x = pixels @ p["into"]
        for w in p["layers"]:
            y = jax.nn.gelu(constrain(recurrence(w, layer_norm(x, w["norm"], w["shift"])), None, None))
            y = constrain((y @ w["value"]) * jax.nn.sigmoid(y @ w["gate"]), None, "tensor")
            x = constrain(x + y, None, None)
        return jnp.mean(x, 0) @ p["head"]

    def loss(p: Any, batch: Any) -> jax.Array:
        logits = jax.vmap(scores, in_axes=(None, 0))(p, constrain(batch["pixels"], "batch", None, None))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    step, state = optax_step(loss, optax.adamw(1e-3, weight_decay=0.05), params, "optimizer")
    return step, (state, {"pixels": weight(batch, length, 3), "labels": tokens(batch)})


def _segment_sums(x: jax.Array) -> jax.Array:
    """The sums over each stretch of the last dimension, `-inf` where it would run backwards."""
    sums = jnp.cumsum(x, -1)
    return jnp.where(jnp.tril(jnp.ones((x.shape[-1],) * 2, bool)), sums[..., :, None] - sums[..., None, :], -jnp.inf)


def _state_space_duality(x: jax.Array, decay: jax.Array, b: jax.Array, c: jax.Array, chunk: int) -> jax.Array:
    """The chunked form of a Mamba-2: matrices within chunks, states between them.

    Takes `(batch, length, heads, size)`, `(batch, length, heads)` and twice `(batch, length, states)`.
    """
    batch, length, heads, size = x.shape
    x = x.reshape(batch, -1, chunk, heads, size)
    b, c = (each.reshape(batch, -1, chunk, each.shape[-1]) for each in (b, c))
    decay = decay.reshape(batch, -1, chunk, heads).transpose(0, 3, 1, 2)
    sums = jnp.cumsum(decay, -1)
    within = jnp.exp(_segment_sums(decay)).astype(x.dtype)
    within = constrain(within, "batch", "tensor", None, None, None)
    scores = jnp.einsum("bcln,bcsn->bcls", c, b)
    y = jnp.einsum("bcls,bhcls,bcshp->bclhp", scores, within, x)
    left = jnp.exp(sums[..., -1:] - sums).astype(x.dtype)
    states = jnp.einsum("bcln,bhcl,bclhp->bchpn", b, left, x)
    states = jnp.concatenate([jnp.zeros_like(states[:, :1]), states[:, :-1]], 1)
    between = jnp.exp(_segment_sums(jnp.pad(sums[..., :-1, -1], ((0, 0), (0, 0), (1, 0))))).astype(x.dtype)
    states = constrain(jnp.einsum("bhzc,bchpn->bzhpn", between, states), "batch", None, "tensor", None, None)
    y = y + jnp.einsum("bcln,bchpn,bhcl->bclhp", c, states, jnp.exp(sums).astype(x.dtype))
    return constrain(y.reshape(batch, length, heads, size), "batch", None, "tensor", None)


def mamba_experts(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A hybrid of four layers: three of Mamba-2 and one of attention; every second MLP is a mixture of experts."""
    width, inner, size, states, hidden, experts, chosen = 1024, 2048, 64, 64, 2816, 8, 2
    heads, chunk, vocab, length, batch = 16, 64, 32000, 1024, 4 * devices
    if smoke:
        width, inner, size, states, hidden, experts, chosen = 32, 64, 16, 8, 64, 8, 2
        heads, chunk, vocab, length, batch = 4, 4, 64, 16, devices
    capacity = length * chosen * 5 // (4 * experts)
    attention = {**dict.fromkeys(("q", "k", "v", "out"), array(width, width)), "norm_1": array(width)}
    mamba = {
        "norm_1": array(width),
        **dict.fromkeys(("into", "open"), array(width, inner)),
        "states": array(width, 2 * states),
        "delta": array(width, inner // size),
        "conv": array(4, 1, inner),
        "conv_states": array(4, 1, 2 * states),
        **dict.fromkeys(("decay_log", "delta_bias", "skip"), array(inner // size, dtype=jnp.float32)),
        "norm_inner": array(inner),
        "out": array(inner, width),
    }
    dense = {
        **dict.fromkeys(("gate", "up"), array(width, hidden)),
        "down": array(hidden, width),
        "norm_2": array(width),
    }
    mixture = {
        "norm_2": array(width),
        "router": array(width, experts, dtype=jnp.float32),
        **dict.fromkeys(("experts_gate", "experts_up"), array(experts, width, hidden)),
        "experts_down": array(experts, hidden, width),
    }
    layers = [mamba | dense, mamba | mixture, attention | dense, mamba | mixture]
    params = {"embed": array(vocab, width), "layers": layers, "norm": array(width), "head": array(width, vocab)}

    def causal_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers, channels = ("NWC", "WIO", "NWC"), x.shape[-1]
        return jax.nn.silu(
            jax.lax.conv_general_dilated(
                x, kernel, (1,), [(3, 0)], dimension_numbers=numbers, feature_group_count=channels
            )
        )

    def mamba_layer(w: Any, y: jax.Array) -> jax.Array:
        x = causal_conv(constrain(y @ w["into"], "batch", None, "tensor"), w["conv"])
        b, c = jnp.split(causal_conv(y @ w["states"], w["conv_states"]), 2, -1)
        delta = jax.nn.softplus((y @ w["delta"]).astype(jnp.float32) + w["delta_bias"])
        x = constrain(x.reshape(*x.shape[:2], -1, size), "batch", None, "tensor", None)
        added = (x * delta[..., None]).astype(x.dtype)
        z = _state_space_duality(added, -jnp.exp(w["decay_log"]) * delta, b, c, chunk)
        z = (z + x * w["skip"][:, None]).astype(x.dtype).reshape(*x.shape[:2], inner)
        z = rms_norm(z * jax.nn.silu(y @ w["open"]), w["norm_inner"])
        return constrain(z, "batch", None, "tensor") @ w["out"]

    def mixed_experts(w: Any, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scatters tokens to slots of experts, and gathers them from there; what has no slot is dropped."""
        gates = jax.nn.softmax(y.astype(jnp.float32) @ w["router"], -1)
        weights, ids = jax.lax.top_k(gates, chosen)
        ids = ids.reshape(y.shape[0], -1)
        places = (
            jnp.take_along_axis(jnp.cumsum(jax.nn.one_hot(ids, experts, dtype=jnp.int32), 1), ids[..., None], 2) - 1
        )
        slots = jnp.where(places[..., 0] < capacity, ids * capacity + places[..., 0], experts * capacity)

        def dispatch(slots: jax.Array, rows: jax.Array) -> jax.Array:
            return jnp.zeros((experts * capacity, width), rows.dtype).at[slots].set(rows, mode="drop")

        x = jax.vmap(dispatch)(slots, jnp.repeat(y, chosen, 1)).reshape(-1, experts, capacity, width)
        x = constrain(x, "batch", "experts beside batch", None, None)
        x = constrain(x, "batch of experts", "experts", None, None)
        gate, up = (jnp.einsum("becd,edf->becf", x, w[f"experts_{name}"]) for name in ("gate", "up"))
        x = constrain(jax.nn.silu(gate) * up, "batch of experts", "experts", None, "tensor of experts")
        x = jnp.einsum("becf,efd->becd", x, w["experts_down"])
        x = constrain(x, "batch of experts", "experts", None, None)
        x = constrain(x, "batch", "experts beside batch", None, None).reshape(-1, experts * capacity, width)
        read = jax.vmap(lambda rows, slots: rows.at[slots].get(mode="fill", fill_value=0))(x, slots)
        read = constrain(read, "batch", None, None).reshape(*y.shape[:2], chosen, width)
        share = jnp.mean(jax.nn.one_hot(ids, experts), (0, 1))
        return jnp.einsum("bskd,bsk->bsd", read, weights.astype(y.dtype)), experts * share @ jnp.mean(gates, (0, 1))

    @jax.checkpoint
    def block(w: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, uneven = whole(rms_norm(x, w["norm_1"])), jnp.float32(0)
        if "q" in w:
            q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
            y = attend(q, k, v, causal=True) @ w["out"]
        else:
            y = mamba_layer(w, y)
        x = residual(x + residual(y))
        y = whole(rms_norm(x, w["norm_2"]))
        if "router" in w:
            y, uneven = mixed_experts(w, y)
        else:
            y = constrain(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "batch", None, "tensor") @ w["down"]
        return residual(x + residual(y)), uneven

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x, uneven = look_up(p["embed"], text[:, :-1]), jnp.float32(0)
        for w in p["layers"]:
            x, layer_uneven = block(w, x)
            uneven = uneven + layer_uneven
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:]) + 0.01 * uneven

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))


def long_convolution(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A Hyena for DNA: filters as long as the sequence that a small network makes, applied by FFT in float32."""
    width, features, hidden, layers, vocab, length, batch = 256, 33, 64, 3, 16, 8192, 2 * devices
    if smoke:
        width, features, hidden, layers, vocab, length, batch = 32, 5, 16, 1, 16, 16, devices

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return array(*shape, dtype=jnp.float32)

    layer = {
        **dict.fromkeys(("norm_1", "shift_1", "norm_2", "shift_2"), weight(width)),
        "into": weight(width, 3, width),
        "short": weight(3, 3, width),
        "filter": {
            "first": weight(features, hidden),
            "middle": weight(hidden, hidden),
            "last": weight(hidden, width),
            **dict.fromkeys(("decay", "skip"), weight(width)),
        },
        "out": weight(width, width),
        "up": weight(width, 4 * width),
        "down": weight(4 * width, width),
    }
    params = {"embed": weight(vocab, width), "layers": [layer] * layers, "norm": weight(width), "shift": weight(width)}

    def implicit_filter(w: Any) -> jax.Array:
        time = jnp.linspace(0, 1, length)[:, None]
        angles = 2 * jnp.pi * time * jnp.linspace(1e-4, features // 2 - 1, features // 2)
        z = jnp.concatenate([time, jnp.cos(angles), jnp.sin(angles)], -1)
        z = jnp.sin(jnp.sin(z @ w["first"]) @ w["middle"]) @ w["last"]
        return constrain(z * jnp.exp(-time * jnp.abs(w["decay"])), None, "tensor")

    def operator(w: Any, y: jax.Array) -> jax.Array:
        z = constrain(jnp.einsum("bld,dse->blse", y, w["into"]), "batch", None, None, "tensor")
        padded = jnp.pad(z, ((0, 0), (2, 0), (0, 0), (0, 0)))
        z = reduce(jnp.add, (padded[:, n : n + length] * w["short"][n] for n in range(3)))
        first, second, value = (z[:, :, n] for n in range(3))
        value = constrain(value * second, "batch", None, "tensor")
        response = jnp.fft.rfft(implicit_filter(w["filter"]), 2 * length, axis=0)
        spectrum = jnp.fft.rfft(value, 2 * length, axis=1) * response
        value = jnp.fft.irfft(spectrum, 2 * length, axis=1)[:, :length] + value * w["filter"]["skip"]
        return constrain(first * value, "batch", None, "tensor") @ w["out"]

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x = whole(p["embed"][text[:, :-1]])
        for w in p["layers"]:
            x = whole(x + operator(w, layer_norm(x, w["norm_1"], w["shift_1"])))
            y = layer_norm(x, w["norm_2"], w["shift_2"])
            x = whole(x + constrain(jax.nn.gelu(y @ w["up"]), "batch", None, "tensor") @ w["down"])
        return cross_entropy(layer_norm(x, p["norm"], p["shift"]) @ p["embed"].T, text[:, 1:])

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b2=0.98, weight_decay=0.1))
    step, state = optax_step(loss, optimizer, params, "optimizer")
    return step, (state, tokens(batch, length + 1))


def linear_attention(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """Gated linear attention: a scan over chunks whose state is float32, in a scan over eight layers."""
    width, heads, rank, hidden, layers, chunk, vocab, length, batch = 1024, 4, 16, 2816, 8, 64, 32000, 2048, 4 * devices
    if smoke:
        width, heads, rank, hidden, layers, chunk, vocab, length, batch = 32, 4, 8, 64, 2, 4, 64, 16, devices
    key_width = width // 2
    layer = {
        **dict.fromkeys(("q", "k"), array(layers, width, key_width)),
        **dict.fromkeys(("v", "open"), array(layers, width, width)),
        "forget_down": array(layers, width, rank),
        "forget_up": array(layers, rank, key_width),
        "norm_heads": array(layers, width // heads),
        "out": array(layers, width, width),
        **dict.fromkeys(("gate", "up"), array(layers, width, hidden)),
        "down": array(layers, hidden, width),
        **dict.fromkeys(("norm_1", "norm_2"), array(layers, width)),
    }
    params = {"embed": array(vocab, width), "layers": layer, "norm": array(width), "head": array(width, vocab)}

    def in_chunks(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], length // chunk, chunk, heads, -1).transpose(1, 0, 3, 2, 4)
        return constrain(x, None, "batch", "tensor", None, None)

    def over_chunk(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, forget = now
        sums = jnp.cumsum(forget, -2)
        total = sums[..., -1:, :]
        faded = q.astype(jnp.float32) * jnp.exp(sums)
        scores = jnp.einsum("bhqd,bhkd->bhqk", faded, k.astype(jnp.float32) * jnp.exp(-sums))
        scores = jnp.where(jnp.tril(jnp.ones((chunk, chunk), bool)), scores, 0).astype(v.dtype)
        y = jnp.einsum("bhqk,bhkv->bhqv", scores, v) + jnp.einsum("bhqd,bhdv->bhqv", faded, state).astype(v.dtype)
        left = (k.astype(jnp.float32) * jnp.exp(total - sums)).astype(v.dtype)
        added = jnp.einsum("bhkd,bhkv->bhdv", left, v, preferred_element_type=jnp.float32)
        return constrain(state * jnp.exp(total).swapaxes(-1, -2) + added, "batch", "tensor", None, None), y

    @jax.checkpoint
    def block(x: jax.Array, w: Any) -> jax.Array:
        y = whole(rms_norm(x, w["norm_1"]))
        q, k, v = (in_chunks(y @ w[name]) for name in ("q", "k", "v"))
        forget = jax.nn.log_sigmoid((y @ w["forget_down"] @ w["forget_up"]).astype(jnp.float32)) / 16
        size = key_width // heads
        start = constrain(jnp.zeros((x.shape[0], heads, size, width // heads)), "batch", "tensor", None, None)
        _, z = jax.lax.scan(over_chunk, start, (q * size**-0.5, k, v, in_chunks(forget)))
        z = rms_norm(z.transpose(1, 0, 3, 2, 4).reshape(x.shape[0], length, heads, -1), w["norm_heads"])
        z = constrain(z.reshape(x.shape) * jax.nn.silu(y @ w["open"]), "batch", None, "tensor")
        x = residual(x + residual(z @ w["out"]))
        y = whole(rms_norm(x, w["norm_2"]))
        return residual(
            x + residual(constrain(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "batch", None, "tensor") @ w["down"])
        )

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), look_up(p["embed"], text[:, :-1]), p["layers"])
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:])

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))
