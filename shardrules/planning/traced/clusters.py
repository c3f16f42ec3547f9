"""Arrays that are laid out alike, because each is computed from the other place by place and needed nowhere else."""

import math
from collections.abc import Iterable, Mapping
from typing import final

import attrs

from shardrules.planning.traced.program import Operation, TracedProgram


@final
@attrs.frozen(eq=False)
class Clusters:
    """Arrays that are laid out alike.

    **Arguments:**

    - `roots`: for each array the one that stands for all of them, and for each of its own dims that one's dim.
    - `sizes`: for each that stands for others, what splits of its dims have to divide.
    """

    roots: dict[int, tuple[int, tuple[int | None, ...]]]
    sizes: dict[int, tuple[int, ...]]


def clusters(program: TracedProgram, partial: Iterable[int], wide: bool) -> Clusters:
    """Finds arrays that are laid out alike.

    **Arguments:**

    - `program`: the program.
    - `partial`: operations that add parts of sums.
    - `wide`: whether operations that take several arrays are laid out as all of them that only they need; otherwise
        only those that take one, which costs nothing.

    **Returns:**

    The `Clusters`.
    """
    arrays = program.arrays
    roots: dict[int, tuple[int, tuple[int | None, ...]]] = {}
    sizes: dict[int, tuple[int, ...]] = {}
    members: dict[int, list[int]] = {}
    skipped = dict.fromkeys(partial)
    summed: dict[int, None] = dict.fromkeys(
        result
        for at, operation in enumerate(program.operations)
        for result in operation.results
        if operation.factors.reduced or at in skipped or len(operation.results) > 1
    )
    for operation in program.operations:
        for place, result in enumerate(operation.results):
            shape = arrays[result].shape
            if not shape or operation.role in ("return", "fixed", "exit"):
                continue
            roots[result] = (result, tuple(range(len(shape))))
            members[result] = [result]
            dims = operation.factors.results[place]
            free = result in summed
            sizes[result] = tuple(
                size if free else 1 if factor is None else operation.factors.sizes[factor]
                for factor, size in zip(dims, shape, strict=True)
            )
    partial_results = dict.fromkeys(result for at in skipped for result in program.operations[at].results)
    for at, operation in enumerate(program.operations):
        if operation.role != "compute" or len(operation.results) != 1 or operation.factors.reduced or at in skipped:
            continue
        result = operation.results[0]
        if not arrays[result].shape:
            continue
        taken = [(place, one) for place, one in enumerate(operation.operands) if one is not None and arrays[one].shape]
        for place, operand in taken:
            if (
                operand not in roots
                or operand in partial_results
                or (
                    not wide
                    and (
                        len(program.users[operand]) != 1
                        or program.operations[program.producers[operand]].role != "compute"
                    )
                )
            ):
                continue
            grows = arrays[result].nbytes > arrays[operand].nbytes and operand not in summed
            if not wide and (len(taken) > 1 or grows):
                continue
            pairs = _pairs(operation, place, arrays[operand].shape, arrays[result].shape)
            if pairs is not None and roots[operand][0] != roots[result][0]:
                _join(roots, sizes, members, operand, result, pairs)
    return Clusters(roots, {root: sizes[root] for root in members})


def _pairs(operation: Operation, place: int, taken: tuple[int, ...], given: tuple[int, ...]) -> dict[int, int] | None:
    """For each dim of the result that dim of an operand which is the same, if all of them are."""
    factors = operation.factors
    of = {factor: dim for dim, factor in enumerate(factors.operands[place]) if factor is not None and taken[dim] > 1}
    found: dict[int, int] = {}
    for dim, factor in enumerate(factors.results[0]):
        if given[dim] == 1:
            continue
        if factor is None or factor not in of or factors.sizes[factor] != given[dim] or taken[of[factor]] != given[dim]:
            return None
        found[dim] = of[factor]
    return found if len(found) == sum(size > 1 for size in taken) else None


def _join(
    roots: dict[int, tuple[int, tuple[int | None, ...]]],
    sizes: dict[int, tuple[int, ...]],
    members: dict[int, list[int]],
    operand: int,
    result: int,
    pairs: Mapping[int, int],
) -> None:
    """Makes one cluster of those of an operand and a result. What was made first stands for it."""
    first, own = roots[operand]
    second, other = roots[result]
    # For each dim of the second root that of the first.
    across: dict[int, int | None] = {}
    for dim, same in pairs.items():
        at = other[dim]
        if at is not None:
            across[at] = own[same]
    cut = list(sizes[first])
    for dim, size in enumerate(sizes[second]):
        at = across.get(dim)
        if at is not None:
            cut[at] = math.gcd(cut[at], size)
    sizes[first] = tuple(cut)
    for array in members.pop(second):
        roots[array] = (first, tuple(None if dim is None else across.get(dim) for dim in roots[array][1]))
        members[first].append(array)
