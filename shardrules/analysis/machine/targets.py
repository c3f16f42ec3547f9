"""Machines to compile for, none of which has to be there: the real compilers need a description only.

JAX reaches them through topologies, which have devices that programs are compiled for and never run on. That keeps all
of them in one process, beside the CPU devices that it has anyway.
"""

import contextlib
import functools
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
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

from shardrules.analysis.machine.hardware import SHEETS, Hardware
from shardrules.core.axes import AnyMesh, check_mesh, mesh_text
from shardrules.core.errors import MissingCompilerError, ShardRulesError, TargetError, UnavailableTargetError, suggest
from shardrules.mesh.layout import lay_out

Platform: TypeAlias = Literal["cpu", "tpu", "cuda"]
"""Whose compiler it is."""


@final
@attrs.frozen
class _Tpu:
    """What to ask libtpu for: its name for the generation, and how a chip is made and used.

    `dims` are those of its torus. Where a chip has two `devices`, JAX has one for each half of it.
    """

    libtpu: str
    dims: int
    devices: int = 1
    options: tuple[tuple[str, Any], ...] = ()


_TPUS = MappingProxyType(
    {
        "v2": _Tpu("v2", 2, devices=2),
        "v3": _Tpu("v3", 2, devices=2),
        # Cloud TPUs run both cores of a v4 as one device; libtpu has to be told, other than for a v5p.
        "v4": _Tpu("v4", 3, options=(("chip_config_name", "megacore"),)),
        "v5e": _Tpu("v5e", 2),
        "v5p": _Tpu("v5p", 3),
        "v6e": _Tpu("v6e", 2),
        "v7x": _Tpu("tpu7x", 3, devices=2),
    }
)
_GPUS = ("a100", "h100", "h200", "b200")
_GPUS_PER_HOST = 8
_SINGLE_CHIP = (("chips_per_host_bounds", (1, 1, 1)),)
_SIZES = re.compile(r"[0-9]+(x[0-9]+)*")

_FORMS = MappingProxyType(
    {
        "cpu": "cpu or cpu:<number>, such as cpu:8",
        "tpu": f"tpu:<{'|'.join(_TPUS)}>:<topology>[:<slices>], such as tpu:v5e:4x4 or tpu:v5p:2x2x2",
        "cuda": f"cuda:<{'|'.join(_GPUS)}>:<number>, such as cuda:h100:8",
    }
)

# What libtpu asks the metadata server of a cloud machine, and complains aloud where there is none. Then: may others
# compile at the same time (it guards a TPU that nobody has), and no log files, please.
_QUIET = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
    }
)

# Two threads that ask for the same target first get the same devices, and neither sees the environment of the other.
_DESCRIBING = threading.Lock()


@final
@attrs.frozen
class Target:
    """A machine to compile for: its compiler, its chip, and how many there are. `Target.parse` reads one from a text.

    **Arguments:**

    - `platform`: `"cpu"`, `"tpu"` or `"cuda"`.
    - `chip`: the generation of TPU (`"v5e"`) or the GPU (`"h100"`); empty for CPUs.
    - `shape`: the torus of a TPU slice, in chips; the number of GPUs, or of CPU devices, alone. Empty for as many CPU
        devices as a mesh takes. More than 8 GPUs are several hosts of 8.
    - `slices`: how many such slices of TPUs a network joins.

    **Raises:**

    `TargetError`, which lists all that is wrong.

    ```python
    target = Target.parse("tpu:v5e:4x4")
    assert target == Target("tpu", "v5e", (4, 4)) and str(target) == "tpu:v5e:4x4"
    assert target.count == 16 and target.hardware.name == "TPU v5e"
    ```
    """

    platform: Platform
    chip: str = ""
    shape: tuple[int, ...] = attrs.field(default=(), converter=tuple)
    slices: int = 1

    def __attrs_post_init__(self) -> None:
        problems = _problems(self.platform, self.chip, self.shape, self.slices)
        if problems:
            raise _refusal(str(self), problems, self.platform)

    @classmethod
    def parse(cls, target: "Target | str") -> "Target":
        """Returns the target that a text names. Letters may be large, and blanks stand around the colons.

        **Arguments:**

        - `target`: `"cpu"`, `"cpu:8"`, `"tpu:v5e:4x4"`, `"tpu:v5e:4x4:2"` for two slices, `"cuda:h100:8"`; or a target,
            which is returned as it is.

        **Returns:**

        A `Target`; its `str` is the text in its normal form.

        **Raises:**

        `TargetError`, which lists all that is wrong and what is known.

        ```python
        assert str(Target.parse(" CUDA:H100:16 ")) == "cuda:h100:16"
        assert Target.parse(Target("cpu")) == Target("cpu")
        ```
        """
        if isinstance(target, cls):
            return target
        if not isinstance(target, str):
            raise TargetError(
                f"a target is a text or a Target, got {target!r}. Targets are {'; '.join(_FORMS.values())}"
            )
        platform, *rest = [part.strip() for part in target.lower().split(":")]
        chip = rest.pop(0) if platform != "cpu" and rest else ""
        sizes = [_read_sizes(part) for part in rest]
        shape = sizes[0] if sizes else ()
        most = 2 if platform == "tpu" else 1
        slices = (sizes[1] if len(sizes[:most]) > 1 else None) or (1,)
        problems = _problems(platform, chip, shape, slices[0])
        if platform in _FORMS:
            problems += [
                f"{part!r} is no number{' and no sizes joined by x' if platform == 'tpu' else ''}"
                for part, size in zip(rest, sizes, strict=True)
                if size is None
            ]
            surplus = rest[most:] if len(slices) == 1 else rest[1:]
            if surplus:
                problems.append(f"{':'.join(surplus)!r} is too much")
        if problems:
            raise _refusal(target, problems, platform)
        return cls(platform, chip, shape or (), slices[0])  # pyright: ignore[reportArgumentType]  checked above

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        slices = str(self.slices) if self.slices != 1 else ""
        return ":".join(str(part) for part in (self.platform, self.chip, sizes, slices) if part)

    @property
    def count(self) -> int | None:
        """How many devices it has; `None` for a CPU target that takes as many as a mesh has."""
        if not self.shape:
            return None
        devices = _TPUS[self.chip].devices if self.platform == "tpu" else 1
        return math.prod(self.shape) * devices * self.slices

    @property
    def granule(self) -> int | None:
        """How many of its devices fast links join: those of a host of GPUs, those of a slice of TPUs, all CPU devices.

        Between granules there is the network only.
        """
        count = self.count
        if count is None or self.platform == "cpu":
            return count
        return count // self.slices if self.platform == "tpu" else min(count, _GPUS_PER_HOST)

    @property
    def hardware(self) -> Hardware:
        """The sheet of its chip. `attrs.evolve` makes another one from it."""
        return SHEETS[f"{self.platform}:{self.chip}" if self.chip else self.platform]

    def devices(self) -> list[Any]:
        """Returns devices to compile for, the same ones every time. JAX's backend is started.

        **Returns:**

        A list of devices of JAX, `count` of them; all CPU devices of the process where `count` is `None`. Nothing runs
        on those of a TPU or a GPU.

        **Raises:**

        `MissingCompilerError` when the compiler is not installed; it gives the command that does so.
        `UnavailableTargetError` when this process has too few CPU devices, or its compiler refuses.

        ```python
        assert Target.parse("cpu:2").devices() == jax.devices("cpu")[:2]
        ```
        """
        return _cpu_devices(self) if self.platform == "cpu" else list(_described(self))

    def mesh(self, mesh: AnyMesh) -> Mesh:
        """Returns the mesh of the same axes on this target's devices.

        Devices stand in it as in a mesh that `create_mesh` makes on the real machine: TPUs along their torus, slices
        and hosts on the first axes that they divide. A mesh that is on this target's devices already is returned as it
        is.

        **Arguments:**

        - `mesh`: a `Mesh` or an `AbstractMesh`: its names, sizes and types of axes are kept.

        **Returns:**

        A `jax.sharding.Mesh`.

        **Raises:**

        `TargetError` when the mesh has another size than the target, `AxisTypeError` when it is none; else as
        `devices`, and as `create_mesh` for a layout that the torus does not have.

        ```python
        mesh = Target.parse("cpu").mesh(sr.mesh_shape("data:4,model:2"))
        assert mesh.shape["data"] == 4 and mesh.devices.size == 8
        ```
        """
        check_mesh(mesh)
        sizes = tuple(mesh.shape.values())
        size = math.prod(sizes)
        if self.count not in (None, size):
            raise TargetError(
                f"mesh {mesh_text(mesh)!r} has {size} devices, and the target {self} has {self.count}. Write a mesh of "
                f"{self.count}, or a target of {size}{_of_size(self, size)}"
            )
        if isinstance(mesh, Mesh) and set(mesh.devices.flat) <= set(self.devices()):
            return mesh
        devices = (self if self.shape else attrs.evolve(self, shape=(size,))).devices()
        by_id = {device.id: device for device in devices}
        standing = np.empty(sizes, dtype=object)
        for place, number in np.ndenumerate(lay_out(sizes, mesh.axis_names, devices).ids):
            standing[place] = by_id[int(number)]
        return Mesh(standing, mesh.axis_names, axis_types=mesh.axis_types)


def _read_sizes(text: str) -> tuple[int, ...] | None:
    """The sizes in `"4x4"` or `"8"`; `None` where there is something else."""
    return tuple(map(int, text.split("x"))) if _SIZES.fullmatch(text) else None


def _refusal(text: str, problems: list[str], platform: str) -> TargetError:
    forms = [_FORMS[platform]] if platform in _FORMS else list(_FORMS.values())
    return TargetError(f"target {text!r}: {'; '.join(problems)}. Write {'; '.join(forms)}")


def _problems(platform: str, chip: str, shape: tuple[int, ...] | None, slices: int) -> list[str]:
    """All that is wrong with a target. A shape that is `None` is one that could not be read: others tell of it."""
    if platform not in _FORMS:
        near = " (did you mean 'cuda'?)" if platform in ("gpu", "nvidia") else suggest(str(platform), _FORMS)
        return [f"there is no platform {platform!r}{near}"]
    chips = {"cpu": (), "tpu": tuple(_TPUS), "cuda": _GPUS}[platform]
    what = "generation of TPU" if platform == "tpu" else "GPU"
    problems = []
    if platform == "cpu" and chip:
        problems.append(f"a CPU has no chip, got {chip!r}")
    elif chips and not chip:
        problems.append(f"it names no {what}")
    elif chips and chip not in chips:
        problems.append(f"there is no {what} {chip!r}{suggest(str(chip), chips)}")
    if any(type(size) is not int or size < 1 for size in shape or ()):
        problems.append(f"sizes are integers of 1 or more, got {shape}")
    elif shape is not None and platform == "tpu" and chip in _TPUS:
        problems += _torus_problems(chip, shape)
    elif shape is not None and platform != "tpu":
        problems += _number_problems(platform, shape)
    elif shape == ():
        problems.append("it has no topology")
    if type(slices) is not int or slices < 1 or (slices > 1 and platform != "tpu"):
        problems.append(f"only TPUs have slices, and 1 of them or more; got {slices}")
    return problems


def _torus_problems(chip: str, shape: tuple[int, ...]) -> list[str]:
    dims = _TPUS[chip].dims
    if not shape:
        return ["it has no topology"]
    if len(shape) != dims:
        like = "x".join(map(str, (*shape, 1))) if len(shape) == 2 else "4x4"
        return [f"the torus of a {chip} has {dims} dimensions, got {len(shape)}: {like} has as many"]
    if math.prod(shape) > 1 and any(size % 2 for size in shape[:2]):
        got = f"{shape[0]}x{shape[1]}"
        return [f"a host holds 2x2 chips, so the first two sizes are even unless there is one chip only; got {got}"]
    return []


def _number_problems(platform: str, shape: tuple[int, ...]) -> list[str]:
    if len(shape) > 1:
        return [f"it has one number of devices, got {shape}"]
    if platform == "cpu":
        return []
    if not shape:
        return ["it has no number of GPUs"]
    over = shape[0] % _GPUS_PER_HOST
    if shape[0] < _GPUS_PER_HOST or not over:
        return []
    fewer = shape[0] - over
    return [
        f"{shape[0]} GPUs are no whole number of hosts of {_GPUS_PER_HOST}: {fewer} or {fewer + _GPUS_PER_HOST} are"
    ]


def _of_size(target: Target, size: int) -> str:
    """How a target of that size is written, where it follows from this one."""
    if target.platform == "tpu" or _problems(target.platform, target.chip, (size,), 1):
        return ""
    return f": {attrs.evolve(target, shape=(size,))}"


def _cpu_devices(target: Target) -> list[Any]:
    try:
        found = jax.devices("cpu")
    except RuntimeError as error:
        raise UnavailableTargetError(
            f"{target}: JAX has no CPU devices: {error}. Where JAX_PLATFORMS is set, it has to name cpu too"
        ) from error
    count = target.count or len(found)
    if count > len(found):
        raise UnavailableTargetError(
            f"{target} needs {count} CPU devices, and this process has {len(found)}: JAX makes them when it starts "
            f"and cannot add any. Start the process with XLA_FLAGS=--xla_force_host_platform_device_count={count}, or "
            f"call jax.config.update('jax_num_cpu_devices', {count}) before anything else of JAX"
        )
    return found[:count]


# Devices of two topologies differ, even of topologies that are alike: a mesh of each would be two meshes.
@functools.cache
def _devices_of(target: Target) -> tuple[Any, ...]:
    # A TPU or GPU that is really there has to be met first, in its own environment. Compiling starts JAX anyway.
    jax.devices()
    try:
        found = _tpu_topology(target) if target.platform == "tpu" else _cuda_topology(target)
    except ShardRulesError:
        raise
    except RuntimeError as error:
        raise UnavailableTargetError(f"{target}: its compiler refuses: {error}") from error
    return tuple(found.devices)


def _described(target: Target) -> tuple[Any, ...]:
    with _DESCRIBING:
        return _devices_of(target)


def _missing(target: Target, extra: str, what: str) -> MissingCompilerError:
    return MissingCompilerError(
        f'{target} needs {what}, which is not installed: pip install "shardrules[{extra}]". It compiles without a '
        f"{'TPU' if extra == 'tpu' else 'GPU'}"
    )


def _tpu_topology(target: Target) -> topologies.TopologyDescription:
    if find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise _missing(target, "tpu", "libtpu, the compiler for TPUs")
    chip = _TPUS[target.chip]
    options = dict(chip.options)
    if math.prod(target.shape) == 1:
        options |= dict(_SINGLE_CHIP)
    if target.slices > 1:
        options["num_slices"] = target.slices
    name = f"{chip.libtpu}:{'x'.join(map(str, target.shape))}"
    with _environment(_QUIET):
        return topologies.get_topology_desc(name, platform="tpu", **options)


def _cuda_topology(target: Target) -> topologies.TopologyDescription:
    if not any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins")):
        raise _missing(target, "cuda", "JAX's CUDA plugin")
    description = files("shardrules.analysis.machine").joinpath("gpus", f"{target.chip}.txtpb").read_text("utf-8")
    count = target.shape[0]
    hosts = max(1, count // _GPUS_PER_HOST)
    try:
        return topologies.get_topology_desc(
            str(target),
            platform="cuda",
            target_config=description,
            # Groups of hosts that NVLink joins, hosts in each, devices in each.
            topology=f"{hosts}x1x{count // hosts}",
        )
    except NotImplementedError as error:
        raise UnavailableTargetError(
            f"{target}: JAX's CUDA plugin is installed and did not load when JAX started: unless JAX_PLATFORMS is cpu, "
            "it wants CUDA's libraries, which compiling does not need. Start the process with JAX_PLATFORMS=cpu, or "
            "call jax.config.update('jax_platforms', 'cpu') before anything else of JAX"
        ) from error


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets those variables that are not set, and takes them away again."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
