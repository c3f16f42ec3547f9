"""Layers in stages: the same values and gradients as layer by layer."""

from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from shardrules.core.errors import MicrobatchError
from shardrules.programs.jaxprs.walk import equations
from shardrules.programs.training.loss import trace_loss
from shardrules.programs.training.microbatches import SplitLoss, accumulated
from shardrules.programs.training.stages.layers import LayerLoop
from shardrules.programs.training.stages.run import StagedProgram, tick_count
from tests.programs.training.checks import assert_close, operands

LAYERS, EXAMPLES, LENGTH, WIDTH, WORDS = 6, 16, 5, 8, 12


def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng([*shape]).normal(size=shape) / 3, jnp.float32)


def words(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, WORDS, (EXAMPLES, LENGTH)))


def model(layers: int = LAYERS) -> Any:
    weights = {"up": numbers(layers, WIDTH, 12), "down": numbers(layers, 12, WIDTH)}
    return {"embedding": numbers(WORDS, WIDTH), "layers": weights, "shift": numbers(WIDTH)}


def batch() -> Any:
    mask = np.random.default_rng(3).random((EXAMPLES, LENGTH)) > 0.3
    return {"x": words(1), "y": words(2), "mask": jnp.asarray(mask, jnp.float32)}


def head(model: Any, x: Any, batch: Any) -> Any:
    """A masked mean over tokens, with an embedding that is tied."""
    logits = jax.nn.log_softmax(x @ model["embedding"].T)
    losses = -jnp.take_along_axis(logits, batch["y"][..., None], -1)[..., 0]
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


def layer(x: Any, weights: Any) -> Any:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def plain(model: Any, batch: Any) -> Any:
    x = jax.lax.scan(lambda x, w: (layer(x, w), None), model["embedding"][batch["x"]], model["layers"])[0]
    return head(model, x, batch)


def written_out(model: Any, batch: Any) -> Any:
    """Layers are a loop of Python."""
    x = model["embedding"][batch["x"]]
    for index in range(LAYERS):
        x = layer(x, jax.tree.map(lambda leaf, index=index: leaf[index], model["layers"]))
    return head(model, x, batch)


def of_examples(model: Any, batch: Any) -> Any:
    """Layers read the mask of their examples, and a weight that all of them share."""

    def step(x: Any, weights: Any) -> tuple[Any, None]:
        return layer(x * batch["mask"][..., None], weights) + model["shift"], None

    return head(model, jax.lax.scan(step, model["embedding"][batch["x"]], model["layers"])[0], batch)


def stacking(model: Any, batch: Any) -> Any:
    """Layers return something each, which the loss uses."""

    def step(x: Any, weights: Any) -> tuple[Any, Any]:
        return layer(x, weights), jnp.sum(x**2, (1, 2))

    x, norms = jax.lax.scan(step, model["embedding"][batch["x"]], model["layers"])
    return head(model, x, batch) + 0.01 * jnp.mean(norms * jnp.arange(1.0, 1 + len(norms))[:, None])


def counting(model: Any, batch: Any) -> Any:
    """A count goes from layer to layer, and a key from which each layer takes its own."""

    def step(carry: Any, weights: Any) -> tuple[Any, None]:
        x, count, key = carry
        key, noise = jax.random.split(key)
        return (layer(x, weights) * (1 + 0.1 * count) + jax.random.normal(noise, (WIDTH,)), count + 1, key), None

    start = model["embedding"][batch["x"]], jnp.float32(0), jax.random.key(0)
    return head(model, jax.lax.scan(step, start, model["layers"])[0][0], batch)


def dropping(model: Any, batch: Any) -> Any:
    """Each example has a key, and each layer its own bits of it."""
    keys = jax.vmap(lambda x: jax.random.split(jax.random.key(x.sum()), len(model["layers"]["up"])), out_axes=1)

    def step(x: Any, row: Any) -> tuple[Any, None]:
        weights, key = row
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (LENGTH, WIDTH)))(key)
        return layer(jnp.where(keep, x / 0.8, 0), weights), None

    x = jax.lax.scan(step, model["embedding"][batch["x"]], (model["layers"], keys(batch["x"])))[0]
    return head(model, x, batch)


def finite_in_order(model: Any, batch: Any) -> Any:
    """Layers that are finite for what comes from layers, and not for zeros."""

    def step(x: Any, weights: Any) -> tuple[Any, None]:
        return layer(x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True)), weights), None

    return head(model, jax.lax.scan(step, model["embedding"][batch["x"]], model["layers"])[0], batch)


LOSSES = (plain, written_out, of_examples, stacking, counting, dropping, finite_in_order)


@final
@attrs.frozen
class Step:
    """Stages, microbatches and groups."""

    stages: int
    microbatches: int
    groups: int = 1
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.stages}-{self.microbatches}-{self.groups}-{self.chunks}"


STEPS = (
    *(Step(2, 2), Step(2, 8), Step(3, 3), Step(4, 4), Step(4, 8), Step(2, 4, 2), Step(2, 4, 4), Step(6, 6)),
    *(Step(2, 2, 1, 3), Step(2, 8, 1, 2), Step(4, 8, 1, 2), Step(2, 4, 2, 3)),
)
SUITABLE = [step for step in STEPS if EXAMPLES % (step.microbatches * step.groups) == 0]


def gradients(loss: Any, step: Step | None, model: Any, batch: Any, dtype: Any = None) -> Any:
    trace = trace_loss(loss, model, batch)
    sizes: dict[str, Any] = {} if step is None else attrs.asdict(step)
    return jax.jit(accumulated(trace, dtype=dtype, **sizes))(*operands(trace, model, batch))[::2]


@pytest.mark.parametrize("step", SUITABLE, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.sample(2)
def test_values_and_gradients_are_those_of_the_loss(loss: Any, step: Step) -> None:
    actual = gradients(loss, step, model(), batch())
    assert all(bool(jnp.isfinite(array).all()) for array in jax.tree.leaves(actual))
    assert_close(actual, gradients(loss, None, model(), batch()), 2e-5, 2e-6)


@pytest.mark.parametrize("layers", [5, 7])
@pytest.mark.sample(1)
def test_layers_need_not_divide_into_stages(layers: int) -> None:
    actual, expected = (gradients(of_examples, step, model(layers), batch()) for step in (Step(4, 4), None))
    assert_close(actual, expected, 2e-5, 2e-6)


@pytest.mark.parametrize(("dtype", "is_exact"), [(None, True), (jnp.bfloat16, False)])
def test_gradients_add_up_in_the_dtype_for_sums(dtype: Any, is_exact: bool) -> None:
    """In bfloat16, ones are lost beside 256: the backward pass begins with the last microbatch."""

    def loss(weight: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (x + w * x, None), x, weight)[0].astype(jnp.float32))

    rows = jnp.asarray([1.0] * 15 + [256.0], jnp.bfloat16)
    weight = jnp.zeros((2, 1), jnp.bfloat16)
    _, (gradient,) = gradients(loss, Step(2, 16), weight, rows[:, None], dtype)
    exact = bool((gradient == jnp.asarray(271, jnp.bfloat16)).all())
    assert exact is is_exact


def test_stages_run_at_once() -> None:
    """As many rounds as microbatches and stages but one, each with as many layers as a stage has."""
    trace = trace_loss(plain, model(), batch())
    split = SplitLoss.of(trace, 8)
    program = StagedProgram(split.forward, split.is_batched, 2, 8)
    inputs = [
        jax.ShapeDtypeStruct((8, *aval.shape) if flag else aval.shape, aval.dtype)
        for aval, flag in zip(split.forward.in_avals, split.is_batched, strict=True)
    ]
    loops = [each for each in jax.make_jaxpr(program)(*inputs).eqns if each.primitive.name == "scan"]
    assert [loop.params["length"] for loop in loops] == [tick_count(2, 8)] == [9]
    inner = [each for each in loops[0].params["jaxpr"].eqns if each.primitive.name == "scan"]
    assert [loop.params["length"] for loop in inner] == [3]


def test_results_of_microbatches_keep_their_order() -> None:
    trace = trace_loss(
        lambda w, x: jnp.sum(jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]), numbers(4, 3, 3), numbers(8, 3)
    )
    split = SplitLoss.of(trace, 8)
    inputs = [numbers(4, 3, 3), *[numbers(8, 1, 3)], jnp.int32(0), jnp.arange(8, dtype=jnp.int32)]
    staged = StagedProgram(split.forward, split.is_batched, 4, 8)(*inputs)
    each = jax.vmap(jaxpr_as_fun(split.forward), tuple(0 if flag else None for flag in split.is_batched))(*inputs)
    np.testing.assert_allclose(staged[0], each[0], rtol=1e-4, atol=1e-6)


def of_other_layers(model: Any, batch: Any) -> Any:
    """No layer is like the one before."""
    x, weights = model["embedding"][batch["x"]], model["layers"]
    for up, function in zip(weights["up"], (jnp.tanh, jnp.sin, jnp.cos, jnp.exp, jnp.abs, jnp.sign), strict=True):
        x = x + function(x @ up) @ weights["down"][0]
    return head(model, x, batch)


def from_last_to_first(model: Any, batch: Any) -> Any:
    start = model["embedding"][batch["x"]]
    x = jax.lax.scan(lambda x, w: (layer(x, w), None), start, model["layers"], reverse=True)[0]
    return head(model, x, batch)


def branching(model: Any, batch: Any) -> Any:
    def step(x: Any, row: Any) -> tuple[Any, None]:
        weights, index = row
        return layer(jax.lax.cond(index % 2 == 0, jnp.sin, jnp.cos, x), weights), None

    rows = model["layers"], jnp.arange(LAYERS)
    return head(model, jax.lax.scan(step, model["embedding"][batch["x"]], rows)[0], batch)


def of_weights_alone(model: Any, batch: Any) -> Any:
    scale = jax.lax.scan(lambda x, w: (layer(x, w), None), numbers(64, WIDTH), model["layers"])[0]
    return head(model, model["embedding"][batch["x"]] * jnp.mean(scale), batch)


def drawing_by_rbg(model: Any, batch: Any) -> Any:
    def step(carry: Any, weights: Any) -> tuple[Any, None]:
        x, key = carry
        key, noise = jax.random.split(key)
        return (layer(x, weights) + jax.random.normal(noise, (WIDTH,)), key), None

    start = model["embedding"][batch["x"]], jax.random.key(0, impl="rbg")
    return head(model, jax.lax.scan(step, start, model["layers"])[0][0], batch)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (of_other_layers, "neither one loop over stacked parameters nor equal ones"),
        (from_last_to_first, "from the last to the first"),
        (branching, "its layers branch"),
        (of_weights_alone, "reads nothing of the batch"),
        (drawing_by_rbg, "random numbers by rbg"),
    ],
)
def test_other_losses_say_why_not(loss: Any, message: str) -> None:
    split = SplitLoss.of(trace_loss(loss, model(), batch()), 2)
    with pytest.raises(MicrobatchError, match=message):
        LayerLoop.of(split.staged_forward, split.is_batched)


def test_backward_passes_begin_with_the_last_microbatch() -> None:
    """As the schedule of a plan is drawn: the derivative goes back through the ticks."""
    trace = trace_loss(plain, model(), batch())
    step = accumulated(trace, microbatches=8, stages=2)
    program = jax.make_jaxpr(step)(*operands(trace, model(), batch()))
    ticks = [
        equation.params["reverse"]
        for equation in equations(program)
        if equation.primitive.name == "scan" and equation.params["length"] == tick_count(2, 8)
    ]
    assert ticks == [False, True]
