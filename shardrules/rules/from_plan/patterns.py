r"""The patterns that a person may write for a family of arrays, and one pattern for several.

Of `layers/3/attention/q_proj/weight` these are its names and what they are made of (`attention`, `q_proj`, `_proj`),
names in a row (`q_proj/weight`), two with a gap (`attention/.*weight`), and, where less does not tell it apart, all of
it (`^layers/\d+/attention/q_proj/weight$`).
"""

import math
import re
from collections.abc import Iterator, Sequence

from shardrules.rules.from_plan.families import Family

_LEAST = 4
"""Shorter names are written as whole names, `\\bup$`, since longer ones may have them inside. Chosen by hand."""

_LEAST_IN_ROW = 2
"""Shorter names are whole with other names behind them, too: `\\bv/norm`, but `up/weight`. Chosen by hand."""

LONGEST = 88
"""The characters of a pattern of several names; with `path = ` and quotes a line has 100. Chosen by hand."""

_WORD = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{3,}")
_ENDS = (re.compile(r"(/\.\*|[_/])"), re.compile(r"(/\.\*|/)"))
"""What ends a word, and what ends a name."""
_WHOLE = re.compile(r"\([^()]*\)|[^()|]*")  # not a piece of some alternatives
_INDEX = r"\d+"
_NAME_EDGE = re.compile(r"\w")


def candidates(family: Family) -> Iterator[tuple[str, float]]:
    """Yields patterns that match all paths of a family, each with what it costs a reader."""
    parts = family.names
    names, last = parts[::2], len(parts) // 2

    def run(first: int, end: int) -> str:
        return "".join(parts[2 * first : 2 * end + 1])

    for first in range(last + 1):
        # A pattern begins with a name rather than with some numbers of layers.
        if names[first] in (_INDEX, "") or names[first].startswith("(") or names[first].isdecimal():
            continue
        for word in _WORD.findall(names[first]) if "\\" not in names[first] and "(" not in names[first] else ():
            if word != names[first]:
                yield word, 1.2
        for end in range(first, min(last, first + 3) + 1):
            if names[end] == _INDEX and end < last:
                continue
            text = run(first, end)
            closing = "$" if end == last else parts[2 * end + 1]
            cost = 1 + 0.5 * (end - first) + 0.1 * (end < last) + _number_cost(text)
            if len(text) >= _LEAST and not _opening(names[first], _LEAST_IN_ROW):
                if not _ends_in_number(text):
                    yield text, cost
                yield f"{text}{closing}", cost + 0.15
            yield f"{_opening(names[first])}{text}{closing}", cost + 0.3
            yield f"(^|/){text}{closing}", cost + 0.5
            # What follows a word of the first name: `_proj/weight`.
            for cut in re.finditer("_", names[first]) if end == last else ():
                if 0 < cut.start() < len(names[first]) - 3 and "(" not in names[first]:
                    tail = text[cut.start() :]
                    if not _ends_in_number(tail):
                        yield tail, cost + 0.2
                    yield f"{tail}$", cost + 0.35
        for begin in range(first + 2, last + 1):
            if names[begin] != _INDEX and not names[begin].isdecimal() and begin >= last - 1:
                least = _LEAST if begin == last else _LEAST_IN_ROW
                opening, inner = _opening(names[first], _LEAST), _opening(names[begin], least)
                text = f"{opening}{names[first]}{parts[2 * first + 1]}.*{inner}{run(begin, last)}"
                cost = 2 + 0.5 * (last - begin) + _number_cost(text)
                if not _ends_in_number(text):
                    yield text, cost
                yield f"{text}$", cost + 0.15
    yield f"^{run(0, last)}$", 1.6 if not last else 3 + 0.5 * last + _number_cost(run(0, last))
    if last and names[0] != _INDEX:
        yield f"^{names[0]}{parts[1]}", 2.0
        for begin in range(max(2, last - 1), last + 1):
            if names[begin] != _INDEX:
                least, text = _LEAST if begin == last else _LEAST_IN_ROW, run(begin, last)
                yield (
                    f"^{names[0]}{parts[1]}.*{_opening(names[begin], least)}{text}$",
                    2.6 + 0.5 * (last - begin) + _number_cost(text),
                )


def _opening(name: str, least: float = math.inf) -> str:
    """What a pattern that begins with a name begins with, for names of `least` characters and more nothing."""
    if len(name) >= least and not name.isdecimal():
        return ""
    return r"\b" if _NAME_EDGE.match(name) else "(^|/)"


def _ends_in_number(text: str) -> bool:
    """Whether a longer number may follow: `blocks/1` is in `blocks/11`."""
    return text[-1:].isdecimal() or text.endswith(")")


def _number_cost(text: str) -> float:
    """The words that the numbers in a pattern count for: of some layers, each has to be read."""
    return 0.6 * text.count(_INDEX) + 2 * text.count("(") + min(0.3 * text.count("|"), 5)


def joined(patterns: Sequence[str]) -> str:
    """Returns one pattern for several: `(q|k)_proj/weight` for `q_proj/weight` and `k_proj/weight`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for pattern in dict.fromkeys(patterns):
        opening = next((text for text in (r"\b", "(^|/)", "^") if pattern.startswith(text)), "")
        closing = "$" if pattern.endswith("$") and not pattern.endswith(r"\$") else ""
        groups.setdefault((opening, closing), []).append(pattern[len(opening) : len(pattern) - len(closing)])
    return "|".join(
        f"{opening}{_common(texts, needs_group=bool(opening or closing))}{closing}"
        for (opening, closing), texts in groups.items()
    )


def _common(texts: Sequence[str], *, needs_group: bool) -> str:
    """The texts as alternatives; those that differ in one word, or in one name, have the others once."""
    parts = list(texts)
    for ends in _ENDS:
        merged = _merged(parts, ends)
        while len(merged) < len(parts):
            parts, merged = merged, _merged(merged, ends)
    return f"({'|'.join(parts)})" if needs_group and len(parts) > 1 else "|".join(parts)


def _merged(texts: Sequence[str], ends: re.Pattern[str]) -> list[str]:
    """The texts, with one for those that differ in one word, as far as one word is not all of them."""
    rest, parts = list(texts), []
    while rest:
        groups: dict[tuple[int, tuple[str, ...]], list[tuple[str, str]]] = {}
        for text in rest:
            words = ends.split(text)
            for place in range(0, len(words), 2) if len(words) > 1 else ():
                if _WHOLE.fullmatch(words[place]):
                    frame = (*words[:place], "", *words[place + 1 :])
                    groups.setdefault((place, frame), []).append((words[place], text))
        (place, frame), members = max(
            groups.items(), key=lambda item: (len(item[1]), item[0][0]), default=((0, ()), [])
        )
        if len(members) < 2:
            return parts + rest
        words = dict.fromkeys(
            word for text, _ in members for word in text.removeprefix("(").removesuffix(")").split("|")
        )
        parts.append("".join((*frame[:place], f"({'|'.join(words)})", *frame[place + 1 :])))
        rest = [text for text in rest if text not in [member for _, member in members]]
    return parts
