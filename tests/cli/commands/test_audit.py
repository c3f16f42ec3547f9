"""`shardrules audit --trace` compares a step with a profile of it."""

import json
from pathlib import Path

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.cli.command import shardrules

STEP = """
import jax.numpy as jnp

def step(w, x):
    return jnp.tanh(x @ w).sum(0)

def training():
    return step, jnp.ones((256, 512)), jnp.ones((1024, 256))
"""
WORDS = ("audit", "step.py:training", "--mesh", "data:8", "--rules", "replicate()", "--batch", "data")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "step.py").write_text(STEP)
    return tmp_path


@pytest.mark.slow
def test_a_profile_is_put_beside_the_audit(folder: Path) -> None:
    names: dict[str, object] = {}
    exec(compile(STEP, str(folder / "step.py"), "exec"), names)
    step = jax.jit(names["step"])  # pyright: ignore[reportArgumentType, reportCallIssue]
    mesh = sr.create_mesh("data:8")
    w = jax.device_put(jnp.ones((256, 512)), NamedSharding(mesh, P()))
    x = jax.device_put(jnp.ones((1024, 256)), NamedSharding(mesh, P("data")))
    jax.block_until_ready(step(w, x))
    with jax.profiler.trace(folder / "profile"):
        for _ in range(4):
            jax.block_until_ready(step(w, x))
    process = shardrules(*WORDS, "--trace", "profile", "--format", "json", cwd=folder)
    assert process.returncode == 0, process.stderr
    data = json.loads(process.stdout)
    assert (data["shardrules_comparison"], data["step_count"], len(data["devices"])) == (1, 3, 8)
    assert data["matched_share"] > 0.9
    process = shardrules(*WORDS, "--trace", "profile", "--module", "jit_train", cwd=folder)
    assert process.returncode == 2
    assert "--trace: profile/plugins/profile/" in process.stderr
    assert "has no program 'jit_train'" in process.stderr
    assert "If jit_step is this function, pass --module 'jit_step'" in process.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trace", "nowhere"), "--trace: nowhere does not exist: name the folder that jax.profiler.trace wrote to"),
        (("--module", "jit_step"), "--module names a program of a trace: pass --trace, too"),
    ],
)
@pytest.mark.slow
def test_a_trace_is_looked_for_before_compiling(folder: Path, words: tuple[str, ...], message: str) -> None:
    process = shardrules(*WORDS, *words, cwd=folder)
    assert (process.returncode, process.stderr) == (2, f"shardrules: error: {message}\n")


@pytest.mark.slow
def test_a_measured_sheet_is_what_is_modelled_with(folder: Path) -> None:
    slow = attrs.evolve(sr.Hardware.named("cpu"), name="slow", memory_bytes_per_second=2e9)
    slow.save(folder / "slow.toml")
    process = shardrules(*WORDS, "--hardware", "slow.toml", "--format", "json", cwd=folder)
    assert process.returncode == 0, process.stderr
    report = sr.reports.AuditReport.from_json(process.stdout)
    assert report.hardware == slow
    (folder / "bad.toml").write_text("name = 'bad'\n[peak_flops]\nvalue = {bf17 = 1.0}\n")
    process = shardrules(*WORDS, "--hardware", "bad.toml", cwd=folder)
    assert process.returncode == 2
    assert "--hardware: bad.toml is not a sheet of hardware: memory_bytes is missing" in process.stderr
