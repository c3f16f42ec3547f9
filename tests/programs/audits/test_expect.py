"""Golden plans, expected collectives and room in memory: what is accepted, what is refused, and what is written."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import (
    ConfigError,
    ConfigTypeError,
    ExpectationError,
    PlanError,
    ReportError,
    ShardRulesError,
)
from shardrules.programs.audits.expect import assert_collectives, assert_fits, assert_plan_matches
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.flow import Times
from tests.house.pages import blocks
from tests.house.source import REPOSITORY
from tests.programs.audits.audited import Program, f32

DIFFER = "differ from those expected"
RULES = sr.DimShardingRule("model", -1) | sr.FSDPShardingRule("data", min_size_mb=0)


def make_plan(rule: sr.ShardingRule = RULES, width: int = 64, mesh: str = "data:4,model:2") -> sr.ShardingPlan:
    tree = {"embed": f32(32, 16), "blocks": [{"up": f32(16, width), "down": f32(width, 16)} for _ in range(3)]}
    return rule.plan(tree, sr.mesh_shape(mesh))


def step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        h = x
        for block in params:
            h = h + jnp.tanh(h @ block["up"]) @ block["down"]
        return jnp.mean(h**2)

    return jax.tree.map(lambda old, change: old - 0.1 * change, params, jax.grad(loss)(params))


PARAMS = [{"up": f32(64, 256), "down": f32(256, 64)} for _ in range(3)]
SPLIT = sr.RegexShardingRule([("up", P(None, "model")), ("down", P("model"))])
LOST = sr.RegexShardingRule([("up", P(None, "model"))])


def audit_of(rule: sr.ShardingRule) -> AuditReport:
    return Program(step, (PARAMS, f32(32, 64)), (rule, P("data")), out=rule, donate=0).audit("cpu")


@pytest.fixture(scope="module")
def report() -> AuditReport:
    """3 layers of 2 weights: 5 sums of activations over model, and all gradients in one sum over data."""
    return audit_of(SPLIT)


@pytest.fixture(scope="module")
def mixed() -> AuditReport:
    """Every kind of axes: one, both, a part of one; once, and in a loop of 3."""

    def body(x: Any) -> Any:
        x = lax.psum(x, ("data", "model"))
        x = lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]])
        x, _ = lax.scan(lambda x, _: (lax.ppermute(jnp.sin(x), "model", [(0, 1), (1, 0)]), None), x, length=3)
        return lax.all_gather(x, "data")

    def f(x: Any) -> Any:
        return jax.shard_map(body, in_specs=P(("data", "model")), out_specs=P("model"), check_vma=False)(x)

    return Program(f, (f32(64),), P(("data", "model"))).audit("cpu")


MIXED = {
    "all-gather over data": {"runs": 1, "wire_bytes": 96},
    "all-reduce over data+model": {"runs": 1, "wire_bytes": 56},
    "all-reduce over part of data": {"runs": 1, "wire_bytes": 32},
    "collective-permute over model": {"runs": 3, "wire_bytes": 96},
}
"""The shard is 8 floats, 32 bytes; the gather brings 4 of them together."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(complaint: str, call: Callable[..., None], *args: Any, **options: Any) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(ExpectationError, match=complaint) as error:
        call(*args, **options)
    return str(error.value)


def test_the_error_is_an_assertion_and_pickles() -> None:
    assert issubclass(ExpectationError, AssertionError)
    assert issubclass(ExpectationError, ShardRulesError)
    copy = pickle.loads(pickle.dumps(ExpectationError("one\ntwo")))
    assert (type(copy), str(copy)) == (ExpectationError, "one\ntwo")


# Golden plans.


def test_a_written_plan_matches(here: Path) -> None:
    plan = make_plan()
    assert_plan_matches(plan, "golden/deep/plan.json", update=True)
    file = here / "golden" / "deep" / "plan.json"
    assert file.read_text() == plan.to_json() + "\n"
    (here / "by_hand.json").write_text(plan.to_json())
    assert_plan_matches(plan, "by_hand.json", strict=True)
    for path in (file, str(file), Path("golden/deep/plan.json")):
        assert_plan_matches(plan, path)
        assert_plan_matches(plan, path, strict=True)
    assert [path.name for path in file.parent.iterdir()] == ["plan.json"]


def test_an_update_writes_only_what_changes(here: Path) -> None:
    file = here / "plan.json"
    assert_plan_matches(make_plan(), file, update=True)
    os.utime(file, (1, 1))
    assert_plan_matches(make_plan(), file, update=True)
    assert file.stat().st_mtime == 1
    assert_plan_matches(make_plan(width=32), file, update=True)
    assert file.stat().st_mtime > 1
    assert_plan_matches(make_plan(width=32), file)


def test_an_interrupted_update_leaves_the_old_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = here / "plan.json"
    assert_plan_matches(make_plan(), file, update=True)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        assert_plan_matches(make_plan(width=32), file, update=True)
    assert_plan_matches(make_plan(), file)
    assert [path.name for path in here.iterdir()] == ["plan.json"]


def test_an_update_leaves_links_and_rights(here: Path) -> None:
    (here / "real.json").write_text("{}")
    (here / "plan.json").symlink_to(here / "real.json")
    assert_plan_matches(make_plan(), "plan.json", update=True)
    assert (here / "plan.json").is_symlink()
    assert (here / "real.json").read_text() == make_plan().to_json() + "\n"
    (here / "other.json").touch()
    assert (here / "real.json").stat().st_mode == (here / "other.json").stat().st_mode


def test_missing_files_are_not_written(mixed: AuditReport, here: Path) -> None:
    for call, subject, name in ((assert_plan_matches, make_plan(), "plan"), (assert_collectives, mixed, "report")):
        update = rf"{call.__name__}\({name}, 'a/p.json', update=True\)"
        remedy = rf"\n    -> Write it, and keep it in your repository: {update}$"
        refusal(rf"^the file a/p\.json does not exist in {here}{remedy}", call, subject, "a/p.json")
        refusal(rf"^the file {here}/p\.json does not exist\n", call, subject, here / "p.json")
    assert list(here.iterdir()) == []


def test_a_difference_has_paths_and_bytes(here: Path) -> None:
    assert_plan_matches(make_plan(), "p.json", update=True)
    text = refusal(r"the plan differs from p\.json", assert_plan_matches, make_plan(width=62), "p.json")
    assert text == (
        "the plan differs from p.json:\n"
        "  blocks/*/down  x3  (62, 16)  (64, 16) float32 P('data', 'model') -> (62, 16) float32 P(None, 'model')  "
        "1.5 KiB -> 5.8 KiB per device\n"
        "  blocks/*/up  x3  (16, 62)  (16, 64) float32 P('data', 'model') -> (16, 62) float32 P('data', 'model')  "
        "1.5 KiB -> 1.5 KiB per device\n"
        "  6 leaves differ, +4.3 KiB per device\n"
        "  in total 3.2 KiB -> 7.5 KiB per device (+131.2%)\n"
        "    -> If this is intended, write it: assert_plan_matches(plan, 'p.json', update=True)"
    )
    on_other_mesh = make_plan(mesh="data:2,model:4")
    complaint = r"json:\n  mesh data:4,model:2 -> data:2,model:4\n(?s:.*)in total 3\.2 KiB"
    refusal(complaint, assert_plan_matches, on_other_mesh, "p.json")


def test_rules_and_reasons_count_only_where_strict(here: Path) -> None:
    assert_plan_matches(make_plan(), "p.json", update=True)
    other = sr.RegexShardingRule([("embed", P("data")), ("up|down", P("data", "model"))])
    text = refusal(
        r"\n  1 leaf differs, \+256 B per device\n", assert_plan_matches, make_plan(other), "p.json", strict=True
    )
    chain = "ChainShardingRule: dim 1 over 'model'; largest free dim over 'data'"
    regex = "RegexShardingRule: matches 'up|down'"
    assert f"\n  blocks/*/up  x3  P('data', 'model') by {chain} -> P('data', 'model') by {regex}\n" in text
    assert text.count("embed") == 1
    assert "RegexShardingRule" not in refusal("1 leaf differs", assert_plan_matches, make_plan(other), "p.json")

    same = make_plan().as_rule()
    assert_plan_matches(make_plan(same), "p.json")
    assert_plan_matches(make_plan(same), "by_path.json", update=True)
    assert_plan_matches(make_plan(same), "by_path.json", strict=True)
    complaint = r"by SpecTreeShardingRule(?s:.*)  in total 3\.2 KiB -> 3\.2 KiB per device\n"
    refusal(complaint, assert_plan_matches, make_plan(same), "p.json", strict=True)


def test_one_placement_has_many_spellings(here: Path) -> None:
    short, long = (sr.RegexShardingRule([(".", spec)]) for spec in (P("data"), P("data", None)))
    assert_plan_matches(make_plan(short), "p.json", update=True)
    assert_plan_matches(make_plan(long), "p.json")
    complaint = r"embed  P\('data'\) by \w+: matches '.' -> P\('data', None\) by"
    refusal(complaint, assert_plan_matches, make_plan(long), "p.json", strict=True)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text.replace('"model"', '"data"'), "this plan was changed after it was written"),
        (lambda text: f"<<<<<<< HEAD\n{text}", "this text is not a plan: JSONDecodeError"),
        (lambda text: "[]", "this text is not a plan: TypeError"),
        (lambda text: f"\udcff{text}", "this text is not a plan: JSONDecodeError"),
    ],
)
def test_an_invalid_plan_can_be_written_again(here: Path, damage: Any, complaint: str) -> None:
    text = damage(make_plan().to_json())
    (here / "p.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PlanError, match=rf"^p\.json: {complaint}(?s:.*)-> Write it again: assert_plan_matches\("):
        assert_plan_matches(make_plan(), "p.json")
    assert_plan_matches(make_plan(), "p.json", update=True)
    assert_plan_matches(make_plan(), "p.json")


# Collectives.


@pytest.mark.parametrize(
    "expected",
    [
        MIXED,
        {key: value["runs"] for key, value in MIXED.items()},
        {"*": 6},
        {"*": {}},
        {"*": {"runs": 6, "wire_bytes": 96 + 56 + 32 + 96}},
        {"*": {"max_runs": 6, "max_wire_bytes": 280}},
        {"all-reduce": 2, "*": 4},
        {"all-reduce": {"wire_bytes": 56 + 32}, "all-gather": 1, "collective-permute": {"max_runs": 4}},
        # The most specific key counts, in whatever order they stand.
        {"*": 4, "all-reduce": 1, "all-reduce over part of data": {"wire_bytes": 32}},
        {"all-reduce over part of data": {"wire_bytes": 32}, "all-reduce": 1, "*": 4},
        {"all-reduce over model+data": 1, "*": 5},
        {"all-gather over model": 0, "all-to-all": 0, "reduce-scatter": {"max_runs": 1}, "*": 6},
    ],
)
def test_collectives_that_are_expected(mixed: AuditReport, expected: Any) -> None:
    assert_collectives(mixed, expected)


@pytest.mark.parametrize(
    ("expected", "lines"),
    [
        ({"*": 7}, ["*: 7 runs expected, 6 found"]),
        ({"*": 1}, ["*: 1 run expected, 6 found"]),
        ({"*": {"wire_bytes": 1}}, ["*: 1 wire byte expected, 280 found"]),
        ({"*": {"wire_bytes": 1281}}, ["*: 1,281 wire bytes expected, 280 found"]),
        ({"*": {"max_runs": 5}}, ["*: at most 5 runs expected, 6 found"]),
        ({"*": {"max_wire_bytes": 279}}, ["*: at most 279 wire bytes expected, 280 found"]),
        (
            {"*": {"runs": 6, "wire_bytes": 2, "max_runs": 0}},
            ["*: 2 wire bytes expected, 280 found; at most 0 runs expected, 6 found"],
        ),
        ({"all-to-all": 2, "*": 6}, ["all-to-all: 2 runs expected, 0 found"]),
        ({"all-reduce over data": 1, "*": 6}, ["all-reduce over data: 1 run expected, 0 found"]),
        (
            {"all-reduce": 2, "all-gather over data": 3},
            [
                "all-gather over data: 3 runs expected, 1 found",
                "collective-permute over model: not expected, 3 runs and 96 wire bytes found",
            ],
        ),
        (
            {},
            [
                "all-reduce over data+model: not expected, 1 run and 56 wire bytes found",
                "all-reduce over part of data: not expected, 1 run and 32 wire bytes found",
                "collective-permute over model: not expected, 3 runs and 96 wire bytes found",
                "all-gather over data: not expected, 1 run and 96 wire bytes found",
            ],
        ),
    ],
)
def test_every_difference_is_listed(mixed: AuditReport, expected: Any, lines: list[str]) -> None:
    text = refusal(r"the collectives differ from those expected:\n", assert_collectives, mixed, expected)
    head, *reported, last = text.splitlines()
    assert head == "f on cpu, mesh data:4,model:2: the collectives differ from those expected:"
    assert sorted(line[2:] for line in reported if not line.startswith("    ")) == sorted(lines)
    runs = {key: value["runs"] for key, value in MIXED.items()}
    assert last == f"    -> If this is intended, expect it: {runs}"
    assert_collectives(mixed, runs)


def test_an_excess_lists_the_largest_collectives(report: AuditReport) -> None:
    lost = audit_of(LOST)
    lines = refusal(DIFFER, assert_collectives, lost, {"all-reduce": {"max_runs": 5}}).splitlines()
    source = Path(__file__).read_text().splitlines()
    update = next(
        line_number for line_number, line in enumerate(source, 1) if "jax.tree.map(lambda old, change" in line
    )
    index = lines.index("  all-gather over model: not expected, 3 runs and 98,304 wire bytes found")
    assert lines[index + 1] == f"    96.0 KiB in 3 runs: f32[256,64] at audits/test_expect.py:{update} (jit(step)/sub)"
    index = lines.index("  all-reduce: at most 5 runs expected, 6 found")
    assert lines[index + 1].startswith("    288.0 KiB in 1 run: f32[")
    assert " and 5 more at " in lines[index + 1]
    assert_collectives(report, {"all-reduce over model": 5, "all-reduce over data": 1})


def test_too_little_lists_no_collectives(report: AuditReport) -> None:
    text = refusal(DIFFER, assert_collectives, report, {"all-reduce": {"runs": 7}, "all-gather": 1})
    assert text.splitlines()[1:-1] == [
        "  all-reduce: 7 runs expected, 6 found",
        "  all-gather: 1 run expected, 0 found",
    ]


def test_equal_layers_are_one_line(report: AuditReport) -> None:
    def gather(path: str, payload: int, op: str) -> Collective:
        return Collective(
            "all-gather", ("data",), ("data",), 4, (), payload, payload, Times(2), "main", "c", op, (), (path, "")
        )

    paths = [(f"params/{layer}/{name}", size) for layer in range(3) for name, size in (("up", 512), ("down", 256))]
    collectives = (
        *(gather(path, size, "dot") for path, size in paths),
        *(gather("x", 1, f"op{op}") for op in range(3)),
    )
    with_layers = attrs.evolve(report, collectives=collectives)
    assert refusal(DIFFER, assert_collectives, with_layers, {"all-gather": 3}).splitlines()[1:-1] == [
        "  all-gather: 3 runs expected, 18 found",
        "    3.0 KiB in 6 runs: params/*/up (dot)",
        "    1.5 KiB in 6 runs: params/*/down (dot)",
        "    2 B in 2 runs: x (op0)",
        "    2 more",
    ]


def test_collectives_that_move_nothing_do_not_count(report: AuditReport) -> None:
    idle = Collective("all-gather", (), (), 1, (), 64, 0, Times(4), "main", "c")
    with_idle = attrs.evolve(report, collectives=(*report.collectives, idle))
    assert_collectives(with_idle, {"all-gather": 0, "all-reduce": 6})


def test_groups_without_axes_can_be_expected(report: AuditReport, here: Path) -> None:
    odd = Collective("all-gather", None, (), 4, (), 64, 48, Times(1), "main", "c")
    alone = attrs.evolve(report, collectives=(odd,))
    assert_collectives(alone, "c.json", update=True)
    assert_collectives(alone, "c.json")
    assert_collectives(alone, {"all-gather over groups of 4": 1, "all-gather": 0})


def test_all_invalid_expectations_are_listed(mixed: AuditReport) -> None:
    expected: Any = {
        "all-gahter": 1,
        "all-reduce over dta": {"run": 1, "wire_bytes": -1, "max_runs": 1.0},
        "all-reduce over data+model": True,
        "all-reduce over model+data": 1,
        "all-to-all over data+data": 1,
        "all-to-all over part of mdel": None,
        "* over data": 1,
        3: 1,
        "all-gather": 1,
    }
    kinds = (
        "the kinds are all-gather, all-reduce, reduce-scatter, all-to-all, ragged-all-to-all, collective-permute, "
        "collective-broadcast"
    )
    limits = "the limits are runs, wire_bytes, max_runs, max_wire_bytes"
    with pytest.raises(ConfigError, match="invalid expected collectives") as error:
        assert_collectives(mixed, expected)
    assert str(error.value).splitlines()[1:] == [
        f"  'all-gahter': unknown kind 'all-gahter' (did you mean 'all-gather'?); {kinds}",
        "  'all-reduce over dta': unknown axis 'dta' (did you mean 'data'?); the mesh has (data, model)",
        f"  'all-reduce over dta': unknown limit 'run' (did you mean 'runs'?); {limits}",
        "  'all-reduce over dta': wire_bytes must be an integer, 0 or more; got -1",
        "  'all-reduce over dta': max_runs must be an integer, 0 or more; got 1.0",
        "  'all-reduce over data+model': runs must be an integer, 0 or more; got True",
        "  'all-reduce over model+data': the same as 'all-reduce over data+model'",
        "  'all-to-all over data+data': axis 'data' is named twice",
        "  'all-to-all over part of mdel': unknown axis 'mdel' (did you mean 'model'?); the mesh has (data, model)",
        "  'all-to-all over part of mdel': runs must be an integer, 0 or more; got None",
        "  '* over data': '*' is for all others, over any axes",
        "  3: keys are strings, such as 'all-gather over data'",
    ]


def test_expected_must_be_a_mapping(mixed: AuditReport, here: Path) -> None:
    not_a_mapping: Any = 6
    with pytest.raises(
        ConfigTypeError, match="the expected collectives must be a mapping from strings to numbers, got 6"
    ):
        assert_collectives(mixed, not_a_mapping)
    (here / "c.json").write_text("[1]")
    with pytest.raises(ConfigTypeError, match=r"the expected collectives in c\.json must be a mapping .* got \[1\]"):
        assert_collectives(mixed, "c.json")


def test_collectives_are_written_sorted(mixed: AuditReport, report: AuditReport, here: Path) -> None:
    assert_collectives(mixed, "golden/c.json", update=True)
    file = here / "golden" / "c.json"
    text = file.read_text()
    assert json.loads(text) == MIXED
    assert text == json.dumps(MIXED, indent=1, sort_keys=True) + "\n"
    for path in (file, str(file)):
        assert_collectives(mixed, path)
    os.utime(file, (1, 1))
    assert_collectives(mixed, file, update=True)
    assert file.stat().st_mtime == 1
    remedy = r"    -> If this is intended, write it: assert_collectives\(report, 'golden/c.json', update=True\)$"
    complaint = rf"{DIFFER} in golden/c\.json:\n(?s:.*)  all-reduce over model: not expected(?s:.*){remedy}"
    refusal(complaint, assert_collectives, report, "golden/c.json")
    assert_collectives(report, file, update=True)
    assert_collectives(report, file)


def test_a_program_without_collectives_expects_none(report: AuditReport, here: Path) -> None:
    alone = attrs.evolve(report, collectives=())
    assert_collectives(alone, "c.json", update=True)
    assert (here / "c.json").read_text() == "{}\n"
    assert_collectives(alone, "c.json")
    refusal("all-reduce over model: not expected", assert_collectives, report, "c.json")


def test_a_file_that_was_edited_is_read(mixed: AuditReport, here: Path) -> None:
    (here / "c.json").write_text('{"all-reduce": {"max_wire_bytes": 88}, "*": {}}')
    assert_collectives(mixed, here / "c.json")
    (here / "c.json").write_text('{"all-reduce": {"max_wire_bytes": 87}, "*": {}}')
    refusal("all-reduce: at most 87 wire bytes expected, 88 found", assert_collectives, mixed, here / "c.json")


def test_a_mapping_is_not_updated(mixed: AuditReport) -> None:
    with pytest.raises(ConfigError, match="update=True writes a file: pass its path as expected, not a mapping"):
        assert_collectives(mixed, MIXED, update=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "Expecting property name"),
        ('{"*": 6, "*": 6}', r"duplicate keys '\*'"),
        ('{"*": {"runs": 6, "runs": 7}}', "duplicate keys 'runs'"),
    ],
)
def test_invalid_json_can_be_written_again(mixed: AuditReport, here: Path, text: str, complaint: str) -> None:
    (here / "c.json").write_text(text)
    remedy = r"-> Write it again: assert_collectives\(report, 'c.json', update=True\)$"
    with pytest.raises(ReportError, match=rf"^c\.json cannot be read as JSON: {complaint}(?s:.*){remedy}"):
        assert_collectives(mixed, "c.json")
    assert_collectives(mixed, "c.json", update=True)
    assert_collectives(mixed, "c.json")


# Memory.


def needing(report: AuditReport, size: int) -> AuditReport:
    none = dict.fromkeys(attrs.asdict(report.memory), 0)
    return attrs.evolve(report, memory=attrs.evolve(report.memory, **{**none, "temporaries_bytes": size}))


@pytest.mark.parametrize(
    "budget",
    [10**6, 1e6, "1000000 B", "1MB", "1 MB", " 1000 kB", "1000KB", "0.001 GB", "0.000001TB"],
)
def test_budgets_are_numbers_or_texts(report: AuditReport, budget: Any) -> None:
    assert_fits(needing(report, 10**6), budget)
    too_much = r"1 B \(1 byte\) more than the 976\.6 KiB of the budget\n"
    refusal(too_much, assert_fits, needing(report, 10**6 + 1), budget)


def test_a_reserve_is_kept_free(report: AuditReport) -> None:
    peak = report.peak_bytes
    assert_fits(report)
    assert_fits(report, peak + 1, reserve=1)
    assert_fits(report, f"{peak + 2**20} B", reserve="1MiB")
    exact = attrs.evolve(report, hardware=attrs.evolve(report.hardware, memory_bytes=peak))
    assert_fits(exact)
    refusal(r"1 B \(1 byte\) more than", assert_fits, exact, reserve=1)


@pytest.mark.parametrize(("text", "size"), [("1KiB", 2**10), ("1MiB", 2**20), ("1.5 GiB", 3 * 2**29), ("1TiB", 2**40)])
def test_binary_units(report: AuditReport, text: str, size: int) -> None:
    assert_fits(needing(report, size), text)
    refusal("does not fit", assert_fits, needing(report, size + 1), text)


def test_an_error_says_what_does_not_fit(report: AuditReport) -> None:
    shares = report.memory.shares()
    assert shares["parameters"] == 3 * 2 * 64 * 256 * 4 // 2
    over = report.peak_bytes - 150_000
    text = refusal("does not fit", assert_fits, report, 160_000, reserve=10_000)
    head, parts, title, first, second, batch, remedy = text.splitlines()
    assert head == (
        f"step on cpu, mesh data:4,model:2, does not fit: a device needs {report.peak_bytes / 1024:.1f} KiB, "
        f"{over / 1024:.1f} KiB ({over:,} bytes) more than the 146.5 KiB left of 156.2 KiB of the budget"
    )
    listed = [part.split() for part in parts.strip().split(", ")]
    assert [part[0] for part in listed if part[0] in ("temporaries", "parameters", "batch")] == sorted(
        ("temporaries", "parameters", "batch"), key=lambda name: -shares[name]
    )
    assert f"parameters 192.0 KiB ({shares['parameters'] / report.peak_bytes:.0%})" in parts
    assert "padding" not in parts  # there is none on CPUs
    assert (title, first, second, batch) == (
        "  largest arguments:",
        "    96.0 KiB: params/*/down  x3  (256, 64) float32 P('model')",
        "    96.0 KiB: params/*/up  x3  (64, 256) float32 P(None, 'model')",
        "    2.0 KiB: x  (32, 64) float32 P('data')",
    )
    assert remedy.startswith("    -> ")


def test_the_hardware_is_the_default_budget(report: AuditReport) -> None:
    small = attrs.evolve(sr.Hardware.named("cuda:h100"), name="tiny", memory_bytes=1024)
    on_small = attrs.evolve(report, hardware=small)
    refusal(r"more than the 1\.0 KiB of tiny\n", assert_fits, on_small)
    refusal(r"more than the 24 B left of 1\.0 KiB of tiny\n", assert_fits, on_small, reserve=1000)
    assert_fits(on_small, "1 GiB")


@pytest.mark.parametrize(
    ("share", "remedy"),
    [
        ("parameters_bytes", "Split the parameters over more axes"),
        ("state_bytes", "Split the optimizer's state as the parameters are"),
        ("batch_bytes", "Make the batch smaller, or split it"),
        ("padding_bytes", "Pick sizes that fill the tiles"),
        ("outputs_bytes", "Donate the arguments that results replace"),
        ("temporaries_bytes", "Make the batch smaller, split activations, or recompute them"),
    ],
)
def test_the_remedy_is_for_the_largest_share(report: AuditReport, share: str, remedy: str) -> None:
    heavy = attrs.evolve(report, memory=attrs.evolve(report.memory, **{share: 2**30}))
    refusal(rf"\n    -> {remedy}", assert_fits, heavy, "1 MiB")


@pytest.mark.parametrize(
    "value",
    ["80", "80 gb", "GB", "-1 GB", "80 GB/s", "1e9 B", "", "1,000 B", -1, True, float("nan"), float("inf"), b""],
)
def test_bad_numbers_of_bytes_are_refused(report: AuditReport, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^budget must be .*bytes.*; got "):
        assert_fits(report, value)
    with pytest.raises(ConfigError, match=r"^reserve must be .*bytes.*; got "):
        assert_fits(report, reserve=value)


def test_reserve_must_be_within_the_budget(report: AuditReport) -> None:
    with pytest.raises(ConfigError, match=r"reserve is 2\.0 GiB, more than the available 1\.0 GiB"):
        assert_fits(report, "1 GiB", reserve="2 GiB")


# The flag of the documentation, in a project of its own.

PROJECT = """
import os

import jax, jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.programs.audits.expect import assert_plan_matches

def plan(width):
    return sr.DimShardingRule("data", 0).plan({"w": jax.ShapeDtypeStruct((8, width), jnp.float32)})

def test_plan(update_golden):
    assert_plan_matches(plan(4), "golden/plan.json", update=update_golden)

@pytest.mark.skipif("CHANGED" not in os.environ, reason="the width is as it was")
def test_wider(update_golden):
    assert_plan_matches(plan(6), "golden/plan.json", update=update_golden)
"""


@pytest.mark.slow
def test_the_flag_of_the_documentation(here: Path) -> None:
    page = (REPOSITORY / "docs" / "how-to" / "golden-plans.md").read_text()
    (conftest,) = [block.text for block in blocks(page) if block.text.startswith("# conftest.py\n")]
    (here / "conftest.py").write_text(conftest)
    (here / "test_project.py").write_text(PROJECT)

    def pytest_says(*flags: str, **variables: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", **variables}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        return run.returncode, run.stdout

    code, text = pytest_says()
    assert code == 1
    assert "the file golden/plan.json does not exist" in text
    assert sorted(path.name for path in here.iterdir()) == ["conftest.py", "test_project.py"]
    code, text = pytest_says("--update-golden")
    assert (code, (here / "golden" / "plan.json").exists()) == (0, True)
    code, text = pytest_says(CHANGED="1")
    assert code == 1
    assert "1 failed, 1 passed" in text
    assert "the plan differs from golden/plan.json" in text
    assert "test_project.py:18: ExpectationError" in text  # the line of the test, and none of the package
    assert "audits/expect.py" not in text
