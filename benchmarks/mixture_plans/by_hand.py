"""The same layers as experts write them by hand, with `jax.shard_map`: which axes split what, and what is sent when.

Tokens are split over all axes. Weights are gathered over some axes just before they are used (FSDP), split by expert
over others, and by hidden unit over others (tensor parallel). Tokens go to the devices of their experts by all-to-all;
or all tokens of these devices are gathered, and results summed and scattered, as for tensor parallelism.
"""

from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from plan_models.experts import Axes, Expert, Splits

from mixture_plans.layers import Mixture, grouped_mlp

SPLITS: Splits = (
    (r"/(up|down)$", 0, "experts"),
    (r"/up$", 2, "tensor"),
    (r"/down$", 1, "tensor"),
)


@final
@attrs.frozen
class HandPlan:
    """A plan that is written by hand, for tokens that all axes split. Weights that are split for storage are gathered
    before they are used."""

    split: Expert
    """How parameters and moments are split."""
    gathers_tokens: bool = False
    """Whether tokens are gathered over the axes of experts, instead of exchanged."""

    def weight_specs(self, mixture: Mixture, mesh: Mesh) -> dict[str, P]:
        """How the parameters of a layer are split."""
        layer = mixture.args()[0]["params"][0]
        return {
            name: self.split.spec(f"params/{name}", leaf.shape, mesh, self.split.parameters)
            for name, leaf in layer.items()
        }

    def step(self, mixture: Mixture, mesh: Mesh) -> Callable[[Any, Any], Any]:
        """The train step. Gradients are split as moments before these change."""
        specs, tokens = self.weight_specs(mixture, mesh), P(mesh.axis_names)
        on_shards = _DenseShard(mixture, self, specs) if mixture.kind == "dense" else _SortedShard(mixture, self, specs)
        layer = jax.shard_map(on_shards, mesh=mesh, in_specs=(specs, tokens), out_specs=tokens, check_vma=False)
        return mixture.step(layer)


def hand_plans(mesh: Mesh, kind: str, *, has_ragged_exchange: bool) -> Iterator[HandPlan]:
    """The plans for a mesh of two axes, of which the last connects neighbours."""
    both, (first, last) = tuple(mesh.axis_names), mesh.axis_names

    def split(name: str, stored: Axes = (), tensor: Axes = (), experts: Axes = (), moments: Axes = ()) -> Expert:
        options = {"tensor": tensor, "experts": experts, "splits": SPLITS, "unsplit": "router$"}
        return Expert(name, both, stored, moments or stored, **options)

    yield HandPlan(split("ZeRO-1", moments=both))
    yield HandPlan(split("FSDP", both))
    yield HandPlan(split(f"tensor parallel over {last}, FSDP over {first}", (first,), (last,)))
    yield HandPlan(split("tensor parallel", tensor=both))
    for experts, stored in ((both, ()), ((last,), (first,))):
        name = f"experts over {' and '.join(experts)}" + (f", FSDP over {first}" if stored else "")
        if kind == "dense" or has_ragged_exchange:
            yield HandPlan(split(f"{name}, all-to-all", stored, experts=experts))
        if kind == "sorted":
            yield HandPlan(split(f"{name}, tokens gathered", stored, experts=experts), gathers_tokens=True)


def _gathered(plan: HandPlan, specs: dict[str, P], params: Any) -> dict[str, jax.Array]:
    """The weights that a device multiplies with."""
    weights = {}
    for name in ("up", "down"):
        weights[name] = params[name]
        for dim, entry in enumerate(specs[name]):
            names = (entry,) if isinstance(entry, str) else entry
            if names and names == plan.split.parameters:
                weights[name] = lax.all_gather(weights[name], names, axis=dim, tiled=True)
    return weights


@final
@attrs.frozen
class _DenseShard:
    """The dense layer of one device."""

    mixture: Mixture
    plan: HandPlan
    specs: dict[str, P]

    def __call__(self, params: Any, tokens: jax.Array) -> jax.Array:
        y, weights, routes = self.mixture.routed(params, tokens)
        combine = self.mixture.combine_tensor(weights, routes)
        slots = jnp.einsum("bsec,bsd->becd", (combine > 0).astype(y.dtype), y)
        return jnp.einsum(
            "bsec,becd->bsd", combine, self.through_experts(_gathered(self.plan, self.specs, params), slots)
        )

    def through_experts(self, weights: Any, slots: jax.Array) -> jax.Array:
        """Brings slots to the devices of their experts, or of their hidden units, and back."""
        experts, tensor = self.plan.split.experts, self.plan.split.tensor
        if experts:
            slots = lax.all_to_all(slots, experts, 1, 0, tiled=True)
        if tensor:
            slots = lax.all_gather(slots, tensor, axis=0, tiled=True)
        inner = jax.nn.gelu(jnp.einsum("becd,edf->becf", slots, weights["up"]))
        results = jnp.einsum("becf,efd->becd", inner, weights["down"])
        if tensor:
            results = lax.psum_scatter(results, tensor, scatter_dimension=0, tiled=True)
        return lax.all_to_all(results, experts, 0, 1, tiled=True) if experts else results


@final
@attrs.frozen
class _SortedShard:
    """The sorted layer of one device."""

    mixture: Mixture
    plan: HandPlan
    specs: dict[str, P]

    def __call__(self, params: Any, tokens: jax.Array) -> jax.Array:
        y, weights, routes = self.mixture.routed(params, tokens)
        y, weights, routes = (x.reshape(-1, x.shape[-1]) for x in (y, weights, routes))
        is_exchanged = bool(self.plan.split.experts) and not self.plan.gathers_tokens
        apply = self.by_exchange if is_exchanged else self.by_gathering
        return apply(_gathered(self.plan, self.specs, params), y, weights, routes).reshape(tokens.shape)

    def by_gathering(self, params: Any, y: jax.Array, weights: jax.Array, routes: jax.Array) -> jax.Array:
        """Every device multiplies what is of its own experts, or its own hidden units, among all tokens."""
        axes = self.plan.split.experts or self.plan.split.tensor
        if axes:
            y, weights, routes = (lax.all_gather(x, axes, tiled=True) for x in (y, weights, routes))
        count = len(params["up"])
        local = routes.reshape(-1) - (lax.axis_index(axes) * count if self.plan.split.experts else 0)
        is_here = (local >= 0) & (local < count)
        order = jnp.argsort(jnp.where(is_here, local, count))
        sizes = jnp.bincount(jnp.where(is_here, local, count), length=count + 1).astype(jnp.int32)[:count]
        results = grouped_mlp(params, y[order // self.mixture.choices], sizes)[jnp.argsort(order)]
        results = jnp.where(is_here[:, None], results, 0).reshape(-1, self.mixture.choices, self.mixture.width)
        combined = jnp.einsum("tkd,tk->td", results, weights)
        return lax.psum_scatter(combined, axes, scatter_dimension=0, tiled=True) if axes else combined

    def by_exchange(self, params: Any, y: jax.Array, weights: jax.Array, routes: jax.Array) -> jax.Array:
        """Rows go to the devices of their experts, where they arrive sorted by expert, and back."""
        axes, count = self.plan.split.experts, self.mixture.experts
        devices, index = lax.axis_size(axes), lax.axis_index(axes)
        order = jnp.argsort(routes.reshape(-1))
        rows = y[order // self.mixture.choices]
        sizes = jnp.bincount(routes.reshape(-1), length=count).astype(jnp.int32)
        all_sizes = lax.all_gather(sizes, axes).reshape(devices, devices, -1)  # [from, to, expert]
        totals = all_sizes.sum(0)  # [to, expert]
        arrivals = (jnp.cumsum(totals, 1) - totals)[None] + jnp.cumsum(all_sizes, 0) - all_sizes
        departures = (jnp.cumsum(all_sizes.reshape(devices, -1), 1) - all_sizes.reshape(devices, -1)).reshape(
            all_sizes.shape
        )
        outward = departures[index], all_sizes[index], arrivals[index], all_sizes[:, index]
        back = arrivals[:, index], all_sizes[:, index], departures[:, index], all_sizes[index]

        def send(rows: jax.Array, row_count: int, slices: tuple[jax.Array, ...]) -> jax.Array:
            results = jnp.zeros((row_count, rows.shape[1]), rows.dtype)
            return lax.ragged_all_to_all(rows, results, *(each.ravel() for each in slices), axis_name=axes)

        # All rows may be of the experts of one device.
        arrived = send(rows, devices * len(rows), outward)
        results = send(grouped_mlp(params, arrived, totals[index]), len(rows), back)[jnp.argsort(order)]
        return jnp.einsum("tkd,tk->td", results.reshape(-1, self.mixture.choices, self.mixture.width), weights)
