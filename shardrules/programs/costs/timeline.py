"""A timeline: what runs when on each resource of a device, for trace viewers and for the page."""

import json
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import attrs

PROGRAM = "program"
"""The row of the loops."""

EventKind: TypeAlias = Literal["compute", "communication", "copy", "wait", "loop", "rest"]
"""The kinds of events: a kernel, a collective, a copy between memories, waiting, a loop or a round of one, and the
rounds of a loop that are not shown one by one."""

_COLOURS = {
    "compute": "thread_state_running",
    "communication": "rail_animation",
    "copy": "thread_state_iowait",
    "wait": "terrible",
    "loop": "grey",
    "rest": "generic_work",
}
"""Names of colours that trace viewers know."""


@final
@attrs.frozen
class Event:
    """Something that a resource does from `start` on, for `seconds`."""

    name: str
    """The instruction of the compiled program, or what the device waits for."""
    line: str
    """The line of Python behind it; empty if unknown."""
    resource: str
    start: float
    seconds: float
    kind: EventKind

    @property
    def end(self) -> float:
        """The time of its end."""
        return self.start + self.seconds


@final
@attrs.frozen
class Timeline:
    """The events of one call of a program, from `AuditReport.timeline`: in seconds, and on one device.

    Of a loop it has the first rounds and an event for the rest. `rows` are the resources: the program with its loops,
    the kernels, links and networks, copies. Two events of a row never overlap, except for loops with their rounds and
    kernels.

    ```python
    event = sr.reports.Event("fusion.1", "model.py:7", "compute", 0.0, 0.002, "compute")
    timeline = sr.reports.Timeline("step", (event,))
    assert timeline.rows == ("compute",) and timeline.seconds == 0.002
    assert '"dur": 2000.0' in timeline.to_json()
    ```
    """

    name: str
    events: tuple[Event, ...] = attrs.field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """The end of the last event."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def rows(self) -> tuple[str, ...]:
        """The resources: the program, then kernels, then the others by name."""
        rows = dict.fromkeys(event.resource for event in self.events)
        return tuple(sorted(rows, key=lambda row: (row != PROGRAM, row != "compute", row)))

    def to_json(self) -> str:
        """Returns it in the trace format of Chrome, which https://ui.perfetto.dev and chrome://tracing open."""
        rows = {row: index for index, row in enumerate(self.rows)}
        names: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": f"{self.name} (modelled)"}}
        ]
        for row, index in rows.items():
            thread = {"ph": "M", "pid": 0, "tid": index}
            names.append({**thread, "name": "thread_name", "args": {"name": row}})
            names.append({**thread, "name": "thread_sort_index", "args": {"sort_index": index}})
        # Loops begin before what is in them, and viewers nest by that order.
        events = sorted(self.events, key=lambda event: (rows[event.resource], event.start, -event.seconds))
        slices = [_slice(event, rows[event.resource]) for event in events]
        return json.dumps({"traceEvents": [*names, *slices], "displayTimeUnit": "ms"}, separators=(", ", ": "))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json()` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def _slice(event: Event, row: int) -> dict[str, Any]:
    # Both ends are rounded, so that neighbours still touch and what is nested stays inside.
    # Traces are in microseconds, and digits end at nanoseconds.
    start, end = (round(1e6 * seconds, 3) for seconds in (event.start, event.end))
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "ts": start,
        "dur": round(end - start, 3),
        "pid": 0,
        "tid": row,
        "cname": _COLOURS[event.kind],
        "args": {"line": event.line or "unknown"},
    }
