"""Parts of a program that are repeated."""

import jax
import jax.numpy as jnp

from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.jaxprs.segments import struct
from shardrules.programs.training.keep.units import Unit, find_units
from tests.programs.training.keep.programs import LAYERS, Traced, batch, layer, layer_weights, scanned, unrolled


def units_of(traced: Traced) -> list[Unit]:
    return find_units(flattened(traced.program), traced.trainable_count)


def test_layers_of_a_loop_in_python_are_a_run() -> None:
    (unit,) = units_of(Traced.of(unrolled, layer_weights(), batch()))
    assert (unit.position.path, unit.position.repeats, unit.run_count) == ((), LAYERS, LAYERS)
    # Only what goes from layer to layer is kept of its inputs: weights are in memory anyway.
    inputs = [var for var, flag in zip(unit.body.invars, unit.is_resident, strict=True) if not flag]
    assert [struct(var).shape for var in inputs] == [batch().shape]


def test_the_body_of_a_scan_over_layers_is_a_unit() -> None:
    (unit,) = units_of(Traced.of(scanned, layer_weights(), batch()))
    assert (unit.position.path, unit.position.repeats, unit.run_count) == ((0,), 1, LAYERS)
    assert unit.is_loop
    assert unit.is_resident.count(False) == 1


def test_layers_inside_a_loop_over_parts_of_the_batch_are_units() -> None:
    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.map(lambda part: scanned(weights, part), x.reshape(2, 2, *x.shape[1:])).sum()

    (unit,) = units_of(Traced.of(loss, layer_weights(), batch()))
    assert len(unit.position.path) == 2
    assert unit.run_count == 2 * LAYERS


def test_two_kinds_of_layers_are_two_units() -> None:
    def loss(weights: dict[str, dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for index in range(3):
            x = layer(x, {name: each[index] for name, each in weights["first"].items()})
        x = x @ jnp.ones((32, 16))
        for index in range(2):
            x = jnp.tanh(x @ weights["second"]["w"][index])
        return x.sum()

    weights = {"first": layer_weights(3), "second": {"w": jnp.ones((2, 16, 16))}}
    first, second = units_of(Traced.of(loss, weights, batch()))
    assert (first.position.repeats, second.position.repeats) == (3, 2)
    assert first.position.start + 3 * first.position.length <= second.position.start


def test_layers_before_the_first_that_is_trained_are_in_no_unit() -> None:
    def loss(trained: dict[str, jax.Array], frozen: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for weights in (frozen, trained):
            for index in range(LAYERS):
                x = layer(x, {name: each[index] for name, each in weights.items()})
        return x.sum()

    (whole,) = find_units(flattened(Traced.of(loss, layer_weights(), layer_weights(), batch()).program))
    (unit,) = units_of(Traced.of(loss, layer_weights(), layer_weights(), batch()))
    assert (whole.position.repeats, unit.position.repeats) == (2 * LAYERS, LAYERS)
    assert unit.position.start == whole.position.start + LAYERS * whole.position.length


def test_functions_without_layers_or_gradients_through_them_have_no_units() -> None:
    assert not units_of(Traced.of(lambda w, x: jnp.tanh(x @ w).sum(), jnp.ones((4, 4)), jnp.ones((2, 4))))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ jnp.ones((4, 4))), None), x, None, length=3)
        return (jax.lax.stop_gradient(y) * w).sum()

    assert not units_of(Traced.of(loss, jnp.ones(4), jnp.ones((2, 4))))


def test_positions_are_the_same_for_other_batches() -> None:
    positions = [
        [unit.position for unit in units_of(Traced.of(loss, layer_weights(), batch(rows)))]
        for loss in (scanned, unrolled)
        for rows in (2, 8)
    ]
    assert positions[0] == positions[1]
    assert positions[2] == positions[3]
