"""Programs whose gradients keep what was chosen compute the same, and keep no more."""

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardrules.core.errors import ConfigError
from shardrules.programs.training.keep.apply import with_kept
from shardrules.programs.training.keep.keep import Keep
from tests.programs.training.keep.programs import Traced, batch, layer, layer_weights, scanned, unrolled


@pytest.mark.parametrize("loss", [scanned, pytest.param(unrolled, marks=pytest.mark.slow)])
def test_gradients_are_the_same_with_less_kept(loss: Callable[..., Any]) -> None:
    traced = Traced.of(loss, layer_weights(), batch())
    choices = traced.choices(offload=False, count=100)
    # Of the run of layers the choice in which the first keep less than the last.
    keep = next((each for each in choices if len(each.units) > 1), choices[-1])
    (expected, gradients), (value, actual) = traced.gradient(), traced.gradient(keep)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), actual, gradients)


@pytest.mark.parametrize("loss", [scanned, pytest.param(unrolled, marks=pytest.mark.slow)])
def test_what_is_kept_is_not_computed_again(loss: Callable[..., Any]) -> None:
    traced = Traced.of(loss, layer_weights(), batch())
    plain = traced.matmul_count()
    for keep in traced.choices(offload=False)[1:]:
        repeated = traced.matmul_count(keep) - plain
        assert (repeated == 0) == (keep.repeated_flops == 0)


def test_the_scan_stacks_what_the_choice_names() -> None:
    traced = Traced.of(scanned, layer_weights(), batch())
    for keep in traced.choices(offload=False)[1:]:
        scan = next(each for each in traced.gradient_program(keep).eqns if each.primitive.name == "scan")
        stacked = sum(var.aval.size * var.aval.dtype.itemsize for var in scan.outvars[1:])
        assert stacked == keep.kept_bytes


def test_least_keeps_only_inputs_of_layers() -> None:
    weights, x = layer_weights(), batch()
    traced = Traced.of(scanned, weights, x)
    least = traced.choices(offload=False, count=100)[-1]
    assert least.kept_bytes == 4 * x.nbytes
    checkpointed = jax.checkpoint(layer)
    expert = Traced.of(
        lambda w, x: jnp.mean(jax.lax.scan(lambda x, w: (checkpointed(x, w), None), x, w)[0] ** 2), weights, x
    )
    assert traced.matmul_count(least) == expert.matmul_count()


def test_a_choice_is_for_other_batches_too() -> None:
    small, large = (Traced.of(scanned, layer_weights(), batch(rows)) for rows in (2, 4))
    assert small.choices(offload=False)[-1] == large.choices(offload=False)[-1]
    keep = large.choices(offload=False)[2]
    assert small.matmul_count(keep) == large.matmul_count(keep)


def test_another_function_is_refused() -> None:
    keep = Traced.of(scanned, layer_weights(), batch()).choices()[1]
    program = jax.make_jaxpr(lambda x: jnp.sin(x).sum())(jnp.ones(4))
    with pytest.raises(ConfigError, match=r"another function: equation .* is no scan"):
        with_kept(program, keep)
    (unit,) = keep.units
    longer = attrs.evolve(unit, unit=attrs.evolve(unit.unit, length=99))
    with pytest.raises(ConfigError, match=r"a layer has .* equations instead of 99"):
        with_kept(Traced.of(scanned, layer_weights(), batch()).program, attrs.evolve(keep, units=[longer]))


def test_without_units_the_program_is_as_written() -> None:
    program = Traced.of(scanned, layer_weights(), batch()).program
    assert with_kept(program, Keep()) is program


def test_what_is_offloaded_is_moved_to_the_host() -> None:
    shape = jax.ShapeDtypeStruct
    weights = {name: shape((4, *each.shape[1:]), jnp.float32) for name, each in layer_weights().items()}
    program = jax.make_jaxpr(scanned)(weights, shape((512, 512, 32), jnp.float32))
    traced = Traced(program, tuple(shape(var.aval.shape, var.aval.dtype) for var in program.jaxpr.invars), 4)
    least = traced.choices()[-1]
    assert least.host_bytes
    assert any(unit.offloaded for unit in least.units)
    assert "pinned_host" in str(traced.gradient_program(least)) or "Host" in str(traced.gradient_program(least))
    assert all(not keep.host_bytes for keep in traced.choices(offload=False))
