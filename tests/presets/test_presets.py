"""The presets: which arguments they refuse. Their results are tested in tests/cases, on cases of the libraries."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.presets import big_vision, eformer
from tests.zoo import f32

MESH = sr.mesh_shape("data:4,model:2")


# ---- coming from eformer ----


def test_all_arrays_without_a_rule_are_listed() -> None:
    tree = {"b": f32(200, 200), "layers": [{"w": f32(200, 200), "b": f32(3)} for _ in range(11)], "step": f32()}
    with pytest.raises(ValueError, match="Partition rule not found for param") as caught:
        eformer.match_partition_rules([("b", P())], tree)
    *listing, last = str(caught.value).splitlines()
    assert listing == [f"Partition rule not found for param: layers/{index}/w" for index in range(11)]
    assert last.startswith("Add a pattern for each")


@pytest.mark.parametrize("spec", ["data", None, P(3), P("data", unreduced={"model"})], ids=repr)  # pyright: ignore[reportArgumentType]
def test_an_invalid_spec_raises_with_its_pattern(spec: Any) -> None:
    with pytest.raises(sr.errors.PatternError, match=r"match_partition_rules: '\.\*': .*P\(\) replicates"):
        eformer.match_partition_rules([(".*", spec)], {"w": f32(8)})


@pytest.mark.parametrize("text", ["a->data+", "a->+data", "a|->b", "|a->b", "a->b.", "a->b..c", "->b", "a->", "a", ""])
def test_a_text_with_an_empty_part_raises(text: str) -> None:
    with pytest.raises(sr.errors.ConfigTypeError, match="spec: the pattern must be text, got None"):
        eformer.create_pattern_based_partition_spec(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(sr.errors.PatternError, match="is not pattern->axis with no part empty"):
        eformer.create_pattern_based_partition_spec(text)


def test_auto_partition_spec_checks_mesh_and_axes() -> None:
    with pytest.raises(sr.errors.AxisTypeError, match="a mesh must be a Mesh or an AbstractMesh, got 'data:4'"):
        eformer.auto_partition_spec(f32(8), "data:4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        sr.errors.UnknownAxisError,
        match=r"unknown axis 'modle' \(did you mean 'model'\?\); the mesh is data:4,model:2",
    ):
        eformer.auto_partition_spec(f32(8), MESH, names=["data", ("data", "modle")])


def test_axes_of_size_one_are_used_unlike_in_the_rule() -> None:
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
        ("(a.b)(1)", ("a.b", [1], {})),
        ("a . b(1)", ("a.b", [1], {})),
    ],
)
def test_a_name_may_have_dots(text: str, parsed: Any) -> None:
    assert big_vision.parse_name(text) == parsed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f().b(1)", "'f().b(1)' is not an op"),
        ("a[0].b", "'a[0].b' is not an op"),
        ("(1).real", "'(1).real' is not an op"),
        ("1", "'1' is not an op"),
        ("a.b(x)", "rule text 'a.b(x)': the arguments of a.b must be literals"),
        ("a.b(**{'c': 1})", "not **mappings"),
        ("a.b(", "invalid rule text 'a.b(' at column 4: '(' was never closed"),
        ("a.if(1)", "invalid rule text 'a.if(1)' at column 3"),
        (5, "a rule text must be a string, got 5"),
    ],
)
def test_invalid_names_raise(text: Any, message: str) -> None:
    with pytest.raises(sr.errors.ConfigError, match=re.escape(message)):
        big_vision.parse_name(text)


def test_infer_sharding_needs_a_mesh() -> None:
    with pytest.raises(sr.errors.NoMeshError, match="infer_sharding needs a mesh: pass one"):
        big_vision.infer_sharding({"w": f32(8)}, [(".*", "replicate")])
    mesh = sr.create_mesh("data:8")
    with jax.set_mesh(mesh):
        shardings = big_vision.infer_sharding({"w": np.ones(8)}, [(".*", "shard_dim('data', 0)")])
    assert shardings["w"] == jax.sharding.NamedSharding(mesh, P("data"))
