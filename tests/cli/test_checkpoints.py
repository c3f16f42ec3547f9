"""Checkpoints as models: planned from headers, or from an index and a configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

import shardrules as sr
from shardrules.cli.errors import UsageError
from shardrules.cli.models import load_model
from shardrules.core.check import LARGE_BYTES
from shardrules.presets.huggingface.rule import with_head_dim
from shardrules.presets.huggingface.shapes import checkpoint_shapes
from tests.cli.command import NO_BACKEND, shardrules
from tests.presets.huggingface.checkpoints import CHECKPOINTS, Checkpoint

INDEX = "model.safetensors.index.json"
WIDTHS = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def download(folder: Path, checkpoint: Checkpoint, **config: Any) -> Path:
    """Writes the index and the configuration of a checkpoint, and returns the index."""
    weight_map = {name: f"model-{index % 4:05}.safetensors" for index, name in enumerate(checkpoint.names)}
    index = {"metadata": {"total_size": checkpoint.total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(checkpoint.config | config))
    return folder / INDEX


def write_headers(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the headers of the files of a checkpoint, without the tensors."""
    files: dict[str, dict[str, Any]] = {}
    for index, (name, (dtype, shape)) in enumerate(checkpoint_shapes(checkpoint.config, checkpoint.names).items()):
        header = files.setdefault(f"model-{index % 4:05}.safetensors", {})
        start = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        size = WIDTHS[dtype]
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}
    for file, header in files.items():
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)


def plan_of(path: Path, mesh: str = "data:16,model:8") -> sr.ShardingPlan:
    model = load_model(str(path))
    rule = sr.parse_rule("hf") if model.head_dim is None else with_head_dim(sr.parse_rule("hf"), model.head_dim)
    return rule.plan(model.tree, sr.mesh_shape(mesh))


MANY_EXPERTS = ("deepseek v3", "qwen 3 30b a3b")
"""Checkpoints of so many tensors that reading their names takes seconds."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in MANY_EXPERTS else ()) for name in CHECKPOINTS]
)
def test_an_index_and_a_configuration_are_planned(tmp_path: Path, name: str) -> None:
    checkpoint = CHECKPOINTS[name]
    plan = plan_of(download(tmp_path, checkpoint)).check()
    assert len(plan.leaves) == len(checkpoint.names)
    assert plan.memory().total_bytes == checkpoint.total_bytes
    # Two of these models have four key and value heads.
    assert {finding.code for finding in plan.findings if finding.severity != "note"} <= {"whole-heads"}
    # Layers, and the experts in them, are one row each.
    assert len(plan.rows) < 75
    for leaf, decision in zip(plan.kinds, plan.decisions, strict=True):
        assert leaf.nbytes < LARGE_BYTES or (decision.spec is not None and any(decision.spec)), leaf.path


@pytest.mark.parametrize("name", ["llama 3 8b", "gpt-oss 20b"])
def test_headers_are_planned_alike(tmp_path: Path, name: str) -> None:
    expected = plan_of(download(tmp_path, CHECKPOINTS[name]))
    write_headers(tmp_path, CHECKPOINTS[name])
    (tmp_path / "config.json").write_text('{"head_dim": 128}' if name == "llama 3 8b" else "{}")
    for path in (tmp_path, tmp_path / INDEX):
        assert plan_of(path) == expected


def test_the_command_plans_an_index(tmp_path: Path) -> None:
    download(tmp_path, CHECKPOINTS["llama 3 8b"])
    words = ("plan", INDEX, "--rules", "hf", "--mesh", "data:16,model:8")
    text = shardrules(*words, cwd=tmp_path, env=NO_BACKEND).stdout
    assert "model/layers/*/mlp/up_proj/weight  x32" in text
    assert "291 arrays, 15.0 GiB in all, 120.2 MiB per device (0.8% of the whole), mesh data:16,model:8" in text


def test_a_configuration_shows_the_size_of_heads(tmp_path: Path) -> None:
    plan = plan_of(download(tmp_path, CHECKPOINTS["llama 3 8b"]), "data:8,model:16")
    assert [finding.code for finding in plan.findings] == ["whole-heads", "whole-heads"]
    assert plan.findings[0].path == "model/layers/*/self_attn/k_proj/weight"
    assert plan.findings[0].count == 32


def test_pointers_of_git_lfs_are_not_the_files(tmp_path: Path) -> None:
    index = download(tmp_path, CHECKPOINTS["qwen 3 1.7b"])
    for number in range(4):
        (tmp_path / f"model-{number:05}.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    assert len(plan_of(index).leaves) == 310


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"model-00000.safetensors: the index .* does not exist\. An index has no shapes: .*config\.json"),
        ("{", r"config\.json: it is not JSON"),
        ("[]", r"config\.json: it holds \[\], not a configuration\. The files"),
        ("{}", r"config\.json: the shapes of a None do not follow"),
        ('{"model_type": "mamba"}', r"config\.json: the shapes of a 'mamba' do not follow from it"),
        ('{"model_type": "llama", "dtype": "bfloat16"}', r"config\.json: it has no 'vocab_size'"),
    ],
)
def test_what_a_lonely_index_lacks_is_said(tmp_path: Path, config: str | None, message: str) -> None:
    index = download(tmp_path, CHECKPOINTS["llama 2 7b"])
    (tmp_path / "config.json").unlink()
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match=message):
        load_model(str(index))


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    index = download(tmp_path, CHECKPOINTS["llama 2 7b"], vocab_size=32016)
    with pytest.raises(UsageError, match=r"its tensors would take .* bytes, and the index says that they take 13,476"):
        load_model(str(index))


def test_a_file_that_is_missing_beside_others_is_reported(tmp_path: Path) -> None:
    index = download(tmp_path, CHECKPOINTS["llama 2 7b"])
    write_headers(tmp_path, CHECKPOINTS["llama 2 7b"])
    (tmp_path / "model-00002.safetensors").unlink()
    with pytest.raises(
        UsageError, match=r"model-00002\.safetensors: the index .* names this file, and it cannot be read: No such file"
    ):
        load_model(str(index))


@pytest.mark.parametrize("name", ["." * 5000, "a." * 5000 + "w", "a/" * 5000, "\x1b[2J.w", "a.b", "..", "a..b"])
def test_odd_names_are_planned(tmp_path: Path, name: str) -> None:
    header = {name: {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, 16384]}}
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert plan_of(tmp_path / "x.safetensors").memory().leaf_count == 1
