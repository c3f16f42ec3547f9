"""Trainings with fused kernels: microbatches compute what the whole batch does, and stages are possible."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

import shardrules as sr
from tests.programs.autoplan.shipped import OPS, loaded
from tests.programs.training.checks import assert_close

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
    assert_trains_as_written(loss, params(), tokens)


def assert_trains_as_written(loss: Any, model: Any, batch: Any) -> None:
    mesh = sr.create_mesh("data:8")
    plan = sr.plan_training(loss, model, optax.sgd(0.1), batch, cluster=mesh, microbatches=2, time_limit=5)
    assert plan.report.microbatches == 2
    new_model, _, value = plan.step(*plan.init(lambda: model)(), batch)[:3]
    expected, gradients = jax.value_and_grad(loss)(model, batch)
    trained = jax.tree.map(lambda array, gradient: array - 0.1 * gradient, model, gradients)
    assert_close((value, new_model), (expected, trained), 1e-4)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_microbatches_of_a_norm_add_its_gradients_up(name: str) -> None:
    """Those of its weights are one kernel over all rows, whose program has the number of rows in it."""
    norm = getattr(loaded(f"{OPS}gpu.{name}"), name)

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(norm(x @ weights["w"], weights["scale"], weights["bias"], interpret=True) ** 3)

    weights = {"w": real(8, 16), "scale": real(16) + 1, "bias": real(16)}
    assert_trains_as_written(loss, weights, real(16, 4, 8))


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


ROWS = pl.BlockSpec((2, 8), lambda i: (i, 0))


def kernel_of(body: Any, rows: int, spec: Any = ROWS, *, block: int = 2) -> Any:
    """A kernel of a batch with this many rows, which is its own derivative."""
    call = pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((rows, 8), jnp.float32),
        grid=(rows // block,),
        in_specs=[spec],
        out_specs=spec,
        interpret=True,
    )
    function = jax.custom_vjp(call)
    function.defvjp(lambda x: (call(x), None), lambda _, gradient: (call(gradient),))
    return function


def in_microbatches(loss: Any) -> Any:
    w, x = real(8, 8), real(16, 8)
    return sr.plan_training(loss, w, optax.sgd(0.1), x, cluster="cpu:4", microbatches=2, time_limit=2)


def multiplied(factor: Any) -> Any:
    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * factor()

    return body


def centred(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] - jnp.mean(x_ref[...], 0, keepdims=True)


@pytest.mark.parametrize(
    ("what", "kernel"),
    [
        ("program", lambda rows: kernel_of(multiplied(lambda: rows), rows)),
        ("program", lambda rows: kernel_of(multiplied(lambda: pl.num_programs(0)), rows)),
        ("program", lambda rows: kernel_of(multiplied(lambda: 2 if rows > 8 else 3), rows)),
        (
            "map of blocks",
            lambda rows: kernel_of(centred, rows, pl.BlockSpec((rows // 4, 8), lambda i: (i, 0)), block=rows // 4),
        ),
        (
            "map of blocks",
            lambda rows: kernel_of(centred, rows, pl.BlockSpec((2, 8), lambda i: (rows // 2 - 1 - i, 0))),
        ),
    ],
)
def test_a_kernel_that_knows_how_many_examples_there_are_has_no_microbatches(what: str, kernel: Any) -> None:
    with pytest.raises(sr.errors.MicrobatchError, match=rf"pallas_call .* another.* {what}.* in each"):
        in_microbatches(lambda w, x: jnp.mean(kernel(len(x))(x @ w) ** 2))


def test_a_kernel_that_does_not_know_it_has_microbatches() -> None:
    assert in_microbatches(lambda w, x: jnp.mean(kernel_of(centred, len(x))(x @ w) ** 2)).report.microbatches == 2


def partitioned(function: Any, rule: str) -> Any:
    """A function that says itself how it is split, over data alone, and is its own derivative."""

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        shardings = [jax.tree.map(lambda struct: struct.sharding, each) for each in (results, operands)]
        return mesh, function, *shardings

    split = custom_partitioning(function)
    split.def_partition(partition, sharding_rule=rule)
    trained = jax.custom_vjp(split)
    trained.defvjp(lambda x: (split(x), None), lambda _, gradient: (split(gradient),))
    return trained


def test_a_function_that_says_how_it_is_split_has_no_microbatches() -> None:
    """The rule says that rows are split, also where the function takes their mean."""
    centre = partitioned(lambda x: x - x.mean(0, keepdims=True), "b d -> b d")
    with pytest.raises(sr.errors.MicrobatchError, match="says how devices split it, not that it computes examples one"):
        in_microbatches(lambda w, x: jnp.mean(centre(x @ w) ** 2))
