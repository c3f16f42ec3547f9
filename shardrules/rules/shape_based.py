"""`ShapeBasedShardingRule`: a spec for every shape."""

from collections.abc import Mapping
from typing import TypeAlias, final

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.errors import PatternError, SpecError
from shardrules.core.finding import Finding
from shardrules.core.leaf import Decision
from shardrules.core.leaves import Leaves, Verdict
from shardrules.core.rule import LeavesShardingRule
from shardrules.core.spec import checked_spec, spec_code, spec_key

ShapePattern: TypeAlias = tuple[int | None, ...]
"""A shape in which `None` stands for any size."""


def _as_patterns(
    patterns: Mapping[ShapePattern, PartitionSpec] | tuple[tuple[ShapePattern, PartitionSpec], ...],
) -> tuple[tuple[ShapePattern, PartitionSpec], ...]:
    pairs = patterns.items() if isinstance(patterns, Mapping) else patterns
    try:
        found = tuple((tuple(pattern), spec) for pattern, spec in pairs)
    except (TypeError, ValueError):
        raise PatternError(
            f"ShapeBasedShardingRule takes shapes and specs, {{(None, 1024): P('model', None)}}; got {patterns!r}"
        ) from None
    for pattern, spec in found:
        sound = all(dim is None or (isinstance(dim, int) and dim >= 0) for dim in pattern)
        if not sound or not isinstance(spec, PartitionSpec):
            raise PatternError(
                f"ShapeBasedShardingRule: {pattern!r}: {spec!r} is not a shape (sizes, or None for any size) and a "
                "PartitionSpec"
            )
        try:
            checked_spec(spec)
        except SpecError as error:
            raise PatternError(f"ShapeBasedShardingRule: {pattern!r}: {error}") from error
    return found


def _matches(pattern: ShapePattern, shape: tuple[int, ...]) -> bool:
    return len(pattern) == len(shape) and all(want in (None, dim) for want, dim in zip(pattern, shape, strict=True))


@final
@attrs.frozen
class ShapeBasedShardingRule(LeavesShardingRule):
    """Gives each array the spec of the first pattern that its shape matches.

    **Arguments:**

    - `patterns`: from shape to spec, in order. `None` matches any size; ranks must be equal.

    ```python
    rule = sr.ShapeBasedShardingRule({(None, 1024): P("model", None)})
    assert rule.apply({"embed": np.ones((8, 1024)), "bias": np.ones(1024)}) == {"embed": P("model", None), "bias": P()}
    ```
    """

    patterns: tuple[tuple[ShapePattern, PartitionSpec], ...] = attrs.field(
        converter=_as_patterns, repr=spec_code, eq=spec_key
    )
    reads_index = "no"

    def decide_all(self, leaves: Leaves) -> Verdict:
        """Returns the first match of each leaf.

        **Arguments:**

        - `leaves`: what to decide.

        **Returns:**

        A `Verdict`, with a finding for every pattern that matches no shape, or only what earlier ones took.
        """
        won: dict[int, None] = {}
        decisions: list[Decision] = []
        for leaf in leaves.items:
            hits = (number for number, (pattern, _) in enumerate(self.patterns) if _matches(pattern, leaf.shape))
            number = next(hits, None)
            if number is None:
                decisions.append(leaf.skip("no shape pattern matches"))
                continue
            won[number] = None
            pattern, spec = self.patterns[number]
            decisions.append(leaf.try_refine(spec, f"shape matches {pattern}"))
        idle = [number for number in range(len(self.patterns)) if number not in won]
        return Verdict(tuple(decisions), idle=tuple((number, self._idle(number, leaves)) for number in idle))

    def _idle(self, number: int, leaves: Leaves) -> Finding:
        pattern = self.patterns[number][0]
        if any(_matches(pattern, leaf.shape) for leaf in leaves.items):
            return Finding(
                "warning",
                "shadowed-pattern",
                f"every array of shape {pattern} is taken by an earlier pattern",
                remedy="Put the narrower pattern first, or take it out",
                rule="ShapeBasedShardingRule",
            )
        return Finding(
            "warning",
            "dead-pattern",
            f"no array that reaches this rule has shape {pattern}",
            remedy="Correct the pattern, or take it out",
            rule="ShapeBasedShardingRule",
        )
