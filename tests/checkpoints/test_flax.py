"""Checkpoints of flax: variables of nnx and boxes of linen, saved with `value` below each and loaded by plain paths."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import shardrules as sr
from shardrules.checkpoints.orbax import read_orbax_metadata
from tests import zoo
from tests.checkpoints.states import facts

RULES = sr.RegexShardingRule([(r"up/kernel$", P(None, "model")), (r"down/kernel$", P("model"))])


def optimizer() -> nnx.Optimizer:
    return nnx.Optimizer(zoo.nnx_model(2), optax.adam(1e-3), wrt=nnx.Param)


def save(path: Path, tree: Any, checkpointer: Callable[[], Any] = ocp.StandardCheckpointer) -> Path:
    with checkpointer() as opened:
        opened.save(path, tree)
    return path


SAVED: dict[str, Callable[[Any], Any]] = {
    "dictionary": lambda state: nnx.to_pure_dict(state),
    "state": lambda state: state,
}
LIKE: dict[str, Callable[[Any], Any]] = {
    "object": lambda thing: thing,
    "state": nnx.state,
    "dictionary": lambda thing: nnx.to_pure_dict(nnx.state(thing)),
}


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("make", [lambda: zoo.nnx_model(2), optimizer], ids=["model", "optimizer"])
@pytest.mark.sample(4)
def test_what_nnx_saved_loads_without_names(tmp_path: Path, mesh: Mesh, make: Any, saved: str, like: str) -> None:
    thing = make()
    path = save(tmp_path / "saved", SAVED[saved](nnx.state(thing)))
    loaded = sr.load_orbax(path, LIKE[like](nnx.eval_shape(make)), RULES, mesh)
    assert type(loaded) is type(LIKE[like](thing))
    assert facts(loaded) == facts(LIKE[like](thing))
    specs = {
        path: leaf.sharding.spec for path, leaf in zip(sr.leaf_paths(loaded), jax.tree.leaves(loaded), strict=True)
    }
    prefix = "" if "blocks/0/up/kernel" in specs else "opt_state/0/mu/"
    assert specs[f"{prefix}blocks/0/up/kernel"] == P(None, "model")


def test_saved_variables_have_plain_names(tmp_path: Path, mesh: Mesh) -> None:
    params = nnx.state(zoo.nnx_model(1), nnx.Param)
    path = save(tmp_path / "saved", params)
    assert tuple(read_orbax_metadata(path)) == sr.leaf_paths(params)
    renamed = {"kernel": nnx.Param(jax.ShapeDtypeStruct((8, 16), jnp.float32))}
    for name in ("blocks/0/up/kernel", "blocks/0/up/kernel/value"):  # orbax's own name is accepted, too
        loaded = sr.load_orbax(path, renamed, P(), mesh, names={"kernel": name}, surplus="skip")
        np.testing.assert_array_equal(loaded["kernel"][...], params.blocks[0].up.kernel[...])
    with pytest.raises(sr.errors.CheckpointError, match=r"surplus: norm/scale: no leaf"):
        sr.load_orbax(path, renamed, P(), mesh, names=lambda name: f"blocks/0/up/{name}/value")


def test_an_array_called_value_loads_by_its_own_path(tmp_path: Path, mesh: Mesh) -> None:
    tree = {"attention": {"value": jnp.ones(8)}, "head": {"value": jnp.zeros(8), "query": jnp.ones(8)}}
    path = save(tmp_path / "saved", tree)
    assert list(read_orbax_metadata(path)) == ["attention", "head/query", "head/value"]
    assert facts(sr.load_orbax(path, jax.eval_shape(lambda: tree), P(), mesh)) == facts(tree)


class Tied(nnx.Module):
    """A model whose head is the table of its embedding."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.head = self.embed.embedding


def test_a_variable_that_occurs_twice_is_loaded_once(tmp_path: Path, mesh: Mesh) -> None:
    model, like = Tied(nnx.Rngs(0)), nnx.eval_shape(lambda: Tied(nnx.Rngs(0)))
    save(tmp_path / "once", nnx.to_pure_dict(nnx.state(model)))
    save_file({"embed.embedding": np.asarray(model.head[...])}, tmp_path / "once.safetensors")
    sr.save_orbax(tmp_path / "twice", model)
    sr.save_safetensors(tmp_path / "twice_tensors", model)
    for loaded in (
        sr.load_orbax(tmp_path / "once", like, P("model"), mesh),
        sr.load_orbax(tmp_path / "twice", like, P("model"), mesh),
        sr.load_safetensors(tmp_path / "once.safetensors", like, P("model"), mesh),
        sr.load_safetensors(tmp_path / "twice_tensors", like, P("model"), mesh),
    ):
        assert loaded.head is loaded.embed.embedding
        assert loaded.head[...].sharding.spec == P("model")
        np.testing.assert_array_equal(loaded.head[...], model.head[...])


def test_what_nnx_has_is_saved_as_dictionaries(tmp_path: Path, mesh: Mesh) -> None:
    state = {"model": zoo.nnx_model(2), "optimizer": optimizer(), "rngs": nnx.Rngs(0), "step": 3}
    sr.save_orbax(tmp_path / "saved", state)
    assert sorted(read_orbax_metadata(tmp_path / "saved")) == sorted(sr.leaf_paths(state))
    loaded = sr.load_orbax(tmp_path / "saved", state, P(), mesh)
    assert (type(loaded["model"]), loaded["step"]) == (zoo.NnxModel, 3)
    assert facts(loaded) == facts(state)


@pytest.mark.parametrize("checkpointer", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
def test_boxes_of_linen_load_boxed_and_unboxed(tmp_path: Path, mesh: Mesh, checkpointer: Any) -> None:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    variables = jax.jit(nn.Dense(16, kernel_init=init).init)(jax.random.key(0), jnp.ones((1, 8)))
    path = save(tmp_path / "saved", variables, checkpointer)
    rules = sr.LogicalShardingRule({"embed": None, "mlp": "model"})
    boxed = sr.load_orbax(path, jax.eval_shape(lambda: variables), rules, mesh)
    assert isinstance(boxed["params"]["kernel"], nn.Partitioned)
    assert boxed["params"]["kernel"].value.sharding.spec == P(None, "model")
    assert facts(boxed) == facts(variables)
    plain = sr.load_orbax(path, jax.eval_shape(lambda: nn.meta.unbox(variables)), P(), mesh)
    assert sr.leaf_paths(plain) == sr.leaf_paths(boxed) == ("params/bias", "params/kernel")
    assert facts(plain) == facts(variables)


@pytest.mark.parametrize("like", LIKE)
def test_tensors_load_into_nnx_models(tmp_path: Path, mesh: Mesh, like: str) -> None:
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    flat = {
        path.replace("/", "."): np.asarray(leaf)
        for path, leaf in zip(sr.leaf_paths(model), jax.tree.leaves(model), strict=True)
    }
    assert list(flat) == ["bias", "kernel"]
    save_file(flat, tmp_path / "model.safetensors")
    shapes = LIKE[like](nnx.eval_shape(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))))
    loaded = sr.load_safetensors(tmp_path / "model.safetensors", shapes, sr.DimShardingRule("model", -1), mesh)
    assert facts(loaded) == facts(model)
    assert jax.tree.leaves(loaded)[1].sharding.spec == P(None, "model")
