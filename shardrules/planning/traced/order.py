"""The order in which compilers run a program where they have the memory for it.

A scheduler that hides collectives keeps work at hand to hide them behind: matmuls that no other matmul waits for, as
those of the gradients of weights, run after everything that does wait. What they read has to be kept until then.
"""

from typing import final

import attrs

from shardrules.planning.traced.program import TracedProgram


def program_order(program: TracedProgram) -> tuple[int, ...]:
    """For each operation its position in the order in which the program is written."""
    return tuple(range(len(program.operations)))


def late_order(program: TracedProgram) -> tuple[int, ...]:
    """For each operation its position where matmuls that no other matmul waits for run last.

    That is within the whole program, and within the body of each loop: a loop is one operation of what is around it.
    """
    order = _Order(program).of_region(0)
    positions = [0] * len(order)
    for position, op_index in enumerate(order):
        positions[op_index] = position
    return tuple(positions)


@final
class _Order:
    def __init__(self, program: TracedProgram) -> None:
        self.program = program
        loops = dict.fromkeys(
            operation.region for operation in program.operations if operation.role in ("enter", "join", "leave")
        )
        # A branch or a loop stays together; what is only computed again is a part of what is around it.
        self.loops = {region: None for region in loops if region > 0}
        self.bodies: dict[int, list[int]] = {region: [] for region in (0, *self.loops)}
        for op_index, operation in enumerate(program.operations):
            self.bodies[self.loop_around(operation.region)].append(op_index)

    def loop_around(self, region: int) -> int:
        """The innermost loop that a region is in; 0 if there is none."""
        while region > 0 and region not in self.loops:
            region = self.program.regions[region].parent
        return region

    def of_region(self, loop: int) -> list[int]:
        """The operations of a loop, with those of the loops inside of it, in order."""
        items = _Items.of(self, loop)
        waiting = items.waiting()
        late = items.late(waiting)
        order: list[int] = []
        for is_late in (False, True):
            for item in items.heads:
                if (item in late) is is_late:
                    order += items.inner(item)
        return order


@final
@attrs.frozen(eq=False)
class _Items:
    """What is ordered in one loop: operations, and whole loops inside of it, by their first operation."""

    order: _Order
    loop: int
    heads: tuple[int, ...]
    item_of: dict[int, int]
    """For each operation in the loop, however deep, the item that it is a part of."""
    inner_loops: dict[int, int]
    """For each item that is a loop, that loop."""

    @classmethod
    def of(cls, order: _Order, loop: int) -> "_Items":
        item_of: dict[int, int] = {}
        inner_loops: dict[int, int] = {}
        firsts: dict[int, int] = {}
        for op_index, operation in enumerate(order.program.operations):
            around, inner = order.loop_around(operation.region), -1
            while around != loop and around > 0:
                inner, around = around, order.loop_around(order.program.regions[around].parent)
            if around != loop:
                continue
            item_of[op_index] = op_index if inner < 0 else firsts.setdefault(inner, op_index)
            if inner >= 0:
                inner_loops[item_of[op_index]] = inner
        return cls(order, loop, tuple(dict.fromkeys(item_of.values())), item_of, inner_loops)

    def inner(self, item: int) -> list[int]:
        """The operations of an item, in order."""
        return self.order.of_region(self.inner_loops[item]) if item in self.inner_loops else [item]

    def users(self, op_index: int) -> list[int]:
        """The items that take a result of an operation, but for the next round of the loop."""
        program, item = self.order.program, self.item_of[op_index]
        items = []
        for result in program.operations[op_index].results:
            for user, _ in program.users.get(result, ()):
                other = self.item_of.get(user, item)
                if other > item:  # only what goes round comes back to the front
                    items.append(other)
        return items

    def waiting(self) -> dict[int, None]:
        """The items that a matmul waits for."""
        program = self.order.program
        multiplying = {self.item_of[op_index]: None for op_index in self.item_of if program.operations[op_index].flops}
        waiting: dict[int, None] = {}
        # What goes round is known to be waited for once the walk has come to the front: twice finds what it comes from.
        for _ in range(2):
            carried = [
                program.operations[op_index].operands[1]
                for op_index in self.item_of
                if program.operations[op_index].name == "join" and self.item_of[op_index] in waiting
            ]
            for op_index in sorted(self.item_of, reverse=True):
                is_carried = any(result in carried for result in program.operations[op_index].results)
                if is_carried or any(user in multiplying or user in waiting for user in self.users(op_index)):
                    waiting[self.item_of[op_index]] = None
        return waiting

    def late(self, waiting: dict[int, None]) -> dict[int, None]:
        """The matmuls that no other waits for, and what is computed from them."""
        program = self.order.program
        late: dict[int, None] = {}
        for op_index in sorted(self.item_of):
            item = self.item_of[op_index]
            if item not in waiting and program.operations[op_index].flops and item not in self.inner_loops:
                late[item] = None
            if item in late:
                late.update(dict.fromkeys(self.users(op_index)))
        return late
