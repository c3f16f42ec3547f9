"""How often XLA compiles."""

from collections.abc import Callable
from typing import Any

import jax


def compiles(run: Callable[[], Any]) -> int:
    """Returns how many programs are compiled while `run` runs."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(run())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(found)
