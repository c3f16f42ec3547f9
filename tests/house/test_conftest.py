"""With fewer than 8 devices the test run ends at once and says why."""

import os
import subprocess
import sys

from tests.house.source import REPOSITORY

# A backend that started early is how a process gets fewer devices than conftest asks for.
EARLY = "import sys, jax, pytest; jax.devices(); sys.exit(pytest.main(sys.argv[1:]))"


def test_too_few_devices_end_the_run() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", EARLY, "-n0", "tests/house/test_layers.py"]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 3, run.stdout + run.stderr
    assert "the tests need 8 CPU devices and JAX has 2" in run.stdout + run.stderr
