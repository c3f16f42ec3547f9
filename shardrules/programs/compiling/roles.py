"""The roles of a function's arguments: parameters, optimizer state, or the batch.

An optimizer keeps copies of the parameters: leaves of the same shape under a path that ends in the parameter's own.
Arrays that are copied elsewhere among the arguments are parameters, the copies and the leaves beside them are the
optimizer's state, and everything else is the batch.
"""

from collections import Counter
from typing import Any, Literal, TypeAlias, get_args

import jax.tree_util as jtu
import numpy as np

from shardrules.core.errors import ConfigError
from shardrules.core.tree import array_kind, leaf_paths, spread
from shardrules.programs.compiling.arguments import Argument, Arguments

Role: TypeAlias = Literal["parameters", "optimizer state", "batch"]
"""The role of an argument. The batch is all that is neither parameter nor state: data, keys, masks, schedules."""

PARAMETERS, STATE, BATCH = get_args(Role)
"""The three roles, by name."""

_Path: TypeAlias = tuple[str, ...]


def read_roles(arguments: Arguments, roles: Any = None) -> tuple[Role, ...]:
    """Returns the role of each array. `roles` has what the caller knows; `None` in it, or for all of it, is guessed."""
    guesses = _guess_roles(arguments)
    return guesses if roles is None else _with_callers_roles(arguments, roles, guesses)


def _with_callers_roles(arguments: Arguments, roles: Any, guesses: tuple[Role, ...]) -> tuple[Role, ...]:
    tree = jtu.tree_unflatten(arguments.treedef, arguments.leaves)
    of_leaves = spread(roles, tree, lambda node: node is None or isinstance(node, str), "roles")
    unknown = [role for role in of_leaves if role is not None and role not in get_args(Role)]
    if unknown:
        raise ConfigError(f"unknown role {unknown[0]!r}; roles are {', '.join(map(repr, get_args(Role)))}")
    leaves = zip(of_leaves, arguments.leaves, strict=True)
    of_arrays = [role for role, leaf in leaves if array_kind(leaf) is not None]
    return tuple(role or guess for role, guess in zip(of_arrays, guesses, strict=True))


def _guess_roles(arguments: Arguments) -> tuple[Role, ...]:
    """From the copies of the parameters where there are any; else from what a plan mirrors; else from dtypes."""
    fallback = _roles_without_optimizer(arguments)
    homes = _find_homes(arguments)
    if homes is not None:
        arrays = zip(_array_paths(arguments), arguments.arrays, fallback, strict=True)
        return tuple(_role_by_path(path, array.shape, *homes) or other for path, array, other in arrays)
    # A state whose leaves have no copied path, like the moments of a single matrix, is known if a plan mirrors it, and
    # another argument is planned itself: else what is mirrored is the parameters. Scalars are mirrored everywhere: they
    # say nothing.
    state_owners = {
        owner: None
        for array, owner in zip(arguments.arrays, arguments.owners, strict=True)
        if array.mirrors and array.shape
    }
    planned_owners = (owner for array, owner in zip(arguments.arrays, arguments.owners, strict=True) if array.planned)
    if state_owners and any(owner not in state_owners for owner in planned_owners):
        return tuple(
            STATE if owner in state_owners else PARAMETERS if array.planned and not array.mirrors else BATCH
            for array, owner in zip(arguments.arrays, arguments.owners, strict=True)
        )
    return fallback


def _find_homes(arguments: Arguments) -> tuple[_Path, list[_Path]] | None:
    """The path of the parameters, and the paths of their copies: arguments or things inside them."""
    arrays = [
        (path, array.shape)
        for path, array in zip(_array_paths(arguments), arguments.arrays, strict=True)
        if array.shape  # counts and steps are not copies of parameters
    ]
    # Every end of every path, with its beginning: "0/mu/layers/0/w" ends in "layers/0/w", the path of a parameter.
    ends: dict[_Path, list[tuple[_Path, tuple[int, ...]]]] = {}
    for path, shape in arrays:
        for cut in range(1, len(path)):
            ends.setdefault(path[cut:], []).append((path[:cut], shape))
    # Parameters are an argument of their own, or one item of an argument that also has the state. Deeper roots would
    # find single layers that happen to be equal.
    for depth in (1, 2):
        for root in dict.fromkeys(path[:depth] for path, _ in arrays if len(path) > depth):
            inside = [(path[depth:], shape) for path, shape in arrays if path[:depth] == root]
            copies = Counter(
                home
                for end, shape in inside
                for home, other_shape in ends[end]
                # Adafactor keeps a row and a column in place of a matrix, and (1,) for what it does not use.
                if not _overlap(home, root)
                and (other_shape == shape or len(other_shape) < len(shape) or other_shape == (1,))
            )
            homes = [home for home, count in copies.items() if _is_copy(root, home, count, len(inside))]
            if homes:
                return root, homes
    return None


def _array_paths(arguments: Arguments) -> list[_Path]:
    """The paths of all arrays. They start with the index of the argument: its name in `*args` would be two parts."""
    args = jtu.tree_unflatten(arguments.treedef, arguments.leaves)
    of_leaves = [path for arg in args for path in leaf_paths(arg)]
    leaves = zip(of_leaves, arguments.leaves, strict=True)
    of_arrays = [path for path, leaf in leaves if array_kind(leaf) is not None]
    owners = zip(arguments.owners, of_arrays, strict=True)
    return [(str(owner), *(path.split("/") if path else ())) for owner, path in owners]


def _overlap(path: _Path, other: _Path) -> bool:
    """One path is inside the other."""
    shorter = min(len(path), len(other))
    return path[:shorter] == other[:shorter]


def _is_copy(root: _Path, home: _Path, count: int, root_size: int) -> bool:
    """`home`, with `count` of the leaves of `root`, is a copy of it."""
    # Siblings in one container may as well be equal layers, commonly with a weight and a bias: all leaves must agree,
    # and be three or more.
    if len(root) == len(home) and len(root) > 1 and root[:-1] == home[:-1]:
        return count == root_size >= 3
    # Elsewhere half are enough: optax.masked and optax.partition keep moments of some parameters only.
    return 2 * count >= root_size


def _role_by_path(path: _Path, shape: tuple[int, ...], root: _Path, homes: list[_Path]) -> Role | None:
    """The role of an array, given the homes of parameters and copies; `None` in arguments that have neither."""
    if path[: len(root)] == root:
        return PARAMETERS
    homes_in_argument = [home for home in homes if home[0] == path[0]]
    if not homes_in_argument:
        return None
    # An argument with copies alone is a state, with all that is in it. In one that has the parameters too, as a train
    # state, only scalars (counts, steps) and what is beside the copies are state: the rest may be a batch.
    if root[0] != path[0] or shape == ():
        return STATE
    return STATE if any(path[:2] == home[:2] for home in homes_in_argument) else BATCH


def _roles_without_optimizer(arguments: Arguments) -> tuple[Role, ...]:
    """Roles where nothing is copied: integers, keys and the last arguments with a common first dimension are data."""
    by_owner: dict[int, list[Argument]] = {}
    for array, owner in zip(arguments.arrays, arguments.owners, strict=True):
        by_owner.setdefault(owner, []).append(array)
    planned = [owner for owner, arrays in by_owner.items() if any(array.planned for array in arrays)]
    if 0 < len(planned) < len(by_owner):  # a plan of some arguments is a plan of the model
        data = [owner for owner in by_owner if owner not in planned]
    elif len(arguments.arrays) == 1 and not planned:
        data = list(by_owner)
    else:
        # The arrays of a batch agree in their first dimension, and batches usually come last and models first. So the
        # last argument that qualifies is the batch, with others of the same size: inputs and labels.
        firsts = {owner: {array.shape[:1] for array in by_owner[owner]} for owner in list(by_owner)[1:]}
        uniform = [owner for owner, sizes in firsts.items() if len(sizes) == 1 and () not in sizes]
        uniform = [owner for owner in uniform if any(_is_number(array.dtype) for array in by_owner[owner])]
        data = [owner for owner in uniform if firsts[owner] == firsts[uniform[-1]]]
    return tuple(
        BATCH if owner in data or not _is_float(array.dtype) else PARAMETERS
        for array, owner in zip(arguments.arrays, arguments.owners, strict=True)
    )


def _is_number(dtype: Any) -> bool:
    """It is not a PRNG key, new (an extended dtype) or old (uint32)."""
    return isinstance(dtype, np.dtype) and dtype != np.uint32


def _is_float(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind not in "iub"
