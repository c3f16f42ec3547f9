"""The axis algebra: the only reader of a PartitionSpec's entries.

JAX writes one thing in many ways: `P()`, `P(None)` and `P(None, None)` differ as values though they place an array
alike, an entry may be a name or a tuple, and `UNCONSTRAINED` may be among them. Here a spec becomes *entries*, one
tuple of axis names for each dimension, and the rest of shardrules reads only these.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardrules.core.axes import AnyMesh
from shardrules.core.errors import SpecError

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
"""The entry that leaves a dimension to the compiler."""

Entry: TypeAlias = tuple[str, ...]
"""The axes that split one dimension, the first most major; empty when it is whole. It may also be `UNCONSTRAINED`."""

Entries: TypeAlias = tuple[Any, ...]
"""An `Entry` or `UNCONSTRAINED` for each dimension that a spec mentions."""


def _entry(partition: object) -> Any:
    if partition is None:
        return ()
    if isinstance(partition, str):
        return (partition,)
    if partition is UNCONSTRAINED:
        return partition
    if isinstance(partition, tuple | list) and all(isinstance(name, str) for name in partition):
        return tuple(partition)
    raise SpecError(f"an entry of a PartitionSpec must be None, an axis or a tuple of axes, got {partition!r}")


def entries(spec: PartitionSpec, ndim: int | None = None) -> Entries:
    """Returns one entry for each dimension: a tuple of axis names, or `UNCONSTRAINED`.

    With `ndim`, entries are padded with empty ones to this rank. A longer spec stays as long as it is.
    """
    spec_entries = tuple(map(_entry, spec.partitions))
    return spec_entries if ndim is None else spec_entries + ((),) * (ndim - len(spec_entries))


def checked_spec(spec: object) -> PartitionSpec:
    """Returns `spec` if it is a PartitionSpec that a rule can use; else it raises a `SpecError`."""
    if not isinstance(spec, PartitionSpec):
        raise SpecError(f"{spec!r} is not a PartitionSpec")
    if spec.unreduced or spec.reduced:
        raise SpecError(
            f"{spec!r} has reductions: unreduced and reduced describe values inside a program, not how to place an "
            "array. Leave them out"
        )
    entries(spec)
    return spec


def make_spec(spec_entries: Entries) -> PartitionSpec:
    """Returns the PartitionSpec with these entries, as long as they are."""
    return PartitionSpec(*[_partition(entry) for entry in spec_entries])


def _partition(entry: Any) -> Any:
    if entry is UNCONSTRAINED:
        return entry
    return None if not entry else entry[0] if len(entry) == 1 else entry


def canonical(spec: PartitionSpec) -> PartitionSpec:
    """Returns the form in which equal placements are equal values: without trailing whole dimensions.

    ```python
    assert sr.specs.canonical(P(("data",), None)) == P("data")
    assert sr.specs.canonical(P(None, None)) == P()
    ```
    """
    spec_entries = entries(spec)
    # Only trailing ones: a whole dimension before a split one is needed to count dimensions.
    while spec_entries and spec_entries[-1] == ():
        spec_entries = spec_entries[:-1]
    return make_spec(spec_entries)


def same(a: PartitionSpec, b: PartitionSpec) -> bool:
    """Returns whether two specs place every array alike, however they are written.

    ```python
    assert sr.specs.same(P("data"), P(("data",), None))
    ```
    """
    return a == b or canonical(a) == canonical(b)


def pad(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Returns `spec` with an entry for each of `ndim` dimensions; a longer spec is an error."""
    spec_entries = entries(spec, ndim)
    if len(spec_entries) > ndim:
        raise SpecError(f"{spec_repr(spec)} has {len(spec_entries)} entries for an array of {ndim} dimensions")
    return make_spec(spec_entries)


def trim(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Returns `spec` cut from the right to at most `ndim` entries. This loses what it cuts."""
    return spec if len(spec.partitions) <= ndim else make_spec(entries(spec)[:ndim])


def axis_names(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the axes that `spec` names, in order of appearance, each as often as it appears."""
    return tuple(name for entry in entries(spec) if entry is not UNCONSTRAINED for name in entry)


def _part_counts(spec_entries: Entries, sizes: Mapping[str, int]) -> Iterator[int]:
    for entry in spec_entries:
        yield 1 if entry is UNCONSTRAINED else math.prod(sizes.get(name, 1) for name in entry)


def part_count(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    """Returns into how many parts `spec` splits an array. Axes that `sizes` lacks count as size 1."""
    return math.prod(_part_counts(entries(spec), sizes))


def shard_shape(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of the largest shard: each split dimension divided, rounded up.

    ```python
    assert sr.specs.shard_shape((8, 6), P("data"), {"data": 4}) == (2, 6)
    ```
    """
    return tuple(
        -(-dim // split) for dim, split in zip(shape, _part_counts(entries(spec, len(shape)), sizes), strict=False)
    )


def device_dtype(dtype: Any) -> Any:
    """Returns the dtype that an array has once it is on a device: 64-bit types follow JAX's x64 mode."""
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(np.dtype(dtype))


def packs(mesh: AnyMesh | None, dtype: Any) -> bool:
    """Returns whether elements of fewer than 8 bits share bytes on the devices of a mesh; without devices they do."""
    return packs_on(mesh.devices.flat[0] if isinstance(mesh, Mesh) and mesh.devices.size else None, dtype)


def packs_on(device: Any, dtype: Any) -> bool:
    """Returns whether elements of fewer than 8 bits share bytes on a device, which may be `None`."""
    if jnp.issubdtype(dtype, jax.dtypes.extended) or jax.dtypes.itemsize_bits(np.dtype(dtype)) >= 8:
        return True
    return getattr(device, "platform", "") != "cpu" or _cpu_packs()


@functools.cache
def _cpu_packs() -> bool:
    """JAX 0.12 packs them on CPUs, 0.10 gives each a byte."""
    with jax.ensure_compile_time_eval():
        array = jax.device_put(np.zeros(8, jnp.int4), jax.local_devices(backend="cpu")[0])
    return array.on_device_size_in_bytes() < array.size


def array_bytes(shape: tuple[int, ...], dtype: Any, *, packed: bool) -> int:
    """Returns the bytes that XLA gives an array; 64-bit types follow JAX's x64 mode.

    Elements of fewer than 8 bits are `packed`, as on TPUs and GPUs, or take a byte each, as JAX 0.10 has them on CPUs.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return math.prod(shape) * dtype.itemsize
    bits = jax.dtypes.itemsize_bits(device_dtype(dtype))
    bits = bits if packed else max(bits, 8)
    return -(-math.prod(shape) * bits // 8)  # int4 and the like are packed, so the last byte may be half empty


def shard_bytes(
    shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, sizes: Mapping[str, int], *, packed: bool = True
) -> int:
    """Returns the bytes that the largest shard takes on one device; with `packed=False`, elements of fewer than 8
    bits take a byte each, as JAX 0.10 has them on CPUs.

    ```python
    assert sr.specs.shard_bytes((8, 6), jnp.float32, P("data"), {"data": 4}) == 48
    ```
    """
    return array_bytes(shard_shape(shape, spec, sizes), dtype, packed=packed)


def divisible_prefix(entry: Entry, dim_size: int, sizes: Mapping[str, int]) -> Entry:
    """Returns the longest leading part of `entry` whose axes are all known and together divide `dim_size`."""
    split = 1
    for position, name in enumerate(entry):
        split *= sizes.get(name, 0)  # 0 for an axis that the mesh lacks: it divides nothing
        if not split or dim_size % split:
            return entry[:position]
    return entry


def spec_repr(spec: PartitionSpec | None) -> str:
    """Returns `spec` as code, `P('data', None)`; `None` is "no opinion"."""
    if spec is None:
        return "no opinion"
    if not isinstance(spec, PartitionSpec) or spec.unreduced or spec.reduced:  # invalid, but printed in errors
        return repr(spec)
    parts = ("P.UNCONSTRAINED" if part is UNCONSTRAINED else repr(part) for part in spec.partitions)
    return f"P({', '.join(parts)})"


def spec_key(value: Any) -> Any:
    """Returns plain tuples and strings to compare and hash in place of a value that holds PartitionSpecs.

    Equal PartitionSpecs may have different hashes, because JAX hashes the addresses of the names.

    ```python
    from shardrules.core.spec import spec_key

    assert hash(spec_key(P("".join(["da", "ta"])))) == hash(spec_key(P("data")))
    ```
    """
    # As text, since names of axes may be equal strings at different addresses.
    if isinstance(value, PartitionSpec):
        return ("P", *map(str, value.partitions), str(value.unreduced), str(value.reduced))
    return tuple(map(spec_key, value)) if isinstance(value, tuple) else value


def spec_code(value: Any) -> str:
    """Returns the repr of a value that holds PartitionSpecs, as code that evaluates to it again."""
    if isinstance(value, PartitionSpec):
        return spec_repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(spec_code, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def spec_to_json(spec: PartitionSpec) -> list[Any]:
    """Returns `spec` as plain lists, strings and nulls; `UNCONSTRAINED` becomes the string `"?"`."""
    partitions = map(_partition, entries(spec))
    return ["?" if part is UNCONSTRAINED else list(part) if isinstance(part, tuple) else part for part in partitions]


def spec_from_json(data: list[Any]) -> PartitionSpec:
    """Returns the PartitionSpec that `spec_to_json` wrote."""
    return make_spec(tuple(UNCONSTRAINED if part == "?" else _entry(part) for part in data))
