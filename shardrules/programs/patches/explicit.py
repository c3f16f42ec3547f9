"""The annotations that a function needs on Explicit axes, where the types of arrays say their layouts.

JAX refuses an operation whose result could have several layouts. Where it does, the operation gets the layout that the
plan has: by `out_sharding` where it takes that, else its operands are brought where the operation is possible, else it
runs on Auto axes by `jax.sharding.auto_axes`. The function is traced again after each, until JAX accepts it. Changed
code is tried as a tree of syntax whose positions are those of the source, so that errors say which expression fails.
"""

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, TracebackType
from typing import Any, cast, final

import attrs
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, Mesh, PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.core.deadline import Deadline
from shardrules.core.errors import PatchError, PlanError, printable
from shardrules.core.finding import Finding
from shardrules.core.spec import spec_repr
from shardrules.programs.compiling.arguments import read_arguments
from shardrules.programs.compiling.compile import trace
from shardrules.programs.compiling.request import CompileRequest
from shardrules.programs.patches.auto import improved, least, take_out
from shardrules.programs.patches.marks import twin_tree
from shardrules.programs.patches.names import dotted_names
from shardrules.programs.patches.places import Place, assigned_again, at_position, children, with_fields
from shardrules.programs.patches.planned import PlannedProgram
from shardrules.programs.patches.reading import Reading
from shardrules.programs.patches.source import SourceFile
from shardrules.programs.patches.swap import code_changes, compiled
from shardrules.programs.patches.text import Annotation, Form, parameter_names
from shardrules.programs.patches.trials import CompiledFigures, PatchTarget

TAKING = frozenset(
    f"jax.{name}"
    for name in (
        *("numpy.matmul", "numpy.einsum", "numpy.dot", "numpy.tensordot", "numpy.reshape", "numpy.broadcast_to"),
        *("numpy.repeat", "numpy.ravel", "lax.dot_general", "lax.reshape", "lax.conv_general_dilated", "lax.dot"),
    )
)
"""The functions of JAX that take the layout of their result, in JAX 0.10 and 0.12."""

_PREFIX = "_shardrules_"


@final
@attrs.frozen
class TypeProblem:
    """An expression that JAX refuses on Explicit axes, and the annotation that mends it."""

    place: Place
    message: str
    annotations: tuple[Annotation, ...]
    """Empty where nothing mends it."""

    @property
    def finding(self) -> Finding:
        """The problem as a finding of a patch."""
        remedy = "Write this line for Explicit axes by hand"
        return Finding(
            "warning",
            "not-explicit",
            self.message,
            self.place.file.text(self.place.node),
            remedy,
            source=str(self.place),
        )

    def __str__(self) -> str:
        mends = ", ".join(dict.fromkeys(f"{each.form} {spec_repr(each.spec)}" for each in self.annotations))
        text = self.place.file.text(self.place.node)
        lines = (
            f"{self.place.file.path.name}:{self.place.line}: {text}: {self.message}",
            f"  -> {mends or 'nothing mends it'}",
        )
        return "\n".join(map(printable, lines))


@final
@attrs.frozen
class ExplicitCheck:
    """The lines of a function that do not type-check on an Explicit mesh. It is true if there are none."""

    problems: tuple[TypeProblem, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems)) or "all lines type-check"


@final
@attrs.define(eq=False)
class ExplicitTrials:
    """Programs of a function with annotations, on Explicit axes."""

    reading: Reading
    machine: PatchTarget
    mesh: Mesh
    deadline: Deadline
    _numbers: dict[int, int]
    """The numbers of places, by the ids of their nodes."""
    mends: dict[int, Form] = attrs.field(factory=dict)
    """The annotations without which JAX refuses the function, by place."""
    problems: dict[int, TypeProblem] = attrs.field(factory=dict)
    _tried: dict[int, int] = attrs.field(factory=dict)
    _outcomes: dict[frozenset[tuple[int, str]], CompiledFigures | None] = attrs.field(factory=dict)

    @classmethod
    def of(cls, reading: Reading, machine: PatchTarget, deadline: Deadline) -> "ExplicitTrials":
        mesh = machine.target.mesh(reading.plan.mesh)
        types = (AxisType.Explicit,) * len(mesh.axis_names)
        numbers = {id(place.node): number for number, place in enumerate(reading.sources.places)}
        explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
        return cls(reading, machine, explicit, deadline, numbers)

    def forms(self, chosen: Sequence[int] | frozenset[int]) -> dict[int, Form]:
        """The annotations of chosen places, and those that the function needs at all."""
        forms: dict[int, Form] = {number: self.form(number) for number in chosen}
        return {**forms, **self.mends}

    def form(self, number: int) -> Form:
        return "out_sharding" if self.takes_sharding(number) else "reshard"

    def takes_sharding(self, number: int) -> bool:
        """Returns whether an expression can be given the layout of its result."""
        place = self.reading.sources.places[number]
        if isinstance(place.node, ast.Subscript):
            # An array that is indexed by arrays: not by numbers, and no dictionary.
            operands = self.operands(number)
            return (
                len(operands) > 1 and operands[0] is place.node.value and self.number(operands[0]) in self.reading.needs
            )
        return takes_sharding(place.node, place.file)

    def number(self, node: ast.AST) -> int:
        """The number of the place that a node is; -1 for none."""
        return self._numbers.get(id(node), -1)

    def annotation(self, number: int, form: Form) -> Annotation:
        operands = tuple(self.operands(number)) if form == "auto" else ()
        return Annotation(self.reading.sources.places[number], self.reading.needs[number].spec, form, operands)

    def mended(self, chosen: frozenset[int]) -> bool:
        """Adds what JAX needs beside chosen annotations; false if nothing makes it accept the function."""
        while True:
            forms = self.forms(chosen)
            # What was compiled once, JAX accepts.
            error = None if frozenset(forms.items()) in self._outcomes else self.error(forms)
            if error is None:
                return True
            if not self.mend(error, chosen):
                return False

    def error(self, forms: Mapping[int, Form]) -> BaseException | None:
        """Returns what JAX raises at annotated code; errors that are not about shardings are raised."""
        plan = self.reading.plan
        try:
            with self.running(forms):
                explicit_trace(self.reading.fn, plan, self.mesh)
        except Exception as error:  # JAX has several classes for what it refuses
            cause = error.__cause__ if isinstance(error, PlanError) else error
            if not re.search(r"(?i)shard|PartitionSpec|DuplicateSpec|\d@[\w(]", f"{type(cause).__name__} {cause}"):
                raise
            return cause
        return None

    def outcome(self, chosen: frozenset[int]) -> CompiledFigures:
        """Compiles the function with annotations. What JAX refuses takes for ever."""
        if not self.mended(chosen):
            return CompiledFigures(float("inf"), 1 << 62, 1 << 62, {})
        return self.compiled(self.forms(chosen))

    def compiled(self, forms: Mapping[int, Form]) -> CompiledFigures:
        key = frozenset(forms.items())
        if key not in self._outcomes:
            request = CompileRequest(self.reading.fn, self.reading.plan.arguments, axis_types=None)
            with self.running(forms):
                self._outcomes[key] = attrs.evolve(self.machine, mesh=self.mesh).outcome_of(
                    request, self.reading.plan.args
                )
        outcome = self._outcomes[key]
        assert outcome is not None, "a compiled program has an outcome"
        return outcome

    @contextlib.contextmanager
    def running(self, forms: Mapping[int, Form]) -> Iterator[None]:
        """Makes the functions run with annotations."""
        code: dict[CodeType, CodeType] = {}
        for file in self.reading.sources.files:
            code |= self.changed_code(file, forms)
        specs = {number: self.reading.needs[number].spec for number in forms}
        with self.reading.changed(code, _helpers(specs)):
            yield

    def changed_code(self, file: SourceFile, forms: Mapping[int, Form]) -> dict[CodeType, CodeType]:
        copy, twins = twin_tree(file)
        places = self.reading.sources.places
        numbers = {id(twins[id(places[number].node)]): number for number in forms if places[number].file is file}
        operands = {
            number: [twins[id(node)] for node in self.operands(number)] for number in forms if forms[number] == "auto"
        }
        changed = _Changed(numbers, forms, operands).visit(copy)
        return code_changes(compiled(file), compile(changed, str(file.path), "exec", dont_inherit=True), file)

    def operands(self, number: int) -> list[ast.expr]:
        """The largest expressions inside of a place that are arrays, or trees of them."""

        def inside(node: ast.expr) -> Iterator[ast.expr]:
            for child, _ in children(node):
                index = self.number(child)
                if index in self.reading.needs or index in self.reading.trees:
                    yield child
                else:
                    yield from inside(child)

        return list(inside(self.reading.sources.places[number].node))

    def mend(self, error: BaseException, chosen: frozenset[int]) -> bool:
        """Adds the next annotation that may mend the expression at which JAX raised an error."""
        number = self.failing(error)
        if number is None:
            return False
        options = self.options(number)
        index = self._tried.get(number, 0)
        message = str(error).partition("\n")[0]
        place, needs = self.reading.sources.places[number], self.reading.needs
        if index >= len(options) or self.deadline.is_over:
            self.problems[number] = TypeProblem(place, message, ())
            return False
        self._tried[number] = index + 1
        added: dict[int, Form] = {each: form for each, form in options[index].items() if each in needs}
        self.mends.update(added)
        annotations = tuple(self.annotation(each, form) for each, form in added.items())
        before = self.problems.get(number)
        self.problems[number] = TypeProblem(place, before.message if before else message, annotations)
        return True

    def options(self, number: int) -> list[dict[int, Form]]:
        """The annotations that may mend an expression, the plainest first."""
        places, needs = self.reading.sources.places, self.reading.needs
        node = places[number].node
        options: list[dict[int, Form]] = []
        if self.takes_sharding(number):
            options.append({number: "out_sharding"})
        operands = [each for each in map(self.number, self.operands(number)) if each in needs]
        returned = [each for each in self.returned(number) if each in needs]
        if returned:
            options.append(dict.fromkeys([*operands, *returned], "reshard"))
        elif isinstance(node, ast.BinOp) and operands and not isinstance(node.op, ast.MatMult):
            options.append(dict.fromkeys(operands, "reshard"))
        if number in needs and self.operands(number) and not self.calls_user(node):
            options.append({number: "auto"})
        if operands and not isinstance(node, ast.BinOp):
            options.append(dict.fromkeys(operands, "reshard"))
        return options

    def calls_user(self, node: ast.expr) -> bool:
        """Returns whether an expression calls a function of the files, whose lines get annotations themselves."""
        parts = [node.func, *node.args] if isinstance(node, ast.Call) else []
        # The functions that `vmap` and loops are given, too.
        names = {getattr(each, "id", getattr(each, "attr", "")) for part in parts for each in ast.walk(part)}
        functions = (each for file in self.reading.sources.files for each in ast.walk(file.tree))
        return any(isinstance(each, ast.FunctionDef) and each.name in names for each in functions)

    def returned(self, number: int) -> list[int]:
        """The values that functions return which a call is given, such as the body of a loop."""
        place = self.reading.sources.places[number]
        if not isinstance(place.node, ast.Call):
            return []
        names = {each.id for each in place.node.args if isinstance(each, ast.Name)}
        result: list[int] = []
        for index, other in enumerate(self.reading.sources.places):
            statement = other.statement
            value = statement.value if isinstance(statement, ast.Return) else None
            items = [value, *(value.elts if isinstance(value, ast.Tuple) else [])]
            if other.function_name in names and any(other.node is item for item in items):
                result.append(index)
        return result

    def failing(self, error: BaseException) -> int | None:
        """The place of the innermost expression at which an error was raised."""
        names = self.reading.sources.names
        span: tuple[str, Any] | None = None
        chain: list[BaseException | None] = [error, error.__cause__, error.__context__]
        for each in chain:
            frame: TracebackType | None = None if each is None else each.__traceback__
            while frame is not None:
                code = frame.tb_frame.f_code
                if code.co_filename in names:
                    positions = list(code.co_positions())[frame.tb_lasti // 2]
                    span = code.co_filename, positions
                frame = frame.tb_next
            if span is not None:
                break
        if span is None:
            return None
        name, (line, end_line, column, end_column) = span
        around: list[tuple[int, int]] = []
        for index, place in enumerate(self.reading.sources.places):
            node = place.node
            starts = (node.lineno, node.col_offset) <= (line, column)
            ends = (node.end_lineno, node.end_col_offset) >= (end_line, end_column)
            if str(place.file.path) == name and not place.is_base and not place.is_after and starts and ends:
                start, stop = place.file.span(node)
                around.append((stop - start, index))
        return min(around)[1] if around else None


def explicit_trace(fn: Callable[..., Any], plan: PlannedProgram, mesh: AnyMesh) -> ClosedJaxpr:
    """Traces a function on a mesh of Explicit axes, with its arguments as planned."""
    assert isinstance(mesh, Mesh), "programs are traced on devices of the target"
    return trace(fn, read_arguments(fn, plan.args, mesh, plan.arguments), mesh).jaxpr


def takes_sharding(node: ast.expr, file: SourceFile) -> bool:
    """Returns whether an operation, or a function of JAX, can be given the layout of its result."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call) or any(each.arg in (None, "out_sharding") for each in node.keywords):
        return False
    first, dot, rest = ast.unparse(node.func).partition(".")
    return f"{dotted_names(file.tree.body).get(first, '')}{dot}{rest}" in TAKING


def explicit_annotations(trials: ExplicitTrials, goal: CompiledFigures) -> tuple[list[Annotation], CompiledFigures]:
    """Returns annotations with which JAX accepts the function and compiles it as planned, none of which can be taken
    out, and the figures of the program with them."""
    reading = trials.reading
    order = reading.candidates
    chosen = least(
        [], [each for each in order if reading.needs[each].has_matmul], order, outcome=trials.outcome, goal=goal
    )
    chosen = improved(chosen, order, trials.outcome, goal, trials.deadline)
    if not trials.mended(chosen):
        problems = "\n".join(str(each) for each in trials.problems.values() if not each.annotations)
        raise PatchError(f"{reading.plan.name}: JAX refuses lines on Explicit axes that nothing mends:\n{problems}")
    kept = take_out([each for each in order if each in chosen], trials.outcome, goal, trials.deadline)
    forms = trials.forms(kept)
    limit = trials.compiled(forms)
    # What was needed beside other annotations may not be any more.
    for number in reversed(list(trials.mends)):
        fewer: dict[int, Form] = {each: form for each, form in forms.items() if each != number}
        is_spare = not trials.deadline.is_over and trials.error(fewer) is None
        if is_spare and trials.compiled(fewer).is_as_good_as(limit, exact=False):
            forms = fewer
    return [trials.annotation(each, form) for each, form in forms.items()], trials.compiled(forms)


def _helpers(specs: Mapping[int, PartitionSpec]) -> dict[str, Callable[..., Any]]:
    """The global names that changed code calls."""

    def auto(number: int, run: Callable[..., Any], *operands: Any) -> Any:
        return jax.sharding.auto_axes(run, out_sharding=specs[number])(*operands)

    return {
        f"{_PREFIX}reshard": lambda number, value: jax.sharding.reshard(value, specs[number]),
        f"{_PREFIX}matmul": lambda number, x, y: jnp.matmul(x, y, out_sharding=specs[number]),
        f"{_PREFIX}spec": lambda number: specs[number],
        f"{_PREFIX}auto": auto,
    }


@final
@attrs.frozen(eq=False)
class _Changed:
    """Annotates expressions in a tree of syntax; positions stay those of the source."""

    numbers: Mapping[int, int]
    forms: Mapping[int, Form]
    operands: Mapping[int, Sequence[ast.AST]]
    replaced: dict[int, tuple[str, list[ast.expr]]] = attrs.field(factory=dict)

    def visit(self, node: ast.AST) -> Any:
        entry = self.replaced.pop(id(node), None)
        if entry is None:
            return self.annotated(node)
        name, values = entry
        values.append(self.annotated(node))
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def annotated(self, node: ast.AST) -> Any:
        number = self.numbers.get(id(node))
        if isinstance(node, ast.AugAssign):
            return self.statement(node)
        if number is None or not isinstance(node, ast.expr):
            return with_fields(node, self.visit)
        form = self.forms[number]
        if form == "auto":
            names, values = parameter_names(node, len(self.operands[number])), list[ast.expr]()
            for name, operand in zip(names, self.operands[number], strict=True):
                self.replaced[id(operand)] = name, values
            body = with_fields(node, self.visit)
            parameters = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
            return self.call("auto", number, node, ast.Lambda(parameters, body), *values)
        node = with_fields(node, self.visit)
        if form == "out_sharding" and isinstance(node, ast.BinOp):
            return self.call("matmul", number, node, node.left, node.right)
        if form == "out_sharding":
            keyword = ast.keyword("out_sharding", self.call("spec", number, node))
            if isinstance(node, ast.Subscript):
                at = ast.Subscript(ast.Attribute(node.value, "at", ast.Load()), node.slice, ast.Load())
                return at_position(ast.Call(ast.Attribute(at, "get", ast.Load()), [], [keyword]), node)
            call = cast(ast.Call, node)
            call.keywords.append(at_position(keyword, node))
            return call
        return self.call("reshard", number, node, node)

    def call(self, name: str, number: int, like: Any, *values: Any) -> Any:
        call = ast.Call(ast.Name(f"{_PREFIX}{name}", ast.Load()), [ast.Constant(number), *values], [])
        return at_position(call, like)

    def statement(self, node: ast.AugAssign) -> Any:
        number, target = self.numbers.get(id(node.target)), node.target
        node.value = self.visit(node.value)
        if number is None or not isinstance(target, ast.Name):
            return node
        return [node, assigned_again(node, self.call("reshard", number, node, ast.Name(target.id, ast.Load())))]
