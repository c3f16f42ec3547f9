"""Completion in a real shell: what it offers for the words so far."""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from shardrules.cli.registry import COMMANDS, load_command
from tests.cli.command import NO_BACKEND, shardrules

SHELLS = ("bash", "zsh", "fish", "tcsh")


@functools.cache
def script(shell: str) -> str:
    process = shardrules("completion", shell, env=NO_BACKEND)
    assert process.returncode == 0, process.stderr
    return process.stdout


def offered(words: list[str], folder: Path) -> list[str]:
    """What bash offers for the last of these words."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = [script("bash"), f"COMP_WORDS=({quoted})", f"COMP_CWORD={len(words) - 1}"]
    code += [f"_shtab_shardrules shardrules '{words[-1]}' '{words[-2]}'", "printf '%s\\n' \"${COMPREPLY[@]}\""]
    process = subprocess.run(["bash", "-c", "\n".join(code)], capture_output=True, text=True, check=True, cwd=folder)
    return sorted(filter(None, process.stdout.splitlines()))


def test_bash_completes_commands_options_values_and_files(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    assert offered(["shardrules", ""], tmp_path) == sorted(COMMANDS)
    assert offered(["shardrules", "au"], tmp_path) == ["audit", "autoplan"]
    assert offered(["shardrules", "plan", "--o"], tmp_path) == ["--optimizer", "--output"]
    assert offered(["shardrules", "check", "x", "--format", ""], tmp_path) == ["github", "json", "text"]
    assert offered(["shardrules", "check", "x", "--level", "w"], tmp_path) == ["warning"]
    assert offered(["shardrules", "plan", "mod"], tmp_path) == ["model.py"]
    assert offered(["shardrules", "completion", ""], tmp_path) == sorted(SHELLS)
    (tmp_path / "my models").mkdir()
    assert offered(["shardrules", "plan", "my"], tmp_path) == ["my models"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_have_every_option_of_every_command(shell: str) -> None:
    text = script(shell)
    for name in COMMANDS:
        assert name in text
        for action in load_command(name).parser()._actions:
            for option in action.option_strings[-1:]:
                assert (option if shell in ("bash", "zsh") else option.removeprefix("--")) in text
    program = shutil.which(shell)
    if program is not None:
        process = subprocess.run([program, "-n"], input=text, capture_output=True, text=True, check=False)
        assert (process.returncode, process.stderr) == (0, "")


def test_without_shtab_it_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from shardrules.cli.main import main

    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert 'completion needs shtab: pip install "shardrules[cli]"' in capsys.readouterr().err
