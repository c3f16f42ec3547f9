"""Which line of the user's Python is behind something: behind an error, an equation, an instruction."""

import contextlib
import itertools
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox
import jax

from shardrules.analysis.program.program import Source
from shardrules.core.errors import ShardRulesError, suggest
from shardrules.core.finding import Finding, plan_error

_UNKNOWN_AXIS = re.compile(r"Resource axis: (\w+) of (.*) is not found in mesh: (\(.*?\))")
_OTHER_MESH = re.compile(r"incompatible devices|should match the mesh passed")
_TWICE = re.compile(r"at most one positional dimension, but (.*) has duplicate entries for `(\w+)`")
_JAX = f"{Path(jax.__file__).parent}{os.sep}"
_LIBRARIES = (
    _JAX,
    f"{Path(equinox.__file__).parent}{os.sep}",
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{Path(os.__file__).parent}{os.sep}",
    "<",  # code that attrs and others make up
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Where code lies that is not the user's."""

_TRACER = str(Path("shardrules", "analysis", "compiling.py"))
"""Where the user's function is called."""


def is_library(file: str) -> bool:
    """Tells whether a file is JAX's, this package's, or was installed otherwise.

    **Arguments:**

    - `file`: its path.

    **Returns:**

    Whether it is.

    ```python
    assert is_library(jax.__file__) and not is_library("model.py")
    ```
    """
    return file.startswith(_LIBRARIES) or any(part in file for part in _INSTALLED)


def users_line(stack: Sequence[Source]) -> str:
    """Returns the innermost line of a stack that is the user's own.

    **Arguments:**

    - `stack`: the innermost first.

    **Returns:**

    `"model.py:12"`, with its path. Where all lines are libraries', the innermost that is not JAX's; empty where there
    is none.

    ```python
    assert users_line([Source(jax.__file__, 7), Source("model.py", 12)]) == "model.py:12"
    ```
    """
    others = [one for one in stack if not one.file.startswith(_JAX) and not one.file.endswith(_TRACER)]
    return str((users_own(stack) or others or [""])[0])


def users_own(stack: Sequence[Source]) -> list[Source]:
    """Returns the lines of a stack that are the user's own, down to where this package calls the user's function.

    **Arguments:**

    - `stack`: the innermost first.

    **Returns:**

    The lines, in the same order.

    ```python
    assert users_own([Source(jax.__file__, 7), Source("model.py", 12)]) == [Source("model.py", 12)]
    ```
    """
    inside = itertools.takewhile(lambda one: not one.file.endswith(_TRACER), stack)
    return [one for one in inside if not is_library(one.file)]


def called_from(stack: Sequence[Source]) -> str:
    """Returns where the function around the innermost line of the user's own was called.

    A constraint often stands in a little function of its own, whose callers are what one looks for.

    **Arguments:**

    - `stack`: the innermost first.

    **Returns:**

    `" (called at model.py:44)"`; empty where that is not known.

    ```python
    stack = [Source("model.py", 12, "held"), Source(jax.__file__, 7, "f"), Source("model.py", 44, "block")]
    assert called_from(stack) == " (called at model.py:44)"
    ```
    """
    own = users_own(stack)
    return f" (called at {short_line(str(own[1]))})" if len(own) > 1 else ""


def short_line(line: str) -> str:
    """Returns a line of code as tables have it: the last two parts of its path.

    **Arguments:**

    - `line`: `"/home/me/project/models/llama.py:12"`.

    **Returns:**

    A text.

    ```python
    assert short_line("/home/me/project/models/llama.py:12") == "models/llama.py:12"
    ```
    """
    return "/".join(line.replace(os.sep, "/").split("/")[-2:])


def equation_line(equation: Any) -> str:
    """Returns the line behind an equation of a traced program.

    **Arguments:**

    - `equation`: one of the `eqns` of a jaxpr.

    **Returns:**

    As `users_line`.
    """
    return users_line(equation_stack(equation))


def equation_stack(equation: Any) -> list[Source]:
    """Returns the lines behind an equation of a traced program.

    **Arguments:**

    - `equation`: one of the `eqns` of a jaxpr.

    **Returns:**

    The innermost first; none where a transformation made it up.
    """
    known = equation.source_info.traceback
    if known is None:
        return []
    return [Source(frame.file_name, frame.line_num, frame.function_name) for frame in known.frames]


@contextlib.contextmanager
def naming_lines() -> Iterator[None]:
    """Makes errors of a trace name the line of the user's code. Those about axes become a `PlanError` with a finding.

    ```python
    try:
        with naming_lines(), jax.set_mesh(sr.create_mesh("data:8")):
            jax.eval_shape(lambda x: jax.lax.with_sharding_constraint(x, P("dat")), jnp.ones(8))
    except sr.errors.PlanError as error:
        assert error.findings[0].code == "unknown-axis"
    ```
    """
    try:
        yield
    except Exception as error:  # whatever the function raises, and goes on being raised
        frames = reversed(traceback.extract_tb(error.__traceback__))
        stack = [Source(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
        source = users_line(users_own(stack))
        finding = _about_axes(str(error), source, called_from(stack))
        if finding is not None and not isinstance(error, ShardRulesError):
            raise plan_error("the function cannot be traced", [finding]) from error
        if source:
            error.add_note(f"while tracing {source}")
        if _OTHER_MESH.search(str(error)) and "pmap" not in str(error):
            error.add_note(
                "The function names a mesh of its own. Give the analyzer that very mesh, ShardingAnalyzer(mesh): then "
                "the target's takes its place"
            )
        if "Unknown backend" in str(error):
            error.add_note(
                "The function calls back to Python (pure_callback, io_callback, eqx.error_if), which "
                "the compiler for GPUs cannot compile where there is no GPU. Leave that out for the audit"
            )
        raise


def _about_axes(text: str, source: str, caller: str) -> Finding | None:
    unknown = _UNKNOWN_AXIS.search(text)
    if unknown is not None:
        name, spec, known = unknown.groups()
        axes = re.findall(r"'([^']*)'", known)
        message = (
            f"{spec} names axis {name!r}, which is not in the mesh ({', '.join(axes)}){suggest(name, axes)}{caller}"
        )
        return Finding("error", "unknown-axis", message, "", "Correct the name", axis=name, source=source)
    if (twice := _TWICE.search(text)) is not None:
        spec, name = twice.groups()
        message = f"{spec} uses axis {name!r} more than once{caller}"
        return Finding("error", "duplicate-axis", message, "", "Split one dimension by it", axis=name, source=source)
    return None
