"""Declarations are read, and what does not fit them is listed."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.errors import ConfigError, ConfigTypeError
from shardrules.programs.regions.declaration import Declaration

ATTENTION = "b h s d, b h t d, b h t d -> b h s d"


def parse(text: str, split: str | None = None, whole: str | None = None) -> Declaration:
    return Declaration.parse(text, split, whole)


@pytest.mark.parametrize(("split", "whole"), [("b h", None), (None, "s t d"), ("h b", "t d s")])
def test_split_and_whole_letters_complete_each_other(split: str | None, whole: str | None) -> None:
    assert parse(ATTENTION, split, whole).split == ("b", "h")


def test_letters_may_be_words_and_arrays_scalars() -> None:
    declaration = parse("rows dim, -> rows dim, ", split="rows")
    assert declaration.operands == (("rows", "dim"), ())
    assert declaration.results == (("rows", "dim"), ())


@pytest.mark.parametrize(
    ("text", "split", "whole", "parts"),
    [
        ("m k, k n", "m", None, ['"->"']),
        ("m -> m -> m", "m", None, ['"->"']),
        ("m m -> m", "m", None, ["'m' is in 2 dims of operand 0"]),
        ("m 2 -> m", "m", None, ["'2' in operand 0 is not a name"]),
        ("m k -> m", None, None, ["split= or whole="]),
        ("m k -> m", "m b", None, ["'b' is in no array"]),
        ("m k -> m", "m", "m k", ["'m' cannot be both"]),
        ("m -> m k", "m k", None, ["'k' is in no operand"]),
        ("m k -> m", "m", "", ["'k' is neither in split nor in whole"]),
        ("m m, k -> _n", "b", None, ["'m' is in 2 dims", "'_n' in result 0", "'b' is in no array"]),
    ],
)
def test_errors_list_everything(text: str, split: str | None, whole: str | None, parts: list[str]) -> None:
    with pytest.raises(ConfigError, match="region") as caught:
        parse(text, split, whole)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("arguments", [(3, "b", None), ("b -> b", ("b",), None), ("b -> b", None, 1)])
def test_anything_but_strings_is_refused(arguments: tuple) -> None:
    with pytest.raises(ConfigTypeError, match="must be letters in a string"):
        Declaration.parse(*arguments)


@pytest.mark.parametrize(
    ("operands", "results", "parts"),
    [
        ([(4, 8), (8, 6)], [(4, 6)], []),
        ([(4, 8)], None, ["2 operands are declared, and the function has 1"]),
        ([(4, 8), (6, 6)], None, ["'k' is 8 in operand 0 and 6 in operand 1"]),
        ([(4,), (8, 6)], [(4, 5)], ["operand 0 has shape (4,)", "'n' is 6 in operand 1 and 5 in result 0"]),
        ([(4, 8), (8, 6)], [], ["1 results are declared"]),
    ],
)
def test_misfits_of_shapes(operands: list, results: list | None, parts: list[str]) -> None:
    problems = parse("m k, k n -> m n", "m").misfits(operands, results)
    assert len(problems) == len(parts)
    assert all(part in problem for part, problem in zip(parts, problems, strict=True))


def test_results_are_sums_over_split_letters_that_they_lack() -> None:
    declaration = parse("m k, k n -> m n, m k", "m k n")
    assert declaration.summed(0) == ("k",)
    assert declaration.summed(1) == ("n",)


SIZES = {"m": 8, "k": 6, "n": 4}


@pytest.mark.parametrize(
    ("operands", "result", "expected"),
    [
        ((P("x"), P()), P(), {"m": ("x",)}),
        ((P("x"), P()), P("y"), {"m": ("y",)}),
        ((P("x", "y"), P()), P(None, "x"), {"n": ("x",), "k": ("y",)}),
        ((P(("x", "y")), P()), P(), {"m": ("x", "y")}),
        ((P(None, "z"), P()), P(), {}),  # 6 elements on 4 devices
        ((P(None, "y"), P("x")), P(), {"k": ("y",)}),
    ],
)
def test_axes_are_taken_from_specs_results_first(operands: tuple, result: P, expected: dict) -> None:
    declaration = parse("m k, k n -> m n", "m k n")
    axes = declaration.axes_of(operands, [result], {"x": 2, "y": 2, "z": 4}, SIZES)
    assert axes.letters == expected


def test_whole_letters_are_never_split() -> None:
    declaration = parse("m k, k n -> m n", "m")
    axes = declaration.axes_of([P("x", "y"), P("y")], [P(None, "y")], {"x": 2, "y": 2}, SIZES)
    assert declaration.specs(axes) == ((P(("x",), None), P(None, None)), (P(("x",), None),))


def test_a_call_that_does_not_fit_says_so() -> None:
    @sr.region("m k, k n -> m n", split="m")
    def matmul(a: Any, b: Any) -> Any:
        return (a @ b)[:, :1]

    with pytest.raises(
        ConfigError, match=r"region matmul \(m k, k n -> m n\): 'n' is 6 in operand 1 and 1 in result 0"
    ):
        matmul(jnp.ones((2, 4)), jnp.ones((4, 6)))
