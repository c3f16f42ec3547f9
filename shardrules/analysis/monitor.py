"""`create_monitored_function`: a function that tells how long it took and what its argument costs."""

import functools
import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax

from shardrules.analysis.analyzer import ShardingAnalyzer
from shardrules.core.errors import ShardingWarning, ShardRulesError, TreeError


def create_monitored_function(
    fn: Callable[..., Any], partition_specs: Any, analyzer: ShardingAnalyzer
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Returns a function that does what `fn` does, and says what it took.

    **Arguments:**

    - `fn`: any function; its first argument, by position or by name, is the tree that `partition_specs` is for.
    - `partition_specs`: a tree with a PartitionSpec at every array.
    - `analyzer`: checks the specs and counts bytes.

    **Returns:**

    A function that returns the result of `fn` and a dictionary: `execution_time` in seconds, from when the arguments
    are there until the result is; `memory_usage`, as `estimate_memory_usage` gives it, or `None` where unsound specs
    have no size; `validation_issues`, as `validate_partition_specs` lists them.

    A `ShardingWarning` tells of issues, and where there is no mesh to check for; the function is run all the same.

    **Raises:**

    `TreeError`, from the function that is returned, when it is called without its first argument.

    ```python
    from shardrules.presets import eformer

    analyzer = sr.ShardingAnalyzer(sr.mesh_shape("data:4"))
    double = eformer.create_monitored_function(lambda x: 2 * x, P("data"), analyzer)
    result, metrics = double(jnp.ones(8))
    assert metrics["memory_usage"]["size_per_device"] == 8
    ```
    """

    @functools.wraps(fn)
    def monitored(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        tree = _tree(fn, args, kwargs)
        verdict, issues = _issues(tree, partition_specs, analyzer)
        if issues:
            listed = "\n".join(f"  {issue}" for issue in issues)
            warnings.warn(f"the specs of {fn!r} {verdict}:\n{listed}", ShardingWarning, stacklevel=2)
        usage = _usage(tree, partition_specs, analyzer)  # now: fn may donate its argument
        jax.block_until_ready((args, kwargs))
        start = time.perf_counter()
        result = jax.block_until_ready(fn(*args, **kwargs))
        took = time.perf_counter() - start
        return result, {"execution_time": took, "memory_usage": usage, "validation_issues": issues}

    return monitored


def _tree(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return args[0]
    try:
        first = next(iter(inspect.signature(fn).parameters), "")
    except (TypeError, ValueError):  # some functions written in C tell nothing of their parameters
        first = ""
    if first not in kwargs:
        raise TreeError(f"{fn!r} was called without its first argument, which is the tree that partition_specs is for")
    return kwargs[first]


def _issues(tree: Any, partition_specs: Any, analyzer: ShardingAnalyzer) -> tuple[str, list[str]]:
    try:
        return "are unsound", analyzer.validate_partition_specs(tree, partition_specs)
    except ShardRulesError as error:  # no mesh: the function may do without
        return "cannot be checked", [str(error)]


def _usage(tree: Any, partition_specs: Any, analyzer: ShardingAnalyzer) -> dict[str, int] | None:
    try:
        return analyzer.estimate_memory_usage(tree, partition_specs)
    except ShardRulesError:  # the issues say why
        return None
