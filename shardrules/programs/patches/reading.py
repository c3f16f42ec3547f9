"""A planned function as its source has it: the user's files, the places in them, and what the plan says of each."""

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, final

import attrs
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from shardrules.core.errors import PatchError
from shardrules.core.finding import Finding
from shardrules.programs.patches.apply import project_root, why_not_writable
from shardrules.programs.patches.marks import mark_names, marked_code, user_lines
from shardrules.programs.patches.needs import Need, PlaceConflict, find_needs
from shardrules.programs.patches.places import Place, functions_at, places_in
from shardrules.programs.patches.planned import PlannedProgram
from shardrules.programs.patches.source import SourceFile, is_file
from shardrules.programs.patches.swap import Changes, compiled, imported_size, live_functions, swapped


@final
@attrs.frozen(eq=False)
class Sources:
    """The user's files that a planned function comes from, and the places in them."""

    root: Path
    files: tuple[SourceFile, ...]
    places: tuple[Place, ...]
    findings: tuple[Finding, ...]
    """The files that are not the user's to change."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(str(file.path) for file in self.files)

    @classmethod
    def read(cls, plan: PlannedProgram, root: str | Path | None) -> "Sources":
        """Reads the files that a function was traced from. `PatchError` says why there are none."""
        lines = user_lines(plan.program)
        top = None if root is None else Path(root).absolute()
        files: list[SourceFile] = []
        findings: list[Finding] = []
        for name in lines:
            path = Path(name)
            if not is_file(name):
                reason = "is no file: its code comes from a prompt, a notebook or a string"
                findings.append(Finding("note", "not-written", reason, name, "Move it to a module of the project"))
                continue
            top = project_root(path) if top is None else top
            reason = why_not_writable(path, top)
            if reason:
                findings.append(Finding("note", "not-written", reason, name))
            else:
                files.append(SourceFile.read(path))
        if top is None or not files:
            where = "; ".join(f"{finding.path} {finding.message}" for finding in findings)
            raise PatchError(
                f"{plan.name}: no line of it can be changed: {where or 'none of it is code of the user'}. Put the "
                "function into a module of your project"
            )
        places = [place for file in files for place in places_in(file, functions_at(file, lines[str(file.path)]))]
        return cls(top, tuple(files), tuple(places), tuple(findings))


@final
@attrs.frozen(eq=False)
class Reading:
    """What a plan says of the source of a function."""

    fn: Callable[..., Any]
    plan: PlannedProgram
    sources: Sources
    marked: ClosedJaxpr
    """The function with a mark at each place."""
    needs: Mapping[int, Need]
    """The layouts of the values at places, by the number of the place."""
    conflicts: tuple[PlaceConflict, ...]
    trees: frozenset[int]
    """The places whose values are trees with arrays in them."""

    @classmethod
    def of(cls, fn: Callable[..., Any], plan: PlannedProgram, root: str | Path | None) -> "Reading":
        sources = Sources.read(plan, root)
        trees: set[int] = set()
        changes: dict[CodeType, CodeType] = {}
        for file in sources.files:
            changes |= marked_code(file, sources.places)
        functions = live_functions([fn, plan.args], sources.names)
        _check_unchanged(sources.files, functions)
        with swapped(changes, dict.fromkeys(sources.names, mark_names(trees)), functions):
            marked = plan.trace()
        needs, conflicts = find_needs(marked, plan.program, plan.layouts, plan.specs, plan.result_specs)
        if plan.is_explicit:
            needs = _with_batches(needs, sources.places)
        return cls(fn, plan, sources, marked, {need.place: need for need in needs}, tuple(conflicts), frozenset(trees))

    @property
    def candidates(self) -> list[int]:
        """The places that may get an annotation, the most important first: large products, then other results."""
        places = self.sources.places
        indices = {id(place.node): number for number, place in enumerate(places)}

        def is_read(place: Place) -> bool:
            # A part of an array is computed from it, and an item of a dictionary is not.
            node = place.node
            is_part = isinstance(node, ast.Subscript) and indices.get(id(node.value)) in self.needs
            return place.is_read and not is_part

        numbers = [
            number
            for number, need in self.needs.items()
            if not places[number].is_base and (need.moves or not is_read(places[number]))
        ]
        return sorted(
            numbers,
            key=lambda each: (not self.needs[each].has_matmul, places[each].is_read, -self.needs[each].elements),
        )

    def changed(self, code: Changes, names: Mapping[str, Any]) -> Any:
        """Returns a context in which the functions run other code, with more global names."""
        functions = live_functions([self.fn, self.plan.args], self.sources.names)
        return swapped(code, dict.fromkeys(self.sources.names, names), functions)


def _with_batches(needs: Sequence[Need], places: Sequence[Place]) -> list[Need]:
    """Returns needs in which arrays that `vmap` maps over are split as what is computed from them.

    Inside of the mapped function nothing can be said of that dim, and on Explicit axes it stays as it comes.
    """
    weights: Counter[Any] = Counter()
    for need in needs:
        weights[need.batch] += need.elements if need.batch is not None else 0
    batch = weights.most_common(1)[0][0] if weights else None
    mapped: set[int] = set()
    for place in places:
        call = place.node
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Call) and "vmap" in ast.unparse(call.func.func):
            mapped |= {id(argument) for argument in call.args}
    return [
        attrs.evolve(need, spec=PartitionSpec(batch), moves=True)
        if batch is not None and id(places[need.place].node) in mapped and not any(need.spec)
        else need
        for need in needs
    ]


def _check_unchanged(files: Sequence[SourceFile], functions: Sequence[Any]) -> None:
    """Raises `PatchError` where files are not what was imported."""
    codes = {str(file.path): set(_all_codes(compiled(file))) for file in files}
    used = {(function.__code__.co_filename, function.__code__) for function in functions}
    changed = {name for name, code in used if code not in codes[name]}
    changed |= {str(file.path) for file in files if imported_size(str(file.path)) not in (None, len(file.raw))}
    if changed:
        raise PatchError(
            f"{', '.join(sorted(changed))}: changed since the import, or imported through a hook that rewrites code. "
            "Start Python again and plan again"
        )


def _all_codes(code: CodeType) -> list[CodeType]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [*inner, *(each for item in inner for each in _all_codes(item))]
