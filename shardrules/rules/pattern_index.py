"""Which of many patterns may match a path, from the names that each pattern must find in it.

With thousands of patterns, trying them in order takes nearly all of the time of a plan, and nearly all of them name a
layer that is not in the path. So each pattern is entered under one of its names, and a path is asked for its names.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import final

import attrs

from shardrules.core.patterns import PatternOutline

MIN_PATTERNS = 64
"""From this number of patterns on an index is quicker than trying all in order: a path has a hundred names to look up,
each in a third of the time that a pattern takes. With half as many both take as long."""

_LENGTH = 16
"""How many characters of a name are looked up: enough for the number of a layer with what is around it. With twice as
many, most names are shorter, and the table of each length is asked by itself."""


@final
@attrs.frozen(eq=False)
class PatternIndex:
    """Patterns by one name that a match must have; `anywhere` are those without any."""

    tables: tuple[tuple[int, dict[str, list[int]]], ...]
    anywhere: tuple[int, ...]

    @staticmethod
    def of(outlines: Sequence[PatternOutline]) -> "PatternIndex":
        """Returns the index of patterns with these outlines; each is entered under its rarest name.

        ```python
        from shardrules.core.patterns import outline
        from shardrules.rules.pattern_index import PatternIndex

        index = PatternIndex.of([outline("layers/0/up"), outline("layers/1/up"), outline(".*")])
        assert index.candidates("layers/1/up/w") == [1, 2]
        ```
        """
        keys = [list(_keys(shown)) for shown in outlines]
        counts = collections.Counter(key for own_keys in keys for key in dict.fromkeys(own_keys))
        tables: dict[int, dict[str, list[int]]] = {}
        anywhere: list[int] = []
        for pattern_index, own_keys in enumerate(keys):
            if not own_keys:
                anywhere.append(pattern_index)
                continue
            # Of equally rare ones the longest, then the first.
            rarest = min(own_keys, key=lambda key: (counts[key], -len(key)))
            tables.setdefault(len(rarest), {}).setdefault(rarest, []).append(pattern_index)
        return PatternIndex(tuple(sorted(tables.items())), tuple(anywhere))

    def candidates(self, path: str) -> list[int]:
        """Returns the indices of the patterns that may match `path`, ascending: all that do, and few others."""
        entries = [
            entry
            for length, table in self.tables
            for start in range(len(path) - length + 1)
            if (entry := table.get(path[start : start + length])) is not None
        ]
        if not entries:
            return list(self.anywhere)
        return sorted({*self.anywhere, *(pattern_index for entry in entries for pattern_index in entry)})


def _keys(shown: PatternOutline) -> Iterator[str]:
    for name in shown.names:
        for start in range(max(1, len(name) - _LENGTH + 1)):
            yield name[start : start + _LENGTH]
