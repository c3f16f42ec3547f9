"""`autoplan`: finds where everything in a function is to be."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.analysis.compiling.compile import name_of
from shardrules.analysis.machine.hardware import Hardware
from shardrules.core.axes import AnyMesh, check_mesh, mesh_sizes, mesh_text
from shardrules.core.check import bytes_text
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
from shardrules.planning.answer.plan import AutoPlan, Candidate
from shardrules.planning.graph.machine import Assumptions, Machine, has_sheet
from shardrules.planning.run.call import Call, read_call
from shardrules.planning.solve.search import Task
from shardrules.planning.traced.program import TracedProgram, read_jaxpr

_RESERVE = 0.1
_DEAR = 2.0
_LARGE = 2**20


def autoplan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | int,
    memory_limit: int | str | None = None,
    pins: ShardingRule | None = None,
    hardware: Hardware | None = None,
    assumptions: Assumptions | None = None,
    time_limit: float = 60,
) -> AutoPlan:
    """Finds where the arguments, the results and everything inside of a function are to be, so that it runs fastest.

    The function is traced, and every layout of every array in it is weighed by what computing and communicating would
    take. Nothing is run or compiled.

    **Arguments:**

    - `fn`: any function that JAX can trace: a whole train step, say. `eqx.filter_*` functions will do.
    - `args`: its arguments; shapes will do. An argument that comes back as a result, as the state of training does,
        comes back where it was.
    - `mesh`: a mesh, with devices or without; or a number of devices, for which meshes are tried, too.
    - `memory_limit`: the most that may lie in the memory of a device, in bytes or as text (`"60GiB"`): arguments,
        results and everything in between. By default the device's memory less a tenth.
    - `pins`: a rule for the tuple of arguments. What it has an opinion on stays as it says.
    - `hardware`: what the devices can do; by default the sheet of the mesh's own devices, and that of H100s for a mesh
        without.
    - `assumptions`: which part of what they can do they reach; by default `Assumptions()`.
    - `time_limit`: after how many seconds the best plan known by then will do.

    **Returns:**

    An `AutoPlan`.

    **Raises:**

    `DoesNotFitError` where nothing fits, with about the smallest limit that something fits in; `PlanError` where pins
    do not divide; `RuleTypeError` where they are no rule; `MeshError` where `mesh` is no mesh and no number of devices;
    whatever `fn` raises when it is traced.

    ```python
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w["up"]) @ w["down"])

    shape = jax.ShapeDtypeStruct
    w = {"up": shape((1024, 4096), jnp.bfloat16), "down": shape((4096, 1024), jnp.bfloat16)}
    planned = sr.autoplan(jax.grad(loss), w, shape((8, 1024), jnp.bfloat16), mesh=sr.mesh_shape("model:8"))
    assert planned.plan.specs[0] == {"up": P(None, "model"), "down": P("model")}
    ```
    """
    begun = time.monotonic()
    wishes = _Wishes(memory_limit, pins, hardware, assumptions, time_limit)
    if isinstance(mesh, int):
        return _search(fn, args, mesh, wishes)
    check_mesh(mesh)
    return _planned(read_call(fn, args, mesh, name_of(fn)), args, mesh, wishes, begun + time_limit)


@final
@attrs.frozen
class _Wishes:
    """What is asked for, beside the function and the mesh."""

    memory_limit: int | str | None
    pins: ShardingRule | None
    hardware: Hardware | None
    assumptions: Assumptions | None
    time_limit: float

    def limit(self, machine: Machine) -> int:
        """The most that may lie in memory, in bytes."""
        if self.memory_limit is None:
            return int(machine.hardware.memory_bytes * (1 - _RESERVE))
        return read_bytes("memory_limit", self.memory_limit)


def _planned(call: Call, args: tuple[Any, ...], mesh: AnyMesh, wishes: _Wishes, deadline: float) -> AutoPlan:
    machine = Machine.of(mesh, wishes.hardware, wishes.assumptions)
    program = read_jaxpr(call.jaxpr)
    limit = wishes.limit(machine)
    pinned = _pinned(args, wishes.pins, mesh)
    task = Task.of(program, machine, call.paths, call.feedback, pinned)
    found = task.within(limit, deadline)
    free = Task.of(program, machine, call.paths, call.feedback, {}) if pinned else task
    if found.solution is None:
        if found.is_late:
            raise PlanError(
                f"{call.name}: nothing that fits in {bytes_text(limit)} was found on {mesh_text(mesh)} before the time "
                f"was up, {wishes.time_limit:.3g} s; the least that was met takes {bytes_text(found.peak_bytes)}. "
                "Raise time_limit, or pin what you know"
            )
        text = _too_large(call, mesh, limit, found.peak_bytes, free, pinned, deadline)
        raise DoesNotFitError(text, int(found.peak_bytes))
    findings = [*_about_machine(mesh, wishes.hardware), *_about_program(call, program, task)]
    plan = AutoPlan(call, args, mesh, limit, wishes.time_limit, task, found)
    if pinned:
        findings += _about_pins(plan, free, pinned, deadline)
    labels = zip(task.problem.nodes, plan.choice, strict=True)
    if not any((node.layouts[label] >= 0).any() for node, label in labels):
        findings.append(_nothing(plan))
    return attrs.evolve(plan, findings=tuple(findings))


def _pinned(args: tuple[Any, ...], pins: ShardingRule | None, mesh: AnyMesh) -> dict[int, PartitionSpec]:
    """For numbers of arrays the specs that they have to have."""
    if pins is None:
        return {}
    if not isinstance(pins, ShardingRule):
        raise RuleTypeError(f"pins is a rule, got {pins!r:.80}. SpecTreeShardingRule makes one of a tree of specs")
    plan = pins.plan(args, mesh)
    plan.check()
    order = list(mesh_sizes(mesh))
    wrong = [
        Finding(
            "error",
            "axis-order",
            f"it is pinned as {spec_repr(spec)}, and several axes on one dim stand in the order of the mesh",
            path,
            "Name them in that order, or make the mesh the other way round",
        )
        for path in plan.paths
        for spec in [plan.decision(path).spec]
        if spec is not None
        and any(isinstance(one, tuple) and sorted(one, key=order.index) != list(one) for one in spec)
    ]
    if wrong:
        raise plan_error("pins that the planner cannot keep", wrong)
    decided = [None if kind < 0 else plan.decisions[kind].spec for kind in plan.survey.kind_of]
    arrays = [spec for leaf, spec in zip(jtu.tree_leaves(args), decided, strict=True) if array_kind(leaf) is not None]
    return {number: spec for number, spec in enumerate(arrays) if spec is not None}


def _too_large(
    call: Call, mesh: AnyMesh, limit: int, least: float, free: Task, pinned: Mapping[int, Any], deadline: float
) -> str:
    text = f"{call.name} does not fit in {bytes_text(limit)} on {mesh_text(mesh)}: it takes about {bytes_text(least)}"
    if pinned and free.within(limit, max(deadline, time.monotonic() + 10)).solution is not None:
        largest = sorted(pinned, key=lambda number: -math.prod(call.structs[number].shape))
        names = [call.paths[number] for number in largest]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"{text} as it is pinned, and would fit without the pins. Pinned: {shown}. Take out what splits least"
    return f"{text} at the least. Take more devices, a smaller batch, or recompute activations (jax.checkpoint)"


def _about_machine(mesh: AnyMesh, hardware: Hardware | None) -> Iterator[Finding]:
    if hardware is None and not has_sheet(mesh):
        yield Finding(
            "note",
            "assumed-hardware",
            f"{mesh_text(mesh)} has no devices that there is a sheet for: it is planned for H100s",
            remedy="Pass hardware=",
        )


def _about_program(call: Call, program: TracedProgram, task: Task) -> Iterator[Finding]:
    back = dict.fromkeys(call.names[call.owners[number]] for number in call.feedback.values())
    if back:
        yield Finding(
            "note",
            "fed-back",
            f"{', '.join(back)} {'come' if len(back) > 1 else 'comes'} back as results of the same structure: in the "
            "same layout, and over the same memory if it is donated",
        )
    for name, count in program.unknown_primitives:
        yield Finding(
            "warning",
            "unknown-operation",
            f"there is no rule for {name}, which is taken {count} time{'s' * (count > 1)}: what it takes and gives is "
            "whole on every device",
            remedy="Put it in jax.shard_map, where it can be split by hand",
        )
    printed = sum(operation.name.startswith("debug_") for operation in program.operations)
    if printed:
        yield Finding(
            "note",
            "debug-callback",
            f"{printed} debug callback{'s gather what they get' if printed > 1 else ' gathers what it gets'}, whole",
            remedy="Take them out, or give them less",
        )
    opaque = sum(operation.role == "opaque" for operation in program.operations)
    if opaque:
        stay = "shard_maps stay" if opaque > 1 else "shard_map stays"
        yield Finding("note", "opaque", f"{opaque} {stay} as written; what is computed inside is in no figure")
    for spec in task.ignored:
        yield Finding(
            "warning",
            "constraint-ignored",
            f"a constraint in the function asks for {spec}, which does not divide, or is no layout of this mesh: it is "
            "not planned for, and the compiler makes of it what it can",
            remedy="Correct it, or take it out",
        )
    held_whole = sum(program.arrays[number].nbytes for number in program.constants)
    if held_whole >= _LARGE:
        yield Finding(
            "warning",
            "whole-constant",
            f"the function holds {bytes_text(held_whole)} in arrays that are no arguments: it is on every device",
            remedy="Make them arguments",
        )
    fixed = sum(operation.role == "fixed" for operation in program.operations)
    if fixed:
        yield Finding(
            "note",
            "constrained",
            f"{fixed} constraint{'s' * (fixed > 1)} in the function {'are' if fixed > 1 else 'is'} obeyed",
            remedy="Take them out to leave these layouts to the planner",
        )


def _about_pins(plan: AutoPlan, free: Task, pinned: Mapping[int, PartitionSpec], deadline: float) -> Iterator[Finding]:
    """Pins that cost much, each by itself."""
    best = free.within(plan.memory_limit, max(deadline, time.monotonic() + 10))
    if best.solution is None:
        return
    least = free.problem.cost(best.choice)
    if plan.cost < _DEAR * least:
        return
    task = plan.task
    groups: dict[tuple[int, Any], list[int]] = {}
    for number, spec in pinned.items():
        home = task.problem.homes.get(task.problem.program.arguments[number])
        if home is not None:
            groups.setdefault((home.node, spec_repr(spec)), []).append(number)
    blamed = False
    for numbers in groups.values():
        alone = Task.of(
            task.problem.program,
            task.problem.machine,
            plan.call.paths,
            plan.call.feedback,
            {number: pinned[number] for number in numbers},
        )
        found = alone.within(plan.memory_limit, time.monotonic() + 10)
        cost = np.inf if found.solution is None else alone.problem.cost(found.choice)
        if cost >= _DEAR * least:
            blamed = True
            yield _dear(plan, numbers, pinned, cost, least)
    if not blamed:
        yield _dear(plan, list(pinned), pinned, plan.cost, least)


def _dear(
    plan: AutoPlan, numbers: list[int], pinned: Mapping[int, PartitionSpec], cost: float, least: float
) -> Finding:
    return Finding(
        "warning",
        "costly-pin",
        f"pinned as {spec_repr(pinned[numbers[0]])}, a call takes {1000 * cost:.4g} ms; {1000 * least:.4g} ms without",
        plan.call.paths[numbers[0]],
        "Take the pin out, or say why it is so",
        tuple(plan.call.structs[numbers[0]].shape),
        count=len(numbers),
    )


def _nothing(plan: AutoPlan) -> Finding:
    return Finding(
        "note",
        "nothing-split",
        f"nothing in {plan.call.name} is worth splitting: all of it is done on every device",
    )


def _search(fn: Callable[..., Any], args: tuple[Any, ...], count: int, wishes: _Wishes) -> AutoPlan:
    """Tries meshes of a number of devices."""
    if count < 1:
        raise MeshError(f"mesh is a mesh or a number of devices, 1 or more; got {count}")
    texts = _shapes(count)
    plans: list[AutoPlan] = []
    candidates: list[Candidate] = []
    refused: ShardRulesError | None = None
    for text in texts:
        mesh = mesh_shape(text)
        left = max(5.0, wishes.time_limit / len(texts))
        try:
            call = read_call(fn, args, mesh, name_of(fn))
            plan = _planned(call, args, mesh, wishes, time.monotonic() + left)
        except DoesNotFitError as error:
            smaller = not isinstance(refused, DoesNotFitError) or error.needed_bytes < refused.needed_bytes
            refused = error if smaller else refused
            candidates.append(Candidate(text, None, error.needed_bytes))
            continue
        except (PlanError, UnknownAxisError) as error:  # pins and constraints may name axes that not all meshes have
            refused = error if refused is None else refused
            candidates.append(Candidate(text, None, 0))
            continue
        plans.append(plan)
        candidates.append(Candidate(text, plan.cost, plan.peak_bytes))
    if not plans:
        assert refused is not None, "every mesh is planned or refused"
        raise refused
    best = min(plans, key=lambda plan: (plan.cost, mesh_text(plan.mesh)))
    candidates.sort(key=lambda one: (one.seconds is None, one.seconds or 0.0, one.mesh))
    return attrs.evolve(best, candidates=tuple(candidates))


def _shapes(count: int) -> list[str]:
    """Meshes of one and two axes, the larger axis first and last."""
    found = [f"data:{count}"]
    found += [f"data:{count // size},model:{size}" for size in range(2, count) if count % size == 0]
    return found
