"""What patterns read of list indices. That it is never wrong is a law in test_laws; here, that it is not too careful.

A pattern that reads as `"value"` without need makes planning slower by the number of layers.
"""

import re

import pytest

from shardrules.rules.pattern import reads_index

USUAL = r"""
.*
^embed
embedding|lm_head
norm|bias
attention/.*_proj/weight
attention/(wq|wk|wv)/kernel
attention/(q|k|v|o)_proj/weight$
(gate|up)_proj
(^|/)norm(/|$)
layers/\d+/mlp
layers/[0-9]+/mlp/.*
^layers/\d+/mlp/(up|down)/weight$
layers/.*/mlp
model/layers/\d+/self_attn/.*
experts/\d+/w\d
mlp/w1
w[12]/weight
h/[0-9]+/attn
block_\d+/w
conv2d/kernel
.*bias.*
[^/]+/norm
\bscale\b
(.*/)?w
(?i)norm
(?:gate|up)_proj
layers/(\d+)/mlp/.*
layers/[^/]+/mlp
layers/.+/mlp
layers.*mlp.up
biase?s?
"""


@pytest.mark.parametrize("pattern", USUAL.split())
def test_usual_patterns_cannot_tell_equal_layers_apart(pattern: str) -> None:
    assert reads_index(re.compile(pattern)) == "no"


@pytest.mark.parametrize(
    "pattern",
    [
        # These read how many digits an index has.
        r"layers/\d/mlp",
        r"layers/\d{2}/",
        r"layers/[0-9][0-9]/mlp",
        r"layers/./mlp",
        r"/\d\d",
        r"layers/\d+\d+/",
        r"layers/(\d+)(\d+)/",
        r"layers/\d+.+",
        "layers/3/mlp",
        "layers/[0-4]/",
        "layers/[12]/",
        "layers/(0|1)/",
        "layers/1",
        r"layers/\d*[02468]/",
        "^0/",
        "layers/[^0]/",
        r"layers/(?!0)\d+",
        r"(\d)/\1",
        r"layers/\N{DIGIT ONE}/",
        r"layers/\x31/",
        "0$",
    ],
)
def test_patterns_that_may_read_an_index(pattern: str) -> None:
    assert reads_index(re.compile(pattern)) == "value"
