"""Homes: where the layout of an array is decided."""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np

from shardrules.programs.autoplan.graph.layouts import PARTIAL, WHOLE
from shardrules.programs.traced.factors.table import Factors


@final
@attrs.frozen
class Home:
    """The place that decides the layout of an array: a node, and the node's dim for each dim of the array."""

    node: int
    dims: tuple[int | None, ...]  # None: never split
    sums: tuple[int, ...] = ()  # dims of the node that the array is summed over: split, they make it partial
    joint: tuple[tuple[int, int], ...] = ()  # more dims of the node, each with the dim of the array that it splits


def nest_home(node: int, factors: Factors, array: Sequence[int | None], sums: tuple[int, ...] = ()) -> Home:
    """The home of an array, given the factor of each of its dims, in a node over the factors of its operation."""
    joint = [(factors.exchange, dim) for dim, factor in enumerate(array) if factor in factors.joint]
    return Home(node, tuple(array), sums, tuple((node_dim, dim) for node_dim, dim in joint if node_dim is not None))


def project(rows: np.ndarray, home: Home) -> np.ndarray:
    # A lookup table from dims of the node to dims of the array. WHOLE and PARTIAL are -1 and -2, so they index its last
    # two entries, which no dim reaches.
    node_dims = (*(dim for dim in home.dims if dim is not None), *(node_dim for node_dim, _ in home.joint))
    highest = max([*rows.ravel().tolist(), *node_dims, 0])
    table = np.full(highest + 3, WHOLE, np.int8)
    for dim, node_dim in enumerate(home.dims):
        if node_dim is not None:
            table[node_dim] = dim
    for node_dim, dim in home.joint:
        table[node_dim] = dim
    for node_dim in home.sums:
        if node_dim <= highest:
            table[node_dim] = PARTIAL
    table[PARTIAL] = PARTIAL
    return table[rows]
