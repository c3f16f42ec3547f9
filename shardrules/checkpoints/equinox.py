"""`load_equinox` and `save_equinox`: the files of `eqx.tree_serialise_leaves`, from and into shardings.

Such a file is one npy block after the other: one for each array and each Python number, in the order of the leaves. It
has no paths, and only the headers of all blocks before it tell where a block begins.
"""

import ast
import io
import itertools
import math
import os
import re
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal, final

import attrs
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from shardrules.checkpoints.checksums import DAMAGED, MOST_TEXT_BYTES, TensorSums, blank_text, read_text
from shardrules.checkpoints.commit import FileLayout, SavePlan, Saving
from shardrules.checkpoints.leaves import NUMBERS, RequestedLeaf, SavedLeaf, local_path, refuse, saved_leaves, title_of
from shardrules.checkpoints.load import load, read_tensors
from shardrules.checkpoints.names import Contents, StoredArray
from shardrules.checkpoints.tensor_file import FileTensor
from shardrules.core.axes import AnyMesh
from shardrules.core.errors import CheckpointError
from shardrules.core.finding import Finding
from shardrules.core.storage.files import open_regular
from shardrules.core.tree import array_kind
from shardrules.rules.how import How

_MAGIC = b"\x93NUMPY"

_CHECKSUMS = b"\x93SHARDRULES "
"""The beginning of the checksums that `save_equinox` writes after the last block."""

_MOST_HEADER_BYTES = 10_000
"""The limit of numpy itself."""

_DTYPES = {
    "<V2": np.dtype(jnp.bfloat16),
    "|V2": np.dtype(jnp.bfloat16),
    "<f1": np.dtype(jnp.float8_e5m2),
}
"""Dtypes that are not numpy's own, as numpy writes them, where only one dtype is written so."""


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
    - `surplus`: `"error"` refuses arrays and numbers that the file has after those of `like`, `"skip"` ignores them.
    - `cast`, `verify`: as for `load_safetensors`; files of Equinox itself have no checksums.

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
    file = _with_suffix(local_path(path, "load_equinox"))
    # Equinox saves whatever is like an array, and only numbers can be compared without a shape.
    shapeless = [
        Finding("error", "no-shape", f"a {type(value).__name__} is saved as an array, and has no shape to compare")
        for value in jax.tree.leaves(like)
        if array_kind(value) is None and eqx.is_array_like(value) and not isinstance(value, NUMBERS)
    ]

    def contents(leaves: Sequence[RequestedLeaf]) -> Contents:
        is_saved = [not leaf.has_values or eqx.is_array_like(leaf.value) for leaf in leaves]
        blocks, problems = _read_blocks(file, [*itertools.compress(leaves, is_saved)], surplus, verify)
        numbers = itertools.count()
        return Contents(
            {str(number): block.stored for number, block in enumerate(blocks)},
            [str(next(numbers)) if saved else None for saved in is_saved],
            read_tensors(lambda name: blocks[int(name)].tensor(file)),
            [*shapeless, *problems],
            label="block {}".format,
        )

    return load("load_equinox", file, like, how, mesh, contents, surplus=surplus, cast=cast, verify=verify)


@final
@attrs.frozen(eq=False)
class _Block:
    """An npy block: its header, the position of its numbers, their order and their kind."""

    header: bytes
    offset: int
    nbytes: int
    is_fortran: bool
    stored: StoredArray
    path: str
    """The path of the leaf that takes it."""
    sums: TensorSums | None = None

    @property
    def end(self) -> int:
        """The position of the next block."""
        return self.offset + self.nbytes

    def tensor(self, file: Path) -> FileTensor:
        """Returns the block as a tensor, which has a dtype that arrays can have."""
        assert self.stored.dtype is not None
        return FileTensor(
            file, self.offset, self.stored.shape, self.stored.dtype, self.is_fortran, self.path, self.sums
        )


def _read_blocks(
    path: Path, leaves: Sequence[RequestedLeaf], surplus: str, verify: bool
) -> tuple[list[_Block], list[Finding]]:
    """Returns all blocks of a file, and what is wrong with it: after a bad header nothing can be read."""
    blocks: list[_Block] = []

    def problem(
        code: str, message: str, remedy: str = "", leaf_path: str = str(path)
    ) -> tuple[list[_Block], list[Finding]]:
        return blocks, [Finding("error", code, message, leaf_path, remedy)]

    try:
        with open_regular(path) as file:
            size, offset = os.fstat(file.fileno()).st_size, 0
            # Checksums can only be the last block, so they end the walk.
            while offset < size and os.pread(file.fileno(), len(_CHECKSUMS), offset) != _CHECKSUMS:
                leaf = leaves[len(blocks)] if len(blocks) < len(leaves) else None
                leaf_path, where = leaf.path if leaf else str(path), f"block {len(blocks)}, at byte {offset}: "
                block = _read_header(file, offset, size, leaf)
                if isinstance(block, str):
                    return problem("unreadable", where + block, "", leaf_path)
                if block.end > size:
                    message = f"{where}{block.stored} would end at byte {block.end}, and the file has {size} bytes"
                    return problem("truncated", message, "copy the file again", leaf_path)
                blocks.append(block)
                offset = block.end
            # The rest of a damaged file may be of any size, and no more than checksums can have is read.
            text = os.pread(file.fileno(), min(size - offset, MOST_TEXT_BYTES), offset)
    except FileNotFoundError:
        return problem("file", "no such file")
    except OSError as error:
        return problem("file", f"cannot be read: {error.strerror or error}")
    if len(blocks) < len(leaves):
        message = f"the file ends here, after {len(blocks)} of {len(leaves)} arrays and numbers"
        return problem("ended", message, "save the tree that `like` describes", leaves[len(blocks)].path)
    if verify and text:
        headers, sizes = [*(block.header for block in blocks), text], [block.nbytes for block in blocks]
        sums = read_text(text[len(_CHECKSUMS) :].decode("ascii", "replace"), headers, sizes)
        if sums is None:
            return problem("damaged", "its headers differ from their checksum", DAMAGED)
        blocks = [attrs.evolve(block, sums=block_sums) for block, block_sums in zip(blocks, sums, strict=True)]
    others = blocks[len(leaves) :]
    if not others or surplus != "error":
        return blocks, []
    listed = ", ".join(str(block.stored) for block in others[:3]) + (" ..." if len(others) > 3 else "")
    arrays = "1 more array or number" if len(others) == 1 else f"{len(others)} more arrays or numbers"
    nbytes = sum(len(block.header) + block.nbytes for block in others)
    message = f"it has {arrays}, {nbytes} bytes, after the {len(leaves)} of `like`: {listed}"
    return problem("surplus", message, '`like` lacks what was saved after them; surplus="skip" ignores it')


def _with_suffix(path: Path) -> Path:
    if path.suffix or not path.name:
        return path
    suffixed = path.with_suffix(".eqx")
    return suffixed if os.path.isfile(suffixed) or not os.path.isfile(path) else path


def _read_header(file: FileIO, offset: int, size: int, leaf: RequestedLeaf | None) -> _Block | str:
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
        descr, shape, is_fortran = header["descr"], tuple(header["shape"]), bool(header["fortran_order"])
        itemsize, dtype = _dtype(descr, leaf and leaf.dtype)
    # What a broken header holds may be anything, and numpy and Python have many errors for it.
    except Exception as error:  # noqa: BLE001
        return f"its header cannot be read: {type(error).__name__}: {error!s:.120}"
    # Booleans are integers in Python, and sizes beyond those of files could not be printed.
    if len(shape) > 32 or not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape):
        return f"its header cannot be read: invalid shape {shape!r:.80}"
    stored = StoredArray(shape, dtype, str(descr) if dtype is None else str(dtype))
    return _Block(raw, begin, math.prod(shape) * itemsize, is_fortran, stored, leaf.path if leaf else "")


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


def save_equinox(path: Any, tree: Any, *, timeout: float = 1800) -> None:
    """Saves the arrays and Python numbers of a tree as `eqx.tree_serialise_leaves` does, and typed PRNG keys too.

    Every process calls it, with the same tree, and writes what its own devices hold, shard by shard, straight into the
    file: no process holds more of the tree on its host than an array, mostly one shard. All must write to one file
    system. An old file is replaced at once, when everything is on the disk.

    **Arguments:**

    - `path`: the file. As in Equinox, it ends in `.eqx` if it has no other suffix.
    - `tree`: any pytree. Of typed PRNG keys the key data are saved, which `load_equinox` wraps again. Leaves that are
        neither arrays nor Python numbers are not saved.
    - `timeout`: the seconds that a process waits for the others at each step.

    **Raises:**

    `CheckpointError`, listing everything that cannot be saved, for addresses of cloud stores, or when the file cannot
    be written: on all processes, whichever failed. `DisagreementError` where processes have different trees;
    `BarrierTimeoutError` and `BarrierError` as in `barrier_sync`.

    ```python
    state = {"w": jnp.ones((16, 8)), "step": 7, "key": jax.random.key(0)}
    sr.save_equinox("state.eqx", sr.filter_shard(state, P(), sr.create_mesh("data:8")))
    restored = sr.load_equinox("state.eqx", state, P(), sr.create_mesh("data:4,model:2"))
    assert restored["step"] == 7 and restored["key"] == jax.random.key(0)
    ```
    """
    saving = Saving(title_of("save_equinox", path), timeout)

    def plan() -> SavePlan:
        target = local_path(path, "save_equinox")
        if not target.name:
            raise CheckpointError(f"{saving.title} cannot be saved: it is a folder, and this saves one file")
        target = target if target.suffix else target.with_suffix(".eqx")
        leaves, findings = saved_leaves(tree, "save_equinox", lambda _: "")
        refuse(saving.title, findings, "saved, and nothing was written")
        return SavePlan(leaves, str(target), lambda _: [_layout(target, leaves)], re.escape(target.name))

    saving.save(plan)


def _layout(target: Path, leaves: Sequence[SavedLeaf]) -> FileLayout:
    """One npy block after the other: a header, and the numbers. Then the checksums, which Equinox does not read."""
    texts: list[tuple[int, bytes]] = []
    tensors: list[tuple[int, int]] = []
    offset = 0
    for leaf_index, leaf in enumerate(leaves):
        header = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(leaf.dtype)
        fields = {"descr": descr, "fortran_order": False, "shape": leaf.shape}
        np.lib.format.write_array_header_1_0(header, fields)
        texts.append((offset, header.getvalue()))
        offset += len(texts[-1][1])
        tensors.append((leaf_index, offset))
        offset += leaf.nbytes
    block, sums = blank_text([leaf.nbytes for leaf in leaves])
    texts.append((offset, _CHECKSUMS + sums.encode()))
    return FileLayout(target, offset + len(texts[-1][1]), tuple(texts), tuple(tensors), block)
