"""Every test process holds 8 virtual CPU devices. With fewer the run ends at once: a skipped law is a law unproven."""

import os

import pytest
from hypothesis import HealthCheck, settings

DEVICES = 8

# Before JAX starts its backend, which reads both once. Set rather than defaulted: what the shell holds is for other
# programs. The processes that tests start inherit them.
os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's passes would take more time than what most tests are about, and know nothing of shardings.
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

    jax.config.update("jax_platforms", "cpu")  # where a plugin imported JAX before the environment was set
    if jax.device_count() < DEVICES:
        pytest.exit(
            f"the tests need {DEVICES} CPU devices and JAX has {jax.device_count()}: "
            "something started its backend before tests/conftest.py could ask for them",
            returncode=3,
        )
