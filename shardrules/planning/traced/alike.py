"""Which operations of a program do the same to the same: those of layers that are repeated in the code."""

import re
from collections.abc import Sequence
from typing import Any, final

import attrs

from shardrules.analysis.compiling.source import equation_line
from shardrules.planning.traced.program import TracedProgram

_ROUNDS = 3
_NUMBER = re.compile(r"(?<![^/.\[\]])[0-9]+(?![^/.\[\]])")


@final
@attrs.frozen
class Classes:
    """Numbers that are the same for what is alike.

    **Arguments:**

    - `operations`: for each operation.
    - `arguments`: for each argument.
    """

    operations: tuple[int, ...]
    arguments: tuple[int, ...]


def classes(program: TracedProgram, paths: Sequence[str], tie: bool = True) -> Classes:
    """Finds out what is alike: the same code on the same shapes, in the same surroundings.

    **Arguments:**

    - `program`: the program.
    - `paths`: the names of its arguments. Numbers in them may differ.
    - `tie`: whether to; otherwise nothing is alike.

    **Returns:**

    The `Classes`.
    """
    if not tie:
        return Classes(tuple(range(len(program.operations))), tuple(range(len(program.arguments))))
    arrays: dict[int, int] = {}
    numbers: dict[Any, int] = {}

    def number(key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    for array, path in zip(program.arguments, paths, strict=True):
        one = program.arrays[array]
        arrays[array] = number(("argument", _NUMBER.sub("*", path), one.shape, str(one.dtype)))
    own = [
        number(
            (
                operation.role,
                operation.name,
                operation.factors.operands,
                operation.factors.results,
                tuple(() if one is None else program.arrays[one].shape for one in operation.operands),
                tuple((program.arrays[one].shape, str(program.arrays[one].dtype)) for one in operation.results),
                operation.run_count,
                str(operation.spec),
                None if operation.equation is None else equation_line(operation.equation),
            )
        )
        for operation in program.operations
    ]
    start = dict(arrays)
    colours = own
    for _ in range(_ROUNDS):
        known = dict(start)
        for at, operation in enumerate(program.operations):
            for place, result in enumerate(operation.results):
                known[result] = number(("array", colours[at], place))
        used = {
            array: tuple(sorted({(colours[at], place) for at, place in places}))
            for array, places in program.users.items()
        }
        colours = [
            number(
                (
                    "round",
                    colours[at],
                    tuple(None if one is None else known.get(one, -1) for one in operation.operands),
                    tuple(used.get(one, ()) for one in operation.results),
                )
            )
            for at, operation in enumerate(program.operations)
        ]
        start = {array: number(("used", arrays[array], used.get(array, ()))) for array in program.arguments}
    return Classes(tuple(colours), tuple(start[array] for array in program.arguments))
