"""Functions that also return their time and memory."""

import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.presets import eformer

ANALYZER = sr.ShardingAnalyzer(sr.mesh_shape("dp:2,tp:4"))
TREE = {"a": np.ones((8, 16), np.float32)}


def test_result_and_metrics() -> None:
    step = eformer.create_monitored_function(lambda tree, scale: tree["a"] * scale, {"a": P("dp", "tp")}, ANALYZER)
    assert eformer.create_monitored_function(time.monotonic, P(), ANALYZER).__name__ == "monotonic"
    result, metrics = step(TREE, scale=3)
    np.testing.assert_array_equal(result, 3 * TREE["a"])
    assert list(metrics) == ["execution_time", "memory_usage", "validation_issues"]
    assert metrics["memory_usage"] == ANALYZER.estimate_memory_usage(TREE, {"a": P("dp", "tp")})
    assert metrics["memory_usage"]["size_per_device"] == 64
    assert metrics["validation_issues"] == []


def test_the_clock_stops_when_the_result_is_ready() -> None:
    def slow(x: Any) -> Any:
        return jax.pure_callback(lambda value: (time.sleep(0.3), value)[1], jax.ShapeDtypeStruct((), jnp.float32), x)

    _, metrics = eformer.create_monitored_function(jax.jit(slow), P(), ANALYZER)(jnp.float32(1))
    assert 0.3 <= metrics["execution_time"] < 30


def test_earlier_work_is_not_counted() -> None:
    pending = jax.jit(
        lambda x: jax.pure_callback(lambda value: (time.sleep(0.5), value)[1], jax.ShapeDtypeStruct((), jnp.float32), x)
    )(jnp.float32(1))
    _, metrics = eformer.create_monitored_function(lambda x: x, P(), ANALYZER)(pending)
    assert metrics["execution_time"] < 0.3


@pytest.mark.parametrize(
    ("spec", "issue", "per_device"),
    [
        (P("tp", "dp"), None, 64),
        (P("dp", "pt"), "a: unknown axis 'pt'", None),
        (P(("dp", "tp"), None, "tp"), "a: ", None),
    ],
)
def test_issues_are_warned_of_and_the_function_runs(spec: P, issue: str | None, per_device: int | None) -> None:
    step = eformer.create_monitored_function(lambda tree: tree["a"].sum(), {"a": spec}, ANALYZER)
    if issue is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result, metrics = step(TREE)
    else:
        with pytest.warns(sr.errors.ShardingWarning, match=f"unsound:\n  {issue}"):
            result, metrics = step(TREE)
        assert issue in metrics["validation_issues"][0]
    assert result == 128
    usage = metrics["memory_usage"]
    assert per_device is None or usage["size_per_device"] == per_device


def test_the_tree_can_be_a_keyword_argument() -> None:
    def step(tree: Any, scale: int = 2) -> Any:
        return tree["a"].sum() * scale

    def by_name(*, tree: Any) -> Any:
        return tree["a"].sum()

    monitored = eformer.create_monitored_function(step, {"a": P("dp")}, ANALYZER)
    for result, metrics in (monitored(scale=3, tree=TREE), monitored(tree=TREE, scale=3)):
        assert (result, metrics["memory_usage"]["size_per_device"]) == (384, 256)
    assert eformer.create_monitored_function(by_name, {"a": P("dp")}, ANALYZER)(tree=TREE)[0] == 128
    for fn in (step, jnp.sum, max):
        with pytest.raises(sr.errors.ConfigTypeError, match="called without its first argument, which is the tree"):
            eformer.create_monitored_function(fn, P(), ANALYZER)(scale=3)


def test_without_a_mesh_it_warns_and_goes_on() -> None:
    step = eformer.create_monitored_function(lambda tree: tree["a"].sum(), {"a": P("dp")}, sr.ShardingAnalyzer())
    with pytest.warns(sr.errors.ShardingWarning, match=r"(?s)cannot be checked:.*the analysis needs a mesh"):
        result, metrics = step(TREE)
    assert (result, metrics["memory_usage"], len(metrics["validation_issues"])) == (128, None, 1)
