"""Which operations of a program are equal, such as those of layers that are repeated in the code.

This is a Weisfeiler-Lehman refinement. Each operation starts with a color, here called its class: the code line, the
primitive and the shapes. Each round then gives it a new class, from its own and those of the operations around it.
After a few rounds two operations are in one class where the program looks the same that far around them: so the layers
in the middle of a model are equal, and the first and the last few are not.
"""

import re
from collections.abc import Sequence
from typing import Any, final

import attrs

from shardrules.analysis.compiling.source import equation_line
from shardrules.planning.traced.program import TracedProgram

_ROUNDS = 3
"""How far around an operation the program has to look the same, in operations.

With more rounds more layers at both ends of a model are planned by themselves, which makes problems larger. With fewer,
operations in the middle are tied to operations at the ends, where another layout may be better.
"""

_INDEX = re.compile(r"(?<![^/.\[\]])[0-9]+(?![^/.\[\]])")
"""A whole part of a path that is a number: equal arguments differ only in these."""


@final
@attrs.frozen
class OpClasses:
    """For each operation and each argument the number of its class."""

    operations: tuple[int, ...]
    arguments: tuple[int, ...]


def op_classes(program: TracedProgram, paths: Sequence[str], tie: bool = True) -> OpClasses:
    """Finds the classes of operations and of arguments, which have `paths`; without `tie` each is its own class."""
    if not tie:
        return OpClasses(tuple(range(len(program.operations))), tuple(range(len(program.arguments))))
    numbers: dict[Any, int] = {}

    def number(key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    arrays = program.arrays
    argument_classes = {
        array: number(("argument", _INDEX.sub("*", path), arrays[array].shape, str(arrays[array].dtype)))
        for array, path in zip(program.arguments, paths, strict=True)
    }
    classes = [
        number(
            (
                operation.role,
                operation.name,
                operation.factors.operands,
                operation.factors.results,
                tuple(() if operand is None else arrays[operand].shape for operand in operation.operands),
                tuple((arrays[result].shape, str(arrays[result].dtype)) for result in operation.results),
                operation.run_count,
                str(operation.spec),
                None if operation.equation is None else equation_line(operation.equation),
            )
        )
        for operation in program.operations
    ]
    refined_arguments = dict(argument_classes)
    for _ in range(_ROUNDS):
        # What an array is: an argument, or which result of which class. -1 stands for what goes round a loop and is
        # produced later, and for constants.
        array_classes = dict(refined_arguments)
        for op_class, operation in zip(classes, program.operations, strict=True):
            for result_index, result in enumerate(operation.results):
                array_classes[result] = number(("array", op_class, result_index))
        user_classes = {
            array: tuple(sorted({(classes[op_index], operand_index) for op_index, operand_index in users}))
            for array, users in program.users.items()
        }
        classes = [
            number(
                (
                    "round",
                    op_class,
                    tuple(
                        None if operand is None else array_classes.get(operand, -1) for operand in operation.operands
                    ),
                    tuple(user_classes.get(result, ()) for result in operation.results),
                )
            )
            for op_class, operation in zip(classes, program.operations, strict=True)
        ]
        refined_arguments = {
            array: number(("used", argument_classes[array], user_classes.get(array, ()))) for array in program.arguments
        }
    return OpClasses(tuple(classes), tuple(refined_arguments[array] for array in program.arguments))
