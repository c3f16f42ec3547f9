"""Families of arrays: paths that differ in numbers only, and have one spec."""

import re
from collections.abc import Hashable, Iterator, Sequence
from typing import final

import attrs

NUMBER = "\0"
"""The character that stands for a number in the text of a family. No path is likely to have it."""

_NUMBERS = re.compile(f"[0-9]+|{NUMBER}")
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")
_SEPARATOR = re.compile(r"([/.])")


def escaped(text: str) -> str:
    """Returns the pattern of a text; other than `re.escape`, it leaves all characters without a meaning as they are."""
    # TOML has no way to write a lone surrogate, and patterns do.
    return "".join(
        f"\\u{ord(char):04x}" if "\ud800" <= char <= "\udfff" else char for char in _SPECIAL.sub(r"\\\g<0>", text)
    )


def exact(path: str) -> str:
    """Returns the pattern that matches one path."""
    ending = r"\Z" if path.endswith("\n") else "$"
    return f"^{escaped(path)}{ending}"


@final
@attrs.frozen
class Family:
    """Some arrays, as positions in a plan: their paths are one text with other numbers in it."""

    text: str
    """The path, with `NUMBER` for each number."""
    numbers: tuple[str, ...]
    """The pattern of each number."""
    members: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The patterns of the names in the path and of what separates them, alternating."""
        rest = iter(self.numbers)
        return tuple(
            "".join(next(rest) if char == NUMBER else escaped(char) for char in name)
            for name in _SEPARATOR.split(self.text)
        )


def families(paths: Sequence[str], placements: Sequence[Hashable]) -> Iterator[Family]:
    """Yields the families of arrays with these paths and placements, in the order of the paths.

    Layers differ in a number. Where some of them have another placement than most, their family has the patterns of
    these numbers only, if that is enough to tell them apart; otherwise each of these arrays is a family. Most have the
    pattern of any number, which takes the layers that are added, too.
    """
    groups: dict[str, dict[Hashable, list[int]]] = {}
    for position, (path, placement) in enumerate(zip(paths, placements, strict=True)):
        groups.setdefault(_NUMBERS.sub(NUMBER, path), {}).setdefault(placement, []).append(position)
    for text, by_placement in groups.items():
        places = list(_places(text))
        # Most texts have one placement, and indices only.
        if len(by_placement) == 1 and all(places):
            yield Family(text, (r"\d+",) * len(places), tuple(*by_placement.values()))
            continue
        columns = {
            placement: [
                dict.fromkeys(column)
                for column in zip(*(_NUMBERS.findall(paths[position]) for position in members), strict=True)
            ]
            for placement, members in by_placement.items()
        }
        most = max(by_placement, key=lambda placement: len(by_placement[placement]))
        for placement, members in by_placement.items():
            own_columns = columns[placement]
            others = [columns[other] for other in by_placement if other != placement]
            column = _telling(own_columns, others)
            if placement != most and column is None:
                for member in members:
                    yield Family(text, tuple(_NUMBERS.findall(paths[member])), (member,))
                continue
            numbers = [_number(list(values), place) for values, place in zip(own_columns, places, strict=True)]
            if placement != most and column is not None:
                numbers[column] = _either(list(own_columns[column]))
            yield Family(text, tuple(numbers), tuple(members))


def single(path: str, member: int) -> Family:
    """Returns the family of one array."""
    return Family(_NUMBERS.sub(NUMBER, path), tuple(_NUMBERS.findall(path)), (member,))


def _telling(own_columns: Sequence[dict[str, None]], others: Sequence[Sequence[dict[str, None]]]) -> int | None:
    """The number that a family shares with no other, the one with the fewest values."""
    columns = [
        column
        for column, values in enumerate(own_columns)
        if all(values.keys().isdisjoint(other[column].keys()) for other in others)
    ]
    return min(columns, key=lambda column: len(own_columns[column]), default=None)


def _places(text: str) -> Iterator[bool]:
    """For each number in a text whether it is an index, as of a layer. The first name counts arguments, not layers."""
    for place, name in enumerate(_SEPARATOR.split(text)):
        yield from [name == NUMBER and place > 0] * name.count(NUMBER)


def _number(values: Sequence[str], is_index: bool) -> str:
    return values[0] if len(values) == 1 and not is_index else r"\d+"


def _either(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"({'|'.join(values)})"


def samples(family: Family, kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """Returns some members of a family, more of a large one: the first, the last, and one of each kind."""
    by_kind = {kinds[member]: member for member in family.members}
    step = -(-len(family.members) // len(family.members).bit_length())
    return tuple(sorted({*family.members[::step], family.members[-1], *by_kind.values()}))
