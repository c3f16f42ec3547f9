"""Patterns for the paths of a tree: for each group of paths the shortest endings that only its own paths have."""

import collections
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

import attrs

from shardrules.cli.init.guess import Guess

_INDEX = r"\d+"
_GENERAL = ("weight", "kernel", "w", "value", "embedding", _INDEX)
"""Names that say too little alone: a pattern has the one before them, too."""


@final
@attrs.frozen
class Pattern:
    """A pattern, and the positions of its paths."""

    text: str
    indices: tuple[int, ...]


def patterns(paths: Sequence[str], guesses: Sequence[Guess]) -> tuple[tuple[Guess, tuple[Pattern, ...]], ...]:
    """Returns the patterns of each guess, in the order of the tree; arrays that are whole come last.

    Each path has exactly one of the guesses, and matches no pattern of another.
    """
    endings = _endings(paths, guesses)
    groups: dict[Guess, dict[str, list[int]]] = {}
    for path_index, (guess, ending) in enumerate(zip(guesses, endings, strict=True)):
        groups.setdefault(guess, {}).setdefault(ending, []).append(path_index)
    ordered = sorted(groups, key=lambda guess: guess.is_whole)
    return tuple((guess, tuple(_joined(groups[guess], paths, guess.is_whole))) for guess in ordered)


def _endings(paths: Sequence[str], guesses: Sequence[Guess]) -> list[str]:
    """The shortest ending of each path that no path with another guess has; with any index, if that is possible."""
    exact = [tuple(map(_escaped, path.split("/"))) for path in paths]
    general = [tuple(_INDEX if part.isdecimal() else part for part in parts) for parts in exact]
    owners: dict[tuple[str, ...], dict[Guess, None]] = collections.defaultdict(dict)
    for every in (general, exact):
        for parts, guess in zip(every, guesses, strict=True):
            for begin in range(len(parts)):
                owners[parts[begin:]][guess] = None
    return [
        next(_own_endings(general_parts, exact_parts, owners))
        for general_parts, exact_parts in zip(general, exact, strict=True)
    ]


def _escaped(name: str) -> str:
    """The pattern of a name. TOML has no way to write a lone surrogate, and patterns do."""
    return "".join(f"\\u{ord(char):04x}" if unicodedata.category(char) == "Cs" else char for char in re.escape(name))


def _own_endings(
    general: tuple[str, ...], exact: tuple[str, ...], owners: Mapping[tuple[str, ...], Mapping[Guess, None]]
) -> Iterator[str]:
    # The last name that says something, and what follows it.
    least = 1 + next((back for back, part in enumerate(reversed(general)) if part not in _GENERAL), 0)
    for parts in (general, exact):
        for length in range(min(least, len(parts)), len(parts) + 1):
            # An empty key ends everything.
            if parts[-length:] != ("",) and len(owners[parts[-length:]]) == 1:
                yield "/".join(parts[-length:])
    # Another path ends with all of this one.
    yield f"^{'/'.join(exact)}"


def _joined(group: Mapping[str, Sequence[int]], paths: Sequence[str], is_whole: bool) -> Iterator[Pattern]:
    """Yields the patterns of the endings of one guess, with alternatives for endings that differ in one name."""
    by_begin: dict[str, dict[tuple[str, ...], Sequence[int]]] = {}
    for ending, indices in group.items():
        text = ending.removeprefix("^")
        lengths = [paths[path_index].count("/") - text.count("/") for path_index in indices]
        # A name must match as a whole: `up` is not the end of `backup`.
        begin = "^" if ending.startswith("^") or not any(lengths) else "/" if all(lengths) else "(^|/)"
        by_begin.setdefault(begin, {})[tuple(text.split("/"))] = indices
    for begin, endings in by_begin.items():
        # First the name of the layer, then what is around it, then the name of the array.
        for back in (2, 3, 1):
            endings = _merged(endings, back)
        texts = {"/".join(names): indices for names, indices in endings.items()}
        for pack in _packs(texts) if is_whole else [[text] for text in texts]:
            pattern = f"{begin}({'|'.join(pack)})$" if len(pack) > 1 else f"{begin}{pack[0]}$"
            yield Pattern(pattern, tuple(sorted(itertools.chain.from_iterable(texts[text] for text in pack))))


def _merged(endings: Mapping[tuple[str, ...], Sequence[int]], back: int) -> dict[tuple[str, ...], Sequence[int]]:
    """Joins endings that differ only in their name at `back` from the end, if the result is not too long."""
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for parts in endings:
        key = (*parts[:-back], "", *parts[len(parts) - back + 1 :]) if len(parts) >= back else parts
        alike.setdefault(key, []).append(parts)
    merged: dict[tuple[str, ...], Sequence[int]] = {}
    for group in alike.values():
        remaining = iter(group)
        # Packs keep the order of the group, so their members are taken one after the other.
        for pack in _packs(parts[-back:][0] for parts in group):
            members = [next(remaining) for _ in pack]
            first = members[0]
            if len(members) > 1:
                first = (*first[:-back], f"({'|'.join(pack)})", *first[len(first) - back + 1 :])
            merged[first] = tuple(itertools.chain.from_iterable(endings[member] for member in members))
    return merged


def _packs(texts: Iterable[str]) -> list[list[str]]:
    """Puts texts into packs that are short enough for one line."""
    packs: list[list[str]] = []
    for text in texts:
        # With `path = ` and quotes a line has 100 characters.
        if packs and sum(len(other) + 1 for other in packs[-1]) + len(text) <= 90:
            packs[-1].append(text)
        else:
            packs.append([text])
    return packs
