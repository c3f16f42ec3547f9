"""Of a test marked `sample(n)`, n cases run with `pytest`, and all others with `pytest -m slow`."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import importlib.util
spec = importlib.util.spec_from_file_location("conftest_of_tests", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
pytest_collection_modifyitems = module.pytest_collection_modifyitems
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


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("not slow", ["test_size[0]", "test_size[5]", "test_alone"]),
        ("slow", [*(f"test_size[{size}]" for size in (1, 2, 3, 4, 6, 7, 8, 9)), "test_large"]),
    ],
)
def test_sample_keeps_evenly_spaced_cases(tmp_path: Path, selection: str, names: list[str]) -> None:
    conftest = Path(__file__).parents[1] / "conftest.py"
    (tmp_path / "conftest.py").write_text(CONFTEST.format(path=str(conftest)))
    (tmp_path / "test_planted.py").write_text(TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "-m",
        selection,
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert [line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line] == names
