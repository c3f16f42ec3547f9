"""By behaviour: models written without shardrules in mind compute the same when split over 8 devices."""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.placement.models import FSDP


def package(name: str) -> Any:
    """Imports a package that only these tests need. On a laptop it may be absent, not where everything is tested."""
    if "CI" in os.environ:
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'shardrules[test]'")


def flow(key: jax.Array) -> Any:
    """A normalizing flow of flowjax."""
    flows, distributions = package("flowjax.flows"), package("flowjax.distributions")
    base = distributions.Normal(jnp.zeros(8))
    return flows.planar_flow(key, base_dist=base, flow_layers=2, width_size=32, depth=1)


def unet(key: jax.Array) -> Any:
    """A network for differential equations of pdequinox."""
    return package("pdequinox").arch.ClassicUNet(2, 1, 1, key=key, hidden_channels=8, num_levels=1)


Make: TypeAlias = Callable[[jax.Array], Any]
MODELS: dict[str, tuple[Make, Callable[[Any, Any], jax.Array], tuple[int, ...]]] = {
    "flowjax_planar": (flow, lambda model, x: model.log_prob(x), (8,)),
    "pdequinox_unet": (unet, lambda model, x: jax.vmap(model)(x), (1, 16, 16)),
}
"""How each is made, how it is run on a batch, and the shape of an example."""

MESHES: dict[str, Callable[[], Mesh]] = {
    "auto": functools.cache(lambda: sr.create_mesh("data:4,model:2")),
    "explicit": functools.cache(lambda: jax.make_mesh((4, 2), ("data", "model"))),
}

RULE = (
    sr.RegexShardingRule([(r"", sr.FittedShardingRule(sr.DimShardingRule("model", 0, ignore_ndim_error=True)))]) | FSDP
)


@functools.cache
def unsharded(name: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns the model on one device, a batch of examples, and what it makes of them."""
    make, run, shape = MODELS[name]
    x = np.random.default_rng(0).normal(size=(16, *shape)).astype(np.float32)
    model = eqx.filter_jit(make)(jax.random.key(0))
    return model, x, np.asarray(eqx.filter_jit(run)(model, x))


def assert_split(model: Any) -> None:
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert len(arrays) > 4
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays)
    assert here < sum(leaf.nbytes for leaf in arrays) / 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("types", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_third_party_models_compute_the_same(name: str, types: str) -> None:
    mesh, (make, run, _) = MESHES[types](), MODELS[name]
    _, x, expected = unsharded(name)
    model = sr.filter_init(make, RULE, mesh)(jax.random.key(0))
    assert_split(model)
    run = sr.filter_jit(run, mesh=mesh, in_shardings=(RULE, P("data")), out_shardings=P("data"))
    result = run(model, x)
    assert result.sharding.spec == P("data")
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_equinox_compiles_what_was_placed(name: str) -> None:
    mesh = MESHES["auto"]()
    whole, x, expected = unsharded(name)
    model = sr.filter_shard(whole, RULE, mesh)
    assert_split(model)
    result = eqx.filter_jit(MODELS[name][1])(model, sr.filter_shard(x, P("data"), mesh))
    assert len(result.sharding.device_set) == 8
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
