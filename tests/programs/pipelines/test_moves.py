"""A model goes between any numbers of stages, and stages may be in other processes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.mesh.cluster import run_processes
from tests.programs.pipelines.models import batch, mesh, parameters, pipelined, unpipelined


def train(loss: Any) -> Any:
    """A step of gradient descent on the batch."""
    x, targets = batch()
    gradient = jax.grad(loss)
    return jax.jit(
        lambda params: jax.tree.map(lambda param, change: param - 0.01 * change, params, gradient(params, x, targets))
    )


@pytest.mark.slow
def test_checkpoints_of_4_stages_are_restored_on_any(tmp_path: Path) -> None:
    """Trained for a step on 4 stages, saved, and trained for another on 2, on 8 and on none."""
    specs = {"embedding": P(), "layers": P("stage")}
    with jax.enable_x64(True):
        four = sr.filter_shard(parameters(8), specs, mesh("stage:4"))
        with jax.set_mesh(mesh("stage:4")):
            trained = train(pipelined(microbatches=4))(four)
        sr.save_safetensors(tmp_path / "model.safetensors", trained)
        step = train(unpipelined)
        expected = step(step(parameters(8)))
        shapes = jax.eval_shape(lambda: parameters(8))
        for devices in (mesh("stage:2"), mesh("stage:8"), mesh("data:8")):
            is_staged = "stage" in devices.shape
            how = specs if is_staged else P()
            moved = sr.reshard(trained, how, devices)
            restored = sr.load_safetensors(tmp_path / "model.safetensors", shapes, how, devices)
            step = train(pipelined(microbatches=4, schedule="1f1b") if is_staged else unpipelined)
            with jax.set_mesh(devices):
                results = [step(params) for params in (moved, restored)]
            for result in results:
                for array, reference in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
                    np.testing.assert_allclose(np.asarray(array), np.asarray(reference), rtol=1e-8, atol=1e-10)


CODE = """
def layer(params, x):
    return x + jnp.tanh(x @ params)

def loss(params, x):
    squares = lambda _, y, targets: ((y - targets) ** 2).mean()
    return sr.pipeline(layer, axis="stage", microbatches=4, schedule="1f1b", last=squares)(params, x, x)

mesh = sr.create_mesh("stage:4")
params = sr.filter_shard(np.linspace(-1, 1, 4 * 8 * 8, dtype=np.float32).reshape(4, 8, 8), P("stage"), mesh)
x = sr.filter_shard(np.linspace(0, 1, 16 * 8, dtype=np.float32).reshape(16, 8), P(), mesh)
with jax.set_mesh(mesh):
    value, gradients = jax.jit(jax.value_and_grad(loss))(params, x)
norm = jax.jit(lambda x: jnp.sqrt((x**2).sum()), out_shardings=NamedSharding(mesh, P()))(gradients)
print(f"{float(value):.6f} {float(norm):.5f}")
"""


@pytest.mark.slow
def test_stages_in_two_processes_compute_as_in_one() -> None:
    (alone,) = run_processes(CODE, processes=1, devices=4)
    two = run_processes(CODE, processes=2, devices=2)
    assert alone.code == 0, alone.err
    assert [ended.code for ended in two] == [0, 0], two[0].err
    assert alone.out
    assert {ended.out for ended in two} == {alone.out}
