"""What the arguments of a function are for: parameters, optimizer state, or the batch.

An optimizer keeps copies of the parameters: leaves of the same shape under a path that ends in the parameter's own.
What is copied elsewhere among the arguments is a parameter, the copies and what lies beside them are its optimizer's
state, and everything else is what the step works on.
"""

from collections import Counter
from typing import Any, Literal, TypeAlias, get_args

import jax.tree_util as jtu
import numpy as np

from shardrules.analysis.compiling.arguments import Argument, Arguments
from shardrules.core.errors import TreeError
from shardrules.core.tree import array_kind, leaf_paths, spread

Role: TypeAlias = Literal["parameters", "optimizer state", "batch"]
"""What an argument is for. The batch is all that is neither parameter nor state: data, keys, masks, schedules."""

PARAMETERS, STATE, BATCH = get_args(Role)
"""The three roles, by name."""

_Path: TypeAlias = tuple[str, ...]
_FEWEST = 3
"""So many leaves must be copied before siblings count as parameters and their moments, and not as equal layers."""


def read_roles(found: Arguments, roles: Any = None) -> tuple[Role, ...]:
    """Returns the role of each array.

    **Arguments:**

    - `found`: the arguments.
    - `roles`: the roles as the caller knows them: a tuple with one item for each argument, each a role or a tree of
        roles that is a prefix of the argument. `None`, for all or for some, finds them.

    **Returns:**

    One role for each array.

    **Raises:**

    `TreeError` for a role that is none, or a tree of them that does not fit.

    ```python
    from shardrules.analysis.compiling.arguments import read_arguments

    params = {"w": np.ones((8, 4))}
    found = read_arguments(lambda params, moments, x: 0, (params, {"m": params}, np.ones(8)), sr.mesh_shape("data:8"))
    assert read_roles(found) == ("parameters", "optimizer state", "batch")
    ```
    """
    likely = _found(found)
    return likely if roles is None else _said(found, roles, likely)


def _said(found: Arguments, roles: Any, likely: tuple[Role, ...]) -> tuple[Role, ...]:
    tree = jtu.tree_unflatten(found.treedef, found.leaves)
    said = spread(roles, tree, lambda node: node is None or isinstance(node, str), "roles")
    other = [one for one in said if one is not None and one not in get_args(Role)]
    if other:
        raise TreeError(f"a role is {', '.join(map(repr, get_args(Role)))}; got {other[0]!r}")
    told = [one for one, leaf in zip(said, found.leaves, strict=True) if array_kind(leaf) is not None]
    return tuple(one or guess for one, guess in zip(told, likely, strict=True))


def _found(found: Arguments) -> tuple[Role, ...]:
    rest = _without_optimizer(found)
    home = _homes(found)
    if home is not None:
        paths = zip(_paths(found), found.arrays, rest, strict=True)
        return tuple(_beside(path, one.shape, *home) or other for path, one, other in paths)
    state = {owner: None for one, owner in zip(found.arrays, found.owners, strict=True) if one.mirrors and one.shape}
    if state:
        return tuple(
            STATE if owner in state else PARAMETERS if one.planned and not one.mirrors else BATCH
            for one, owner in zip(found.arrays, found.owners, strict=True)
        )
    return rest


def _homes(found: Arguments) -> tuple[_Path, list[_Path]] | None:
    """Where the parameters are, an argument or an item of one, and where copies of them are."""
    paths = [(path, one.shape) for path, one in zip(_paths(found), found.arrays, strict=True) if one.shape]
    ends: dict[_Path, list[tuple[_Path, tuple[int, ...]]]] = {}
    for path, shape in paths:
        for cut in range(1, len(path)):
            ends.setdefault(path[cut:], []).append((path[:cut], shape))
    for depth in (1, 2):
        for root in dict.fromkeys(path[:depth] for path, _ in paths if len(path) > depth):
            own = [(path[depth:], shape) for path, shape in paths if path[:depth] == root]
            counts = Counter(
                home
                for end, shape in own
                for home, other in ends[end]
                if _apart(home, root) and (other == shape or len(other) < len(shape) or other == (1,))  # or a factor
            )
            homes = [home for home, count in counts.items() if _is_copy(root, home, count, len(own))]
            if homes:
                return root, homes
    return None


def _paths(found: Arguments) -> list[_Path]:
    """The paths of all arrays, the first part being the number of the argument: `*args` give it a name of two parts."""
    args = jtu.tree_unflatten(found.treedef, found.leaves)
    inside = [path for arg in args for path in leaf_paths(arg)]
    kept = [path for path, leaf in zip(inside, found.leaves, strict=True) if array_kind(leaf) is not None]
    return [(str(owner), *(path.split("/") if path else ())) for owner, path in zip(found.owners, kept, strict=True)]


def _apart(one: _Path, other: _Path) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] != other[:shorter]


def _is_copy(root: _Path, home: _Path, count: int, size: int) -> bool:
    if len(root) == len(home) and len(root) > 1 and root[:-1] == home[:-1]:
        return count == size >= _FEWEST
    return 2 * count >= size


def _beside(path: _Path, shape: tuple[int, ...], root: _Path, homes: list[_Path]) -> Role | None:
    """The role of one array, once it is known where parameters and their copies are; `None` in other arguments."""
    if path[: len(root)] == root:
        return PARAMETERS
    within = [home for home in homes if home[0] == path[0]]
    if not within:
        return None
    if root[0] != path[0] or shape == ():
        return STATE  # a count, a step, a factor of a moment
    return STATE if any(path[:2] == home[:2] for home in within) else BATCH


def _without_optimizer(found: Arguments) -> tuple[Role, ...]:
    """Integers and keys are data, and so is the last argument whose arrays agree in their first dimension, with others
    that agree with it, but for the first argument of several. What a plan speaks of alone is the model."""
    parts: dict[int, list[Argument]] = {}
    for one, owner in zip(found.arrays, found.owners, strict=True):
        parts.setdefault(owner, []).append(one)
    planned = [owner for owner, part in parts.items() if any(one.planned for one in part)]
    if 0 < len(planned) < len(parts):
        data = [owner for owner in parts if owner not in planned]
    elif len(found.arrays) == 1 and not planned:
        data = list(parts)
    else:
        sizes = {owner: {one.shape[:1] for one in parts[owner]} for owner in list(parts)[1:]}
        alike = [owner for owner, first in sizes.items() if len(first) == 1 and () not in first]
        alike = [owner for owner in alike if any(_is_number(one.dtype) for one in parts[owner])]
        data = [owner for owner in alike if sizes[owner] == sizes[alike[-1]]]
    return tuple(
        BATCH if owner in data or not _is_float(one.dtype) else PARAMETERS
        for one, owner in zip(found.arrays, found.owners, strict=True)
    )


def _is_number(dtype: Any) -> bool:
    """Whether it is no PRNG key."""
    return isinstance(dtype, np.dtype) and dtype != np.uint32


def _is_float(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind not in "iub"
