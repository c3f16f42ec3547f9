"""Which devices talk to each other in a collective, and which mesh axes that is.

XLA writes the groups in four ways: as lists, as a reshaped and transposed count from 0, by the axes of a mesh of its
own, and empty for everybody.
"""

import itertools
import math
import re
from collections.abc import Mapping
from typing import TypeAlias, final

import attrs
import numpy as np

from shardrules.analysis.program.text import Instruction
from shardrules.core.errors import ProgramTextError

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of devices by their numbers: device `i` is `mesh.devices.flat[i]`."""

_LIST = re.compile(r"\{([\d, ]+)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](.*)\{(.*)\}$", re.DOTALL)
_SIZES = re.compile(r"'?([^',=\s][^',=]*)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:\s][^',:]*)'?(?::\((\d+)\)(\d+))?")
_SENT_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{.*?\}\}|\{\})')
_ALONG_PARTITIONS = ("all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")


@final
@attrs.frozen
class Span:
    """How groups of devices lie in a mesh.

    **Arguments:**

    - `axes`: the axes that every group is the whole of, in mesh order; `None` where groups are no union of whole axes.
    - `crossed`: the axes along which devices of one group differ, in whole or in part.
    """

    axes: tuple[str, ...] | None
    crossed: tuple[str, ...]


def read_groups(text: str, device_count: int) -> Groups:
    """Reads groups of devices.

    **Arguments:**

    - `text`: for instance `"{{0,1},{2,3}}"`, `"[4,2]<=[2,4]T(1,0)"`, `"mesh['a'=4,'b'=2] {'a'}"`, or `"{}"` for one
        group of all.
    - `device_count`: how many devices there are.

    **Returns:**

    The groups.

    **Raises:**

    `ProgramTextError` for a text in none of these forms.

    ```python
    assert read_groups("[2,2]<=[2,2]T(1,0)", 4) == ((0, 2), (1, 3))
    assert read_groups("mesh['a'=2,'b'=2] {'a'}", 4) == ((0, 2), (1, 3))
    ```
    """
    text = text.strip()
    if text.startswith("mesh["):
        return _of_mesh(text)
    if text.startswith("["):
        return _rows(_iota(text))
    groups = tuple(tuple(map(int, inside.split(","))) for inside in _LIST.findall(text))
    if groups:
        return groups
    if text.strip("{} "):
        raise ProgramTextError(f"these are no replica groups as XLA prints them: {text[:200]!r}")
    return (tuple(range(device_count)),)


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())


def _iota(text: str) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)`: count from 0 to 7, as 2 x 4, transposed, as 4 x 2."""
    found = _IOTA.match(text)
    if found is None:
        raise ProgramTextError(f"these are no replica groups as XLA prints them: {text[:200]!r}")
    shape, source, order = ([int(one) for one in part.split(",")] if part else [] for part in found.groups())
    count = np.arange(math.prod(shape)).reshape(source or shape)
    return (count.transpose(order) if order else count).reshape(-1 if not source else shape)


def _of_mesh(text: str) -> Groups:
    """`mesh['a'=4,'b'=2] {'a':(2)2}`: groups along some of the axes, or along factors of them.

    `'a':(2)2` is the second of the factors 2 x 2 of `a`, the major first. Devices may be numbered in another order.
    """
    found = _MESH.match(text)
    if found is None:
        raise ProgramTextError(f"these are no replica groups as XLA prints them: {text[:200]!r}")
    sizes = {name: int(size) for name, size in _SIZES.findall(found[1])}
    ids = re.search(r"device_ids=\((.*?)\)\s*$", found[2].strip())
    count = math.prod(sizes.values())
    devices = np.arange(count) if ids is None else _device_ids(ids[1])
    cuts = {name: sorted({1, size}) for name, size in sizes.items()}
    parts: list[tuple[str, int, int]] = []
    for name, before, size in _AXIS.findall(found[3]):
        first, last = (int(before), int(before) * int(size)) if size else (1, sizes[name])
        cuts[name] = sorted({*cuts[name], first, last})
        parts.append((name, first, last))
    shape, along = [], []
    for name, marks in cuts.items():
        for first, last in itertools.pairwise(marks):
            if any(name == of and low <= first and last <= high for of, low, high in parts):
                along.append(len(shape))
            shape.append(last // first)
    others = [dim for dim in range(len(shape)) if dim not in along]
    group = math.prod(shape[dim] for dim in along)
    return _rows(devices.reshape(shape).transpose([*others, *along]).reshape(-1, group))


def _device_ids(text: str) -> np.ndarray:
    return _iota(text).reshape(-1) if text.startswith("[") else np.array([int(one) for one in text.split(",")])


def groups_of(instruction: Instruction, replica_count: int, partition_count: int) -> Groups:
    """Returns the devices that a collective brings together.

    **Arguments:**

    - `instruction`: the collective; one with source and target pairs gives these.
    - `replica_count`, `partition_count`: those of the program.

    **Returns:**

    The groups. Device `r * partition_count + p` is partition `p` of replica `r`.
    """
    attributes = instruction.attributes
    devices = replica_count * partition_count
    if instruction.op == "send":
        return sent_pairs(instruction) or ()
    text = attributes.get("source_target_pairs", attributes.get("replica_groups", "{}"))
    if "device_ids" in attributes:  # the comma before it ends an attribute everywhere else
        text = f"{text}, device_ids={attributes['device_ids']}"
    if attributes.get("source_target_pairs") == "{}":
        return ()
    kind = instruction.op.removesuffix("-start")
    if attributes.get("use_global_device_ids") == "true":
        return read_groups(text, devices)
    if "channel_id" in attributes and kind in _ALONG_PARTITIONS:  # numbers are those of partitions
        groups = read_groups(text, partition_count)
        return tuple(
            tuple(replica * partition_count + one for one in group)
            for replica in range(replica_count)
            for group in groups
        )
    groups = read_groups(text, replica_count)  # numbers are those of replicas
    if replica_count == 1 and any(one for group in groups for one in group):
        return groups  # there is but replica 0: these can only be devices
    partitions = range(partition_count)
    if "channel_id" in attributes:
        return tuple(tuple(one * partition_count + part for one in group for part in partitions) for group in groups)
    return tuple(tuple(one * partition_count + part for one in group) for part in partitions for group in groups)


def sent_pairs(instruction: Instruction) -> Groups | None:
    """Returns the sources and targets of a send between devices, as which GPUs may write a permute.

    **Arguments:**

    - `instruction`: any instruction.

    **Returns:**

    The pairs; `None` for what sends nothing to a device.
    """
    found = _SENT_PAIRS.search(instruction.text) if instruction.op == "send" else None
    return None if found is None else tuple(tuple(map(int, one.split(","))) for one in _LIST.findall(found[1]))


def span(groups: Groups, sizes: Mapping[str, int]) -> Span:
    """Finds the mesh axes that groups of devices are.

    **Arguments:**

    - `groups`: the groups.
    - `sizes`: the axes of the mesh with their sizes, in mesh order.

    **Returns:**

    A `Span`; of groups of one device each, no axes.

    ```python
    assert span(((0, 2), (1, 3)), {"data": 2, "model": 2}) == Span(("data",), ("data",))
    assert span(((0, 1), (2, 3)), {"data": 4}) == Span(None, ("data",))
    ```
    """
    if not sizes:
        return Span(None, ())
    differ = [False] * len(sizes)
    for same_size in _by_size(groups):
        for dim, places in enumerate(np.unravel_index(same_size, tuple(sizes.values()))):
            differ[dim] |= bool((places != places[:, :1]).any())
    crossed = tuple(name for name, does in zip(sizes, differ, strict=True) if does)
    whole = math.prod(sizes[name] for name in crossed)
    alike = all(len(group) == whole for group in groups) and len(groups) * whole == math.prod(sizes.values())
    return Span(crossed if alike else None, crossed)


def _by_size(groups: Groups) -> list[np.ndarray]:
    lengths = dict.fromkeys(map(len, groups))
    return [np.array([group for group in groups if len(group) == length]) for length in lengths if length]
