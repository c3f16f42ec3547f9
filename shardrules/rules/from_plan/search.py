"""The search for the shortest list of patterns, from the one at the end, for all arrays, to exceptions at the top.

Each step puts the pattern and the value on top that set right most of what is wrong. Arrays are bits of integers, so
that a pattern with a value is judged by a few operations.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.leaf import Leaf
from shardrules.core.spec import canonical
from shardrules.rules.from_plan.families import Family, exact, samples
from shardrules.rules.from_plan.patterns import LONGEST, candidates, joined
from shardrules.rules.from_plan.values import Value, gives, placement, rule_values
from shardrules.rules.fsdp import FSDPShardingRule

EVERYTHING = ".*"
"""The pattern of the rule at the end."""

_STARTS = 3
"""The values with which a list may end that are tried: those of most families. Chosen by hand."""

_HIDDEN = 10.0
"""The words that a reader has to guess where a rule stands for a single spec. Chosen by hand."""

_SPLIT_REST = 6.0
"""The words that a list is better off with than with a last value that splits all that is left. Chosen by hand."""

_CAUTION = (1.0, 3.0)
"""What it counts, beside an array that a pattern sets right, that it sets another one wrong. Chosen by hand."""

_MOST_PARTS = 3
"""With more names at the top, none is searched first: they are parts of a model, not arguments. Chosen by hand."""

_MOST_FAMILIES = 400
"""With more families, as where layers have specs by chance, each gets a pattern of its own. Chosen by hand."""


@final
@attrs.frozen
class Entry:
    """One rule of a list: patterns with a value, and the bits of the arrays that they match."""

    patterns: tuple[str, ...]
    cost: float
    value_index: int
    matches: int


@final
@attrs.frozen(eq=False)
class _Choices:
    """What can be written: each pattern with what it costs and matches, each value with the arrays that it suits."""

    patterns: tuple[tuple[str, float, int], ...]
    values: tuple[tuple[Value, float], ...]
    suits: tuple[int, ...]
    has_whole: bool
    """Some array is whole."""
    placements: tuple[int, ...]
    """The arrays of each placement other than `P()`."""
    paths: tuple[str, ...]

    @property
    def everything(self) -> int:
        return (1 << len(self.paths)) - 1

    def parts(self) -> tuple[int, ...]:
        """All arrays, and those below each name at the top where there are few, as of parameters and of state."""
        names = [path.partition("/")[0] for path in self.paths]
        groups = {
            name: sum(1 << bit for bit, other in enumerate(names) if other == name) for name in dict.fromkeys(names)
        }
        return (self.everything, *(groups.values() if 1 < len(groups) <= _MOST_PARTS else ()))

    def right(self, entries: Sequence[Entry]) -> int:
        """The arrays that a list, the top first, sets right."""
        rest, right = self.everything, 0
        for entry in entries:
            right |= rest & entry.matches & self.suits[entry.value_index]
            rest &= ~entry.matches
        return right

    def cost(self, entries: Sequence[Entry]) -> float:
        # Arrays that come later may have no dimension that the last value splits: they had better be whole.
        last = self.values[entries[-1].value_index][0]
        is_whole = isinstance(last, FSDPShardingRule) or last == PartitionSpec() or not self.has_whole
        rest, cost = self.everything, 0.0 if is_whole else _SPLIT_REST
        for entry in entries:
            members, rest = rest & entry.matches, rest & ~entry.matches
            value, words = self.values[entry.value_index]
            # A rule that says no more than one spec does hides it.
            is_spec = isinstance(value, PartitionSpec) or sum(bool(members & bits) for bits in self.placements) > 1
            cost += 2 + entry.cost + words + (0 if is_spec else _HIDDEN)
        return cost

    def extended(self, last: int, caution: float, value_count: int, part: int) -> list[Entry]:
        """A list that ends with a value for everything, and sets all arrays right by the first values.

        The arrays of `part` come first, and above them what else there is: the state below the parameters.
        """
        entries = [Entry((EVERYTHING,), 0.0, last, self.everything)]
        right = self.suits[last]
        for scope in dict.fromkeys((part, self.everything)):
            while wrong := scope & ~right:
                steps = self._steps(scope & right, wrong, caution, value_count)
                best = max(steps, default=None, key=lambda step: step[0])
                entry = best[1] if best is not None and best[0] > 0 else self._single(wrong)
                entries.insert(0, entry)
                right = (right & ~entry.matches) | (entry.matches & self.suits[entry.value_index])
        return entries

    def _steps(self, right: int, wrong: int, caution: float, value_count: int) -> Iterator[tuple[float, Entry]]:
        for value_index, suits in enumerate(self.suits[:value_count]):
            gain = wrong & suits
            if not gain:
                continue
            loss, extra = right & ~suits, self.values[value_index][1]
            for pattern, cost, matches in self.patterns:
                mended = (matches & gain).bit_count()
                if mended:
                    broken = (matches & loss).bit_count()
                    if mended > broken:
                        score = mended - caution * broken - 0.1 * cost - extra
                        yield score, Entry((pattern,), cost, value_index, matches)

    def _single(self, wrong: int) -> Entry:
        """An entry for the first array that is wrong."""
        bit = (wrong & -wrong).bit_length() - 1
        value_index = next(
            index
            for index, (value, _) in enumerate(self.values)
            if isinstance(value, PartitionSpec) and self.suits[index] >> bit & 1
        )
        pattern = exact(self.paths[bit])
        matches = _matches(pattern, self.paths)
        return Entry((pattern,), 4.0, value_index, matches)

    def shortened(self, entries: list[Entry]) -> list[Entry]:
        """The list without what is idle, and with one entry for several of one value, where that changes nothing."""
        entries, position = self._without_idle(entries), 0
        while position < len(entries):
            merged = next(self._merged(entries, position), None)
            entries, position = (entries, position + 1) if merged is None else (merged, position)
        return self._without_idle(entries)  # an exception may be one no more where another entry moved

    def _without_idle(self, entries: list[Entry]) -> list[Entry]:
        position = 0
        while position < len(entries) - 1:
            without = entries[:position] + entries[position + 1 :]
            is_idle = self.right(without) == self.everything
            entries, position = (without, 0) if is_idle else (entries, position + 1)
        return entries

    def _merged(self, entries: list[Entry], position: int) -> Iterator[list[Entry]]:
        """Yields the lists in which the entry at `position` is one with a later one."""
        entry = entries[position]
        for later in range(position + 1, len(entries)):
            other = entries[later]
            if other.value_index != entry.value_index or other.patterns == (EVERYTHING,):
                continue
            patterns = (*entry.patterns, *other.patterns)
            if len(joined(patterns)) > LONGEST:
                continue
            both = Entry(patterns, entry.cost + other.cost, entry.value_index, entry.matches | other.matches)
            rest = entries[:position] + entries[position + 1 : later] + entries[later + 1 :]
            for place in (position, later - 1):
                merged = [*rest[:place], both, *rest[place:]]
                if self.right(merged) == self.everything:
                    yield merged


def _matches(pattern: str, paths: Sequence[str]) -> int:
    search = re.compile(pattern).search
    return int("".join("1" if search(path) else "0" for path in reversed(paths)) or "0", 2)


def _choices(
    every: Sequence[Family], paths: Sequence[str], leaves: Sequence[Leaf], specs: Sequence[PartitionSpec]
) -> _Choices:
    kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
    members = sorted({member for family in every for member in samples(family, kinds)})
    sample_paths = tuple(paths[member] for member in members)
    texts: dict[str, float] = {}
    for family in every:
        for text, cost in candidates(family):
            texts[text] = min(cost, texts.get(text, cost))
    # Of patterns that match the same, the one that is read most easily.
    by_matches: dict[int, tuple[str, float, int]] = {}
    for text, cost in sorted(texts.items(), key=lambda item: (item[1], len(item[0]))):
        by_matches.setdefault(matches := _matches(text, sample_paths), (text, cost, matches))
    by_matches.pop(0, None)
    sample_leaves, sample_specs = [leaves[member] for member in members], [specs[member] for member in members]
    plain = {placement(spec): canonical(spec) for spec in sample_specs}
    values: list[tuple[Value, float]] = [(spec, 0.0) for spec in plain.values()]
    values += rule_values(sample_leaves, list(plain.values()), sample_specs)
    suits = [_suits(value, sample_leaves, sample_specs) for value, _ in values]
    # A rule that suits no more than a spec does says nothing that the spec does not.
    keep = [
        index
        for index, suit in enumerate(suits)
        if index < len(plain) or not any(suit & ~other == 0 for other in suits[: len(plain)])
    ]
    return _Choices(
        tuple(by_matches.values()),
        tuple(values[index] for index in keep),
        tuple(suits[index] for index in keep),
        PartitionSpec() in plain.values(),
        tuple(suits[index] for index, spec in enumerate(plain.values()) if spec != PartitionSpec()),
        sample_paths,
    )


def _suits(value: Value, leaves: Sequence[Leaf], specs: Sequence[PartitionSpec]) -> int:
    answers: dict[tuple[object, ...], bool] = {}
    bits = 0
    for bit, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        key = (leaf.shape, leaf.dtype, placement(spec))
        if key not in answers:
            answers[key] = gives(value, leaf, spec)
        bits |= answers[key] << bit
    return bits


def shortest(
    every: Sequence[Family], paths: Sequence[str], leaves: Sequence[Leaf], specs: Sequence[PartitionSpec]
) -> list[tuple[str, Value]]:
    """Returns the patterns with their values, the top first, that give samples of the families their specs.

    `paths`, `leaves` and `specs` are those of all arrays; the paths of the leaves are not read.
    """
    if len(every) > _MOST_FAMILIES:
        most = max(every, key=lambda family: len(family.members))
        rest = {
            paths[member]: canonical(specs[member])
            for family in every
            for member in family.members
            if placement(specs[member]) != placement(specs[most.members[0]])
        }
        pairs = [(exact(path), spec) for path, spec in rest.items()]
        return [*pairs, (EVERYTHING, canonical(specs[most.members[0]]))]
    choices = _choices(every, paths, leaves, specs)
    # Among equals `P()` is the value that a reader expects at the end.
    starts = sorted(
        range(len(choices.suits)),
        key=lambda index: (-choices.suits[index].bit_count(), choices.values[index][1]),
    )
    whole = [index for index, (value, _) in enumerate(choices.values) if value == PartitionSpec()]
    spec_count = sum(isinstance(value, PartitionSpec) for value, _ in choices.values)
    lists: list[list[Entry]] = []
    for value_count in dict.fromkeys((spec_count, len(choices.values))):
        own_starts = [*whole, *[start for start in starts if start < value_count][:_STARTS]]
        for start, caution, part in itertools.product(dict.fromkeys(own_starts), _CAUTION, choices.parts()):
            lists.append(choices.shortened(choices.extended(start, caution, value_count, part)))
    best = min(lists, key=choices.cost)

    def first(pattern: str) -> int:
        matches = _matches(pattern, choices.paths)
        return matches & -matches

    # Names in the order of the tree.
    return [(joined(sorted(entry.patterns, key=first)), choices.values[entry.value_index][0]) for entry in best]
