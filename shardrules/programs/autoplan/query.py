"""The query of `autoplan`: a function on one mesh, with a limit of memory and pins."""

import collections
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import jax.tree_util as jtu
from jax.sharding import Mesh, PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_sizes, mesh_text
from shardrules.core.callables import name_of
from shardrules.core.deadline import Deadline
from shardrules.core.errors import ConfigError, DoesNotFitError, RuleTypeError
from shardrules.core.fields import read_bytes
from shardrules.core.finding import Finding, plan_error
from shardrules.core.rule import ShardingPlan, ShardingRule
from shardrules.core.spec import spec_repr
from shardrules.core.tree import array_kind
from shardrules.programs.autoplan.answer.findings import does_not_fit_text
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.programs.autoplan.graph.machine import Assumptions, Machine
from shardrules.programs.autoplan.run.call import Call, read_call
from shardrules.programs.autoplan.solve.limits import search_within
from shardrules.programs.autoplan.solve.proof import memory_bound
from shardrules.programs.autoplan.solve.search import SearchResult, Task
from shardrules.programs.compiling.arguments import argument_names
from shardrules.programs.machine.hardware import Hardware, ready_name
from shardrules.programs.machine.targets import target_of
from shardrules.programs.traced.program import TracedProgram, read_jaxpr


@final
@attrs.frozen
class QueryOptions:
    """The wishes of the user, beside the function and the mesh."""

    memory_limit: int | str | None
    pins: ShardingRule | None
    hardware: Hardware | None
    assumptions: Assumptions | None
    time_limit: float
    prove: bool


@final
@attrs.frozen(eq=False)
class Query:
    """A function to plan on one mesh: everything that is read before a search."""

    fn: Callable[..., Any]
    call: Call
    args: tuple[Any, ...]
    mesh: AnyMesh
    options: QueryOptions
    program: TracedProgram
    machine: Machine
    limit_bytes: int
    pinned: Mapping[int, PartitionSpec]
    """For indices of arrays of the arguments the specs that they have to have."""
    task: Task
    read_seconds: float
    """The time that reading took. Another mesh, or other pins, take as long again, which no deadline interrupts."""
    device_mesh: Mesh | None
    """The devices to compile for, if the compiler is to decide what fits."""

    def check_possible(self) -> None:
        """Raises `DoesNotFitError` if it is certain that no plan fits."""
        _check_possible(self.call, self.program, self.mesh, self.machine.hardware, self.limit_bytes, self.pinned)

    def search(self, deadline: Deadline) -> SearchResult:
        """Finds the best choice that fits; where none is found, the cheapest hardly larger than the smallest."""
        # Ending a search and answering takes a fifth of the time of reading, chosen by hand.
        result = search_within(self.task, self.limit_bytes, deadline.earlier(0.2 * self.read_seconds))
        if result.fits or not result.met:
            return result
        most = 1.01 * min(trial.peak_bytes for trial in result.met)  # the model of memory cannot tell more
        return self.task.with_choice(result, next(trial.choice for trial in result.met if trial.peak_bytes <= most))

    def plan(self, result: SearchResult) -> AutoPlan:
        """Returns the plan that a search found, without findings."""
        return AutoPlan(self.call, self.args, self.mesh, self.limit_bytes, self.options.time_limit, self.task, result)

    def with_pins(self, pinned: Mapping[int, PartitionSpec]) -> "Query":
        """Returns the same query with other pins."""
        task = Task.of(self.program, self.machine, self.call.paths, self.call.feedback, pinned)
        return attrs.evolve(self, pinned=dict(pinned), task=task)


def read_query(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: AnyMesh,
    options: QueryOptions,
    on_host: Sequence[bool] | None = None,
    *,
    check: bool = True,
) -> Query:
    """Traces a function and builds the choices of its layouts on a mesh. `on_host` is as `read_call` takes it.

    With `check`, raises `DoesNotFitError` if it is certain that no plan fits, before these choices are built.
    """
    start = time.monotonic()
    pinned = pinned_specs(fn, args, options.pins, mesh)  # first: what is wrong with pins needs no trace
    call = read_call(fn, args, mesh, name_of(fn), on_host)
    machine = Machine.of(mesh, options.hardware, options.assumptions)
    program = read_jaxpr(call.jaxpr)
    limit_bytes = memory_limit(options.memory_limit, machine.hardware)
    if check:
        _check_possible(call, program, mesh, machine.hardware, limit_bytes, pinned)
    task = Task.of(program, machine, call.paths, call.feedback, pinned)
    target_mesh = device_mesh(mesh, machine.hardware) if options.prove else None
    read_seconds = time.monotonic() - start
    return Query(fn, call, args, mesh, options, program, machine, limit_bytes, pinned, task, read_seconds, target_mesh)


def _check_possible(
    call: Call,
    program: TracedProgram,
    mesh: AnyMesh,
    hardware: Hardware,
    limit_bytes: int,
    pinned: Mapping[int, PartitionSpec],
) -> None:
    """Raises `DoesNotFitError` if it is certain that no plan fits."""
    sizes = mesh_sizes(mesh)
    bound = memory_bound(program, sizes, hardware, call.paths, pinned)
    if bound.nbytes > limit_bytes:
        free = memory_bound(program, sizes, hardware, call.paths, {}) if pinned else None
        pinned_paths = [call.paths[index] for index in pinned]
        text = does_not_fit_text(call.name, mesh_text(mesh), limit_bytes, bound, pinned_paths, free)
        raise DoesNotFitError(text, bound.nbytes)


def memory_limit(requested: int | str | None, hardware: Hardware) -> int:
    """Returns the most memory that a device may use: as requested, or its memory less the reserve."""
    if requested is not None:
        return read_bytes("memory_limit", requested)
    # A tenth, chosen by hand, is left to the runtime, the compiler's scratch space and fragmentation.
    return int(hardware.memory_bytes * 0.9)


def check_time_limit(seconds: float) -> None:
    """Raises `ConfigError` if a search cannot have this time limit."""
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not seconds > 0:  # NaN, too
        raise ConfigError(f"time_limit must be a number of seconds above 0, got {seconds!r:.60}")


def check_rule(pins: Any) -> None:
    """Raises `RuleTypeError` if pins are not a rule."""
    if pins is not None and not isinstance(pins, ShardingRule):
        raise RuleTypeError(
            f"pins must be a rule, got {pins!r:.80}. SpecTreeShardingRule makes one from a tree of specs"
        )


_DEAD_CODES = ("dead-pattern", "dead-pin")
"""The codes of findings about what matches no array."""


def pins_plan(fn: Callable[..., Any], pins: ShardingRule, args: tuple[Any, ...], mesh: AnyMesh) -> ShardingPlan:
    """Returns the plan of arguments by pins, whose paths begin with the names or with the indices of arguments."""
    named = collections.OrderedDict(zip(argument_names(fn, len(args)), args, strict=True))
    plan = pins.plan(args, mesh)
    dead_count = _dead_count(plan)
    if not dead_count:
        return plan
    named_plan = pins.plan(named, mesh)
    return named_plan if _dead_count(named_plan) < dead_count else plan


def _dead_count(plan: ShardingPlan) -> int:
    return sum(finding.code in _DEAD_CODES for finding in plan.findings)


def pinned_specs(
    fn: Callable[..., Any], args: tuple[Any, ...], pins: ShardingRule | None, mesh: AnyMesh
) -> dict[int, PartitionSpec]:
    """Returns the specs that pins have for arrays of the arguments, by the indices of these arrays."""
    if pins is None:
        return {}
    check_rule(pins)
    plan = pins_plan(fn, pins, args, mesh)
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
    pinned = {index: spec for index, spec in enumerate(arrays) if spec is not None}
    # Rules without patterns, such as those for large arrays alone, may have no opinion on a mesh.
    if plan.paths and not pinned and any(finding.code == "dead-pattern" for finding in plan.findings):
        raise ConfigError(
            f"pins match no array: paths begin with the name or the index of an argument, as "
            f"{argument_names(fn, len(args))[0]!r} or {plan.paths[0]!r}. Write patterns for these, or leave pins out"
        )
    return pinned


def device_mesh(mesh: AnyMesh, hardware: Hardware) -> Mesh:
    """Returns a mesh to compile for: the mesh itself, or one like it of devices that need not be present."""
    if isinstance(mesh, Mesh):
        return mesh
    target = target_of(hardware, mesh.size)
    if target is not None:
        return target.mesh(mesh)
    _, _, chip = ready_name(hardware).partition(":")
    cause = f"{chip} slices have several shapes" if chip else f"{hardware.name!r} is not a ready sheet"
    raise ConfigError(
        f"autoplan(prove=True) compiles, and the mesh {mesh_text(mesh)} has no devices to compile for: {cause}. Pass "
        'a mesh of a target, such as mesh=sr.Target.parse("tpu:v5e:4x4").mesh(mesh)'
    )
