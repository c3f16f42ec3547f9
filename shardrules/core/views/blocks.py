"""The blocks of an array, and the devices that hold them: of any number of dimensions, over any mesh."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, final

import attrs
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.core.check import check_spec
from shardrules.core.errors import NoMeshError, printable
from shardrules.core.finding import plan_error
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.spec import UNCONSTRAINED, entries

Split: TypeAlias = tuple[int, tuple[str, ...]]
"""A dimension: its size, and the mesh axes that split it, the most major first."""


@final
@attrs.frozen
class Block:
    """A block of an array: its index along each dimension, its bounds, and the devices that hold it."""

    index: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


@final
@attrs.frozen
class Blocks:
    """The blocks of an array, and the devices that hold them. `shardrules.picture` draws it.

    ```python
    from shardrules.core.views.blocks import Blocks

    blocks = Blocks(((8, ("data",)), (6, ())), {"data": 2, "model": 2})
    assert blocks.counts == (2, 1)
    assert blocks.block((1, 0)).devices == (2, 3)
    assert blocks.block((1, 0)).bounds == ((4, 8), (0, 6))
    ```
    """

    dims: tuple[Split, ...]
    mesh: tuple[tuple[str, int], ...] = attrs.field(converter=lambda sizes: tuple(dict(sizes).items()))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh."""
        return dict(self.mesh)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks along each dimension."""
        sizes = self.sizes
        return tuple(math.prod(sizes[axis] for axis in axes) for _, axes in self.dims)

    def all(self) -> Iterator[Block]:
        """Yields every block."""
        yield from map(self.block, itertools.product(*map(range, self.counts)))

    def block(self, index: Sequence[int]) -> Block:
        """Returns the block at `index`, its position along each dimension."""
        axis_indices: dict[str, int] = {}
        sizes = self.sizes
        bounds = []
        for (size, axes), count, position in zip(self.dims, self.counts, index, strict=True):
            step = -(-size // count) if count else size  # the last blocks may be smaller, or empty
            bounds.append((min(size, position * step), min(size, (position + 1) * step)))
            for axis in reversed(axes):  # the last axis of an entry changes fastest
                position, axis_indices[axis] = divmod(position, sizes[axis])
        # Along axes that split nothing every device has a copy.
        choices = [(axis_indices[axis],) if axis in axis_indices else range(size) for axis, size in self.mesh]
        shape = tuple(size for _, size in self.mesh)
        devices = np.ravel_multi_index(np.ix_(*choices), shape).ravel().tolist() if shape else [0]
        return Block(tuple(index), tuple(bounds), tuple(devices))

    def sentences(self) -> Iterator[str]:
        """Yields how each dimension is split, in words."""
        for dim, ((size, axes), count) in enumerate(zip(self.dims, self.counts, strict=True)):
            if count == 1:
                yield f"dim {dim}: {size:,}, whole"
            else:
                step = -(-size // count)
                yield f"dim {dim}: {size:,} in {count:,} blocks of {step:,} over {', '.join(axes)}"
        # Devices beyond the number of blocks hold copies.
        copies = math.prod(size for _, size in self.mesh) // max(1, math.prod(self.counts))
        yield f"each block is on {copies:,} device{'s' * (copies > 1)}"


def split_dims(leaf: Leaf, decision: Decision) -> tuple[Split, ...]:
    """Returns the dimensions of a leaf, each with the axes that split it; one left to the compiler counts as whole."""
    # A spec that is too long is a finding of the plan, and no reason not to draw it.
    spec_entries = entries(decision.spec or PartitionSpec(), leaf.ndim)[: leaf.ndim]
    split_axes = [() if axes is UNCONSTRAINED else axes for axes in spec_entries]
    return tuple((size, tuple(axes)) for size, axes in zip(leaf.shape, split_axes, strict=True))


def blocks_of(path: str, leaf: Leaf, decision: Decision, sizes: Mapping[str, int]) -> Blocks:
    """Returns which device holds which block of the leaf at `path`, on a mesh with these `sizes`."""
    if not sizes:
        raise NoMeshError("blocks need a mesh: plan with one")
    spec = decision.spec or PartitionSpec()
    errors = [finding for finding in check_spec(path, leaf.shape, spec, sizes) if finding.severity == "error"]
    if errors:
        raise plan_error(f"{printable(path)} cannot be split this way", errors)
    return Blocks(split_dims(leaf, decision), sizes)


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers with runs as ranges: `0-3,6` for 0, 1, 2, 3, 6.

    ```python
    from shardrules.core.views.blocks import ranges

    assert ranges([0, 1, 2, 3, 6]) == "0-3,6"
    ```
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
