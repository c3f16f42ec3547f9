"""`autoplan`: finds where everything in a function goes.

It reads, then searches, then reports. Everything that searches, for the plan and for what its pins cost, divides one
deadline; findings are made from what the searches returned.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs
import jax.tree_util as jtu
from jax.sharding import Mesh, PartitionSpec

from shardrules.analysis.compiling.compile import name_of
from shardrules.analysis.machine.hardware import Hardware
from shardrules.core.axes import AnyMesh, check_mesh, mesh_sizes, mesh_text
from shardrules.core.errors import (
    DoesNotFitError,
    MeshError,
    PlanError,
    RuleTypeError,
    ShardRulesError,
    UnknownAxisError,
)
from shardrules.core.fields import read_bytes
from shardrules.core.finding import Finding, plan_error
from shardrules.core.rule import ShardingRule
from shardrules.core.spec import spec_repr
from shardrules.core.tree import array_kind
from shardrules.mesh.shape import mesh_shape
from shardrules.planning.answer.findings import (
    COSTLY_RATIO,
    NEAR_RATIO,
    PinCosts,
    does_not_fit_text,
    machine_findings,
    may_not_fit,
    near_the_limit,
    nothing_split,
    pin_findings,
    program_findings,
    time_is_up,
    untried_meshes,
)
from shardrules.planning.answer.plan import AutoPlan, Candidate
from shardrules.planning.answer.prove import device_mesh, prove_plan
from shardrules.planning.graph.machine import Assumptions, Machine
from shardrules.planning.run.call import Call, read_call
from shardrules.planning.solve.deadline import Deadline
from shardrules.planning.solve.proof import memory_bound
from shardrules.planning.solve.search import SearchResult, Task
from shardrules.planning.traced.program import TracedProgram, read_jaxpr

_RESERVE = 0.1
"""The part of a device's memory that plans leave free by default: what the runtime, the compiler's scratch space and
fragmentation take. Halved, plans near the limit fail on the device; doubled, memory that is there is not used."""


def autoplan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | int,
    memory_limit: int | str | None = None,
    pins: ShardingRule | None = None,
    hardware: Hardware | None = None,
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
    - `pins`: a rule for the tuple of arguments. Where it has an opinion, the plan follows it.
    - `hardware`: what the devices reach; by default the sheet of the mesh's devices, or of H100s if it has none.
    - `assumptions`: which part of that functions reach; by default `Assumptions()`.
    - `time_limit`: the seconds that planning may take, over all meshes and pins. If it is reached, the best plan so
        far is returned, with its gap and a finding. Plans do not depend on it otherwise.
    - `prove`: whether the compiler decides what fits, instead of a model of it: the best few plans are compiled within
        the time limit, for the mesh's devices, or for those of the hardware if the mesh has none. What they need
        corrects the model for this function, and the cheapest that fits is returned. Arguments that come back as
        results count as donated.

    **Returns:**

    An `AutoPlan`.

    **Raises:**

    `DoesNotFitError` if no plan can fit, with the bound that proves it; `PlanError` if pins do not divide;
    `RuleTypeError` if `pins` is not a rule; `MeshError` if `mesh` is neither a mesh nor a device count; with `prove`,
    `MissingCompilerError` if the compiler is not installed and `ConfigError` if it is not known for which devices to
    compile; and whatever `fn` raises when it is traced. Where no plan fits by the model, the one with the least memory
    is returned, with the finding `may-not-fit`; where one fits by less than a tenth, it has the finding
    `near-the-limit`.

    ```python
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w["up"]) @ w["down"])

    shape = jax.ShapeDtypeStruct
    w = {"up": shape((1024, 4096), jnp.bfloat16), "down": shape((4096, 1024), jnp.bfloat16)}
    planned = sr.autoplan(jax.grad(loss), w, shape((8, 1024), jnp.bfloat16), mesh=sr.mesh_shape("model:8"))
    assert planned.plan.specs[0] == {"up": P(None, "model"), "down": P("model")}
    ```
    """
    deadline = Deadline.after(time_limit)
    options = _Options(memory_limit, pins, hardware, assumptions, time_limit, prove)
    if isinstance(mesh, int):
        return _best_mesh(fn, args, mesh, options, deadline)
    check_mesh(mesh)
    query = _read(fn, args, mesh, options)
    query.check_possible()
    # If the compiler is to decide what fits, the first plan it is asked about is the fastest of all.
    first = query if not prove else attrs.evolve(query, limit_bytes=sys.maxsize)
    return _answer(query, first.search(deadline.share(2) if prove else deadline), deadline)


@final
@attrs.frozen
class _Options:
    """What the user asks for, beside the function and the mesh."""

    memory_limit: int | str | None
    pins: ShardingRule | None
    hardware: Hardware | None
    assumptions: Assumptions | None
    time_limit: float
    prove: bool


@final
@attrs.frozen(eq=False)
class _Query:
    """A function to plan on one mesh: everything that is read before a search."""

    fn: Callable[..., Any]
    call: Call
    args: tuple[Any, ...]
    mesh: AnyMesh
    options: _Options
    program: TracedProgram
    machine: Machine
    limit_bytes: int
    pinned: dict[int, PartitionSpec]
    """For indices of arrays of the arguments the specs that they have to have."""
    task: Task
    read_seconds: float
    """How long reading took: another mesh, or other pins, take about as long again, which no deadline interrupts."""
    device_mesh: Mesh | None
    """What to compile for, if the compiler is to decide what fits."""

    def check_possible(self) -> None:
        """Raises `DoesNotFitError` if it is certain that no plan fits."""
        bound = memory_bound(self.program, self.machine, self.call.paths, self.pinned)
        if bound.nbytes > self.limit_bytes:
            free = memory_bound(self.program, self.machine, self.call.paths, {}) if self.pinned else None
            pinned_paths = [self.call.paths[index] for index in self.pinned]
            text = does_not_fit_text(self.call.name, self.mesh, self.limit_bytes, bound, pinned_paths, free)
            raise DoesNotFitError(text, bound.nbytes)

    def search(self, deadline: Deadline) -> SearchResult:
        """Finds the best choice that fits."""
        return self.task.within(self.limit_bytes, deadline)

    def with_pins(self, pinned: Mapping[int, PartitionSpec]) -> "_Query":
        """Returns the same query with other pins."""
        task = Task.of(self.program, self.machine, self.call.paths, self.call.feedback, pinned)
        return attrs.evolve(self, pinned=dict(pinned), task=task)


def _read(fn: Callable[..., Any], args: tuple[Any, ...], mesh: AnyMesh, options: _Options) -> _Query:
    start = time.monotonic()
    call = read_call(fn, args, mesh, name_of(fn))
    machine = Machine.of(mesh, options.hardware, options.assumptions)
    program = read_jaxpr(call.jaxpr)
    if options.memory_limit is None:
        limit_bytes = int(machine.hardware.memory_bytes * (1 - _RESERVE))
    else:
        limit_bytes = read_bytes("memory_limit", options.memory_limit)
    pinned = _pinned_specs(args, options.pins, mesh)
    task = Task.of(program, machine, call.paths, call.feedback, pinned)
    target_mesh = device_mesh(mesh, machine.hardware) if options.prove else None
    read_seconds = time.monotonic() - start
    return _Query(fn, call, args, mesh, options, program, machine, limit_bytes, pinned, task, read_seconds, target_mesh)


def _pinned_specs(args: tuple[Any, ...], pins: ShardingRule | None, mesh: AnyMesh) -> dict[int, PartitionSpec]:
    if pins is None:
        return {}
    if not isinstance(pins, ShardingRule):
        raise RuleTypeError(
            f"pins must be a rule, got {pins!r:.80}. SpecTreeShardingRule makes one from a tree of specs"
        )
    plan = pins.plan(args, mesh)
    plan.check()
    order = list(mesh_sizes(mesh))
    # Layouts have one order of the axes on a dim, the mesh's; plans with another could not be compared.
    misordered = [
        Finding(
            "error",
            "axis-order",
            f"pinned as {spec_repr(spec)}, but several axes on one dim must be in the order of the mesh",
            path,
            "Name them in that order, or reverse the mesh",
        )
        for path in plan.paths
        for spec in [plan.decision(path).spec]
        if spec is not None
        and any(isinstance(entry, tuple) and sorted(entry, key=order.index) != list(entry) for entry in spec)
    ]
    if misordered:
        raise plan_error("pins that the planner cannot keep", misordered)
    specs = [None if kind < 0 else plan.decisions[kind].spec for kind in plan.survey.kind_of]
    arrays = [spec for leaf, spec in zip(jtu.tree_leaves(args), specs, strict=True) if array_kind(leaf) is not None]
    return {index: spec for index, spec in enumerate(arrays) if spec is not None}


def _best_mesh(
    fn: Callable[..., Any], args: tuple[Any, ...], count: int, options: _Options, deadline: Deadline
) -> AutoPlan:
    """Searches on meshes of some devices, which divide the time, and returns the plan of the best."""
    if count < 1:
        raise MeshError(f"mesh must be a mesh or a device count of at least 1, got {count}")
    texts = _mesh_texts(count)
    outcomes: list[tuple[_Query, SearchResult]] = []
    candidates: list[Candidate] = []
    refusal: ShardRulesError | None = None
    for index, text in enumerate(texts):
        # Reading cannot be interrupted. Without the time for it, a search would have none either.
        if outcomes and deadline.seconds_left <= outcomes[-1][0].read_seconds:
            break
        try:
            query = _read(fn, args, mesh_shape(text), options)
            query.check_possible()
        # Pins and constraints may name axes that not all meshes have.
        except (PlanError, UnknownAxisError, DoesNotFitError) as error:
            refusal = refusal or error
            candidates.append(Candidate(text, None, 0))
            continue
        result = query.search(deadline.share(len(texts) - index))
        outcomes.append((query, result))
        seconds = query.task.problem.cost(result.choice) if result.fits else None
        candidates.append(Candidate(text, seconds, int(result.peak_bytes)))
    if not outcomes:
        assert refusal is not None, "every mesh is searched or refused"
        raise refusal
    best, result = min(outcomes, key=_rank)
    plan = _answer(best, result, deadline)
    # The best first; those that do not fit come last.
    candidates.sort(key=lambda candidate: (candidate.seconds is None, candidate.seconds or 0.0, candidate.mesh))
    untried = texts[len(candidates) :]
    findings = (*plan.findings, untried_meshes(untried)) if untried else plan.findings
    return attrs.evolve(plan, candidates=tuple(candidates), findings=findings)


def _rank(outcome: tuple[_Query, SearchResult]) -> tuple[int, float, str]:
    """Orders outcomes: plans that fit by their cost, then others by what they need."""
    query, result = outcome
    if result.fits:
        return 0, query.task.problem.cost(result.choice), mesh_text(query.mesh)
    return 1, int(result.peak_bytes), mesh_text(query.mesh)


def _mesh_texts(count: int) -> list[str]:
    """Returns meshes of one and two axes, the larger axis first and last."""
    texts = [f"data:{count}"]
    texts += [f"data:{count // size},model:{size}" for size in range(2, count) if count % size == 0]
    return texts


def _answer(query: _Query, result: SearchResult, deadline: Deadline) -> AutoPlan:
    """Returns the plan that a search found, with its findings."""
    costs = _pin_costs(query, result, deadline)
    # Findings come last, and search nothing: they only read the plan.
    plan = AutoPlan(query.call, query.args, query.mesh, query.limit_bytes, query.options.time_limit, query.task, result)
    plan = attrs.evolve(plan, findings=tuple(_findings(query, plan, costs)))
    return plan if query.device_mesh is None else prove_plan(plan, query.fn, query.device_mesh, deadline)


def _findings(query: _Query, plan: AutoPlan, costs: PinCosts) -> Iterator[Finding]:
    if not plan.result.fits:
        yield may_not_fit(query.call, query.limit_bytes, plan.result.peak_bytes, list(query.pinned), costs)
    elif query.device_mesh is None and plan.peak_bytes > NEAR_RATIO * query.limit_bytes:
        yield near_the_limit(query.limit_bytes, plan.peak_bytes)
    if plan.result.is_late:
        yield time_is_up(query.options.time_limit, plan.gap)
    yield from machine_findings(query.mesh, query.options.hardware)
    yield from program_findings(query.call, query.task)
    if query.pinned:
        yield from pin_findings(query.call, query.pinned, plan.cost, costs)
    chosen = zip(query.task.problem.nodes, plan.choice, strict=True)
    if not any((node.layouts[layout_index] >= 0).any() for node, layout_index in chosen):
        yield nothing_split(query.call)


def _pin_costs(query: _Query, result: SearchResult, deadline: Deadline) -> PinCosts:
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
