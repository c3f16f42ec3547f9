"""Arrays back to the host."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.presets import eformer

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "tp"))


def test_a_module_comes_back_whole() -> None:
    model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
    back = sr.filter_gather(sr.filter_shard(model, sr.FSDPShardingRule("dp", min_size_mb=0), MESH))
    assert isinstance(back, eqx.nn.MLP)
    assert back.activation is model.activation
    for gathered, other in zip(jax.tree.leaves(back), jax.tree.leaves(model), strict=True):
        if eqx.is_array(other):
            assert isinstance(gathered, np.ndarray)
            np.testing.assert_array_equal(gathered, other)


def test_keys_stay_keys_and_other_leaves_as_they_are() -> None:
    array = np.ones(3)
    key = sr.filter_shard(jax.random.key(3), P(), MESH)
    back = sr.filter_gather({"key": key, "own": array, "n": 2})
    assert back["own"] is array
    assert back["n"] == 2
    assert jax.random.key_data(back["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()


def test_the_pair_of_functions_goes_there_and_back() -> None:
    shard, gather = eformer.make_shard_and_gather_fns({"w": P("dp", "tp"), "b": None, "n": P()}, MESH)
    assert shard["b"] is gather["b"] is None
    for array in (np.arange(64.0, dtype=np.float32).reshape(8, 8), jnp.arange(64.0).reshape(8, 8)):
        placed = shard["w"](array)
        assert placed.sharding == NamedSharding(MESH, P("dp", "tp"))
        back = gather["w"](placed)
        assert isinstance(back, np.ndarray)
        np.testing.assert_array_equal(back, array)
    same, _ = eformer.make_shard_and_gather_fns({"w": P("dp", "tp")}, MESH)
    assert (same["w"], gather["n"]) == (shard["w"], gather["w"])  # static arguments do not compile again
    assert shard["n"](3.0).sharding == NamedSharding(MESH, P())
    assert isinstance(gather["n"](shard["n"](3.0)), np.ndarray)


def test_the_pair_is_refused_as_filter_shard_refuses() -> None:
    shard, _ = eformer.make_shard_and_gather_fns(P("dp"), MESH)
    with pytest.raises(sr.errors.PlanError, match="not divisible by mesh axis dp size 2"):
        shard(np.ones(7))
    with pytest.raises(sr.errors.NoMeshError, match="No mesh found"):
        eformer.make_shard_and_gather_fns(P("dp"))
    with pytest.raises(sr.errors.ConfigTypeError, match="takes PartitionSpecs, got 'dp'"):
        eformer.make_shard_and_gather_fns({"w": "dp"}, MESH)


def test_the_mesh_in_force_is_the_default() -> None:
    with jax.set_mesh(MESH):
        shard, _ = eformer.make_shard_and_gather_fns({"w": P("dp")})
    assert shard["w"](np.ones(8)).sharding.mesh == MESH
