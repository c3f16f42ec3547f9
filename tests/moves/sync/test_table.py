"""Name tables: their text, TOML and patterns, and which line an array belongs to."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.moves.sync.pattern import PathPattern
from shardrules.reports import NameLine, NameTable

TOML = """
unused = ["opt/{*rest}", "step"]

[[line]]
source = "layers/{i}/w"
target = "w"
operations = "stack('i') | cast('bfloat16')"

[[line]]
source = ["a", "b"]
target = ["c", "größe"]
operations = "concat(0) | split(0, [1, 2])"

[[line]]
source = "embed"
target = "head"
operations = "tied()"
"""


@pytest.mark.parametrize("path", ["", "\N{GRINNING FACE}", "a\x7f", "tab\t'\"\\"])
def test_any_path_stands_in_toml(path: str) -> None:
    table = NameTable([(path, "b"), (["c", path], ["d"], "concat(0)")], [path])
    assert NameTable.from_toml(table.to_toml()) == table


def test_a_table_stands_in_toml(tmp_path: Path) -> None:
    table = NameTable.from_toml(TOML)
    assert table == NameTable(
        [
            ("layers/{i}/w", "w", "stack('i') | cast('bfloat16')"),
            NameLine(["a", "b"], ["c", "größe"], "concat(0) | split(0, [1, 2])"),
            {"source": "embed", "target": "head", "operations": "tied()"},
        ],
        ["opt/{*rest}", "step"],
    )
    assert NameTable.from_toml(table.to_toml()) == table
    table.save(tmp_path / "names.toml")
    assert NameTable.load(tmp_path / "names.toml") == NameTable.of(tmp_path / "names.toml") == table
    assert NameTable([]).to_toml() == ""
    assert (NameTable(table.lines[:1], "step") + NameTable(table.lines[1:])).unused == ("step",)
    assert str(table.lines[1]) == "[a, b] -> [c, größe]: concat(0) | split(0, [1, 2])"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("line = 3", "the lines of a name table must be a list, got 3"),
        ("lines = []", r"unknown key 'lines' \(did you mean 'line'\?\)"),
        ("[[line]]\nsource = 'a'", "line 1: it has no 'target'"),
        ("[[line]]\nsource = 3\ntarget = 'a'", "line 1: expected a pattern of paths"),
        ("[[line]\n", "it is not TOML"),
        ("unused = ['{a']", "has a brace"),
    ],
)
def test_toml_that_is_no_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(sr.errors.ConfigError, match=message):
        NameTable.from_toml(text)


@pytest.mark.parametrize(
    ("pattern", "path", "values"),
    [
        ("a/{x}/c", "a/b/c", {"x": "b"}),
        ("a/{x}/c", "a/b/b/c", None),
        ("a.{x}.c", "a.b.c", {"x": "b"}),
        ("a/{x}", "a/b.c", None),
        ("a/{*x}", "a/b.c/d", {"x": "b.c/d"}),
        ("a{*x}", "a", {"x": ""}),
        ("{i:3-60}/{name}_proj", "12/q_proj", {"i": "12", "name": "q"}),
        ("{i:3-60}/w", "2/w", None),
        ("{i:0-60:6}/w", "12/w", {"i": "12"}),
        ("{i:0-60:6}/w", "13/w", None),
        ("{i:0-9}", "x", None),
        ("a+b/{x}", "a+b/c", {"x": "c"}),
    ],
)
def test_patterns_match_whole_paths(pattern: str, path: str, values: dict[str, str] | None) -> None:
    assert PathPattern(pattern).match(path) == values
    if values is not None:
        assert PathPattern(pattern).fill(values) == path


def shapes(names: str) -> dict[str, jax.Array]:
    mesh = sr.create_mesh("a:8")
    return {
        name: jax.device_put(jnp.full((8,), float(index)), NamedSharding(mesh, P("a")))
        for index, name in enumerate(names.split())
    }


def values(source: str, target: str, table: NameTable) -> dict[str, float]:
    tree = shapes(source)
    result = sr.plan_sync(tree, shapes(target), names=table).run(tree)
    return {path: float(array[0]) for path, array in result.items()}


def test_the_first_line_that_matches_takes_an_array() -> None:
    table = NameTable([("b", "x"), ("{name}", "{name}"), ("{name}", "{name}2", "tied()")], "d")
    with pytest.raises(sr.errors.PlanError, match=r"d2: line 3 .*target lacks it"):
        values("a b c d", "a c x a2 b2 c2", table)
    table = NameTable([("b", "x"), ("{name}", "{name}"), ("b", "b2", "tied()")], "d")
    assert values("a b c d", "a c x b2", table) == {"a": 0, "b2": 1, "c": 2, "x": 1}


def test_layers_with_a_period_are_stacked_apart() -> None:
    """Each third layer is of another kind, and the first two have none of it."""
    mesh = sr.create_mesh("a:8")
    sharding = NamedSharding(mesh, P())
    tree = {
        f"layers/{index}/w": jax.device_put(jnp.full((3 + (index % 3 == 2),), index), sharding) for index in range(9)
    }
    kinds = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        for name, shape in (("first", (3, 3)), ("second", (3, 3)), ("third", (3, 4)))
    }
    names = [(f"layers/{{i:{start}-8:3}}/w", name, "stack('i')") for start, name in enumerate(kinds)]
    result = sr.plan_sync(tree, kinds, names=names).run(tree)
    assert [result[name][:, 0].tolist() for name in kinds] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    back = [(name, source, "unstack('i')") for source, name, _ in names]
    again = sr.plan_sync(result, tree, names=back).run(result)
    assert all(np.array_equal(again[path], tree[path]) for path in tree)
