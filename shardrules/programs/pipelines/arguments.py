"""A call of a pipeline: what is wrong with its arguments, and the arrays as stages take them."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from shardrules.core.axes import mesh_sizes, mesh_text
from shardrules.core.context import current_mesh
from shardrules.core.errors import ConfigError, printable
from shardrules.core.tree import named_leaves
from shardrules.programs.pipelines.functions import (
    FunctionError,
    Functions,
    message_structure,
    refuse_derivatives,
    result_problems,
    shapes_text,
)
from shardrules.programs.pipelines.leaves import Arrays, Structure, as_others, pack
from shardrules.programs.pipelines.run import Operands, Pipeline
from shardrules.programs.pipelines.schedule import PipelineSchedule, ScheduleName
from shardrules.programs.pipelines.stages import Stages


@final
@attrs.frozen(eq=False)
class Settings:
    layer: Callable[[Any, Any], Any]
    axis: str
    microbatches: int
    schedule: ScheduleName
    chunks: int
    cut: tuple[int, ...] | None
    batch: tuple[str, ...]
    first: Callable[[Any, Any], Any] | None
    last: Callable[..., Any] | None


@final
@attrs.frozen(eq=False, slots=False)
class PipelineCall:
    settings: Settings
    layers: Any
    x: Any
    targets: Any
    first: Any
    last: Any

    @functools.cached_property
    def _stacked(self) -> Any:
        return stacked(self.layers)

    @functools.cached_property
    def _packed(self) -> list[tuple[Arrays, Structure]]:
        return [pack(tree) for tree in (self._stacked, self.first, self.last, self.x, self.targets)]

    @functools.cached_property
    def _operands(self) -> Operands:
        return Operands(*(arrays for arrays, _ in self._packed), cotangents=[])

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return mesh_sizes(current_mesh())

    @property
    def _stages(self) -> int:
        return self._sizes.get(self.settings.axis, 1)

    @property
    def _shards(self) -> int:
        return math.prod(self._sizes.get(name, 1) for name in self.settings.batch)

    def check(self) -> None:
        problems = self._axis_problems() + self._presence_problems()
        dims = self._dim_problems("layers", [("layers", self._stacked)])
        if dims:
            dims += self._unequal_layers()
        dims += self._dim_problems("examples", [("x", self.x), ("targets", self.targets)])
        problems += dims or self._split_problems()
        problems, closed = (problems, {}) if problems else self._result_problems()
        if problems:
            raise ConfigError(f"pipeline: {'; '.join(problems)}")
        if self._stages > 1:  # without stages JAX differentiates the functions as they are
            refuse_derivatives(closed)

    def _axis_problems(self) -> list[str]:
        names = self.settings.axis, *self.settings.batch
        problems = [
            f"unknown axis {name!r}; the mesh has {mesh_text(current_mesh())}"
            for name in names
            if self._sizes and name not in self._sizes
        ]
        mesh = jax.sharding.get_abstract_mesh()
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if any(types.get(name) == AxisType.Manual for name in names):
            problems.append("it is called inside a jax.shard_map over its axes; call it outside")
        explicit = [name for name, kind in types.items() if kind == AxisType.Explicit]
        if explicit and self._stages > 1:
            problems.append(
                f"the mesh has Explicit axes, {', '.join(explicit)}; make one of Auto axes, as sr.create_mesh does"
            )
        return problems

    def _presence_problems(self) -> list[str]:
        settings = self.settings
        problems = []
        if settings.first is None and self.first is not None:
            problems.append("it gets parameters first, but has no function first=")
        if settings.last is None and not (self.last is None and self.targets is None):
            problems.append("it gets parameters last or targets, but has no function last=")
        return problems

    def _dim_problems(self, what: str, trees: list[tuple[str, Any]]) -> list[str]:
        """Arrays whose first dims differ."""
        named = [
            (f"{label}{path and '.'}{path}", leaf)
            for label, tree in trees
            for path, leaf in named_leaves(tree)
            if hasattr(leaf, "shape")
        ]
        if not named:
            return [f"{trees[0][0]} has no arrays"]
        if len({leaf.shape[:1] for _, leaf in named}) == 1 and named[0][1].shape:
            return []
        shapes = ", ".join(f"{path} {tuple(leaf.shape)}" for path, leaf in named)
        return [f"the first dim must be that of the {what} in all arrays, got {shapes:.300}"]

    def _split_problems(self) -> list[str]:
        settings, problems = self.settings, []
        examples, layers = (len(arrays[0]) for arrays in (self._operands.inputs, self._operands.layers))
        parts = settings.microbatches * self._shards
        if examples % parts:
            over = f", each over {self._shards} devices of {', '.join(settings.batch)}" if self._shards > 1 else ""
            problems.append(
                f"{examples} examples cannot be split into {settings.microbatches} microbatches{over}; "
                f"use a multiple of {parts}"
            )
        groups = self._stages * settings.chunks
        of = f"{self._stages} stages" + (f" of {settings.chunks} chunks" if settings.chunks > 1 else "")
        if self._stages > 1 and settings.cut is None and layers < groups:
            problems.append(
                f"{layers} layers are too few for {of}; use fewer, or a smaller axis than {settings.axis!r}"
            )
        if self._stages > 1 and settings.cut is not None and (len(settings.cut), sum(settings.cut)) != (groups, layers):
            problems.append(f"cut must be {groups} numbers, for {of}, whose sum is {layers} layers, got {settings.cut}")
        return problems

    def _result_problems(self) -> tuple[list[str], dict[str, Arrays]]:
        operands = self._operands
        layer = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in operands.layers]
        try:
            rows = [self._row_shapes(arrays) for arrays in (operands.inputs, operands.targets)]
            return result_problems(self._functions, layer, operands.first, operands.last, rows)
        except FunctionError as raised:
            error, name = raised.__cause__, raised.function
            assert error is not None
            # A function may raise for want of an argument: then the message says so, else its own error goes on.
            problems = self._missing(name)
            if not problems:
                raise error from None
            text = f"{name} raised {type(error).__name__}: {printable(str(error)):.200}"
            raise ConfigError(f"pipeline: {'; '.join([text, *problems])}") from error

    def _missing(self, name: str) -> list[str]:
        """The arguments that a call lacks and that a function which raised may need."""
        if name == "layer":
            return self._unequal_layers()
        call = "pipelined(layers, x, targets, first=..., last=...)"
        missing = [f"{name} gets no parameters, since the call has no {name}="] if getattr(self, name) is None else []
        if name == "last" and self.targets is None:
            missing.append("last gets no targets, since the call has none")
        return [*missing[:-1], f"{missing[-1]}; call it as {call}"] if missing else []

    def _unequal_layers(self) -> list[str]:
        """The reason why a list of layers is read as the parameters of stacked layers, and not as a layer each."""
        if self._stacked is not self.layers or type(self.layers) not in (list, tuple) or not self.layers:
            return []
        count = len(self.layers)
        if any(hasattr(layer, "shape") for layer in self.layers):
            return [f"layers is a list of {count} arrays, each with the layers first; stack layers with jnp.stack"]
        texts = [f"{shapes_text(arrays)} in {structure.treedef}" for arrays, structure in map(pack, self.layers)]
        # The empty text at the end differs from all, so that there always is one.
        other = next(index for index, text in enumerate([*texts, ""]) if text != texts[0])
        if other == count:
            return []
        differences = f"layer 0 has {texts[0]:.200}, and layer {other} has {texts[other]:.200}"
        return [
            f"layers is a list of {count} that are not equal: {differences}. Compute what differs in first= or last="
        ]

    def _row_shapes(self, arrays: Arrays) -> Arrays:
        parts = self.settings.microbatches * self._shards
        return [jax.ShapeDtypeStruct((len(array) // parts, *array.shape[1:]), array.dtype) for array in arrays]

    @functools.cached_property
    def _functions(self) -> Functions:
        settings = self.settings
        layers, first, last, inputs, targets = (structure for _, structure in self._packed)
        rows = self._operands.first, self._row_shapes(self._operands.inputs)
        message = message_structure(settings.first, first, inputs, rows)
        users = settings.layer, settings.first, settings.last
        return Functions(*users, layers, first, last, inputs, targets, message)

    def run(self) -> Any:
        functions, has_loss = self._functions, self.settings.last is not None
        operands = self._operands._replace(
            inputs=self._microbatches(self._operands.inputs), targets=self._microbatches(self._operands.targets)
        )
        if self._stages == 1:
            value = _run_whole(functions, operands)
        else:
            value = self._staged(functions)(operands._replace(layers=self._by_stage(operands.layers)))
        if has_loss:
            return value
        rows = [array.swapaxes(0, 1) for array in value]
        return functions.message.unpack([array.reshape(-1, *array.shape[2:]) for array in rows])

    def _microbatches(self, arrays: Arrays) -> Arrays:
        """[microbatches, examples, ...]. A device that has a block of the batch has a part of each microbatch."""
        count = self.settings.microbatches
        return [array.reshape(len(array) // count, count, *array.shape[1:]).swapaxes(0, 1) for array in arrays]

    def _staged(self, functions: Functions) -> Stages:
        settings, stages = self.settings, self._stages
        names = settings.axis, *settings.batch
        has_other_axes = any(size > 1 for name, size in self._sizes.items() if name not in names)
        schedule = PipelineSchedule(
            settings.schedule,
            stages=stages,
            microbatches=settings.microbatches,
            chunks=settings.chunks,
            in_step=has_other_axes,
        )
        pipeline = Pipeline(
            axis=settings.axis,
            schedule=schedule,
            layer=functions.layer,
            counts=tuple(self._cut[stage::stages] for stage in range(stages)),
            first=None if settings.first is None else functions.first,
            loss=None if settings.last is None else functions.last,
            weight=1 / (settings.microbatches * self._shards),
        )
        return Stages(pipeline, current_mesh(), settings.batch)

    @functools.cached_property
    def _cut(self) -> tuple[int, ...]:
        """The number of layers of each chunk of each stage, in the order in which microbatches meet them."""
        if self.settings.cut is not None:
            return self.settings.cut
        groups = self._stages * self.settings.chunks
        each, more = divmod(len(self._operands.layers[0]), groups)
        return tuple(each + (group < more) for group in range(groups))

    def _by_stage(self, arrays: Arrays) -> Arrays:
        """[stages, layers of a stage, ...]; where chunks are shorter than others, layers follow that are not computed.

        With chunks, or where the layers are not split evenly, devices send each other parameters for that.
        """
        stages, chunks, most = self._stages, self.settings.chunks, max(self._cut)
        if set(self._cut) == {most}:
            split = [array.reshape(chunks, stages, most, *array.shape[1:]).swapaxes(0, 1) for array in arrays]
            return [array.reshape(stages, chunks * most, *array.shape[3:]) for array in split]
        layers = len(arrays[0])
        starts = np.array([0, *itertools.accumulate(self._cut)][:-1]).reshape(chunks, stages).T
        indices = np.minimum(starts[..., None] + np.arange(most), layers - 1).reshape(stages, -1)
        return [array[indices] for array in arrays]


def _run_whole(functions: Functions, operands: Operands) -> Any:
    """The mean loss of microbatches, or the outputs of the last layer, without stages: one after the other."""

    def of_layer(x: Arrays, params: Arrays) -> tuple[Arrays, None]:
        return as_others(functions.layer(params, x), x), None

    def of_microbatch(rows: tuple[Arrays, Arrays]) -> Any:
        inputs, targets = rows
        y, _ = lax.scan(of_layer, functions.first(operands.first, inputs), operands.layers)
        return y if functions.last_function is None else functions.last(operands.last, y, targets)

    results = lax.map(of_microbatch, (operands.inputs, operands.targets))
    return results if functions.last_function is None else jnp.sum(results) / results.shape[0]


def stacked(layers: Any) -> Any:
    """Parameters with the layers first, also of a list of layers that are equal."""
    # A list of arrays is the parameters of stacked layers, and no list of layers.
    if type(layers) not in (list, tuple) or not layers or any(hasattr(layer, "shape") for layer in layers):
        return layers
    packed = [pack(layer) for layer in layers]
    structure = packed[0][1]
    shapes = {shapes_text(arrays) for arrays, _ in packed}
    if any(other.treedef != structure.treedef for _, other in packed) or len(shapes) > 1:
        return layers
    return structure.unpack([jnp.stack(rows) for rows in zip(*(arrays for arrays, _ in packed), strict=True)])
