"""Importing the package has no effects, prints nothing and imports nothing slow. Each import is a real process."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import shardrules as sr
from tests.house.source import REPOSITORY, plant
from tests.house.startup import beyond_startup

LATE = ("flax", "libtpu", "matplotlib", "optax", "rich", "scipy.optimize", "shardrules.programs.autoplan")
"""Modules that must not be imported with the package: they are optional, or slow to import and rarely needed."""

PLANNING = ("Assumptions", "autoplan", "plan_training", "presets", "report_page", "reports")
"""The exports that import some of these."""

PEERS = "import jax, equinox"

PROBE = """
import os, sys, warnings
{peers}
before = dict(os.environ), dict(jax.config.values), list(warnings.filters), set(sys.modules)
import {package}
for name in {names}:
    getattr({package}, name)
if dict(os.environ) != before[0]:
    print("it changes the environment")
if dict(jax.config.values) != before[1]:
    print("it changes JAX's configuration")
if list(warnings.filters) != before[2]:
    print("it changes the warning filters")
for name in {late}:
    if name in sys.modules and name not in before[3]:
        print("it imports", name)
try:
    jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend is up: the public way to ask
except RuntimeError:
    print("it starts a backend")
"""


def clean_environment(path: Path, **variables: str) -> dict[str, str]:
    """The environment of an independent process that imports packages from `path`."""
    # XLA_FLAGS of this process would set the device count too, and JAX refuses to set it twice.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return environment | {"PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"} | variables


def python(*arguments: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a fresh process."""
    command, environment = [sys.executable, *arguments], clean_environment(path, **variables)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def import_effects(package: str, path: Path, names: Iterable[str] = ()) -> list[str]:
    """What importing `package` and then `names` did that it should not: printed, warned, raised, changed something."""
    probe = PROBE.format(peers=PEERS, package=package, names=sorted(names), late=LATE)
    run = python("-W", "error", "-c", probe, path=path)
    return (run.stdout + beyond_startup(run.stderr, PEERS, clean_environment(path))).splitlines()


def test_importing_has_no_effects() -> None:
    assert import_effects("shardrules", REPOSITORY, set(sr.__all__) - set(PLANNING)) == []


BELOW_THE_WALL = (
    *("ShardingRule", "load_rules", "parse_rule", "ShardingPlan", "create_mesh", "meshes", "specs", "presets"),
    *("filter_shard", "filter_init", "filter_jit", "filter_shard_map", "filter_gather", "place_batch", "constrain"),
    *("load_safetensors", "load_orbax", "save_safetensors", "save_orbax", "save_equinox", "load_equinox"),
    *("reshard", "plan_reshard", "recover", "check_same_plan", "ShardingAnalyzer"),
)
"""Exports about trees of arrays, which need nothing of what reads programs."""


def programs_behind(names: Iterable[str]) -> list[str]:
    """The modules of `programs` that using some exports loads."""
    code = f"""
import sys, jax.numpy as jnp, shardrules as sr
for name in {[*names]}:
    getattr(sr, name)
tree, mesh = {{"w": jnp.ones((8, 4))}}, sr.mesh_shape("data:8")
plan = sr.AutoShardingRule().plan(tree, mesh)
print(str(plan) and [name for name in sys.modules if name.startswith("shardrules.programs")])
"""
    return ast.literal_eval(python("-c", code, path=REPOSITORY).stdout)


def test_what_is_below_the_wall_loads_no_programs() -> None:
    assert programs_behind(BELOW_THE_WALL) == []


def test_programs_behind_the_wall_are_reported() -> None:
    assert "shardrules.programs.machine.hardware" in programs_behind(["Hardware"])


def test_threads_may_use_different_names_first() -> None:
    code = """
import threading, shardrules as sr
names = ["mesh_shape", "filter_jit", "report_page", "specs", "Target", "load_safetensors", "autoplan", "Leaf"]
barrier, values = threading.Barrier(len(names)), []
def use(name):
    barrier.wait()
    values.append(getattr(sr, name))
threads = [threading.Thread(target=use, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(values))
"""
    assert python("-c", code, path=REPOSITORY).stdout == "8\n"


def test_no_module_takes_the_name_of_an_export() -> None:
    """Python binds a module in its package when it imports it, and would hide the export."""
    rooms = {"errors", "meshes", "presets", "reports", "specs"}
    package = REPOSITORY / "shardrules"
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    assert modules & set(sr.__all__) == rooms


def test_importing_alone_imports_nothing_slow() -> None:
    """Each name is imported when it is first used: a command can say what Ctrl-C does before JAX is imported."""
    code = (
        "import sys, shardrules; print([name for name in ('jax', 'numpy', 'equinox', 'attrs') if name in sys.modules])"
    )
    assert python("-c", code, path=REPOSITORY).stdout == "[]\n"


EFFECTS = {
    "import os\nos.environ['XLA_FLAGS'] = ''": "it changes the environment",
    "import jax\njax.config.update('jax_enable_x64', True)": "it changes JAX's configuration",
    "import warnings\nwarnings.simplefilter('ignore')": "it changes the warning filters",
    "import jax\njax.devices()": "it starts a backend",
    "import scipy.optimize": "it imports scipy.optimize",
    "import optax": "it imports optax",
    "print('hello')": "hello",
    "import sys\nsys.stderr.write('psst')": "psst",
}


@pytest.mark.slow
def test_all_effects_are_reported(tmp_path: Path) -> None:
    plant(tmp_path, {"__init__.py": "\n".join(EFFECTS)})
    assert set(EFFECTS.values()) - set(import_effects("planted", tmp_path)) == set()


def test_a_warning_is_reported(tmp_path: Path) -> None:
    plant(tmp_path, {"__init__.py": "import warnings\nwarnings.warn('old')"})
    assert "UserWarning: old" in import_effects("planted", tmp_path)
