"""The plans of experts: data, tensor, expert and sequence parallelism, ZeRO, and their products over mesh axes.

A pattern says for each mesh axis which dims it may split. The program's operations tell dims apart, not names: dims
that go together through the program are a family. The family that most FLOPs have is the batch, and of several that all
FLOPs have, one that nothing fed back has; an array without it is a weight, a gradient or a moment; and families that no
weight has are rows. The rest is left to message passing, which is fast with so few layouts.
"""

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, final

import attrs
import numpy as np

from shardrules.programs.autoplan.graph.home import Home
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.compilers.waiting import Waiting
from shardrules.programs.traced.unions import Unions

Role: TypeAlias = Literal["rows", "expert", "sequence", "tensor"]
"""The dims that an axis splits beside weights: rows; rows and experts; rows but for the batch; dims of weights."""

Stage: TypeAlias = Literal["whole", "moments", "all", "derived"]
"""The weights that axes of rows split: none; those that no matmul takes (ZeRO-1 and 2); all (ZeRO-3, FSDP); all, and
the arrays derived from them, such as the kernels that gradients of convolutions take. These are gathered then: derived
from weights that were gathered before, they take no collective, but weights have to stay gathered for them from the
forward pass on."""

_ROLE_NAMES: dict[Role, str] = {
    "rows": "data parallel",
    "expert": "expert parallel",
    "sequence": "sequence parallel",
    "tensor": "tensor parallel",
}
_STAGE_NAMES: dict[Stage, str] = {
    "whole": "",
    "moments": ", ZeRO-1",
    "all": ", ZeRO-3",
    "derived": ", ZeRO-3, gathered again",
}

_Dim: TypeAlias = tuple[int, int]
"""A node and one of its dims."""


@final
@attrs.frozen(eq=False)
class ExpertPattern:
    """A pattern, and the indices of the layouts that it leaves each node."""

    name: str
    keep: tuple[np.ndarray, ...]
    is_simple: bool
    """All axes split the batch: such patterns are weighed even when the time is up."""


def patterns(problem: Problem) -> Iterator[ExpertPattern]:
    """Yields the patterns for a problem, the simplest first."""
    families, axes = Families.of(problem), problem.machine.axes
    if families.batch is None or not axes:
        return
    roles: list[Role] = ["rows", *(["expert"] if families.experts else []), "sequence", "tensor"]
    for stage in ("whole", "moments", "all"):
        # Axes that come first are the outer ones: experts put rows there, and tensors inside of hosts.
        for combination in itertools.combinations_with_replacement(roles, len(axes)):
            if stage != "whole" and combination[0] == "tensor":  # no axis to store weights along
                continue
            if len(set(combination)) > 2:
                continue
            if "sequence" in combination and len(axes) > 1 and combination.count("rows") < len(axes) - 1:
                continue
            name = " x ".join(dict.fromkeys(_ROLE_NAMES[role] for role in combination)) + _STAGE_NAMES[stage]
            yield ExpertPattern(name, families.layouts(combination, stage), set(combination) == {"rows"})
    if families.derived:
        roles = ["rows"] * len(axes)
        name = _ROLE_NAMES["rows"] + _STAGE_NAMES["derived"]
        yield ExpertPattern(name, families.layouts(roles, "derived"), is_simple=True)


@final
@attrs.frozen(eq=False)
class Families:
    """The dims of nodes that go together, and their roles in the program."""

    problem: Problem
    roots: Mapping[_Dim, _Dim]
    batch: _Dim | None
    """The family that most FLOPs have; `None` in a program without matmuls."""
    weights: frozenset[_Dim]
    """The families of weights."""
    experts: frozenset[_Dim]
    """Families of weights that matmuls have as batch dims, or that regions exchange."""
    parameters: frozenset[int]
    """The nodes of arguments that matmuls take, and that have no batch."""
    arguments: frozenset[int]
    """The nodes of all arguments that have no batch."""
    derived: frozenset[int]
    """The nodes of what is computed from parameters alone, where matmuls take both it and these."""

    @classmethod
    def of(cls, problem: Problem) -> "Families":
        """Finds the families of a problem."""
        roots = _roots(problem)
        program, waiting = problem.program, Waiting.of(problem.program)
        batch = _batch(problem, roots, waiting)
        if batch is None:
            return cls(problem, roots, None, *[frozenset()] * 5)
        homes = {array: problem.homes[array] for array in program.arguments if array in problem.homes}
        # Vectors do not count: masks over rows would make weights of these.
        without_batch = {array: home for array, home in homes.items() if batch not in _families(home, roots)}
        matmul_arguments = {
            array
            for array in without_batch
            if any(user in waiting.before or program.operations[user].flops for user, _ in program.users.get(array, ()))
        }
        weights = {
            root for array in without_batch if len(homes[array].dims) > 1 for root in _families(homes[array], roots)
        }
        experts: dict[_Dim, None] = {}
        for op_index in waiting.matmuls:
            operation = program.operations[op_index]
            if operation.name != "dot_general":
                continue
            _, batch_dims = operation.equation.params["dimension_numbers"]
            for index, dims in enumerate(batch_dims):
                home, operand = problem.operand_homes.get((op_index, index)), operation.operands[index]
                if home is not None and operand not in waiting.behind:
                    split = [(home.node, home.dims[dim]) for dim in dims if home.dims[dim] is not None]
                    experts.update(
                        dict.fromkeys(roots.get(dim, dim) for dim in split if roots.get(dim, dim) in weights)
                    )
        for op_index, node in problem.region_nodes.items():
            exchange = program.operations[op_index].factors.exchange
            if exchange is not None and roots.get((node, exchange)) in weights:
                experts[roots[node, exchange]] = None
        return cls(
            problem,
            roots,
            batch,
            frozenset(weights),
            frozenset(experts),
            frozenset(without_batch[array].node for array in matmul_arguments),
            frozenset(home.node for home in without_batch.values()),
            frozenset(_derived(problem, waiting, matmul_arguments)),
        )

    def layouts(self, roles: Sequence[Role], stage: Stage) -> tuple[np.ndarray, ...]:
        """Returns for each node the indices of the layouts that a pattern leaves; all where it would leave none."""
        keep: list[np.ndarray] = []
        for node_index, node in enumerate(self.problem.nodes):
            mask = np.ones(len(node.layouts), bool)
            for axis, role in enumerate(roles):
                mask &= self._allowed(node_index, role, stage)[node.layouts[:, axis].astype(np.int64)]
            is_stored = node_index in self.arguments or (stage == "derived" and node_index in self.derived)
            if stage in ("all", "derived") and is_stored:
                is_split = np.stack([node.layouts[:, axis] >= 0 for axis, role in enumerate(roles) if role != "tensor"])
                mask = mask & is_split.all(axis=0) if (mask & is_split.all(axis=0)).any() else mask
            kept = np.flatnonzero(mask)
            keep.append(kept if len(kept) else np.arange(len(node.layouts)))
        return tuple(keep)

    def _allowed(self, node: int, role: Role, stage: Stage) -> np.ndarray:
        """Returns whether an axis may split each dim of a node; the last two entries are for parts and whole dims."""
        families, layouts = self._node_families[node], self.problem.nodes[node].layouts
        # Dims that nothing splits, such as the windows of convolutions, are in no family.
        has_rows = any(root not in self.weights and (layouts == dim).any() for dim, root in enumerate(families))
        allowed = np.ones(len(families) + 2, bool)
        for dim, root in enumerate(families):
            is_weight = root in self.weights
            if role == "tensor":
                allowed[dim] = is_weight
            elif role == "expert" and root in self.experts:
                allowed[dim] = True
            elif not has_rows:  # a weight, a gradient or a moment
                allowed[dim] = stage in ("all", "derived") or (stage == "moments" and node not in self.parameters)
            else:
                allowed[dim] = not is_weight and not (role == "sequence" and root == self.batch)
        return allowed

    @functools.cached_property
    def _node_families(self) -> list[list[_Dim]]:
        """For each node the family of each of its dims."""
        counts = [max(0, int(node.layouts.max(initial=-1)) + 1) for node in self.problem.nodes]
        return [[self.roots.get((node, dim), (node, dim)) for dim in range(count)] for node, count in enumerate(counts)]


def _batch(problem: Problem, roots: dict[_Dim, _Dim], waiting: Waiting) -> _Dim | None:
    """Returns the family that most FLOPs have; `None` in a program without matmuls."""
    flops: dict[_Dim, float] = {}
    for op_index in waiting.matmuls:
        operation = problem.program.operations[op_index]
        homes = [problem.operand_homes.get((op_index, index)) for index in range(len(operation.operands))]
        for root in dict.fromkeys(root for home in homes if home is not None for root in _families(home, roots)):
            flops[root] = flops.get(root, 0.0) + operation.flops * operation.run_count
    # All matmuls may have a dim of weights, too, such as the one that all layers add to: weights are fed back.
    updated = [problem.homes[array] for array in problem.feedback.values() if array in problem.homes]
    of_updated = {root for home in updated for root in _families(home, roots)}
    return max(flops, key=lambda root: (flops[root], root not in of_updated), default=None)


def _derived(problem: Problem, waiting: Waiting, parameters: Collection[int]) -> Iterator[int]:
    """Yields the nodes of matrices that matmuls need and that are computed from nothing but some parameters, each also
    needed by matmuls for something else."""
    program = problem.program
    computed = {array for array in parameters if len(program.arrays[array].shape) > 1}
    needing = waiting.before.union(waiting.matmuls)
    for op_index in sorted(waiting.before.difference(waiting.matmuls)):
        operation = program.operations[op_index]
        operands = {operand for operand in operation.operands if operand is not None}
        if not operands or not operands <= computed:
            continue
        computed.update(operation.results)
        # Otherwise a parameter would be gathered for this alone.
        users = [{user for user, _ in program.users[operand]} for operand in operands]
        if all(len(needing.intersection(each)) > 1 for each in users):
            yield from (problem.homes[result].node for result in operation.results if result in problem.homes)


def _families(home: Home, roots: dict[_Dim, _Dim]) -> list[_Dim]:
    """Returns the families of the dims of an array."""
    return [roots.get((home.node, dim), (home.node, dim)) for dim in home.dims if dim is not None]


def _roots(problem: Problem) -> dict[_Dim, _Dim]:
    """Returns for each dim that an array has in several nodes the first dim of its family."""
    unions = Unions[_Dim]()
    operations = problem.program.operations
    pairs = [
        (problem.homes.get(operand), home)
        for (op_index, index), home in problem.operand_homes.items()
        if (operand := operations[op_index].operands[index]) is not None
    ]
    pairs += [
        (problem.homes.get(operations[op_index].results[index]), home)
        for (op_index, index), home in problem.produced_homes.items()
    ]
    for first, second in (*pairs, *problem.equal_homes):
        if first is None:
            continue
        for first_dim, second_dim in zip(first.dims, second.dims, strict=True):
            if first_dim is not None and second_dim is not None:
                unions.join((first.node, first_dim), (second.node, second_dim))
    return {dim: unions.root(dim) for dim in [*unions.parents]}
