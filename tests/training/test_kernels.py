"""Trainings with fused kernels: microbatches compute what the whole batch does, and stages are possible."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl

import shardrules as sr
from tests.planning.shipped import OPS, loaded

NUMBERS = np.random.default_rng(0)


def real(*shape: int) -> jax.Array:
    return jnp.asarray(0.1 * NUMBERS.normal(size=shape), jnp.float32)


def attend(q: Any, k: Any, v: Any) -> Any:
    """With the gradient of attention as it is written out: that of the kernel takes blocks of 16 at least."""
    kernel = loaded(f"{OPS}gpu.attention").mha
    return kernel(q, k, v, None, causal=True, interpret=True, backward_pass_impl="xla")


def loss(params: Any, tokens: Any) -> Any:
    def block(x: Any, layer: Any) -> tuple[Any, None]:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, layer[name]) for name in "qkv")
        return x + jnp.einsum("btnh,nhd->btd", attend(q, k, v), layer["o"]), None

    x, _ = jax.lax.scan(block, params["embed"][tokens], params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, tokens).mean()


def params() -> Any:
    shapes = dict.fromkeys("qkv", (2, 32, 2, 16)) | {"o": (2, 2, 16, 32)}
    return {"embed": real(64, 32), "layers": {name: real(*shape) for name, shape in shapes.items()}}


def test_microbatches_of_a_kernel_compute_what_the_whole_batch_does() -> None:
    tokens = jnp.asarray(NUMBERS.integers(0, 64, (16, 32)), jnp.int32)
    model, optimizer = params(), optax.sgd(0.1)
    plan = sr.plan_training(
        loss, model, optimizer, tokens, cluster=sr.create_mesh("data:8"), microbatches=2, time_limit=5
    )
    assert plan.report.microbatches == 2
    new_model, _, value = plan.step(*plan.init(lambda: model)(), tokens)[:3]
    expected, gradients = jax.value_and_grad(loss)(model, tokens)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for array, before, gradient in zip(*map(jax.tree.leaves, (new_model, model, gradients)), strict=True):
        np.testing.assert_allclose(array, before - 0.1 * gradient, rtol=1e-4, atol=1e-6)


def test_a_kernel_that_asks_for_its_example_has_no_microbatches() -> None:
    def weigh(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * pl.program_id(0)

    rows = pl.BlockSpec((1, 8), lambda i: (i, 0))
    call = pl.pallas_call(
        weigh, jax.ShapeDtypeStruct((16, 8), jnp.float32), grid=(16,), in_specs=[rows], out_specs=rows, interpret=True
    )
    call = jax.custom_vjp(call)
    call.defvjp(lambda x: (call(x), None), lambda _, gradient: (gradient,))
    with pytest.raises(sr.errors.MicrobatchError, match="pallas_call"):
        sr.plan_training(
            lambda w, x: jnp.mean(call(x @ w)), real(8, 8), optax.sgd(0.1), real(16, 8), cluster="cpu:4", microbatches=2
        )
