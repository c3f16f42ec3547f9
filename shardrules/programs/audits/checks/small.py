"""Many collectives, each so small that it takes as long as its messages travel: combined they would take one such time.

Compilers combine neighbors, but not what depends on something in between, and each in a fusion of its own.
"""

from collections.abc import Iterator

from shardrules.core.finding import Finding
from shardrules.core.text import bytes_text
from shardrules.programs.audits.movement import MovedArrays, Movement
from shardrules.programs.audits.timing import Timing
from shardrules.programs.compiled.collectives import Collective

_MIN_RUNS = 100
"""A finding takes so many small collectives of a kind in a step. Chosen by hand: a healthy model of a few layers has
dozens, the published case 583."""

_LATENCY_SHARE = 1 / 3
"""A collective is small if its messages travel for this share of its time. Chosen by hand: combined, such collectives
take two thirds of their time or less."""


def check_small_collectives(movement: Movement) -> Iterator[Finding]:
    """Hundreds of small collectives of the same kind over the same axes, in one computation, that nobody combined."""
    timing = movement.timing
    groups: dict[tuple[str, str], list[Collective]] = {}
    for collective in movement.collectives:
        # Latency says that a collective is small: how many bytes are few depends on the hardware.
        is_small = timing.latency_seconds(collective) > _LATENCY_SHARE * timing.seconds(collective)
        if collective.group_size > 1 and is_small and _is_independent(movement, collective):
            groups.setdefault((collective.kind, collective.axes_text), []).append(collective)
    for group in groups.values():
        moved = MovedArrays(movement, [(collective, array) for collective in group for array in collective.arrays])
        combined_count, combined_seconds = _combined(timing, group)
        saved = moved.seconds - combined_seconds
        if moved.runs < _MIN_RUNS or saved <= 0:
            continue
        yield moved.finding(
            timing.severity(saved),
            "small-collectives",
            f"{moved.runs} x {moved.kind} over {moved.axes} of {bytes_text(moved.wire_bytes // moved.runs)} on "
            f"average, largest array {moved.largest}: {moved.on_wire}: they take as long as their messages travel. "
            f"{combined_count} larger would save that: {timing.cost_text(saved)}"
            + f". Arrays: {moved.names}"
            * bool(moved.names),
            "Stack the arrays of equal layers into one (jax.lax.scan over layers), keep small arrays whole "
            "(min_size_mb of FSDPShardingRule), or gather them together in one operation",
        )


def _is_independent(movement: Movement, collective: Collective) -> bool:
    """Moves of parameters or their gradients do not wait for each other.

    Activations do: each sum of a model that is split over features comes after the one before.
    """
    arguments = movement.arguments
    if collective.kind == "all-gather" and all(name in arguments.indices for name in collective.arguments):
        return True
    is_over_batch = all(name in arguments.example_axes for name in collective.crossed)
    is_update = collective.kind in ("all-gather", "all-reduce", "reduce-scatter") and is_over_batch
    return is_update and all(movement.is_shaped_like_parameter(collective, array) for array in collective.arrays)


def _combined(timing: Timing, group: list[Collective]) -> tuple[int, float]:
    """The runs and the time of collectives if they were combined, also those of all rounds of a loop.

    They are combined until they send for as long as their messages travel: larger ones gain little.
    """
    transfer = sum(timing.seconds(each) - timing.latency_seconds(each) for each in group)
    latency = max(timing.latency_seconds(each) / each.times.count for each in group)
    count = max(1, round(transfer / latency))
    return count, transfer + count * latency
