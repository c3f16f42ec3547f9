"""Axis mappings of haliax and levanter, on what their own code gave, at commits 280f49f and 9263f81."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.tree import named_leaves
from shardrules.presets import haliax, levanter

RECORDED = Path(__file__).parent / "recorded"
TRAINERS = json.loads((RECORDED / "levanter_trainers.json").read_text())
MESH = sr.mesh_shape("replica:2,data:4,model:8")
TRAINER = {"tensor_parallel_axes": ["mlp", "heads"], "axis_resources": {"token": "data"}}
WHOLE = ("layers", "kv_head", "q_heads_per_group", "head_size", "vocab", "experts")
MODELS = ("llama", "mixtral")


@dataclass(frozen=True)
class Axis:
    """An axis as haliax has it."""

    name: str
    size: int


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class NamedArray:
    """An array with named axes, a container of one leaf as in haliax."""

    array: Any
    axes: tuple[Axis, ...]

    def tree_flatten(self) -> Any:
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes: Any, children: Any) -> Any:
        return cls(children[0], axes)


def recorded(model: str) -> dict[str, Any]:
    """The axes of each parameter by path, and the spec that haliax gives it under `TRAINER`."""
    return json.loads((RECORDED / f"levanter_{model}.json").read_text())


def tree_of(rows: dict[str, Any], renamed: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The nested dictionary of named arrays, with some axes renamed."""
    tree: dict[str, Any] = {}
    for path, (axes, _) in rows.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        named = tuple([Axis(renamed.get(name, name), size) for name, size in axes])
        node[last] = NamedArray(jax.ShapeDtypeStruct(tuple([axis.size for axis in named]), jnp.float32), named)
    return tree


def rule_of(trainer: dict[str, Any] = TRAINER, whole: tuple[str, ...] = WHOLE) -> sr.LogicalShardingRule:
    return haliax.from_axis_mapping(levanter.parameter_axis_mapping(trainer), whole)


@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_levanter_get_the_specs_of_haliax(model: str) -> None:
    rows = recorded(model)
    plan = rule_of().plan(tree_of(rows), MESH).check()
    assert sorted(plan.paths) == sorted(rows)
    for path, (_, entries) in rows.items():
        expected = P(*[tuple(entry) if isinstance(entry, list) else entry for entry in entries])
        assert sr.specs.same(plan.decision(path).spec or P("none"), expected), path


@pytest.mark.parametrize("model", MODELS)
def test_optimizer_states_mirror_named_arrays(model: str) -> None:
    tree = tree_of(recorded(model))
    plan = rule_of().plan(tree, MESH).check()
    state = jax.eval_shape(optax.adam(1e-3).init, tree)
    mirrored = plan.mirror(state).check()
    assert mirrored.decision("0/mu/lm_head/weight").spec == plan.decision("lm_head/weight").spec == P(None, "data")


@pytest.mark.parametrize("model", MODELS)
def test_every_name_that_is_neither_mapped_nor_whole_is_an_error(model: str) -> None:
    tree = tree_of(recorded(model))
    with pytest.raises(sr.errors.PlanError, match=r"logical axis 'kv_head' \(did you mean 'heads'\?\)") as caught:
        rule_of(whole=tuple(name for name in WHOLE if name != "kv_head")).plan(tree, MESH).check()
    for path in ("q_proj", "k_proj", "v_proj"):
        assert f"self_attn/{path}/weight" in str(caught.value)


@pytest.mark.parametrize("model", MODELS)
def test_a_renamed_axis_is_an_error_with_the_nearest_name(model: str) -> None:
    with pytest.raises(sr.errors.PlanError, match=r"logical axis 'mlp_dim' \(did you mean 'mlp'\?\)"):
        rule_of().plan(tree_of(recorded(model), {"mlp": "mlp_dim"}), MESH).check()


def test_two_axes_of_an_array_on_one_mesh_axis_are_an_error_as_in_haliax() -> None:
    trainer = {"tensor_parallel_axes": ["mlp"], "fsdp_axis": ["embed", "mlp"]}
    with pytest.raises(sr.errors.PlanError, match="'mlp' and 'embed' both map to mesh axis 'data'"):
        rule_of(trainer, (*WHOLE, "heads")).plan(tree_of(recorded("llama")), MESH).check()


def test_named_arrays_are_placed_and_keep_their_axes() -> None:
    mesh = sr.create_mesh("data:4,model:2")
    tree = {"w": NamedArray(jnp.ones((8, 4)), (Axis("embed", 8), Axis("mlp", 4))), "b": jnp.ones(4)}
    placed = sr.filter_shard(tree, haliax.from_axis_mapping({"embed": "data", "mlp": ("model",)}), mesh)
    assert placed["w"].array.sharding.spec == P("data", "model")
    assert placed["w"].axes == tree["w"].axes
    plan = sr.RegexShardingRule([("^w$", P("data")), ("^b$", P())], unmatched="error").plan(tree, mesh).check()
    assert plan.specs["w"].array == P("data")
    assert sr.leaf_paths(tree) == ("b", "w") == tuple([path for path, _ in named_leaves(tree)])
    parts = NamedArray({"codes": jnp.ones((8, 4)), "scales": jnp.ones(8)}, (Axis("embed", 8), Axis("mlp", 4)))
    for several in ({"w": parts}, {"w": NamedArray(None, ())}, NamedArray(None, ())):
        assert sr.leaf_paths(several) == tuple([path for path, _ in named_leaves(several)])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Picture:
    """A user's class with the fields of a named array, whose axes have no names."""

    array: Any
    axes: Any


def test_a_class_whose_axes_have_no_names_is_no_named_array() -> None:
    for axes in (jnp.ones(2), (1, 2), ()):
        tree = {"picture": Picture(jnp.ones((2, 3)), axes)}
        assert sr.leaf_paths(tree)[0] == named_leaves(tree)[0][0] == "picture/array"
        assert sr.LogicalShardingRule({"embed": "data"}).plan(tree, MESH).decision("picture/array").spec is None


@pytest.mark.parametrize("name", TRAINERS)
def test_mappings_of_a_trainer_are_those_of_levanter(name: str) -> None:
    section, compute, parameters = TRAINERS[name]

    def as_json(mapping: dict[str, Any]) -> Any:
        return json.loads(json.dumps(mapping))

    assert as_json(levanter.compute_axis_mapping(section)) == compute
    assert as_json(levanter.parameter_axis_mapping(section)) == parameters
    assert (
        as_json(haliax.to_axis_mapping(haliax.from_axis_mapping(levanter.parameter_axis_mapping(section))))
        == parameters
    )


AXES = st.sampled_from([None, "x", "y", ("x", "y"), ("z",), ()])


@given(st.dictionaries(st.sampled_from("abcdef"), AXES, max_size=6))
def test_axis_mappings_of_haliax_come_back_exactly(mapping: Any) -> None:
    rule = haliax.from_axis_mapping(mapping)
    assert haliax.to_axis_mapping(rule) == mapping
    assert eval(repr(rule), {"LogicalShardingRule": sr.LogicalShardingRule}) == rule


def test_what_is_no_mapping_of_haliax_or_levanter_is_refused() -> None:
    untyped: Any = haliax
    with pytest.raises(sr.errors.ConfigError, match=r"must be a dictionary.*got \[\['embed', 'data'\]\]"):
        untyped.from_axis_mapping([["embed", "data"]])
    with pytest.raises(sr.errors.ConfigError, match=r"\['embed'\] have mesh axes in the mapping"):
        haliax.from_axis_mapping({"embed": "data", "mlp": None}, ["embed", "mlp"])
    with pytest.raises(sr.errors.ConfigError, match="several pairs for 'embed'"):
        haliax.to_axis_mapping(sr.LogicalShardingRule([("embed", "data"), ("embed", None), ("mlp", None)]))
    with pytest.raises(sr.errors.ConfigError, match=r"'axis_resorces' \(did you mean 'axis_resources'\?\)"):
        levanter.compute_axis_mapping({"axis_resorces": {}, "train_batch_size": 4, "model_axis_size": 2})
    with pytest.raises(sr.errors.ConfigError, match=r"must be the name of an axis, or a list of names; got 3"):
        levanter.parameter_axis_mapping({"fsdp_axis": 3})
    with pytest.raises(sr.errors.ConfigError, match=r"axis_resources must be a dictionary .*; got \['embed'\]"):
        levanter.parameter_axis_mapping({"axis_resources": ["embed"]})
    with pytest.raises(sr.errors.ConfigError, match="the trainer must be a dictionary"):
        levanter.parameter_axis_mapping(untyped)
