"""`load_safetensors`: safetensors files, one or many, straight into shardings.

A file is eight bytes that hold the length of its header, the header (JSON: a dtype, a shape and two offsets for each
tensor), and the tensors, one after the other without holes. Large models come as several files and an index that says
which file holds which tensor.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, final

import attrs
import jax.numpy as jnp
import numpy as np

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import suggest
from shardrules.core.finding import Finding
from shardrules.placement.checkpoints.names import Names, StoredArray, match, refuse
from shardrules.placement.checkpoints.requested import plain_value, requested_leaves, with_values
from shardrules.placement.checkpoints.tensor_file import FileTensor
from shardrules.placement.destination import How, resolve_destination

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

    No device sees more than its shards, and the host holds little more than one of them at a time. All headers are
    checked before anything is read.

    **Arguments:**

    - `path`: a `.safetensors` file, a `.safetensors.index.json`, or a folder with an index or with such files.
    - `like`: a tree of arrays or `ShapeDtypeStruct`s that says what is wanted, a module from `eqx.filter_eval_shape`
        say. A Python number takes the one that the file holds under its name, if there is one. What else is no array
        stays as it is.
    - `how`, `mesh`: where the arrays are to be, as `filter_shard` takes them.
    - `names`: from a leaf's path (`layers/0/mlp/up/weight`) to the name of its tensor: a function, or a table for the
        paths whose name is not the default. The default name is the path with dots, `layers.0.mlp.up.weight`. `None`
        for a path: the file does not have it, and the array that stands in `like` is placed.
    - `surplus`: what tensors are that no leaf takes: an `"error"`, or nothing to talk about, `"skip"`.
    - `cast`: whether a tensor of another dtype than the leaf's is converted, part by part on the host, or is an error.
        Whole numbers may become fractions, but not the other way round.

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
    found = resolve_destination(like, how, mesh, caller="load_safetensors")
    wants = requested_leaves(like, found, "load_safetensors")
    checkpoint = read_headers(Path(path))
    takes, wrong = match(
        wants, checkpoint.stored, names, lambda each: each.replace("/", "."), surplus=surplus, cast=cast
    )
    if checkpoint.problems:  # what is missing may be in what cannot be read
        wrong = [one for one in wrong if one.code not in ("missing", "surplus")]
    refuse(f"load_safetensors: {path}", [*checkpoint.problems, *wrong])
    values = [
        want.value
        if name is None
        else checkpoint.tensors[name].source(want.device_dtype)
        if want.is_array
        else plain_value(checkpoint.tensors[name].source(checkpoint.tensors[name].dtype), want)
        for want, name in zip(wants, takes, strict=True)
    ]
    return with_values(found, wants, values)


@final
@attrs.frozen(eq=False)
class Safetensors:
    """What the headers of one or more files say.

    **Arguments:**

    - `stored`: what each tensor is, by name.
    - `tensors`: where each tensor is, for those of a dtype that arrays can have.
    - `problems`: what is wrong with the files.
    """

    stored: dict[str, StoredArray]
    tensors: dict[str, FileTensor]
    problems: list[Finding]


def read_headers(path: Path, *, whole: bool = True) -> Safetensors:
    """Reads the headers, and nothing else.

    **Arguments:**

    - `path`: a file, an index, or a folder with an index or with files.
    - `whole`: whether what headers speak of has to be there. Who only plans needs no more than the headers.

    **Returns:**

    What they say.
    """
    held: dict[str, StoredArray] = {}
    tensors: dict[str, FileTensor] = {}
    wrong: list[Finding] = []

    def say(where: Path, what: str, remedy: str = "") -> None:
        wrong.append(Finding("error", "file", what, str(where), remedy))

    files, index = _files(path, say)
    for file in files:
        for name, (one, tensor) in _read_header(file, say, whole).items():
            if name in index and index[name] != file:
                continue
            if name in held:
                say(file, f"{name!r} stands in another file too", "write an index that says which one is meant")
            held[name] = one
            if tensor is not None:
                tensors[name] = tensor
    broken = dict.fromkeys(found.path for found in wrong)
    for name, file in index.items():
        if name not in held and str(file) not in broken:
            say(file, f"the index says that it holds {name!r}, and it does not{suggest(name, held)}", "index it again")
    return Safetensors(held, tensors, wrong)


def _files(path: Path, say: Callable[..., None]) -> tuple[list[Path], dict[str, Path]]:
    """The files to read, and what an index says: which tensor each holds."""
    if path.is_dir():
        inside = sorted(path.iterdir())
        indices = [file for file in inside if file.name.endswith(_INDEX)]
        files = [file for file in inside if file.suffix == ".safetensors"]
        if len(indices) > 1:
            say(path, f"it holds several indices: {', '.join(file.name for file in indices)}", "give one of them")
            return [], {}
        if not indices:
            if not files:
                say(path, "there is no .safetensors file in this folder", "give the folder or the file that was saved")
            return files, {}
        path = indices[0]
    if not path.is_file():
        say(path, "there is no such file or folder")
        return [], {}
    if path.suffix != ".json":
        return [path], {}
    try:
        table = json.loads(path.read_text())["weight_map"]
        paths = {file: path.parent / file for file in dict.fromkeys(table.values())}
        index = {name: paths[file] for name, file in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        say(path, f"it is no index of safetensors: {error!r:.120}", 'an index holds {"weight_map": {name: file}}')
        return [], {}
    files = list(paths.values())
    for file in files:
        if not file.is_file():
            say(file, f"the index {path.name} names it, and it is not there", "load the missing file, or index again")
    return [file for file in files if file.is_file()], index


def _read_header(path: Path, say: Callable[..., None], whole: bool) -> dict[str, tuple[StoredArray, FileTensor | None]]:
    again = "copy or load the file again"
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin = 8 + length
        if size < 8 or begin > size:
            say(path, f"it has {size} bytes, and its header alone would end at byte {begin}", again)
            return {}
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_twins)
        entries = {name: _entry(one) for name, one in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        say(path, f"its header cannot be read: {error!r:.160}", again)
        return {}
    for problem in _misfits(entries, size - begin if whole else None):
        say(path, problem, again)
    result: dict[str, tuple[StoredArray, FileTensor | None]] = {}
    for name, (said, shape, first, after) in entries.items():
        dtype = np.dtype(_DTYPES[said]) if said in _DTYPES else None
        tensor = None if dtype is None else FileTensor(path, begin + first, shape, dtype)
        if tensor is not None and tensor.nbytes != after - first:
            say(
                path,
                f"{name!r}, {said}{list(shape)}, takes {tensor.nbytes} bytes, not the {after - first} it has",
                again,
            )
        result[name] = StoredArray(shape, dtype, said), tensor
    return result


def _without_twins(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} stands in it twice")
        result[name] = value
    return result


def _entry(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    shape, (first, after) = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str):
        raise TypeError(f"{entry['dtype']!r} is no dtype")
    numbers = [*shape, first, after]
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or after < first:
        raise ValueError(f"shape {shape} and offsets {[first, after]} are no shape and no offsets")
    return entry["dtype"], tuple(shape), first, after


def _misfits(entries: Mapping[str, tuple[str, tuple[int, ...], int, int]], size: int | None) -> Iterator[str]:
    """What is wrong with where tensors are: they are to fill the bytes after the header, without holes."""
    end, last = 0, ""
    for first, after, name in sorted((first, after, name) for name, (_, _, first, after) in entries.items()):
        if first < end:
            yield f"{name!r} begins at byte {first} of the data, before {last!r} ends at byte {end}"
        elif first > end:
            yield f"bytes {end} to {first} of the data, before {name!r}, belong to no tensor"
        end, last = max(end, after), name
    if size is None:
        return
    if end > size:
        yield f"it ends at byte {size} of the data, and {last!r} would end at byte {end}"
    elif end < size:
        yield f"bytes {end} to {size} of the data, after the last tensor, belong to no tensor"
