"""How long do train steps take on the device that is here, beside what an audit models for it?

**Method.** The models of `plan_quality.py`, each at the size for one device. Each is audited for the kind of device
there is, as it would be on a machine without one, and then run: `measured` is the mean of as many steps as take three
seconds, after three that warm up. `kernels` is the part of a step in which kernels run and `idle` that in which nothing
does, from a profile. `--compare NAME` prints all of one comparison. With `--calibrate SECONDS` the device is measured
first (`Hardware.measure`), for so long, and each step is modelled by the ready sheet and by the measured one: eight
models by default, of which four were never run on a device when this was written (`CALIBRATED`). On a GPU that takes
less than eight minutes with 100 seconds for the sheet.

**Last answer.** 2026-11-26, one H100 SXM5, Python 3.12, JAX 0.11.2: a median error of 9 % over fourteen models, between
0.69 and 1.23 of what they took. The table is in `docs/how-far-to-believe-the-times.md`.

Run it as `python benchmarks/device_step_time.py`; with `--sheet FILE` the sheet that `Hardware.save` wrote replaces the
ready one.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from typing import Any, final

import attrs

LIMIT = 0.15
"""The median error from which on `--check` fails."""

CALIBRATED = (
    *("gpt2", "llama", "vit", "sorted_experts"),
    *("diffusion_transformer", "masked_autoencoder", "mamba_experts", "window_attention"),
)
"""The models of `--calibrate`: four of the last answer, and four of which no device was asked."""

_MEASURED_SECONDS = 3.0
"""How long the steps of one model run: a GPU that is at its limit of power slows down within half a second."""


@final
@attrs.frozen
class Row:
    """The times of one model, in seconds of a step."""

    name: str
    measured: float
    modelled: float
    kernels: float
    idle: float
    matched: float
    """The share of the time on the device in instructions of the audited program."""
    calibrated: float | None = None
    """As modelled by the sheet that was measured here."""

    @property
    def ratio(self) -> float:
        """Modelled over measured."""
        return self.modelled / self.measured

    def text(self) -> str:
        """A line of the table."""
        second = (
            ""
            if self.calibrated is None
            else f"{self.calibrated * 1e3:>10.2f} ms{self.calibrated / self.measured:>8.3f}"
        )
        return (
            f"{self.name:24}{self.measured * 1e3:>10.2f} ms{self.modelled * 1e3:>10.2f} ms{self.ratio:>8.3f}{second}"
            f"   kernels {self.kernels * 1e3:.2f} ms, idle {self.idle * 1e3:.2f} ms, matched {self.matched:.1%}"
        )


def models() -> dict[str, Any]:
    """The models that train by name: those that serve return no state for the next step."""
    from plan_models import KINDS, MODELS, MORE

    return {name: model for name, model in {**MODELS, **KINDS, **MORE}.items() if model.donated == (0,)}


def seconds_by(sheet: Any, report: Any) -> float:
    """The seconds of an audited step by another sheet, without compiling it again."""
    from shardrules.programs.compiled.flops import find_matmuls
    from shardrules.programs.compiled.kernels import find_kernels
    from shardrules.programs.compiled.program import read_program
    from shardrules.programs.costs.schedule import play_schedule

    program = read_program(report.hlo_text)
    return play_schedule(program, report.collectives, find_kernels(program, find_matmuls(program)), sheet).time.seconds


def random_arrays(shapes: Any) -> Any:
    """Small random values; moments are positive, tokens and labels below 200."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))

    def values(leaf: Any) -> Any:
        key = next(keys)
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.randint(key, leaf.shape, 0, 200 if leaf.ndim else 2, leaf.dtype)
        return jnp.abs(jax.random.normal(key, leaf.shape, jnp.float32) / 50).astype(leaf.dtype)

    return jax.tree.map(values, shapes)


def measure(name: str, target: str, sheet: Any, second_sheet: Any, smoke: bool) -> tuple[Row, Any]:
    """Audits and runs a model; returns its row, and the comparison with its profile. `second_sheet` is another."""
    import equinox as eqx
    import jax

    import shardrules as sr

    model_step, shapes = models()[name].build(1, smoke)
    (state, batch), static = eqx.partition(random_arrays(shapes), eqx.is_array)

    def step(state: Any, batch: Any) -> Any:
        return eqx.filter(model_step(*eqx.combine((state, batch), static)), eqx.is_array)

    report = sr.audit(step, state, batch, mesh=sr.mesh_shape("data:1"), donate_argnums=0, target=target, hardware=sheet)
    run = jax.jit(step, donate_argnums=0).lower(state, batch).compile()

    def again(count: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(count):
            state, _ = run(state, batch)
        jax.block_until_ready(state)
        return time.perf_counter() - start

    again(3)
    count = 4 if smoke else max(4, int(_MEASURED_SECONDS / again(1)))
    measured = again(count) / count
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(4):
                again(1)
        comparison = report.compare(folder)
    (device,) = comparison.devices
    calibrated = None if second_sheet is None else seconds_by(second_sheet, report)
    row = Row(
        *(name, measured, report.step_time(), device.kernel_seconds, device.idle_seconds, comparison.matched_share),
        calibrated,
    )
    return row, comparison


def default_target() -> str:
    """What an audit calls the first device that is here."""
    import jax

    from shardrules.programs.machine.kinds import sheet_name

    device = jax.devices()[0]
    name = sheet_name(device.platform, device.device_kind)
    if name is None or name.startswith("tpu"):
        raise SystemExit(f"name the target of a {device.device_kind} with --target, such as cuda:h100:1 or tpu:v6e:1x1")
    return f"{name}:1"


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Steps on the device that is here, beside what an audit models.")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--target", help="what the device is, such as cuda:h100:1; by default what it says")
    parser.add_argument("--sheet", metavar="FILE", help="a sheet that Hardware.save wrote")
    parser.add_argument(
        "--calibrate", type=float, metavar="SECONDS", help="measure the device for so long, and model with both sheets"
    )
    parser.add_argument("--compare", metavar="NAME", help="print the whole comparison of one model with its profile")
    parser.add_argument("--smoke", action="store_true", help="toys of two models on a CPU device")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="fail where the limit is missed")
    options = parser.parse_args(arguments)
    if options.check and options.smoke:
        parser.error("toy sizes have no limits: use --check without --smoke")
    if options.smoke:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    import shardrules as sr

    target = options.target or default_target()
    sheet = None if options.sheet is None else sr.Hardware.load(options.sheet)
    # Measured before anything else runs.
    second_sheet = (
        None if options.calibrate is None else sr.Hardware.measure(jax.devices()[:1], time_limit=options.calibrate)
    )
    named = [options.compare] if options.compare and second_sheet is None else []
    all_models = [*models()] if second_sheet is None else [*CALIBRATED]
    names = options.models or named or (["conv_net", "sorted_experts"] if options.smoke else all_models)
    unknown = [name for name in names if name not in models()]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}; the models are {', '.join(models())}")
    if options.compare not in (None, *names):
        parser.error(f"--models has no {options.compare}")
    rows = []
    for name in names:
        row, comparison = measure(name, target, sheet, second_sheet, options.smoke)
        rows.append(row)
        if options.compare == name:
            print(comparison, file=sys.stderr)
        if not options.json:
            print(row.text(), flush=True)
    error = statistics.median(abs(row.ratio - 1) for row in rows)
    by_own = [abs(row.calibrated / row.measured - 1) for row in rows if row.calibrated is not None]
    own_error = statistics.median(by_own) if by_own else None
    if options.json:
        versions = {"python": platform.python_version(), "jax": jax.__version__, "device": jax.devices()[0].device_kind}
        print(
            json.dumps(
                {**versions, "rows": [attrs.asdict(row) for row in rows], "median": error, "own": own_error}, indent=1
            )
        )
    else:
        print(f"median error {error:.1%}" + (f", by the measured sheet {own_error:.1%}" if by_own else ""))
    return 1 if options.check and error > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
