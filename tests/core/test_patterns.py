"""Patterns that backtrack are errors soon, patterns that only look like it are matched, and names are never wrong."""

import random
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.patterns import MOST_STEPS, guarded, outline
from shardrules.presets import big_vision, eformer

LONG = "layers/" + "a" * 40 + "!"
"""A path on which `(a+)+$` takes a day."""

TREE = {"layers": {"a" * 40 + "!": np.ones((8, 8), np.float32)}, "w": np.ones(8, np.float32)}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("pattern", "names"),
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
        (r"a\x41b", ()),
        (r"(a)\1b", ()),
        ("", ()),
        ("a{b}#c", ("a{b}#c",)),
    ],
)
def test_names_are_what_each_match_contains(pattern: str, names: tuple[str, ...]) -> None:
    assert outline(pattern).names == names


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
                assert all(name in path for name in outline(pattern).names), (pattern, path)
    assert matches > 3000


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            ".*",
            r"layers/\d+/(attn|mlp)/(q|k|v|o)_proj/(kernel|bias)",
            "norm|bias|scale|embed",
            r"(.*/)?w",
            "[^/]+/norm",
        ),
        *(r"(?:gate|up)_proj", "(?i)norm", r"^model\.layers\.\d+\.mlp$", "(?:ab)*c", "layers/.*/mlp/.*", "a{2,5}b"),
    ],
)
def test_usual_patterns_are_matched_here(pattern: str) -> None:
    assert outline(pattern).safe_length >= 300
    compiled = re.compile(pattern)
    assert guarded(compiled, "search", ["w" * 300], "me") == compiled.search


def test_a_bound_counts_the_ways_of_repetitions_in_a_row() -> None:
    lengths = [outline(".*a" * count).safe_length for count in range(1, 7)]
    assert lengths == sorted(lengths, reverse=True)
    assert outline("a?" * 19).safe_length > 0 >= outline("a?" * 24).safe_length
    assert 2**23 < MOST_STEPS < 2**24


HARMLESS = [
    r"(\w+/)*w$",
    r"(?:layers/|blocks/)+",
    r"((a|b)c)*w",
    r"(a+)+",
    ".*a.*b.*c.*d.*e.*f",
    r"(\d+|\w)*w",
    r"(.)\1",
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("match", ["search", "match", "fullmatch"])
@pytest.mark.parametrize("pattern", HARMLESS)
def test_patterns_that_only_look_bad_are_matched(pattern: str, match: str) -> None:
    paths = ["layers/0/w", "w", "", "aa", "blocks/layers/w", "acbcw", "é/w", "a" * 50]
    matches = guarded(re.compile(pattern), match, paths, "me")
    assert matches != getattr(re.compile(pattern), match)
    expected = [bool(getattr(re.compile(pattern), match)(path)) for path in paths]
    assert [bool(matches(path)) for path in paths] == expected
    assert bool(matches("another/w")) == bool(getattr(re.compile(pattern), match)("another/w"))


ENDLESS = [
    *(
        "(a+)+$",
        "(a*)*$",
        "(a|a)*$",
        "(a|aa)+$",
        "([a-z]+)*$",
        "(?:a+){2,}$",
        "((a+)b?)+$",
        r"(\w+\w+)+$",
        "(?i)(A+)+$",
    ),
    *("(a?){40}a{40}$", "a?" * 40 + "b", r"^(([a-z])+.)+[A-Z]([a-z])+$"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("pattern", ENDLESS)
def test_patterns_that_backtrack_are_errors(pattern: str) -> None:
    matches = guarded(re.compile(pattern), "search", ["w", LONG], "owner")
    assert matches("w") in (True, False)
    with pytest.raises(
        sr.errors.PatternError, match=r"(?s)owner: pattern .* backtracks .* Write one repetition"
    ) as caught:
        matches(LONG)
    assert repr(pattern) in str(caught.value)
    assert repr(LONG) in str(caught.value)


CALLS: dict[str, Callable[[], Any]] = {
    "rule": lambda: sr.RegexShardingRule([("w", P()), ("(a+)+$", P("data"))]).plan(TREE, sr.mesh_shape("data:4")),
    "apply": lambda: sr.RegexShardingRule([("(a+)+$", P())]).apply(TREE),
    "match": lambda: sr.RegexShardingRule([(".*/(a+)+$", P())], match="fullmatch").apply(TREE),
    "many": lambda: sr.RegexShardingRule([*((f"x{i}/", P()) for i in range(99)), ("(a+)+$", P())]).apply(TREE),
    "explain": lambda: sr.ReplicateShardingRule().plan(TREE).explain("(a+)+$"),
    "eformer": lambda: eformer.match_partition_rules([("(a+)+$", P()), (".*", P())], TREE),
    "eformer text": lambda: eformer.create_pattern_based_partition_spec("(a+)+$->data")(LONG, None),
    "big_vision": lambda: big_vision.make_mask_trees(TREE, [".*/(a+)+$", ".*"]),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CALLS)
def test_wherever_patterns_meet_paths_they_are_guarded(name: str) -> None:
    with pytest.raises(sr.errors.PatternError, match="backtracks for more than"):
        CALLS[name]()


def test_threads_are_guarded_too() -> None:
    errors: list[str] = []

    def run() -> None:
        try:
            CALLS["apply"]()
        except sr.errors.PatternError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_a_pattern_is_not_asked_about_leaves_that_others_took() -> None:
    # The last pattern is a default, and nothing reaches it.
    rule = sr.RegexShardingRule([("layers", P("data")), ("w", P()), (".*|(a+)+$", P())])
    assert rule.plan(TREE, sr.mesh_shape("data:4")).specs["w"] == P()


def test_a_later_path_is_asked_about_after_one_that_takes_too_long() -> None:
    matches = guarded(re.compile("(a+)+$"), "search", [LONG, "b", "aa"], "me")
    assert (matches("b"), matches("aa")) == (False, True)
    with pytest.raises(sr.errors.PatternError, match="backtracks"):
        matches(LONG)
    assert matches("aaa")
