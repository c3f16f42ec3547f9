"""The dim of each array of a batch that has the examples."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.tree_util as jtu
import numpy as np

from shardrules.core.errors import ConfigError, ConfigTypeError, printable, shortened
from shardrules.core.tree import array_kind, leaf_paths

ExampleDims: TypeAlias = tuple[int | None, ...]
"""The dim of the examples in each leaf of a batch; `None` for what is the same for all examples."""

_OLD_KEYS = ((2,), (4,))
"""The shapes of keys of random numbers that `jax.random.PRNGKey` makes, as arrays of uint32."""


def named_dims(batch: Any, example_dims: Any) -> ExampleDims:
    """Reads dims of examples as users name them: as `in_axes` of `jax.vmap`."""
    dims: list[int | None] = []

    def add(dim: Any, part: Any) -> None:
        if dim is not None and type(dim) is not int:
            raise ConfigTypeError(f"example_dims must have integers and None, got {printable(repr(dim))}")
        dims.extend(None if array_kind(leaf) is None else dim for leaf in jtu.tree_leaves(part))

    try:
        jtu.tree_map(add, example_dims, batch, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ConfigError(
            f"example_dims must be an integer or a prefix of the batch, got {printable(repr(example_dims)):.200}; the "
            f"batch is {printable(str(jtu.tree_structure(batch))):.200}"
        ) from error
    leaves, paths = jtu.tree_leaves(batch), leaf_paths(batch)
    problems: list[str] = []
    counts: dict[str, int] = {}
    for index, (leaf, path, dim) in enumerate(zip(leaves, paths, dims, strict=True)):
        if dim is None:
            continue
        shape = leaf.shape
        if not -len(shape) <= dim < len(shape):
            problems.append(f"{_text(path, leaf)} has no dim {dim}")
            continue
        dims[index], counts[f"{_text(path, leaf)}, dim {dim}"] = dim % len(shape), shape[dim]
    if len(dict.fromkeys(counts.values())) > 1:
        problems += [f"{text}: {count} examples" for text, count in counts.items()]
    if problems:
        raise ConfigError(
            "example_dims does not fit the batch:\n  " + "\n  ".join(shortened(problems)) + f"\n{_REMEDY}"
        )
    if not counts:
        raise ConfigError("example_dims names no dim of examples")
    return tuple(dims)


def guessed_dims(batch: Any, trace: Callable[[ExampleDims, int], Any]) -> ExampleDims:
    """Guesses the dims of examples: the first dims of the arrays that share its size.

    Keys and arrays without dims do not count. Of several sizes, such as those of tokens and of a table of positions,
    the examples have the one that can grow while the others stay: `trace` traces the loss so. Where that does not
    decide, arrays whose first dim is 1 are the same for all examples.
    """
    leaves = jtu.tree_leaves(batch)
    kinds = [array_kind(leaf) for leaf in leaves]
    firsts = [None if kind is None or not kind[0] or _is_old_key(kind) else kind[0][0] for kind in kinds]
    sizes = list(dict.fromkeys(size for size in firsts if size is not None))
    if not sizes:
        raise ConfigError(
            f"the batch has no array with a dim of examples, got {printable(repr(batch)):.200}. Pass arrays or shapes, "
            "such as jax.ShapeDtypeStruct((512, 1024), jnp.int32), with the examples along a dim"
        )

    def dims_of(size: int) -> ExampleDims:
        return tuple(0 if first == size else None for first in firsts)

    if len(sizes) == 1:
        return dims_of(sizes[0])
    every_size = {size for kind in kinds if kind is not None for size in kind[0]}
    trace(dims_of(sizes[0]), sizes[0])  # errors of the loss itself are not about sizes
    growing = [size for size in sizes if _can_grow(trace, dims_of(size), size, every_size)]
    choices = growing if len(growing) == 1 else [size for size in growing or sizes if size != 1]
    if len(choices) == 1:
        return dims_of(choices[0])
    paths, treedef = leaf_paths(batch), jtu.tree_structure(batch)
    lines = []
    for size in sizes:
        arrays = ", ".join(_text(paths[index], leaves[index]) for index, first in enumerate(firsts) if first == size)
        dims = printable(repr(treedef.unflatten(dims_of(size))))
        lines.append(f"{size} examples: {arrays}; pass example_dims={dims:.200}")
    raise ConfigError(
        "the first dims of the batch's arrays differ, and the loss can be traced with other sizes of "
        + ("several" if growing else "none")
        + " of them. Which have the examples?\n  "
        + "\n  ".join(shortened(lines))
        + f"\n{_REMEDY}"
    )


def example_count(leaves: Sequence[Any], dims: ExampleDims) -> int:
    return next(leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None)


_REMEDY = "Name the dim of the examples of each array, and None for arrays that are the same for all examples"


def _can_grow(trace: Callable[[ExampleDims, int], Any], dims: ExampleDims, size: int, taken_sizes: set[int]) -> bool:
    # Another number of examples than any other size, or arrays would fit together by chance.
    larger = (factor * max(size, 1) for factor in range(2, 3 + len(taken_sizes)))
    try:
        trace(dims, next(count for count in larger if count not in taken_sizes))
    except Exception:  # noqa: BLE001  what the loss raises for arrays that do not fit together
        return False
    return True


def _is_old_key(kind: tuple[tuple[int, ...], Any]) -> bool:
    shape, dtype = kind
    return shape in _OLD_KEYS and dtype == np.uint32


def _text(path: str, leaf: Any) -> str:
    shape, dtype = leaf.shape, leaf.dtype
    return f"{path or 'the batch'} {dtype}{list(shape)}"
