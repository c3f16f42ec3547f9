"""The helpers that read specs and shardings off trees."""

import pickle
import re
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules.core.errors import NoMeshError, NoSpecError, ShardRulesError, SpecError
from shardrules.core.views.spec_trees import (
    extract_sharding_structure,
    extract_shardings,
    get_names_from_partition_spec,
    get_partition_spec,
    get_shardings_with_structure,
)


def mesh_of(*kinds: AxisType) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"), axis_types=kinds or (AxisType.Auto,) * 2)


def placed(spec: P, mesh: Mesh | None = None) -> jax.Array:
    return jax.device_put(np.zeros((8, 16)), NamedSharding(mesh or mesh_of(), spec))


class Block(eqx.Module):
    weight: Any
    bias: Any


@pytest.mark.parametrize("mesh", ["dp:2", 8, ("dp",)], ids=str)
def test_a_text_is_no_mesh(mesh: Any) -> None:
    with pytest.raises(TypeError, match="a mesh must be a Mesh or an AbstractMesh, got"):
        extract_shardings({"w": SimpleNamespace(sharding=P("dp"))}, mesh)


# ---- get_names_from_partition_spec ----


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        (P(("dp", "fsdp"), None, "tp"), ["dp", "fsdp", "tp"]),
        (P("tp", ("dp", "sp")), ["tp", "dp", "sp"]),
        (P(), []),
        (P(None, None), []),
        (P(P.UNCONSTRAINED, "a"), ["a"]),
        ({"a": P("dp"), "b": P(None, ("tp",))}, ["dp", "tp"]),
        ({"b": P("tp"), "a": P("dp", "tp")}, ["tp", "dp"]),
        ({"b": [P("z"), None], "a": (P("x"), {1: P("z"), "y": P(("q", "x"))})}, ["z", "x", "q"]),
        ([P("b"), (P("a"), P("b"))], ["b", "a"]),
        (("dp", None, ("tp", "dp")), ["dp", "tp"]),
        (Block(P("tp"), P("dp")), ["tp", "dp"]),
        ({"a": Block([P("tp")], None)}, ["tp"]),
        (None, []),
        ({}, []),
    ],
)
def test_names_come_once_in_order_of_appearance(tree: Any, names: list[str]) -> None:
    assert get_names_from_partition_spec(tree) == names


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4).map(lambda names: P(*names)), max_size=5))
def test_names_are_those_of_all_specs(specs: list[P]) -> None:
    names = get_names_from_partition_spec(specs)
    assert len(set(names)) == len(names)
    assert set(names) == {name for spec in specs for name in spec}
    assert names == get_names_from_partition_spec(dict(enumerate(specs)))


@pytest.mark.parametrize("leaf", [3, np.zeros(3), jax.nn.relu, object()])
def test_names_are_read_from_specs_only(leaf: Any) -> None:
    with pytest.raises(
        SpecError, match=f"get_names_from_partition_spec reads PartitionSpecs, got {type(leaf).__name__}"
    ):
        get_names_from_partition_spec({"a": P("dp"), "b": [leaf]})


# ---- get_partition_spec ----


def test_specs_of_arrays_and_numbers() -> None:
    tree = {"a": placed(P("dp", "tp")), "b": [1, 2.0, True], "c": None, "d": Block(placed(P()), np.float64(3))}
    specs = get_partition_spec(tree)
    assert specs == {"a": P("dp", "tp"), "b": [P(), P(), P()], "c": None, "d": Block(P(), P())}


def test_an_array_is_a_tree_too() -> None:
    assert get_partition_spec(placed(P(None, "tp"))) == P(None, "tp")


@pytest.mark.parametrize("leaf", [np.zeros(3), 1j, "text", jax.nn.relu, jax.ShapeDtypeStruct((3,), jnp.float32)])
def test_other_leaves_are_refused(leaf: Any) -> None:
    message = f"Unsupported leaf type for get_partition_spec: {type(leaf)} at 'a/1'. "
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        get_partition_spec({"a": [1, leaf]})
    assert isinstance(caught.value, SpecError)


def test_every_unsupported_leaf_is_listed() -> None:
    with pytest.raises(SpecError, match=r"'numpy.ndarray'> at 'a'; <class 'str'> at 'b/weight'\."):
        get_partition_spec({"a": np.zeros(3), "b": Block("x", 1)})


def test_an_array_without_a_spec_is_refused_in_a_short_message() -> None:
    tree = {"w": Block(jnp.arange(100_000.0), placed(P())), "b": jnp.zeros((2, 3), jnp.bfloat16)}
    with pytest.raises(AttributeError, match=r"'b' \(bfloat16\[2, 3\]\): SingleDeviceSharding; 'w/weight'") as caught:
        get_partition_spec(tree)
    assert isinstance(caught.value, NoSpecError)
    assert isinstance(caught.value, ShardRulesError)
    assert len(str(caught.value)) < 400
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (NoSpecError, str(caught.value))


def test_the_root_has_no_path() -> None:
    with pytest.raises(NoSpecError, match=r"the root of the tree \(float32\[3\]\)"):
        get_partition_spec(jnp.zeros(3))


def test_a_traced_array_has_a_spec_where_its_type_has() -> None:
    seen = []

    @jax.jit
    def look(x: jax.Array) -> jax.Array:
        seen.append((get_partition_spec(x), extract_sharding_structure(x).spec))
        return x

    mesh = mesh_of(AxisType.Explicit, AxisType.Explicit)
    with jax.set_mesh(mesh):
        look(placed(P("dp", "tp"), mesh))
    assert seen == [(P("dp", "tp"), P("dp", "tp"))]


def test_a_traced_array_that_the_compiler_will_place_has_none() -> None:
    seen = []

    @jax.jit
    def look(x: jax.Array) -> jax.Array:
        seen.append(extract_shardings({"x": x}))
        get_partition_spec({"x": x})
        return x

    with pytest.raises(NoSpecError, match=r"'x' \(float32\[8, 16\]\): traced, not placed yet"):
        look(placed(P("dp", "tp")))
    assert seen == [{"x": None}]


# ---- extract_shardings ----


def test_shardings_are_kept_and_specs_are_put_on_the_mesh() -> None:
    mesh = mesh_of()
    array, shape = placed(P("dp", "tp")), jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("tp")))
    tree = {"a": array, "b": SimpleNamespace(sharding=P("dp")), "c": [shape, 1, np.zeros(3), jnp.zeros(3), jax.nn.relu]}
    assert extract_shardings(tree, mesh) == {
        "a": array.sharding,
        "b": NamedSharding(mesh, P("dp")),
        "c": [shape.sharding, None, None, None, None],
    }


def test_a_mesh_is_asked_for_only_where_it_is_needed() -> None:
    array = placed(P("dp"))
    assert extract_shardings({"a": array, "b": 1}) == {"a": array.sharding, "b": None}
    with pytest.raises(NoMeshError, match=r"the sharding of 'a/0' is .*'dp'.*, which needs a mesh"):
        extract_shardings({"a": [SimpleNamespace(sharding=P("dp"))]})


def test_the_mesh_of_the_context_is_used() -> None:
    carrier = SimpleNamespace(sharding=P("dp"))
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        assert extract_shardings([carrier]) == [NamedSharding(mesh, P("dp"))]
        other = Mesh(np.array(jax.devices()[:8]), ("dp",))
        assert extract_shardings([carrier], other) == [NamedSharding(other, P("dp"))]


def test_the_shape_of_a_mesh_will_do() -> None:
    mesh = AbstractMesh((64, 64), ("dp", "tp"))
    assert extract_shardings([SimpleNamespace(sharding=P("dp"))], mesh) == [NamedSharding(mesh, P("dp"))]


def test_the_memory_kind_is_kept() -> None:
    sharding = NamedSharding(mesh_of(), P("dp"), memory_kind="pinned_host")
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    assert extract_shardings([shape])[0].memory_kind == "pinned_host"
    assert extract_sharding_structure([shape])[0].memory_kind == "pinned_host"


# ---- extract_sharding_structure ----


def test_structure() -> None:
    array = placed(P("dp", "tp"))
    tree = {"a": array, "b": jnp.zeros(3), "c": 1, "d": np.zeros(3), "e": Block(array, jax.nn.relu), "f": None}
    expected = {"a": array.sharding, "b": None, "c": None, "d": None, "e": Block(array.sharding, None), "f": None}
    assert extract_sharding_structure(tree) == expected
    assert extract_sharding_structure(SimpleNamespace(sharding=P("dp"))) is None
    assert extract_sharding_structure({}) == {}


def test_its_other_name() -> None:
    assert get_shardings_with_structure is extract_sharding_structure
