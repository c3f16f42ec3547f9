"""Files that commands read and write, and the errors they raise."""

from pathlib import Path

from shardrules.cli.errors import UsageError
from shardrules.cli.interrupt import finishing
from shardrules.core.errors import ConfigError
from shardrules.core.storage import files


def read_text(file: Path) -> str:
    """Returns the text of a file. A `UsageError` says why it cannot be read."""
    try:
        return files.read_text(file)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def missing_file(file: Path) -> UsageError:
    """Returns the error for a file that does not exist, with the most similar name in its folder."""
    return UsageError(files.missing_file(file))


def named_path(text: str) -> Path:
    """Returns the path that a word of the command line names."""
    if "://" in text:
        raise UsageError(f"{text} is an address: download the file, and name it")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text}: there is no such user, so the folder {text.split('/')[0]} is unknown") from error


def write(file: Path, text: str, *, makes_folders: bool = False) -> None:
    """Writes a whole file, or leaves it as it is. A `UsageError` says why it cannot be written."""
    check_writable(file, makes_folders=makes_folders)
    try:
        with finishing():
            # A device or a pipe must not be replaced by a file.
            if file.exists() and not file.is_file():
                file.write_text(text, "utf-8")
            else:
                files.write_text(file, text)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error


def check_writable(file: Path, *, makes_folders: bool = False) -> None:
    """Raises the `UsageError` for a file that has no folder, or is one."""
    # A parent that exists may be a file, in which no folder can be made.
    obstacle = next((parent for parent in file.parents if parent.exists() and not parent.is_dir()), None)
    if obstacle is not None:
        raise UsageError(f"cannot write {file}: {obstacle} is a file, not a folder; rename it")
    if not (makes_folders or file.parent.is_dir()):
        raise UsageError(f"cannot write {file}: the folder {file.parent} does not exist; make it first")
    if file.is_dir():
        raise UsageError(f"{file} is a folder: name a file in it")
    if str(file) == "-":
        raise UsageError("cannot write to -: --format json prints to the standard output")
