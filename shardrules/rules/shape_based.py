"""`ShapeBasedShardingRule`: a spec for every shape."""

from collections.abc import Mapping
from typing import TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.errors import PatternError, SpecError
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule, from_fields
from shardrules.core.spec import checked_spec, spec_code, spec_key

ShapePattern: TypeAlias = tuple[int | None, ...]
"""A shape in which `None` is any size."""


def _as_patterns(
    patterns: Mapping[ShapePattern, PartitionSpec] | tuple[tuple[ShapePattern, PartitionSpec], ...],
) -> tuple[tuple[ShapePattern, PartitionSpec], ...]:
    pairs = patterns.items() if isinstance(patterns, Mapping) else patterns
    try:
        checked = tuple((tuple(pattern), spec) for pattern, spec in pairs)
    except (TypeError, ValueError):
        raise PatternError(
            f"ShapeBasedShardingRule takes shapes and specs, {{(None, 1024): P('model', None)}}; got {patterns!r}"
        ) from None
    for pattern, spec in checked:
        is_shape = all(size is None or (isinstance(size, int) and size >= 0) for size in pattern)
        if not is_shape or not isinstance(spec, PartitionSpec):
            raise PatternError(
                f"ShapeBasedShardingRule: {pattern!r}: {spec!r} is not a shape (sizes, or None for any size) and a "
                "PartitionSpec"
            )
        try:
            checked_spec(spec)
        except SpecError as error:
            raise PatternError(f"ShapeBasedShardingRule: {pattern!r}: {error}") from error
    return checked


def _matches(pattern: ShapePattern, shape: tuple[int, ...]) -> bool:
    return len(pattern) == len(shape) and all(
        expected in (None, size) for expected, size in zip(pattern, shape, strict=True)
    )


@final
@attrs.frozen
class ShapeBasedShardingRule(LeavesShardingRule):
    """Gives each array the spec of the first pattern that its shape matches.

    **Arguments:**

    - `shape_patterns`: from shape to spec, in order. `None` matches any size; ranks must be equal.

    ```python
    rule = sr.ShapeBasedShardingRule({(None, 1024): P("model", None)})
    assert rule.apply({"embed": np.ones((8, 1024)), "bias": np.ones(1024)}) == {"embed": P("model", None), "bias": P()}
    ```
    """

    shape_patterns: tuple[tuple[ShapePattern, PartitionSpec], ...] = attrs.field(
        converter=_as_patterns, repr=spec_code, eq=spec_key
    )
    reads_index = "no"
    parts = ()
    named_axes = from_fields(lambda rule: tuple(spec for _, spec in rule.shape_patterns))

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns the first match of each of `leaves`, with a finding for each pattern that wins no leaf."""
        idle = dict.fromkeys(range(len(self.shape_patterns)))
        decisions: list[Decision] = []
        for leaf in leaves.items:
            decision = leaf.skip("no shape pattern matches")
            for pattern_index, (pattern, spec) in enumerate(self.shape_patterns):
                if _matches(pattern, leaf.shape):
                    idle.pop(pattern_index, None)
                    decision = leaf.try_refine(spec, f"shape matches {pattern}")
                    break
            decisions.append(decision)
        # The engine drops those that win a leaf elsewhere, where an equal rule decides other leaves of the tree.
        return Verdict(tuple(decisions), idle=tuple((index, self._idle_finding(index, leaves)) for index in idle))

    def _idle_finding(self, pattern_index: int, leaves: Leaves) -> Finding:
        pattern = self.shape_patterns[pattern_index][0]
        rule = "ShapeBasedShardingRule"
        # If it matches something, an earlier pattern must have won all of that.
        if any(_matches(pattern, leaf.shape) for leaf in leaves.items):
            why = f"every array of shape {pattern} is matched by an earlier pattern"
            remedy = "Put the narrower pattern first, or remove this one"
            return Finding("warning", "shadowed-pattern", why, remedy=remedy, rule=rule)
        why = f"no array that reaches this rule has shape {pattern}"
        return Finding("warning", "dead-pattern", why, remedy="Correct the pattern, or remove it", rule=rule)
