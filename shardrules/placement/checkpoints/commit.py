"""Files that several processes write together, and that appear all at once or not at all.

The first process makes each file under a temporary name, all processes write their parts, and only when all parts are
on the disk does the first process rename them. After each step the processes exchange whether it went well: if one of
them fails, all raise, and none waits for ever.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import attrs

from shardrules.core.errors import CheckpointError, DisagreementError
from shardrules.core.jax_state import process_id
from shardrules.mesh.processes import exchange
from shardrules.placement.checkpoints.saved import SavedLeaf
from shardrules.placement.checkpoints.tensor_writer import local_parts, write_at, write_tensor

TEMPORARY = ".saving"
"""The end of the names of files that are being written. A process that was killed leaves them behind."""

_PLANS = "what is saved"
"""The step in which processes compare what they save."""

_AT_FDCWD = -100
"""For `renameat2`: paths are relative to the folder of the process."""

_T = TypeVar("_T")


@final
@attrs.frozen(eq=False)
class FileLayout:
    """What goes where in one file."""

    path: Path
    size: int
    texts: tuple[tuple[int, bytes], ...]
    """Headers, each with its offset."""
    tensors: tuple[tuple[int, int], ...]
    """The index of a leaf, and the offset at which it begins."""

    @property
    def temporary(self) -> Path:
        """The file while it is being written."""
        return self.path.with_name(f".{self.path.name}{TEMPORARY}")


@final
@attrs.frozen(eq=False)
class Saving:
    """A save that all processes take part in; `title` names the caller and the file in errors."""

    title: str
    timeout: float

    def agree(self, step: str, error: Exception | None = None, notes: Any = None) -> list[Any]:
        """Returns the notes of all processes once each has finished a step; raises on all of them if one has not."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        answers = exchange(json.dumps([text, notes]), f"{self.title}: {step}", self.title, self.timeout)
        if isinstance(error, OSError):
            name = f" {error.filename}" if error.filename else ""
            raise CheckpointError(f"{self.title} cannot be saved: {error.strerror or error}{name}") from error
        if error is not None:
            raise error
        results = [json.loads(str(answer)) for answer in answers]
        failures = [f"\n  process {process}: {text}" for process, (text, _) in enumerate(results) if text is not None]
        if failures:
            raise CheckpointError(f"{self.title} was not saved, since other processes failed:{''.join(failures)}")
        return [notes for _, notes in results]

    def plan(self, make: Callable[[], _T]) -> _T:
        """Returns what `make` returns: what this process saves. Its error is raised on all processes."""
        try:
            return make()
        except Exception as error:
            self.agree(_PLANS, error)
            raise

    def agree_on(self, leaves: Sequence[SavedLeaf], layout: str, notes: Any = None) -> tuple[list[int], Any]:
        """Returns which process writes each leaf that processes have whole, and the notes of the first process.

        Raises where the processes do not save the same.
        """
        # Numbers are compared too: of different ones only the first process's would be saved.
        texts = [f"{leaf.path} {leaf.dtype}{leaf.shape}{_number(leaf)}" for leaf in leaves]
        digest = hashlib.sha256("\n".join([layout, *texts]).encode(errors="surrogatepass")).hexdigest()
        local = "".join("01"[leaf.is_local] for leaf in leaves)
        results = self.agree(_PLANS, None, [digest, local, notes])
        different = [str(process) for process, (other, _, _) in enumerate(results) if other != results[0][0]]
        if different:
            raise DisagreementError(
                f"{self.title}: the tree of process {', '.join(different)} differs from process 0's in paths, shapes, "
                "dtypes or Python numbers. Save the same tree on every process"
            )
        # What is local everywhere is written by the first process; what is on the devices of one process, by that one.
        columns = map("".join, zip(*(local for _, local, _ in results), strict=True))
        return [column.find("1") for column in columns], results[0][2]

    def write(
        self,
        files: Sequence[FileLayout],
        leaves: Sequence[SavedLeaf],
        writers: Sequence[int],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes all files under their temporary names; the first process calls `prepare` before."""

        def create() -> None:
            prepare()
            for file in files:
                _create(file)

        with self._cleanup(files):
            self.agree("the files", error_of(create if process_id() == 0 else lambda: None))
            self.agree("the arrays", error_of(lambda: [_fill(file, leaves, writers) for file in files]))

    def commit(
        self, files: Sequence[FileLayout], finish: Callable[[], None], undo: Callable[[], None] = lambda: None
    ) -> None:
        """Gives the files their names on the first process, which then calls `finish`; where that fails, `undo`."""

        def rename() -> None:
            try:
                for file in files:
                    file.temporary.replace(file.path)
                finish()
            except BaseException:
                undo()
                raise

        with self._cleanup(files):
            self.agree("the names", error_of(rename if process_id() == 0 else lambda: None))

    @contextlib.contextmanager
    def _cleanup(self, files: Sequence[FileLayout]) -> Iterator[None]:
        """Removes the temporary files if something fails."""
        try:
            yield
        except BaseException:
            if process_id() == 0:
                for file in files:
                    with contextlib.suppress(OSError):
                        file.temporary.unlink()
            raise


def write_synced(path: Path, text: str) -> None:
    """Writes a small file as a whole or not at all."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
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
    elif not _exchange_names(new, old):
        aside = replaced_folder(old)
        shutil.rmtree(aside, ignore_errors=True)
        old.replace(aside)
        try:
            new.replace(old)
        except OSError:
            aside.replace(old)
            raise
    sync_folder(old.parent)
    # What is left of the old one harms nothing, and the next save removes it.
    shutil.rmtree(aside, ignore_errors=True)


def replaced_folder(folder: Path) -> Path:
    """Returns the name that a folder has while another gets its name, where the two cannot be exchanged."""
    return folder.parent / f".{folder.name}.replaced"


def remove_leftover_folders(new: Path, old: Path) -> None:
    """Removes what a killed process has left of `replace_folder`, or gives `old` its name back."""
    aside = replaced_folder(old)
    # Scripts may have made an empty folder since.
    if aside.is_dir() and not old.is_file() and not any(old.glob("*")):
        aside.replace(old)
    if new.is_symlink() or new.is_file():
        new.unlink()
    for folder in (new, aside):
        shutil.rmtree(folder, ignore_errors=True)


def _exchange_names(first: Path, second: Path) -> bool:
    """Whether the system could exchange two names at once, as Linux and macOS can on most file systems."""
    libc = ctypes.CDLL(None)
    names = os.fsencode(first), os.fsencode(second)
    if hasattr(libc, "renameat2"):  # with RENAME_EXCHANGE
        return libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], 2) == 0
    # With RENAME_SWAP.
    return hasattr(libc, "renamex_np") and libc.renamex_np(*names, 2) == 0


def error_of(work: Callable[[], Any]) -> Exception | None:
    """Returns what went wrong, so that all processes hear of it before any raises."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  raised by `agree`, after the others know
        return error
    return None


def _number(leaf: SavedLeaf) -> str:
    return f" {leaf.value!r}" if isinstance(leaf.value, bool | int | float | complex) else ""


def _create(file: FileLayout) -> None:
    file.path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.truncate(handle, file.size)
        for offset, text in file.texts:
            write_at(handle, offset, text)
        os.fsync(handle)
    finally:
        os.close(handle)


def _fill(file: FileLayout, leaves: Sequence[SavedLeaf], writers: Sequence[int]) -> None:
    """Writes what this process has of the tensors of a file."""
    process = process_id()
    parts = [
        (leaf_index, offset, local_parts(leaves[leaf_index], writers[leaf_index] == process))
        for leaf_index, offset in file.tensors
    ]
    if not any(tensor_parts for _, _, tensor_parts in parts):
        return
    try:
        handle = os.open(file.temporary, os.O_RDWR)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"process {process} does not see {file.temporary}, which process 0 has made: all processes must write to "
            "one file system"
        ) from error
    try:
        for leaf_index, offset, tensor_parts in parts:
            write_tensor(handle, offset, leaves[leaf_index], tensor_parts)
        os.fsync(handle)
    finally:
        os.close(handle)
