"""A planned training in two processes computes what one process computes."""

import pytest

from tests.mesh.cluster import run_processes

CODE = """
import equinox as eqx, optax

def loss(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)

make = lambda key: eqx.nn.MLP(8, 8, 32, 2, key=key)
x = jax.ShapeDtypeStruct((32, 8), jnp.float32)
optimizer = optax.adam(1e-2)
plan = sr.plan_training(loss, eqx.filter_eval_shape(make, jax.random.key(0)), optimizer, (x, x), cluster=jax.devices())
model, state = plan.init(make)(jax.random.key(0))
rows = np.arange(256.0, dtype=np.float32).reshape(32, 8) / 256
for _ in range(2):
    model, state, value, _ = plan.step(model, state, (rows, rows))
print(plan.report.mesh, f"{float(value):.6f}")
"""


@pytest.mark.slow
def test_two_processes_train_as_one() -> None:
    (alone,) = run_processes(CODE, processes=1, devices=4)
    two = run_processes(CODE, processes=2, devices=2)
    assert alone.code == 0, alone.err
    assert [ended.code for ended in two] == [0, 0], two[0].err
    assert len({ended.out for ended in two}) == 1
    assert alone.out.split()[-1][:6] == two[0].out.split()[-1][:6]
