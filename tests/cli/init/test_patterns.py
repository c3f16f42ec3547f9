"""Patterns for groups of paths."""

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from shardrules.cli.init.guess import Guess
from shardrules.cli.init.patterns import patterns

A, B, WHOLE = Guess((("a",),), "A"), Guess((("b",),), "B"), Guess((), "whole")


def texts(guesses: dict[str, Guess]) -> list[list[str]]:
    return [[pattern.text for pattern in group] for _, group in patterns([*guesses], [*guesses.values()])]


@pytest.mark.parametrize(
    ("guesses", "expected"),
    [
        ({"layers/0/up/weight": A, "layers/1/up/weight": A}, [["/up/weight$"]]),
        ({"layers/0/up/w": A, "layers/0/gate/w": A, "layers/0/down/w": B}, [["/(up|gate)/w$"], ["/down/w$"]]),
        ({"up": A, "backup": B}, [["^up$"], ["^backup$"]]),
        ({"up": A, "x/up": B}, [["^up$"], ["^x/up$"]]),
        ({"w/up": A, "x/w/up": B}, [["^w/up$"], ["^x/w/up$"]]),
        ({"layers/0/w": A, "layers/1/w": B, "layers/2/w": A}, [["^layers/(0|2)/w$"], ["^layers/1/w$"]]),
        ({"m/attn/up/w": A, "m/mlp/up/w": A, "m/head/up/w": B}, [["/(attn|mlp)/up/w$"], ["/head/up/w$"]]),
        ({"m/0/x": A, "m/0/y": A, "m/0/z": B}, [["/(x|y)$"], ["/z$"]]),
        ({"m/up/w": A, "m/gate/v": A, "m/gate/w": B}, [["/up/w$", "/v$"], ["/gate/w$"]]),
        ({"a/bias": WHOLE, "b/up/w": A, "b/bias": WHOLE}, [["/up/w$"], ["/bias$"]]),
        ({"embed/w": A, "norms/0/weight": WHOLE, "bias": WHOLE}, [["^embed/w$"], [r"^(norms/\d+/weight|bias)$"]]),
        ({"": A}, [["^$"]]),
        ({"a.b": A, "a+b": B}, [[r"^a\.b$"], [r"^a\+b$"]]),
        ({"x/~/linear_0/w": A}, [["/linear_0/w$"]]),
    ],
)
def test_endings_are_as_short_as_they_can_be(guesses: dict[str, Guess], expected: list[list[str]]) -> None:
    assert texts(guesses) == expected


def test_long_alternatives_become_several_patterns() -> None:
    guesses = {f"module/layer_number_{name}/weight": WHOLE for name in "abcdefghijkl"}
    [group] = texts(guesses)
    assert len(group) > 1
    assert all(len(text) < 130 for text in group)


NAMES = st.sampled_from(["a", "b", "ab", "w", "weight", "bias", "0", "1", "12", "x.y", "", "l_0"])
PATHS = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=4).map("/".join), st.sampled_from([A, B, WHOLE]), min_size=1
)


@hypothesis.given(PATHS)
def test_each_path_matches_only_its_own_guess(guesses: dict[str, Guess]) -> None:
    groups = patterns([*guesses], [*guesses.values()])
    for path, guess in guesses.items():
        winners = {other for other, group in groups for pattern in group if re.search(pattern.text, path)}
        assert winners == {guess}
    indices = sorted(index for _, group in groups for pattern in group for index in pattern.indices)
    assert indices == [*range(len(guesses))]
