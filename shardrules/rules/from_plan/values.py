"""The values that a pattern may have: the specs of a plan, and the rules that give several of them."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import attrs
from jax.sharding import PartitionSpec

from shardrules.core.axes import Axis, mesh_sizes
from shardrules.core.errors import RuleError
from shardrules.core.leaf import Leaf
from shardrules.core.rule import ChainShardingRule, LeafShardingRule
from shardrules.core.spec import UNCONSTRAINED, axis_names, canonical, entries, spec_repr
from shardrules.rules.dim import DimShardingRule
from shardrules.rules.fsdp import FSDPShardingRule

Value: TypeAlias = PartitionSpec | LeafShardingRule | ChainShardingRule
"""A spec, a rule, or a chain of two."""

_DEFAULT_SIZE = attrs.fields(FSDPShardingRule).min_size_mb.default

_DIMS = (0, -1, 1, -2)
"""The dimensions that a rule may split: what else there is, a spec says in no more words. Chosen by hand."""


def placement(spec: PartitionSpec | None) -> str:
    """Returns the canonical form of a spec as text; no opinion is as `P()`."""
    return "P()" if spec is None else spec_repr(canonical(spec))


def rule_values(
    leaves: Sequence[Leaf], distinct: Sequence[PartitionSpec], specs: Sequence[PartitionSpec]
) -> Iterator[tuple[Value, float]]:
    """Yields the rules that may give `leaves` their `specs`, each with the words that it takes more than a spec.

    `distinct` are the different ones among the specs.
    """
    sizes = mesh_sizes(leaves[0].mesh) if leaves and leaves[0].mesh is not None else {}
    axes: dict[Axis, None] = {}
    for spec in distinct:
        for entry in entries(spec):
            if entry is not UNCONSTRAINED and entry and all(name in sizes for name in entry):
                axes[entry[0] if len(entry) == 1 else entry] = None
    fully = [FSDPShardingRule(axis, size) for axis in axes for size in _least_sizes(leaves, specs)]
    by_dim = [DimShardingRule(axis, dim) for axis in axes for dim in _DIMS]
    yield from ((rule, 3.5) for rule in (*fully, *by_dim))
    for first, second in itertools.product(by_dim, fully):
        if not set(_names(first.axis)) & set(_names(second.axis)):
            yield first | second, 6.0


def _names(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _least_sizes(leaves: Sequence[Leaf], specs: Sequence[PartitionSpec]) -> tuple[float, ...]:
    """The sizes, in MiB, up to which arrays may stay whole: none, and what is between the whole and the split ones."""
    whole = max((leaf.nbytes for leaf, spec in zip(leaves, specs, strict=True) if not axis_names(spec)), default=0)
    split = min((leaf.nbytes for leaf, spec in zip(leaves, specs, strict=True) if axis_names(spec)), default=0)
    # The least size of its own first, then powers of two.
    sizes = (_DEFAULT_SIZE, *(2.0**power for power in range(20)))
    size = next((size for size in sizes if whole <= size * 2**20 < split), None)
    return (0,) if size is None else (0, int(size))


def gives(value: Value, leaf: Leaf, spec: PartitionSpec) -> bool:
    """Returns whether a value gives a leaf its spec, without an error."""
    if isinstance(value, PartitionSpec):
        return placement(value) == placement(spec)
    decided: PartitionSpec | None = None
    for rule in value.rules if isinstance(value, ChainShardingRule) else (value,):
        assert isinstance(rule, LeafShardingRule)
        try:
            decision = rule.decide(attrs.evolve(leaf, spec=decided))
        except RuleError:
            return False
        decided = decided if decision.spec is None else decision.spec
    return placement(decided) == placement(spec)
