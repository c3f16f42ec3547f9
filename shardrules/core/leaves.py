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
    """What a rule says about some leaves.

    **Arguments:**

    - `decisions`: one for each leaf, in order.
    - `findings`: what is worth knowing beside them.
    - `idle`: the patterns that won no leaf: the rule, the number of the pattern in it, and the finding that says so. It
        is dropped when an equal rule stands in another place as well, and the pattern wins there.
    """

    decisions: tuple[Decision, ...]
    findings: tuple[Finding, ...] = ()
    idle: tuple[tuple[Any, int, Finding], ...] = ()


@final
@attrs.frozen(eq=False)
class Leaves:
    """Some leaves of a tree, which a rule is to decide.

    **Arguments:**

    - `items`: one `Leaf` for each kind.
    - `counts`: how many leaves of the tree are of each kind.
    - `places`: the number of each kind in the survey.
    - `survey`: the whole tree.
    - `settled`: what earlier rules of a composite have decided: leaf, with its spec, and count.
    - `heard`: where to write down what each rule says; `None`, except for `plan.explain`.
    """

    items: tuple[Leaf, ...]
    counts: tuple[int, ...]
    places: tuple[int, ...]
    survey: Survey
    settled: tuple[tuple[Leaf, int], ...] = ()
    heard: list[Any] | None = None

    def select(self, chosen: Sequence[int], settled: Iterable[tuple[Leaf, int]] = ()) -> "Leaves":
        """Returns some of these leaves.

        **Arguments:**

        - `chosen`: positions in `items`, ascending.
        - `settled`: leaves that have been decided meanwhile.

        **Returns:**

        The leaves at those positions.
        """
        if len(chosen) == len(self.items) and not settled:
            return self
        return Leaves(
            tuple([self.items[one] for one in chosen]),
            tuple([self.counts[one] for one in chosen]),
            tuple([self.places[one] for one in chosen]),
            self.survey,
            (*self.settled, *settled),
            self.heard,
        )

    def replace(self, items: Iterable[Leaf]) -> "Leaves":
        """Returns the same places with other leaves in them: another shape, mesh, or spec so far.

        **Arguments:**

        - `items`: one leaf for each of `items`.

        **Returns:**

        The new leaves.
        """
        return attrs.evolve(self, items=tuple(items))

    def names(self) -> tuple[str, ...]:
        """Returns the path of each of `items` with the fields of named tuples by name, in plans of either path style.

        **Returns:**

        A tuple of paths.
        """
        if self.survey.path_style == "attr":
            return tuple([leaf.path for leaf in self.items])
        found = self.survey.kind_names()
        return tuple([found[place] for place in self.places])
