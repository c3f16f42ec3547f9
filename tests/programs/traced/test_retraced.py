"""Kernels that JAX's own functions make again for pieces: the options they are made with, and those that stay whole."""

import sys
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.traced.factors import retraced
from shardrules.programs.traced.factors.retraced import is_made_again, retraced_loops, retraced_params
from shardrules.programs.traced.factors.table import op_signature
from tests.programs.autoplan.shipped import OPS, PAGES, SHIPPED, integers, kernels_in, loaded, struct

HEADS = (64, 16, 4, 128)
INT8 = struct(2, 64, 16, 128, dtype=jnp.int8)
SCALES = struct(2, 64, 16, 1, dtype=jnp.float32)


def signature(fn: Any, *args: Any) -> Any:
    """The last kernel of a function."""
    *_, (equation, unused) = kernels_in(jax.make_jaxpr(fn)(*args))
    return op_signature(equation, unused)


def paged(queries: int = 8, pages: Any = PAGES, **options: Any) -> Any:
    module = loaded(f"{OPS}tpu.paged_attention")
    return signature(
        lambda *args: module.paged_attention(*args, pages_per_compute_block=4, **options),
        *(struct(4, queries, 128), pages, pages, integers(4), integers(4, 16)),
    )


def ragged(queries: int = 8, pages: Any = HEADS, dtype: Any = jnp.bfloat16, **options: Any) -> Any:
    module = loaded(f"{OPS}tpu.ragged_paged_attention")
    blocks = {"num_kv_pages_per_block": 4, "num_queries_per_block": 8}
    return signature(
        lambda *args: module.ragged_paged_attention(*args, **blocks, **options),
        *(struct(64, queries, 128), struct(*pages, dtype=dtype)),
        *(integers(4), integers(4, 16), integers(5), integers(1)),
    )


def pieces_of(op: Any) -> Any:
    loops = retraced_loops(op)
    return loops and loops.sizes


@pytest.mark.parametrize(
    "options",
    [
        {"mask_value": -1e6, "attn_logits_soft_cap": 30.0},
        {"inline_seq_dim": False, "queries": 16},
        {"inline_seq_dim": False, "attn_logits_soft_cap": 128**-0.5},
    ],
)
def test_options_are_read_from_the_program_of_paged_attention(options: Any) -> None:
    assert pieces_of(paged(**options)) == {"a": 4, "b": 2}


def test_cores_keep_pairs_of_what_they_share() -> None:
    pages = struct(8, 64, 16, 128)
    modes = [pieces_of(paged(64, pages, megacore_mode=mode)) for mode in ("kv_head", "batch")]
    assert modes == [{"a": 4, "b": 4}, {"a": 2, "b": 8}]


def test_pages_with_scales_are_split_with_them() -> None:
    module = loaded(f"{OPS}tpu.paged_attention.quantization_utils")

    def attend(q: Any, k: Any, k_scales: Any, v: Any, v_scales: Any, *tables: Any) -> Any:
        pages = (module.QuantizedTensor(k, k_scales), module.QuantizedTensor(v, v_scales))
        attention = loaded(f"{OPS}tpu.paged_attention").paged_attention
        return attention(q, *pages, *tables, pages_per_compute_block=4)

    loops = retraced_loops(
        signature(attend, struct(4, 8, 128), INT8, SCALES, INT8, SCALES, integers(4), integers(4, 16))
    )
    assert loops is not None
    assert [names[0] for names in loops.operands] == ["a", "a", None, None, "a", *"bbbb"]


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"sm_scale": 128**-0.5}, 2),
        ({"sm_scale": 1, "mask_value": -1e9, "soft_cap": 30.0, "sliding_window": 512}, 2),
        ({"k_scale": 0.5, "v_scale": 0.25, "vmem_limit_bytes": 2**26}, 2),
        ({"queries": 64, "pages": (64, 16, 64, 128)}, 32),
        ({"queries": 48, "pages": (64, 16, 48, 128)}, 3),  # JAX makes no kernel for 12 heads of keys, nor for 6
        ({"queries": 32, "pages": (64, 16, 16, 128), "dtype": jnp.int8}, 4),  # two heads are in one word
    ],
)
def test_heads_of_ragged_attention_are_split_as_far_as_jax_makes_kernels(options: Any, pieces: int) -> None:
    assert pieces_of(ragged(**options)) == {"b": pieces}


@pytest.mark.parametrize("name", ["paged", "ragged paged", "layer norm", "rms norm"])
def test_a_kernel_for_pieces_is_the_one_that_jax_makes_of_them(name: str) -> None:
    shipped = SHIPPED[name]
    op = signature(shipped.fn, *shipped.args)
    assert is_made_again(op, op.operands, op.params)
    loops = retraced_loops(op)
    assert loops is not None
    loop = "b" if "paged" in name else "a"
    sides = zip(op.operands, loops.operands, strict=True)
    shapes = [tuple(size // 2 if other == loop else size for size, other in zip(*side, strict=True)) for side in sides]
    params = retraced_params(op, shapes)
    assert params is not None
    assert [is_made_again(op, shapes, each) for each in (params, op.params)] == [True, False]
    blocks = params["grid_mapping"].block_mappings
    first = len(shapes) - params["grid_mapping"].num_inputs
    assert [block.array_aval.shape for block in blocks[: len(shapes) - first]] == shapes[first:]


def test_a_kernel_that_jax_would_not_make_is_whole() -> None:
    """As one of a copy of its function, or of another version."""
    op = ragged()
    program = op.params["jaxpr"]
    shorter = {**op.params, "jaxpr": program.replace(eqns=program.eqns[:-1])}
    other_grid = {**op.params, "grid_mapping": op.params["grid_mapping"].replace(grid=(1, 4))}
    assert [retraced_loops(attrs.evolve(op, params=params)) for params in (shorter, other_grid)] == [None, None]


def test_a_kernel_whose_function_takes_other_arguments_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    op, module = paged(20), sys.modules[f"{OPS}tpu.paged_attention.paged_attention_kernel"]
    monkeypatch.setattr(module, "paged_attention", lambda *arrays: arrays[0])
    assert (retraced_loops(op), retraced_params(op, op.operands)) == (None, None)


def test_equal_kernels_are_made_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (ragged(sm_scale=0.75) for _ in range(2))
    loops = retraced_loops(first)
    monkeypatch.setattr(retraced, "_params", lambda *_: pytest.fail("it is made again"))
    assert retraced_loops(second) == loops


@pytest.mark.parametrize("set_mesh", [jax.set_mesh, lambda mesh: jax.sharding.use_abstract_mesh(mesh.abstract_mesh)])
def test_a_kernel_is_made_under_the_mesh_that_it_was_traced_under(set_mesh: Any) -> None:
    before = ragged(sm_scale=0.5)
    with set_mesh(sr.create_mesh("data:8", axis_types=jax.sharding.AxisType.Auto)):
        on_mesh = ragged(sm_scale=0.25)
        pieces = [pieces_of(op) for op in (before, on_mesh)]
    assert [*pieces, pieces_of(on_mesh)] == [{"b": 2}] * 3
