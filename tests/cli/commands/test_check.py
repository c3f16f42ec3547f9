"""Golden plans that `--update` replaces, and files that it does not."""

import json
from pathlib import Path

import numpy as np
import pytest

import shardrules as sr
from shardrules.cli.main import main

TEXT = sr.AutoShardingRule().plan({"w": np.ones((8, 8), np.float32)}, sr.mesh_shape("data:4")).to_json()

BROKEN = {
    "empty": "",
    "cut off": TEXT[:100],
    "cut off in its first line": "{",
    "in a merge": f"<<<<<<< HEAD\n{TEXT}\n=======\n{TEXT}\n>>>>>>> main\n",
    "of another version": json.dumps({**json.loads(TEXT), "shardrules": 99}),
    "edited": TEXT.replace('"w"', '"v"'),
    "without a mesh": json.dumps({name: value for name, value in json.loads(TEXT).items() if name != "mesh"}),
}

OTHERS = {
    "package.json": '{"name": "page"}',
    "list.json": "[1, 2]",
    "tsconfig.json": '{\n  // comments\n  "compilerOptions": {}\n}\n',
    "cut.json": '{"compilerOptions": {"strict',
    "text.json": "not JSON",
    "rules.toml": '[[rules]]\npath = "w"\nspec = []\n',
    "model.py": "def make(): ...\n",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("name", BROKEN)
def test_update_replaces_a_broken_plan(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "golden.json").write_text(BROKEN[name])
    words = ["check", "old.json", "--golden", "golden.json"]
    assert main(words) == 2
    assert "--update" in capsys.readouterr().err
    assert main([*words, "--update"]) == 0
    assert (model / "golden.json").read_text() == f"{TEXT}\n"
    assert main(words) == 0


@pytest.mark.parametrize("name", OTHERS)
def test_update_keeps_other_files(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / name).write_text(OTHERS[name])
    assert main(["check", "old.json", "--golden", name, "--update"]) == 2
    assert f"--update would replace {name}, which is not a plan" in capsys.readouterr().err
    assert (model / name).read_text() == OTHERS[name]
