"""Files that commands read and write, and the errors they raise."""

from pathlib import Path

from shardrules.cli.errors import UsageError
from shardrules.core.check import bytes_text
from shardrules.core.errors import suggest
from shardrules.core.storage.files import write_text

_MOST_BYTES = 2**29
"""512 MiB: the plan of a model of a million kinds takes less, and a checkpoint named by mistake takes more. Doubled, a
small checkpoint is read and fails later, as JSON; halved, nothing that exists is refused."""


def read_text(file: Path) -> str:
    """Returns the text of a file. A `UsageError` says why it cannot be read."""
    try:
        if file.is_dir():
            raise UsageError(f"{file} is a folder, not a file")
        size = file.stat().st_size
        if size > _MOST_BYTES:
            raise UsageError(
                f"{file} has {bytes_text(size)}, too much for a text file (at most {bytes_text(_MOST_BYTES)})"
            )
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise missing_file(file) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        # No file can have this name.
        raise UsageError(f"cannot read {str(file)!r}: {error}") from error


def missing_file(file: Path) -> UsageError:
    """Returns the error for a file that does not exist, with the most similar name in its folder."""
    names = [sibling.name for sibling in file.parent.iterdir()] if file.parent.is_dir() else []
    return UsageError(f"file {file} does not exist{suggest(file.name, names)}")


def write(file: Path, text: str) -> None:
    """Writes a whole file, or leaves it as it is. A `UsageError` says why it cannot be written."""
    if file.is_dir():
        raise UsageError(f"{file} is a folder: name a file in it")
    if str(file) == "-":
        raise UsageError("cannot write to -: --format json prints to the standard output")
    try:
        # A device or a pipe must not be replaced by a file.
        if file.exists() and not file.is_file():
            file.write_text(text, "utf-8")
        else:
            write_text(file, text)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error
