"""Runs of a pipeline on the devices of a mesh, and their derivatives.

A stage computes with its part of the arrays, in `jax.shard_map` over the axes of the pipeline and of the batch; over
other axes of the mesh the compiler splits a stage as it splits any function. The derivative is not the loop's: a
schedule says itself when a stage computes backward.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardrules.core.jax_state import jit, shard_map
from shardrules.programs.pipelines.leaves import Arrays, is_float
from shardrules.programs.pipelines.run import Operands, Pipeline, StageRun, State
from shardrules.programs.pipelines.simulate import Phase
from shardrules.programs.pipelines.tables import tables


@final
class StageResults(NamedTuple):
    """The results of a run; empty if not requested."""

    value: Any
    """The loss, or the outputs of the last layer."""
    kept: Arrays
    gradients: Operands | None


@final
@attrs.frozen(eq=False)
class Stages:
    pipeline: Pipeline
    mesh: Any
    batch: tuple[str, ...]
    """Mesh axes that the examples of each microbatch are split over."""

    def __call__(self, operands: Operands) -> Any:
        trained, rest = eqx.partition(operands, is_float)
        structure = jax.tree.structure(trained)

        @jax.custom_vjp
        def run(trained: Operands, rest: Operands) -> Any:
            return self._value(eqx.combine(trained, rest))

        def forward(trained: Operands, rest: Operands) -> tuple[Any, Any]:
            value, saved = self._forward(eqx.combine(trained, rest))
            return value, (saved, rest)

        def backward(saved: Any, cotangent: Any) -> tuple[Operands, Operands]:
            saved, rest = saved
            gradients = jax.tree.leaves(self._backward(saved, cotangent))
            zeros = jax.tree.map(lambda array: np.zeros(array.shape, jax.dtypes.float0), rest)
            return jax.tree.unflatten(structure, gradients), zeros

        run.defvjp(forward, backward)
        return run(trained, rest)

    @property
    def _turns_inside(self) -> bool:
        """The loss is computed in the pipeline, so that gradients are known with it."""
        return self.pipeline.loss is not None

    def _value(self, operands: Operands) -> Any:
        return self._run(self.pipeline.schedule.forward_only(), operands).value

    def _forward(self, operands: Operands) -> tuple[Any, Any]:
        phases = self.pipeline.schedule.phases
        if self._turns_inside:
            results = self._run(phases, operands, keeps=True, has_gradients=True)
            return results.value, results.gradients
        if len(phases) == 1:  # forward and backward in one phase: all of it is in the backward pass
            return self._value(operands), (operands, None)
        results = self._run(phases, operands, keeps=True, phase=0)
        return results.value, (operands, results.kept)

    def _backward(self, saved: Any, cotangent: Any) -> Operands:
        if self._turns_inside:
            return jax.tree.map(lambda array: array * cotangent.astype(array.dtype), saved)
        operands, kept = saved
        # An integer has a cotangent of a type without elements.
        cotangents = [array for array in cotangent if array.dtype != jax.dtypes.float0]
        operands = operands._replace(cotangents=cotangents)
        phase = None if kept is None else 1
        results = self._run(
            self.pipeline.schedule.phases, operands, keeps=kept is None, has_gradients=True, phase=phase, kept=kept
        )
        assert results.gradients is not None
        return results.gradients

    def _run(
        self,
        phases: Sequence[Phase],
        operands: Operands,
        *,
        keeps: bool = False,
        has_gradients: bool = False,
        phase: int | None = None,
        kept: Arrays | None = None,
    ) -> StageResults:
        """Runs phases on the devices, or one of them."""
        pipeline, schedule = self.pipeline, self.pipeline.schedule
        first_tick = sum(len(before.ticks) for before in phases[: phase or 0])
        make_run = functools.partial(
            StageRun,
            pipeline,
            phases if phase is None else phases[phase : phase + 1],
            tables(phases, schedule.stages, schedule.chunks),
            first_tick,
            keeps,
        )

        def on_stage(stage: Any, operands: Operands, kept: Arrays | None) -> StageResults:
            operands = operands._replace(layers=[array[0] for array in operands.layers])
            state = make_run(operands, stage[0])(kept)
            is_value = not has_gradients or self._turns_inside
            return StageResults(
                self._summed_value(state) if is_value else [],
                (state.kept or []) if keeps and not has_gradients else [],
                self._summed_gradients(state) if has_gradients else None,
            )

        everywhere = PartitionSpec((pipeline.axis, *self.batch))
        gradients = self._specs(of_rows=self._rows_spec) if has_gradients else None
        value = PartitionSpec() if self._turns_inside else self._rows_spec
        mapped = shard_map(
            on_stage,
            mesh=self.mesh,
            axis_names={pipeline.axis, *self.batch},
            in_specs=(PartitionSpec(pipeline.axis), self._specs(of_rows=self._row_spec(None)), everywhere),
            out_specs=StageResults(value, everywhere, gradients),  # pyright: ignore[reportArgumentType]
            check_vma=False,
        )
        # Over some axes of a mesh, JAX maps inside of jit only.
        return jit(mapped)(jnp.arange(schedule.stages, dtype=jnp.int32), operands, kept)

    def _row_spec(self, axis: str | None) -> PartitionSpec:
        """The spec of arrays [microbatches, examples, ...]."""
        return PartitionSpec(axis, self.batch or None)

    @property
    def _rows_spec(self) -> PartitionSpec:
        """The spec of rows that come out: microbatches are split over the stages where these divide them."""
        schedule = self.pipeline.schedule
        return self._row_spec(None if schedule.microbatches % schedule.stages else self.pipeline.axis)

    def _specs(self, of_rows: PartitionSpec) -> Any:
        whole, rows = PartitionSpec(), self._row_spec(None)
        return Operands(PartitionSpec(self.pipeline.axis), whole, whole, of_rows, rows, rows)  # pyright: ignore[reportArgumentType]

    def _summed_value(self, state: State) -> Any:
        if self._turns_inside:
            return lax.psum(state.loss * self.pipeline.weight, (self.pipeline.axis, *self.batch))
        return self._spread([array[:-1] for array in state.outputs])

    def _spread(self, arrays: Arrays) -> Arrays:
        """Rows that one stage has and others have zeros for, on all stages or split over them."""
        axis = self.pipeline.axis
        if self._rows_spec[0] is None:
            return [lax.psum(array, axis) for array in arrays]
        return [lax.psum_scatter(array, axis, tiled=True) for array in arrays]

    def _summed_gradients(self, state: State) -> Operands:
        """Each gradient is summed once: over the axes of the batch, and over stages where all have the same array."""
        everywhere = (self.pipeline.axis, *self.batch)
        layers = [lax.psum(array, self.batch) if self.batch else array for array in state.layer_gradients]
        return Operands(
            [array[None] for array in layers],
            # All stages but one have zeros here, so that the sum gives its gradients to all.
            [lax.psum(array, everywhere) for array in state.first_gradients],
            [lax.psum(array, everywhere) for array in state.last_gradients],
            self._spread(state.input_gradients),
            [lax.psum(array, self.pipeline.axis) for array in state.target_gradients],
            [],
        )
