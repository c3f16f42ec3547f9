"""Arrays that are gathered because a kernel needs them whole.

XLA splits its own operations. A custom call (a kernel of Pallas, a function of another library by FFI) is a black box:
unless it says how, it cannot be split, and every device gets the whole batch and does all of the work. A call back to
Python (`jax.pure_callback`) is one, too.
"""

from collections.abc import Iterator

from shardrules.core.finding import Finding
from shardrules.core.source import user_line
from shardrules.programs.audits.movement import MovedArrays, Movement
from shardrules.programs.compiled.collectives import Collective
from shardrules.programs.compiled.custom_calls import is_callback
from shardrules.programs.compiled.text import ArrayType, Instruction


def check_kernels(movement: Movement) -> Iterator[Finding]:
    """Activations that are gathered for a kernel which cannot be split."""
    groups: dict[tuple[str, str, str], list[tuple[Collective, ArrayType, Instruction]]] = {}
    for collective in movement.collectives:
        for array, kernel in movement.kernels_behind(collective):
            lines = [user_line(movement.program.stack(kernel)), user_line(collective.stack)]
            # A callback may be another one of the same name.
            line = next(filter(None, reversed(lines) if is_callback(kernel) else lines), "")
            key = (kernel.custom_call_target, collective.axes_text, line)
            groups.setdefault(key, []).append((collective, array, kernel))
    timing = movement.timing
    for (_, axes, line), group in groups.items():
        moved = MovedArrays(movement, [(collective, array) for collective, array, _ in group])
        names, kernel = {kernel.name for _, _, kernel in group}, group[0][2]
        # Every device of a group does the work of all of them.
        size = max(collective.group_size for collective in moved.collectives)
        work = timing.kernel_seconds(each for each in timing.kernels if each.name in names)
        seconds = moved.seconds + work * (size - 1) / size
        yield moved.finding(
            timing.severity(seconds),
            "gathered-for-kernel",
            f"{moved}: {moved.on_wire}, for {_reason(kernel, size)}: {timing.cost_text(seconds)}"
            + f". Arrays: {moved.names}" * bool(moved.names),
            f"Call it inside jax.shard_map over {axes}"
            if is_callback(kernel)
            else f"Call the kernel inside jax.shard_map over {axes}, or tell how to split it "
            "(jax.custom_partitioning with a sharding_rule)",
            line,
        )


def _reason(kernel: Instruction, size: int) -> str:
    """The reason why a kernel needs all of an array. Calls back to Python have a name of their own in each backend."""
    if is_callback(kernel):
        name = kernel.op_name.rpartition("/")[2]
        return f"the Python function of {name!r}, which one of {size} devices calls while the others wait"
    return (
        f"the kernel {kernel.custom_call_target!r}, which cannot be split: every device gets all of it, and repeats "
        f"the work of {size} devices"
    )
