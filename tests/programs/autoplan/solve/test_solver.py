"""The solver against every choice, on random programs."""

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
from shardrules.programs.autoplan.graph import build as problems
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.graph.problem import Edge, Problem
from shardrules.programs.autoplan.solve.formulation import Formulation
from shardrules.programs.autoplan.solve.search import Task, layout_preference
from shardrules.programs.autoplan.solve.solver import Solution, solve
from shardrules.programs.machine.hardware import Hardware
from shardrules.programs.traced.clusters import Clusters
from shardrules.programs.traced.program import TracedProgram, read_jaxpr

COUNT = 72
"""The number of random programs: for each, one mesh of one axis or of two."""

MESHES = ("x:2", "x:4", "x:8", "x:2,y:2", "x:4,y:2", "x:2,y:4", "x:2,y:3")
SIZES = (96, 128, 192, 256, 384, 512, 768, 1024, 4096, 7)
MOST_ENTRIES = 4_000_000
MOST_STEPS = 3_000


# ---- random programs ----


@final
@attrs.frozen
class RandomProgram:
    """A function, and the shapes of its arguments."""

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

    def add_argument(self, shape: tuple[int, ...]) -> int:
        """Adds an argument. Arguments have negative indices, arrays that are computed others."""
        self.arguments.append(shape)
        self.uses[-len(self.arguments)] = 0
        return -len(self.arguments)

    def shape(self, array: int) -> tuple[int, ...]:
        return self.arguments[-1 - array] if array < 0 else self.shapes[array]

    def live(self) -> list[int]:
        """Returns the arrays that may be used once more: each is used twice at most."""
        return [array for array, uses in self.uses.items() if uses < 2 and self.shape(array)]

    def any_of(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def sizes(self, count: int) -> tuple[int, ...]:
        return tuple(int(self.any_of(SIZES)) for _ in range(count))

    def first(self) -> int:
        """Returns an array to begin with: mostly the last, so that programs are deep."""
        live = self.live()
        if not live or self.rng.random() < 0.05:
            return self.add_argument(self.sizes(int(self.rng.integers(1, 4))))
        return max(live) if self.rng.random() < 0.5 else self.any_of(live)

    def write(self, fn: Callable[..., Any], *operands: int) -> None:
        structs = [jax.ShapeDtypeStruct(self.shape(array), jnp.float32) for array in operands]
        for array in operands:
            self.uses[array] += 1
        self.steps.append((fn, operands))
        self.shapes.append(tuple(jax.eval_shape(fn, *structs).shape))
        self.uses[len(self.shapes) - 1] = 0

    def step(self) -> None:
        array = self.first()
        shape = self.shape(array)
        kinds = ["dot", "dot", "dot", "unary", "binary", "transpose", "split", "broadcast"]
        kinds += ["reduce", "reduce", "merge"] if len(shape) > 1 else []
        kind = self.any_of(kinds)
        dim = int(self.rng.integers(len(shape)))
        if kind == "dot":
            self.dot(array, dim)
        elif kind == "unary":
            self.write(jnp.tanh, array)
        elif kind == "binary":
            others = [other for other in self.live() if self.shape(other) == shape and other != array]
            other = self.any_of(others) if others and self.rng.random() < 0.7 else self.add_argument(shape)
            self.write(self.any_of([jnp.add, jnp.multiply]), array, other)
        elif kind == "reduce":
            self.write(self.any_of([lambda x: x.sum(axis=dim), lambda x: x.max(axis=dim)]), array)
        elif kind == "transpose":
            order = tuple(map(int, self.rng.permutation(len(shape))))
            self.write(lambda x: x.transpose(order), array)
        elif kind == "merge":
            first = int(self.rng.integers(len(shape) - 1))
            new = (*shape[:first], shape[first] * shape[first + 1], *shape[first + 2 :])
            self.write(lambda x: x.reshape(new), array)
        elif kind == "split" and len(shape) < 3:
            part = self.any_of([factor for factor in (2, 4, 6, 8, 32) if shape[dim] % factor == 0] or [1])
            new = (*shape[:dim], part, shape[dim] // part, *shape[dim + 1 :])
            self.write(lambda x: x.reshape(new), array)
        elif kind == "broadcast" and len(shape) < 3:
            size = int(self.any_of((4, 8, 96)))
            new = (*shape[:dim], size, *shape[dim:])
            self.write(lambda x: jnp.broadcast_to(jnp.expand_dims(x, dim), new), array)
        else:
            self.write(jnp.exp, array)

    def dot(self, array: int, dim: int) -> None:
        """Writes a product with an argument or an array over a dim, and sometimes with a dim that both have."""
        shape = self.shape(array)
        others = [
            (other, other_dim)
            for other in self.live()
            if other != array
            for other_dim, size in enumerate(self.shape(other))
            if size == shape[dim] and len(self.shape(other)) + len(shape) <= 5
        ]
        if others and self.rng.random() < 0.6:
            other, other_dim = self.any_of(others)
            dims = (((dim,), (other_dim,)), ((), ()))
        elif len(shape) == 3 or (len(shape) == 2 and self.rng.random() < 0.2):
            batch = (dim + 1) % len(shape)
            other = self.add_argument((shape[batch], shape[dim], *self.sizes(1)))
            dims = (((dim,), (1,)), ((batch,), (0,)))
        else:
            other = self.add_argument((shape[dim], *self.sizes(1)))
            dims = (((dim,), (0,)), ((), ()))
        self.write(lambda x, y: jax.lax.dot_general(x, y, dims), array, other)

    def program(self) -> RandomProgram:
        """Returns the program; it returns what it does not use itself."""
        steps, unused = tuple(self.steps), [array for array, uses in self.uses.items() if array >= 0 and not uses]

        def fn(*args: Any) -> list[Any]:
            arrays: list[Any] = []
            for step, operands in steps:
                arrays.append(step(*[args[-1 - array] if array < 0 else arrays[array] for array in operands]))
            return [arrays[array] for array in unused]

        return RandomProgram(fn, tuple(self.arguments))


def random_program(seed: int) -> RandomProgram:
    rng = np.random.default_rng(seed)
    writer = Writer(rng)
    for _ in range(3 + seed % 6):
        writer.step()
    return writer.program()


def read(program: RandomProgram) -> TracedProgram:
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in program.shapes]
    return read_jaxpr(jax.make_jaxpr(program.fn)(*structs))


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
        # What does not depend on layouts would outweigh the rest in programs as small as these.
        launch_seconds=0.0,
        collective_launch_seconds=0.0,
        matmul_rates=(),
        collective_times=(),
    )


def random_task(seed: int, mesh: str | None = None) -> Task:
    """A random program on random hardware, some of them with a result that goes back or an argument that is pinned."""
    rng = np.random.default_rng(1000 + seed)
    program = read(random_program(seed))
    text = MESHES[seed % len(MESHES)] if mesh is None else mesh
    machine = Machine.of(sr.mesh_shape(text), random_hardware(rng))
    shapes = [program.arrays[index].shape for index in program.arguments]
    feedback: dict[int, int] = {}
    pinned: dict[int, P] = {}
    if rng.random() < 0.3:
        returned = [None if result is None else program.arrays[result].shape for result in program.results]
        pairs = [
            (a, b) for a, b in itertools.product(range(len(returned)), range(len(shapes))) if returned[a] == shapes[b]
        ]
        feedback = dict(pairs[:1])
    if rng.random() < 0.3:
        index = int(rng.integers(len(shapes)))
        pinned = {index: P("x") if shapes[index][0] % machine.sizes[0] == 0 else P()}
    names = [f"argument{index}" for index in range(len(shapes))]
    return Task.of(program, machine, names, feedback, pinned, tie=False)


# ---- every choice ----


@final
@attrs.frozen(eq=False)
class Table:
    """The cost of the layouts of some nodes together: an array with a dim for each node."""

    nodes: tuple[int, ...]
    cost: np.ndarray


def edge_costs(edge: Edge) -> np.ndarray:
    """Returns the cost of an edge for each pair of layouts; with one node at both ends, for each of its layouts."""
    cost = edge.seconds[edge.from_codes[:, None], edge.to_codes[None, :]]
    return cost.diagonal() if edge.start == edge.end else cost


def spread(table: Table, nodes: Sequence[int]) -> np.ndarray:
    """Returns a table over more nodes."""
    order = [table.nodes.index(node) for node in nodes if node in table.nodes]
    shape = iter(table.cost.transpose(order).shape)
    return table.cost.transpose(order).reshape([next(shape) if node in table.nodes else 1 for node in nodes])


def tables(problem: Problem) -> list[Table]:
    """Returns everything that a choice pays, part by part."""
    parts = [Table((node_index,), np.asarray(node.seconds, float)) for node_index, node in enumerate(problem.nodes)]
    for group, count in problem.edge_groups:
        edges = [problem.edges[edge_index] for edge_index in group]
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
        parts.append(Table(nodes, np.broadcast_to(total, [len(problem.nodes[node].layouts) for node in nodes])))
    for first, second in problem.equal_homes:
        a, b = (problems.project(problem.nodes[home.node].layouts, home) for home in (first, second))
        same = (a[:, None, :] == b[None, :, :]).all(axis=2)
        parts.append(Table((first.node, second.node), np.where(same, 0.0, np.inf)))
    return parts


def width(tables: Sequence[Table], sizes: Sequence[int], node: int) -> float:
    """Returns how many entries a table over a node and all its neighbours has."""
    around = dict.fromkeys(other for table in tables if node in table.nodes for other in table.nodes)
    return float(np.prod([float(sizes[other]) for other in around]))


@final
@attrs.frozen(eq=False)
class Brute:
    """Every choice of a problem, by variable elimination.

    Nodes are eliminated one by one: what the cheapest layout of a node costs is a table over its neighbours. That
    weighs every choice, and none of them twice.
    """

    problem: Problem
    order: tuple[int, ...]
    eliminated: tuple[tuple[Table, ...], ...]
    """For each node in the order the tables that it was eliminated from."""

    @classmethod
    def of(cls, problem: Problem) -> "Brute":
        rest = tables(problem)
        sizes = [len(node.layouts) for node in problem.nodes]
        order: list[int] = []
        eliminated: list[tuple[Table, ...]] = []
        left = list(range(len(sizes)))
        while left:
            widths = [(width(rest, sizes, node), node) for node in left]
            entries, node = min(widths)
            if entries > MOST_ENTRIES:
                raise TooLarge
            members = [table for table in rest if node in table.nodes]
            nodes = tuple(dict.fromkeys([node, *(other for table in members for other in table.nodes)]))
            total: Any = 0.0
            for table in members:
                total = total + spread(table, nodes)
            rest = [table for table in rest if node not in table.nodes]
            rest.append(Table(nodes[1:], total.min(axis=0)))
            order.append(node)
            eliminated.append(tuple(members))
            left.remove(node)
        return cls(problem, tuple(order), tuple(eliminated))

    def choices(self, position: int, choice: Mapping[int, int]) -> np.ndarray:
        """Returns the cost of each layout of a node, with the rest at its cheapest."""
        total: Any = 0.0
        for table in self.eliminated[position]:
            where = tuple(slice(None) if node == self.order[position] else choice[node] for node in table.nodes)
            total = total + table.cost[where]
        return total

    def best(self) -> tuple[int, ...]:
        choice: dict[int, int] = {}
        for position in reversed(range(len(self.order))):
            choice[self.order[position]] = int(np.argmin(self.choices(position, choice)))
        return tuple(choice[node] for node in range(len(choice)))


class TooLarge(Exception):
    """There are too many choices to try."""


def smallest(task: Task) -> list[np.ndarray]:
    """Returns for each node and layout what its arrays take at every operation, without copies."""
    occupancy, problem = task.occupancy, task.problem
    sizes = [np.zeros((len(node.layouts), len(problem.program.operations) + 1)) for node in problem.nodes]
    for stay in occupancy.stays:
        for layout_index in range(len(sizes[stay.home.node])):
            choice = {stay.home.node: layout_index}
            layout = problem.layout(stay.home, choice)  # pyright: ignore[reportArgumentType]  it reads this node only
            cut = np.prod([size for size, dim in zip(problem.machine.sizes, layout, strict=True) if dim >= 0])
            sizes[stay.home.node][layout_index, stay.first : stay.last + 1] += (
                stay.nbytes * (1.0 if stay.is_lasting else occupancy.temporaries) / cut
            )
    return sizes


def within(task: Task, limit: float) -> float:
    """Returns the least cost of all choices whose timeline stays within a limit; infinite if there is none.

    Branch and bound, depth first and the cheapest branch first. A branch is cut if it costs as much as the best so far
    even with the rest at its cheapest, or takes too much memory even with the rest at its smallest.
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
        for layout_index in np.argsort(costs, kind="stable").tolist():
            if not costs[layout_index] < best * (1 - 1e-9):
                break
            used = room + sizes[node][layout_index]
            if (used + rest[len(order) - 1 - depth]).max() <= limit * (1 + 1e-9):
                go(depth + 1, {**choice, node: layout_index}, float(costs[layout_index]), used)

    go(0, {}, problem.cost(brute.best()), np.full(sizes[0].shape[1], float(task.occupancy.fixed_bytes)))
    return best


# ---- tests ----


def best_cost(problem: Problem) -> float:
    return problem.cost(Brute.of(problem).best())


def without_preference(problem: Problem) -> Solution:
    return solve(Formulation(problem, [np.zeros(len(node.layouts)) for node in problem.nodes]))


def preferred(problem: Problem) -> float:
    """Returns the most that choosing the simplest of equal plans may cost."""
    return sum(float(extra.max()) for extra in layout_preference(problem)) / 1e6


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


@pytest.mark.sample(24)
@pytest.mark.parametrize("seed", range(COUNT))
def test_solver_finds_the_least_cost(seed: int) -> None:
    problem = random_task(seed).problem
    best, solution = best_cost(problem), without_preference(problem)
    assert solution.choice is not None
    assert len(solution.choice) == len(problem.nodes)
    assert problem.cost(solution.choice) == solution.cost
    assert solution.cost == pytest.approx(best, rel=1e-6, abs=0)
    assert solution.bound <= best * (1 + 1e-6)


def test_random_programs_are_worth_planning() -> None:
    """Most have several nodes that cost, and cost far more without a plan."""
    tasks = [random_task(seed) for seed in range(COUNT)]
    sizes = [len(read(random_program(seed)).operations) for seed in range(COUNT)]
    gains = [task.problem.cost([0] * len(task.problem.nodes)) / best_cost(task.problem) for task in tasks]
    sends = [bool(task.problem.chosen_moves(Brute.of(task.problem).best())) for task in tasks]
    assert sum(gain > 1.2 for gain in gains) > COUNT * 0.7
    assert sum(sends) > COUNT * 0.3
    assert max(sizes) >= 8


@pytest.mark.parametrize("seed", range(0, COUNT, 3))
def test_the_simplest_of_equal_plans_is_chosen(seed: int) -> None:
    problem = random_task(seed).problem
    solution = solve(Formulation(problem, layout_preference(problem)))
    assert solution.cost <= best_cost(problem) * (1 + 1e-6) + preferred(problem)


def every_array_apart(program: TracedProgram, *_: Any) -> Clusters:
    """Clusters of one array each. Dims that an operation gives to no operand stay whole, as they do in clusters."""
    roots, sizes = {}, {}
    for operation in program.operations:
        for position, result in enumerate(operation.results):
            shape = program.arrays[result].shape
            if shape and operation.role == "compute":
                factors = operation.factors.results[position]
                alone = not operation.factors.reduced
                sizes[result] = tuple(1 if f is None and alone else n for f, n in zip(factors, shape, strict=True))
                roots[result] = (result, tuple(range(len(shape))))
    return Clusters(roots, sizes)


@pytest.mark.sample(24)
@pytest.mark.parametrize("seed", range(COUNT))
def test_clusters_rule_out_nothing_better(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that are computed elementwise share a layout: that rules out nothing better."""
    best = best_cost(random_task(seed).problem)
    monkeypatch.setattr(problems, "find_clusters", every_array_apart)
    apart = random_task(seed).problem
    # A slice more costs a nanosecond, which only decides between equal plans.
    assert best == pytest.approx(best_cost(apart), rel=1e-6, abs=1.5e-9)


def test_pinned_layouts_are_the_only_ones() -> None:
    product = RandomProgram(lambda x, w: [x @ w], ((128, 256), (256, 512)))
    program, machine = read(product), Machine.of(sr.mesh_shape("x:4,y:2"))
    task = Task.of(program, machine, ["x", "w"], {}, {0: P("y"), 1: P(None, P.UNCONSTRAINED)}, tie=False)
    first, second = (task.problem.nodes[task.problem.homes[array].node] for array in program.arguments)
    assert first.layouts.tolist() == [[-1, 0]]
    assert sorted(map(tuple, second.layouts.tolist())) == [(-1, -1), (-1, 1), (1, -1), (1, 1)]
    assert without_preference(task.problem).cost == pytest.approx(best_cost(task.problem), rel=1e-6)


def test_fed_back_results_have_the_layout_of_the_argument() -> None:
    update = RandomProgram(lambda w, x: [w - x], ((128, 256), (128, 256)))
    program, machine = read(update), Machine.of(sr.mesh_shape("x:4"))
    task = Task.of(program, machine, ["w", "x"], {0: 0}, {0: P("x"), 1: P(None, "x")}, tie=False)
    choice = without_preference(task.problem).choice
    assert choice is not None
    assert task.problem.layout(task.problem.homes[program.results[0]], choice) == (0,)  # pyright: ignore[reportArgumentType]
    assert task.problem.cost(choice) == pytest.approx(best_cost(task.problem), rel=1e-6)
    assert sum(move.seconds for move in task.problem.chosen_moves(choice)) > 0  # x goes from columns to rows
