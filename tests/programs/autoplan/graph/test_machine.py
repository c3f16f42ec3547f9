"""Meshes as the planner sees them: groups of axes, and what collectives over them cost."""

import itertools
import math

import attrs
import numpy as np
import pytest

import shardrules as sr
from shardrules.programs.autoplan.graph.machine import COLLECTIVE_KINDS, Machine, _host_count, hardware_of, has_sheet
from shardrules.programs.costs.collective import Group, collective_cost
from shardrules.programs.machine.hardware import Hardware
from tests.programs.examples import CUDA, TPU, mesh_on

H100 = sr.Hardware.named("cuda:h100")
PEAKS = attrs.evolve(
    H100, link_fractions=1.0, network_fraction=1.0, collective_times=(), collective_launch_seconds=0.0, torus_dims=0
)
"""The peaks of an H100, as if programs reached them."""


def machine(axes: str, sheet: Hardware = PEAKS) -> Machine:
    return Machine.of(sr.mesh_shape(axes), sheet)


def test_axes_of_one_device_are_left_out() -> None:
    plan = machine("a:1,b:4,c:1,d:2")
    assert (plan.axes, plan.sizes) == (("b", "d"), (4, 2))


def test_one_device_has_no_axes_and_no_costs() -> None:
    plan = machine("a:1")
    assert (plan.axes, plan.sizes) == ((), ())
    assert all(rates.per_byte.tolist() == rates.fixed.tolist() == [0.0] for rates in plan.rates.values())


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_a_byte_within_a_host_costs_what_links_do(kind: str) -> None:
    rates = machine("data:4,model:2").rates[kind]
    assert rates.per_byte.shape == rates.fixed.shape == (4,)
    assert rates.per_byte[0] == rates.fixed[0] == 0
    np.testing.assert_allclose(rates.per_byte[1:], 1 / PEAKS.link_bytes_per_second, rtol=0.2)
    assert (rates.fixed[1:] > 0).all()


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_a_byte_between_hosts_costs_more(kind: str) -> None:
    """The first axis crosses hosts of eight, the last does not."""
    rates = machine("data:4,model:8").rates[kind]
    data, model, both = rates.per_byte[1:]
    assert data > model
    assert both > model
    assert data == pytest.approx(1 / H100.network_bytes_per_second, rel=0.1)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("axes", ["data:8", "data:4", "data:16,model:4"])
def test_collectives_cost_what_an_audit_says(kind: str, axes: str) -> None:
    """At any size far from where tables bend, since the planner's costs are linear in the bytes."""
    plan = machine(axes, H100)
    for mask, group in ((1, Group(plan.sizes[0], max(1, plan.mesh.size // 8))), (0, Group(1))):
        for nbytes in (0, 10**8):
            modelled = plan.rates[kind].fixed[mask] + nbytes * plan.rates[kind].per_byte[mask]
            assert modelled == pytest.approx(collective_cost(kind, nbytes, group, H100).seconds)


def test_faster_links_make_collectives_cheaper() -> None:
    slow = attrs.evolve(PEAKS, link_bytes_per_second=PEAKS.link_bytes_per_second / 2)
    ratio = machine("x:8", slow).rates["all-gather"].per_byte[1] / machine("x:8").rates["all-gather"].per_byte[1]
    assert ratio == pytest.approx(2, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "sheet"), [(CUDA, "cuda:h100"), (TPU, "tpu:v5e")])
def test_devices_of_targets_have_their_sheet(target: str, sheet: str) -> None:
    mesh = mesh_on(target, "data:4,model:2")
    assert has_sheet(mesh)
    assert hardware_of(mesh) == sr.Hardware.named(sheet)


def test_meshes_without_devices_are_planned_for_h100s() -> None:
    mesh = sr.mesh_shape("data:8")
    assert not has_sheet(mesh)
    assert hardware_of(mesh) == sr.Hardware.named("cuda:h100")
    assert has_sheet(sr.create_mesh("data:8"))
    assert hardware_of(sr.create_mesh("data:8")) == sr.Hardware.named("cpu")


@pytest.mark.slow
def test_an_axis_of_a_torus_has_links_along_its_dims() -> None:
    """On 4 × 2 chips `data` is folded along both dims of the torus, and `model` is along one."""
    mesh = mesh_on(TPU, "data:4,model:2")
    groups = mesh.devices[:, 0], mesh.devices[0], mesh.devices.ravel()
    dims = [sum(len({device.coords[dim] for device in group}) > 1 for dim in range(2)) for group in groups]
    assert dims == [2, 1, 2]
    whole, half = Machine.of(mesh).rates["all-gather"].per_byte[1:3]
    assert half == pytest.approx(2 * whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_what_spans_a_cube_of_a_torus_costs_an_all_reduce(kind: str) -> None:
    """`data` spans two dims of the cube, both axes three."""
    rates = Machine.of(mesh_on("tpu:v5p:4x4x4", "data:16,model:4")).rates
    plane, cube = rates[kind].per_byte[[1, 3]]
    reduced_plane, reduced_cube = rates["all-reduce"].per_byte[[1, 3]]
    assert cube == pytest.approx(2 * reduced_cube)
    assert plane < 1.5 * reduced_plane


def test_latency_grows_with_the_group() -> None:
    pair, inside, across = machine("a:2", H100), machine("a:8", H100), machine("a:64", H100)
    for kind in ("all-gather", "all-reduce"):
        fixed = [plan.rates[kind].fixed[1] for plan in (pair, inside, across)]
        assert fixed == sorted(fixed)
        assert fixed[2] > fixed[1] + H100.network_latency_seconds / 10


def test_hosts_of_clusters_that_no_hosts_divide_are_counted_at_once() -> None:
    assert _host_count({"data": 10**9 + 7}, ("data",), 8) == 125_000_001
    assert _host_count({"data": 10**9 + 7, "model": 3}, ("data",), 8) == 375_000_003


def test_hosts_of_groups_are_as_by_counting() -> None:
    for sizes in itertools.product((1, 2, 3, 4, 7, 12), repeat=3):
        by_name = dict(zip("abc", sizes, strict=True))
        for axes in ((), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")):
            index = tuple(slice(None) if axis in axes else 0 for axis in by_name)
            positions = np.arange(math.prod(sizes)).reshape(sizes)[index].ravel()
            for per_host in (1, 3, 8):
                assert _host_count(by_name, axes, per_host) == len(np.unique(positions // per_host))
