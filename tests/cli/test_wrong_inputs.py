"""Errors of commands as a process prints them. Their words: test_wrong_words.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardrules.cli.main import main
from shardrules.cli.terminal import complain
from tests.cli.command import GPT, NO_BACKEND, shardrules

MESH = ("--mesh", "data:4,model:2")


@pytest.mark.parametrize("words", [("plna",), ("plan", "modle:make", "--rules", "auto", *MESH), ("diff", "a", "b")])
def test_errors_of_processes_are_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    process = shardrules(*words, cwd=tmp_path, env=NO_BACKEND)
    assert (process.returncode, process.stdout) == (2, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("shardrules: error: ")


def test_traceback_shows_the_traceback() -> None:
    process = shardrules("plan", "no_such:thing", "--rules", "auto", "--mesh", "data:2", "--traceback", env=NO_BACKEND)
    assert process.returncode == 2
    assert "Traceback (most recent call last)" in process.stderr
    assert process.stderr.splitlines()[-1].startswith("shardrules: error: module 'no_such' is neither")


def test_unsound_plans_list_every_array(tmp_path: Path) -> None:
    """The command is valid then: the exit code is 1, and every array is named."""
    (tmp_path / "model.py").write_text("import numpy as np\ndef make():\n    return [np.ones((8, 8))] * 2\n")
    process = shardrules(
        "plan", "model.py:make", "--rules", "shard_dim('data', 5)", *MESH, cwd=tmp_path, env=NO_BACKEND
    )
    assert process.returncode == 1
    assert "2 leaves cannot be decided" in process.stderr
    odd = ("--rules", "shard_dim('data', 0)", "--mesh", "data:3")
    process = shardrules("plan", "model.py:make", *odd, cwd=tmp_path, env=NO_BACKEND)
    assert process.returncode == 1
    assert "indivisible" in process.stdout


def test_without_rich_it_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['rich'] = None; from shardrules.cli.start import start; start()"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert (
        process.stderr.splitlines()[-1]
        == 'shardrules: error: the command line needs rich: pip install "shardrules[cli]"'
    )


def test_closed_pipes_are_not_errors(tmp_path: Path) -> None:
    for command, code in (("plan", 0), ("check --budget 1B", 1)):  # the exit code is as without the pipe
        words = (
            f"{sys.executable} -m shardrules {command} {GPT} --rules auto --mesh data:4 | true; exit ${{PIPESTATUS[0]}}"
        )
        process = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
        assert process.returncode == code
    assert "Traceback" not in process.stderr
    assert "BrokenPipe" not in process.stderr


@pytest.mark.parametrize("options", [(), ("--traceback",)])
@pytest.mark.parametrize("variable", ["NO_COLOR", "FORCE_COLOR"])
def test_a_closed_stderr_ends_no_command(
    variable: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not rich takes it for a terminal."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setenv(variable, "1")
        monkeypatch.setattr(sys, "stderr", stderr)
        if not options:
            complain("the first of several", "warning")
        assert main(["plan", str(tmp_path / "nosuch.json"), *options]) == 2
