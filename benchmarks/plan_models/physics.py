"""Kinds of train steps of science: a physics-informed net, a net on a graph."""

import itertools
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from plan_models.experts import Splits, constrain
from plan_models.parts import array, tokens
from plan_models.updates import module_step, optax_step

BURGERS_SPLITS: Splits = (
    (r"(^|/)(0|2|4|6)/(w|b)$", -1, "tensor"),
    (r"(^|/)(1|3|5|7)/w$", 0, "tensor"),
)
GRAPH_SPLITS: Splits = (
    (r"/first/(weight|bias)$", 0, "tensor"),
    (r"/second/weight$", 1, "tensor"),
)


def physics_informed(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A net `u(x, t)` that solves Burgers' equation: its derivatives at points inside, its values at edges."""
    width, layers, points, edges, viscosity = 512, 8, 8192 * devices, 1024 * devices, 0.01 / jnp.pi
    if smoke:
        width, layers, points, edges = 16, 4, 4 * devices, 2 * devices
    sizes = [2, *[width] * layers, 1]
    params = [
        {"w": array(before, after, dtype=jnp.float32), "b": array(after, dtype=jnp.float32)}
        for before, after in itertools.pairwise(sizes)
    ]

    def solution(p: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        h = jnp.stack([x, t])
        for index, layer in enumerate(p[:-1]):
            h = constrain(jnp.tanh(h @ layer["w"] + layer["b"]), None if index % 2 else "tensor")
        return (h @ p[-1]["w"] + p[-1]["b"])[0]

    def residual(p: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        slope = jax.grad(solution, 1)
        u, u_t = jax.jvp(lambda t: solution(p, x, t), (t,), (jnp.ones_like(t),))
        u_x, u_xx = jax.jvp(lambda x: slope(p, x, t), (x,), (jnp.ones_like(x),))
        return u_t + u * u_x - viscosity * u_xx

    def loss(p: Any, batch: Any) -> jax.Array:
        inside, edge = constrain(batch["inside"], "batch", None), constrain(batch["edge"], "batch", None)
        physics = jax.vmap(residual, (None, 0, 0))(p, inside[:, 0], inside[:, 1])
        values = jax.vmap(solution, (None, 0, 0))(p, edge[:, 0], edge[:, 1])
        return jnp.mean(physics**2) + jnp.mean((values - batch["values"]) ** 2)

    step, state = optax_step(loss, optax.adam(optax.exponential_decay(1e-3, 2000, 0.9)), params)
    shapes = {"inside": (points, 2), "edge": (edges, 2), "values": (edges,)}
    return step, (state, {name: array(*shape, dtype=jnp.float32) for name, shape in shapes.items()})


@final
class Perceptron(eqx.Module):
    """A hidden layer, a linear layer and a norm."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    norm: eqx.nn.LayerNorm | None

    def __init__(self, before: int, width: int, after: int, key: jax.Array, *, norm: bool = True) -> None:
        first, second = jax.random.split(key)
        self.first = eqx.nn.Linear(before, width, key=first)
        self.second = eqx.nn.Linear(width, after, key=second)
        self.norm = eqx.nn.LayerNorm(after) if norm else None

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = constrain(jax.nn.relu(jax.vmap(self.first)(x)), "batch", "tensor")
        y = constrain(jax.vmap(self.second)(hidden), "batch", None)
        return y if self.norm is None else jax.vmap(self.norm)(y)


@final
class MeshGraphNet(eqx.Module):
    """A simulator on a mesh: messages along edges change the edges and then the nodes, in each round."""

    node_encoder: Perceptron
    edge_encoder: Perceptron
    edge_rounds: list[Perceptron]
    node_rounds: list[Perceptron]
    decoder: Perceptron

    def __init__(self, inputs: tuple[int, int, int], width: int, rounds: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 3 + 2 * rounds)
        node_inputs, edge_inputs, outputs = inputs
        self.node_encoder = Perceptron(node_inputs, width, width, keys[0])
        self.edge_encoder = Perceptron(edge_inputs, width, width, keys[1])
        self.decoder = Perceptron(width, width, outputs, keys[2], norm=False)
        self.edge_rounds = [Perceptron(3 * width, width, width, each) for each in keys[3 : 3 + rounds]]
        self.node_rounds = [Perceptron(2 * width, width, width, each) for each in keys[3 + rounds :]]

    def __call__(self, graph: Any) -> jax.Array:
        nodes, edges = self.node_encoder(graph["nodes"]), self.edge_encoder(graph["edges"])
        senders, receivers = graph["senders"], graph["receivers"]
        for edge_round, node_round in zip(self.edge_rounds, self.node_rounds, strict=True):
            everywhere = constrain(nodes, None, None)
            inputs = jnp.concatenate([edges, everywhere[senders], everywhere[receivers]], -1)
            edges = edges + edge_round(constrain(inputs, "batch", None))
            messages = jax.ops.segment_sum(edges, receivers, nodes.shape[0])
            inputs = jnp.concatenate([nodes, constrain(messages, "batch", None)], -1)
            nodes = nodes + node_round(constrain(inputs, "batch", None))
        return self.decoder(nodes)


def graph_net(devices: int, smoke: bool) -> tuple[Any, tuple[Any, Any]]:
    """A MeshGraphNet of four rounds on one mesh of 65,536 nodes: nodes and edges are split as examples are."""
    width, rounds, nodes, edges = 128, 4, 8192 * devices, 49152 * devices
    if smoke:
        width, rounds, nodes, edges = 16, 2, 4 * devices, 16 * devices

    def loss(model: MeshGraphNet, graph: Any) -> jax.Array:
        return jnp.mean((model(graph) - graph["targets"]) ** 2)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4))
    step, state = module_step(lambda key: MeshGraphNet((12, 7, 3), width, rounds, key), loss, optimizer)
    shapes = {"nodes": (nodes, 12), "edges": (edges, 7), "targets": (nodes, 3)}
    graph: dict[str, Any] = {name: array(*shape, dtype=jnp.float32) for name, shape in shapes.items()}
    return step, (state, graph | {"senders": tokens(edges), "receivers": tokens(edges)})
