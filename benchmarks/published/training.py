"""Published steps as losses that training plans are made for, and as their authors ran them."""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from published.attention import BATCH
from published.decoder import Decoder, weight_shapes, weight_specs
from published.rebuild import audit
from published.rows import Row
from shardrules.programs.autoplan.graph.machine import Assumptions
from shardrules.programs.autoplan.query import QueryOptions
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.search.problem import Outcome, TrainingProblem, plan_once
from shardrules.programs.training.step import Recipe, TrainingStep
from shardrules.reports import AuditReport


@final
@attrs.frozen
class TrainingCase:
    """What `plan_training` gets of a row."""

    row: Row
    loss: Callable[[Any, Any], Any]
    weights: Any
    optimizer: Any
    batch: Any


def training_case(row: Row) -> TrainingCase:
    """Returns the step of a row without what its authors decided: no mesh, constraints or policy."""
    free = attrs.evolve(row.recipe, constraints=False)
    decoder = Decoder(row.dims, free, "blocks", "none")

    def loss(weights: Any, batch: Any) -> Any:
        return decoder.loss(weights, *batch)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.95, weight_decay=0.1))
    sequences = row.sequences * row.recipe.accumulations
    tokens = jax.ShapeDtypeStruct((sequences, row.length), jnp.int32)
    return TrainingCase(row, loss, weight_shapes(row.dims, free, row.length), optimizer, (tokens, tokens))


def scanned_row(row: Row) -> Row:
    """Returns a row whose layers are scanned, and whose weights XLA splits."""
    as_jax = type(row.recipe)()
    names = ("fsdp", "eager", "compiled", "sequence_parallel", "loss_dtype", "logged_losses", "lora_rank", "scan")
    recipe = attrs.evolve(row.recipe, **{name: getattr(as_jax, name) for name in names})
    return attrs.evolve(row, recipe=recipe)


def expert_audit(case: TrainingCase) -> AuditReport:
    """Compiles the published configuration as its authors run it."""
    return audit(case.row, Decoder(case.row.dims, case.row.recipe, "blocks", case.row.remat))


def expert_outcome(case: TrainingCase) -> Outcome:
    """Returns what the planner's costs say of the published mesh, layouts, recomputation and accumulations."""
    row, recipe = case.row, case.row.recipe
    decoder = Decoder(row.dims, recipe, "blocks", row.remat)

    def loss(weights: Any, batch: Any) -> Any:
        return decoder.loss(weights, *batch)

    target = sr.Target.parse(row.target)
    abstract = sr.mesh_shape(",".join(f"{axis}:{size}" for axis, size in row.mesh.items()))
    mesh = target.mesh(abstract) if target.platform == "tpu" else abstract
    step = TrainingStep(loss, case.optimizer)
    state = jax.eval_shape(step.init_state, case.weights)
    plan = sr.SpecTreeShardingRule(weight_specs(row.dims, recipe, row.length)).plan(case.weights, mesh)
    pins = sr.SpecTreeShardingRule((plan.specs, plan.mirror(state).specs, (P(BATCH), P(BATCH))))
    options = QueryOptions(None, pins, target.hardware, Assumptions(), 600.0, False)
    cluster = Cluster.of(mesh, target.hardware)
    problem = TrainingProblem(step, case.weights, state, case.batch, cluster, options)
    (shape,) = cluster.shapes()
    outcome = plan_once(problem, shape, Recipe(row.recipe.accumulations), float("inf"), is_free=True)
    assert outcome.result is not None, outcome.refusal
    return outcome
