"""Trains a character-level GPT on 8 virtual CPU devices, saves it, restores it onto 4 of them, and goes on.

Rules say where the weights are to be, the plan shows it, and the rest follows from the plan: the optimizer's moments,
the compiled step, the restored run. The text to learn is the documentation in Python's own standard library.
"""

import argparse
import ast
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import shardrules as sr

VOCAB, CONTEXT, WIDTH, HEADS, DEPTH, BATCH = 128, 64, 128, 4, 3, 16

RULES = sr.CompositeShardingRule(
    sr.RegexShardingRule(
        [
            ("norm|bias", P()),
            ("embedding", P(("data", "model"))),  # by rows, which are looked up
            ("(output_proj|down)/weight", P("data", "model")),
        ]
    ),
    sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data", min_size_mb=0.05),
)
AXES = {"batch": "data", "length": None, "vocab": "model"}  # what the names in the model's code mean on the mesh


def turned(x: Array) -> Array:
    """Tells queries and keys their positions: turns each pair of numbers by an angle that grows with the position."""
    length, _, size = x.shape
    angles = jnp.outer(jnp.arange(length), 0.001 ** jnp.linspace(0, 1, size // 2))[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1)


class Block(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        attention, up, down = jax.random.split(key, 3)
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
        self.up, self.down = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=up), eqx.nn.Linear(4 * WIDTH, WIDTH, key=down)

    def __call__(self, x: Array) -> Array:
        first, second = self.norms
        y, causal = jax.vmap(first)(x), jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(y, y, y, causal, process_heads=lambda q, k, v: (turned(q), turned(k), v))
        return x + jax.vmap(lambda one: self.down(jax.nn.gelu(self.up(second(one)))))(x)


class GPT(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        embedding, head, *blocks = jax.random.split(key, 2 + DEPTH)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=embedding)
        self.blocks = [Block(block) for block in blocks]
        self.norm, self.head = eqx.nn.LayerNorm(WIDTH), eqx.nn.Linear(WIDTH, VOCAB, key=head)

    def __call__(self, tokens: Array) -> Array:
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(lambda one: self.head(self.norm(one)))(x)


class State(eqx.Module):
    """All that training needs to go on: made, placed, donated, saved and restored in one piece."""

    model: GPT
    optimizer: Any
    step: Array
    key: Array


def make_state(optim: optax.GradientTransformation, seed: int) -> State:
    init, key = jax.random.split(jax.random.PRNGKey(seed))  # a raw key: Equinox's files hold no typed ones
    model = GPT(init)
    return State(model, optim.init(eqx.filter(model, eqx.is_inexact_array)), jnp.array(0), key)


def loss_of(model: GPT, windows: Array) -> Array:
    tokens = sr.constrain(windows.astype(jnp.int32), "batch", "length")
    logits = sr.constrain(jax.vmap(model)(tokens[:, :-1]), "batch", "length", "vocab")
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(optim: optax.GradientTransformation, state: State, text: Array) -> tuple[State, Array]:
    key, draw = jax.random.split(state.key)
    starts = jax.random.randint(draw, (BATCH, 1), 0, len(text) - CONTEXT)
    loss, grads = eqx.filter_value_and_grad(loss_of)(state.model, text[starts + jnp.arange(CONTEXT + 1)])
    updates, optimizer = optim.update(grads, state.optimizer, eqx.filter(state.model, eqx.is_inexact_array))
    return State(eqx.apply_updates(state.model, updates), optimizer, state.step + 1, key), loss


def training() -> tuple[Any, ...]:
    """Returns the step and what it takes, as `shardrules audit` and `shardrules autoplan` want it."""
    optim = optax.adamw(4e-3)

    def step(state: State, text: Array) -> tuple[State, Array]:
        with sr.logical_axes(AXES):
            return train_step(optim, state, text)

    return step, make_state(optim, 0), jnp.zeros(1_000_000, jnp.uint8)


class Trainer:
    """Training on one mesh: the plan, and what is compiled for it."""

    def __init__(self, optim: optax.GradientTransformation, shapes: State, mesh: jax.sharding.Mesh) -> None:
        self.optim, self.mesh, self.plan = optim, mesh, RULES.plan(shapes.model, mesh).check()
        self.where = state = self.plan.mirror  # from a state to its shardings: a moment is split as its weight is
        self.step = sr.filter_jit(
            train_step, mesh=mesh, in_shardings=(None, state, P()), out_shardings=(state, P()), donate=["state"]
        )
        self.loss = sr.filter_jit(loss_of, mesh=mesh, in_shardings=(self.plan, P("data")), out_shardings=P())

    def train(self, state: State, text: np.ndarray, until: int) -> State:
        placed, first, started = sr.filter_shard(text, P(), self.mesh), int(state.step), 0.0
        for done in range(first + 1, until + 1):
            state, loss = self.step(self.optim, state, placed)
            loss = float(loss)  # waits for the step
            started = started or time.perf_counter()  # the first step has to be compiled, and does not count
            speed = (done - first - 1) * BATCH * CONTEXT / max(time.perf_counter() - started, 1e-9)
            show(done, first, until, f"loss {loss:.3f}, {speed:6,.0f} tokens/s")
        return state

    def report(self, when: str, state: State, held_out: np.ndarray) -> str:
        loss = float(self.loss(state.model, held_out))
        weights = state.model.blocks[0].up.weight, state.optimizer[0].mu.blocks[0].up.weight
        shards = " and ".join(f"{x.addressable_shards[0].data.shape} on {len(x.devices())} devices" for x in weights)
        print(line := f"{when:9}  held-out loss {loss:.3f}; blocks/0/up/weight and its moment: {shards}")
        return line


def show(done: int, first: int, until: int, text: str) -> None:
    """Shows a progress bar on a terminal, and elsewhere a line now and then."""
    width = 24 * (done - first) // (until - first)
    line = f"  step {done:4}/{until} [{'#' * width:.<24}] {text}"
    last, terminal = done == until, sys.stdout.isatty()
    if terminal or last or (done - first) % max(1, (until - first) // 8) == 0:
        print("\r" * terminal + line, end="" if terminal and not last else "\n", flush=True)


@eqx.filter_jit
def sample(model: GPT, window: np.ndarray, length: int, key: Array) -> Array:
    def step(window: Array, key: Array) -> tuple[Array, Array]:
        token = jax.random.categorical(key, 1.5 * model(window)[-1])
        return jnp.append(window[1:], token), token

    return jax.lax.scan(step, jnp.asarray(window), jax.random.split(key, length))[1]


def documentation() -> np.ndarray:
    """Returns the docstrings of the standard library as ASCII, one number for each character."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_bytes())))
    texts = (ast.get_docstring(node) for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return np.frombuffer("\n\n".join(filter(None, texts)).encode("ascii", "ignore"), np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a character-level GPT on 8 virtual CPU devices.")
    parser.add_argument("--steps", type=int, default=300, help="how many; a third of them after the restore")
    parser.add_argument("--smoke", action="store_true", help="30 steps, to see that it runs")
    steps = 30 if (args := parser.parse_args()).smoke else args.steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    text = documentation()
    text, held_out = text[: -64 * (CONTEXT + 1)], text[-64 * (CONTEXT + 1) :].reshape(64, CONTEXT + 1)

    optim = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps, 4e-4))
    shapes = eqx.filter_eval_shape(make_state, optim, 0)
    eight = Trainer(optim, shapes, sr.create_mesh("data:4,model:2"))
    four = Trainer(optim, shapes, sr.create_mesh("data:2,model:2", devices=jax.devices()[:4]))
    print(f"{eight.plan}\n\nlearning {len(text):,} characters")

    with sr.logical_axes(AXES), tempfile.TemporaryDirectory() as folder:
        state = sr.filter_init(make_state, eight.where, eight.mesh)(optim, 0)
        lines = [eight.report("untrained", state, held_out)]
        state = eight.train(state, text, 2 * steps // 3)
        lines.append(eight.report("saved", state, held_out))
        eqx.tree_serialise_leaves(f"{folder}/state.eqx", state)
        state = sr.load_equinox(f"{folder}/state.eqx", shapes, four.where, four.mesh)
        lines.append(four.report("restored", state, held_out))
        state = four.train(state, text, steps)
        lines.append(four.report("trained", state, held_out))

    prompt = "Return a new "
    window = np.frombuffer(prompt.rjust(CONTEXT).encode(), np.uint8).astype(np.int32)
    tokens = sample(sr.filter_gather(state.model), window, 240, jax.random.key(0))
    print("\n" + prompt + bytes(tokens.tolist()).decode() + "\n", *lines, sep="\n")


if __name__ == "__main__":
    main()
