"""The layers of a stage, forward and backward, one by one; what the backward pass needs goes into slots."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from shardrules.core.keys import is_key
from shardrules.programs.pipelines.leaves import (
    Arrays,
    add_at,
    as_others,
    at,
    floats,
    of_floats,
    once_if,
    only_if,
    put,
)

_Source: TypeAlias = Callable[[Arrays, Arrays], Any]
"""From parameters and kept arrays to an array that a derivative needs."""


def _source(leaf: Any, params: Arrays, kept: Arrays) -> _Source:
    """The source of a leaf; other leaves than parameters and constants are added to the kept arrays."""
    if not isinstance(leaf, Tracer):
        return lambda params, kept: leaf
    # Parameters are there in the backward pass anyway; of other arrays each is kept once.
    for index, param in enumerate(params):
        if param is leaf:
            return lambda params, kept, index=index: params[index]
    place = next((index for index, array in enumerate(kept) if array is leaf), len(kept))
    if place == len(kept):
        kept.append(leaf)
    if is_key(leaf.dtype):
        key_type = jax.random.key_impl(leaf)
        return lambda params, kept: jax.random.wrap_key_data(kept[place], impl=key_type)
    return lambda params, kept: kept[place]


@final
@attrs.define(eq=False)
class Layers:
    """The layers of a stage. What `jax.vjp` keeps of a layer besides its parameters goes into slots."""

    apply: Callable[[Arrays, Arrays], Arrays]
    """From the parameters and the input of a layer to its output."""
    params: Arrays
    """Of all layers of the stage, chunk after chunk."""
    per_chunk: int
    counts: Any
    """The number of layers of each chunk, if these differ, else `None`."""
    in_step: bool = False
    """Layers that a chunk does not have are computed, too, for nobody."""
    _treedef: Any = None
    _sources: list[_Source] = attrs.field(factory=list)

    def kept(self, x: Sequence[Any]) -> Arrays:
        """The shapes of what a forward pass keeps of a layer."""
        params = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in self.params]
        return jax.eval_shape(lambda params, x: self._forward(params, x)[1], params, list(x))

    def forward(self, x: Arrays, chunk: Any, buffers: Arrays | None, slot: Any) -> tuple[Arrays, Arrays | None]:
        """The output of a chunk, and the buffers with what the backward pass needs."""

        def body(index: Any, carry: tuple[Arrays, Arrays | None]) -> tuple[Arrays, Arrays | None]:
            x, buffers = carry
            params = at(self.params, chunk * self.per_chunk + index)
            if buffers is None:
                return as_others(self.apply(params, x), x), None
            y, kept = self._forward(params, x)
            return y, put(buffers, kept, slot * self.per_chunk + index)

        return self._loop(chunk, body, (x, buffers), is_backward=False)

    def backward(
        self, cotangent: Arrays, chunk: Any, buffers: Arrays, slot: Any, gradients: Arrays, counts: Any = True
    ) -> tuple[Arrays, Arrays]:
        """The cotangent of the input of a chunk, and the gradients with its layers' added, if these count."""

        def body(index: Any, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            cotangent, gradients = carry
            layer = chunk * self.per_chunk + index
            of_params, of_x = self._backward(
                at(self.params, layer), at(buffers, slot * self.per_chunk + index), cotangent
            )
            is_layer = True if self.counts is None else index < self.counts[chunk]
            of_params = only_if(counts & is_layer, of_params) if self.in_step else of_params
            return of_x, add_at(gradients, of_params, layer)

        return self._loop(chunk, body, (cotangent, gradients), is_backward=True)

    def _loop(self, chunk: Any, body: Callable[[Any, Any], Any], carry: Any, *, is_backward: bool) -> Any:
        last = self.per_chunk - 1

        def step(carry: Any, position: Any) -> tuple[Any, None]:
            index = last - position if is_backward else position
            if self.counts is None:
                return body(index, carry), None
            if self.in_step:
                is_layer, following = index < self.counts[chunk], body(index, carry)
                # In step, layers that a chunk lacks are computed, and dropped here.
                return (
                    [jnp.where(is_layer, *pair) for pair in zip(following[0], carry[0], strict=True)],
                    following[1],
                ), None
            return once_if(index < self.counts[chunk], lambda carry: body(index, carry), carry), None

        return lax.scan(step, carry, jnp.arange(self.per_chunk, dtype=jnp.int32))[0]

    def _forward(self, params: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        """The output of a layer, and what its derivative needs besides its parameters."""

        def run(params: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
            y = as_others(self.apply(params, x), x)
            return floats(y), y

        function, operands = of_floats(run, params, x)
        _, pull, y = jax.vjp(function, *operands, has_aux=True)
        # The function of `jax.vjp` is a pytree of what it keeps: the backward pass puts it together from its sources.
        leaves, self._treedef = jax.tree.flatten(pull)
        kept: Arrays = []
        self._sources = [_source(leaf, params, kept) for leaf in leaves]
        return y, [jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf for leaf in kept]

    def _backward(self, params: Arrays, kept: Arrays, cotangent: Arrays) -> tuple[Arrays, Arrays]:
        leaves = [source(params, kept) for source in self._sources]
        return jax.tree.unflatten(self._treedef, leaves)(cotangent)
