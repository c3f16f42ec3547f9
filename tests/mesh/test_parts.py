"""The part of a batch that each process has, on meshes of pretended processes."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import MeshError, UnknownAxisError
from shardrules.mesh.parts import batch_part, dim_part


def mesh(processes: list[Any], *axis_names: str) -> Any:
    """A mesh whose devices belong to these processes."""
    infos = [sr.meshes.DeviceInfo(index, process_index=process) for index, process in enumerate(np.ravel(processes))]
    devices = np.array(infos).reshape(np.shape(processes))
    return sr.create_mesh(devices.shape, axis_names, devices=devices, fast_axes=())


MESHES: dict[str, tuple[Any, tuple[str, ...], tuple[int, int]]] = {
    "rows": (mesh([[0, 0], [0, 0], [1, 1], [1, 1]], "data", "model"), ("data",), (0, 2)),
    "rows of the last process": (mesh([[1, 1], [0, 0]], "data", "model"), ("data",), (1, 2)),
    "columns, so that all hold all rows": (mesh([[0, 1], [0, 1]], "data", "model"), ("data",), (0, 1)),
    "pairs hold the same rows": (mesh([[0, 1], [2, 3]], "data", "model"), ("data",), (0, 2)),
    "both axes": (mesh([[1, 0], [2, 3]], "data", "model"), ("data", "model"), (1, 4)),
    "the other order of axes": (mesh([[1, 0], [2, 3]], "data", "model"), ("model", "data"), (2, 4)),
    "every second row": (mesh([1, 0, 1, 0], "data"), ("data",), (1, 2)),
    "no axis": (mesh([0, 1], "data"), (), (0, 1)),
    "an axis that the mesh lacks": (mesh([0, 1], "data"), ("expert",), (0, 1)),
}


@pytest.mark.parametrize("name", MESHES)
def test_parts_follow_from_the_mesh(name: str) -> None:
    fake, axes, expected = MESHES[name]
    assert dim_part(axes, fake) == expected


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([0, 0, 0, 1], r"process 0: \[0, 1, 2\], process 1: \[3\] of 4"),
        ([[0, 1], [1, 2]], r"process 0: \[0\], process 1: \[0, 1\], process 2: \[1\] of 2"),
    ],
)
def test_unequal_parts_are_refused(processes: list[Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        dim_part(("data",), mesh(processes, *("data", "model")[: np.ndim(processes)]))


def test_a_process_without_devices_has_no_part() -> None:
    with pytest.raises(MeshError, match="process 0 has no device of the mesh"):
        dim_part(("data",), mesh([1, 2], "data"))


def test_one_process_has_all() -> None:
    real = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    for spec in ("data", P("data"), P(("data", "model")), P(), P(None, "model")):
        assert batch_part(spec, real) == (0, 1)
    with pytest.raises(UnknownAxisError, match=r"batch_part: unknown axis 'dta' \(did you mean 'data'\?\)"):
        sr.meshes.batch_part("dta", real)
