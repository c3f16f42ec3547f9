"""The problem of a training plan, and the outcome of planning it on a mesh with a recipe."""

import functools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, final

import attrs
import jax

from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.callables import name_of
from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.core.errors import DoesNotFitError, MeshError, MicrobatchError, PlanError, UnknownAxisError
from shardrules.core.fields import read_bytes
from shardrules.core.spec import shard_bytes
from shardrules.core.tree import array_kind
from shardrules.programs.autoplan.answer.findings import does_not_fit_text
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.programs.autoplan.query import Query, QueryOptions, memory_limit, pinned_specs, read_query
from shardrules.programs.autoplan.run.call import axis_names_of, read_call
from shardrules.programs.autoplan.solve.proof import prime_sizes, rest_bound, split_bytes
from shardrules.programs.autoplan.solve.search import SearchResult
from shardrules.programs.traced.program import read_jaxpr
from shardrules.programs.training.batch import ExampleDims
from shardrules.programs.training.cluster import Cluster, Shape
from shardrules.programs.training.host_state import array_bytes, host_state
from shardrules.programs.training.keep.apply import is_kept_name
from shardrules.programs.training.keep.choices import keep_choices
from shardrules.programs.training.keep.keep import Keep
from shardrules.programs.training.keep.seconds import equation_seconds
from shardrules.programs.training.loss import TracedLoss
from shardrules.programs.training.microbatches import SplitLoss, forward_program
from shardrules.programs.training.search.paired import least_paired_bytes, paired_bytes, pairs_rounds
from shardrules.programs.training.stages.layers import LayerLoop
from shardrules.programs.training.stages.layouts import stage_layouts
from shardrules.programs.training.stages.traffic import StageTraffic
from shardrules.programs.training.step import Recipe, TrainingStep

REFUSALS = (DoesNotFitError, MeshError, MicrobatchError, PlanError, UnknownAxisError)
"""Errors of one mesh and recipe, where others may be planned for: a torus, pins and constraints on axes that a mesh
lacks, microbatches that would tear examples apart."""


@final
@attrs.define(eq=False)
class TrainingProblem:
    """A step to plan on a cluster."""

    step: TrainingStep
    model: Any = attrs.field(repr=False)
    state: Any = attrs.field(repr=False)
    batch: Any = attrs.field(repr=False)
    cluster: Cluster
    options: QueryOptions
    host_memory: int | str | None = None
    """The most memory of its host that a device may use; by default as much as it has itself."""
    _keep_choices: dict[tuple[int, bool, bool], tuple[Keep, ...]] = attrs.field(factory=dict, init=False, repr=False)
    """The choices of microbatches, for their number, whether hosts have memory, and whether layers are in stages."""
    _queries: dict[tuple[Shape, Recipe], Query] = attrs.field(factory=dict, init=False, repr=False)

    def check_possible(self) -> None:
        """Raises `DoesNotFitError` if no mesh and no recipe can have the step's arguments in memory.

        The state may be on hosts, as far as they have room for it.
        """
        mesh, sizes, trees = self.cluster.mesh, self._finest_sizes, (self.model, self.state, self.batch)
        pins = None if mesh is None else self.options.pins  # of several meshes, each may have what pins name
        # What is cheap to know comes first: without pins, arguments are no larger than all arrays.
        state_bytes = split_bytes(self.state, sizes)
        if pins is None and self.rest_bytes - min(state_bytes, self.host_limit_bytes) <= self.limit_bytes:
            return
        step = self.step_of(self.step.recipe)
        call = read_call(step, trees, self.mesh, name_of(self.step.loss))
        pinned = {} if mesh is None else pinned_specs(step, trees, pins, mesh)
        bound = rest_bound(read_jaxpr(call.jaxpr), sizes, call.paths, pinned)
        owners = dict(zip(call.paths, call.argument_indices, strict=True))
        state_bytes = sum(array.nbytes for array in bound.arrays if owners.get(array.name) == 1)
        host_bytes = min(state_bytes, self.host_limit_bytes)
        bound = attrs.evolve(bound, nbytes=bound.nbytes - host_bytes)
        if bound.nbytes > self.limit_bytes:
            paths = [call.paths[index] for index in pinned]
            text = does_not_fit_text(
                call.name, self.cluster.name, self.limit_bytes, bound, paths, host_bytes=host_bytes
            )
            raise DoesNotFitError(text, bound.nbytes)

    @functools.cached_property
    def rest_bytes(self) -> int:
        """The bytes of model, state and batch on a device, each array split as finely as a mesh can."""
        return split_bytes((self.model, self.state, self.batch), self._finest_sizes)

    @property
    def _finest_sizes(self) -> Mapping[str, int]:
        """The axes of the only mesh, or of one that splits finer than any other."""
        mesh = self.cluster.mesh
        return prime_sizes(self.cluster.count) if mesh is None else mesh_sizes(mesh)

    def query(self, shape: Shape, recipe: Recipe, *, check: bool = False) -> Query:
        """Traces the step with a recipe, and builds the choices of its layouts on a mesh; `check` as `read_query`.

        What was read is kept, until it is forgotten: plans within a limit often follow such without.
        """
        key = shape, recipe
        query = self._queries.pop(key, None)
        if query is None:
            query = self._read_query(shape, recipe, check)
        elif check:
            query.check_possible()
        self._queries[key] = query
        return query

    def forget(self, best: "Outcome | None") -> None:
        """Forgets queries, but for the last few and that of the best plan, for which it is read once."""
        # Each holds a traced step, of many megabytes for hundreds of layers.
        for key in [*self._queries][:-3]:
            if best is None or key != (best.shape, best.recipe):
                del self._queries[key]

    def _read_query(self, shape: Shape, recipe: Recipe, check: bool) -> Query:
        step = self.step_of(recipe)
        args = self.model, self.state, self.batch
        mesh = self.cluster.mesh_of(shape, recipe.stages)
        query = read_query(step, args, mesh, self.options, self.on_host(recipe), check=check)
        if recipe.stages == 1:
            return query
        left = stage_layouts(query.task.problem, recipe.stages, recipe.rounds)
        return attrs.evolve(query, task=query.task.only(left))

    def on_host(self, recipe: Recipe) -> list[bool]:
        """Returns for each array of the step's arguments whether a recipe has it in the memory of the host."""
        model, state, batch = (len(array_bytes(tree)) for tree in (self.model, self.state, self.batch))
        return [False] * model + [index in recipe.host_state for index in range(state)] + [False] * batch

    def step_of(self, recipe: Recipe) -> TrainingStep:
        dims = self.loss.split.named_example_dims
        return attrs.evolve(self.step, recipe=recipe, example_dims=dims, planned_batch=self.batch)

    @functools.cached_property
    def limit_bytes(self) -> int:
        return memory_limit(self.options.memory_limit, self.cluster.hardware)

    @functools.cached_property
    def host_limit_bytes(self) -> int:
        """The most memory of its host that a device may use; none where the host's memory is the device's own."""
        hardware = self.cluster.hardware
        if hardware.is_cpu:
            return 0
        return hardware.memory_bytes if self.host_memory is None else read_bytes("host_memory", self.host_memory)

    def host_state(self, part: float) -> tuple[int, ...]:
        """Returns the arrays of the optimizer's state, by index, that are on the host if a part of its bytes is."""
        count = self.cluster.count
        return host_state(self.state, count, part, self.host_limit_bytes * count)

    @functools.cached_property
    def loss(self) -> TracedLoss:
        """The loss on the whole batch, traced with the first mesh in force, whose axes it may name."""
        with axis_names_of(self.mesh):
            return self.step.trace(self.model, self.batch)

    @functools.cached_property
    def split_refusal(self) -> str:
        """The reason that the loss cannot be computed by microbatches; empty where it can."""
        try:
            _ = self._split
        except MicrobatchError as error:
            return str(error)
        return ""

    def check_loss(self) -> None:
        """Raises an error for a loss that cannot train the model, or is another program each time."""
        with axis_names_of(self.mesh):
            self.loss.check()

    def check_split(self, microbatches: int) -> None:
        with axis_names_of(self.mesh):
            forward_program(self.loss, microbatches)

    def keeps(self, microbatches: int, *, has_stages: bool = False) -> tuple[Keep, ...]:
        """Returns what the backward pass of a microbatch may keep: first everything, then less and less."""
        most_bytes = self.host_limit_bytes * self.cluster.count
        keeps = self._keeps(microbatches, most_bytes > 0, has_stages)
        fitting = [keep for keep in keeps if keep.host_bytes <= most_bytes]
        if len(fitting) == len(keeps):
            return keeps
        # What hosts have no room for is computed again. Of any two, the one that keeps more has to be faster.
        front: list[Keep] = []
        candidates = (*fitting, *self._keeps(microbatches, False, has_stages))
        for keep in sorted(candidates, key=lambda keep: (keep.kept_bytes, keep.seconds)):
            if not front or keep.seconds < front[-1].seconds or not keep.units:
                front.append(keep)
        return tuple(dict.fromkeys(front[::-1]))

    def _keeps(self, microbatches: int, offload: bool, has_stages: bool) -> tuple[Keep, ...]:
        if microbatches == 1 or (has_stages and self._has_equal_layers):
            # Where equal layers are cut depends on sizes.
            return self._choices(microbatches, offload, has_stages)
        # Positions are the same in microbatches of any size.
        factor = self._least_split / microbatches
        return tuple(keep.scaled(factor) for keep in self._choices(self._least_split, offload, has_stages))

    def _choices(self, microbatches: int, offload: bool, has_stages: bool) -> tuple[Keep, ...]:
        key = microbatches, offload, has_stages and self._has_equal_layers
        if key not in self._keep_choices:
            with axis_names_of(self.mesh):
                program = forward_program(self.loss, microbatches, has_stages=has_stages)
            self._keep_choices[key] = keep_choices(
                program,
                self.cluster.hardware,
                trainable_count=self.loss.trainable_count,
                offload=offload,
                device_count=self.cluster.count,
                replace_checkpoints=self.step.recipe.keep.replaces_checkpoints,
            )
        return self._keep_choices[key]

    @property
    def layer_count(self) -> int:
        """The layers of the loop over layers; raises `MicrobatchError` where there is none."""
        return self._layers.layer_count

    @functools.cached_property
    def _layers(self) -> LayerLoop:
        return LayerLoop.of(self._split.staged_forward, self._split.is_batched)

    @functools.cached_property
    def traffic(self) -> StageTraffic:
        """The traffic between hosts with stages and without; raises `MicrobatchError` where no loop has the layers."""
        trained = self.loss.jaxpr.in_avals[: self.loss.trainable_count]
        return StageTraffic.of(self._layers, self._least_split, trained, self.cluster)

    @functools.cached_property
    def layer_seconds(self) -> float:
        """The least time of layers in a step, shared by all devices: forward, for gradients of what they hand on, and
        for those of weights that are trained."""
        program, layers = self._split.staged_forward, self._layers
        seconds, _ = equation_seconds(program, self.cluster.hardware)
        forward = seconds[[equation is layers.equation for equation in program.jaxpr.eqns].index(True)]
        return (2 + self.traffic.trained_part) * self._least_split * forward / self.cluster.count

    @functools.cached_property
    def _has_equal_layers(self) -> bool:
        """Returns whether layers become a loop where they are in stages."""
        return self._split.staged_forward is not self._split.forward

    @functools.cached_property
    def _split(self) -> SplitLoss:
        """The loss in the least number of microbatches."""
        with axis_names_of(self.mesh):
            return SplitLoss.of(self.loss, self._least_split)

    @property
    def _least_split(self) -> int:
        examples = self.loss.batch_size
        return next((count for count in range(2, examples + 1) if examples % count == 0), 2)

    @functools.cached_property
    def mesh(self) -> AnyMesh:
        """The first mesh that devices can be laid out in."""
        *others, last = self.cluster.shapes()
        for shape in others:
            try:
                return self.cluster.mesh_of(shape)
            except MeshError:
                continue
        return self.cluster.mesh_of(last)


@final
@attrs.frozen(eq=False)
class Outcome:
    """The outcome of planning on a mesh with a recipe."""

    shape: Shape
    mesh: str
    recipe: Recipe
    """The recipe, with the bytes that each device keeps."""
    result: SearchResult | None
    """The layouts; `None` where the mesh was refused."""
    seconds: float
    """The modelled time of a step."""
    peak_bytes: int
    fits: bool
    refusal: str = ""
    """The reason that nothing was searched."""
    batch_splits: int = 1
    """The devices over which the batch is split."""
    planning_seconds: float = 0.0
    read_seconds: float = 0.0
    """The seconds that it took to trace the step and to read its layouts."""
    argument_bytes: int = 0
    """The bytes of model, state and batch on a device."""
    host_bytes: int = 0
    """The bytes that a device has in the memory of its host."""
    paired_bytes: int = 0
    """The part of `peak_bytes` that the layouts say nothing of: rounds of loops that run in pairs."""
    compute_seconds: float = 0.0
    """The part of `seconds` in which devices compute."""
    choices: tuple[tuple[int, float], ...] = ()
    """The bytes and seconds of the layouts that the search has met."""

    def plan(self, problem: TrainingProblem) -> AutoPlan:
        assert self.result is not None, "a refused mesh has no plan"
        query = problem.query(self.shape, self.recipe)
        return attrs.evolve(query.plan(self.result), mesh=problem.cluster.public_mesh(query.mesh))


def plan_once(
    problem: TrainingProblem,
    shape: Shape,
    recipe: Recipe,
    limit_bytes: float,
    is_free: bool = False,
    deadline: Deadline = NO_DEADLINE,
    *,
    shrinks: bool = False,
) -> Outcome:
    """Plans on one mesh with one recipe, within a limit of memory, or for time alone if it `is_free`.

    `shrinks` is as `Task.within` takes it; without it, what certainly does not fit is refused.
    """
    start = time.monotonic()
    try:
        query = problem.query(shape, recipe, check=not is_free and not shrinks)
    except REFUSALS as error:
        needed = error.needed_bytes if isinstance(error, DoesNotFitError) else 0
        text = mesh_text(problem.cluster.abstract_mesh(shape, recipe.stages))
        # Without layouts: as if all devices shared it.
        recipe = attrs.evolve(recipe, keep=recipe.keep.scaled(1 / problem.cluster.count))
        return Outcome(shape, text, recipe, None, float("inf"), needed, False, " ".join(str(error).split()))
    is_paired, program = pairs_rounds(problem.cluster, recipe), query.task.problem.program
    least_bytes = least_paired_bytes(program, recipe, problem.cluster.count) if is_paired else 0
    read_seconds = time.monotonic() - start
    limit = float("inf") if is_free else max(0.0, limit_bytes - least_bytes)
    result = query.task.within(limit, deadline, shrinks=shrinks)
    if not result.choice and query.task.problem.nodes:
        return Outcome(shape, mesh_text(query.mesh), recipe, None, float("inf"), 0, False, "no time was left")
    plan = query.plan(result)
    more_bytes = paired_bytes(plan, recipe) if is_paired else 0
    if not is_free and result.fits and result.peak_bytes + more_bytes > limit_bytes:
        # What goes round twice is larger in these layouts than at the least: leave room for it.
        result = query.task.within(max(0.0, limit_bytes - more_bytes), deadline, shrinks=shrinks)
        plan = query.plan(result)
        more_bytes = paired_bytes(plan, recipe)
    batch_splits = _batch_splits(plan, problem.loss.split.example_dims)
    # Microbatches that follow each other keep theirs one after another, stages those of all microbatches.
    kept_rounds = 1 if recipe.stages > 1 else recipe.microbatches
    host_bytes = plan.host_traffic.argument_bytes + plan.host_traffic.kept_bytes // kept_rounds
    return Outcome(
        shape,
        mesh_text(query.mesh),
        attrs.evolve(recipe, keep=kept_on_device(plan, recipe, batch_splits)),
        result,
        float(plan.step_time.seconds),
        plan.peak_bytes + more_bytes,
        result.fits and result.peak_bytes + more_bytes <= limit_bytes and host_bytes <= problem.host_limit_bytes,
        batch_splits=batch_splits,
        planning_seconds=time.monotonic() - start,
        read_seconds=read_seconds,
        argument_bytes=sum(argument_bytes(plan)),
        host_bytes=host_bytes,
        paired_bytes=more_bytes,
        compute_seconds=plan.step_time.compute_seconds,
        choices=tuple(_choices(plan)),
    )


def _choices(plan: AutoPlan) -> Iterator[tuple[int, float]]:
    """Yields bytes and seconds of the choices that a search has met: of those as large, the one that costs least."""
    least = math.inf
    for trial in sorted(plan.result.candidates, key=lambda trial: (trial.peak_bytes, trial.cost)):
        if trial.cost < least:
            least, result = trial.cost, attrs.evolve(plan.result, choice=trial.choice)
            yield int(trial.peak_bytes), float(attrs.evolve(plan, result=result).step_time.seconds)


def kept_on_device(planned: AutoPlan, recipe: Recipe, batch_splits: int) -> Keep:
    """Returns what the backward pass keeps, with the bytes of each device by the layouts of a plan.

    Values kept by parts that stay as written have no name: they count as split like those that have one, or like the
    batch if none has.
    """
    keep, sizes, program = recipe.keep, mesh_sizes(planned.mesh), planned.task.problem.program
    whole_bytes = local_bytes = 0
    for operation in program.operations:
        if operation.name == "name" and is_kept_name(operation.equation):
            (index,) = operation.results
            array, count = program.arrays[index], operation.run_count
            whole_bytes += count * array.nbytes
            local_bytes += count * shard_bytes(array.shape, array.dtype, planned.spec_of(index), sizes)
    kept_bytes = keep.kept_bytes + keep.host_bytes
    if not kept_bytes:
        return keep
    # Stages keep what all microbatches need, and those that wait compute, too.
    rounds = recipe.rounds / recipe.chunks
    return keep.scaled(rounds * (local_bytes / whole_bytes if whole_bytes else 1 / (recipe.stages * batch_splits)))


def argument_bytes(plan: AutoPlan) -> list[int]:
    sizes, call = mesh_sizes(plan.mesh), plan.call
    by_argument = [0] * len(plan.args)
    for array, spec, owner, is_on_host in zip(
        call.structs, plan.specs, call.argument_indices, call.on_host, strict=True
    ):
        by_argument[owner] += 0 if is_on_host else shard_bytes(array.shape, array.dtype, spec, sizes)
    return by_argument


def _batch_splits(plan: AutoPlan, example_dims: ExampleDims) -> int:
    """Returns over how many devices the plan splits the examples of the batch, the last argument."""
    sizes = mesh_sizes(plan.mesh)
    owners = zip(plan.specs, plan.call.argument_indices, strict=True)
    specs = [spec for spec, owner in owners if owner == len(plan.args) - 1]
    kinds = map(array_kind, jax.tree.leaves(plan.args[-1]))
    # Specs are those of arrays, so leaves that are none have no part in the pairs below.
    dims = [dim for dim, kind in zip(example_dims, kinds, strict=True) if kind is not None]
    counts = [1]
    for spec, dim in zip(specs, dims, strict=True):
        entry = spec[dim] if dim is not None and dim < len(spec) else None
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        counts.append(math.prod(sizes[axis] for axis in axes))
    return max(counts)
