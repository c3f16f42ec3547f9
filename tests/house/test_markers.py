"""Markers: of a test marked `sample(n)`, n cases are not slow; only slow tests may skip."""

import subprocess
import sys
from pathlib import Path

import pytest

SKIPPING = """
import pytest

def test_fast():
    pytest.skip("no GPU")

@pytest.mark.slow
def test_slow():
    pytest.skip("no GPU")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""

CONFTEST = """
import importlib.util
spec = importlib.util.spec_from_file_location("conftest_of_tests", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
pytest_collection_modifyitems = module.pytest_collection_modifyitems
pytest_runtest_makereport = module.pytest_runtest_makereport
"""

TEST = """
import pytest

@pytest.mark.sample(2)
@pytest.mark.parametrize("size", range(10))
def test_size(size): ...

def test_alone(): ...

@pytest.mark.slow
def test_large(): ...
"""


def run_pytest(folder: Path, test: str, *arguments: str) -> list[str]:
    """Runs pytest on one file with the hooks of tests/conftest.py, and returns what it prints."""
    conftest = Path(__file__).parents[1] / "conftest.py"
    (folder / "conftest.py").write_text(CONFTEST.format(path=str(conftest)))
    (folder / "test_planted.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.splitlines()


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("not slow", ["test_size[0]", "test_size[5]", "test_alone"]),
        ("slow", [*(f"test_size[{size}]" for size in (1, 2, 3, 4, 6, 7, 8, 9)), "test_large"]),
    ],
)
def test_sample_keeps_evenly_spaced_cases(tmp_path: Path, selection: str, names: list[str]) -> None:
    output = run_pytest(tmp_path, TEST, "--collect-only", "-m", selection)
    assert [line.partition("::")[2] for line in output if "::" in line] == names


def test_only_slow_tests_may_skip(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, SKIPPING)
    assert output[-1].startswith("1 failed, 1 skipped, 1 xfailed")
    assert any("Only slow tests may skip" in line for line in output)
