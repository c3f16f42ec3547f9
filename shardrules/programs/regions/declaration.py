"""Declarations: how the dims of a region's operands and results go together, in the letters of an einsum."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.errors import ConfigError, ConfigTypeError

Term: TypeAlias = tuple[str, ...]
"""For each dim of an array its letter."""

Axes: TypeAlias = tuple[str, ...]
"""Mesh axes, the first most major."""


@final
@attrs.frozen
class ShardAxes:
    """The mesh axes over which a region is split."""

    letters: Mapping[str, Axes] = attrs.field(factory=dict)
    """Of each letter that is split by itself."""
    exchange: Axes = ()
    """Of all letters along which the function communicates, together."""
    order: Axes = ()
    """All axes of the mesh, which decides the order of those that split one dim in both ways."""

    def device_count(self, mesh_sizes: Mapping[str, int]) -> int:
        """The number of devices that the region is split over."""
        names = (*(name for letter_names in self.letters.values() for name in letter_names), *self.exchange)
        return math.prod(mesh_sizes[name] for name in names)


@final
@attrs.frozen
class Declaration:
    """The letters of the dims of operands and results. A result is a sum over the split letters that it lacks."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    split: Term
    """The letters that may be split by themselves, in the order in which they first appear."""
    exchange: Term = ()
    """The letters that may be split together, over the same axes, along which the function itself communicates."""
    sources: tuple[tuple[int, ...], ...] = ()
    """For each result the operands that it is computed from, once the function is traced: what is computed without a
    letter is no sum over it."""

    @classmethod
    def parse(cls, text: str, split: str | None, whole: str | None, exchange: str | None = None) -> Self:
        """Reads what a user declares; one error lists everything that is wrong."""
        for name, value in (("rule", text), ("split", split), ("whole", whole), ("exchange", exchange)):
            if not isinstance(value, str) and not (value is None and name != "rule"):
                raise ConfigTypeError(
                    f'region: {name} must be letters in a string, such as "b h s d"; got {value!r:.60}'
                )
        if text.count("->") != 1:
            raise ConfigError(
                f'region: {text!r} must have operands, "->" and results, with a comma between arrays: "m k, k n -> m n"'
            )
        operands, results = (tuple(tuple(term.split()) for term in side.split(",")) for side in text.split("->"))
        letters = tuple(dict.fromkeys(letter for term in (*operands, *results) for letter in term))
        problems = list(_term_problems(operands, results))
        if split is None and whole is None and exchange is None:
            problems.append("it does not say which letters may be split: pass split= or whole=")
        # Of split and whole either may be left out: it is then all other letters. A letter of the exchange may be split
        # by itself, too, but only if split names it.
        together = tuple(dict.fromkeys((exchange or "").split()))
        if split is not None:
            splits = split.split()
        else:
            others = (*(whole or "").split(), *together)
            splits = [letter for letter in letters if whole is not None and letter not in others]
        wholes = (
            [letter for letter in letters if letter not in (*splits, *together)] if whole is None else whole.split()
        )
        problems += [f"{letter!r} is in no array" for letter in (*splits, *wholes, *together) if letter not in letters]
        problems += [
            f"{letter!r} cannot be both split and whole" for letter in (*splits, *together) if letter in wholes
        ]
        in_operands = {letter for term in operands for letter in term}
        problems += [
            f"{letter!r} is in no operand, so that it cannot be split"
            for letter in (*splits, *together)
            if letter in letters and letter not in in_operands
        ]
        problems += [
            f"{letter!r} is neither in split nor in whole"
            for letter in letters
            if letter not in (*splits, *wholes, *together)
        ]
        if problems:
            raise ConfigError(f"region {text!r}: {'; '.join(dict.fromkeys(problems))}")
        return cls(operands, results, tuple(letter for letter in letters if letter in splits), together)

    def __str__(self) -> str:
        sides = (", ".join(" ".join(term) for term in side) for side in (self.operands, self.results))
        return " -> ".join(sides)

    @property
    def text(self) -> str:
        """All of it, the same in every process: equations that print it are told apart by it."""
        exchange = f"; exchange {' '.join(self.exchange)}" if self.exchange else ""
        return f"{self}; split {' '.join(self.split) or 'nothing'}{exchange}"

    def sizes(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]] = ()) -> dict[str, int]:
        """The size of each letter, in shapes that fit (`misfits`)."""
        sides = zip((*self.operands, *self.results), (*operands, *results), strict=False)
        return {letter: size for term, shape in sides for letter, size in zip(term, shape, strict=True)}

    def misfits(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]] | None) -> list[str]:
        """The misfits in the shapes of operands, and of results if they are known."""
        problems: list[str] = []
        sizes: dict[str, tuple[int, str]] = {}
        sides = [("operand", self.operands, operands), ("result", self.results, results)]
        for kind, terms, shapes in sides:
            if shapes is None:
                continue
            if len(terms) != len(shapes):
                problems.append(f"{len(terms)} {kind}s are declared, and the function has {len(shapes)}")
                continue
            for index, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
                name = f"{kind} {index}"
                if len(term) != len(shape):
                    problems.append(f"{name} has shape {shape}, and {' '.join(term) or 'no dims'!r} is declared")
                    continue
                for letter, size in zip(term, shape, strict=True):
                    size_before, name_before = sizes.setdefault(letter, (size, name))
                    if size_before != size:
                        problems.append(f"{letter!r} is {size_before} in {name_before} and {size} in {name}")
        return problems

    def summed(self, result_index: int) -> Term:
        """The letters split by themselves that a result is summed over."""
        letters = self._letters_of_sources(result_index)
        return tuple(letter for letter in self.split if letter in letters and letter not in self.results[result_index])

    def sums_exchange(self, result_index: int) -> bool:
        """A result is summed over the devices that exchange, since it has none of their letters.

        This holds for any result: the function knows over which axes it runs, and returns its part.
        """
        return bool(self.exchange) and not any(letter in self.results[result_index] for letter in self.exchange)

    def all_summed(self, result_index: int) -> Term:
        """All letters that a result is summed over: the letters of the exchange go together."""
        exchange = self.exchange if self.sums_exchange(result_index) else ()
        return tuple(dict.fromkeys((*self.summed(result_index), *exchange)))

    def sum_axes(self, result_index: int, axes: ShardAxes) -> Axes:
        """The axes over which the shards of a result are parts of a sum."""
        exchange = axes.exchange if self.sums_exchange(result_index) else ()
        names = (name for letter in self.summed(result_index) for name in axes.letters.get(letter, ()))
        return (*names, *exchange)

    def _letters_of_sources(self, result_index: int) -> frozenset[str]:
        sources = self.sources[result_index] if self.sources else range(len(self.operands))
        return frozenset(letter for operand_index in sources for letter in self.operands[operand_index])

    def axes_of(
        self,
        specs: Sequence[PartitionSpec],
        results_first: Sequence[PartitionSpec],
        mesh_sizes: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> ShardAxes:
        """The axes that split each letter, for operands and results in these specs: as many as fit, results first."""
        terms = [*zip(self.results, results_first, strict=True), *zip(self.operands, specs, strict=True)]
        entries = [
            (letter, names)
            for term, spec in terms
            for letter, entry in zip(term, tuple(spec), strict=False)
            if (names := () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))
        ]
        exchange = self._exchange_axes(entries, mesh_sizes, sizes)
        together = math.prod(mesh_sizes[name] for name in exchange)
        axes: dict[str, Axes] = {}
        used = dict.fromkeys(exchange)
        for letter, all_names in entries:
            # An axis serves one letter, the first that wants it; a letter that does not divide stays whole.
            names = tuple(name for name in all_names if name not in exchange) if letter in self.exchange else all_names
            if letter not in self.split or letter in axes or not names or any(name in used for name in names):
                continue
            pieces = math.prod(mesh_sizes[name] for name in names) * (together if letter in self.exchange else 1)
            if sizes[letter] % pieces == 0:
                axes[letter] = names
                used.update(dict.fromkeys(names))
        return ShardAxes(axes, exchange, tuple(mesh_sizes))

    def _exchange_axes(
        self, entries: Sequence[tuple[str, Axes]], mesh_sizes: Mapping[str, int], sizes: Mapping[str, int]
    ) -> Axes:
        """The axes that split the letters of the exchange, where letters are split over some axes.

        An axis of a letter that may also be split by itself has to split another of these letters, too.
        """
        letters_of: dict[str, dict[str, None]] = {}
        for letter, names in entries:
            for name in names if letter in self.exchange else ():
                letters_of.setdefault(name, {})[letter] = None
        chosen: list[str] = []
        for name in (name for name in mesh_sizes if name in letters_of):
            letters = letters_of[name]
            pieces = math.prod(mesh_sizes[other] for other in (*chosen, name))
            # All letters of the exchange are cut into as many pieces: one that does not divide rules an axis out.
            is_together = len(letters) > 1 or any(letter not in self.split for letter in letters)
            if is_together and all(sizes[letter] % pieces == 0 for letter in self.exchange):
                chosen.append(name)
        return tuple(chosen)

    def allows(self, axes: ShardAxes) -> bool:
        return all(letter in self.split for letter in axes.letters) and bool(self.exchange or not axes.exchange)

    def specs(self, axes: ShardAxes) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
        """The specs of operands and results where letters are split over these axes."""

        def entry(letter: str) -> Axes | None:
            names = axes.letters.get(letter, ())
            if axes.exchange and letter in self.exchange:
                names = tuple(sorted((*names, *axes.exchange), key=axes.order.index)) if names else axes.exchange
            return names or None

        def spec(term: Term) -> PartitionSpec:
            return PartitionSpec(*map(entry, term))

        return tuple(map(spec, self.operands)), tuple(map(spec, self.results))

    def with_dim(self, batched: Sequence[bool]) -> Self:
        """Adds a letter in front of some operands and of all results, which may be split: the dim of a `vmap`."""
        letters = {letter for term in (*self.operands, *self.results) for letter in term}
        # A `vmap` around another has taken a number already; one of these is free.
        letter = next(name for index in range(len(letters) + 1) if (name := f"vmap{index}") not in letters)
        operands = tuple((letter, *term) if flag else term for term, flag in zip(self.operands, batched, strict=True))
        return attrs.evolve(
            self,
            operands=operands,
            results=tuple((letter, *term) for term in self.results),
            split=(letter, *self.split),
        )


def _term_problems(operands: Sequence[Term], results: Sequence[Term]) -> Iterator[str]:
    for kind, terms in (("operand", operands), ("result", results)):
        for index, term in enumerate(terms):
            for letter, count in Counter(term).items():
                if not (letter.isidentifier() and letter[0].isalpha()):
                    yield f"{letter!r} in {kind} {index} is not a name"
                elif count > 1:
                    yield f"{letter!r} is in {count} dims of {kind} {index}; an array has each letter once"
