"""A pipeline of one stage: microbatches go through all layers one after the other."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from shardrules.programs.pipelines.functions import Functions
from shardrules.programs.pipelines.leaves import Arrays, as_others
from shardrules.programs.pipelines.run import Operands


def run_whole(functions: Functions, operands: Operands) -> Any:
    """The mean loss of microbatches, or the outputs of the last layer, without stages."""

    def of_layer(x: Arrays, params: Arrays) -> tuple[Arrays, None]:
        return as_others(functions.layer(params, x), x), None

    def of_microbatch(rows: tuple[Arrays, Arrays]) -> Any:
        inputs, targets = rows
        y, _ = lax.scan(of_layer, functions.first(operands.first, inputs), operands.layers)
        return y if functions.last_function is None else functions.last(operands.last, y, targets)

    results = lax.map(of_microbatch, (operands.inputs, operands.targets))
    return results if functions.last_function is None else jnp.sum(results) / results.shape[0]
