"""Leaves and Verdict: what a rule is asked about a whole tree, or a part of it, and what it answers."""

from collections.abc import Iterable, Sequence
from typing import Any, final

import attrs

from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.tree import Survey


@final
@attrs.frozen
class Verdict:
    """The decisions of a rule about some leaves.

    **Arguments:**

    - `decisions`: one for each leaf, in order.
    - `findings`: what is worth knowing beside them. A rule around other rules hands on what they found.
    - `idle`: the rule's own patterns that won no leaf: the index of each, and the finding that says so. The engine
        collects them, and drops those that win a leaf where an equal rule is asked about other leaves.
    """

    decisions: tuple[Decision, ...]
    findings: tuple[Finding, ...] = ()
    idle: tuple[tuple[int, Finding], ...] = ()


@final
@attrs.frozen(eq=False)
class RuleCall:
    """One call of a rule: what it was asked, and what it decided."""

    rule: Any
    leaves: "Leaves"
    """Their `calls` are those of the rules inside. A record that holds itself would wait for the garbage collector."""
    verdict: Verdict


@final
@attrs.frozen(eq=False)
class Leaves:
    """Some leaves of a tree, for a rule to decide.

    **Arguments:**

    - `items`: one `Leaf` for each kind.
    - `counts`: how many leaves of the tree are of each kind.
    - `kind_indices`: the index of each kind in the survey.
    - `survey`: the whole tree.
    - `settled`: what earlier rules of a composite have decided: each leaf with its spec, and its count.
    - `calls`: where the engine records every call of a rule.
    """

    items: tuple[Leaf, ...]
    counts: tuple[int, ...]
    kind_indices: tuple[int, ...]
    survey: Survey
    settled: tuple[tuple[Leaf, int], ...] = ()
    calls: list[RuleCall] = attrs.field(factory=list)

    def select(self, positions: Sequence[int], settled: Iterable[tuple[Leaf, int]] = ()) -> "Leaves":
        """Returns the leaves at these ascending `positions`; `settled` are leaves that were decided meanwhile."""
        if len(positions) == len(self.items) and not settled:
            return self
        return Leaves(
            tuple([self.items[position] for position in positions]),
            tuple([self.counts[position] for position in positions]),
            tuple([self.kind_indices[position] for position in positions]),
            self.survey,
            (*self.settled, *settled),
            self.calls,
        )

    def replace(self, items: Iterable[Leaf]) -> "Leaves":
        """Returns these leaves with as many other `items` in their place: of another shape, mesh, or spec so far."""
        return attrs.evolve(self, items=tuple(items))

    def recording(self, calls: list[RuleCall]) -> "Leaves":
        """Returns these leaves, with `calls` as the record of the rules that are asked about them."""
        # The engine needs this for every call of a rule, and `attrs.evolve` takes three times as long.
        return Leaves(self.items, self.counts, self.kind_indices, self.survey, self.settled, calls)

    def attr_paths(self) -> tuple[str, ...]:
        """Returns the path of each of `items`, with the fields of named tuples by name in any path style."""
        if self.survey.path_style == "attr":
            return tuple([leaf.path for leaf in self.items])
        paths = self.survey.kind_attr_paths()
        return tuple([paths[kind] for kind in self.kind_indices])
