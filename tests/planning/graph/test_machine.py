"""Meshes as the planner sees them: groups of axes, and what collectives over them cost."""

import attrs
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from shardrules.analysis.machine.hardware import Hardware
from shardrules.planning.graph.machine import COLLECTIVE_KINDS, Assumptions, Machine, hardware_of, has_sheet
from tests.analysis.programs import CUDA, TPU, mesh_on

H100 = attrs.evolve(sr.Hardware.named("cuda:h100"), link_fractions=1.0, network_fraction=1.0, collective_times=())
"""Without what is reached, so that figures are those of the sheet."""
PERFECT = Assumptions(compute=1.0, memory=1.0, links=1.0, launch_seconds=0.0)


def machine(axes: str, sheet: Hardware = H100, assumptions: Assumptions = PERFECT) -> Machine:
    return Machine.of(sr.mesh_shape(axes), sheet, assumptions)


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
    np.testing.assert_allclose(rates.per_byte[1:], 1 / H100.link_bytes_per_second, rtol=1e-6)
    assert (rates.fixed[1:] > 0).all()


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_a_byte_between_hosts_costs_more(kind: str) -> None:
    """The first axis crosses hosts of eight, the last does not."""
    rates = machine("data:4,model:8").rates[kind]
    data, model, both = rates.per_byte[1:]
    assert data > model
    assert both > model
    assert data == pytest.approx(1 / H100.network_bytes_per_second, rel=0.1)


def test_assumptions_make_everything_slower() -> None:
    sure, careful = machine("x:8"), machine("x:8", assumptions=Assumptions())
    assert careful.flops_per_second(jnp.bfloat16) == sure.flops_per_second(jnp.bfloat16) / 2
    assert careful.memory_bytes_per_second == pytest.approx(0.8 * sure.memory_bytes_per_second)
    for kind in COLLECTIVE_KINDS:
        assert careful.rates[kind].per_byte[1] == pytest.approx(sure.rates[kind].per_byte[1] / 0.8)
        assert careful.rates[kind].fixed[1] == pytest.approx(sure.rates[kind].fixed[1] + 5e-6)


def test_rates_without_assumptions_are_the_sheet() -> None:
    assert machine("x:8").flops_per_second(jnp.bfloat16) == H100.flops_per_second(jnp.bfloat16)
    assert machine("x:8").memory_bytes_per_second == H100.memory_bytes_per_second
    slow = attrs.evolve(H100, link_bytes_per_second=H100.link_bytes_per_second / 2)
    ratio = machine("x:8", slow).rates["all-gather"].per_byte[1] / machine("x:8").rates["all-gather"].per_byte[1]
    assert ratio == pytest.approx(2)


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
    whole = 1 / sr.Hardware.named("tpu:v5e").link_bytes_per_second
    rates = Machine.of(mesh, assumptions=PERFECT).rates["all-gather"]
    assert rates.per_byte[1:] == pytest.approx([whole, 2 * whole, whole])


def test_latency_grows_with_doublings() -> None:
    sheet = attrs.evolve(H100, devices_per_host=8)
    inside, across = machine("a:8", sheet), machine("a:64", sheet)
    link, network = sheet.link_latency_seconds, sheet.network_latency_seconds
    for rates, steps in ((inside.rates, 3 * link), (across.rates, 3 * link + 3 * network)):
        assert rates["all-gather"].fixed[1] == pytest.approx(steps)
        assert rates["all-reduce"].fixed[1] == pytest.approx(2 * steps)
    assert inside.rates["collective-permute"].fixed[1] == link
    assert across.rates["collective-permute"].fixed[1] == network
