"""Every test process holds 8 virtual CPU devices. With fewer the run ends at once: a skipped law is a law unproven."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

DEVICES = 8

# Before JAX is imported, and for the processes that tests start. Set rather than defaulted: what the shell holds is for
# other programs.
os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's passes would take more time than what most tests are about, and know nothing of shardings. Those that compare
# bits take the fixture `optimized`.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()

settings.register_profile(
    "shardrules",
    deadline=None,  # the first example pays for imports and compilation, so time per example means nothing
    max_examples=50,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],  # two busy cores are slow; that says nothing about a strategy
)
settings.load_profile("shardrules")


def pytest_sessionstart() -> None:
    import jax  # here, after the environment has been set

    # Where a plugin imported JAX before the environment was set.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.device_count() < DEVICES:
        pytest.exit(
            f"the tests need {DEVICES} CPU devices and JAX has {jax.device_count()}: "
            "something started its backend before tests/conftest.py could ask for them",
            returncode=3,
        )


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """All of LLVM's passes: they decide on the last bits of what is computed."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # compiled the other way
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()
