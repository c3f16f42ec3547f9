"""`load_equinox`: what `eqx.tree_serialise_leaves` wrote, straight into shardings.

Such a file is one npy block after the other: one for each array and each Python number, in the order of the leaves. It
has no paths, and only the headers of all blocks before it tell where a block begins.
"""

import ast
import math
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from shardrules.checkpoints.checksums import DAMAGED, MOST_TEXT_BYTES, TensorSums, read_text
from shardrules.checkpoints.names import Mismatch, StoredArray, compare, mismatch_findings, refuse
from shardrules.checkpoints.requested import (
    RequestedLeaf,
    check_flags,
    python_value,
    requested_leaves,
    with_values,
)
from shardrules.checkpoints.tensor_file import FileTensor, file_source, local_path
from shardrules.core.axes import AnyMesh
from shardrules.core.errors import ConfigError
from shardrules.core.finding import Finding
from shardrules.core.storage.files import open_regular
from shardrules.placement.destination import resolve_destination
from shardrules.rules.how import How

_MAGIC = b"\x93NUMPY"

CHECKSUMS = b"\x93SHARDRULES "
"""How the checksums begin that `save_equinox` writes after the last block."""

_MOST_HEADER_BYTES = 10_000
"""The limit of numpy itself. Doubled, a broken length makes a process read more before it is refused; halved, dtypes of
many fields are, which no model has."""

_DTYPES = {
    "<V2": np.dtype(jnp.bfloat16),
    "|V2": np.dtype(jnp.bfloat16),
    "<f1": np.dtype(jnp.float8_e5m2),
}
"""How numpy writes dtypes that are not its own, where only one dtype is written so."""


def load_equinox(
    path: Any,
    like: Any,
    how: How,
    mesh: AnyMesh | None = None,
    *,
    surplus: Literal["error", "skip"] = "error",
    cast: bool = False,
    verify: bool = True,
) -> Any:
    """Loads what `eqx.tree_serialise_leaves` wrote into a tree of sharded arrays.

    Each process reads only what its devices hold, and no device gets more than its shards. All headers are checked
    before anything is read.

    **Arguments:**

    - `path`: the file. As in Equinox, `.eqx` may be left out.
    - `like`: the tree that was saved, with arrays or `ShapeDtypeStruct`s: `eqx.filter_eval_shape` makes one. Python
        numbers come back from the file; other leaves stay as they are.
    - `how`, `mesh`: where the arrays go, as for `filter_shard`.
    - `surplus`: whether arrays and numbers that the file has after those of `like` are an `"error"`, or to `"skip"`.
    - `cast`: whether an array of another dtype than the leaf's is converted, part by part on the host, or is an error.
    - `verify`: whether what is read is compared with the checksums that `save_equinox` wrote. Files of Equinox itself
        have none.

    **Returns:**

    A tree like `like` with a sharded `jax.Array` at every array.

    **Raises:**

    `CheckpointError`, listing everything that is missing, left over, of another shape or dtype, truncated or
    unreadable, or naming the first array that differs from its checksums; `PlanError`, `TreeError` and `NoMeshError` as
    `filter_shard`.

    ```python
    def make():
        return eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))

    eqx.tree_serialise_leaves("model.eqx", make())
    mesh = sr.create_mesh("data:4,model:2")
    model = sr.load_equinox("model.eqx", eqx.filter_eval_shape(make), sr.DimShardingRule("model", 0), mesh)
    assert model.layers[0].weight.sharding.spec == P("model", None)
    ```
    """
    check_flags("load_equinox", cast=cast, verify=verify)
    if surplus not in ("error", "skip"):
        raise ConfigError(f"surplus must be 'error' or 'skip', got {surplus!r}")
    destination = resolve_destination(like, how, mesh, caller="load_equinox")
    leaves = requested_leaves(like, destination, "load_equinox")
    has_block = [isinstance(leaf.value, jax.ShapeDtypeStruct) or eqx.is_array_like(leaf.value) for leaf in leaves]
    # Equinox saves whatever is like an array, and only numbers can be compared without a shape.
    findings = [
        Finding("error", "no-shape", f"a {type(value).__name__} is saved as an array, and has no shape to compare")
        for value, sharding in zip(destination.values, destination.shardings, strict=True)
        if sharding is None and eqx.is_array_like(value) and not isinstance(value, bool | int | float | complex)
    ]
    file = _with_suffix(local_path(path, "load_equinox"))
    stored_leaves = [leaf for leaf, has in zip(leaves, has_block, strict=True) if has]
    tensors, problems = read_blocks(file, stored_leaves, cast, surplus, verify)
    refuse(f"load_equinox: {file}", [*findings, *problems])
    blocks = iter(tensors)
    values: list[Any] = []
    for leaf, has in zip(leaves, has_block, strict=True):
        if not has:
            values.append(leaf.value)
            continue
        tensor = next(blocks)
        source = file_source([tensor], (), leaf.device_dtype if leaf.is_array else tensor.dtype)
        values.append(source if leaf.is_array else python_value(source, leaf))
    return with_values(destination, leaves, values)


def read_blocks(
    path: Path, leaves: Sequence[RequestedLeaf], cast: bool, surplus: str, verify: bool
) -> tuple[list[FileTensor], list[Finding]]:
    """Returns the tensor of each leaf, and what is wrong; where something is, there may be fewer tensors."""
    try:
        with open_regular(path) as file:
            return _read_blocks(file, path, leaves, cast, surplus, verify)
    except FileNotFoundError:
        return [], [Finding("error", "file", "no such file", str(path))]
    except OSError as error:
        return [], [Finding("error", "file", f"cannot be read: {error.strerror or error}", str(path))]


def _read_blocks(
    file: FileIO, path: Path, leaves: Sequence[RequestedLeaf], cast: bool, surplus: str, verify: bool
) -> tuple[list[FileTensor], list[Finding]]:
    size = os.fstat(file.fileno()).st_size
    blocks: list[_Block] = []
    mismatches: list[Mismatch] = []
    findings: list[Finding] = []
    sums: Sequence[TensorSums] | None = None
    offset = 0
    for index, leaf in enumerate(leaves):
        if offset == size or _is_checksums(file, offset):
            message = f"the file ends here, after {index} of {len(leaves)} arrays and numbers"
            findings.append(Finding("error", "ended", message, leaf.path, "save the tree that `like` describes"))
            break
        # Where a block begins follows from the size of the one before: after a bad header nothing can be read.
        block = _read_header(file, offset, size, leaf.dtype)
        if isinstance(block, str):
            message = f"block {index}, at byte {offset}: {block}"
            findings.append(Finding("error", "unreadable", message, leaf.path))
            break
        offset = block.end
        if offset > size:
            message = f"the file has {size} bytes, and its block {index}, {block.stored}, would end at byte {offset}"
            findings.append(Finding("error", "truncated", message, leaf.path, "copy the file again"))
            break
        mismatches += compare(leaf, f"block {index}", block.stored, cast=cast)
        blocks.append(block)
    else:
        others, problems = _surplus(file, path, offset, size, len(leaves), surplus)
        findings += problems
        offset = others[-1].end if others else offset
        if verify and not problems and offset < size:
            sums = _sums(file, offset, size, [*blocks, *others])
            if sums is None:
                findings.append(
                    Finding("error", "damaged", "its headers differ from their checksum", str(path), DAMAGED)
                )
    tensors = [
        FileTensor(path, block.offset, stored.shape, stored.dtype, block.fortran, leaf.path, block_sums)
        for block, leaf, block_sums in zip(blocks, leaves, sums or [None] * len(blocks), strict=False)
        if (stored := block.stored).dtype is not None
    ]
    return tensors, [*mismatch_findings(mismatches, [], []), *findings]


def _is_checksums(file: FileIO, offset: int) -> bool:
    return os.pread(file.fileno(), len(CHECKSUMS), offset) == CHECKSUMS


def _sums(file: FileIO, offset: int, size: int, blocks: Sequence["_Block"]) -> list[TensorSums] | None:
    """Returns the checksums of all blocks, which stand after the last; `None` where headers or they are damaged."""
    text = os.pread(file.fileno(), min(size - offset, MOST_TEXT_BYTES), offset)
    headers = [*(block.header for block in blocks), text]
    return read_text(text[len(CHECKSUMS) :].decode("ascii", "replace"), headers, [block.bytes for block in blocks])


def _surplus(
    file: FileIO, path: Path, offset: int, size: int, count: int, surplus: str
) -> tuple[list["_Block"], list[Finding]]:
    """Returns the blocks after those of all leaves, and what is wrong with them."""
    start = offset
    blocks: list[_Block] = []
    while offset < size and not _is_checksums(file, offset):
        block = _read_header(file, offset, size, None)
        if isinstance(block, str) or block.end > size:
            why = block if isinstance(block, str) else f"{block.stored} would end at byte {block.end}"
            message = f"block {count + len(blocks)}, at byte {offset}: {why}"
            return blocks, [Finding("error", "unreadable", message, str(path))]
        blocks.append(block)
        offset = block.end
    if not blocks or surplus != "error":
        return blocks, []
    listed = ", ".join(str(block.stored) for block in blocks[:3]) + (" ..." if len(blocks) > 3 else "")
    arrays = "1 more array or number" if len(blocks) == 1 else f"{len(blocks)} more arrays or numbers"
    message = f"it has {arrays}, {offset - start} bytes, after the {count} of `like`: {listed}"
    remedy = '`like` lacks what was saved after them; surplus="skip" ignores it'
    return blocks, [Finding("error", "surplus", message, str(path), remedy)]


@final
@attrs.frozen(eq=False)
class _Block:
    """The numbers of a block: where they begin, how many bytes they take, their order, and what they are."""

    header: bytes
    offset: int
    bytes: int
    fortran: bool
    stored: StoredArray

    @property
    def end(self) -> int:
        """Where the next block begins."""
        return self.offset + self.bytes


def _with_suffix(path: Path) -> Path:
    if path.suffix or not path.name:
        return path
    suffixed = path.with_suffix(".eqx")
    return suffixed if os.path.isfile(suffixed) or not os.path.isfile(path) else path


def _read_header(file: FileIO, offset: int, size: int, expected: np.dtype | None) -> _Block | str:
    """Returns the block that begins at `offset`, or why there is none."""
    start = os.pread(file.fileno(), 12, offset)
    if start[:6] != _MAGIC:
        return f"no npy block begins here, but {start[:8]!r}"
    # Version 1 of the format has a length of two bytes, later ones of four.
    width = 2 if start[6:7] == b"\x01" else 4
    length = int.from_bytes(start[8 : 8 + width], "little")
    begin = offset + 8 + width + length
    if length > _MOST_HEADER_BYTES:
        return f"its header would take {length} bytes, and npy headers have at most {_MOST_HEADER_BYTES}"
    if begin > size:
        return f"the file has {size} bytes, and the header alone would end at byte {begin}"
    raw = os.pread(file.fileno(), begin - offset, offset)
    text = raw[8 + width :].decode("latin1" if width == 2 else "utf8", "replace")
    try:
        header = ast.literal_eval(text.strip())
        descr, shape, fortran = header["descr"], tuple(header["shape"]), bool(header["fortran_order"])
        itemsize, dtype = _dtype(descr, expected)
    # What a broken header holds may be anything, and numpy and Python have many errors for it.
    except Exception as error:  # noqa: BLE001
        return f"its header cannot be read: {type(error).__name__}: {error!s:.120}"
    # Booleans are integers in Python, and sizes beyond those of files could not be printed.
    if len(shape) > 32 or not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape):
        return f"its header cannot be read: invalid shape {shape!r:.80}"
    count = math.prod(shape)
    stored = StoredArray(shape, dtype, str(descr) if dtype is None else str(dtype))
    return _Block(raw, begin, count * itemsize, fortran, stored)


def _dtype(descr: Any, expected: np.dtype | None) -> tuple[int, np.dtype | None]:
    """Returns the size of a number, and its dtype if arrays can have it.

    Dtypes that numpy does not have are written by their size only, so that the leaf has to tell which one it is.
    """
    if expected is not None and descr == np.lib.format.dtype_to_descr(expected):
        return expected.itemsize, expected
    if descr in _DTYPES:
        return _DTYPES[descr].itemsize, _DTYPES[descr]
    dtype = np.lib.format.descr_to_dtype(descr)
    if dtype.hasobject:
        raise TypeError("it holds Python objects")
    return dtype.itemsize, dtype if dtype.kind in "biufc" else None
