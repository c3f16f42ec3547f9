"""`load_equinox`: what `eqx.tree_serialise_leaves` wrote, straight into shardings.

Such a file is one npy block after the other: one for each array and each Python number, in the order of the leaves. It
says nothing about paths, and where a block begins is known only once every header before it was read.
"""

import ast
import math
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from shardrules.core.axes import AnyMesh
from shardrules.core.finding import Finding
from shardrules.placement.checkpoints.names import Mismatch, StoredArray, compare, refuse, told
from shardrules.placement.checkpoints.requested import RequestedLeaf, plain_value, requested_leaves, with_values
from shardrules.placement.checkpoints.tensor_file import FileTensor
from shardrules.placement.destination import How, resolve_destination

_MAGIC = b"\x93NUMPY"
_NAMED = {
    "<V2": np.dtype(jnp.bfloat16),
    "|V2": np.dtype(jnp.bfloat16),
    "<f1": np.dtype(jnp.float8_e5m2),
}
"""What numpy writes for types that are not its own, where no two of them are written the same way."""


def load_equinox(path: Any, like: Any, how: How, mesh: AnyMesh | None = None, *, cast: bool = False) -> Any:
    """Loads what `eqx.tree_serialise_leaves` wrote into a tree of sharded arrays.

    Each process reads only what its devices hold, and no device sees more than its shards. All headers are checked
    before anything is read.

    **Arguments:**

    - `path`: the file. As in Equinox, `.eqx` may be left out.
    - `like`: the tree that was saved, with arrays or `ShapeDtypeStruct`s: `eqx.filter_eval_shape` makes one. Python
        numbers come back from the file; what else is no array stays as it is.
    - `how`, `mesh`: where the arrays are to be, as `filter_shard` takes them.
    - `cast`: whether an array of another dtype than the leaf's is converted, part by part on the host, or is an error.

    **Returns:**

    A tree like `like` with a sharded `jax.Array` at every array.

    **Raises:**

    `CheckpointError`, listing everything that is missing, left over, of another shape or dtype, truncated or
    unreadable; `PlanError`, `TreeError` and `NoMeshError` as `filter_shard`.

    ```python
    def make():
        return eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))

    eqx.tree_serialise_leaves("model.eqx", make())
    mesh = sr.create_mesh("data:4,model:2")
    model = sr.load_equinox("model.eqx", eqx.filter_eval_shape(make), sr.DimShardingRule("model", 0), mesh)
    assert model.layers[0].weight.sharding.spec == P("model", None)
    ```
    """
    found = resolve_destination(like, how, mesh, caller="load_equinox")
    wants = requested_leaves(like, found, "load_equinox")
    has_block = [isinstance(want.value, jax.ShapeDtypeStruct) or eqx.is_array_like(want.value) for want in wants]
    wrong = [
        Finding("error", "no-shape", f"a {type(value).__name__} is saved as an array, and has no shape to compare")
        for value, sharding in zip(found.values, found.shardings, strict=True)
        if sharding is None and eqx.is_array_like(value) and not isinstance(value, bool | int | float | complex)
    ]
    file = _with_suffix(Path(path))
    tensors, complaints = read_blocks(file, [want for want, has in zip(wants, has_block, strict=True) if has], cast)
    refuse(f"load_equinox: {file}", [*wrong, *complaints])
    blocks = iter(tensors)
    values: list[Any] = []
    for want, has in zip(wants, has_block, strict=True):
        if not has:
            values.append(want.value)
            continue
        tensor = next(blocks)
        values.append(
            tensor.source(want.device_dtype) if want.is_array else plain_value(tensor.source(tensor.dtype), want)
        )
    return with_values(found, wants, values)


def read_blocks(path: Path, wants: Sequence[RequestedLeaf], cast: bool) -> tuple[list[FileTensor], list[Finding]]:
    """Reads the headers of a file, and compares them with what is wanted.

    **Arguments:**

    - `path`: the file.
    - `wants`: what has a block in it, in the order of the blocks.
    - `cast`: whether a block may have another dtype.

    **Returns:**

    A tensor for each, and what is wrong. Where something is, there may be fewer tensors.
    """
    if not path.is_file():
        return [], [Finding("error", "file", "there is no such file", str(path))]
    size = path.stat().st_size
    tensors: list[FileTensor] = []
    problems: list[Mismatch] = []
    wrong: list[Finding] = []
    offset = 0
    with path.open("rb") as file:
        for number, want in enumerate(wants):
            if offset == size:
                what = f"the file ends here, after {number} of {len(wants)} arrays and numbers"
                wrong.append(Finding("error", "ended", what, want.path, "save the tree that `like` describes"))
                break
            block = _read_header(file, offset, size, want.dtype)
            if isinstance(block, str):
                wrong.append(Finding("error", "unreadable", f"block {number}, at byte {offset}: {block}", want.path))
                break
            offset = block.offset + block.bytes
            if offset > size:
                what = f"the file has {size} bytes, and its block {number}, {block.held}, would end at byte {offset}"
                wrong.append(Finding("error", "truncated", what, want.path, "copy the file again"))
                break
            problems += compare(want, f"block {number}", block.held, cast=cast)
            if block.held.dtype is not None:
                tensors.append(FileTensor(path, block.offset, block.held.shape, block.held.dtype, block.fortran))
        else:
            if offset < size:
                what = f"{size - offset} bytes are left after its {len(wants)} arrays and numbers"
                remedy = "`like` lacks what was saved after them"
                wrong.append(Finding("error", "surplus", what, str(path), remedy))
    return tensors, [*told(problems, [], []), *wrong]


@final
@attrs.frozen(eq=False)
class _Block:
    """A block: where its numbers are, how many bytes they take, in which order they lie, and what they are."""

    offset: int
    bytes: int
    fortran: bool
    held: StoredArray


def _with_suffix(path: Path) -> Path:
    suffixed = path.with_suffix(".eqx")
    return suffixed if not path.suffix and (suffixed.is_file() or not path.is_file()) else path


def _read_header(file: BufferedReader, offset: int, size: int, wanted_dtype: np.dtype | None) -> _Block | str:
    """Returns the block that begins at `offset`, or why there is none."""
    file.seek(offset)
    start = file.read(8)
    if start[:6] != _MAGIC:
        return f"no npy block begins here, but {start!r}"
    width = 2 if start[6:7] == b"\x01" else 4
    length = int.from_bytes(file.read(width), "little")
    begin = offset + 8 + width + length
    if begin > size:
        return f"the file has {size} bytes, and the header alone would end at byte {begin}"
    text = file.read(length).decode("latin1" if width == 2 else "utf8", "replace")
    try:
        header = ast.literal_eval(text.strip())
        descr, shape, fortran = header["descr"], tuple(header["shape"]), bool(header["fortran_order"])
        itemsize, dtype = _dtype(descr, wanted_dtype)
        count = math.prod(shape)
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        return f"its header cannot be read: {error!r:.120}"
    if not all(isinstance(dim, int) and dim >= 0 for dim in shape):
        return f"its header cannot be read: {shape} is no shape"
    held = StoredArray(shape, dtype, str(descr) if dtype is None else str(dtype))
    return _Block(begin, count * itemsize, fortran, held)


def _dtype(descr: Any, wanted_dtype: np.dtype | None) -> tuple[int, np.dtype | None]:
    """The size of a number, and its dtype if there is one for arrays.

    The types that numpy does not have are written by their size only, so that the leaf has to say which one it is.
    """
    if wanted_dtype is not None and descr == np.lib.format.dtype_to_descr(wanted_dtype):
        return wanted_dtype.itemsize, wanted_dtype
    if descr in _NAMED:
        return _NAMED[descr].itemsize, _NAMED[descr]
    dtype = np.lib.format.descr_to_dtype(descr)
    if dtype.hasobject:
        raise TypeError("it holds Python objects")
    return dtype.itemsize, dtype if dtype.kind in "biufc" else None
