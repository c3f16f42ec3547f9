"""The plan that `autoplan` finds: what it costs, why it is so, and how to run a function by it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import attrs
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.deadline import Deadline
from shardrules.core.errors import TreeError, printable, suggest
from shardrules.core.finding import Finding, listing, template
from shardrules.core.rule import ShardingPlan, ShardingRule, SpecTreeShardingRule
from shardrules.core.spec import spec_repr
from shardrules.core.text import bytes_text
from shardrules.core.tree import array_kind
from shardrules.core.views.diff import Placements, PlanDiff
from shardrules.core.views.table import MOST_ROWS, aligned
from shardrules.programs.autoplan.answer.diff import AutoPlanDiff
from shardrules.programs.autoplan.answer.explain import (
    Alternative,
    ArrayUse,
    RegionUse,
    SplitDim,
    alternative_text,
    array_uses,
    other_regions,
    region_uses,
    split_dims,
)
from shardrules.programs.autoplan.answer.frontier import Frontier, FrontierPoint
from shardrules.programs.autoplan.answer.host_traffic import HostTraffic
from shardrules.programs.autoplan.answer.whole import first_line
from shardrules.programs.autoplan.graph.layouts import spec_of
from shardrules.programs.autoplan.graph.machine import COLLECTIVE_KINDS
from shardrules.programs.autoplan.graph.problem import ChosenMove
from shardrules.programs.autoplan.run.call import Call
from shardrules.programs.autoplan.run.replay import PlannedFunction
from shardrules.programs.autoplan.solve.limits import frontier_points, search_within
from shardrules.programs.autoplan.solve.peak import Certainty, Peak
from shardrules.programs.autoplan.solve.search import SearchResult, Task
from shardrules.programs.autoplan.solve.solver import LIMIT_TOLERANCE
from shardrules.programs.compiling.arguments import donated_arguments
from shardrules.programs.costs.step_time import StepTime
from shardrules.programs.machine.targets import Target

if TYPE_CHECKING:
    from shardrules.programs.patches.explicit import ExplicitCheck
    from shardrules.programs.patches.patch import SourcePatch
    from shardrules.programs.patches.planned import PlannedProgram

Status: TypeAlias = Literal["optimal", "feasible"]
"""A plan's proof: no other that fits is better, or another may be."""


@final
@attrs.frozen
class Candidate:
    """A mesh that was tried."""

    mesh: str
    seconds: float | None
    """The modelled time of a call on it; `None` where nothing fits."""
    peak_bytes: int
    """The peak of the best plan; where nothing fits, the least that was met."""


@final
@attrs.frozen
class CompiledPlan:
    """A plan that was compiled to see what it needs."""

    seconds: float
    """The modelled time of a call."""
    predicted_bytes: int
    """The peak as modelled, before compiling."""
    peak_bytes: int
    """The peak as the compiler reports it."""
    is_chosen: bool = False


@final
@attrs.frozen(eq=False)
class AutoPlan:
    """A plan for a function: where its arguments, its results and everything in between are. `autoplan` makes them.

    ```python
    def step(w, x):
        gradients = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2))(w)
        return jax.tree.map(lambda old, change: old - 0.1 * change, w, gradients)

    w, x = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((65536, 512), jnp.float32)
    planned = sr.autoplan(step, (w, w), x, mesh=sr.mesh_shape("data:8"))
    assert planned.plan.specs[1] == P("data") and planned.wire_bytes > 0 and planned.status == "optimal"
    ```
    """

    call: Call = attrs.field(repr=False)
    """The function, traced."""
    args: tuple[Any, ...] = attrs.field(repr=False)
    mesh: AnyMesh
    memory_limit: int
    """The most memory that a device may use, in bytes."""
    time_limit: float
    """The seconds that a search may take."""
    task: Task = attrs.field(repr=False)
    """The choices there were."""
    result: SearchResult = attrs.field(repr=False)
    """The choice, and how it was found."""
    findings: tuple[Finding, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    """The meshes that were tried, the best first, if a device count was given."""
    compiled: tuple[CompiledPlan, ...] = ()
    """The plans compiled with `prove=True`, in that order: this plan, unless the compiler failed at it, and others."""

    @property
    def choice(self) -> tuple[int, ...]:
        """For each node of the problem the index of its layout."""
        return self.result.choice

    @property
    def status(self) -> Status:
        """`"optimal"` if the plan fits and no other is better by 0.2 % and a nanosecond, as modelled; else
        `"feasible"`: another may be, by `gap` at most. Plans for which the compiler has to save memory, and hides less,
        count only where this is one."""
        # Chosen by hand: searches end at `CLOSE`, half of this, and functions that cost next to nothing have gaps of
        # rounding only.
        is_best = self.cost - self.bound < 2e-3 * self.cost + 1e-9
        return "optimal" if is_best and self.is_expected_to_fit and self.result.fits else "feasible"

    @property
    def fits(self) -> Certainty:
        """The certainty that the plan keeps the memory limit: `"certain"`, `"possible"`, or `"no"`, which is false."""
        return self.peak.fit(self.memory_limit)

    @property
    def is_expected_to_fit(self) -> bool:
        """Returns whether the expected peak keeps the memory limit; with `prove`, whether the compiler's does."""
        return self.peak.expected <= self.memory_limit * (1 + LIMIT_TOLERANCE)

    @functools.cached_property
    def cost(self) -> float:
        """The modelled time of one call in seconds, if nothing overlaps: the search minimizes it."""
        return self.task.problem.cost(self.choice)

    @property
    def bound(self) -> float:
        """The least seconds that any plan that fits takes."""
        return min(self.result.bound, self.cost)

    @property
    def gap(self) -> float:
        """The part of the cost by which the best plan may be better."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0

    @property
    def seconds(self) -> float:
        """The seconds that the search took."""
        return self.result.seconds

    @property
    def price_of_memory(self) -> float:
        """The seconds that one more byte of memory would save in each call; 0 if memory does not matter."""
        return self.result.price

    @functools.cached_property
    def step_time(self) -> StepTime:
        """The modelled time of one call, in its parts, as an audit reports it of the compiled plan."""
        moves = self._moves
        exposed = sum(move.exposed_seconds * move.count for move in moves)
        communication = sum(move.seconds * move.count for move in moves)
        copies = self.host_traffic.exposed_seconds
        compute = self.cost - communication - copies
        nodes = zip(self.task.problem.nodes, self.choice, strict=True)
        memory = sum(float(node.memory_seconds[index]) for node, index in nodes) - copies
        # Nothing hides behind more computing than there is.
        return StepTime(compute, communication, memory, max(exposed, communication - compute), copies)

    @functools.cached_property
    def _moves(self) -> list[ChosenMove]:
        problem = self.task.problem
        return [*problem.chosen_moves(self.choice), *problem.exchanges(self.choice)]

    @functools.cached_property
    def host_traffic(self) -> HostTraffic:
        """The traffic of a device with its host in one call."""
        return HostTraffic.of(self.task.problem, self.choice)

    @functools.cached_property
    def sent_bytes(self) -> dict[str, int]:
        """The bytes that a device sends in one call, by kind of collective."""
        total = np.zeros(len(COLLECTIVE_KINDS))
        for move in self._moves:
            total += move.sent * move.count
        return dict(zip(COLLECTIVE_KINDS, map(int, total), strict=True))

    @property
    def wire_bytes(self) -> int:
        """The bytes that a device sends in one call."""
        return sum(self.sent_bytes.values())

    @property
    def is_compiled(self) -> bool:
        """Returns whether the plan itself was compiled with `prove`."""
        return any(trial.is_chosen for trial in self.compiled)

    @functools.cached_property
    def peak(self) -> Peak:
        """The range of the most memory that a device uses once the plan is compiled, as modelled; with `prove`, a
        point, as compiled.

        Arguments that come back as results count as donated. Run without `donate_argnums`, these results come on top.
        """
        for trial in self.compiled:
            if trial.is_chosen:
                return Peak.point(trial.peak_bytes)
        task = self.task.tight() if self.result.is_tight else self.task
        return task.peak(self.choice)

    @property
    def peak_bytes(self) -> int:
        """The most memory that a device is expected to use; with `prove`, as compiled."""
        return int(self.peak.expected)

    @functools.cached_property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """The spec of each array of the arguments, in order."""
        return tuple(map(self.spec_of, self.task.problem.program.arguments))

    @functools.cached_property
    def result_specs(self) -> tuple[PartitionSpec, ...]:
        """The spec of each array that is returned, in order."""
        return tuple(map(self.spec_of, self.task.problem.program.results))

    def spec_of(self, array: int | None) -> PartitionSpec:
        """Returns the spec of an array of the program, by its index; `None` is a constant."""
        problem = self.task.problem
        home = None if array is None else problem.homes.get(array)
        if home is None or array is None:  # nothing to choose: whole on every device
            return PartitionSpec()
        return spec_of(problem.layout(home, self.choice), len(problem.program.arrays[array].shape), problem.machine)

    @functools.cached_property
    def plan(self) -> ShardingPlan:
        """The plan of the tuple of arguments."""
        return attrs.evolve(self._plan_of(self.args, self.specs), argument_names=self.call.argument_names)

    def argument_plan(self, argument_index: int) -> ShardingPlan:
        """Returns the plan of one argument: for `filter_init`, checkpoints and everything else that takes plans."""
        owners = zip(self.specs, self.call.argument_indices, strict=True)
        return self._plan_of(self.args[argument_index], [spec for spec, owner in owners if owner == argument_index])

    def _plan_of(self, tree: Any, specs: Sequence[PartitionSpec]) -> ShardingPlan:
        leaves, treedef = jtu.tree_flatten(tree)
        # Only arrays have specs; other leaves of the tree have none.
        rest = iter(specs)
        leaf_specs = [None if array_kind(leaf) is None else next(rest) for leaf in leaves]
        return SpecTreeShardingRule(treedef.unflatten(leaf_specs)).plan(tree, self.mesh)

    def as_rule(self) -> SpecTreeShardingRule:
        """Returns a rule for the tuple of arguments that decides as the plan does."""
        return self.plan.as_rule()

    def to_rules(self) -> ShardingRule:
        """Returns a short list of patterns for the tuple of arguments that decides as the plan does: see
        [`ShardingPlan.to_rules`][shardrules.ShardingPlan.to_rules]."""
        return self.plan.to_rules()

    def jit(self, fn: Callable[..., Any], *, donate_argnums: int | Sequence[int] = ()) -> PlannedFunction:
        """Returns the function compiled as planned, with arguments, results and everything inside where the plan says.

        `fn` is the function that was planned; its code stays as it is. Call the result as you call `fn`, or lower it
        with `.lower(*args)`. Both raise `TreeError` if the function or the shapes are not the planned ones, and
        `NoMeshError` if the mesh has no devices and none like it is in force. `donate_argnums` is as in `jax.jit`; the
        model of memory assumes that arguments which come back as results are donated.

        ```python
        double = lambda x: 2 * x
        x = np.arange(16.0)
        planned = sr.autoplan(double, x, mesh=sr.create_mesh("data:8"))
        assert (planned.jit(double)(x) == 2 * x).all()
        ```
        """
        return PlannedFunction(
            fn,
            self.call,
            self.mesh,
            self.task.problem,
            self.choice,
            self.specs,
            self.result_specs,
            donated_arguments(donate_argnums, len(self.args)),
            self.memory_limit,
            int(self.result.peak_bytes),
        )

    def to_patch(
        self,
        fn: Callable[..., Any],
        *,
        root: str | Path | None = None,
        target: Target | str | None = None,
        time_limit: float = 300,
    ) -> "SourcePatch":
        """Returns the plan's layouts inside of the function as a patch of its source, which prints as a diff.

        `fn` is the function that was planned, from files of the project `root`: by default that of its own file. On
        Auto axes annotations are `with_sharding_constraint`s, on Explicit ones `reshard` and `out_sharding`. Only those
        stay without which the program compiled for `target`, by default that of the plan, is another; once `time_limit`
        seconds are over, none is taken out any more. Raises `PatchError` where no line can be changed.
        """
        from shardrules.programs.patches.patch import make_patch

        return make_patch(fn, self._program(fn), root, target, time_limit)

    def check_explicit(
        self, fn: Callable[..., Any], *, root: str | Path | None = None, target: Target | str | None = None
    ) -> "ExplicitCheck":
        """Returns the lines of the function that JAX refuses on an Explicit mesh, each with what mends it."""
        from shardrules.programs.patches.patch import check_explicit

        return check_explicit(fn, self._program(fn), root, target)

    def _program(self, fn: Callable[..., Any]) -> "PlannedProgram":
        from shardrules.programs.autoplan.answer.code import planned_program

        # A plan of the only argument is for that argument, not for a tuple of it.
        arguments = self.argument_plan(0) if len(self.args) == 1 else self.plan
        return planned_program(self.jit(fn), self.args, arguments)

    @functools.cached_property
    def split_dims(self) -> tuple[SplitDim, ...]:
        """Dims that go together through the function, as batch, heads and features do, and the axes that split them."""
        return split_dims(self.task.problem, self.choice, self.call.paths)

    @functools.cached_property
    def regions(self) -> tuple[RegionUse, ...]:
        """The layout of each `shardrules.region`, and what its alternatives would take instead."""
        return region_uses(self.task.problem, self.choice)

    def uses(self, path: str) -> tuple[ArrayUse, ...]:
        """Returns the operations that use an argument, by its path in `call.paths`, and the layouts they take it in."""
        return array_uses(self.task.problem, self.choice, self._argument_index(path))

    def alternative(self, path: str) -> Alternative | None:
        """Searches for the best plan in which an argument has another layout; `None` if none fits."""
        array = self.task.problem.program.arguments[self._argument_index(path)]
        home = self.task.problem.homes.get(array)
        if home is None:
            return None
        # The same problem, without the layout that it has.
        rows = np.arange(len(self.task.problem.nodes[home.node].layouts))
        changed = self._with_layouts(home.node, np.delete(rows, self.choice[home.node]))
        if changed is None:
            return None
        # Nothing was compiled of the other plan: models are compared with models.
        modelled = attrs.evolve(self, compiled=())
        return Alternative(
            changed.spec_of(array),
            changed.cost - self.cost,
            changed.wire_bytes - self.wire_bytes,
            changed.peak_bytes - modelled.peak_bytes,
        )

    def _with_layouts(self, node: int, rows: np.ndarray) -> "AutoPlan | None":
        """Searches for the best plan in which a node has one of these layouts; `None` if none fits."""
        keep = [np.arange(len(each.layouts)) for each in self.task.problem.nodes]
        keep[node] = rows
        if not len(rows):
            return None
        other = search_within(self.task.only(keep), self.memory_limit, Deadline.after(self.time_limit))
        return attrs.evolve(self, result=other.reindexed(keep), compiled=()) if other.fits else None

    def explain(self, path: str) -> str:
        """Returns a few lines on the spec of an argument: what uses it, and what the next best would cost.

        `path` is as the plan prints it; with a `*`, it is the first array of that row. Paths of `plan`, which begin
        with the index of an argument, are accepted too. Of regions that use the array, these are also plans with the
        alternatives that do not run.
        """
        index = self._argument_index(path)
        array = self.call.structs[index]
        name = printable(self.call.paths[index])
        head = f"{name} {array.dtype.name}{list(array.shape)}: {spec_repr(self.specs[index])}"
        lines = [str(use) for use in self.uses(path)]
        for other in other_regions(self.task.problem, self.choice, index):
            changed = self._with_layouts(other.node, np.array(other.rows))
            lines.append(other.text(None if changed is None else changed.cost - self.cost))
        return "\n".join(
            [head, *(printable(f"  {line}") for line in lines), f"  {alternative_text(self.alternative(path))}"]
        )

    def _argument_index(self, path: str) -> int:
        # As the table prints it, with `*` in the path of several arrays, or as `plan` has it.
        for paths in (self.call.paths, [template(path) for path in self.call.paths], self.plan.paths):
            if path in paths:
                return paths.index(path)
        raise TreeError(f"no array {path!r} among the arguments of {self.call.name}{suggest(path, self.call.paths)}")

    def frontier(self, count: int = 6) -> Frontier:
        """Returns what less memory costs: the best plan for each of `count` budgets, by a search each.

        They go from the least budget that anything fits in to the largest that helps. All of them take no longer than
        the time limit of the plan: once it is up, the other budgets get the best of the plans met before.
        """
        points = frontier_points(self.task, count, Deadline.after(self.time_limit))
        return Frontier(self.call.name, mesh_text(self.mesh), tuple(FrontierPoint(*point) for point in points))

    def diff(self, other: "AutoPlan") -> AutoPlanDiff:
        """Returns what differs in another plan of the same function, from this one to the other."""
        return AutoPlanDiff(
            PlanDiff.between(self._placements(), other._placements()),
            (self.cost, other.cost),
            (self.wire_bytes, other.wire_bytes),
            (self.peak_bytes, other.peak_bytes),
            (self.host_traffic.host_bytes, other.host_traffic.host_bytes),
        )

    def _placements(self) -> Placements:
        placements = self.plan.placements()
        paths = self.plan.named_paths
        return attrs.evolve(placements, leaves=dict(zip(paths, placements.leaves.values(), strict=True)))

    def __str__(self) -> str:
        lines = [*map(printable, self._summary()), "", *self._argument_table()]
        if self.regions:
            lines += ["", *(printable(f"region {use}") for use in self.regions)]
        if self.candidates:
            lines += ["", *self._candidate_table()]
        if self.compiled:
            lines += ["", *self._compiled_table()]
        if self.findings:
            lines += ["", listing(self.findings)]
        return "\n".join(line.rstrip() for line in lines)

    def _summary(self) -> Iterator[str]:
        time, on_host = self.step_time, self.host_traffic.host_bytes
        parts = {"compute": time.compute_seconds, "communication": time.communication_seconds}
        parts |= {"host": time.copy_seconds} if time.copy_seconds else {}
        text = ", ".join(f"{name} {1000 * seconds:.4g}" for name, seconds in parts.items())
        yield first_line(
            f"{self.call.name} on {mesh_text(self.mesh)}: {1000 * self.cost:.4g} ms a call ({text}), "
            f"{self._status_text()}, found in {self.seconds:.1f} s",
            self.findings,
        )
        sent = ", ".join(f"{kind} {bytes_text(sent)}" for kind, sent in self.sent_bytes.items() if sent)
        source = " as compiled" if self.is_compiled else ""
        host = f" and {bytes_text(on_host)} of the host" if on_host else ""
        memory = f"{self.peak}{source} of {bytes_text(self.memory_limit)}{host}"
        yield f"memory {memory}; on the wire {sent or 'nothing'}"
        if self.price_of_memory:
            percent = self.memory_limit // 100
            saved = 1000 * percent * self.price_of_memory
            yield f"1 % more memory ({bytes_text(percent)}) would save about {saved:.3g} ms a call"
        if self.split_dims:
            yield "; ".join(map(str, self.split_dims))

    def _status_text(self) -> str:
        if not self.is_expected_to_fit:
            return f"{'does' if self.is_compiled else 'may'} not fit"
        if not self.result.fits:  # the search counted more than is compiled, and took what needs least
            return "feasible, the plan with the least memory"
        return (
            self.status if self.status == "optimal" else f"feasible, the best takes at most {100 * self.gap:.1f} % less"
        )

    def _argument_table(self) -> list[str]:
        similar: dict[tuple[str, str, str], list[str]] = {}
        for path, array, spec in zip(self.call.paths, self.call.structs, self.specs, strict=True):
            row = (template(path), f"{array.dtype.name}{list(array.shape)}", spec_repr(spec))
            similar.setdefault(row, []).append(path)
        rows = [("argument", "shape", "spec")]
        for (pattern, shape, spec), paths in similar.items():
            rows.append((paths[0] if len(paths) == 1 else f"{pattern}  x{len(paths)}", shape, spec))
        more = len(rows) - 1 - MOST_ROWS
        return [*aligned(rows[: MOST_ROWS + 1]), *([f"and {more:,} more: plan.plan.table() has all"] * (more > 0))]

    def _candidate_table(self) -> list[str]:
        rows = [("mesh", "time", "memory")]
        for candidate in self.candidates:
            time = "does not fit" if candidate.seconds is None else f"{1000 * candidate.seconds:.4g} ms"
            rows.append((candidate.mesh, time, bytes_text(candidate.peak_bytes)))
        return aligned(rows)

    def _compiled_table(self) -> list[str]:
        rows = [("compiled", "time", "memory", "as modelled")]
        for index, trial in enumerate(self.compiled):
            notes = [name for name, holds in (("chosen", trial.is_chosen), ("fits", self._fits(trial))) if holds]
            label = f"{index + 1}" + f" ({', '.join(notes)})" * bool(notes)
            time = f"{1000 * trial.seconds:.4g} ms"
            rows.append((label, time, bytes_text(trial.peak_bytes), bytes_text(trial.predicted_bytes)))
        return aligned(rows)

    def _fits(self, trial: CompiledPlan) -> bool:
        return trial.peak_bytes <= self.memory_limit
