"""Files that others may be reading while they are written."""

import tempfile
from pathlib import Path


def write_text(file: Path | str, text: str) -> None:
    """Writes a file as a whole or not at all, if it does not say that already. Folders are made.

    **Arguments:**

    - `file`: the file.
    - `text`: what it is to say.

    ```python
    write_text("golden/plan.json", "{}")
    assert Path("golden/plan.json").read_text() == "{}"
    ```
    """
    there, data = Path(file).resolve(), text.encode()  # resolved, so that a link stays one
    if there.exists() and there.read_bytes() == data:
        return
    there.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{there.name}-", dir=there.parent) as folder:
        made = Path(folder, there.name)
        made.write_bytes(data)
        made.replace(there)
