"""Losses as training plans trace them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from shardrules.core.errors import ConfigError, ConfigTypeError
from shardrules.programs.training.loss import trace_loss

STRUCT = jax.ShapeDtypeStruct


def mean_loss(model: Any, batch: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def data(rows: int = 8) -> dict[str, Any]:
    return {"key": jax.random.key(0), "x": jnp.ones((rows, 4)), "y": jnp.ones((rows, 3))}


def test_arrays_come_trainable_first_then_fixed_then_batched() -> None:
    model = eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(0))
    frozen = jax.tree.map(lambda _: False, model, is_leaf=eqx.is_array)
    trainable = eqx.tree_at(lambda tree: tree.layers[0].weight, frozen, True)
    trace = trace_loss(mean_loss, model, data(), trainable=trainable)
    assert (trace.trainable_count, trace.fixed_count, trace.batched_count) == (1, 4, 2)
    assert [aval.shape for aval in trace.jaxpr.in_avals[:1]] == [(5, 4)]
    assert [aval.shape for aval in trace.jaxpr.in_avals[-2:]] == [(8, 4), (8, 3)]


def test_shapes_are_traced_as_arrays_are() -> None:
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(0)))
    batch = jax.eval_shape(data)
    trace = trace_loss(mean_loss, model, batch)
    assert (trace.trainable_count, trace.batch_size) == (4, 8)
    assert trace.with_batch_size(2).jaxpr.in_avals[-1].shape == (2, 3)


def test_arrays_of_a_model_and_a_batch_evaluate_the_jaxpr() -> None:
    model = eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(0))
    trace = trace_loss(mean_loss, model, data())
    arrays = trace.split.arrays(model, data())
    (value,) = jaxpr_as_fun(trace.jaxpr)(*arrays.trainable, *arrays.fixed, *arrays.batched)
    assert jnp.allclose(value, mean_loss(model, data()))
    tree = trace.split.trainable_tree(arrays.trainable)
    assert jax.tree.structure(tree) == jax.tree.structure(eqx.filter(model, eqx.is_inexact_array))


def test_aux_comes_back_with_what_is_no_array() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return jnp.sum(batch @ model), {"name": "sum", "rows": batch * 2}

    trace = trace_loss(loss, jnp.ones(4), jnp.ones((8, 4)), has_aux=True)
    assert trace.aux_names == ("aux 'rows'",)
    rows = jnp.ones((8, 4))
    assert trace.rebuild_aux([rows])[0] == {"name": "sum", "rows": rows}


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (lambda w, x: x @ w, {}, r"must be a scalar .* not float32\[8\]"),
        (lambda w, x: (jnp.sum(x @ w), 1), {}, "pass has_aux=True"),
        (lambda w, x: jnp.sum(x @ w), {"has_aux": True}, "must return a pair"),
        (lambda w, x: jnp.sum(x @ w), {"trainable": lambda leaf: False}, "chooses no array"),
        (lambda w, x: jnp.sum(x), {"model": jnp.arange(3), "trainable": eqx.is_array}, "only floating-point arrays"),
    ],
)
def test_invalid_losses_are_refused(loss: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ConfigTypeError), match=message):
        trace_loss(loss, **{"model": jnp.ones(4), "batch": jnp.ones((8, 4)), **options})


@pytest.mark.parametrize("example_dims", [None, {"key": None, "x": 0, "y": 0}])
def test_batches_without_examples_are_refused(example_dims: Any) -> None:
    model = eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(0))
    with pytest.raises(
        ConfigError, match=r"mean_loss: the batch has no examples: the size of batch/x\[0\], batch/y\[0\] is 0"
    ):
        trace_loss(mean_loss, model, data(0), example_dims=example_dims)


def test_arrays_without_a_gradient_are_named() -> None:
    model = {"down": jnp.ones((4, 3)), "up": jnp.ones((3, 4)), "unused": jnp.ones(3), "mean": jnp.ones(3)}

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean((batch @ model["up"] @ model["down"] - jax.lax.stop_gradient(model["mean"])) ** 2)

    trace = trace_loss(loss, model, jnp.ones((8, 3)))
    assert trace.without_gradient == ("model/mean", "model/unused")
    trace.check()


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: jnp.mean(x**2),
        lambda w, x: jnp.mean((x @ jax.lax.stop_gradient(w["a"])) ** 2),
        lambda w, x: jnp.mean((x @ w["a"] > 0) * 1.0),
    ],
)
def test_losses_that_train_nothing_are_refused(loss: Any) -> None:
    trace = trace_loss(loss, {"a": jnp.ones(4), "b": jnp.ones(2)}, jnp.ones((8, 4)))
    with pytest.raises(
        ConfigError, match="does not depend on what is trained, model/a, model/b, or not by a derivative"
    ):
        trace.check()


class Counting:
    """A loss that knows how often it was traced."""

    __name__ = "counting"

    def __init__(self, change: Any) -> None:
        self.count, self.change = 0, change

    def __call__(self, w: Any, x: Any) -> Any:
        self.count += 1
        return jnp.mean(self.change(x @ w, self.count) ** 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda y, count: jnp.sin(y) if count % 2 else jnp.cos(y), r"sin float32\[8\] \(.*test_loss.py:\d+\) is cos"),
        (lambda y, count: y ** (count + 1), "integer_pow .* is integer_pow .* with y=3 instead of 2"),
        (lambda y, count: y * count, r"a constant of mul float32\[8\] \(.*test_loss.py:\d+\) has another value"),
        (lambda y, count: y * np.full(8, 1.0 + count), r"a constant of .*float32\[8\] \(.*\) has another value"),
        (lambda y, count: jnp.tanh(y) if count > 1 else y, "is tanh"),
    ],
)
def test_losses_that_differ_in_each_trace_are_refused(change: Any, text: str) -> None:
    trace = trace_loss(Counting(change), jnp.ones(4), jnp.ones((8, 4)))
    with pytest.raises(
        ConfigError, match=f"counting: the loss is another program each time that it is traced: .*{text}"
    ):
        trace.check()
