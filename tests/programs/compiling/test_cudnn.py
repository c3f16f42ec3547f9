"""Functions that call cuDNN: they compile without a GPU, their FLOPs count, and a missing package is named."""

import importlib
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import MissingCompilerError
from tests.programs.machine.test_targets import needs

MESH = sr.mesh_shape("data:2,model:4")
BATCH, LENGTH, HEADS, SIZE = 4, 1024, 16, 128
QUERY = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, SIZE), jnp.bfloat16)
SPEC = P("data", None, "model")


@pytest.mark.parametrize("message", ["cuDNN not found.", "cuDNN is not detected."])
def test_the_missing_package_is_named(message: str) -> None:
    def attend(query: Any) -> Any:
        raise RuntimeError(message)

    with pytest.raises(MissingCompilerError, match=r'attend calls cuDNN, .*: pip install "shardrules\[cudnn\]"'):
        sr.audit(attend, QUERY, mesh=MESH, target="cpu")


def test_other_errors_of_a_function_stay_as_they_are() -> None:
    def attend(query: Any) -> Any:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        sr.audit(attend, QUERY, mesh=MESH, target="cpu")


def versions(monkeypatch: pytest.MonkeyPatch, version: int | None) -> None:
    """Lets JAX find a cuDNN, or none: all that it asks of the library before there is a GPU is its version."""
    needs("cuda")

    def answer() -> int:
        if version is None:
            raise RuntimeError("cuDNN not found.")
        return version

    monkeypatch.setattr(importlib.import_module("jax_cuda12_plugin._versions"), "cudnn_get_version", answer)


def attention(causal: bool) -> Any:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation="cudnn")

    return attend


@pytest.mark.slow
def test_jax_itself_asks_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, None)
    with pytest.raises(MissingCompilerError, match=r"attend calls cuDNN"):
        sr.audit(attention(True), QUERY, QUERY, QUERY, mesh=MESH, target="cuda:h100:8")


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "blocks"), [(False, 64), (True, 36)])
def test_attention_of_cudnn_counts(monkeypatch: pytest.MonkeyPatch, causal: bool, blocks: int) -> None:
    """Forward two matmuls, backward five; a causal kernel computes the blocks of 128 x 128 up to the diagonal."""
    if find_spec("nvidia") is None or find_spec("nvidia.cudnn") is None:
        versions(monkeypatch, 90800)
    needs("cuda")

    def loss(*args: Any) -> Any:
        return attention(causal)(*args).astype(jnp.float32).sum()

    report = sr.audit(
        jax.grad(loss, argnums=(0, 1, 2)), QUERY, QUERY, QUERY, mesh=MESH, target="cuda:h100:8", in_shardings=SPEC
    )
    matmul = 2 * BATCH // 2 * HEADS // 4 * blocks * 128 * 128 * SIZE
    assert report.flops == (2 + 5) * matmul
    assert not [finding for finding in report.findings if finding.code == "uncounted-kernel"]
    assert "__cudnn$fmha" in report.hlo_text
