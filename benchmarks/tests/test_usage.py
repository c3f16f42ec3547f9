"""Every benchmark has tests and the same options."""

import pytest

from benchmarks.tests.smoke import BENCHMARKS, run

SCRIPTS = sorted(
    file.name for end in ("time", "memory", "quality", "limits") for file in BENCHMARKS.glob(f"*_{end}.py")
)


def test_every_benchmark_runs_at_toy_size() -> None:
    tests = {file.name: file.read_text() for file in (BENCHMARKS / "tests").glob("test_*.py")}
    assert len(SCRIPTS) >= 8
    for script in SCRIPTS:
        assert f'"{script}", "--smoke"' in tests[f"test_{script}"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_toy_sizes_have_no_targets(script: str) -> None:
    done = run(script, "--smoke", "--check")
    assert done.returncode == 2
    assert "use --check without --smoke" in done.stderr or "use --check on its own" in done.stderr
