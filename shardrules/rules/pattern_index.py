"""An index of many patterns, by the names that each must find in a path.

With thousands of patterns, trying them in order takes nearly all of the time of a plan, and nearly all of them name a
layer that is not in the path. So each pattern is entered under one of its names, and a path is asked for its names.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import final

import attrs

MIN_PATTERNS = 64
"""From this number of patterns on an index is quicker than trying all in order: at 500 in 0.4 of the time, at 8,000 in
0.14, of a plan. Chosen by hand."""

_LENGTH = 16
"""The characters of a name that are looked up: the number of a layer and what is around it. Chosen by hand."""


@final
@attrs.frozen(eq=False)
class PatternIndex:
    """Patterns by one name that a match must have; `anywhere` are those without any."""

    tables: tuple[tuple[int, dict[str, list[int]]], ...]
    anywhere: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[tuple[str, ...]]) -> "PatternIndex":
        """Returns the index of patterns with these names; each is entered under its rarest one.

        ```python
        from shardrules.rules.pattern_index import PatternIndex

        index = PatternIndex.of([("layers/0/up",), ("layers/1/up",), ()])
        assert index.candidates("layers/1/up/w") == [1, 2]
        ```
        """
        keys = [list(_keys(pattern_names)) for pattern_names in names]
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


def _keys(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        for start in range(max(1, len(name) - _LENGTH + 1)):
            yield name[start : start + _LENGTH]
