"""The devices that talk to each other in a collective, and the mesh axes that they form.

XLA writes the groups in four ways: as lists, `{{0,1},{2,3}}`; as a reshaped and transposed count from 0,
`[2,2]<=[2,2]T(1,0)`; by the axes of a mesh of its own, `mesh['a'=2,'b'=2] {'a'}`; and empty for one group of all.
"""

import itertools
import math
import re
from collections.abc import Mapping
from typing import TypeAlias, final

import attrs
import numpy as np

from shardrules.core.errors import ProgramTextError
from shardrules.programs.compiled.text import Instruction

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of devices by index: device `i` is `mesh.devices.flat[i]`."""

_LIST = re.compile(r"\{([\d, ]+)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](.*)\{(.*)\}$", re.DOTALL)
_SIZES = re.compile(r"'?([^',=\s][^',=]*)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:\s][^',:]*)'?(?::\((\d+)\)(\d+))?")
_SENT_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{.*?\}\}|\{\})')

_ALONG_PARTITIONS = ("all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
"""Collectives whose ids number partitions when they have a channel. The others number replicas then."""


@final
@attrs.frozen
class Span:
    """The mesh axes that groups of devices form."""

    axes: tuple[str, ...] | None
    """The axes that every group spans completely, in mesh order; `None` where groups are not a union of whole axes."""

    crossed: tuple[str, ...]
    """The axes along which devices of one group differ, at least in part."""


def read_groups(text: str, device_count: int) -> Groups:
    """Reads groups in any of the four forms; an empty text is one group of `device_count` devices."""
    text = text.strip()
    if text.startswith("mesh["):
        return _read_mesh_groups(text)
    if text.startswith("["):
        return _rows(_read_iota(text))
    groups = tuple(tuple(map(int, inside.split(","))) for inside in _LIST.findall(text))
    if groups:
        return groups
    # Braces around nothing are one group of all; any other text without a list is an error.
    if text.strip("{} "):
        raise _not_groups(text)
    return (tuple(range(device_count)),)


def _not_groups(text: str) -> ProgramTextError:
    return ProgramTextError(f"not replica groups as XLA prints them: {text[:200]!r}")


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())


def _read_iota(text: str) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)`: count from 0 to 7, reshape to 2 x 4, transpose, reshape to 4 x 2."""
    match = _IOTA.match(text)
    if match is None:
        raise _not_groups(text)
    shape, source, order = ([int(size) for size in part.split(",")] if part else [] for part in match.groups())
    count = np.arange(math.prod(shape)).reshape(source or shape)
    return (count.transpose(order) if order else count).reshape(-1 if not source else shape)


def _read_mesh_groups(text: str) -> Groups:
    """`mesh['a'=4,'b'=2] {'a':(2)2}`: groups along some of the axes, or along factors of them.

    `'a':(2)2` is the factor of size 2 of axis `a` that comes after a factor of 2, counted from the major side. A mesh
    may have its devices in another order: `mesh['a'=4], device_ids=(3,2,1,0) {'a'}`.
    """
    match = _MESH.match(text)
    if match is None:
        raise _not_groups(text)
    sizes = {name: int(size) for name, size in _SIZES.findall(match[1])}
    ids = re.search(r"device_ids=\((.*?)\)\s*$", match[2].strip())
    devices = np.arange(math.prod(sizes.values())) if ids is None else _read_device_ids(ids[1])
    # Split every axis where a factor begins or ends, so that each group is a union of the dimensions in between.
    cuts = {name: sorted({1, size}) for name, size in sizes.items()}
    factors: list[tuple[str, int, int]] = []
    for name, before, size in _AXIS.findall(match[3]):
        first, last = (int(before), int(before) * int(size)) if size else (1, sizes[name])
        cuts[name] = sorted({*cuts[name], first, last})
        factors.append((name, first, last))
    shape, grouped = [], []
    for name, marks in cuts.items():
        for first, last in itertools.pairwise(marks):
            if any(name == axis and low <= first and last <= high for axis, low, high in factors):
                grouped.append(len(shape))
            shape.append(last // first)
    # Grouped dimensions last and flattened: each row is then one group.
    others = [dim for dim in range(len(shape)) if dim not in grouped]
    group_size = math.prod(shape[dim] for dim in grouped)
    return _rows(devices.reshape(shape).transpose([*others, *grouped]).reshape(-1, group_size))


def _read_device_ids(text: str) -> np.ndarray:
    return _read_iota(text).reshape(-1) if text.startswith("[") else np.array([int(part) for part in text.split(",")])


def groups_of(instruction: Instruction, device_count: int) -> Groups:
    """Returns the devices that a collective brings together, or its pairs of source and target.

    What the ids in the text number depends on `channel_id` and `use_global_device_ids`, as XLA's
    `CollectiveOpGroupMode` defines it. JAX has a single replica of a program, with a partition for each device.
    """
    attributes, kind = instruction.attributes, instruction.op.removesuffix("-start")
    if instruction.op == "send":
        return sent_pairs(instruction) or ()
    # Without replica_groups all devices form one group: an empty text.
    text = attributes.get("source_target_pairs", attributes.get("replica_groups", "{}"))
    if "device_ids" in attributes:  # it belongs to the mesh, but the comma before it ends any other attribute
        text = f"{text}, device_ids={attributes['device_ids']}"
    if attributes.get("source_target_pairs") == "{}":
        return ()
    is_of_devices = attributes.get("use_global_device_ids") == "true"
    if is_of_devices or ("channel_id" in attributes and kind in _ALONG_PARTITIONS):
        return read_groups(text, device_count)
    groups = read_groups(text, 1)
    if any(device for group in groups for device in group):
        return groups  # the only replica is 0, so these must be devices
    # With a channel, all devices of the replica take part; without, each by itself.
    devices = range(device_count)
    return (tuple(devices),) if "channel_id" in attributes else tuple((device,) for device in devices)


def sent_pairs(instruction: Instruction) -> Groups | None:
    """Returns the pairs of source and target of a send between devices; `None` for any other instruction.

    The compiler for GPUs may write a collective-permute as sends and receives.
    """
    match = _SENT_PAIRS.search(instruction.text) if instruction.op == "send" else None
    return None if match is None else tuple(tuple(map(int, pair.split(","))) for pair in _LIST.findall(match[1]))


def span(groups: Groups, sizes: Mapping[str, int]) -> Span:
    """Finds the mesh axes that groups of devices form. `sizes` has the axes in mesh order."""
    if not sizes:
        return Span(None, ())
    # NumPy wants rectangles, so groups of one length are unravelled together.
    differs = [False] * len(sizes)
    for same_length in _by_length(groups):
        for dim, coords in enumerate(np.unravel_index(same_length, tuple(sizes.values()))):
            differs[dim] |= bool((coords != coords[:, :1]).any())
    crossed = tuple(axis for axis, does_differ in zip(sizes, differs, strict=True) if does_differ)
    # Groups that cross some axes are the whole of them if they have as many devices as the axes, and cover the mesh.
    whole = math.prod(sizes[axis] for axis in crossed)
    is_whole = all(len(group) == whole for group in groups) and len(groups) * whole == math.prod(sizes.values())
    return Span(crossed if is_whole else None, crossed)


def _by_length(groups: Groups) -> list[np.ndarray]:
    lengths = dict.fromkeys(map(len, groups))
    return [np.array([group for group in groups if len(group) == length]) for length in lengths if length]
