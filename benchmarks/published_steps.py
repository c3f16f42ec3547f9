"""Are modelled times what machines took?

**Method.** Each row of `published/rows.toml` is a training step that others published with its seconds: a model,
chips, a layout, a batch. It is rebuilt from these alone (`published/`), compiled for the chips, which need not be
present, with the flags of its authors, and modelled. `ratio` is predicted over measured. Nothing in the model is fitted
on these rows: its figures come from micro-benchmarks. Rows with an `order` are layouts of one model on one machine, of
which the order is tested, and for some how many times as long as the fastest the others take.

**Last answer.** 2026-11-28, 2 busy cores of an Intel Xeon, JAX 0.10.2. Over 31 steps of dense models the median error
is 7.1 %, the 90th percentile 18.3 %, the worst 22.2 % and the mean of the signed errors -2.2 %; as first predicted,
22 steps had 10.0 %, 21.9 %, 32.3 % and +2.0 %. Three steps of two mixtures of experts are modelled at 0.90, 0.80 and
0.73 of what they took, first at 0.68, 1.12 and 0.73. The table, and where the worst are off, is in "How far to
believe the times". The limits below are missed in the median, at the 90th percentile, in the worst step, in the
median of TPU7x (18.3 %), and for five of seven peaks. The orders R1, R4 and R5 are right. Steps on GPUs compile in 5
to 70 s, those of PyTorch in 60 to 390 s. Of those on TPUs only 22 to 27 are compiled in less than 300 s (175 to 263
s); the others are modelled from their schedules, which take 15 to 500 s, and their machine code up to more than half
an hour.

Run it as `python benchmarks/published_steps.py`; see `--help` for less. It needs the extras `cuda` and `tpu`. Compiling
takes up to five minutes a row, and `--texts DIR` keeps the compiled programs, so that another run models them again
without compiling. `--rows FILE` rebuilds rows of your own.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEDIAN_LIMIT, TAIL_LIMIT, WORST_LIMIT, CHIP_LIMIT = 0.05, 0.12, 0.20, 0.08
"""The largest relative errors: in the median, at the 90th percentile, of any row, and in the median of a chip."""

MEMORY_LIMIT = 0.10
"""The largest relative error of a peak that its source prints."""

RATIO_LIMITS = {"R4": 0.05}
"""By set the largest relative error of how many times as long as its fastest layout another one takes."""

SECONDS_LIMIT = 300.0
"""Seconds that the rebuild of a row may take on two cores."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def order_limits(figures: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The limits on orders, and on how many times as long as the fastest the others of a set take."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for figure in figures:
        if figure["order"] and figure["measured"] is not None:
            sets.setdefault(figure["order"], []).append(figure)
    limits = []
    for name, members in sets.items():
        # Where steps have other numbers of tokens, tokens per second are what is compared.
        members = [
            {**member, **{key: member[key] / member.get("tokens", 1) for key in ("measured", "predicted")}}
            for member in members
        ]
        measured, predicted = (
            [member["name"] for member in sorted(members, key=lambda member: member[key])]
            for key in ("measured", "predicted")
        )
        if len(members) > 1:
            text = f"{name}: predicted {' < '.join(predicted)}, measured {' < '.join(measured)}"
            limits.append((text, measured == predicted))
        fastest = min(members, key=lambda member: member["measured"])
        for member in members:
            if name in RATIO_LIMITS and member is not fastest:
                ours, theirs = (member[key] / fastest[key] for key in ("predicted", "measured"))
                text = f"{member['name']} takes {ours:.2f} x {fastest['name']}, machines {theirs:.2f} x, "
                text += f"at most {RATIO_LIMITS[name]:.0%} apart"
                limits.append((text, abs(ours / theirs - 1) <= RATIO_LIMITS[name]))
    return limits


def summary(figures: Sequence[dict[str, Any]], key: str = "ratio") -> dict[str, Any]:
    """Errors over all rows that are no part of an order: as modelled today, or as first predicted."""
    errors: dict[str, list[float]] = {}
    ratios = []
    for figure in figures:
        if not figure["order"] and figure[key] is not None:
            errors.setdefault(figure["chip"], []).append(abs(figure[key] - 1))
            ratios.append(figure[key])
    values = [error for chip in errors.values() for error in chip]
    if not values:
        return {"rows": 0}
    return {
        "rows": len(values),
        "median": statistics.median(values),
        "90th percentile": percentile(values, 0.9),
        "worst": max(values),
        "mean signed": statistics.fmean(ratios) - 1,
        "chips": {chip: statistics.median(chip_errors) for chip, chip_errors in errors.items()},
    }


def limits_of(figures: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Every limit that these rows are held to, and whether it is met."""
    totals, errors = summary(figures), {"median": MEDIAN_LIMIT, "90th percentile": TAIL_LIMIT, "worst": WORST_LIMIT}
    limits = [
        (f"{name} error {totals[name]:.1%}, at most {limit:.0%}", totals[name] <= limit)
        for name, limit in errors.items()
        if name in totals
    ]
    limits += [
        (f"median error on {chip} {error:.1%}, at most {CHIP_LIMIT:.0%}", error <= CHIP_LIMIT)
        for chip, error in totals.get("chips", {}).items()
    ]
    limits += [
        (
            f"{figure['name']}: {figure['memory ratio']:.2f} of the printed peak, at most {MEMORY_LIMIT:.0%} off",
            abs(figure["memory ratio"] - 1) <= MEMORY_LIMIT,
        )
        for figure in figures
        if figure.get("memory ratio")
    ]
    limits += [
        (
            f"{figure['name']}: rebuilt in {figure['seconds']:.0f} s, at most {SECONDS_LIMIT:.0f} s",
            figure["seconds"] <= SECONDS_LIMIT,
        )
        for figure in figures
        if figure["compiled"]
    ]
    return limits + order_limits(figures)


def missed(figures: Sequence[dict[str, Any]]) -> list[str]:
    """The limits that were missed."""
    return [text for text, is_met in limits_of(figures) if not is_met]


def figure_of(result: Any) -> dict[str, Any]:
    """A line of the table."""
    row, time = result.row, result.time
    return {
        "name": row.name,
        "order": row.order,
        "model": row.model,
        "chip": row.chip,
        "devices": row.device_count,
        "layout": row.layout,
        "kind": "mixture" if row.dims.experts else "dense",
        "tokens": row.sequences * row.length * row.recipe.accumulations,
        "measured": row.seconds,
        "first": row.first,
        "first ratio": row.first / row.seconds if row.first and row.seconds else None,
        "predicted": result.predicted,
        "ratio": result.ratio,
        "memory": result.peak_bytes,
        "memory ratio": result.memory_ratio,
        "compute": time.compute_seconds,
        "communication": time.communication_seconds,
        "exposed": time.exposed_seconds,
        "seconds": result.compile_seconds,
        "compiled": result.is_compiled,
    }


def line(figure: dict[str, Any]) -> str:
    """A figure as text."""
    measured, first = (f"{figure[key]:10.4g}" if figure[key] else f"{'-':>10}" for key in ("measured", "first"))
    ratios = [f"{figure[key]:7.3f}" if figure[key] else f"{'-':>7}" for key in ("ratio", "memory ratio")]
    return (
        f"{figure['name']:24}{figure['model']:17}{figure['devices']:>5} {figure['chip']:11}{figure['layout']:24}"
        f"{measured}{first}{figure['predicted']:10.4g}{ratios[0]}{figure['compute']:10.4g}"
        f"{figure['communication']:10.4g}{figure['exposed']:10.4g}{figure['memory'] / 1e9:8.1f}{ratios[1]}"
        f"{figure['seconds']:8.0f}"
    )


def is_named(row: str, name: str) -> bool:
    """Whether a row is called so, or belongs to a group that is."""
    return row == name or row.startswith(f"{name},")


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Modelled against published seconds of training steps.")
    parser.add_argument(
        "--row", nargs="*", default=[], metavar="NAME", help="rows with this name, or with it before a comma"
    )
    parser.add_argument(
        "--rows", nargs="*", default=[], type=Path, metavar="FILE", help="the rows of TOML files instead"
    )
    parser.add_argument(
        "--texts", type=Path, metavar="DIR", help="keep compiled programs here, and read those there are"
    )
    parser.add_argument("--smoke", action="store_true", help="toy models on CPU devices, without limits")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if options.smoke:
        jax.config.update("jax_num_cpu_devices", 8)
    from published.rebuild import rebuild
    from published.rows import FILE, RowError, read_rows

    try:
        rows = read_rows(options.rows or ([FILE.with_name("smoke.toml")] if options.smoke else ()))
    except RowError as error:
        parser.error(f"rows that cannot be rebuilt:\n{error}")
    unknown = [name for name in options.row if not any(is_named(row.name, name) for row in rows)]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; the rows are {'; '.join(row.name for row in rows)}")
    figures = []
    out = sys.stderr if options.json else sys.stdout
    heads = ("measured", "first", "modelled", "ratio", "compute", "comm.", "exposed", "GB", "ratio", "rebuilt")
    sizes = (10, 10, 10, 7, 10, 10, 10, 8, 7, 8)
    print(f"{'':82}" + "".join(f"{head:>{size}}" for head, size in zip(heads, sizes, strict=True)), file=out)
    for row in rows:
        if not options.row or any(is_named(row.name, name) for name in options.row):
            figures.append(figure_of(rebuild(row, options.texts)))
            print(line(figures[-1]), file=out, flush=True)
            jax.clear_caches()
    over = [] if options.smoke else missed(figures)
    totals = {
        "as modelled today": summary(figures),
        "as first predicted": summary(figures, "first ratio"),
        **{
            f"{kind}, as modelled today": summary([figure for figure in figures if figure["kind"] == kind])
            for kind in ("dense", "mixture")
        },
    }
    if options.json:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        print(json.dumps({**versions, "rows": figures, "summary": totals, "missed": over}, indent=1))
    else:
        print()
        for name, errors in totals.items():
            if errors["rows"]:
                parts = [f"{part} {errors[part]:.1%}" for part in ("median", "90th percentile", "worst")]
                parts.append(f"mean of signed errors {errors['mean signed']:+.1%}")
                chips = ", ".join(f"{chip} {error:.1%}" for chip, error in errors["chips"].items())
                print(f"{errors['rows']} rows {name}: {', '.join(parts)}; medians by chip: {chips}")
        met = [] if options.smoke else [text for text, is_met in limits_of(figures) if is_met]
        kept = [figure["name"] for figure in figures if not figure["compiled"]]
        print(
            *(f"not tested: {name}: rebuilt in {SECONDS_LIMIT:.0f} s, its program was kept" for name in kept), sep="\n"
        )
        print(*(f"met: {text}" for text in met), *(f"missed: {text}" for text in over), sep="\n")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
