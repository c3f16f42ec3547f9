"""Pictures of schedules: a row for each stage, a box for each pass of a microbatch."""

from shardrules.drawing.picture import Box, Picture, Words, label_width
from shardrules.programs.pipelines.simulate import PipelineTimes, TimedPass

_WIDTHS = 600.0, 1100.0
"""The least and the greatest width of the boxes in pixels."""

_NAMES_WIDTH, _ROW_HEIGHT, _GAP = 60.0, 24.0, 4.0

_COLOURS = (0, 4), (2, 1)
"""Colours by direction and chunk: forward blue, backward green and orange; they alternate with chunks."""


def picture(times: PipelineTimes, label: str) -> Picture:
    """Returns the picture of a schedule that was played."""
    stages = len(times.live)
    shortest = min((timed.end - timed.start for timed in times.passes if timed.end > timed.start), default=1.0)
    # The index of a microbatch fits into 18 pixels.
    width = min(max(_WIDTHS[0], 18.0 * times.seconds / shortest), _WIDTHS[1])
    scale = width / times.seconds if times.seconds else 0.0
    names = [Words(0.0, _top(stage) + _ROW_HEIGHT / 2 + 4, f"stage {stage}") for stage in range(stages)]
    boxes = [_box(timed, scale) for timed in times.passes]
    others = " (every other chunk dark blue and orange)" if any(timed.work.chunk for timed in times.passes) else ""
    foot = Words(_NAMES_WIDTH, _top(stages) + 12, f"forward blue, backward green{others}; {label}")
    whole_width = _NAMES_WIDTH + max(width + 4, label_width(foot.text))
    return Picture(whole_width, _top(stages) + 18, (*names, *boxes, foot), f"Schedule: {label}")


def _top(stage: int) -> float:
    return stage * (_ROW_HEIGHT + _GAP)


def _box(timed: TimedPass, scale: float) -> Box:
    work = timed.work
    direction = "backward" if work.is_backward else "forward"
    title = f"stage {timed.stage}: {direction}, microbatch {work.microbatch}, chunk {work.chunk}"
    start, width = _NAMES_WIDTH + timed.start * scale, (timed.end - timed.start) * scale
    colour = _COLOURS[work.is_backward][work.chunk % 2]
    return Box(start, _top(timed.stage), width, _ROW_HEIGHT, colour, str(work.microbatch), title)


def text(times: PipelineTimes) -> str:
    """Returns a row for each stage, in columns as long as the shortest pass: `F3` is microbatch 3 forward."""
    unit = min((timed.end - timed.start for timed in times.passes if timed.end > timed.start), default=1.0)
    width = 1 + len(str(max(timed.work.microbatch for timed in times.passes)))
    rows = []
    for stage in range(len(times.live)):
        cells = ["." * width] * round(times.seconds / unit)
        for timed in times.passes:
            if timed.stage == stage:
                first, last = round(timed.start / unit), round(timed.end / unit)
                name = f"{'B' if timed.work.is_backward else 'F'}{timed.work.microbatch}"
                # The first column of a pass has its whole text, and the others are left out of the line.
                cells[first:last] = [name.ljust((width + 1) * (last - first) - 1, "-"), *[""] * (last - first - 1)]
        rows.append(f"stage {stage} | {' '.join(cell for cell in cells if cell)}")
    return "\n".join(rows)
