"""`load_safetensors`: safetensors files, one or many, straight into shardings.

A file is eight bytes that hold the length of its header, the header (JSON: a dtype, a shape and two offsets for each
tensor), and the tensors, one after the other without gaps. Large models come as several files and an index that says
which file holds which tensor.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, final

import attrs
import jax.numpy as jnp
import numpy as np

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import suggest
from shardrules.core.finding import Finding
from shardrules.placement.checkpoints.names import Names, StoredArray, match, refuse
from shardrules.placement.checkpoints.requested import python_value, requested_leaves, with_values
from shardrules.placement.checkpoints.tensor_file import FileTensor
from shardrules.placement.destination import resolve_destination
from shardrules.rules.how import How

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
}
_INDEX = ".safetensors.index.json"


def load_safetensors(
    path: Any,
    like: Any,
    how: How,
    mesh: AnyMesh | None = None,
    *,
    names: Names = None,
    surplus: Literal["error", "skip"] = "error",
    cast: bool = False,
) -> Any:
    """Loads safetensors into a tree of sharded arrays. Each process reads only what its devices hold.

    No device gets more than its shards, and the host holds little more than one of them at a time. All headers are
    checked before anything is read.

    **Arguments:**

    - `path`: a `.safetensors` file, a `.safetensors.index.json`, or a folder with an index or with such files.
    - `like`: a tree of arrays or `ShapeDtypeStruct`s with the expected shapes and dtypes, for example a module from
        `eqx.filter_eval_shape`. A Python number takes the one that the file has under its name, if there is one. Other
        leaves stay as they are.
    - `how`, `mesh`: where the arrays go, as for `filter_shard`.
    - `names`: from a leaf's path (`layers/0/mlp/up/weight`) to the name of its tensor: a function, or a table for the
        paths whose name is not the default. The default name is the path with dots, `layers.0.mlp.up.weight`. `None`
        for a path: the file lacks it, and the array in `like` is placed.
    - `surplus`: whether tensors that no leaf takes are an `"error"`, or to `"skip"`.
    - `cast`: whether a tensor of another dtype than the leaf's is converted, part by part on the host, or is an error.
        Integers may become floats, but not the other way round.

    **Returns:**

    A tree like `like` with a sharded `jax.Array` at every array.

    **Raises:**

    `CheckpointError`, listing everything that is missing, surplus, of another shape or dtype, truncated or unreadable;
    `PlanError`, `TreeError` and `NoMeshError` as `filter_shard`.

    ```python
    import safetensors.numpy

    safetensors.numpy.save_file({"model.up.weight": np.ones((16, 8), np.float32)}, "model.safetensors")
    like = {"up": {"weight": jax.ShapeDtypeStruct((16, 8), jnp.float32)}}
    params = sr.load_safetensors(
        "model.safetensors",
        like,
        sr.DimShardingRule("model", 0),
        sr.create_mesh("data:4,model:2"),
        names=lambda path: "model." + path.replace("/", "."),
    )
    assert params["up"]["weight"].sharding.spec == P("model", None)
    ```
    """
    destination = resolve_destination(like, how, mesh, caller="load_safetensors")
    leaves = requested_leaves(like, destination, "load_safetensors")
    headers = read_headers(Path(path))
    matches, findings = match(
        leaves, headers.stored, names, lambda path: path.replace("/", "."), surplus=surplus, cast=cast
    )
    if headers.problems:  # what is missing may be in a file that cannot be read
        findings = [finding for finding in findings if finding.code not in ("missing", "surplus")]
    refuse(f"load_safetensors: {path}", [*headers.problems, *findings])
    values = [
        leaf.value
        if name is None
        else headers.tensors[name].source(leaf.device_dtype)
        if leaf.is_array
        else python_value(headers.tensors[name].source(headers.tensors[name].dtype), leaf)
        for leaf, name in zip(leaves, matches, strict=True)
    ]
    return with_values(destination, leaves, values)


@final
@attrs.frozen(eq=False)
class Safetensors:
    """What the headers of one or more files say."""

    stored: dict[str, StoredArray]
    """Each tensor by name."""
    tensors: dict[str, FileTensor]
    """Where each tensor is, for dtypes that arrays can have."""
    problems: list[Finding]


@final
@attrs.define(eq=False)
class _Problems:
    """Findings about files."""

    findings: list[Finding] = attrs.field(factory=list)

    def add(self, path: Path, message: str, remedy: str = "") -> None:
        self.findings.append(Finding("error", "file", message, str(path), remedy))


def read_headers(path: Path, *, whole: bool = True) -> Safetensors:
    """Reads the headers of a file, an index, or a folder with an index or with files, and nothing else.

    With `whole=False` the tensors themselves may be missing: planning takes only the headers.
    """
    stored: dict[str, StoredArray] = {}
    tensors: dict[str, FileTensor] = {}
    problems = _Problems()
    files, index = _files(path, problems)
    for file in files:
        for name, (array, tensor) in _read_header(file, problems, whole).items():
            if name in index and index[name] != file:
                continue  # the index says which of several files counts
            if name in stored:
                problems.add(file, f"{name!r} is in another file too", "write an index that says which one counts")
            stored[name] = array
            if tensor is not None:
                tensors[name] = tensor
    unreadable = dict.fromkeys(finding.path for finding in problems.findings)
    for name, file in index.items():
        if name not in stored and str(file) not in unreadable:
            hint = suggest(name, stored)
            problems.add(file, f"the index says that it has {name!r}, and it does not{hint}", "write the index again")
    return Safetensors(stored, tensors, problems.findings)


def _files(path: Path, problems: _Problems) -> tuple[list[Path], dict[str, Path]]:
    """Returns the files to read, and for each tensor in an index its file."""
    if path.is_dir():
        inside = sorted(path.iterdir())
        indices = [file for file in inside if file.name.endswith(_INDEX)]
        files = [file for file in inside if file.suffix == ".safetensors"]
        if len(indices) > 1:
            problems.add(
                path, f"it has several indices: {', '.join(file.name for file in indices)}", "pass one of them"
            )
            return [], {}
        if not indices:
            if not files:
                problems.add(path, "this folder has no .safetensors file", "pass the folder or the file that was saved")
            return files, {}
        path = indices[0]
    if not path.is_file():
        problems.add(path, "no such file or folder")
        return [], {}
    if path.suffix != ".json":
        return [path], {}
    try:
        table = json.loads(path.read_text())["weight_map"]
        paths = {file: path.parent / file for file in dict.fromkeys(table.values())}
        index = {name: paths[file] for name, file in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"it is not an index of safetensors: {error!r:.120}"
        problems.add(path, message, 'an index holds {"weight_map": {name: file}}')
        return [], {}
    files = list(paths.values())
    for file in files:
        if not file.is_file():
            message = f"the index {path.name} names this file, and it does not exist"
            problems.add(file, message, "download it, or write the index again")
    return [file for file in files if file.is_file()], index


def _read_header(path: Path, problems: _Problems, whole: bool) -> dict[str, tuple[StoredArray, FileTensor | None]]:
    remedy = "copy or download the file again"
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin = 8 + length
        if size < 8 or begin > size:
            problems.add(path, f"it has {size} bytes, and its header alone would end at byte {begin}", remedy)
            return {}
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique_keys)
        entries = {name: _entry(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.add(path, f"its header cannot be read: {error!r:.160}", remedy)
        return {}
    # A damaged file may still have a header that can be read: offsets must fill the file exactly.
    for problem in _offset_problems(entries, size - begin if whole else None):
        problems.add(path, problem, remedy)
    arrays: dict[str, tuple[StoredArray, FileTensor | None]] = {}
    for name, (dtype_name, shape, start, end) in entries.items():
        dtype = np.dtype(_DTYPES[dtype_name]) if dtype_name in _DTYPES else None
        array = StoredArray(shape, dtype, dtype_name)
        tensor = None if dtype is None else FileTensor(path, begin + start, shape, dtype)
        if tensor is not None and tensor.nbytes != end - start:
            problems.add(path, f"{name!r}, {array}, takes {tensor.nbytes} bytes, not the {end - start} it has", remedy)
        arrays[name] = array, tensor
    return arrays


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} is in it twice")
        result[name] = value
    return result


def _entry(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Returns the dtype, the shape and the offsets of a tensor from its JSON."""
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str):
        raise TypeError(f"{entry['dtype']!r} is not a dtype")
    numbers = [*shape, start, end]
    if not all(isinstance(size, int) and size >= 0 for size in numbers) or end < start:
        raise ValueError(f"invalid shape {shape} or offsets {[start, end]}")
    return entry["dtype"], tuple(shape), start, end


def _offset_problems(entries: Mapping[str, tuple[str, tuple[int, ...], int, int]], size: int | None) -> Iterator[str]:
    """Yields what is wrong with offsets: tensors must fill the bytes after the header without gaps."""
    previous_end, previous = 0, ""
    for start, end, name in sorted((start, end, name) for name, (_, _, start, end) in entries.items()):
        if start < previous_end:
            yield f"{name!r} begins at byte {start} of the data, before {previous!r} ends at byte {previous_end}"
        elif start > previous_end:
            yield f"bytes {previous_end} to {start} of the data, before {name!r}, belong to no tensor"
        previous_end, previous = max(previous_end, end), name
    if size is None:
        return
    if previous_end > size:
        yield f"it ends at byte {size} of the data, and {previous!r} would end at byte {previous_end}"
    elif previous_end < size:
        yield f"bytes {previous_end} to {size} of the data, after the last tensor, belong to no tensor"
