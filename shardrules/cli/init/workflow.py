"""A workflow of GitHub that checks rules against a golden plan."""

import shlex
from collections.abc import Sequence
from pathlib import Path

WORKFLOW = Path(".github", "workflows", "sharding.yml")
"""The path of the workflow, from the top of a repository."""


def repository_of(folder: Path) -> Path:
    """Returns the top of the repository around a folder, or the folder itself outside of one."""
    return next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), folder)


def workflow_text(folder: Path, subject: Sequence[str], packages: Sequence[str] = ()) -> str:
    """Returns the workflow for a folder; `subject` are the words that name the model and the rules, `packages` what it
    needs beside its own requirements."""
    command = shlex.join(["shardrules", "check", *subject, "--format", "github"])
    report = shlex.join(["shardrules", "report", *subject, "-o", "report.html"])
    inner = folder.relative_to(repository_of(folder)).as_posix()
    # Steps run at the top of the repository, unless they say where.
    defaults = "" if inner == "." else f"    defaults:\n      run:\n        working-directory: {inner!r}\n"
    # `working-directory` is for commands only: the path of an upload begins at the top. `repr` quotes as YAML does.
    page = "report.html" if inner == "." else f"{inner}/report.html"
    return f"""\
# Checks how the model is sharded: written by `shardrules init`, yours to edit.
# To accept a change of the plan: {shlex.join(["shardrules", "check", *subject, "--update"])}
name: sharding
on:
  pull_request:
  push:
    branches: [main]
permissions:
  contents: read
jobs:
  check:
    runs-on: ubuntu-latest
    timeout-minutes: 15
{defaults}    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - name: Install
        run: |
          {_install(folder, packages)}
      - name: Check the plan
        run: |
          {command}
      - name: Draw the page
        if: failure()
        run: |
          {report}
      - name: Keep the page
        if: failure()
        uses: actions/upload-artifact@v4
        with:
          name: sharding
          path: {page!r}
"""


def _install(folder: Path, packages: Sequence[str]) -> str:
    """The command that installs shardrules, `packages`, and the folder's requirements and package, if it has them."""
    words = ["pip", "install", "shardrules[cli]", *packages]
    if (folder / "requirements.txt").is_file():
        words += ["-r", "requirements.txt"]
    if (folder / "pyproject.toml").is_file() or (folder / "setup.py").is_file():
        words += ["-e", "."]
    return shlex.join(words)
