"""Names in files of strangers do not act on a terminal or in the log of a CI service, whatever prints them."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.cli.command import NO_BACKEND, shardrules
from tests.cli.test_terminal import typed

MARKS = "\x1b[31m\r\x07\u202e\u2066\x9b\x85\u2028"
"""Colours, the start of the line, a bell, reversed text, C1, and two more ends of lines."""

EVIL = f"größe→{MARKS}\n::error::pwned"
TREE = {EVIL: np.ones((8, 6), np.float32), "::warning::hi": np.ones(4, np.float32), "##vso[x]y": np.ones(3, np.float32)}
MESH = sr.mesh_shape("data:4")

MODEL = f"""\
import jax.numpy as jnp
def make():
    return {{{EVIL!r}: jnp.ones((8, 6)), "::warning::hi": jnp.ones(4), "##vso[x]y": jnp.ones(3)}}
def raises():
    raise ValueError({EVIL!r})
def step():
    return (lambda w, x: x), make(), jnp.ones((8, 8))
"""


def acting(text: str, commands: bool = True) -> list[str]:
    """What in a text would act: characters that do not show, and commands to CI services."""
    lines = [line for line in text.split("\n") if line.lstrip().startswith("::") or "##vso[" in line]
    return [*(char for char in text if not char.isprintable() and char != "\n"), *(lines if commands else [])]


def plan_of(rule: sr.ShardingRule) -> sr.ShardingPlan:
    return rule.plan(TREE, MESH)


def evil_plan() -> str:
    """The JSON of a plan in which everything that a stranger may write is evil."""
    plan = plan_of(sr.RegexShardingRule([("größe", sr.FSDPShardingRule("data", 0)), (".", sr.ReplicateShardingRule())]))
    data = json.loads(plan.to_json())
    finding = {"code": EVIL, "message": EVIL, "path": EVIL, "remedy": EVIL, "rule": EVIL}
    finding |= {"severity": "warning", "dim": None, "axis": EVIL, "count": 1, "shape": None}
    for leaf in data["leaves"]:
        leaf |= {"rule": EVIL, "reason": EVIL, "findings": [finding]}
    data["findings"] = [finding]
    return json.dumps(data)


TEXTS = {
    "a table": lambda: str(plan_of(sr.AutoShardingRule())),
    "a repr": lambda: repr(plan_of(sr.AutoShardingRule())),
    "a notebook": lambda: plan_of(sr.AutoShardingRule())._repr_html_(),
    "a plan from a file": lambda: str(sr.ShardingPlan.from_json(evil_plan())),
    "findings": lambda: "\n".join(map(str, sr.ShardingPlan.from_json(evil_plan()).findings)),
    "an explanation": lambda: plan_of(sr.AutoShardingRule()).explain("größe"),
    "an explanation of a file": lambda: sr.ShardingPlan.from_json(evil_plan()).explain("größe"),
    "a difference": lambda: str(plan_of(sr.AutoShardingRule()).diff(plan_of(sr.ReplicateShardingRule()))),
    "a report": lambda: str(sr.ShardingAnalyzer(MESH).analyze(TREE, {name: P() for name in TREE})),
    "a page": lambda: sr.report_page(sr.ShardingPlan.from_json(evil_plan()), title=EVIL),
    "a picture": lambda: sr.picture(plan_of(sr.AutoShardingRule())).to_svg(),
}

ERRORS = {
    "an unsound plan": lambda: plan_of(sr.RegexShardingRule([(".", P(None, "data"))])).check(),
    "undecided leaves": lambda: plan_of(sr.DimShardingRule("data", 5)),
    "another tree": lambda: plan_of(sr.AutoShardingRule()).bind({"w": np.ones(3)}),
    "no such leaf": lambda: plan_of(sr.AutoShardingRule()).explain(f"{EVIL}("),
    "specs of another kind": lambda: sr.SpecTreeShardingRule({EVIL: 1}),
    "a bad mesh": lambda: sr.mesh_shape(EVIL),
    "a bad rule": lambda: sr.parse_rule(f"fsdp({EVIL!r}"),
    "specs that do not fit": lambda: sr.ShardingAnalyzer(MESH).analyze(TREE, dict.fromkeys(TREE, 1)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_do_not_act(name: str) -> None:
    text = TEXTS[name]()
    # In a page they are data, not lines of a log.
    assert acting(text, commands=name not in ("a page", "a picture", "a notebook")) == []
    assert "größe→" in text or name in ("a repr", "a report")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_do_not_act(name: str) -> None:
    with pytest.raises(sr.errors.ShardRulesError, match=r".") as caught:
        ERRORS[name]()
    assert acting(str(caught.value)) == []


def test_data_keeps_the_names() -> None:
    plan = plan_of(sr.AutoShardingRule())
    assert plan.decision(EVIL).spec is not None
    assert sr.ShardingPlan.from_json(plan.to_json()).paths == plan.paths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL, "utf-8")
    (tmp_path / "plan.json").write_text(evil_plan())
    (tmp_path / "old.json").write_text(plan_of(sr.ReplicateShardingRule()).to_json())
    (tmp_path / "evil.toml").write_text(f"[[rules]]\npath = {json.dumps(EVIL)}\nspce = []\n")
    header = {EVIL: {"dtype": "F32", "shape": [8, 6], "data_offsets": [0, 192]}}
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(192))
    header[EVIL]["dtype"] = EVIL
    data = json.dumps(header).encode()
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(192))
    return tmp_path


AUTO = ("--rules", "auto", "--mesh", "data:4")
COMMANDS = [
    ("plan", "model.py:make", *AUTO),
    ("plan", "model.safetensors", *AUTO, "--optimizer", "adam"),
    ("plan", "plan.json"),
    ("plan", "plan.json", "--format", "json"),
    ("check", "plan.json", "--level", "note"),
    ("check", "plan.json", "--format", "json"),
    ("check", "model.safetensors", *AUTO, "--budget", "1B", "--golden", "plan.json"),
    ("explain", "plan.json", "größe"),
    ("explain", "model.py:make", EVIL, *AUTO),
    ("diff", "old.json", "plan.json"),
    ("diff", "old.json", "plan.json", "--html"),
    ("report", "plan.json", "--title", EVIL),
    ("plan", "odd.safetensors", *AUTO),
    ("plan", "model.py:raises", *AUTO),
    ("plan", "model.py:make", "--rules", "evil.toml", "--mesh", "data:4"),
    ("plan", EVIL, *AUTO),
    ("plan", f"{EVIL}.py:make", *AUTO),
    ("plan", "model.py:make", "--rules", EVIL, "--mesh", "data:4"),
    ("plan", "model.py:make", "--rules", "auto", "--mesh", EVIL),
    ("plan", "model.py:make", *AUTO, "--optimizer", EVIL),
    ("plan", "model.py:make", *AUTO, f"--{EVIL}"),
    ("check", "model.py:make", *AUTO, "--format", EVIL),
    (EVIL,),
    ("audit", "model.py:step", *AUTO, "--target", EVIL),
    ("autoplan", "model.py:step", "--mesh", EVIL),
    ("diff", EVIL, EVIL),
    ("completion", EVIL),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]).replace(EVIL, "EVIL"))
def test_commands_do_not_act(words: tuple[str, ...], folder: Path) -> None:
    process = shardrules(*words, cwd=folder, env=NO_BACKEND)
    assert process.returncode in (0, 1, 2)
    assert process.stdout + process.stderr
    # In JSON, which is data, a name may look like a command.
    assert acting(process.stdout + process.stderr, commands="json" not in words) == []


def test_annotations_hold_one_line_each(folder: Path) -> None:
    process = shardrules("check", "plan.json", "--level", "note", "--format", "github", cwd=folder, env=NO_BACKEND)
    assert acting(process.stdout, commands=False) == []
    *annotations, _ = process.stdout.splitlines()
    assert annotations
    assert all(re.match(r"::(error|warning|notice) ", line) for line in annotations)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("plan",), ("check",), ("explain", "größe")], ids=lambda words: words[0])
def test_coloured_output_does_not_act(words: tuple[str, ...], folder: Path) -> None:
    text, code = typed(words[0], f"{folder}/plan.json", *words[1:], width=60, env=NO_BACKEND)
    assert code in (0, 1)
    # The colours are rich's own: none is red, which is for errors.
    assert not set(MARKS) - {"\x1b", "[", "3", "1", "m", "\r"} & set(text)
    assert "\x1b[31m" not in text
