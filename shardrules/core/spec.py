"""The axis algebra: the only reader of a PartitionSpec's entries.

JAX writes one thing in many ways: `P()`, `P(None)` and `P(None, None)` differ as values though they place an array
alike, an entry may be a name or a tuple, and `UNCONSTRAINED` stands among them. Here a spec becomes *entries*, one
tuple of axis names for each dimension, and everything else in shardrules asks its questions of those.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardrules.core.errors import SpecError

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
"""The entry that leaves a dimension to the compiler."""

Entry: TypeAlias = tuple[str, ...]
"""The axes that split one dimension, the first most major; empty when it is whole. `UNCONSTRAINED` may stand for it."""

Entries: TypeAlias = tuple[Any, ...]
"""An `Entry` or `UNCONSTRAINED` for each dimension that a spec speaks of."""


def _entry(partition: object) -> Any:
    if partition is None:
        return ()
    if isinstance(partition, str):
        return (partition,)
    if partition is UNCONSTRAINED:
        return partition
    if isinstance(partition, tuple | list) and all(isinstance(name, str) for name in partition):
        return tuple(partition)
    raise SpecError(f"an entry of a PartitionSpec is None, an axis or a tuple of axes, got {partition!r}")


def entries(spec: PartitionSpec, ndim: int | None = None) -> Entries:
    """Returns one entry for each dimension: a tuple of axis names, or `UNCONSTRAINED`.

    **Arguments:**

    - `spec`: any PartitionSpec.
    - `ndim`: with it, entries are padded with empty ones to this rank. A longer spec stays as long as it is.

    **Returns:**

    A tuple of entries.

    ```python
    assert entries(P("data", None, ("data", "model"))) == (("data",), (), ("data", "model"))
    assert entries(P("data"), 2) == (("data",), ())
    ```
    """
    found = tuple(map(_entry, spec.partitions))
    return found if ndim is None else found + ((),) * (ndim - len(found))


def checked_spec(spec: object) -> PartitionSpec:
    """Returns `spec` if it is one that a rule can ask for.

    **Arguments:**

    - `spec`: what was given.

    **Returns:**

    The PartitionSpec itself.

    **Raises:**

    `SpecError` for what is no PartitionSpec, for entries that name no axes, and for one that speaks of reductions.

    ```python
    assert checked_spec(P("data", None)) == P("data", None)
    ```
    """
    if not isinstance(spec, PartitionSpec):
        raise SpecError(f"{spec!r} is not a PartitionSpec")
    if spec.unreduced or spec.reduced:
        raise SpecError(
            f"{spec!r} speaks of reductions: unreduced and reduced are states of values inside a program, and no "
            "placement that a rule could ask for. Leave them out"
        )
    entries(spec)
    return spec


def make_spec(found: Entries) -> PartitionSpec:
    """Returns the PartitionSpec with these entries, as long as they are.

    **Arguments:**

    - `found`: entries, as `entries` gives them.

    **Returns:**

    A PartitionSpec; an entry of one axis is written as its bare name.

    ```python
    assert make_spec((("data",), (), ("data", "model"))) == P("data", None, ("data", "model"))
    ```
    """
    return PartitionSpec(*[_partition(entry) for entry in found])


def _partition(entry: Any) -> Any:
    if entry is UNCONSTRAINED:
        return entry
    return None if not entry else entry[0] if len(entry) == 1 else entry


def canonical(spec: PartitionSpec) -> PartitionSpec:
    """Returns the one form in which equal placements are equal values: trailing whole dimensions are cut.

    **Arguments:**

    - `spec`: any PartitionSpec.

    **Returns:**

    A PartitionSpec that places every array as `spec` does.

    ```python
    assert canonical(P(("data",), None)) == P("data")
    assert canonical(P(None, None)) == P()
    ```
    """
    found = entries(spec)
    while found and found[-1] == ():
        found = found[:-1]
    return make_spec(found)


def same(a: PartitionSpec, b: PartitionSpec) -> bool:
    """Whether two specs place every array alike, however they are written.

    **Arguments:**

    - `a`, `b`: two PartitionSpecs.

    **Returns:**

    Whether their canonical forms are equal.

    ```python
    assert same(P("data"), P(("data",), None))
    ```
    """
    return a == b or canonical(a) == canonical(b)


def pad(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Returns `spec` with an entry for each of `ndim` dimensions; a longer spec is an error.

    **Arguments:**

    - `spec`: any PartitionSpec.
    - `ndim`: the rank of the array.

    **Returns:**

    A PartitionSpec of length `ndim`.

    **Raises:**

    `SpecError` when the spec speaks of more dimensions than there are.

    ```python
    assert pad(P("data"), 3) == P("data", None, None)
    ```
    """
    found = entries(spec, ndim)
    if len(found) > ndim:
        raise SpecError(f"{spec_repr(spec)} has {len(found)} entries for an array of {ndim} dimensions")
    return make_spec(found)


def trim(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Returns `spec` cut from the right to at most `ndim` entries. This loses what it cuts.

    **Arguments:**

    - `spec`: any PartitionSpec.
    - `ndim`: the rank of the array.

    **Returns:**

    The leading entries.

    ```python
    assert trim(P("data", "model"), 1) == P("data")
    ```
    """
    return spec if len(spec.partitions) <= ndim else make_spec(entries(spec)[:ndim])


def axis_names(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the axes that `spec` names, in order of appearance, each as often as it appears.

    **Arguments:**

    - `spec`: any PartitionSpec.

    **Returns:**

    A tuple of names.

    ```python
    assert axis_names(P(("data", "model"), None, "seq")) == ("data", "model", "seq")
    ```
    """
    return tuple(name for entry in entries(spec) if entry is not UNCONSTRAINED for name in entry)


def _ways(found: Entries, sizes: Mapping[str, int]) -> Iterator[int]:
    for entry in found:
        yield 1 if entry is UNCONSTRAINED else math.prod(sizes.get(name, 1) for name in entry)


def ways(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    """Returns into how many parts `spec` splits an array. Axes that `sizes` lacks count as size 1.

    **Arguments:**

    - `spec`: any PartitionSpec.
    - `sizes`: the size of each mesh axis.

    **Returns:**

    The product of the sizes of the axes it names.

    ```python
    assert ways(P(("data", "model")), {"data": 4, "model": 2}) == 8
    ```
    """
    return math.prod(_ways(entries(spec), sizes))


def shard_shape(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of the largest shard: each split dimension divided, rounded up.

    **Arguments:**

    - `shape`: the shape of the whole array.
    - `spec`: a PartitionSpec; entries beyond the rank are ignored.
    - `sizes`: the size of each mesh axis.

    **Returns:**

    A shape of the same rank.

    ```python
    assert shard_shape((8, 6), P("data"), {"data": 4}) == (2, 6)
    ```
    """
    return tuple(-(-dim // split) for dim, split in zip(shape, _ways(entries(spec, len(shape)), sizes), strict=False))


def device_dtype(dtype: Any) -> Any:
    """Returns the dtype that an array has once it is on a device: 64-bit types follow JAX's x64 mode.

    **Arguments:**

    - `dtype`: any dtype, PRNG key types included.

    **Returns:**

    A dtype.

    ```python
    assert device_dtype(np.dtype("float64")) == np.dtype("float64" if jax.config.jax_enable_x64 else "float32")
    ```
    """
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(np.dtype(dtype))


def array_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Returns the bytes that XLA gives an array: sub-byte types are packed, 64-bit ones follow JAX's x64 mode.

    **Arguments:**

    - `shape`: its shape.
    - `dtype`: its dtype, PRNG key types included.

    **Returns:**

    A whole number of bytes.

    ```python
    assert array_bytes((5,), jnp.int4) == 3
    ```
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return math.prod(shape) * dtype.itemsize
    bits = jax.dtypes.itemsize_bits(device_dtype(dtype))
    return -(-math.prod(shape) * bits // 8)


def shard_bytes(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    """Returns the bytes that the largest shard takes on one device.

    **Arguments:**

    - `shape`, `dtype`: those of the whole array.
    - `spec`: a PartitionSpec.
    - `sizes`: the size of each mesh axis.

    **Returns:**

    A whole number of bytes.

    ```python
    assert shard_bytes((8, 6), jnp.float32, P("data"), {"data": 4}) == 48
    ```
    """
    return array_bytes(shard_shape(shape, spec, sizes), dtype)


def divisible_prefix(entry: Entry, dim_size: int, sizes: Mapping[str, int]) -> Entry:
    """Returns the longest leading part of `entry` whose axes are all known and together divide `dim_size`.

    **Arguments:**

    - `entry`: axis names, the first most major.
    - `dim_size`: the size of the dimension.
    - `sizes`: the size of each mesh axis.

    **Returns:**

    A leading part of `entry`, perhaps empty.

    ```python
    assert divisible_prefix(("data", "model"), 4, {"data": 2, "model": 4}) == ("data",)
    ```
    """
    split = 1
    for position, name in enumerate(entry):
        split *= sizes.get(name, 0)
        if not split or dim_size % split:
            return entry[:position]
    return entry


def spec_repr(spec: PartitionSpec | None) -> str:
    """Returns `spec` as code, `P('data', None)`; `None` is "no opinion".

    **Arguments:**

    - `spec`: a PartitionSpec, or `None`.

    **Returns:**

    A text that evaluates to `spec`.

    ```python
    assert spec_repr(P("data", None, P.UNCONSTRAINED)) == "P('data', None, P.UNCONSTRAINED)"
    ```
    """
    if spec is None:
        return "no opinion"
    if not isinstance(spec, PartitionSpec) or spec.unreduced or spec.reduced:  # what `checked_spec` refuses, in errors
        return repr(spec)
    parts = ("P.UNCONSTRAINED" if part is UNCONSTRAINED else repr(part) for part in spec.partitions)
    return f"P({', '.join(parts)})"


def spec_key(value: Any) -> Any:
    """Returns what to compare and hash in place of a value that holds PartitionSpecs.

    Equal PartitionSpecs may have different hashes, because JAX hashes the addresses of the names.

    **Arguments:**

    - `value`: a PartitionSpec, or tuples that hold some.

    **Returns:**

    Plain tuples and strings.

    ```python
    assert hash(spec_key(P("".join(["da", "ta"])))) == hash(spec_key(P("data")))
    ```
    """
    if isinstance(value, PartitionSpec):
        return ("P", *map(str, value.partitions), str(value.unreduced), str(value.reduced))
    return tuple(map(spec_key, value)) if isinstance(value, tuple) else value


def code(value: Any) -> str:
    """Returns how a value that holds PartitionSpecs is written in the repr of a rule, so that it evaluates again.

    **Arguments:**

    - `value`: a PartitionSpec, or tuples that hold some.

    **Returns:**

    Python code.

    ```python
    assert code((("norm", P()), ("w", P("data")))) == "(('norm', P()), ('w', P('data')))"
    ```
    """
    if isinstance(value, PartitionSpec):
        return spec_repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(code, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def spec_to_json(spec: PartitionSpec) -> list[Any]:
    """Returns `spec` as plain lists, strings and nulls; `UNCONSTRAINED` becomes the string `"?"`.

    **Arguments:**

    - `spec`: a PartitionSpec.

    **Returns:**

    A list with one item for each entry.

    ```python
    assert spec_to_json(P("data", None, ("a", "b"))) == ["data", None, ["a", "b"]]
    ```
    """
    partitions = map(_partition, entries(spec))
    return ["?" if part is UNCONSTRAINED else list(part) if isinstance(part, tuple) else part for part in partitions]


def spec_from_json(data: list[Any]) -> PartitionSpec:
    """Returns the PartitionSpec that `spec_to_json` wrote.

    **Arguments:**

    - `data`: a list with one item for each entry.

    **Returns:**

    A PartitionSpec.

    ```python
    assert spec_from_json(["data", None, ["a", "b"]]) == P("data", None, ("a", "b"))
    ```
    """
    return make_spec(tuple(UNCONSTRAINED if part == "?" else _entry(part) for part in data))
