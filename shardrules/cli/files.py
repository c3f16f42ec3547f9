"""Files that commands read and write, and what can be wrong with them."""

from pathlib import Path

from shardrules.cli.errors import UsageError
from shardrules.core.check import bytes_text
from shardrules.core.errors import suggest
from shardrules.core.storage.files import write_text

_MOST = 2**29
"""More than any text that is meant for reading; a checkpoint given in its place is larger."""


def read_text(file: Path) -> str:
    """Returns the text of a file.

    **Arguments:**

    - `file`: the file.

    **Returns:**

    Its text.

    **Raises:**

    `UsageError` where there is none, where it is a folder, no text, far too large, or not to be read.
    """
    try:
        if file.is_dir():
            raise UsageError(f"{file} is a folder, where a file is wanted")
        size = file.stat().st_size
        if size > _MOST:
            raise UsageError(
                f"{file} has {bytes_text(size)}: that is no text that somebody wrote (at most {bytes_text(_MOST)})"
            )
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        folder = file.parent
        names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
        raise UsageError(f"there is no file {file}{suggest(file.name, names)}") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is no text in UTF-8 (byte {error.start} is {error.object[error.start]:#04x})"
        ) from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a name that no file can have
        raise UsageError(f"{str(file)!r} cannot be read: {error}") from error


def write(file: Path, text: str) -> None:
    """Writes a file as a whole, or not at all.

    **Arguments:**

    - `file`: the file.
    - `text`: what it is to say.

    **Raises:**

    `UsageError` where it cannot be written.
    """
    if file.is_dir():
        raise UsageError(f"{file} is a folder: name a file in it")
    if str(file) == "-":
        raise UsageError("- is no file: --format json prints to the standard output")
    try:
        if file.exists() and not file.is_file():  # a device or a pipe is written to, and not replaced
            file.write_text(text, "utf-8")
        else:
            write_text(file, text)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}") from error
