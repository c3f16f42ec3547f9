"""Errors of traces, with the user's line of Python."""

import contextlib
import re
import traceback
from collections.abc import Iterator

from shardrules.core.errors import ShardRulesError, suggest
from shardrules.core.finding import Finding, plan_error
from shardrules.core.source import Source, called_from, user_frames, user_line

# Messages of JAX's own checks, which it has no error classes for.
_UNKNOWN_AXIS = re.compile(r"Resource axis: (\w+) of (.*) is not found in mesh: (\(.*?\))")
_OTHER_MESH = re.compile(r"incompatible devices|should match the mesh passed")
_DUPLICATE_AXIS = re.compile(r"at most one positional dimension, but (.*) has duplicate entries for `(\w+)`")


def names_other_mesh(error: Exception) -> bool:
    """JAX refuses a function for a mesh that is not the one in force."""
    return isinstance(error, ValueError) and _OTHER_MESH.search(str(error)) is not None and "pmap" not in str(error)


@contextlib.contextmanager
def naming_lines() -> Iterator[None]:
    """Makes errors of a trace name the user's line. Errors about axes become a `PlanError` with a finding."""
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
                "The function names a mesh of its own. Pass that mesh, mesh=: the target's mesh then "
                "replaces it. If its axes are Explicit, pass axis_types=None, too"
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
