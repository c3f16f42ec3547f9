"""Flags change the compiled program, and those that a compiler refuses are found first."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import TargetError
from shardrules.programs.compiling.flags import compiler_options
from shardrules.programs.machine.flags import flag_sets
from tests.programs.machine.test_targets import needs
from tests.quick import USUAL_KERNELS

MESH = sr.mesh_shape("data:4")


def train(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return y.sum()

    return jax.tree.map(lambda weight, gradient: weight - gradient, weights, jax.grad(loss)(weights))


def report(target: str, spec: P, dtype: Any) -> sr.reports.AuditReport:
    weights, x = [jax.ShapeDtypeStruct((512, 512), dtype)] * 3, jax.ShapeDtypeStruct((1024, 512), dtype)
    return sr.audit(train, weights, x, mesh=MESH, target=target, in_shardings=(spec, P("data")))


def test_a_cpu_program_changes_with_a_flag() -> None:
    def fn(x: Any) -> Any:
        return jnp.tanh(x) + 1

    def text(*more: str) -> str:
        flags = " ".join([*more, *(f"--{name}" for name in USUAL_KERNELS)])
        audited = sr.audit(fn, jnp.ones((64, 64)), mesh=sr.mesh_shape("data:8"), target=sr.Target("cpu", flags=flags))
        assert dict(audited.target.flags) == dict(sr.Target("cpu", flags=flags).flags)
        return audited.hlo_text

    assert "wrapped_tanh" not in text()
    assert "wrapped_tanh" in text("--xla_disable_hlo_passes=fusion"), "each operation is a kernel of its own"


def test_refused_flags_are_all_in_one_error() -> None:
    calls: list[int] = []

    def fn(x: Any) -> Any:
        calls.append(1)
        return x

    flags = "--xla_nonsense=1 --xla_cpu_enable_fast_math=maybe --xla_other"
    message = (
        r"flags of target cpu: unknown flag 'xla_nonsense'; .*xla_cpu_enable_fast_math, 'maybe' is not a valid bool "
        r"value; unknown flag 'xla_other'\. A flag that the compiler reads only when it is loaded goes into XLA_FLAGS"
    )
    with pytest.raises(TargetError, match=message):
        sr.audit(fn, jnp.ones(8), mesh=MESH, target=sr.Target("cpu", flags=flags))
    with pytest.raises(TargetError, match="unknown flag 'xla_nonsense'"):
        sr.fits(fn, jnp.ones(8), target="cpu --xla_nonsense=1", mesh=MESH, budget="1 GiB")
    assert not calls, "flags are checked before anything is traced"


def test_switches_are_written_in_many_ways() -> None:
    for text, switch in (("true", True), ("1", True), ("False", False), ("0", False)):
        target = sr.Target("cpu", flags={"xla_cpu_enable_fast_math": text})
        (value,) = compiler_options(target).values()
        assert str(value) == str(switch)


def test_reports_keep_flags() -> None:
    audited = sr.audit(
        lambda x: x + 1, jnp.ones(8), mesh=sr.mesh_shape("data:8"), target="cpu --xla_cpu_enable_fast_math=true"
    )
    assert "on cpu --xla_cpu_enable_fast_math=true" in str(audited)
    assert '"target": "cpu"' in audited.to_json()
    assert sr.reports.AuditReport.from_json(audited.to_json()) == audited


@pytest.mark.slow
def test_combined_gradients_follow_a_threshold_on_gpus() -> None:
    needs("cuda")
    apart = report("cuda:h100:4 --xla_gpu_all_reduce_combine_threshold_bytes=1", P(), jnp.float32)
    together = report("cuda:h100:4", P(), jnp.float32)
    assert [len(each.collectives) for each in (apart, together)] == [3, 1]


@pytest.mark.slow
def test_gathers_beside_matmuls_follow_a_flag_on_tpus() -> None:
    needs("tpu")
    apart = report("tpu:v5e:2x2 maxtext:v5e --xla_enable_async_all_gather=false", P("data"), jnp.bfloat16)
    beside = report("tpu:v5e:2x2 maxtext:v5e", P("data"), jnp.bfloat16)
    counts = [len(re.findall("AsyncCollectiveStart", each.hlo_text)) for each in (apart, beside)]
    assert counts[0] == 0 < counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", flag_sets())
def test_published_sets_are_accepted(name: str) -> None:
    chip = name.partition(":")[2].partition("-")[0]
    needs("cuda" if chip == "gpu" else "tpu")
    machine = {"v5e": "tpu:v5e:2x2", "v5p": "tpu:v5p:2x2x1", "v6e": "tpu:v6e:2x2", "gpu": "cuda:h100:8"}[chip]
    target = sr.Target.parse(f"{machine} {name}")
    assert len(compiler_options(target)) == len(target.flags)
