"""The dim of a batch's arrays that has the examples."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardrules.core.errors import ConfigError, ConfigTypeError
from shardrules.programs.training.loss import TracedLoss, trace_loss
from shardrules.programs.training.microbatches import accumulated
from tests.programs.training.checks import assert_close, operands

WORDS = jax.ShapeDtypeStruct((9, 4), jnp.float32)


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def embedded(words: Any, batch: Any) -> Any:
    """Reads every array of a batch, and adds tables of positions to the words."""
    x = words[batch["tokens"]]
    if "rope" in batch:
        x = x * batch["rope"]
    others = [jnp.sum(leaf) for name, leaf in batch.items() if name in ("mask", "table")]
    if "key" in batch:
        others.append(jax.random.uniform(batch["key"]))
    return jnp.mean(x**2) + sum(others, start=jnp.float32(0))


def traced(**batch: Any) -> TracedLoss:
    return trace_loss(embedded, WORDS, {"tokens": array(8, 6, dtype=jnp.int32), **batch})


@pytest.mark.parametrize(
    "other",
    [
        {"mask": array(1, 1, 6, 6)},
        {"rope": array(6, 4)},
        {"key": jax.random.key(0)},
        {"key": jax.random.PRNGKey(0)},
        {"table": array()},
    ],
    ids=["mask-of-four-dims", "rope", "key", "old-key", "scalar"],
)
def test_arrays_without_the_examples_stay_whole(other: dict[str, Any]) -> None:
    trace = traced(**other)
    assert trace.batch_size == 8
    assert trace.split.example_arrays == (("batch/tokens[0]",), (f"batch/{next(iter(other))}",))


def test_arrays_that_share_the_first_dim_are_split() -> None:
    assert traced(mask=array(8, 1, 6, 6)).split.example_arrays == (("batch/mask[0]", "batch/tokens[0]"), ())
    assert traced(table=array(8), mask=array(1, 6)).split.example_arrays[1] == ("batch/mask",)
    # An old key has two numbers, and is none of two examples.
    old_key = traced(tokens=array(2, 6, dtype=jnp.int32), key=jax.random.PRNGKey(0))
    assert old_key.split.example_arrays[1] == ("batch/key",)
    one_example = traced(tokens=array(1, 6, dtype=jnp.int32), rope=array(6, 4))
    assert one_example.split.example_arrays == (("batch/tokens[0]",), ("batch/rope",))


def test_ambiguous_batches_are_refused_with_each_choice() -> None:
    for size in (0, 5):
        several = rf"(?s)other sizes of several of them.*{size} examples: table.*8 examples: tokens"
        with pytest.raises(ConfigError, match=rf"{several}.*pass example_dims={{'table': None, 'tokens': 0}}"):
            traced(table=array(size))

    def of_one_size(words: Any, batch: Any) -> Any:
        return jnp.mean(words[batch["tokens"].reshape(8, 6)]) + jnp.sum(batch["table"] * jnp.ones(5))

    with pytest.raises(ConfigError, match="other sizes of none of them"):
        trace_loss(of_one_size, WORDS, {"tokens": array(8, 6, dtype=jnp.int32), "table": array(5)})


def test_errors_of_the_loss_are_not_about_sizes() -> None:
    with pytest.raises(AttributeError, match="undefined"):
        trace_loss(lambda words, batch: words.undefined, WORDS, {"x": array(16, 4), "table": array(5)})


def test_a_batch_without_examples_is_refused() -> None:
    for batch in (jnp.ones(()), (1.0, 2.0), "tokens"):
        with pytest.raises(ConfigError, match=r"no array with a dim of examples, got .*Pass arrays or shapes, such as"):
            trace_loss(lambda w, x: w * x, jnp.ones(()), batch)


def recurrent(weights: Any, batch: Any) -> Any:
    def step(hidden: Any, x: Any) -> Any:
        return jnp.tanh(x @ weights + hidden), None

    hidden, _ = jax.lax.scan(step, jnp.zeros(batch["x"].shape[1:]), batch["x"])
    return jnp.mean((hidden + batch["bias"]) ** 2 * batch["weight"][:, None])


def test_examples_may_be_along_another_dim() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(6, 8, 4)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    batch = {"x": x, "weight": weight, "bias": np.ones(4, np.float32)}
    weights = jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)
    trace = trace_loss(recurrent, weights, batch, example_dims={"x": -2, "weight": 0, "bias": None})
    assert trace.batch_size == 8
    expected = jax.value_and_grad(recurrent)(weights, batch)
    for parts in ((1, 1), (2, 2)):
        value, _, (gradient,) = accumulated(trace, *parts)(*operands(trace, weights, batch))
        assert_close((value, gradient), expected, 1e-4)
    assert trace.split.resized(16)["x"].shape == (6, 16, 4)


@pytest.mark.parametrize(
    ("dims", "error", "message"),
    [
        (0, ConfigError, r"(?s)bias float32\[\] has no dim 0.*weight float32\[8\], dim 0: 8 examples.*: 6 examples"),
        ({"x": 3, "weight": 0, "bias": None}, ConfigError, "has no dim 3"),
        ({"x": 0}, ConfigError, r"a prefix of the batch, got {'x': 0}; the batch is .*'bias'"),
        ({"x": None, "weight": None, "bias": None}, ConfigError, "names no dim of examples"),
        ("first", ConfigTypeError, "must have integers and None, got 'first'"),
    ],
)
def test_wrong_dims_are_refused(dims: Any, error: type[Exception], message: str) -> None:
    batch = {"x": array(6, 8, 4), "weight": array(8), "bias": array()}
    with pytest.raises(error, match=message):
        trace_loss(recurrent, array(4, 4), batch, example_dims=dims)
