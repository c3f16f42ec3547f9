"""Zig-zag order: each device has two half-shards of a causal sequence, so that all devices have the same work.

Of 2n half-shards device i has numbers i and 2n - 1 - i, an early one and a late one. In blocks of keys of other devices
there is then no mask: the late half attends to the early half of all devices, and either the early half attends to
the early half of an earlier device, or the late half to the late half of a later one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import lax

Half: TypeAlias = Any
"""Of two halves along dim 1 `True` is the first, `False` the second, a traced bool either, and `None` both."""


@final
class Pairing(NamedTuple):
    """The queries that attend to keys of another device, and these keys; none if not `is_attended`."""

    queries: Half
    keys: Half
    is_attended: Any = None


def parts_of(index: Any, source: Any, *, is_causal: bool, is_zigzag: bool) -> tuple[Pairing, ...]:
    """The parts of the keys of device `source` that device `index` attends to."""
    if not is_causal:
        return (Pairing(None, None),)
    is_earlier = source < index
    if not is_zigzag:
        return (Pairing(None, None, is_earlier),)
    # Late queries meet early keys. The other pair is early or late on both sides, by which device comes first.
    return Pairing(False, True), Pairing(is_earlier, is_earlier)


def take(tree: Any, half: Half) -> Any:
    """A half of each array."""
    if half is None:
        return tree
    return jax.tree.map(lambda array: _either(half, *jnp.split(array, 2, axis=1)), tree)


def put(array: Any, half: Half, fill: Any) -> Any:
    """A half among elements `fill` for the other: what `take` takes."""
    if half is None:
        return array
    # Halves are put side by side: a traced choice has no slice to write to.
    other = jnp.full_like(array, fill)
    return jnp.concatenate([_either(half, array, other), _either(half, other, array)], axis=1)


def _either(is_first: Any, first: Any, second: Any) -> Any:
    if isinstance(is_first, bool):
        return first if is_first else second
    return jnp.where(is_first, first, second)


def to_zigzag(tree: Any, axis_name: Sequence[str]) -> Any:
    """Sends the half-shards of arrays that are split in order along dim 1 to where they are in zig-zag order."""
    even, odd = _permutations(lax.axis_size(axis_name))
    is_even = lax.axis_index(axis_name) % 2 == 0

    def move(array: Any) -> Any:
        # Each half goes by its own permutation: a device sends one half by each, and receives one.
        halves = jnp.split(array, 2, axis=1)
        from_even, from_odd = (
            lax.ppermute(half, axis_name, pairs) for half, pairs in zip(halves, (even, odd), strict=True)
        )
        return jnp.concatenate(
            [jnp.where(is_even, from_even, from_odd), jnp.where(is_even, from_odd, from_even)], axis=1
        )

    return jax.tree.map(move, tree)


def from_zigzag(array: Any, axis_name: Sequence[str]) -> Any:
    """Undoes `to_zigzag`."""
    even, odd = _permutations(lax.axis_size(axis_name))
    is_even = lax.axis_index(axis_name) % 2 == 0
    early, late = jnp.split(array, 2, axis=1)
    halves = [
        lax.ppermute(half, axis_name, [(after, before) for before, after in pairs])
        for half, pairs in (
            (jnp.where(is_even, early, late), even),
            (jnp.where(is_even, late, early), odd),
        )
    ]
    return jnp.concatenate(halves, axis=1)


def _permutations(count: int) -> list[list[tuple[int, int]]]:
    """The devices that the first halves of all shards go to, and the second: each is a permutation of the devices.

    An even half-shard is the early one of an even device, or the late one of an odd device.
    """
    return [
        [(device, min(half, 2 * count - 1 - half)) for device in range(count) for half in (2 * device + offset,)]
        for offset in (0, 1)
    ]
