"""Path patterns: the names that a match must have, and the refusal of patterns that backtrack.

Python's `re` tries every way to divide a path among the repetitions of a pattern, and nothing can interrupt it.
`(a+)+$` has a repetition inside a repetition, where the ways double with each character. So the text of a pattern is
read, and a repetition is refused if one round of it can match in several ways.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import final

import attrs

from shardrules.core.errors import PatternError

Matcher = Callable[[str], object]
"""Takes a path, and returns something true if the pattern matches it."""

MOST_REPEATS = 6
"""Repetitions in a row whose ends are open: each multiplies the time by the length of a name. Chosen by hand."""

MANY_ROUNDS = 10
"""A repetition of this many rounds counts as endless. Chosen by hand."""

_LITERAL = re.compile(r"[^\\\[(){.*+?|^$]+")  # nothing in it has a meaning of its own
_FLAGS = re.compile(r"\(\?([aims]+)\)")
_TOKEN = re.compile(
    r"""
    (?P<repeat>[*+?] | \{(?=[\d,])(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\}) (?P<mode>[?+]?)
    | (?P<char>[^\\\[().*+?|^$] | \\[^A-Za-z0-9])
    | (?P<zero>[\^$] | \\[bBAZ])
    | (?P<reference>\\[1-9]\d? | \(\?P=\w+\))
    | (?P<set>\. | \\[dDwWsSafnrtv] | \\x.{2} | \\u.{4} | \\U.{8} | \\N\{[^}]*\} | \\0[0-7]{0,2}
        | \[\^?\]?(?:[^\]\\]|\\.)*\])
    | (?P<open>\((?:\?(?:[aims]*(?:-[ims]+)?:|[=!>]|<[=!]|P<\w+>|\(\w+\))|(?!\?)))
    | (?P<close>\))
    | (?P<or>\|)
    """,
    re.VERBOSE | re.DOTALL,
)


@functools.lru_cache(maxsize=4096)
def _tokens(text: str) -> tuple[re.Match[str], ...]:
    """The tokens of a valid pattern without its flags; none for one with comments or layout, which is not read."""
    flags = _FLAGS.match(text)
    position = flags.end() if flags else 0
    tokens: list[re.Match[str]] = []
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return ()
        tokens.append(token)
        position = token.end()
    return tuple(tokens)


@functools.lru_cache(maxsize=4096)
def names(text: str) -> tuple[str, ...]:
    """Returns texts that each match of a valid pattern contains."""
    if _LITERAL.fullmatch(text):
        return (text,)
    flags = _FLAGS.match(text)
    if flags is not None and "i" in flags[1]:
        return ()  # a name in other letters is not in the path
    runs, depth = [""], 0
    for token in _tokens(text):
        kind = token.lastgroup
        if kind == "or" and not depth:
            return ()
        depth += (kind == "open") - (kind == "close")
        if kind == "char" and not depth:
            runs[-1] += token["char"][-1]
        elif token["repeat"] and token["repeat"] != "+":
            runs[-1:] = [runs[-1][:-1], ""]  # the character before may be absent, or stand there several times
        else:
            runs.append("")
    return tuple(filter(None, runs))


_SAMPLE = "".join(map(chr, range(128))) + "\x85\xa0é²٣中"
"""Characters of every kind that sets tell apart."""


@functools.lru_cache(maxsize=1024)
def _characters(atom: str, flags: int) -> frozenset[str]:
    return frozenset(re.findall(atom, _SAMPLE + atom, flags))


@final
@attrs.frozen
class _Part:
    """A part of a pattern: the characters at its borders, and the ways in which it may match; by default nothing."""

    lead: tuple[frozenset[str], ...] = ()
    """The characters that may stand at its beginning, one place after the other, as far as that is certain."""
    ends: frozenset[str] = frozenset()
    """The characters that a repetition at its end may go on with."""
    is_fixed: bool = True
    """`lead` is all of it."""
    is_empty: bool = True
    """It may match nothing."""
    is_ambiguous: bool = False
    """It may match a text in several ways."""
    repeats: int = 0
    """The repetitions in a row that may end in many places; too many for a repetition inside a repetition."""

    @property
    def first(self) -> frozenset[str]:
        return self.lead[0] if self.lead else frozenset()

    def then(self, other: "_Part") -> "_Part":
        """Both, one after the other."""
        # A character that the first may go on with and the second may begin with can go to either: the border is open.
        is_open = bool(self.ends & other.first)
        # A single letter, small or capital, stands in few places of a path: `.*` before it has few ends.
        is_letter = other.is_fixed and len(other.first) <= 2
        # The beginning is certain only as far as all before it has a fixed length.
        if self.is_fixed:
            lead = self.lead + (() if self.lead and other.is_empty else other.lead)
        else:
            lead = (self.first | other.first,) if self.is_empty else self.lead
        return _Part(
            lead,
            self.ends | other.ends if other.is_empty else other.ends,
            self.is_fixed and other.is_fixed,
            self.is_empty and other.is_empty,
            self.is_ambiguous or other.is_ambiguous or is_open,
            self.repeats + other.repeats + (is_open and not is_letter),
        )

    def repeated(self, least: int, most: float, is_possessive: bool) -> "_Part":
        """This part, `least` to `most` times; a possessive repetition has one end."""
        # A round may go on with what the next one begins with: the text does not say where rounds meet.
        is_again = bool(self.ends & self.first)
        is_open = (self.is_ambiguous or is_again) and not is_possessive
        rounds = int(min(most, MANY_ROUNDS)) if is_open else 1
        return _Part(
            self.lead[:1],
            frozenset() if is_possessive or (least == most and not is_again) else self.first | self.ends,
            is_fixed=False,
            is_empty=self.is_empty or not least,
            is_ambiguous=is_open,
            # Each round may be open by itself, so the ways multiply: many rounds count as unbounded.
            repeats=rounds * (self.repeats + (is_open and is_again)) if rounds < MANY_ROUNDS else MOST_REPEATS + 1,
        )


def _either(parts: Sequence[_Part]) -> _Part:
    """Alternatives, of which the characters of a path choose one, or which are tried in turn."""
    if len(parts) == 1:
        return parts[0]
    # A single place at which they share no character is enough to tell two alternatives apart.
    is_certain = all(
        any(map(frozenset[str].isdisjoint, part.lead, other.lead)) for part, other in itertools.combinations(parts, 2)
    )
    return _Part(
        (frozenset[str]().union(*(part.first for part in parts)),),
        frozenset[str]().union(*(part.ends for part in parts)),
        is_fixed=False,
        is_empty=any(part.is_empty for part in parts),
        is_ambiguous=not is_certain or any(part.is_ambiguous for part in parts),
        repeats=max(part.repeats for part in parts),
    )


def _read(tokens: Iterable[re.Match[str]], flags: int) -> _Part:
    # One item for each open group, the whole pattern first: its opening, and its alternatives so far as lists of parts.
    groups: list[tuple[str, list[list[_Part]]]] = [("", [[]])]

    def end() -> _Part:
        opening, alternatives = groups.pop()
        part = _either([functools.reduce(_Part.then, parts, _Part()) for parts in alternatives])
        if opening.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            return _Part(repeats=part.repeats)  # takes no character
        # An atomic group never gives back what it matched: from outside there is one way to match it.
        return attrs.evolve(part, ends=frozenset(), is_ambiguous=False) if opening == "(?>" else part

    for token in tokens:
        kind, alternatives = token.lastgroup, groups[-1][1]
        if kind == "open":
            groups.append((token[0], [[]]))
        elif kind == "close":
            part = end()
            groups[-1][1][-1].append(part)
        elif kind == "or":
            alternatives.append([])
        elif kind == "mode":
            least, most = _bounds(token)
            alternatives[-1][-1] = alternatives[-1][-1].repeated(least, most, token["mode"] == "+")
        elif kind == "zero":
            alternatives[-1].append(_Part())
        elif kind == "reference":
            # The text that a reference repeats is not known here, so any character may begin it.
            alternatives[-1].append(_Part((frozenset(_SAMPLE),), is_fixed=False))
        else:
            alternatives[-1].append(_Part((_characters(token[0], flags),), is_empty=False))
    return end()


def _bounds(token: re.Match[str]) -> tuple[int, float]:
    """The least and the largest number of rounds of a repetition."""
    if token["repeat"] in ("*", "+", "?"):
        return int(token["repeat"] == "+"), 1 if token["repeat"] == "?" else math.inf
    least = int(token["least"] or 0)
    return least, int(token["most"]) if token["most"] else math.inf if token["comma"] else least


@functools.lru_cache(maxsize=4096)
def backtracks(pattern: re.Pattern[str]) -> bool:
    """Returns whether a pattern may take years to match a path."""
    text = pattern.pattern
    # Most patterns have few repetitions and none of a group. To read them takes three times as long as to compile them.
    is_short = len(re.findall(r"[*+?{]", text)) <= MOST_REPEATS and not re.search(r"\)[*+{]", text)
    if is_short or pattern.flags & re.VERBOSE:
        return False
    is_caseless = pattern.flags & re.IGNORECASE or re.search(r"\(\?[ams]*i", text)
    part = _read(_tokens(text), re.DOTALL | (re.IGNORECASE if is_caseless else 0))
    return part.repeats > MOST_REPEATS


def compile_pattern(pattern: str | re.Pattern[str], owner: str) -> re.Pattern[str]:
    """Returns `pattern` compiled; `owner` is the rule or function named in the error."""
    try:
        compiled = re.compile(pattern)
        is_slow = backtracks(compiled)
    except (re.error, OverflowError, RecursionError, TypeError, ValueError) as error:  # also of numbers in it
        why = "it nests too deeply" if isinstance(error, RecursionError) else error
        raise PatternError(f"{owner}: pattern {pattern!r:.200} is not a regular expression: {why}") from error
    if is_slow:
        raise PatternError(
            f"{owner}: pattern {compiled.pattern!r} may backtrack for years: it has a repetition inside a repetition, "
            "as in (a+)+, or many of them in a row. Write one repetition for both, a+, or what stands between the "
            "parts, (a+/)+"
        )
    return compiled
