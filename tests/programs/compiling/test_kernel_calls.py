"""Pallas kernels in traced functions: their estimates, and constant masks behind loops, remat and `shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.compiled.kernel_costs import KernelCall
from shardrules.programs.compiling.kernel_calls import find_kernel_calls
from tests.programs.machine.test_targets import needs

MESH = sr.mesh_shape("data:2,model:2")
LENGTH, SIZE, HEADS, BLOCK = 1024, 128, 8, 256
QUERY = jax.ShapeDtypeStruct((4, HEADS, LENGTH, SIZE), jnp.bfloat16)
SHARD = (2, HEADS // 2, LENGTH, SIZE)
SIZES = splash.BlockSizes(
    block_q=BLOCK,
    block_kv=BLOCK,
    block_kv_compute=BLOCK,
    block_q_dkv=BLOCK,
    block_kv_dkv=BLOCK,
    block_kv_dkv_compute=BLOCK,
    block_q_dq=BLOCK,
    block_kv_dq=BLOCK,
)


def double(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = 2 * x_ref[...]


def doubled(x: Any, **options: Any) -> Any:
    return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), **options)(x)


def calls(fn: Any, *args: Any) -> dict[str, KernelCall]:
    with jax.sharding.use_abstract_mesh(MESH):
        return {call.name: call for call in find_kernel_calls(jax.make_jaxpr(fn)(*args))}


def masked(mask: Any) -> Any:
    """Splash attention over batch and heads of a mesh, its gradient, in a loop over layers that are recomputed."""

    def attend(query: Any, key: Any, value: Any) -> Any:
        heads = splash.MultiHeadMask([mask] * query.shape[1])
        kernel = splash.make_splash_mha(heads, head_shards=1, q_seq_shards=1, block_sizes=SIZES)
        return jax.vmap(kernel)(query, key, value)

    spec = P("data", "model")

    def loss(weights: Any, query: Any) -> Any:
        def layer(x: Any, weight: Any) -> Any:
            attention = jax.shard_map(attend, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
            return attention(x * weight, x, x), None

        return jax.lax.scan(jax.checkpoint(layer), query, weights)[0].astype(jnp.float32).sum()

    return jax.grad(loss)


WEIGHTS = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
MASKS = [
    ("causal", splash.CausalMask((LENGTH, LENGTH)), 10),
    ("local", splash.LocalMask((LENGTH, LENGTH), (BLOCK, 0), 0), 7),
    ("an array", splash.NumpyMask(np.tril(np.ones((LENGTH, LENGTH), bool))), 10),
]


@pytest.mark.parametrize(("mask", "blocks"), [case[1:] for case in MASKS], ids=[case[0] for case in MASKS])
def test_masks_are_followed_to_their_kernels(mask: Any, blocks: int) -> None:
    kernels = calls(masked(mask), WEIGHTS, QUERY)
    assert {name.split("_")[2]: call.block_count for name, call in kernels.items()} == {
        "fwd": blocks,
        "dq": blocks,
        "dkv": blocks,
    }
    assert all(SHARD in call.operands for call in kernels.values())


def test_estimates_and_names_are_kept() -> None:
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    estimate = pl.CostEstimate(flops=77, bytes_accessed=88, transcendentals=0)

    def fn(x: Any) -> Any:
        return doubled(doubled(x, cost_estimate=estimate), name="mine")

    kernels = calls(jax.jit(fn), x)
    assert kernels == {
        "double": KernelCall("double", ((8, 128),), ((8, 128),), 77, 88, block_shapes=((8, 128), (8, 128))),
        "mine": KernelCall("mine", ((8, 128),), ((8, 128),), block_shapes=((8, 128), (8, 128))),
    }


def test_a_split_mask_counts_for_the_busiest_device() -> None:
    mask = splash.CausalMask((LENGTH, LENGTH))

    def fn(query: Any) -> Any:
        heads = splash.MultiHeadMask([mask] * HEADS)
        kernel = splash.make_splash_mha(heads, head_shards=1, q_seq_shards=2, block_sizes=SIZES)
        specs = kernel.manual_sharding_spec(jax.NamedSharding(MESH, P(None, "data")))
        run = jax.shard_map(
            lambda kernel, query, key: kernel(query, key, key),
            in_specs=(specs, P(None, "data"), P()),
            out_specs=P(None, "data"),
            check_vma=False,
        )
        return run(kernel, query, query)

    kernels = calls(fn, jax.ShapeDtypeStruct((HEADS, LENGTH, SIZE), jnp.bfloat16))
    assert [call.block_count for call in kernels.values()] == [7], "the second half has rows of 3 and 4 blocks"


@pytest.mark.slow
def test_masked_attention_counts_in_reports() -> None:
    needs("tpu")
    report = sr.audit(
        masked(MASKS[0][1]), WEIGHTS, QUERY, mesh=MESH, target="tpu:v5e:2x2", in_shardings=(P(), P("data", "model"))
    )
    block = 2 * BLOCK * BLOCK * SIZE
    # Three layers, each forward twice; two matmuls forward, three for the queries, four for keys and values.
    assert report.flops == pytest.approx(3 * SHARD[0] * SHARD[1] * 10 * block * (2 + 2 + 3 + 4), rel=0.001)
    assert not [finding for finding in report.findings if finding.code == "uncounted-kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tpu:v5e:2x2", "cuda:h100:4"])
def test_kernels_of_users_count_in_reports(target: str) -> None:
    needs("tpu" if target.startswith("tpu") else "cuda")
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)

    def report(costs: Any = (), **options: Any) -> sr.reports.AuditReport:
        if target.startswith("cuda"):  # Pallas has two backends for GPUs, and this is no kernel for Mosaic's
            options["compiler_params"] = triton.CompilerParams()

        def fn(x: Any) -> Any:
            return jax.shard_map(lambda x: doubled(x, **options), in_specs=P(), out_specs=P(), check_vma=False)(x)

        return sr.audit(fn, x, mesh=MESH, target=target, kernel_costs=costs)

    def findings(report: sr.reports.AuditReport) -> list[sr.Finding]:
        return [each for each in report.findings if each.code in ("uncounted-kernel", "unused-kernel-cost")]

    (finding,) = findings(report())
    assert finding.code == "uncounted-kernel"
    assert "kernel_cost('double', flops=...)" in finding.remedy
    estimate = pl.CostEstimate(flops=77, bytes_accessed=88, transcendentals=0)
    assert (report(cost_estimate=estimate).flops, findings(report(cost_estimate=estimate))) == (77, [])
    cost = sr.kernel_cost("doub*", flops=lambda x: 3 * x.size)
    assert (report([cost]).flops, report([cost], cost_estimate=estimate).flops) == (3 * 64 * 128, 3 * 64 * 128)
    unused = findings(report([cost, sr.kernel_cost("triple", 1)]))
    assert [(each.code, each.severity) for each in unused] == [("unused-kernel-cost", "warning")]
    slow = sr.kernel_cost("double", flops=10**15)
    slowed = report([slow])
    assert slowed.step_time() > 0.5 > report().step_time()
    assert max(seconds for _, seconds in slowed.kernel_seconds) == pytest.approx(slowed.step_time(), rel=0.01)


@pytest.mark.parametrize(
    ("costs", "got"), [(["double"], "'double' in it"), (sr.kernel_cost("f", 1), r"KernelCost\("), (None, "None")]
)
def test_costs_must_be_costs(costs: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"kernel_costs must be a list of what kernel_cost returns, got {got}"):
        sr.audit(lambda x: x, jnp.ones(8), mesh=MESH, kernel_costs=costs)
