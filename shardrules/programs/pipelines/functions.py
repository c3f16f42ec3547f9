"""The functions of a pipeline as functions of lists of arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from shardrules.core.errors import ConfigError
from shardrules.programs.pipelines.leaves import Arrays, Structure, pack


@final
@attrs.frozen(eq=False)
class Functions:
    """A user's functions, of arrays; the structures are of their arguments."""

    layer_function: Callable[[Any, Any], Any]
    first_function: Callable[[Any, Any], Any] | None
    last_function: Callable[..., Any] | None
    layers: Structure
    first_params: Structure
    last_params: Structure
    inputs: Structure
    targets: Structure
    message: Structure
    """The structure of what goes from layer to layer."""

    def layer(self, params: Arrays, x: Arrays) -> Arrays:
        return pack(self.layer_function(self.layers.unpack(params), self.message.unpack(x)))[0]

    def first(self, params: Arrays, inputs: Arrays) -> Arrays:
        if self.first_function is None:
            return inputs
        return pack(self.first_function(self.first_params.unpack(params), self.inputs.unpack(inputs)))[0]

    def last(self, params: Arrays, y: Arrays, targets: Arrays) -> Any:
        assert self.last_function is not None
        arrays = self.last_params.unpack(params), self.message.unpack(y), self.targets.unpack(targets)
        return jnp.asarray(self.last_function(*arrays))


@final
class FunctionError(Exception):
    """A function of the user raised what is its cause; `function` is the argument of `pipeline` that it is."""

    def __init__(self, function: str) -> None:
        super().__init__(function)
        self.function = function


def _traced(name: str, function: Callable[..., Any], *operands: Any) -> tuple[Arrays, Structure, dict[str, Arrays]]:
    """The shapes that a function returns, their structure, and under its name the traced arrays that it closes over."""
    structures = []

    @functools.wraps(function)
    def run(*operands: Any) -> Arrays:
        arrays, structure = pack(function(*operands))
        structures.append(structure)
        return arrays

    try:
        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*operands)
    except Exception as error:
        raise FunctionError(name) from error
    return shapes, structures[0], {name: [array for array in jaxpr.consts if isinstance(array, Tracer)]}


def refuse_derivatives(closed: dict[str, Arrays]) -> None:
    """Raises a `ConfigError` wherever JAX differentiates by arrays that functions close over.

    Schedules compute gradients of what functions get, and not of what they close over.
    """
    for name, arrays in closed.items():
        if arrays:
            _without_derivative(name)(*arrays)


def _without_derivative(name: str) -> Callable[..., Any]:
    @jax.custom_jvp
    def same(*arrays: Any) -> Any:
        return arrays

    def refuse(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moved = [
            primal for primal, tangent in zip(primals, tangents, strict=True) if not isinstance(tangent, SymbolicZero)
        ]
        if moved:
            shapes = shapes_text([jax.typeof(array) for array in moved])
            raise ConfigError(
                f"pipeline: {name} closes over {shapes} that a gradient is taken of; pass it in the parameters of "
                f"{name} (of layer with the layers first), or close over jax.lax.stop_gradient of it"
            )
        return primals, tangents

    same.defjvp(refuse, symbolic_zeros=True)
    return same


def message_structure(
    function: Callable[[Any, Any], Any] | None, params: Structure, inputs: Structure, operands: Sequence[Arrays]
) -> Structure:
    """The structure of what the first layer gets."""
    if function is None:
        return inputs
    return _traced("first", lambda *arrays: function(params.unpack(arrays[0]), inputs.unpack(arrays[1])), *operands)[1]


def result_problems(
    functions: Functions, layer: Arrays, first: Arrays, last: Arrays, rows: Sequence[Arrays]
) -> tuple[list[str], dict[str, Arrays]]:
    """The problems in the functions' results, for a layer, and a microbatch of inputs and targets; and the traced
    arrays that each function closes over."""
    inputs, targets = rows
    message, _, closed = _traced("first", functions.first, first, inputs)

    def run(params: Arrays, x: Arrays) -> Any:
        return functions.layer_function(functions.layers.unpack(params), functions.message.unpack(x))

    out, structure, of_layer = _traced("layer", run, layer, message)
    closed |= of_layer
    gets, returns = shapes_text(message), shapes_text(out)
    trees = functions.message.treedef, structure.treedef
    if gets != returns or trees[0] != trees[1]:
        text = f"layer must return what it gets: it gets {gets} in {trees[0]}, and returns {returns} in {trees[1]}"
        return [text], closed
    if functions.last_function is None:
        return [], closed
    (loss,), _, of_last = _traced("last", functions.last, last, message, targets)
    closed |= of_last
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        return [f"last must return one float, the loss of a microbatch, got {shapes_text([loss])}"], closed
    return [], closed


def shapes_text(arrays: Sequence[Any]) -> str:
    return ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
