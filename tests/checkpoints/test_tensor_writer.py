"""Parts of sharded arrays, written to where they belong in a file."""

import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints import boxes, tensor_file
from shardrules.checkpoints.checksums import UNKNOWN, block_sums
from shardrules.checkpoints.leaves import saved_leaves
from shardrules.checkpoints.tensor_file import local_parts, write_tensor

BLOCK = 64  # smaller than in files
SPECS = [
    P(),
    P("data"),
    P(None, "data"),
    P(None, None, "model"),
    P("model", "data"),
    P("data", None, "model"),
    P(("model", "data")),
    P(None, ("data", "model")),
    P(None, None, ("model", "data")),
]


def written(path: Path, array: object, offset: int = 3) -> bytes:
    (leaf,), _ = saved_leaves([array], "save", lambda _: "")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        sums = write_tensor(handle, offset, leaf, local_parts(leaf, True), BLOCK)
    finally:
        os.close(handle)
    data = path.read_bytes()[offset:]
    # Checksums of blocks that no run fills are missing; the others are those of the file.
    expected = block_sums(np.frombuffer(data, np.uint8), BLOCK)
    assert np.all((sums == expected) | (sums == UNKNOWN))
    return data


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("long_bytes", [1, 64, 2**20])
def test_a_sharded_array_is_written_whole(
    spec: P, long_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether runs count as long decides how parts are written; small blocks end in the middle of boxes.
    monkeypatch.setattr(boxes, "_LONG_BYTES", long_bytes)
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 300)
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 300)
    array = np.arange(16 * 8 * 8, dtype=np.int32).reshape(16, 8, 8)
    placed = sr.filter_shard(array, spec, sr.create_mesh("data:4,model:2"))
    assert written(tmp_path / "file", placed) == array.tobytes()


@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    axes=st.permutations(["data", "model", None]),
    dtype=st.sampled_from([np.bool_, jnp.bfloat16, jnp.float8_e5m2, np.complex64]),
)
def test_any_shape_and_spec_is_written_whole(shape: list[int], axes: list[str | None], dtype: type) -> None:
    mesh = sr.create_mesh("data:4,model:2")
    spec = P(*axes[: len(shape)])
    sizes = [size * (1 if axis is None else mesh.shape[axis]) for size, axis in zip(shape, axes, strict=False)]
    array = np.arange(np.prod(sizes, dtype=int)).reshape(sizes).astype(dtype)
    placed = sr.filter_shard(array, spec, mesh)
    with tempfile.TemporaryDirectory() as folder:
        assert written(Path(folder, "file"), placed) == array.tobytes()


def test_columns_are_joined_into_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(1024 * 64, dtype=np.float32).reshape(1024, 64)
    placed = sr.filter_shard(array, P(None, ("data", "model")), sr.create_mesh("data:4,model:2"))
    calls = []
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: calls.append(args) or write(*args))
    assert written(tmp_path / "file", placed) == array.tobytes()
    assert len(calls) == 1


def test_replicas_are_written_once_and_by_one_process() -> None:
    mesh = sr.create_mesh("data:4,model:2")
    tree = {"w": sr.filter_shard(np.ones((8, 8)), P("data"), mesh), "local": np.ones(3)}
    leaves, _ = saved_leaves(tree, "save", lambda _: "")
    assert [len(local_parts(leaf, True)) for leaf in leaves] == [1, 4]
    assert [len(local_parts(leaf, False)) for leaf in leaves] == [0, 0]


def test_sources_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_SOURCE_BYTES", 100)
    rows = np.arange(70, dtype=np.float32).reshape(14, 5)
    reads = []

    def read(index: tuple[slice, ...]) -> np.ndarray:
        reads.append(index[0])
        return rows[index]

    assert written(tmp_path / "file", sr.ArraySource((14, 5), np.float32, read)) == rows.tobytes()
    assert reads == [slice(0, 5), slice(5, 10), slice(10, 14)]
    scalar = sr.ArraySource((), np.int32, lambda _: np.array(7, np.int32))
    assert written(tmp_path / "file", scalar) == np.int32(7).tobytes()


def test_numbers_and_transposed_arrays_are_native(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3).T
    assert written(tmp_path / "file", array) == np.arange(6, dtype="<i2").reshape(2, 3).T.tobytes()
    assert written(tmp_path / "file", 2.5) == np.float64(2.5).tobytes()
    assert written(tmp_path / "file", jax.random.key(7)) == np.array([0, 7], np.uint32).tobytes()
