"""The order in which compilers run a program if it fits in memory that way.

Compilers run matmuls that are needed only at the end, such as the gradients of weights, as late as possible: they
fill the time while collectives run. The arrays that these matmuls read stay in memory until then.

There are three groups. Last come matmuls whose result no other matmul uses. Just before them come matmuls that only
those use, such as the gradient of an attention's values: XLA for GPUs usually runs it after the gradient of the scores,
so that probabilities, scores and the gradients of both are in memory together. Everything else comes first.

Chains of matmuls that do not need each other, such as the gradients of two towers, have these groups each: one chain
ends with its own gradients of weights before the next begins.
"""

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import final

import attrs

from shardrules.programs.traced.program import TracedProgram


def program_order(program: TracedProgram) -> tuple[int, ...]:
    return tuple(range(len(program.operations)))


def late_order(program: TracedProgram) -> tuple[int, ...]:
    """For each operation its position if matmuls that are needed only at the end run late.

    The whole program is ordered like that, and so is the body of each loop. A loop itself counts as one operation.
    """
    order = _Order(program).of_region(0)
    positions = [0] * len(order)
    for position, op_index in enumerate(order):
        positions[op_index] = position
    return tuple(positions)


def late_matmul_count(program: TracedProgram) -> int:
    """The number of matmuls that are needed only at the end of the program, or of their round of a loop."""
    order = _Order(program)
    count = 0
    for loop in (0, *order.loops):
        items = _Items.of(order, loop)
        last, _ = items.put_off()
        count += program.regions[loop].run_count * sum(item in last for item in items.matmuls)
    return count


def has_many_chains(program: TracedProgram) -> bool:
    """Chains of matmuls, such as the gradients of two towers, end before others begin that do not need them."""
    items = _Items.of(_Order(program), 0)
    _, late = items.put_off()
    return bool(items.breaks([item for item in items.matmuls if item not in late]))


@final
class _Order:
    def __init__(self, program: TracedProgram) -> None:
        self.program = program
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

    def of_region(self, loop: int) -> list[int]:
        items = _Items.of(self, loop)
        last, late = items.put_off()
        chains = items.chains([item for item in items.matmuls if item not in late])
        ordered = sorted(items.heads, key=lambda item: (chains[item], (item in late) + (item in last)))
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

    def put_off(self) -> tuple[dict[int, None], dict[int, None]]:
        """The items that come last, and all that come late, these among them."""
        last = self.late(self.waiting(self.matmuls))
        return last, self.late(self.waiting([item for item in self.matmuls if item not in last]))

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

    def breaks(self, matmuls: Sequence[int]) -> list[tuple[int, int]]:
        """The ends of chains, which none of these matmuls needs, each with the first matmul of the next chain."""
        needed = self.waiting(matmuls)
        return [(end, start) for end, start in itertools.pairwise(matmuls) if end not in needed]

    def chains(self, matmuls: Sequence[int]) -> dict[int, int]:
        """For each item the index of the chain that it belongs to."""
        breaks, needs = self.breaks(matmuls), self.needs(matmuls)
        starts = [start for _, start in breaks]
        multiplying = frozenset(matmuls)
        # For each item the last of these matmuls that it is computed from.
        sources: dict[int, int] = {}
        for op_index in sorted(self.item_of):
            item = self.item_of[op_index]
            source = item if item in multiplying else sources.get(item, -1)
            for user in self.users(op_index):
                sources[user] = max(sources.get(user, -1), source)
        chains: dict[int, int] = {}
        for op_index in sorted(self.item_of, reverse=True):
            item = self.item_of[op_index]
            index = bisect.bisect_right(starts, item)
            # Between the end of a chain and the first matmul of the next may be gradients of weights of both.
            end, start = breaks[index] if index < len(breaks) else (item, item)
            is_next = end < item < start and sources.get(item, -1) <= sources.get(start, -1)
            if item < end and item not in needs:
                # Beside matmuls that a later chain needs, gradients of weights are put off to the end of that.
                index = bisect.bisect_right(starts, needs.get(matmuls[bisect.bisect_right(matmuls, item)], item))
            # What this chain needs, too, such as a mask for both, cannot wait for the next.
            users = (chains[user] for user in self.users(op_index))
            chains[item] = min(index + is_next, chains.get(item, index + 1), *users)
        return chains

    def needs(self, matmuls: Sequence[int]) -> dict[int, int]:
        """For each item that any of these matmuls needs, the last that does."""
        multiplying = frozenset(matmuls)
        needs: dict[int, int] = {}
        for op_index in sorted(self.item_of, reverse=True):
            item = self.item_of[op_index]
            for user in self.users(op_index):
                last = max(needs.get(user, -1), user if user in multiplying else -1)
                if last >= 0:
                    needs[item] = max(needs.get(item, -1), last)
        return needs

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

    def late(self, waiting: dict[int, None]) -> dict[int, None]:
        """The matmuls that are not in `waiting`, and what is computed from them."""
        program = self.order.program
        late: dict[int, None] = {}
        for op_index in sorted(self.item_of):
            item = self.item_of[op_index]
            if item not in waiting and program.operations[op_index].flops and item not in self.inner_loops:
                late[item] = None
            if item in late:
                late.update(dict.fromkeys(self.users(op_index)))
        return late
