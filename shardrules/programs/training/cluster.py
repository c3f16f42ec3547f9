"""The meshes that a cluster may form.

A mesh has up to four axes, the outermost first. Hosts and slices are never cut: what is inside an axis and all axes
after it fills whole hosts, or is a part of one. What an axis splits is left to the planner, so that data, tensor and
fully sharded parallelism are layouts of the same few meshes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, final

import attrs
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardrules.core.axes import AnyMesh, mesh_text
from shardrules.core.errors import ConfigError, MeshError, TargetError
from shardrules.mesh.creation import create_mesh
from shardrules.mesh.divisors import divisors, prime_factors
from shardrules.mesh.layout import DeviceInfo
from shardrules.mesh.shape import mesh_shape
from shardrules.programs.autoplan.graph.machine import hardware_of, has_sheet
from shardrules.programs.machine.hardware import Hardware, ready_name
from shardrules.programs.machine.targets import Target, target_of
from shardrules.programs.training.stages.run import STAGE_AXIS

Shape: TypeAlias = tuple[int, ...]
"""The sizes of a mesh's axes."""

_NAMES = ("replica", "data", "model", "minor")
"""The names of four axes; a mesh of two has `data` and `model`."""

AXES = (STAGE_AXIS, *_NAMES)
"""The axes that the meshes of a cluster may have."""

_MODEL_SIZES = (2, 4, 8)
"""The sizes of an innermost axis that are tried from the beginning, where they divide a host or a slice. Neighbours of
good meshes are tried later, so that 16 is reached from 8."""


@final
@attrs.frozen(eq=False)
class Cluster:
    """Devices to train on, the links between them, and the mesh that they form, if the user says so."""

    name: str
    count: int
    granule: int
    """The number of devices that fast links connect."""
    hardware: Hardware
    torus: Shape = ()
    """The sizes of a slice of TPUs."""
    target: Target | None = None
    """The target to compile for; `None` for devices that are here."""
    devices: tuple[Any, ...] = ()
    mesh: AnyMesh | None = None
    """The only mesh to try."""
    is_assumed: bool = False
    """The devices are unknown, so that the sheet is a guess."""

    @classmethod
    def of(cls, cluster: Any, hardware: Hardware | str | None = None) -> "Cluster":
        """Reads a cluster: `"cuda:h100:64"`, a `Target`, a mesh, or devices. `hardware` replaces its sheet."""
        hardware = None if hardware is None else Hardware.of(hardware)
        if isinstance(cluster, Mesh | AbstractMesh):
            size = math.prod(cluster.shape.values())
            sheet = hardware or hardware_of(cluster)
            granule = _granule(list(cluster.devices.flat)) if isinstance(cluster, Mesh) else sheet.devices_per_host
            is_assumed = hardware is None and not has_sheet(cluster)
            return cls(mesh_text(cluster), size, min(size, granule or size), sheet, mesh=cluster, is_assumed=is_assumed)
        if isinstance(cluster, str | Target):
            target = Target.parse(cluster)
            count, granule = target.count, target.granule
            if count is None or granule is None:
                raise MeshError(f"cluster {str(target)!r} does not say how many devices it has; write {target}:8")
            torus = target.shape if target.platform == "tpu" else ()
            return cls(str(target), count, granule, hardware or target.hardware, torus, target)
        if not isinstance(cluster, Sequence | np.ndarray) or not len(cluster):
            raise MeshError(
                f"cluster must be a target such as 'cuda:h100:64', a mesh, or a list of devices, got {cluster!r:.80}"
            )
        devices = tuple(np.ravel(np.asarray(cluster, dtype=object)))
        granule = _granule(devices)
        # The mesh is made only to look up the hardware.
        one_axis = create_mesh((len(devices),), ("data",), devices=devices)
        name = f"{len(devices)} {devices[0].device_kind} devices"
        sheet, is_assumed = hardware or hardware_of(one_axis), hardware is None and not has_sheet(one_axis)
        return cls(name, len(devices), granule, sheet, devices=devices, is_assumed=is_assumed)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes that its meshes may have."""
        return AXES if self.mesh is None else self.mesh.axis_names

    def shapes(self) -> tuple[Shape, ...]:
        """Returns the meshes to begin with: all devices on one axis, a small axis inside hosts, an axis for hosts."""
        if self.mesh is not None:
            return (tuple(self.mesh.shape.values()),)
        shapes: list[Shape] = [(self.count,)]
        inner = [size for size in (*_MODEL_SIZES, *self.torus) if self.granule % size == 0]
        shapes += [(self.count // size, size) for size in dict.fromkeys(inner)]
        hosts = self.count // self.granule
        if hosts > 1:
            shapes += [(size, self.count // size) for size in _spread(hosts)]
        return tuple(dict.fromkeys(shape for shape in map(_without_ones, shapes) if self.allows(shape)))

    def neighbours(self, shape: Shape) -> tuple[Shape, ...]:
        """Returns the meshes that differ by one step: a factor that moves to the next axis, an axis cut in two, or two
        axes joined."""
        if self.mesh is not None:
            return ()
        near = dict.fromkeys(map(_without_ones, _steps(shape)))
        return tuple(other for other in near if other != shape and len(other) <= len(_NAMES) and self.allows(other))

    def allows(self, shape: Shape) -> bool:
        """No axis cuts a host or a slice."""
        inside = 1
        for size in reversed(shape):
            inside *= size
            if self.granule % inside and inside % self.granule:
                return False
        return True

    def abstract_mesh(self, shape: Shape, stages: int = 1) -> AbstractMesh:
        """Returns a mesh without devices; with `stages`, these are its first axis."""
        if self.mesh is not None:
            return mesh_shape(mesh_text(self.mesh))
        if stages > 1:
            names = (STAGE_AXIS, *_NAMES[1 : len(shape)])
        else:
            names = _NAMES[1 : 1 + len(shape)] if len(shape) < 3 else _NAMES[: len(shape)]
        return mesh_shape(",".join(f"{name}:{size}" for name, size in zip(names, shape, strict=True)))

    def mesh_of(self, shape: Shape, stages: int = 1) -> AnyMesh:
        """Returns a mesh in which devices have their positions in the torus, if the planner has to know them."""
        if self.mesh is not None:
            return self.mesh
        abstract = self.abstract_mesh(shape, stages)
        if self.devices:
            return create_mesh(abstract, devices=self.devices, fast_axes=())
        if self.target is not None and self.torus:
            return self.target.mesh(abstract)
        return abstract

    def doubled(self) -> "Cluster | None":
        """Returns a cluster of twice as many devices of the same kind; `None` where they would not fill hosts, as of 5
        GPUs, or where only one mesh is allowed."""
        if self.mesh is not None or self.target is None:
            return None
        try:
            return Cluster.of(_doubled(self.target), self.hardware)
        except TargetError:
            return None

    def compile_target(self) -> Target:
        if self.target is not None:
            return self.target
        target = target_of(self.hardware, self.count)
        if target is None:
            name = ready_name(self.hardware)
            cause = "slices have several shapes" if name else f"{self.hardware.name!r} is not a ready sheet"
            raise ConfigError(
                f"it is unknown what to compile for on {self.name}: {cause}. Pass a target as cluster, such as "
                "'tpu:v5e:4x4'"
            )
        return target

    def public_mesh(self, mesh: AnyMesh) -> AnyMesh:
        """Returns a mesh as users get it: of a target, which cannot run anything, only the shape."""
        return mesh_shape(mesh_text(mesh)) if self.target is not None else mesh


def _doubled(target: Target) -> Target:
    """Returns a target of twice as many devices, or raises `TargetError` where they do not fill hosts."""
    sizes = list(target.shape)
    # A whole pod of v5e or v6e is a plane of 256 chips (https://jax-ml.github.io/scaling-book/tpus).
    if target.slices > 1 or (len(sizes) == 2 and math.prod(sizes) >= 256):
        return attrs.evolve(target, slices=2 * target.slices)
    smallest = min(range(len(sizes)), key=lambda dim: (sizes[dim], -dim))
    sizes[smallest] *= 2
    return attrs.evolve(target, shape=tuple(sizes))


def _granule(devices: Sequence[Any]) -> int:
    """The number of devices that fast links connect, in a list of them."""
    infos = [DeviceInfo.of(device) for device in devices]
    groups: dict[Any, int] = {}
    for info in infos:
        key = info.slice_index if info.platform == "tpu" else info.process_index
        groups[key] = groups.get(key, 0) + 1
    return math.gcd(*groups.values())


def _spread(hosts: int) -> tuple[int, ...]:
    """Returns the number of hosts, and its divisor next to its root."""
    inner = divisors(hosts)[1:-1]
    middle = [min(inner, key=lambda size: abs(math.log(size) - math.log(hosts) / 2))] if inner else []
    return (hosts, *middle)


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size > 1) or (1,)


def _steps(shape: Shape) -> Iterator[Shape]:
    for index, size in enumerate(shape):
        before, after = shape[:index], shape[index + 1 :]
        for prime in dict.fromkeys(prime_factors(size)):
            if after:  # to the next axis
                yield (*before, size // prime, after[0] * prime, *after[1:])
            if before:
                yield (*before[:-1], before[-1] * prime, size // prime, *after)
        for prime in dict.fromkeys(prime_factors(size)):
            yield (*before, size // prime, prime, *after)
            yield (*before, prime, size // prime, *after)
        if after:
            yield (*before, size * after[0], *after[1:])
