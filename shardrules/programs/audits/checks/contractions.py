"""Matmuls that contract a dimension which is split, where the sums are far larger than what is multiplied.

The head of a language model multiplies the width of the model with the vocabulary. If the width is split, each device
has a part of every sum, and all logits go over the wire. Split by vocabulary, nothing goes but the activations.
"""

from collections.abc import Iterator
from typing import final

import attrs

from shardrules.core.check import bytes_text
from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.programs.audits.checks.costs import cost_text, names_text, severity
from shardrules.programs.audits.checks.moves import is_parameter_or_gradient
from shardrules.programs.audits.checks.work import is_for_update
from shardrules.programs.audits.facts import AuditFacts, is_explicit
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.costs.collective import collective_seconds
from shardrules.programs.costs.step_time import seconds_text

_MIN_RATIO = 4.0
"""How many times as long as gathering the operand the sum must take.

The projections that tensor parallelism sums have a ratio of 2 at most: an all-reduce moves twice the bytes of an
all-gather, and their results are no larger than their operands. With 2 these would be findings; with 8, projections
from the width of a model to four times that width would not."""


@final
@attrs.frozen
class _Sum:
    collective: Collective
    array: ArrayType
    seconds: float
    gather_seconds: float
    paths: tuple[str, ...]
    """The matrix that is split along the contracted dimension."""


def check_contractions(facts: AuditFacts) -> Iterator[Finding]:
    """Sums of matmuls over an axis that does not split the batch, which cost far more than gathering an operand."""
    groups: dict[tuple[str, str, str], list[_Sum]] = {}
    for partial_sum in _sums(facts):
        collective = partial_sum.collective
        key = (collective.kind, collective.axes_text, user_line(collective.stack))
        groups.setdefault(key, []).append(partial_sum)
    for (kind, axes, line), group in groups.items():
        seconds, gather_seconds = (
            sum(getattr(partial_sum, name) for partial_sum in group) for name in ("seconds", "gather_seconds")
        )
        runs = sum(partial_sum.collective.times.count for partial_sum in group)
        wire_bytes = sum(partial_sum.collective.total_wire_bytes for partial_sum in group)
        largest = max((partial_sum.array for partial_sum in group), key=lambda array: array.nbytes)
        names = names_text(path for partial_sum in group for path in partial_sum.paths) or "A matrix"
        yield Finding(
            severity(facts, seconds - gather_seconds),
            "partial-sums",
            f"{runs} x {kind} over {axes}, largest array {largest}: {bytes_text(wire_bytes)} on the wire per device "
            f"and step, {cost_text(facts, seconds)}. {names}: split along the contracted dimension, and the product is "
            f"far larger than what is multiplied: to gather that takes {seconds_text(gather_seconds)}",
            remedy=f"Split {names} along the other dimension, the features of the product, over {axes}",
            axis=axes if axes in facts.sizes else None,
            source=line,
        )


def _sums(facts: AuditFacts) -> Iterator[_Sum]:
    for collective in facts.collectives:
        # Sums over the axis of the batch are gradients, or findings of `check_moves`.
        if collective.kind not in ("all-reduce", "reduce-scatter") or len(collective.arrays) != 1:
            continue
        if not collective.crossed or is_explicit(collective) or is_for_update(facts, collective):
            continue
        if facts.is_sent_back(collective):
            continue
        if all(name in facts.example_axes for name in collective.crossed):
            continue
        if is_parameter_or_gradient(facts, collective, collective.arrays[0]):
            continue
        factors = facts.factors_behind(collective)
        activations = [factor for factor in factors if not factor.paths]
        # The matrix has to stay split, or every device would do all of the work.
        if len(factors) != 2 or len(activations) != 1:
            continue
        wire_bytes = activations[0].array.nbytes * (collective.group_size - 1)
        gather = attrs.evolve(collective, kind="all-gather", wire_bytes=wire_bytes)
        seconds, gather_seconds = (collective_seconds(each, facts.hardware) for each in (collective, gather))
        if seconds >= _MIN_RATIO * gather_seconds:
            paths = tuple(path for factor in factors for path in factor.paths)
            yield _Sum(collective, collective.arrays[0], seconds, gather_seconds, paths)
