"""Checkpoints as models: their arrays by name, as trees of shapes. No array is read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardrules.checkpoints.headers import (
    DTYPES,
    INDEX,
    SafetensorsIndex,
    is_pointer,
    read_headers,
    read_index,
)
from shardrules.checkpoints.names import StoredArray
from shardrules.checkpoints.orbax import read_orbax_metadata
from shardrules.cli.errors import UsageError, one_line
from shardrules.cli.files import read_text
from shardrules.core.errors import CheckpointError
from shardrules.core.finding import Finding
from shardrules.core.storage.records import read_json
from shardrules.presets.huggingface.shapes import checkpoint_shapes, head_dim_of


def load_orbax_shapes(path: Path) -> Any:
    """Returns the arrays that an orbax checkpoint describes."""
    try:
        stored = read_orbax_metadata(path)
    except CheckpointError as error:
        raise UsageError(one_line(error)) from error
    # Strings take no memory.
    return _nested({name: array for name, array in stored.items() if array.dtype is not None}, path)


def load_safetensors_shapes(path: Path) -> tuple[Any, int | None]:
    """Returns the tensors in the headers of a file, an index or a folder, and the size of an attention head, if known.

    The data after a header is not read, and may be missing. Where an index has no file beside it, shapes follow from
    the model's `config.json`.
    """
    config_file = (path if path.is_dir() else path.parent) / "config.json"
    config = _read_config(config_file) if config_file.is_file() else None
    index = _lonely_index(path)
    if index is not None:
        stored = _configured(index, config_file, config)
    else:
        headers = read_headers(path, whole=False)
        if headers.problems:
            raise UsageError(_first_problem(headers.problems))
        stored = headers.stored
    unsupported = {array.dtype_name: name for name, array in stored.items() if array.dtype is None}
    if unsupported:
        listed = ", ".join(f"{dtype} ({name})" for dtype, name in unsupported.items())
        raise UsageError(f"{path} has tensors of dtypes that JAX arrays cannot have: {listed}; convert them")
    paths = {name: name.replace(".", "/") for name in stored}
    # One name has a dot where another has a slash.
    clash = len(dict.fromkeys(paths.values())) < len(paths)
    arrays = {name if clash else paths[name]: array for name, array in stored.items()}
    return _nested(arrays, path), head_dim_of(config)


def _lonely_index(path: Path) -> SafetensorsIndex | None:
    """Returns the index that is meant, if none of the files that it names is there; pointers are not the files."""
    if path.is_dir():
        indices = [file for file in path.iterdir() if file.name.endswith(INDEX)]
        if len(indices) != 1:
            return None
        path = indices[0]
    if not path.name.endswith(INDEX) or not path.is_file():
        return None
    index = read_index(path)
    try:
        is_lonely = not any(file.is_file() and not is_pointer(file) for file in dict.fromkeys(index.files.values()))
    except OSError:
        return None  # which reading the headers reports
    return index if is_lonely and not index.problems else None


def _read_config(file: Path) -> Any:
    try:
        return read_json(read_text(file))
    except ValueError as error:
        raise UsageError(f"{file}: it is not JSON: {error!s:.80}; copy or download it again") from error


def _configured(index: SafetensorsIndex, config_file: Path, config: Any) -> Mapping[str, StoredArray]:
    """Returns the tensors that an index names, with the shapes that follow from a configuration."""
    name, file = index.path.name, next(iter(index.files.values()))
    if config is None:
        raise UsageError(
            f"{file}: the index {name} names this file, and it does not exist. An index has no shapes: download the "
            "files (their headers are enough), or the model's config.json, and put them beside it"
        )
    try:
        shapes = checkpoint_shapes(config, index.files, index.total_bytes)
    except CheckpointError as error:
        raise UsageError(
            f"{config_file}: {one_line(error)}. The files that {name} names have the shapes: download them (their "
            "headers are enough)"
        ) from error
    return {name: StoredArray(shape, np.dtype(DTYPES[dtype]), dtype) for name, (dtype, shape) in shapes.items()}


def _first_problem(problems: Sequence[Finding]) -> str:
    first, *rest = problems
    more = f" (and {len(rest)} more)" if rest else ""
    remedy = f"; {first.remedy}" if first.remedy else ""
    return one_line(ValueError(f"{first.path}: {first.message}{remedy}{more}"))


def _nested(stored: Mapping[str, StoredArray], path: Path) -> Any:
    """A tree of dictionaries and, where names are 0, 1, 2 and so on, lists, so that equal layers are decided once."""
    if not stored:
        raise UsageError(f"{path} has no arrays")
    flat = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in stored.items()}
    root: dict[str, Any] = {}
    for name, struct in flat.items():
        *modules, last = name.split("/")
        if len(modules) > 64:  # published checkpoints have 12 levels at most, and Python's recursion has a limit
            return flat
        node = root
        for module in modules:
            node = node.setdefault(module, {})
            # An array and a module share a name, which no tree can express.
            if not isinstance(node, dict):
                return flat
        if last in node:
            return flat
        node[last] = struct
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    # As many keys as there are indices: then these are all of them.
    if all(str(index) in node for index in range(len(node))):
        return [_with_lists(node[str(index)]) for index in range(len(node))]
    return {name: _with_lists(child) for name, child in node.items()}
