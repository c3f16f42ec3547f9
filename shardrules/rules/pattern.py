"""Path patterns, and what they read of the index of a layer.

`layers/\\d+/mlp` says the same of layer 3 and of layer 112, `layers/3/mlp` does not. A rule whose patterns cannot tell
equal layers apart lets the engine decide them once, which is what makes planning fast. Here a pattern's text is read to
find out. The reading is careful: whatever it does not understand counts as able to tell indices apart, which costs
speed and never changes a result.
"""

import re
from collections.abc import Iterator
from typing import Literal, TypeAlias, final

import attrs

from shardrules.core.errors import PatternError
from shardrules.core.tree import ReadsIndex

Match: TypeAlias = Literal["search", "fullmatch", "match"]
"""How a pattern meets a path: anywhere in it, as a whole, or from its beginning."""

_NOT_DIGITS = frozenset("DWsbAZ")  # escapes that no digit matches, \\b and the anchors among them
_ANY = frozenset("dwS")  # escapes that every digit matches
_PLAIN = re.compile(r"(?:[A-Za-z_/|$^]|\.\*|\((?!\?)|\)(?!\*))*")  # most patterns: this tells at a glance
_CONTROL = frozenset("nrtfv")
_GLOBAL_FLAGS = re.compile(r"\A\(\?[aims]+\)")  # what they change, they change for all digits alike
_QUANTIFIERS = ("?", "*", "+", "{}")


@final
class _Unreadable(Exception):
    """A construct that this module does not follow."""


@final
@attrs.frozen
class _Token:
    """A piece of a pattern.

    `kind` is `"letter"` (a letter or underscore), `"literal"` (another character that is no digit), `"digit"` (some
    digits and not others), `"any"` (every digit, and perhaps more), `"none"` (a class without digits) or `"syntax"`.
    """

    kind: Literal["letter", "literal", "digit", "any", "none", "syntax"]
    text: str
    slash_free: bool = False  # for digits: whether '/' is not among what it matches


def compile_pattern(pattern: str | re.Pattern[str], owner: str) -> re.Pattern[str]:
    """Returns `pattern` compiled.

    **Arguments:**

    - `pattern`: a regular expression, compiled or not.
    - `owner`: the rule it is for, for the message.

    **Returns:**

    The compiled pattern.

    **Raises:**

    `PatternError` when it does not compile.
    """
    try:
        found = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise PatternError(f"{owner}: pattern {pattern!r} is not a regular expression: {error}") from error
    return found


def check_beginning(pattern: str, owner: str) -> None:
    """Refuses a pattern that begins with a slash where it has to match from the beginning, as no path begins with one.

    **Arguments:**

    - `pattern`: a regular expression.
    - `owner`: the rule it is for, for the message.

    **Raises:**

    `PatternError`.
    """
    if pattern.startswith("/"):
        raise PatternError(
            f"{owner}: pattern {pattern!r} can match no path: they never start with '/'. Take the slash out; "
            "'(.*/)?w' finds a name at the beginning of a path as well as inside"
        )


def reads_index(pattern: re.Pattern[str]) -> ReadsIndex:
    """Returns what a pattern can tell about a list index in a path.

    **Arguments:**

    - `pattern`: a compiled pattern.

    **Returns:**

    `"no"` when any two indices are alike to it, `"width"` when those with as many digits are, else `"value"`.

    ```python
    assert reads_index(re.compile(r"layers/\\d+/mlp/.*")) == "no"
    assert reads_index(re.compile(r"layers/\\d/mlp")) == "width"
    assert reads_index(re.compile(r"layers/3/mlp")) == "value"
    ```
    """
    if _PLAIN.fullmatch(pattern.pattern):
        return "no"
    if pattern.flags & re.VERBOSE:
        return "value"
    try:
        return _read(list(_tokens(_GLOBAL_FLAGS.sub("", pattern.pattern))))
    except _Unreadable:
        return "value"


def _tokens(text: str) -> Iterator[_Token]:
    place = 0
    while place < len(text):
        char = text[place]
        if char == "\\":
            yield _escape(text[place + 1 : place + 2])
            place += 2
        elif char == "[":
            place, token = _char_class(text, place)
            yield token
        elif char == "(" and text[place + 1 : place + 2] == "?":
            if text[place : place + 3] != "(?:":
                raise _Unreadable("a look-around, a flag or a named group")
            yield _Token("syntax", "(")
            place += 3
        elif char == "{" and (repeat := _REPEAT.match(text, place)):
            yield _Token("syntax", "{}")
            place = repeat.end()
        else:
            yield _plain(char)
            place += 1


_REPEAT = re.compile(r"\{(\d+,?\d*|,\d*)\}")


def _plain(char: str) -> _Token:
    if char.isdigit():
        return _Token("digit", char, slash_free=True)
    if char == ".":
        return _Token("any", char)
    if char in "()|^$*+?":
        return _Token("syntax", char)
    return _Token("letter" if char.isalpha() or char == "_" else "literal", char)


def _escape(char: str) -> _Token:
    if char in _ANY:
        return _Token("any", char, slash_free=char != "S")
    if char in _NOT_DIGITS:
        return _Token("none" if char in "DWs" else "syntax", "\\" + char)
    if char in _CONTROL or (char and not char.isalnum()):
        return _Token("literal", char)
    raise _Unreadable("a back-reference, or an escape that may stand for a digit")


def _char_class(text: str, place: int) -> tuple[int, _Token]:
    """Returns where a character class ends, and its token."""
    place += 1
    negated = text[place : place + 1] == "^"
    place += negated
    every = some = slash = False
    first = place
    while place < len(text) and (text[place] != "]" or place == first):
        char = text[place]
        if text[place : place + 3] == "0-9":
            every = True
            place += 3
        elif char == "\\":
            token = _escape(text[place + 1 : place + 2])
            every = every or token.kind == "any"
            slash = slash or text[place + 1] in "SDW/"
            place += 2
            if text[place : place + 1] == "-" and text[place + 1 : place + 2] not in ("]", ""):
                raise _Unreadable("a range that begins with an escape")
        elif text[place + 1 : place + 2] == "-" and text[place + 2 : place + 3] not in ("]", ""):
            low, high = char, text[place + 2]
            if low.isdigit() or high.isdigit() or high == "\\":
                raise _Unreadable("a range that begins or ends in a digit or an escape")
            every = every or low < "0" < high  # a range between two other characters holds all digits or none
            slash = slash or low <= "/" <= high
            place += 3
        else:
            some = some or char.isdigit()
            slash = slash or char == "/"
            place += 1
    kind = "digit" if some and not every else "any" if every != negated else "none"
    return place + 1, _Token(kind, "[]", slash_free=slash == negated)


def _read(tokens: list[_Token]) -> ReadsIndex:
    """Returns what the pattern reads of an index.

    An index is a run of digits with a slash, or an end of the path, on either side. So what stands right behind a
    letter, or right before one, never meets a digit of an index. Of the other atoms those that match only some digits
    read the index. Those that match any digit read its width, unless each is repeated and no two stand in a row: then
    one digit does wherever several do.
    """
    width = False
    depth = 0
    in_name = False  # right behind a letter of a name
    pending = False  # an atom that needs a digit, with nothing sure to stand between it and the next
    for number, token in enumerate(tokens):
        follow = [one.text if one.kind == "syntax" else "" for one in tokens[number + 1 : number + 3]]
        repeat = follow[0] if follow and follow[0] in _QUANTIFIERS else ""
        if token.kind in ("digit", "any"):
            before_name = not repeat and _is_sure_letter(tokens, number + 1)
            if (in_name and (not repeat or token.slash_free)) or before_name:
                in_name = in_name and token.slash_free
                pending = pending and not (depth == 0 and repeat in ("", "+"))
                continue
            if token.kind == "digit":
                return "value"
            if repeat == "+" and not pending:
                pending = True
            elif repeat != "*":
                width = True
            in_name = False
            continue
        in_name = token.kind == "letter"
        if token.kind in ("letter", "literal", "none"):
            pending = pending and not (depth == 0 and repeat in ("", "+"))
        elif token.text == "(":
            depth += 1
        elif token.text == ")":
            depth -= 1
        elif token.text == "{}" or (token.text in _QUANTIFIERS and follow and follow[0] == "+"):
            width = True  # a count; or a possessive quantifier, which gives nothing back for the rest to match
    return "width" if width else "no"


def _is_sure_letter(tokens: list[_Token], number: int) -> bool:
    """Whether the token is a letter that is there exactly once."""
    if number >= len(tokens) or tokens[number].kind != "letter":
        return False
    return number + 1 == len(tokens) or tokens[number + 1].text not in ("?", "*", "{}")
