"""Training steps compute what plain Equinox and optax steps compute."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardrules.core.errors import ConfigError, ConfigTypeError
from shardrules.programs.training.step import TrainingStep

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (16, 4))


class Net(eqx.Module):
    layers: tuple[eqx.nn.Linear, ...]
    activation: Any
    name: str = eqx.field(static=True, default="net")

    def __init__(self) -> None:
        keys = jax.random.split(KEY, 2)
        self.layers = eqx.nn.Linear(4, 8, key=keys[0]), eqx.nn.Linear(8, 4, key=keys[1])
        self.activation = jax.nn.relu

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.activation(self.layers[0](x)))


def squares(net: Net, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(net)(x) - x) ** 2)


def plain(loss: Any, net: Any, optimizer: Any, batch: Any, steps: int, trainable: Any = eqx.is_inexact_array) -> Any:
    """The step as users write it."""
    params, frozen = eqx.partition(net, trainable)
    state = optimizer.init(params)
    for _ in range(steps):
        gradients = eqx.filter_grad(lambda params: loss(eqx.combine(params, frozen), batch))(params)
        updates, state = optimizer.update(gradients, state, params)
        params = eqx.apply_updates(params, updates)
    return eqx.combine(params, frozen)


def run(step: TrainingStep, net: Any, batch: Any, steps: int) -> Any:
    state = step.init_state(net)
    for _ in range(steps):
        net, state, _, _ = eqx.filter_jit(step)(net, state, batch)
    return net


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(leaf):
            np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)


def test_steps_equal_plain_steps() -> None:
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 8))
    assert_same(run(TrainingStep(squares, optimizer), Net(), X, 3), plain(squares, Net(), optimizer, X, 3))


def test_optimizers_that_read_the_loss_get_it() -> None:
    optimizer = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau())
    net = run(TrainingStep(squares, optimizer), Net(), X, 2)
    assert_same(net, plain(squares, Net(), optax.adam(1e-2), X, 2))


def test_frozen_layers_stay_and_adapters_train() -> None:
    frozen = jax.tree.map(lambda _: False, Net())
    adapters = eqx.tree_at(lambda net: net.layers[1].weight, frozen, True)
    step = TrainingStep(squares, optax.sgd(0.1), trainable=adapters)
    net = run(step, Net(), X, 2)
    assert_same(net, plain(squares, Net(), optax.sgd(0.1), X, 2, adapters))
    assert (net.layers[0].weight == Net().layers[0].weight).all()
    assert not np.allclose(net.layers[1].weight, Net().layers[1].weight)


def test_aux_comes_back_beside_the_loss() -> None:
    step = TrainingStep(lambda net, x: (squares(net, x), {"x": x[:, 0], "name": "aux"}), optax.sgd(0.1), has_aux=True)
    _, _, loss, aux = step(Net(), step.init_state(Net()), X)
    assert aux["name"] == "aux"
    assert (aux["x"] == X[:, 0]).all()
    np.testing.assert_allclose(loss, squares(Net(), X), rtol=1e-6)


def test_typed_keys_draw_as_in_the_plain_loss() -> None:
    def dropped(net: Net, batch: Any) -> jax.Array:
        x, key = batch
        return squares(net, x * jax.random.bernoulli(key, 0.5, x.shape))

    batch = X, jax.random.key(3)
    assert_same(
        run(TrainingStep(dropped, optax.sgd(0.1)), Net(), batch, 1), plain(dropped, Net(), optax.sgd(0.1), batch, 1)
    )


class Counted(eqx.Module):
    linear: eqx.nn.Linear
    mean: eqx.nn.StateIndex

    def __init__(self) -> None:
        self.linear, self.mean = eqx.nn.Linear(4, 4, key=KEY), eqx.nn.StateIndex(jnp.zeros(4))

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        y = jax.vmap(self.linear)(x)
        return y, state.set(self.mean, 0.9 * state.get(self.mean) + 0.1 * y.mean(0))


def counted(model: Any, x: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
    net, state = model
    y, state = net(x, state)
    return jnp.mean(y**2), state


def test_states_are_updated_and_not_trained() -> None:
    model = eqx.nn.make_with_state(Counted)()
    step = TrainingStep(counted, optax.adam(1e-2), has_aux=True)
    state = step.init_state(model)
    assert [leaf.shape for leaf in jax.tree.leaves(state[0].mu)] == [(4, 4), (4,)]
    (net, statistics), _, _, _ = step(model, state, X)
    expected = 0.1 * jax.vmap(model[0].linear)(X).mean(0)
    np.testing.assert_allclose(statistics.get(net.mean), expected, rtol=1e-5)
    assert not np.allclose(net.linear.weight, model[0].linear.weight)


@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norms_keep_their_types_over_steps(mode: Any) -> None:
    def loss(model: Any, x: jax.Array) -> Any:
        norm, state = model
        y, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean((y - x) ** 2), state

    def make() -> Any:
        return eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode=mode)

    model, (norm, statistics) = make(), make()
    step = TrainingStep(loss, optax.sgd(0.1), has_aux=True)
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)]
    for _ in range(2):
        model, _, _, _ = eqx.filter_jit(step)(model, step.init_state(model), X)
        gradient, statistics = eqx.filter_grad(loss_of_first(loss), has_aux=True)(norm, statistics, X)
        norm = eqx.apply_updates(norm, jax.tree.map(lambda leaf: -0.1 * leaf, gradient))
        assert_same(jax.tree.leaves(model), jax.tree.leaves((norm, statistics)))
        assert [jax.typeof(leaf) for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)] == types


def loss_of_first(loss: Any) -> Any:
    return lambda first, second, batch: loss((first, second), batch)


def test_a_state_with_other_entries_is_refused() -> None:
    model = eqx.nn.make_with_state(Counted)()
    _, other = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    step = TrainingStep(lambda model, x: (counted(model, x)[0], other), optax.sgd(0.1), has_aux=True)
    with pytest.raises(ConfigTypeError, match="other entries"):
        step(model, step.init_state(model), X)


def test_a_state_of_each_example_is_refused() -> None:
    def loss(model: Any, x: jax.Array) -> Any:
        values, states = jax.vmap(lambda row: counted(model, row[None]))(x)
        return values.mean(), states

    step = TrainingStep(loss, optax.sgd(0.1), has_aux=True)
    model = eqx.nn.make_with_state(Counted)()
    with pytest.raises(ConfigTypeError, match=r"float32\[16, 4\] in aux, float32\[4\] in the model\n.*out_axes=None"):
        step(model, step.init_state(model), X)


def test_updates_in_float32_leave_models_in_bfloat16() -> None:
    step = TrainingStep(lambda w, x: jnp.mean((x @ w) ** 2), optax.adam(1e-2, mu_dtype=jnp.float32))
    w = jnp.ones((4, 4), jnp.bfloat16)
    model, _, _, _ = step(w, step.init_state(w), X)
    assert model.dtype == jnp.bfloat16


def test_a_state_of_another_structure_is_refused() -> None:
    state = optax.adam(0.1).init(jax.tree.leaves(eqx.filter(Net(), eqx.is_array)))
    with pytest.raises(ConfigTypeError, match=r"optimizer's state differs.*plan\.init"):
        eqx.filter_eval_shape(TrainingStep(squares, optax.adam(0.1)), Net(), state, X)


@pytest.mark.parametrize("choice", ["weight", (eqx.nn.Linear, float), ..., lambda path, leaf: True, [True]])
def test_what_is_no_filter_is_refused(choice: Any) -> None:
    with pytest.raises((ConfigError, ConfigTypeError), match=r"`trainable`.*Pass a type of variables of flax nnx"):
        TrainingStep(squares, optax.sgd(0.1), trainable=choice).trace(Net(), X)
