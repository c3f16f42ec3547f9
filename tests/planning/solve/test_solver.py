"""The solver against every choice that there is, on random programs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.analysis.machine.hardware import Hardware
from shardrules.planning.graph import build as problems
from shardrules.planning.graph.machine import Machine
from shardrules.planning.graph.problem import Edge, Problem
from shardrules.planning.solve.formulation import Formulation
from shardrules.planning.solve.search import Task, layout_preference
from shardrules.planning.solve.solver import Solution, solve
from shardrules.planning.traced.clusters import Clusters
from shardrules.planning.traced.program import TracedProgram, read_jaxpr

COUNT = 72
"""How many random programs: for each, one mesh of one axis or of two."""

MESHES = ("x:2", "x:4", "x:8", "x:2,y:2", "x:4,y:2", "x:2,y:4", "x:2,y:3")
SIZES = (96, 128, 192, 256, 384, 512, 768, 1024, 4096, 7)
MOST_ENTRIES = 4_000_000
MOST_STEPS = 3_000


# ---- random programs ----


@final
@attrs.frozen
class Made:
    """A function, and the shapes that it is called with."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


@final
class Writer:
    """Writes a program of a few operations."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.arguments: list[tuple[int, ...]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.uses: dict[int, int] = {}
        self.steps: list[tuple[Callable[..., Any], tuple[int, ...]]] = []

    def given(self, shape: tuple[int, ...]) -> int:
        """A new argument. Arguments have negative numbers until all of them are known."""
        self.arguments.append(shape)
        self.uses[-len(self.arguments)] = 0
        return -len(self.arguments)

    def shape(self, number: int) -> tuple[int, ...]:
        return self.arguments[-1 - number] if number < 0 else self.shapes[number]

    def live(self) -> list[int]:
        """Arrays that may be taken once more: each is taken twice at the most."""
        return [number for number, uses in self.uses.items() if uses < 2 and self.shape(number)]

    def any_of(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def sizes(self, count: int) -> tuple[int, ...]:
        return tuple(int(self.any_of(SIZES)) for _ in range(count))

    def first(self) -> int:
        """An array to begin with: the last one mostly, so that programs are deep."""
        live = self.live()
        if not live or self.rng.random() < 0.05:
            return self.given(self.sizes(int(self.rng.integers(1, 4))))
        return max(live) if self.rng.random() < 0.5 else self.any_of(live)

    def write(self, fn: Callable[..., Any], *taken: int) -> None:
        known = [jax.ShapeDtypeStruct(self.shape(number), jnp.float32) for number in taken]
        for number in taken:
            self.uses[number] += 1
        self.steps.append((fn, taken))
        self.shapes.append(tuple(jax.eval_shape(fn, *known).shape))
        self.uses[len(self.shapes) - 1] = 0

    def step(self) -> None:
        one = self.first()
        shape = self.shape(one)
        kinds = ["dot", "dot", "dot", "unary", "binary", "transpose", "split", "broadcast"]
        kinds += ["reduce", "reduce", "merge"] if len(shape) > 1 else []
        kind = self.any_of(kinds)
        dim = int(self.rng.integers(len(shape)))
        if kind == "dot":
            self.dot(one, dim)
        elif kind == "unary":
            self.write(jnp.tanh, one)
        elif kind == "binary":
            others = [number for number in self.live() if self.shape(number) == shape and number != one]
            other = self.any_of(others) if others and self.rng.random() < 0.7 else self.given(shape)
            self.write(self.any_of([jnp.add, jnp.multiply]), one, other)
        elif kind == "reduce":
            self.write(self.any_of([lambda x: x.sum(axis=dim), lambda x: x.max(axis=dim)]), one)
        elif kind == "transpose":
            order = tuple(map(int, self.rng.permutation(len(shape))))
            self.write(lambda x: x.transpose(order), one)
        elif kind == "merge":
            at = int(self.rng.integers(len(shape) - 1))
            new = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
            self.write(lambda x: x.reshape(new), one)
        elif kind == "split" and len(shape) < 3:
            part = self.any_of([one for one in (2, 4, 6, 8, 32) if shape[dim] % one == 0] or [1])
            new = (*shape[:dim], part, shape[dim] // part, *shape[dim + 1 :])
            self.write(lambda x: x.reshape(new), one)
        elif kind == "broadcast" and len(shape) < 3:
            size = int(self.any_of((4, 8, 96)))
            new = (*shape[:dim], size, *shape[dim:])
            self.write(lambda x: jnp.broadcast_to(jnp.expand_dims(x, dim), new), one)
        else:
            self.write(jnp.exp, one)

    def dot(self, one: int, dim: int) -> None:
        """A product with an argument or an array, over one dim, and sometimes with a dim that both have."""
        shape = self.shape(one)
        others = [
            (number, place)
            for number in self.live()
            if number != one
            for place, size in enumerate(self.shape(number))
            if size == shape[dim] and len(self.shape(number)) + len(shape) <= 5
        ]
        if others and self.rng.random() < 0.6:
            other, place = self.any_of(others)
            numbers = (((dim,), (place,)), ((), ()))
        elif len(shape) == 3 or (len(shape) == 2 and self.rng.random() < 0.2):
            batch = (dim + 1) % len(shape)
            other = self.given((shape[batch], shape[dim], *self.sizes(1)))
            numbers = (((dim,), (1,)), ((batch,), (0,)))
        else:
            other = self.given((shape[dim], *self.sizes(1)))
            numbers = (((dim,), (0,)), ((), ()))
        self.write(lambda x, y: jax.lax.dot_general(x, y, numbers), one, other)

    def made(self) -> Made:
        """The program; it returns what it does not take itself."""
        steps, unused = tuple(self.steps), [number for number, uses in self.uses.items() if number >= 0 and not uses]

        def fn(*given: Any) -> list[Any]:
            known: list[Any] = []
            for step, taken in steps:
                known.append(step(*[given[-1 - number] if number < 0 else known[number] for number in taken]))
            return [known[number] for number in unused]

        return Made(fn, tuple(self.arguments))


def random_program(seed: int) -> Made:
    rng = np.random.default_rng(seed)
    writer = Writer(rng)
    for _ in range(3 + seed % 6):
        writer.step()
    return writer.made()


def read(made: Made) -> TracedProgram:
    return read_jaxpr(jax.make_jaxpr(made.fn)(*[jax.ShapeDtypeStruct(one, jnp.float32) for one in made.shapes]))


def random_hardware(rng: np.random.Generator) -> Hardware:
    def between(low: float, high: float) -> float:
        return float(10 ** rng.uniform(low, high))

    return attrs.evolve(
        sr.Hardware.named("cuda:h100"),
        name="random",
        peak_flops={"f32": between(12, 15)},
        memory_bytes_per_second=between(11, 12.7),
        link_bytes_per_second=between(8, 12),
        link_latency_seconds=between(-7, -5),
        network_bytes_per_second=between(8, 11),
        devices_per_host=int(rng.choice([2, 4, 8])),
    )


def random_task(seed: int, mesh: str | None = None) -> Task:
    """A random program on random hardware, some of them with a result that goes back or an argument that is pinned."""
    rng = np.random.default_rng(1000 + seed)
    program = read(random_program(seed))
    text = MESHES[seed % len(MESHES)] if mesh is None else mesh
    machine = Machine.of(sr.mesh_shape(text), random_hardware(rng))
    shapes = [program.arrays[number].shape for number in program.arguments]
    feedback: dict[int, int] = {}
    pinned: dict[int, P] = {}
    if rng.random() < 0.3:
        returned = [None if one is None else program.arrays[one].shape for one in program.results]
        pairs = [
            (a, b) for a, b in itertools.product(range(len(returned)), range(len(shapes))) if returned[a] == shapes[b]
        ]
        feedback = dict(pairs[:1])
    if rng.random() < 0.3:
        number = int(rng.integers(len(shapes)))
        pinned = {number: P("x") if shapes[number][0] % machine.sizes[0] == 0 else P()}
    names = [f"argument{number}" for number in range(len(shapes))]
    return Task.of(program, machine, names, feedback, pinned, tie=False)


# ---- every choice that there is ----


@final
@attrs.frozen(eq=False)
class Table:
    """What the labels of some nodes cost together: an array with a dim for each."""

    nodes: tuple[int, ...]
    cost: np.ndarray


def edge_costs(edge: Edge) -> np.ndarray:
    """What an edge costs for each pair of labels; with one node at both ends, for each of its labels."""
    cost = edge.seconds[edge.from_codes[:, None], edge.to_codes[None, :]]
    return cost.diagonal() if edge.start == edge.end else cost


def spread(table: Table, nodes: Sequence[int]) -> np.ndarray:
    """A table over more nodes."""
    order = [table.nodes.index(node) for node in nodes if node in table.nodes]
    shape = iter(table.cost.transpose(order).shape)
    return table.cost.transpose(order).reshape([next(shape) if node in table.nodes else 1 for node in nodes])


def tables(problem: Problem) -> list[Table]:
    """Everything that a choice pays, apart."""
    found = [Table((number,), np.asarray(node.seconds, float)) for number, node in enumerate(problem.nodes)]
    for group, count in problem.edge_groups:
        edges = [problem.edges[number] for number in group]
        nodes = tuple(dict.fromkeys(node for edge in edges for node in (edge.start, edge.end)))
        assert np.prod([float(len(problem.nodes[node].layouts)) for node in nodes]) < MOST_ENTRIES
        targets = dict.fromkeys(tuple(row) for edge in edges for row in edge.to_layouts.tolist())
        total: Any = 0.0
        for target in targets:
            dearest: Any = 0.0
            for edge in edges:
                here = (edge.to_layouts == target).all(axis=1)[edge.to_codes]
                ends = (edge.start,) if edge.start == edge.end else (edge.start, edge.end)
                cost = edge_costs(edge)
                part = Table(ends, np.where(here if cost.ndim == 1 else here[None, :], cost, 0.0))
                dearest = np.maximum(dearest, spread(part, nodes))
            total = total + dearest * count
        found.append(Table(nodes, np.broadcast_to(total, [len(problem.nodes[node].layouts) for node in nodes])))
    for first, second in problem.equal_homes:
        a, b = (problems.project(problem.nodes[home.node].layouts, home) for home in (first, second))
        same = (a[:, None, :] == b[None, :, :]).all(axis=2)
        found.append(Table((first.node, second.node), np.where(same, 0.0, np.inf)))
    return found


def width(tables: Sequence[Table], sizes: Sequence[int], node: int) -> float:
    """How many entries a table has over a node and all that it has to do with."""
    around = dict.fromkeys(other for table in tables if node in table.nodes for other in table.nodes)
    return float(np.prod([float(sizes[other]) for other in around]))


@final
@attrs.frozen(eq=False)
class Brute:
    """Every choice of a problem, put in an order in which each node's cheapest labels are known from the others'.

    Nodes are left out one by one: what the cheapest label of one costs is a table over those that it has to do with.
    That is every choice weighed, without one that was made twice.
    """

    problem: Problem
    order: tuple[int, ...]
    known: tuple[tuple[Table, ...], ...]
    """For each node in the order the tables that it was left out of."""

    @classmethod
    def of(cls, problem: Problem) -> "Brute":
        rest = tables(problem)
        sizes = [len(node.layouts) for node in problem.nodes]
        order: list[int] = []
        known: list[tuple[Table, ...]] = []
        left = list(range(len(sizes)))
        while left:
            widths = [(width(rest, sizes, node), node) for node in left]
            entries, node = min(widths)
            if entries > MOST_ENTRIES:
                raise TooLarge
            own = [table for table in rest if node in table.nodes]
            nodes = tuple(dict.fromkeys([node, *(other for table in own for other in table.nodes)]))
            total: Any = 0.0
            for table in own:
                total = total + spread(table, nodes)
            rest = [table for table in rest if node not in table.nodes]
            rest.append(Table(nodes[1:], total.min(axis=0)))
            order.append(node)
            known.append(tuple(own))
            left.remove(node)
        return cls(problem, tuple(order), tuple(known))

    def choices(self, at: int, choice: Mapping[int, int]) -> np.ndarray:
        """What each label of a node costs, with what is to come at its cheapest."""
        total: Any = 0.0
        for table in self.known[at]:
            where = tuple(slice(None) if node == self.order[at] else choice[node] for node in table.nodes)
            total = total + table.cost[where]
        return total

    def best(self) -> tuple[int, ...]:
        choice: dict[int, int] = {}
        for at in reversed(range(len(self.order))):
            choice[self.order[at]] = int(np.argmin(self.choices(at, choice)))
        return tuple(choice[node] for node in range(len(choice)))


class TooLarge(Exception):
    """There are too many choices to weigh."""


def smallest(task: Task) -> list[np.ndarray]:
    """For each node and label what its arrays take at every operation, without copies."""
    occupancy, problem = task.occupancy, task.problem
    found = [np.zeros((len(node.layouts), len(problem.program.operations) + 1)) for node in problem.nodes]
    for stay in occupancy.stays:
        for label in range(len(found[stay.home.node])):
            choice = {stay.home.node: label}
            layout = problem.layout(stay.home, choice)  # pyright: ignore[reportArgumentType]  of this node it asks only
            cut = np.prod([size for size, dim in zip(problem.machine.sizes, layout, strict=True) if dim >= 0])
            found[stay.home.node][label, stay.first : stay.last + 1] += stay.nbytes * occupancy.overhead(stay) / cut
    return found


def within(task: Task, limit: float) -> float:
    """The least cost of all choices of which the timeline stays within a limit; infinite if there is none.

    Depth first, the cheapest way on first. A way on is left where it costs as much as what is known, with all to come
    at its cheapest, or where it takes too much, with all to come at its smallest.
    """
    brute, problem = Brute.of(task.problem), task.problem
    order = brute.order[::-1]
    sizes = smallest(task)
    rest = [np.zeros(sizes[0].shape[1])]
    for node in brute.order:
        rest.append(rest[-1] + sizes[node].min(axis=0))
    best, steps = np.inf, 0

    def go(depth: int, choice: dict[int, int], least: float, room: np.ndarray) -> None:
        nonlocal best, steps
        steps += 1
        if steps > MOST_STEPS:
            raise TooLarge
        if depth == len(order):
            whole = tuple(choice[node] for node in range(len(choice)))
            if task.occupancy.timeline(whole).max() <= limit:
                best = min(best, problem.cost(whole))
            return
        node = order[depth]
        costs = brute.choices(len(order) - 1 - depth, choice)
        costs = least + costs - costs.min()
        for label in np.argsort(costs, kind="stable").tolist():
            if not costs[label] < best * (1 - 1e-9):
                break
            now = room + sizes[node][label]
            if (now + rest[len(order) - 1 - depth]).max() <= limit * (1 + 1e-9):
                go(depth + 1, {**choice, node: label}, float(costs[label]), now)

    go(0, {}, problem.cost(brute.best()), np.full(sizes[0].shape[1], float(task.occupancy.fixed_bytes)))
    return best


# ---- what is told of it ----


def best_cost(problem: Problem) -> float:
    return problem.cost(Brute.of(problem).best())


def without_preference(problem: Problem) -> Solution:
    return solve(Formulation(problem, [np.zeros(len(node.layouts)) for node in problem.nodes]))


def preferred(problem: Problem) -> float:
    """What it may cost at the most that of plans that cost the same the simplest is taken."""
    return sum(float(extra.max()) for extra in layout_preference(problem)) / 1e6


@pytest.mark.parametrize("seed", range(0, COUNT, 6))
def test_brute_force_pays_what_a_choice_costs(seed: int) -> None:
    problem, rng = random_task(seed).problem, np.random.default_rng(seed)
    parts = tables(problem)
    for _ in range(20):
        choice = [int(rng.integers(len(node.layouts))) for node in problem.nodes]
        paid = sum(float(part.cost[tuple(choice[node] for node in part.nodes)]) for part in parts)
        assert paid == pytest.approx(problem.cost(choice), rel=1e-9)


def test_brute_force_finds_what_trying_everything_finds() -> None:
    tried = 0
    for seed in range(COUNT):
        problem = random_task(seed, "x:2").problem
        sizes = [len(node.layouts) for node in problem.nodes]
        if np.prod([float(size) for size in sizes]) > 4000:
            continue
        tried += 1
        least = min(problem.cost(choice) for choice in itertools.product(*map(range, sizes)))
        assert best_cost(problem) == pytest.approx(least, rel=1e-12)
    assert tried >= 10


@pytest.mark.parametrize("seed", range(COUNT))
def test_solver_finds_the_least_cost(seed: int) -> None:
    problem = random_task(seed).problem
    best, found = best_cost(problem), without_preference(problem)
    assert found.choice is not None
    assert len(found.choice) == len(problem.nodes)
    assert problem.cost(found.choice) == found.cost
    assert found.cost == pytest.approx(best, rel=1e-6, abs=0)
    assert found.bound <= best * (1 + 1e-6)


def test_random_programs_are_worth_planning() -> None:
    """Most have more than one node that costs, and are dearer by far without a plan."""
    tasks = [random_task(seed) for seed in range(COUNT)]
    sizes = [len(read(random_program(seed)).operations) for seed in range(COUNT)]
    gains = [one.problem.cost([0] * len(one.problem.nodes)) / best_cost(one.problem) for one in tasks]
    sends = [bool(one.problem.chosen_moves(Brute.of(one.problem).best())) for one in tasks]
    assert sum(gain > 1.2 for gain in gains) > COUNT * 0.7
    assert sum(sends) > COUNT * 0.3
    assert max(sizes) >= 8


@pytest.mark.parametrize("seed", range(0, COUNT, 3))
def test_of_plans_that_cost_the_same_the_simplest_is_taken(seed: int) -> None:
    problem = random_task(seed).problem
    found = solve(Formulation(problem, layout_preference(problem)))
    assert found.cost <= best_cost(problem) * (1 + 1e-6) + preferred(problem)


def every_array_apart(program: TracedProgram, *_: Any) -> Clusters:
    """Clusters of one array each. Dims that an operation gives to no operand stay whole, as they do in clusters."""
    roots, sizes = {}, {}
    for operation in program.operations:
        for place, result in enumerate(operation.results):
            shape = program.arrays[result].shape
            if shape and operation.role == "compute":
                factors = operation.factors.results[place]
                alone = not operation.factors.reduced
                sizes[result] = tuple(1 if f is None and alone else n for f, n in zip(factors, shape, strict=True))
                roots[result] = (result, tuple(range(len(shape))))
    return Clusters(roots, sizes)


@pytest.mark.parametrize("seed", range(COUNT))
def test_what_is_laid_out_alike_for_nothing_costs_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact form puts arrays together that are computed place by place: that rules out nothing that is better."""
    best = best_cost(random_task(seed).problem)
    monkeypatch.setattr(problems, "find_clusters", every_array_apart)
    apart = random_task(seed).problem
    assert best == pytest.approx(best_cost(apart), rel=1e-6)


def test_pinned_labels_are_the_only_ones() -> None:
    made = Made(lambda x, w: [x @ w], ((128, 256), (256, 512)))
    program, machine = read(made), Machine.of(sr.mesh_shape("x:4,y:2"))
    task = Task.of(program, machine, ["x", "w"], {}, {0: P("y"), 1: P(None, P.UNCONSTRAINED)}, tie=False)
    first, second = (task.problem.nodes[task.problem.homes[number].node] for number in program.arguments)
    assert first.layouts.tolist() == [[-1, 0]]
    assert sorted(map(tuple, second.layouts.tolist())) == [(-1, -1), (-1, 1), (1, -1), (1, 1)]
    assert without_preference(task.problem).cost == pytest.approx(best_cost(task.problem), rel=1e-6)


def test_results_that_go_back_are_where_the_argument_is() -> None:
    made = Made(lambda w, x: [w - x], ((128, 256), (128, 256)))
    program, machine = read(made), Machine.of(sr.mesh_shape("x:4"))
    task = Task.of(program, machine, ["w", "x"], {0: 0}, {0: P("x"), 1: P(None, "x")}, tie=False)
    choice = without_preference(task.problem).choice
    assert choice is not None
    assert task.problem.layout(task.problem.homes[program.results[0]], choice) == (0,)  # pyright: ignore[reportArgumentType]
    assert task.problem.cost(choice) == pytest.approx(best_cost(task.problem), rel=1e-6)
    assert sum(paid for paid, _, _ in task.problem.chosen_moves(choice)) > 0  # x goes from columns to rows
