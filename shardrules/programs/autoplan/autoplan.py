"""`autoplan`: finds where everything in a function goes.

It reads, then searches, then reports. Everything that searches, for the plan and for what its pins cost, divides one
deadline; findings are made from what the searches returned.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from shardrules.core.axes import AnyMesh, check_mesh, mesh_text
from shardrules.core.deadline import Deadline
from shardrules.core.errors import (
    ConfigError,
    ConfigTypeError,
    DoesNotFitError,
    MeshError,
    PlanError,
    ShardRulesError,
    UnknownAxisError,
)
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingRule
from shardrules.core.spec import spec_repr
from shardrules.mesh.divisors import divisors
from shardrules.mesh.shape import mesh_shape
from shardrules.programs.autoplan.answer.findings import (
    COSTLY_RATIO,
    PinCosts,
    Remarks,
    machine_findings,
    may_not_fit,
    near_the_limit,
    nothing_split,
    pin_findings,
    program_findings,
    time_is_up,
    untried_meshes,
)
from shardrules.programs.autoplan.answer.plan import AutoPlan, Candidate
from shardrules.programs.autoplan.answer.prove import prove_plan
from shardrules.programs.autoplan.graph.machine import Assumptions
from shardrules.programs.autoplan.query import Query, QueryOptions, check_time_limit, read_query
from shardrules.programs.autoplan.solve.search import SearchResult
from shardrules.programs.machine.hardware import Hardware

MESH_AXES = ("data", "model")
"""The axes of the meshes that are tried for a device count."""


def autoplan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | int,
    memory_limit: int | str | None = None,
    pins: ShardingRule | None = None,
    hardware: Hardware | str | None = None,
    assumptions: Assumptions | None = None,
    time_limit: float = 60,
    prove: bool = False,
) -> AutoPlan:
    """Finds how to split the arguments, the results and everything inside of a function so that it runs fastest.

    The function is traced, and every layout of every array in it is weighed by what computing and communicating would
    cost. Nothing is run, and nothing compiled unless you ask for it.

    **Arguments:**

    - `fn`: any function that JAX can trace, such as a whole train step. `eqx.filter_*` functions are also accepted.
    - `args`: its arguments, as arrays or shapes. An argument that comes back as a result, such as the state of
        training, comes back in the same layout.
    - `mesh`: a mesh, with devices or without; or a device count, for which several meshes are tried.
    - `memory_limit`: the most memory that a device may use, in bytes or as a string (`"60GiB"`): arguments,
        results and everything in between. By default the device's memory less a tenth.
    - `pins`: a rule for the tuple of arguments. Where it has an opinion, the plan follows it. Paths begin with the
        name of an argument, as the plan prints them, or with its index: `w/up` or `0/up`.
    - `hardware`: what the devices reach, a sheet or the name of one (`"cuda:h100"`); by default that of the mesh's
        devices, or of H100s if it has none.
    - `assumptions`: which part of that functions reach; by default `Assumptions()`.
    - `time_limit`: the seconds that planning may take, over all meshes and pins. If it is reached, the best plan so
        far is returned, with its gap and a finding. Plans do not depend on it otherwise. Tracing the function and
        reading its layouts is not interrupted: it takes about a second for a thousand operations.
    - `prove`: whether the compiler decides what fits, instead of a model of it: the best few plans are compiled within
        the time limit, for the mesh's devices, or for those of the hardware if the mesh has none. The plan that fits by
        the model comes first, then the fastest of all, whatever the model says of it. What they need corrects the model
        for this function, and the fastest that the compiler says fits is returned: never a worse plan than without.
        A plan that the compiler fails at, or has no time for, is returned if it fits by the model and nothing else is
        proved to fit, with a finding. Arguments that come back as results count as donated. A compiler is not
        interrupted either.

    **Returns:**

    An `AutoPlan`.

    **Raises:**

    `DoesNotFitError` if no plan can fit, with the bound that proves it; `PlanError` if pins do not divide;
    `RuleTypeError` if `pins` is not a rule; `MeshError` if `mesh` is neither a mesh nor a device count; `ConfigError`
    if `time_limit` is not above 0, or `prove` neither true nor false; `HardwareError` for an unknown sheet;
    `ConfigTypeError` for other arguments of a wrong type; with `prove`, `MissingCompilerError` if the compiler is not
    installed and `ConfigError` if it is not known for which devices to compile; and whatever `fn` raises when it is
    traced. Where no plan is expected to fit, the one with the least memory is returned, or a faster one with up to 1 %
    more, with the finding `may-not-fit`; one that is expected to fit, but may not, has the finding `near-the-limit`.

    ```python
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w["up"]) @ w["down"])

    shape = jax.ShapeDtypeStruct
    w = {"up": shape((1024, 4096), jnp.bfloat16), "down": shape((4096, 1024), jnp.bfloat16)}
    planned = sr.autoplan(jax.grad(loss), w, shape((8, 1024), jnp.bfloat16), mesh=sr.mesh_shape("model:8"))
    assert planned.plan.specs[0] == {"up": P(None, "model"), "down": P("model")}
    ```
    """
    check_time_limit(time_limit)
    if not isinstance(prove, bool):
        raise ConfigError(f"prove must be True or False, got {prove!r:.60}")
    if not callable(fn):
        raise ConfigTypeError(f"fn must be a function, got {fn!r:.60}")
    if assumptions is not None and not isinstance(assumptions, Assumptions):
        raise ConfigTypeError(f"assumptions must be Assumptions, got {assumptions!r:.60}")
    deadline = Deadline.after(time_limit)
    sheet = None if hardware is None else Hardware.of(hardware)
    options = QueryOptions(memory_limit, pins, sheet, assumptions, time_limit, prove)
    if isinstance(mesh, int):
        return _best_mesh(fn, args, mesh, options, deadline)
    check_mesh(mesh)
    query = read_query(fn, args, mesh, options)
    return answer_query(query, query.search(deadline), deadline)


def _best_mesh(
    fn: Callable[..., Any], args: tuple[Any, ...], count: int, options: QueryOptions, deadline: Deadline
) -> AutoPlan:
    """Searches on meshes of some devices, which divide the time, and returns the plan of the best."""
    if isinstance(count, bool) or count < 1:
        raise MeshError(f"mesh must be a mesh or a device count of at least 1, got {count}")
    texts = _mesh_texts(count)
    outcomes: list[tuple[Query, AutoPlan]] = []
    candidates: list[Candidate] = []
    refusal: ShardRulesError | None = None
    for index, text in enumerate(texts):
        # Reading cannot be interrupted. Without the time for it, a search would have none either.
        if outcomes and deadline.seconds_left <= outcomes[-1][0].read_seconds:
            break
        try:
            query = read_query(fn, args, mesh_shape(text), options)
        # Pins and constraints may name axes that not all meshes have.
        except (PlanError, UnknownAxisError, DoesNotFitError) as error:
            refusal = refusal or error
            candidates.append(Candidate(text, None, 0))
            continue
        plan = query.plan(query.search(deadline.share(len(texts) - index)))
        outcomes.append((query, plan))
        candidates.append(Candidate(text, plan.cost if plan.is_expected_to_fit else None, plan.peak_bytes))
    if not outcomes:
        assert refusal is not None, "every mesh is searched or refused"
        raise refusal
    best, plan = min(outcomes, key=_rank)
    plan = answer_query(best, plan.result, deadline)
    # The best first; those that do not fit come last.
    candidates.sort(key=lambda candidate: (candidate.seconds is None, candidate.seconds or 0.0, candidate.mesh))
    untried = texts[len(candidates) :]
    findings = (*plan.findings, untried_meshes(untried)) if untried else plan.findings
    return attrs.evolve(plan, candidates=tuple(candidates), findings=findings)


def _rank(outcome: tuple[Query, AutoPlan]) -> tuple[bool, float, str]:
    """Orders outcomes: plans that fit by their cost, then others by what they need."""
    query, plan = outcome
    fits = plan.is_expected_to_fit
    return not fits, plan.cost if fits else plan.peak_bytes, mesh_text(query.mesh)


def _mesh_texts(count: int) -> list[str]:
    """Returns meshes of one and two axes, the larger axis first and last."""
    data, model = MESH_AXES
    return [f"{data}:{count}", *(f"{data}:{count // size},{model}:{size}" for size in divisors(count)[1:-1])]


def answer_query(query: Query, result: SearchResult, deadline: Deadline) -> AutoPlan:
    plan = query.plan(result)
    if query.device_mesh is not None:
        plan = prove_plan(plan, query.fn, query.device_mesh, deadline)
    remarks = Remarks()
    costs = remarks.of("what pins cost", lambda: _pin_costs(query, plan.result, deadline), PinCosts())
    # Findings come last, and search nothing: they only read the plan.
    findings = remarks.each("what else is worth knowing", _findings(query, plan, costs))
    return attrs.evolve(plan, findings=(*plan.findings, *findings, *remarks.findings))


def _findings(query: Query, plan: AutoPlan, costs: PinCosts) -> Iterator[Finding]:
    if not plan.is_compiled:  # what was compiled has findings already
        if not plan.is_expected_to_fit:
            yield may_not_fit(query.call, query.limit_bytes, plan.peak, list(query.pinned), costs)
        elif plan.fits != "certain":
            yield near_the_limit(query.limit_bytes, plan.peak, plan.result.is_tight)
    if plan.result.is_late:
        yield time_is_up(query.options.time_limit, plan.gap)
    yield from machine_findings(query.mesh, query.options.hardware)
    yield from program_findings(query.call, query.task, plan.choice)
    if query.pinned:
        yield from pin_findings(query.call, query.pinned, plan.cost, costs)
    chosen = zip(query.task.problem.nodes, plan.choice, strict=True)
    is_split = any((node.layouts[layout_index] >= 0).any() for node, layout_index in chosen)
    if not is_split and not plan.result.is_late:
        yield nothing_split(query.call)


def _pin_costs(query: Query, result: SearchResult, deadline: Deadline) -> PinCosts:
    """Searches without pins, and if those cost much, with one group of pins at a time: as far as the time goes."""
    if not query.pinned:
        return PinCosts(is_complete=True)
    if deadline.seconds_left <= query.read_seconds:
        return PinCosts()
    free = query.with_pins({})
    free_result = free.search(deadline)
    if not free_result.fits:  # pins are not what keeps it from fitting
        return PinCosts(is_complete=not free_result.is_late)
    free_seconds = free.task.problem.cost(free_result.choice)
    if not result.fits or query.task.problem.cost(result.choice) < COSTLY_RATIO * free_seconds:
        return PinCosts(True, free_seconds)
    # Arrays of repeated layers share a node: with the same spec, they are pinned by the same line of a rule.
    groups: dict[tuple[int, str], list[int]] = {}
    for index, spec in query.pinned.items():
        home = query.task.problem.homes.get(query.program.arguments[index])
        if home is not None:
            groups.setdefault((home.node, spec_repr(spec)), []).append(index)
    group_seconds: list[tuple[tuple[int, ...], float]] = []
    for count, indices in enumerate(groups.values()):
        if deadline.seconds_left <= query.read_seconds:
            break
        alone = query.with_pins({index: query.pinned[index] for index in indices})
        alone_result = alone.search(deadline.share(len(groups) - count))
        if alone_result.fits:
            group_seconds.append((tuple(indices), alone.task.problem.cost(alone_result.choice)))
        elif not alone_result.is_late:
            group_seconds.append((tuple(indices), math.inf))
    return PinCosts(True, free_seconds, tuple(group_seconds))
