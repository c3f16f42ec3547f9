"""Wrong declarations are found, and right ones pass."""

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.errors import ConfigError, ConfigTypeError, ExpectationError
from tests.programs.regions.test_region import attention, real

SHAPES = [jax.ShapeDtypeStruct((4, 2, 6, 8), jnp.float32)] * 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("split", ["b h", "b h s"])
def test_right_declarations_pass(split: str) -> None:
    """Queries are independent of each other, keys are not."""
    sr.check_region(sr.region("b h s d, b h t d, b h t d -> b h s d", split=split)(attention), *SHAPES)


@pytest.mark.sample(1)
@pytest.mark.parametrize("letter", ["t", "d"])
def test_wrong_letters_are_named(letter: str) -> None:
    region = sr.region("b h s d, b h t d, b h t d -> b h s d", split=f"b {letter}")(attention)
    with pytest.raises(ExpectationError, match="region attention") as caught:
        sr.check_region(region, *SHAPES)
    lines = str(caught.value).splitlines()
    assert "region attention (b h s d, b h t d, b h t d -> b h s d) is not what it declares" in lines[0]
    assert all(f"{letter} in 2: " in line for line in lines[1:])
    assert "result 0 differs by up to" in lines[1]


def test_a_term_beside_a_sum_is_wrong() -> None:
    """Each shard would add it."""
    region = sr.region("m k, k n, n -> m n", split="k")(lambda a, b, c: a @ b + c)
    with pytest.raises(ExpectationError, match="k in 2: result 0 differs"):
        sr.check_region(region, real(4, 8), real(8, 6), real(6))


def test_a_wrong_gradient_is_wrong() -> None:
    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return x * 2

    scaled.defvjp(lambda x: (x * 2, x), lambda x, g: (2 * g * x.shape[0] / 4,))
    with pytest.raises(ExpectationError, match="gradient of operand 0 differs") as caught:
        sr.check_region(sr.region("r -> r", split="r")(lambda x: scaled(x)), real(4))
    assert "result" not in str(caught.value)


def test_indices_have_to_be_arrays() -> None:
    region = sr.region("r d, k -> k d", split="k")(lambda table, indices: table[indices])
    indices = jnp.array([1, 5, 1, 0])
    sr.check_region(region, real(6, 4), indices)
    with pytest.raises(ConfigTypeError, match=r"pass arrays: operand 1 is int32\[4\]"):
        sr.check_region(region, real(6, 4), jax.ShapeDtypeStruct((4,), jnp.int32))


def test_what_cannot_be_split_is_not_passed_over() -> None:
    region = sr.region("r d -> r d", split="r d")(lambda x: jax.nn.softmax(x, axis=0))
    with pytest.raises(ConfigError, match="cannot split 'r' of 11, 'd' of 13 over 8 devices"):
        sr.check_region(region, real(11, 13))


def test_alternatives_that_differ_are_wrong() -> None:
    double = sr.region("r d -> r d", split="r")(lambda x: 2 * x)
    other = sr.region("r d -> r d", split="d")(lambda x: 3 * x)
    with pytest.raises(ExpectationError, match=r"whole: result 0 differs by up to .*, from <lambda>"):
        sr.check_region(sr.alternatives(double, other), real(8, 8))
    sr.check_region(sr.alternatives(double, sr.region("r d -> r d", split="d")(lambda x: x + x)), real(8, 8))


def test_small_shards_are_tried() -> None:
    """Blocks of four rows are whole in halves, and not in eighths."""

    def by_blocks(x: Any) -> Any:
        blocks = x.reshape(-1, min(4, len(x)), x.shape[1])
        return (blocks - blocks.mean(1, keepdims=True)).reshape(x.shape)

    region = sr.region("r d -> r d", split="r")(by_blocks)
    with pytest.raises(ExpectationError, match="r in 8: result 0 differs") as caught:
        sr.check_region(region, real(8, 4))
    assert "r in 2" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "function", "line"),
    [
        ("a b -> b a", lambda x: x, r"a in 2: .*\(4, 8\) result 0 is float32\[4, 8\], and float32\[8, 4\] is declared"),
        (
            "a b -> a b",
            lambda x: jnp.resize(x, (8, 8)),
            r"a in 2: .* is float32\[8, 8\], and float32\[4, 8\] is declared",
        ),
        ("a b -> a b", lambda x: x.astype("f4" if len(x) == 8 else "f2"), r"result 0 is float16\[4, 8\]"),
        ("a b -> a b", lambda x: x.reshape(8, 8), "a in 2: .* cannot run on shards of shapes"),
    ],
)
def test_shards_of_other_types_are_wrong(rule: str, function: Any, line: str) -> None:
    region = sr.region(rule, split="a")(function)
    with pytest.raises(ExpectationError, match=line):
        sr.check_region(region, real(8, 8))


def test_letters_of_any_alphabet_are_split() -> None:
    sr.check_region(sr.region("ж ü -> ж ü", split="ж")(lambda x: jax.nn.softmax(x)), real(8, 4))


def test_infinities_may_be_equal() -> None:
    region = sr.region("r d -> r", split="r")(lambda x: jax.nn.logsumexp(x, axis=-1))
    sr.check_region(region, jnp.full((8, 4), -jnp.inf), gradients=False)


@pytest.mark.parametrize(
    ("value", "gradients", "line"),
    [
        (jnp.nan, False, "whole: result 0 is only NaN, so that nothing can be compared"),
        (jnp.nan, True, "whole: gradient of operand 0 is only NaN"),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_only_nan_is_not_a_pass(value: Any, gradients: bool, line: str, dtype: Any) -> None:
    x = jax.ShapeDtypeStruct((8, 4), dtype)
    with pytest.raises(ExpectationError, match=line):
        sr.check_region(sr.region("n d -> n d", split="n")(lambda x: x * value), x, gradients=gradients)


def test_only_regions_are_checked() -> None:
    with pytest.raises(ConfigTypeError, match=r"checks what shardrules\.region returns"):
        sr.check_region(attention, *SHAPES)


class Random:
    """A product of arrays, summed as an einsum does, and a softmax along letters that may not be split."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.sizes = dict(zip("abcd", draw.sample([2, 4, 6, 8], 4), strict=True))
        self.terms = ["".join(draw.sample("abcd", draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]
        letters = sorted({letter for term in self.terms for letter in term})
        self.result = "".join(draw.sample(letters, draw.randint(1, len(letters))))
        self.whole = "".join(draw.sample(self.result, draw.randint(0, len(self.result))))
        summed = [letter for letter in letters if letter not in self.result]
        # Letters that are summed before a softmax have to be whole.
        self.split = [
            letter for letter in letters if letter not in self.whole and not (self.whole and letter in summed)
        ]
        self.wrong = [letter for letter in letters if letter not in self.split and self.sizes[letter] > 1]
        self.dtype = draw.choice([jnp.float32, jnp.bfloat16])

    def run(self, *arrays: Any) -> Any:
        result = jnp.einsum(f"{','.join(self.terms)}->{self.result}", *arrays)
        dims = tuple(self.result.index(letter) for letter in self.whole)
        return jax.nn.softmax(2 * result, axis=dims) if dims else result

    def check(self, extra: str = "") -> None:
        rule = ", ".join(" ".join(term) for term in self.terms) + " -> " + " ".join(self.result)
        shapes = [jax.ShapeDtypeStruct(tuple(self.sizes[letter] for letter in term), self.dtype) for term in self.terms]
        sr.check_region(sr.region(rule, split=" ".join([*self.split, *extra]))(self.run), *shapes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_declarations_hold(seed: int) -> None:
    Random(seed).check()


WRONG = [seed for seed in range(100) if Random(seed).wrong][:20]


@pytest.mark.slow
@pytest.mark.parametrize("seed", WRONG)
def test_random_wrong_declarations_are_refused(seed: int) -> None:
    case = Random(seed)
    with pytest.raises(ExpectationError, match=f"{case.wrong[0]} in"):
        case.check(case.wrong[0])


def test_random_declarations_are_of_many_kinds() -> None:
    cases = [Random(seed) for seed in range(100)]
    assert len(WRONG) == 20
    assert sum(bool(case.whole) for case in cases) > 30
    assert sum(len(case.split) > 1 for case in cases) > 30
    assert all(math.prod(case.sizes.values()) < 1000 for case in cases)
