"""Files that others may be reading while they are written."""

import tempfile
from pathlib import Path


def write_text(file: Path | str, text: str) -> None:
    """Writes `text` to `file` as a whole or not at all, unless it has that content already, and makes its folders.

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
        temporary.replace(path)
