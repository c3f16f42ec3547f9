"""Plans for which the compiler decides what fits."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import optax
import pytest

import shardrules as sr
from shardrules.planning.answer.prove import device_mesh

MESH = sr.mesh_shape("data:4,model:2")


def real(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(w: Any, x: Any) -> Any:
    for layer in w:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


def train(state: Any, x: Any) -> Any:
    w, moments = state
    value, slopes = jax.value_and_grad(loss)(w, x)
    updates, moments = optax.adam(1e-3).update(slopes, moments)
    return (optax.apply_updates(w, updates), moments), value


def step_args(rows: int = 4096) -> tuple[Any, Any]:
    w = [{"up": real(256, 1024), "down": real(1024, 256)}] * 2
    return (w, jax.eval_shape(optax.adam(1e-3).init, w)), real(rows, 256)


def proved(limit: float | str | None = None, **options: Any) -> sr.reports.AutoPlan:
    return sr.autoplan(
        train,
        *step_args(),
        mesh=MESH,
        memory_limit=None if limit is None else int(limit) if isinstance(limit, float) else limit,
        hardware=sr.Hardware.named("cpu"),
        prove=True,
        **options,
    )


def peak_of(plan: sr.reports.AutoPlan) -> int:
    with jax.set_mesh(sr.create_mesh("data:4,model:2")):
        usage = plan.jit(train, donate_argnums=0).lower(*step_args()).compile().memory_analysis()
    assert usage is not None
    used = usage.argument_size_in_bytes + usage.output_size_in_bytes + usage.temp_size_in_bytes
    return used - usage.alias_size_in_bytes


def test_the_fastest_plan_is_kept_where_it_fits_once_compiled() -> None:
    free = sr.autoplan(train, *step_args(), mesh=MESH, hardware=sr.Hardware.named("cpu"))
    peak = peak_of(free)
    # The model wants more than the compiler needs: half as much again, as assumed here.
    pessimistic = sr.Assumptions(temporaries=1.1 * 1.5 * peak / free.peak_bytes)
    refused = sr.autoplan(
        train,
        *step_args(),
        mesh=MESH,
        memory_limit=int(1.01 * peak),
        hardware=sr.Hardware.named("cpu"),
        assumptions=pessimistic,
    )
    plan = proved(1.01 * peak, assumptions=pessimistic)
    assert refused.specs != free.specs
    assert plan.specs == free.specs
    (trial,) = plan.compiled
    assert trial.is_chosen
    assert trial.peak_bytes == peak
    assert trial.predicted_bytes > plan.memory_limit
    assert plan.cost == pytest.approx(free.cost)
    assert "may-not-fit" not in [finding.code for finding in plan.findings]


def test_what_is_compiled_corrects_the_model() -> None:
    free = sr.autoplan(train, *step_args(), mesh=MESH, hardware=sr.Hardware.named("cpu"))
    limit = 0.8 * peak_of(free)
    # By this model next to nothing is in memory, so that the fastest plan fits.
    plan = proved(limit, assumptions=sr.Assumptions(temporaries=0.3))
    first, *others = plan.compiled
    assert first.predicted_bytes < limit < first.peak_bytes
    assert not first.is_chosen
    (chosen,) = [trial for trial in others if trial.is_chosen]
    assert peak_of(plan) == chosen.peak_bytes <= limit
    assert plan.task.problem.machine.assumptions.temporaries > 0.3
    text = str(plan)
    assert "(chosen, fits)" in text
    assert "compiled) of" in text
    report = sr.reports.AutoPlanReport.of(plan)
    assert sr.reports.AutoPlanReport.from_json(report.to_json()).compiled == plan.compiled


def test_nothing_that_fits_is_a_finding_with_the_least() -> None:
    smallest = proved("6MiB")
    (finding,) = [finding for finding in smallest.findings if finding.code == "does-not-fit"]
    assert finding.severity == "warning"
    chosen = min(smallest.compiled, key=lambda trial: trial.peak_bytes)
    assert chosen.is_chosen
    assert chosen.peak_bytes > smallest.memory_limit


def test_no_time_is_left_to_compile() -> None:
    plan = proved(time_limit=1e-3)
    assert not plan.compiled
    assert "not-compiled" in [finding.code for finding in plan.findings]


def test_without_a_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrules.analysis.machine.targets.entry_points", lambda **_: ())
    monkeypatch.setattr("shardrules.analysis.machine.targets._topology_devices", lambda target: _raise(target))
    with pytest.raises(sr.errors.MissingCompilerError, match=r"shardrules\[cuda\]"):
        sr.autoplan(train, *step_args(), mesh=MESH, prove=True)


def _raise(target: Any) -> Any:
    from shardrules.analysis.machine.targets import _cuda_topology  # noqa: PLC0415

    return _cuda_topology(target).devices


@pytest.mark.parametrize(("hardware", "cause"), [("tpu:v5e", "v5e slices have several shapes"), ("", "not a ready")])
def test_devices_that_are_not_known_are_an_error(hardware: str, cause: str) -> None:
    sheet = sr.Hardware.named(hardware or "cpu")
    sheet = sheet if hardware else attrs.evolve(sheet, name="our cluster")
    with pytest.raises(sr.errors.ConfigError, match=f"{cause}.*Pass a mesh of a target"):
        device_mesh(MESH, sheet)


def test_meshes_with_devices_are_compiled_for() -> None:
    mesh = sr.create_mesh("data:4,model:2")
    assert device_mesh(mesh, sr.Hardware.named("cuda:h100")) is mesh
