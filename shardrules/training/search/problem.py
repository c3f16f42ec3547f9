"""What a training plan is searched for, and what planning it on a mesh with a recipe gives."""

import functools
import math
import time
from typing import Any, final

import attrs
import jax

from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.errors import DoesNotFitError, MeshError, MicrobatchError, PlanError, UnknownAxisError
from shardrules.core.fields import read_bytes
from shardrules.core.tree import array_kind
from shardrules.planning.answer.plan import AutoPlan
from shardrules.planning.query import Query, QueryOptions, memory_limit, read_query
from shardrules.planning.run.call import axis_names_of
from shardrules.planning.solve.deadline import NO_DEADLINE, Deadline
from shardrules.planning.solve.search import SearchResult
from shardrules.training.batch import ExampleDims
from shardrules.training.cluster import Cluster, Shape
from shardrules.training.host_state import array_bytes, host_state
from shardrules.training.keep.choices import keep_choices
from shardrules.training.keep.keep import Keep
from shardrules.training.loss import TracedLoss
from shardrules.training.microbatches import SplitLoss, forward_program
from shardrules.training.search.kept import kept_on_device
from shardrules.training.search.paired import least_paired_bytes, paired_bytes, pairs_rounds
from shardrules.training.stages.layers import LayerLoop
from shardrules.training.stages.layouts import stage_layouts
from shardrules.training.step import Recipe, TrainingStep

REFUSALS = (DoesNotFitError, MeshError, MicrobatchError, PlanError, UnknownAxisError)
"""What keeps a mesh and a recipe from being planned for, where others may be: a torus, pins and constraints on axes
that a mesh lacks, microbatches that would tear examples apart."""


@final
@attrs.frozen(eq=False)
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
    """What microbatches may keep, for their number, whether hosts have memory, and whether layers are in stages."""

    def query(self, shape: Shape, recipe: Recipe) -> Query:
        """Traces the step with a recipe, and builds the choices of its layouts on a mesh."""
        step = self.step_of(recipe)
        args = self.model, self.state, self.batch
        mesh = self.cluster.mesh_of(shape, recipe.stages)
        query = read_query(step, args, mesh, self.options, self.on_host(recipe))
        if recipe.stages == 1:
            return query
        left = stage_layouts(query.task.problem, recipe.stages, recipe.rounds)
        return attrs.evolve(query, task=query.task.only(left))

    def on_host(self, recipe: Recipe) -> list[bool]:
        """Returns for each array of the step's arguments whether a recipe has it in the memory of the host."""
        model, state, batch = (len(array_bytes(tree)) for tree in (self.model, self.state, self.batch))
        return [False] * model + [index in recipe.host_state for index in range(state)] + [False] * batch

    def step_of(self, recipe: Recipe) -> TrainingStep:
        """Returns the step with a recipe."""
        dims = self.loss.split.named_example_dims
        return attrs.evolve(self.step, recipe=recipe, example_dims=dims, planned_batch=self.batch)

    @functools.cached_property
    def limit_bytes(self) -> int:
        """The most memory that a device may use."""
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
        """Why the loss cannot be computed by microbatches; empty where it can."""
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
        """Raises an error if the loss cannot be computed by so many microbatches."""
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

    @functools.cached_property
    def layer_count(self) -> int:
        """How many layers the loop over layers has; raises `MicrobatchError` where there is none."""
        return LayerLoop.of(self._split.staged_forward, self._split.is_batched).layer_count

    @functools.cached_property
    def _has_equal_layers(self) -> bool:
        """Whether layers become a loop where they are in stages."""
        return self._split.staged_forward is not self._split.forward

    @functools.cached_property
    def _split(self) -> SplitLoss:
        """The loss in the least number of microbatches."""
        with axis_names_of(self.mesh):
            return SplitLoss.of(self.loss, self._least_split)

    @property
    def _least_split(self) -> int:
        """The least number of microbatches that the batch can be split into."""
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
    """What planning on a mesh with a recipe gave."""

    shape: Shape
    mesh: str
    recipe: Recipe
    """With the bytes that each device keeps."""
    result: SearchResult | None
    """The layouts; `None` where the mesh was refused."""
    seconds: float
    """The modelled time of a step."""
    peak_bytes: int
    fits: bool
    refusal: str = ""
    """Why nothing was searched."""
    batch_splits: int = 1
    """Over how many devices the batch is split."""
    planning_seconds: float = 0.0
    host_bytes: int = 0
    """What a device has in the memory of its host."""
    paired_bytes: int = 0
    """The part of `peak_bytes` that the layouts say nothing of: what rounds of loops take that run in pairs."""
    compute_seconds: float = 0.0
    """The part of `seconds` in which devices compute."""

    def plan(self, problem: TrainingProblem) -> AutoPlan:
        """Returns the plan of the step."""
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
) -> Outcome:
    """Plans on one mesh with one recipe, within a limit of memory, or for time alone if it `is_free`."""
    start = time.monotonic()
    try:
        query = problem.query(shape, recipe)
        if not is_free:
            query.check_possible()
    except REFUSALS as error:
        needed = error.needed_bytes if isinstance(error, DoesNotFitError) else 0
        text = mesh_text(problem.cluster.abstract_mesh(shape, recipe.stages))
        # Without layouts: as if all devices shared it.
        recipe = attrs.evolve(recipe, keep=recipe.keep.scaled(1 / problem.cluster.count))
        return Outcome(shape, text, recipe, None, float("inf"), needed, False, " ".join(str(error).split()))
    is_paired, program = pairs_rounds(problem.cluster, recipe), query.task.problem.program
    least_bytes = least_paired_bytes(program, recipe, problem.cluster.count) if is_paired else 0
    result = query.task.within(float("inf") if is_free else max(0.0, limit_bytes - least_bytes), deadline)
    if not result.choice and query.task.problem.nodes:
        return Outcome(shape, mesh_text(query.mesh), recipe, None, float("inf"), 0, False, "no time was left")
    plan = query.plan(result)
    more_bytes = paired_bytes(plan, recipe) if is_paired else 0
    if not is_free and result.fits and result.peak_bytes + more_bytes > limit_bytes:
        # What goes round twice is larger in these layouts than at the least: leave room for it.
        result = query.task.within(max(0.0, limit_bytes - more_bytes), deadline)
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
        plan.cost,
        plan.peak_bytes + more_bytes,
        result.fits and result.peak_bytes + more_bytes <= limit_bytes and host_bytes <= problem.host_limit_bytes,
        batch_splits=batch_splits,
        planning_seconds=time.monotonic() - start,
        host_bytes=host_bytes,
        paired_bytes=more_bytes,
        compute_seconds=plan.step_time.compute_seconds,
    )


def _batch_splits(plan: AutoPlan, example_dims: ExampleDims) -> int:
    """Over how many devices the plan splits the examples of the batch, the last argument."""
    sizes = mesh_sizes(plan.mesh)
    owners = zip(plan.specs, plan.call.argument_indices, strict=True)
    specs = [spec for spec, owner in owners if owner == len(plan.args) - 1]
    kinds = map(array_kind, jax.tree.leaves(plan.args[-1]))
    dims = [dim for dim, kind in zip(example_dims, kinds, strict=True) if kind is not None]
    counts = [1]
    for spec, dim in zip(specs, dims, strict=True):
        entry = spec[dim] if dim is not None and dim < len(spec) else None
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        counts.append(math.prod(sizes[axis] for axis in axes))
    return max(counts)
