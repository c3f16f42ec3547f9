"""Hardware in JSON: tables of a ready sheet are written as its name."""

import json
from collections.abc import Mapping
from typing import Any

import attrs

from shardrules.core.errors import suggest
from shardrules.programs.machine.hardware import Hardware, sheets

_TABLES = ("matmul_rates", "collective_times")


def hardware_to_json(hardware: Hardware) -> dict[str, Any]:
    """Returns hardware as plain data."""
    data = attrs.asdict(hardware)
    for figure in _TABLES:
        tables = getattr(hardware, figure)
        names = [name for name, sheet in sheets().items() if tables and getattr(sheet, figure) == tables]
        if names:
            data[figure] = names[0]
    return data


def hardware_from_json(data: Any) -> Any:
    """Returns what `hardware_to_json` wrote with its tables, as far as it is that: `record` checks the rest."""
    if not isinstance(data, Mapping):
        return data
    names = {figure: data[figure] for figure in _TABLES if isinstance(data.get(figure), str)}
    for figure, name in names.items():
        if name not in sheets():
            raise LookupError(f"{figure}: unknown sheet {name!r}{suggest(name, sheets())}")
    # As JSON has it: lists, not tuples.
    tables = {
        figure: json.loads(json.dumps([attrs.asdict(table) for table in getattr(sheets()[name], figure)]))
        for figure, name in names.items()
    }
    return {**data, **tables}
