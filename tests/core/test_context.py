"""Which mesh is in force, in the order in which one is looked for."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = "data:4,model:2"


def legacy(mesh: Mesh) -> AbstractContextManager[object]:
    return mesh


CONTEXTS: dict[str, Callable[[Mesh], AbstractContextManager[object]]] = {
    "set_mesh": jax.set_mesh,
    "abstract": lambda mesh: jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    "legacy": legacy,
}


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.parametrize("kind", CONTEXTS)
def test_every_way_to_set_a_mesh_is_seen(kind: str) -> None:
    mesh = sr.create_mesh(MESH)
    with CONTEXTS[kind](mesh):
        current = sr.meshes.current_mesh()
        assert current == (mesh.abstract_mesh if kind == "abstract" else mesh)
        assert sr.meshes.get_incontext_mesh() == current
        assert sr.meshes.names_in_current_mesh("data", "model")
        assert not sr.meshes.names_in_current_mesh("data", "expert")
        assert sr.meshes.get_axes_size_in_mesh(("data", "model")) == 8
        assert sr.meshes.get_mesh_axis_names() == ["data", "model"]
        assert sr.FSDPShardingRule("data", 0).plan({"w": np.ones((8, 6))}).specs == {"w": P("data", None)}
    assert sr.meshes.current_mesh() is None


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
def test_set_mesh_comes_before_a_legacy_one() -> None:
    with sr.create_mesh("old:8"), jax.set_mesh(sr.create_mesh("new:8")):
        assert sr.meshes.get_mesh_axis_names() == ["new"]


def test_an_abstract_mesh_of_another_shape_comes_before_the_devices_that_are_set() -> None:
    mesh, other = sr.create_mesh("a:8"), sr.create_mesh("b:4,c:2")
    typed = sr.create_mesh("a:8", axis_types="explicit")
    with jax.set_mesh(mesh):
        for inner in (other, typed):
            with jax.sharding.use_abstract_mesh(inner.abstract_mesh):
                assert sr.meshes.current_mesh() == inner.abstract_mesh
        with jax.sharding.use_abstract_mesh(sr.mesh_shape("a:8")):
            assert sr.meshes.current_mesh() is mesh
        assert sr.meshes.current_mesh() is mesh


def test_inside_shard_map_the_mesh_is_the_mapped_one() -> None:
    seen = []
    with jax.set_mesh(sr.create_mesh("a:8")):
        jax.shard_map(lambda x: seen.append(sr.meshes.current_mesh()) or x, in_specs=P("a"), out_specs=P("a"))(
            np.ones(8)
        )
    assert isinstance(seen[0], AbstractMesh)
    assert seen[0].axis_types == (AxisType.Manual,)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_inside_jit_the_shape_is_seen(types: AxisType) -> None:
    seen = []
    with jax.set_mesh(sr.create_mesh(MESH, axis_types=types)):
        jax.jit(lambda x: seen.append(sr.meshes.current_mesh()) or x)(np.ones(8))
    assert isinstance(seen[0], AbstractMesh)
    assert dict(seen[0].shape) == {"data": 4, "model": 2}


def test_without_a_mesh() -> None:
    assert sr.meshes.current_mesh() is None
    assert sr.meshes.get_incontext_mesh(raise_error=False).empty
    assert sr.meshes.names_in_current_mesh()
    assert not sr.meshes.names_in_current_mesh("data")
    with pytest.raises(sr.errors.NoMeshError, match=r"No mesh found .*jax\.set_mesh"):
        sr.meshes.get_incontext_mesh()


def placed(mesh: Mesh, **specs: P) -> dict[str, jax.Array]:
    return {name: jax.device_put(np.ones((8, 8)), NamedSharding(mesh, spec)) for name, spec in specs.items()}


def test_an_argument_comes_first_then_the_arrays_then_what_is_set() -> None:
    rule = sr.AutoShardingRule(min_shard_size=0)
    arrays = sr.create_mesh("array:8")
    tree = {"none": np.ones((4, 4)), **placed(arrays, w=P("array"))}
    mesh = sr.mesh_shape("given:8")
    with jax.set_mesh(sr.create_mesh("set:8")):
        assert rule.plan(tree, mesh).mesh == mesh
        assert rule.plan(tree).mesh == arrays
        assert rule.plan({"w": np.ones((8, 8))}).mesh == sr.create_mesh("set:8")
    assert rule.plan(tree).specs == {"none": P(None, None), "w": P("array", None)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(arrays, P())), tree)
    assert rule.plan(shapes).mesh == arrays


def test_arrays_on_two_meshes_say_nothing() -> None:
    mesh, other = sr.create_mesh("a:8"), sr.create_mesh("b:8")
    tree = placed(mesh, x=P("a")) | {"y": jax.device_put(np.ones((4, 4)), NamedSharding(other, P()))}
    with pytest.raises(sr.errors.NoMeshError, match="this rule needs a mesh"):
        sr.AutoShardingRule().plan(tree)
