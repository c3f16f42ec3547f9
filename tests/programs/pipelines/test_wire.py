"""Compiled for GPUs and TPUs, stages send each other microbatches, and weights are gathered once."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.pipelines.schedule import PipelineSchedule
from tests.programs.examples import mesh_on

EXAMPLES, LENGTH, WIDTH, HIDDEN, LAYERS, MICROBATCHES = 64, 128, 256, 512, 8, 16


def layer(params: Any, x: Any) -> Any:
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def squares(head: Any, y: Any, targets: Any) -> Any:
    return jnp.mean((y @ head - targets).astype(jnp.float32) ** 2)


def audited(target: str, text: str, **options: Any) -> Any:
    """The collectives of a step whose weights are split over the data axis, too."""
    mesh = mesh_on(target, text)

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    rows = shape(EXAMPLES, LENGTH, WIDTH)
    params = {"up": shape(LAYERS, WIDTH, HIDDEN), "down": shape(LAYERS, HIDDEN, WIDTH)}
    run = sr.pipeline(layer, axis="stage", microbatches=MICROBATCHES, batch="data", last=squares, **options)

    def loss(params: Any, head: Any, x: Any, targets: Any) -> Any:
        return run(params, x, targets, last=head)

    weights = {"up": P("stage", "data"), "down": P("stage", None, "data")}
    specs = weights, P(), P("data"), P("data")
    with jax.set_mesh(mesh):
        report = sr.audit(
            jax.value_and_grad(loss),
            params,
            shape(WIDTH, WIDTH),
            rows,
            rows,
            mesh=mesh,
            in_shardings=specs,
            target=target,
        )
    return report.collectives


@pytest.mark.parametrize(
    ("target", "text", "options"),
    [
        ("cuda:h100:8", "stage:4,data:2", {"schedule": "1f1b"}),
        ("cuda:h100:8", "stage:4,data:2", {"schedule": "gpipe", "chunks": 2}),
        ("tpu:v5e:4x4", "stage:8,data:2", {"schedule": "1f1b"}),
    ],
)
def test_stages_send_microbatches(target: str, text: str, options: Any) -> None:
    stages, chunks = int(text[6]), options.get("chunks", 1)
    collectives = audited(target, text, **options)
    microbatch = 2 * EXAMPLES // MICROBATCHES // 2 * LENGTH * WIDTH  # on each of two devices along the data axis
    schedule = PipelineSchedule(options["schedule"], stages=stages, microbatches=MICROBATCHES, chunks=chunks)
    pairs = sum(len(exchange) for phase in schedule.phases for exchange in phase.exchanges)
    assert pairs == (2 * (stages - 1) if chunks == 1 else 2 * stages)
    sent = [collective for collective in collectives if collective.kind == "collective-permute"]
    assert all(collective.payload_bytes == microbatch and collective.axes == ("stage",) for collective in sent)
    rounds = chunks * MICROBATCHES + stages - 1  # those in which some stages have nothing to send among them
    assert sum(collective.times.count for collective in sent) == 2 * rounds

    runs = Counter[str]()
    for collective in collectives:
        if collective.axes == ("data",) and collective.payload_bytes > 4:
            runs[collective.kind] += collective.times.count
    assert set(runs) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert max(runs.values()) <= 2  # once for each of two weights
