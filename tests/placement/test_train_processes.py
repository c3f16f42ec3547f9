"""By behaviour: two processes with four devices each train as one with eight."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.mesh.axis_types import AxisTypes
from tests.mesh.cluster import run_processes
from tests.placement.models import FSDP, OPTIM, TASKS, compiled_step, params


def trained(axis_types: AxisTypes) -> tuple[list[float], dict[str, float], float]:
    """Trains for two steps on all devices of all processes, on a mesh with these types of axes.

    Returns the losses, the sum of every parameter afterwards, and the largest share of the model that a device holds.
    """
    mesh = sr.create_mesh("data:4,model:2", axis_types=axis_types)
    task = next(task for task in TASKS if task.name == "gpt")
    rule = task.tensor_parallel | FSDP
    training = sr.filter_init(task.make, rule, mesh)(jax.random.key(0))
    plan = sr.check_same_plan(rule.plan(params(training), mesh).check())
    moments = sr.filter_init(OPTIM.init, plan.mirror, mesh)(params(training))
    run = compiled_step(task, rule, plan, mesh)
    batch = sr.filter_shard(task.batch(), P("data"), mesh)
    losses = []
    for _ in range(2):
        training, moments, loss = run(training, moments, batch)
        losses.append(float(loss))
    arrays = jax.tree.leaves(params(training))
    for path, array in zip(plan.paths, arrays, strict=True):
        assert array.sharding.mesh == mesh, path
        assert sr.specs.same(array.sharding.spec, plan.decision(path).spec or P()), path
        assert len(array.addressable_shards) == jax.local_device_count(), path
    share = sum(array.addressable_shards[0].data.nbytes for array in arrays) / sum(array.nbytes for array in arrays)
    whole = jax.tree.leaves(sr.filter_gather(params(training)))
    return losses, {path: float(np.sum(array)) for path, array in zip(plan.paths, whole, strict=True)}, share


@pytest.mark.slow
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
    assert [process.code for process in ended] == [0, 0], "\n".join(process.out + process.err for process in ended)
    lines = [process.out.splitlines() for process in ended]
    assert lines[0] == lines[1]
    losses, sums, share = trained("auto")
    assert losses[1] < losses[0]
    assert share < 0.2
    for line in lines[0]:
        results = json.loads(line)
        np.testing.assert_allclose(results[0], losses, rtol=1e-5)
        assert list(results[1]) == list(sums)
        np.testing.assert_allclose(list(results[1].values()), list(sums.values()), rtol=1e-4, atol=1e-4)
        assert results[2] == share
