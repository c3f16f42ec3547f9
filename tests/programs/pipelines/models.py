"""A small transformer with dropout and a tied embedding, in a pipeline and layer by layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr

WORDS, WIDTH, LENGTH, EXAMPLES = 32, 16, 4, 32


def mesh(text: str) -> Mesh:
    """A mesh on as many CPU devices as it needs."""
    shape = dict(part.split(":") for part in text.split(","))
    sizes = [int(size) for size in shape.values()]
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(sizes))


def parameters(layers: int) -> dict[str, Any]:
    """A tied embedding, and layers that are stacked."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(size=shape) * 0.3)

    stacked = {"up": normal(layers, WIDTH, 2 * WIDTH), "down": normal(layers, 2 * WIDTH, WIDTH)}
    return {"embedding": normal(WORDS, WIDTH), "layers": stacked}


def batch() -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Tokens and a key for each example, and targets."""
    tokens = np.random.default_rng(1).integers(0, WORDS, (EXAMPLES, LENGTH + 1))
    keys = jax.random.split(jax.random.key(3), EXAMPLES)
    return (jnp.asarray(tokens[:, :-1]), keys), jnp.asarray(tokens[:, 1:])


def embed(embedding: Any, x: Any) -> Any:
    tokens, keys = x
    return embedding[tokens], keys


def layer(params: Any, state: Any) -> Any:
    """Mixes tokens, and drops out a quarter."""
    x, keys = state
    x = x + jnp.cumsum(x, axis=1) / LENGTH
    hidden = jnp.tanh(x @ params["up"])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.75, hidden.shape[1:]))(keys)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
    return x + jnp.where(keep, hidden / 0.75, 0) @ params["down"], keys


def cross_entropy(embedding: Any, y: Any, targets: Any) -> Any:
    logits = jax.nn.log_softmax(y[0] @ embedding.T)
    return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], -1))


def unpipelined(params: Any, x: Any, targets: Any) -> Any:
    """The loss, layer by layer."""
    y, _ = jax.lax.scan(lambda x, params: (layer(params, x), None), embed(params["embedding"], x), params["layers"])
    return cross_entropy(params["embedding"], y, targets)


def pipelined(inside: bool = True, **options: Any) -> Any:
    """The loss, computed in stages; the embedding and the loss on the stages or outside."""
    ends = {"first": embed, "last": cross_entropy} if inside else {}
    run = sr.pipeline(layer, axis="stage", **ends, **options)

    def loss(params: Any, x: Any, targets: Any) -> Any:
        embedding = params["embedding"]
        if inside:
            return run(params["layers"], x, targets, first=embedding, last=embedding)
        return cross_entropy(embedding, run(params["layers"], embed(embedding, x)), targets)

    return loss


def assert_equal(loss: Any, devices: Mesh, layers: int) -> None:
    """Holds the loss and its gradients to those of the model layer by layer."""
    with jax.enable_x64(True):
        params, (x, targets) = parameters(layers), batch()
        expected = jax.jit(jax.value_and_grad(unpipelined))(params, x, targets)
        model = "model" if "model" in devices.shape else None
        specs = (
            {"up": P("stage", None, model), "down": P("stage", model)} if layers % devices.shape["stage"] == 0 else P()
        )
        params["layers"] = sr.filter_shard(params["layers"], specs, devices)
        with jax.set_mesh(devices):
            results = jax.jit(jax.value_and_grad(loss))(params, x, targets)
    for result, reference in zip(*(jax.tree.leaves(each) for each in (results, expected)), strict=True):
        assert result.dtype == "float64"
        arrays = np.asarray(result), np.asarray(reference)
        np.testing.assert_allclose(*arrays, rtol=1e-10, atol=1e-12 * np.abs(arrays[1]).max())
