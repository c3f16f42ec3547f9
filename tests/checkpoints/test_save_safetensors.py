"""`save_safetensors`: what it writes, for us and for the safetensors library, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import CheckpointError, ConfigError, ConfigTypeError
from tests.checkpoints.states import facts, make_state, place


def library_tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Returns the tensors that the safetensors library reads from all files of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    pairs = [pair for file in files for pair in safetensors.deserialize(file.read_bytes())]
    return {name: (tensor["dtype"], tensor["shape"], bytes(tensor["data"])) for name, tensor in pairs}


def test_files_do_not_depend_on_the_mesh(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    state = make_state()
    sr.save_safetensors(tmp_path / "sharded", place(state, mesh), max_file_bytes=20_000)
    sr.save_safetensors(tmp_path / "whole", state, max_file_bytes=20_000)
    files = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert len(files) > 3
    for file in files:
        assert (tmp_path / "sharded" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_the_safetensors_library_reads_the_files(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    tree = {
        "flags": np.array([True, False, True]),
        "half": jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3),
        "eighth": jnp.arange(8, dtype=jnp.float8_e5m2),
        "deep": [np.float64(2.5), np.ones((2, 0), np.int16)],
        "step": 7,
    }
    sr.save_safetensors(tmp_path, tree, max_file_bytes="20B", metadata={"format": "pt"})
    expected = {
        "flags": ("BOOL", [3], b"\x01\x00\x01"),
        "half": ("BF16", [4, 3], np.asarray(tree["half"]).tobytes()),
        "eighth": ("F8_E5M2", [8], np.asarray(tree["eighth"]).tobytes()),
        "deep.0": ("F64", [], np.float64(2.5).tobytes()),
        "deep.1": ("I16", [2, 0], b""),
        "step": ("I64", [], np.int64(7).tobytes()),
    }
    assert library_tensors(tmp_path) == expected
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in expected.values())
    for file in set(index["weight_map"].values()):
        with safetensors.safe_open(tmp_path / file, "np") as opened:
            metadata = opened.metadata()
            assert metadata.pop("shardrules.checksums").startswith("crc=")
            assert metadata == {"format": "pt"}


def test_files_hold_at_most_so_many_bytes(tmp_path: Path) -> None:
    tree = {
        "a": np.zeros(10, np.uint8),
        "b": np.zeros(10, np.uint8),
        "c": np.zeros(25, np.uint8),
        "d": np.zeros(5, "u1"),
    }
    sr.save_safetensors(tmp_path, tree, max_file_bytes=20)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
    }


def test_tensors_are_aligned(tmp_path: Path) -> None:
    tree = {
        "a": np.ones(3, np.bool_),
        "b": np.ones(3, np.float64),
        "c": np.ones(1, np.int16),
        "d": np.ones(1, np.int32),
    }
    sr.save_safetensors(tmp_path / "m.safetensors", tree)
    data = (tmp_path / "m.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    for name, entry in list(json.loads(data[8 : 8 + length]).items())[1:]:
        assert entry["data_offsets"][0] % tree[name].dtype.itemsize == 0


def test_names_are_given_as_the_loader_takes_them(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    tree = {"up": {"w": np.ones(4, np.float32)}, "cache": np.zeros(3, np.float32)}

    def names(path: str) -> str | None:
        return None if path == "cache" else "model." + path.replace("/", ".")

    sr.save_safetensors(tmp_path, tree, names=names)
    assert list(library_tensors(tmp_path)) == ["model.up.w"]
    restored = sr.load_safetensors(tmp_path, tree, P(), mesh, names=names)
    assert facts(restored) == facts(tree)
    sr.save_safetensors(tmp_path, tree, names={"up/w": "x"})
    assert sorted(library_tensors(tmp_path)) == ["cache", "x"]


def test_a_second_save_replaces_the_first_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.safetensors").write_bytes(b"someone else's")
    for count in (3, 1, 2):
        sr.save_safetensors(tmp_path, {"layers": [np.full(4, count)] * count}, max_file_bytes=8)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        files = {file.name for file in tmp_path.iterdir()}
        assert files == {
            "config.json",
            "other.safetensors",
            "model.safetensors.index.json",
            *index["weight_map"].values(),
        }
        assert len(index["weight_map"]) == count


def test_an_index_cannot_have_files_elsewhere_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / "saved").mkdir()
    index = {"weight_map": {"a": "../precious", "b": str(tmp_path / "precious"), "c": 3, "d": "gone.safetensors"}}
    (tmp_path / "saved" / "model.safetensors.index.json").write_text(json.dumps(index))
    sr.save_safetensors(tmp_path / "saved", {"w": np.ones(3)})
    assert (tmp_path / "precious").read_text() == "x"


def test_all_that_cannot_be_saved_is_listed(tmp_path: Path) -> None:
    tree: Any = {
        "a.b": np.ones(2),
        "a": {"b": np.ones(2)},
        "__metadata__": np.ones(1),
        "complex": 1j,
        "nibbles": [jnp.ones(4, jnp.int4)] * 3,
        "shape": jax.ShapeDtypeStruct((2,), np.float32),
    }
    with pytest.raises(CheckpointError, match="cannot be saved, and nothing was written") as raised:
        sr.save_safetensors(tmp_path / "saved", tree)
    for line in (
        "name: __metadata__: '__metadata__' is reserved",
        "name: a.b: 'a.b' is also the name of a/b",
        "dtype: complex (): it is complex128, which safetensors cannot hold",
        "dtype: nibbles/* (4,) x3: it is int4, which safetensors cannot hold",
        "no-values: shape (2,): it has a shape and no values",
    ):
        assert f"  error {line}\n" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"names": 3}, ConfigTypeError, "names must be a table or a function"),
        ({"names": lambda path: 3}, ConfigTypeError, "names must give a string or None for 'w', got 3"),
        ({"max_file_bytes": "5 gigs"}, ConfigError, "max_file_bytes must be a number of bytes"),
        ({"max_file_bytes": 0}, ConfigError, "max_file_bytes must be 1 or more, got 0"),
        ({"metadata": {"step": 3}}, ConfigTypeError, "metadata must be a table from strings to strings"),
        ({"metadata": "abc"}, ConfigTypeError, "metadata must be a table from strings to strings, got 'abc'"),
        ({"metadata": [1]}, ConfigTypeError, r"metadata must be a table from strings to strings, got \[1\]"),
        ({"names": {"ww": "x"}}, CheckpointError, r"no-leaf: ww: .* has this path, and the tree .*did you mean 'w'"),
        ({"names": {"w": "x\ud800"}}, CheckpointError, r"name: w: 'x\\ud800' is not valid Unicode"),
        ({"names": lambda path: None}, CheckpointError, "neither an array nor a Python number"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        sr.save_safetensors(tmp_path / "saved", {"w": np.ones(3)}, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_path_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="file cannot be saved: it is a file"):
        sr.save_safetensors(tmp_path / "file", {"w": np.ones(3)})
    with pytest.raises(CheckpointError, match="it is a folder"):
        sr.save_safetensors(tmp_path / "folder.safetensors", {"w": np.ones(3)})
    with pytest.raises(CheckpointError, match="Not a directory"):
        sr.save_safetensors(tmp_path / "file" / "saved", {"w": np.ones(3)})


@pytest.mark.parametrize(("first", "second"), [("", "model.safetensors"), ("model.safetensors", "")])
def test_one_folder_has_no_two_forms_of_a_checkpoint(first: str, second: str, tmp_path: Path) -> None:
    sr.save_safetensors(tmp_path / first, {"w": np.ones(3)})
    files = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"model\.safetensors[.a-z]* is a checkpoint already"):
        sr.save_safetensors(tmp_path / second, {"w": np.zeros(3)})
    assert sorted(tmp_path.iterdir()) == files
    sr.save_safetensors(tmp_path / "ema.safetensors", {"w": np.zeros(3)})


def test_a_table_of_names_may_have_paths_that_are_not_saved(tmp_path: Path) -> None:
    sr.save_safetensors(tmp_path, {"w": np.ones(4), "label": "x"}, names={"w": "v", "label": "label"})
    assert list(library_tensors(tmp_path)) == ["v"]


@pytest.mark.slow
def test_the_host_holds_a_small_part_of_the_tree(tmp_path: Path) -> None:
    code = """
import resource, sys, jax, numpy as np, shardrules as sr
from jax.sharding import PartitionSpec as P
mesh = sr.create_mesh("data:4,model:2")
block = np.ones((1024, 2048), np.float32)
tree = {f"layer{index}": sr.filter_shard(block + index, P("model", "data"), mesh) for index in range(24)}
jax.block_until_ready(tree)
sr.save_safetensors(sys.argv[1] + "/warm", {"w": np.ones(3)})
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sr.save_safetensors(sys.argv[1] + "/saved", tree)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 / (24 * block.nbytes))
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)
    assert float(done.stdout) < 0.25


def test_only_files_that_no_index_names_are_removed(tmp_path: Path) -> None:
    tree = {"a": np.ones(4, np.float32), "b": np.ones(2, np.float32)}
    # The shards of `model.1` have names like those of the first generation of `model`.
    indices = [tmp_path / f"{stem}.safetensors.index.json" for stem in ("model.1", "model.ema", "model")]
    for index in indices:
        sr.save_safetensors(index, tree, max_file_bytes=16)
    kept = {file.name for file in tmp_path.iterdir()}
    for name in ("model.7-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        (tmp_path / name).touch()
    for name in ("other-00001-of-00002.safetensors", "notes.txt"):
        (tmp_path / name).touch()
        kept.add(name)
    sr.save_safetensors(indices[2], tree, max_file_bytes=100)
    assert {file.name for file in tmp_path.iterdir()} == {
        *(name for name in kept if not name.startswith("model-")),
        "model-00001-of-00001.safetensors",
    }
    for index in indices:
        assert sr.load_safetensors(index, tree, P(), sr.create_mesh("data:8"))["b"].tolist() == [1, 1]
