"""`load_equinox` and `save_equinox`: files of Equinox, what they have, and what is refused."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints.equinox import load_equinox
from shardrules.core.errors import CheckpointError
from tests.checkpoints.states import facts, make_state

RULES = sr.FSDPShardingRule("data", min_size_mb=0)


class Everything(eqx.Module):
    """One leaf of each kind that Equinox saves, or does not."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    half: jax.Array
    columns: jax.Array | np.ndarray
    rate: float
    steps: int
    flag: bool
    phase: complex
    act: Callable[..., Any]
    name: str
    static: int = eqx.field(static=True)

    def __init__(self, key: jax.Array, start: float = 0) -> None:
        self.linear = eqx.nn.Linear(8, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
        self.half = jnp.arange(32, dtype=jnp.bfloat16).reshape(8, 4)
        self.columns = np.array(np.arange(96, dtype=np.float32).reshape(8, 12), order="F")
        self.rate, self.steps, self.flag, self.phase = start / 2, int(start), bool(start), complex(start, 1)
        self.act, self.name, self.static = jax.nn.relu, "text", 3


def make(start: float = 0) -> tuple[Everything, eqx.nn.State]:
    return eqx.nn.make_with_state(Everything)(jax.random.key(0), start)


@pytest.mark.parametrize("how", [RULES, P(), P("data"), jax.devices()[1]])
def test_a_model_with_state_comes_back(tmp_path: Path, mesh: jax.sharding.Mesh, how: Any) -> None:
    saved = make(7.0)
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", saved)
    like = eqx.filter_eval_shape(make)
    if how == P("data"):  # what has no dimension to split
        how = sr.RegexShardingRule([("linear|half|columns", P("data")), ("", P())])
    loaded = load_equinox(tmp_path / "m.eqx", like, how, mesh)
    assert facts(loaded) == facts(saved)
    assert jax.tree.structure(loaded) == jax.tree.structure(like)
    assert [type(value) for value in (loaded[0].rate, loaded[0].steps, loaded[0].flag)] == [float, int, bool]
    expected = sr.filter_shard(saved, how, mesh)
    for new, old in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert not eqx.is_array(old) or (isinstance(new, jax.Array) and new.sharding == old.sharding)


@pytest.mark.parametrize("give", [lambda folder: folder / "m", lambda folder: str(folder / "m.eqx")])
def test_the_suffix_may_be_left_out(tmp_path: Path, mesh: jax.sharding.Mesh, give: Callable[[Path], Any]) -> None:
    eqx.tree_serialise_leaves(tmp_path / "m", jnp.arange(8.0))
    assert load_equinox(give(tmp_path), jnp.zeros(8), P("data"), mesh).tolist() == list(range(8))
    with (tmp_path / "bare").open("wb") as file:
        eqx.tree_serialise_leaves(file, jnp.arange(8.0))
    assert load_equinox(tmp_path / "bare", jnp.zeros(8), P("data"), mesh).tolist() == list(range(8))


def test_arrays_after_those_of_like_may_be_skipped(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", [jnp.arange(8.0), 3, jnp.ones((4, 4), jnp.bfloat16), 7])
    with pytest.raises(sr.errors.CheckpointError, match=r"it has 2 more arrays or numbers, .*: bfloat16\[4, 4\], int"):
        load_equinox(tmp_path / "x.eqx", [jnp.zeros(8), 0], P(), mesh)
    loaded = load_equinox(tmp_path / "x.eqx", [jnp.zeros(8), 0], P(), mesh, surplus="skip")
    assert (loaded[0].tolist(), loaded[1]) == (list(range(8)), 3)


def test_skipping_takes_sound_arrays_only(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", [jnp.arange(8.0), jnp.ones(4)])
    whole = (tmp_path / "x.eqx").read_bytes()
    for broken, message in (
        (whole[:-1], r"block 1, at byte \d+: float32\[4\] would end"),
        (whole + b"!", "block 2, at byte"),
    ):
        (tmp_path / "x.eqx").write_bytes(broken)
        with pytest.raises(sr.errors.CheckpointError, match=message):
            load_equinox(tmp_path / "x.eqx", [jnp.zeros(8)], P(), mesh, surplus="skip")


@pytest.mark.parametrize(
    "dtype",
    [
        jnp.bfloat16,
        jnp.float8_e4m3fn,
        jnp.float8_e5m2,
        jnp.int4,
        np.float16,
        np.float32,
        np.int8,
        np.uint32,
        np.bool_,
        np.complex64,
    ],
)
def test_every_dtype_is_read_as_it_is(tmp_path: Path, mesh: jax.sharding.Mesh, dtype: Any) -> None:
    array = np.arange(64).reshape(8, 8) % 5
    tree = {"first": jnp.ones(3), "x": jnp.asarray(array.astype(dtype)), "last": 5}
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", tree)
    loaded = load_equinox(
        tmp_path / "x.eqx", {**tree, "last": 0}, {"first": P(), "x": P("data", "model"), "last": None}, mesh
    )
    assert facts(loaded) == facts(tree)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_header_is_read(tmp_path: Path, mesh: jax.sharding.Mesh, version: tuple[int, int]) -> None:
    with (tmp_path / "x.eqx").open("wb") as file:
        for _ in range(2):
            np.lib.format.write_array(file, np.arange(8, dtype=">i4"), version)
    loaded = load_equinox(tmp_path / "x.eqx", [np.zeros(8, np.int32)] * 2, P("data"), mesh)
    assert [array.tolist() for array in loaded] == [list(range(8))] * 2
    assert loaded[0].dtype == np.int32


def test_casts_need_cast(tmp_path: Path, mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": jnp.linspace(0, 1, 8), "b": jnp.arange(8, dtype=jnp.bfloat16), "c": jnp.arange(8, dtype=jnp.int8)}
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", tree)
    like = {"a": jnp.zeros(8, jnp.bfloat16), "b": jnp.zeros(8), "c": jnp.zeros(8)}
    loaded = load_equinox(tmp_path / "x.eqx", like, P("data"), mesh, cast=True)
    assert facts(loaded) == facts({name: tree[name].astype(like[name].dtype) for name in tree})
    with pytest.raises(
        sr.errors.CheckpointError, match=r"b \(8,\): block 1 is bfloat16\[8\], expected float32\n +-> cast=True"
    ):
        load_equinox(tmp_path / "x.eqx", like, P("data"), mesh)


def test_dtypes_that_numpy_lacks_come_from_like(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", jnp.zeros(8, jnp.float8_e4m3fn))
    with pytest.raises(sr.errors.CheckpointError, match=r"block 0 is <V1\[8\], a dtype without JAX arrays"):
        load_equinox(tmp_path / "x.eqx", jnp.zeros(8), P(), mesh, cast=True)


# What is wrong.


def test_all_problems_are_listed_before_anything_is_read(
    tmp_path: Path, mesh: jax.sharding.Mesh, no_reads: None
) -> None:
    def layers(width: int, dtype: Any) -> list[Any]:
        return [{"up": jnp.ones((8, width)), "norm": jnp.ones(8, dtype)} for _ in range(3)]

    eqx.tree_serialise_leaves(tmp_path / "m.eqx", (layers(8, jnp.float32), 3, jnp.ones(2)))
    with pytest.raises(sr.errors.CheckpointError, match=r"m\.eqx cannot be loaded, and nothing was") as caught:
        load_equinox(tmp_path / "m.eqx", (layers(16, jnp.bfloat16), 3.0, jnp.ones(2)), P(), mesh)
    assert [line.strip() for line in str(caught.value).splitlines()[1:] if "->" not in line] == [
        "error dtype: 0/*/norm (8,) x3: block 0 is float32[8], expected bfloat16",
        "error shape: 0/*/up (8, 16) x3: block 1 has shape (8, 8)",
        "error value: 1: block 6 is int64[], and `like` has a Python float",
    ]


@pytest.mark.parametrize(
    ("like", "complaint"),
    [
        (
            [jnp.ones(8), 3],
            "error surplus: .*x.eqx: it has 1 more array or number, 192 bytes, after the 2 of `like`: float32",
        ),
        (
            [jnp.ones(8), 3, jnp.ones(16), jnp.ones(4)],
            "error ended: 3: the file ends here, after 3 of 4 arrays and numb",
        ),
        ([jnp.ones(8)] * 5, "error ended: 3: the file ends here, after 3 of 5"),
    ],
)
def test_a_tree_of_another_size(
    tmp_path: Path, mesh: jax.sharding.Mesh, no_reads: None, like: Any, complaint: str
) -> None:
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", [jnp.ones(8), 3, jnp.ones(16)])
    with pytest.raises(sr.errors.CheckpointError, match=complaint):
        load_equinox(tmp_path / "x.eqx", like, P(), mesh)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, mesh: jax.sharding.Mesh, no_reads: None) -> None:
    like = {"a": jnp.ones(8), "b": jnp.ones(4)}
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", like)
    whole = (tmp_path / "x.eqx").read_bytes()
    second = len(whole) // 2 + 8
    complaints = {
        0: "ended: a",
        second: "ended: b",
        len(whole) - 1: "truncated: b: block 1, at byte .*: float32.* would end at",
    }
    for length in range(len(whole)):
        (tmp_path / "x.eqx").write_bytes(whole[:length])
        with pytest.raises(sr.errors.CheckpointError, match=complaints.get(length, "unreadable: [ab]|truncated: [ab]")):
            load_equinox(tmp_path / "x.eqx", like, P(), mesh)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"PK\x03\x04something", r"unreadable: 0: block 0, at byte 0: no npy block begins here, but b'PK"),
        (npy(np.ones(8, np.float32)) + b"garbage", r"unreadable: 1: block 1, at byte 160: no npy block begins here"),
        (
            npy(np.array([object()])),
            "block 0, at byte 0: its header cannot be read: TypeError: it holds Python objects",
        ),
        (npy(np.ones(8)).replace(b"'shape'", b"'shabe'"), r"its header cannot be read: KeyError: 'shape'"),
        (npy(np.ones(8)).replace(b"(8,)", b"-8  "), r"its header cannot be read: TypeError"),
        (npy(np.ones(8)).replace(b"(8,)", b"(-8,"), r"its header cannot be read: SyntaxError"),
        (npy(np.ones((8, 1))).replace(b"(8, 1)", b"(-8,1)"), r"its header cannot be read: invalid shape \(-8, 1\)"),
        (npy(np.ones(8)).replace(b"(8,)", b"8**9"), r"its header cannot be read: ValueError: malformed node"),
        (npy(np.ones(8)).replace(b"(8,), ", b"(True,"), r"its header cannot be read: "),
        (npy(np.ones(8)).replace(b"'<f8'", b"{1:2}"), r"its header cannot be read: "),
        (npy(np.ones(8)).replace(b"NUMPY\x01\x00v", b"NUMPY\x02\x00v"), r"its header would take \d+ bytes, and npy"),
        (npy(np.ones(8)).replace(b"<f8", b"<q8"), r"its header cannot be read: TypeError"),
    ],
)
def test_other_files_are_errors(
    tmp_path: Path, mesh: jax.sharding.Mesh, no_reads: None, content: bytes, complaint: str
) -> None:
    (tmp_path / "x.eqx").write_bytes(content)
    with pytest.raises(sr.errors.CheckpointError, match=complaint):
        load_equinox(tmp_path / "x.eqx", [jnp.ones(8), jnp.ones(8)], P(), mesh)


def test_missing_files_are_errors(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(sr.errors.CheckpointError, match=r"error file: .*gone.eqx: no such file"):
        load_equinox(tmp_path / "gone", jnp.ones(8), P(), mesh)


# Saving.


def test_equinox_reads_the_file(tmp_path: Path) -> None:
    tree = {
        "w": jnp.arange(12.0).reshape(3, 4),
        "half": jnp.ones(3, jnp.bfloat16),
        "step": 7,
        "rate": 0.5,
        "f": jax.nn.relu,
    }
    sr.save_equinox(tmp_path / "tree.eqx", tree)
    like = {**tree, "w": jnp.zeros((3, 4)), "half": jnp.zeros(3, jnp.bfloat16), "step": 0, "rate": 0.0}
    restored = eqx.tree_deserialise_leaves(tmp_path / "tree.eqx", like)
    assert facts(restored) == facts(tree)


def test_without_keys_it_is_the_file_of_equinox_and_checksums(tmp_path: Path) -> None:
    model = make_state().model
    eqx.tree_serialise_leaves(tmp_path / "theirs.eqx", model)
    sr.save_equinox(tmp_path / "ours.eqx", sr.filter_shard(model, P(), sr.create_mesh("data:8")))
    theirs, ours = (tmp_path / "theirs.eqx").read_bytes(), (tmp_path / "ours.eqx").read_bytes()
    assert ours.startswith(theirs + b"\x93SHARDRULES crc=")


def test_all_that_cannot_be_saved_is_listed(tmp_path: Path) -> None:
    tree = {"a": jax.ShapeDtypeStruct((2,), np.float32), "b": 2**64}
    with pytest.raises(CheckpointError, match=r"(?s)save_equinox: .*no-values: a \(2,\).*too-large: b"):
        sr.save_equinox(tmp_path / "tree.eqx", tree)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_without_arrays_is_saved(tmp_path: Path) -> None:
    sr.save_equinox(tmp_path / "tree.eqx", {"f": jax.nn.relu, "none": np.zeros((0, 3), np.float32)})
    like = {"f": jax.nn.relu, "none": np.ones((0, 3), np.float32)}
    restored = sr.load_equinox(tmp_path / "tree.eqx", like, P(), sr.create_mesh("data:8"))
    assert restored["none"].shape == (0, 3)
    sr.save_equinox(tmp_path / "tree.eqx", {"f": jax.nn.relu})
    assert sr.load_equinox(tmp_path / "tree.eqx", {"f": jax.nn.relu}, P(), sr.create_mesh("data:8"))
