"""PartitionManager: lists and ready lists, modes by name and by shape, and no state outside the value."""

import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules.core.errors import ConfigError, ConfigTypeError
from shardrules.presets.eformer import axes as logical_axes
from shardrules.presets.eformer.axes import (
    BATCH,
    KV_LENGTH,
    MODE_DECODE,
    MODE_TRAIN,
    QUERY_LENGTH,
    AttnKVSharding,
    AttnQSharding,
    ColumnWise,
    DynamicShardingAxes,
    HiddenStateSharding,
)
from shardrules.presets.eformer.partition_axis import PartitionAxis, RegisteredAxis
from shardrules.presets.eformer.partition_manager import PartitionManager

BATCHES = ("fsdp", "dp")


@pytest.mark.parametrize(
    ("axes", "train", "decode"),
    [
        (HiddenStateSharding, P(BATCHES, "sp", "tp"), P(BATCHES, None, "tp")),
        (AttnQSharding, P(BATCHES, "sp", "tp", None), P(BATCHES, None, "tp", None)),
        (AttnKVSharding, P(BATCHES, "sp", "tp", None), P(BATCHES, "sp", "tp", None)),
    ],
)
def test_the_mode_of_activations_is_read_off_their_shape(axes: DynamicShardingAxes, train: P, decode: P) -> None:
    manager = PartitionManager(PartitionAxis())
    long, single = (2, 8, 4, 32)[: len(axes.axes)], (2, 1, 4, 32)[: len(axes.axes)]
    assert manager.resolve(axes, shape=long) == train
    assert manager.resolve(axes, shape=single) == decode
    assert manager.resolve(dynamic_axes=axes, shape=single) == decode
    assert manager.resolve(axes, shape=np.zeros(single).shape) == decode


def test_an_explicit_mode_overrides_the_mode_of_the_list() -> None:
    manager = PartitionManager(PartitionAxis())
    assert manager.resolve(HiddenStateSharding, MODE_TRAIN) == P(BATCHES, "sp", "tp")
    assert manager.resolve(HiddenStateSharding, MODE_DECODE, shape=(2, 8, 32)) == P(BATCHES, None, "tp")
    assert manager.resolve([BATCH, QUERY_LENGTH], 1, shape=(2, 1)) == P(BATCHES, None)
    assert manager.resolve(ColumnWise, MODE_DECODE) == manager.resolve(ColumnWise) == P(("fsdp", "sp"), "tp")
    assert manager.resolve((BATCH, None)) == P(BATCHES, None)


@pytest.mark.parametrize("name", [name for name, v in vars(logical_axes).items() if isinstance(v, DynamicShardingAxes)])
@pytest.mark.parametrize("length", [1, 8])
def test_jax_accepts_the_spec_of_every_ready_list(name: str, length: int) -> None:
    axes: DynamicShardingAxes = getattr(logical_axes, name)
    shape = tuple(length if dim == 1 else 8 for dim in range(len(axes.axes)))
    spec = PartitionManager(PartitionAxis()).resolve(axes, shape=shape)
    assert len(spec) == len(shape)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1, 1), PartitionAxis().mesh_axes)
    placed = jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec))
    assert placed.sharding.is_equivalent_to(NamedSharding(mesh, spec), placed.ndim)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "neither was passed"),
        ({"mode": MODE_TRAIN}, "neither was passed"),
        ({"axes": [BATCH], "dynamic_axes": ColumnWise}, "both were passed"),
        ({"axes": HiddenStateSharding}, "mode 1 reads the mode off the length of dimension 1"),
        ({"axes": HiddenStateSharding, "shape": (2, 8)}, "3 logical axes"),
        ({"axes": HiddenStateSharding, "shape": (2,)}, "which shape (2,) does not have"),
        ({"axes": [BATCH, KV_LENGTH], "mode": "train"}, "unknown runtime mode 'train'"),
        ({"axes": BATCH}, "logical axes are a list"),
    ],
)
def test_invalid_arguments_raise(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        PartitionManager(PartitionAxis()).resolve(**call)


def test_it_is_a_value() -> None:
    manager = PartitionManager(PartitionAxis(head_axis=None).register("stage", "pipe"))
    assert manager == PartitionManager(manager.paxis) != PartitionManager(PartitionAxis())
    assert hash(manager) == hash(pickle.loads(pickle.dumps(manager)))
    assert jax.tree.leaves(manager) == [manager]
    names = {"PartitionManager": PartitionManager, "PartitionAxis": PartitionAxis, "RegisteredAxis": RegisteredAxis}
    assert eval(repr(manager), names) == manager


def test_a_manager_takes_partition_axes_only() -> None:
    with pytest.raises(ConfigTypeError, match=r"Expected PartitionAxis as the paxis.*got 'fsdp'"):
        PartitionManager("fsdp")  # pyright: ignore[reportArgumentType]
