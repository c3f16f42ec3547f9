"""Counts compilations."""

from collections.abc import Callable
from typing import Any

import jax


def compiles(run: Callable[[], Any]) -> int:
    """Returns how often anything is traced, lowered or compiled while `run` runs."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(run())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(events)
