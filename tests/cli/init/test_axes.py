"""What mesh axes are for."""

import pytest

from shardrules.cli.init.axes import AxisRoles, axis_roles


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("data", "model"), AxisRoles(tensor=("model",), data=("data",))),
        (("dp", "fsdp", "tp"), AxisRoles(tensor=("tp",), data=("dp", "fsdp"))),
        (("model", "data"), AxisRoles(tensor=("model",), data=("data",))),
        (("fsdp",), AxisRoles(data=("fsdp",))),
        (("x",), AxisRoles(data=("x",))),
        (("x", "y"), AxisRoles(tensor=("y",), data=("x",))),
        (("x", "tensor"), AxisRoles(tensor=("tensor",), data=("x",))),
        (("pp", "data", "expert", "sp", "mp"), AxisRoles(("mp",), ("expert",), ("pp",), ("data", "sp"))),
        (("tensor_parallel", "DATA"), AxisRoles(tensor=("tensor_parallel",), data=("DATA",))),
        ((), AxisRoles()),
    ],
)
def test_names_say_what_axes_are_for(names: tuple[str, ...], roles: AxisRoles) -> None:
    assert axis_roles(dict.fromkeys(names, 2)) == roles
