"""Makes the graph of a program: what is chosen together, what follows from it, and what that costs."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from jax.sharding import PartitionSpec

from shardrules.core.axes import mesh_sizes
from shardrules.core.spec import axis_names, spec_repr
from shardrules.planning.graph.layouts import WHOLE, Moves, all_layouts, moves, shard_counts
from shardrules.planning.graph.machine import Machine
from shardrules.planning.graph.problem import Edge, Home, Node, Problem, project, read_region
from shardrules.planning.traced.alike import classes
from shardrules.planning.traced.clusters import Clusters, clusters
from shardrules.planning.traced.program import Operation, TracedProgram
from shardrules.planning.traced.sums import Sums

_SOON = 48
"""Within how many operations compilers compute something anew rather than keep it."""

_IN_LOOPS = 128
"""How many times fewer bytes compilers combine in a loop."""


@final
class Builder:
    """Makes the graph of a program.

    **Arguments:**

    - `program`: the program.
    - `machine`: the mesh.
    - `feedback`: for numbers of arrays that are returned those of the arguments that they are to be.
    - `pinned`: for numbers of arguments the specs that they have to have.
    """

    def __init__(
        self, program: TracedProgram, machine: Machine, feedback: Mapping[int, int], pinned: Mapping[int, Any]
    ) -> None:
        self.program, self.machine, self.feedback, self.pinned = program, machine, feedback, pinned
        self.nodes: list[Node] = []
        self.homes: dict[int, Home] = {}
        self.operand_homes: dict[tuple[int, int], Home] = {}
        self.made: dict[Any, int] = {}
        self.known: dict[Any, Moves] = {}
        self.anew: dict[tuple[int, int], tuple[Home, Home]] = {}
        self.equal: list[tuple[Home, Home]] = []
        self.ignored: dict[str, None] = {}
        self.sums = Sums.of(program)
        self.clusters = Clusters({}, {})
        self.cluster_nodes: dict[int, int] = {}

    def build(self, tie: bool, paths: Sequence[str]) -> Problem:
        """Makes the graph.

        **Arguments:**

        - `tie`: whether operations alike take the same layout.
        - `paths`: the names of the arguments.

        **Returns:**

        The `Problem`.
        """
        program = self.program
        found = classes(program, paths, tie)
        self.clusters = clusters(program, filter(self.sums.is_partial, range(len(program.operations))), tie)
        for position, number in enumerate(program.arguments):
            self.argument(position, number, ("argument", found.arguments[position], self.pinned.get(position)))
        for at in range(len(program.operations)):
            self.operation(at, found.operations[at])
        for at, operation in enumerate(program.operations):  # what goes round a loop is made after it is taken
            if operation.role == "join" and operation.results[0] in self.homes:
                home = self.homes[operation.results[0]]
                where = {dim: own for dim, own in enumerate(home.dims) if own is not None}
                self.take(at, home.node, where)
        edges, shared, reads = self.edges(tie)
        return Problem(
            program,
            self.machine,
            self.nodes,
            edges,
            shared,
            self.equal,
            self.homes,
            self.operand_homes,
            {key: own for key, (own, _) in self.anew.items()},
            reads,
        )

    def node(self, key: Any, sizes: Sequence[int], name: str, partial: bool = False) -> tuple[int, bool]:
        """Returns the node of a class, and makes it if there is none yet.

        **Arguments:**

        - `key`: what tells the class from others.
        - `sizes`: of each dim of the node what splits have to divide.
        - `name`: what it is, for people.
        - `partial`: whether it may be a sum that is not added up yet.

        **Returns:**

        Its number, and whether it is new.
        """
        key = (key, tuple(sizes))  # what is alike may go together with what divides less
        if key in self.made:
            return self.made[key], False
        rows = all_layouts(sizes, self.machine, partial)
        self.nodes.append(Node(rows, np.zeros(len(rows)), name))
        self.made[key] = len(self.nodes) - 1
        return self.made[key], True

    def argument(self, position: int, number: int, key: Any) -> None:
        """Makes the node of an argument.

        **Arguments:**

        - `position`: which argument.
        - `number`: of its array.
        - `key`: what tells its class from others.
        """
        shape = self.program.arrays[number].shape
        if not shape:
            return
        node, new = self.node(key, shape, f"argument {position}")
        home = Home(node, tuple(range(len(shape))))
        self.homes[number] = home
        if new and position in self.pinned:
            self.restrict(home, self.pinned[position])

    def restrict(self, home: Home, spec: PartitionSpec) -> None:
        """Leaves only the labels that a spec allows.

        **Arguments:**

        - `home`: the array.
        - `spec`: the spec. Where it is `UNCONSTRAINED`, all stay.
        """
        own = self.nodes[home.node]
        entries = (*tuple(spec), *(None,) * (len(home.dims) - len(tuple(spec))))
        wanted = np.full(len(self.machine.axes), WHOLE, np.int8)
        free = [dim for dim, entry in enumerate(entries) if entry is PartitionSpec.UNCONSTRAINED]
        for dim, entry in enumerate(entries):
            for name in () if dim in free or entry is None else (entry,) if isinstance(entry, str) else entry:
                if name in self.machine.axes:
                    wanted[self.machine.axes.index(name)] = dim
        rows = project(own.layouts, home)
        keep = ((rows == wanted) | ((wanted == WHOLE) & np.isin(rows, free))).all(axis=1)
        unknown = [name for name in axis_names(spec) if name not in mesh_sizes(self.machine.mesh)]
        if not keep.any() or unknown:
            self.ignored[spec_repr(spec)] = None
            return
        own.layouts, own.seconds = own.layouts[keep], own.seconds[keep]

    def operation(self, at: int, colour: int) -> None:
        """Makes the nodes of an operation.

        **Arguments:**

        - `at`: the number of the operation.
        - `colour`: the number of its class: operations alike have the same.
        """
        operation = self.program.operations[at]
        arrays, factors = self.program.arrays, operation.factors
        if not any(
            arrays[one].shape for one in (*operation.results, *(o for o in operation.operands if o is not None))
        ):
            return
        if operation.name in ("optimization_barrier", "pvary", "device_put") and len(operation.results) > 1:
            self.apart(at, colour)
            return
        if operation.role == "opaque":
            self.opaque(at, colour)
        elif len(operation.results) == 1 and not factors.reduced and arrays[operation.results[0]].shape:
            self.functional(at, colour)
        else:
            self.general(at, colour)

    def place_of(self, array: int, at: int, colour: int, slot: Any) -> Home:
        """Returns the node of an array that goes with others, and the array's place there.

        **Arguments:**

        - `array`: its number.
        - `at`: the operation that makes it.
        - `colour`: the number of its class: operations alike have the same.
        - `slot`: which of its results it is.

        **Returns:**

        A `Home`.
        """
        root, dims = self.clusters.roots.get(array, (array, tuple(range(len(self.program.arrays[array].shape)))))
        if root not in self.cluster_nodes:
            sizes = self.clusters.sizes.get(root, self.program.arrays[root].shape)
            name = self.program.operations[at].name
            self.cluster_nodes[root], _ = self.node(("array", colour, slot), sizes, f"result of {name}")
        return Home(self.cluster_nodes[root], dims)

    def functional(self, at: int, colour: int) -> None:
        """Makes an operation of which what comes in follows from the layout of what comes out.

        **Arguments:**

        - `at`: the number of the operation.
        - `colour`: the number of its class: operations alike have the same.
        """
        operation = self.program.operations[at]
        factors, result = operation.factors, operation.results[0]
        array = self.program.arrays[result]
        partial = self.sums.is_partial(at)
        back = self.feedback.get(result)
        if back is not None and back in self.homes:
            own = Home(self.homes[back].node, tuple(range(len(array.shape))))
        elif operation.role == "exit" and operation.operands[0] not in self.sums.rounds:
            self.homes[result] = self.homes[operation.operands[0] or 0]
            return
        elif partial:
            own = self.part(at, colour)
        else:
            own = self.place_of(result, at, colour, 0)
            if operation.role == "fixed":
                self.restrict(own, operation.spec)
        where: dict[int, int] = {
            f: dim for f, dim in zip(factors.results[0], own.dims, strict=True) if f is not None and dim is not None
        }
        self.take(at, own.node, where)
        self.homes[result] = self.settled(at, colour, 0, own) if partial and not self.sums.is_added(result) else own
        self.charge(at, own)

    def part(self, at: int, colour: int) -> Home:
        """Makes the node of a sum that devices may hold in parts; what goes round in a loop has one.

        **Arguments:**

        - `at`: the number of the operation.
        - `colour`: the number of its class.

        **Returns:**

        The `Home` of its result.
        """
        operation = self.program.operations[at]
        factors = operation.factors
        for array, adding in self.sums.rounds.items():
            if adding == at and array in self.homes:
                return self.homes[array]
        sizes = [1 if f is None else factors.sizes[f] for f in factors.results[0]]
        node, _ = self.node(("node", colour), sizes, operation.name, True)
        return Home(node, tuple(range(len(factors.results[0]))))

    def apart(self, at: int, colour: int) -> None:
        """Makes an operation of which every result is an operand that is handed on.

        **Arguments:**

        - `at`: the number of the operation.
        - `colour`: the number of its class: operations alike have the same.
        """
        operation = self.program.operations[at]
        for place, (operand, result) in enumerate(zip(operation.operands, operation.results, strict=True)):
            shape = self.program.arrays[result].shape
            if not shape:
                continue
            home = self.place_of(result, at, colour, place)
            self.homes[result] = home
            if operand in self.homes:
                self.operand_homes[at, place] = home

    def general(self, at: int, colour: int) -> None:
        """Makes an operation that has layouts of its own, and each result of which may be laid out anew.

        **Arguments:**

        - `at`: the number of the operation.
        - `colour`: the number of its class: operations alike have the same.
        """
        operation = self.program.operations[at]
        factors = operation.factors
        node, _ = self.node(("node", colour), factors.sizes, operation.name)
        self.take(at, node, {factor: factor for factor in range(len(factors.sizes))})
        for place, result in enumerate(operation.results):
            if not self.program.arrays[result].shape:
                continue
            own = Home(node, factors.results[place], factors.reduced)
            self.homes[result] = own if self.sums.is_added(result) else self.settled(at, colour, place, own)
        self.charge(at, Home(node, ()))

    def opaque(self, at: int, colour: int) -> None:
        """Makes an operation of which what it takes and gives is laid out as it says.

        **Arguments:**

        - `at`: the number of the operation.
        - `colour`: the number of its class: operations alike have the same.
        """
        operation = self.program.operations[at]
        taken, given = operation.spec
        for place, operand in enumerate(operation.operands):
            if operand in self.homes:
                shape = self.program.arrays[operand].shape
                node, new = self.node(("fixed", colour, "in", place), shape, operation.name)
                self.operand_homes[at, place] = Home(node, tuple(range(len(shape))))
                if new:
                    self.restrict(self.operand_homes[at, place], taken[place])
        for place, result in enumerate(operation.results):
            shape = self.program.arrays[result].shape
            if shape:
                node, new = self.node(("fixed", colour, "out", place), shape, operation.name)
                self.homes[result] = Home(node, tuple(range(len(shape))))
                if new:
                    self.restrict(self.homes[result], given[place])

    def settled(self, at: int, colour: int, place: int, own: Home) -> Home:
        """Returns where an array is that is laid out anew after the operation.

        **Arguments:**

        - `at`: the number of the operation.
        - `colour`: the number of its class: operations alike have the same.
        - `place`: which result.
        - `own`: where it is before that.

        **Returns:**

        A `Home`.
        """
        home = self.place_of(self.program.operations[at].results[place], at, colour, ("sum", place))
        self.anew[at, place] = (own, home)
        return home

    def take(self, at: int, node: int, where: Mapping[int, int]) -> None:
        """Notes what the operation takes of each operand.

        **Arguments:**

        - `at`: the number of the operation.
        - `node`: its node.
        - `where`: for factors of the operation the dims of the node.
        """
        operation = self.program.operations[at]
        zeros = operation.role == "join" and operation.results[0] in self.sums.rounds
        for place, operand in enumerate(operation.operands):
            if zeros and place == 0:  # which are made wherever they are wanted
                continue
            if operand in self.homes:
                dims = operation.factors.operands[place]
                self.operand_homes[at, place] = Home(node, tuple(None if f is None else where.get(f) for f in dims))

    def charge(self, at: int, home: Home) -> None:
        """Adds what computing takes.

        **Arguments:**

        - `at`: the number of the operation.
        - `home`: its node.
        """
        operation, arrays, machine = self.program.operations[at], self.program.arrays, self.machine
        node = home.node
        own = self.nodes[node]
        cut = shard_counts(own.layouts, machine)
        busy = operation.flops / machine.flops_per_second(operation.dtype) / cut if operation.flops else 0.0
        moved = np.zeros(len(own.layouts))
        for place, operand in enumerate(operation.operands):
            if (at, place) in self.operand_homes and operand is not None and self.is_read(at):
                rows = project(own.layouts, self.operand_homes[at, place])
                moved += arrays[operand].nbytes / shard_counts(rows, machine)
        for place, result in enumerate(operation.results):
            if arrays[result].shape and self.is_written(at, result):
                if len(operation.results) == 1 and not operation.factors.reduced:
                    rows = own.layouts
                else:
                    rows = project(own.layouts, Home(node, operation.factors.results[place], operation.factors.reduced))
                # What leaves a loop is written piece by piece, one in each round.
                written = operation.operands[0] if operation.role == "leave" else result
                moved += arrays[written or 0].nbytes / shard_counts(rows, machine)
        own.seconds = own.seconds + np.maximum(busy, moved / machine.memory_rate) * operation.run_count

    def is_read(self, at: int) -> bool:
        """Whether an operation reads its operands from memory, rather than being computed along with others.

        **Arguments:**

        - `at`: the number of the operation.

        **Returns:**

        Whether it does.
        """
        operation = self.program.operations[at]
        return bool(operation.flops) or operation.role == "return" or not _is_fused(operation)

    def is_written(self, at: int, result: int) -> bool:
        """Whether what comes out is written to memory: others need all of it before they can begin.

        **Arguments:**

        - `at`: the number of the operation.
        - `result`: the number of the array that comes out.

        **Returns:**

        Whether it is.
        """
        operation = self.program.operations[at]
        if operation.role in ("enter", "join", "leave"):
            return operation.role == "leave"
        if not _is_fused(operation) or operation.role == "return":
            return True
        users = self.program.users.get(result, ())
        # What is needed again much later is kept, rather than what it is computed from.
        return any(not _is_fused(self.program.operations[user]) or user - at > _SOON for user, _ in users)

    def edges(self, together: bool) -> tuple[list[Edge], list[tuple[tuple[int, ...], int]], dict[tuple[int, int], int]]:
        """Makes the edges.

        **Arguments:**

        - `together`: whether operations of one name that take an array alike take the same copy of it.

        **Returns:**

        The edges; groups of them with what they share, as `Problem.shared` has them; and `Problem.reads`.
        """
        program = self.program
        edges: list[Edge] = []
        numbers: dict[Any, int] = {}
        reads: dict[tuple[int, int], int] = {}
        groups: dict[tuple[int, int], dict[Any, list[tuple[int, int]]]] = {}

        def add(array: int, start: Home, end: Home, times: int, region: int) -> int:
            in_loop = program.regions[region][1] > 1
            key = (start, end, program.arrays[array].nbytes, times, in_loop)
            if key not in numbers:
                numbers[key] = len(edges)
                edges.append(self.edge(start, end, program.arrays[array].nbytes, times, in_loop))
            return numbers[key]

        for at, operation in enumerate(program.operations):
            for place, operand in enumerate(operation.operands):
                taken = self.operand_homes.get((at, place))
                if taken is None or operand is None or taken == self.homes[operand]:
                    continue
                free = together and operation.role == "compute"
                same = (operation.name, place, operation.factors.operands[place]) if free else (at, place)
                own = groups.setdefault((operand, read_region(program, at, place)), {})
                own.setdefault((operation.read_counts[place], same), []).append((at, place))
        counted: dict[tuple[int, ...], int] = {}
        for (array, region), kinds in groups.items():
            by_times: dict[int, dict[int, None]] = {}
            for (times, _), places in kinds.items():
                end = self.copy(places)
                number = add(array, self.homes[array], end, times, region)
                by_times.setdefault(times, {})[number] = None
                reads.update(dict.fromkeys(places, number))
            for times, same in by_times.items():
                key = tuple(sorted(same))
                counted[key] = counted.get(key, 0) + times
        for (at, place), (own, home) in self.anew.items():
            operation = program.operations[at]
            number = add(operation.results[place], own, home, operation.run_count, operation.region)
            reads[at, -1 - place] = number
            counted[number,] = counted.get((number,), 0) + operation.run_count
        return edges, list(counted.items()), reads

    def copy(self, places: Sequence[tuple[int, int]]) -> Home:
        """Returns where an array is brought for operations that take it alike: all of them take the same copy.

        **Arguments:**

        - `places`: the operations, and as which operand each takes it.

        **Returns:**

        A `Home`.
        """
        ends = [self.operand_homes[place] for place in places]
        if len(dict.fromkeys(ends)) == 1:
            return ends[0]
        key = ("copy", tuple(dict.fromkeys(ends)))
        if key not in self.made:
            rows = [np.unique(project(self.nodes[end.node].layouts, end), axis=0) for end in ends]
            common = [row for row in rows[0].tolist() if all((other == row).all(axis=1).any() for other in rows[1:])]
            self.nodes.append(Node(np.array(common, np.int8), np.zeros(len(common)), "copy"))
            self.made[key] = len(self.nodes) - 1
            dims = tuple(range(len(ends[0].dims)))
            self.equal += [(Home(self.made[key], dims), end) for end in dict.fromkeys(ends)]
        return Home(self.made[key], tuple(range(len(ends[0].dims))))

    def edge(self, start: Home, end: Home, nbytes: int, times: int, in_loop: bool) -> Edge:
        """Makes an edge.

        **Arguments:**

        - `start`, `end`: where the array is given, and where it is taken.
        - `nbytes`: the bytes of all of it.
        - `times`: how often it goes.
        - `in_loop`: whether that is in a loop, where fewer collectives can be combined.

        **Returns:**

        An `Edge`.
        """
        first, from_codes = np.unique(project(self.nodes[start.node].layouts, start), axis=0, return_inverse=True)
        last, to_codes = np.unique(project(self.nodes[end.node].layouts, end), axis=0, return_inverse=True)
        key = (first.tobytes(), first.shape, last.tobytes(), last.shape)
        if key not in self.known:
            self.known[key] = moves(first, last, self.machine)
        return Edge(
            start.node,
            end.node,
            nbytes,
            times,
            from_codes.ravel(),
            to_codes.ravel(),
            first,
            last,
            self.known[key],
            self.machine.assumptions.combined_bytes // (_IN_LOOPS if in_loop else 1),
        )


def _is_fused(operation: Operation) -> bool:
    """Whether an operation is computed along with those that take its result."""
    if operation.role in ("enter", "join", "fixed"):
        return True
    return operation.role == "compute" and not operation.flops and operation.name not in _ALONE


_ALONE = (
    "gather",
    "scatter",
    "scatter-add",
    "sort",
    "top_k",
    "cumsum",
    "while",
    "reduce_window",
    "select_and_scatter_add",
    "fft",
    "dynamic_update_slice",
)
