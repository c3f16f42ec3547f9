"""The one loader. A format says which tensors a checkpoint has and how they are read; all else is here.

Everything that a checkpoint says of itself is checked against `like` before any tensor is read.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shardrules.checkpoints.leaves import RequestedLeaf, refuse, requested_leaves, with_values
from shardrules.checkpoints.names import Contents, Name, Names, flat_names, match, stack_shape
from shardrules.checkpoints.tensor_file import FileTensor, file_source
from shardrules.core.axes import AnyMesh
from shardrules.core.errors import ConfigError, shown
from shardrules.placement.destination import resolve_destination
from shardrules.rules.how import How


def load(
    caller: str,
    path: Any,
    like: Any,
    how: How,
    mesh: AnyMesh | None,
    contents_of: Callable[[Sequence[RequestedLeaf]], Contents],
    names: Names = None,
    *,
    surplus: str,
    cast: bool,
    verify: bool = True,
) -> Any:
    """Returns a tree like `like` with what a checkpoint holds, placed."""
    if surplus not in ("error", "skip"):
        raise ConfigError(f"{caller}: surplus must be 'error' or 'skip', got {shown(surplus)}")
    for flag, value in (("cast", cast), ("verify", verify)):
        if not isinstance(value, bool):  # text, such as "no", would count as true
            raise ConfigError(f"{caller}: {flag} must be True or False, got {shown(value)}")
    destination = resolve_destination(like, how, mesh, caller=caller)
    leaves = requested_leaves(like, destination, caller)
    contents = contents_of(leaves)
    matches, findings = match(leaves, contents, names, surplus=surplus, cast=cast)
    if contents.problems:  # what is missing may be in a file that cannot be read
        findings = [finding for finding in findings if finding.code not in ("missing", "surplus")]
    refuse(f"{caller}: {path}", [*contents.problems, *findings])
    return with_values(destination, leaves, contents.read(leaves, matches))


def read_tensors(
    tensor_of: Callable[[str], FileTensor],
) -> Callable[[Sequence[RequestedLeaf], Sequence[Name]], list[Any]]:
    """Returns how the values of leaves are read from tensors in files: arrays part by part, when they are placed."""

    def value(leaf: RequestedLeaf, name: Name) -> Any:
        if name is None:
            return leaf.value
        stack = [tensor_of(layer) for layer in flat_names(name)]
        if leaf.is_array:
            return file_source(stack, stack_shape(name) or (), leaf.device_dtype)
        return leaf.python_value(file_source(stack, (), stack[0].dtype).part(()).item())

    return lambda leaves, names: [value(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
