"""The train step of a dense decoder, from its dimensions, as MaxText runs it.

Weights and Adam's states are float32, compute is bfloat16, and the gathers of weights go out in bfloat16.
"""

import functools
from collections.abc import Callable
from math import prod
from typing import Any, Literal, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from published.adapters import adapted, adapter_shapes, merged, parted
from published.attention import BATCH, LENGTH, attend
from published.eager import cross_entropy, kernel, layer_norm, log_softmax, rms_norm, rotary
from published.experts import ExpertDims, ExpertLayer, Experts
from published.fsdp import Unit, fully_gathered, gathered, grouped, ungrouped, with_strategy
from published.recipe import Recipe, policy_of
from published.sequence import columns, part_of, row, shared, whole_of

Family: TypeAlias = Literal["llama", "gpt"]
"""Llamas have RMS norms, rotary positions, and a head of their own. GPTs have layer norms, biases, learned positions,
and the embedding as their head."""

_WIDTH = ("fsdp", LENGTH)
"""The mesh axes that split the model's width in weights."""

_ROWS = (*BATCH, LENGTH)
"""The mesh axes that split the tokens of a batch, sequences joined."""


@final
@attrs.frozen
class Dims:
    """The dimensions of a decoder."""

    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    layers: int
    vocab: int
    gated: bool = True
    activation: Literal["", "silu", "gelu", "relu"] = ""
    """Of the MLP: by default silu with a gate, and gelu without."""

    family: Family = "llama"
    tied: bool = False
    """A llama whose embedding is its head."""

    parallel: bool = False
    """Attention and MLP have the same input, off one norm."""

    head_norms: Literal["", "qk", "qkv"] = ""
    """Norms of each head: of queries and keys ahead of their rotation, or of values as well, and behind it."""

    post_norms: bool = False
    """Norms of what attention and MLP return."""

    interleaved_rotary: bool = False
    """Pairs that are rotated are neighbours, and not half a head apart."""

    window: int = 0
    """How many tokens before it a token sees, except in each `period`-th layer, where it sees all."""

    period: int = 1
    """How many layers one round of the loop over layers has; they are recomputed together."""

    global_head_dim: int = 0
    global_kv_heads: int = 0
    """Of layers that see all tokens, where they have others. Their values are their keys, ahead of norm and rotation,
    and a quarter of each head is rotated."""

    logit_cap: float = 0.0
    """The most that a logit may be, by a hyperbolic tangent."""

    experts: ExpertDims | None = None
    """Layers are of experts."""

    @property
    def is_latent(self) -> bool:
        """Layers are those of `ExpertLayer`."""
        return self.experts is not None and self.experts.key_value_rank > 0

    def sees_all(self, index: int) -> bool:
        """A layer of a period has heads of its own, since it sees all tokens."""
        return self.global_head_dim > 0 and (index + 1) % self.period == 0


def _expert_layer(dims: Dims, recipe: Recipe, platform: str = "", is_dense: bool = False) -> ExpertLayer | None:
    """A layer of a model of experts, if it is one; `is_dense` for those that have none."""
    if dims.experts is None or not dims.is_latent:
        return None
    mlp = dims.mlp if is_dense else 0
    return ExpertLayer(dims.embed, dims.heads, dims.head_dim, dims.experts, recipe, platform, mlp)


def _layer_shapes(
    dims: Dims, recipe: Recipe, is_dense: bool = False, index: int = 0
) -> dict[str, tuple[tuple[int, ...], P]]:
    """The weights of a layer, with MaxText's specs: the model's width over `fsdp`, heads and MLP over `tensor`."""
    if expert_layer := _expert_layer(dims, recipe, is_dense=is_dense):
        return expert_layer.shapes
    embed, heads, kv_heads, size, mlp = dims.embed, dims.heads, dims.kv_heads, dims.head_dim, dims.mlp
    if dims.sees_all(index):
        kv_heads, size = dims.global_kv_heads, dims.global_head_dim
    column, row = P(_WIDTH, "tensor"), P("tensor", _WIDTH)
    up, down = column, row
    if recipe.hidden_split:
        up, down = P(LENGTH, ("fsdp", "tensor")), P(("fsdp", "tensor"), LENGTH)
    norms = ["norm_attention"] if dims.parallel else ["norm_attention", "norm_mlp"]
    if dims.post_norms:
        norms += ["norm_context", "norm_down"]
    if dims.experts:
        norms += ["norm_experts", "norm_mixed", "norm_sum", "router_scale"]
    shapes: dict[str, tuple[tuple[int, ...], P]] = {name: ((embed,), P()) for name in norms}
    if dims.head_norms:
        names = ("query", "key", "value")[: len(dims.head_norms)]
        shapes |= {f"norm_{name}": ((size,), P()) for name in names}
    if recipe.fused_qkv:
        shapes["qkv"] = ((embed, heads + 2 * kv_heads, size), column)
    else:
        shapes["query"] = ((embed, heads, size), column)
        shapes["key"] = ((embed, kv_heads, size), column)
        if not dims.sees_all(index):
            shapes["value"] = shapes["key"]
    shapes["out"] = ((heads, size, embed), P("tensor", None, _WIDTH))
    if dims.gated and recipe.fused_mlp:
        shapes["gate_up"] = ((embed, 2, mlp), P(up[0], None, up[1]))
    elif dims.gated:
        shapes["gate"] = ((embed, mlp), up)
    if "gate_up" not in shapes:
        shapes["up"] = ((embed, mlp), up)
    shapes["down"] = ((mlp, embed), down)
    if dims.experts:
        shapes |= Experts(dims.experts, recipe, "", jax.nn.gelu).shapes(embed) | {"scale": ((1,), P())}
    if recipe.lora_rank:
        shapes |= adapter_shapes({name: shape for name, (shape, _) in shapes.items()}, recipe.lora_rank)
    if dims.family == "gpt":
        for name in [name for name in shapes if not name.startswith("norm")]:
            # A bias has the dims that its matmul makes.
            shape, spec = shapes[name]
            shapes[f"{name}_bias"] = (shape[-1:], P()) if name in ("out", "down") else (shape[1:], P(*spec[1:]))
        shapes |= {f"{name}_bias": ((embed,), P()) for name in norms}
    return shapes


def _root_shapes(dims: Dims, recipe: Recipe, length: int) -> dict[str, tuple[tuple[int, ...], P]]:
    """The weights outside of layers."""
    split = None if recipe.sequence_parallel else "tensor"
    shapes = {"embed": ((dims.vocab, dims.embed), P(split, _WIDTH)), "norm": ((dims.embed,), P())}
    if dims.family == "llama" and dims.tied:
        return shapes
    if dims.family == "llama":
        head = P(None, ("fsdp", "tensor")) if recipe.split_vocab else P(_WIDTH, "tensor")
        return shapes | {"head": ((dims.embed, dims.vocab), head)}
    return shapes | {"norm_bias": ((dims.embed,), P()), "positions": ((length, dims.embed), P(None, "fsdp"))}


def _shapes(dims: Dims, recipe: Recipe, length: int) -> dict[str, Any]:
    layer, root = _layer_shapes(dims, recipe), _root_shapes(dims, recipe, length)
    if recipe.fsdp:  # FSDP splits vectors
        layer, root = ({name: _vector(*item) for name, item in shapes.items()} for shapes in (layer, root))
    dense_count = dims.experts.dense_layers if dims.experts else 0
    layers = [layer] * dims.period
    if dims.global_head_dim:
        layers = [_layer_shapes(dims, recipe, index=index) for index in range(dims.period)]
    groups = {"layers": _stacked(layers, dims.layers - dense_count, recipe)}
    if dense_count:
        groups["dense_layers"] = _stacked([_layer_shapes(dims, recipe, is_dense=True)], dense_count, recipe)
    return root | groups


def _vector(shape: tuple[int, ...], spec: P) -> tuple[tuple[int], P]:
    """A weight as FSDP splits it, after `tensor` if that splits it, too."""
    return (prod(shape),), P(("tensor", "fsdp")) if "tensor" in spec else P("fsdp")


def _local(shape: tuple[int, ...], spec: P, size: int) -> tuple[int, ...]:
    """The shape of a weight on one of `size` devices that `tensor` splits it over."""
    axes = (*spec, *[None] * len(shape))
    return tuple(length // size if axis == "tensor" else length for length, axis in zip(shape, axes, strict=False))


def _stacked(layers: list[dict[str, tuple[tuple[int, ...], P]]], count: int, recipe: Recipe) -> Any:
    """The weights of so many layers, of which those of one period are given."""
    if not recipe.scan:
        return layers * (count // len(layers))
    rounds = count // len(layers)
    stacks = [{name: ((rounds, *shape), P(None, *spec)) for name, (shape, spec) in layer.items()} for layer in layers]
    return stacks if len(stacks) > 1 else stacks[0]


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def weight_shapes(dims: Dims, recipe: Recipe, length: int) -> dict[str, Any]:
    """The weights of a decoder for sequences of `length`."""
    dtype = jnp.dtype(recipe.weight_dtype)
    return jax.tree.map(
        lambda item: jax.ShapeDtypeStruct(item[0], dtype), _shapes(dims, recipe, length), is_leaf=_is_shape
    )


def weight_specs(dims: Dims, recipe: Recipe, length: int) -> dict[str, Any]:
    """The specs of `weight_shapes`."""
    return jax.tree.map(lambda item: item[1], _shapes(dims, recipe, length), is_leaf=_is_shape)


@final
@attrs.frozen
class Decoder:
    """The functions of a decoder on a platform."""

    dims: Dims
    recipe: Recipe
    platform: str
    remat: str
    frozen: Any = attrs.field(default=None, eq=False)
    """The weights that are not trained, where only adapters are."""

    def _fence(self, x: Any) -> Any:
        """Ends a kernel, where each operation is one."""
        return jax.lax.optimization_barrier(x) if self.recipe.eager else x

    @property
    def _is_eager(self) -> bool:
        """Operations of layers are run one by one."""
        return self.recipe.eager and not self.recipe.compiled

    def _end(self, x: Any) -> Any:
        """Ends a kernel of a layer."""
        return jax.lax.optimization_barrier(x) if self._is_eager else x

    def _constrain(self, x: Any, *spec: Any) -> Any:
        """Says how XLA splits an array; with FSDP each device has its own."""
        return x if self.recipe.fsdp or not self.recipe.constraints else jax.lax.with_sharding_constraint(x, P(*spec))

    def _whole(self, weights: Any, shapes: dict[str, tuple[tuple[int, ...], P]]) -> Any:
        """Weights as the model computes with them."""
        if not self.recipe.fsdp:
            return jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), weights)
        if isinstance(weights, Unit):
            vectors = fully_gathered(weights, self.recipe.reduce_dtype)
        else:
            vectors = gathered(weights, self.recipe.reduce_dtype, self._fence)
        size = jax.lax.axis_size("tensor")
        whole = {name: vector.reshape(_local(*shapes[name], size)) for name, vector in vectors.items()}
        if not self.recipe.sequence_parallel:
            return whole
        return {name: shared(weight) if name.startswith("norm") else weight for name, weight in whole.items()}

    def _residual(self, x: Any) -> Any:
        return self._constrain(x, BATCH, LENGTH, "tensor" if self.recipe.split_residual else None)

    def _norm(self, x: Any, weights: Any, name: str) -> Any:
        if self.dims.family == "gpt" and self._is_eager:
            return layer_norm(x, weights[name], weights[f"{name}_bias"])
        if self.dims.family == "gpt":  # in bfloat16, as MaxText does it for GPTs
            y = x - jnp.mean(x, -1, keepdims=True)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
            return y * weights[name] + weights[f"{name}_bias"]
        if self._is_eager:
            return rms_norm(x, weights[name])
        return self._end(_unit(x) * weights[name])

    def _dense(self, equation: str, x: Any, weights: Any, name: str) -> Any:
        """A matmul whose results are whole."""
        if self.recipe.sequence_parallel:
            return self._end(row(functools.partial(jnp.einsum, equation), x, weights[name]))
        if self.recipe.lora_rank and name != "head":
            return adapted(equation, x, weights, name, self.recipe.lora_dropout)
        y = jnp.einsum(equation, x, weights[name])
        # The bias is added where the matmul ends, in the same kernel.
        return self._end(y + weights[f"{name}_bias"] if f"{name}_bias" in weights else y)

    def _split(self, equation: str, x: Any, weights: Any, *names: str) -> tuple[Any, ...]:
        """Matmuls whose results `tensor` splits."""
        if not self.recipe.sequence_parallel:
            return tuple(self._dense(equation, x, weights, name) for name in names)
        results = columns(functools.partial(jnp.einsum, equation), x, tuple(weights[name] for name in names))
        return tuple(self._end(result) for result in results)

    def _shared_heads(self, x: Any, weights: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values of a layer whose keys are its values."""
        query, key = self._split("bse,ehd->bshd", x, weights, "query", "key")
        return query, key, key

    def _quarter_turned(self, x: Any) -> Any:
        quarter = x.shape[-1] // 4
        return jnp.concatenate([_rotary(x[..., :quarter]), x[..., quarter:]], -1)

    def _heads(self, x: Any, weights: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values."""
        if "qkv" in weights:
            (joined,) = self._split("bse,ehd->bshd", x, weights, "qkv")
            joined = checkpoint_name(joined, "qkv_proj")
            heads = self.dims.heads
            query, key, value = jnp.split(joined, (heads, heads + self.dims.kv_heads), 2)
        elif "value" in weights:
            query, key, value = self._split("bse,ehd->bshd", x, weights, "query", "key", "value")
        else:
            query, key, value = self._shared_heads(x, weights)
        if self.dims.head_norms == "qk":
            query, key = self._norm(query, weights, "norm_query"), self._norm(key, weights, "norm_key")
        if self.dims.global_head_dim:
            value = _unit(value)
        if self.dims.family == "llama":
            halves = rotary if self._is_eager else _rotary
            turn = _neighbour_rotary if self.dims.interleaved_rotary else halves
            turn = turn if "qkv" in weights or "value" in weights else self._quarter_turned
            query, key = turn(query), turn(key)
        if self.recipe.repeat_heads:
            repeats = self.dims.heads // self.dims.kv_heads
            key, value = (self._end(jnp.repeat(part, repeats, 2)) for part in (key, value))
        names = ("query", "key", "value")
        parts = zip((query, key, value), names, strict=True)
        if self.dims.head_norms == "qkv":
            parts = [(self._norm(part, weights, f"norm_{name}"), name) for part, name in parts]
        query, key, value = (
            checkpoint_name(self._constrain(part, BATCH, LENGTH, "tensor"), f"{name}_proj") for part, name in parts
        )
        # What is kept is split, too, though keys and values are gathered from it.
        query, key, value = (self._constrain(part, BATCH, LENGTH, "tensor") for part in (query, key, value))
        return query, key, value

    def _hidden(self, x: Any, weights: Any) -> Any:
        """The MLP up to its last matmul."""
        if "gate_up" in weights:
            (both,) = self._split("bse,eam->bsam", x, weights, "gate_up")
            both = checkpoint_name(both, "mlpwi")
            gate, up = both[:, :, 0], both[:, :, 1]
        elif self.dims.gated:
            gate, up = self._split("bse,em->bsm", x, weights, "gate", "up")
            gate, up = checkpoint_name(gate, "mlpwi_0"), checkpoint_name(up, "mlpwi_1")
        else:
            (up,) = self._split("bse,em->bsm", x, weights, "up")
            up = checkpoint_name(up, "mlpwi")
            return kernel(self._activation, up) if self._is_eager else self._activation(up)
        if self._is_eager:
            return kernel(jnp.multiply, kernel(self._activation, gate), up)
        return self._activation(gate) * up

    @property
    def _activation(self) -> Callable[[Any], Any]:
        default = "silu" if self.dims.gated else "gelu"
        return {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}[self.dims.activation or default]

    def _attention(self, normed: Any, weights: Any, window: int) -> Any:
        whole = self._constrain(normed, BATCH, LENGTH, None) if self.recipe.gather_once else normed
        heads = self._heads(whole, weights)
        context = self._end(attend(self.platform, self.recipe.tpu_kernel, *heads, window))
        context = self._constrain(context, BATCH, LENGTH, "tensor")
        out = checkpoint_name(self._dense("bshd,hde->bse", context, weights, "out"), "out_proj")
        return self._residual(self._norm(out, weights, "norm_context") if self.dims.post_norms else out)

    def _mlp(self, normed: Any, weights: Any) -> Any:
        hidden = self._constrain(self._hidden(normed, weights), BATCH, LENGTH, "tensor")
        down = checkpoint_name(self._dense("bsm,me->bse", hidden, weights, "down"), "mlpwo")
        return self._residual(self._norm(down, weights, "norm_down") if self.dims.post_norms else down)

    def _layer(self, x: Any, weights: Any, is_dense: bool = False, window: int = 0) -> tuple[Any, None]:
        weights = self._whole(weights, _layer_shapes(self.dims, self.recipe, is_dense))
        if expert_layer := _expert_layer(self.dims, self.recipe, self.platform, is_dense):
            return expert_layer(x, weights), None
        x = checkpoint_name(self._residual(x), "decoder_layer_input")
        normed = self._residual(self._norm(x, weights, "norm_attention"))
        out = self._attention(normed, weights, window)
        if self.dims.parallel:
            return self._residual(self._mlp(normed, weights) + out + x), None
        x = self._end(x + out)
        normed = self._residual(self._norm(x, weights, "norm_mlp"))
        added = self._mlp(normed, weights)
        if self.dims.experts:
            x, added = x * weights["scale"], self._mixed(x, added, weights) * weights["scale"]
        return self._residual(self._end(x + added)), None

    def _mixed(self, x: Any, shared: Any, weights: Any) -> Any:
        """The sum of what the MLP of all tokens returns and of what their experts do."""
        assert self.dims.experts is not None
        experts = Experts(self.dims.experts, self.recipe, self.platform, self._activation)
        gated = _unit(x) * self.dims.embed**-0.5 * weights["router_scale"]
        logits = jnp.einsum("bse,ec->bsc", gated, weights["router"])
        routed = experts(self._residual(self._norm(x, weights, "norm_experts")), logits, weights)
        return self._residual(self._norm(shared + self._norm(routed, weights, "norm_mixed"), weights, "norm_sum"))

    def _period(self, x: Any, layers: Any) -> tuple[Any, None]:
        """One round of the loop over layers, of which the last one sees all tokens."""
        for index, weights in enumerate(layers):
            x, _ = self._layer(x, weights, window=self._window(index))
        return x, None

    def _window(self, index: int) -> int:
        return 0 if (index + 1) % self.dims.period == 0 else self.dims.window

    def _layers(self, x: Any, weights: Any, is_dense: bool = False) -> Any:
        layer: Callable[..., Any] = functools.partial(self._layer, is_dense=is_dense)
        if self.dims.period > 1:
            layer = self._period
        policy = policy_of(self.remat)
        if self.recipe.fsdp:
            policy = with_strategy(policy, self.recipe.fsdp)
        if self.remat != "none" or self.recipe.fsdp in ("FULL_SHARD", "fully_shard"):
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=not self.recipe.scan)
        if self.recipe.scan:
            return jax.lax.scan(layer, x, weights)[0]
        period = self.dims.period
        for index in range(0, len(weights), period):
            x, _ = layer(x, weights[index : index + period] if period > 1 else weights[index])
        return x

    def loss(self, weights: Any, tokens: Any, targets: Any) -> Any:
        """The mean cross entropy of a batch."""
        if self.frozen is not None:
            weights = merged(weights, self.frozen)
        root = weights.get("root", {name: weight for name, weight in weights.items() if not name.endswith("layers")})
        root = self._whole(root, _root_shapes(self.dims, self.recipe, tokens.shape[1]))
        table = root["embed"]
        if self.recipe.one_hot_lookup:
            x = jnp.einsum("bsv,ve->bse", jax.nn.one_hot(tokens, self.dims.vocab, dtype=jnp.bfloat16), table)
        else:
            x = jnp.take(table, tokens, axis=0)
        if "positions" in root:
            x = x + root["positions"]
        x = part_of(x) if self.recipe.sequence_parallel else self._residual(x)
        if "dense_layers" in weights:
            x = self._layers(x, weights["dense_layers"], is_dense=True)
        x = self._layers(x, weights["layers"])
        if self.recipe.vocab_tiles > 1:
            return self._tiled_loss(x, weights, targets)
        x = self._norm(x, root, "norm")
        spec = ("data", LENGTH, ("fsdp", "tensor")) if self.recipe.split_vocab else (BATCH, LENGTH, "tensor")
        return self._mean_loss(self._fence(self._constrain(self._logits(x, root), *spec)), targets)

    def _mean_loss(self, logits: Any, targets: Any) -> Any:
        if not self.recipe.loss_dtype:
            loss = jnp.mean(_cross_entropy(logits.astype(jnp.float32), targets))
        else:
            loss = jnp.mean(cross_entropy(self._fence(logits.astype(self.recipe.loss_dtype)), targets))
        for _ in range(self.recipe.logged_losses):
            wide = jax.lax.optimization_barrier(jax.lax.stop_gradient(logits).astype(jnp.float32))
            loss = loss + 0.0 * jnp.sum(log_softmax(wide))
        return loss

    def _logits(self, x: Any, root: Any) -> Any:
        head = root["head"] if "head" in root else root["embed"].T
        if self.recipe.float32_logits:
            x, head = x.astype(jnp.float32), head.astype(jnp.float32)
        if self.recipe.sequence_parallel:
            (logits,) = self._split("bse,ev->bsv", x, {"head": head}, "head")
            return self._fence(whole_of(logits, 2))
        logits = x @ head
        logits = logits * self.dims.embed**-0.5 if self.dims.tied else logits
        cap = self.dims.logit_cap
        return jnp.tanh(logits / cap) * cap if cap else logits

    def _tiled_loss(self, x: Any, weights: Any, targets: Any) -> Any:
        """The loss of one part of the batch after the other, with logits that the backward pass computes again."""
        specs = {"norm": P(), "head": P(None, "tensor"), "embed": P("tensor", None)}
        names = ("norm", "head" if "head" in weights else "embed")
        root = {name: self._constrain(weights[name], *specs[name]) for name in names}
        tiles = self.recipe.vocab_tiles
        rows = self._constrain(self._residual(x).reshape(tiles, -1, x.shape[-1]), None, _ROWS, "tensor")
        labels = self._constrain(targets.reshape(tiles, -1), None, _ROWS)

        def add(total: Any, tile: Any) -> tuple[Any, None]:
            x, targets = self._constrain(tile[0], _ROWS, "tensor"), self._constrain(tile[1], _ROWS)
            whole = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), root)
            logits = self._constrain(self._logits(self._norm(x, whole, "norm"), whole), _ROWS, "tensor")
            return total + jnp.sum(_cross_entropy(logits.astype(jnp.float32), targets)), None

        total, _ = jax.lax.scan(jax.checkpoint(add, prevent_cse=False), jnp.zeros(()), (rows, labels))
        return total / targets.size

    def step(self, weights: Any, state: Any, tokens: Any, targets: Any) -> tuple[Any, Any, Any]:
        """Loss, gradients, clipping and Adam; `state` is a count and two trees of moments."""
        if self.recipe.lora_rank and self.frozen is None:
            trained, frozen = parted(weights)
            trained, state, logged = attrs.evolve(self, frozen=frozen).step(trained, state, tokens, targets)
            return merged(trained, frozen), state, logged
        if self.recipe.accumulations > 1 and not self._sums_whole:
            loss, gradients = self._accumulated(weights, tokens, targets)
        else:
            loss, gradients = self._gradients(weights, tokens, targets)
        norm = _norm_of(gradients)
        if self.recipe.clip:
            scale = jnp.minimum(1.0, 1.0 / norm)
            gradients = jax.tree.map(lambda gradient: self._fence(gradient * scale), gradients)
        count, first, second = state
        count = count + 1
        leaves, structure = jax.tree.flatten(weights)
        updated = [
            self._adam(count, *arrays)
            for arrays in zip(leaves, *(jax.tree.leaves(tree) for tree in (gradients, first, second)), strict=True)
        ]
        weights, first, second = (jax.tree.unflatten(structure, part) for part in zip(*updated, strict=True))
        logged = {"loss": loss, "gradients": norm}
        if not self.recipe.eager:  # MaxText logs it in every step
            logged["weights"] = _norm_of(weights)
        return weights, (count, first, second), logged

    def _gradients(self, weights: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
        """The loss and its gradients."""
        gradients = jax.value_and_grad(self.loss)
        if not self.recipe.fsdp:
            return gradients(weights, tokens, targets)

        def local(*arguments: Any) -> tuple[Any, Any]:
            loss, parts = self._reduced_once(*arguments) if self._sums_whole else gradients(*arguments)
            return jax.lax.pmean(loss, BATCH), parts

        batch = P(None, BATCH) if self._sums_whole else P(BATCH)
        specs = weight_specs(self.dims, self.recipe, tokens.shape[1])
        return jax.shard_map(local, in_specs=(specs, batch, batch), out_specs=(P(), specs), check_vma=False)(
            weights, tokens, targets
        )

    @property
    def _sums_whole(self) -> bool:
        """Gradients of whole weights are added up before they are reduced."""
        return self.recipe.fsdp == "fully_shard"

    def _reduced_once(self, weights: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
        """The loss and its gradients on a device. `fully_shard` reduces those of the last batch with all others."""
        gradients, last = jax.value_and_grad(self.loss), tokens.shape[0] - 1
        shards = grouped(weights)

        def add(totals: Any, batch: Any) -> tuple[Any, Any]:
            loss, parts = gradients(Unit.of(shards, totals, reduces=False), *batch)
            return jax.tree.map(lambda unit: unit.totals, parts, is_leaf=Unit.is_one), loss

        totals, losses = None, []
        if last:
            size, dtype = jax.lax.axis_size("fsdp"), self.recipe.reduce_dtype
            zeros = jax.tree.map(lambda shard: jnp.zeros(shard.size * size, dtype), shards)
            totals, loss = add(zeros, (tokens[0], targets[0]))
            losses.append(loss)
        if last > 1:
            totals, more = jax.lax.scan(add, totals, (tokens[1:last], targets[1:last]))
            losses.append(jnp.sum(more))
        loss, parts = gradients(Unit.of(shards, totals, reduces=True), tokens[last], targets[last])
        parts = jax.tree.map(lambda unit: unit.shards, parts, is_leaf=Unit.is_one)
        return sum(losses, loss), ungrouped(parts)

    def _accumulated(self, weights: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
        """Adds up the gradients of several batches, which are the first dim of tokens and targets."""

        def add(total: Any, batch: Any) -> tuple[Any, None]:
            # PyTorch adds gradients when they are all there, where it compiles the whole backward pass.
            part = self._gradients(weights, *batch)
            return jax.tree.map(jnp.add, total, self._fence(part) if self.recipe.compiled else part), None

        if self.recipe.eager:  # the first gradients are nothing's sum
            first = self._gradients(weights, tokens[0], targets[0])
            return jax.lax.scan(add, first, (tokens[1:], targets[1:]))[0]
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights))
        return jax.lax.scan(add, zeros, (tokens, targets))[0]

    def _adam(self, count: Any, weight: Any, gradient: Any, first: Any, second: Any) -> tuple[Any, Any, Any]:
        """AdamW. Each line is one kernel where operations are run one by one."""
        if self.recipe.fused_adam:
            return self._fused_adam(count, weight, gradient, first, second)
        fence = self._fence
        dtype, first = first.dtype, fence(fence(0.9 * first) + 0.1 * gradient)
        second = fence(fence(0.95 * second) + 0.05 * gradient * gradient)
        root = fence(fence(fence(jnp.sqrt(second)) / jnp.sqrt(1 - 0.95**count)) + 1e-8)
        if self.recipe.weight_decay:
            weight = fence(weight * (1 - 1e-5))
        return fence(weight - 1e-4 * first / (1 - 0.9**count) / root), first.astype(dtype), second

    def _fused_adam(self, count: Any, weight: Any, gradient: Any, first: Any, second: Any) -> tuple[Any, Any, Any]:
        """AdamW as one kernel, in float32 whatever it reads and writes."""
        wide = [x.astype(jnp.float32) for x in (weight, gradient, first, second)]
        results = attrs.evolve(self, recipe=attrs.evolve(self.recipe, eager=False, fused_adam=False))._adam(
            count, *wide
        )
        weight, first, second = (x.astype(weight.dtype) for x in results)
        return weight, first, second


def state_shapes(weights: Any, recipe: Recipe) -> tuple[Any, Any, Any]:
    """The optimizer's state of weights of these shapes."""
    first = jax.tree.map(lambda weight: jax.ShapeDtypeStruct(weight.shape, recipe.moment_dtype), weights)
    return jax.ShapeDtypeStruct((), jnp.float32), first, weights


def _unit(x: Any) -> Any:
    """Vectors divided by their root mean square."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def _rotary(x: Any) -> Any:
    length, size = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] / (10_000 ** (jnp.arange(size // 2) / (size // 2)))
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _neighbour_rotary(x: Any) -> Any:
    length, size = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] / (10_000 ** (jnp.arange(size // 2) / (size // 2)))
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return turned.reshape(x.shape)


def _cross_entropy(logits: Any, targets: Any) -> Any:
    # Targets are one-hot, so that nothing is gathered from logits that are split over the vocabulary.
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    picked = jnp.sum(jax.nn.one_hot(targets, logits.shape[-1]) * shifted, -1)
    return jnp.log(jnp.exp(shifted).sum(-1)) - picked


def _norm_of(tree: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)))
