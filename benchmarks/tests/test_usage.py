"""What holds for every benchmark."""

import pytest

from benchmarks.tests.smoke import BENCHMARKS, run

SCRIPTS = sorted(file.name for file in BENCHMARKS.glob("*.py") if "--smoke" in file.read_text())


def test_each_has_a_smoke_run_that_is_tested() -> None:
    tested = {file.name.removeprefix("test_") for file in (BENCHMARKS / "tests").glob("test_*.py")}
    assert tested - {"test_usage.py", "usage.py"} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_targets_are_refused_at_toy_sizes(script: str) -> None:
    done = run(script, "--smoke", "--check")
    assert done.returncode == 2
    assert "use --check" in done.stderr
