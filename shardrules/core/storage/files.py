"""Files of text: read whole, and written so that others may be reading them meanwhile."""

import os
import shutil
import stat
import tempfile
from io import FileIO
from pathlib import Path
from typing import Any

from shardrules.core.errors import ConfigError, ConfigTypeError, shown, suggest
from shardrules.core.text import bytes_text

_MOST_BYTES = 2**29
"""512 MiB, chosen by hand: the plan of a model of a million kinds takes less, and a checkpoint named by mistake takes
more."""


def as_path(path: Any, caller: str) -> Path:
    """Returns a string or path as a `Path`; anything else is a `ConfigTypeError`."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ConfigTypeError(f"{caller}: expected the path of a file, got {shown(path)}")
    # Both are refused here, before a call to the system: null characters, and text that the file system cannot encode.
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a null character")
    except ValueError as error:
        raise ConfigError(f"{caller}: no file can have the name {shown(path)}: {error}") from None
    return Path(path)


def open_regular(path: Path) -> FileIO:
    """Opens a file to read it; anything else that has its name, such as a pipe, raises an `OSError` at once."""
    handle = _opened(path, os.O_NONBLOCK)  # opening a pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is not a regular file", str(path))
    return FileIO(handle)


def _opened(path: Path, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except ValueError as error:  # of a name that no file can have
        raise OSError(0, str(error), str(path)) from None


def read_text(file: Path) -> str:
    """Returns the text of a file, which may be a pipe. A `ConfigError` says why it cannot be read."""
    try:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder, not a file")
        with FileIO(_opened(file)) as handle:
            size = os.fstat(handle.fileno()).st_size
            # A pipe has size 0 here, and is read to its end.
            if size > _MOST_BYTES:
                raise ConfigError(
                    f"{file} has {bytes_text(size)}, too much for a text file (at most {bytes_text(_MOST_BYTES)})"
                )
            # Some editors put a byte order mark first, which is no part of the text.
            return handle.readall().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(missing_file(file)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error


def missing_file(file: Path) -> str:
    """Returns that a file does not exist, with the most similar name in its folder."""
    names = [sibling.name for sibling in file.parent.iterdir()] if file.parent.is_dir() else []
    return f"file {file} does not exist{suggest(file.name, names)}"


def write_text(file: Path | str, text: str) -> None:
    """Writes `text` to `file` as a whole or not at all, unless it has that content already, and makes its folders.

    A file that exists keeps its mode.

    ```python
    from pathlib import Path

    from shardrules.core.storage.files import write_text

    write_text("golden/plan.json", "{}")
    assert Path("golden/plan.json").read_text() == "{}"
    ```
    """
    path, data = Path(file).resolve(), text.encode()  # resolved, so that a link stays a link
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renaming is atomic only within a file system, so the temporary folder is beside the file.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        temporary.write_bytes(data)
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
