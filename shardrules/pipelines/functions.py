"""The functions of a pipeline as functions of lists of arrays."""

from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp

from shardrules.pipelines.leaves import Arrays, Structure, pack


@final
@attrs.frozen(eq=False)
class Functions:
    """What a user's functions compute of arrays; the structures are of their arguments."""

    layer_function: Callable[[Any, Any], Any]
    first_function: Callable[[Any, Any], Any] | None
    last_function: Callable[..., Any] | None
    layers: Structure
    first_params: Structure
    last_params: Structure
    inputs: Structure
    targets: Structure
    message: Structure
    """Of what goes from layer to layer."""

    def layer(self, params: Arrays, x: Arrays) -> Arrays:
        """The output of a layer."""
        return pack(self.layer_function(self.layers.unpack(params), self.message.unpack(x)))[0]

    def first(self, params: Arrays, inputs: Arrays) -> Arrays:
        """The input of the first layer."""
        if self.first_function is None:
            return inputs
        return pack(self.first_function(self.first_params.unpack(params), self.inputs.unpack(inputs)))[0]

    def last(self, params: Arrays, y: Arrays, targets: Arrays) -> Any:
        """The loss of a microbatch."""
        assert self.last_function is not None
        arrays = self.last_params.unpack(params), self.message.unpack(y), self.targets.unpack(targets)
        return jnp.asarray(self.last_function(*arrays))


def message_structure(
    function: Callable[[Any, Any], Any] | None, params: Structure, inputs: Structure, operands: Sequence[Arrays]
) -> Structure:
    """The structure of what the first layer gets."""
    if function is None:
        return inputs
    structures = []

    def run(param_arrays: Arrays, input_arrays: Arrays) -> Arrays:
        arrays, structure = pack(function(params.unpack(param_arrays), inputs.unpack(input_arrays)))
        structures.append(structure)
        return arrays

    jax.eval_shape(run, *operands)
    return structures[0]


def result_problems(
    functions: Functions, layer: Arrays, first: Arrays, last: Arrays, rows: Sequence[Arrays]
) -> list[str]:
    """What the functions return that they should not, for a layer, and a microbatch of inputs and targets."""
    inputs, targets = rows
    message = jax.eval_shape(functions.first, first, inputs)
    results = []

    def run(params: Arrays, x: Arrays) -> Arrays:
        arguments = functions.layers.unpack(params), functions.message.unpack(x)
        arrays, structure = pack(functions.layer_function(*arguments))
        results.append(structure)
        return arrays

    out = jax.eval_shape(run, layer, message)
    if shapes_text(out) != shapes_text(message) or results[0].treedef != functions.message.treedef:
        gets, returns = (shapes_text(arrays) for arrays in (message, out))
        trees = functions.message.treedef, results[0].treedef
        return [f"layer must return what it gets: it gets {gets} in {trees[0]}, and returns {returns} in {trees[1]}"]
    if functions.last_function is None:
        return []
    loss = jax.eval_shape(functions.last, last, message, targets)
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        return [f"last must return one float, the loss of a microbatch, got {shapes_text([loss])}"]
    return []


def shapes_text(arrays: Sequence[Any]) -> str:
    """Dtypes and shapes, for people."""
    return ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
