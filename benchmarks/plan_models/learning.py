"""Kinds of steps that differ in how they learn or serve: distillation, policies, other optimizers, sampling."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from plan_models.experts import Splits, constrain, constrain_as_moments
from plan_models.kinds import decoder, mlp
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
from plan_models.text import LLAMA_SPLITS

ALIBI_SPLITS: Splits = (
    (r"(^|/)qkv$", 3, "tensor"),
    (r"(^|/)out$", 1, "tensor"),
    (r"(^|/)up$", -1, "tensor"),
    (r"(^|/)down$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
)
POLICY_SPLITS: Splits = (
    (r"(^|/)(actor|critic)/(0|2)/(weight|bias)$", -1, "tensor"),
    (r"(^|/)(actor|critic)/(1|3)/weight$", 0, "tensor"),
    (r"^(observations|actions|log_chances|rewards|dones|values)$", 1, "batch"),
)
SAMPLER_SPLITS: Splits = (
    *LLAMA_SPLITS,
    (r"(^|/)(keys|values)$", 0, "batch"),
    (r"(^|/)(keys|values)$", 2, "tensor"),
    (r"(^|/)key$", 0, None),
)
ADAFACTOR_SPLITS: Splits = (
    (r"^(?!optimizer/)(.*/)?(q|k|v|up|up_bias)$", -1, "tensor"),
    (r"^(?!optimizer/)(.*/)?(out|down)$", -2, "tensor"),
)
"""Only parameters and their average: the factored moments have fewer dimensions, and are small."""


def alibi_decoder(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """An MPT: distances as biases of attention, fused projections, no other biases, a tied head, a scan over layers."""
    width, heads, layers, vocab, length, batch = 1024, 16, 12, 50368, 1024, 4 * devices
    if smoke:
        width, heads, layers, vocab, length, batch = 32, 4, 2, 64, 16, devices
    size = width // heads
    layer = {
        "qkv": array(layers, width, 3, heads, size),
        "out": array(layers, heads, size, width),
        "up": array(layers, width, 4 * width),
        "down": array(layers, 4 * width, width),
        **dict.fromkeys(("norm_1", "norm_2"), array(layers, width)),
    }
    params = {"embed": array(vocab, width), "layers": layer, "norm": array(width)}

    def loss(p: Any, text: jax.Array) -> jax.Array:
        distance = jnp.arange(length)[None] - jnp.arange(length)[:, None]
        slopes = 2.0 ** (-8 / heads * jnp.arange(1, heads + 1))
        bias = jnp.where(distance <= 0, slopes[:, None, None] * distance, -1e9)

        @jax.checkpoint
        def block(x: jax.Array, w: Any) -> jax.Array:
            y = whole(layer_norm(x, w["norm_1"], jnp.zeros_like(w["norm_1"])))
            qkv = constrain(jnp.einsum("bld,dshe->sblhe", y, w["qkv"]), None, "batch", None, "tensor", None)
            scores = jnp.einsum("bqhe,bkhe->bhqk", qkv[0], qkv[1], preferred_element_type=jnp.float32)
            scores = constrain(scores * size**-0.5 + bias, "batch", "tensor", None, None)
            read = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores, -1).astype(x.dtype), qkv[2])
            x = residual(x + jnp.einsum("bqhe,hed->bqd", constrain(read, "batch", None, "tensor", None), w["out"]))
            y = whole(layer_norm(x, w["norm_2"], jnp.zeros_like(w["norm_2"])))
            y = constrain(jax.nn.gelu(y @ w["up"], approximate=False), "batch", None, "tensor")
            return residual(x + residual(y @ w["down"]))

        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), look_up(p["embed"], text[:, :-1]), p["layers"])
        x = layer_norm(x, p["norm"], jnp.zeros_like(p["norm"]))
        return cross_entropy(vocabulary_scores(x, p["embed"].T), text[:, 1:])

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))


def distillation(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A student of a frozen decoder: the divergence from its softened scores, beside the loss of the labels."""
    width, heads, hidden, layers = 2048, 16, 5632, 4
    student_width, student_heads, student_hidden, student_layers = 768, 12, 2048, 6
    vocab, length, batch, temperature, share = 32000, 1024, 2 * devices, 2.0, 0.5
    if smoke:
        width, heads, hidden, layers, vocab, length, batch = 64, 4, 128, 2, 64, 16, devices
        student_width, student_heads, student_hidden, student_layers = 32, 4, 64, 1

    def scores(p: Any, heads: int, text: jax.Array) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array, w: Any) -> jax.Array:
            y = whole(rms_norm(x, w["norm_1"]))
            q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
            return mlp(w, residual(x + residual(attend(q, k, v, causal=True) @ w["out"])))

        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), look_up(p["embed"], text), p["layers"])
        return vocabulary_scores(rms_norm(x, p["norm"]), p["head"]).astype(jnp.float32)

    def loss(p: Any, batch: Any) -> jax.Array:
        text, labels = batch["text"][:, :-1], batch["text"][:, 1:]
        teacher = jax.lax.stop_gradient(scores(batch["frozen"], heads, text))
        student = scores(p, student_heads, text)
        targets = jax.nn.log_softmax(teacher / temperature, -1)
        chances = jax.nn.log_softmax(student / temperature, -1)
        divergence = jnp.mean(jnp.sum(jnp.exp(targets) * (targets - chances), -1))
        return share * temperature**2 * divergence + (1 - share) * cross_entropy(student, labels)

    frozen = decoder(width, hidden, layers, vocab)
    params = decoder(student_width, student_hidden, student_layers, vocab)
    return train_step(loss), (with_moments(params), {"frozen": frozen, "text": tokens(batch, length + 1)})


def proximal_policy(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """PPO on a rollout: advantages by a scan backwards in time, then epochs over shuffled minibatches, in float32."""
    observed, actions, widths, times, environments, epochs, parts = 376, 17, (1024, 1024, 512), 24, 2048 * devices, 4, 4
    if smoke:
        observed, actions, widths, times, environments, epochs, parts = 16, 4, (32, 32, 16), 4, 4 * devices, 2, 2
    discount, smoothing, clip = 0.99, 0.95, 0.2
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))

    def numbers(*shape: int) -> jax.ShapeDtypeStruct:
        return array(*shape, dtype=jnp.float32)

    def network(outputs: int) -> list[Any]:
        sizes = zip((observed, *widths), (*widths, outputs), strict=True)
        return [{"weight": numbers(before, after), "bias": numbers(after)} for before, after in sizes]

    params = {"actor": network(actions), "critic": network(1), "log_scale": numbers(actions)}

    def forward(layers: list[Any], x: jax.Array) -> jax.Array:
        for index, layer in enumerate(layers):
            x = constrain(x @ layer["weight"] + layer["bias"], "batch", None if index % 2 else "tensor")
            x = x if index == len(layers) - 1 else jax.nn.elu(x)
        return x

    def log_chance(p: Any, observations: jax.Array, actions: jax.Array) -> jax.Array:
        z = (actions - forward(p["actor"], observations)) * jnp.exp(-p["log_scale"])
        return jnp.sum(-0.5 * (z**2 + jnp.log(2 * jnp.pi)) - p["log_scale"], -1)

    def loss(p: Any, part: Any) -> jax.Array:
        ratio = jnp.exp(log_chance(p, part["observations"], part["actions"]) - part["log_chances"])
        gain = (part["advantages"] - part["advantages"].mean()) / (part["advantages"].std() + 1e-8)
        policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - clip, 1 + clip) * gain).mean()
        values = forward(p["critic"], part["observations"])[:, 0]
        near = part["values"] + jnp.clip(values - part["values"], -clip, clip)
        critic = 0.5 * jnp.maximum((values - part["targets"]) ** 2, (near - part["targets"]) ** 2).mean()
        entropy = jnp.sum(p["log_scale"] + 0.5 * jnp.log(2 * jnp.pi * jnp.e))
        return policy + 0.5 * critic - 0.001 * entropy

    def advantages(rollout: Any, last: jax.Array) -> jax.Array:
        def backwards(after: tuple[jax.Array, jax.Array], now: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            advantage, next_value = after
            reward, going, value = now
            surprise = reward + discount * next_value * going - value
            advantage = surprise + discount * smoothing * going * advantage
            return (advantage, value), advantage

        transitions = (rollout["rewards"], 1 - rollout["dones"], rollout["values"])
        return jax.lax.scan(backwards, (jnp.zeros_like(last), last), transitions, reverse=True)[1]

    def step(state: Any, rollout: Any) -> Any:
        last = constrain(forward(state["params"]["critic"], rollout["last_observations"])[:, 0], "batch")
        gain = constrain(advantages(rollout, last), None, "batch")
        names = ("observations", "actions", "log_chances", "values")
        examples = {name: rollout[name] for name in names} | {"advantages": gain, "targets": gain + rollout["values"]}
        key, shuffle = jax.random.split(jax.random.wrap_key_data(state["key"]))

        def minibatch(carry: Any, part: Any) -> tuple[Any, jax.Array]:
            params, moments = carry
            value, gradients = jax.value_and_grad(loss)(params, part)
            updates, moments = optimizer.update(constrain_as_moments(gradients), moments)
            return (constrain_as_moments(optax.apply_updates(params, updates)), moments), value

        def epoch(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            order = jax.random.permutation(key, times * environments)

            def shuffled(x: jax.Array) -> jax.Array:
                x = x.reshape(times * environments, *x.shape[2:])[order]
                return constrain(x.reshape(parts, -1, *x.shape[1:]), None, "batch", *[None] * (x.ndim - 1))

            return jax.lax.scan(minibatch, carry, jax.tree.map(shuffled, examples))

        carry = (state["params"], state["optimizer"])
        (params, moments), values = jax.lax.scan(epoch, carry, jax.random.split(shuffle, epochs))
        return {"params": params, "optimizer": moments, "key": jax.random.key_data(key)}, values.mean()

    state = {"params": params, "optimizer": jax.eval_shape(optimizer.init, params)}
    rollout = {
        "observations": numbers(times, environments, observed),
        "actions": numbers(times, environments, actions),
        **dict.fromkeys(("log_chances", "rewards", "dones", "values"), numbers(times, environments)),
        "last_observations": numbers(environments, observed),
    }
    return step, (state | {"key": jax.ShapeDtypeStruct((2,), jnp.uint32)}, rollout)


def sampler(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """Sixteen tokens for each sequence, drawn from the fifty most likely; the cache is written in place."""
    width, heads, kv_heads, hidden, layers, vocab = 2048, 16, 8, 5632, 4, 32000
    length, batch, drawn, likely, temperature = 2048, 16 * devices, 16, 50, 0.8
    if smoke:
        width, heads, kv_heads, hidden, layers, vocab, length, batch, drawn, likely = (
            64,
            8,
            8,
            128,
            2,
            64,
            32,
            devices,
            4,
            8,
        )
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

    def rotated(x: jax.Array, position: jax.Array) -> jax.Array:
        angles = position / 1e4 ** (jnp.arange(size // 2) / (size // 2))
        first, second = jnp.split(x.astype(jnp.float32), 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1).astype(x.dtype)

    def attention(w: Any, y: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
        q, k, v = in_heads(y @ w["q"], heads), in_heads(y @ w["k"], kv_heads), in_heads(y @ w["v"], kv_heads)
        keys = jax.lax.dynamic_update_slice_in_dim(cache["keys"], rotated(k, position), position, 1)
        values = jax.lax.dynamic_update_slice_in_dim(cache["values"], v, position, 1)
        q = rotated(q, position).reshape(batch, kv_heads, heads // kv_heads, size)
        scores = jnp.einsum("bhge,bkhe->bhgk", q, keys, preferred_element_type=jnp.float32) * size**-0.5
        scores = jnp.where(jnp.arange(length) <= position, scores, -jnp.inf)
        mixed = jnp.einsum("bhgk,bkhe->bhge", jax.nn.softmax(scores, -1).astype(y.dtype), values)
        return constrain(mixed.reshape(batch, 1, width), "batch", None, "tensor"), {"keys": keys, "values": values}

    def step(p: Any, state: Any) -> Any:
        key = jax.random.wrap_key_data(state["key"])

        def next_token(_: jax.Array, carry: Any) -> Any:
            text, caches, position = carry
            x, new = look_up(p["embed"], jax.lax.dynamic_slice_in_dim(text, position, 1, 1)), []
            for w, cache in zip(p["layers"], caches, strict=True):
                y, cache = attention(w, whole(rms_norm(x, w["norm_1"])), cache, position)
                new.append(cache)
                x = mlp(w, residual(x + residual(y @ w["out"])))
            scores = vocabulary_scores(rms_norm(x, p["norm"]), p["head"])[:, 0].astype(jnp.float32)
            best, ids = jax.lax.top_k(scores, likely)
            choice = jax.random.categorical(jax.random.fold_in(key, position), best / temperature, -1)
            token = jnp.take_along_axis(ids, choice[:, None], -1).astype(jnp.int32)
            text = jax.lax.dynamic_update_slice_in_dim(text, token, position + 1, 1)
            return constrain(text, "batch", None), new, position + 1

        text, caches, position = jax.lax.fori_loop(
            0, drawn, next_token, (state["text"], state["caches"], state["position"])
        )
        return {"text": text, "caches": caches, "position": position, "key": state["key"]}

    cache = dict.fromkeys(("keys", "values"), array(batch, length, kv_heads, size))
    state = {"text": tokens(batch, length), "caches": [cache] * layers, "position": tokens()}
    return step, (params, state | {"key": jax.ShapeDtypeStruct((2,), jnp.uint32)})


def adafactor_decoder(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A GPT of 50,257 tokens: Adafactor, two microbatches, an average of the weights, a loss of large scores."""
    width, heads, layers, vocab, length, batch, parts = 768, 12, 4, 50257, 1024, 8 * devices, 2
    if smoke:
        width, heads, layers, vocab, length, batch, parts = 32, 4, 2, 61, 16, 2 * devices, 2
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adafactor(1e-3, min_dim_size_to_factor=16 if smoke else 128)
    )

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return array(*shape, dtype=jnp.float32)

    layer = {
        **dict.fromkeys(("q", "k", "v", "out"), weight(width, width)),
        "up": weight(width, 4 * width),
        "up_bias": weight(4 * width),
        "down": weight(4 * width, width),
        **dict.fromkeys(("down_bias", "norm_1", "norm_2", "shift_1", "shift_2"), weight(width)),
    }
    params = {
        "embed": weight(vocab, width),
        "positions": weight(length, width),
        "layers": [layer] * layers,
        **dict.fromkeys(("norm", "shift"), weight(width)),
    }

    @jax.checkpoint
    def block(w: Any, x: jax.Array) -> jax.Array:
        y = whole(layer_norm(x, w["norm_1"], w["shift_1"]))
        q, k, v = (in_heads(y @ w[name], heads) for name in ("q", "k", "v"))
        x = residual(x + residual(attend(q, k, v, causal=True) @ w["out"]))
        y = whole(layer_norm(x, w["norm_2"], w["shift_2"]))
        y = constrain(jax.nn.gelu(y @ w["up"] + w["up_bias"]), "batch", None, "tensor")
        return residual(x + residual(y @ w["down"]) + w["down_bias"])

    def loss(p: Any, text: jax.Array) -> jax.Array:
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
        x = residual(low["embed"][text[:, :-1]] + low["positions"])
        for w in low["layers"]:
            x = block(w, x)
        x = whole(layer_norm(x, low["norm"], low["shift"]))
        scores = jnp.einsum("bld,vd->blv", x, low["embed"], preferred_element_type=jnp.float32)
        total = jax.nn.logsumexp(scores, -1)
        chosen = jnp.take_along_axis(scores, text[:, 1:, None], -1)[..., 0]
        return jnp.mean(total - chosen + 1e-4 * total**2)

    def step(state: Any, text: jax.Array) -> Any:
        def add(total: Any, part: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(loss)(state["params"], part)
            return jax.tree.map(jnp.add, total, constrain_as_moments(gradients)), value

        zeros = constrain_as_moments(jax.tree.map(jnp.zeros_like, state["params"]))
        gradients, values = jax.lax.scan(
            add, zeros, constrain(text.reshape(parts, -1, length + 1), None, "batch", None)
        )
        gradients = jax.tree.map(lambda leaf: leaf / parts, gradients)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        params = constrain_as_moments(optax.apply_updates(state["params"], updates))
        average = optax.incremental_update(params, state["average"], 1e-3)
        return {"params": params, "average": average, "optimizer": moments}, values.mean()

    state = {"params": params, "average": params, "optimizer": jax.eval_shape(optimizer.init, params)}
    return step, (state, tokens(batch, length + 1))
