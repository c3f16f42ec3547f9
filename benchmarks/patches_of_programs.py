"""How near to their plans do patches bring the programs of users, and how long does it take?

**Method.** `plan.to_patch(fn)` for the six programs of `tests/programs/patches/sources` on a mesh of 8 CPU devices,
Auto and Explicit, with a sheet of hardware scaled to their small arrays; and, with `--gpus`, for a transformer of plain
products of a user's size, compiled for 8 H100s, which need not be present. Times are modelled, from the compiled
program: of the function without the patch (on Auto axes; JAX may refuse it on Explicit ones), with it, and of the plan.
Numbers are equal if what the patched function returns is what the function returns. Seconds are those of `to_patch`.

**Last answer.** 2026-11-28, 2 busy cores of an AMD EPYC, JAX 0.10.2, compiled without XLA's optimizations for CPUs
(`JAX_DISABLE_MOST_OPTIMIZATIONS=true`, as in the tests). Over the plan's time with patches, Auto and Explicit: plain
+1.9 and +1.9 %, blocks -1.7 and +1.2 %, experts +0.1 and +0.1 %, scanned +3.4 and +6.3 % (+31.6 % without a patch on
Auto), modules +17.5 and +34.5 %, whose layers are code of flax. The numbers of all are equal. They take 0 to 7
annotations and 2 to 77 s. encoder_decoder and the transformer for GPUs were not measured to their end.

Run it as `python benchmarks/patches_of_programs.py`; see `--help` for less. `--gpus` needs the extra `cuda`.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp

import shardrules as sr
from shardrules.errors import PatchError
from shardrules.programs.autoplan.answer.plan import AutoPlan
from shardrules.programs.jaxprs.walk import equations

SOURCES = Path(__file__).parents[1] / "tests" / "programs" / "patches" / "sources"
PROGRAMS = ("plain", "blocks", "scanned", "modules", "encoder_decoder", "experts")
TOYS = ("layers",)
"""The programs of a smoke run."""

CPU = sr.Hardware.named("cpu")
SMALL = attrs.evolve(
    CPU,
    name="an H100 for arrays a hundred times smaller",
    memory_bytes_per_second=7e6,
    peak_flops={kind: 17e6 for kind, _ in CPU.peak_flops},
    link_bytes_per_second=1e6,
    link_latency_seconds=1e-12,
)
"""Hardware that has, for small arrays, the ratios of an H100 for those of users."""

WIDTH, HIDDEN, WORDS, LAYERS = 1024, 4096, 32768, 2
"""The sizes of the transformer that is compiled for GPUs."""


@final
@attrs.frozen
class Row:
    """The patch of one program."""

    name: str
    annotations: int
    operations: int
    before_seconds: float | None
    patched_seconds: float
    planned_seconds: float
    is_equal: bool | None
    """Whether the numbers are the same; `None` if nothing was run."""
    is_verified: bool
    seconds: float
    refusal: str = ""
    """Why there is no patch."""


def imported(name: str, folder: Path) -> Any:
    """Copies a program to a folder, and imports it."""
    path = Path(shutil.copy(SOURCES / f"{name}.py", folder))
    spec = importlib.util.spec_from_file_location(f"program_{name}", path)
    assert spec is not None, "a file of Python"
    assert spec.loader is not None, "a file of Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def row_of(name: str, fn: Callable[..., Any], plan: AutoPlan, folder: Path, target: str | None, limit: float) -> Row:
    """Makes the patch of a plan, and compares."""
    operations = sum(1 for _ in equations(plan.call.jaxpr))
    start = time.perf_counter()
    try:
        patch = plan.to_patch(fn, root=folder, target=target, time_limit=limit)
    except PatchError as error:
        message = str(error).strip().splitlines()[-2:]
        return Row(name, 0, operations, None, 0.0, 0.0, None, False, time.perf_counter() - start, " ".join(message))
    seconds = time.perf_counter() - start
    verification = patch.verify()
    before = None if "explicit" in name else attrs.evolve(patch, changes=()).verify().patched.seconds
    return Row(
        name,
        len(patch.annotations),
        operations,
        before,
        verification.patched.seconds,
        verification.planned.seconds,
        None if verification.error is None else verification.error <= verification.tolerance,
        bool(verification),
        seconds,
    )


def on_cpus(names: list[str], limit: float) -> Iterator[Row]:
    """The programs on CPU devices."""
    for name in names:
        for axis_types in ("auto", "explicit"):
            with tempfile.TemporaryDirectory() as folder:
                fn, args = imported(name, Path(folder)).make()
                mesh = sr.create_mesh("data:4,model:2", axis_types=axis_types)
                plan = sr.autoplan(fn, *args, mesh=mesh, hardware=SMALL)
                yield row_of(f"{name}, {axis_types}", fn, plan, Path(folder), None, limit)
            jax.clear_caches()


def on_gpus(limit: float) -> Iterator[Row]:
    """A transformer of a user's size, on GPUs."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    square = {name: array(WIDTH, WIDTH) for name in "qkvo"}
    layer = {**square, "up": array(WIDTH, HIDDEN), "down": array(HIDDEN, WIDTH)}
    params = {"embed": array(WORDS, WIDTH), "layers": [layer] * LAYERS}
    with tempfile.TemporaryDirectory() as folder:
        step = imported("plain", Path(folder)).step
        tokens = jax.ShapeDtypeStruct((32, 512), jnp.int32)
        plan = sr.autoplan(step, params, tokens, mesh=sr.mesh_shape("data:2,model:4"))
        yield row_of("plain, cuda:h100:8", step, plan, Path(folder), "cuda:h100:8", limit)


def text_of(row: Row) -> str:
    """The row as a line of the table."""
    if row.refusal:
        return f"{row.name:<26}  refused after {row.seconds:.0f} s: {row.refusal}"
    before = "-" if row.before_seconds is None else f"{1e3 * row.before_seconds:.4g}"
    equal = "not run" if row.is_equal is None else "yes" if row.is_equal else "NO"
    return (
        f"{row.name:<26}{row.annotations:>6}{row.operations:>7}{before:>10}{1e3 * row.patched_seconds:>10.4g}"
        f"{1e3 * row.planned_seconds:>10.4g}{row.patched_seconds / row.planned_seconds - 1:>+8.1%}  {equal:<8}"
        f"{'yes' if row.is_verified else 'no':<9}{row.seconds:>6.0f}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="How near patches bring programs to their plans.")
    parser.add_argument("--smoke", action="store_true", help="a toy program")
    parser.add_argument("--json", action="store_true", help="print JSON; the table goes to the standard error")
    parser.add_argument("--programs", nargs="*", help="only these programs; none with nothing behind it")
    parser.add_argument("--gpus", action="store_true", help="a transformer compiled for 8 H100s, too")
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="S", help="of each patch (default: 300)")
    options = parser.parse_args(arguments)
    names = options.programs if options.programs is not None else [*(TOYS if options.smoke else PROGRAMS)]
    if unknown := [name for name in names if not (SOURCES / f"{name}.py").is_file()]:
        parser.error(f"unknown program {', '.join(unknown)}; the programs are {', '.join(PROGRAMS)}")
    jax.config.update("jax_platforms", "cpu")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    out = sys.stderr if options.json else sys.stdout
    head = (
        f"{'program':<26}{'lines':>6}{'ops':>7}{'before ms':>10}{'patched':>10}{'planned':>10}{'':>8}  equal   verified"
    )
    print(f"{head:<96}{'s':>3}", file=out)
    rows: list[Row] = []
    for group in (on_cpus(names, options.time_limit), on_gpus(options.time_limit) if options.gpus else ()):
        for row in group:
            rows.append(row)
            print(text_of(row), file=out, flush=True)
    if options.json:
        print(json.dumps({"jax": jax.__version__, "rows": [attrs.asdict(row) for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
