"""What the text of a path pattern tells: the names that a match must have, and how long a match may take.

Python's `re` tries every way to divide a path among the repetitions of a pattern, and nothing can interrupt it. In most
patterns repetitions follow one another: then there are few ways, and the text shows how few. `(a+)+$` has a repetition
inside a repetition, where the ways double with each character. Such a pattern may still be harmless on the paths of a
model, so another process tries it, and a match that takes it too long is an error here.
"""

import bisect
import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, final

import attrs

from shardrules.core.errors import PatternError

MOST_STEPS = 10**7
"""How many ways a match may have before another process tries it. `re` tries as many in a tenth of a second; with ten
times as many a plan would visibly hang, and with a tenth, patterns with three `.*` would be tried elsewhere."""

SECONDS = 0.3
"""How long the other process may compute for one path. Patterns that backtrack take years, harmless ones microseconds;
with six times as much, the error comes after more than two seconds."""

_LONGEST = 1 << 14
"""No path is as long, and no match of a pattern without ambiguity takes long on a shorter one."""


@final
@attrs.frozen
class PatternOutline:
    """What the text of a pattern shows without matching anything."""

    names: tuple[str, ...]
    """Texts that each match contains."""
    repeats: int
    """How many repetitions follow one another."""
    ways: int
    """How many ways alternatives and options give to each division of a path."""
    is_nested: bool
    """Whether a repetition has repetitions or alternatives inside."""

    @property
    def safe_length(self) -> int:
        """The length up to which every path is matched quickly."""
        return 0 if self.is_nested else _safe_length(self.repeats, self.ways)


@functools.lru_cache(maxsize=1024)
def _safe_length(repeats: int, ways: int) -> int:
    # Each repetition ends at one of the characters, in order, and a search may start at any.
    def steps(length: int) -> int:
        return math.comb(length + repeats + 1, repeats + 1) * ways

    return bisect.bisect_right(range(_LONGEST), MOST_STEPS, key=steps) - 1


_LITERAL = re.compile(r"[^\\\[(){.*+?|^$]+")  # nothing in it has a meaning of its own
_FLAGS = re.compile(r"\(\?([aims]+)\)")
_TOKEN = re.compile(
    r"""
    (?P<repeat>[*+?]|\{\d*,?\d*\}) [?+]?
    | (?P<char>[^\\\[().*+?|^$] | \\[^A-Za-z0-9])
    | (?P<zero>[\^$] | \\[bBAZ])
    | (?P<set>\. | \\[dDwWsS] | \[\^?\]?(?:[^\]\\]|\\.)*\])
    | (?P<open>\((?:\?(?:[aims]*(?:-[ims]+)?:|[=!>]|<[=!]|P<\w+>)|(?!\?)))
    | (?P<close>\))
    | (?P<or>\|)
    """,
    re.VERBOSE | re.DOTALL,
)


@final
@attrs.define
class _Group:
    """What is read of a group so far: of the current alternative, and of those before it."""

    repeats: int = 0
    ways: int = 1
    most_repeats: int = 0
    all_ways: int = 0

    def end_alternative(self) -> None:
        self.most_repeats = max(self.most_repeats, self.repeats)
        self.all_ways += self.ways
        self.repeats, self.ways = 0, 1


@functools.lru_cache(maxsize=4096)
def outline(text: str) -> PatternOutline:
    """Returns what the text of a valid pattern shows; of what it cannot read, the worst.

    ```python
    from shardrules.core.patterns import outline

    assert outline(r"layers/\\d+/mlp").names == ("layers/", "/mlp")
    assert outline(r"(a+)+$").is_nested and not outline(r"(.*/)?w").is_nested
    ```
    """
    if _LITERAL.fullmatch(text):
        return PatternOutline((text,), 0, 1, is_nested=False)
    flags = _FLAGS.match(text)
    if flags is None:
        return _Outliner().read(text)
    shown = _Outliner().read(text[flags.end() :])
    return attrs.evolve(shown, names=()) if "i" in flags[1] else shown  # a name in other letters is not in the path


@final
@attrs.define
class _Outliner:
    """Reads the tokens of a pattern from left to right."""

    names: list[str] = attrs.field(factory=list)
    run: str = ""
    groups: list[_Group] = attrs.field(factory=lambda: [_Group()])
    last: _Group | None = None
    """What a repetition repeats: a group that has ended, or a single character (`None`)."""
    is_nested: bool = False

    def read(self, text: str) -> PatternOutline:
        position = 0
        has_alternatives = False
        while position < len(text):
            token = _TOKEN.match(text, position)
            # Other flags, references, conditions, characters by number; and what `re` refuses.
            if token is None or (token.lastgroup == "close" and len(self.groups) == 1):
                return PatternOutline((), len(text), 1, is_nested=True)
            position = token.end()
            kind = token.lastgroup
            if kind == "repeat":
                self._repeat(token["repeat"])
                continue
            has_alternatives = has_alternatives or (kind == "or" and len(self.groups) == 1)
            if kind != "char":
                self._end_run()
            elif len(self.groups) == 1:
                self.run += token["char"][-1]
            self.last = None
            if kind == "open":
                self.groups.append(_Group())
            elif kind == "close":
                self._close()
            elif kind == "or":
                self.groups[-1].end_alternative()
        self._end_run()
        whole = self.groups[0]
        whole.end_alternative()
        names = () if has_alternatives else tuple(self.names)
        return PatternOutline(names, whole.most_repeats, whole.all_ways, self.is_nested)

    def _end_run(self) -> None:
        if self.run:
            self.names.append(self.run)
        self.run = ""

    def _close(self) -> None:
        group = self.groups.pop()
        group.end_alternative()
        self.groups[-1].repeats += group.most_repeats
        self.groups[-1].ways *= group.all_ways
        self.last = group

    def _repeat(self, repeat: str) -> None:
        # The character before may be absent, or stand there several times.
        if self.run:
            kept = self.run if repeat == "+" else self.run[:-1]
            self.run = kept
            self._end_run()
        around = self.groups[-1]
        if repeat == "?":
            around.ways *= 2
            return
        if self.last is not None and (self.last.most_repeats or self.last.all_ways > 1):
            self.is_nested = True
        around.repeats += 1
        self.last = _Group(most_repeats=1, all_ways=1)


def compile_pattern(pattern: str | re.Pattern[str], owner: str) -> re.Pattern[str]:
    """Returns `pattern` compiled; `owner` is the rule or function named in the error."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError, TypeError, ValueError) as error:  # also of numbers in it
        why = "it nests too deeply" if isinstance(error, RecursionError) else error
        raise PatternError(f"{owner}: pattern {pattern!r:.200} is not a regular expression: {why}") from error


Matcher = Callable[[str], object]
"""Takes a path, and returns something true if the pattern matches it."""


def guarded(pattern: re.Pattern[str], match: str, paths: Iterable[str], owner: str) -> Matcher:
    """Returns the method `match` of a pattern; one that may backtrack raises a `PatternError` instead of hanging.

    Only where the text of the pattern leaves it open, another process tries it. `paths` are the paths that it may be
    asked about, and `owner` is the rule or function named in the error.

    ```python
    import re

    from shardrules.core.patterns import guarded

    assert guarded(re.compile("w$"), "search", ["mlp/w"], "me")("mlp/w")
    ```
    """
    paths = list(paths)
    plain: Matcher = getattr(pattern, match)
    if max(map(len, paths), default=0) <= outline(pattern.pattern).safe_length:
        return plain
    return _Trial(pattern, match, paths, owner)


@final
@attrs.frozen(eq=False)
class _Trial:
    """A matcher that asks another process."""

    pattern: re.Pattern[str]
    match: str
    paths: list[str]
    owner: str
    answers: dict[str, str] = attrs.field(factory=dict)

    def __call__(self, path: str) -> bool:
        if path not in self.answers:
            # Those not answered yet, beginning with this one: the process stops at the first that takes too long.
            others = (other for other in self.paths if other != path and other not in self.answers)
            requested = tuple(dict.fromkeys([path, *others]))
            answers = _ask(self.pattern, self.match, requested)
            # Where no process can be started, nothing is known, and the pattern is matched here.
            if answers is None:
                return bool(getattr(self.pattern, self.match)(path))
            self.answers.update(zip(requested, answers, strict=False))
        if self.answers[path] == _SLOW:
            raise PatternError(
                f"{self.owner}: pattern {self.pattern.pattern!r} backtracks for more than {SECONDS} s on the path "
                f"{path!r}: it has a repetition inside a repetition, as in (a+)+, or many of them in a row. Write one "
                "repetition for both, a+, or what stands between the parts, (a+/)+"
            )
        return self.answers[path] == _MATCHES


_MATCHES, _SLOW = "1", "t"

# The time is the processor's, not the clock's: a loaded machine gives the same answers. `re` checks for signals while
# it matches, but only in a main thread, which users of this package may not be in; here it is.
_SCRIPT = """
import json, re, signal, sys

def stop(signum, frame):
    raise TimeoutError

pattern, flags, match, paths, seconds = json.loads(sys.stdin.read())
matches = getattr(re.compile(pattern, flags), match)
signal.signal(signal.SIGVTALRM, stop)
for path in paths:
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        answer = "1" if matches(path) else "0"
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except TimeoutError:
        answer = "t"
    sys.stdout.write(answer)
    if answer == "t":
        break
sys.stdout.write(".")
"""


@functools.lru_cache(maxsize=64)  # a rule is often planned for the same tree again
def _ask(pattern: re.Pattern[str], match: str, paths: tuple[str, ...]) -> str | None:
    """One character for each of the first paths, up to one that takes too long; `None` without an answer."""
    request: list[Any] = [pattern.pattern, pattern.flags, match, paths, SECONDS]
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SCRIPT],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # a program that Python is embedded in has no interpreter
        return None
    return process.stdout[:-1] if process.stdout.endswith(".") else None
