"""On which line each key of a TOML file is."""

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrules.rules.files.lines import KeyPath, key_lines

NUMBERED = {
    "keys and tables": """\
a = 1  # a comment = 9
"b c" = 2

[t]
x = 5
[t.u]
'y z' = 7
""",
    "arrays of tables": """\
[[r]]
n = 2

[[r]]
n = 5
[r.deep]
m = 7
[[r.many]]
k = 9
[[r.many]]
k = 11
[[r]]  # the third
n = 13
""",
    "dotted keys": """\
d.e = 1
"f.g" . 'h i'.j = 2
[t."u.v"]
x.y = 4
x.z = 5
""",
    "inline tables": """\
list = {a = 1, b = [
  2,
  3]}
c = 4
[t]
list = [
[7],
{d = 8}]
e = 9
""",
    "values after strings of many lines": """\
a = \'\'\'
[[r]]
x = 3 \'\'\'
b = 4
[[r]]
list = [\"\"\"[[
\\\" [r]\"\"\"\", 7, "[",
']', '# [']  # [ {
c = 9
""",
    "values over many lines": """\
list = [
  [2,
   3], ]
b = 4
c = [
  ["x"]
]
d = 8
""",
}


def numbers(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from numbers(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from numbers(value, (*path, index))
    elif isinstance(data, int):
        yield path, data


@pytest.mark.parametrize("name", NUMBERED)
def test_keys_have_their_lines(name: str) -> None:
    lines = key_lines(NUMBERED[name])
    expected = list(numbers(tomllib.loads(NUMBERED[name])))
    assert len(expected) > 1
    for path, number in expected:
        assert lines[path] == number, path


def test_tables_have_lines_too() -> None:
    lines = key_lines(NUMBERED["arrays of tables"])
    assert [lines["r", index] for index in range(3)] == [1, 4, 12]
    assert lines["r", 1, "many", 1] == 10


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True),
            st.sampled_from(["1", '"x # y"', "'='", "[1, [2]]", "{a = 1, b = [{}]}", "1.5", "true", "[\n1,\n2\n]"]),
        ),
        unique_by=lambda pair: pair[0],
    )
)
def test_every_key_of_a_flat_file_has_its_line(pairs: list[tuple[str, str]]) -> None:
    line, expected, text = 1, {}, ""
    for key, value in pairs:
        expected[key,] = line
        text += f"{key} = {value} # note\n"
        line += value.count("\n") + 1
    assert set(tomllib.loads(text)) == {key for (key,) in expected}
    lines = key_lines(text)
    assert {path: line for path, line in lines.items() if len(path) == 1} == expected
