"""`load_safetensors`: what it reads, how, and what it refuses."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints.headers import DTYPES
from shardrules.checkpoints.safetensors import load_safetensors
from tests.checkpoints.states import facts
from tests.house.source import REPOSITORY
from tests.mesh.cluster import run_processes

Header: TypeAlias = dict[str, Any]

RULES = sr.DimShardingRule("model", 0) | sr.FSDPShardingRule("data", min_size_mb=0)


def make() -> eqx.nn.MLP:
    return eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))


def tensors(tree: Any) -> dict[str, np.ndarray]:
    pairs = zip(sr.leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    return {path.replace("/", "."): np.asarray(leaf) for path, leaf in pairs if eqx.is_array(leaf)}


def write(
    path: Path, arrays: Mapping[str, tuple[str, np.ndarray]], change: Callable[[Header], None] | None = None
) -> Path:
    """Writes a file by hand, with dtypes that are named by hand, and a header that may be changed."""
    header: Header = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in arrays.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    if change is not None:
        change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_model_is_loaded(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    model = make()
    safetensors.numpy.save_file(tensors(model), tmp_path / "m.safetensors")
    loaded = load_safetensors(tmp_path / "m.safetensors", eqx.filter_eval_shape(make), RULES, mesh)
    assert facts(loaded) == facts(model)
    assert loaded.activation is model.activation
    expected = sr.filter_shard(model, RULES, mesh)
    for new, old in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert not eqx.is_array(old) or new.sharding == old.sharding
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(loaded(x), expected(x))
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5)


@pytest.mark.parametrize("how", [P("data", "model"), P(None, ("model", "data")), P(), P("model"), None])
def test_every_dtype_is_read_as_it_is(tmp_path: Path, mesh: jax.sharding.Mesh, how: P | None) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 2, (16, 24)).astype(dtype) for name, dtype in DTYPES.items()}
    like = {name: np.zeros_like(array) for name, array in arrays.items()}
    path = write(tmp_path / "x.safetensors", {name: (name, array) for name, array in arrays.items()})
    with jax.enable_x64(True):
        loaded = load_safetensors(path, like, how, mesh)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert np.asarray(loaded[name]).tobytes() == array.tobytes()
        assert loaded[name].sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, how or P()), 2)


def test_dtypes_have_the_names_that_safetensors_writes() -> None:
    for name in ("BOOL", *["U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "F16", "F32", "F64", "C64"]):
        assert f'"dtype":"{name}"'.encode() in safetensors.numpy.save({"x": np.zeros(2, DTYPES[name])})


def test_names_are_a_table_or_a_function(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    path = write(tmp_path / "x.safetensors", {"w": ("F32", np.ones(8, np.float32))})
    names: Any = ["w"]
    with pytest.raises(sr.errors.ConfigTypeError, match=r"names must be a table or a function from paths .*\['w'\]"):
        load_safetensors(path, {"w": np.ones(8, np.float32)}, P(), mesh, names=names)


def test_64_bit_values_are_refused_while_x64_is_off(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    safetensors.numpy.save_file({"i": np.full(8, 2**40 + 5), "n": np.arange(8)}, tmp_path / "x.safetensors")
    for cast in (False, True):
        with pytest.raises(sr.errors.CheckpointError, match="and JAX makes it int32 while jax_enable_x64 is off"):
            load_safetensors(tmp_path / "x.safetensors", {"i": np.zeros(8, int)}, P(), mesh, surplus="skip", cast=cast)
    small = {"n": jax.ShapeDtypeStruct((8,), jnp.int32)}
    loaded = load_safetensors(tmp_path / "x.safetensors", small, P(), mesh, surplus="skip", cast=True)
    assert loaded["n"].tolist() == list(range(8))
    small = {"i": jax.ShapeDtypeStruct((8,), jnp.int32)}
    with pytest.raises(sr.errors.CheckpointError, match="int32 cannot hold 1099511627781"):
        load_safetensors(tmp_path / "x.safetensors", small, P(), mesh, surplus="skip", cast=True)


def test_no_dimensions_and_no_elements(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    arrays = {"scalar": np.array(3.5, np.float32), "none": np.zeros((0, 8), np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    like = {"scalar": jax.ShapeDtypeStruct((), jnp.float32), "none": jax.ShapeDtypeStruct((0, 8), jnp.float32)}
    loaded = load_safetensors(tmp_path / "x.safetensors", like, P(), mesh)
    assert loaded["scalar"] == 3.5
    assert loaded["none"].shape == (0, 8)


def test_names_casts_and_missing_tensors(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    w = np.random.default_rng(0).standard_normal((16, 8), dtype=np.float32)
    safetensors.numpy.save_file({"model.w": w, "step": np.array(7)}, tmp_path / "x.safetensors")
    like = {
        "w": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16),
        "tied": jax.ShapeDtypeStruct((16, 8), jnp.float32),
        "new": jnp.ones(8),
        "step": 0,
        "rate": 0.5,
    }
    table = {"w": "model.w", "tied": "model.w", "new": None}
    for names in (table, lambda path: table.get(path, path)):
        loaded = load_safetensors(tmp_path / "x.safetensors", like, P("data"), mesh, names=names, cast=True)
        assert np.asarray(loaded["w"]).tobytes() == w.astype(jnp.bfloat16).tobytes()
        assert np.asarray(loaded["tied"]).tobytes() == w.tobytes()
        assert loaded["new"].sharding.spec == P("data")
        assert loaded["new"].sum() == 8
        assert (loaded["step"], loaded["rate"]) == (7, 0.5)
        assert type(loaded["step"]) is int


# Several files.


def shards(folder: Path, model: Any, **changes: Any) -> Path:
    named = list(tensors(model).items())
    halves = {"a.safetensors": dict(named[:3]), "b.safetensors": dict(named[3:])}
    for file, part in halves.items():
        safetensors.numpy.save_file(part, folder / file)
    index = {name: file for file, part in halves.items() for name in part}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": {**index, **changes}}))
    return path


@pytest.mark.parametrize("how", [P(), P("data", None, "model"), P(None, ("model", "data")), P("model", "data")])
def test_stacked_layers_are_tensors_of_their_own(tmp_path: Path, mesh: jax.sharding.Mesh, how: P) -> None:
    layers = np.arange(4 * 8 * 6, dtype=np.float32).reshape(4, 8, 6)
    experts = np.arange(4 * 2 * 8 * 4, dtype=np.int32).reshape(4, 2, 8, 4)
    arrays: dict[str, np.ndarray] = {f"layers.{i}.w": layer for i, layer in enumerate(layers)}
    arrays |= {f"layers.{i}.experts.{j}": experts[i, j] for i in range(4) for j in range(2)}
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()}, tmp_path / "x.safetensors"
    )
    like = {"w": jax.ShapeDtypeStruct((4, 8, 6), jnp.float32), "experts": jax.ShapeDtypeStruct((4, 2, 8, 4), jnp.int32)}
    names = {
        "w": [f"layers.{i}.w" for i in range(4)],
        "experts": tuple([f"layers.{i}.experts.{j}" for j in range(2)] for i in range(4)),
    }
    specs = {"w": how, "experts": P("data", "model")}
    loaded = load_safetensors(tmp_path, like, specs, mesh, names=names)
    np.testing.assert_array_equal(loaded["w"], layers)
    np.testing.assert_array_equal(loaded["experts"], experts)
    assert loaded["w"].sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, how), 3)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "a", "a"], r"error stack: w \(2, 4\): `names` gives 3 tensors for it"),
        ([["a"], ["a"]], r"error stack: w \(2, 4\): `names` gives 2 x 1 tensors"),
        (["a", ["a"]], r"error no-name: w \(2, 4\): `names` gives \['a', \['a'\]\] for it, which is not the name"),
        (["a", None], r"error no-name: w \(2, 4\): `names` gives \['a', None\] for it"),
        ([], r"error no-name: w \(2, 4\): `names` gives \[\] for it"),
        (["a", "c"], r"error missing: w \(4,\): the checkpoint has no 'c'"),
        (["a", "b"], r"error shape: w \(4,\): 'b' has shape \(2, 3\)"),
    ],
)
def test_wrong_stacks_are_errors(tmp_path: Path, mesh: jax.sharding.Mesh, names: Any, message: str) -> None:
    path = write(tmp_path / "x.safetensors", TWO)
    like = {"w": jax.ShapeDtypeStruct((2, 4), jnp.float32)}
    with pytest.raises(sr.errors.CheckpointError, match=message):
        load_safetensors(path, like, P(), mesh, names={"w": names}, surplus="skip")


@pytest.mark.parametrize("give", [lambda index: index, lambda index: index.parent, lambda index: str(index.parent)])
def test_an_index_is_followed(tmp_path: Path, mesh: jax.sharding.Mesh, give: Callable[[Path], Any]) -> None:
    model = make()
    loaded = load_safetensors(give(shards(tmp_path, model)), eqx.filter_eval_shape(make), RULES, mesh)
    assert facts(loaded) == facts(model)


def test_files_without_an_index_are_read_together(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    model = make()
    shards(tmp_path, model).unlink()
    loaded = load_safetensors(tmp_path, eqx.filter_eval_shape(make), RULES, mesh)
    assert facts(loaded) == facts(model)
    safetensors.numpy.save_file({"layers.0.bias": np.zeros(64, np.float32)}, tmp_path / "c.safetensors")
    with pytest.raises(
        sr.errors.CheckpointError, match=r"c.safetensors: 'layers.0.bias' is in another file too\n +-> wri"
    ):
        load_safetensors(tmp_path, eqx.filter_eval_shape(make), RULES, mesh)


def test_an_index_says_which_of_two_counts(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    model = make()
    index = shards(tmp_path, model, **{"layers.2.bias": "c.safetensors"})
    safetensors.numpy.save_file(
        {"layers.2.bias": np.full(8, 5, np.float32), "more": np.ones(2)}, tmp_path / "c.safetensors"
    )
    loaded = load_safetensors(index, eqx.filter_eval_shape(make), RULES, mesh, surplus="skip")
    assert np.asarray(loaded.layers[2].bias).tolist() == [5] * 8
    with pytest.raises(sr.errors.CheckpointError, match=r"error surplus: more: no leaf of `like` takes it, F64\[2\]"):
        load_safetensors(index, eqx.filter_eval_shape(make), RULES, mesh)


def test_a_wrong_index_is_listed_with_other_problems(tmp_path: Path, mesh: jax.sharding.Mesh, no_reads: None) -> None:
    changes = {"layers.0.weight": "gone.safetensors", "layers.1.weights": "a.safetensors"}
    index = shards(tmp_path, make(), **changes)
    like = eqx.tree_at(
        lambda model: model.layers[2].bias, eqx.filter_eval_shape(make), jax.ShapeDtypeStruct((9,), jnp.int8)
    )
    with pytest.raises(sr.errors.CheckpointError, match="cannot be loaded, and nothing was") as caught:
        load_safetensors(index, like, P(), mesh)
    lines = [line.strip() for line in str(caught.value).replace(f"{tmp_path}/", "").splitlines()[1:]]
    assert lines == [
        (
            "error file: gone.safetensors: the index model.safetensors.index.json names this file, and it cannot be "
            "read: No such file or directory"
        ),
        "-> download it, or write the index again",
        (
            "error file: a.safetensors: the index says that it has 'layers.1.weights', and it does not "
            "(did you mean 'layers.1.weight'?)"
        ),
        "-> write the index again",
        "error shape: layers/2/bias (9,): 'layers.2.bias' has shape (8,)",
        "-> give `like` the shape that was saved, or use another tensor",
        "error dtype: layers/2/bias (9,): 'layers.2.bias' is F32[8], expected int8",
        "-> cast=True converts it",
    ]


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "this folder has no .safetensors file"),
        (
            {"a.safetensors.index.json": "{}", "b.safetensors.index.json": "{}"},
            "it has several indices: a.safe.*, b.safe",
        ),
        ({"a.safetensors": ""}, "it has 0 bytes, and its header alone would end at byte 8"),
    ],
)
def test_unreadable_folders_are_errors(
    tmp_path: Path, mesh: jax.sharding.Mesh, files: dict[str, str], complaint: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(sr.errors.CheckpointError, match=complaint):
        load_safetensors(tmp_path, {"w": jnp.ones(2)}, P(), mesh)
    with pytest.raises(sr.errors.CheckpointError, match="nothing: cannot be read: No such file"):
        load_safetensors(tmp_path / "nothing", {"w": jnp.ones(2)}, P(), mesh)


# Files that are broken.

TWO = {"a": ("F32", np.arange(4, dtype=np.float32)), "b": ("I32", np.arange(6, dtype=np.int32).reshape(2, 3))}
LIKE = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, (_, array) in TWO.items()}


def test_a_file_cut_anywhere_is_refused_before_anything_is_read(
    tmp_path: Path, mesh: jax.sharding.Mesh, no_reads: None
) -> None:
    whole = write(tmp_path / "x.safetensors", TWO).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "x.safetensors").write_bytes(whole[:length])
        with pytest.raises(sr.errors.CheckpointError, match=r"its header alone would end at|it ends at byte"):
            load_safetensors(tmp_path / "x.safetensors", LIKE, P(), mesh)


# What is held, where, and how much.


@pytest.mark.slow
@pytest.mark.parametrize("whole_bytes", [0, 2**30])
def test_each_process_reads_what_its_devices_hold(tmp_path: Path, whole_bytes: int) -> None:
    arrays = {"rows": np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024), "all": np.arange(16, dtype=np.int32)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    code = f"""
        from shardrules.placement import transfer
        from shardrules.checkpoints import safetensors, tensor_file
        transfer.WHOLE_BYTES = {whole_bytes}
        counts = []
        plain = tensor_file.read_into
        def count(file, offset, view, path):
            counts.append(view.nbytes)
            plain(file, offset, view, path)
        tensor_file.read_into = count
        like = {{"rows": jax.ShapeDtypeStruct((64, 1024), jnp.float32), "all": jax.ShapeDtypeStruct((16,), jnp.int32)}}
        mesh = sr.create_mesh("data:4,model:2")
        found = safetensors.load_safetensors({str(tmp_path)!r}, like, {{"rows": P("data"), "all": P()}}, mesh)
        whole = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
        for shard in found["rows"].addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
        assert found["all"].is_fully_replicated and found["all"].addressable_data(0).tolist() == list(range(16))
        print(sum(counts))
    """
    ended = run_processes(code, processes=2, devices=4)
    assert [process.code for process in ended] == [0, 0], ended
    assert [int(process.out) for process in ended] == [64 * 1024 * 4 // 2 + 64] * 2


def peak_over_start(code: str, folder: Path) -> tuple[int, int]:
    """Runs code in a process of its own; returns the bytes it needed at most, and the bytes of `arrays` at the end."""
    text = """
        import re, resource, sys
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        import shardrules as sr
        from shardrules.checkpoints.safetensors import load_safetensors
        def peak():
            if sys.platform == "darwin":
                return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            # On Linux that number begins with what the process was forked from.
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
        mesh = sr.create_mesh("data:4,model:2")
        like = {"w": [jax.ShapeDtypeStruct((5120, 1024), jnp.float32) for _ in range(10)]}
        jax.block_until_ready(jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, P("data", "model"))))
        start = peak()
    """
    end = "\njax.block_until_ready(arrays)\nprint(peak() - start, sum(one.nbytes for one in jax.tree.leaves(arrays)))"
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text) + textwrap.dedent(code) + end],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    needed, placed_bytes = map(int, ended.stdout.split())
    return needed, placed_bytes


@pytest.mark.slow
def test_loading_takes_the_memory_of_the_arrays_and_little_more(tmp_path: Path) -> None:
    arrays = {f"w.{i}": np.full((5120, 1024), i, np.float32) for i in range(10)}  # 20 MiB each
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    del arrays
    peak_bytes, placed_bytes = peak_over_start(
        'arrays = load_safetensors("x.safetensors", like, P("data", "model"), mesh)', tmp_path
    )
    assert placed_bytes == 200 * 2**20
    assert peak_bytes <= placed_bytes + 60 * 2**20
    peak_bytes, placed_bytes = peak_over_start(
        """
        import safetensors.numpy
        found = safetensors.numpy.load_file("x.safetensors")
        arrays = sr.filter_shard({"w": list(found.values())}, P("data", "model"), mesh)
        """,
        tmp_path,
    )
    assert peak_bytes >= placed_bytes + 150 * 2**20  # what it takes otherwise: the measure sees the difference
