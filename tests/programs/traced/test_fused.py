"""Loops of the fused kernels that are primitives: cuDNN's attention, and matmuls with scales."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from shardrules.programs.compiling.fused_calls import FUSED, fused_flops
from shardrules.programs.traced.factors.table import op_factors
from tests.programs.autoplan.shipped import cudnn_module, integers, kernels_in, let_jax_find_cudnn, struct, text_of

Q, K, SINGLE = struct(4, 256, 16, 128), struct(4, 256, 4, 128), struct(4, 256, 1, 128)
HEADS_FIRST = struct(4, 16, 256, 128)
LENGTHS, OFFSETS = integers(4), integers(4, 4)
EIGHT_BITS, EIGHT_BITS_SINGLE = (struct(*array.shape, dtype=jnp.float8_e4m3fn) for array in (Q, SINGLE))
SCALED, SCALES = struct(4, 256, 512, dtype=jnp.float8_e4m3fn), struct(4, 256, 16, dtype=jnp.float8_e8m0fnu)


def texts(fn: Any, *args: Any, gradient: bool = False) -> list[str]:
    """The texts of the kernels of a function, or of its gradient for all that are floats."""
    floats = tuple(index for index, array in enumerate(args) if jnp.issubdtype(array.dtype, jnp.floating))
    if gradient:
        function, fn = fn, jax.grad(lambda *arrays: function(*arrays).astype(jnp.float32).sum(), floats)
    return [text_of(op_factors(equation)) for equation, _ in kernels_in(jax.make_jaxpr(fn)(*args))]


def attend(*args: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(*args, implementation="cudnn", **options)


NONE = ",.,.,.,.,.,."
"""Neither lengths nor offsets nor tables of pages."""


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    return let_jax_find_cudnn(monkeypatch)


def test_examples_and_heads_of_attention_may_be_split() -> None:
    queries = "a.b.,a.b.,a.b.,."
    assert texts(lambda q, k, v: attend(q, k, v, is_causal=True), Q, K, K) == [f"{queries}{NONE} -> a.b."]
    assert texts(lambda q, k, v: attend(q, k, v, is_causal=True), Q, K, K, gradient=True) == [
        f"{queries}{NONE} -> a.b.,ab.",
        f"{queries}{NONE},ab.,a.b.,a.b. -> a.b.,a.b.,a.b.",
    ]


def test_groups_of_queries_stay_with_their_keys() -> None:
    ((equation, _),) = kernels_in(jax.make_jaxpr(attend)(Q, K, K))
    factors = op_factors(equation)
    assert factors is not None
    assert (factors.sizes, factors.is_local) == ((4, 4), True)


def test_a_single_head_of_keys_is_whole_and_its_gradient_a_sum() -> None:
    keys = "a.b.,a...,a...,."
    assert texts(attend, Q, SINGLE, SINGLE, gradient=True) == [
        f"{keys}{NONE} -> a.b.,ab.",
        f"{keys}{NONE},ab.,a.b.,a.b. -> a.b.,a...,a... / b",
    ]


@pytest.mark.parametrize(
    ("shape", "bias", "reduced"),
    [((1, 16, 256, 256), ".b..", " / a"), ((4, 1, 256, 256), "a...", " / b"), ((4, 16, 256, 256), "ab..", "")],
)
def test_gradients_of_biases_are_sums_over_what_they_lack(
    shape: tuple[int, ...], bias: str, reduced: str, cudnn: Any
) -> None:
    def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return cudnn.dot_product_attention(q, k, v, bias)

    assert texts(biased, Q, Q, Q, struct(*shape), gradient=True) == [
        f"a.b.,a.b.,a.b.,{bias}{NONE} -> a.b.,ab.",
        f"a.b.,a.b.,a.b.,{bias}{NONE},ab.,a.b.,a.b. -> a.b.,a.b.,a.b.,{bias}{reduced}",
    ]


def test_lengths_go_with_examples() -> None:
    def padded(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return attend(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)

    assert texts(padded, Q, K, K, LENGTHS) == ["a.b.,a.b.,a.b.,.,a,a,.,.,.,. -> a.b."]


def test_heads_may_come_before_the_length(cudnn: Any) -> None:
    def attend_in_order(q: Any, k: Any, v: Any) -> Any:
        return cudnn.dot_product_attention(q, k, v, qkv_layout="BNTH")

    assert texts(attend_in_order, HEADS_FIRST, HEADS_FIRST, HEADS_FIRST) == [f"ab..,ab..,ab..,.{NONE} -> ab.."]


def test_packed_examples_are_whole_where_there_is_a_backward_pass(cudnn: Any) -> None:
    """Statistics of their sequences are numbered through, so that pieces have others than the whole."""

    def packed(q: Any, k: Any, v: Any, lengths: Any, offsets: Any) -> Any:
        return cudnn.dot_product_attention(
            q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
            mask_type=cudnn.MaskType.PADDING,
        )  # fmt: skip

    args = (Q, Q, Q, integers(4, 3), OFFSETS)
    assert texts(packed, *args) == ["a.b.,a.b.,a.b.,.,a.,a.,a.,a.,.,. -> a.b."]
    assert texts(packed, *args, gradient=True)[0] == "..a.,..a.,..a.,.,..,..,..,..,.,. -> ..a.,.a."


def test_pages_are_whole_but_for_their_heads(cudnn: Any) -> None:
    def paged(q: Any, k: Any, v: Any, lengths: Any, tables: Any) -> Any:
        return cudnn.paged_attention(q, k, v, lengths, lengths, tables, tables)

    pages = struct(64, 16, 16, 128)
    assert texts(paged, Q, pages, pages, LENGTHS, integers(4, 1, 16, 1)) == [
        "a.b.,..b.,..b.,.,a,a,.,.,a...,a... -> a.b."
    ]


@pytest.mark.parametrize(("keys", "letters"), [(EIGHT_BITS, "a.b."), (EIGHT_BITS_SINGLE, "a...")])
def test_largest_elements_of_eight_bits_are_those_of_all_pieces(keys: Any, letters: str, cudnn: Any) -> None:
    scales = {name: jnp.ones((1, 1, 1, 1)) for name in cudnn.fp8_params_keys}

    def attend_in_8_bits(q: Any, k: Any, v: Any) -> Any:
        return cudnn.dot_product_attention(q, k, v, use_fp8=True, fp8_params=scales)[0]

    arrays, ones = f"a.b.,{letters},{letters}", ",...." * 6
    assert texts(attend_in_8_bits, EIGHT_BITS, keys, keys, gradient=True) == [
        f"{arrays}{ones} -> a.b.,....,....,ab. / ab",
        f"{arrays},a.b.,a.b.,ab.{ones}{ones} -> {arrays}{',....' * 4} / ab",
    ]


def test_what_drops_out_by_one_seed_is_whole(cudnn: Any) -> None:
    def dropping(q: Any, k: Any, v: Any) -> Any:
        return cudnn.dot_product_attention(q, k, v, dropout_rate=0.1)

    assert texts(dropping, Q, K, K, gradient=True) == ["whole", "whole"]


def test_scales_are_split_with_their_blocks() -> None:
    def multiply(x: Any, y: Any, x_scales: Any, y_scales: Any) -> Any:
        return jax.nn.scaled_matmul(x, y, x_scales, y_scales)

    ((equation, _),) = kernels_in(jax.make_jaxpr(multiply)(SCALED, SCALED, SCALES, SCALES))
    factors = op_factors(equation)
    assert factors is not None
    assert (text_of(factors), factors.sizes) == ("abc,adc,abc,adc -> abd / c", (4, 256, 16, 256))


def test_one_scale_for_all_of_a_dim_is_whole() -> None:
    def multiply(x: Any, y: Any, scales: Any) -> Any:
        return jax.lax.scaled_dot(x, y, lhs_scale=scales, dimension_numbers=(((2,), (2,)), ((0,), (0,))))

    assert texts(multiply, SCALED, SCALED, SCALES) == ["abc,adc,abc,ad. -> abd / c"]


def test_every_fused_primitive_is_known() -> None:
    """A kernel that a new version of JAX ships as a primitive belongs into the rules, and has FLOPs."""
    names = [
        value.name
        for function in ("cudnn_dot_product_attention", "cudnn_scaled_matmul")
        for value in vars(cudnn_module(function)).values()
        if isinstance(value, Primitive)
    ]
    # What stands in programs are those that partitioners are asked about: the others are inside of them.
    in_programs = [name for name in dict.fromkeys(names) if name.endswith("_wrapper")]
    assert sorted([*in_programs, "scaled_dot"]) == sorted(FUSED)


@pytest.mark.parametrize(("causal", "blocks"), [(False, 4), (True, 3)])
def test_attention_has_the_flops_of_the_blocks_that_it_computes(causal: bool, blocks: int) -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, is_causal=causal).astype(jnp.float32).sum()

    forward, backward = kernels_in(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(Q, K, K))
    matmul = 2 * 4 * 16 * blocks * 128 * 128 * 128
    assert (fused_flops(forward[0]), fused_flops(backward[0])) == (2 * matmul, 5 * matmul)
