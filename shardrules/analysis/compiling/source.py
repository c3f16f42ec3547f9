"""Which line of the user's Python is behind an error, an equation or an instruction."""

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

# Messages of JAX's own checks, which it has no error classes for.
_UNKNOWN_AXIS = re.compile(r"Resource axis: (\w+) of (.*) is not found in mesh: (\(.*?\))")
_OTHER_MESH = re.compile(r"incompatible devices|should match the mesh passed")
_DUPLICATE_AXIS = re.compile(r"at most one positional dimension, but (.*) has duplicate entries for `(\w+)`")

_JAX, _OWN = (f"{folder}{os.sep}" for folder in (Path(jax.__file__).parent, Path(__file__).parents[2]))
_LIBRARIES = (
    _JAX,
    f"{Path(equinox.__file__).parent}{os.sep}",
    _OWN,
    f"{Path(os.__file__).parent}{os.sep}",
    "<",  # code that attrs and others generate
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Folders of code that is not the user's."""

_TRACER = str(Path("shardrules", "analysis", "compiling", "compile.py"))
"""The file that calls the user's function. Frames outside it belong to whoever called the audit."""


def is_library(file: str) -> bool:
    """Whether a file belongs to JAX, to this package, or to any installed package."""
    return file.startswith(_LIBRARIES) or any(part in file for part in _INSTALLED)


def user_line(stack: Sequence[Source]) -> str:
    """Returns the innermost user line of a stack, innermost first: `"model.py:12"`.

    Without any, the innermost line of a library other than JAX and this one, or an empty string.
    """
    library_frames = [frame for frame in stack if not frame.file.startswith((_JAX, _OWN))]
    return str((user_frames(stack) or library_frames or [""])[0])


def user_frames(stack: Sequence[Source]) -> list[Source]:
    """Returns the user's frames of a stack, innermost first, up to where this package calls the user's function."""
    # Outside of the tracer are the frames of whoever called the audit: a script or a test, not the model.
    function_frames = itertools.takewhile(lambda frame: not frame.file.endswith(_TRACER), stack)
    return [frame for frame in function_frames if not is_library(frame.file)]


def called_from(stack: Sequence[Source]) -> str:
    """Returns where the function around the innermost user line was called: `" (called at model.py:44)"`, or `""`.

    Constraints are often in a small helper function, where only the caller says which array is meant.
    """
    frames = user_frames(stack)
    return f" (called at {short_line(str(frames[1]))})" if len(frames) > 1 else ""


def short_line(line: str) -> str:
    """Returns a line of code as tables show it: the last two parts of its path."""
    return "/".join(line.replace(os.sep, "/").split("/")[-2:])


def equation_line(equation: Any) -> str:
    """Returns the user line behind an equation of a traced program."""
    return user_line(equation_stack(equation))


def equation_stack(equation: Any) -> list[Source]:
    """Returns the lines behind an equation, innermost first; none where a transformation generated it."""
    frames = equation.source_info.traceback
    if frames is None:
        return []
    return [Source(frame.file_name, frame.line_num, frame.function_name) for frame in frames.frames]


def names_other_mesh(error: Exception) -> bool:
    """Whether JAX refuses a function for a mesh that is not the one in force."""
    return isinstance(error, ValueError) and _OTHER_MESH.search(str(error)) is not None and "pmap" not in str(error)


@contextlib.contextmanager
def naming_lines() -> Iterator[None]:
    """Makes errors of a trace name the user's line. Errors about axes become a `PlanError` with a finding.

    ```python
    from shardrules.analysis.compiling.source import naming_lines

    try:
        with naming_lines(), jax.set_mesh(sr.create_mesh("data:8")):
            jax.eval_shape(lambda x: jax.lax.with_sharding_constraint(x, P("dat")), jnp.ones(8))
    except sr.errors.PlanError as error:
        assert error.findings[0].code == "unknown-axis"
    ```
    """
    try:
        yield
    except Exception as error:  # the user's function may raise anything, and all of it is raised again
        frames = reversed(traceback.extract_tb(error.__traceback__))
        stack = [Source(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
        source = user_line(user_frames(stack))
        finding = _axis_finding(str(error), source, called_from(stack))
        if finding is not None and not isinstance(error, ShardRulesError):
            raise plan_error("the function cannot be traced", [finding]) from error
        if source:
            error.add_note(f"while tracing {source}")
        # Without a mesh on devices the function is traced on the target's, and its own mesh is then a different one.
        if names_other_mesh(error):
            error.add_note(
                "The function names a mesh of its own. Pass that mesh to the analyzer, ShardingAnalyzer(mesh): the "
                "target's mesh then replaces it. If its axes are Explicit, pass axis_types=None, too"
            )
        # To lower a callback JAX looks up the platform's backend in this process, and without a GPU there is none.
        if "Unknown backend" in str(error):
            error.add_note(
                "The function calls back to Python (pure_callback, io_callback, eqx.error_if), which "
                "the compiler for GPUs cannot compile where there is no GPU. Leave that out for the audit"
            )
        raise


def _axis_finding(text: str, source: str, caller: str) -> Finding | None:
    """The finding for an error of JAX about a mesh axis; `None` for any other error."""
    unknown = _UNKNOWN_AXIS.search(text)
    if unknown is not None:
        name, spec, mesh = unknown.groups()
        axes = re.findall(r"'([^']*)'", mesh)
        message = f"unknown axis {name!r} in {spec}{suggest(name, axes)}; the mesh has ({', '.join(axes)}){caller}"
        return Finding("error", "unknown-axis", message, "", "Correct the name", axis=name, source=source)
    duplicate = _DUPLICATE_AXIS.search(text)
    if duplicate is not None:
        spec, name = duplicate.groups()
        message = f"{spec} uses axis {name!r} more than once{caller}"
        return Finding("error", "duplicate-axis", message, "", "Split one dimension by it", axis=name, source=source)
    return None
