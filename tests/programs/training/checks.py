"""Comparisons and problems that tests of training plans share."""

from typing import Any

import jax
import numpy as np
import optax

from shardrules.programs.autoplan.graph.machine import Assumptions
from shardrules.programs.autoplan.query import QueryOptions
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.loss import TracedLoss
from shardrules.programs.training.search.problem import TrainingProblem
from shardrules.programs.training.step import TrainingStep


def assert_close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for array, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(array, other, rtol=rtol, atol=atol)


def operands(trace: TracedLoss, model: Any, batch: Any) -> tuple[Any, Any, Any]:
    """The operands of functions of gradients."""
    arrays = trace.split.arrays(model, batch)
    return arrays.trainable, arrays.fixed, arrays.batched


def problem_of(
    loss: Any,
    model: Any,
    batch: Any,
    cluster: Cluster,
    *,
    limit: int | None = None,
    host_memory: int | None = None,
    optimizer: Any = None,
    **options_of_step: Any,
) -> TrainingProblem:
    step = TrainingStep(loss, optax.adam(1e-3) if optimizer is None else optimizer, **options_of_step)
    options = QueryOptions(limit, None, cluster.hardware, Assumptions(), 600, False)
    state = jax.eval_shape(step.init_state, model)
    return TrainingProblem(step, model, state, batch, cluster, options, host_memory)
