"""By behaviour: models written without shardrules in mind compute the same when split over 8 devices."""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, final

import attrs
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


def flow(kind: str, **settings: Any) -> Callable[[jax.Array], Any]:
    flows, distributions = package("flowjax.flows"), package("flowjax.distributions")
    base = distributions.Normal(jnp.zeros(8))
    return lambda key: getattr(flows, kind)(key, base_dist=base, **settings)


def net(kind: str, **settings: Any) -> Callable[[jax.Array], Any]:
    arch = package("pdequinox").arch
    return lambda key: getattr(arch, kind)(2, 1, 1, key=key, **settings)


def log_density(model: Any, x: jax.Array) -> jax.Array:
    return model.log_prob(x)


def on_each(model: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


@final
@attrs.frozen
class Model:
    """A model that others wrote.

    **Arguments:**

    - `make`: returns the function from a random key to the model.
    - `run`: from the model and a batch to results.
    - `shape`: of an example.
    - `traceable`: whether JAX can trace the function that makes it: some keep what they traced.
    """

    make: Callable[[], Callable[[jax.Array], Any]]
    run: Callable[[Any, Any], jax.Array]
    shape: tuple[int, ...]
    traceable: bool = True


MODELS = {
    "flowjax_planar": Model(lambda: flow("planar_flow", flow_layers=2, width_size=32, depth=1), log_density, (8,)),
    "flowjax_autoregressive": Model(
        lambda: flow("masked_autoregressive_flow", flow_layers=2, nn_width=32), log_density, (8,), traceable=False
    ),
    "pdequinox_unet": Model(lambda: net("ClassicUNet", hidden_channels=8, num_levels=1), on_each, (1, 16, 16)),
    "pdequinox_res_net": Model(lambda: net("ClassicResNet", hidden_channels=8, num_blocks=2), on_each, (1, 16, 16)),
}

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
    x = np.random.default_rng(0).normal(size=(16, *MODELS[name].shape)).astype(np.float32)
    make = MODELS[name].make()
    model = eqx.filter_jit(make)(jax.random.key(0)) if MODELS[name].traceable else make(jax.random.key(0))
    return model, x, np.asarray(eqx.filter_jit(MODELS[name].run)(model, x))


def assert_split(model: Any) -> None:
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert len(arrays) > 4
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays)
    assert here < sum(leaf.nbytes for leaf in arrays) / 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("types", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_third_party_models_compute_the_same(name: str, types: str) -> None:
    mesh, library_model = MESHES[types](), MODELS[name]
    whole, x, expected = unsharded(name)
    model = (
        sr.filter_init(library_model.make(), RULE, mesh)(jax.random.key(0))
        if library_model.traceable
        else sr.filter_shard(whole, RULE, mesh)
    )
    assert_split(model)
    run = sr.filter_jit(library_model.run, mesh=mesh, in_shardings=(RULE, P("data")), out_shardings=P("data"))
    result = run(model, x)
    assert result.sharding.spec == P("data")
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_equinox_compiles_what_was_placed(name: str) -> None:
    mesh = MESHES["auto"]()
    whole, x, expected = unsharded(name)
    model = sr.filter_shard(whole, RULE, mesh)
    assert_split(model)
    result = eqx.filter_jit(MODELS[name].run)(model, sr.filter_shard(x, P("data"), mesh))
    assert len(result.sharding.device_set) == 8
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
