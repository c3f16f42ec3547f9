"""Logical axes: a model's names for its dimensions, which a mapping turns into the axes of a mesh."""

import abc
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import Axis, as_axis, axis_tuple
from shardrules.core.errors import ConfigError, suggest
from shardrules.core.fields import one_of
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision, Leaf, LogicalName
from shardrules.core.rule import LeafShardingRule, from_fields
from shardrules.core.spec import UNCONSTRAINED, Entry, make_spec

LogicalAxis: TypeAlias = "str | Sequence[LogicalAxis] | None"
"""One dimension: a logical axis, a mesh axis, `None` for a whole dimension, or a sequence of these."""

MODE_TRAIN: Final = "__train__"
"""Training: whole sequences."""


class AxisMeanings(abc.ABC):
    """The meanings of logical axes, which may depend on a runtime mode and on the shape of an array."""

    @abc.abstractmethod
    def resolve_spec(
        self, axes: Sequence[LogicalAxis], mode: str | int = MODE_TRAIN, shape: Sequence[int] | None = None
    ) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dimensions are these logical axes."""


class DimNames(abc.ABC):
    """The logical axes of all dimensions of an array, and the runtime mode in which they are meant."""

    @property
    @abc.abstractmethod
    def axes(self) -> Sequence[LogicalAxis]:
        """A logical axis for each dimension."""

    @property
    @abc.abstractmethod
    def mode(self) -> str | int:
        """A runtime mode, or the dimension whose length says it."""


OpenSeverity: TypeAlias = Literal["warning", "error"]
"""The severity of a finding about a name that gets no axis."""

LogicalPairs: TypeAlias = tuple[tuple[str, Axis | None], ...]
"""Pairs of logical name and mesh axis; `None` leaves the dimension whole."""


def as_pairs(mapping: Mapping[str, Axis | None] | Sequence[tuple[str, Axis | None]]) -> LogicalPairs:
    """Returns a mapping from logical names to mesh axes as pairs, in its order."""
    try:
        pairs = [(name, axis) for name, axis in (mapping.items() if isinstance(mapping, Mapping) else mapping)]
    except (TypeError, ValueError):
        raise ConfigError(
            "the mapping of logical axes must be a dictionary or pairs, {'embed': 'data'} or [('embed', 'data')]; "
            f"got {mapping!r}"
        ) from None
    return tuple((name, _as_written(axis)) for name, axis in pairs)


def _as_written(axis: Axis | None) -> Axis | None:
    """An axis with lists as tuples. A tuple of one name or none stays one, so that a configuration can be restored."""
    if axis is None:
        return None
    if isinstance(axis, tuple | list) and not axis:
        return ()
    normal = as_axis(axis)
    return normal if isinstance(axis, str) else axis_tuple(normal)


def _meaning(pairs: LogicalPairs) -> LogicalPairs:
    return tuple((name, as_axis(axis) if axis else None) for name, axis in pairs)


@final
@attrs.frozen
class LogicalShardingRule(LeafShardingRule):
    """Splits the dimensions of arrays that carry logical axis names: flax boxes, and variables of flax nnx.

    Pairs apply in order, as in flax: each gives its axis to the dimension of that name, if the axis is still free on
    the leaf and the dimension has none yet. So a name may occur several times, and if two names map to one axis the
    earlier pair wins. A name that gets no axis because another has it is a finding, and so is a name that is not in the
    mapping, since it may be a typo.

    **Arguments:**

    - `mapping`: from logical name to a mesh axis, a tuple of them, or `None` or `()` for "whole". A dictionary or
        pairs, with those first that should win.
    - `unknown`: `"error"` makes a name that is not in the mapping an error, instead of a warning.
    - `lost`: `"error"` makes a name an error, instead of a warning, if others have all of its axes.

    ```python
    leaf = sr.Leaf("w", (8, 16), jnp.float32, axes=("embed", "mlp"))
    assert sr.LogicalShardingRule({"embed": "data", "mlp": "model"}).decide(leaf).spec == P("data", "model")
    ```
    """

    mapping: LogicalPairs = attrs.field(converter=as_pairs, eq=_meaning)
    unknown: OpenSeverity = attrs.field(default="warning", converter=one_of("unknown", "warning", "error"))
    lost: OpenSeverity = attrs.field(default="warning", converter=one_of("lost", "warning", "error"))
    reads_index = "no"
    parts = ()
    named_axes = from_fields(lambda rule: tuple(axis for _, axis in rule.mapping))

    def decide(self, leaf: Leaf) -> Decision:
        """Returns the decision for `leaf`."""
        if leaf.axes is None:
            return leaf.skip("it has no logical axis names")
        if len(leaf.axes) != leaf.ndim:
            raise leaf.error(self, f"it has {len(leaf.axes)} logical names {leaf.axes} for {leaf.ndim} dimensions")
        entries = list(leaf.entries[: leaf.ndim])
        owner: dict[str, LogicalName] = {}
        # A dimension stays open until a pair decides it, if only to `None`: what is left open gets a finding.
        open_dims = {dim: name for dim, name in enumerate(leaf.axes) if name is not None and entries[dim] == ()}
        for logical_name, axis in self.mapping:
            names = () if axis is None else axis_tuple(axis)
            for dim in [dim for dim, name in open_dims.items() if name == logical_name]:
                # A pair whose axis is used is passed over: a later pair of the same name may have a free one.
                if not any(name in owner or name in leaf.used_axes for name in names):
                    entries[dim] = names
                    owner.update(dict.fromkeys(names, logical_name))
                    del open_dims[dim]
        findings = [self._open_dim(leaf, dim, name, owner) for dim, name in open_dims.items()]
        meanings = ", ".join(f"{name}->{_entry_text(entry)}" for name, entry in zip(leaf.axes, entries, strict=True))
        return Decision(make_spec(tuple(entries)), f"logical axes {meanings}", findings=tuple(findings))

    def _open_dim(self, leaf: Leaf, dim: int, name: LogicalName, owner: Mapping[str, LogicalName]) -> Finding:
        """A finding about a dimension that has a name and got no axis."""
        rule = "LogicalShardingRule"
        axes = [axis for logical_name, axis in self.mapping if logical_name == name and axis is not None]
        candidates = [part for axis in axes for part in axis_tuple(axis)]
        if not candidates:
            near = suggest(name, [logical_name for logical_name, _ in self.mapping]) if isinstance(name, str) else ""
            why = f"logical axis {name!r}{near} is not in the mapping, so dimension {dim} stays whole"
            remedy = f"Add it to the mapping; {name!r}: None keeps it whole without this {self.unknown}"
            return Finding(self.unknown, "unknown-logical-axis", why, leaf.path, remedy, leaf.shape, dim, rule=rule)
        # An earlier rule's axis is an error, unlike one that this mapping gave to another dimension of the leaf.
        earlier = [part for part in candidates if part in leaf.used_axes]
        if earlier:
            raise leaf.error(
                self,
                f"logical axis {name!r} maps to mesh axis {earlier[0]!r}, which an earlier rule uses",
                "Map it to another axis, or to None",
            )
        part = next(part for part in candidates if part in owner)
        why = (
            f"logical axes {owner[part]!r} and {name!r} both map to mesh axis {part!r}, and {owner[part]!r} comes "
            f"first, so dimension {dim} stays whole"
        )
        remedy = f"Map one of them to another axis; ({name!r}, None) at the end keeps it whole without this {self.lost}"
        return Finding(self.lost, "lost-logical-axis", why, leaf.path, remedy, leaf.shape, dim, part, rule=rule)


def _entry_text(entry: Entry) -> str:
    return "unconstrained" if entry is UNCONSTRAINED else "+".join(entry) or "whole"
