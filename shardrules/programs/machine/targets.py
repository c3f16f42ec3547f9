"""Machines to compile for. None of them has to be present: the real compilers need only a description.

JAX reaches the compilers through topologies. A topology has devices that programs are compiled for and never run on, so
one process compiles for all of them, beside the CPU devices that it has anyway.
"""

import contextlib
import functools
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import attrs
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from shardrules.core.axes import AnyMesh, check_mesh, mesh_text
from shardrules.core.errors import MissingCompilerError, ShardRulesError, TargetError, UnavailableTargetError, suggest
from shardrules.core.fields import whole_number
from shardrules.mesh.layout import lay_out
from shardrules.programs.machine.flags import Flags, flags_text, read_flags
from shardrules.programs.machine.hardware import Hardware, ready_name

Platform: TypeAlias = Literal["cpu", "tpu", "cuda"]
"""The platform whose compiler is used."""


@final
@attrs.frozen
class _TpuGeneration:
    """A generation of TPUs as libtpu knows it: `device_count` is JAX's devices per chip."""

    libtpu_name: str
    torus_dims: int
    device_count: int = 1
    closed_size: int = 4
    """A dimension of a slice closes to a ring if its size is a multiple of this: in two dimensions each on its own, in
    three only all together, since whole cubes are connected."""
    options: tuple[tuple[str, Any], ...] = ()


_TPUS = MappingProxyType(
    {
        # A chip of a v2, v3 or v7x has two cores, which JAX shows as two devices.
        "v2": _TpuGeneration("v2", 2, device_count=2, closed_size=16),
        "v3": _TpuGeneration("v3", 2, device_count=2, closed_size=32),
        # Cloud TPUs run both cores of a v4 as one device. libtpu needs this option for it; for a v5p it is the default.
        "v4": _TpuGeneration("v4", 3, options=(("chip_config_name", "megacore"),)),
        "v5e": _TpuGeneration("v5e", 2, closed_size=16),
        "v5p": _TpuGeneration("v5p", 3),
        "v6e": _TpuGeneration("v6e", 2, closed_size=16),
        "v7x": _TpuGeneration("tpu7x", 3, device_count=2),
    }
)

_GPUS = ("a100", "h100", "h200", "b200")
"""The GPUs with a description in `gpus/`."""

_GPUS_PER_HOST = 8
"""The GPUs of a DGX or HGX host, which NVLink connects."""

_SINGLE_CHIP = (("chips_per_host_bounds", (1, 1, 1)),)
"""Without this option libtpu assumes hosts of 2x2 chips, and refuses a topology of one chip."""

_SIZES = re.compile(r"[0-9]+(x[0-9]+)*")

_FORMS = MappingProxyType(
    {
        "cpu": "cpu or cpu:<number>, such as cpu:8",
        "tpu": f"tpu:<{'|'.join(_TPUS)}>:<topology>[:<slices>], such as tpu:v5e:4x4 or tpu:v5p:2x2x2",
        "cuda": f"cuda:<{'|'.join(_GPUS)}>:<number>, such as cuda:h100:8",
    }
)

_LIBTPU_ENVIRONMENT = MappingProxyType(
    {
        # libtpu looks these three up on a cloud machine's metadata server, and logs warnings where there is none.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        # Several processes may compile at once: its lock protects a TPU, and there is none.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
    }
)

# Two threads that use a target for the first time get the same devices, and neither sees the other's environment.
_TOPOLOGY_LOCK = threading.Lock()


def _as_sizes(value: Any) -> tuple[int, ...]:
    """Converts a single number; what is not a size is refused with everything else that is wrong."""
    return tuple(value) if isinstance(value, Iterable) else (value,)


@final
@attrs.frozen
class Target:
    """A machine to compile for: its compiler, its chip, and how many of them. `Target.parse` reads one from a string.

    **Arguments:**

    - `platform`: `"cpu"`, `"tpu"` or `"cuda"`.
    - `chip`: the generation of TPU (`"v5e"`) or the GPU (`"h100"`); empty for CPUs.
    - `shape`: the torus of a TPU slice, in chips; for GPUs and CPUs just their number. Empty for as many CPU devices as
        a mesh has. More than 8 GPUs are several hosts of 8.
    - `slices`: how many such TPU slices, connected by a network.
    - `flags`: what the compiler is told besides: `XLA_FLAGS` or `LIBTPU_INIT_ARGS` as they are, a mapping of names and
        values, or the name of a published set, such as `"maxtext:v5p"`; a set may be followed by flags that change it.
        Flags in this process's environment are in force as well, for all targets.

    **Raises:**

    `TargetError`, which lists everything that is wrong.

    ```python
    target = sr.Target.parse("tpu:v5e:4x4")
    assert target == sr.Target("tpu", "v5e", (4, 4)) and str(target) == "tpu:v5e:4x4"
    assert target.count == 16 and target.hardware.name == "TPU v5e"
    tuned = sr.Target("tpu", "v5e", (4, 4), flags="--xla_tpu_scoped_vmem_limit_kib=65536")
    assert str(tuned) == "tpu:v5e:4x4 --xla_tpu_scoped_vmem_limit_kib=65536"
    ```
    """

    platform: Platform
    chip: str = ""
    shape: tuple[int, ...] = attrs.field(default=(), converter=_as_sizes)
    slices: int = 1
    flags: Flags = attrs.field(default=(), converter=read_flags)

    def __attrs_post_init__(self) -> None:
        problems = _target_problems(self.platform, self.chip, self.shape, self.slices)
        if problems:
            raise _target_error(self.machine, problems, self.platform)

    @classmethod
    def parse(cls, target: "Target | str") -> "Target":
        """Returns the target that a string names. Capitals and blanks around the colons do not matter.

        **Arguments:**

        - `target`: `"cpu"`, `"cpu:8"`, `"tpu:v5e:4x4"`, `"tpu:v5e:4x4:2"` for two slices, `"cuda:h100:8"`, each
            with flags behind it if there are any: `"tpu:v5p:4x4x4 maxtext:v5p"`; or a `Target`, which is returned
            unchanged.

        **Returns:**

        A `Target`; its `str` is the string in normal form.

        **Raises:**

        `TargetError`, which lists everything that is wrong, and the forms that a target may have.

        ```python
        assert str(sr.Target.parse(" CUDA:H100:16 ")) == "cuda:h100:16"
        assert sr.Target.parse(sr.Target("cpu")) == sr.Target("cpu")
        ```
        """
        if isinstance(target, cls):
            return target
        if not isinstance(target, str):
            raise TargetError(
                f"a target must be a string or a Target, got {target!r}. Write {'; '.join(_FORMS.values())}"
            )
        machine, flags = _split_flags(target)
        platform, *rest = [part.strip() for part in machine.lower().split(":")]
        chip = rest.pop(0) if platform != "cpu" and rest else ""
        sizes = [_read_sizes(part) for part in rest]
        shape = sizes[0] if sizes else ()
        # Only TPUs have a number of slices after their shape. It is a single size: 2x2 in its place is unexpected.
        slice_sizes = (sizes[1] if platform == "tpu" and len(sizes) > 1 else None) or (1,)
        slices = slice_sizes[0]
        part_count = 2 if platform == "tpu" and len(slice_sizes) == 1 else 1
        # Collect everything that is wrong, so that one error names it all.
        problems = _target_problems(platform, chip, shape, slices)
        if platform in _FORMS:
            problems += [
                f"{part!r} is not a number{' or sizes joined by x' if platform == 'tpu' else ''}"
                for part, size in zip(rest, sizes, strict=True)
                if size is None
            ]
            surplus = rest[part_count:]
            if surplus:
                problems.append(f"unexpected {':'.join(surplus)!r}")
        if problems:
            raise _target_error(target, problems, platform)
        return cls(platform, chip, shape or (), slices, flags)  # pyright: ignore[reportArgumentType]  checked above

    def __str__(self) -> str:
        return f"{self.machine} {flags_text(self.flags)}" if self.flags else self.machine

    @property
    def machine(self) -> str:
        """The target as a string without its flags: `"tpu:v5e:4x4"`."""
        sizes = "x".join(map(str, self.shape))
        slices = str(self.slices) if self.slices != 1 else ""
        return ":".join(str(part) for part in (self.platform, self.chip, sizes, slices) if part)

    @property
    def count(self) -> int | None:
        """The number of its devices; `None` for a CPU target that takes as many as a mesh has."""
        if not self.shape:
            return None
        devices = _TPUS[self.chip].device_count if self.platform == "tpu" else 1
        return math.prod(self.shape) * devices * self.slices

    @property
    def granule(self) -> int | None:
        """The number of devices that fast links connect: a host of GPUs, a slice of TPUs, or all CPU devices.

        Only the network connects granules to each other.
        """
        count = self.count
        if count is None or self.platform == "cpu":
            return count
        return count // self.slices if self.platform == "tpu" else min(count, _GPUS_PER_HOST)

    @property
    def hardware(self) -> Hardware:
        """The sheet of its chip. `attrs.evolve` makes your own sheet from it."""
        return Hardware.named(f"{self.platform}:{self.chip}" if self.chip else self.platform)

    def devices(self) -> list[Any]:
        """Returns devices to compile for, the same objects at every call. This starts JAX's backend.

        **Returns:**

        A list of `count` JAX devices; all CPU devices of the process where `count` is `None`. The devices of a TPU or
        GPU target cannot run anything.

        **Raises:**

        `MissingCompilerError` when the compiler is not installed, with the command that installs it.
        `UnavailableTargetError` when this process has too few CPU devices, or when the compiler refuses the target.

        ```python
        assert sr.Target.parse("cpu:2").devices() == jax.devices("cpu")[:2]
        ```
        """
        if self.platform == "cpu":
            return _cpu_devices(self)
        return list(_compile_only_devices(attrs.evolve(self, flags=())))

    def mesh(self, mesh: AnyMesh) -> Mesh:
        """Returns a mesh with the same axes on this target's devices.

        The devices are laid out as `create_mesh` lays them out on the real machine: TPUs along their torus, slices and
        hosts on the first axes that they divide. A mesh that is on this target's devices already is returned unchanged.

        **Arguments:**

        - `mesh`: a `Mesh` or an `AbstractMesh`: its axis names, sizes and types are kept.

        **Returns:**

        A `jax.sharding.Mesh`.

        **Raises:**

        `TargetError` when mesh and target differ in size, `AxisTypeError` when `mesh` is not a mesh; also what
        `devices` raises, and what `create_mesh` raises for a layout that the torus does not have.

        ```python
        mesh = sr.Target.parse("cpu").mesh(sr.mesh_shape("data:4,model:2"))
        assert mesh.shape["data"] == 4 and mesh.devices.size == 8
        ```
        """
        check_mesh(mesh)
        sizes = tuple(mesh.shape.values())
        size = math.prod(sizes)
        if self.count not in (None, size):
            raise TargetError(
                f"mesh {mesh_text(mesh)!r} has {size} devices, but target {self} has {self.count}. Use a mesh of "
                f"{self.count} devices, or a target of {size}{_example_of_size(self, size)}"
            )
        if isinstance(mesh, Mesh) and set(mesh.devices.flat) <= set(self.devices()):
            return mesh
        devices = (self if self.shape else attrs.evolve(self, shape=(size,))).devices()
        # The layout is computed by ids, as for devices that are only described.
        by_id = {device.id: device for device in devices}
        arranged = np.empty(sizes, dtype=object)
        for coords, device_id in np.ndenumerate(lay_out(sizes, mesh.axis_names, devices).ids):
            arranged[coords] = by_id[int(device_id)]
        return Mesh(arranged, mesh.axis_names, axis_types=mesh.axis_types)


def target_of(hardware: Hardware, count: int) -> Target | None:
    """Returns the target of some devices with a ready sheet; `None` without one, and for TPUs, whose slices of a size
    have several shapes."""
    name = ready_name(hardware)
    return None if not name or name.startswith("tpu") else Target.parse(f"{name}:{count}")


def closed_dims(chip: str, sizes: Sequence[int]) -> tuple[bool, ...]:
    """Returns for each dimension of a slice of TPUs whether it closes to a ring, by its sizes in chips.

    Full pods do, and parts of them along a dimension of full size (https://jax-ml.github.io/scaling-book/tpus); of a
    v4, v5p and v7x all slices of whole cubes of 4x4x4.
    """
    closed = tuple(size % _TPUS[chip].closed_size == 0 for size in sizes)
    return closed if len(closed) < 3 else (all(closed),) * len(closed)


def _split_flags(text: str) -> tuple[str, str]:
    """A target and its flags, which begin with a dash or with the name of a set, which has a colon."""
    match = re.search(r"(?<=[^\s:])\s+(?=-|[^\s:]+:)", text)
    return (text, "") if match is None else (text[: match.start()], text[match.end() :])


def _read_sizes(text: str) -> tuple[int, ...] | None:
    """The sizes in `"4x4"` or `"8"`; `None` for any other text."""
    sizes = [whole_number(size) for size in text.split("x")] if _SIZES.fullmatch(text) else [None]
    return tuple([size for size in sizes if size is not None]) if None not in sizes else None


def _target_error(text: str, problems: list[str], platform: str) -> TargetError:
    forms = [_FORMS[platform]] if platform in _FORMS else list(_FORMS.values())
    return TargetError(f"target {text!r}: {'; '.join(problems)}. Write {'; '.join(forms)}")


def _target_problems(platform: str, chip: str, shape: tuple[int, ...] | None, slices: int) -> list[str]:
    """Everything that is wrong with a target. `shape` is `None` where it could not be read, which `parse` reports."""
    if platform not in _FORMS:
        hint = " (did you mean 'cuda'?)" if platform in ("gpu", "nvidia") else suggest(str(platform), _FORMS)
        return [f"unknown platform {platform!r}{hint}"]
    # Sizes depend on the chip: they are judged only where the chip is known.
    chips = {"cpu": (), "tpu": tuple(_TPUS), "cuda": _GPUS}[platform]
    chip_noun = "TPU generation" if platform == "tpu" else "GPU"
    problems = []
    if platform == "cpu" and chip:
        problems.append(f"a CPU target has no chip, got {chip!r}")
    elif chips and not chip:
        problems.append(f"the {chip_noun} is missing")
    elif chips and chip not in chips:
        problems.append(f"unknown {chip_noun} {chip!r}{suggest(str(chip), chips)}")
    if any(type(size) is not int or size < 1 for size in shape or ()):
        problems.append(f"sizes must be positive integers, got {shape}")
    elif shape is not None and platform == "tpu" and chip in _TPUS:
        problems += _torus_problems(chip, shape)
    elif shape is not None and platform != "tpu":
        problems += _count_problems(platform, shape)
    elif shape == ():
        # Only a TPU of an unknown chip comes here, of whose shape nothing else can be said.
        problems.append("the topology is missing")
    if type(slices) is not int or slices < 1 or (slices > 1 and platform != "tpu"):
        problems.append(f"slices must be a positive integer, and only TPUs may have more than 1; got {slices}")
    return problems


def _torus_problems(chip: str, shape: tuple[int, ...]) -> list[str]:
    dims = _TPUS[chip].torus_dims
    if not shape:
        return ["the topology is missing"]
    if len(shape) != dims:
        example = "x".join(map(str, (*shape, 1))) if len(shape) == 2 else "x".join(["4"] * dims)
        return [f"the torus of a {chip} has {dims} dimensions, got {len(shape)}; use {example}, for example"]
    if math.prod(shape) > 1 and any(size % 2 for size in shape[:2]):
        plane = f"{shape[0]}x{shape[1]}"
        return [f"a host has 2x2 chips, so the first two sizes must be even unless there is a single chip; got {plane}"]
    return []


def _count_problems(platform: str, shape: tuple[int, ...]) -> list[str]:
    if len(shape) > 1:
        return [f"expected one number of devices, got {shape}"]
    if platform == "cpu":
        return []
    if not shape:
        return ["the number of GPUs is missing"]
    count = shape[0]
    # Part of a host is fine, as on a machine with 4 GPUs; several hosts must be whole.
    fewer = count - count % _GPUS_PER_HOST
    if count < _GPUS_PER_HOST or count == fewer:
        return []
    return [f"{count} GPUs do not fill hosts of {_GPUS_PER_HOST}; use {fewer} or {fewer + _GPUS_PER_HOST}"]


def _example_of_size(target: Target, size: int) -> str:
    """The target of that size, where it follows from this one."""
    if target.platform == "tpu" or _target_problems(target.platform, target.chip, (size,), 1):
        return ""
    return f": {attrs.evolve(target, shape=(size,))}"


def _cpu_devices(target: Target) -> list[Any]:
    try:
        devices = jax.devices("cpu")
    except RuntimeError as error:
        raise UnavailableTargetError(
            f"{target}: JAX has no CPU devices: {error}. If JAX_PLATFORMS is set, it must include cpu"
        ) from error
    count = target.count or len(devices)
    if count > len(devices):
        raise UnavailableTargetError(
            f"{target} needs {count} CPU devices, but this process has {len(devices)}, and JAX cannot add any after it "
            f"has started. Start the process with XLA_FLAGS=--xla_force_host_platform_device_count={count}, or call "
            f"jax.config.update('jax_num_cpu_devices', {count}) before anything else of JAX"
        )
    return devices[:count]


# The devices of two topologies differ, even of equal topologies, and so would meshes on them: build each topology once.
@functools.cache
def _topology_devices(target: Target) -> tuple[Any, ...]:
    # A real TPU or GPU must be found first, with the user's environment. Compiling starts JAX anyway.
    jax.devices()
    try:
        topology = _tpu_topology(target) if target.platform == "tpu" else _cuda_topology(target)
    except ShardRulesError:
        raise
    except RuntimeError as error:
        raise UnavailableTargetError(f"{target}: its compiler refuses: {error}") from error
    return tuple(topology.devices)


def _compile_only_devices(target: Target) -> tuple[Any, ...]:
    with _TOPOLOGY_LOCK:
        return _topology_devices(target)


def _missing_compiler(target: Target, extra: str, package: str) -> MissingCompilerError:
    return MissingCompilerError(
        f'{target} needs {package}, which is not installed: pip install "shardrules[{extra}]". It compiles without a '
        f"{'TPU' if extra == 'tpu' else 'GPU'}"
    )


def _tpu_topology(target: Target) -> topologies.TopologyDescription:
    if find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise _missing_compiler(target, "tpu", "libtpu, the compiler for TPUs")
    generation = _TPUS[target.chip]
    options = dict(generation.options)
    if math.prod(target.shape) == 1:
        options |= dict(_SINGLE_CHIP)
    if target.slices > 1:
        options["num_slices"] = target.slices
    name = f"{generation.libtpu_name}:{'x'.join(map(str, target.shape))}"
    with _environment(_LIBTPU_ENVIRONMENT):
        return topologies.get_topology_desc(name, platform="tpu", **options)


def _cuda_topology(target: Target) -> topologies.TopologyDescription:
    if not any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins")):
        raise _missing_compiler(target, "cuda", "JAX's CUDA plugin")
    description = files("shardrules.programs.machine").joinpath("gpus", f"{target.chip}.txtpb").read_text("utf-8")
    count = target.shape[0]
    hosts = max(1, count // _GPUS_PER_HOST)
    try:
        return topologies.get_topology_desc(
            str(target),
            platform="cuda",
            target_config=description,
            # Groups of hosts that NVLink connects, hosts in each group, devices in each host.
            topology=f"{hosts}x1x{count // hosts}",
        )
    except NotImplementedError as error:
        raise UnavailableTargetError(
            f"{target}: JAX's CUDA plugin is installed but did not load when JAX started: unless JAX_PLATFORMS is cpu, "
            "it needs CUDA's libraries, which compiling does not need. Start the process with JAX_PLATFORMS=cpu, or "
            "call jax.config.update('jax_platforms', 'cpu') before anything else of JAX"
        ) from error


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables that are not set yet, and removes them afterwards."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
