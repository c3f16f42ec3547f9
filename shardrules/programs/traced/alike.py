"""The equal operations of a program, as in layers that are repeated in the code.

This is a Weisfeiler-Lehman refinement. Each operation starts with a color, here called its class: the code line, the
primitive and the shapes. Each round then gives it a new class, from its own and its neighbours' classes.
After a few rounds two operations are in one class where the program looks the same that far around them: so the layers
in the middle of a model are equal, and the first and the last few are not.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs

from shardrules.core.source import equation_line
from shardrules.programs.traced.program import Operation, TracedProgram

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
    refinement = _Refinement(program)
    first_arguments = refinement.argument_classes(paths)
    operations, arguments = refinement.operation_classes(), first_arguments
    # The program has to look the same three operations around: with more rounds more layers at both ends of a model are
    # planned by themselves, with fewer, operations in the middle are tied to the ends.
    for _ in range(3):
        users = {
            array: tuple(sorted({(operations[op_index], operand_index) for op_index, operand_index in array_users}))
            for array, array_users in program.users.items()
        }
        operations = refinement.refine(operations, arguments, users)
        # Arguments start again in each round: how they are used says all that the rounds before it have found.
        arguments = {
            array: refinement.number(("used", op_class, users.get(array, ())))
            for array, op_class in first_arguments.items()
        }
    return OpClasses(tuple(operations), tuple(arguments[array] for array in program.arguments))


def _rule(operation: Operation) -> str | None:
    return operation.equation.params["rule"] if operation.name == "region" and operation.equation is not None else None


@final
@attrs.define(eq=False)
class _Refinement:
    """Numbers classes by what defines them, in the order in which they are first met: the same on every host."""

    program: TracedProgram
    numbers: dict[Any, int] = attrs.field(factory=dict)

    def number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def argument_classes(self, paths: Sequence[str]) -> dict[int, int]:
        arrays = self.program.arrays
        return {
            array: self.number(("argument", _INDEX.sub("*", path), arrays[array].shape, str(arrays[array].dtype)))
            for array, path in zip(self.program.arguments, paths, strict=True)
        }

    def operation_classes(self) -> list[int]:
        """The classes of operations by themselves. Their lines of code tell apart operations that only happen to have
        equal shapes."""
        arrays = self.program.arrays
        return [
            self.number(
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
                    _rule(operation),
                )
            )
            for operation in self.program.operations
        ]

    def refine(
        self, classes: Sequence[int], arguments: Mapping[int, int], users: Mapping[int, tuple[tuple[int, int], ...]]
    ) -> list[int]:
        """One round: the class of an operation, of what it reads, and of what uses its results."""
        arrays = dict(arguments)
        for op_class, operation in zip(classes, self.program.operations, strict=True):
            for result_index, result in enumerate(operation.results):
                arrays[result] = self.number(("array", op_class, result_index))
        # Constants of the closure are not in `arrays`: all of them are -1.
        return [
            self.number(
                (
                    "round",
                    op_class,
                    tuple(None if operand is None else arrays.get(operand, -1) for operand in operation.operands),
                    tuple(users.get(result, ()) for result in operation.results),
                )
            )
            for op_class, operation in zip(classes, self.program.operations, strict=True)
        ]
