"""Devices send what the closed forms of ring, gathered and all-to-all attention say."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.programs.examples import mesh_on

BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 4, 2048, 16, 4, 64


def forms(how: str, causal: bool, devices: int, data: int) -> tuple[float, float]:
    """The bytes that a device sends in a forward pass, and for the gradients alone, in bfloat16."""
    q, kv = (2 * BATCH // data * LENGTH // devices * heads * WIDTH for heads in (HEADS, KV_HEADS))
    others = devices - 1
    if how == "all_to_all":
        repeats = max(1, devices // KV_HEADS)
        part, kv = others / devices, kv * repeats
        return part * (2 * q + 2 * kv), part * (3 * q + 4 * kv)
    if how == "gather":
        zigzag = q if causal else 0  # queries, and what comes back
        return others * 2 * kv + 2 * zigzag, others * 4 * kv + 3 * zigzag
    zigzag = q + 2 * kv if causal else 0
    output = q if causal else 0
    # The gradients of keys and values are of float32. Both passes share what they send first.
    return others * 2 * kv + zigzag + output, others * 8 * kv - 4 * kv + 2 * zigzag + output


@pytest.mark.parametrize("how", ["ring", "gather", "all_to_all"])
@pytest.mark.parametrize(("target", "mesh"), [("cuda:h100:8", "sequence:8"), ("tpu:v5e:4x4", "data:2,sequence:8")])
def test_wire_bytes_are_the_closed_forms(how: Any, target: str, mesh: str) -> None:
    devices = mesh_on(target, mesh)
    causal = how != "gather" or target.startswith("cuda")
    data, count = devices.shape.get("data", 1), devices.shape["sequence"]
    shapes = [
        jax.ShapeDtypeStruct((BATCH, LENGTH, heads, WIDTH), jnp.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]

    def forward(q: Any, k: Any, v: Any) -> Any:
        return sr.sharded_attention(q, k, v, causal=causal, axis="sequence", how=how)

    def gradients(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        return jax.vjp(forward, q, k, v)[1](cotangent)

    def sent(fn: Any, *operands: Any) -> float:
        spec = P("data" if data > 1 else None, "sequence")
        # The compiler for TPUs asks no region how it is split: on an Explicit mesh it need not.
        report = sr.audit(
            fn, *operands, mesh=devices, in_shardings=spec, out_shardings=spec, target=target, axis_types="explicit"
        )
        return sum(collective.total_wire_bytes for collective in report.collectives)

    expected = forms(how, causal, count, data)
    if target.startswith("cuda"):
        assert sent(forward, *shapes) == pytest.approx(expected[0], rel=0.01)
    assert sent(gradients, *shapes, shapes[0]) == pytest.approx(expected[1], rel=0.01)
