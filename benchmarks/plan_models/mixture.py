"""A mixture of experts for the planning benchmark, dispatched as GShard does: one-hot tensors with a capacity."""

from typing import Any

import jax
import jax.numpy as jnp

from plan_models.experts import Axes, Expert, Splits, constrain, plain, vocabularies
from plan_models.parts import (
    array,
    attend,
    cross_entropy,
    in_heads,
    look_up,
    residual,
    rms_norm,
    tokens,
    train_step,
    vocabulary_scores,
    whole,
    with_moments,
)

SPLITS: Splits = (
    (r"(^|/)(q|k|v)$", -1, "tensor"),
    (r"(^|/)out$", -2, "tensor"),
    (r"(^|/)embed$", 0, "rows"),
    (r"(^|/)embed$", 1, "columns"),
    (r"(^|/)head$", 1, "vocab"),
    (r"(^|/)experts_(up|down)$", 0, "experts"),
    (r"(^|/)experts_up$", 2, "tensor of experts"),
    (r"(^|/)experts_down$", 1, "tensor of experts"),
)


def mixture(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A decoder of 4 layers with 8 experts each. Every token goes to two of them."""
    width, heads, hidden, layers, experts, vocab, length, batch = 1024, 16, 4096, 4, 8, 32000, 1024, 4 * devices
    if smoke:
        width, heads, hidden, layers, vocab, length, batch = 32, 4, 64, 2, 64, 16, devices
    capacity = length * 5 // (2 * experts)  # two choices, and a quarter more than an even share
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

    def routed(y: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights that take each token to slots of experts and back, and the loss of uneven shares."""
        gates = jax.nn.softmax((y @ router).astype(jnp.float32), -1)
        first = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), -1), experts)
        uneven = experts * jnp.mean(jnp.mean(gates, 1) * jnp.mean(first, 1))
        slot_1 = jnp.sum((jnp.cumsum(first, 1) - first) * first, -1)
        slot_2 = jnp.sum((jnp.cumsum(second, 1) - second + jnp.sum(first, 1, keepdims=True)) * second, -1)
        combine = sum(
            ((gates * chosen)[..., None] * jax.nn.one_hot(slot.astype(jnp.int32), capacity)[:, :, None, :])
            for chosen, slot in ((first, slot_1), (second, slot_2))  # one_hot is zero where no slot is left
        )
        return constrain(jnp.asarray(combine, y.dtype), "batch", None, "experts beside batch", None), uneven

    @jax.checkpoint
    def block(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = whole(rms_norm(x, p["norm_1"]))
        q, k, v = (in_heads(y @ p[name], heads) for name in ("q", "k", "v"))
        x = residual(x + residual(attend(q, k, v, causal=True) @ p["out"]))
        y = whole(rms_norm(x, p["norm_2"]))
        combine, uneven = routed(y, p["router"])
        slots = constrain(
            jnp.einsum("bsec,bsd->becd", (combine > 0).astype(y.dtype), y), "batch", "experts beside batch", None, None
        )
        slots = constrain(slots, "batch of experts", "experts", None, None)
        inner = constrain(
            jax.nn.gelu(jnp.einsum("becd,edf->becf", slots, p["experts_up"])),
            *("batch of experts", "experts", None, "tensor of experts"),
        )
        slots = constrain(
            jnp.einsum("becf,efd->becd", inner, p["experts_down"]), "batch of experts", "experts", None, None
        )
        slots = constrain(slots, "batch", "experts beside batch", None, None)
        return residual(x + residual(jnp.einsum("bsec,becd->bsd", combine, slots))), uneven

    def loss(p: Any, text: jax.Array) -> jax.Array:
        x, uneven = look_up(p["embed"], text[:, :-1]), jnp.float32(0)
        for layer_params in p["layers"]:
            x, layer_uneven = block(layer_params, x)
            uneven = uneven + layer_uneven
        return cross_entropy(vocabulary_scores(rms_norm(x, p["norm"]), p["head"]), text[:, 1:]) + 0.01 * uneven

    return train_step(loss), (with_moments(params), tokens(batch, length + 1))


def experts() -> tuple[Expert, ...]:
    """The plans for a mixture: the plans of any transformer, and plans that split experts."""

    def split(
        over: Axes, batch: Axes, name: str, tensor: Axes = (), vocab: Axes | None = None, columns: Axes = ()
    ) -> tuple[Expert, ...]:
        return (
            Expert(f"{name}, ZeRO-1", batch, (), batch, tensor, vocab, columns, experts=over, splits=SPLITS),
            Expert(f"{name}, FSDP", batch, batch, batch, tensor, vocab, columns, experts=over, splits=SPLITS),
        )

    d, f, m = ("data",), ("fsdp",), ("model",)
    return (
        *plain(SPLITS),
        *vocabularies(SPLITS),
        *split(d, d, "experts over data"),
        *split(d, d, "experts over data, table by columns", (), None, d),
        *split((*d, *m), (*d, *m), "experts over data+model"),
        *split((*d, *m), (*d, *m), "experts over data+model, table by columns, head over model", (), m, (*d, *m)),
        *split(d, (*m, *d), "experts over data, batch over model+data"),
        *split(m, (*d, *m), "experts over model, batch over data+model"),
        *split(m, (*d, *m), "experts and head over model, batch and table over data+model", (), m, (*d, *m)),
        *split(m, d, "experts and heads over model", m),
        *split(d, d, "experts over data, Megatron over model", m),
        *split((*d, *f, *m), (*d, *f, *m), "experts over data+fsdp+model"),
        *split(
            (*d, *f, *m),
            (*d, *f, *m),
            "experts over data+fsdp+model, table by columns, head over model",
            (),
            m,
            (*d, *f, *m),
        ),
        *split((*f, *m), (*d, *f, *m), "experts over fsdp+model, batch over data+fsdp+model"),
        *split(m, (*d, *f), "experts and heads over model, batch over data+fsdp", m),
        *split((*d, *f), (*d, *f), "experts over data+fsdp, Megatron over model", m),
    )
