"""Plays the steps of a program against a clock: what runs when, and what waits for what.

The device takes its steps in the order of the program. A kernel moves the clock. A task that begins takes its resources
as soon as they are free, and the clock goes on; where it is waited for, the clock moves to its end. Rounds of a loop
are played until a round ends as it began, with the same tasks under way: all rounds after it take as long.

What is assumed: kernels beside a collective are slower by what the sheet of the hardware says, and nothing else slows
anything down; tasks on one resource run in the order in which they begin; a conditional takes its longest branch; and
the device never waits for its host to launch a kernel.
"""

import bisect
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias, final

import attrs

from shardrules.programs.costs.path import PathPart, extended, extended_by, repeated
from shardrules.programs.costs.steps import (
    BranchStep,
    CallStep,
    ComputeStep,
    ConveyStep,
    LoopStep,
    ReceiveStep,
    StartStep,
    Step,
    StepReader,
    WaitStep,
)
from shardrules.programs.costs.tally import Purpose, Tally
from shardrules.programs.costs.tasks import COMPUTE, OTHER_STREAM, BackgroundTask, TaskKind
from shardrules.programs.costs.timeline import PROGRAM, Event, EventKind

_MAX_ROUNDS = 16
"""The rounds of a loop that are played in search of one that is like the next. All loops of six programs for TPUs and
GPUs are steady after two."""

_PURPOSES: Mapping[TaskKind, Purpose] = MappingProxyType(
    {"communication": "exposed", "copy": "copy", "compute": "compute"}
)
"""The use of the time in which the device waits for a task. Waiting for kernels of another stream counts as computing.
"""

_SAME = 1e-9
"""Rounds are the same if nothing differs by more than this part of their length: rounding errors are far smaller."""


@final
@attrs.define(eq=False)
class Handle:
    """A task that has begun."""

    task: BackgroundTask
    end: float
    path: PathPart | None
    """The path to its end."""


@final
@attrs.frozen(eq=False)
class Older:
    """Tasks under way before a loop began. They end at times of their own, after any number of rounds."""

    handles: tuple[Handle, ...]
    sending: tuple[tuple[float, float, str], ...]

    @property
    def changes(self) -> list[float]:
        """The times at which any of it begins or ends."""
        return [*(handle.end for handle in self.handles), *(time for each in self.sending for time in each[:2])]

    def has_change(self, start: float, now: float) -> bool:
        """Any of it begins or ends in a round, which is like no other round then."""
        return any(start < time <= now for time in self.changes)

    def rounds(self, count: int, start: float, now: float) -> int:
        """The number of the next rounds, each as long as from `start` to `now`, that are over before it changes."""
        left = [time - now for time in self.changes if time > now]
        return min([count, *(int(seconds / (now - start)) for seconds in left if now > start)])


Carried: TypeAlias = "Handle | dict[int, Carried] | None"
"""The tasks behind a value: of a tuple by index."""


@final
@attrs.define
class Player:
    """A clock, what each resource does, and the sums of what was played so far."""

    reader: StepReader
    records: bool = True
    """Events are kept for a timeline."""

    now: float = 0.0
    free: dict[str, float] = attrs.Factory(dict)
    """The time at which each resource will be free."""

    under_way: list[Handle] = attrs.Factory(list)
    """The tasks that may not have ended yet, by when they began."""

    sending: list[tuple[float, float, str]] = attrs.Factory(list)
    """Begin, end and line of the collectives that have not ended yet, sorted."""

    meetings: dict[str, Handle] = attrs.Factory(dict)
    longest: dict[str, int] = attrs.Factory(dict)
    """The branch that each conditional takes, by index."""

    path: PathPart | None = None
    """The path to this moment."""

    paths: dict[str, PathPart | None] = attrs.Factory(dict)
    """The path to the moment at which each resource will be free."""

    tally: Tally = attrs.Factory(Tally)
    events: list[Event] = attrs.Factory(list)

    def play(self, computation: str) -> None:
        """Plays a computation, and waits for all that it began."""
        self._play(computation, {})
        for handle in sorted(self.under_way, key=lambda handle: handle.end):
            self._wait(handle)

    def _play(self, computation: str, carried: dict[str, Carried]) -> Carried:
        """Plays a computation; returns the tasks behind its result."""
        for step in self.reader.read(computation):
            if isinstance(step, ComputeStep):
                self._compute(step)
            elif isinstance(step, ConveyStep):
                _convey(step, carried)
            else:
                carried[step.name] = self._take(step, carried)
        return carried.get(self.reader.program.find(computation).root)

    def _take(self, step: Step, carried: dict[str, Carried]) -> Carried:
        """Takes a step that is not a kernel; returns the tasks behind its result."""
        if isinstance(step, StartStep):
            return self._start(step)
        if isinstance(step, WaitStep):
            for handle in [self.meetings.pop(step.meeting, None), *map(carried.get, step.operands)]:
                if isinstance(handle, Handle):
                    self._wait(handle)
        elif isinstance(step, ReceiveStep):
            # What arrives is sent at the same time by another device, which runs the same program.
            return self.meetings.setdefault(
                step.meeting, Handle(BackgroundTask(step.name, "", "communication", (), 0.0), self.now, self.path)
            )
        elif isinstance(step, LoopStep):
            return self._loop(step, carried.get(step.operand))
        elif isinstance(step, BranchStep):
            return self._branch(step, carried)
        elif isinstance(step, CallStep):
            return self._call(step, carried)
        return None

    def _compute(self, kernel: ComputeStep) -> None:
        if not kernel.seconds:
            return
        end = self._end_of(kernel.seconds)
        self.tally.add("compute", end - self.now, kernel.line)
        if kernel.is_memory_bound:
            self.tally.add("memory", end - self.now)
        for begin, until, line in self.sending:
            if (both := min(until, end) - max(begin, self.now)) > 0:
                self.tally.add("hidden", both, line, kernel.line)
        self._record(kernel.name, kernel.line, COMPUTE, self.now, end, "compute")
        self.path = extended(self.path, self.now, end, kernel.line)
        self._advance(end)

    def _end_of(self, seconds: float) -> float:
        """The end of a kernel that would take so many seconds without collectives beside it."""
        now, fraction = self.now, self.reader.hardware.overlap_fraction
        for begin, end, _ in self.sending if fraction < 1 else ():  # a later one begins later than all of these
            alone = max(0.0, min(seconds, begin - now))
            now, seconds = now + alone, seconds - alone
            beside = min(seconds / fraction, max(0.0, end - now))
            now, seconds = now + beside, max(0.0, seconds - beside * fraction)
        return now + seconds

    def _start(self, start: StartStep) -> Handle:
        task = start.task
        begin, path = self.now, self.path
        for resource in task.resources:
            if self.free.get(resource, 0.0) > begin:  # what took the resource before leads to the begin of this
                begin, path = self.free[resource], self.paths[resource]
        end = begin + task.seconds
        path = extended(path, begin, end, task.line)
        for resource in task.resources:
            self.free[resource], self.paths[resource] = end, path
            self.tally.add("resource", task.seconds, resource)
            self._record(task.name, task.line, resource, begin, end, task.kind)
        if task.kind == "communication" and task.seconds:
            self.tally.add("sent", task.seconds, task.line)
            bisect.insort(self.sending, (begin, end, task.line))
        # A receive that this task meets ends with it.
        handle = self.meetings.get(start.meeting, Handle(task, end, path))
        handle.task, handle.end, handle.path = task, end, path
        if start.meeting:
            self.meetings[start.meeting] = handle
        if start.blocks:
            self._wait(handle)
        else:
            self.under_way = [*(each for each in self.under_way if each.end > self.now), handle]
        return handle

    def _wait(self, handle: Handle) -> None:
        task, seconds = handle.task, handle.end - self.now
        if seconds > 0:
            self.tally.add(_PURPOSES[task.kind], seconds, task.line)
            self._record(f"wait for {task.name}", task.line, COMPUTE, self.now, handle.end, "wait")
            self.path = handle.path
            self._advance(handle.end)

    def _advance(self, to: float) -> None:
        """Moves the clock, and adds up for how long anything is sent meanwhile."""
        covered = self.now
        for begin, end, _ in self.sending:
            low, high = max(begin, covered), min(end, to)
            if high > low:
                self.tally.add("busy", high - low)
                covered = high
        self.sending = [each for each in self.sending if each[1] > to]
        self.now = to

    def _loop(self, loop: LoopStep, carried: Carried) -> Carried:
        outer, begin = self.tally, self.now
        older = Older(tuple(self.under_way), tuple(self.sending))
        ends, tallies, index = self._ends(carried), list[Tally](), 0
        while index < loop.rounds:
            self.tally, start, free = Tally(), self.now, dict(self.free)
            self._play_with(loop.condition, [carried])
            carried = self._play_with(loop.body, [carried])
            index += 1
            self._record(f"round {index}", "", PROGRAM, start, self.now, "loop")
            outer.merge(self.tally)
            tallies = [] if older.has_change(start, self.now) else [*tallies, self.tally]
            old_ends, ends = ends, self._ends(carried)
            is_steady = _is_steady(old_ends, start, ends, self.now)
            rest = older.rounds(loop.rounds - index, start, self.now)
            # A timeline shows at least two rounds of a loop.
            if rest and tallies and ((is_steady and index >= 2) or len(tallies) >= _MAX_ROUNDS):
                # Where rounds alternate between two lengths, the rest takes the mean of them.
                shares = [(self.tally, 1.0)] if is_steady else [(tally, 0.5) for tally in tallies[-2:]]
                self._repeat(shares, rest, start, free, older)
                for tally, share in shares:
                    outer.merge(tally, share * rest)
                index += rest
                ends, tallies = self._ends(carried), []
        self.tally = outer
        self._play_with(loop.condition, [carried])
        self._record(loop.name, loop.line, PROGRAM, begin, self.now, "loop")
        return carried

    def _repeat(
        self, shares: list[tuple[Tally, float]], count: int, since: float, free: dict[str, float], older: "Older"
    ) -> None:
        """Adds rounds that are like those that were played: a share of each, and `count` in all.

        The last of them began at `since`, and `free` is when each resource was free then.
        """
        lengths = [share * sum(map(tally.total, ("compute", "exposed", "copy"))) for tally, share in shares]
        shift = count * sum(lengths)
        title, last = f"{count:,} more round{'s' * (count > 1)}", shares[-1][0]
        for row in (PROGRAM, COMPUTE):
            self._record(title, "", row, self.now, self.now + shift, "rest")
        # A task older than the loop ends when it would have; those of the last round are repeated with it.
        for handle in self.under_way:
            if handle.end > self.now and handle not in older.handles:
                handle.end, handle.path = handle.end + shift, repeated(handle.path, since, self.now, shift)
        self.sending = sorted(
            each if each in older.sending else (each[0] + shift, each[1] + shift, each[2]) for each in self.sending
        )
        for resource in last.of("resource"):
            end = max(self.now, self.free[resource])
            growth = max(shift, count * (end - max(self.now - shift / count, free.get(resource, 0.0))))
            self._record(title, "", resource, end, end + growth, "rest")
            if growth > shift * (1 + _SAME):
                # Nothing waits for what this resource does, and it piles up.
                sent = last.of("sent") or {"": 1.0}
                path = extended_by(self.paths[resource], end, end + growth, sent)
                line = max(sent, key=lambda line: sent[line])
                task = BackgroundTask(title, line, "communication", (resource,), 0.0)
                self.under_way.append(Handle(task, end + growth, path))
                bisect.insort(self.sending, (self.now + shift, end + growth, line))
            elif end > self.now:
                path = repeated(self.paths[resource], since, self.now, shift)
            else:
                continue
            self.free[resource], self.paths[resource] = end + growth, path
        self.path = repeated(self.path, since, self.now, shift)
        self.now += shift

    def _ends(self, carried: Carried) -> dict[str, float]:
        """The times at which each resource will be free, and at which the tasks that the next round may wait for will
        end."""
        return {**self.free, **{f"#{path}": end for path, end in _carried_ends(carried, "")}}

    def _branch(self, branch: BranchStep, carried: dict[str, Carried]) -> Carried:
        if branch.name not in self.longest:
            lengths = [self._trial(computation) for computation, _ in branch.choices]
            self.longest[branch.name] = lengths.index(max(lengths))
        computation, operands = branch.choices[self.longest[branch.name]]
        return self._play_with(computation, [carried.get(operand) for operand in operands])

    def _call(self, call: CallStep, carried: dict[str, Carried]) -> Carried:
        if not call.is_async:
            return self._play_with(call.computation, [carried.get(operand) for operand in call.operands])
        task = BackgroundTask(call.name, call.line, "compute", (OTHER_STREAM,), self._trial(call.computation))
        return self._start(StartStep(call.name, task, blocks=False))

    def _trial(self, computation: str) -> float:
        """The time of a computation by itself."""
        player = Player(self.reader, records=False, longest=self.longest)
        player.play(computation)
        return player.now

    def _play_with(self, computation: str, arguments: list[Carried]) -> Carried:
        if not any(arguments):
            return self._play(computation, {})
        parameters = self.reader.program.find(computation).parameters
        return self._play(computation, {each.name: value for each, value in zip(parameters, arguments, strict=False)})

    def _record(self, name: str, line: str, resource: str, start: float, end: float, kind: EventKind) -> None:
        if self.records and end > start:
            self.events.append(Event(name, line, resource, start, end - start, kind))


def _convey(step: ConveyStep, carried: dict[str, Carried]) -> None:
    """Gives a value the tasks behind its operands."""
    if step.is_tuple:
        parts = {index: carried[name] for index, name in enumerate(step.operands) if carried.get(name) is not None}
        value: Carried = parts or None
    else:
        value = carried.get(step.operands[0]) if step.operands else None
        if step.index is not None and isinstance(value, dict):
            value = value.get(step.index)
    if value is not None:
        carried[step.name] = value


def _carried_ends(carried: Carried, path: str) -> Iterator[tuple[str, float]]:
    """Yields the ends of the tasks behind a value."""
    if isinstance(carried, Handle):
        yield path, carried.end
    elif carried is not None:
        for index, value in carried.items():
            yield from _carried_ends(value, f"{path}/{index}")


def _is_steady(old: dict[str, float], start: float, new: dict[str, float], now: float) -> bool:
    """A round from `start` to `now` left everything as it was, seen from the clock, or did not touch it."""

    def is_same(name: str) -> bool:
        before, after = old.get(name, 0.0), new.get(name, 0.0)
        return before == after or abs(max(0.0, before - start) - max(0.0, after - now)) <= _SAME * (now - start)

    return all(map(is_same, dict.fromkeys((*old, *new))))
