"""Zig-zag order gives every device an early and a late half-shard, and the same work."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.attention.zigzag import from_zigzag, parts_of, put, take, to_zigzag


@pytest.mark.parametrize("mesh", ["sequence:8", "x:2,y:4", "sequence:3"])
def test_devices_have_an_early_and_a_late_half(mesh: str) -> None:
    shape = sr.mesh_shape(mesh)
    axes, count = tuple(shape.axis_names), shape.size
    devices = sr.create_mesh(mesh, devices=jax.devices()[:count])
    x = jnp.arange(4 * count)[None]

    def move(x: Any) -> Any:
        moved = to_zigzag({"x": x}, axes)["x"]
        return moved, from_zigzag(moved, axes)

    moved, returned = jax.jit(jax.shard_map(move, mesh=devices, in_specs=P(None, axes), out_specs=P(None, axes)))(x)
    expected = [[2 * half, 2 * half + 1] for device in range(count) for half in (device, 2 * count - 1 - device)]
    np.testing.assert_array_equal(moved[0], np.concatenate(expected))
    np.testing.assert_array_equal(returned, x)


@pytest.mark.parametrize("is_zigzag", [True, False])
def test_parts_are_what_is_not_masked(is_zigzag: bool) -> None:
    count = 4
    for index in range(count):
        for source in range(count):
            if index == source:
                continue
            halves = [
                [device, 2 * count - 1 - device] if is_zigzag else [2 * device, 2 * device + 1]
                for device in (index, source)
            ]
            expected = [[key < query for key in halves[1]] for query in halves[0]]
            attended = np.zeros((2, 2), bool)
            for part in parts_of(index, source, is_causal=True, is_zigzag=is_zigzag):
                if part.is_attended is None or part.is_attended:
                    rows, columns = (list({None: (0, 1), True: (0,), False: (1,)}[half]) for half in part[:2])
                    attended[np.ix_(rows, columns)] = True
            np.testing.assert_array_equal(attended, expected)
            assert not is_zigzag or attended.sum() == 2  # the same work everywhere


@pytest.mark.parametrize("half", [True, False, None])
@pytest.mark.parametrize("is_traced", [True, False])
def test_halves_return_where_they_were(half: Any, is_traced: bool) -> None:
    x = jnp.arange(8.0).reshape(2, 4)
    if half is None:
        assert put(take(x, None), None, 0) is x
        return
    choice = jnp.asarray(half) if is_traced else half
    np.testing.assert_array_equal(put(take(x, choice), choice, -1), np.where((np.arange(4) < 2) == half, x, -1))
