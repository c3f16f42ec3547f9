"""The part of list indices that patterns read: never less than they do, and of the usual patterns not more.

A pattern that reads as `"value"` without need makes planning slower by the number of layers.
"""

import itertools
import random
import re
from typing import Any

import pytest

from shardrules.rules.pattern import reads_index

USUAL = r"""
.* ^embed embedding|lm_head norm|bias (gate|up)_proj (^|/)norm(/|$) mlp/w1 w[12]/weight conv2d/kernel .*bias.* w#
[^/]+/norm \bscale\b (.*/)?w (?i)norm (?:gate|up)_proj biase?s? [qkv]_proj [A-Za-z_]+norm \S*norm\S* [^a-z]+/w
[\w-]+/kernel embed.+weight .+attn.+weight .+norm|.+bias (^|[./])norm([./]|$) 3x3/kernel 1x1conv block-\d+
attention/.*_proj/weight attention/(wq|wk|wv)/kernel attention/(q|k|v|o)_proj/weight$ attn/[qkv]_proj/weight
layers/\d+/mlp layers/[0-9]+/mlp/.* ^layers/\d+/mlp/(up|down)/weight$ layers/.*/mlp model/layers/\d+/self_attn/.*
experts/\d+/w\d h/[0-9]+/attn block_\d+/w layers/(\d+)/mlp/.* layers/[^/]+/mlp layers/.+/mlp layers.*mlp.up
layers/\d+/attn/[qkv]_proj/weight model\.layers\.\d+\.mlp layers\.\d+\.mlp\.experts\.\d+\.w[12] layers.\d+.mlp
layers/(?:\d+|head)/w layers/(?:head|\d+)/w a/(\d+|head)/b/(x|\d+) layers/\d+?/mlp layers/.*?/mlp layers/\d+/w#x
conv_1x1/\d+/w
"""


@pytest.mark.parametrize("pattern", USUAL.split())
def test_usual_patterns_cannot_tell_equal_layers_apart(pattern: str) -> None:
    assert reads_index(re.compile(pattern)) == "no"


WIDTHS = r"""
layers/\d/mlp layers/\d{2}/ layers/\d{1,3}/ layers/[0-9][0-9]/mlp layers/./mlp /\d\d layers/\d+\d+/
layers/(\d+)(\d+)/ layers/\d+.+ layers/\d++/ a(/\d+|\d+/)+b
"""


@pytest.mark.parametrize("pattern", WIDTHS.split())
def test_patterns_that_read_how_many_digits_an_index_has(pattern: str) -> None:
    assert reads_index(re.compile(pattern)) == "width"


VALUES = r"""
layers/3/mlp layers\.3\.mlp layers[^/]3 layers/[0-4]/ layers/[12]/ layers/(0|1)/ layers/1 layers/\d*[02468]/ ^0/
layers/[^0]/ layers/(?!0)\d+ (\d)/\1 layers/\x31/ 0$ layers/x?0 layers/[--9] layers/[\.-9] layers/(a|)1
"""


@pytest.mark.parametrize("pattern", [*VALUES.split(), r"layers/\N{DIGIT ONE}/", r"(?x)layers/\d+ \d+", "(?x)a #b\n0"])
def test_patterns_that_may_read_an_index(pattern: str) -> None:
    assert reads_index(re.compile(pattern)) == "value"


PIECES = (
    r"a b / _ - # 1 0 . \d \w \S \D \. \b ^ $ [0-9] [12] [ab] [^/] [^a] [^0] [a-b] [\d/] [--9] [\w-] ( (?: ) | \1 (?!0)"
)
QUANTIFIERS = ("", "", "", "", "*", "+", "?", "*?", "+?", "{2}", "++", "*+")
NAMES = ("{0}", "{1}", "a", "b1", "1b", "a-", "#2")
INDICES = ("0", "1", "9", "10", "21", "305")


def test_no_pattern_reads_more_than_it_says() -> None:
    rng = random.Random(0)
    count = 0
    while count < 1500:
        text = "".join(rng.choice(PIECES.split()) + rng.choice(QUANTIFIERS) for _ in range(rng.randint(1, 7)))
        try:
            pattern = re.compile(text)
        except re.error:
            continue
        reads = reads_index(pattern)
        if reads == "value":
            continue
        count += 1
        for _ in range(4):
            names = [rng.choice(NAMES) for _ in range(rng.randint(1, 4))]
            template = "".join(name + rng.choice("/.") for name in names)[:-1]
            for search in (pattern.search, pattern.match, pattern.fullmatch):
                answers: dict[Any, bool] = {}
                for indices in itertools.product(INDICES, repeat=2):
                    answer = search(template.format(*indices)) is not None
                    widths = tuple(map(len, indices)) if reads == "width" else ()
                    assert answers.setdefault(widths, answer) == answer, (text, template, indices)
