"""Matmuls that contract a dimension which is split, where the sums are far larger than what is multiplied.

The head of a language model multiplies the width of the model with the vocabulary. If the width is split, each device
has a part of every sum, and all logits go over the wire. Split by vocabulary, nothing goes but the activations.
"""

from collections.abc import Iterator
from typing import final

import attrs

from shardrules.core.finding import Finding
from shardrules.programs.audits.checks.moves import is_parameter_or_gradient
from shardrules.programs.audits.checks.work import is_for_update
from shardrules.programs.audits.movement import MovedArrays, Movement, grouped, is_explicit, names_text, place_of
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.costs.step_time import seconds_text

_MIN_RATIO = 4.0
"""A sum that is a finding takes so many times as long as gathering the operand. Chosen by hand: the projections that
tensor parallelism sums take twice as long at most, as an all-reduce moves twice the bytes of an all-gather."""


@final
@attrs.frozen
class _Sum:
    collective: Collective
    gather_seconds: float
    paths: tuple[str, ...]
    """The matrix that is split along the contracted dimension."""


def check_contractions(movement: Movement) -> Iterator[Finding]:
    """Sums of matmuls over an axis that does not split the batch, which cost far more than gathering an operand."""
    timing = movement.timing
    for group in grouped(_sums(movement), lambda each: place_of(each.collective)).values():
        moved = MovedArrays(movement, [(each.collective, each.collective.arrays[0]) for each in group])
        gather_seconds = sum(partial_sum.gather_seconds for partial_sum in group)
        names = names_text(path for partial_sum in group for path in partial_sum.paths) or "A matrix"
        yield moved.finding(
            timing.severity(moved.seconds - gather_seconds),
            "partial-sums",
            f"{moved}: {moved.on_wire}, {timing.cost_text(moved.seconds)}. {names}: split along the contracted "
            "dimension, and the product is far larger than what is multiplied: to gather that takes "
            f"{seconds_text(gather_seconds)}",
            f"Split {names} along the other dimension, the features of the product, over {moved.axes}",
        )


def _sums(movement: Movement) -> Iterator[_Sum]:
    for collective in movement.collectives:
        # Sums over the axis of the batch are gradients, or findings of `check_moves`.
        if (
            collective.kind not in ("all-reduce", "reduce-scatter")
            or len(collective.arrays) != 1
            or not collective.crossed
            or is_explicit(collective)
            or is_for_update(movement.function, collective)
            or movement.is_sent_back(collective)
            or all(name in movement.arguments.example_axes for name in collective.crossed)
            or is_parameter_or_gradient(movement, collective, collective.arrays[0])
        ):
            continue
        factors = movement.factors_behind(collective)
        activations = [factor for factor in factors if not factor.paths]
        # The matrix has to stay split, or every device would do all of the work.
        if len(factors) != 2 or len(activations) != 1:
            continue
        wire_bytes = activations[0].array.nbytes * (collective.group_size - 1)
        gather = attrs.evolve(collective, kind="all-gather", wire_bytes=wire_bytes)
        gather_seconds = movement.timing.seconds(gather)
        if movement.timing.seconds(collective) >= _MIN_RATIO * gather_seconds:
            yield _Sum(collective, gather_seconds, tuple(path for factor in factors for path in factor.paths))
