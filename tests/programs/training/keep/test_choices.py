"""The choices of what is kept."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from shardrules.programs.training.keep.choices import keep_choices
from tests.programs.training.keep.programs import LAYERS, Traced, batch, layer, layer_weights, norm, scanned, unrolled


def test_each_choice_keeps_less_and_takes_longer() -> None:
    for loss in (scanned, unrolled):
        choices = Traced.of(loss, layer_weights(), batch()).choices(offload=False)
        assert not choices[0].units
        kept, seconds = [keep.kept_bytes for keep in choices], [keep.seconds for keep in choices[1:]]
        assert kept == sorted(kept, reverse=True)
        assert len(dict.fromkeys(kept)) == len(kept)
        assert seconds == sorted(seconds)


def test_at_most_as_many_choices_as_asked_for() -> None:
    traced = Traced.of(unrolled, layer_weights(), batch())
    few, many = traced.choices(count=3), traced.choices(count=100)
    assert (len(few), few[0].units, few[-1]) == (3, (), many[-1])
    assert len(many) > 10


def test_first_layers_of_a_run_may_keep_less_than_the_last() -> None:
    traced = Traced.of(unrolled, layer_weights(), batch())
    mixed = next(keep for keep in traced.choices(count=100) if len(keep.units) == 2)
    first, last = mixed.units
    assert first.unit.repeats + last.unit.repeats == LAYERS
    assert first.unit.start + first.unit.repeats * first.unit.length == last.unit.start


def test_functions_without_layers_keep_everything() -> None:
    program = jax.make_jaxpr(lambda w, x: jnp.tanh(x @ w).sum())(jnp.ones((4, 4)), jnp.ones((2, 4)))
    (only,) = keep_choices(program, sr.Hardware.named("cuda:h100"))
    assert (only.units, str(only)) == ((), "keeps everything")


def test_checkpoints_of_the_user_are_respected_or_replaced() -> None:
    checkpointed = jax.checkpoint(layer)

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, w: (checkpointed(x, w), None), x, weights)[0] ** 2)

    traced = Traced.of(loss, layer_weights(), batch())
    assert [keep.units for keep in traced.choices(offload=False)] == [()]
    replaced = traced.choices(offload=False, replace_checkpoints=True)
    plain = Traced.of(scanned, layer_weights(), batch())
    assert [keep.units for keep in replaced] == [keep.units for keep in plain.choices(offload=False)]
    assert traced.matmul_count(replaced[0]) == plain.matmul_count() < traced.matmul_count()


def test_nothing_is_sent_to_hosts_by_sheets_of_processors() -> None:
    program = jax.make_jaxpr(scanned)(layer_weights(), jax.ShapeDtypeStruct((512, 512, 32), jnp.float32))
    assert any(keep.host_bytes for keep in keep_choices(program, sr.Hardware.named("cuda:h100")))
    assert not any(keep.host_bytes for keep in keep_choices(program, sr.Hardware.named("cpu")))


def test_frozen_weights_need_no_operands() -> None:
    weights, x = layer_weights(), batch()
    adapters = {"a": jnp.ones((LAYERS, 32, 2)), "b": jnp.ones((LAYERS, 2, 128))}

    def loss(adapters: dict[str, jax.Array], weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def adapted(x: jax.Array, both: tuple[dict[str, jax.Array], dict[str, jax.Array]]) -> tuple[jax.Array, None]:
            adapter, weight = both
            return layer(x, weight | {"up": weight["up"] + adapter["a"] @ adapter["b"]}), None

        return jnp.mean(jax.lax.scan(adapted, x, (adapters, weights))[0] ** 2)

    traced = Traced.of(loss, adapters, weights, x)
    everything = Traced(traced.program, traced.arrays, 6)
    assert traced.choices()[0].kept_bytes < everything.choices()[0].kept_bytes


def test_texts_name_lines_and_bytes() -> None:
    texts = [str(keep) for keep in Traced.of(scanned, layer_weights(), batch()).choices(offload=False)]
    assert texts[0].startswith("keeps everything (")
    assert all("programs.py:" in text and "iB)" in text and "recomputes" in text for text in texts[1:])
    assert "the input of each layer" in texts[-1]


@pytest.mark.slow
def test_layers_may_carry_keys_and_hold_loops() -> None:
    def loss(weights: dict[str, jax.Array], x: jax.Array, key: jax.Array) -> jax.Array:
        def body(state: tuple[jax.Array, jax.Array], weights: dict[str, jax.Array]) -> tuple[Any, None]:
            x, key = state
            key, own_key = jax.random.split(key)
            inputs = (norm(x) @ weights["out"]).swapaxes(0, 1)
            _, y = jax.lax.scan(lambda h, u: (0.9 * h + u, jnp.tanh(h) * u), jnp.zeros(x.shape[::2]), inputs)
            return (x + jnp.where(jax.random.bernoulli(own_key, 0.9, x.shape), y.swapaxes(0, 1), 0.0), key), None

        return jnp.mean(jax.lax.scan(body, (x, key), weights)[0][0] ** 2)

    traced = Traced.of(loss, {"out": layer_weights()["out"]}, batch(), jax.random.key(0))
    least = traced.choices(offload=False)[-1]
    assert "recomputes" in str(least)
    np.testing.assert_allclose(traced.gradient(least)[0], traced.gradient()[0], rtol=1e-6)


def test_units_with_effects_stay_as_written() -> None:
    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            jax.debug.callback(lambda _: None, x.sum())
            return layer(x, weights), None

        return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

    assert [keep.units for keep in Traced.of(loss, layer_weights(), batch()).choices()] == [()]


def test_hosts_fill_the_gap_below_what_devices_can_keep() -> None:
    weights = jax.ShapeDtypeStruct((4, 16384, 16384), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((16384, 16384), jnp.bfloat16)

    def layers(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            hidden = jnp.tanh(x @ w)
            return jnp.sin(hidden @ w) @ w + x, None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    program = jax.make_jaxpr(layers)(weights, x)
    choices = keep_choices(program, sr.Hardware.named("cuda:h100"))
    assert [keep.kept_bytes for keep in choices] == sorted((keep.kept_bytes for keep in choices), reverse=True)
    on_hosts = [keep for keep in choices if keep.host_bytes]
    assert len(on_hosts) > 1
    assert on_hosts[0].kept_bytes  # some of it stays on the device
    assert not on_hosts[-1].kept_bytes
    assert [keep.seconds for keep in on_hosts] == sorted(keep.seconds for keep in on_hosts)
    assert "on the host, recomputes" in on_hosts[-1].short_text
    few = keep_choices(program, sr.Hardware.named("cuda:h100"), device_count=2**20)
    assert not any(keep.host_bytes for keep in few)  # a device's part of each array is small
