"""Paths that are none: each reader and writer of checkpoints answers them with an error of ours."""

from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import CheckpointError, ConfigError, ConfigTypeError

TREE = {"w": np.ones(3, np.float32)}
SAVERS = {"safetensors": sr.save_safetensors, "equinox": sr.save_equinox, "orbax": sr.save_orbax}
LOADERS = {"safetensors": sr.load_safetensors, "equinox": sr.load_equinox, "orbax": sr.load_orbax}


@pytest.mark.parametrize("form", SAVERS)
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
def test_what_is_no_path_is_an_error(form: str, path: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?i){message}"):
        SAVERS[form](path, TREE)
    with pytest.raises(error, match=f"(?i){message}"):
        LOADERS[form](path, TREE, P(), sr.create_mesh("data:8"))


def test_a_file_has_a_name() -> None:
    with pytest.raises(CheckpointError, match="save_equinox:  cannot be saved: it is a folder"):
        sr.save_equinox("", TREE)
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        sr.load_equinox("", TREE, P(), sr.create_mesh("data:8"))


@pytest.mark.parametrize(("form", "flag"), [(form, flag) for form in LOADERS for flag in ("cast", "verify")][:-1])
@pytest.mark.parametrize("value", ["no", None, 0])
def test_flags_are_true_or_false(form: str, flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"load_{form}: {flag} must be True or False, got {value!r}"):
        LOADERS[form]("missing", TREE, P(), sr.create_mesh("data:8"), **{flag: value})
