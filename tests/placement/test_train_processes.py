"""Training over real processes: two of four devices train as one of eight does."""

import json
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.mesh.creation import AxisTypes
from tests.mesh.cluster import run_processes
from tests.placement.models import FSDP, TASKS

OPTIM = optax.adam(2e-3)


def trained(axis_types: AxisTypes) -> tuple[list[float], dict[str, float], float]:
    """Trains a model for two steps, in as many processes as there are.

    **Arguments:**

    - `axis_types`: of the mesh, which takes all devices of all processes.

    **Returns:**

    The losses; the sum of every parameter afterwards; and the largest share of the model that a device holds.
    """
    mesh = sr.create_mesh("data:4,model:2", axis_types=axis_types)
    task = next(task for task in TASKS if task.name == "gpt")
    rule = task.tensor_parallel | FSDP

    def params(made: Any) -> Any:
        return eqx.filter(made[0], eqx.is_inexact_array)

    def step(made: Any, moments: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        module, state = made
        (value, state), grads = eqx.filter_value_and_grad(task.loss, has_aux=True)(module, state, batch)
        updates, moments = OPTIM.update(grads, moments, eqx.filter(module, eqx.is_inexact_array))
        return (eqx.apply_updates(module, updates), state), moments, value

    made = sr.filter_init(task.make, rule, mesh)(jax.random.key(0))
    plan = sr.check_same_plan(rule.plan(params(made), mesh).check())
    moments = sr.filter_init(OPTIM.init, plan.mirror, mesh)(params(made))
    run = sr.filter_jit(
        step,
        mesh=mesh,
        in_shardings=(rule, plan.mirror, P("data")),
        out_shardings=(rule, plan.mirror, P()),
        donate=(0, 1),
    )
    batch = sr.filter_shard(task.batch(), P("data"), mesh)
    losses = []
    for _ in range(2):
        made, moments, loss = run(made, moments, batch)
        losses.append(float(loss))
    arrays = jax.tree.leaves(params(made))
    for path, array in zip(plan.paths, arrays, strict=True):
        assert array.sharding.mesh == mesh, path
        assert sr.specs.same(array.sharding.spec, plan.decision(path).spec or P()), path
        assert len(array.addressable_shards) == jax.local_device_count(), path
    share = sum(array.addressable_shards[0].data.nbytes for array in arrays) / sum(array.nbytes for array in arrays)
    whole = jax.tree.leaves(sr.filter_gather(params(made)))
    return losses, {path: float(np.sum(one)) for path, one in zip(plan.paths, whole, strict=True)}, share


def test_two_processes_train_as_one_does() -> None:
    ended = run_processes(
        """
        import json
        from tests.placement.test_train_processes import trained
        for types in ("auto", "explicit"):
            print(json.dumps(trained(types)))
        sr.barrier_sync(timeout=60)
        """,
        processes=2,
        devices=4,
        timeout=240,
    )
    assert [one.code for one in ended] == [0, 0], "\n".join(one.out + one.err for one in ended)
    told = [one.out.splitlines() for one in ended]
    assert told[0] == told[1]
    losses, sums, share = trained("auto")
    assert losses[1] < losses[0]
    assert share < 0.2
    for line in told[0]:
        found = json.loads(line)
        np.testing.assert_allclose(found[0], losses, rtol=1e-5)
        assert list(found[1]) == list(sums)
        np.testing.assert_allclose(list(found[1].values()), list(sums.values()), rtol=1e-4, atol=1e-4)
        assert found[2] == share
