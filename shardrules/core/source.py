"""The user's lines of Python behind frames and equations."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import attrs
import equinox
import jax

_JAX, _OWN = (f"{folder}{os.sep}" for folder in (Path(jax.__file__).parent, Path(__file__).parents[1]))
_LIBRARIES = (
    _JAX,
    f"{Path(equinox.__file__).parent}{os.sep}",
    _OWN,
    f"{Path(os.__file__).parent}{os.sep}",
    "<",  # code that attrs and others generate
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Folders of code that is not the user's."""

_TRACER = str(Path("shardrules", "programs", "compiling", "compile.py"))
"""The file that calls the user's function. Frames outside it belong to whoever called the audit."""


@final
@attrs.frozen
class Source:
    """A line of Python, counted from 1, in a function whose name may be empty."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def is_library(file: str) -> bool:
    """Returns whether a file belongs to JAX, to this package, or to any installed package."""
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
