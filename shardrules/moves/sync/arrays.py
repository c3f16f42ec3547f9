"""The arrays of one side of a sync: paths, shapes, and which device holds which part of each."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import IndivisibleError
from shardrules.core.finding import Finding
from shardrules.core.rule import ShardingPlan
from shardrules.core.spec import UNCONSTRAINED, entries, spec_repr
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.moves.schedule import boxes_of
from shardrules.placement.traced import host_memory
from shardrules.rules.how import spec_errors

_HOST_DEVICES = 8
"""The devices of a host where a mesh has none. Chosen by hand."""


@final
@attrs.frozen
class PlannedDevice:
    """A device of a mesh that is only a shape: each host has 8 of them."""

    id: int
    process_index: int
    platform: str = "none"

    def __str__(self) -> str:
        return f"planned device {self.id}"


@final
@attrs.frozen(eq=False)
class ShardLayout:
    """A grid of equal cells of an array, and the devices that hold each of them."""

    cell: tuple[int, ...]
    """The shape of a cell."""
    grid: tuple[int, ...]
    """The cells along each dim."""
    owners: np.ndarray
    """The indices of the devices of each cell, cells in row-major order: one row for each cell."""
    text: str
    """The sharding for tables and messages."""

    @property
    def strides(self) -> list[int]:
        """The cells between neighbours along each dim."""
        return [math.prod(self.grid[dim + 1 :]) for dim in range(len(self.grid))]


@final
@attrs.define(eq=False)
class Devices:
    """The devices of both sides by index. Devices of meshes without any are made up, apart for each side."""

    devices: list[Any] = attrs.field(factory=list)
    _indices: dict[Any, int] = attrs.field(factory=dict)
    _planned: dict[tuple[int, int], list[int]] = attrs.field(factory=dict)

    def index(self, device: Any) -> int:
        """Returns the index of a device of JAX."""
        index = self._indices.setdefault(device, len(self.devices))
        if index == len(self.devices):
            self.devices.append(device)
        return index

    @property
    def are_mixed(self) -> bool:
        """True where some exist and others are made up."""
        return 0 < sum(isinstance(device, PlannedDevice) for device in self.devices) < len(self.devices)

    def existing(self) -> "Devices":
        """Returns those that exist."""
        result = Devices()
        for device in self.devices:
            if not isinstance(device, PlannedDevice):
                result.index(device)
        return result

    def of_mesh(self, mesh: AnyMesh, side: int) -> np.ndarray:
        """Returns the indices of the devices of a mesh, in its shape."""
        if isinstance(mesh, Mesh):
            return np.vectorize(self.index, otypes=[np.int64])(mesh.devices)
        count = math.prod(mesh.shape.values())
        planned = self._planned.setdefault((side, count), [])
        if not planned:
            first = 1 + max((device.id for device in self.devices), default=-1)
            host = 1 + max((device.process_index for device in self.devices), default=-1)
            for number in range(count):
                planned.append(self.index(PlannedDevice(first + number, host + number // _HOST_DEVICES)))
        return np.array(planned, np.int64).reshape(tuple(mesh.shape.values()))


@final
@attrs.frozen(eq=False)
class Arrays:
    """All arrays of a source or a target, in the order of the tree."""

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    layout_of: np.ndarray
    """The index of the layout of each array; where it has none, that of its problem, counted from -1 downwards."""
    layouts: tuple[ShardLayout, ...]
    shardings: tuple[Sharding | None, ...]
    """The sharding of each array, where its devices are known."""
    positions: tuple[int, ...]
    """The position of each array among the leaves of the tree."""
    leaves: tuple[Any, ...]
    """What else is in the tree, by position: numbers, callables."""
    treedef: Any
    """`None` for a plan that was read without its tree: then its trees are dictionaries by path."""
    problems: tuple[Finding, ...]
    """The reasons why arrays have no layout: errors only for those that are used."""
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def flatten(self, tree: Any) -> list[Any]:
        """Returns the leaves at the arrays' positions in a tree of this structure."""
        if self.treedef is None and isinstance(tree, Mapping):
            return [tree.get(path) for path in self.paths]
        leaves = jax.tree.leaves(tree) if self.treedef is None else self.treedef.flatten_up_to(tree)
        return [leaves[position] for position in self.positions]

    def unflatten(self, values: Sequence[Any]) -> Any:
        """Returns a tree with these arrays."""
        if self.treedef is None:
            return dict(zip(self.paths, values, strict=True))
        leaves = list(self.leaves)
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        return self.treedef.unflatten(leaves)


def read_arrays(tree: Any, side: int, devices: Devices) -> Arrays:
    """Returns the arrays of a plan or of a tree of arrays, shapes, or objects with a shape, dtype and sharding."""
    layouts = _Layouts(side, devices)
    if isinstance(tree, ShardingPlan):
        return _of_plan(tree, layouts)
    values, treedef = jax.tree.flatten(tree)
    kinds = [array_kind(value) for value in values]
    positions = [position for position, kind in enumerate(kinds) if kind is not None]
    names = leaf_paths(tree)
    paths = [names[position] for position in positions]
    shapes, dtypes = zip(*[kinds[position] or ((), None) for position in positions], strict=True) if paths else ((), ())
    shardings = [_sharding(values[position]) for position in positions]
    layout_of = [
        layouts.index(shape, sharding, dtype) for shape, sharding, dtype in zip(shapes, shardings, dtypes, strict=True)
    ]
    rest: list[Any] = [None if kind is not None else value for value, kind in zip(values, kinds, strict=True)]
    return Arrays(
        tuple(paths),
        shapes,
        dtypes,
        np.array(layout_of, np.int64),
        tuple(layouts.layouts),
        tuple(shardings),
        tuple(positions),
        tuple(rest),
        treedef,
        tuple(layouts.problems),
        tuple(_repeated(paths, side)),
    )


def _of_plan(plan: ShardingPlan, layouts: "_Layouts") -> Arrays:
    paths, kinds = plan.paths, plan.kind_indices
    specs, mesh = plan.kind_specs, plan.mesh
    shardings: list[Any] = [None if mesh is None else NamedSharding(mesh, spec) for spec in specs]
    by_kind = [
        layouts.index(leaf.shape, sharding, leaf.dtype) for leaf, sharding in zip(plan.kinds, shardings, strict=True)
    ]
    leaves: list[Any] = [None] * len(plan.survey.kind_of)
    for position, value in (*plan.survey.carried, *plan.survey.numbers):
        leaves[position] = value
    return Arrays(
        paths,
        tuple([plan.kinds[kind].shape for kind in kinds]),
        tuple([plan.kinds[kind].dtype for kind in kinds]),
        np.array([by_kind[kind] for kind in kinds], np.int64),
        tuple(layouts.layouts),
        tuple([shardings[kind] for kind in kinds]),
        tuple([position for position, kind in enumerate(plan.survey.kind_of) if kind >= 0]),
        tuple(leaves),
        plan.survey.treedef,
        tuple(layouts.problems),
        tuple(_repeated(paths, layouts.side)),
    )


def _repeated(paths: Sequence[str], side: int) -> Iterator[Finding]:
    if len(dict.fromkeys(paths)) == len(paths):
        return
    counts: dict[str, int] = {}
    for path in paths:
        counts[path] = counts.get(path, 0) + 1
    for path, count in counts.items():
        if count > 1:
            why = f"{count} arrays of the {side_name(side)} have this path"
            yield Finding("error", "ambiguous-path", why, path, "Rename keys that contain slashes")


def side_name(side: int) -> str:
    """Returns the word for a side."""
    return "target" if side else "source"


def _sharding(value: Any) -> Any:
    # An uncommitted array is wherever JAX has put it, which says nothing.
    if isinstance(value, jax.Array) and not value.committed:
        return None
    return getattr(value, "sharding", None)  # numpy arrays and most shapes have none


@final
@attrs.define(eq=False)
class _Layouts:
    """The layouts of one side, each once, and why arrays have none."""

    side: int
    devices: Devices
    layouts: list[ShardLayout] = attrs.field(factory=list)
    problems: list[Finding] = attrs.field(factory=list)
    _seen: dict[Any, int] = attrs.field(factory=dict)

    def index(self, shape: tuple[int, ...], sharding: Any, dtype: Any) -> int:
        """Returns the index of the layout of an array, or of what is wrong with it: -1 for the first problem."""
        key = shape, dtype, sharding if isinstance(sharding, Sharding) else id(sharding)
        if key not in self._seen:
            finding = self._problem(shape, sharding, dtype)
            if finding is None:
                try:
                    self.layouts.append(self._layout(shape, sharding))
                except (IndivisibleError, ValueError) as error:
                    finding = Finding("error", "misfit", str(error), shape=shape)
            if finding is not None:
                self.problems.append(finding)
            self._seen[key] = len(self.layouts) - 1 if finding is None else -len(self.problems)
        return self._seen[key]

    def _problem(self, shape: tuple[int, ...], sharding: Any, dtype: Any) -> Finding | None:
        side = side_name(self.side)

        def finding(code: str, why: str, remedy: str) -> Finding:
            return Finding("error", code, f"{why} ({side})", "", remedy, shape)

        if jnp.issubdtype(dtype, jax.dtypes.extended):
            return finding("key", f"{dtype} is not a number", "Move PRNG keys with reshard, and leave them out here")
        if not isinstance(sharding, Sharding):
            why = "it has no sharding" if sharding is None else f"its sharding is {sharding!r:.60}"
            return finding("no-sharding", why, "Pass a plan with a mesh, placed arrays, or shapes with shardings")
        memory = host_memory(sharding)
        if memory is not None:
            return finding("host-memory", f"it is in {memory} memory", "Move it to the devices first: reshard")
        if isinstance(sharding, NamedSharding):
            spec = sharding.spec
            if spec.unreduced or spec.reduced:
                return finding("unreduced", f"{spec} holds unreduced sums", "Reduce it inside jit first")
            if UNCONSTRAINED in spec.partitions:
                return finding("unconstrained", f"{spec} leaves a dim open", "Name the axes that split it, or None")
            for error in spec_errors(shape, spec, sharding.mesh):
                return attrs.evolve(error, message=f"{error.message} ({side})")
        return None

    def _layout(self, shape: tuple[int, ...], sharding: Sharding) -> ShardLayout:
        if not isinstance(sharding, NamedSharding):
            return self._of_boxes(shape, sharding)
        mesh = sharding.mesh
        names, sizes = list(mesh.shape), dict(mesh.shape)
        by_dim = entries(sharding.spec, len(shape))
        used = [name for entry in by_dim for name in entry]
        rest = [name for name in names if name not in used]
        grid = tuple(math.prod(sizes[name] for name in entry) for entry in by_dim)
        order = [names.index(name) for name in (*used, *rest)]
        ids = self.devices.of_mesh(mesh, self.side).transpose(order)
        owners = ids.reshape(math.prod(grid), -1)
        cell = tuple(size // count for size, count in zip(shape, grid, strict=True))
        return ShardLayout(cell, grid, owners, f"{spec_repr(sharding.spec)} on {mesh_text(mesh)}")

    def _of_boxes(self, shape: tuple[int, ...], sharding: Sharding) -> ShardLayout:
        boxes = boxes_of(sharding, shape)
        starts = [sorted({box[dim][0] for box in boxes.values()}) for dim in range(len(shape))]
        grid = tuple(map(len, starts))
        cells: dict[tuple[int, ...], list[int]] = {}
        for device, box in boxes.items():
            place = tuple(starts[dim].index(start) for dim, (start, _) in enumerate(box))
            cells.setdefault(place, []).append(self.devices.index(device))
        owners = np.array([cells[place] for place in np.ndindex(*grid)], np.int64)
        cell = tuple(size // count for size, count in zip(shape, grid, strict=True))
        return ShardLayout(cell, grid, owners, f"{len(boxes)} devices")
