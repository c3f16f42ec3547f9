"""Pallas kernels on pieces, beside the same kernels on whole arrays: both run as Pallas interprets them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, make_group_metadata, tgmm
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.run.local import LocalSplit, local_jaxpr
from shardrules.programs.jaxprs.walk import equations
from tests.programs.autoplan.shipped import OPS, loaded

NUMBERS = np.random.default_rng(0)
MESH = "data:4,model:2"


def real(*shape: int) -> jax.Array:
    return jnp.asarray(NUMBERS.normal(size=shape), jnp.float32)


def kernel(fn: Any, *args: Any) -> Any:
    """The equation of the only kernel in a function."""
    (equation,) = [each for each in equations(jax.make_jaxpr(fn)(*args)) if each.primitive.name == "pallas_call"]
    return equation


def check(equation: Any, args: list[Any], split: LocalSplit) -> None:
    compare(equation, args, local_jaxpr(equation, split, sr.create_mesh(MESH)))


def compare(equation: Any, args: list[Any], program: Any) -> None:
    whole = equation.primitive.bind(*args, **equation.params)
    pieces = jax.jit(jaxpr_as_fun(program))(*args)
    for result, expected in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_attention_runs_on_examples_and_heads() -> None:
    q = real(4, 32, 2, 16)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return loaded(f"{OPS}gpu.attention").mha(q, k, v, None, causal=True, interpret=True)

    spec = P("data", None, "model")
    check(kernel(attend, q, q, q), [q, q, q], LocalSplit((spec,) * 3, (spec,), ((),)))


def test_a_matmul_runs_on_blocks_of_both_sides() -> None:
    def multiply(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] @ y_ref[...]

    x, y = real(32, 8), real(8, 16)
    cost = pl.CostEstimate(flops=8192, bytes_accessed=800, transcendentals=0)
    call = pl.pallas_call(
        multiply,
        jax.ShapeDtypeStruct((32, 16), jnp.float32),
        grid=(8, 2),
        in_specs=[pl.BlockSpec((4, 8), lambda i, j: (i, 0)), pl.BlockSpec((8, 8), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((4, 8), lambda i, j: (i, j)),
        cost_estimate=cost,
        interpret=True,
    )
    split = LocalSplit((P("data"), P(None, "model")), (P("data", "model"),), ((),))
    equation = kernel(call, x, y)
    check(equation, [x, y], split)
    program = local_jaxpr(equation, split, sr.create_mesh(MESH))
    (estimate,) = [each.params["cost_estimate"] for each in equations(program) if "cost_estimate" in each.params]
    assert (estimate.flops, estimate.bytes_accessed) == (1024, 100)


GROUP_SIZES = [(16, 0, 25, 23), (0, 0, 0, 64), (1, 2, 3, 58), (64, 0, 0, 0)]
"""Groups that are empty, cross the border of a device, or leave a device without a row."""


def tables(sizes: tuple[int, ...], sums_rows: bool) -> list[Any]:
    """The tables that the kernels of `megablox` read of groups: the number of tiles, starts and the first group."""
    metadata, count = make_group_metadata(
        group_sizes=jnp.array(sizes, jnp.int32),
        m=64,
        tm=8,
        start_group=jnp.int32(0),
        num_nonzero_groups=4,
        visit_empty_groups=sums_rows,
    )
    return [count, *metadata, jnp.zeros(1, jnp.int32)]


@pytest.mark.parametrize("sizes", GROUP_SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_rows_are_in_their_groups(sizes: tuple[int, ...], transposed: bool) -> None:
    x, w = real(64, 8), real(4, 16, 8) if transposed else real(4, 8, 16)

    def multiply(x: Any, w: Any, counts: Any) -> Any:
        return gmm(x, w, counts, tiling=(8, 8, 8), transpose_rhs=transposed, interpret=True)

    columns = P(None, "model") if transposed else P(None, None, "model")
    split = LocalSplit((*[P()] * 5, P("data"), columns), (P("data", "model"),), ((),))
    equation = kernel(multiply, x, w, jnp.array(sizes, jnp.int32))
    check(equation, [*tables(sizes, False), x, w], split)


@pytest.mark.parametrize("sizes", GROUP_SIZES)
def test_grouped_rows_are_summed(sizes: tuple[int, ...]) -> None:
    x, y = real(64, 8), real(64, 16)

    def multiply(x: Any, y: Any, counts: Any) -> Any:
        return tgmm(x.T, y, counts, tiling=(8, 8, 8), interpret=True)

    split = LocalSplit((*[P()] * 5, P("data"), P("data", "model")), (P(None, None, "model"),), (("data",),))
    equation = kernel(multiply, x, y, jnp.array(sizes, jnp.int32))
    check(equation, [*tables(sizes, True), x, y], split)


def interpreted(equation: Any, how: Any) -> Any:
    """A kernel that does not offer to be interpreted."""
    return equation.replace(params={**equation.params, "interpret": how})


@pytest.mark.sample(2)
@pytest.mark.parametrize("axes", [("data", None), (None, "model"), ("data", "model")])
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [0, 5, 16, 1, 0, 0, 7, 0]),
        # Of empty examples this one leaves the results as they were in memory.
        ({"inline_seq_dim": False, "attn_logits_soft_cap": 5.0}, [3, 5, 16, 1, 2, 9, 7, 4]),
    ],
)
def test_paged_attention_runs_on_examples_and_heads(
    axes: tuple[Any, Any], options: dict[str, Any], sizes: list[int]
) -> None:
    examples, heads = axes
    keys, queries = P(heads), P(examples, heads)
    lengths = jnp.array(sizes, jnp.int32)
    pages = jnp.asarray(NUMBERS.integers(0, 12, (8, 4)), jnp.int32)
    k, v, q = real(2, 12, 4, 16), real(2, 12, 4, 16), real(8, 4, 16)

    def attend(*args: Any) -> Any:
        return loaded(f"{OPS}tpu.paged_attention").paged_attention(*args, pages_per_compute_block=2, **options)

    operands = [lengths, pages.reshape(-1), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), q[:, :, None], k, v]
    specs = (P(examples), P(examples), P(), P(), queries, keys, keys)
    # With the copies between the memories of a TPU, and an error where one is out of bounds.
    equation = interpreted(kernel(attend, q, k, v, lengths, pages), pltpu.InterpretParams())
    check(equation, operands, LocalSplit(specs, (queries,) * 3, ((),) * 3))


@pytest.mark.parametrize("options", [{}, {"sm_scale": 0.3, "soft_cap": 5.0, "sliding_window": 3, "v_scale": 0.7}])
def test_ragged_paged_attention_runs_on_heads(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, starts = jnp.array([9, 20, 3, 0], jnp.int32), jnp.array([0, 4, 5, 8, 8], jnp.int32)
    pages, count = jnp.asarray(NUMBERS.integers(0, 12, (4, 6)), jnp.int32), jnp.array([3], jnp.int32)
    q, keys = real(16, 4, 128), real(12, 4, 4, 128)

    def attend(*args: Any) -> Any:
        module = loaded(f"{OPS}tpu.ragged_paged_attention")
        return module.ragged_paged_attention(*args, num_kv_pages_per_block=2, num_queries_per_block=8, **options)

    operands = [lengths, pages, starts, jnp.zeros(2, jnp.int32), count, q, keys]
    heads = P(None, "model")
    split = LocalSplit((*[P()] * 5, heads, P(None, None, "model")), (heads,), ((),))
    equation = interpreted(kernel(attend, q, keys, lengths, pages, starts, count), True)
    program = local_jaxpr(equation, split, sr.create_mesh(MESH))
    # JAX asks integers of a program for their shape when it interprets a store with a mask, and these lack it.
    integer: Any = jax.make_jaxpr(lambda x: x + 1)(0).eqns[0].invars[1]
    monkeypatch.setattr(type(integer.val), "shape", (), raising=False)
    compare(equation, operands, program)
