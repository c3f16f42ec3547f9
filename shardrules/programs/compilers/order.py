"""The orders in which a compiler may run a program.

Operations run as they are written, or what frees memory runs as soon as it can: the update of a parameter right after
its gradient. To hide collectives, compilers for GPUs also put off matmuls that no other matmul needs, such as the
gradients of weights, to the end. The arrays that these matmuls read stay in memory until then.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import attrs

from shardrules.programs.traced.program import TracedProgram

Order: TypeAlias = Callable[[TracedProgram], tuple[int, ...]]
"""Returns for each operation its position."""


def program_order(program: TracedProgram) -> tuple[int, ...]:
    """Operations run as they are written."""
    return tuple(range(len(program.operations)))


def early_order(program: TracedProgram) -> tuple[int, ...]:
    """What no matmul needs, such as the update of a parameter, runs as soon as it can."""
    return _Order(program, puts_off=False).positions()


def late_order(program: TracedProgram) -> tuple[int, ...]:
    """Matmuls that no other needs, such as gradients of weights, run last; what none needs, as soon as it can.

    The whole program is ordered like that, and so is the body of each loop. A loop itself counts as one operation.
    """
    return _Order(program, puts_off=True).positions()


def has_many_chains(program: TracedProgram) -> bool:
    """Chains of matmuls, such as the gradients of two towers, end before others begin that do not need them."""
    items = _Items.of(_Order(program, puts_off=True), 0)
    last = items.late()
    matmuls = [item for item in items.matmuls if item not in last]
    needed = items.waiting(matmuls)
    return any(end not in needed for end, _ in itertools.pairwise(matmuls))


@final
class _Order:
    def __init__(self, program: TracedProgram, *, puts_off: bool) -> None:
        self.program, self.puts_off = program, puts_off
        loops = dict.fromkeys(
            operation.region for operation in program.operations if operation.role in ("enter", "join", "leave")
        )
        # The operations of a branch or a loop stay together. A recomputed part (`jax.checkpoint`) is not kept apart:
        # its operations are ordered with those around it.
        self.loops = {region: None for region in loops if region > 0}
        self.bodies: dict[int, list[int]] = {region: [] for region in (0, *self.loops)}
        for op_index, operation in enumerate(program.operations):
            self.bodies[self.loop_around(operation.region)].append(op_index)

    def loop_around(self, region: int) -> int:
        """The innermost loop that a region is in; 0 if there is none."""
        while region > 0 and region not in self.loops:
            region = self.program.regions[region].parent
        return region

    def positions(self) -> tuple[int, ...]:
        order = self.of_region(0)
        positions = [0] * len(order)
        for position, op_index in enumerate(order):
            positions[op_index] = position
        return tuple(positions)

    def of_region(self, loop: int) -> list[int]:
        items = _Items.of(self, loop)
        last = items.late() if self.puts_off else {}
        ordered = sorted(items.heads, key=last.__contains__)
        return [op_index for item in items.soon(ordered) for op_index in items.inner(item)]


@final
@attrs.frozen(eq=False)
class _Items:
    """The items to be ordered in one loop. An item is an operation, or a whole inner loop; its index is its first
    operation's."""

    order: _Order
    loop: int
    heads: tuple[int, ...]
    item_of: dict[int, int]
    """For each operation in the loop, at any depth, the item that it belongs to."""
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
        return self.order.of_region(self.inner_loops[item]) if item in self.inner_loops else [item]

    def users(self, op_index: int) -> list[int]:
        program, item = self.order.program, self.item_of[op_index]
        items = []
        for result in program.operations[op_index].results:
            for user, _ in program.users.get(result, ()):
                other = self.item_of.get(user, item)
                if other > item:  # an earlier item uses it in the next round
                    items.append(other)
        return items

    @functools.cached_property
    def matmuls(self) -> list[int]:
        operations = self.order.program.operations
        return list(dict.fromkeys(item for op_index, item in self.item_of.items() if operations[op_index].flops))

    def waiting(self, matmuls: Sequence[int]) -> dict[int, None]:
        """The items that any of these matmuls needs, directly or through other items."""
        program, multiplying = self.order.program, frozenset(matmuls)
        waiting: dict[int, None] = {}
        # The walk goes backwards. Only at the start of the loop does it see which values of the last round are needed,
        # so a second walk marks what those are computed from.
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

    def soon(self, ordered: Sequence[int]) -> list[int]:
        """Moves what no matmul needs, such as the update of a parameter, to right after what it is computed from."""
        needed = self.waiting(self.matmuls)
        moved = [item for item in ordered if item not in needed and self.is_movable(item)]
        producers = {item: self.producers(item) for item in moved}
        # What is computed from arguments alone, such as the rate of learning, can run as soon as something takes it.
        free: dict[int, None] = {}
        for item in sorted(moved):
            if all(producer in free for producer in producers[item]):
                free[item] = None
        missing = {item: sum(producer not in free for producer in producers[item]) for item in moved}
        users: dict[int, list[int]] = {}
        for item in sorted(moved, reverse=True):
            for producer in producers[item]:
                users.setdefault(producer, []).append(item)
        placed: dict[int, None] = {}
        for first in ordered:
            ready = [first] if missing.get(first, 0) == 0 else []
            while ready:
                item = ready[-1]
                before = [producer for producer in producers.get(item, ()) if producer not in placed]
                if before:
                    ready += before
                    continue
                ready.pop()
                if item in placed:
                    continue
                placed[item] = None
                for user in users.get(item, ()) if item not in free else ():
                    missing[user] -= 1
                    if missing[user] == 0:
                        ready.append(user)
        return list(placed)

    def is_movable(self, item: int) -> bool:
        """An item is an operation that computes or returns, and not a matmul."""
        operation = self.order.program.operations[item]
        return item not in self.inner_loops and operation.role in ("compute", "fixed", "return") and not operation.flops

    def producers(self, item: int) -> list[int]:
        """The items that compute what an operation takes in the same round of the loop."""
        program = self.order.program
        operations = (
            program.producers.get(operand) for operand in program.operations[item].operands if operand is not None
        )
        return list(dict.fromkeys(self.item_of[producer] for producer in operations if producer in self.item_of))

    def late(self) -> dict[int, None]:
        """The matmuls that no other needs, and what is computed from them."""
        program, waiting = self.order.program, self.waiting(self.matmuls)
        late: dict[int, None] = {}
        for op_index in sorted(self.item_of):
            item = self.item_of[op_index]
            if item not in waiting and program.operations[op_index].flops and item not in self.inner_loops:
                late[item] = None
            if item in late:
                late.update(dict.fromkeys(self.users(op_index)))
        return late
