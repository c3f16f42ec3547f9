"""The purposes of the axes of a mesh, by their names."""

from collections.abc import Mapping
from typing import final

import attrs

_TENSOR = ("model", "mdl", "tensor", "tp", "mp")
_EXPERT = ("expert", "experts", "ep")
_STAGE = ("stage", "stages", "pipe", "pipeline", "pp")
_DATA = ("data", "dp", "ddp", "dcn", "batch", "replica", "fsdp", "hsdp", "zero", "shard", "cp", "sp", "seq", "sequence")


@final
@attrs.frozen
class AxisRoles:
    """Axes by what they split: the features of a layer, its experts, stacked layers, or whatever is left."""

    tensor: tuple[str, ...] = ()
    expert: tuple[str, ...] = ()
    stage: tuple[str, ...] = ()
    data: tuple[str, ...] = ()


def axis_roles(sizes: Mapping[str, int]) -> AxisRoles:
    """Returns what each axis of a mesh is for. Where no name says so, the last of several axes splits features.

    ```python
    from shardrules.cli.init.axes import axis_roles

    assert axis_roles({"fsdp": 8, "tp": 4}).tensor == ("tp",)
    assert axis_roles({"x": 8, "y": 4}).tensor == ("y",)
    ```
    """
    roles = {name: _role(name) for name in sizes}
    unknown = [name for name, role in roles.items() if not role]
    if unknown and len(sizes) > 1 and "tensor" not in roles.values():
        roles[unknown[-1]] = "tensor"
    by_role = {
        role: tuple(name for name in sizes if (roles[name] or "data") == role)
        for role in ("tensor", "expert", "stage", "data")
    }
    return AxisRoles(**by_role)


def _role(name: str) -> str:
    word = name.lower().removesuffix("_parallel").removesuffix("_axis")
    named = {"tensor": _TENSOR, "expert": _EXPERT, "stage": _STAGE, "data": _DATA}
    return next((role for role, names in named.items() if word in names), "")
