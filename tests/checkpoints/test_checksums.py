"""Checksums of blocks: what they find, and by whom they are written and compared."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints import checksums
from shardrules.checkpoints.checksums import KEY, blank_text, block_sums, is_text, sums_text
from shardrules.core.errors import CheckpointError, ConfigError

SPECS = [P(), P("data"), P(None, "model"), P("model", "data"), P(None, ("data", "model"))]


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((64, 256), np.float32),
        "odd": rng.integers(0, 255, (16, 1000), np.uint8),
        "bias": rng.standard_normal(8).astype(np.float16),
        "step": 7,
    }


SAVERS: dict[str, Callable[[Path, Any], Path]] = {
    "safetensors": lambda folder, tree: (sr.save_safetensors(folder / "x.safetensors", tree), folder / "x.safetensors")[
        1
    ],
    "equinox": lambda folder, tree: (sr.save_equinox(folder / "x.eqx", tree), folder / "x.eqx")[1],
}


def load(name: str, path: Path, spec: P, **options: Any) -> Any:
    like = {**jax.tree.map(np.zeros_like, {**tree(), "step": np.array(0)}), "step": 0}
    specs = {"w": spec, "odd": spec, "bias": P(), "step": P()}
    return getattr(sr, f"load_{name}")(path, like, specs, sr.create_mesh("data:4,model:2"), **options)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("length", [1, 4095, 4096, 3 * 4096 + 17])
def test_every_bit_of_a_block_changes_its_checksum(length: int) -> None:
    block = np.random.default_rng(length).integers(0, 255, length, dtype=np.uint8)
    expected = block_sums(block, 4096)
    for byte in range(0, length, 1 if length < 5000 else 37):
        for bit in range(8):
            block[byte] ^= 1 << bit
            assert np.flatnonzero(block_sums(block, 4096) != expected).tolist() == [byte // 4096]
            block[byte] ^= 1 << bit


def test_every_bit_of_a_word_survives_the_fold() -> None:
    # Where the difference of two products ends below the upper bits, carries decide: it must never be small.
    weights = checksums._weights(512)
    with np.errstate(over="ignore"):
        products = (weights[:, None] << np.arange(64, dtype=np.uint64)) * checksums._FOLD
    assert np.minimum(products, -products.astype(np.int64).astype(np.uint64)).min() >= 2**40


def test_swapped_blocks_and_words_are_found() -> None:
    data = np.random.default_rng(0).integers(0, 255, 8192, dtype=np.uint8)
    expected = block_sums(data, 4096)
    assert not np.array_equal(block_sums(np.roll(data, 4096), 4096), expected)
    data[:16] = np.roll(data[:16], 8)
    assert (block_sums(data, 4096) != expected).tolist() == [True, False]


def test_checksums_stay_what_they_are() -> None:
    # Files that exist must load for ever.
    data = np.arange(3 * 4096 // 8 + 2, dtype=np.uint64).view(np.uint8)
    assert sums_text(block_sums(data, 4096)) == b"/ExipnLTUJlEO6oD"


def test_blocks_of_large_files_are_larger() -> None:
    assert blank_text([10**6, 10**6])[0] == 4096
    assert blank_text([2**40])[0] == 2**18


@pytest.mark.parametrize("name", SAVERS)
def test_any_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    path = SAVERS[name](tmp_path, tree())
    plain = path.read_bytes()
    rng = np.random.default_rng(0)
    bits = [*rng.integers(0, 8 * len(plain), 60).tolist(), *rng.integers(0, 8 * 600, 40).tolist()]
    bits += rng.integers(8 * (len(plain) - 200), 8 * len(plain), 20).tolist()
    for bit in bits:
        path.write_bytes(plain)
        flip(path, bit)
        with pytest.raises(CheckpointError, match=r"x\.(safetensors|eqx)"):
            load(name, path, SPECS[bit % len(SPECS)])


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_error_says_which_tensor_is_damaged_and_where(name: str, spec: P, tmp_path: Path) -> None:
    path = SAVERS[name](tmp_path, tree())
    load(name, path, spec)
    position = path.read_bytes().index(tree()["odd"].tobytes()) + 5000
    flip(path, 8 * position)
    start = position - 5000 + 4096
    with pytest.raises(
        CheckpointError, match=rf"is damaged: '?odd'? differs .* bytes {start} to {start + 4096} of the"
    ):
        load(name, path, spec)
    loaded = load(name, path, spec, verify=False)
    assert np.sum(np.asarray(loaded["odd"]) != tree()["odd"]) == 1


def test_a_damaged_index_is_found(tmp_path: Path) -> None:
    sr.save_safetensors(tmp_path, tree(), max_file_bytes=20_000)
    index = tmp_path / "model.safetensors.index.json"
    plain = index.read_bytes()
    load("safetensors", tmp_path, P())
    for bit in range(0, 8 * len(plain), 41):
        index.write_bytes(plain)
        flip(index, bit)
        with pytest.raises(CheckpointError, match="index"):
            load("safetensors", tmp_path, P())


def test_files_without_checksums_load(tmp_path: Path) -> None:
    arrays = {**tree(), "step": np.array(7)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert load("safetensors", tmp_path / "x.safetensors", P("data"))["step"] == 7
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", tree())
    assert load("equinox", tmp_path / "x.eqx", P("data"))["step"] == 7


def test_checksums_that_another_program_copied_are_refused_unless_ignored(tmp_path: Path) -> None:
    path = SAVERS["safetensors"](tmp_path, tree())
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    safetensors.numpy.save_file({**tree(), "step": np.array(8)}, path, metadata=metadata)
    with pytest.raises(CheckpointError, match="verify=False loads it"):
        load("safetensors", path, P())
    assert load("safetensors", path, P(), verify=False)["step"] == 8
    # Saved again, a file has its own.
    sr.save_safetensors(path, tree(), metadata=metadata)
    assert load("safetensors", path, P())["step"] == 7


def test_a_text_is_known_by_its_form() -> None:
    assert is_text(blank_text([])[1])
    assert not any(map(is_text, ["", "pt", None, 3, json.dumps({"crc": 1})]))


def test_metadata_do_not_read_like_checksums(tmp_path: Path) -> None:
    tensors, path = {"w": np.ones(3, np.float32)}, tmp_path / "a.safetensors"
    with pytest.raises(ConfigError, match=r"save_safetensors: metadata\['note'\] reads like the checksums of a file"):
        sr.save_safetensors(path, tensors, metadata={"note": blank_text([1])[1].replace(".", "A")})
    sr.save_safetensors(path, tensors, metadata={"note": "crc= sums=", KEY: "of another file"})
    sr.load_safetensors(path, tensors, P(), sr.create_mesh("data:8"))
