"""Coming from levanter: the axis mappings that a trainer's configuration stands for."""

from collections.abc import Mapping
from typing import Any

from shardrules.core.errors import ConfigError, suggest

__all__ = ["compute_axis_mapping", "parameter_axis_mapping"]

_FIELDS = ("axis_resources", "parameter_axis_resources", "batch_axis", "fsdp_axis", "tensor_parallel_axes")


def compute_axis_mapping(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mapping from axis names to mesh axes that levanter computes with, for `sr.logical_axes`.

    These are `axis_resources`, over them `tensor_parallel_axes` on `model`, and over these `batch_axis` on
    `("replica", "data")`. `trainer` is the section of that name in levanter's YAML, as a YAML library reads it. Fields
    that are not there are as in levanter: `batch_axis` is `"batch"`, and `fsdp_axis` is `"embed"`.

    ```python
    from shardrules.presets import levanter

    mapping = levanter.compute_axis_mapping({"axis_resources": {"token": "data"}, "tensor_parallel_axes": ["mlp"]})
    assert mapping == {"token": "data", "mlp": "model", "batch": ("replica", "data")}
    ```
    """
    _check(trainer)
    mapping = _resources(trainer, "axis_resources") | dict.fromkeys(_names(trainer, "tensor_parallel_axes"), "model")
    batch_axis = trainer.get("batch_axis", "batch")
    return mapping if batch_axis is None else mapping | {batch_axis: ("replica", "data")}


def parameter_axis_mapping(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mapping by which levanter keeps parameters and optimizer state, for `haliax.from_axis_mapping`.

    This is `compute_axis_mapping`, over it `parameter_axis_resources`, and over these `fsdp_axis` on `data`.

    ```python
    from shardrules.presets import haliax, levanter

    trainer = {"tensor_parallel_axes": ["mlp", "heads"]}
    rule = haliax.from_axis_mapping(levanter.parameter_axis_mapping(trainer), whole=["layers"])
    leaf = sr.Leaf("up_proj/weight", (4, 16, 8), jnp.float32, axes=("layers", "mlp", "embed"))
    assert rule.decide(leaf).spec == P(None, "model", "data")
    ```
    """
    mapping = compute_axis_mapping(trainer) | _resources(trainer, "parameter_axis_resources")
    return mapping | dict.fromkeys(_names(trainer, "fsdp_axis", "embed"), "data")


def _check(trainer: Mapping[str, Any]) -> None:
    """Raises where a key of the section is nearly one that is read here: it would be passed over."""
    if not isinstance(trainer, Mapping):
        raise ConfigError(f"levanter: the trainer must be a dictionary, the section of the YAML file; got {trainer!r}")
    if wrong := [f"{key!r}{near}" for key in trainer if key not in _FIELDS and (near := suggest(str(key), _FIELDS))]:
        raise ConfigError(f"levanter: unknown keys of the trainer: {', '.join(wrong)}")


def _resources(trainer: Mapping[str, Any], field: str) -> dict[str, Any]:
    resources = trainer.get(field) or {}
    if not isinstance(resources, Mapping):
        raise ConfigError(f"levanter: {field} must be a dictionary from axis to mesh axes; got {resources!r}")
    return dict(resources)


def _names(trainer: Mapping[str, Any], field: str, default: str | None = None) -> list[str]:
    names = trainer.get(field, default)
    if names is not None and not isinstance(names, str | list | tuple):
        raise ConfigError(f"levanter: {field} must be the name of an axis, or a list of names; got {names!r}")
    return [names] if isinstance(names, str) else list(names or ())
