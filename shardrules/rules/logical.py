"""`LogicalShardingRule`: from the names that a model gives its dimensions to the axes of a mesh."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

import attrs

from shardrules.core.axes import Axis, as_axis, axis_tuple
from shardrules.core.errors import suggest
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf
from shardrules.core.rule import LeafShardingRule
from shardrules.core.spec import axis_names, make_spec

LogicalPairs: TypeAlias = tuple[tuple[str, Axis | None], ...]
"""Pairs of logical name and mesh axis; `None` leaves the dimension whole."""


def as_pairs(mapping: Mapping[str, Axis | None] | Sequence[tuple[str, Axis | None]]) -> LogicalPairs:
    """Returns a mapping from logical names to mesh axes in its normal form.

    **Arguments:**

    - `mapping`: a mapping, or pairs of name and axis; `None` leaves a dimension whole.

    **Returns:**

    Pairs, in the order given.

    ```python
    assert as_pairs({"embed": ["data"], "norm": None}) == (("embed", "data"), ("norm", None))
    ```
    """
    pairs = mapping.items() if isinstance(mapping, Mapping) else mapping
    return tuple((name, None if axis is None else as_axis(axis)) for name, axis in pairs)


@final
@attrs.frozen
class LogicalShardingRule(LeafShardingRule):
    """Splits the dimensions of arrays that carry logical axis names, such as flax boxes.

    A name may come several times: the first axis that is still free on the leaf is taken. A name that the mapping does
    not know is a finding, since it may be a typo.

    **Arguments:**

    - `mapping`: from logical name to a mesh axis, a tuple of them, or `None` for "whole". A dictionary or pairs.

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
        found = list(leaf.entries)
        owner = dict.fromkeys(() if leaf.spec is None else axis_names(leaf.spec), "an earlier rule")
        findings: list[Finding] = []
        for dim, name in enumerate(leaf.axes):
            if name is None or found[dim] != ():
                continue
            choices = [axis for known, axis in self.mapping if known == name]
            if not choices:
                findings.append(self._unknown(leaf, dim, name))
                continue
            free = [one for one in choices if one is None or not any(part in owner for part in axis_tuple(one))]
            if not free:
                twice = next(part for part in axis_tuple(choices[-1] or ()) if part in owner)
                raise leaf.error(
                    self,
                    f"logical axes {owner[twice]!r} and {name!r} both map to mesh axis {twice!r}",
                    "Map one of them to another axis, or to None",
                )
            found[dim] = () if free[0] is None else axis_tuple(free[0])
            owner.update(dict.fromkeys(found[dim], name))
        known = ", ".join(f"{name}->{'+'.join(entry) or 'whole'}" for name, entry in zip(leaf.axes, found, strict=True))
        return Decision(make_spec(tuple(found)), f"logical axes {known}", findings=tuple(findings))

    def _unknown(self, leaf: Leaf, dim: int, name: str) -> Finding:
        near = suggest(name, [known for known, _ in self.mapping])
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
