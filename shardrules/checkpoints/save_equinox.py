"""`save_equinox`: a tree of sharded arrays into the file that `eqx.tree_serialise_leaves` would write."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardrules.checkpoints.checksums import blank_text, block_bytes, block_count
from shardrules.checkpoints.commit import FileLayout, Saving, sync_folder
from shardrules.checkpoints.equinox import CHECKSUMS
from shardrules.checkpoints.saved import SavedLeaf, refuse_to_save, saved_leaves
from shardrules.checkpoints.tensor_file import local_path, title_of
from shardrules.core.errors import CheckpointError


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

    def plan() -> tuple[Path, list[SavedLeaf]]:
        target = local_path(path, "save_equinox")
        if not target.name:
            raise CheckpointError(f"{saving.title} cannot be saved: it is a folder, and this saves one file")
        leaves, findings = saved_leaves(tree, "save_equinox", lambda _: "")
        refuse_to_save(saving.title, findings)
        return target if target.suffix else target.with_suffix(".eqx"), leaves

    target, leaves = saving.plan(plan)
    writers, token, _ = saving.agree_on(leaves, str(target))
    saving.write(
        [_layout(target, leaves)], leaves, writers, token, re.escape(target.name), lambda: sync_folder(target.parent)
    )


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
    block = block_bytes([leaf.nbytes for leaf in leaves])
    count = sum(block_count(leaf.nbytes, block) for leaf in leaves)
    texts.append((offset, CHECKSUMS + blank_text(count, block).encode()))
    return FileLayout(target, offset + len(texts[-1][1]), tuple(texts), tuple(tensors), block)
