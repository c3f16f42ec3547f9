"""Helpers for meshes: from text, over processes and slices, derived from another mesh, after the loss of devices."""

from shardrules.core.context import current_mesh, get_incontext_mesh, names_in_current_mesh
from shardrules.mesh.axes import (
    get_axes_size_in_mesh,
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_submesh_device_index,
)
from shardrules.mesh.axis_types import AxisTypes
from shardrules.mesh.creation import (
    calculate_host_mesh_shape,
    cpu_context,
    create_cpu_mesh,
    create_device_mesh,
    force_cpu,
    parse_mesh_from_string,
)
from shardrules.mesh.derived import fold_axes, rename_axes, split_axis, submesh
from shardrules.mesh.layout import DeviceInfo, Layout, lay_out
from shardrules.mesh.parts import batch_part
from shardrules.mesh.processes import is_primary
from shardrules.moves.elastic import group_devices, scale_batch, surviving_mesh

__all__ = [
    "AxisTypes",
    "DeviceInfo",
    "Layout",
    "batch_part",
    "calculate_host_mesh_shape",
    "cpu_context",
    "create_cpu_mesh",
    "create_device_mesh",
    "current_mesh",
    "fold_axes",
    "force_cpu",
    "get_axes_size_in_mesh",
    "get_incontext_mesh",
    "get_mesh_axis_names",
    "get_mesh_axis_size",
    "get_submesh_device_index",
    "group_devices",
    "is_primary",
    "lay_out",
    "names_in_current_mesh",
    "parse_mesh_from_string",
    "rename_axes",
    "scale_batch",
    "split_axis",
    "submesh",
    "surviving_mesh",
]
