"""`create_monitored_function`: a function that also returns how long it took and what its argument takes in memory."""

import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax

from shardrules.checks.analyzer import ShardingAnalyzer
from shardrules.core.callables import update_wrapper
from shardrules.core.errors import ConfigTypeError, ShardingWarning, ShardRulesError


def create_monitored_function(
    fn: Callable[..., Any], partition_specs: Any, analyzer: ShardingAnalyzer
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Returns a function that returns the result of `fn` and a dictionary of metrics.

    `partition_specs` are for the first argument of `fn`. The metrics are `execution_time` in seconds, from when the
    arguments are ready until the result is; `memory_usage`, as `estimate_memory_usage` returns it, or `None` where
    unsound specs have no size; `validation_issues`, as `validate_partition_specs` lists them. Issues, and a missing
    mesh, are a `ShardingWarning`: the function runs all the same.

    ```python
    from shardrules.presets import eformer

    analyzer = sr.ShardingAnalyzer(sr.mesh_shape("data:4"))
    double = eformer.create_monitored_function(lambda x: 2 * x, P("data"), analyzer)
    result, metrics = double(jnp.ones(8))
    assert metrics["memory_usage"]["size_per_device"] == 8
    ```
    """

    def monitored(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        tree = _first_argument(fn, args, kwargs)
        problem, issues, usage = _check(tree, partition_specs, analyzer)  # before the call: fn may donate its argument
        if issues:
            issue_lines = "\n".join(f"  {issue}" for issue in issues)
            warnings.warn(f"the specs of {fn!r} {problem}:\n{issue_lines}", ShardingWarning, stacklevel=2)
        # Dispatch is asynchronous: without both waits the time would include earlier work, or miss this function's.
        jax.block_until_ready((args, kwargs))
        start = time.perf_counter()
        result = jax.block_until_ready(fn(*args, **kwargs))
        seconds = time.perf_counter() - start
        return result, {"execution_time": seconds, "memory_usage": usage, "validation_issues": issues}

    return update_wrapper(monitored, fn)


def _first_argument(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return args[0]
    try:
        first = next(iter(inspect.signature(fn).parameters), "")
    except (TypeError, ValueError):  # some functions written in C have no signature
        first = ""
    if first not in kwargs:
        raise ConfigTypeError(
            f"{fn!r} was called without its first argument, which is the tree that partition_specs is for"
        )
    return kwargs[first]


def _check(tree: Any, partition_specs: Any, analyzer: ShardingAnalyzer) -> tuple[str, list[str], dict[str, int] | None]:
    issues: list[str] = []
    try:
        issues = analyzer.validate_partition_specs(tree, partition_specs)
        return "are unsound", issues, analyzer.estimate_memory_usage(tree, partition_specs)
    except ShardRulesError as error:
        # Without issues there is no mesh, which the function may not need.
        return ("are unsound", issues, None) if issues else ("cannot be checked", [str(error)], None)
