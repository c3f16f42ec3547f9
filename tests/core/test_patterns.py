"""Patterns that backtrack are refused, patterns that only look like it are not, and names are never wrong."""

import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.patterns import MOST_REPEATS, backtracks, compile_pattern, names
from shardrules.presets import big_vision, eformer

TREE = {"layers": {"a" * 40 + "!": np.ones((8, 8), np.float32)}, "w": np.ones(8, np.float32)}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers/0/mlp", ("layers/0/mlp",)),
        (r"layers/\d+/mlp", ("layers/", "/mlp")),
        (r"model\.layers\.3\.", ("model.layers.3.",)),
        ("^w$", ("w",)),
        ("ab?c", ("a", "c")),
        ("ab*c+d", ("a", "c", "d")),
        ("ab{2}c", ("a", "c")),
        ("norm|bias", ()),
        ("(norm|bias)/w", ("/w",)),
        ("a[bc]d", ("a", "d")),
        ("a[]b]c[^]]d", ("a", "c", "d")),
        ("(?i)norm", ()),
        ("(?s)norm.x", ("norm", "x")),
        ("(?x)a b", ()),
        (r"a\x41b", ("a", "b")),
        (r"(a)\1b", ("b",)),
        ("", ()),
        ("a{b}#c", ("a{b}#c",)),
        ("a(?#b)c", ()),
    ],
)
def test_names_are_what_each_match_contains(pattern: str, expected: tuple[str, ...]) -> None:
    assert names(pattern) == expected


ATOMS = [*"ab/0", "[ab]", "[^/]", r"\d", r"\w", ".", r"\.", "(a|b)", "(?:ab)", "(a/)", "(?:a|0/)", "(?=a)", "(?!b)"]
REPEATS = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "*?", "+?", "??"]


def random_pattern(random_state: random.Random) -> str:
    parts = [random_state.choice(ATOMS) + random_state.choice(REPEATS) for _ in range(random_state.randrange(1, 6))]
    text = "".join(parts)
    return random_state.choice([text, text, f"^{text}", f"{text}$", f"{text}|b", f"({text})?a", f"(?i){text}"])


def test_a_match_contains_all_names_of_its_pattern() -> None:
    random_state = random.Random(0)
    matches = 0
    for _ in range(3000):
        pattern = random_pattern(random_state)
        for _ in range(8):
            path = "".join(random_state.choices("ab/0.A", k=random_state.randrange(8)))
            if re.search(pattern, path):
                matches += 1
                assert all(name in path for name in names(pattern)), (pattern, path)
    assert matches > 3000


HARMLESS = [
    *(".*", r"layers/\d+/(attn|mlp)/(q|k|v|o)_proj/(kernel|bias)", "norm|bias|scale|embed", r"(.*/)?w", "[^/]+/norm"),
    *(r"(?:gate|up)_proj", "(?i)norm", r"^model\.layers\.\d+\.mlp$", "(?:ab)*c", "layers/.*/mlp/.*", "a{2,5}b"),
    *(r"(\w+/)*w$", "(?:[^/]+/)*w", r"(/\w+)*$", r"(\d{1,3}\.)*w", "([A-Z][a-z]+)+", "(?:layers/|blocks/)+"),
    *("(attn/|attention/)+", r"((a|b)c)*w", r"(\w+/){3}", r"(\w+\w+){2}", r"(\d+|\w)w", "(é+/)+", "(a?)?w"),
    *(".*a.*b.*c.*d.*e.*f", r".*\d+.*[a-z]+.*\w+", r"layers_?\d+/?s?.*", r"(.)\1", r"(?P<x>a)(?P=x)*"),
    *("(?>a+)+$", "(a++)+$", "(?=a+)*w", r"(?:\w+\b/)+", "(?x)(a +/)+"),
]

ENDLESS = [
    *("(a+)+$", "(a*)*$", "(a|a)*$", "(a|aa)+$", "([a-z]+)*$", "(?:a+){2,}$", "((a+)b?)+$", r"(\w+\w+)+$"),
    *("(?i)(A+)+$", "(?i:(A|a)+)+$", "(a?){40}a{40}$", "a?" * 40 + "b", r"^(([a-z])+.)+[A-Z]([a-z])+$", "(é|ée?)*$"),
    *(r"(a\w*)+$", r"(a+|\w)+$", "(?=(a+)+!!)", r"(\x61|a)*$", r"(.)(\1?a)*$", "(a|aa){20}$", "(a+)+"),
]


@pytest.mark.parametrize("pattern", HARMLESS)
def test_patterns_that_only_look_bad_are_matched(pattern: str) -> None:
    compiled = compile_pattern(pattern, "me")
    start = time.process_time()
    for path in ["a" * 60 + "!", "a/" * 30 + "!", "layers/0/attn/q_proj/kernel!", "0" * 30 + "."]:
        assert isinstance(compiled.search(path), re.Match | None)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("pattern", ENDLESS)
def test_patterns_that_backtrack_are_errors(pattern: str) -> None:
    with pytest.raises(sr.errors.PatternError, match=r"may backtrack for years.* Write one repetition") as caught:
        compile_pattern(pattern, "owner")
    assert f"owner: pattern {pattern!r}" in str(caught.value)


def test_many_repetitions_in_a_row_are_errors() -> None:
    """With names between them, each ends in few places."""
    assert [backtracks(re.compile(r"\w+" * count + "x")) for count in (MOST_REPEATS + 1, MOST_REPEATS + 2)] == [
        False,
        True,
    ]
    assert not backtracks(re.compile(r".*x" * 20))


CALLS: dict[str, Callable[[], Any]] = {
    "rule": lambda: sr.RegexShardingRule([("w", P()), ("(a+)+$", P("data"))]),
    "many": lambda: sr.RegexShardingRule([*((f"x{i}/", P()) for i in range(99)), ("(a+)+$", P())]),
    "explain": lambda: sr.ReplicateShardingRule().plan(TREE).explain("(a+)+$"),
    "eformer": lambda: eformer.match_partition_rules([("(a+)+$", P()), (".*", P())], TREE),
    "eformer text": lambda: eformer.create_pattern_based_partition_spec("(a+)+$->data"),
    "big_vision": lambda: big_vision.make_mask_trees(TREE, [".*/(a+)+$", ".*"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_wherever_patterns_are_compiled_they_are_checked(name: str) -> None:
    with pytest.raises(sr.errors.PatternError, match="backtrack for years"):
        CALLS[name]()
