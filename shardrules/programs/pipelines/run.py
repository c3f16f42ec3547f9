"""Runs a schedule on the stages: a loop over its ticks, with work of each stage in each tick.

All devices run the same program. The work of a stage in a tick is a branch, and its operands and results are rows of
buffers: the tables say which. After each tick pairs of stages exchange their results.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardrules.programs.pipelines.leaves import (
    Arrays,
    add,
    add_at,
    at,
    floats,
    is_float,
    of_floats,
    once_if,
    only_if,
    put,
    with_floats,
    zeros,
)
from shardrules.programs.pipelines.schedule import PipelineSchedule
from shardrules.programs.pipelines.simulate import Phase
from shardrules.programs.pipelines.stage import Layers
from shardrules.programs.pipelines.tables import BACKWARD, FORWARD, IDLE, Tables


@final
class Operands(NamedTuple):
    """The operands of a stage: its layers, and all of the rest."""

    layers: Arrays
    """[layers of the stage, ...]."""
    first: Arrays
    last: Arrays
    inputs: Arrays
    """[microbatches, examples, ...], as are targets and cotangents."""
    targets: Arrays
    cotangents: Arrays


@final
class State(NamedTuple):
    outbox: Arrays
    messages: Arrays
    kept: Arrays | None
    layer_gradients: Arrays
    first_gradients: Arrays
    last_gradients: Arrays
    input_gradients: Arrays
    target_gradients: Arrays
    outputs: Arrays
    loss: Any


@final
@attrs.frozen(eq=False)
class Pipeline:
    """Common settings of all runs of a pipeline."""

    axis: str
    schedule: PipelineSchedule
    layer: Callable[[Arrays, Arrays], Arrays]
    counts: tuple[tuple[int, ...], ...]
    """The number of layers of each chunk of each stage."""
    first: Callable[[Arrays, Arrays], Arrays] | None
    loss: Callable[[Arrays, Arrays, Arrays], Any] | None
    weight: float
    """The weight of a microbatch's loss in the gradients."""

    @property
    def in_step(self) -> bool:
        """A stage that waits computes as the others do, for nobody.

        Compilers may write collectives into the inside of a stage that wait for all devices of the mesh.
        """
        return self.schedule.in_step

    @property
    def per_chunk(self) -> int:
        """The most layers of a chunk."""
        return max(map(max, self.counts))


@final
@attrs.frozen(eq=False)
class StageRun:
    """A run of some phases on one stage."""

    pipeline: Pipeline
    phases: Sequence[Phase]
    tables: Tables
    first_tick: int
    """The row of the tables that the phases begin with."""
    keeps: bool
    """Forward passes keep the arrays that backward passes need."""
    operands: Operands
    stage: Any

    @functools.cached_property
    def layers(self) -> Layers:
        counts = self.pipeline.counts
        is_even = all(count == self.pipeline.per_chunk for of_stage in counts for count in of_stage)
        of_stage = None if is_even else jnp.asarray(np.array(counts, np.int32))[self.stage]
        pipeline = self.pipeline
        return Layers(pipeline.layer, self.operands.layers, pipeline.per_chunk, of_stage, pipeline.in_step)

    @functools.cached_property
    def _has_backward(self) -> bool:
        end = self.first_tick + sum(len(phase.ticks) for phase in self.phases)
        return bool((self.tables.kind[self.first_tick : end] == BACKWARD).any())

    def __call__(self, kept: Arrays | None = None) -> State:
        """Runs the phases; `kept` is what forward passes of a run before kept."""
        state = self._initial(kept)
        tick = self.first_tick
        for phase in self.phases:
            state = self._run_phase(state, phase, tick)
            tick += len(phase.ticks)
        return state

    def _initial(self, kept: Arrays | None) -> State:
        pipeline, operands = self.pipeline, self.operands
        message = jax.eval_shape(lambda: self._enter(operands.first, at(operands.inputs, 0)))
        shapes = self.layers.kept(message) if self.keeps or self._has_backward else []
        if kept is None and self.keeps:
            # In step, a stage also computes for nobody: that goes behind the slots that are read.
            kept = zeros(shapes, (self.tables.kept_slots + self.pipeline.in_step) * self.layers.per_chunk)
        parts = operands[:5] if self._has_backward else [[]] * 5
        gradients = [zeros(floats(arrays)) for arrays in parts]
        outputs: Arrays = []
        if pipeline.loss is None and not self._has_backward:
            # The last row is for results that nobody reads.
            outputs = zeros(message, pipeline.schedule.microbatches + 1)
        messages = zeros(message, self.tables.message_slots + 1)
        loss = jnp.zeros((), self._loss_dtype(message))
        return State(zeros(message), messages, kept, *gradients, outputs=outputs, loss=loss)

    def _loss_dtype(self, message: Arrays) -> Any:
        loss, operands = self.pipeline.loss, self.operands
        if loss is None:
            return jnp.float32
        return jax.eval_shape(lambda y: loss(operands.last, y, at(operands.targets, 0)), message).dtype

    def _run_phase(self, state: State, phase: Phase, first_tick: int) -> State:
        """A loop whose rounds have as many ticks as there are turns of exchanges."""
        turns = len(phase.exchanges)
        rounds = -(-len(phase.ticks) // turns)
        columns = self.tables.columns(first_tick, first_tick + len(phase.ticks))
        padding = rounds * turns - len(phase.ticks)
        # Behind the last tick: idle, and what arrives is for nobody.
        fill = {"arrival": self.tables.message_slots}
        tables = {
            name: np.pad(array, ((0, padding), (0, 0)), constant_values=fill.get(name, 0))
            for name, array in columns.items()
        }
        # Kinds of work are known when it is compiled, so that a turn has no branch for others.
        kinds = [set(tables["kind"][turn::turns].flat) for turn in range(turns)]
        busy = {kind: jnp.asarray((tables["kind"] == kind).any(1)) for kind in (FORWARD, BACKWARD)}
        of_stage = {name: jnp.asarray(array)[:, self.stage] for name, array in tables.items()}
        for kind, name in ((FORWARD, "goes_forward"), (BACKWARD, "goes_backward")):
            # In step, all stages take a branch that any of them takes: collectives inside of it have to meet.
            of_stage[name] = busy[kind] if self.pipeline.in_step else of_stage["kind"] == kind
        rows = {name: array.reshape(rounds, turns) for name, array in of_stage.items()}

        def body(state: State, row: dict[str, Any]) -> tuple[State, None]:
            for turn, pairs in enumerate(phase.exchanges):
                now = {name: array[turn] for name, array in row.items()}
                if FORWARD in kinds[turn]:
                    state = once_if(now["goes_forward"], functools.partial(self._forward, now), state)
                if BACKWARD in kinds[turn]:
                    state = once_if(now["goes_backward"], functools.partial(self._backward, now), state)
                if pairs:
                    state = self._exchange(state, pairs, now["arrival"], floats_only=FORWARD not in kinds[turn])
            return state, None

        return lax.scan(body, state, rows)[0]

    def _exchange(self, state: State, pairs: Any, slot: Any, *, floats_only: bool) -> State:
        messages = list(state.messages)
        for index, array in enumerate(state.outbox):
            # Messages of backward passes are cotangents, which only floats have.
            if is_float(array) or not floats_only:
                arrived = lax.ppermute(array, self.pipeline.axis, pairs)
                messages[index] = messages[index].at[slot].set(arrived)
        return state._replace(messages=messages)

    def _enter(self, params: Arrays, inputs: Arrays) -> Arrays:
        return inputs if self.pipeline.first is None else self.pipeline.first(params, inputs)

    def _is_first(self, row: dict[str, Any]) -> Any:
        return (self.stage == 0) & (row["chunk"] == 0) & (row["kind"] != IDLE)

    def _is_last(self, row: dict[str, Any]) -> Any:
        schedule = self.pipeline.schedule
        return (self.stage == schedule.stages - 1) & (row["chunk"] == schedule.chunks - 1) & (row["kind"] != IDLE)

    def _forward(self, row: dict[str, Any], state: State) -> State:
        operands, loss = self.operands, self.pipeline.loss
        x = self._either(
            self._is_first(row),
            lambda: self._enter(operands.first, at(operands.inputs, row["microbatch"])),
            lambda: at(state.messages, row["source"]),
        )
        y, kept = self.layers.forward(x, row["chunk"], state.kept, row["kept"])
        state = state._replace(outbox=y, kept=kept)
        if loss is None:
            # All stages write, and only the last one to rows that are read.
            index = jnp.where(self._is_last(row), row["microbatch"], self.pipeline.schedule.microbatches)
            return state._replace(outputs=put(state.outputs, y, index)) if state.outputs else state
        if self._has_backward:
            # The last output begins the way back, and is kept for that; for others it is a slot that nobody reads.
            return state._replace(messages=put(state.messages, y, row["turning"]))
        targets = at(operands.targets, row["microbatch"])
        (value,) = self._either(
            self._is_last(row), lambda: [loss(operands.last, y, targets)], lambda: [jnp.zeros((), state.loss.dtype)]
        )
        return state._replace(loss=state.loss + value)

    def _either(self, condition: Any, fn: Callable[[], Arrays], other: Callable[[], Arrays]) -> Arrays:
        """The result of one of two functions; in step both are computed."""
        if not self.pipeline.in_step:
            return lax.cond(condition, fn, other)
        return [jnp.where(condition, *pair) for pair in zip(fn(), other(), strict=True)]

    def _once_if(self, condition: Any, fn: Callable[[Any], Any], carry: Any) -> Any:
        """A function of a carry, which adds nothing where it is computed in step for nobody."""
        return fn(carry) if self.pipeline.in_step else once_if(condition, fn, carry)

    def _backward(self, row: dict[str, Any], state: State) -> State:
        message = at(state.messages, row["source"])
        turn = functools.partial(self._turn, message, row)
        cotangent, state = self._once_if(self._is_last(row), turn, (floats(message), state))
        assert state.kept is not None
        cotangent, gradients = self.layers.backward(
            cotangent, row["chunk"], state.kept, row["kept"], state.layer_gradients, row["kind"] == BACKWARD
        )
        state = state._replace(outbox=with_floats(state.outbox, cotangent), layer_gradients=gradients)
        if not state.first_gradients and not state.input_gradients:
            return state
        return self._once_if(self._is_first(row), functools.partial(self._leave, cotangent, row), state)

    def _turn(self, y: Arrays, row: dict[str, Any], carry: tuple[Arrays, State]) -> tuple[Arrays, State]:
        """The cotangent of the output of the last layer."""
        operands, loss, state = self.operands, self.pipeline.loss, carry[1]
        if loss is None:
            rows = at(operands.cotangents, row["microbatch"])
            return self._either(self._is_last(row), lambda: rows, lambda: carry[0]), state
        targets = at(operands.targets, row["microbatch"])
        function, arrays = of_floats(loss, operands.last, y, targets)
        value, pull = jax.vjp(function, *arrays)
        of_last, cotangent, of_targets = pull(jnp.full_like(value, self.pipeline.weight))
        if self.pipeline.in_step:
            is_last = self._is_last(row)
            of_last, of_targets, (value,) = (only_if(is_last, arrays) for arrays in (of_last, of_targets, [value]))
            cotangent = [jnp.where(is_last, *pair) for pair in zip(cotangent, carry[0], strict=True)]
        return cotangent, state._replace(
            loss=state.loss + value,
            last_gradients=add(state.last_gradients, of_last),
            target_gradients=add_at(state.target_gradients, of_targets, row["microbatch"]),
        )

    def _leave(self, cotangent: Arrays, row: dict[str, Any], state: State) -> State:
        operands = self.operands
        function, arrays = of_floats(self._enter, operands.first, at(operands.inputs, row["microbatch"]))
        _, pull = jax.vjp(lambda params, inputs: floats(function(params, inputs)), *arrays)
        of_first, of_inputs = pull(cotangent)
        if self.pipeline.in_step:
            of_first, of_inputs = (only_if(self._is_first(row), arrays) for arrays in (of_first, of_inputs))
        return state._replace(
            first_gradients=add(state.first_gradients, of_first),
            input_gradients=add_at(state.input_gradients, of_inputs, row["microbatch"]),
        )
