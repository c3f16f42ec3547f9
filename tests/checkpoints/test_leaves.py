"""Leaves that savers take from trees and loaders ask for, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints.leaves import requested_leaves, saved_leaves, with_values
from shardrules.core.errors import ConfigTypeError
from shardrules.placement.destination import resolve_destination


def supported(_: np.dtype) -> str:
    return ""


def test_arrays_numbers_and_keys_are_saved_in_order() -> None:
    tree = {
        "array": jnp.ones((2, 3), jnp.bfloat16),
        "big-endian": np.ones(2, ">f4"),
        "function": jax.nn.relu,
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
        "number": 3,
        "source": sr.ArraySource((4,), np.float32, lambda index: np.ones(4, np.float32)[index]),
        "text": "x",
        "truth": True,
        "type": np.float32,
    }
    leaves, findings = saved_leaves(tree, "save", supported)
    assert findings == []
    assert [(leaf.path, str(leaf.dtype), leaf.shape, leaf.nbytes) for leaf in leaves] == [
        ("array", "bfloat16", (2, 3), 12),
        ("big-endian", "float32", (2,), 8),
        ("keys", "uint32", (3, 4), 48),
        ("number", "int64", (), 8),
        ("source", "float32", (4,), 16),
        ("truth", "bool", (), 1),
    ]


def test_everything_without_values_is_listed() -> None:
    deleted = jnp.ones(3)
    deleted.delete()
    tree: Any = {"deleted": deleted, "shape": jax.ShapeDtypeStruct((2,), np.float32), "large": 2**64, "fine": 1}
    leaves, findings = saved_leaves(tree, "save", supported)
    assert [leaf.path for leaf in leaves] == ["fine"]
    assert [(finding.path, finding.code) for finding in findings] == [
        ("deleted", "no-values"),
        ("large", "too-large"),
        ("shape", "no-values"),
    ]


def test_inside_jit_there_is_nothing_to_save() -> None:
    with pytest.raises(ConfigTypeError, match="save: inside jit arrays have no values"):
        jax.jit(lambda x: saved_leaves({"x": x}, "save", supported))(jnp.ones(3))


@pytest.mark.parametrize("count", [None, 8])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_made_of_their_numbers(count: int | None, impl: str) -> None:
    def make() -> jax.Array:
        key = jax.random.key(3, impl=impl)
        return key if count is None else jax.random.split(key, count)

    keys, like = make(), {"key": jax.eval_shape(make)}
    numbers = np.asarray(jax.random.key_data(keys))
    destination = resolve_destination(like, P("data") if keys.ndim else P(), sr.create_mesh("data:8"))
    [leaf] = requested_leaves(like, destination, "load")
    assert (leaf.shape, leaf.dtype) == (numbers.shape, np.uint32)
    placed = with_values(destination, [leaf], [numbers])["key"]
    assert placed.dtype == keys.dtype
    assert placed.sharding == destination.shardings[0]
    np.testing.assert_array_equal(jax.random.key_data(placed), numbers)


def test_keys_of_another_kind_are_an_error() -> None:
    like = {"key": jax.eval_shape(lambda: jax.random.key(0, impl="unsafe_rbg"))}
    destination = resolve_destination(like, P(), sr.create_mesh("data:8"))
    with pytest.raises(sr.errors.CheckpointError, match=r"key holds key<rbg>, expected key<urbg>"):
        with_values(destination, requested_leaves(like, destination, "load"), [jax.random.key(0, impl="rbg")])
