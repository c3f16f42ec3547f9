"""The TOML of a sheet of hardware: `name`, and for each figure a table with its value and its source."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardrules.core.errors import suggest


def sheet_text(fields: Mapping[str, Any], figures: Sequence[str]) -> str:
    """Returns the TOML of a sheet with these fields."""
    sources = dict(fields["sources"])
    lines = [f"name = {_value(fields['name'])}"]
    for figure in figures:
        # TOML has nothing for None: without a value the figure keeps its default. An empty table says nothing, either.
        entries = [] if fields[figure] in (None, ()) else [f"value = {_value(fields[figure])}"]
        if figure in sources:
            entries.append(f"source = {_value(sources[figure])}")
        if entries:
            lines += ["", f"[{figure}]", *entries]
    return "\n".join(lines) + "\n"


def sheet_problems(table: Mapping[str, Any], figures: Sequence[str], required: Sequence[str]) -> list[str]:
    """Returns what in a file of TOML is no sheet."""
    problems = [] if isinstance(table.get("name"), str) else ["name is missing"]
    problems += [
        f"unknown figure {figure!r}{suggest(figure, figures)}; the figures are {', '.join(figures)}"
        for figure in table
        if figure != "name" and figure not in figures
    ]
    for figure in figures:
        entry = table.get(figure)
        if entry is None:
            problems += [f"{figure} is missing"] * (figure in required)
        elif not isinstance(entry, Mapping) or not isinstance(entry.get("source", ""), str):
            problems.append(f"{figure} must be a table with a value, and perhaps a source, as text")
        elif "value" not in entry and figure in required:
            problems.append(f"{figure} has no value")
    return problems


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(str(name))} = {_value(each)}' for name, each in value.items())}}}"
    if isinstance(value, tuple | list):
        # Pairs are written as a mapping, and tables one on a line.
        if value and all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in value):
            return _value(dict(value))
        tables = any(isinstance(each, Mapping) for each in value)
        joined = ",\n    ".join(map(_value, value)) if tables else ", ".join(map(_value, value))
        return f"[\n    {joined},\n]" if tables else f"[{joined}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
