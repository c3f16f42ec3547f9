"""The plan that `autoplan` finds: what it is worth, why it is so, and how to run a function by it."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.analysis.audits.roofline import StepTime
from shardrules.analysis.compiling.arguments import donated_arguments
from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.check import bytes_text
from shardrules.core.errors import TreeError, suggest
from shardrules.core.finding import Finding, listing, template
from shardrules.core.rule import ShardingPlan, SpecTreeShardingRule
from shardrules.core.spec import spec_repr
from shardrules.core.tree import array_kind
from shardrules.core.views.diff import Placements
from shardrules.core.views.table import aligned
from shardrules.planning.answer.diff import AutoPlanDiff, difference
from shardrules.planning.answer.explain import Alternative, SplitDim, Use, alternatives_text, split_dims, uses
from shardrules.planning.answer.frontier import Frontier, FrontierPoint
from shardrules.planning.graph.layouts import spec_of
from shardrules.planning.graph.machine import COLLECTIVE_KINDS
from shardrules.planning.run.call import Call
from shardrules.planning.run.replay import PlannedFunction
from shardrules.planning.solve.search import Found, Task
from shardrules.planning.solve.solver import Status


@final
@attrs.frozen
class Candidate:
    """A mesh that was tried.

    **Arguments:**

    - `mesh`: its axes, as text.
    - `seconds`: the modelled time of a call on it; `None` where nothing fits.
    - `peak_bytes`: the most that lies in the memory of a device; where nothing fits, about the least that would.
    """

    mesh: str
    seconds: float | None
    peak_bytes: int


@final
@attrs.frozen(eq=False)
class AutoPlan:
    """A plan for a function: where its arguments, its results and everything in between are to be.

    `autoplan` makes them.

    **Arguments:**

    - `call`: the function, traced.
    - `args`: the arguments that it was planned for.
    - `mesh`: the mesh.
    - `memory_limit`: the most that may lie in the memory of a device, in bytes.
    - `time_limit`: how long a search may take, in seconds.
    - `task`: what was to be chosen.
    - `found`: what was.
    - `findings`: what is worth knowing.
    - `candidates`: the meshes that were tried, the best first, where the number of devices was given only.

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
    args: tuple[Any, ...] = attrs.field(repr=False)
    mesh: AnyMesh
    memory_limit: int
    time_limit: float
    task: Task = attrs.field(repr=False)
    found: Found = attrs.field(repr=False)
    findings: tuple[Finding, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    @property
    def choice(self) -> tuple[int, ...]:
        """For each node of the problem the number of its label."""
        return self.found.choice

    @property
    def status(self) -> Status:
        """`"optimal"` where no plan of the model is better by 0.2 % and a nanosecond; else `"feasible"`: one may be, by
        `gap` at the most."""
        return "optimal" if self.cost - self.bound < 2e-3 * self.cost + 1e-9 else "feasible"

    @functools.cached_property
    def cost(self) -> float:
        """The modelled time of one call in seconds, if nothing overlaps."""
        return self.task.problem.cost(self.choice)

    @property
    def bound(self) -> float:
        """What every plan that fits takes at least, in seconds."""
        return min(self.found.bound, self.cost)

    @property
    def gap(self) -> float:
        """By how much the best plan may be better, as a part of the cost."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0

    @property
    def seconds(self) -> float:
        """How long the search took."""
        return self.found.seconds

    @property
    def price_of_memory(self) -> float:
        """What one more byte of memory would save, in seconds for each call; 0 where memory is no matter."""
        return self.found.price

    @functools.cached_property
    def step_time(self) -> StepTime:
        """The modelled time of one call, in its parts."""
        communicating = sum(paid * count for paid, count, _ in self.task.problem.chosen_moves(self.choice))
        return StepTime(self.cost - communicating, communicating)

    @functools.cached_property
    def sent_bytes(self) -> dict[str, int]:
        """What a device sends in one call, by kind of collective."""
        total = np.zeros(len(COLLECTIVE_KINDS))
        for _, count, sent in self.task.problem.chosen_moves(self.choice):
            total += sent * count
        return dict(zip(COLLECTIVE_KINDS, map(int, total), strict=True))

    @property
    def wire_bytes(self) -> int:
        """What a device sends in one call."""
        return sum(self.sent_bytes.values())

    @property
    def peak_bytes(self) -> int:
        """The most that lies in the memory of a device, as modelled."""
        return int(self.found.peak_bytes)

    @functools.cached_property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """The spec of each array of the arguments, in order."""
        return tuple(map(self.spec_of, self.task.problem.program.arguments))

    @functools.cached_property
    def result_specs(self) -> tuple[PartitionSpec, ...]:
        """The spec of each array that is returned, in order."""
        return tuple(map(self.spec_of, self.task.problem.program.results))

    def spec_of(self, array: int | None) -> PartitionSpec:
        """Returns where an array of the program is.

        **Arguments:**

        - `array`: its number; `None` stands for a constant.

        **Returns:**

        A `PartitionSpec`.
        """
        problem = self.task.problem
        home = None if array is None else problem.homes.get(array)
        if home is None or array is None:
            return PartitionSpec()
        return spec_of(problem.layout(home, self.choice), len(problem.program.arrays[array].shape), problem.machine)

    @functools.cached_property
    def plan(self) -> ShardingPlan:
        """The plan of all arguments, which are a tuple."""
        return self._plan_of(self.args, self.specs)

    def argument_plan(self, number: int) -> ShardingPlan:
        """Returns the plan of one argument: for `filter_init`, checkpoints and everything else that takes plans.

        **Arguments:**

        - `number`: which argument, counted from 0.

        **Returns:**

        A `ShardingPlan`.
        """
        own = [spec for spec, owner in zip(self.specs, self.call.owners, strict=True) if owner == number]
        return self._plan_of(self.args[number], own)

    def _plan_of(self, tree: Any, specs: Sequence[PartitionSpec]) -> ShardingPlan:
        """The plan of a tree, from the specs of its arrays."""
        leaves, treedef = jtu.tree_flatten(tree)
        rest = iter(specs)
        every = [None if array_kind(leaf) is None else next(rest) for leaf in leaves]
        return SpecTreeShardingRule(treedef.unflatten(every)).plan(tree, self.mesh)

    def as_rule(self) -> SpecTreeShardingRule:
        """Returns a rule for the tuple of arguments that decides as the plan does.

        **Returns:**

        A `SpecTreeShardingRule`.
        """
        return self.plan.as_rule()

    def jit(self, fn: Callable[..., Any], *, donate_argnums: int | Sequence[int] = ()) -> PlannedFunction:
        """Returns the function, to be run as planned: with arguments and results where they are to be, and with
        everything inside held where it is to be. The function's code stays as it is.

        **Arguments:**

        - `fn`: the function that was planned.
        - `donate_argnums`: the arguments whose memory may be used for results, as in `jax.jit`. The model of memory
            takes it that arguments which come back as results are given.

        **Returns:**

        A `PlannedFunction`: it is called as `fn` is, and has `.lower(*args)`.
        Both raise `TreeError` where the function or the shapes are not those that were planned, and `NoMeshError` where
        the mesh has no devices and none like it is in force.

        ```python
        double = lambda x: 2 * x
        x = np.arange(16.0)
        planned = sr.autoplan(double, x, mesh=sr.create_mesh("data:8"))
        assert (planned.jit(double)(x) == 2 * x).all()
        ```
        """
        donated = donated_arguments(donate_argnums, len(self.args))
        return PlannedFunction(
            fn,
            self.call,
            self.mesh,
            self.task.problem,
            self.choice,
            self.specs,
            self.result_specs,
            donated,
            self.memory_limit,
            self.peak_bytes,
        )

    @functools.cached_property
    def split_dims(self) -> tuple[SplitDim, ...]:
        """Dims that go together through the function, as batch, heads and features do, and the axes that split them."""
        return split_dims(self.task.problem, self.choice, self.call.paths)

    def uses(self, path: str) -> tuple[Use, ...]:
        """Returns what takes an argument, and in which layout.

        **Arguments:**

        - `path`: the array, as `call.paths` has it: `"state/0/embed"`.

        **Returns:**

        A `Use` for each operation that takes it, or takes what is computed from it place by place.
        """
        return uses(self.task.problem, self.choice, self._number(path))

    def alternative(self, path: str) -> Alternative | None:
        """Finds the best plan in which an argument is laid out in any other way. That takes another search.

        **Arguments:**

        - `path`: the array.

        **Returns:**

        An `Alternative`; `None` where there is no other way that fits.
        """
        array = self.task.problem.program.arguments[self._number(path)]
        home = self.task.problem.homes.get(array)
        if home is None:
            return None
        keep = [np.arange(len(node.layouts)) for node in self.task.problem.nodes]
        keep[home.node] = np.delete(keep[home.node], self.choice[home.node])
        if not len(keep[home.node]):
            return None
        other = self.task.only(keep).within(self.memory_limit, time.monotonic() + self.time_limit)
        if other.solution is None:
            return None
        changed = attrs.evolve(self, found=other.among(keep))
        return Alternative(
            changed.spec_of(array),
            changed.cost - self.cost,
            changed.wire_bytes - self.wire_bytes,
            changed.peak_bytes - self.peak_bytes,
        )

    def explain(self, path: str) -> str:
        """Says what an argument got, why, and what the next best would cost.

        **Arguments:**

        - `path`: the array.

        **Returns:**

        A few lines.

        **Raises:**

        `TreeError` where the arguments have no such array.
        """
        number = self._number(path)
        one = self.call.structs[number]
        head = f"{path} {one.dtype.name}{list(one.shape)}: {spec_repr(self.specs[number])}"
        taken = [f"  {use}" for use in self.uses(path)]
        return "\n".join([head, *taken, f"  {alternatives_text(self.alternative(path))}"])

    def _number(self, path: str) -> int:
        if path not in self.call.paths:
            raise TreeError(
                f"no array {path!r} among the arguments of {self.call.name}{suggest(path, self.call.paths)}"
            )
        return self.call.paths.index(path)

    def frontier(self, count: int = 6) -> Frontier:
        """Returns what less memory costs: the best plans from the least budget on which any fits to as much as helps.

        **Arguments:**

        - `count`: how many budgets. Each takes a search.

        **Returns:**

        A `Frontier`.
        """
        deadline = time.monotonic() + self.time_limit
        most = self.task.within(float("inf"), deadline)
        least = self.task.within(0.0, deadline)
        points: list[FrontierPoint] = []
        best = least.choice  # what fits in less fits in more
        first = max(1.0, least.peak_bytes * 1.01)
        for limit in np.geomspace(first, max(most.peak_bytes, first * 1.01), count):
            found = self.task.within(float(limit), time.monotonic() + max(1.0, self.time_limit / count))
            if found.solution is not None:
                best = min(best, found.choice, key=self.task.problem.cost)
            cost, peak = self.task.problem.cost(best), self.task.occupancy.timeline(best).max()
            points.append(FrontierPoint(int(limit), cost, int(peak), found.price))
        return Frontier(self.call.name, mesh_text(self.mesh), tuple(points))

    def diff(self, other: "AutoPlan") -> AutoPlanDiff:
        """Returns what is other in another plan of the same function.

        **Arguments:**

        - `other`: the other plan.

        **Returns:**

        An `AutoPlanDiff`, from this one to the other.
        """
        return difference(
            (self._placements(), self.cost, self.wire_bytes, self.peak_bytes),
            (other._placements(), other.cost, other.wire_bytes, other.peak_bytes),
        )

    def _placements(self) -> Placements:
        """How all arguments are placed, under their names."""
        own = self.plan.placements()
        parts = [path.partition("/") for path in own.leaves]
        named = [f"{self.call.names[int(number)]}{slash}{rest}" for number, slash, rest in parts]
        return attrs.evolve(own, leaves=dict(zip(named, own.leaves.values(), strict=True)))

    def __str__(self) -> str:
        time = self.step_time
        lines = [
            f"{self.call.name} on {mesh_text(self.mesh)}: {1000 * self.cost:.4g} ms a call "
            f"(compute {1000 * time.compute_seconds:.4g}, communication {1000 * time.communication_seconds:.4g}), "
            f"{self.status}"
            + (f", at most {100 * self.gap:.1f} % above the best" if self.status == "feasible" else "")
            + f", found in {self.seconds:.1f} s",
            f"memory {bytes_text(self.peak_bytes)} of {bytes_text(self.memory_limit)}; on the wire "
            + (", ".join(f"{kind} {bytes_text(sent)}" for kind, sent in self.sent_bytes.items() if sent) or "nothing"),
        ]
        if self.price_of_memory:
            part = self.memory_limit // 100
            saved = 1000 * part * self.price_of_memory
            lines.append(f"1 % more memory ({bytes_text(part)}) would save about {saved:.3g} ms a call")
        if self.split_dims:
            lines.append("; ".join(map(str, self.split_dims)))
        alike: dict[tuple[str, str, str], list[str]] = {}
        for path, one, spec in zip(self.call.paths, self.call.structs, self.specs, strict=True):
            row = (template(path), f"{one.dtype.name}{list(one.shape)}", spec_repr(spec))
            alike.setdefault(row, []).append(path)
        rows = [("argument", "shape", "spec")]
        for (pattern, shape, spec), paths in alike.items():
            rows.append((paths[0] if len(paths) == 1 else f"{pattern}  x{len(paths)}", shape, spec))
        lines += ["", *aligned(rows)]
        if self.candidates:
            tried = [("mesh", "time", "memory")]
            tried += [
                (
                    one.mesh,
                    "does not fit" if one.seconds is None else f"{1000 * one.seconds:.4g} ms",
                    bytes_text(one.peak_bytes),
                )
                for one in self.candidates
            ]
            lines += ["", *aligned(tried)]
        if self.findings:
            lines += ["", listing(self.findings)]
        return "\n".join(line.rstrip() for line in lines)
