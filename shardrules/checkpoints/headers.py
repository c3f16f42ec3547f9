"""The headers of safetensors files, and the index of several, with all that is wrong with them.

A file is eight bytes that hold the length of its header, the header (JSON: a dtype, a shape and two offsets for each
tensor), and the tensors, one after the other without gaps. Large models come as several files and an index that says
which file holds which tensor. Files come from strangers, so nothing in them is trusted: sizes are bounded before
anything is read, and an index names files in its own folder.
"""

import collections
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, TypeAlias, final

import attrs
import jax.numpy as jnp
import numpy as np

from shardrules.checkpoints.checksums import DAMAGED, KEY, MOST_TEXT_BYTES, TensorSums, is_text, read_text
from shardrules.checkpoints.leaves import is_unicode
from shardrules.checkpoints.names import StoredArray
from shardrules.checkpoints.tensor_file import FileTensor
from shardrules.core.errors import suggest
from shardrules.core.finding import Finding
from shardrules.core.storage.files import open_regular
from shardrules.core.storage.records import read_json
from shardrules.core.text import bytes_text

DTYPES: dict[str, Any] = {
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
    "F8_E4M3FNUZ": jnp.float8_e4m3fnuz,
    "F8_E5M2FNUZ": jnp.float8_e5m2fnuz,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
}
"""The dtypes of files that arrays can have."""

INDEX = ".safetensors.index.json"
"""The end of the name of an index."""

_METADATA = "__metadata__"
"""The name of strings in a header, beside those of the tensors."""

_MOST_DIMS = 32
"""The most that numpy arrays have."""

_MOST_SIZE = 2**63
"""The sizes and offsets of files are below it."""

_SUGGESTIONS = 8
"""For how many files a similar name is suggested: each looks at all names."""

_POINTER = b"version "
_HTML = ("it is an HTML page", "download the file itself")

_FORMATS = {
    _POINTER: ("it is a Git LFS pointer, not the file that it stands for", "fetch the file: git lfs pull"),
    b"PK\x03\x04": (
        "it is a zip archive, as torch.save writes",
        "convert it with save_file of the package safetensors",
    ),
    b"GGUF": ("it is a GGUF file", "use the safetensors that it was converted from"),
    b"<!": _HTML,
    b"<htm": _HTML,
}
"""Other formats that are often named as safetensors, by their first bytes, with the remedy."""

_COPY = "copy or download the file again"


@final
@attrs.frozen(eq=False)
class Safetensors:
    """The contents of one or more files, as their headers describe them."""

    stored: Mapping[str, StoredArray]
    """Each tensor by name."""
    places: Mapping[str, tuple[Path, int, TensorSums | None]]
    """The file of each tensor, its first byte, and its checksums if it has any."""
    problems: Sequence[Finding]

    def tensor(self, name: str) -> FileTensor:
        """Returns where a tensor is, which has a dtype that arrays can have."""
        (path, start, sums), stored = self.places[name], self.stored[name]
        assert stored.dtype is not None
        return FileTensor(path, start, stored.shape, stored.dtype, name=repr(name), sums=sums)


@final
@attrs.frozen(eq=False)
class SafetensorsIndex:
    path: Path
    files: Mapping[str, Path]
    """The file of each tensor."""
    total_bytes: int | None
    """The bytes of all tensors, if it says so."""
    problems: Sequence[Finding]


@final
class _BrokenError(Exception):
    """Text that cannot be what it should be; the message says why."""


def _problem(path: Path, message: str, remedy: str = "") -> Finding:
    return Finding("error", "file", message, str(path), remedy)


def read_headers(path: Path, *, whole: bool = True, verify: bool = True) -> Safetensors:
    """Reads the headers of a file, an index, or a folder with an index or with files, and nothing else.

    With `whole=False` the tensors themselves may be missing: planning takes only the headers. With `verify=False`
    checksums are ignored.
    """
    stored: dict[str, StoredArray] = {}
    places: dict[str, tuple[Path, int, TensorSums | None]] = {}
    files, index, problems = _files(path, verify)
    file_of = index.files if index else {}
    for file in files:
        header = _read_header(file, index, whole, verify)
        problems += header.problems
        arrays = header.stored
        if index:  # it says which of several files counts
            arrays = {name: array for name, array in arrays.items() if file_of.get(name, file) == file}
        if not stored.keys().isdisjoint(arrays):
            remedy = "write an index that says which one counts"
            twice = [name for name in arrays if name in stored]
            problems += [_problem(file, f"{name!r} is in another file too", remedy) for name in twice]
        stored |= arrays
        places |= {name: header.places[name] for name in arrays}
    return Safetensors(stored, places, [*problems, *_missing(file_of, stored, problems)])


def _missing(
    index: Mapping[str, Path], stored: Mapping[str, StoredArray], problems: list[Finding]
) -> Iterator[Finding]:
    """Yields a finding for each file that lacks what the index says it has."""
    # A file that cannot be read has its own finding, and not one more for its tensors.
    unreadable = dict.fromkeys(finding.path for finding in problems)
    missing: dict[Path, list[str]] = {}
    for name, file in index.items():
        if name not in stored and str(file) not in unreadable:
            missing.setdefault(file, []).append(name)
    for count, (file, names) in enumerate(missing.items()):
        hint = suggest(names[0], stored) if count < _SUGGESTIONS else ""
        more = f", nor {len(names) - 1} more" if len(names) > 1 else ""
        yield _problem(
            file, f"the index says that it has {names[0]!r}, and it does not{hint}{more}", "write the index again"
        )


def _files(path: Path, verify: bool) -> tuple[list[Path], SafetensorsIndex | None, list[Finding]]:
    """Returns the files to read, the index if there is one, and what is wrong."""
    try:
        is_folder = path.is_dir()
        inside = sorted(path.iterdir()) if is_folder else [path]
    except OSError as error:
        return [], None, [_problem(path, f"cannot be read: {error.strerror or error}")]
    # In a folder only the usual name makes an index; a file that was passed itself may have any.
    indices = [file for file in inside if (file.name.endswith(INDEX) if is_folder else file.suffix == ".json")]
    if len(indices) > 1:
        listed = ", ".join(file.name for file in indices)
        return [], None, [_problem(path, f"it has several indices: {listed}", "pass one of them")]
    if indices:
        index = read_index(indices[0], verify=verify)
        return list(dict.fromkeys(index.files.values())), index, [*index.problems]
    files = [file for file in inside if file.suffix == ".safetensors" or not is_folder]
    remedy = "pass the folder or the file that was saved"
    return files, None, [] if files else [_problem(path, "this folder has no .safetensors file", remedy)]


def read_index(path: Path, *, verify: bool = True) -> SafetensorsIndex:
    """Reads an index; the files that it names may be missing."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_TEXT_BYTES:
                raise _BrokenError(f"it has {bytes_text(size)}, and an index at most {bytes_text(MOST_TEXT_BYTES)}")
            text = file.read().removeprefix(b"\xef\xbb\xbf")  # a mark of its encoding
        table = _table(text, _unique_keys)
        weight_map = table.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _BrokenError("it has no weight_map, or an empty one")
        _check_names(weight_map)
        paths: dict[str, Path] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or file_name not in paths:
                _check_file(name, file_name)
                paths[file_name] = path.parent / file_name
    except (_BrokenError, OSError) as error:
        remedy = 'an index holds {"weight_map": {name: file}}; copy or download it again'
        why = str(error) if isinstance(error, _BrokenError) else error.strerror or error
        return SafetensorsIndex(path, {}, None, [_problem(path, f"it is not an index of safetensors: {why}", remedy)])
    metadata = table.get("metadata")
    # A flipped bit may have changed the name of the metadata, too.
    others = [value for value in table.values() if value is not metadata and isinstance(value, dict) and KEY in value]
    if verify and (others or _sums(metadata, {}, text) is None):
        return SafetensorsIndex(path, {}, None, [_problem(path, "it differs from its checksum", DAMAGED)])
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some indices have it as a float.
    is_size = isinstance(total, int | float) and not isinstance(total, bool) and 0 < total < 2**63
    total_bytes = int(total) if is_size else None  # pyright: ignore[reportArgumentType]
    return SafetensorsIndex(path, {name: paths[file] for name, file in weight_map.items()}, total_bytes, [])


def _check_file(name: str, file: Any) -> None:
    """Refuses files that are not in the folder of the index, or below it."""
    if not isinstance(file, str) or not file:
        raise _BrokenError(f"its weight_map has {file!r:.60} for {name!r:.60}, which is not the name of a file")
    windows = PureWindowsPath(file)  # also reads forward slashes
    if windows.is_absolute() or windows.drive or windows.root or ".." in windows.parts or Path(file).is_absolute():
        raise _BrokenError(f"its weight_map has {file!r:.80} for {name!r:.60}, which is not in the folder of the index")
    if not file.endswith(".safetensors"):
        raise _BrokenError(f"its weight_map has {file!r:.80} for {name!r:.60}, which is not a .safetensors file")


def is_pointer(path: Path) -> bool:
    """Returns whether a file is what Git LFS leaves for one that was not fetched."""
    with open_regular(path) as file:
        return file.read(8) == _POINTER


def _read_header(path: Path, index: SafetensorsIndex | None, whole: bool, verify: bool) -> Safetensors:
    """Returns the contents of one file."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            begin = 8 + length
            # The length is a stranger's number: nothing more is read before it is compared with the size of the file.
            if begin > size or length > MOST_TEXT_BYTES:
                return Safetensors({}, {}, [_problem(path, *_length_problem(start, length, size))])
            text = file.read(length)
        table = _table(text, _entry_or_table)
        entries = {name: _entry(name, entry) for name, entry in table.items() if name != _METADATA}
        _check_names(entries)
    except _BrokenError as error:
        return Safetensors({}, {}, [_problem(path, f"its header cannot be read: {error}", _COPY)])
    except OSError as error:
        message, remedy = f"cannot be read: {error.strerror or error}", "pass the file that was saved"
        if index is not None:
            message, remedy = (
                f"the index {index.path.name} names this file, and it {message}",
                "download it, or write the index again",
            )
        return Safetensors({}, {}, [_problem(path, message, remedy)])
    # A damaged file may still have a header that can be read: offsets must fill the file exactly.
    messages = list(_offset_problems(entries, size - begin if whole else None))
    sums = _sums(table.get(_METADATA), entries, start + text) if verify and not messages else {}
    if sums is None:
        return Safetensors({}, {}, [_problem(path, "its header differs from its checksum", DAMAGED)])
    stored: dict[str, StoredArray] = {}
    # Layers repeat, so that headers of a million tensors have few kinds of them.
    kinds: dict[tuple[str, tuple[int, ...]], tuple[StoredArray, int | None]] = {}
    for name, (dtype_name, shape, first, end) in entries.items():
        kind = kinds.get((dtype_name, shape))
        if kind is None:
            dtype = np.dtype(DTYPES[dtype_name]) if dtype_name in DTYPES else None
            nbytes = None if dtype is None else math.prod(shape) * dtype.itemsize
            kind = kinds[dtype_name, shape] = StoredArray(shape, dtype, dtype_name), nbytes
        array, nbytes = kind
        stored[name] = array
        if nbytes is not None and nbytes != end - first:
            messages.append(f"{name!r}, {array}, takes {nbytes} bytes, not the {end - first} it has")
    places = {name: (path, begin + entry[2], sums.get(name)) for name, entry in entries.items()}
    return Safetensors(stored, places, [_problem(path, message, _COPY) for message in messages])


def _length_problem(start: bytes, length: int, size: int) -> tuple[str, str]:
    """Returns what is wrong with a file that begins so, and the remedy."""
    # As lengths, these are all longer than the files that begin so, or than the limit.
    for magic, texts in _FORMATS.items():
        if start.startswith(magic):
            return texts
    if 8 + length > size:
        return f"it has {size} bytes, and its header alone would end at byte {8 + length}", _COPY
    message = f"its header would take {bytes_text(length)}, and the format allows {MOST_TEXT_BYTES:,} bytes"
    return message, f"it is damaged, or not a safetensors file; {_COPY}"


_Entry: TypeAlias = tuple[str, tuple[int, ...], int, int]

_KEYS = {"dtype": "a name", "shape": "a list of sizes", "data_offsets": "two ascending positions"}
"""The keys of an entry, and what their values are."""


def _check_names(names: Iterable[str]) -> None:
    try:
        "".join(names).encode()
    except UnicodeEncodeError as error:
        name = next(name for name in names if not is_unicode(name))
        raise _BrokenError(f"the name {name!r:.80} is not Unicode text") from error


def _sums(metadata: Any, entries: Mapping[str, _Entry], header: bytes) -> dict[str, TensorSums] | None:
    """Returns the checksums of the tensors, if the metadata have any; `None` where header or checksums are damaged."""
    texts = (
        {key: text for key, text in metadata.items() if key == KEY or is_text(text)}
        if isinstance(metadata, dict)
        else {}
    )
    if not texts:
        return {}
    names = sorted(entries, key=lambda name: entries[name][2:])
    sizes = [end - start for _, _, start, end in map(entries.__getitem__, names)]
    # Checksums are one text under their own key: any other text of that form is damage.
    sums = read_text(str(texts[KEY]), [header], sizes) if list(texts) == [KEY] else None
    return None if sums is None else dict(zip(names, sums, strict=True))


def _table(text: bytes, pairs_hook: Callable[[list[tuple[str, Any]]], Any]) -> dict[str, Any]:
    """Returns the table that JSON holds; a `_BrokenError` says why it holds none."""
    try:
        # Sizes are checked below.
        table = read_json(text.decode("utf-8"), object_pairs_hook=pairs_hook, parse_int=int)
    except UnicodeDecodeError as error:
        raise _BrokenError(f"byte {error.start} of it is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        cut = ", where it ends" if error.pos >= len(error.doc.rstrip()) else ""
        raise _BrokenError(f"it is not JSON: {error.msg} at character {error.pos}{cut}") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise _BrokenError(f"it is not JSON: {error!s:.80}") from error
    if isinstance(table, tuple):  # all of it is like the entry of a tensor
        return _table(text, _unique_keys)
    if not isinstance(table, dict):
        raise _BrokenError(f"it holds {table!r:.40}, not a table by name")
    return table


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise _BrokenError(f"{counts.most_common(1)[0][0]!r:.80} is in it twice")
    return result


def _entry_or_table(pairs: list[tuple[str, Any]]) -> _Entry | dict[str, Any]:
    """Returns the entry of a tensor if that is all that a table of JSON is, else the table.

    Headers have up to a million entries: as tables with lists, the collector would go through them again and again.
    """
    if len(pairs) == 3:
        (first, dtype), (second, shape), (third, offsets) = pairs
        if [first, second, third] == [*_KEYS] and _is_entry(dtype, shape, offsets):
            return dtype, tuple(shape), *offsets
    return _unique_keys(pairs)


def _is_entry(dtype: Any, shape: Any, data_offsets: Any) -> bool:
    if type(shape) is not list or type(data_offsets) is not list or len(shape) > _MOST_DIMS or len(data_offsets) != 2:
        return False
    for size in (*shape, *data_offsets):
        # JSON's true is another integer in Python; and the product of sizes beyond those of files is too long to print.
        if type(size) is not int or not 0 <= size < _MOST_SIZE:
            return False
    return data_offsets[0] <= data_offsets[1] and type(dtype) is str and dtype.isidentifier()


def _entry(name: str, entry: Any) -> _Entry:
    """Returns the dtype, the shape and the offsets of a tensor from its JSON."""
    if isinstance(entry, tuple):
        return entry  # pyright: ignore[reportReturnType]  of `_entry_or_table`
    if not isinstance(entry, dict):
        raise _BrokenError(f"{name!r:.80} is {entry!r:.40}, not a table with {', '.join(_KEYS)}")
    if entry.keys() != _KEYS.keys() or not _is_entry(**entry):
        # Each key is tried beside valid values of the others, so that the message names the wrong one.
        valid: dict[str, Any] = {"dtype": "F32", "shape": [], "data_offsets": [0, 0]}
        for key, expected in _KEYS.items():
            if key not in entry:
                raise _BrokenError(f"{name!r:.80} has no {key}")
            if not _is_entry(**{**valid, key: entry[key]}):
                raise _BrokenError(f"{name!r:.80} has the {key} {entry[key]!r:.60}, expected {expected}")
    # Only keys beyond the three come to here, and they are ignored.
    return entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]


def _offset_problems(entries: Mapping[str, _Entry], size: int | None) -> Iterator[str]:
    """Yields what is wrong with offsets: tensors must fill the bytes after the header without gaps."""
    previous_end, previous = 0, ""
    for start, end, name in sorted((start, end, name) for name, (_, _, start, end) in entries.items()):
        if start < previous_end:
            yield f"{name!r} begins at byte {start} of the data, before {previous!r} ends at byte {previous_end}"
        elif start > previous_end:
            yield f"bytes {previous_end} to {start} of the data, before {name!r}, belong to no tensor"
        # A tensor inside another one does not move the end back.
        previous_end, previous = max(previous_end, end), name
    if size is None:
        return
    if previous_end > size:
        yield f"it ends at byte {size} of the data, and {previous!r} would end at byte {previous_end}"
    elif previous_end < size:
        yield f"bytes {previous_end} to {size} of the data, after the last tensor, belong to no tensor"
