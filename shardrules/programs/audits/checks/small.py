"""Many collectives, each so small that it takes as long as its messages travel: combined they would take one such time.

Compilers combine neighbors, but not what depends on something in between, and each in a fusion of its own.
"""

from collections.abc import Iterator

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.programs.audits.checks.costs import cost_text, latency_seconds, names_text, severity
from shardrules.programs.audits.facts import AuditFacts
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.costs.collective import collective_seconds

_MIN_RUNS = 100
"""How many small collectives of a kind a step must run for a finding.

A model of a few layers has dozens in a healthy step. With 200 the published case of 583 would still be a finding, but
not its half; with 50 toy models of two layers would be."""

_LATENCY_SHARE = 1 / 3
"""The share of a collective's time that its messages must take to travel, for it to be small.

Combined, such collectives take two thirds of their time or less. With a half, GPUs' short protocols, which trade
bandwidth for latency, would hide some; with a fifth most of what is small would gain little."""


def check_small_collectives(facts: AuditFacts) -> Iterator[Finding]:
    """Hundreds of small collectives of the same kind over the same axes, in one computation, that nobody combined."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for collective in facts.collectives:
        is_small = latency_seconds(facts, collective) > _LATENCY_SHARE * _seconds(facts, collective)
        if collective.group_size > 1 and is_small and _is_independent(facts, collective):
            groups.setdefault((collective.kind, collective.axes_text), []).append(collective)
    for (kind, axes), group in groups.items():
        runs = sum(collective.times.count for collective in group)
        combined_count, combined_seconds = _combined(facts, group)
        seconds = sum(_seconds(facts, collective) for collective in group)
        saved = seconds - combined_seconds
        if runs < _MIN_RUNS or saved <= 0:
            continue
        wire_bytes = sum(collective.total_wire_bytes for collective in group)
        largest = max((array for each in group for array in each.arrays), key=lambda array: array.nbytes)
        names = names_text(filter(None, facts.paths_of([name for each in group for name in each.arguments])))
        yield Finding(
            severity(facts, saved),
            "small-collectives",
            f"{runs} x {kind} over {axes} of {bytes_text(wire_bytes // runs)} on average, largest array {largest}: "
            f"{bytes_text(wire_bytes)} on the wire per device and step: they take as long as their messages travel. "
            f"{combined_count} larger would save that: {cost_text(facts, saved)}" + f". Arrays: {names}" * bool(names),
            remedy="Stack the arrays of equal layers into one (jax.lax.scan over layers), keep small arrays whole "
            "(min_size_mb of FSDPShardingRule), or gather them together in one operation",
            axis=axes if axes in facts.sizes else None,
            source=next(filter(None, (user_line(collective.stack) for collective in group)), ""),
        )


def _is_independent(facts: AuditFacts, collective: Collective) -> bool:
    """Whether it moves parameters or their gradients, which do not wait for each other.

    Activations do: each sum of a model that is split over features comes after the one before.
    """
    if collective.kind == "all-gather" and all(name in facts.argument_indices for name in collective.arguments):
        return True
    is_over_batch = all(name in facts.example_axes for name in collective.crossed)
    is_update = collective.kind in ("all-gather", "all-reduce", "reduce-scatter") and is_over_batch
    return is_update and all(facts.may_be_parameter(collective, array) for array in collective.arrays)


def _seconds(facts: AuditFacts, collective: Collective) -> float:
    return collective_seconds(collective, facts.hardware)


def _combined(facts: AuditFacts, group: list[Collective]) -> tuple[int, float]:
    """How often collectives would run if they were combined, also those of all rounds of a loop, and for how long.

    They are combined until they send for as long as their messages travel: larger ones gain little.
    """
    transfer = sum(_seconds(facts, each) - latency_seconds(facts, each) for each in group)
    latency = max(latency_seconds(facts, each) / each.times.count for each in group)
    count = max(1, round(transfer / latency))
    return count, transfer + count * latency
