"""The plan that `plan_training` finds, with which training runs."""

import functools
from collections.abc import Callable
from typing import Any, final

import attrs
import jax
from jax.sharding import Mesh, PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.core.callables import update_wrapper
from shardrules.core.errors import ConfigError
from shardrules.core.rule import ShardingPlan, ShardingRule, SpecTreeShardingRule
from shardrules.core.tree import array_kind
from shardrules.placement.init import filter_init
from shardrules.programs.autoplan.answer.diff import AutoPlanDiff
from shardrules.programs.autoplan.answer.frontier import Frontier
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.programs.autoplan.run.replay import PlannedFunction, concrete_mesh
from shardrules.programs.autoplan.solve.peak import Certainty, Peak
from shardrules.programs.costs.step_time import StepTime
from shardrules.programs.pipelines.schedule import PipelineSchedule
from shardrules.programs.training.answer.prove import ProvedPlan, TrainingProof, plans_to_prove
from shardrules.programs.training.answer.report import TrainingCandidate, TrainingPlanReport
from shardrules.programs.training.search.problem import Outcome, TrainingProblem
from shardrules.programs.training.step import Recipe, TrainingStep


@final
@attrs.frozen(eq=False)
class TrainingPlan:
    """A mesh, layouts, and how a training step computes its gradients. `plan_training` makes them.

    It prints as a note, with what else was planned and why it lost.

    ```python
    import optax

    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    plan = sr.plan_training(loss, jnp.ones((8, 8)), optax.adam(1e-3), jnp.ones((64, 8)), cluster=jax.devices())
    model, state = plan.init(lambda: jnp.ones((8, 8)))()
    model, state, loss_value, _ = plan.step(model, state, jnp.ones((64, 8)))
    assert loss_value == 64 and plan.report.examples == 64
    ```
    """

    _training_step: TrainingStep = attrs.field(repr=False)
    planned: AutoPlan = attrs.field(repr=False)
    """The layouts of everything in the step."""
    report: TrainingPlanReport = attrs.field(repr=False)
    """All figures, as a record."""
    _problem: TrainingProblem = attrs.field(repr=False)
    """The step, its arguments and the cluster."""
    _outcomes: tuple[Outcome, ...] = attrs.field(repr=False)
    """The plans that fit by the model, this one first, then the others by their time."""
    compiled: tuple[ProvedPlan, ...] = ()
    """The plans compiled with `prove`, the best first: this plan, unless the compiler failed at it, and others."""
    _compiled_bytes: int | None = attrs.field(default=None, repr=False)
    """The bytes that this plan needs as compiled; also if the compiler refused it for its size."""

    @property
    def recipe(self) -> Recipe:
        """The recipe by which the gradient is computed."""
        return self._training_step.recipe

    @property
    def mesh(self) -> AnyMesh:
        """The mesh; without devices if the cluster was a target."""
        return self.planned.mesh

    @property
    def step_time(self) -> StepTime:
        """The modelled time of a step, in its parts: `step_time.seconds` is the time by which plans are compared."""
        return self.planned.step_time

    @property
    def peak_bytes(self) -> int:
        """The most memory that a device uses, as modelled."""
        return self.report.peak_bytes

    @property
    def peak(self) -> Peak:
        """The range of the most memory that a device uses; with `prove`, a point, as compiled."""
        if self._compiled_bytes is not None:
            return Peak.point(self._compiled_bytes)
        return self.planned.peak.plus(self.peak_bytes - self.planned.peak_bytes)

    @property
    def fits(self) -> Certainty:
        """The certainty that the plan keeps the memory limit: `"certain"`, `"possible"`, or `"no"`, which is false."""
        return self.peak.fit(self._problem.limit_bytes)

    @property
    def candidates(self) -> tuple[TrainingCandidate, ...]:
        """Everything that was planned, the best first, with the reason each lost."""
        return self.report.candidates

    @property
    def schedule(self) -> PipelineSchedule | None:
        """The stage that computes the layers of each microbatch at each time; `None` without stages."""
        return self.report.schedule

    @property
    def frontier(self) -> Frontier:
        """The worth of memory, by all that was planned."""
        return self.report.as_frontier()

    @functools.cached_property
    def plan(self) -> ShardingPlan:
        """The plan of model, state and batch."""
        return self.planned.plan

    @functools.cached_property
    def step(self) -> PlannedFunction:
        """The step, compiled as planned: from (model, state, batch) to (model, state, loss, aux).

        Model and state are donated.
        """
        return self.planned.jit(self._training_step, donate_argnums=(0, 1))

    def as_rule(self) -> SpecTreeShardingRule:
        """Returns a rule for (model, state) that decides as the plan does, for checkpoints and others.

        Rules say nothing about memory: where the plan has arrays of the state on hosts, `shardings` does.
        """
        # What is no array, such as a name, is in the tree as it is.
        specs = jax.tree.map(lambda spec: spec if isinstance(spec, PartitionSpec) else None, self.plan.specs[:2])
        return SpecTreeShardingRule(specs)

    def to_rules(self) -> ShardingRule:
        """Returns a short list of patterns that decides as `as_rule` does, for the model alone, too: see
        [`ShardingPlan.to_rules`][shardrules.ShardingPlan.to_rules].

        State that is split as its parameters needs no patterns of its own.
        """
        from shardrules.rules.from_plan.rules_of import rules_of

        return rules_of(self.as_rule().plan(self.planned.args[:2], self.mesh), self.planned.argument_plan(0))

    def shardings(self, mesh: Mesh | None = None) -> Any:
        """Returns the sharding of each array of (model, state), with its memory: what loads of checkpoints take.

        `mesh` is needed if that of the plan has no devices.
        """
        function = self.step
        leaves, treedef = jax.tree.flatten(self.planned.args[:2])
        shardings = iter(function.argument_shardings(concrete_mesh(self.mesh if mesh is None else mesh)))
        return treedef.unflatten([None if array_kind(leaf) is None else next(shardings) for leaf in leaves])

    def init(self, make: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        """Returns a function that makes the model and the optimizer's state, placed from the start.

        It takes the arguments of `make`, which returns the model.
        """

        def model_and_state(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            model = make(*args, **kwargs)
            return model, self._training_step.init_state(model)

        how = self.as_rule() if not self.recipe.host_state else lambda tree: self.shardings()
        return filter_init(update_wrapper(model_and_state, make), how, self.mesh)

    def prove(self, count: int = 3) -> tuple[ProvedPlan, ...]:
        """Compiles the best plans for the cluster, and returns what the compiler makes of each, the best first.

        Of plans that are nearly as fast by the model, those are compiled that differ most. First come those that fit by
        the compiler, by the modelled time of the compiled program. Nothing is run. Plans that the compiler fails at are
        left out; if it fails at all of them, that error is raised.
        """
        if type(count) is not int or count < 1:
            raise ConfigError(f"count must be how many plans to compile, got {count!r}")
        proof = TrainingProof.of(self._problem)
        proof.compilations.run([outcome] for outcome in plans_to_prove(self._outcomes, count))
        if not proof.proved:
            raise next(iter(proof.compilations.errors.values()))
        return proof.ranked

    def to_json(self) -> str:
        """Returns the report as JSON, which `TrainingPlanReport.from_json` reads."""
        return self.report.to_json()

    def diff(self, other: "TrainingPlan") -> AutoPlanDiff:
        """Returns what differs in another plan of the same loss, from this one to the other."""
        return attrs.evolve(
            self.planned.diff(other.planned),
            seconds=(self.step_time.seconds, other.step_time.seconds),
            peak_bytes=(self.peak_bytes, other.peak_bytes),
            recipe=(str(self.recipe), str(other.recipe)),
        )

    def __str__(self) -> str:
        return str(self.report)
