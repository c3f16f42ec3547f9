"""Places in source code: the expressions whose value can get an annotation where it stands."""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, final

import attrs

from shardrules.programs.patches.source import SourceFile

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_COMPUTED = (ast.BinOp, ast.UnaryOp, ast.Call, ast.IfExp)
_READ = (ast.Name, ast.Attribute, ast.Subscript)
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CONDITIONAL = (ast.IfExp, ast.BoolOp)


@final
@attrs.frozen(eq=False)
class Place:
    """An expression, or a name that a statement such as `x += y` has changed."""

    file: SourceFile
    node: ast.expr
    statement: ast.stmt
    function: Function
    is_read: bool
    """The expression only names a value that was computed before."""
    is_inline: bool
    """The expression cannot be computed in a line before: it is in a comprehension, a lambda or a condition."""
    is_after: bool = False
    """The name that the statement assigns to; the annotation stands behind the statement."""
    is_base: bool = False
    """The expression is only called, indexed or asked for an attribute: it gets no annotation."""

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def function_name(self) -> str:
        return getattr(self.function, "name", "<lambda>")

    def __str__(self) -> str:
        return f"{self.file.path}:{self.line}"


def functions_at(file: SourceFile, lines: Iterable[int]) -> list[Function]:
    """Returns the functions of a file that any of these lines is in, but not those around them."""
    functions = [node for node in ast.walk(file.tree) if isinstance(node, Function)]
    chosen: dict[int, Function] = {}
    for line in lines:
        around = [node for node in functions if node.lineno <= line <= (node.end_lineno or node.lineno)]
        lengths = [(node.end_lineno or node.lineno) - node.lineno for node in around]
        # Several lambdas may be on a line.
        innermost = [node for node, length in zip(around, lengths, strict=True) if length == min(lengths)]
        chosen.update((id(node), node) for node in innermost)
    return list(chosen.values())


def places_in(file: SourceFile, functions: Sequence[Function]) -> list[Place]:
    """Returns the places of functions, in the order in which their values are computed."""
    places: list[Place] = []
    done: set[int] = set()
    for function in functions:
        for place in _of_function(file, function):
            if id(place.node) not in done:
                done.add(id(place.node))
                places.append(place)
    return places


def _of_function(file: SourceFile, function: Function) -> Iterator[Place]:
    if isinstance(function, ast.Lambda):
        statement = _statement_of(file.tree, function)
        if statement is not None:
            yield from _in_expression(file, function.body, statement, function, is_inline=True)
        return
    yield from _in_statements(file, function.body, function)


def _statement_of(tree: ast.Module, node: ast.AST) -> ast.stmt | None:
    """The innermost statement around an expression."""
    around = [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and any(node is n for n in ast.walk(each))]
    return around[-1] if around else None


def _in_statements(file: SourceFile, body: Sequence[ast.stmt], function: Function) -> Iterator[Place]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _in_statements(file, statement.body, statement)
            continue
        if isinstance(statement, ast.ClassDef | ast.Assert | ast.Delete | ast.Import | ast.ImportFrom):
            continue
        # Tests of conditions and loops run again and again, or choose between programs: no layout is asked for there.
        is_inline = isinstance(statement, ast.While | ast.If)
        for name, value in ast.iter_fields(statement):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.expr) and name not in ("target", "targets", "annotation", "test"):
                    yield from _in_expression(file, item, statement, function, is_inline)
                elif isinstance(item, ast.withitem):
                    yield from _in_expression(file, item.context_expr, statement, function, True)
                elif isinstance(item, ast.ExceptHandler | ast.match_case):
                    yield from _in_statements(file, item.body, function)
                elif isinstance(item, ast.stmt):
                    yield from _in_statements(file, [item], function)
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            yield Place(file, statement.target, statement, function, False, False, is_after=True)


def _in_expression(
    file: SourceFile,
    node: ast.expr,
    statement: ast.stmt,
    function: Function,
    is_inline: bool,
    is_base: bool = False,
) -> Iterator[Place]:
    """Yields the places in an expression, operands first."""
    if isinstance(node, ast.JoinedStr | ast.Compare | ast.NamedExpr | ast.Yield | ast.YieldFrom | ast.Constant):
        return
    inner = is_inline or isinstance(node, _SCOPES + _CONDITIONAL)
    scope = node if isinstance(node, ast.Lambda) else function
    for child, is_child_base in children(node):
        yield from _in_expression(file, child, statement, scope, inner, is_child_base)
    is_load = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    if isinstance(node, _COMPUTED + _READ) and is_load:
        is_read = isinstance(node, _READ)
        yield Place(file, node, statement, function, is_read, is_inline, is_base=is_base and is_read)


def children(node: ast.expr) -> Iterator[tuple[ast.expr, bool]]:
    """The expressions inside of one that have values of their own, and whether each is only the base of another."""
    if isinstance(node, ast.Call):
        yield node.func, True
        for child in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield child, False
    elif isinstance(node, ast.Attribute):
        yield node.value, True
    elif isinstance(node, ast.Subscript):
        yield node.value, True
        yield node.slice, False
    elif isinstance(node, ast.Lambda):
        yield node.body, False
    elif isinstance(node, ast.IfExp):
        yield node.body, False
        yield node.orelse, False
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield child, False
            elif isinstance(child, ast.comprehension):
                yield child.iter, False


def instrumented(tree: ast.Module, places: dict[int, int], call: str) -> Any:
    """Returns a tree in which the value of each place is passed through a function, with the number of the place.

    `places` maps ids of nodes to numbers. The tree is changed; positions stay as they are.
    """
    return _Instrument(places, call).visit(tree)


@final
@attrs.frozen
class _Instrument:
    """Wraps expressions in calls."""

    places: dict[int, int]
    call: str

    def visit(self, node: ast.AST) -> Any:
        number = self.places.get(id(node))
        if isinstance(node, ast.AugAssign):
            return self.visit_statement(node)
        node = with_fields(node, self.visit)
        return self.marked(number, node, node) if number is not None and isinstance(node, ast.expr) else node

    def marked(self, number: int, value: ast.expr, like: ast.AST) -> Any:
        call = ast.Call(ast.Name(self.call, ast.Load()), [ast.Constant(number), value], [])
        return at_position(call, like)

    def visit_statement(self, node: ast.AugAssign) -> Any:
        target, number = node.target, self.places.get(id(node.target))
        node.value = self.visit(node.value)
        if number is None or not isinstance(target, ast.Name):
            return node
        return [node, assigned_again(node, self.marked(number, ast.Name(target.id, ast.Load()), node))]


def with_fields(node: ast.AST, visit: Callable[[ast.AST], Any]) -> Any:
    """Returns a node in which those below it are what `visit` returns for them: a node, or several for a statement."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            setattr(node, name, visit(value))
        elif isinstance(value, list):
            items = [visit(item) if isinstance(item, ast.AST) else item for item in value]
            value[:] = [each for item in items for each in (item if isinstance(item, list) else [item])]
    return node


def assigned_again(node: ast.AugAssign, value: ast.expr) -> ast.Assign:
    """Returns a statement that gives another value to the name that a statement has changed."""
    assert isinstance(node.target, ast.Name), "only names are assigned to again"
    return at_position(ast.Assign([ast.Name(node.target.id, ast.Store())], value), node)


def at_position(node: Any, like: Any) -> Any:
    """Gives new nodes the position of another, and returns the first."""
    for each in ast.walk(node):
        if "lineno" in getattr(each, "_attributes", ()) and not hasattr(each, "lineno"):
            ast.copy_location(each, like)
    return node
