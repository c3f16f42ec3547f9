"""The patch of a plan, as a diff of the user's files."""

import difflib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import attrs

from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.core.finding import Finding, listing
from shardrules.core.spec import spec_repr
from shardrules.programs.compiling.request import CompileRequest
from shardrules.programs.costs.step_time import seconds_text
from shardrules.programs.machine.targets import Target
from shardrules.programs.patches.apply import write_all
from shardrules.programs.patches.auto import auto_annotations
from shardrules.programs.patches.explicit import ExplicitCheck, ExplicitTrials, explicit_annotations, explicit_trace
from shardrules.programs.patches.planned import PlannedProgram
from shardrules.programs.patches.reading import Reading
from shardrules.programs.patches.text import AnnotatedFile, Annotation, annotated
from shardrules.programs.patches.trials import CompiledFigures, PatchTarget
from shardrules.programs.patches.verify import Verification, compare_numbers, patched_functions


@final
@attrs.frozen(eq=False)
class SourcePatch:
    """A plan's layouts as annotations in the user's code, from `AutoPlan.to_patch`. It prints as a unified diff."""

    fn: Callable[..., Any] = attrs.field(repr=False)
    plan: PlannedProgram = attrs.field(repr=False)
    root: Path
    """The top of the user's project: nothing outside of it is changed."""
    changes: tuple[AnnotatedFile, ...] = attrs.field(repr=False)
    annotations: tuple[Annotation, ...]
    machine: PatchTarget = attrs.field(repr=False)
    planned: CompiledFigures
    """The plan's own program, compiled."""
    findings: tuple[Finding, ...]
    """The places that the patch could not write, and what leaving them costs."""

    @property
    def diff(self) -> str:
        """The unified diff; empty where the compiler chooses what the plan says."""
        return "".join(file_diff(change, self.root) for change in self.changes)

    def __str__(self) -> str:
        notes = [f"# {line}" for line in listing(self.findings).splitlines()] if self.findings else []
        if not self.changes:
            notes.insert(0, f"# {self.plan.name}: without annotations, it is compiled as planned")
        return self.diff + "".join(f"{line}\n" for line in notes)

    def apply(self) -> tuple[Path, ...]:
        """Writes the files, all of them or none, and returns their paths.

        `PatchError` lists the files that have changed since, are read-only, or lead out of the project.
        """
        write_all({change.file: change.new for change in self.changes}, self.root)
        return tuple(change.file.path for change in self.changes)

    def verify(self) -> Verification:
        """Compiles the patched function for the plan's target, and runs it on CPU devices if there are enough.

        Its collectives, its modelled time and its numbers are compared with those of the plan, and of the function
        without the patch. No file changes.
        """
        plan, request = self.plan, CompileRequest(self.fn, self.plan.arguments, axis_types=None)
        with patched_functions(self.changes, [self.fn, plan.args]):
            program = explicit_trace(self.fn, plan, self.machine.mesh) if plan.is_explicit else plan.trace()
            outcome = self.machine.outcome_of(request, plan.args) if plan.is_explicit else self.machine.outcome(program)
        return Verification(self.planned, outcome, *compare_numbers(plan, program))


def make_patch(
    fn: Callable[..., Any],
    plan: PlannedProgram,
    root: str | Path | None,
    target: Target | str | None,
    time_limit: float,
) -> SourcePatch:
    """Returns the patch of a plan."""
    deadline = Deadline.after(time_limit)
    reading = Reading.of(fn, plan, root)
    machine = machine_of(plan, target)
    goal = machine.outcome(plan.planned)
    findings = list(reading.sources.findings)
    if plan.is_explicit:
        trials = ExplicitTrials.of(reading, machine, deadline)
        annotations, figures = explicit_annotations(trials, goal)
        machine = attrs.evolve(machine, mesh=trials.mesh)
        findings += [problem.finding for problem in trials.problems.values() if not problem.annotations]
    else:
        annotations, figures = auto_annotations(reading, machine, goal, deadline)
    if deadline.is_over:
        message = f"the time limit of {time_limit:g} s was reached: some annotations may not be needed"
        findings.append(Finding("note", "time-limit", message, remedy="Raise time_limit"))
    findings += _unsaid(reading, figures, goal)
    files = [file for file in reading.sources.files if any(each.place.file is file for each in annotations)]
    changes = tuple(annotated(file, annotations, plan.mesh.axis_names) for file in files)
    return SourcePatch(fn, plan, reading.sources.root, changes, tuple(annotations), machine, goal, tuple(findings))


def _unsaid(reading: Reading, figures: CompiledFigures, goal: CompiledFigures) -> Iterator[Finding]:
    """Yields the places that no one annotation fits, and what that costs, if the program is slower than planned."""
    if figures.seconds <= 1.01 * goal.seconds:  # chosen by hand: a per cent is no reason to look for more
        return
    for conflict in reading.conflicts:
        place, specs = reading.sources.places[conflict.place], ", ".join(map(spec_repr, conflict.specs))
        if not place.is_base and not place.is_read:
            message = f"runs for several layouts, {specs}, and one annotation says one"
            yield Finding("note", "several-layouts", message, place.file.text(place.node), source=str(place))
    times = f"{seconds_text(figures.seconds)} a call instead of {seconds_text(goal.seconds)}"
    yield Finding("note", "unsaid-layouts", f"with layouts that no annotation says, here or in code of others, {times}")


def check_explicit(
    fn: Callable[..., Any], plan: PlannedProgram, root: str | Path | None, target: Target | str | None
) -> ExplicitCheck:
    """Returns the lines of a function that JAX refuses on Explicit axes."""
    trials = ExplicitTrials.of(Reading.of(fn, plan, root), machine_of(plan, target), NO_DEADLINE)
    trials.mended(frozenset())
    return ExplicitCheck(tuple(trials.problems.values()))


def machine_of(plan: PlannedProgram, target: Target | str | None) -> PatchTarget:
    """Returns what a patch is compiled for."""
    machine = plan.target if target is None else Target.parse(target)
    return PatchTarget(plan.mesh, machine, plan.hardware, plan.structs, plan.specs, plan.result_specs)


def file_diff(change: AnnotatedFile, root: Path) -> str:
    """Returns the unified diff of a file."""
    name = os.path.relpath(change.file.path, root).replace(os.sep, "/")
    old, new = (_lines(data.decode(change.file.encoding)) for data in (change.file.raw, change.new))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as `patch` counts them, which keep their ends."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
