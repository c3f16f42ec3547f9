"""Runs the Python of a page, and puts what it prints into the `text` block below it; and the commands of a `console`.

`python -m tests.house.pages` refreshes every page; the tests run the same and compare.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, final

import attrs
import jax

from tests.forks import run_forks
from tests.house.source import REPOSITORY

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
NO_RUN = re.compile(r"<!-- *no-run: *\S.*-->\s*\Z")
SET_FOR_TESTS = ("XLA_FLAGS", "JAX_PLATFORMS", "FORCE_COLOR")
"""Environment variables that commands of a page must not inherit."""

OTHER_SPELLINGS = ("py", "py3", "python3", "pycon", "ipython", "ipython3")


@final
@attrs.frozen
class Block:
    """A fenced block: its language, its text, the line of its first line, and whether it is marked `no-run`.

    With the name of a Python file as its title, it is that file for the commands that follow.
    """

    language: str
    text: str
    line: int
    no_run: bool
    title: str = ""

    @property
    def is_file(self) -> bool:
        return self.language == "python" and self.title.endswith(".py")

    @property
    def runs(self) -> bool:
        return self.language == "python" and not self.is_file


def blocks(text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a markdown text, indented ones too."""
    for fence in FENCE.finditer(text):
        info = fence["info"].strip(" {}").split()
        language = info[0].lstrip(".").lower() if info else ""
        line = text.count("\n", 0, fence.start("text")) + 1
        title = re.search(r'title="([^"]*)"', fence["info"])
        no_run = bool(NO_RUN.search(text[: fence.start()]))
        yield Block(language, textwrap.dedent(fence["text"]), line, no_run, title[1] if title else "")


def misfits(text: str) -> list[str]:
    """Blocks that hide from this test: Python that is marked `no-run`, Python by another name, or a file not run."""
    every = list(blocks(text))
    commands = " ".join(block.text for block in every if block.language == "console")
    unused = [
        f"line {block.line}: no command runs {block.title}"
        for block in every
        if block.is_file and block.title.removesuffix(".py").replace("/", ".") not in commands
    ]
    return unused + [
        f"line {block.line}: {'Python always runs' if block.runs else f'write python, not {block.language}'}"
        for block in every
        if (block.runs and block.no_run) or block.language in OTHER_SPELLINGS
    ]


def run_console(text: str) -> str:
    """Runs the commands of a `console` block, the lines after `$`, and returns the block with what they print.

    They run in the current folder, with a link to the documentation, and may exit with 1.
    """
    parts: list[str] = []
    for command in re.findall(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)$", text, re.MULTILINE):
        inherited = {name: value for name, value in os.environ.items() if name not in SET_FOR_TESTS}
        paths = {"PATH": f"{Path(sys.executable).parent}:{inherited['PATH']}", "PYTHONPATH": str(REPOSITORY)}
        with contextlib.suppress(FileExistsError):
            Path("docs").symlink_to(REPOSITORY / "docs")
        process = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            env={**inherited, **paths},
            check=False,
            timeout=240,
        )
        if process.returncode not in (0, 1):
            raise ValueError(f"{command} exited with {process.returncode}: {process.stderr[-2000:]}")
        parts.append(f"$ {command}\n{process.stdout}")
    return "\n".join(parts)


@contextlib.contextmanager
def _devices_as_they_are() -> Iterator[None]:
    """Inside, asking JAX for as many CPU devices as it has already does nothing: the process of the tests has them."""
    update = jax.config.update

    def update_unless_present(name: str, val: Any) -> None:
        try:
            update(name, val)
        except RuntimeError:  # JAX has started
            if (name, val) != ("jax_num_cpu_devices", jax.device_count("cpu")):
                raise

    jax.config.update = update_unless_present
    try:
        yield
    finally:
        del jax.config.update  # the method of the class again


def run_blocks(text: str, source: str, scope: dict[str, Any], first_line: int = 1) -> list[str]:
    """Runs the Python blocks of `text` in order, in one namespace, and returns what each block of `text` printed.

    A traceback names the line in `source`.
    """
    module = ModuleType("example")  # a real module: classes made in a block look for theirs
    vars(module).update({**scope, "__name__": "example"})
    saved = sys.modules.get("example")
    sys.modules["example"] = module
    printed = []
    try:
        for block in blocks(text):
            output = io.StringIO()
            if block.is_file:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.text)
            if block.runs:
                padding = "\n" * (first_line + block.line - 2)
                with contextlib.redirect_stdout(output), _devices_as_they_are():
                    exec(compile(padding + block.text, source, "exec", dont_inherit=True), vars(module))
            written = run_console(block.text) if block.language == "console" else output.getvalue()
            printed.append("".join(f"{line.rstrip()}\n" for line in written.splitlines()))
    finally:
        if saved is None:
            del sys.modules["example"]
        else:
            sys.modules["example"] = saved
    return printed


def filled(text: str, printed: list[str]) -> str:
    """Returns `text` with what each of its blocks printed in the `text` block that comes next."""
    parts, end, pending = [], 0, ""
    for fence, block, output in zip(FENCE.finditer(text), blocks(text), printed, strict=True):
        if block.runs and pending:
            raise ValueError(f"line {block.line}: the output of the block above is not shown: {pending[:80]!r}")
        parts.append(text[end : fence.start("text")])
        if block.language == "console":
            parts.append(textwrap.indent(output, fence["indent"]))
            end = fence.end("text")
            continue
        takes = block.language == "text" and pending
        parts.append(textwrap.indent(pending, fence["indent"]) if takes else fence["text"])
        pending = "" if takes else pending or output
        end = fence.end("text")
    if pending:
        raise ValueError(f"the output of the last block is not shown: {pending[:80]!r}")
    return "".join(parts) + text[end:]


def pages(root: Path) -> list[Path]:
    """Returns the README and every page of the documentation."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def printed_by_an_interpreter(page: Path, **variables: str) -> list[str]:
    """Runs a page as a reader does, in an interpreter of its own, and returns what each block printed."""
    code = "import json, sys; from pathlib import Path; from tests.house.pages import run_blocks; "
    code += "Path(sys.argv[2]).write_text(json.dumps(run_blocks(Path(sys.argv[1]).read_text(), sys.argv[1], {})))"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY), **variables}
    printed = Path("printed.json").resolve()
    (ended,) = run_forks(code, [[str(page), str(printed)]], env=environment, cwd=Path.cwd(), timeout=300)
    assert ended.code == 0, ended.err[-2000:]
    return json.loads(printed.read_text())


TIMED = REPOSITORY / "docs" / "how-to" / "find-the-all-gather.md"
"""A page that prints modelled times of CPU programs. They depend on the kernels, which tests compile in other ways."""


def printed_by(page: Path) -> list[str]:
    """Runs a page, and returns what each block printed."""
    if page == TIMED:
        return printed_by_an_interpreter(page, JAX_DISABLE_MOST_OPTIMIZATIONS="false", XLA_FLAGS="")
    return run_blocks(page.read_text(), str(page), {})


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  eight devices, as the tests have them

    for page in pages(REPOSITORY):
        old = page.read_text()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # examples may write files
            new = filled(old, printed_by(page))
        if new != old:
            page.write_text(new)
            print("refreshed", page.relative_to(REPOSITORY))
