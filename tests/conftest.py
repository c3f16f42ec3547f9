"""Every test process has 8 virtual CPU devices. With fewer the run ends at once: a skipped test proves nothing."""

import gc
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.quick import QUICK_FLAGS

DEVICES = 8

# Before JAX is imported, and for the processes that tests start. The shell's own values are overwritten.
os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's passes would take more time than most tests, and do not depend on shardings. Tests that compare bits take the
# fixture `optimized`.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={DEVICES}", QUICK_FLAGS]
).strip()

settings.register_profile(
    "shardrules",
    deadline=None,  # the first example pays for imports and compilation, so time per example means nothing
    max_examples=50,
    derandomize="CI" in os.environ,  # the same draws in every run, so that a change fails for what it changes
    suppress_health_check=[HealthCheck.too_slow],  # two busy cores are slow, whatever the strategy
)
settings.load_profile("shardrules")


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what compiles for TPUs or GPUs, and of a test marked `sample(n)` all but n cases, evenly spaced."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        target = (
            item.callspec.params.get("target")
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
            else ""
        )
        if isinstance(target, str) and target.startswith(("cuda:", "tpu:")):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("sample"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("sample")
        assert marker is not None
        (keep,) = marker.args
        kept = {index * len(group) // keep for index in range(keep)}
        for index, item in enumerate(group):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Takes thousands of tests out of the garbage collector's sight: it would visit each of them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a fast test that skips itself: CI runs fast tests without any extra but `test`."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("slow"):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr}\nOnly slow tests may skip: mark it slow."
    return report


def pytest_sessionstart() -> None:
    import jax  # here, after the environment has been set

    # In case a plugin imported JAX before the environment was set.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.device_count() < DEVICES:
        pytest.exit(
            f"the tests need {DEVICES} CPU devices and JAX has {jax.device_count()}: "
            "something started its backend before tests/conftest.py could request them",
            returncode=3,
        )


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """All of LLVM's passes: they decide the last bits of results."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # compiled the other way
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()
