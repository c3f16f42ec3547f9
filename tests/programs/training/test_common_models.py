"""Plans of models, losses and optimizers as people write them train as the plain step does, on eight devices."""

from collections.abc import Callable
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardrules as sr

KEY = jax.random.key(0)
X, Y = (jax.random.normal(key, (32, 16)) for key in jax.random.split(KEY))
WORDS = jax.random.randint(KEY, (32, 8), 0, 16)
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 8)


class Net(eqx.Module):
    """Layers, a function, a name and dropout."""

    layers: tuple[eqx.nn.Linear, ...]
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    activation: Callable[[jax.Array], jax.Array]
    name: str = eqx.field(static=True, default="net")

    def __init__(self) -> None:
        keys = jax.random.split(KEY)
        self.layers = eqx.nn.Linear(16, 32, key=keys[0]), eqx.nn.Linear(32, 16, key=keys[1])
        self.norm, self.dropout, self.activation = eqx.nn.LayerNorm(32), eqx.nn.Dropout(0.3), jax.nn.gelu

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        x = self.norm(self.activation(self.layers[0](x)))
        return self.layers[1](self.dropout(x, key=key, inference=key is None))


def squares(net: Net, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.vmap(net)(x) - y) ** 2)


def dropped(net: Net, batch: Any) -> jax.Array:
    x, y, key = batch
    return jnp.mean((jax.vmap(net)(x, jax.random.split(key, len(x))) - y) ** 2)


def several(net: Net, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    x, y = batch
    predicted = jax.vmap(net)(x)
    parts = {"fit": jnp.mean((predicted - y) ** 2), "size": 1e-3 * jnp.sum(net.layers[1].weight ** 2)}
    return parts["fit"] + parts["size"], {**parts, "predicted": predicted, "name": net.name}


def language(words: Any, tokens: jax.Array) -> jax.Array:
    logits = jnp.tanh(words["in"][tokens[:, :-1]]) @ words["out"]
    loss = optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(tokens[:, 1:], 16), 0.1))
    mask = tokens[:, 1:] != 0
    return jnp.sum((loss + 1e-2 * jax.nn.logsumexp(logits, -1) ** 2) * mask) / jnp.sum(mask)


def make_words() -> dict[str, jax.Array]:
    return {"in": jax.random.normal(KEY, (16, 8)), "out": jax.random.normal(KEY, (8, 16))}


class Counted(eqx.Module):
    """Counts steps, and learns."""

    net: Net
    steps: eqx.nn.StateIndex

    def __init__(self) -> None:
        self.net, self.steps = Net(), eqx.nn.StateIndex(jnp.array(0))


def counted(model: Any, batch: Any) -> tuple[jax.Array, eqx.nn.State]:
    module, state = model
    count = state.get(module.steps)
    return squares(module.net, batch) * (1 + count), state.set(module.steps, count + 1)


def by_kind(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


def adapter(model: Any) -> Any:
    return eqx.tree_at(lambda net: net.layers[1].weight, jax.tree.map(lambda _: False, model), True)


@final
@attrs.frozen
class Case:
    """A model, and the way to train it."""

    loss: Callable[[Any, Any], Any] = squares
    make: Callable[[], Any] = Net
    optimizer: Any = attrs.field(factory=lambda: optax.adam(1e-2))
    batch: Any = (X, Y)
    has_aux: bool = False
    trainable: Callable[[Any], Any] | None = None
    """Makes the filter from a model."""

    def step(self, model: Any, state: Any) -> tuple[Any, Any, Any, Any]:
        """The step as users write it."""
        params, frozen = eqx.partition(model, self.filter_of(model))

        def loss(params: Any) -> Any:
            result = self.loss(eqx.combine(params, frozen), self.batch)
            return result if self.has_aux else (result, None)

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = self.optimizer.update(gradients, state, params)
        trained: Any = eqx.combine(optax.apply_updates(params, updates), frozen)
        return (trained[0], aux) if isinstance(aux, eqx.nn.State) else trained, state, value, aux

    def filter_of(self, model: Any) -> Any:
        return eqx.is_inexact_array if self.trainable is None else self.trainable(model)


def halves() -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, Net())


CASES = {
    "static fields, dropout, a schedule and updates that may be skipped": Case(
        dropped, optimizer=optax.apply_if_finite(optax.adamw(SCHEDULE), 3), batch=(X, Y, jax.random.key(3))
    ),
    "an adapter, several losses and clipping": Case(
        several,
        optimizer=optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), 2),
        has_aux=True,
        trainable=adapter,
    ),
    "smoothed labels, z-loss, masks and Muon": Case(language, make_words, optax.contrib.muon(SCHEDULE), WORDS),
    "a state, and optimizers by kind": Case(
        counted,
        lambda: eqx.nn.make_with_state(Counted)(),
        optax.multi_transform({"matrix": optax.lion(1e-2), "vector": optax.sgd(1e-2)}, by_kind),
        has_aux=True,
    ),
    "moments in float32": Case(make=halves, optimizer=optax.adam(1e-2, mu_dtype=jnp.float32)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [*((name, 2) for name in CASES), *((name, 1) for name in CASES if name.startswith("a"))],
)
def test_planned_steps_train_as_plain_steps(name: str, microbatches: int) -> None:
    case = CASES[name]
    model = case.make()
    state = case.optimizer.init(eqx.filter(model, case.filter_of(model)))
    plan = sr.plan_training(
        case.loss,
        model,
        case.optimizer,
        case.batch,
        cluster=sr.create_mesh("data:8"),
        has_aux=case.has_aux,
        trainable=case.filter_of(model),
        microbatches=microbatches,
    )
    actual, actual_state = plan.init(case.make)()
    assert plan.recipe.microbatches == microbatches
    tolerance = 0.05 if name == "moments in float32" else 1e-4
    for _ in range(3):
        model, state, *results = eqx.filter_jit(case.step)(model, state)
        actual, actual_state, *actual_results = plan.step(actual, actual_state, case.batch)
        expected = (model, state, results)
        assert jax.tree.structure((actual, actual_state, actual_results)) == jax.tree.structure(expected)
        pairs = zip(jax.tree.leaves((actual, actual_state, actual_results)), jax.tree.leaves(expected), strict=True)
        for leaf, other in pairs:
            if eqx.is_array(other):
                assert leaf.dtype == other.dtype
                first, second = (np.asarray(array, np.float32) for array in (leaf, other))
                np.testing.assert_allclose(first, second, rtol=tolerance, atol=tolerance)
            else:
                assert leaf == other


def test_a_state_that_the_loss_does_not_return_is_warned_of() -> None:
    def evaluated(model: Any, batch: Any) -> jax.Array:
        return counted(model, batch)[0]

    model = eqx.nn.make_with_state(Counted)()
    plans = [
        sr.plan_training(loss, model, optax.sgd(0.1), (X, Y), cluster=sr.mesh_shape("data:2"), has_aux=has_aux)
        for loss, has_aux in ((evaluated, False), (counted, True))
    ]
    codes = [[finding.code for finding in plan.report.findings] for plan in plans]
    assert ["state-not-returned" in each for each in codes] == [True, False]
