"""Broken safetensors: each has one message that names the file and the remedy, and none is read as something else."""

import json
import os
import random
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.checkpoints import headers
from shardrules.checkpoints.headers import read_headers, read_index
from shardrules.checkpoints.safetensors import load_safetensors

Entry: TypeAlias = dict[str, Any]
Header: TypeAlias = dict[str, Entry]

A, B = np.arange(4, dtype=np.float32), np.arange(6, dtype=np.int32).reshape(2, 3)
DATA = A.tobytes() + B.tobytes()
LIKE = {"a": jax.ShapeDtypeStruct((4,), jnp.float32), "b": jax.ShapeDtypeStruct((2, 3), jnp.int32)}
COPY = "copy or download the file again"


def header() -> Header:
    return {
        "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "b": {"dtype": "I32", "shape": [2, 3], "data_offsets": [16, 40]},
    }


def file_of(text: bytes, data: bytes = DATA) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: Any) -> bytes:
    """Returns a file whose second tensor has other entries; `None` removes one."""
    changed = header()
    changed["b"] = {key: value for key, value in {**changed["b"], **changes}.items() if value is not None}
    return file_of(json.dumps(changed).encode())


def text(header_text: str | bytes) -> bytes:
    return file_of(header_text if isinstance(header_text, bytes) else header_text.encode())


B_TEXT = '"b": {"dtype": "I32", "shape": [2, 3], "data_offsets": [16, 40]}'

BROKEN_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes, and its header alone would end at byte 8"),
    "only a length": ((10).to_bytes(8, "little"), "it has 8 bytes, and its header alone would end at byte 18"),
    "a length beyond the file": (
        (10**9).to_bytes(8, "little") + b"{}",
        "its header alone would end at byte 1000000008",
    ),
    "a length of 64 bits": (b"\xff" * 8 + b"{}", "its header alone would end at byte 18446744073709551623"),
    "no header": (
        file_of(b""),
        "its header cannot be read: it is not JSON: Expecting value at character 0, where it ends",
    ),
    "a header of zeros": (text(b"\0" * 16), "it is not JSON: Expecting value at character 0"),
    "a header that is cut off": (
        text('{"a": {}'),
        r"it is not JSON: Expecting ',' delimiter at character 8, where it ends",
    ),
    "a header that is a list": (text("[1]"), r"its header cannot be read: it holds \[1\], not a table by name"),
    "a header that is null": (text("null"), "it holds None, not a table by name"),
    "a header that is a tensor": (text(json.dumps(header()["a"])), "'dtype' is 'F32', not a table with dtype, shape"),
    "a header that is not UTF-8": (text(b'{"\xff": 1}'), "byte 2 of it is not UTF-8 text"),
    "a header with a mark of its encoding": (text(b"\xef\xbb\xbf{}"), "it is not JSON: Unexpected UTF-8 BOM"),
    "a header with more behind it": (text("{} {}"), "it is not JSON: Extra data at character 3"),
    "a header that nests": (text("[" * 100_000), "its header cannot be read: it is not JSON: it nests too deeply"),
    "a header with a long number": (text(f'{{"a": {"9" * 5000}}}'), "it is not JSON: Exceeds the limit"),
    "a tensor that is there twice": (text(f"{{{B_TEXT}, {B_TEXT}}}"), "'b' is in it twice"),
    "a key that is there twice": (text('{"a": {"dtype": "F32", "dtype": "I32"}}'), "'dtype' is in it twice"),
    "a name that is not Unicode": (text(f'{{"\\ud800": {B_TEXT[5:]}}}'), r"the name '\\ud800' is not Unicode text"),
    "a tensor that is a number": (text('{"b": 3}'), "'b' is 3, not a table with dtype, shape, data_offsets"),
    "a tensor that is a list": (text('{"b": ["I32", [2], [0, 8]]}'), r"'b' is \['I32', .*, not a table"),
    "no dtype": (entry(dtype=None), "'b' has no dtype"),
    "no shape": (entry(shape=None), "'b' has no shape"),
    "no offsets": (entry(data_offsets=None), "'b' has no data_offsets"),
    "a dtype that is a number": (entry(dtype=7), "'b' has the dtype 7, expected a name"),
    "an empty dtype": (entry(dtype=""), "'b' has the dtype '', expected a name"),
    "a dtype with an escape": (entry(dtype="\x1b[2J"), r"'b' has the dtype '\\x1b\[2J', expected a name"),
    "a shape that is a number": (entry(shape=6), "'b' has the shape 6, expected a list of sizes"),
    "a negative shape": (entry(shape=[-2, -3]), r"'b' has the shape \[-2, -3\], expected a list of sizes"),
    "a shape that is a string": (entry(shape="23"), "'b' has the shape '23', expected a list of sizes"),
    "a shape of floats": (entry(shape=[2.0, 3]), r"'b' has the shape \[2\.0, 3\], expected a list of sizes"),
    "a shape of booleans": (entry(shape=[True, 6]), r"'b' has the shape \[True, 6\], expected a list of sizes"),
    "a shape of 100 dimensions": (entry(shape=[1] * 100), "'b' has the shape .*, expected a list of sizes"),
    "a shape beyond 64 bits": (entry(shape=[2**64]), "'b' has the shape .*, expected a list of sizes"),
    "a shape whose product is": (entry(shape=[2**62] * 30), "takes .* bytes, not the 24 it has"),
    "another shape": (entry(shape=[2, 4]), r"'b', I32\[2, 4\], takes 32 bytes, not the 24 it has"),
    "another dtype": (entry(dtype="I64"), r"'b', I64\[2, 3\], takes 48 bytes, not the 24 it has"),
    "three offsets": (entry(data_offsets=[16, 20, 40]), "expected two ascending positions"),
    "one offset": (entry(data_offsets=[16]), "expected two ascending positions"),
    "offsets that are floats": (entry(data_offsets=[16.0, 40.0]), "expected two ascending positions"),
    "negative offsets": (entry(data_offsets=[-8, 16]), "expected two ascending positions"),
    "descending offsets": (entry(data_offsets=[40, 16]), "expected two ascending positions"),
    "offsets beyond 64 bits": (entry(data_offsets=[2**64, 2**64 + 24]), "expected two ascending positions"),
    "overlapping offsets": (
        entry(data_offsets=[12, 36]),
        "'b' begins at byte 12 of the data, before 'a' ends at byte 16",
    ),
    "equal offsets": (entry(data_offsets=[0, 24]), "begins at byte 0 of the data, before 'a' ends at byte 16"),
    "a gap": (entry(data_offsets=[20, 44]), "bytes 16 to 20 of the data, before 'b', belong to no tensor"),
    "offsets past the end": (
        entry(data_offsets=[20, 44]),
        "it ends at byte 40 of the data, and 'b' would end at byte 44",
    ),
    "offsets too close": (entry(data_offsets=[16, 36]), r"'b', I32\[2, 3\], takes 24 bytes, not the 20 it has"),
    "bytes left over": (entry() + b"\0" * 8, "bytes 40 to 48 of the data, after the last tensor, belong to no tensor"),
    "data cut off": (entry()[:-1], "it ends at byte 39 of the data, and 'b' would end at byte 40"),
    "no tensors and data": (text("{}"), "bytes 0 to 40 of the data, after the last tensor, belong to no tensor"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "a Git LFS pointer"),
    "a zip archive": (b"PK\x03\x04" + b"\0" * 100, "it is a zip archive, as torch.save writes"),
    "a GGUF file": (b"GGUF\x03\0\0\0" + b"\0" * 100, "it is a GGUF file"),
    "an HTML page": (b"<!DOCTYPE html><html>404</html>", "it is an HTML page"),
}
"""Files by what is wrong with them, with the message."""


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_broken_files_are_refused(tmp_path: Path, name: str) -> None:
    data, message = BROKEN_FILES[name]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(sr.errors.CheckpointError, match=message) as caught:
        load_safetensors(tmp_path, LIKE, P(), sr.create_mesh("data:8"))
    assert "x.safetensors: " in str(caught.value)
    assert "-> " in str(caught.value)
    assert not any(char in str(caught.value) for char in "\x1b\0\r")


def test_a_header_above_the_limit_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.safetensors"
    with file.open("wb") as stream:
        stream.write((2**30).to_bytes(8, "little"))
        stream.truncate(2**31)  # a file with a hole, which takes no space
    monkeypatch.setattr(headers, "_table", lambda text: pytest.fail("the header was read"))
    (problem,) = read_headers(file).problems
    assert problem.message == "its header would take 1.0 GiB, and the format allows 100,000,000 bytes"


def test_an_unreadable_dtype_is_an_error_where_a_leaf_takes_it(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(entry(dtype="F4"))
    with pytest.raises(sr.errors.CheckpointError, match=r"b \(2, 3\): 'b' is F4\[2, 3\], a dtype without JAX arrays"):
        load_safetensors(tmp_path, LIKE, P(), sr.create_mesh("data:8"))


@pytest.mark.parametrize("length", [ord("<"), int.from_bytes(b"<!", "little"), int.from_bytes(b"<h", "little")])
def test_a_length_like_another_format_is_read(tmp_path: Path, length: int) -> None:
    header_text = json.dumps({"a": header()["a"]}, separators=(",", ":")).encode()
    (tmp_path / "x.safetensors").write_bytes(file_of(header_text.ljust(length), A.tobytes()))
    assert read_headers(tmp_path).problems == []


def test_a_header_wrong_everywhere_gives_few_messages(tmp_path: Path) -> None:
    entries = {f"w{index}": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]} for index in range(1000)}
    (tmp_path / "x.safetensors").write_bytes(text(json.dumps(entries)))
    with pytest.raises(sr.errors.CheckpointError, match=r"and [\d,]+ more") as caught:
        load_safetensors(tmp_path, LIKE, P(), sr.create_mesh("data:8"))
    assert len(str(caught.value).splitlines()) < 100


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_header_is_refused_or_means_the_same(tmp_path: Path, seed: int) -> None:
    rng, whole = random.Random(seed), entry()
    end = len(whole) - len(DATA)
    mesh = sr.create_mesh("data:8")
    for trial in range(25):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 5))):
            data[rng.randrange(end)] = rng.choice((rng.randrange(256), *b'0123456789[]{},:" '))
        file = tmp_path / f"{trial}.safetensors"
        file.write_bytes(data)
        try:
            loaded = load_safetensors(file, LIKE, P(), mesh)
        except sr.errors.CheckpointError:
            continue
        assert np.array_equal(loaded["a"], A)
        assert np.array_equal(loaded["b"], B)


# ---- indices ----


def index_of(**files: str) -> str:
    return json.dumps({"weight_map": files})


BROKEN_INDICES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "it is not JSON: Expecting value at character 0, where it ends"),
    "cut off": (index_of(a="x.safetensors")[:-8], "it is not JSON: Unterminated string"),
    "no map": ("{}", "it has no weight_map, or an empty one"),
    "a map that is a list": ('{"weight_map": ["a"]}', "it has no weight_map, or an empty one"),
    "a file that is a number": (
        '{"weight_map": {"a": 3}}',
        "its weight_map has 3 for 'a', which is not the name of a file",
    ),
    "a file without a name": (index_of(a=""), "its weight_map has '' for 'a', which is not the name of a file"),
    "a folder above": (
        index_of(a="../x.safetensors"),
        r"has '\.\./x\.safetensors' for 'a', which is not in the folder",
    ),
    "a folder above, later": (index_of(a="b/../../x.safetensors"), "which is not in the folder of the index"),
    "a share of Windows": (index_of(a="\\\\host\\x.safetensors"), "which is not in the folder of the index"),
    "a file that is null": ('{"weight_map": {"a": null}}', "its weight_map has None for 'a', which is not the name"),
    "a list": ("[]", r"it holds \[\], not a table by name"),
    "a folder above, of Windows": (index_of(a="..\\x.safetensors"), "which is not in the folder of the index"),
    "an absolute file": (
        index_of(a="/etc/x.safetensors"),
        "has '/etc/x.safetensors' for 'a', which is not in the folder",
    ),
    "an absolute file of Windows": (index_of(a="C:\\x.safetensors"), "which is not in the folder of the index"),
    "another format": (
        index_of(a="pytorch_model.bin"),
        "has 'pytorch_model.bin' for 'a', which is not a .safetensors file",
    ),
    "a name twice": ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' is in it twice"),
    "not UTF-8": (b'{"weight_map": {"\xe9": "x.safetensors"}}', "byte 17 of it is not UTF-8 text"),
    "nested": ('{"weight_map": ' + "[" * 100_000, "it nests too deeply"),
    "a missing file": (
        index_of(a="y.safetensors"),
        "y.safetensors: the index .* names this file, and it cannot be read: No such file",
    ),
    "a file name too long": (
        index_of(a="y" * 5000 + ".safetensors"),
        "names this file, and it cannot be read: File name too",
    ),
    "a file name with a zero": (
        index_of(a="y\0.safetensors"),
        "names this file, and it cannot be read: .*embedded null",
    ),
    "a missing tensor": (index_of(c="x.safetensors"), "the index says that it has 'c', and it does not"),
}
"""Indices by what is wrong with them, with the message. Beside them is a file x.safetensors that is sound."""


@pytest.mark.parametrize("name", BROKEN_INDICES)
def test_broken_indices_are_refused(tmp_path: Path, name: str) -> None:
    data, message = BROKEN_INDICES[name]
    (tmp_path / "x.safetensors").write_bytes(entry())
    (tmp_path / "model.safetensors.index.json").write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(sr.errors.CheckpointError, match=message) as caught:
        load_safetensors(tmp_path, {"a": LIKE["a"]}, P(), sr.create_mesh("data:8"))
    assert "-> " in str(caught.value)


def test_an_index_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(entry())
    file = tmp_path / "m.safetensors.index.json"
    file.write_bytes(b"\xef\xbb\xbf" + index_of(a="x.safetensors", b="x.safetensors").encode())
    assert list(read_headers(file).stored) == ["a", "b"]


def test_an_index_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors.index.json"
    with file.open("wb") as stream:
        stream.truncate(2**30)
    (problem,) = read_headers(file).problems
    assert "it has 1.0 GiB, and an index at most 95.4 MiB" in problem.message


def test_many_missing_tensors_give_one_message_for_each_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(entry())
    file = tmp_path / "m.safetensors.index.json"
    file.write_text(index_of(**{f"w{index}": "x.safetensors" for index in range(20_000)}))
    (problem,) = read_headers(file).problems
    assert problem.message == "the index says that it has 'w0', and it does not, nor 19999 more"


@pytest.mark.parametrize("total", [16060522496, 16060522496.0, None, "16060522496", -3, True])
def test_the_total_of_an_index_is_read_where_it_has_it(tmp_path: Path, total: Any) -> None:
    file = tmp_path / "m.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": {"a": "x.safetensors"}}))
    expected = 16060522496 if total == 16060522496 else None
    assert read_index(file).total_bytes == expected


def test_a_file_that_may_not_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.safetensors").write_bytes(entry())

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(os, "open", refuse)
    (problem,) = read_headers(tmp_path / "x.safetensors").problems
    assert problem.message == "cannot be read: Permission denied"


def test_keys_of_a_tensor_may_be_in_any_order(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"b": dict(reversed(header()["b"].items())), "a": header()["a"], "c": header()["a"]}
    changed["c"] = {"dtype": "F4", "shape": [0], "data_offsets": [40, 40]}
    file = tmp_path / "x.safetensors"
    file.write_bytes(file_of(json.dumps(changed).encode()))
    contents = read_headers(file)
    assert contents.problems == []
    assert {name: str(array) for name, array in contents.stored.items()} == {
        "a": "F32[4]",
        "b": "I32[2, 3]",
        "c": "F4[0]",
    }
    assert contents.tensor("b").offset - contents.tensor("a").offset == 16
