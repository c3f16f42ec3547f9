"""A loop over layers in stages: microbatches go from one group of layers to the next.

The stages are a dim of ordinary arrays: in each tick all of them compute, each with its own microbatch, and hand on
what they computed. Split over a mesh axis, each device has its own stage, and what is handed on is sent. So plans
split, price and keep these arrays like all others, and the backward pass is the derivative of the loop.

Microbatches wait in queues: the first `1 / stages` of them with the first stage, and so on. When the first stage takes
one out of its queue, the others send theirs one stage on, and the last stage puts in what it has computed.

With chunks, a stage has several groups of layers that do not follow each other. As many microbatches as there are
stages go round as often as there are chunks: then the first stage takes the next out of its queue.
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

from shardrules.core.axes import mesh_sizes
from shardrules.core.context import current_mesh
from shardrules.core.keys import is_key
from shardrules.programs.jaxprs.bodies import scan_of
from shardrules.programs.regions.region import region
from shardrules.programs.training.accumulation import accumulation_dtype
from shardrules.programs.training.stages.layers import LayerLoop

STAGE_AXIS = "stage"
"""The mesh axis of the stages."""


def tick_count(stages: int, microbatches: int, chunks: int = 1) -> int:
    """The ticks in which all microbatches go through all chunks of all stages."""
    return chunks * microbatches + stages - 1


@final
@attrs.frozen(eq=False)
class StagedProgram:
    """The program of a microbatch, run for all microbatches of a batch, with its layers in stages."""

    program: ClosedJaxpr
    """With a loop for its layers."""
    batched: Sequence[bool]
    """The inputs that are a microbatch's."""
    stages: int
    microbatches: int
    """As many for each stage."""
    chunks: int = 1
    """The number of groups of layers that a stage has."""
    dtype: Any = None
    """The dtype in which gradients of layers add up; by default at least float32."""

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
        # Without a batched operand `jax.vmap` would refuse, and a shared array runs once.
        dims = [0 if var in self.loop.by_microbatch else None for var in body.invars]
        if any(dim == 0 for dim in dims):
            run = jax.vmap(run, tuple(dims), [0 if var in self.loop.by_microbatch else None for var in results])
        return dict(zip(results, run(*(values[var] for var in body.invars)), strict=True))

    def _layers(self, values: dict[Any, Any]) -> list[Any]:
        equation = self.loop.equation
        loop = scan_of(equation)
        operands = [self._read(var, values) for var in equation.invars]
        consts = [(self._summing(array, is_shared), is_shared) for array, is_shared in operands[loop.consts]]
        carry = operands[loop.carry]
        pieces = [
            (self._summing(self._by_stage(*operand), operand[1]), operand[1]) for operand in operands[loop.pieces]
        ]
        waiting = [self._queue(*operand) for operand in carry]
        # What stages compute before a microbatch reaches them is for nobody. From arrays of the batch it is finite.
        before = [jnp.broadcast_to(queue[:1, 0], (self.stages, *queue.shape[2:])) for queue in waiting]

        def tick(state: tuple[list[Any], list[Any]], index: Any) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
            outputs, queues = state
            heads = self._heads(queues, self._entered(index))
            inputs = [on_stages(self._arriving(index, *pair)) for pair in zip(outputs, heads, strict=True)]
            outputs, stacked = self._run_stages(inputs, *self._visits(index), consts, pieces)
            last = self._entered(index + 1) - 1
            heads = heads if self.chunks == 1 else self._heads(queues, last)
            heads = [on_stages(self._moved_up(index, *pair)) for pair in zip(outputs, heads, strict=True)]
            place = lax.rem(last, jnp.int32(self._length))
            queues = [
                lax.dynamic_update_index_in_dim(queue, head, place, 1)
                for queue, head in zip(queues, heads, strict=True)
            ]
            return (outputs, queues), stacked

        ticks = jnp.arange(tick_count(self.stages, self.microbatches, self.chunks), dtype=jnp.int32)
        (_, queues), stacked = lax.scan(tick, (before, waiting), ticks)
        return [*map(self._results, queues), *map(self._stacked, stacked)]

    def _entered(self, tick: Any) -> Any:
        """The number of microbatches that have come to the first stage for the first time before a tick."""
        if self.chunks == 1:
            return tick
        turn, rest = _divided(tick, self.stages * self.chunks)
        return turn * self.stages + jnp.minimum(rest, self.stages)

    def _enters(self, tick: Any) -> Any:
        """Another comes in this tick."""
        return lax.rem(tick, jnp.int32(self.stages * self.chunks)) < self.stages

    def _visits(self, tick: Any) -> tuple[Any, Any]:
        """The microbatch of each stage in a tick, and its chunk."""
        visit = jnp.clip(tick - jnp.arange(self.stages), 0, self.chunks * self.microbatches - 1)
        if self.chunks == 1:
            return visit, None
        turn, rest = _divided(visit, self.stages * self.chunks)
        chunk, place = _divided(rest, self.stages)
        return turn * self.stages + place, chunk

    def _heads(self, queues: Sequence[Any], count: Any) -> list[Any]:
        """The heads of queues after so many microbatches."""
        place = lax.rem(count, jnp.int32(self._length))
        return [on_stages(lax.dynamic_index_in_dim(queue, place, 1, keepdims=False)) for queue in queues]

    def _arriving(self, tick: Any, outputs: Any, heads: Any) -> Any:
        """The inputs of stages: the head of its queue for the first, the outputs of the stage before for the others.

        With chunks the first gets the outputs of the last, if no other microbatch comes.
        """
        if self.chunks == 1:
            return _exchanged(stage_inputs, outputs, heads)
        is_head = self._enters(tick) & (jnp.arange(self.stages) == 0)
        return _where(is_head, heads, _exchanged(stage_ring, outputs))

    def _moved_up(self, tick: Any, outputs: Any, heads: Any) -> Any:
        """The heads of queues one stage on; the last is what the last stage has computed.

        With chunks they stay where it has not been through all of them.
        """
        moved = _exchanged(stage_queues, outputs, heads)
        return moved if self.chunks == 1 else jnp.where(self._enters(tick + 1), moved, heads)

    @property
    def _length(self) -> int:
        """The number of microbatches that wait with each stage."""
        return self.microbatches // self.stages

    @property
    def _stage_dim(self) -> int:
        """The dim of the pieces of layers that has the stages."""
        return 1 if self.chunks == 1 else 2

    @property
    def _place_count(self) -> int:
        """The number of layers that all stages have room for."""
        return self._depth * self.chunks * self.stages

    @property
    def _depth(self) -> int:
        return -(-self.loop.layer_count // (self.chunks * self.stages))

    def _run_stages(
        self,
        inputs: Sequence[Any],
        microbatch: Any,
        chunk: Any,
        consts: Sequence[tuple[Any, bool]],
        pieces: Sequence[tuple[Any, bool]],
    ) -> tuple[list[Any], list[Any]]:
        """Runs each stage with its microbatch and chunk, layer by layer."""
        run = jaxpr_as_fun(scan_of(self.loop.equation).body)
        count = len(inputs)

        def of_stages(array: Any, is_shared: bool) -> Any:
            return array if is_shared else on_stages(jnp.take(array, microbatch, axis=0))

        const_arrays = [of_stages(*const) for const in consts]
        dims = [None if is_shared else 0 for _, is_shared in consts] + [0] * (count + len(pieces))

        def layer(*operands: Any) -> list[Any]:
            return run(*map(_read, operands))

        mapped = jax.vmap(layer, tuple(dims), spmd_axis_name=STAGE_AXIS if _has_stages() else None)
        is_layer = self._in_places(np.arange(self._place_count) < self.loop.layer_count, 0)
        is_full = bool(is_layer.all())

        def step(carry: list[Any], row: tuple[list[Any], Any]) -> tuple[list[Any], list[Any]]:
            arrays, exists = row if chunk is None else jax.tree.map(lambda array: _picked(array, chunk), row)
            results = mapped(*const_arrays, *carry, *arrays)
            # A place without a layer hands on what it got.
            following = [
                array if is_full else _where(exists, array, before)
                for array, before in zip(results[:count], carry, strict=True)
            ]
            return following, results[count:]

        rows = [array if is_shared else _picked(array, microbatch, self._stage_dim) for array, is_shared in pieces]
        return lax.scan(step, list(inputs), (rows, jnp.asarray(is_layer)))

    def _summing(self, array: Any, is_shared: bool) -> Any:
        """An array that all ticks read, such as a weight, so that its gradients add up in the dtype for sums."""
        wide = accumulation_dtype(array.dtype, self.dtype)
        if not is_shared or not jnp.issubdtype(array.dtype, jnp.inexact) or wide == array.dtype:
            return array
        return _Summing(lax.stop_gradient(array), array.astype(wide))

    def _by_stage(self, array: Any, is_shared: bool) -> Any:
        """Pieces of layers as `_in_places` has them; with microbatches as [microbatches, ...].

        Where stages have more places than there are layers, the last layer fills them.
        """
        dim = 0 if is_shared else 1
        missing = self._place_count - self.loop.layer_count
        if missing:
            last = lax.slice_in_dim(array, self.loop.layer_count - 1, self.loop.layer_count, axis=dim)
            array = jnp.concatenate([array, *[last] * missing], dim)
        array = self._in_places(array, dim)
        return on_stages(array, self._stage_dim) if is_shared else array

    def _in_places(self, array: Any, dim: int) -> Any:
        """An array with a dim of layers as [layers of a chunk, chunks, stages], without the chunks if there is one."""
        sizes = (self.chunks, self.stages, self._depth) if self.chunks > 1 else (self.stages, self._depth)
        array = array.reshape(*array.shape[:dim], *sizes, *array.shape[dim + 1 :])
        dims = [*range(array.ndim)]
        dims.insert(dim, dims.pop(dim + self._stage_dim))
        return array.transpose(dims)

    def _queue(self, array: Any, is_shared: bool) -> Any:
        """The arrays that microbatches start with, as [stages, microbatches that wait there, ...]."""
        if is_shared:
            array = jnp.broadcast_to(array, (self.microbatches, *jnp.shape(array)))
        return on_stages(array.reshape(self.stages, self._length, *array.shape[1:]))

    def _results(self, queue: Any) -> Any:
        """The arrays that microbatches end with, in their order."""
        shift = (self.stages - 1) % self._length
        return jnp.roll(queue, -shift, 1).reshape(self.microbatches, *queue.shape[2:])

    def _stacked(self, array: Any) -> Any:
        """The arrays that layers stacked, [ticks, layers of a stage, stages, ...], by microbatch and layer."""
        stages = np.arange(self.stages)
        turn, place = np.divmod(np.arange(self.microbatches), self.stages if self.chunks > 1 else self.microbatches)
        visits = (turn * self.chunks * self.stages + place)[:, None] + self.stages * np.arange(self.chunks)
        rows = array.swapaxes(1, 2)[visits[..., None] + stages, stages]
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
    """An array with the gradient of `total`."""
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


def _picked(array: Any, indices: Any, stage_dim: int = 0) -> Any:
    """Of [rows, ..., stages, ...] the row of each stage by its index, where `stage_dim` is the dim of rows' stages."""
    return jax.vmap(lambda index, column: column[index], (0, stage_dim + 1), stage_dim)(indices, array)


def _divided(number: Any, by: int) -> tuple[Any, Any]:
    """A number that is not negative, divided, and the rest."""
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


def _where(condition: Any, array: Any, other: Any) -> Any:
    return jnp.where(condition.reshape(condition.shape + (1,) * (array.ndim - condition.ndim)), array, other)


def _exchanged(exchange: Callable[..., Any], *arrays: Any) -> Any:
    first = arrays[0]
    if not is_key(first.dtype):
        return _region_of(exchange, len(arrays), first.ndim)(*arrays)
    data = [jax.random.key_data(keys) for keys in arrays]
    return jax.random.wrap_key_data(_exchanged(exchange, *data), impl=jax.random.key_impl(first))


@functools.cache
def _region_of(exchange: Callable[..., Any], count: int, ndim: int) -> Callable[..., Any]:
    dims = [f"dim{index}" for index in range(1, ndim)]
    array = " ".join(["stage", *dims])
    return region(f"{', '.join([array] * count)} -> {array}", split=" ".join(dims), exchange="stage")(exchange)


def is_stage_exchange(name: str) -> bool:
    """The name is of one of these regions, or of its backward pass."""
    return name.removesuffix("_backward") in {each.__name__ for each in (stage_inputs, stage_ring, stage_queues)}


def stage_inputs(outputs: Any, heads: Any, *, axis_name: Any) -> Any:
    first, last = heads[:1], outputs[-1:]
    if axis_name is not None:
        arrived = lax.ppermute(last, axis_name, [(index, index + 1) for index in range(lax.axis_size(axis_name) - 1)])
        first = jnp.where(lax.axis_index(axis_name) == 0, first, arrived)
    return jnp.concatenate([first, outputs[:-1]])


def stage_ring(outputs: Any, *, axis_name: Any) -> Any:
    last = outputs[-1:]
    if axis_name is not None:
        count = lax.axis_size(axis_name)
        last = lax.ppermute(last, axis_name, [(index, (index + 1) % count) for index in range(count)])
    return jnp.concatenate([last, outputs[:-1]])


def stage_queues(outputs: Any, heads: Any, *, axis_name: Any) -> Any:
    last, first = outputs[-1:], heads[:1]
    if axis_name is not None:
        count = lax.axis_size(axis_name)
        arrived = lax.ppermute(first, axis_name, [(index + 1, index) for index in range(count - 1)])
        last = jnp.where(lax.axis_index(axis_name) == count - 1, last, arrived)
    return jnp.concatenate([heads[1:], last])
