"""Builds the graph of a program: which layouts are chosen, what follows from them, and what computing costs.

Operations come in four forms:

- *Output-driven*: one result, and nothing is summed over. The layout of the result is chosen, and the operands' layouts
  follow from it. Results that are computed elementwise from each other are one node (see `clusters`).
- *Loops*: the operation is a nest of loops, as matmuls and reductions are. What is chosen is how its loops are split.
  Its results get layouts of their own right after it, since a sum over a split loop is completed there.
- *Passed on*: every result is an operand, unchanged.
- *As written*: `shard_map`, whose specs the user wrote.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.core.axes import mesh_sizes
from shardrules.core.spec import axis_names, spec_repr
from shardrules.programs.autoplan.graph.compute_cost import ComputeCosts
from shardrules.programs.autoplan.graph.edges import EdgeBuilder
from shardrules.programs.autoplan.graph.home import Home, nest_home, project
from shardrules.programs.autoplan.graph.layouts import WHOLE, all_layouts
from shardrules.programs.autoplan.graph.machine import Machine
from shardrules.programs.autoplan.graph.problem import Node, Problem
from shardrules.programs.autoplan.graph.region_cost import RegionCosts
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.traced.alike import op_classes
from shardrules.programs.traced.clusters import Clusters, find_clusters
from shardrules.programs.traced.program import TracedProgram
from shardrules.programs.traced.sums import PartialSums

_PASSED_ON = ("optimization_barrier", "pvary", "device_put")
"""Primitives whose results are their operands."""


def build_problem(
    program: TracedProgram,
    machine: Machine,
    paths: Sequence[str],
    feedback: Mapping[int, int],
    pinned: Mapping[int, Any],
    tie: bool,
) -> Problem:
    """Builds the problem of a program whose arguments have these `paths`.

    `feedback` maps results to the arguments that a caller passes them as in the next call, `pinned` argument positions
    to their specs. `tie`: whether equal operations take the same layout.
    """
    sums = PartialSums.of(program)
    partial_ops = [op_index for op_index in range(len(program.operations)) if sums.may_add_parts(op_index)]
    clusters = find_clusters(program, partial_ops, tie)
    classes = op_classes(program, paths, tie)
    fusion = FusedProgram.of(program, machine.compiler, math.prod(machine.sizes))
    costs = ComputeCosts(fusion, machine)
    builder = _GraphBuilder(program, machine, costs, RegionCosts(machine), feedback, sums, clusters)
    for position, array in enumerate(program.arguments):
        spec = pinned.get(position)
        builder.add_argument(position, array, ("argument", classes.arguments[position], spec), spec)
    for op_index, op_class in enumerate(classes.operations):
        builder.add_operation(op_index, op_class)
    builder.connect_loops()
    edges = EdgeBuilder(program, machine, builder.nodes, builder.homes, builder.operand_homes)
    edges.add_operands(share_copies=tie)
    edges.add_results(builder.produced_homes)
    return Problem(
        program,
        machine,
        fusion,
        builder.nodes,
        edges.edges,
        list(edges.group_counts.items()),
        edges.equal_homes,
        builder.homes,
        builder.operand_homes,
        builder.produced_homes,
        edges.edge_indices,
        feedback,
        tuple(builder.ignored_specs),
        builder.region_nodes,
        builder.region_costs,
    )


@final
@attrs.define(eq=False)
class _GraphBuilder:
    """The nodes so far, and the homes of the arrays in them. An `op_class` is a number that equal operations share."""

    program: TracedProgram
    machine: Machine
    costs: ComputeCosts
    region_costs: RegionCosts
    feedback: Mapping[int, int]
    sums: PartialSums
    clusters: Clusters
    nodes: list[Node] = attrs.field(factory=list)
    homes: dict[int, Home] = attrs.field(factory=dict)
    operand_homes: dict[tuple[int, int], Home] = attrs.field(factory=dict)
    produced_homes: dict[tuple[int, int], Home] = attrs.field(factory=dict)
    ignored_specs: dict[str, None] = attrs.field(factory=dict)
    region_nodes: dict[int, int] = attrs.field(factory=dict)
    _node_indices: dict[Any, int] = attrs.field(factory=dict)
    _cluster_nodes: dict[int, int] = attrs.field(factory=dict)

    def add_argument(self, position: int, array: int, key: Any, spec: PartitionSpec | None) -> None:
        """Adds the node of an argument, which arguments with the same `key` share."""
        shape = self.program.arrays[array].shape
        if not shape:
            return
        node, is_new = self._node_of_class(key, shape, f"argument {position}")
        self.homes[array] = Home(node, tuple(range(len(shape))))
        if is_new and spec is not None:
            self._restrict(self.homes[array], spec)

    def add_operation(self, op_index: int, op_class: int) -> None:
        operation, arrays = self.program.operations[op_index], self.program.arrays
        operands = [operand for operand in operation.operands if operand is not None]
        if not any(arrays[array].shape for array in (*operation.results, *operands)):
            return  # scalars are on every device
        if operation.name in _PASSED_ON and len(operation.results) > 1:
            self._add_passed_on(op_index, op_class)
        elif operation.role == "opaque":
            self._add_as_written(op_index, op_class)
        elif len(operation.results) == 1 and not operation.is_nest and arrays[operation.results[0]].shape:
            self._add_output_driven(op_index, op_class)
        else:
            self._add_loops(op_index, op_class)

    def connect_loops(self) -> None:
        """Sets the layouts in which values come back to the start of a loop: their homes are known only at its end."""
        for op_index, operation in enumerate(self.program.operations):
            if operation.role == "join" and operation.results[0] in self.homes:
                home = self.homes[operation.results[0]]
                factor_dims = {dim: node_dim for dim, node_dim in enumerate(home.dims) if node_dim is not None}
                self._set_operand_homes(op_index, home.node, factor_dims)

    def _add_output_driven(self, op_index: int, op_class: int) -> None:
        """Adds an operation whose operand layouts follow from the layout of its only result."""
        operation = self.program.operations[op_index]
        factors, result = operation.factors, operation.results[0]
        is_partial = self.sums.may_add_parts(op_index)
        argument = self.feedback.get(result)
        if argument is not None and argument in self.homes:
            # The caller passes it again: in the layout of the argument, or every call would begin with a move.
            home = Home(self.homes[argument].node, tuple(range(len(self.program.arrays[result].shape))))
        elif operation.role == "exit" and operation.operands[0] not in self.sums.loop_sums:
            # What comes out of a loop is what went round in it.
            assert operation.operands[0] is not None, "what goes round a loop is an array"
            self.homes[result] = self.homes[operation.operands[0]]
            return
        elif is_partial:
            home = self._partial_home(op_index, op_class)
        else:
            home = self._cluster_home(result, op_index, (op_class, 0))
            if operation.role == "fixed":
                self._restrict(home, operation.spec)
        factor_dims = {
            factor: dim
            for factor, dim in zip(factors.results[0], home.dims, strict=True)
            if factor is not None and dim is not None
        }
        self._set_operand_homes(op_index, home.node, factor_dims)
        if is_partial and not self.sums.is_only_added(result):
            self.homes[result] = self._home_after(op_index, op_class, 0, home)
        else:
            self.homes[result] = home
        self._add_compute_seconds(op_index, home.node)

    def _add_loops(self, op_index: int, op_class: int) -> None:
        operation = self.program.operations[op_index]
        factors = operation.factors
        node, is_new = self._node_of_class(("node", op_class), factors.sizes, operation.name)
        if operation.name == "region":
            self.region_nodes[op_index] = node
            if is_new:
                rows, alternatives = self.region_costs.rows(operation, self.nodes[node].layouts)
                self._keep_layouts(node, np.array(rows, np.int64))
                self.nodes[node].alternatives = alternatives
        for operand_index, operand in enumerate(operation.operands):
            if operand in self.homes:
                home = nest_home(node, factors, factors.operands[operand_index])
                self.operand_homes[op_index, operand_index] = home
        for result_index, result in enumerate(operation.results):
            if not self.program.arrays[result].shape:
                continue
            home = nest_home(node, factors, factors.results[result_index], factors.summed(result_index))
            # A sum that is only added to others stays in parts: all are completed together at the end.
            if not self.sums.is_only_added(result):
                home = self._home_after(op_index, op_class, result_index, home)
            self.homes[result] = home
        self._add_compute_seconds(op_index, node)

    def _add_passed_on(self, op_index: int, op_class: int) -> None:
        """Adds an operation whose results are its operands; any of them may be laid out without the others."""
        operation = self.program.operations[op_index]
        for index, (operand, result) in enumerate(zip(operation.operands, operation.results, strict=True)):
            if self.program.arrays[result].shape:
                self.homes[result] = self._cluster_home(result, op_index, (op_class, index))
                if operand in self.homes:
                    self.operand_homes[op_index, index] = self.homes[result]

    def _add_as_written(self, op_index: int, op_class: int) -> None:
        operation = self.program.operations[op_index]
        operand_specs, result_specs = operation.spec
        for operand_index, operand in enumerate(operation.operands):
            if operand is not None and operand in self.homes:
                key = ("fixed", op_class, "in", operand_index)
                home = self._fixed_home(key, operand, operand_specs[operand_index], operation.name)
                self.operand_homes[op_index, operand_index] = home
        for result_index, result in enumerate(operation.results):
            if self.program.arrays[result].shape:
                key = ("fixed", op_class, "out", result_index)
                self.homes[result] = self._fixed_home(key, result, result_specs[result_index], operation.name)

    def _node_of_class(self, key: Any, sizes: Sequence[int], name: str, partial: bool = False) -> tuple[int, bool]:
        """The node of a class, and whether it is new. Splits of each dim divide its size in `sizes`."""
        key = (key, tuple(sizes))  # equal operations may be in clusters that fewer splits divide
        if key in self._node_indices:
            return self._node_indices[key], False
        rows = all_layouts(sizes, self.machine, partial)
        self.nodes.append(Node(rows, np.zeros(len(rows)), np.zeros(len(rows)), name))
        self._node_indices[key] = len(self.nodes) - 1
        return self._node_indices[key], True

    def _cluster_home(self, array: int, op_index: int, key: Any) -> Home:
        dims = tuple(range(len(self.program.arrays[array].shape)))
        root, dims = self.clusters.roots.get(array, (array, dims))
        if root not in self._cluster_nodes:
            sizes = self.clusters.sizes.get(root, self.program.arrays[root].shape)
            name = f"result of {self.program.operations[op_index].name}"
            self._cluster_nodes[root], _ = self._node_of_class(("array", *key), sizes, name)
        return Home(self._cluster_nodes[root], dims)

    def _partial_home(self, op_index: int, op_class: int) -> Home:
        """The home of a sum that devices may hold in parts. What goes round a loop is one such sum with its adds."""
        operation = self.program.operations[op_index]
        for array, adding in self.sums.loop_sums.items():
            if adding == op_index and array in self.homes:
                return self.homes[array]
        factors = operation.factors
        sizes = [1 if factor is None else factors.sizes[factor] for factor in factors.results[0]]
        node, _ = self._node_of_class(("node", op_class), sizes, operation.name, partial=True)
        return Home(node, tuple(range(len(sizes))))

    def _fixed_home(self, key: Any, array: int, spec: PartitionSpec, name: str) -> Home:
        shape = self.program.arrays[array].shape
        node, is_new = self._node_of_class(key, shape, name)
        home = Home(node, tuple(range(len(shape))))
        if is_new:
            self._restrict(home, spec)
        return home

    def _home_after(self, op_index: int, op_class: int, result_index: int, produced: Home) -> Home:
        """The home of a result that changes its layout right after the operation, which produces it in `produced`."""
        result = self.program.operations[op_index].results[result_index]
        self.produced_homes[op_index, result_index] = produced
        return self._cluster_home(result, op_index, (op_class, ("sum", result_index)))

    def _set_operand_homes(self, op_index: int, node: int, factor_dims: Mapping[int, int]) -> None:
        """Sets the homes in which an operation reads its operands, given the dim of the node for each factor."""
        operation = self.program.operations[op_index]
        starts_at_zero = operation.role == "join" and operation.results[0] in self.sums.loop_sums
        for operand_index, operand in enumerate(operation.operands):
            if starts_at_zero and operand_index == 0:  # zeros are made in any layout
                continue
            if operand in self.homes:
                factors = operation.factors.operands[operand_index]
                dims = tuple(None if factor is None else factor_dims.get(factor) for factor in factors)
                self.operand_homes[op_index, operand_index] = Home(node, dims)

    def _add_compute_seconds(self, op_index: int, node_index: int) -> None:
        node, operation = self.nodes[node_index], self.program.operations[op_index]
        if operation.name == "region":
            rows = zip(node.layouts.tolist(), node.alternatives, strict=True)
            seconds = [self.region_costs.price(operation, layout, index).seconds for layout, index in rows]
            node.seconds = node.seconds + operation.run_count * np.array(seconds)
            return
        seconds, memory = self.costs.seconds(op_index, node_index, node.layouts, self.operand_homes)
        node.seconds, node.memory_seconds = node.seconds + seconds, node.memory_seconds + memory

    def _restrict(self, home: Home, spec: PartitionSpec) -> None:
        """Leaves a node only the layouts that a spec allows; all of them if the spec is not a layout of this mesh."""
        node = self.nodes[home.node]
        entries = (*tuple(spec), *(None,) * (len(home.dims) - len(tuple(spec))))
        layout = np.full(len(self.machine.axes), WHOLE, np.int8)
        free_dims = [dim for dim, entry in enumerate(entries) if entry is PartitionSpec.UNCONSTRAINED]
        for dim, entry in enumerate(entries):
            for axis in () if dim in free_dims or entry is None else (entry,) if isinstance(entry, str) else entry:
                if axis in self.machine.axes:
                    layout[self.machine.axes.index(axis)] = dim
        rows = project(node.layouts, home)
        # Axes that the spec does not use may also split the unconstrained dims.
        keep = ((rows == layout) | ((layout == WHOLE) & np.isin(rows, free_dims))).all(axis=1)
        unknown_axes = [axis for axis in axis_names(spec) if axis not in mesh_sizes(self.machine.mesh)]
        if not keep.any() or unknown_axes:
            self.ignored_specs[spec_repr(spec)] = None
            return
        self._keep_layouts(home.node, keep)

    def _keep_layouts(self, node_index: int, keep: np.ndarray) -> None:
        node = self.nodes[node_index]
        node.layouts, node.seconds, node.memory_seconds = (
            node.layouts[keep],
            node.seconds[keep],
            node.memory_seconds[keep],
        )
