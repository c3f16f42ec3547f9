"""`LogicalShardingRule` on what flax makes: variables of nnx, beside the boxes of linen."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests import zoo

MESH = sr.mesh_shape("data:4,model:2")
RULES = (("embed", "data"), ("mlp", "model"))
RULE = sr.CompositeShardingRule(sr.LogicalShardingRule(RULES), sr.ReplicateShardingRule())


def flax_specs(tree: Any) -> dict[str, P]:
    """The specs that flax itself gives each variable."""
    with logical_axis_rules(RULES):
        flat = nnx.to_flat_state(nnx.state(nnx.get_partition_spec(nnx.state(tree))))
    return {"/".join(map(str, path)): variable.get_raw_value() for path, variable in flat}


@pytest.mark.parametrize("kind", ["module", "state", "optimizer"])
def test_names_of_nnx_variables_give_the_specs_of_flax(kind: str) -> None:
    tree: Any = zoo.nnx_model(2)
    if kind == "optimizer":
        tree = nnx.Optimizer(tree, optax.adam(1e-3), wrt=nnx.Param)
    plan = RULE.plan(nnx.state(tree) if kind == "state" else tree, MESH).check()
    expected = flax_specs(tree)
    assert sorted(plan.paths) == sorted(expected)
    for path, spec in expected.items():
        assert sr.specs.same(plan.decision(path).spec or P(), spec), path
    assert next(spec for path, spec in expected.items() if path.endswith("up/kernel")) == P("data", "model")


def test_a_name_of_nnx_that_no_pair_maps_is_a_warning() -> None:
    plan = sr.LogicalShardingRule({"embed": "data", "mpl": "model"}).plan(zoo.nnx_model(2), MESH)
    (finding, *_) = [finding for finding in plan.findings if finding.code == "unknown-logical-axis"]
    assert finding.path in ("blocks/*/down/kernel", "blocks/*/up/kernel")
    assert "did you mean 'mpl'" in finding.message


def test_names_that_are_axes_map_to_themselves() -> None:
    mesh = sr.create_mesh("data:4,model:2")
    with jax.set_mesh(sr.create_mesh("data:4,model:2", axis_types="auto")):
        init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "model"))
        layer = nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0))
    assert sr.LogicalShardingRule({"model": "model"}).plan(layer, mesh).decision("kernel").spec == P(None, "model")


@nnx.use_eager_sharding(False)
def stacked_blocks(**options: Any) -> Any:
    """Six blocks in one, as `nnx.vmap` stacks them."""
    make = nnx.vmap(lambda rngs: zoo.NnxBlock(rngs), in_axes=0, out_axes=0, **options)
    return nnx.eval_shape(lambda: make(nnx.Rngs(0).split(6)))


def test_stacks_of_nnx_have_the_name_that_vmap_gave_them() -> None:
    blocks = stacked_blocks(transform_metadata={nnx.PARTITION_NAME: "layers"})
    rule = sr.LogicalShardingRule((*RULES, ("layers", None)))
    assert rule.plan(blocks, MESH).check().decision("up/kernel").spec == P(None, "data", "model")
    stacked = sr.StackedShardingRule(sr.LogicalShardingRule(RULES))
    assert stacked.plan(blocks, MESH).check().decision("up/kernel").spec == P(None, "data", "model")


def test_stacks_without_a_name_take_the_rule_of_one_layer() -> None:
    blocks = stacked_blocks()
    with pytest.raises(sr.errors.PlanError, match=r"it has 2 logical names \('embed', 'mlp'\) for 3 dimensions"):
        sr.LogicalShardingRule(RULES).plan(blocks, MESH).check()
    plan = sr.StackedShardingRule(sr.LogicalShardingRule(RULES)).plan(blocks, MESH).check()
    assert plan.decision("up/kernel").spec == P(None, "data", "model")


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_boxes_of_linen_are_read_as_before(box: Any) -> None:
    model = nn.Dense(16, kernel_init=box(nn.initializers.ones_init(), ("embed", "mlp")))
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 8)))
    plan = RULE.plan(variables, MESH).check()
    assert plan.paths == ("params/bias", "params/kernel")
    assert plan.specs["params"]["kernel"] == P("data", "model")


def test_parameters_of_haiku_are_planned_by_their_module_names() -> None:
    struct = jax.ShapeDtypeStruct
    params: Any = {
        "mlp/~/linear_0": {"w": struct((8, 16), jnp.float32), "b": struct((16,), jnp.float32)},
        "mlp/~/linear_1": {"w": struct((16, 8), jnp.float32), "b": struct((8,), jnp.float32)},
    }
    rule = sr.RegexShardingRule([(r"linear_0/w$", P(None, "model")), (r"linear_\d+/b$", P())], unmatched="error")
    with pytest.raises(sr.errors.PlanError, match="mlp/~/linear_1/w"):
        rule.plan(params, MESH).check()
    plan = (sr.DimShardingRule("model", 0)).plan(params, MESH).check()
    assert plan.decision("mlp/~/linear_1/w").spec == P("model", None)
    state = optax.adam(1e-3).init(params)
    assert plan.mirror(state).check().decision("0/mu/mlp/~/linear_0/w").spec == P("model", None)
