"""Tables of the sheets of hardware, which mkdocs puts into the page on targets."""

import re
from typing import Any

from shardrules.programs.machine.hardware import FIGURES, RATES, Hardware, sheets

MARK = "<!-- the sheets -->"
TABLES = ("matmul_rates", "collective_times")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """The page with the tables at the mark; mkdocs calls this for every page."""
    return markdown.replace(MARK, tables()) if MARK in markdown else markdown


def figure_text(sheet: Hardware, figure: str) -> str:
    value = getattr(sheet, figure)
    if figure == "peak_flops":
        return ", ".join(f"{name} {rate / 1e12:.6g}" for name, rate in value) + " TFLOP/s"
    if figure == "memory_bytes":
        return f"{value / 2**30:.2f} GiB"
    if figure.endswith("_fractions"):
        return ", ".join(f"{name} {number:.6g}" for name, number in value)
    if figure == "matmul_rates":
        return ", ".join(f"{table.kind}: {len(table.flops_per_second)} sizes" for table in value) or "none"
    if figure == "collective_times":
        kinds = dict.fromkeys(table.kind for table in value)
        groups = {kind: [str(table.group_size) for table in value if table.kind == kind] for kind in kinds}
        return ", ".join(f"{kind} of {'/'.join(sizes)}" for kind, sizes in groups.items()) or "none"
    if figure == "clock_hertz":
        return f"{value / 1e9:.6g} GHz" if value else "none"
    if figure == "devices_per_host":
        return "all" if value is None else str(value)
    if figure.endswith("bytes_per_second"):
        return f"{value / 1e9:.6g} GB/s"
    return f"{value * 1e6:.6g} µs" if figure.endswith("seconds") else f"{value:.6g}"


def tables() -> str:
    """The sheets as markdown: an overview, then every figure with its source."""
    peaks = [figure for figure in FIGURES[: FIGURES.index("torus_dims")] if figure != "peak_flops"]
    reached = [figure for figure in FIGURES[FIGURES.index("matmul_fractions") :] if figure not in TABLES]
    lines = [
        f"| sheet | {' | '.join(f'`{name}`' for name in RATES)} |",
        f"|---|{'--:|' * len(RATES)}",
    ]
    for name, sheet in sheets().items():
        rates = dict(sheet.peak_flops)
        cells = [f"{rates[kind] / 1e12:.5g}" if kind in rates else "" for kind in RATES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    for columns in (peaks, reached):
        lines += [
            "",
            f"| sheet | {' | '.join(column.replace('_', ' ') for column in columns)} |",
            f"|---|{'--:|' * len(columns)}",
        ]
        lines += [
            f"| `{name}` | {' | '.join(figure_text(sheet, column) for column in columns)} |"
            for name, sheet in sheets().items()
        ]
    for name, sheet in sheets().items():
        lines += ["", f"### {sheet.name}: `{name}`", "", "| figure | value | source |", "|---|---|---|"]
        for figure in FIGURES:
            source = re.sub(r"https://[^\s,;]*[^\s,;:]", r"<\g<0>>", sheet.source(figure))
            lines.append(f"| `{figure}` | {figure_text(sheet, figure)} | {source} |")
    return "\n".join(lines)
