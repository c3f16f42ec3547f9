"""A loop over layers in stages: microbatches go from one group of layers to the next.

The stages are a dim of ordinary arrays: in each tick all of them compute, each with its own microbatch, and hand on
what they computed. Split over a mesh axis, each device has its own stage, and what is handed on is sent. So plans
split, price and keep these arrays like all others, and the backward pass is the derivative of the loop.

Microbatches wait in queues: the first `1 / stages` of them with the first stage, and so on. In each tick the first
stage takes one out of its queue, the others send theirs one stage on, and the last stage puts in what it has computed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from shardrules.analysis.compiling.jaxprs import scan_counts
from shardrules.core.axes import mesh_sizes
from shardrules.core.context import current_mesh
from shardrules.core.keys import is_key
from shardrules.regions.region import region
from shardrules.training.accumulation import accumulation_dtype
from shardrules.training.stages.layers import LayerLoop

STAGE_AXIS = "stage"
"""The mesh axis of the stages."""


def tick_count(stages: int, microbatches: int) -> int:
    """In how many ticks all microbatches have gone through all stages."""
    return microbatches + stages - 1


@final
@attrs.frozen(eq=False)
class StagedProgram:
    """The program of a microbatch, run for all microbatches of a batch, with its layers in stages."""

    program: ClosedJaxpr
    batched: Sequence[bool]
    """Which inputs are those of a microbatch."""
    stages: int
    microbatches: int
    """As many for each stage."""
    dtype: Any = None
    """What gradients of layers add up in; by default at least float32."""

    def summed(self, count: int) -> Callable[..., list[Any]]:
        """A function that returns the sums of the first results over the microbatches, and the others stacked."""

        def run(*inputs: Any) -> list[Any]:
            results = self(*inputs)
            wide = [accumulation_dtype(array.dtype) for array in results[:count]]
            sums = [
                jnp.sum(array, 0, dtype=dtype).astype(array.dtype) for array, dtype in zip(results, wide, strict=False)
            ]
            return [*sums, *results[count:]]

        return run

    @functools.cached_property
    def loop(self) -> LayerLoop:
        """The layers."""
        return LayerLoop.of(self.program, self.batched)

    def __call__(self, *inputs: Any) -> list[Any]:
        """The results of all microbatches, stacked, from their inputs, stacked as well."""
        jaxpr, loop = self.program.jaxpr, self.loop
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= dict(zip(jaxpr.constvars, self.program.consts, strict=True))
        values |= self._run(loop.before, values)
        values |= dict(zip(loop.equation.outvars, self._layers(values), strict=True))
        values |= self._run(loop.after, values)
        return [
            jnp.broadcast_to(value, (self.microbatches, *jnp.shape(value))) if is_shared else value
            for value, is_shared in (self._read(var, values) for var in jaxpr.outvars)
        ]

    def _read(self, var: Any, values: dict[Any, Any]) -> tuple[Any, bool]:
        """An operand, and whether it is the same for all microbatches."""
        return (var.val, True) if isinstance(var, Literal) else (values[var], var not in self.loop.by_microbatch)

    def _run(self, body: Jaxpr, values: dict[Any, Any]) -> dict[Any, Any]:
        """Runs equations: once for each microbatch what differs between them, once for all what does not."""
        computed = dict.fromkeys(var for equation in body.eqns for var in equation.outvars)
        results = [var for var in dict.fromkeys(body.outvars) if not isinstance(var, Literal) and var in computed]
        run = jaxpr_as_fun(ClosedJaxpr(body.replace(outvars=results), ()))
        dims = [0 if var in self.loop.by_microbatch else None for var in body.invars]
        if any(dim == 0 for dim in dims):
            run = jax.vmap(run, tuple(dims), [0 if var in self.loop.by_microbatch else None for var in results])
        return dict(zip(results, run(*(values[var] for var in body.invars)), strict=True))

    def _layers(self, values: dict[Any, Any]) -> list[Any]:
        """Runs the layers, tick by tick."""
        equation = self.loop.equation
        const_count, carry_count = scan_counts(equation.params)
        operands = [self._read(var, values) for var in equation.invars]
        first_piece = const_count + carry_count
        consts = [(self._summing(array, is_shared), is_shared) for array, is_shared in operands[:const_count]]
        carry = operands[const_count:first_piece]
        pieces = [
            (self._summing(self._by_stage(*operand), operand[1]), operand[1]) for operand in operands[first_piece:]
        ]
        waiting = [self._queue(*operand) for operand in carry]
        # What stages compute before a microbatch reaches them is for nobody. From arrays of the batch it is finite.
        before = [jnp.broadcast_to(queue[:1, 0], (self.stages, *queue.shape[2:])) for queue in waiting]

        def tick(state: tuple[list[Any], list[Any]], index: Any) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
            outputs, queues = state
            place = lax.rem(index, jnp.int32(self._length))
            heads = [on_stages(lax.dynamic_index_in_dim(queue, place, 1, keepdims=False)) for queue in queues]
            inputs = [on_stages(_arriving(*pair)) for pair in zip(outputs, heads, strict=True)]
            microbatch = jnp.clip(index - jnp.arange(self.stages), 0, self.microbatches - 1)
            outputs, stacked = self._run_stages(inputs, microbatch, consts, pieces)
            heads = [on_stages(_moved_up(*pair)) for pair in zip(outputs, heads, strict=True)]
            queues = [
                lax.dynamic_update_index_in_dim(queue, head, place, 1)
                for queue, head in zip(queues, heads, strict=True)
            ]
            return (outputs, queues), stacked

        ticks = jnp.arange(tick_count(self.stages, self.microbatches), dtype=jnp.int32)
        (_, queues), stacked = lax.scan(tick, (before, waiting), ticks)
        return [*map(self._results, queues), *map(self._stacked, stacked)]

    @property
    def _length(self) -> int:
        """How many microbatches wait with each stage."""
        return self.microbatches // self.stages

    @property
    def _depth(self) -> int:
        """How many layers a stage has."""
        return -(-self.loop.layer_count // self.stages)

    def _run_stages(
        self,
        inputs: Sequence[Any],
        microbatch: Any,
        consts: Sequence[tuple[Any, bool]],
        pieces: Sequence[tuple[Any, bool]],
    ) -> tuple[list[Any], list[Any]]:
        """Runs each stage with its microbatch, layer by layer."""
        run = jaxpr_as_fun(self.loop.equation.params["jaxpr"])
        count = len(inputs)

        def of_stages(array: Any, is_shared: bool) -> Any:
            return array if is_shared else on_stages(jnp.take(array, microbatch, axis=0))

        const_arrays = [of_stages(*const) for const in consts]
        dims = [None if is_shared else 0 for _, is_shared in consts] + [0] * (count + len(pieces))

        def layer(*operands: Any) -> list[Any]:
            return run(*map(_read, operands))

        mapped = jax.vmap(layer, tuple(dims), spmd_axis_name=STAGE_AXIS if _has_stages() else None)
        numbers = np.arange(self._depth)[:, None] + self._depth * np.arange(self.stages)
        is_layer = numbers < self.loop.layer_count
        is_full = bool(is_layer.all())

        def step(carry: list[Any], row: tuple[list[Any], Any]) -> tuple[list[Any], list[Any]]:
            arrays, exists = row
            results = mapped(*const_arrays, *carry, *arrays)
            following = [
                array if is_full else _where(exists, array, before)
                for array, before in zip(results[:count], carry, strict=True)
            ]
            return following, results[count:]

        rows = [array if is_shared else jnp.moveaxis(_picked(array, microbatch), 0, 1) for array, is_shared in pieces]
        return lax.scan(step, list(inputs), (rows, jnp.asarray(is_layer)))

    def _summing(self, array: Any, is_shared: bool) -> Any:
        """What all ticks read, such as weights, so that its gradients add up in the dtype for sums."""
        wide = accumulation_dtype(array.dtype, self.dtype)
        if not is_shared or not jnp.issubdtype(array.dtype, jnp.inexact) or wide == array.dtype:
            return array
        return _Summing(lax.stop_gradient(array), array.astype(wide))

    def _by_stage(self, array: Any, is_shared: bool) -> Any:
        """Pieces of layers as [layers of a stage, stages, ...], or with the microbatches of each stage first.

        Where stages have more places than there are layers, the last layer fills them.
        """
        dim = 0 if is_shared else 1
        missing = self._depth * self.stages - self.loop.layer_count
        if missing:
            last = lax.slice_in_dim(array, self.loop.layer_count - 1, self.loop.layer_count, axis=dim)
            array = jnp.concatenate([array, *[last] * missing], dim)
        shape = (*array.shape[:dim], self.stages, self._depth, *array.shape[dim + 1 :])
        array = array.reshape(shape)
        return on_stages(array.swapaxes(0, 1), 1) if is_shared else array

    def _queue(self, array: Any, is_shared: bool) -> Any:
        """What microbatches start with, as [stages, microbatches that wait there, ...]."""
        if is_shared:
            array = jnp.broadcast_to(array, (self.microbatches, *jnp.shape(array)))
        return on_stages(array.reshape(self.stages, self._length, *array.shape[1:]))

    def _results(self, queue: Any) -> Any:
        """What microbatches end with, in their order."""
        shift = (self.stages - 1) % self._length
        return jnp.roll(queue, -shift, 1).reshape(self.microbatches, *queue.shape[2:])

    def _stacked(self, array: Any) -> Any:
        """What layers stacked, [ticks, layers of a stage, stages, ...], by microbatch and layer."""
        stages = np.arange(self.stages)
        ticks = np.arange(self.microbatches)[:, None] + stages
        rows = array.swapaxes(1, 2)[ticks, stages]
        return rows.reshape(self.microbatches, -1, *array.shape[3:])[:, : self.loop.layer_count]


@final
class _Summing(NamedTuple):
    """An array, and the same in the dtype in which its gradients add up: only the gradient of that is used."""

    array: Any
    total: Any


def _read(array: Any) -> Any:
    return _with_gradient(*array) if isinstance(array, _Summing) else array


@jax.custom_vjp
def _with_gradient(array: Any, total: Any) -> Any:
    """An array whose gradient is that of `total`."""
    del total
    return array


def _with_gradient_forward(array: Any, total: Any) -> tuple[Any, Any]:
    return array, jnp.zeros((), total.dtype)


def _with_gradient_backward(zero: Any, gradient: Any) -> tuple[None, Any]:
    return None, gradient.astype(zero.dtype)


_with_gradient.defvjp(_with_gradient_forward, _with_gradient_backward)


def on_stages(array: Any, dim: int = 0) -> Any:
    """An array whose dim of stages is split over their mesh axis, if there is one."""
    if not _has_stages():
        return array
    entries = [STAGE_AXIS if index == dim else PartitionSpec.UNCONSTRAINED for index in range(array.ndim)]
    return lax.with_sharding_constraint(array, PartitionSpec(*entries))


def _has_stages() -> bool:
    mesh = current_mesh()
    return mesh is not None and mesh_sizes(mesh).get(STAGE_AXIS, 1) > 1


def _picked(array: Any, microbatch: Any) -> Any:
    """Of [microbatches, stages, ...] the row of each stage for its microbatch."""
    return jax.vmap(lambda index, column: column[index], (0, 1))(microbatch, array)


def _where(condition: Any, array: Any, other: Any) -> Any:
    return jnp.where(condition.reshape(condition.shape + (1,) * (array.ndim - condition.ndim)), array, other)


def _arriving(outputs: Any, heads: Any) -> Any:
    """What stages get: the first what waits at its head, the others what the stage before has computed."""
    return _exchanged(stage_inputs, outputs, heads)


def _moved_up(outputs: Any, heads: Any) -> Any:
    """The heads of queues one stage on; the last is what the last stage has computed."""
    return _exchanged(stage_queues, outputs, heads)


def _exchanged(exchange: Callable[..., Any], outputs: Any, heads: Any) -> Any:
    if not is_key(outputs.dtype):
        return _region_of(exchange, outputs.ndim)(outputs, heads)
    data = [jax.random.key_data(keys) for keys in (outputs, heads)]
    return jax.random.wrap_key_data(_exchanged(exchange, *data), impl=jax.random.key_impl(outputs))


@functools.cache
def _region_of(exchange: Callable[..., Any], ndim: int) -> Callable[..., Any]:
    dims = [f"dim{index}" for index in range(1, ndim)]
    array = " ".join(["stage", *dims])
    return region(f"{array}, {array} -> {array}", split=" ".join(dims), exchange="stage")(exchange)


def is_stage_exchange(name: str) -> bool:
    """Whether the region of a name is one of these, or its backward pass."""
    return name.removesuffix("_backward") in (stage_inputs.__name__, stage_queues.__name__)


def stage_inputs(outputs: Any, heads: Any, *, axis_name: Any) -> Any:
    first, last = heads[:1], outputs[-1:]
    if axis_name is not None:
        arrived = lax.ppermute(last, axis_name, [(index, index + 1) for index in range(lax.axis_size(axis_name) - 1)])
        first = jnp.where(lax.axis_index(axis_name) == 0, first, arrived)
    return jnp.concatenate([first, outputs[:-1]])


def stage_queues(outputs: Any, heads: Any, *, axis_name: Any) -> Any:
    last, first = outputs[-1:], heads[:1]
    if axis_name is not None:
        count = lax.axis_size(axis_name)
        arrived = lax.ppermute(first, axis_name, [(index + 1, index) for index in range(count - 1)])
        last = jnp.where(lax.axis_index(axis_name) == count - 1, last, arrived)
    return jnp.concatenate([heads[1:], last])
