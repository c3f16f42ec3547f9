"""The rows that each pass of a schedule reads and writes: slots of messages between stages, and of kept arrays.

A message has a slot from the tick in which it arrives to the tick that uses it, and an array that a forward pass keeps
has one until the backward pass. Slots are used again, so that buffers are as long as the schedule needs them and no
longer.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import final

import attrs
import numpy as np

from shardrules.programs.pipelines.simulate import Phase, StagePass

IDLE, FORWARD, BACKWARD = 0, 1, 2

_Span = tuple[int, int, int]
"""Stage, first and last tick."""


@final
@attrs.frozen(eq=False)
class Tables:
    """The work of each stage in each tick: its kind, microbatch and chunk, and slots."""

    kind: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    source: np.ndarray
    """The slot of the message that a pass reads."""
    arrival: np.ndarray
    """The slot of the message that arrives after the tick."""
    turning: np.ndarray
    """The slot of what the last stage keeps for the loss."""
    kept: np.ndarray
    """The slot of what the backward pass needs."""
    message_slots: int
    kept_slots: int

    def columns(self, first: int, last: int) -> dict[str, np.ndarray]:
        """The tables of some ticks, [ticks, stages]."""
        arrays = attrs.asdict(self, filter=lambda field, _: not field.name.endswith("_slots"))
        return {name: array[first:last] for name, array in arrays.items()}


def tables(phases: Sequence[Phase], stages: int, chunks: int) -> Tables:
    """Allocates the slots of a schedule. Behind the slots of each kind there is one that nobody reads."""
    rows = [row for phase in phases for row in phase.ticks]
    when = {(stage, work): tick for tick, row in enumerate(rows) for stage, work in enumerate(row) if work is not None}
    messages: dict[_Span, tuple[tuple[int, int], tuple[int, int], bool]] = {}
    kept: dict[_Span, tuple[tuple[int, int], tuple[int, int]]] = {}
    for (stage, work), tick in when.items():
        target, following = _following(stage, work, stages, chunks)
        use = None if following is None else when.get((target, following))
        # A result that no pass uses keeps the slot that nobody reads.
        if use is not None:
            messages[target, tick, use] = (tick, target), (use, target), target == stage
        back = when.get((stage, attrs.evolve(work, is_backward=True)))
        if not work.is_backward and back is not None:
            kept[stage, tick, back] = (tick, stage), (back, stage)
    message_slots, message_count = _allocate(messages, at_once=True)  # what arrives is written at the end of a tick
    kept_slots, kept_count = _allocate(kept, at_once=False)
    shape = len(rows), stages
    source, arrival, turning = (np.full(shape, message_count, np.int32) for _ in range(3))
    for span, (writer, reader, is_turn) in messages.items():
        (turning if is_turn else arrival)[writer] = source[reader] = message_slots[span]
    kept_table = np.full(shape, kept_count, np.int32)
    for span, ends in kept.items():
        for end in ends:
            kept_table[end] = kept_slots[span]
    kind, microbatch, chunk = (np.zeros(shape, np.int32) for _ in range(3))
    for (stage, work), tick in when.items():
        kind[tick, stage] = BACKWARD if work.is_backward else FORWARD
        microbatch[tick, stage], chunk[tick, stage] = work.microbatch, work.chunk
    return Tables(kind, microbatch, chunk, source, arrival, turning, kept_table, message_count, kept_count)


def _following(stage: int, work: StagePass, stages: int, chunks: int) -> tuple[int, StagePass | None]:
    """The stage and the pass that use what a pass computes; the loss turns the last one forward back."""
    step = -1 if work.is_backward else 1
    target = (stage + step) % stages
    chunk = work.chunk + step * (target != stage + step)
    if chunk in range(chunks):
        return target, attrs.evolve(work, chunk=chunk)
    return stage, None if work.is_backward else attrs.evolve(work, is_backward=True)


def _allocate(spans: Iterable[_Span], *, at_once: bool) -> tuple[dict[_Span, int], int]:
    """Slots for spans of ticks of stages, and how many a stage needs at most; `at_once` used again in its last tick."""
    slots, count = {}, 0
    busy: dict[int, list[tuple[int, int]]] = {}
    free: dict[int, list[int]] = {}
    for span in sorted(spans):
        stage, first, last = span
        ends, unused = busy.setdefault(stage, []), free.setdefault(stage, [])
        while ends and ends[0][0] < first + at_once:
            heapq.heappush(unused, heapq.heappop(ends)[1])
        # Without a free slot all so far are taken, and their count is the next.
        slots[span] = heapq.heappop(unused) if unused else len(ends)
        heapq.heappush(ends, (last, slots[span]))
        count = max(count, len(ends))
    return slots, count
