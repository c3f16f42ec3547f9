"""Importing the package touches nothing, says nothing, and takes no time to speak of. Each import is a real process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import REPOSITORY, plant
from tests.house.startup import beyond_startup

BUDGET_MS = 60
"""What importing shardrules may add to importing JAX and Equinox, on a machine that imports JAX in `JAX_MS`."""

JAX_MS = 350
"""A slower machine, or one that is busy with other tests, is given more time, by as much as JAX takes longer there."""

OPTIONAL = ("flax", "libtpu", "matplotlib", "optax", "rich")
"""What is not a dependency, and so must not be imported with the package, even where it is installed."""

PEERS = "import jax, equinox"

PROBE = """
import os, sys, warnings
{peers}
before = dict(os.environ), dict(jax.config.values), list(warnings.filters), set(sys.modules)
import {package}
if dict(os.environ) != before[0]:
    print("it changes the environment")
if dict(jax.config.values) != before[1]:
    print("it changes JAX's configuration")
if list(warnings.filters) != before[2]:
    print("it changes the warning filters")
for name in {optional}:
    if name in sys.modules and name not in before[3]:
        print("it imports", name)
try:
    jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend is up: the public way to ask
except RuntimeError:
    print("it starts a backend")
"""


def surroundings(path: Path, **variables: str) -> dict[str, str]:
    """The environment of a process that knows nothing of this one, and finds packages in `path`."""
    # XLA_FLAGS of this process would set the device count too, and JAX refuses to be told twice.
    forgotten = ("XLA_FLAGS", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in forgotten}
    return environment | {"PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"} | variables


def python(*arguments: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a fresh process."""
    command, environment = [sys.executable, *arguments], surroundings(path, **variables)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def import_effects(package: str, path: Path) -> list[str]:
    """What importing `package` did that it should not: printed, warned, raised, or changed something."""
    probe = PROBE.format(peers=PEERS, package=package, optional=OPTIONAL)
    run = python("-W", "error", "-c", probe, path=path)
    return (run.stdout + beyond_startup(run.stderr, PEERS, surroundings(path))).splitlines()


def import_ms(package: str, path: Path, cache: Path, runs: int = 5) -> float:
    """Milliseconds that `import package` takes over JAX and Equinox, with its bytecode written, as an installer does.

    The least of several processes: whatever else the machine does can only add to it. See `JAX_MS` for slow ones.
    """
    times = []
    for _ in range(runs + 1):  # the first one writes the bytecode
        run = python("-X", "importtime", "-c", f"import {package}", path=path, PYTHONPYCACHEPREFIX=str(cache))
        assert run.returncode == 0, run.stderr[-2000:]
        found = re.findall(r"^import time: +\d+ \| +(\d+) \| +(\w+)$", run.stderr, re.MULTILINE)
        took = {name: int(microseconds) / 1000 for microseconds, name in found}
        peers = took.get("jax", 0) + took.get("equinox", 0)
        times.append((took[package] - peers) / max(peers / JAX_MS, 1))
    return min(times[1:])


def test_importing_touches_nothing() -> None:
    assert import_effects("shardrules", REPOSITORY) == []


def test_importing_is_quick(tmp_path: Path) -> None:
    assert import_ms("shardrules", REPOSITORY, tmp_path) <= BUDGET_MS


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("import os\nos.environ['XLA_FLAGS'] = ''", "it changes the environment"),
        ("import jax\njax.config.update('jax_enable_x64', True)", "it changes JAX's configuration"),
        ("import warnings\nwarnings.simplefilter('ignore')", "it changes the warning filters"),
        ("import jax\njax.devices()", "it starts a backend"),
        ("import optax", "it imports optax"),
        ("print('hello')", "hello"),
        ("import sys\nsys.stderr.write('psst')", "psst"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
    ],
)
def test_an_effect_is_seen(tmp_path: Path, text: str, complaint: str) -> None:
    plant(tmp_path, {"__init__.py": text})
    assert complaint in import_effects("planted", tmp_path)


def test_a_slow_import_is_seen(tmp_path: Path) -> None:
    plant(tmp_path, {"__init__.py": f"import time\ntime.sleep({1.5 * BUDGET_MS / 1000})"})
    assert import_ms("planted", tmp_path, tmp_path / "cache", runs=1) > BUDGET_MS
