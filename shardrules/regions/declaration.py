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
class Declaration:
    """How the dims of operands and results go together. A result is a sum over the split letters that it lacks.

    ```python
    from shardrules.regions.declaration import Declaration

    matmul = Declaration.parse("m k, k n -> m n", split="m n", whole=None)
    assert matmul.operands == (("m", "k"), ("k", "n")) and matmul.split == ("m", "n")
    ```
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    split: Term
    """The letters that may be split, in the order in which they first appear."""
    sources: tuple[tuple[int, ...], ...] = ()
    """For each result the operands that it is computed from, once the function is traced: what is computed without a
    letter is no sum over it."""

    @classmethod
    def parse(cls, text: str, split: str | None, whole: str | None) -> Self:
        """Reads what a user declares; one error lists everything that is wrong."""
        for name, value in (("rule", text), ("split", split), ("whole", whole)):
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
        if split is None and whole is None:
            problems.append("it does not say which letters may be split: pass split= or whole=")
        splits = (
            [letter for letter in letters if letter not in (whole or "").split()] if split is None else split.split()
        )
        wholes = [letter for letter in letters if letter not in splits] if whole is None else whole.split()
        problems += [f"{letter!r} is in no array" for letter in (*splits, *wholes) if letter not in letters]
        problems += [f"{letter!r} cannot be both split and whole" for letter in splits if letter in wholes]
        in_operands = {letter for term in operands for letter in term}
        problems += [
            f"{letter!r} is in no operand, so that it cannot be split"
            for letter in splits
            if letter in letters and letter not in in_operands
        ]
        problems += [
            f"{letter!r} is neither in split nor in whole" for letter in letters if letter not in (*splits, *wholes)
        ]
        if problems:
            raise ConfigError(f"region {text!r}: {'; '.join(dict.fromkeys(problems))}")
        return cls(operands, results, tuple(letter for letter in letters if letter in splits))

    def __str__(self) -> str:
        sides = (", ".join(" ".join(term) for term in side) for side in (self.operands, self.results))
        return " -> ".join(sides)

    @property
    def text(self) -> str:
        """All of it, the same in every process: equations that print it are told apart by it."""
        return f"{self}; split {' '.join(self.split) or 'nothing'}"

    def sizes(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]] = ()) -> dict[str, int]:
        """The size of each letter, in shapes that fit (`misfits`)."""
        sides = zip((*self.operands, *self.results), (*operands, *results), strict=False)
        return {letter: size for term, shape in sides for letter, size in zip(term, shape, strict=True)}

    def misfits(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]] | None) -> list[str]:
        """What is wrong with the shapes of operands, and of results where they are known."""
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
        """The split letters that a result is summed over."""
        sources = self.sources[result_index] if self.sources else range(len(self.operands))
        letters = {letter for operand_index in sources for letter in self.operands[operand_index]}
        return tuple(letter for letter in self.split if letter in letters and letter not in self.results[result_index])

    def axes_of(
        self,
        specs: Sequence[PartitionSpec],
        results_first: Sequence[PartitionSpec],
        mesh_sizes: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> dict[str, Axes]:
        """Which axes split each letter, for operands and results in these specs: whatever fits, results first."""
        axes: dict[str, Axes] = {}
        used: dict[str, None] = {}
        terms = [*zip(self.results, results_first, strict=True), *zip(self.operands, specs, strict=True)]
        for term, spec in terms:
            for letter, entry in zip(term, tuple(spec), strict=False):
                names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
                if letter not in self.split or letter in axes or not names or any(name in used for name in names):
                    continue
                if sizes[letter] % math.prod(mesh_sizes[name] for name in names) == 0:
                    axes[letter] = names
                    used.update(dict.fromkeys(names))
        return axes

    def specs(self, axes: Mapping[str, Axes]) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
        """The specs of operands and results where each letter is split over these axes."""

        def spec(term: Term) -> PartitionSpec:
            return PartitionSpec(*(axes.get(letter) for letter in term))

        return tuple(map(spec, self.operands)), tuple(map(spec, self.results))

    def with_dim(self, batched: Sequence[bool]) -> Self:
        """Adds a letter in front of some operands and of all results, which may be split: the dim of a `vmap`."""
        letters = {letter for term in (*self.operands, *self.results) for letter in term}
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
