"""The meshes that a cluster may form."""

import math

import jax
import pytest

import shardrules as sr
from shardrules.core.errors import MeshError
from shardrules.programs.training.cluster import Cluster

CLUSTERS = ("cuda:h100:8", "cuda:h100:64", "cuda:h100:1024", "cuda:h100:24", "tpu:v5p:4x4x8", "tpu:v5e:16x16:2")


@pytest.mark.parametrize("name", CLUSTERS)
def test_meshes_are_whole_and_cut_no_host(name: str) -> None:
    cluster = Cluster.of(name)
    shapes = dict.fromkeys(cluster.shapes())
    for _ in range(2):
        shapes |= dict.fromkeys(near for shape in list(shapes) for near in cluster.neighbours(shape))
    for shape in shapes:
        assert math.prod(shape) == cluster.count
        assert len(shape) <= 4
        assert 1 not in shape
        # What is inside of an axis is a part of a host, or whole hosts.
        for index in range(len(shape)):
            inside = math.prod(shape[index:])
            assert inside % cluster.granule == 0 or cluster.granule % inside == 0
    assert len(shapes) > len(cluster.shapes()) >= 3


def test_first_meshes_are_few_and_hosts_stay_whole() -> None:
    shapes = Cluster.of("cuda:h100:1024").shapes()
    assert shapes == ((1024,), (512, 2), (256, 4), (128, 8), (8, 128))
    assert Cluster.of("cuda:h200:4").shapes() == ((4,), (2, 2))
    assert not Cluster.of("cuda:h100:24").allows((8, 3))
    assert Cluster.of("cuda:h100:24").allows((3, 8))


def test_a_mesh_is_the_only_one() -> None:
    mesh = sr.create_mesh("data:4,model:2")
    cluster = Cluster.of(mesh)
    assert cluster.shapes() == ((4, 2),)
    assert cluster.neighbours((4, 2)) == ()
    assert cluster.mesh_of((4, 2)) is mesh
    assert cluster.doubled() is None


def test_devices_make_meshes_of_devices() -> None:
    cluster = Cluster.of(jax.devices()[:4])
    mesh = cluster.mesh_of((2, 2))
    assert mesh == sr.create_mesh("data:2,model:2", devices=jax.devices()[:4])
    assert cluster.public_mesh(mesh) is mesh


@pytest.mark.parametrize(
    ("name", "twice", "granule"),
    [
        ("cuda:h100:8", "cuda:h100:16", 8),
        ("tpu:v5p:2x2x1", "tpu:v5p:2x2x2", 8),
        ("tpu:v5e:16x16", "tpu:v5e:16x16:2", 256),
    ],
)
def test_twice_a_cluster_has_the_same_devices(name: str, twice: str, granule: int) -> None:
    doubled = Cluster.of(name).doubled()
    assert doubled is not None
    assert (doubled.name, doubled.granule) == (twice, granule)


@pytest.mark.parametrize("name", ["cuda:h100:5", "cuda:h100:6", "cuda:h100:7", "tpu:v5e:1x1", "tpu:v5p:1x1x1"])
def test_twice_a_cluster_that_fills_no_hosts_is_none(name: str) -> None:
    assert Cluster.of(name).doubled() is None


@pytest.mark.parametrize(
    ("cluster", "message"),
    [("cpu", "does not say how many devices"), ([], "must be a target"), (8, "must be a target")],
)
def test_clusters_without_devices_are_refused(cluster: object, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Cluster.of(cluster)
