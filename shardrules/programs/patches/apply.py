"""Changed files written all together, or none: new text goes to files beside, which replace the old ones at the end."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardrules.core.errors import PatchError
from shardrules.programs.patches.source import SourceFile

_MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git", ".hg")
"""The files and folders at the top of a project."""


def project_root(file: Path) -> Path:
    """Returns the top of the project that a file is in: its repository, else the folder of its package."""
    folder = file.absolute().parent
    for parent in (folder, *folder.parents):
        if any((parent / marker).exists() for marker in _MARKERS):
            return parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def why_not_writable(file: Path, root: Path) -> str:
    """Returns why a file is not the user's to change; empty if it is."""
    if not file.absolute().is_relative_to(root):
        return f"is outside of the project {root}"
    if not file.resolve().is_relative_to(root.resolve()):
        return f"is a link out of the project, to {file.resolve()}"
    return ""


def check(files: Sequence[SourceFile], root: Path) -> None:
    """Raises `PatchError`, which lists all files that cannot be written."""
    problems: list[str] = []
    for file in files:
        problem = why_not_writable(file.path, root)
        try:
            is_same = file.path.read_bytes() == file.raw
            mode = stat.S_IMODE(file.path.stat().st_mode)
        except OSError as error:
            problems.append(f"{file.path}: {error.strerror}")
            continue
        if not problem and not is_same:
            problem = "has changed since the patch was made: make it again"
        # Root may write anything: the mode is what the user says.
        if not problem and (not mode & 0o222 or not os.access(file.path, os.W_OK)):
            problem = "is read-only"
        if problem:
            problems.append(f"{file.path}: {problem}")
    if problems:
        raise PatchError("the patch cannot be applied, and nothing was written:\n  " + "\n  ".join(problems))


def write_all(texts: Mapping[SourceFile, bytes], root: Path) -> None:
    """Writes new text to files, all or none."""
    check(list(texts), root)
    written: list[tuple[SourceFile, Path, Path]] = []
    try:
        for file, text in texts.items():
            target = file.path.resolve()
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            written.append((file, target, Path(name)))
            with os.fdopen(handle, "wb") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            shutil.copymode(target, name)
        _replace_all(written)
    except OSError as error:
        raise PatchError(f"the patch cannot be applied, and no file has changed: {error}") from error
    finally:
        for _, _, beside in written:
            with contextlib.suppress(FileNotFoundError):
                beside.unlink()


def _replace_all(written: Sequence[tuple[SourceFile, Path, Path]]) -> None:
    """Moves files into their places; if one cannot be, the others get their text back."""
    done: list[tuple[SourceFile, Path]] = []
    try:
        for file, target, beside in written:
            os.replace(beside, target)
            done.append((file, target))
    except OSError:
        for file, target in done:
            target.write_bytes(file.raw)
        raise
