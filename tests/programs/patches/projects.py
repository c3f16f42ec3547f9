"""Projects of a user: the source files of a function, copied to a folder and imported from there."""

import importlib.util
import itertools
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
from jax.sharding import Mesh

import shardrules as sr
from tests.programs.autoplan.models import FAST

SOURCES = Path(__file__).parent / "sources"

SMALL = attrs.evolve(
    FAST,
    name="an H100 for arrays a hundred times smaller",
    memory_bytes_per_second=7e6,
    peak_flops={kind: 17e6 for kind, _ in FAST.peak_flops},
    link_bytes_per_second=1e6,
)
"""Hardware that has, for the arrays of tests, the ratios of an H100 for those of users."""

_NUMBERS = itertools.count()


def mesh_of(axis_types: str = "auto") -> Mesh:
    return sr.create_mesh("data:4,model:2", axis_types=axis_types)  # pyright: ignore[reportArgumentType]  one of its texts


def imported(path: Path) -> ModuleType:
    """Imports a file under a name of its own."""
    name = f"project_{next(_NUMBERS)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file of Python"
    assert spec.loader is not None, "a file of Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def copied(name: str, folder: Path) -> ModuleType:
    """Copies one of the sources to a folder, and imports it."""
    shutil.copy(SOURCES / f"{name}.py", folder / f"{name}.py")
    return imported(folder / f"{name}.py")


def written(text: str | bytes, folder: Path, name: str = "model.py") -> ModuleType:
    """Writes a file to a folder, and imports it."""
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return imported(path)


def planned(fn: Any, args: tuple[Any, ...], axis_types: str = "auto") -> Any:
    return sr.autoplan(fn, *args, mesh=mesh_of(axis_types), hardware=SMALL)
