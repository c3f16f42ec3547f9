"""The line of each value of a TOML file, against files written so that each value is the number of its own line."""

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrules.cli.toml_lines import Place, toml_lines

TEXTS = {
    "keys and tables": """\
a = 1  # a comment = 9
"b c" = 2
d.e = 3

[t]
x = 6
[t.u]
'y z' = 8
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
[[r]]
n = 13
""",
    "values over many lines": '''\
a = """
[not] = 9
""" # 4
b = 4
c = [
  6, 7.5, # x = 1
  # y = 1
  [8,
   9], ]
d = 10
e = \'\'\'
{ \'\'\'
f = 13
g = 1979-05-27T07:32:00Z
h = "a \\" # b"
i = 16
''',
    "inline tables": """\
r = [
  {p = 2, q = {s = 2, t = [2, 2]}},
  {p = 3},
]
z = {a.b = 5, "c" = 5}
""",
}


def values(data: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    if isinstance(data, dict | list):
        for key, one in data.items() if isinstance(data, dict) else enumerate(data):
            yield from values(one, (*place, key))
    else:
        yield place, data


@pytest.mark.parametrize("name", TEXTS)
def test_each_number_stands_on_its_line(name: str) -> None:
    text = TEXTS[name]
    lines = toml_lines(text)
    found = [(place, value) for place, value in values(tomllib.loads(text)) if type(value) is int]
    assert len(found) > 4
    off = {("c", 0): 6, ("c", 2, 0): 8}  # these stand below the line of their key
    for place, value in found:
        assert lines[place] == off.get(place, value), place


def test_tables_have_lines_too() -> None:
    lines = toml_lines(TEXTS["arrays of tables"])
    assert [lines["r", number] for number in range(3)] == [1, 4, 12]
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
def test_every_key_of_a_flat_file_is_found(pairs: list[tuple[str, str]]) -> None:
    line, wanted, text = 1, {}, ""
    for key, value in pairs:
        wanted[key,] = line
        text += f"{key} = {value} # note\n"
        line += value.count("\n") + 1
    assert set(tomllib.loads(text)) == {key for (key,) in wanted}
    found = toml_lines(text)
    assert {place: found[place] for place in wanted} == wanted
