"""Coming from MaxText: the logical axis rules of its YAML files, as a YAML library reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardrules.core.errors import ConfigError
from shardrules.rules.logical import LogicalShardingRule

__all__ = ["from_logical_axis_rules", "to_logical_axis_rules"]

_RULES, _OVERRIDE = "logical_axis_rules", "override_logical_axis_rules"


def from_logical_axis_rules(*configs: Mapping[str, Any] | Sequence[Any]) -> LogicalShardingRule:
    """Returns the rule of MaxText's logical axis rules, in which a logical name without a rule is an error.

    Each of `configs` is what `yaml.safe_load` returns for a file, or its `logical_axis_rules` alone.

    A later configuration is merged as MaxText merges that of a model into `base.yml`: its rules come last, and replace
    all earlier rules of the same names; with `override_logical_axis_rules: true` they replace all. A file of
    `custom_mesh_and_rule` replaces all in MaxText, so pass it alone.

    ```python
    from shardrules.presets import maxtext

    base = [["mlp", ["fsdp_transpose", "tensor"]], ["embed", ["fsdp", "fsdp_transpose"]], ["embed", ["fsdp"]]]
    rule = maxtext.from_logical_axis_rules(base, {"logical_axis_rules": [["norm", "fsdp"]]})
    leaf = sr.Leaf("wi_0/kernel", (8, 16), jnp.float32, axes=("embed", "mlp"))
    assert rule.decide(leaf).spec == P("fsdp", ("fsdp_transpose", "tensor"))
    ```
    """
    pairs: list[Any] = []
    for config in configs:
        rules = config
        if isinstance(config, Mapping):
            if _RULES not in config:
                raise ConfigError(
                    f"maxtext.from_logical_axis_rules: the configuration has no {_RULES}; its keys are {[*config]}"
                )
            rules = config[_RULES]
            if config.get(_OVERRIDE):
                pairs = []
        # The rule checks the pairs, and says what is wrong with them.
        new = LogicalShardingRule(rules).mapping
        names = {name for name, _ in new}
        pairs = [pair for pair in pairs if pair[0] not in names] + list(new)
    return LogicalShardingRule(pairs, unknown="error")


def to_logical_axis_rules(rule: LogicalShardingRule) -> list[list[Any]]:
    """Returns `logical_axis_rules` as MaxText's YAML files have them: what `from_logical_axis_rules` read, exactly.

    ```python
    from shardrules.presets import maxtext

    rules = [["exp", "expert"], ["activation_exp", ["expert"]], ["qkv", []]]
    assert maxtext.to_logical_axis_rules(maxtext.from_logical_axis_rules(rules)) == rules
    ```
    """
    return [[name, list(axis) if isinstance(axis, tuple) else axis] for name, axis in rule.mapping]
