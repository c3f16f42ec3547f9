"""Random trees, tables of names and meshes, with what NumPy makes of them."""

from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moves.cases import random_values

DTYPES = ("float32", "bfloat16", "int8", "float16")

DEVICE_SETS = {
    "4 + 4": (range(4), range(4, 8)),
    "2 + 6": (range(2), range(2, 8)),
    "6 + 2": (range(6), range(6, 8)),
    "overlapping": (range(6), range(4, 8)),
    "equal": (range(8), range(7, -1, -1)),
}
"""The devices of the source and of the target."""

_SIZES = (1, 2, 3, 4, 6, 8, 12)


@final
@attrs.frozen(eq=False)
class Case:
    """A source tree on devices, the shapes of a target, a table, and the values that the target should have."""

    source: dict[str, jax.Array]
    target: dict[str, jax.ShapeDtypeStruct]
    lines: list[tuple[Any, Any, str]]
    unused: list[str]
    expected: dict[str, np.ndarray]
    limit: int


def random_case(seed: int, devices: str) -> Case:
    """Returns the case of a seed on a pair of sets of devices."""
    rng = np.random.default_rng(seed)
    old_mesh, new_mesh = (random_mesh(rng, indices) for indices in DEVICE_SETS[devices])
    values: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    lines: list[tuple[Any, Any, str]] = []
    for number in range(int(rng.integers(1, 4))):
        line, old, new = _random_line(rng, f"p{number}")
        lines.append(line)
        values.update(old)
        expected.update(new)
    unused: list[str] = []
    if rng.integers(3) == 0:
        values["left/over"] = random_values((4,), "float32", seed)
        unused = ["left/{name}"]
    source = {
        path: jax.device_put(array, random_sharding(rng, old_mesh, array.shape)) for path, array in values.items()
    }
    target = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=random_sharding(rng, new_mesh, array.shape))
        for path, array in expected.items()
    }
    return Case(source, target, lines, unused, expected, int(rng.choice([80, 200, 1000, 2**20])))


def random_mesh(rng: np.random.Generator, indices: Sequence[int]) -> Mesh:
    """Returns a mesh of one to three axes on some devices."""
    devices = np.array([jax.devices()[index] for index in indices])
    sizes: list[int] = []
    left = len(devices)
    for _ in range(2):
        sizes.append(int(rng.choice([size for size in range(1, left + 1) if left % size == 0])))
        left //= sizes[-1]
    return Mesh(devices.reshape(*sizes, left), ("a", "b", "c"))


def random_sharding(rng: np.random.Generator, mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Returns a sharding that fits a shape."""
    entries: list[list[str]] = [[] for _ in shape]
    for name in rng.permutation(list(mesh.axis_names)).tolist():
        fitting = [
            dim
            for dim, size in enumerate(shape)
            if size % (mesh.shape[name] * int(np.prod([mesh.shape[other] for other in entries[dim]]))) == 0
        ]
        if fitting and rng.integers(4):
            entries[int(rng.choice(fitting))].append(name)
    return NamedSharding(mesh, P(*[tuple(entry) or None for entry in entries]))


_Line = tuple[tuple[Any, Any, str], dict[str, np.ndarray], dict[str, np.ndarray]]


def _random_line(rng: np.random.Generator, name: str) -> _Line:
    """A line, the arrays of its source, and those of its target."""
    dtype = str(rng.choice(DTYPES))
    shape = tuple(rng.choice(_SIZES, int(rng.integers(1, 4))).tolist())
    while np.prod(shape) > 600:
        shape = shape[1:]
    begin = str(rng.choice(["one", "list", "stack", "capture"]))
    paths = {"one": [name], "list": [f"{name}/x", f"{name}/y"]}.get(begin, [f"{name}/{{i}}"])
    count = int(rng.integers(1, 4))
    # By list and by capture.
    arrays = [[_values(rng, shape, dtype) for _ in range(count if begin in ("stack", "capture") else 1)] for _ in paths]
    source = {
        path.replace("{i}", str(index)): array
        for path, group in zip(paths, arrays, strict=True)
        for index, array in enumerate(group)
    }
    texts: list[str] = []
    arrays = _change(rng, arrays, texts)
    if begin == "list":
        dim = int(rng.integers(arrays[0][0].ndim))
        arrays = [[np.concatenate([group[0] for group in arrays], axis=dim)]]
        texts.append(f"concat({dim})")
    if begin == "stack":
        dim = int(rng.integers(arrays[0][0].ndim + 1))
        arrays = [[np.stack(arrays[0], axis=dim)]]
        texts.append(f"stack('i', {dim})")
    arrays = _change(rng, arrays, texts)
    targets = ["{i}" if begin == "capture" else ""]
    end = str(rng.choice(["one", "split", "unstack"]))
    dim = int(rng.integers(arrays[0][0].ndim)) if arrays[0][0].ndim else -1
    size = arrays[0][0].shape[dim] if dim >= 0 else 0
    if end == "split" and size > 1:
        cut = int(rng.integers(1, size))
        arrays = [[np.split(array, [cut], axis=dim)[part] for array in arrays[0]] for part in range(2)]
        texts.append(f"split({dim}, [{cut}, {size - cut}])")
        targets = [f"{targets[0]}left", f"{targets[0]}right"]
    if end == "unstack" and 0 < size < 5 and begin != "capture":
        arrays = [[np.take(arrays[0][0], index, axis=dim) for index in range(size)]]
        texts.append(f"unstack('i', {dim})")
        targets = ["{i}"]
    arrays = _change(rng, arrays, texts)
    new = [f"new/{name}.{target}" for target in targets]
    expected = {
        path.replace("{i}", str(index)): array
        for path, group in zip(new, arrays, strict=True)
        for index, array in enumerate(group)
    }
    line = paths if len(paths) > 1 else paths[0], new if len(new) > 1 else new[0], " | ".join(texts)
    return line, source, expected


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-128, 128, shape, np.int8)
    return rng.standard_normal(shape).astype(jax.numpy.dtype(dtype))


def _change(rng: np.random.Generator, arrays: list[list[np.ndarray]], texts: list[str]) -> list[list[np.ndarray]]:
    """Up to three operations that change each array alike, if all have one shape; their texts are added."""
    for _ in range(int(rng.integers(4))):
        shapes = dict.fromkeys(array.shape for group in arrays for array in group)
        if len(shapes) > 1:
            break
        text, change = _random_operation(rng, arrays[0][0])
        arrays = [[change(array) for array in group] for group in arrays]
        texts.append(text)
    return arrays


def _divisor(rng: np.random.Generator, number: int) -> int:
    return int(rng.choice([each for each in range(1, number + 1) if number % each == 0]))


def _random_operation(rng: np.random.Generator, array: np.ndarray) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    shape, rank = array.shape, array.ndim
    dim = int(rng.integers(rank)) if rank else 0
    kinds = ["reshape", "cast", "scale"] + ["transpose", "interleave", "pad", "crop"] * bool(rank)
    kind = str(rng.choice(kinds))
    if kind == "transpose":
        order = rng.permutation(rank).tolist()
        return f"transpose({', '.join(map(str, order))})", lambda x: x.transpose(order)
    if kind == "reshape":
        first = _divisor(rng, array.size)
        new = (first, _divisor(rng, array.size // first), -1)
        return f"reshape{new}", lambda x: x.reshape(new)
    if kind == "interleave":
        count, is_inverse = _divisor(rng, shape[dim]), bool(rng.integers(2))
        parts = (shape[dim] // count, count) if is_inverse else (count, shape[dim] // count)
        text = f"{'de' if is_inverse else ''}interleave({dim}, {count})"
        return text, lambda x: x.reshape(*shape[:dim], *parts, *shape[dim + 1 :]).swapaxes(dim, dim + 1).reshape(shape)
    if kind == "pad":
        before, after = rng.integers(0, 4, 2).tolist()
        widths = [(before, after) if each == dim else (0, 0) for each in range(rank)]
        return f"pad({dim}, {before}, {after}, 3)", lambda x: np.pad(x, widths, constant_values=3)
    if kind == "crop":
        start = int(rng.integers(shape[dim]))
        stop = int(rng.integers(start, shape[dim])) + 1
        return f"crop({dim}, {start}, {stop})", lambda x: x.take(range(start, stop), axis=dim)
    if kind == "scale" and array.dtype != np.int8:
        return "scale(0.3)", lambda x: (x * np.asarray(0.3, x.dtype)).astype(x.dtype)
    if kind == "cast":
        name = str(rng.choice([*DTYPES[:2], DTYPES[3]]))
        return f"cast({name!r})", lambda x: x.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return "reshape(-1)", lambda x: x.reshape(-1)
