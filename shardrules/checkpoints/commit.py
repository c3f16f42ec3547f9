"""Files that several processes write together, and that appear all at once or not at all.

The first process makes each file under a temporary name, all processes write their parts and the checksums of these,
and only when all parts are on the disk does the first process rename them. After each step the processes exchange
whether it went well: if one of them fails, all raise, and none waits for ever.

A temporary name is `.NAME.TOKEN.saving`. The first process draws the token, which nobody can foresee, and tells it to
the others; a file that exists is never opened. A process that was killed leaves such a file, and the next save under
the same name removes it: so two jobs cannot save under one name at once.
"""

import bisect
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import numpy as np

from shardrules.checkpoints.checksums import (
    SUM_CHARS,
    UNKNOWN,
    block_count,
    block_sums,
    sealed,
    sums_text,
    unknown_sums,
)
from shardrules.checkpoints.leaves import NUMBERS, SavedLeaf
from shardrules.checkpoints.tensor_file import local_parts, read_into, write_at, write_tensor
from shardrules.core.errors import CheckpointError, DisagreementError
from shardrules.core.jax_state import process_count, process_id
from shardrules.core.storage.files import open_regular
from shardrules.mesh.processes import exchange

_TEMPORARY = ".saving"
"""The end of the names of files that are being written."""

_TOKEN_BYTES = 8
"""64 bits that nobody guesses."""

_NAME_BYTES = 150
"""The part of a name that a temporary one keeps, of the 255 bytes of file systems: we add 42, and orbax some 50."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""For `renameat2`: paths are relative to the folder of the process; the two names change places."""


@final
@attrs.frozen(eq=False)
class FileLayout:
    """The places of headers and tensors in one file."""

    path: Path
    size: int
    texts: tuple[tuple[int, bytes], ...]
    """Headers, each with its offset; the text of checksums is in the last."""
    tensors: tuple[tuple[int, int], ...] = ()
    """The index of a leaf, and the offset at which it begins."""
    block: int = 0
    """The bytes of the blocks that have checksums."""

    @property
    def sums_offset(self) -> int:
        """The position of the checksums in the file."""
        offset, text = self.texts[-1]
        return offset + text.index(b"sums=", text.index(b"crc=")) + 5


@final
@attrs.frozen(eq=False)
class SavePlan:
    """The leaves that are saved, and what a format puts them into: files, or a folder that its library writes."""

    leaves: Sequence[SavedLeaf]
    text: str
    """All that the files depend on beside the leaves."""
    layouts: Callable[[int], Sequence[FileLayout]] = lambda _: ()
    """The files of a generation; the last one makes them the checkpoint, and the others have names of their own."""
    own_names: str = ""
    """A regular expression for the names of the files of all generations, or of the folder."""
    free_generation: Callable[[], int] = lambda: 0
    clear: Callable[[], None] = lambda: None
    """Removes what was the checkpoint before."""
    folder: Path | None = None
    """`None` where there are files, and for a folder in a cloud store, where names do not change."""
    write: Callable[[Path | None], None] | None = None
    """Writes the folder, under its temporary name if it has one."""


@final
@attrs.frozen(eq=False)
class Saving:
    """A save that all processes take part in; `title` names the caller and the file in errors."""

    title: str
    timeout: float

    def agree(self, step: str, work: Callable[[], Any], *, by_first: bool = False) -> list[Any]:
        """Does a step, which with `by_first` is the first process's alone, and returns the results of all processes.

        None returns before all have done it; where it fails on one, it raises on all of them.
        """
        error, result = None, None
        try:
            result = None if by_first and process_id() else work()
        except Exception as failure:  # noqa: BLE001  raised below, after the others know
            error = failure
        text = None if error is None else f"{type(error).__name__}: {error}"
        answers = exchange(json.dumps([text, result]), f"{self.title}: {step}", self.title, self.timeout)
        # The error of this process says more than the list of failures, so it comes first.
        if isinstance(error, OSError):
            name = f" {error.filename}" if error.filename else ""
            raise CheckpointError(f"{self.title} cannot be saved: {error.strerror or error}{name}") from error
        if error is not None:
            raise error
        results = [json.loads(str(answer)) for answer in answers]
        failures = [f"\n  process {process}: {text}" for process, (text, _) in enumerate(results) if text is not None]
        if failures:
            raise CheckpointError(f"{self.title} was not saved, since other processes failed:{''.join(failures)}")
        return [result for _, result in results]

    def agree_on(self, make: Callable[[], SavePlan]) -> tuple[SavePlan, list[int], str, int]:
        """Returns what this process saves, which process writes each leaf, a token, and a free generation.

        Raises where the processes do not save the same.
        """
        plans: list[SavePlan] = []

        def compare() -> list[Any]:
            plans.append(plan := make())
            # Numbers are compared too: of different ones only the first process's would be saved.
            numbers = [leaf.value if isinstance(leaf.value, NUMBERS) else "" for leaf in plan.leaves]
            pairs = zip(plan.leaves, numbers, strict=True)
            texts = [f"{leaf.path} {leaf.dtype}{leaf.shape} {number!r}" for leaf, number in pairs]
            digest = hashlib.sha256("\n".join([plan.text, *texts]).encode(errors="surrogatepass")).hexdigest()
            local = "".join("01"[leaf.is_local] for leaf in plan.leaves)
            # The first process looks for names: another may not see yet what it removed a moment ago.
            return [digest, local, secrets.token_hex(_TOKEN_BYTES), None if process_id() else plan.free_generation()]

        results = self.agree("what is saved", compare)
        different = [str(process) for process, (digest, *_) in enumerate(results) if digest != results[0][0]]
        if different:
            raise DisagreementError(
                f"{self.title}: the tree of process {', '.join(different)} differs from process 0's in paths, shapes, "
                "dtypes or Python numbers. Save the same tree on every process"
            )
        # What is local everywhere is written by the first process; what is on the devices of one process, by that one.
        columns = map("".join, zip(*(local for _, local, *_ in results), strict=True))
        return plans[0], [column.find("1") for column in columns], *results[0][2:]

    def save(self, make: Callable[[], SavePlan]) -> None:
        """Writes what is planned under temporary names, which are changed when all of it is on the disk."""
        plan, writers, token, generation = self.agree_on(make)
        files = plan.layouts(generation)
        paths = [file.path for file in files] if plan.folder is None else [plan.folder]
        names = [temporary_name(path, token) for path in paths]
        pairs = list(zip(files, names, strict=False))
        short_names = "|".join([plan.own_names, *(re.escape(short_name(path)) for path in paths)])
        folders: list[Path] = []
        modes: list[int | None] = []

        def create() -> None:
            parent = paths[0].parent
            folders.extend(_make_folders(parent))
            if plan.folder is not None:
                _take_back(plan.folder)
            remove_leftovers(parent, short_names)
            old = [path for path in parent.iterdir() if re.fullmatch(plan.own_names, path.name)]
            _forget(file for path in old for file in (path, *path.rglob("*")))
            # Of a checkpoint of several files, the new ones may have other names.
            modes.extend(_mode_of([file.path, *old]) for file in files)
            for (file, name), mode in zip(pairs, modes, strict=True):
                _create(file, name, mode)

        def write() -> None:
            if plan.write is None:
                _fill(pairs, plan.leaves, writers)
            else:
                plan.write(names[0] if names else None)

        def rename() -> None:
            for (file, name), mode in zip(pairs, modes, strict=True):
                _seal(file, name, mode)
            if plan.folder is not None:
                replace_folder(names[0], plan.folder)
                return
            _rename_files(names, paths)
            # Old files go last, when nothing names them any more.
            plan.clear()

        try:
            if paths:
                self.agree("the files", create, by_first=True)
            self.agree("the arrays", write)
            if files:
                self.agree("the checksums", lambda: _fill_sums(pairs, plan.leaves))
            if paths:
                self.agree("the names", rename, by_first=True)
        except BaseException:
            if paths and process_id() == 0:
                remove_leftovers(paths[0].parent, short_names)
                _remove_folders(folders)
            raise


def _rename_files(names: Sequence[Path], paths: Sequence[Path]) -> None:
    """Gives files their names. The last says which of them count, so the others are on the disk before it."""
    try:
        for name, path in zip(names[:-1], paths[:-1], strict=True):
            name.replace(path)
        _sync_folder(paths[0].parent)
        names[-1].replace(paths[-1])
    except BaseException:
        if names[-1].exists():
            remove(paths[:-1])
        raise
    _sync_folder(paths[0].parent)


def temporary_name(path: Path, token: str) -> Path:
    """Returns the name of a file or a folder while it is written."""
    return path.with_name(f".{short_name(path)}.{token}{_TEMPORARY}")


def short_name(path: Path) -> str:
    """Returns the name of a file, the end of a long one as a hash: names of temporary files are longer."""
    raw = os.fsencode(path.name)
    if len(raw) <= _NAME_BYTES:
        return path.name
    return f"{raw[:_NAME_BYTES].decode(errors='ignore')}-{hashlib.sha256(raw).hexdigest()[: 2 * _TOKEN_BYTES]}"


def remove_leftovers(folder: Path, names: str) -> None:
    """Removes what killed processes have left of saves under names that match a regular expression."""
    name = re.compile(rf"\.({names})\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}{re.escape(_TEMPORARY)}.*", re.DOTALL)
    if folder.is_dir():
        remove([entry for entry in folder.iterdir() if name.fullmatch(entry.name)])


def remove(paths: Iterable[Path]) -> None:
    """Removes files, links and folders, as far as that is possible."""
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _forget(paths: Iterable[Path]) -> None:
    """Frees the memory in which the system keeps old files, since new ones that replace them need as much."""
    for path in paths if hasattr(os, "posix_fadvise") else ():
        with contextlib.suppress(OSError), open_regular(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _make_folders(folder: Path) -> list[Path]:
    """Makes a folder and those that it is in; returns those that were missing, the outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_folders(folders: Sequence[Path]) -> None:
    """Removes folders that are empty, the last first."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _mode_of(paths: Iterable[Path]) -> int | None:
    """Returns the mode of the first file that exists, which one that replaces it shall have."""
    for path in paths:
        with contextlib.suppress(OSError):
            mode = path.stat().st_mode
            if stat.S_ISREG(mode):
                return stat.S_IMODE(mode)
    return None


def _sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems cannot sync a folder, and need not.
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(new: Path, old: Path) -> None:
    """Gives the folder `new` the name `old`; a folder that has it is replaced, where the system can do so at once."""
    aside = new
    if not old.exists():
        new.replace(old)
        _sync_folder(old.parent)
        return
    shutil.copymode(old, new)
    if not _exchange_names(new, old):
        aside = replaced_folder(old)
        shutil.rmtree(aside, ignore_errors=True)
        # A folder cannot replace one that has files: the old one steps aside, and comes back if the new one fails.
        old.replace(aside)
        try:
            new.replace(old)
        except OSError:
            aside.replace(old)
            raise
    _sync_folder(old.parent)
    # What is left of the old one harms nothing, and the next save removes it.
    shutil.rmtree(aside, ignore_errors=True)


def replaced_folder(folder: Path) -> Path:
    """Returns the name that a folder has while another gets its name, where the two cannot be exchanged."""
    return folder.parent / f".{short_name(folder)}.replaced"


def _take_back(old: Path) -> None:
    """Removes what a killed process has left of `replace_folder`, or gives `old` its name back."""
    aside = replaced_folder(old)
    # Scripts may have made an empty folder since.
    if aside.is_dir() and not aside.is_symlink() and not old.is_file() and not any(old.glob("*")):
        aside.replace(old)
    remove([aside])


def _exchange_names(first: Path, second: Path) -> bool:
    """Returns whether the system could exchange two names at once, as Linux can on most file systems, and macOS.

    Python itself cannot: with two of its renames there is a moment without a checkpoint, in which a reader finds none,
    a killed process leaves none, and a second process that saves under this name moves the wrong folder away.
    """
    libc, names = ctypes.CDLL(None), (os.fsencode(first), os.fsencode(second))
    if hasattr(libc, "renameat2"):
        return libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
    return hasattr(libc, "renamex_np") and libc.renamex_np(*names, _RENAME_EXCHANGE) == 0  # there it is RENAME_SWAP


def _create(file: FileLayout, name: Path, mode: int | None) -> None:
    """Makes a file, which its owner can write as long as it is open; one that exists, or a link, raises."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # A file that replaces a private one is private from its first byte on.
    handle = os.open(name, flags, 0o666 if mode is None else 0o600)
    try:
        if mode is not None:
            os.fchmod(handle, mode | 0o600)
        _reserve(handle, file.size)
        for offset, text in file.texts:
            write_at(handle, offset, text)
    finally:
        os.close(handle)


def _reserve(handle: int, size: int) -> None:
    """Gives a new file its size and, where the system can, its place on the disk: then writing takes a third less time.

    A disk that is too full raises.
    """
    try:
        os.posix_fallocate(handle, 0, size)
    except (AttributeError, OSError) as error:  # macOS has no such function
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        os.truncate(handle, size)


@contextlib.contextmanager
def _opened(name: Path, *, sync: bool) -> Iterator[int]:
    """A file that the first process has made; `sync` waits until it is on the disk."""
    try:
        handle = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"process {process_id()} does not see {name}, which process 0 has made: all processes must write to one "
            "file system"
        ) from error
    try:
        yield handle
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def _fill(pairs: Sequence[tuple[FileLayout, Path]], leaves: Sequence[SavedLeaf], writers: Sequence[int]) -> None:
    """Writes what this process has of the tensors of files, and the checksums of the blocks that it fills."""
    process = process_id()
    for file, name in pairs:
        parts = [local_parts(leaves[leaf_index], writers[leaf_index] == process) for leaf_index, _ in file.tensors]
        if any(parts):
            # A single process syncs at the end.
            with _opened(name, sync=process_count() > 1) as handle:
                sums = [
                    write_tensor(handle, offset, leaves[leaf_index], tensor_parts, file.block)
                    for (leaf_index, offset), tensor_parts in zip(file.tensors, parts, strict=True)
                ]
                _write_sums(handle, file, np.concatenate(sums))


def _fill_sums(pairs: Sequence[tuple[FileLayout, Path]], leaves: Sequence[SavedLeaf]) -> None:
    """Writes this process's share of the checksums of blocks that several runs fill, perhaps of several processes."""
    for file, name in pairs:
        sizes = [leaves[leaf_index].nbytes for leaf_index, _ in file.tensors]
        *_, count = ends = np.cumsum([0, *(block_count(size, file.block) for size in sizes)]).tolist()
        if not count:
            continue
        with _opened(name, sync=process_count() > 1) as handle:
            unknown = unknown_sums(_read_at(handle, file.sums_offset, SUM_CHARS * count, name))
            sums = np.full(count, UNKNOWN, np.uint32)
            # By their own indices: other processes may have written theirs already.
            for index in [index for index in unknown if index % process_count() == process_id()]:
                tensor = bisect.bisect_right(ends, index) - 1
                start = (index - ends[tensor]) * file.block
                data = _read_at(handle, file.tensors[tensor][1] + start, min(file.block, sizes[tensor] - start), name)
                sums[index] = block_sums(np.frombuffer(data, np.uint8), file.block)[0]
            _write_sums(handle, file, sums)


def _read_at(handle: int, offset: int, count: int, name: Path) -> bytes:
    data = bytearray(count)
    read_into(handle, offset, memoryview(data), name)
    return bytes(data)


def _write_sums(handle: int, file: FileLayout, sums: np.ndarray) -> None:
    """Writes those checksums that are known."""
    # Runs of known sums are written at once, and what other processes write between them stays.
    edges = np.flatnonzero(np.diff(sums != UNKNOWN, prepend=False, append=False)).reshape(-1, 2)
    for start, stop in edges.tolist():
        write_at(handle, file.sums_offset + SUM_CHARS * start, sums_text(sums[start:stop]))


def _seal(file: FileLayout, name: Path, mode: int | None) -> None:
    """Writes the checksum of all headers, gives the file its mode, and waits until everything is on the disk."""
    with _opened(name, sync=True) as handle:
        position, crc = sealed([_read_at(handle, offset, len(text), name) for offset, text in file.texts])
        write_at(handle, file.texts[-1][0] + position, crc)
        if mode is not None:
            os.fchmod(handle, mode)
