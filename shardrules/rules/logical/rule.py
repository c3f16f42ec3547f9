"""`LogicalShardingRule`: from the names that a model gives its dimensions to the axes of a mesh."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

import attrs

from shardrules.core.axes import Axis, as_axis, axis_tuple
from shardrules.core.errors import SpecError, suggest
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf, LogicalName
from shardrules.core.rule import LeafShardingRule
from shardrules.core.spec import UNCONSTRAINED, Entry, make_spec

LogicalPairs: TypeAlias = tuple[tuple[str, Axis | None], ...]
"""Pairs of logical name and mesh axis; `None` leaves the dimension whole."""


def as_pairs(mapping: Mapping[str, Axis | None] | Sequence[tuple[str, Axis | None]]) -> LogicalPairs:
    """Returns a mapping from logical names to mesh axes in its normal form.

    **Arguments:**

    - `mapping`: a mapping, or pairs of name and axis; `None` leaves a dimension whole.

    **Returns:**

    Pairs, in the order given.

    **Raises:**

    `SpecError` for anything else.

    ```python
    assert as_pairs({"embed": ["data"], "norm": None}) == (("embed", "data"), ("norm", None))
    ```
    """
    try:
        pairs = [(name, axis) for name, axis in (mapping.items() if isinstance(mapping, Mapping) else mapping)]
    except (TypeError, ValueError):
        raise SpecError(
            "logical axes are mapped by a dictionary or by pairs, {'embed': 'data'} or [('embed', 'data')]; "
            f"got {mapping!r}"
        ) from None
    return tuple((name, None if axis is None else as_axis(axis)) for name, axis in pairs)


@final
@attrs.frozen
class LogicalShardingRule(LeafShardingRule):
    """Splits the dimensions of arrays that carry logical axis names, such as flax boxes.

    The pairs are gone through in order, as flax does: each gives its axis to the dimension of that name, if the axis
    is still free on the leaf and the dimension has none yet. So a name may come several times, and of two names that
    want one axis the earlier pair wins. A name that gets no axis because another has it is a finding, and so is one
    that the mapping does not know, since it may be a typo.

    **Arguments:**

    - `mapping`: from logical name to a mesh axis, a tuple of them, or `None` for "whole". A dictionary or pairs, those
        that are to win first.

    ```python
    leaf = sr.Leaf("w", (8, 16), jnp.float32, axes=("embed", "mlp"))
    assert sr.LogicalShardingRule({"embed": "data", "mlp": "model"}).decide(leaf).spec == P("data", "model")
    ```
    """

    mapping: LogicalPairs = attrs.field(converter=as_pairs)
    reads_index = "no"

    def decide(self, leaf: Leaf) -> Decision:
        """Returns the decision for one leaf.

        **Arguments:**

        - `leaf`: the array.

        **Returns:**

        A `Decision`.
        """
        if leaf.axes is None:
            return leaf.skip("it carries no logical axis names")
        if len(leaf.axes) != leaf.ndim:
            raise leaf.error(self, f"it carries {len(leaf.axes)} logical names {leaf.axes} for {leaf.ndim} dimensions")
        found = list(leaf.entries[: leaf.ndim])
        owner: dict[str, LogicalName] = {}
        # What is whole so far, until a pair says what it is to be.
        open_dims = {dim: name for dim, name in enumerate(leaf.axes) if name is not None and found[dim] == ()}
        for known, axis in self.mapping:
            names = () if axis is None else axis_tuple(axis)
            for dim in [dim for dim, name in open_dims.items() if name == known]:
                if not any(name in owner or name in leaf.taken for name in names):
                    found[dim] = names
                    owner.update(dict.fromkeys(names, known))
                    del open_dims[dim]
        findings = [self._left_open(leaf, dim, name, owner) for dim, name in open_dims.items()]
        said = ", ".join(f"{name}->{_text(entry)}" for name, entry in zip(leaf.axes, found, strict=True))
        return Decision(make_spec(tuple(found)), f"logical axes {said}", findings=tuple(findings))

    def _left_open(self, leaf: Leaf, dim: int, name: LogicalName, owner: Mapping[str, LogicalName]) -> Finding:
        """A finding about a dimension that has a name and got nothing."""
        wanted = [
            part for known, axis in self.mapping if known == name and axis is not None for part in axis_tuple(axis)
        ]
        if not wanted:
            return self._unknown(leaf, dim, name)
        earlier = [part for part in wanted if part in leaf.taken]
        if earlier:
            raise leaf.error(
                self,
                f"logical axis {name!r} maps to mesh axis {earlier[0]!r}, which an earlier rule has taken",
                "Map it to another axis, or to None",
            )
        part = next(part for part in wanted if part in owner)
        return Finding(
            "warning",
            "lost-logical-axis",
            f"logical axes {owner[part]!r} and {name!r} both map to mesh axis {part!r}, and {owner[part]!r} comes "
            f"first, so dimension {dim} stays whole",
            leaf.path,
            f"Map one of them to another axis; ({name!r}, None) at the end says that it is to stay whole",
            leaf.shape,
            dim,
            part,
            rule="LogicalShardingRule",
        )

    def _unknown(self, leaf: Leaf, dim: int, name: LogicalName) -> Finding:
        near = suggest(name, [known for known, _ in self.mapping]) if isinstance(name, str) else ""
        return Finding(
            "warning",
            "unknown-logical-axis",
            f"the mapping does not know the logical axis {name!r}{near}, so dimension {dim} stays whole",
            leaf.path,
            f"Add it to the mapping; {name!r}: None says that it is to stay whole",
            leaf.shape,
            dim,
            rule="LogicalShardingRule",
        )


def _text(entry: Entry) -> str:
    return "unconstrained" if entry is UNCONSTRAINED else "+".join(entry) or "whole"
