"""Coming from haliax: mappings from the names of axes to axes of a mesh."""

from collections.abc import Iterable, Mapping
from typing import Any

from shardrules.core.axes import Axis
from shardrules.core.errors import ConfigError
from shardrules.rules.logical import LogicalShardingRule

__all__ = ["from_axis_mapping", "to_axis_mapping"]


def from_axis_mapping(mapping: Mapping[str, Any], whole: Iterable[str] = ()) -> LogicalShardingRule:
    """Returns the rule of an axis mapping, for trees of `haliax.NamedArray`s and any others with logical names.

    `mapping` is from the name of an axis to a mesh axis, a sequence of them, or `None`; the axes named in `whole` stay
    whole. A name in neither of the two is an error, where haliax leaves the axis whole without a word. Two axes of an
    array on one mesh axis are an error as well, as they are in haliax.

    ```python
    from shardrules.presets import haliax

    rule = haliax.from_axis_mapping({"embed": "data", "batch": ("replica", "data")}, whole=["layers"])
    assert rule.decide(sr.Leaf("norm", (4, 8), jnp.float32, axes=("layers", "embed"))).spec == P(None, "data")
    ```
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"haliax.from_axis_mapping: the mapping must be a dictionary, {{'embed': 'data'}}; got {mapping!r}"
        )
    names = (whole,) if isinstance(whole, str) else tuple(whole)
    if both := [name for name in names if mapping.get(name)]:
        raise ConfigError(f"haliax.from_axis_mapping: {both} have mesh axes in the mapping, so they cannot stay whole")
    pairs = (*mapping.items(), *((name, None) for name in names if name not in mapping))
    return LogicalShardingRule(pairs, unknown="error", lost="error")


def to_axis_mapping(rule: LogicalShardingRule) -> dict[str, Axis | None]:
    """Returns the axis mapping of a rule, for `haliax.axis_mapping` or `haliax.named_jit`.

    Axes that stay whole are `None`, and sequences are tuples. A rule with several pairs of one name is a `ConfigError`:
    haliax has no second choice.

    ```python
    from shardrules.presets import haliax

    mapping = {"embed": "data", "batch": ("replica", "data")}
    assert haliax.to_axis_mapping(haliax.from_axis_mapping(mapping)) == mapping
    ```
    """
    names = [name for name, _ in rule.mapping]
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(
            f"haliax.to_axis_mapping: the rule has several pairs for {', '.join(map(repr, repeated))}, and haliax has "
            "one. Keep one pair of each"
        )
    return dict(rule.mapping)
