"""Marks: constraints at all places of the source, which show in the traced program which value is where.

The functions of the user are traced with each expression passed through a mark. Where the value of one is an array, the
program gets a constraint that asks for nothing; its name says the place and the number of dims that the array has
there. JAX carries marks into loops, derivatives and batches as it carries constraints that the user writes.
"""

import ast
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from shardrules.core.source import equation_stack, is_library
from shardrules.programs.jaxprs.walk import equations
from shardrules.programs.patches.places import Place, instrumented
from shardrules.programs.patches.source import SourceFile
from shardrules.programs.patches.swap import Changes, code_changes, compiled

_CALL = "_shardrules_mark"
_NAME = re.compile(r"place:(\d+):(\d+)")
_CONSTRAINT = "sharding_constraint"
_PROMPTS = ("<stdin>", "<string>", "<python-input", "<ipython-input", "<doctest")
"""The beginnings of the names that code has which comes from no file."""

_TRACERS = (str(Path("autoplan", "run", "call.py")), str(Path("compiling", "compile.py")))
"""The files that call the user's function. Frames outside of them belong to whoever called the planner."""


@final
class Mark(NamedTuple):
    """The place of a mark, by number, and the number of dims that its value has there."""

    place: int
    ndim: int


def user_lines(program: ClosedJaxpr) -> dict[str, set[int]]:
    """Returns the lines of each of the user's files that a traced program comes from, callers included."""
    lines: dict[str, set[int]] = {}
    for equation in equations(program):
        frames = itertools.takewhile(lambda frame: not frame.file.endswith(_TRACERS), equation_stack(equation))
        # The outermost first: the file of the function itself.
        for frame in reversed(list(frames)):
            if not is_library(frame.file) or frame.file.startswith(_PROMPTS):
                lines.setdefault(frame.file, set()).add(frame.line)
    return lines


def mark_of(equation: Any) -> Mark | None:
    """Returns the mark that an equation is."""
    if equation.primitive.name != _CONSTRAINT:
        return None
    match = _NAME.search(str(equation.source_info.name_stack))
    return None if match is None else Mark(int(match[1]), int(match[2]))


def is_backward(equation: Any) -> bool:
    """Returns whether an equation computes derivatives backwards, or computes again what these need."""
    stack = str(equation.source_info.name_stack)
    return "transpose(" in stack or "rematted_computation" in stack


def marked_code(file: SourceFile, places: Sequence[Place]) -> Changes:
    """Returns the changes to functions of a file that put marks at its places; numbers count all places."""
    copy, twins = twin_tree(file)
    numbers = {id(twins[id(place.node)]): number for number, place in enumerate(places) if place.file is file}
    new = compile(instrumented(copy, numbers, _CALL), str(file.path), "exec", dont_inherit=True)
    return code_changes(compiled(file), new, file)


def twin_tree(file: SourceFile) -> tuple[ast.Module, dict[int, ast.AST]]:
    """Returns another tree of a file, and its nodes by the ids of the nodes of the file's own tree."""
    copy = ast.parse(file.data.decode(), str(file.path))
    return copy, {id(old): new for old, new in zip(ast.walk(file.tree), ast.walk(copy), strict=True)}


def mark_names(trees: set[int]) -> dict[str, Callable[[int, Any], Any]]:
    """The global name that marked code calls. The places of trees with arrays in them are added to `trees`."""
    return {_CALL: functools.partial(_mark, trees)}


def _mark(trees: set[int], place: int, value: Any) -> Any:
    if not isinstance(value, Tracer):
        if not jtu.all_leaves([value]) and any(isinstance(leaf, Tracer) for leaf in jtu.tree_leaves(value)):
            trees.add(place)
        return value
    kind = jax.typeof(value)
    if not isinstance(kind, ShapedArray) or not kind.shape or jnp.issubdtype(kind.dtype, jax.dtypes.extended):
        return value
    # Code inside of `shard_map` has its own pieces of arrays, which have no layout.
    if jax.sharding.get_abstract_mesh().manual_axes:
        return value
    with jax.named_scope(f"place:{place}:{kind.ndim}"):
        return jax.lax.with_sharding_constraint(value, PartitionSpec(*[None] * kind.ndim))
