"""Every JSON document has a version, and the schema that the documentation shows."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.profiler import ProfileData
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.cli.main import main
from shardrules.programs.compiled.collectives import find_collectives
from shardrules.programs.compiled.program import read_program
from tests.house.source import REPOSITORY
from tests.programs.audits.sample_report import REPORT
from tests.programs.profiles.planes import PROGRAM, tpu_trace

PAGE = (REPOSITORY / "docs" / "json.md").read_text()
SCHEMAS = {
    name: json.loads(text) for name, text in re.findall(r'```json title="([\w-]+)"\n(.*?)\n```', PAGE, re.DOTALL)
}

_TYPES: dict[str, Any] = {"string": str, "array": list, "object": dict, "null": type(None), "boolean": bool}


def has_type(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, _TYPES[name])


def violations(value: Any, schema: dict[str, Any], where: str = "$") -> Iterator[str]:
    """What in a value differs from a schema, for the words of JSON Schema that the page uses."""
    if "anyOf" in schema and all(list(violations(value, part, where)) for part in schema["anyOf"]):
        yield f"{where}: none of {schema['anyOf']} fits {value!r:.60}"
    if "const" in schema and value != schema["const"]:
        yield f"{where} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is not in {schema['enum']}"
    if "type" in schema and not has_type(value, schema["type"]):
        yield f"{where} is not of type {schema['type']}: {value!r:.60}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), f"{where}[{index}]")
    elif isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (f"{where} has no {name!r}" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            if name not in properties and others is False:
                yield f"{where} has {name!r}, which is unknown"
            part = properties.get(name, others if isinstance(others, dict) else {})
            yield from violations(item, part, f"{where}.{name}")


def check(text: str, name: str) -> Any:
    data = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert list(violations(data, SCHEMAS[name])) == []
    assert next(iter(data)).startswith("shardrules")
    return data


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tree = {"up": [np.ones((8, 6), np.float32)] * 2, "é": np.ones(3, np.float32)}
    mesh = sr.mesh_shape("data:4")
    (tmp_path / "old.json").write_text(sr.AutoShardingRule().plan(tree, mesh).to_json())
    (tmp_path / "new.json").write_text(sr.RegexShardingRule([(".", P(None, "data"))]).plan(tree, mesh).to_json())
    (tmp_path / "small.json").write_text(sr.AutoShardingRule().plan(tree, sr.mesh_shape("data:2")).to_json())
    return tmp_path


COMMANDS = {
    "plan": ("plan", "old.json"),
    "an unsound plan": ("plan", "new.json"),
    "plans": ("plan", "old.json", "--optimizer", "adam"),
    "check": ("check", "new.json", "--level", "note"),
    "diff-of-plans": ("diff", "old.json", "new.json"),
    "a diff of meshes": ("diff", "old.json", "small.json"),
    "no diff": ("diff", "old.json", "old.json"),
}
NAMES = {"an unsound plan": "plan", "a diff of meshes": "diff-of-plans", "no diff": "diff-of-plans"}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_what_the_page_says(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMANDS[name], "--format", "json"]) in (0, 1)
    data = check(capsys.readouterr().out, NAMES.get(name, name))
    for part in ("model", "optimizer") if name == "plans" else ():
        assert list(violations(data[part], SCHEMAS["plan"])) == []


def test_plans_with_a_state_can_be_read_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "old.json", "--optimizer", "adam", "--format", "json"])
    (folder / "both.json").write_text(capsys.readouterr().out)
    assert main(["diff", "old.json", "both.json", "--exit-code"]) == 0


def test_audits_and_their_differences(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sr.mesh_shape("data:8")
    arguments = jnp.ones((64, 64)), jnp.ones((64, 64))
    for name, spec in (("a", P("data")), ("b", P(None, "data"))):
        report = sr.audit(lambda w, x: jnp.tanh(x @ w), *arguments, mesh=mesh, in_shardings=(spec, P("data")))
        check(report.to_json(), "audit")
        (folder / f"{name}.json").write_text(report.to_json())
    assert main(["diff", "a.json", "b.json", "--format", "json"]) == 0
    assert check(capsys.readouterr().out, "diff-of-audits")["figures"]


def test_comparisons() -> None:
    # An instruction by another name is only in the program.
    text = PROGRAM.replace("fusion.1", "fusion.7")
    report = attrs.evolve(REPORT, collectives=find_collectives(read_program(text)), hlo_text=text)
    comparison = report.compare(ProfileData.from_serialized_xspace(tpu_trace()))
    data = check(comparison.to_json(), "comparison")
    assert all(data[name] for name in ("devices", "lines", "collectives", "kernels", "unmatched", "missing"))


def test_autoplans() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    planned = sr.autoplan(step, jnp.ones((64, 64)), jnp.ones((64, 64)), mesh=sr.mesh_shape("data:2"))
    data = check(sr.reports.AutoPlanReport.of(planned, frontier=2).to_json(), "autoplan")
    assert list(violations(data["plan"], SCHEMAS["plan"])) == []


def test_training_plans() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ w) ** 2)

    w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    planned = sr.plan_training(loss, w, optax.sgd(0.1), x, cluster=sr.mesh_shape("data:2"))
    data = check(planned.to_json(), "train_plan")
    assert list(violations(data["plan"], SCHEMAS["plan"])) == []


def test_moves() -> None:
    mesh = sr.create_mesh("data:8")
    tree = sr.filter_shard({"w": jnp.ones((8, 8))}, P("data"), mesh)
    check(sr.plan_reshard(tree, P(None, "data"), mesh).to_json(), "moves")


@pytest.mark.parametrize("hardware", [None, "cuda:h100"])
def test_syncs(hardware: str | None) -> None:
    tree = sr.filter_shard({"w": jnp.ones((8, 8))}, P("data"), sr.create_mesh("data:8"))
    target = sr.DimShardingRule("model", 1).plan(
        {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, sr.mesh_shape("model:4")
    )
    sheet = None if hardware is None else sr.Hardware.named(hardware)
    check(sr.plan_sync(tree, target, hardware=sheet).to_json(), "sync")


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        ({"shardrules": 2}, r"\$\.shardrules is not 1"),
        ({"mesh": {"data": "4"}}, r"\$\.mesh: none of"),
        ({"leaves": [{}]}, r"\$\.leaves\[0\] has no 'paths'"),
        ({"extra": 1}, r"\$ has 'extra', which is unknown"),
        ({"findings": None}, r"\$\.findings is not of type array"),
    ],
)
def test_the_check_of_schemas_can_fail(change: dict[str, Any], violation: str) -> None:
    plan = json.loads(sr.AutoShardingRule().plan({"w": np.ones(8)}, sr.mesh_shape("data:4")).to_json())
    assert not list(violations(plan, SCHEMAS["plan"]))
    (first, *_) = violations({**plan, **change}, SCHEMAS["plan"])
    assert re.match(violation, first)
