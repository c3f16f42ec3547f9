"""A layer of DeepSeek-V2 or V3 as MaxText runs it: latent attention, and experts that tokens are sorted by.

Tokens are permuted, multiplied by their experts and permuted back on each device (MaxText's `sparse_matmul` with
`megablox`): `fsdp` gathers the weights of experts, and `tensor` splits either the width of the experts, or with
`recipe.transposed` the width of the model (MaxText's axis `tensor_transpose`).
"""

from collections.abc import Callable
from typing import Any, Literal, final

import attrs
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from published.attention import BATCH, attend
from published.recipe import Recipe

_TILE_ROWS = 512
"""The rows that the kernel of experts works on at a time: MaxText's default."""


@final
@attrs.frozen
class ExpertDims:
    """What a layer of experts has besides the dimensions of a decoder."""

    count: int
    per_token: int
    mlp: int
    """The hidden width of an expert, and of each expert that all tokens share."""

    key_value_rank: int = 0
    """The width of the vectors that keys and values are made of. 0 is for layers of experts beside an MLP, which have
    the attention of a decoder without experts: Gemma's."""

    query_rank: int = 0
    """The width of the vectors that queries are made of; 0 where they are made of the model's."""

    shared: int = 1
    """The experts that all tokens share."""

    scores: Literal["sigmoid", "softmax", "normed softmax"] = "sigmoid"
    """The shares of experts: DeepSeek-V3's, which are divided by their sum, and whose choice has a bias; V2's; or
    Gemma's, which are divided by their sum."""

    rotary_dim: int = 0
    """How much of a query and a key is rotated, beside the `head_dim` that is not."""

    dense_layers: int = 0
    """How many layers, the first ones, have an MLP of the decoder's hidden width instead."""


@final
@attrs.frozen
class ExpertLayer:
    """A layer of experts."""

    embed: int
    heads: int
    head_dim: int
    dims: ExpertDims
    recipe: Recipe
    platform: str
    dense_mlp: int = 0
    """The hidden width of the MLP that a layer has instead of experts."""

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """The weights, with MaxText's specs."""
        embed, heads, dims = self.embed, self.heads, self.dims
        shared_mlp = self.dense_mlp or dims.shared * dims.mlp
        width, mlp = (("fsdp", "tensor"), None) if self.recipe.transposed else ("fsdp", "tensor")
        query, key = self.head_dim + dims.rotary_dim, 2 * self.head_dim
        shapes = {
            "norm_attention": ((embed,), P("tensor")),
            "norm_mlp": ((embed,), P("tensor")),
            "norm_key_value": ((dims.key_value_rank,), P("tensor")),
            "key_value_down": ((embed, dims.key_value_rank + dims.rotary_dim), P(width, None)),
            "key_value_up": ((dims.key_value_rank, heads, key), P("fsdp", "tensor")),
            "out": ((heads, self.head_dim, embed), P("tensor", None, "fsdp")),
            "shared_gate": ((embed, shared_mlp), P(width, mlp)),
            "shared_up": ((embed, shared_mlp), P(width, mlp)),
            "shared_down": ((shared_mlp, embed), P(mlp, width)),
        }
        if dims.query_rank:
            shapes |= {
                "norm_query": ((dims.query_rank,), P("tensor")),
                "query_down": ((embed, dims.query_rank), P(width, None)),
                "query_up": ((dims.query_rank, heads, query), P("fsdp", "tensor")),
            }
        else:
            shapes["query"] = ((embed, heads, query), P(width, "tensor"))
        if self.dense_mlp:
            return shapes
        return shapes | Experts(dims, self.recipe, self.platform, jax.nn.silu).shapes(embed)

    def __call__(self, x: Any, weights: dict[str, Any]) -> Any:
        """What the layer returns for (batch, length, embed)."""
        x = checkpoint_name(_residual(x), "decoder_layer_input")
        x = _residual(x + self._attention(_residual(_norm(x, weights["norm_attention"])), weights))
        normed = _residual(_norm(x, weights["norm_mlp"]))
        result = self._shared(normed, weights)
        if not self.dense_mlp:
            result = self._routed(normed, weights) + result
        return _residual(x + _residual(result))

    def _attention(self, x: Any, weights: dict[str, Any]) -> Any:
        """Attention whose queries, keys and values are made of vectors that are narrower than the model."""
        rank, size = self.dims.key_value_rank, self.head_dim
        if self.dims.query_rank:
            low = _norm(jnp.einsum("bse,er->bsr", x, weights["query_down"]), weights["norm_query"])
            query = _heads(jnp.einsum("bsr,rhd->bshd", low, weights["query_up"]))
        else:
            query = _heads(jnp.einsum("bse,ehd->bshd", x, weights["query"]))
        low = jnp.einsum("bse,er->bsr", x, weights["key_value_down"])
        # All heads share the part of keys that is rotated.
        turned = _rotary(low[..., None, rank:])
        both = _heads(
            jnp.einsum("bsr,rhd->bshd", _norm(low[..., :rank], weights["norm_key_value"]), weights["key_value_up"])
        )
        key = jnp.concatenate([both[..., :size], jnp.broadcast_to(turned, (*both.shape[:-1], turned.shape[-1]))], -1)
        query = jnp.concatenate([query[..., :size], _rotary(query[..., size:])], -1)
        if self.platform == "tpu":
            query = query * query.shape[-1] ** -0.5
        context = attend(self.platform, self.recipe.tpu_kernel, _heads(query), _heads(key), both[..., size:])
        return _residual(jnp.einsum("bshd,hde->bse", _heads(context), weights["out"]))

    def _shared(self, x: Any, weights: dict[str, Any]) -> Any:
        gate, up = (jnp.einsum("bse,em->bsm", x, weights[f"shared_{name}"]) for name in ("gate", "up"))
        hidden = jax.lax.with_sharding_constraint(jax.nn.silu(gate) * up, P(BATCH, None, "tensor"))
        return jnp.einsum("bsm,me->bse", hidden, weights["shared_down"])

    def _routed(self, x: Any, weights: dict[str, Any]) -> Any:
        logits = jnp.einsum("bse,ec->bsc", x, weights["router"])
        return Experts(self.dims, self.recipe, self.platform, jax.nn.silu)(x, logits, weights)


@final
@attrs.frozen
class Experts:
    """The experts that tokens are sent to."""

    dims: ExpertDims
    recipe: Recipe
    platform: str
    activation: Callable[[Any], Any]

    def shapes(self, embed: int) -> dict[str, tuple[tuple[int, ...], P]]:
        """The weights of all experts, and of the logits by which they are chosen, with MaxText's specs."""
        dims, transposed = self.dims, self.recipe.transposed
        width, mlp = (("fsdp", "tensor"), None) if transposed else ("fsdp", "tensor")
        up, down = P(None, width, mlp), P(None, mlp, width)
        bias = {"router_bias": ((dims.count,), P())} if dims.scores == "sigmoid" else {}
        return bias | {
            "router": ((embed, dims.count), P(width, None)),
            "expert_gate": ((dims.count, embed, dims.mlp), up),
            "expert_up": ((dims.count, embed, dims.mlp), up),
            "expert_down": ((dims.count, dims.mlp, embed), down),
        }

    def __call__(self, x: Any, logits: Any, weights: dict[str, Any]) -> Any:
        """What the experts of each token return together, for logits of all experts."""
        score = jax.nn.sigmoid if self.dims.scores == "sigmoid" else jax.nn.softmax
        scores = score(logits if self.dims.scores == "softmax" else logits.astype(jnp.float32))
        transposed, tokens = self.recipe.transposed, P(BATCH, None, None)
        width, mlp = ("tensor", None) if transposed else (None, "tensor")
        up, down = P(None, width, mlp), P(None, mlp, width)
        run = jax.shard_map(
            self._on_device,
            in_specs=(P(BATCH, None, width), tokens, P(), up, up, down),
            out_specs=P(BATCH, None, "tensor"),
            check_vma=False,
        )
        experts = (weights[f"expert_{name}"] for name in ("gate", "up", "down"))
        return run(x, scores, weights.get("router_bias"), *experts)

    def _chosen(self, scores: Any, bias: Any) -> tuple[Any, Any]:
        """The share of each expert of a token, and which they are."""
        count = self.dims.per_token
        if self.dims.scores != "sigmoid":
            shares, chosen = jax.lax.top_k(scores, count)
            is_normed = self.dims.scores == "normed softmax"
            return (shares / shares.sum(-1, keepdims=True) if is_normed else shares), chosen
        _, chosen = jax.lax.top_k(scores + bias.astype(jnp.float32), count)
        shares = jnp.take_along_axis(scores, chosen, -1)
        return 2.5 * shares / shares.sum(-1, keepdims=True), chosen

    def _on_device(self, x: Any, scores: Any, bias: Any, *experts: Any) -> Any:
        """The experts of the tokens of a device."""
        gate, up, down = experts
        count = self.dims.per_token
        shares, chosen = self._chosen(scores, bias)
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=self.dims.count)
        # MaxText takes the rows out of as many copies as a token has experts: its gradient is then as long.
        rows = x.reshape(-1, x.shape[-1])
        rows = _permuted(jnp.broadcast_to(rows, (count, *rows.shape)).reshape(-1, rows.shape[-1]), order // count)
        hidden = self._product(rows, gate, sizes), self._product(rows, up, sizes)
        if self.recipe.transposed:
            hidden = tuple(jax.lax.psum(part, "tensor") for part in hidden)
        result = self._product(self.activation(hidden[0]) * hidden[1], down, sizes)
        if not self.recipe.transposed:
            result = jax.lax.psum_scatter(result, "tensor", scatter_dimension=1, tiled=True)
        result = _permuted(result, jnp.argsort(order)).reshape(-1, count, result.shape[-1])
        mixed = jnp.einsum("tce,tc->te", result.astype(jnp.float32), shares.reshape(-1, count).astype(jnp.float32))
        return mixed.reshape(*x.shape[:2], -1).astype(x.dtype)

    def _product(self, rows: Any, weights: Any, sizes: Any) -> Any:
        """Rows times the weights of their experts."""
        if self.platform != "tpu":
            return jax.lax.ragged_dot(rows, weights, sizes.astype(jnp.int32))
        from jax.experimental.pallas.ops.tpu.megablox import ops

        return ops.gmm(rows, weights, sizes.astype(jnp.int32), rows.dtype, self._tiles)

    def _tiles(self, rows: int, inner: int, columns: int) -> tuple[int, int, int]:
        """The rows, and the widths before and after a matmul, that the kernel works on at a time."""
        block = self.recipe.expert_block
        return min(_TILE_ROWS, rows), min(block, inner), min(block, columns)


@jax.custom_vjp
def _permuted(rows: Any, order: Any) -> Any:
    """Rows in another order. The backward pass permutes, too, where JAX would scatter."""
    return rows[order]


def _permuted_backward(order: Any, gradient: Any) -> tuple[Any, None]:
    return gradient[jnp.argsort(order)], None


_permuted.defvjp(lambda rows, order: (rows[order], order), _permuted_backward)


def _rotary(x: Any) -> Any:
    """Neighbours are turned as one complex number; their parts are half a head apart behind it."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(length)[:, None] / (10_000 ** (jnp.arange(half) / half))
    pairs = x.reshape(*x.shape[:-1], half, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * jnp.exp(1j * angles)[None, :, None]
    return jnp.stack([jnp.real(turned), jnp.imag(turned)], -2).reshape(x.shape).astype(x.dtype)


def _norm(x: Any, weight: Any) -> Any:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


def _residual(x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, P(BATCH, None, "tensor"))


def _heads(x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, P(BATCH, None, "tensor"))
