"""By behaviour: over real processes each hands in its part of a batch, and what differs is an error on all."""

import pytest

from tests.mesh.cluster import run_processes
from tests.mesh.test_processes import SHAPES, printed_lines


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["data:4,part:2", "data:2,part:4", "data:1,part:8", "part:2,data:4"])
@SHAPES
def test_parts_make_the_whole(axes: str, processes: int, devices: int) -> None:
    lines = printed_lines(
        run_processes(
            f"""
            mesh = sr.create_mesh({axes!r})
            index, count = sr.meshes.batch_part(P("data", None), mesh)
            whole = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
            part = np.split(whole, count)[index]
            key = jax.random.split(jax.random.key(0), len(part))
            local = {{"x": part, "y": part[:, 0].astype(np.int64), "key": key, "step": 3, "one": np.float32(2)}}
            how = {{"x": P("data", None), "y": P("data"), "key": P("data"), "step": None, "one": None}}
            batch = sr.place_batch(local, how, mesh)
            assert batch["x"].sharding == NamedSharding(mesh, P("data", None)) and batch["step"] == 3
            gathered = sr.filter_gather(batch)
            np.testing.assert_array_equal(gathered["x"], whole)
            np.testing.assert_array_equal(gathered["y"], whole[:, 0])
            assert batch["y"].dtype == jnp.int32 and batch["key"].shape == (16,) and gathered["one"] == 2
            rule = sr.DimShardingRule("data", 0)
            planned = sr.place_batch({{"x": part}}, rule.plan({{"x": whole}}, mesh))
            ruled = sr.place_batch({{"x": part}}, rule, mesh)
            assert planned["x"].sharding == ruled["x"].sharding == batch["x"].sharding
            auto = sr.place_batch({{"x": whole}}, P(), mesh)
            np.testing.assert_array_equal(sr.filter_gather(auto)["x"], whole)
            local_array = sr.place_batch({{"x": jnp.asarray(part)}}, P("data"), mesh)["x"]
            np.testing.assert_array_equal(sr.filter_gather(local_array), whole)
            try:
                sr.place_batch(batch, how, mesh)
            except sr.errors.PlanError as error:
                print("it is placed over several processes already" in str(error))
            print(float(jax.jit(jnp.sum)(batch["x"])))
            """,
            processes=processes,
            devices=devices,
        )
    )
    assert lines == [["True", "1128.0"]] * processes


@pytest.mark.slow
@SHAPES
def test_uneven_parts_are_named_on_every_process(processes: int, devices: int) -> None:
    lines = printed_lines(
        run_processes(
            """
            mesh = sr.create_mesh("data:8")
            def attempt(local):
                try:
                    sr.place_batch(local, P("data"), mesh, timeout=60)
                except sr.errors.ShardRulesError as error:
                    print(type(error).__name__, "|".join(str(error).splitlines()))
            rows = 8 - process
            attempt({"x": np.ones((rows, 3)), "y": [np.ones(8)]})
            attempt({"x": np.ones(8)} if process else {"z": np.ones(8)})
            attempt({"x": np.ones(8, np.int32 if process else np.float32)})
            attempt({"x": np.ones(8)} if process else {"x": jax.ShapeDtypeStruct((8,), np.float64)})
            attempt({"x": np.ones(3)})
            sr.place_batch({"x": np.ones(8)}, P("data"), mesh)
            """,
            processes=processes,
            devices=devices,
        )
    )
    parts = ", ".join(f"process {process} has ({8 - process}, 3) float32" for process in range(processes))
    start = (
        "DisagreementError place_batch: the parts of the processes differ; drop or pad what is left over at the end:"
    )
    for process, printed in enumerate(lines):
        assert printed[0] == f"{start}|  x: {parts}"
        assert printed[1].startswith(f"{start}|  z: process 0 has (8,) float32, process 1 has none")
        assert printed[2].startswith(f"{start}|  x: process 0 has (8,) float32, process 1 has (8,) int32")
        if process:
            assert printed[3].startswith("DisagreementError place_batch: other processes failed to make their part")
            assert "|  process 0: PlanError: " in printed[3]
        else:
            assert printed[3].startswith("PlanError place_batch: 1 array cannot be placed")
        assert "indivisible: x " in printed[4]


@pytest.mark.slow
@SHAPES
def test_iterators_go_on_together(processes: int, devices: int) -> None:
    lines = printed_lines(
        run_processes(
            """
            import threading
            mesh = sr.create_mesh("data:8")
            def source(count, fail=False, rows=8):
                for step in range(count):
                    yield {"x": np.full((rows, 2), step, np.float32)}
                if fail:
                    raise ValueError("broken file")
            total = jax.jit(lambda batch: batch["x"].sum(), out_shardings=NamedSharding(mesh, P()))
            def attempt(batches):
                sums = []
                try:
                    for batch in sr.place_batches(batches, P("data"), mesh, timeout=60):
                        sums.append(float(total(batch)))
                except (sr.errors.ShardRulesError, ValueError) as error:
                    print(sums, type(error).__name__, "|".join(str(error).splitlines()))
                else:
                    print(sums)
            attempt(source(3))
            attempt(source(3 - process % 2))
            attempt(source(2, fail=process == 1))
            attempt(source(2, rows=8 + 8 * process))
            print(sum(thread.name == "shardrules.place_batches" for thread in threading.enumerate()))
            """,
            processes=processes,
            devices=devices,
        )
    )
    rows = 8 * processes * 2
    ended = ", ".join(str(process) for process in range(1, processes, 2))
    for process, printed in enumerate(lines):
        assert printed[0] == str([0.0, float(rows), float(2 * rows)])
        assert f"DisagreementError place_batch: process {ended} of {processes} has no more batches" in printed[1]
        expected = "ValueError broken file" if process == 1 else "DisagreementError place_batch: other processes failed"
        assert printed[2].startswith(f"{[0.0, float(rows)]} {expected}")
        assert printed[3].startswith("[] DisagreementError place_batch: the parts of the processes differ")
        assert printed[4] == "0"
