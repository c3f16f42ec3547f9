"""What users say of their kernels, and what JAX knows of them."""

from typing import Any

import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.core.errors import ConfigTypeError
from shardrules.programs.compiled.kernel_costs import KernelFacts
from shardrules.programs.compiled.text import read_types


def test_amounts_are_numbers_or_functions_of_shapes() -> None:
    operands = read_types("(bf16[8,16], f32[16], pred[4], f8e4m3fn[2], s4[3])")
    assert sr.kernel_cost("k", 7).amounts(operands) == (7, None)
    seen: list[Any] = []

    def flops(*shapes: Any) -> int:
        seen.extend(shapes)
        return 2 * shapes[0].size

    assert sr.kernel_cost("k", flops, bytes=9).amounts(operands) == (256, 9)
    assert [shape.dtype for shape in seen] == [jnp.bfloat16, jnp.float32, jnp.bool_, jnp.float8_e4m3fn, jnp.int4]
    assert seen[0].shape == (8, 16)


def test_tokens_are_no_operands() -> None:
    operands = read_types("(token[], f32[8])")
    assert sr.kernel_cost("k", lambda *shapes: len(shapes)).amounts(operands) == (1, None)


def test_whole_floats_are_amounts() -> None:
    amounts = sr.kernel_cost("k", flops=1e12, bytes=2e9).amounts(())
    assert amounts == (10**12, 2 * 10**9)
    assert all(isinstance(amount, int) for amount in amounts)


def test_names_may_be_globs() -> None:
    assert sr.kernel_cost("scan_*", 1).matches(["tpu_custom_call", "scan_fwd"])
    assert not sr.kernel_cost("scan", 1).matches(["scan_fwd"])


def test_the_first_cost_that_matches_counts() -> None:
    first, second = sr.kernel_cost("scan_fwd", 1), sr.kernel_cost("scan_*", 2)
    facts = KernelFacts([first, second])
    assert (facts.cost(["scan_fwd"]), facts.cost(["scan_bwd"]), facts.cost(["other"])) == (first, second, None)
    assert facts.unused([["scan_fwd"]]) == (second,)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((7, 1), "name must be the name of a kernel or a glob, got 7"),
        (("", 1), "name must be the name"),
        (("k", "1"), "flops must be a whole number of at least 0, or a function .* got '1'"),
        (("k", -1), "flops must be"),
        (("k", True), "flops must be"),
        (("k", None), "flops must be"),
        (("k", float("inf")), "flops must be"),
        (("k", 1, 2.5), "bytes must be a whole number"),
    ],
)
def test_other_costs_are_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigTypeError, match=f"kernel_cost: {message}"):
        sr.kernel_cost(*args)


@pytest.mark.parametrize(
    ("flops", "message"),
    [
        (
            lambda x, w: x.size,
            r"flops raised TypeError: .* missing 1 required .* 'w'; bytes raised .* here 1: float32\[8, 4\]",
        ),
        (lambda x: None, "flops must return a number of at least 0, got None"),
        (lambda x: float("nan"), "flops must return a number of at least 0, got nan"),
        (lambda x: float("inf"), "flops must return a number of at least 0, got inf"),
        (lambda x: "7", "flops must return a number of at least 0, got '7'"),
        (lambda x: -x.size, "flops must return a number of at least 0, got -32; bytes raised KeyError: 'shape'"),
    ],
)
def test_functions_must_return_amounts(flops: Any, message: str) -> None:
    cost = sr.kernel_cost("scan_*", flops, bytes=lambda x: {}["shape"])
    with pytest.raises(ConfigTypeError, match=rf"kernel_cost 'scan_\*': {message}"):
        cost.amounts(read_types("(f32[8,4])"))


def test_fractions_of_functions_are_rounded_down() -> None:
    assert sr.kernel_cost("k", lambda x: x.size / 3).amounts(read_types("(f32[8])")) == (2, None)
