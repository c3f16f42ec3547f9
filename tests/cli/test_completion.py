"""Completion in a real shell: what it offers for the words so far."""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from shardrules.cli.registry import COMMANDS, load_command
from tests.cli.command import NO_BACKEND, shardrules


@functools.cache
def script(shell: str) -> str:
    done = shardrules("completion", shell, env=NO_BACKEND)
    assert done.returncode == 0
    return done.stdout


def offered(words: list[str], folder: Path) -> list[str]:
    """What bash offers for the last of these words."""
    asked = " ".join(f"'{word}'" for word in words)
    code = [script("bash"), f"COMP_WORDS=({asked})", f"COMP_CWORD={len(words) - 1}", "_shardrules"]
    code.append("printf '%s\\n' \"${COMPREPLY[@]}\"")
    done = subprocess.run(["bash", "-c", "\n".join(code)], capture_output=True, text=True, check=True, cwd=folder)
    return sorted(filter(None, done.stdout.splitlines()))


def test_bash_completes_commands_options_values_and_files(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    assert offered(["shardrules", ""], tmp_path) == sorted(COMMANDS)
    assert offered(["shardrules", "au"], tmp_path) == ["audit", "autoplan"]
    assert offered(["shardrules", "plan", "--o"], tmp_path) == ["--optimizer", "--output"]
    assert offered(["shardrules", "check", "x", "--format", ""], tmp_path) == ["github", "json", "text"]
    assert offered(["shardrules", "check", "x", "--level", "w"], tmp_path) == ["warning"]
    assert offered(["shardrules", "plan", "mod"], tmp_path) == ["model.py"]
    assert offered(["shardrules", "completion", ""], tmp_path) == ["bash", "fish", "zsh"]
    (tmp_path / "my models").mkdir()
    assert offered(["shardrules", "plan", "my"], tmp_path) == ["my models"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_option_of_every_command_is_in_every_script(shell: str) -> None:
    text = script(shell)
    for name in COMMANDS:
        for action in load_command(name).parser()._actions:
            for option in action.option_strings[-1:]:
                assert (option if shell != "fish" else f"-l {option[2:]}") in text
    program = shutil.which(shell)
    if program is not None:
        done = subprocess.run([program, "-n"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
