"""Fixtures of the tests of checkpoints."""

from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

import shardrules as sr
from shardrules.checkpoints import tensor_file


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return sr.create_mesh("data:4,model:2")


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where data is read, rather than headers."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(tensor_file, "read_into", refuse)
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", refuse)
