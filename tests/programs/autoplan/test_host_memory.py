"""Arrays that a function keeps in the memory of hosts: planned, but not counted as memory of devices."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import shardrules as sr
from shardrules.core.axes import mesh_sizes
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.programs.autoplan.run.rewrite import chosen_layouts, with_layouts
from shardrules.programs.autoplan.solve.proof import memory_bound
from shardrules.programs.compilers.compiler import GpuCompiler
from shardrules.programs.compilers.fusion import FusedProgram
from shardrules.programs.jaxprs.walk import equations
from shardrules.programs.traced.program import changes_memory, is_on_host, read_jaxpr

SHAPE = jax.ShapeDtypeStruct
WIDTH, ROWS, LAYERS = 256, 4096, 4


def loss(policy: Any) -> Any:
    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    def kept_layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return layer(checkpoint_name(x, "input"), w)

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jax.checkpoint(kept_layer, policy=policy, prevent_cse=False)(x, w), None

    return lambda w, x: jnp.sum(jax.lax.scan(body, x, w)[0])


def on_host(*names: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


H100 = sr.Hardware.named("cuda:h100")


def planned(policy: Any, hardware: sr.Hardware = H100) -> AutoPlan:
    args = SHAPE((LAYERS, WIDTH, WIDTH), jnp.bfloat16), SHAPE((ROWS, WIDTH), jnp.bfloat16)
    return sr.autoplan(jax.grad(loss(policy)), *args, mesh=sr.mesh_shape("data:8"), hardware=hardware)


@pytest.fixture(scope="module")
def plans() -> tuple[AutoPlan, AutoPlan]:
    return planned(on_host("input")), planned(jax.checkpoint_policies.save_only_these_names("input"))


def test_the_memory_of_hosts_is_not_that_of_devices(plans: tuple[AutoPlan, AutoPlan]) -> None:
    offloaded, kept = plans
    assert offloaded.peak_bytes < kept.peak_bytes


def test_sending_to_hosts_takes_the_time_of_their_link(plans: tuple[AutoPlan, AutoPlan]) -> None:
    slower = attrs.evolve(H100, host_link_bytes_per_second=H100.host_link_bytes_per_second / 2)
    nbytes = 2 * LAYERS * ROWS * WIDTH * 2 / 8  # there and back, of bfloat16, in eight pieces
    exposed = (1 - sr.Assumptions().hidden) * nbytes / H100.host_link_bytes_per_second
    assert planned(on_host("input"), slower).cost - plans[0].cost == pytest.approx(exposed, rel=1e-6)


def test_constraints_leave_arrays_on_hosts(plans: tuple[AutoPlan, AutoPlan]) -> None:
    plan, _ = plans
    layouts = chosen_layouts(plan.task.problem, plan.choice)
    changed = with_layouts(plan.call.jaxpr, layouts, sr.mesh_shape("data:8"))
    constraints = [each for each in equations(changed) if each.primitive.name == "sharding_constraint"]
    assert constraints
    assert not any(is_on_host(var.aval) for each in constraints for var in (*each.invars, *each.outvars))


def test_a_move_between_memories_is_a_copy_and_not_a_view() -> None:
    def there_and_back(x: jax.Array) -> jax.Array:
        host = jax.device_put(x, jax.memory.Space.Host)
        return jax.device_put(host, jax.memory.Space.Device) * 2

    program = read_jaxpr(jax.make_jaxpr(there_and_back)(SHAPE((ROWS, WIDTH), jnp.bfloat16)))
    first, second = (operation for operation in program.operations if operation.name == "device_put")
    assert changes_memory(first)
    assert changes_memory(second)
    fusion = FusedProgram.of(program, GpuCompiler())
    assert [program.arrays[operation.results[0]].device_bytes for operation in (first, second)] == [0, ROWS * WIDTH * 2]
    assert second.results[0] not in fusion.sources


def test_arguments_on_hosts_take_no_memory_of_devices() -> None:
    mesh = sr.mesh_shape("data:8")
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    shape = SHAPE((ROWS, WIDTH), jnp.float32)

    def step(moment: jax.Array, x: jax.Array) -> jax.Array:
        new = jax.device_put(moment, jax.memory.Space.Device) * 0.9 + x
        return jax.device_put(new, jax.memory.Space.Host)

    on_hosts = sr.autoplan(step, shape.update(sharding=sharding), shape, mesh=mesh, hardware=H100)
    on_devices = sr.autoplan(lambda moment, x: moment * 0.9 + x, shape, shape, mesh=mesh, hardware=H100)
    nbytes = ROWS * WIDTH * 4 // 8
    traffic = on_hosts.host_traffic
    assert (traffic.argument_bytes, traffic.kept_bytes, traffic.exchanged_bytes) == (nbytes, 0, 2 * nbytes)
    assert on_hosts.peak_bytes < on_devices.peak_bytes - 0.9 * nbytes
    assert least_bytes(on_hosts) == least_bytes(on_devices) - nbytes
    assert on_hosts.step_time.copy_seconds == pytest.approx(traffic.exposed_seconds)
    assert on_devices.step_time.copy_seconds == 0
    assert "and 512.0 KiB of the host" in str(on_hosts)
    assert "of the host" not in str(on_devices)
    assert on_devices.diff(on_hosts).host_bytes == (0, nbytes)
    assert "host 0 B -> 512.0 KiB" in str(on_devices.diff(on_hosts))


def least_bytes(plan: AutoPlan) -> int:
    problem = plan.task.problem
    machine = problem.machine
    return memory_bound(problem.program, mesh_sizes(machine.mesh), machine.hardware, plan.call.paths, {}).nbytes


def test_functions_move_arguments_from_hosts() -> None:
    mesh = sr.mesh_shape("data:8")
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    on_host = shape.update(sharding=NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host"))
    with pytest.raises(sr.errors.PlanError, match=r"state/0\b.* is in the memory of the host") as caught:
        sr.autoplan(lambda state, x: state[0] * 0.9 + state[1] + x, (on_host, shape), shape, mesh=mesh, hardware=H100)
    assert "state/1" not in str(caught.value)
    assert "jax.device_put(x, jax.memory.Space.Device)" in str(caught.value)


def test_functions_run_with_arguments_on_hosts() -> None:
    def step(moment: jax.Array, x: jax.Array) -> jax.Array:
        new = jax.device_put(moment, jax.memory.Space.Device) + x
        return jax.device_put(new, jax.memory.Space.Host)

    mesh = sr.create_mesh("data:8")
    on_devices = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("data")))
    moment = jax.device_put(on_devices, on_devices.sharding.with_memory_kind("pinned_host"))
    plan = sr.autoplan(step, moment, on_devices, mesh=mesh)
    run = plan.jit(step, donate_argnums=0)
    for argument in (moment, jax.device_put(on_devices, NamedSharding(mesh, plan.specs[0]))):
        result = run(argument, on_devices)
        assert result.sharding.memory_kind == "pinned_host"
        assert (jax.device_get(result) == 2 * jnp.arange(64.0).reshape(8, 8)).all()
