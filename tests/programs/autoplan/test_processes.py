"""Planned functions over real processes: each passes its own whole arrays, and those that come back."""

import pytest

from tests.mesh.cluster import run_processes
from tests.mesh.test_processes import SHAPES, printed_lines


@pytest.mark.slow
@SHAPES
def test_processes_run_what_was_planned(processes: int, devices: int) -> None:
    lines_by_process = printed_lines(
        run_processes(
            """
            from tests.compiles import compiles

            def step(w, key, x):
                grad = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
                return w - grad + 1e-3 * jax.random.normal(key, w.shape), jax.random.fold_in(key, 1)

            mesh = sr.create_mesh("data:4,model:2")
            rng = np.random.default_rng(0)
            w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 64), (256, 64)))
            key = jax.random.key(3)
            plan = sr.autoplan(step, w, key, x, mesh=mesh)
            run = plan.jit(step)
            expected_w, expected_key = w, key
            arrays = (jnp.asarray(w), key)
            for turn in range(3):
                if turn == 1:
                    arrays = jax.block_until_ready(arrays)
                results = []
                compile_count = compiles(lambda: results.append(run(*arrays, x)))
                assert turn == 0 or compile_count == 0, (turn, compile_count)
                (arrays,) = results
                expected_w, expected_key = jax.jit(step)(expected_w, expected_key, x)
            assert arrays[0].sharding.is_equivalent_to(NamedSharding(mesh, plan.result_specs[0]), 2)
            np.testing.assert_allclose(sr.filter_gather(arrays[0]), expected_w, rtol=1e-4, atol=1e-6)
            holes = np.where(x > 2, np.nan, x).astype(np.float32)  # NaNs in the same places are not a difference
            jax.block_until_ready(run(*arrays, holes))
            print("ran", plan.result_specs[0])
            """,
            processes=processes,
            devices=devices,
        )
    )
    assert lines_by_process[0][0].startswith("ran")
    assert all(lines == lines_by_process[0] for lines in lines_by_process)
