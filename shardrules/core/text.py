"""Numbers as text for people."""


def bytes_text(count: float) -> str:
    """Returns a number of bytes for people to read; below 1 KiB the exact number.

    ```python
    from shardrules.core.text import bytes_text

    assert bytes_text(3 * 2**19) == "1.5 MiB"
    ```
    """
    # The page of `shardrules report` does the same in its script.
    for unit in ("B", "KiB", "MiB", "GiB"):
        # What would be written as 1024 gets the next unit.
        if abs(count) < (1023.5 if unit == "B" else 1023.95):
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
