"""Trains a flax nnx model on 8 virtual CPU devices, saves it with orbax, restores it onto 4 of them, and goes on.

The model names the dimensions of its variables, and rules say which axis of the mesh each name means. The optimizer
follows the model's plan. The text to learn is this file.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardrules as sr

CONTEXT, WIDTH, DEPTH, BATCH = 16, 64, 2, 64
RULES = sr.CompositeShardingRule(
    sr.LogicalShardingRule({"vocab": "model", "mlp": "model", "embed": "data"}),
    sr.ReplicateShardingRule(),  # what has no names: norms, biases, counters and keys
)


def kernel(*names: str) -> Any:
    """Returns an initializer of kernels whose dimensions have these names."""
    # By default flax splits a variable where it is made, and takes the names for axes of the mesh.
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names, eager_sharding=False)


class Block(nnx.Module):
    """A residual layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(CONTEXT * WIDTH, rngs=rngs)
        self.up = nnx.Linear(CONTEXT * WIDTH, 4 * WIDTH, kernel_init=kernel("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, CONTEXT * WIDTH, kernel_init=kernel("mlp", "embed"), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Model(nnx.Module):
    """Predicts the next character from the last few."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(128, WIDTH, embedding_init=kernel("vocab", "embed"), rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(CONTEXT * WIDTH, 128, kernel_init=kernel("embed", "vocab"), rngs=rngs)

    def __call__(self, windows: jax.Array) -> jax.Array:
        x = self.embed(windows).reshape(len(windows), -1)
        for block in self.blocks:
            x = block(sr.with_sharding_constraint(x, P("data")))
        return self.head(x)


def make_optimizer(model: Model) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)


def train_step(model: Model, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    def loss_of(model: Model) -> jax.Array:
        logits = model(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def train(model: Model, optimizer: nnx.Optimizer, plan: sr.ShardingPlan, mesh: Any, until: int) -> float:
    """Trains on a mesh until the optimizer has made so many steps; returns the last loss."""
    # Model and optimizer are written to, as by nnx.jit, and keep their shardings.
    step = sr.filter_jit(train_step, mesh=mesh, in_shardings=(plan, plan.mirror, P("data")), donate=[0, 1])
    text, loss = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32) % 128, np.inf
    for index in range(int(optimizer.step[...]), until):
        starts = np.random.default_rng(index).integers(0, len(text) - CONTEXT, (BATCH, 1))
        loss = float(step(model, optimizer, text[starts + np.arange(CONTEXT + 1)]))
        if index % 10 == 9:
            print(f"  step {index + 1:3}/{until}  loss {loss:.3f}", flush=True)
    return loss


def report(when: str, model: Model, optimizer: nnx.Optimizer) -> None:
    """Prints how one variable and its moment are split."""
    moment = optimizer.opt_state[0].mu.blocks[0].up.kernel[...]
    shards = [
        f"{x.addressable_shards[0].data.shape} on {len(x.devices())}" for x in (model.blocks[0].up.kernel[...], moment)
    ]
    print(f"{when}: blocks/0/up/kernel is {shards[0]} devices, its moment {shards[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a flax nnx model on 8 virtual CPU devices.")
    parser.add_argument("--steps", type=int, default=100, help="how many; a third of them after the restore")
    steps = parser.parse_args().steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    eight = sr.create_mesh("data:4,model:2")
    four = sr.create_mesh("data:2,model:2", devices=jax.devices()[:4])

    shapes = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    plan = RULES.plan(shapes, eight).check()
    print(plan)
    model = sr.filter_init(Model, plan)(nnx.Rngs(0))  # never whole on any device
    optimizer = sr.filter_init(make_optimizer, plan.mirror)(model)
    report("made", model, optimizer)
    train(model, optimizer, plan, eight, 2 * steps // 3)

    with tempfile.TemporaryDirectory() as folder:
        sr.save_orbax(f"{folder}/state", {"model": model, "optimizer": optimizer})
        plan = RULES.plan(shapes, four).check()
        like = {"model": shapes, "optimizer": nnx.eval_shape(make_optimizer, shapes)}
        restored = sr.load_orbax(f"{folder}/state", like, plan.mirror, four)
    report("restored", restored["model"], restored["optimizer"])
    loss = train(restored["model"], restored["optimizer"], plan, four, steps)
    report(f"trained to a loss of {loss:.3f}", restored["model"], restored["optimizer"])


if __name__ == "__main__":
    main()
