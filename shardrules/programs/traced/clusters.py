"""Arrays that are laid out alike, because each is computed elementwise from the other and used nowhere else.

A cluster has one layout instead of one for each of its arrays, which makes problems many times smaller. In the narrow
form this rules out no better plan: a result is joined to its operand only where moving the result afterwards costs no
more than moving the operand before. The wide form also joins arrays with several uses, and operations of several
operands: its plans are optimal only among those in which such arrays are laid out alike.
"""

import math
from collections.abc import Iterable, Mapping
from typing import final

import attrs

from shardrules.programs.traced.program import Operation, TracedProgram


@final
@attrs.frozen(eq=False)
class Clusters:
    """Arrays that are laid out alike. The first array of a cluster is its root."""

    roots: Mapping[int, tuple[int, tuple[int | None, ...]]]
    """For each array the root of its cluster, and for each dim of the array the dim of the root."""
    sizes: Mapping[int, tuple[int, ...]]
    """For each root the size of each of its dims that splits have to divide, for all arrays of the cluster."""


def find_clusters(program: TracedProgram, partial_ops: Iterable[int], wide: bool) -> Clusters:
    partial = dict.fromkeys(partial_ops)
    joined = _JoinedArrays(program, partial)
    partial_results = dict.fromkeys(result for index in partial for result in program.operations[index].results)
    for op_index, operation in enumerate(program.operations):
        if operation.role != "compute" or operation.is_nest:
            continue
        result = operation.results[0]
        if op_index in partial or not program.arrays[result].shape:
            continue
        operands = [
            (operand_index, operand)
            for operand_index, operand in enumerate(operation.operands)
            if operand is not None and program.arrays[operand].shape
        ]
        for operand_index, operand in operands:
            if operand not in joined.roots or operand in partial_results:
                continue
            if not wide and (
                # Different layouts for two operands, or for two uses of one array, may be better than one layout.
                len(operands) > 1
                or len(program.users[operand]) != 1
                # What enters a loop or comes out of it may change its layout there.
                or program.operations[program.producers[operand]].role != "compute"
                # An array is cheaper to move before it grows. A sum is moved after it is complete, whatever its size.
                or (program.arrays[result].nbytes > program.arrays[operand].nbytes and operand not in joined.settled)
            ):
                continue
            operand_dims = _same_dims(program, operation, operand_index)
            if operand_dims is not None and joined.roots[operand][0] != joined.roots[result][0]:
                joined.join(operand, result, operand_dims)
    return Clusters(joined.roots, {root: joined.sizes[root] for root in joined.members})


def _same_dims(program: TracedProgram, operation: Operation, operand_index: int) -> dict[int, int] | None:
    """For each dim of the result the dim of an operand that is the same; `None` where the two differ in any dim.

    Dims of size 1 do not count: nothing splits them.
    """
    operand = operation.operands[operand_index]
    assert operand is not None, "constants of the program have no layout"
    shape, result_shape = program.arrays[operand].shape, program.arrays[operation.results[0]].shape
    factors = operation.factors
    factor_dims = {
        factor: dim
        for dim, factor in enumerate(factors.operands[operand_index])
        if factor is not None and shape[dim] > 1
    }
    operand_dims: dict[int, int] = {}
    for dim, factor in enumerate(factors.results[0]):
        size = result_shape[dim]
        if size == 1:
            continue
        # A factor smaller than its dims, as of a reshape that regroups, is only a part of what they could be split by.
        if factor is None or factor not in factor_dims or factors.sizes[factor] != size:
            return None
        if shape[factor_dims[factor]] != size:
            return None
        operand_dims[dim] = factor_dims[factor]
    return operand_dims if len(operand_dims) == sum(size > 1 for size in shape) else None


@final
class _JoinedArrays:
    """The clusters so far: at first every result is one by itself."""

    def __init__(self, program: TracedProgram, partial: Mapping[int, None]) -> None:
        self.roots: dict[int, tuple[int, tuple[int | None, ...]]] = {}
        self.sizes: dict[int, tuple[int, ...]] = {}
        self.members: dict[int, list[int]] = {}
        self.settled: dict[int, None] = {}
        """Results that get a layout of their own after the operation, which therefore need not be able to give it."""
        for op_index, operation in enumerate(program.operations):
            if operation.is_nest or op_index in partial:
                self.settled.update(dict.fromkeys(operation.results))
            # Their layouts are those that the caller, the user or the loop requires.
            if operation.role in ("return", "fixed", "exit"):
                continue
            for result_index, result in enumerate(operation.results):
                shape = program.arrays[result].shape
                if not shape:
                    continue
                self.roots[result] = (result, tuple(range(len(shape))))
                self.members[result] = [result]
                self.sizes[result] = tuple(
                    size if result in self.settled else 1 if factor is None else operation.factors.sizes[factor]
                    for factor, size in zip(operation.factors.results[result_index], shape, strict=True)
                )

    def join(self, operand: int, result: int, operand_dims: Mapping[int, int]) -> None:
        """Joins the clusters of an operand and a result, given the operand's dim for each dim of the result."""
        root, root_dims = self.roots[operand]
        other_root, other_dims = self.roots[result]
        # For each dim of the other root, which is no longer one, the dim of the root that it becomes: the same dim of
        # the result and of the operand connects the two.
        dims_of_other: dict[int, int | None] = {}
        for result_dim, operand_dim in operand_dims.items():
            other_dim = other_dims[result_dim]
            if other_dim is not None:
                dims_of_other[other_dim] = root_dims[operand_dim]
        # A split has to divide the dims of all arrays in the cluster.
        sizes = list(self.sizes[root])
        for dim, size in enumerate(self.sizes[other_root]):
            root_dim = dims_of_other.get(dim)
            if root_dim is not None:
                sizes[root_dim] = math.gcd(sizes[root_dim], size)
        self.sizes[root] = tuple(sizes)
        for array_index in self.members.pop(other_root):
            dims = self.roots[array_index][1]
            self.roots[array_index] = (root, tuple(None if dim is None else dims_of_other.get(dim) for dim in dims))
            self.members[root].append(array_index)
