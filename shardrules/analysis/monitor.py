"""`create_monitored_function`: a function that tells how long it took and what its argument costs."""

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax

from shardrules.analysis.analyzer import ShardingAnalyzer
from shardrules.core.errors import ShardingWarning, ShardRulesError


def create_monitored_function(
    fn: Callable[..., Any], partition_specs: Any, analyzer: ShardingAnalyzer
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Returns a function that does what `fn` does, and says what it took.

    **Arguments:**

    - `fn`: any function; its first argument is the tree that `partition_specs` is for.
    - `partition_specs`: a tree with a PartitionSpec at every array.
    - `analyzer`: checks the specs and counts bytes.

    **Returns:**

    A function that returns the result of `fn` and a dictionary: `execution_time` in seconds, from when the arguments
    are there until the result is; `memory_usage`, as `estimate_memory_usage` gives it, or `None` where unsound specs
    have no size; `validation_issues`, as `validate_partition_specs` lists them.

    A `ShardingWarning` tells of issues, and the function is run all the same.

    ```python
    analyzer = sr.ShardingAnalyzer(sr.mesh_shape("data:4"))
    double = sr.create_monitored_function(lambda x: 2 * x, P("data"), analyzer)
    result, metrics = double(jnp.ones(8))
    assert metrics["memory_usage"]["size_per_device"] == 8
    ```
    """

    @functools.wraps(fn)
    def monitored(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        tree = args[0]
        issues = analyzer.validate_partition_specs(tree, partition_specs)
        if issues:
            listed = "\n".join(f"  {issue}" for issue in issues)
            warnings.warn(f"the specs of {fn!r} are unsound:\n{listed}", ShardingWarning, stacklevel=2)
        usage = _usage(tree, partition_specs, analyzer)  # now: fn may donate its argument
        jax.block_until_ready((args, kwargs))
        start = time.perf_counter()
        result = jax.block_until_ready(fn(*args, **kwargs))
        took = time.perf_counter() - start
        return result, {"execution_time": took, "memory_usage": usage, "validation_issues": issues}

    return monitored


def _usage(tree: Any, partition_specs: Any, analyzer: ShardingAnalyzer) -> dict[str, int] | None:
    try:
        return analyzer.estimate_memory_usage(tree, partition_specs)
    except ShardRulesError:  # the issues say why
        return None
