"""Real processes: two of four devices, and four of two, over loopback."""

import pytest

import shardrules as sr
from tests.mesh.cluster import Ended, run_processes

SHAPES = pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])


def told(ended: list[Ended]) -> list[list[str]]:
    """What each process printed after the mark "> "; all must have ended well."""
    assert [one.code for one in ended] == [0] * len(ended), "\n".join(one.out + one.err for one in ended)
    return [[line[2:] for line in one.out.splitlines() if line.startswith("> ")] for one in ended]


@SHAPES
def test_a_mesh_a_plan_an_array_and_a_barrier(processes: int, devices: int) -> None:
    found = told(
        run_processes(
            """
            mesh = sr.create_mesh("data:4,model:2")
            owners = [[device.process_index for device in row] for row in mesh.devices]
            print(">", owners)
            print(">", sr.calculate_host_mesh_shape((4, 2)))
            tree = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32), "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
            rule = sr.DimShardingRule("data", 0, ignore_ndim_error=True) | sr.FSDPShardingRule("model", 0)
            plan = sr.check_same_plan(rule.plan(tree, mesh).check(), timeout=60)
            print(">", plan.fingerprint)
            whole = np.arange(128, dtype=np.float32).reshape(16, 8)
            array = jax.make_array_from_callback((16, 8), plan.shardings(mesh)["w"], lambda index: whole[index])
            print(">", float(jax.jit(jnp.sum)(array)), [shard.data.shape for shard in array.addressable_shards][0])
            sr.barrier_sync(timeout=60, name="done")
            print(">", sr.is_primary())
            """,
            processes=processes,
            devices=devices,
        )
    )
    rows = 4 // processes
    assert found[0][0] == str([[process] * 2 for process in range(processes) for _ in range(rows)])
    assert found[0][1] == str((rows, 2))
    assert found[0][3] == f"{float(sum(range(128)))} (4, 4)"
    assert [lines[:4] for lines in found] == [found[0][:4]] * processes
    assert [lines[4] for lines in found] == ["True", *["False"] * (processes - 1)]


def test_the_sizes_asked_for_are_kept_however_processes_are_spread() -> None:
    found = told(
        run_processes(
            """
            for outer in ((2, 1), (1, 2), (-1, 1)):
                mesh = sr.create_mesh("a:4,b:2", dcn_mesh_dims=outer)
                print(">", dict(mesh.shape), [device.process_index for device in mesh.devices.flat])
            try:
                sr.create_mesh("a:4,b:2", dcn_mesh_dims=(3, 1))
            except sr.MeshError as error:
                print(">", error)
            """,
            processes=2,
            devices=4,
        )
    )
    assert found[0] == found[1]
    assert found[0][:3] == [
        "{'a': 4, 'b': 2} [0, 0, 0, 0, 1, 1, 1, 1]",
        "{'a': 4, 'b': 2} [0, 1, 0, 1, 0, 1, 0, 1]",
        "{'a': 4, 'b': 2} [0, 0, 0, 0, 1, 1, 1, 1]",
    ]
    assert found[0][3].endswith("On mesh a:4,b:2 over 2 processes these work: (2, 1), (1, 2)")


def test_one_that_is_late_is_waited_for() -> None:
    found = told(
        run_processes(
            """
            time.sleep(2.0 * process)
            start = time.monotonic()
            sr.barrier_sync(timeout=30)
            print(">", process, time.monotonic() - start > 1.0)
            """,
            processes=2,
            devices=1,
        )
    )
    assert found == [["0 True"], ["1 False"]]


def test_one_that_never_comes_is_named_in_the_time_asked_for() -> None:
    ended = run_processes(
        """
        sr.barrier_sync(timeout=30, name="start")
        if process == 1:
            time.sleep(8)
            os._exit(0)
        start = time.monotonic()
        try:
            sr.barrier_sync(timeout=2, name="checkpoint written")
        except sr.BarrierTimeoutError as error:
            print(isinstance(error, TimeoutError), 2 <= round(time.monotonic() - start, 1) <= 6)
            print(error, flush=True)
        time.sleep(8)  # the service lives in this process, and the other one cannot do without
        os._exit(0)
        """,
        processes=2,
        devices=1,
    )
    first, *rest = ended[0].out.splitlines()
    assert first == "True True", ended[0].out + ended[0].err
    assert rest == [
        "barrier 'checkpoint written': not all processes came within 2 s:",
        "  process 0: waiting at 'checkpoint written' (<string>:17)",
        "  process 1: past 'start' (<string>:11)",
    ]


def test_processes_at_different_barriers_are_told_at_once() -> None:
    found = told(
        run_processes(
            """
            start = time.monotonic()
            try:
                sr.barrier_sync(timeout=60, name="even" if process % 2 == 0 else "odd")
            except sr.BarrierError as error:
                print(">", time.monotonic() - start < 30)
                print("\\n".join(f"> {line}" for line in str(error).splitlines()))
            sr.barrier_sync(timeout=60)  # and can meet again
            """,
            processes=4,
            devices=1,
        )
    )
    assert found == [found[0]] * 4
    assert found[0][:3] == [
        "True",
        "processes wait at different barriers:",
        "  process 0: waiting at 'even' (<string>:13)",
    ]
    assert found[0][4] == "  process 2: waiting at 'even' (<string>:13)"
    assert found[0][5] == "  process 3: waiting at 'odd' (<string>:13)"


@SHAPES
def test_one_that_holds_another_plan_is_shown_to_all(processes: int, devices: int) -> None:
    found = told(
        run_processes(
            """
            mesh = sr.create_mesh("data:8")
            tree = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32), "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
            same = sr.FSDPShardingRule("data", 0).plan(tree, mesh)
            other = sr.DimShardingRule("data", 0).plan(tree, mesh)
            try:
                sr.check_same_plan(other if process == 1 else same, timeout=60)
            except sr.DisagreementError as error:
                print("\\n".join(f"> {line}" for line in str(error).splitlines()))
            sr.check_same_plan(same, timeout=60)
            """,
            processes=processes,
            devices=devices,
        )
    )
    assert found == [found[0]] * processes
    assert found[0][0].startswith(f"{processes} processes hold 2 different plans")
    assert found[0][1] == "from the plan of process 0 to that of process 1:"
    moved = " ".join(found[0][2].split())
    assert moved == "w (16, 16) P(None, 'data') -> P('data') 128 B -> 128 B per device"


def test_several_processes_without_a_service_cannot_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrules.mesh.processes.process_count", lambda: 2)
    with pytest.raises(sr.BarrierError, match=r"there are 2 processes .*jax\.distributed\.initialize") as caught:
        sr.barrier_sync(name="lonely")
    assert isinstance(caught.value, RuntimeError)


def test_one_process_waits_for_nobody() -> None:
    sr.barrier_sync()
    sr.barrier_sync(0, name="any")
    assert sr.is_primary()
    plan = sr.ReplicateShardingRule().plan({})
    assert sr.check_same_plan(plan) is plan
