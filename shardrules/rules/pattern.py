"""Path patterns, and what they read of the index of a layer.

`layers/\\d+/mlp` says the same of layer 3 and of layer 112, `layers/3/mlp` does not. A rule whose patterns cannot tell
equal layers apart lets the engine decide them once, which is what makes planning fast. Here a pattern's text is read to
find out. The reading is careful: whatever it does not understand counts as able to tell indices apart, which costs
speed and never changes a result.
"""

import re
from collections.abc import Iterator
from typing import Literal, TypeAlias

from shardrules.core.errors import PatternError
from shardrules.core.tree import ReadsIndex

Match: TypeAlias = Literal["search", "fullmatch", "match"]
"""How a pattern meets a path: anywhere in it, as a whole, or from its beginning."""

_Token: TypeAlias = tuple[Literal["literal", "digits", "other"], str]

_NOT_DIGITS = frozenset("DWsbAZ")  # escapes that no digit matches, \b and the anchors among them
_ANY = frozenset("dwS")  # escapes that every digit matches
_GLOBAL_FLAGS = re.compile(r"\A\(\?[aims]+\)")  # what they change, they change for all digits alike
_CONTROL = frozenset("nrtfv")


def compile_pattern(pattern: str | re.Pattern[str], owner: str) -> re.Pattern[str]:
    """Returns `pattern` compiled.

    **Arguments:**

    - `pattern`: a regular expression, compiled or not.
    - `owner`: the rule it is for, for the message.

    **Returns:**

    The compiled pattern.

    **Raises:**

    `PatternError` when it does not compile, or begins with a slash, which no path does.
    """
    try:
        found = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise PatternError(f"{owner}: pattern {pattern!r} is not a regular expression: {error}") from error
    if found.pattern.startswith("/"):
        raise PatternError(
            f"{owner}: pattern {found.pattern!r} can match no whole path: paths never start with '/'. Take the slash "
            "out; '(^|/)w' finds a name at the beginning of a path as well as inside."
        )
    return found


def reads_index(pattern: re.Pattern[str]) -> ReadsIndex:
    """Returns what a pattern can tell about a list index in a path.

    **Arguments:**

    - `pattern`: a compiled pattern.

    **Returns:**

    `"no"` when any two indices are alike to it, `"width"` when those with as many digits are, else `"value"`.

    ```python
    assert reads_index(re.compile(r"layers/\\d+/mlp/.*")) == "no"
    assert reads_index(re.compile(r"layers.\\d+.mlp")) == "width"
    assert reads_index(re.compile(r"layers/3/mlp")) == "value"
    ```
    """
    if pattern.flags & re.VERBOSE:
        return "value"
    try:
        tokens = list(_tokens(_GLOBAL_FLAGS.sub("", pattern.pattern)))
    except ValueError:
        return "value"
    return "no" if _blind_to_width(tokens) else "width"


def _tokens(text: str) -> Iterator[_Token]:
    """Yields literals, atoms that match any digit, and the rest; raises ValueError where digits could differ."""
    place = 0
    after_letter = False  # a digit right after a letter belongs to a name: no index begins inside a name
    while place < len(text):
        char = text[place]
        was_after_letter, after_letter = after_letter, False
        if char == "\\":
            escape = text[place + 1 : place + 2]
            place += 2
            if escape in _ANY:
                yield "digits", "\\" + escape
            elif escape in _NOT_DIGITS:
                yield "other", "\\" + escape
            elif escape and not escape.isalnum():
                yield "literal", escape
            elif escape in _CONTROL:
                yield "literal", "\\" + escape
            else:
                raise ValueError("a back-reference, or an escape that may stand for a digit")
            continue
        if char == "[":
            place, kind = _char_class(text, place)
            yield kind, "[]"
            continue
        if char == "(" and text[place + 1 : place + 2] == "?":
            if text[place : place + 3] != "(?:":
                raise ValueError("a look-around, a flag or a named group")
            yield "other", "("
            place += 3
            continue
        if char == "{":
            end = text.find("}", place)
            inside = text[place + 1 : end]
            if end > place and inside.strip("0123456789,") == "" and inside:
                yield "other", "{}"
                place = end + 1
                continue
        if char.isdigit():
            if not was_after_letter:
                raise ValueError("a literal digit")
            after_letter = True
            yield "literal", char
        elif char == ".":
            yield "digits", "."
        elif char in "()|^$*+?":
            yield "other", char
        else:
            after_letter = char.isalpha() or char == "_"
            yield "literal", char
        place += 1


def _char_class(text: str, place: int) -> tuple[int, Literal["digits", "other"]]:
    """Returns where a character class ends, and whether every digit or no digit is in it."""
    place += 1
    negated = text[place : place + 1] == "^"
    place += negated
    has_digits = False
    first = place
    while place < len(text) and (text[place] != "]" or place == first):
        if text[place : place + 3] == "0-9":
            has_digits = True
            place += 3
        elif text[place] == "\\":
            escape = text[place + 1 : place + 2]
            if escape.isalnum() and escape not in _ANY | _NOT_DIGITS | _CONTROL:
                raise ValueError("an escape that may stand for a digit")
            has_digits = has_digits or escape in _ANY
            place += 2
        elif text[place].isdigit():
            raise ValueError("some digits in a class, and not others")
        elif text[place + 1 : place + 2] == "-" and text[place + 2 : place + 3] not in ("]", ""):
            # A range between two characters that are no digits holds all digits or none.
            has_digits = has_digits or text[place] < "0" < text[place + 2]
            if text[place + 2].isdigit() or text[place + 2] == "\\":
                raise ValueError("a range that ends in a digit or an escape")
            place += 3
        else:
            place += 1
    return place + 1, "digits" if has_digits != negated else "other"


def _blind_to_width(tokens: list[_Token]) -> bool:
    """Whether one digit always does where several do: each atom for digits is repeated, and no two stand in a row."""
    depth = 0
    pending = False  # an atom that needs a digit, with nothing sure to stand between it and the next
    for number, (kind, text) in enumerate(tokens):
        following = tokens[number + 1][1] if number + 1 < len(tokens) else ""
        if text == "{}" or text == "\\B":
            return False
        if kind == "digits":
            if following == "*":
                continue
            if following != "+" or pending:
                return False
            pending = True
        elif kind == "literal":
            if depth == 0 and following not in ("?", "*", "{}") and not text.isdigit():
                pending = False
        elif text == "(":
            depth += 1
        elif text == ")":
            depth -= 1
    return True
