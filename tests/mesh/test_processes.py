"""Real processes over loopback: two of four devices, and four of two. Where only timing matters, threads are used."""

import threading
import time
from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import pytest

import shardrules as sr
from tests.mesh.cluster import Ended, run_processes

SHAPES = pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])


def printed_lines(ended: list[Ended]) -> list[list[str]]:
    """The lines that each process printed; all must have succeeded."""
    assert [child.code for child in ended] == [0] * len(ended), "\n".join(child.out + child.err for child in ended)
    return [child.out.splitlines() for child in ended]


@pytest.mark.sample(1)
@SHAPES
def test_meshes_plans_arrays_and_barriers_over_processes(processes: int, devices: int) -> None:
    lines = printed_lines(
        run_processes(
            """
            mesh = sr.create_mesh("data:4,model:2")
            owners = [[device.process_index for device in row] for row in mesh.devices]
            print(owners)
            print(sr.meshes.calculate_host_mesh_shape((4, 2)))
            tree = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32), "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
            rule = sr.DimShardingRule("data", 0, ignore_ndim_error=True) | sr.FSDPShardingRule("model", 0)
            plan = sr.check_same_plan(rule.plan(tree, mesh).check(), timeout=60)
            print(plan.fingerprint)
            whole = np.arange(128, dtype=np.float32).reshape(16, 8)
            array = jax.make_array_from_callback((16, 8), plan.shardings(mesh)["w"], lambda index: whole[index])
            print(float(jax.jit(jnp.sum)(array)), [shard.data.shape for shard in array.addressable_shards][0])
            outer = sr.create_mesh("a:2,b:4", dcn_mesh_dims=(1, -1))
            print(dict(outer.shape), [device.process_index for device in outer.devices[0]])
            sr.barrier_sync(timeout=60, name="done")
            print(sr.meshes.is_primary())
            """,
            processes=processes,
            devices=devices,
        )
    )
    rows = 4 // processes
    assert lines[0][0] == str([[process] * 2 for process in range(processes) for _ in range(rows)])
    assert lines[0][1] == str((rows, 2))
    assert lines[0][3] == f"{float(sum(range(128)))} (4, 4)"
    along = [process for process in range(processes) for _ in range(4 // processes)]
    assert lines[0][4] == f"{{'a': 2, 'b': 4}} {along}"
    assert [printed[:5] for printed in lines] == [lines[0][:5]] * processes
    assert [printed[5] for printed in lines] == ["True", *["False"] * (processes - 1)]


@pytest.mark.slow
def test_a_missing_process_is_named_after_the_timeout() -> None:
    ended = run_processes(
        """
        sr.barrier_sync(timeout=30, name="start")
        if process == 1:
            time.sleep(8)
            os._exit(0)
        start = time.monotonic()
        try:
            sr.barrier_sync(timeout=2, name="checkpoint written")
        except sr.errors.BarrierTimeoutError as error:
            print(isinstance(error, TimeoutError), 2 <= round(time.monotonic() - start, 1) <= 6)
            print(error, flush=True)
        time.sleep(8)  # the service runs in this process, and the other one needs it
        os._exit(0)
        """,
        processes=2,
        devices=1,
    )
    first, *rest = ended[0].out.splitlines()
    assert first == "True True", ended[0].out + ended[0].err
    assert rest == [
        "barrier 'checkpoint written': not all processes arrived within 2 s:",
        "  process 0: gave up at 'checkpoint written' (<string>:8) after 2 s",
        "  process 1: past 'start' (<string>:2)",
    ]


@final
@attrs.define
class Store:
    """The store of `jax.distributed`, in memory."""

    texts: dict[str, str] = attrs.field(factory=dict)
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.texts and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.texts[key] = value
            self.changed.notify_all()

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.changed:
            return [(name, text) for name, text in self.texts.items() if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            for name, _ in self.key_value_dir_get(f"{key}/"):
                del self.texts[name]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.texts, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.texts[key]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Runs each list of barriers as a process, a tuple of lists as threads of one; returns what each call did."""
    store = Store()
    count = 0
    monkeypatch.setattr("shardrules.mesh.processes.coordination_client", lambda: store)
    monkeypatch.setattr("shardrules.mesh.processes.process_id", lambda: int(threading.current_thread().name))
    monkeypatch.setattr("shardrules.mesh.processes.process_count", lambda: count)

    def run(*ways: list[tuple[float, str, float]] | tuple[list[tuple[float, str, float]], ...]) -> list[list[str]]:
        nonlocal count
        count = len(ways)
        outcomes: list[list[str]] = [[] for _ in ways]

        def go(process: int, calls: list[tuple[float, str, float]]) -> None:
            for start, name, timeout in calls:
                time.sleep(max(begin + start - time.monotonic(), 0))
                try:
                    sr.barrier_sync(timeout, name=name)
                    outcomes[process].append("met")
                except sr.errors.ShardRulesError as error:
                    outcomes[process].append(f"{type(error).__name__} {error}")

        begin = time.monotonic()
        workers = [
            threading.Thread(target=go, args=(process, calls), name=str(process))
            for process, way in enumerate(ways)
            for calls in (way if isinstance(way, tuple) else (way,))
        ]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        assert len([key for key in store.texts if "outcomes" in key]) <= 3  # outcomes that all have read are deleted
        return outcomes

    return run


def test_a_process_that_is_too_late_learns_who_gave_up(threads: Callable[..., list[list[str]]]) -> None:
    first, second = threads([(0, "x", 0.1)], [(0.5, "x", 0.4)])
    assert "not all processes arrived within 0.1 s" in first[0]
    assert "process 1: has not reached a barrier yet" in first[0]
    assert second[0].startswith(
        "BarrierTimeoutError barrier 'x': not all processes arrived within 0.4 s:\n  process 0: gave"
    )
    assert "process 0: gave up at 'x' (test_processes.py:" in second[0]
    assert second[0].count("after 0.1 s\n") == second[0].count("after 0.4 s") == 1


def test_processes_meet_again_after_different_barriers(
    threads: Callable[..., list[list[str]]],
) -> None:
    outcomes = threads(
        [(0, "x", 0.1), (0.2, "y", 9), (0.2, "z", 9)], [(0, "x", 9), (0, "z", 9)], [(1, "x", 9), (1, "z", 9)]
    )
    assert [len(outcome) for outcome in outcomes] == [3, 2, 2]
    for outcome in (outcomes[0][1], outcomes[1][0], outcomes[2][0]):
        assert outcome.startswith("BarrierError processes wait at different barriers:\n  process 0: waiting at 'y'")
    assert [outcome[-1] for outcome in outcomes] == ["met"] * 3


def test_processes_with_the_same_timeout_all_give_up(threads: Callable[..., list[list[str]]]) -> None:
    begin = time.monotonic()
    outcomes = threads(*[[(0.01 * process, "x", 0.3), (1.6, "y", 9)] for process in range(7)], [(1.5, "y", 9)])
    assert time.monotonic() - begin < 8
    assert [outcome[-1] for outcome in outcomes] == ["met"] * 8
    assert all("arrived within 0.3 s" in outcome[0] and "gave up at 'x'" in outcome[0] for outcome in outcomes[:-1])


def test_processes_meet_at_many_barriers_in_a_row(threads: Callable[..., list[list[str]]]) -> None:
    assert threads(*[[(0, str(index), 9) for index in range(20)]] * 5) == [["met"] * 20] * 5


def test_a_barrier_waits_for_a_late_process(threads: Callable[..., list[list[str]]]) -> None:
    begin = time.monotonic()
    assert threads([(0, "late", 9)], [(0.3, "late", 0.1)]) == [["met"], ["met"]]
    assert time.monotonic() - begin >= 0.3


def test_a_process_waits_at_one_barrier_at_a_time(threads: Callable[..., list[list[str]]]) -> None:
    first, second = [(0.0, "a", 9.0)], [(0.1, "b", 9.0)]
    both, alone = threads((first, second), [(0.3, "b", 9), (0.3, "c", 0.1)])
    assert alone[0] == "met"
    assert max(both) == "met"
    assert min(both).startswith("BarrierError barrier 'a': the others met this process waiting at 'b' (test_proc")
    assert both[0] != both[1]


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1, None, "2"])
def test_a_timeout_must_be_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(sr.errors.ConfigError, match="the timeout must be a number of seconds, 0 or more; got"):
        sr.barrier_sync(timeout)


@pytest.mark.slow
def test_different_plans_meshes_and_values_raise_in_all_processes() -> None:
    lines = printed_lines(
        run_processes(
            """
            tree = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32), "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
            rule, rows = sr.FSDPShardingRule("data", 0), sr.DimShardingRule("data", 0)
            usual, shape = sr.create_mesh("data:8"), sr.mesh_shape("data:8")
            turned = sr.create_mesh("data:8", devices=jax.devices()[::-1])
            explicit = sr.create_mesh("data:8", axis_types="explicit")
            same = rule.plan(tree, usual)
            pairs = [same, rows.plan(tree, usual)], [same, same], [same, rule.plan(tree, turned)]
            pairs += [same, rule.plan(tree, explicit)], [same, rule.plan(tree, shape)], [tree, tree], [same, tree]
            for pair in pairs:
                try:
                    print("same", sr.check_same_plan(pair[process], timeout=60) is pair[process])
                except (sr.errors.DisagreementError, sr.errors.ConfigTypeError) as error:
                    print(type(error).__name__, " ".join(str(error).split()))
            """,
            processes=2,
            devices=4,
        )
    )
    different, same, turned, explicit, abstract, trees, tree = lines[0]
    assert different.startswith("DisagreementError 2 processes have 2 different plans")
    moved = "w (16, 16) P(None, 'data') -> P('data') 128 B -> 128 B per device"
    assert f"from the plan of process 0 to the plan of process 1: {moved}" in different
    assert (same, abstract) == ("same True", "same True")
    assert turned.startswith("DisagreementError 2 processes have plans for different meshes. ")
    ids = [part for part in turned.split("the mesh has devices ") if part][1].partition("; process 0: ")
    assert ids[0].split(", ") == ids[2].split(", ")[::-1]
    assert explicit.endswith("process 1: the axes of the mesh are Explicit; process 0: Auto")
    what = "which is not a plan: check_same_plan compares what rule.plan(tree, mesh) returns"
    assert trees == f"ConfigTypeError process 0 passed a dict, process 1 passed a dict, {what}"
    assert tree == f"DisagreementError process 1 passed a dict, {what}"
    assert lines[1] == [*lines[0][:-1], tree.replace("DisagreementError", "ConfigTypeError")]


@pytest.mark.slow
def test_processes_at_different_barriers_raise_at_once() -> None:
    lines = printed_lines(
        run_processes(
            """
            start = time.monotonic()
            try:
                sr.barrier_sync(timeout=60, name="even" if process % 2 == 0 else "odd")
            except sr.errors.BarrierError as error:
                print(time.monotonic() - start < 30)
                print(error)
            sr.barrier_sync(timeout=60)  # and can meet again
            """,
            processes=3,
            devices=1,
        )
    )
    assert lines == [lines[0]] * 3
    assert lines[0][:3] == [
        "True",
        "processes wait at different barriers:",
        "  process 0: waiting at 'even' (<string>:4)",
    ]
    assert lines[0][3] == "  process 1: waiting at 'odd' (<string>:4)"


def test_a_barrier_needs_jax_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrules.mesh.processes.process_count", lambda: 2)
    with pytest.raises(sr.errors.BarrierError, match=r"2 processes, .*jax\.distributed\.initialize") as caught:
        sr.barrier_sync(name="lonely")
    assert isinstance(caught.value, RuntimeError)


def test_a_single_process_does_not_wait() -> None:
    sr.barrier_sync()
    sr.barrier_sync(0, name="any")
    assert sr.meshes.is_primary()
    plan = sr.ReplicateShardingRule().plan({})
    assert sr.check_same_plan(plan) is plan
    with pytest.raises(sr.errors.ConfigTypeError, match="process 0 passed a dict, which is not a plan"):
        sr.check_same_plan({})  # pyright: ignore[reportArgumentType]
