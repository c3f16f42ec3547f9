"""The patch of a plan: which annotations it takes, as a diff of the user's files."""

import difflib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import attrs

from shardrules.core.errors import PatchError
from shardrules.core.finding import Finding, listing
from shardrules.programs.machine.targets import Target
from shardrules.programs.patches.apply import project_root, why_not_writable, write_all
from shardrules.programs.patches.marks import mark_names, marked_code, user_lines
from shardrules.programs.patches.needs import Need, find_needs
from shardrules.programs.patches.places import Place, functions_at, places_in
from shardrules.programs.patches.planned import PlannedProgram
from shardrules.programs.patches.source import SourceFile, is_file
from shardrules.programs.patches.swap import compiled, live_functions, swapped
from shardrules.programs.patches.text import AnnotatedFile, Annotation, annotated
from shardrules.programs.patches.trials import Machine, Outcome, constrained, needed
from shardrules.programs.patches.verify import Verification, compare_numbers, patched_functions


def file_diff(change: AnnotatedFile, root: Path) -> str:
    """Returns the unified diff of a file."""
    name = os.path.relpath(change.file.path, root).replace(os.sep, "/")
    old, new = (_lines(data.decode(change.file.encoding)) for data in (change.file.raw, change.new))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as `patch` counts them, which keep their ends."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


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
    machine: Machine = attrs.field(repr=False)
    planned: Outcome
    """The plan's own program, compiled."""
    findings: tuple[Finding, ...]
    """The places that the patch could not write, and what leaving them costs."""

    @property
    def diff(self) -> str:
        """The unified diff; empty where the compiler chooses what the plan says."""
        return "".join(file_diff(change, self.root) for change in self.changes)

    def __str__(self) -> str:
        notes = "".join(f"# {line}\n" for line in listing(self.findings).splitlines()) if self.findings else ""
        return f"{self.diff or f'# {self.plan.name}: the compiler chooses what the plan says without annotations' + chr(10)}{notes}"

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
        with patched_functions(self.changes, [self.fn, self.plan.args]):
            program = self.plan.trace()
        return Verification(self.planned, self.machine.outcome(program), *compare_numbers(self.plan, program))


def make_patch(
    fn: Callable[..., Any],
    plan: PlannedProgram,
    root: str | Path | None,
    target: Target | str | None,
    time_limit: float,
) -> SourcePatch:
    """Returns the patch of a plan."""
    deadline = time.monotonic() + time_limit
    sources = read_sources(plan, root)
    machine = machine_of(plan, target)
    marked, skipped = trace_marked(fn, plan, sources)
    needs, _ = find_needs(marked, plan.program, plan.layouts, plan.specs, plan.result_specs, sources.places)
    specs = {need.place: need.spec for need in needs}
    outcomes: dict[frozenset[int], Outcome] = {}

    def outcome(chosen: frozenset[int]) -> Outcome:
        if chosen not in outcomes:
            outcomes[chosen] = machine.outcome(constrained(marked, {place: specs[place] for place in chosen}))
        return outcomes[chosen]

    goal = machine.outcome(plan.planned)
    everything = frozenset(specs)
    starts = [
        frozenset(),
        everything,
        frozenset(need.place for need in needs if need.has_matmul),
        frozenset(need.place for need in needs if need.has_matmul or sources.places[need.place].is_read),
    ]
    best = min(starts, key=lambda chosen: outcome(chosen).seconds)
    best = next((chosen for chosen in starts if outcome(chosen).is_as_good_as(goal, exact=False)), best)
    exact = outcome(best).collectives == goal.collectives
    limit = goal if outcome(best).is_as_good_as(goal, exact=exact) else outcome(best)
    findings = list(sources.findings)

    def suffices(chosen: frozenset[int]) -> bool:
        return time.monotonic() < deadline and outcome(chosen).is_as_good_as(limit, exact=exact)

    order = [need.place for need in sorted(needs, key=lambda need: _rank(need, sources.places)) if need.place in best]
    kept = needed(order, suffices)
    if time.monotonic() > deadline:
        findings.append(
            Finding(
                "note",
                "time-limit",
                f"the time limit of {time_limit:g} s was reached: some annotations may not be needed",
                remedy="Raise time_limit",
            )
        )
    annotations = tuple(Annotation(sources.places[place], specs[place], "constraint") for place in sorted(kept))
    changes = tuple(
        annotated(file, annotations)
        for file in sources.files
        if any(annotation.place.file is file for annotation in annotations)
    )
    return SourcePatch(fn, plan, sources.root, changes, annotations, machine, goal, tuple(findings))


def _rank(need: Need, places: Sequence[Place]) -> tuple[bool, bool, int]:
    """Annotations of large products are kept rather than others."""
    return not need.has_matmul, places[need.place].is_read, -need.elements


@final
@attrs.frozen(eq=False)
class Sources:
    """The user's files that a planned function comes from, and the places in them."""

    root: Path
    files: tuple[SourceFile, ...]
    places: tuple[Place, ...]
    findings: tuple[Finding, ...]
    """The files that are not the user's to change."""


def read_sources(plan: PlannedProgram, root: str | Path | None) -> Sources:
    """Reads the files that a function was traced from. `PatchError` says why there are none."""
    lines = user_lines(plan.program)
    top = Path(root).absolute() if root is not None else None
    files: list[SourceFile] = []
    findings: list[Finding] = []
    for name in lines:
        path = Path(name)
        if not is_file(name):
            findings.append(_not_written(name, "is no file: its code is from a prompt, a notebook or a string"))
            continue
        top = project_root(path) if top is None else top
        reason = why_not_writable(path, top)
        if reason:
            findings.append(_not_written(name, reason))
        else:
            files.append(SourceFile.read(path))
    if not files:
        where = "; ".join(f"{finding.path} {finding.message}" for finding in findings)
        raise PatchError(
            f"{plan.name}: no line of it can be changed: {where or 'none of it is the code of the user'}. Put the "
            "function into a module of your project"
        )
    assert top is not None, "a file has a project"
    places = [place for file in files for place in places_in(file, functions_at(file, lines[str(file.path)]))]
    return Sources(top, tuple(files), tuple(places), tuple(findings))


def _not_written(name: str, reason: str) -> Finding:
    return Finding("note", "not-written", reason, name)


def machine_of(plan: PlannedProgram, target: Target | str | None) -> Machine:
    machine = plan.target if target is None else Target.parse(target)
    return Machine(plan.mesh, machine, plan.hardware, plan.structs, plan.in_shardings, plan.out_shardings)


def trace_marked(fn: Callable[..., Any], plan: PlannedProgram, sources: Sources) -> tuple[Any, frozenset[int]]:
    """Returns the program with marks at all places, and the places that cannot have one."""
    names = {str(file.path): mark_names() for file in sources.files}
    changes = {}
    for file in sources.files:
        changes |= marked_code(file, sources.places, frozenset())
    functions = live_functions([fn, plan.args], frozenset(names))
    check_unchanged(sources, functions)
    with swapped(changes, names, functions):
        return plan.trace(), frozenset()


def check_unchanged(sources: Sources, functions: Sequence[Any]) -> None:
    """Raises `PatchError` where files are not what was imported."""
    places = {str(file.path): file for file in sources.files}
    codes = {name: set(all_codes(compiled(file))) for name, file in places.items()}
    changed = {
        function.__code__.co_filename
        for function in functions
        if function.__code__ not in codes[function.__code__.co_filename]
    }
    if changed:
        raise PatchError(
            f"{', '.join(sorted(changed))}: changed since the import, or imported through a hook that rewrites code. "
            "Start Python again and plan again"
        )


def all_codes(code: Any) -> list[Any]:
    inner = [each for each in code.co_consts if isinstance(each, type(code))]
    return [*inner, *(each for item in inner for each in all_codes(item))]
