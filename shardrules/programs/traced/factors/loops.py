"""The language of the rules of primitives: an operation as a nest of loops, each with a name."""

import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs

Shape: TypeAlias = tuple[int, ...]

LoopNames: TypeAlias = Sequence[Hashable]
"""For each dim of an array the name of its loop, or `None` where the dim has to be whole."""

ANY, SOME, ONE, TWO, THREE = range(sys.maxsize), range(1, sys.maxsize), range(1, 2), range(2, 3), range(3, 4)
"""The numbers of operands or results that a rule is written for."""


@final
@attrs.frozen
class OpSignature:
    """An equation without its variables: the primitive, the shapes and the parameters."""

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    dtypes: tuple[str, ...]  # of the operands, as JAX prints them
    params: Mapping[str, Any]
    unused: tuple[bool, ...] = ()
    """The results that nothing reads."""


@final
@attrs.frozen
class Loops:
    """The loops of an operation. Dims of one loop have one name, whatever it is."""

    operands: Sequence[LoopNames]
    results: Sequence[LoopNames]
    reduced: LoopNames = ()
    """Loops over which the results are sums, or the like, of the results of the pieces."""
    sizes: Mapping[Hashable, int] = attrs.field(factory=dict, hash=False)
    """Sizes of loops that cannot be split into every divisor of their dims."""
    is_local: bool = False
    """XLA splits the operation only if each device is given its own (`shard_map`): otherwise it gathers."""
    shared: Sequence[LoopNames] = ()
    """For each result the loops in `reduced` that it is not computed from: every piece has the same."""
    exchange: Hashable = None
    """The loop over whose pieces the function of a region communicates, if it does."""
    joint: LoopNames = ()
    """Loops whose dims are split by `exchange`, too."""
    positional: LoopNames = ()
    """Loops along which the operation does another thing at each position: only together with the whole do pieces give
    what the whole gives there, as devices do of one array, and microbatches do not."""


@final
@attrs.frozen
class LoopRule:
    """Finds the loops of a primitive; `find_loops` returns `None` for forms of it that are not covered."""

    find_loops: Callable[[OpSignature], Loops | None]
    operands: range = SOME
    results: range = SOME
    params: tuple[str, ...] = ()

    def covers(self, op: OpSignature) -> bool:
        """An operation has the arrays and the parameters of the rule: other JAX versions may have others."""
        counts_fit = len(op.operands) in self.operands and len(op.results) in self.results
        return counts_fit and all(name in op.params for name in self.params)


def loop_sizes(loops: Loops, op: OpSignature) -> dict[Hashable, int]:
    """The size of each loop, which all pieces have to divide, in the order in which the loops appear."""
    sizes: dict[Hashable, int] = {}
    sides = ((loops.operands, op.operands), (loops.results, op.results))
    for names, shape in (pair for side in sides for pair in zip(*side, strict=True)):
        for name, size in zip(names, shape, strict=True):
            if name is not None:
                # gcd(0, size) is size: a loop starts with the rule's size, or with the size of its first dim.
                sizes[name] = math.gcd(sizes.get(name, loops.sizes.get(name, 0)), size)
    return sizes


def whole(shape: Shape) -> tuple[None, ...]:
    return (None,) * len(shape)


def same_dims(op: OpSignature, untouched: Sequence[bool]) -> Loops:
    """The loops of an operation whose arrays all have the same dims, or are scalars.

    Only dims that are `untouched` may be split: the operation does the same at each position along them.
    """
    names = [dim if free else None for dim, free in enumerate(untouched)]
    return Loops([names if shape else () for shape in op.operands], [names for _ in op.results])


def leading_dims(op: OpSignature, count: int) -> Loops:
    """The loops of an operation that does the same at each position along the first `count` dims of all arrays."""
    names = tuple(range(count))
    operands = [names + whole(shape[count:]) if shape else () for shape in op.operands]
    return Loops(operands, [names + whole(shape[count:]) for shape in op.results])
