"""Rules as the text of a file."""

import tomllib

import pytest

from shardrules.rules.files.writer import toml_string


@pytest.mark.parametrize(
    "text", ["a/b$", r"\d+/w", "it's", r"it's \d", 'a"b', "a\nb\x1b\x7f", "naïve/ü", "\u202e", "", "😀"]
)
def test_strings_are_valid_toml(text: str) -> None:
    assert tomllib.loads(f"x = {toml_string(text)}") == {"x": text}
    assert toml_string(text).isprintable()
