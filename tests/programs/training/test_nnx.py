"""Training steps of flax nnx: parameters are trained, and what the loss writes to other variables is kept."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardrules as sr
from shardrules.core.errors import ConfigTypeError, TreeError
from shardrules.programs.training.step import TrainingStep

X = jax.random.normal(jax.random.key(1), (16, 4))
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, norm: bool = True) -> None:
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.up(x)
        return self.down(self.dropout(nnx.relu(x if self.norm is None else self.norm(x))))


def make(norm: bool = True) -> Net:
    return Net(nnx.Rngs(0), norm)


def squares(net: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((net(x) - x) ** 2)


def plain(net: Any, steps: int) -> dict[str, Any]:
    """The step as users of nnx write it."""
    optimizer = nnx.Optimizer(net, OPTIMIZER, wrt=nnx.Param)
    for _ in range(steps):
        gradients = nnx.grad(squares)(net, X)
        optimizer.update(net, gradients)
    return flat(net)


def flat(net: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(net)))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for path, leaf in actual.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, expected[path] = jax.random.key_data(leaf), jax.random.key_data(expected[path])
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_planned_steps_equal_those_of_nnx() -> None:
    shapes = nnx.eval_shape(make)
    plan = sr.plan_training(squares, shapes, OPTIMIZER, X, cluster=jax.devices())
    net, state = plan.init(make)()
    assert len(jax.tree.leaves(state[0].trace)) == 6
    for _ in range(2):
        net, state, _, _ = plan.step(net, state, X)
    assert flat(net)["['dropout']['rngs']['count']"] == 2
    assert_same(flat(net), plain(make(), 2))


@pytest.mark.slow
def test_microbatches_write_as_the_whole_batch() -> None:
    plan = sr.plan_training(
        squares, nnx.eval_shape(lambda: make(norm=False)), OPTIMIZER, X, cluster=jax.devices(), microbatches=2
    )
    net, state = plan.init(lambda: make(norm=False))()
    for _ in range(2):
        net, state, _, _ = plan.step(net, state, X)
    assert_same(flat(net), plain(make(norm=False), 2))


def test_a_type_of_variables_chooses_what_is_trained() -> None:
    net = nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    step = TrainingStep(squares, optax.adam(1e-2), trainable=nnx.LoRAParam)
    new, state, _, _ = step(net, step.init_state(net), X)
    assert [leaf.shape for leaf in jax.tree.leaves(state[0].mu)] == [(4, 2), (2, 4)]
    before, after = flat(net), flat(new)
    changed = [path for path in before if not np.array_equal(before[path], after[path])]
    assert changed == ["['lora_b']"]  # it is zero at first, and so is the gradient of the other


@pytest.mark.parametrize("choice", [nnx.All(nnx.Param, nnx.PathContains("up")), nnx.Not(nnx.BatchStat), (nnx.Param,)])
def test_filters_of_nnx_are_refused(choice: Any) -> None:
    with pytest.raises(ConfigTypeError, match=r"cannot choose arrays by.*Pass a type of variables of flax nnx"):
        TrainingStep(squares, OPTIMIZER, trainable=choice).init_state(make())


def test_writes_to_trained_variables_and_to_the_batch_are_refused() -> None:
    def trained(net: Any, x: jax.Array) -> jax.Array:
        net.up.bias[...] = net.up.bias[...] + 1
        return squares(net, x)

    def of_batch(net: Any, batch: Any) -> jax.Array:
        x, rngs = batch
        return squares(net, x * jax.random.bernoulli(rngs.dropout(), 0.5, x.shape))

    net = make()
    for loss, batch, message in ((trained, X, "that is trained"), (of_batch, (X, nnx.Rngs(0)), "Put them into the")):
        step = TrainingStep(loss, optax.sgd(0.1))
        with pytest.raises(TreeError, match=message):
            step(net, step.init_state(net), batch)


def test_shared_variables_are_refused() -> None:
    net = make()
    net.down.bias = net.up.kernel
    step = TrainingStep(squares, optax.sgd(0.1))
    with pytest.raises(TreeError, match=r"model twice: up/kernel is down/bias.*nnx\.split.*stay as they are"):
        step(net, step.init_state(net), X)
