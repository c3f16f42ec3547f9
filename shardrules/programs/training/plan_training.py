"""`plan_training`: from a loss and a cluster to the step."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from shardrules.core.callables import name_of
from shardrules.core.deadline import Deadline
from shardrules.core.errors import (
    ConfigError,
    ConfigTypeError,
    PlanError,
    printable,
    shortened,
    suggest,
)
from shardrules.core.fields import read_bytes
from shardrules.core.rule import ShardingRule
from shardrules.core.tree import array_kind
from shardrules.programs.autoplan.graph.machine import Assumptions
from shardrules.programs.autoplan.query import QueryOptions, check_rule, check_time_limit
from shardrules.programs.autoplan.run.call import strong, struct
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.training.answer.make import proved_plan, training_plan
from shardrules.programs.training.answer.plan import TrainingPlan
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.keep.keep import Keep
from shardrules.programs.training.search.problem import TrainingProblem
from shardrules.programs.training.search.search import TrainingSearch
from shardrules.programs.training.search.staged import search_plans
from shardrules.programs.training.step import Recipe, TrainingStep
from shardrules.rules.named_axes import named_axes


def plan_training(
    loss: Callable[[Any, Any], Any],
    model: Any,
    optimizer: Any,
    batch: Any,
    *,
    cluster: Any,
    has_aux: bool = False,
    trainable: Any = eqx.is_inexact_array,
    example_dims: Any = None,
    memory_limit: int | str | None = None,
    host_memory: int | str | None = None,
    pins: ShardingRule | None = None,
    microbatches: int | None = None,
    stages: int | None = None,
    accumulate_dtype: Any = None,
    replace_checkpoints: bool = False,
    hardware: Hardware | str | None = None,
    time_limit: float = 600,
    prove: int = 0,
    progress: Callable[[str], None] | None = None,
) -> TrainingPlan:
    """Plans how to train on a cluster: the mesh, where everything is, how many microbatches, what is recomputed.

    The loss is traced from shapes, and steps that compute its gradient in different ways are planned on different
    meshes, each as `autoplan` does it. The fastest that fits is returned, with all others and why they lost. Nothing is
    run or compiled, and the model's code is not touched.

    **Arguments:**

    - `loss`: a function of a model and a batch that returns a scalar, or with `has_aux` a pair of a scalar and aux.
    - `model`: the model, as arrays or shapes: any pytree. What an `eqx.nn.State` in it holds is not trained; a
        new state that the loss returns in aux becomes the model's, as does what it writes to variables of flax nnx.
    - `optimizer`: an optax optimizer.
    - `batch`: the batch of a whole step, as arrays or shapes.
    - `cluster`: where to train: a target such as `"cuda:h100:64"`, a list of devices such as `jax.devices()`, or the
        mesh to use.
    - `has_aux`: whether `loss` returns a pair.
    - `trainable`: which arrays of the model are trained, as `eqx.partition` takes it, or a type of variables of flax
        nnx. Of those, by default `nnx.Param`s.
    - `example_dims`: which dim of each array of the batch has the examples, as `in_axes` of `jax.vmap`: an integer,
        `None` for arrays that are the same for all examples, such as keys, or a tree of these. By default it is the
        first dim of the arrays that share its size; where several sizes are possible, an error lists them.
    - `memory_limit`: the most memory that a device may use, in bytes or as a string (`"60GiB"`); by default the
        device's memory less a tenth.
    - `host_memory`: the most memory of its host that a device may use, for activations and the optimizer's state, in
        the same way; by default as much as the device has itself. With 0 everything stays on devices. CPU devices have
        no other memory.
    - `pins`: a rule for the tuple of model, optimizer state and batch. Where it has an opinion, the plan follows it.
        Paths begin with `model`, `state` or `batch`, as the plan prints them, or with an index: `model/up` or `0/up`.
    - `microbatches`: how many microbatches to use; by default as many as are best.
    - `stages`: into how many stages to split the layers, each on its own devices, of which microbatches go from one to
        the next; by default as many as are best, and with 1 none. The layers have to be one `jax.lax.scan` over stacked
        parameters.
    - `accumulate_dtype`: what gradients of microbatches are added up in. By default that is float32 for gradients of
        fewer bits, and devices exchange their sums as the plain step does, in the dtype of the parameters. Complex
        gradients add up in complex numbers of it.
    - `replace_checkpoints`: whether `jax.checkpoint` in the loss may be replaced; by default it is kept as written.
    - `hardware`: what the devices reach, a sheet or the name of one (`"cuda:h100"`); by default that of the cluster.
    - `time_limit`: the seconds that planning may take. If it is reached, the best plan so far is returned, with a
        finding.
    - `prove`: how many plans to compile, which takes up to minutes each, so that the compiler decides what fits: first
        the plan that is returned without it, and the fastest of all, beside these, whatever the model of memory says of
        it. The fastest that fits is returned; where none does, others are searched for that leave more room. A plan
        that the compiler fails at is returned only if nothing else is proved to fit.
    - `progress`: called with a line of text for each step that is planned.

    **Returns:**

    A `shardrules.reports.TrainingPlan`.

    **Raises:**

    `DoesNotFitError` if model, state and batch cannot be in memory on any mesh; `PlanError` if pins or constraints suit
    no mesh, or if the optimizer evaluates the loss again, as line searches do; `ConfigError` and `ConfigTypeError` for
    an argument that cannot be used, such as a batch without examples, or a loss that does not depend on the model or is
    another program each time that it is traced; `MicrobatchError` for a loss or a batch that cannot be split into the
    requested microbatches; `TargetError` and `MeshError` for a cluster that does not exist. Where no plan is expected
    to fit, the one with the least memory is returned, with the finding `may-not-fit`.

    ```python
    import optax

    def loss(model, batch):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    model = eqx.nn.MLP(256, 256, 1024, 2, key=jax.random.key(0))
    x = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    plan = sr.plan_training(loss, model, optax.adamw(1e-3), (x, x), cluster="cuda:h100:8")
    assert plan.peak_bytes < 2**30 and plan.candidates[0].fits
    ```
    """
    if type(prove) is not int or prove < 0:
        raise ConfigError(f"prove must be how many plans to compile, got {prove!r}")
    for argument, count in (("microbatches", microbatches), ("stages", stages)):
        if count is not None and (type(count) is not int or count < 1):
            raise ConfigError(f"{argument} must be a positive integer, got {count!r}")
    _check_dtype(accumulate_dtype)
    check_time_limit(time_limit)
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ConfigTypeError(f"optimizer must be one of optax, such as optax.adam(1e-3), got {optimizer!r:.80}")
    for argument, value in (("loss", loss), ("progress", progress)):
        if not callable(value) and (argument == "loss" or value is not None):
            raise ConfigTypeError(f"{argument} must be a function, got {printable(repr(value)):.80}")
    deadline = Deadline.after(time_limit)
    devices = Cluster.of(cluster, hardware)
    if prove:
        devices.compile_target().devices()  # without its compiler, nothing has to be searched for
    if host_memory is not None and read_bytes("host_memory", host_memory) and devices.hardware.is_cpu:
        raise ConfigError(f"host_memory is {host_memory!r}, but CPU devices have no memory of a host besides their own")
    _check_pins(pins, devices)
    # Models that steps and checkpoints return have no weak types; those of a batch are as the loss was written for.
    model, batch = _shapes(model, strong), _shapes(batch, struct)
    recipe = Recipe(keep=Keep(replaces_checkpoints=replace_checkpoints), accumulate_dtype=accumulate_dtype)
    step = TrainingStep(loss, optimizer, has_aux, trainable, recipe, example_dims)
    state = eqx.filter_eval_shape(step.init_state, model)
    step.check_optimizer(model, state)
    options = QueryOptions(memory_limit, pins, devices.hardware, Assumptions(), time_limit, False)
    problem = TrainingProblem(step, model, state, batch, devices, options, host_memory)
    # All that can be wrong with a loss is said before the search, which may take minutes.
    problem.check_possible()
    problem.check_loss()
    if microbatches is not None:
        problem.check_split(microbatches)
    search = TrainingSearch(problem, microbatches, stages, deadline, progress or (lambda text: None))
    search_plans(search)
    _check_outcomes(search, name_of(loss))
    return training_plan(search) if not prove else proved_plan(search, prove)


def _check_pins(pins: Any, cluster: Cluster) -> None:
    """Refuses axes that no mesh of the cluster has, before anything is traced."""
    check_rule(pins)
    unknown = [] if pins is None else [name for name in named_axes(pins) if name not in cluster.axis_names]
    if unknown:
        near = suggest(unknown[0], cluster.axis_names)
        raise PlanError(
            f"pins: unknown axis {unknown[0]!r}{near}; meshes of {cluster.name} have {', '.join(cluster.axis_names)}"
        )


def _check_dtype(dtype: Any) -> None:
    try:
        is_float = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_float = False
    if not is_float:
        raise ConfigError(f"accumulate_dtype must be a floating-point type, got {dtype!r:.80}")
    if dtype is not None and (actual := jax.dtypes.canonicalize_dtype(dtype)) != jnp.dtype(dtype):
        raise ConfigError(
            f"accumulate_dtype is {jnp.dtype(dtype)}, which JAX computes as {actual} unless jax_enable_x64 is set"
        )


def _shapes(tree: Any, shape_of: Callable[[Any], jax.ShapeDtypeStruct]) -> Any:
    return jax.tree.map(lambda leaf: leaf if array_kind(leaf) is None else shape_of(leaf), tree)


def _check_outcomes(search: TrainingSearch, name: str) -> None:
    if search.smallest is not None:
        return
    refusals = [outcome for outcome in (*search.free.values(), *search.outcomes.values()) if outcome.refusal]
    texts = [each.refusal if each.mesh in each.refusal else f"{each.mesh}: {each.refusal}" for each in refusals]
    lines = list(dict.fromkeys(texts))
    cluster = search.problem.cluster.name
    if not lines:
        lines = [f"{search.stages} stages: {search.why_no_stages}"]
    raise PlanError(
        f"{name} cannot be trained on {cluster}: no mesh can be planned for:\n  " + "\n  ".join(shortened(lines))
    )
