"""All formats alike: trees come back on any mesh, and each refuses wrong plans, paths and flags before it reads."""

import enum
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import CheckpointError, ConfigError, ConfigTypeError
from tests.checkpoints.states import facts, like_state, make_state, place

FORMATS: dict[str, tuple[Callable[..., None], Callable[..., Any]]] = {
    "safetensors": (sr.save_safetensors, sr.load_safetensors),
    "equinox": (sr.save_equinox, sr.load_equinox),
    "orbax": (sr.save_orbax, sr.load_orbax),
}
TREE = {"w": np.ones(3, np.float32)}


@pytest.mark.parametrize(
    ("form", "target"),
    [
        ("safetensors", "saved"),
        ("safetensors", "saved.safetensors"),
        ("safetensors", "saved/ema.safetensors.index.json"),
        ("equinox", "state.eqx"),
        ("orbax", "run/state"),
    ],
)
@pytest.mark.parametrize("other", ["data:8", "model:2", "data:2,model:4"])
def test_a_state_comes_back_on_any_mesh(form: str, target: str, other: str, tmp_path: Path, mesh: Mesh) -> None:
    save, load = FORMATS[form]
    state = place(make_state(), mesh)
    save(tmp_path / target, state, **({"max_file_bytes": 20_000} if form == "safetensors" else {}))
    assert [file.name for file in tmp_path.iterdir()] == [target.partition("/")[0]]
    devices = jax.devices()[: sr.mesh_shape(other).size]
    restored = load(tmp_path / target, like_state(), P(), sr.create_mesh(other, devices=devices))
    assert facts(restored) == facts(state)
    assert (restored.epoch, restored.rate, restored.is_frozen) == (3, 3 / 7, True)


@pytest.mark.parametrize("form", FORMATS)
def test_a_plan_that_is_wrong_is_refused_before_anything_is_read(
    form: str, tmp_path: Path, mesh: Mesh, no_reads: None
) -> None:
    save, load = FORMATS[form]
    save(tmp_path / "saved", {"w": jnp.ones(6)})
    with pytest.raises(sr.errors.PlanError, match=r"w \(6,\): .*6.*4"):
        load(tmp_path / "saved", {"w": jnp.ones(6)}, P("data"), mesh)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("whole_bytes", [0, 2**30])
def test_no_device_holds_more_than_its_shards(
    form: str, whole_bytes: int, tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks at all that lives on any device whenever an array is put there, and at the end."""
    monkeypatch.setattr("shardrules.placement.transfer.WHOLE_BYTES", whole_bytes)
    save, load = FORMATS[form]
    tree = [jnp.ones((64, 64)) for _ in range(4)]
    save(tmp_path / "saved", tree)
    before = [*tree, *jax.live_arrays()]
    largest: list[int] = []

    def look(put: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        new = [array for array in jax.live_arrays() if not any(array is other for other in before)]
        largest.extend(shard.data.nbytes for array in new for shard in array.addressable_shards)
        return put(*args, **kwargs)

    for name in ("device_put", "make_array_from_single_device_arrays"):
        monkeypatch.setattr(jax, name, functools.partial(look, getattr(jax, name)))
    like = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    loaded = load(tmp_path / "saved", like, P("data", "model"), mesh)
    look(lambda: loaded)
    assert max(largest) == 64 * 64 * 4 // 8
    whole = load(tmp_path / "saved", like, jax.devices()[0])
    look(lambda: whole)
    assert max(largest) == 64 * 64 * 4  # what it looks for can be seen


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        (None, ConfigTypeError, "expected the path of a file, got None"),
        (10**5000, ConfigTypeError, "got a value of type int"),
        (b"/x", ConfigTypeError, "got b'/x'"),
        ("a\0b", ConfigError, r"no file can have the name 'a\\x00b': it has a null character"),
        ("\ud800", ConfigError, r"no file can have the name '\\ud800'"),
        ("x" * 5000, CheckpointError, "name too long|no such file|cannot be"),
    ],
    ids=["None", "integer", "bytes", "null", "surrogate", "long"],
)
def test_what_is_no_path_is_an_error(form: str, path: Any, error: type[Exception], message: str, mesh: Mesh) -> None:
    with pytest.raises(error, match=f"(?i){message}"):
        FORMATS[form][0](path, TREE)
    with pytest.raises(error, match=f"(?i){message}"):
        FORMATS[form][1](path, TREE, P(), mesh)


def test_a_file_has_a_name(mesh: Mesh) -> None:
    with pytest.raises(CheckpointError, match="save_equinox:  cannot be saved: it is a folder"):
        sr.save_equinox("", TREE)
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        sr.load_equinox("", TREE, P(), mesh)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        *[(flag, value, "True or False") for flag in ("cast", "verify") for value in ("no", None, 0)],
        ("surplus", "ignore", "'error' or 'skip'"),
    ],
)
def test_flags_are_those_of_the_signature(form: str, flag: str, value: Any, expected: str, mesh: Mesh) -> None:
    if (form, flag) != ("orbax", "verify"):
        with pytest.raises(ConfigError, match=f"load_{form}: {flag} must be {expected}, got {value!r}"):
            FORMATS[form][1]("missing", TREE, P(), mesh, **{flag: value})


class Phase(enum.IntEnum):
    WARM = 1
    TRAIN = 2


class Rate(float):
    """A subclass of a Python number."""


@pytest.mark.parametrize("form", FORMATS)
def test_subclasses_of_numbers_come_back_as_they_were(form: str, tmp_path: Path, mesh: Mesh) -> None:
    save, load = FORMATS[form]
    tree = {"phase": Phase.TRAIN, "rate": Rate(0.5), "truth": True}
    save(tmp_path / "saved", tree)
    restored = load(tmp_path / "saved", {"phase": Phase.WARM, "rate": Rate(0), "truth": False}, P(), mesh)
    assert restored == tree
    assert [type(value) for value in restored.values()] == [Phase, Rate, bool]
    with pytest.raises(CheckpointError, match=r"(?s)value: .*value: "):
        load(tmp_path / "saved", {"phase": True, "rate": 0.0, "truth": 1}, P(), mesh)


@pytest.mark.parametrize("form", FORMATS)
def test_a_number_that_an_enum_lacks_is_an_error_with_its_path(form: str, tmp_path: Path, mesh: Mesh) -> None:
    save, load = FORMATS[form]
    save(tmp_path / "saved", {"phase": 7})
    with pytest.raises(CheckpointError, match="phase: 7 cannot become a Phase"):
        load(tmp_path / "saved", {"phase": Phase.WARM}, P(), mesh)


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_a_path_with_half_a_surrogate_pair_is_refused(form: str, tmp_path: Path, mesh: Mesh) -> None:
    save, _ = FORMATS[form]
    with pytest.raises(CheckpointError, match=r"name: w\\ud800.* is not valid Unicode"):
        save(tmp_path / "saved", {"w\ud800": np.ones(3)})
    assert list(tmp_path.iterdir()) == []


def test_a_format_without_paths_takes_half_a_surrogate_pair(tmp_path: Path, mesh: Mesh) -> None:
    tree = {"w\ud800": np.ones(3, np.float32)}
    sr.save_equinox(tmp_path / "saved", tree)
    assert (sr.load_equinox(tmp_path / "saved", tree, P(), mesh)["w\ud800"] == 1).all()
