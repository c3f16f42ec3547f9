"""Do the tests that other libraries wrote for themselves pass with our functions in the place of theirs?

**Method.** Each library's own test files are run from a checkout, in a process of its own, after our functions have
taken the place of the library's: `filter_jit` and `filter_shard` of Equinox; what `shardrules.presets.eformer` and
`shardrules` have of eformer's `escale`; `reshard` of pathways-utils. Nothing is fetched: the folder of checkouts is an
argument, or the variable SHARDRULES_OTHERS, and a library that is not there, or that lacks a package, is skipped. Tests
that cannot pass are listed below with the reason; any other failure makes the script fail.

**Last answer.** 2026-11-22, JAX 0.10.2, Equinox 0.13.8 (34 tests of sharding, jit and filters, and 441 others), eformer
0.0.101, 2 busy cores. What cannot pass in Equinox times its own loops; it fails there with Equinox's functions, too.

| | passed | cannot pass | skipped | failed |
|---|---|---|---|---|
| equinox | 472 | 2 | 1 | 0 |
| eformer | 20 | 23 | 0 | 0 |
| pathwaysutils | 0 | 11 | 0 | 0 |

eformer's are about a registry and a current manager of the whole process, those of pathways-utils about which calls a
mocked proxy gets: the page "Coming from" lists what to write instead.

Run it as `python benchmarks/others_tests.py FOLDER`, where FOLDER has `equinox`, `eformer` and `pathways-utils` in it.
"""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final
from xml.etree import ElementTree

import attrs

ROOT = Path(__file__).parents[1]
SUITE = "SHARDRULES_OTHERS_SUITE"
"""The variable that tells the process of the tests, which loads this file as a plugin of pytest, whose they are."""


@final
@attrs.frozen
class Suite:
    """The tests of one library."""

    package: str
    folder: str
    """Of the checkout."""
    tests: tuple[str, ...]
    quick: tuple[str, ...]
    """What a smoke run takes."""
    needs: tuple[str, ...]
    unsupported: Mapping[str, str]
    """Parts of names of tests that cannot pass, with the reason."""


_REGISTRY = "registers axes for the whole process; here `register` returns a new value"
_MANAGER = "looks for a current manager of the process; here a manager is a value that is passed on"
_INTERNALS = "reads a private attribute"

SUITES = (
    Suite(
        "equinox",
        "equinox",
        ("tests",),
        ("tests/test_sharding.py",),
        ("beartype", "jaxtyping"),
        {"test_speed_": "times Equinox's own loops against each other, which a busy machine fails"},
    ),
    Suite(
        "eformer",
        "eformer",
        ("tests/escale",),
        ("tests/escale/test_mesh_creation.py",),
        ("eformer",),
        {
            "test_kv_head_dim_maps_to_attention_kv_dim_axis": _INTERNALS,
            "custom_semantic_axis": _REGISTRY,
            "test_register_": _REGISTRY,
            "test_unregister_": _REGISTRY,
            "test_clear_registered_axes": _REGISTRY,
            "repeated_semantics": _REGISTRY,
            "test_custom_generation_rule": _REGISTRY,
            "test_true_cycle_in_custom_aliases": _REGISTRY,
            "context_manager": _MANAGER,
            "partition_manager_context": _MANAGER,
            "last_partition_manager": _MANAGER,
            "test_apply_logical_sharding": _MANAGER,
        },
    ),
    Suite(
        "pathwaysutils",
        "pathways-utils",
        ("pathwaysutils/test/reshard_test.py", "pathwaysutils/test/experimental/reshard_test.py"),
        ("pathwaysutils/test/reshard_test.py",),
        ("absl", "fastapi", "orbax"),
        {"_reshard_": "asserts which calls a mocked Pathways proxy gets, and ours makes none"},
    ),
)


def pytest_sessionstart() -> None:
    """Puts our functions into the place of the library's, before its tests are imported."""
    if os.environ.get(SUITE):
        _SWAPS[os.environ[SUITE]]()


def _swap_equinox() -> None:
    import equinox

    import shardrules as sr

    equinox.filter_jit, equinox.filter_shard = sr.filter_jit, sr.filter_shard


def _swap_eformer() -> None:
    import shardrules as sr
    from shardrules.presets import eformer as ours

    for name in (
        "eformer.escale",
        "eformer.escale.partition",
        "eformer.escale.partition.auto_spec",
        "eformer.common_types",
    ):
        module = importlib.import_module(name)
        for exported in vars(module).copy():
            for home in (ours, sr, sr.meshes, sr.specs):
                if exported in home.__all__:
                    setattr(module, exported, getattr(home, exported))
    # Every test of one file clears a registry of the process first. Ours is a value: there is nothing to clear.
    ours.PartitionAxis.clear_registered_axes = staticmethod(lambda: None)  # pyright: ignore[reportAttributeAccessIssue]


def _swap_pathways() -> None:
    import shardrules as sr

    for name in ("pathwaysutils.reshard", "pathwaysutils.experimental.reshard"):
        vars(importlib.import_module(name))["reshard"] = sr.reshard


_SWAPS = {"equinox": _swap_equinox, "eformer": _swap_eformer, "pathwaysutils": _swap_pathways}


def run_suite(suite: Suite, folder: Path, smoke: bool) -> dict[str, Any]:
    """Runs the tests of one library, and counts them; or says why it does not."""
    checkout = folder / suite.folder
    missing = [name for name in suite.needs if importlib.util.find_spec(name) is None]
    if not checkout.is_dir() or missing:
        why = f"needs {', '.join(missing)}" if missing else f"no checkout at {checkout}"
        return {"name": suite.package, "skipped": why, "failed": []}
    paths = [str(ROOT / "benchmarks"), str(ROOT), str(checkout)]
    settings = {"PYTHONPATH": os.pathsep.join(paths), SUITE: suite.package, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        options = ["-q", "-p", "others_tests", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
        tests = suite.quick if smoke else suite.tests
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=checkout,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            return {"name": suite.package, "skipped": "", "failed": [done.stdout[-2000:] + done.stderr[-2000:]]}
        return count(suite, ElementTree.parse(report).getroot())


def count(suite: Suite, report: ElementTree.Element) -> dict[str, Any]:
    """Returns how many tests passed, cannot pass, were skipped, and the names of those that failed."""
    row: dict[str, Any] = {"name": suite.package, "passed": 0, "unsupported": 0, "skips": 0, "failed": []}
    for case in report.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = {child.tag for child in case}
        if outcome & {"failure", "error"}:
            is_unsupported = any(part in name for part in suite.unsupported)
            row["unsupported"] += is_unsupported
            row["failed"] += [] if is_unsupported else [name]
        else:
            row["skips" if "skipped" in outcome else "passed"] += 1
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests."""
    parser = argparse.ArgumentParser(description="Other libraries' tests, with our functions in the place of theirs.")
    parser.add_argument("folder", nargs="?", default=os.environ.get("SHARDRULES_OTHERS", ""), help="of checkouts")
    parser.add_argument("--smoke", action="store_true", help="one file of each library")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", choices=[suite.package for suite in SUITES], help="the tests of one library")
    options = parser.parse_args(arguments)
    folder = Path(options.folder).resolve() if options.folder else Path("no-folder-given")
    rows = [run_suite(suite, folder, options.smoke) for suite in SUITES if options.only in (None, suite.package)]
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        print("| | passed | cannot pass | skipped | failed |\n|---|---|---|---|---|")
        for row in rows:
            counts = [row.get("passed", ""), row.get("unsupported", ""), row.get("skips", row.get("skipped"))]
            print(f"| {row['name']} | {' | '.join(map(str, counts))} | {len(row['failed'])} |")
    for row in rows:
        for name in row["failed"]:
            print(f"failed: {row['name']}: {name}", file=sys.stderr)
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
