"""What flax puts around arrays: variables of nnx are no part of a path, and name dimensions as boxes of linen do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.tree import named_leaves, survey
from tests import zoo


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def flat_paths(state: Any) -> list[str]:
    """The paths of a state, as flax has them."""
    return ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


TREES = {
    "module": lambda: zoo.nnx_model(),
    "state": lambda: nnx.state(zoo.nnx_model()),
    "parameters": lambda: nnx.state(zoo.nnx_model(), nnx.Param),
    "shapes": lambda: nnx.eval_shape(lambda: zoo.nnx_model()),
    "rngs": lambda: nnx.Rngs(0, dropout=1),
    "optimizer": lambda: nnx.Optimizer(zoo.nnx_model(), optax.adam(1e-3), wrt=nnx.Param),
    "metrics": lambda: nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
}


@pytest.mark.parametrize("name", TREES)
def test_paths_of_nnx_are_those_of_its_flat_state(name: str) -> None:
    tree = TREES[name]()
    state = tree if isinstance(tree, nnx.State) else nnx.state(tree)
    assert sorted(sr.leaf_paths(tree)) == sorted(flat_paths(state))
    assert sr.leaf_paths(nnx.to_pure_dict(state)) == sr.leaf_paths(state)


def test_paths_inside_split_modules_have_no_value() -> None:
    graph, params, rest = nnx.split(zoo.nnx_model(1), nnx.Param, ...)
    paths = sr.leaf_paths({"graph": graph, "params": params, "rest": rest})
    assert paths[:2] == ("params/blocks/0/down/bias", "params/blocks/0/down/kernel")
    assert "rest/blocks/0/dropout/rngs/key" in paths
    assert not [path for path in paths if "value" in path]


def test_a_tree_in_a_variable_keeps_its_own_keys() -> None:
    tree = {"cache": nnx.Variable({"k": np.ones((8, 4)), "v": [np.ones(8)]}), "w": nnx.Param(np.ones(4))}
    assert sr.leaf_paths(tree) == ("cache/k", "cache/v/0", "w")
    assert sr.leaf_paths(nnx.Param(np.ones(4))) == ("",)


def test_patterns_see_where_the_path_of_a_variable_ends() -> None:
    rules = sr.RegexShardingRule([(r"up/kernel$", P(None, "model")), (r"down/kernel$", P("model"))])
    plan = rules.plan(zoo.nnx_model(), sr.mesh_shape("data:4,model:2")).check()
    assert plan.decision("blocks/1/up/kernel").spec == P(None, "model")
    assert plan.specs.blocks[2].down.kernel.get_raw_value() == P("model")
    assert "blocks/*/up/kernel" in str(plan)
    assert "value" not in str(plan)
    assert sr.ShardingPlan.from_json(plan.to_json(), zoo.nnx_model()) == plan


def test_equal_layers_of_nnx_are_one_kind() -> None:
    kinds = survey(zoo.nnx_model(5), None, reads_index="no").kinds
    assert [kind.path for kind in kinds if kind.path.startswith("blocks/")] == [
        *("blocks/0/down/bias", "blocks/0/down/kernel", "blocks/0/dropout/rngs/count", "blocks/0/dropout/rngs/key"),
        *("blocks/0/up/bias", "blocks/0/up/kernel"),
    ]


@nnx.use_eager_sharding(False)
def named(names: Any, shape: tuple[int, ...] = (8, 16)) -> nnx.Param:
    return nnx.Param(struct(*shape), out_sharding=names)


@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (("embed", "mlp"), ("embed", "mlp")),
        (["embed", None], ("embed", None)),
        ((("data", "model"), None), (("data", "model"), None)),
        (P("embed"), ("embed", None)),
        (P(), None),
        ((), None),
        (None, None),
    ],
    ids=str,
)
def test_metadata_of_variables_names_dimensions(names: Any, axes: Any) -> None:
    # Lists are given as older versions keep them: the newest turns them into specs by itself.
    (kind,) = survey({"w": named(tuple(names) if isinstance(names, list) else names)}, None).kinds
    assert (kind.path, kind.axes) == ("w", axes)


@pytest.mark.parametrize("key", ["out_sharding", "sharding_names", "sharding"])
def test_metadata_of_every_version_of_flax_is_read(key: str) -> None:
    variable = nnx.Param(struct(8, 16))
    variable.get_metadata()
    variable._var_metadata[key] = ("embed", "mlp")  # as versions of flax that have this name write it
    assert survey({"w": variable}, None).kinds[0].axes == ("embed", "mlp")


def test_shardings_as_metadata_name_the_axes_of_their_spec() -> None:
    sharding = jax.sharding.NamedSharding(sr.create_mesh("data:4,model:2"), P("data"))
    assert survey({"w": named(sharding)}, None).kinds[0].axes == ("data", None)


def test_variables_of_one_shape_with_other_names_are_other_kinds() -> None:
    layers = [{"w": named(("embed", "mlp"))}, {"w": named(("mlp", "embed"))}, {"w": named(("embed", "mlp"))}]
    tree_survey = survey(layers, None, reads_index="no")
    assert [leaf.axes for leaf in tree_survey.kinds] == [("embed", "mlp"), ("mlp", "embed")]
    assert list(tree_survey.kind_of) == [0, 1, 0]


class OpaqueModule(nnx.Module, pytree=False):
    """A module that JAX does not look into, as all are in flax before 0.11."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)


def test_objects_that_hide_their_arrays_are_refused() -> None:
    rule = sr.ReplicateShardingRule()
    with pytest.raises(sr.errors.TreeError, match=r"no arrays in .*: model \(OpaqueModule\).* nnx\.split\(model\)"):
        rule.plan({"model": OpaqueModule(nnx.Rngs(0)), "w": np.ones(8)}, sr.mesh_shape("data:2"))
    with nnx.var_defaults(hijax=True):
        model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    with pytest.raises(sr.errors.TreeError, match=r"bias \(HijaxVariable\), kernel \(HijaxVariable\)"):
        sr.filter_shard(model, rule, sr.create_mesh("data:8"))


def test_messages_about_specs_name_variables_without_value() -> None:
    state = {"up": nnx.Param(np.ones(4))}
    with pytest.raises(sr.errors.SpecError, match=r"ndarray'> at 'up'\."):
        sr.specs.get_partition_spec(state)
    assert named_leaves(state, lambda node: node is None) == [("up", state["up"].get_raw_value())]
    specs: Any = {"up": nnx.Param(P("data"))}
    with pytest.raises(sr.errors.ConfigError, match=r"\('data',\) at up\."):
        sr.reshard({"up": nnx.Param(jnp.ones(8))}, specs)
