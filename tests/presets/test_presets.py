"""The presets: what they refuse, and in which words. For their results see the cases of the systems they come from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.presets import big_vision, eformer

MESH = sr.mesh_shape("data:4,model:2")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# ---- coming from eformer ----


def test_every_array_without_a_rule_is_listed() -> None:
    tree = {"b": f32(200, 200), "layers": [{"w": f32(200, 200), "b": f32(3)} for _ in range(11)], "step": f32()}
    with pytest.raises(ValueError, match="Partition rule not found for param") as caught:
        eformer.match_partition_rules([("b", P())], tree)
    *listed, last = str(caught.value).splitlines()
    assert listed == [f"Partition rule not found for param: layers/{number}/w" for number in range(11)]
    assert last.startswith("Add a pattern for each")


@pytest.mark.parametrize("spec", ["data", None, P(3), P("data", unreduced={"model"})], ids=repr)  # pyright: ignore[reportArgumentType]
def test_what_is_no_spec_is_refused_with_its_pattern(spec: Any) -> None:
    with pytest.raises(sr.errors.PatternError, match=r"match_partition_rules: '\.\*': .*P\(\) replicates"):
        eformer.match_partition_rules([(".*", spec)], {"w": f32(8)})


@pytest.mark.parametrize("text", ["a->data+", "a->+data", "a|->b", "|a->b", "a->b.", "a->b..c", "->b", "a->", "a", ""])
def test_a_text_with_an_empty_part_is_refused(text: str) -> None:
    with pytest.raises(sr.errors.PatternError, match="is not pattern->axis, none of it empty"):
        eformer.create_pattern_based_partition_spec(text)


def test_one_array_wants_a_mesh_and_its_axes() -> None:
    with pytest.raises(sr.errors.AxisTypeError, match="a mesh must be a Mesh or an AbstractMesh, got 'data:4'"):
        eformer.auto_partition_spec(f32(8), "data:4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        sr.errors.UnknownAxisError, match=r"the mesh \(data:4,model:2\) has no axis 'modle' \(did you mean 'model"
    ):
        eformer.auto_partition_spec(f32(8), MESH, names=["data", ("data", "modle")])


def test_axes_of_size_one_are_taken_here_and_not_by_the_rule() -> None:
    mesh = sr.mesh_shape("one:1,data:4")
    assert eformer.auto_partition_spec(f32(8, 7), mesh) == P("data", "one")
    assert sr.AutoShardingRule().plan(f32(8, 7), mesh).specs == P("data", None)


# ---- coming from big_vision ----


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a.b(1)", ("a.b", [1], {})),
        ("a.b", ("a.b", [], {})),
        ("big.vision.models(1, 'x', width=(2,))", ("big.vision.models", [1, "x"], {"width": (2,)})),
    ],
)
def test_a_name_may_have_dots(text: str, parsed: Any) -> None:
    assert big_vision.parse_name(text) == parsed


@pytest.mark.parametrize("text", ["f().b(1)", "a[0].b", "(1).real", "a.b(x)", "a.b(**{'c': 1})", "1", "a.b("])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(sr.errors.SpecError, match=r"no op|literal"):
        big_vision.parse_name(text)


def test_a_strategy_takes_the_mesh_in_force_or_asks_for_one() -> None:
    with pytest.raises(sr.errors.NoMeshError, match="infer_sharding needs a mesh: pass one"):
        big_vision.infer_sharding({"w": f32(8)}, [(".*", "replicate")])
    mesh = sr.create_mesh("data:8")
    with jax.set_mesh(mesh):
        found = big_vision.infer_sharding({"w": np.ones(8)}, [(".*", "shard_dim('data', 0)")])
    assert found["w"] == jax.sharding.NamedSharding(mesh, P("data"))
