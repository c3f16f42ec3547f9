"""Slices of tensors in files, read as numpy would cut them; parts of sharded arrays, written to where they belong."""

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints import boxes, tensor_file
from shardrules.checkpoints.checksums import UNKNOWN, TensorSums, block_sums
from shardrules.checkpoints.leaves import local_path, saved_leaves
from shardrules.checkpoints.tensor_file import FileTensor, file_source, local_parts, write_tensor
from shardrules.core.errors import CheckpointError

HEAD = b"something before"


def written(path: Path, array: np.ndarray, fortran: bool = False, block: int = 0) -> FileTensor:
    data = array.tobytes(order="F" if fortran else "C")
    path.write_bytes(HEAD + data + b"something after")
    sums = TensorSums(block, block_sums(np.frombuffer(data, np.uint8), block)) if block else None
    return FileTensor(path, len(HEAD), array.shape, array.dtype, fortran, "x", sums)


def read(tensor: FileTensor, cuts: tuple[slice, ...]) -> np.ndarray:
    return file_source([tensor], (), tensor.dtype).part(cuts)


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    cuts = []
    for size in shape:
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, size))
        cuts.append(draw(st.sampled_from([slice(None), slice(start, stop), slice(start, stop, None)])))
    return shape, tuple(cuts)


@given(
    box=parts(),
    fortran=st.booleans(),
    short=st.sampled_from([1, 8, 32, 4096]),
    wide=st.sampled_from([4, 64, 65536]),
    block=st.sampled_from([1, 16, 64, 2**20]),
    sums=st.sampled_from([0, 8, 24, 64]),
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_part_is_what_numpy_cuts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    box: tuple[tuple[int, ...], tuple[slice, ...]],
    fortran: bool,
    short: int,
    wide: int,
    block: int,
    sums: int,
) -> None:
    monkeypatch.setattr(tensor_file, "_SHORT_BYTES", short)
    monkeypatch.setattr(tensor_file, "_WIDE_BYTES", wide)
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block)
    monkeypatch.setattr(boxes, "BLOCK_BYTES", block)
    shape, cuts = box
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    tensor = written(tmp_path / "x", array, fortran, sums)
    part = read(tensor, cuts)
    assert part.shape == array[cuts].shape
    np.testing.assert_array_equal(part, array[cuts])
    if sums and part.size:  # a bit of the last number that it has
        data = bytearray((tmp_path / "x").read_bytes())
        flat = array.ravel(order="F" if fortran else "C")
        data[len(HEAD) + 4 * int(np.flatnonzero(flat == part.flat[-1])[0])] ^= 1
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(CheckpointError, match="x is damaged: x differs from its checksums"):
            read(tensor, cuts)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and bytes of every read."""
    seen: list[tuple[int, int]] = []
    plain = tensor_file.read_into

    def record(file: int, offset: int, view: memoryview, path: Path) -> None:
        seen.append((offset - len(HEAD), view.nbytes))
        plain(file, offset, view, path)

    monkeypatch.setattr(tensor_file, "read_into", record)
    return seen


@pytest.mark.parametrize(
    ("shape", "cuts", "expected"),
    [
        ((64, 32), (slice(8, 16), slice(None)), [(8 * 128, 8 * 128)]),  # rows lie together
        ((4, 8, 32), (slice(1, 2), slice(4, 6), slice(None)), [(1024 + 512, 256)]),
        ((4, 4096), (slice(None), slice(0, 2048)), [(row * 16384, 8192) for row in range(4)]),  # long runs, one by one
        ((64, 32), (slice(None), slice(8, 16)), [(32, 63 * 128 + 32)]),  # short ones together, and what lies between
        ((4, 65536), (slice(None), slice(0, 8)), [(row * 262144, 32) for row in range(4)]),  # too far apart for that
        ((3, 5), (slice(1, 1), slice(None)), []),
        ((), (), [(0, 4)]),
    ],
)
def test_only_what_is_needed_is_read(
    tmp_path: Path,
    reads: list[tuple[int, int]],
    shape: tuple[int, ...],
    cuts: tuple[slice, ...],
    expected: list[tuple[int, int]],
) -> None:
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    np.testing.assert_array_equal(read(written(tmp_path / "x", array), cuts), array[cuts])
    assert reads == expected


def test_what_is_cut_is_read_in_blocks(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    array = np.arange(2**21, dtype=np.int32).reshape(-1, 256)  # 8 MiB, 1 KiB a row
    part = read(written(tmp_path / "x", array), (slice(None), slice(0, 128)))
    np.testing.assert_array_equal(part, array[:, :128])
    assert [count for _, count in reads] == [2**21 - 512] * 4


def test_a_source_converts_each_part(tmp_path: Path) -> None:
    array = np.arange(8, dtype=">f4")
    source = file_source([written(tmp_path / "x", array)], (), jnp.bfloat16)
    part = source.part((slice(2, 4),))
    assert part.dtype == jnp.bfloat16
    assert part.tolist() == [2, 3]


def test_a_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    tensor = written(tmp_path / "x", np.arange(8, dtype=np.int32))
    (tmp_path / "x").write_bytes(HEAD + bytes(12))
    with pytest.raises(CheckpointError, match="x ended at byte 28 while it was read"):
        read(tensor, (slice(None),))


@pytest.mark.parametrize("path", ["gs://bucket/state", "s3://bucket/state.safetensors", Path("gs://bucket/state.eqx")])
def test_addresses_of_cloud_stores_are_refused(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree, mesh = {"w": np.ones(8)}, sr.create_mesh("data:8")
    calls = {
        "save_safetensors": lambda: sr.save_safetensors(path, tree),
        "load_safetensors": lambda: sr.load_safetensors(path, tree, P(), mesh),
        "save_equinox": lambda: sr.save_equinox(path, tree),
        "load_equinox": lambda: sr.load_equinox(path, tree, P(), mesh),
    }
    for name, call in calls.items():
        with pytest.raises(CheckpointError, match=f"{name}: .*bucket.* is an address.*mount the bucket"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["C:/state", "a:b/c", "runs/gs://x", "http", "."])
def test_paths_are_no_addresses(path: str) -> None:
    assert local_path(path, "save") == Path(path)


# ---- writing ----

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


def saved(path: Path, array: object, offset: int = 3) -> bytes:
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
    assert saved(tmp_path / "file", placed) == array.tobytes()


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
        assert saved(Path(folder, "file"), placed) == array.tobytes()


def test_columns_are_joined_into_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(1024 * 64, dtype=np.float32).reshape(1024, 64)
    placed = sr.filter_shard(array, P(None, ("data", "model")), sr.create_mesh("data:4,model:2"))
    calls = []
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: calls.append(args) or write(*args))
    assert saved(tmp_path / "file", placed) == array.tobytes()
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

    assert saved(tmp_path / "file", sr.ArraySource((14, 5), np.float32, read)) == rows.tobytes()
    assert reads == [slice(0, 5), slice(5, 10), slice(10, 14)]
    scalar = sr.ArraySource((), np.int32, lambda _: np.array(7, np.int32))
    assert saved(tmp_path / "file", scalar) == np.int32(7).tobytes()


def test_numbers_and_transposed_arrays_are_native(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3).T
    assert saved(tmp_path / "file", array) == np.arange(6, dtype="<i2").reshape(2, 3).T.tobytes()
    assert saved(tmp_path / "file", 2.5) == np.float64(2.5).tobytes()
    assert saved(tmp_path / "file", jax.random.key(7)) == np.array([0, 7], np.uint32).tobytes()
