"""Paths and kinds of leaves, against JAX's own walk."""

import collections
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.tree import spread, survey
from tests import zoo

TREES = zoo.TREES


@pytest.mark.parametrize("name", TREES)
def test_paths_are_those_of_jax(name: str) -> None:
    tree = TREES[name]()
    pairs = jtu.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, nn.Partitioned | nnx.Variable))[0]
    assert sr.leaf_paths(tree) == tuple(jtu.keystr(path, simple=True, separator="/") for path, _ in pairs)


@pytest.mark.sample(50)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("reads", ["no", "width", "value"])
def test_what_is_grouped_is_alike_and_keeps_its_place(name: str, reads: Any) -> None:
    tree = TREES[name]()
    tree_survey = survey(tree, None, reads_index=reads)
    each = survey(tree, None, reads_index="value")
    assert tree_survey.paths() == each.paths()
    assert len(tree_survey.kind_of) == len(each.kind_of)
    for kind, other_kind in zip(tree_survey.kind_of, each.kind_of, strict=True):
        assert (kind < 0) == (other_kind < 0)
        if kind >= 0:
            leaf, other_leaf = tree_survey.kinds[kind], each.kinds[other_kind]
            assert (leaf.shape, leaf.dtype, leaf.axes) == (other_leaf.shape, other_leaf.dtype, other_leaf.axes)
    rebuilt = tree_survey.unflatten(list(range(len(tree_survey.kinds))), "number")
    assert jtu.tree_structure(rebuilt) == tree_survey.treedef


class Moments(NamedTuple):
    mu: Any
    nu: Any


@pytest.mark.parametrize(
    ("tree", "by_name", "by_position"),
    [
        (Moments(np.ones(2), {"w": np.ones(2)}), ("mu", "nu/w"), ("0", "1/w")),
        ([np.ones(1), (np.ones(1),)], ("0", "1/0"), ("0", "1/0")),
        ({2: np.ones(1), 10: np.ones(1)}, ("2", "10"), ("2", "10")),
        ({"b": np.ones(1), "a": None}, ("b",), ("b",)),
        (collections.OrderedDict(b=np.ones(1), a=np.ones(1)), ("b", "a"), ("b", "a")),
        (np.ones(1), ("",), ("",)),
        ({}, (), ()),
        (None, (), ()),
    ],
    ids=str,
)
def test_both_styles_of_paths(tree: Any, by_name: tuple[str, ...], by_position: tuple[str, ...]) -> None:
    assert sr.leaf_paths(tree) == by_name
    assert sr.leaf_paths(tree, "index") == by_position


def test_the_fields_of_an_optimizer_state_have_their_names() -> None:
    state = jax.eval_shape(optax.adam(1e-3).init, {"w": np.ones((4, 4))})
    assert sr.leaf_paths(state) == ("0/count", "0/mu/w", "0/nu/w")
    assert sr.leaf_paths(state, "index") == ("0/0", "0/1/w", "0/2/w")


def test_a_tied_weight_is_one_leaf() -> None:
    plan = sr.ReplicateShardingRule().plan(zoo.Tied(), sr.mesh_shape("data:2"))
    assert plan.paths == ("shared/pytree/0/weight",)
    assert plan.memory().total_bytes == 16 * 8 * 4


def test_state_of_equinox_keeps_its_markers_apart_from_its_arrays() -> None:
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")
    plan = sr.ReplicateShardingRule().plan((model, state), sr.mesh_shape("data:2"))
    assert len(plan.paths) == len(jax.tree.leaves(eqx.filter((model, state), eqx.is_array)))


def test_boxes_carry_their_names() -> None:
    tree = {"w": nn.Partitioned(np.ones((4, 8)), names=("embed", "mlp")), "b": np.ones(8)}
    (plain, boxed) = survey(tree, None).kinds
    assert (boxed.path, boxed.shape, boxed.axes) == ("w", (4, 8), ("embed", "mlp"))
    assert (plain.path, plain.axes) == ("b", None)


def test_layers_that_are_equal_are_one_kind_and_those_that_differ_are_not() -> None:
    layers = [{"w": np.ones((8, 4))} for _ in range(11)]
    layers[4] = {"w": np.ones((8, 5))}
    assert len(survey({"layers": layers}, None, reads_index="no").kinds) == 2
    assert len(survey({"layers": layers}, None, reads_index="width").kinds) == 3
    assert len(survey({"layers": layers}, None).kinds) == 11


def test_tracers_have_shapes_too() -> None:
    seen = []

    @jax.jit
    def step(tree: Any) -> Any:
        seen.append(sr.FSDPShardingRule("data", 0).plan(tree, sr.mesh_shape("data:4")).specs)
        return tree

    tree = {"w": jnp.ones((8, 6)), "b": [jnp.ones(4)]}
    step(tree)
    assert seen == [sr.FSDPShardingRule("data", 0).plan(tree, sr.mesh_shape("data:4")).specs]


def test_a_deep_tree_is_walked() -> None:
    tree: Any = np.ones(2)
    for _ in range(350):
        tree = {"a": [tree]}
    assert sr.leaf_paths(tree)[0].count("/") == 699
    assert sr.ReplicateShardingRule().plan(tree).check().paths == sr.leaf_paths(tree)


def test_a_node_without_keys_counts_its_children() -> None:
    @jtu.register_pytree_node_class
    class Bare:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
            return self.parts, None

        @classmethod
        def tree_unflatten(cls, aux: None, parts: tuple[Any, ...]) -> "Bare":
            return cls(*parts)

    assert sr.leaf_paths({"x": Bare(np.ones(1), {"w": np.ones(1)})}) == ("x/0", "x/1/w")


@pytest.mark.parametrize("style", ["atr", "", None])
def test_a_style_of_paths_that_there_is_not(style: Any) -> None:
    with pytest.raises(sr.errors.ConfigError, match="path_style must be one of 'attr', 'index'; got"):
        sr.ReplicateShardingRule().plan({"w": np.ones(2)}, path_style=style)
    with pytest.raises(sr.errors.ConfigError, match="path_style must be one of"):
        sr.leaf_paths({"w": np.ones(2)}, style)


def test_of_boxes_in_boxes_the_innermost_names_count() -> None:
    inner = nn.Partitioned(np.ones((4, 8)), names=("a", "b"))
    assert survey({"w": nn.Partitioned(inner, names=("c", "d"))}, None).kinds[0].axes == ("a", "b")


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"": {"w": np.ones((8, 8))}, "w": np.ones((4, 4))}, "w"),
        ({"": {"w": np.ones((8, 8))}, "w": np.ones((8, 8))}, "w"),
        ({"a": {"": {"": np.ones(4)}, "/": np.ones(4)}}, "a//"),
    ],
    ids=str,
)
def test_keys_without_a_text_do_not_hide_that_paths_are_equal(tree: Any, path: str) -> None:
    plan = sr.DimShardingRule("data", 0).plan(tree, sr.mesh_shape("data:4"))
    assert [(finding.code, finding.path) for finding in plan.findings if finding.severity == "error"] == [
        ("ambiguous-path", path)
    ]
    assert "a key has a slash or is empty" in plan.findings[0].message
    assert sr.DimShardingRule("data", 0).plan({"": np.ones(4)}, sr.mesh_shape("data:4")).check().paths == ("",)


# ---- the mesh that arrays are on ----


def test_every_array_is_asked_for_its_mesh() -> None:
    wide, long = sr.create_mesh("data:4,model:2"), sr.create_mesh("x:8")

    def on(mesh: jax.sharding.Mesh) -> jax.Array:
        return jax.device_put(
            np.ones((8, 8), np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )

    def mesh_for(*arrays: Any) -> Any:
        return sr.ReplicateShardingRule().plan(list(arrays)).mesh

    plain = np.ones((8, 8), np.float32)
    assert mesh_for(plain, on(wide)) == wide
    assert mesh_for(jnp.asarray(plain), on(wide), 3, jax.nn.relu) == wide
    assert mesh_for(jax.ShapeDtypeStruct((8, 8), jnp.float32), on(wide), on(wide)) == wide
    assert mesh_for(nn.Partitioned(plain, ("a", "b")), nn.Partitioned(on(wide), ("a", "b"))) == wide  # pyright: ignore[reportArgumentType]
    assert mesh_for(on(wide), on(long)) is None
    with jax.set_mesh(long):
        assert mesh_for(plain, on(wide)) == wide
        assert mesh_for(on(wide), on(long)) == long
        assert mesh_for(plain) == long


# ---- arrays that JAX cannot hold ----


class Labelled(eqx.Module):
    w: np.ndarray
    labels: np.ndarray


FOREIGN: dict[str, Any] = {
    "text": np.array(["cat", "dog"]),
    "bytes": np.array([b"cat"]),
    "objects": np.array([object(), None]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "spans": np.array([1], "timedelta64[s]"),
    "records": np.zeros(3, [("a", "i4"), ("b", "f4")]),
    "raw": np.zeros(3, "V8"),
    "float0": np.zeros((8, 4), jax.dtypes.float0),
    "struct": jax.ShapeDtypeStruct((8, 4), jax.dtypes.float0),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_arrays_that_jax_cannot_hold_are_carried_through(name: str) -> None:
    model = Labelled(np.ones((8, 4), np.float32), FOREIGN[name])
    plan = sr.DimShardingRule("data", 0).plan(model, sr.mesh_shape("data:4"))
    assert (plan.paths, plan.memory().total_bytes) == (("w",), 128)
    assert plan.specs.labels is FOREIGN[name]
    assert "(8, 4)" in str(plan)
    assert sr.ShardingPlan.from_json(plan.to_json(), model).specs.labels is FOREIGN[name]
    mirrored = plan.mirror({"grads": model})
    assert mirrored.specs["grads"].w == plan.specs.w
    assert str(mirrored).count("(8, 4)") == 1


def test_gradients_of_integers_are_mirrored() -> None:
    params = {"w": np.ones((8, 4), np.float32), "n": np.ones(8, np.int32)}
    grads = jax.grad(lambda tree: jnp.sum(tree["w"]) * jnp.sum(tree["n"]), allow_int=True)(params)
    plan = sr.DimShardingRule("data", 0).plan(params, sr.mesh_shape("data:4"))
    assert plan.mirror(grads).check().paths == ("w",)


def test_what_is_not_json_or_numbers_stays_in_the_specs() -> None:
    carried = {"w": np.ones(8), **FOREIGN}
    specs = sr.DimShardingRule("data", 0).plan(carried, sr.mesh_shape("data:4")).specs
    assert sr.SpecTreeShardingRule(specs).plan(carried, sr.mesh_shape("data:4")).specs == specs


def is_spec(node: Any) -> bool:
    return node is None or isinstance(node, P)


def test_what_is_said_of_a_prefix_is_said_of_each_leaf_below() -> None:
    tree_of_two = {"a": [1, (2, 3)], "b": 4}
    assert spread({"a": P("x"), "b": None}, tree_of_two, is_spec, "me") == [P("x"), P("x"), P("x"), None]
    assert spread(P("x"), tree_of_two, is_spec, "me") == [P("x")] * 4
    assert spread({"a": [P("x"), P("y")], "b": P()}, tree_of_two, is_spec, "me") == [P("x"), P("y"), P("y"), P()]


def test_what_is_no_prefix_is_refused() -> None:
    with pytest.raises(
        sr.errors.TreeError, match="me: the values do not have the structure of the tree, or of a prefix"
    ):
        spread({"a": P(), "c": P()}, {"a": 1, "b": 2}, is_spec, "me")
