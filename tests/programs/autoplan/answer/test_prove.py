"""Plans for which the compiler decides what fits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.deadline import NO_DEADLINE
from shardrules.core.errors import CompileError
from shardrules.programs.autoplan.answer.compilations import Compilations
from shardrules.programs.autoplan.answer.prove import _Proof
from shardrules.programs.autoplan.query import device_mesh
from shardrules.programs.autoplan.solve.search import Task
from shardrules.programs.autoplan.solve.trials import Trials
from shardrules.programs.compiling.compile import CompilerMemory
from shardrules.programs.machine import targets

MESH = sr.mesh_shape("data:8")
CPU = sr.Hardware.named("cpu")


def real(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = ((real(512, 4096), real(4096, 512)), real(2048, 512))


def train(w: Any, x: Any) -> Any:
    slopes = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2))(w)
    return jax.tree.map(lambda old, slope: old - 0.1 * slope, w, slopes)


def plan_of(limit: float | None = None, **options: Any) -> sr.reports.AutoPlan:
    return sr.autoplan(
        train, *ARGS, mesh=MESH, hardware=CPU, memory_limit=None if limit is None else int(limit), **options
    )


def compiler_peaks(monkeypatch: pytest.MonkeyPatch, peaks: list[float]) -> None:
    """Makes the compiler say that plans need this much, one after the other; the last also for all others."""
    answers = iter(peaks[:-1])
    compile_plans(monkeypatch, lambda: next(answers, peaks[-1]))


def compile_plans(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Any]) -> None:
    """Makes the compiler say that plans need this much, or fail with this error."""

    def compiled_memory(*_: Any) -> CompilerMemory:
        peak = answer()
        if isinstance(peak, Exception):
            raise peak
        return CompilerMemory(0, 0, 0, int(peak))

    monkeypatch.setattr("shardrules.programs.autoplan.answer.prove.compiled_memory", compiled_memory)


def codes(plan: sr.reports.AutoPlan) -> list[str]:
    return [finding.code for finding in plan.findings]


def test_the_fastest_plan_is_kept_where_it_fits_once_compiled() -> None:
    free = plan_of()
    with jax.set_mesh(sr.create_mesh("data:8")):
        usage = free.jit(train, donate_argnums=0).lower(*ARGS).compile().memory_analysis()
    assert usage is not None
    peak = usage.argument_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes
    peak += usage.temp_size_in_bytes
    # By this model the plan takes more than the limit, which it keeps once it is compiled.
    pessimistic = sr.Assumptions(temporaries=1.15)
    assert plan_of(1.05 * peak, assumptions=pessimistic).choice != free.choice
    plan = plan_of(1.05 * peak, assumptions=pessimistic, prove=True)
    fitting, trial = plan.compiled
    assert plan.choice == free.choice
    assert fitting.predicted_bytes <= plan.memory_limit
    assert not fitting.is_chosen
    assert trial.is_chosen
    assert trial.peak_bytes == peak
    assert trial.predicted_bytes > plan.memory_limit
    assert plan.cost == pytest.approx(free.cost)
    assert "may-not-fit" not in codes(plan)


def test_what_is_compiled_corrects_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    free = plan_of()
    limit = free.peak_bytes * 1.05
    compiler_peaks(monkeypatch, [free.peak_bytes * 1.3, free.peak_bytes, free.peak_bytes * 1.3])
    plan = plan_of(limit, prove=True)
    first, *others = plan.compiled
    assert first.predicted_bytes < limit < first.peak_bytes
    assert not first.is_chosen
    (index,) = [index for index, trial in enumerate(others, 2) if trial.is_chosen]
    assert plan.cost > free.cost
    assert plan.task.occupancy.temporaries > 1.1 * plan.task.problem.machine.temporaries
    text = str(plan)
    assert f"{index} (chosen, fits)" in text
    assert plan.peak_bytes == plan.compiled[index - 1].peak_bytes
    assert " as compiled of" in text
    report = sr.reports.AutoPlanReport.of(plan)
    assert report.peak == sr.reports.Peak.point(plan.peak_bytes)
    assert sr.reports.AutoPlanReport.from_json(report.to_json()).compiled == plan.compiled


def test_where_nothing_fits_the_least_is_returned_with_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    free = plan_of()
    compiler_peaks(monkeypatch, [2e9, 1e9, 3e9])
    plan = plan_of(free.peak_bytes, prove=True)
    (message,) = [finding.message for finding in plan.findings if finding.code == "does-not-fit"]
    assert "the 6 need 953.7 MiB, 1.9 GiB, 2.8 GiB, 2.8 GiB, 2.8 GiB, 2.8 GiB; this one needs least" in message
    assert "may-not-fit" not in codes(plan)
    assert [trial.is_chosen for trial in plan.compiled] == [False, True, False, False, False, False]
    assert plan.peak_bytes == int(1e9)
    assert plan.peak_bytes > plan.memory_limit


def test_what_does_not_fit_is_followed_by_what_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free = plan_of()
    limit = free.peak_bytes * 1.01
    # The model is right but for the fastest plan, which it says fits.
    compiler_peaks(monkeypatch, [limit * 1.005, limit * 0.9])
    first, second, *_ = plan_of(limit, prove=True).compiled
    assert first.predicted_bytes <= limit
    assert second.predicted_bytes <= 0.9 * limit
    assert not first.is_chosen


def test_the_last_that_there_is_time_for_leaves_most_room(monkeypatch: pytest.MonkeyPatch) -> None:
    aims: list[float] = []
    search = Task.within

    def within(task: Task, limit: float, *_: Any) -> Any:
        aims.append(limit)
        return search(task, limit)

    monkeypatch.setattr(Task, "within", within)
    free = plan_of()
    compiler_peaks(monkeypatch, [free.peak_bytes * 1.3, free.peak_bytes])
    # As if compiling had taken nearly half of the time.
    monkeypatch.setattr(
        "shardrules.programs.autoplan.answer.compilations.time", SimpleNamespace(monotonic=iter((0, 450) * 9).__next__)
    )
    plan = plan_of(free.peak_bytes, time_limit=800, prove=True)
    assert aims[2] == pytest.approx(0.8 * plan.memory_limit)


@pytest.mark.parametrize("part", [0.9, 0.7])
def test_the_fastest_plan_is_compiled_whatever_the_model_says_of_it(
    monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    free = plan_of()
    limit = part * free.peak_bytes
    compiler_peaks(monkeypatch, [limit])
    plan = plan_of(limit, prove=True)
    assert [trial.is_chosen for trial in plan.compiled] == [False, True]
    assert plan.choice == free.choice
    assert plan.fits
    assert plan.cost < plan_of(limit).cost


def test_the_plan_without_proof_is_compiled_first_and_kept_where_nothing_better_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 0.9 * plan_of().peak_bytes
    plain = plan_of(limit)
    compiler_peaks(monkeypatch, [limit, 2 * limit])
    plan = plan_of(limit, prove=True)
    assert plan.compiled[0].is_chosen
    assert len(plan.compiled) > 1
    assert plan.choice == plain.choice
    assert plan.jit(train).peak_bytes == plain.jit(train).peak_bytes
    assert plan.fits


def test_without_time_for_a_second_the_plan_without_proof_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 0.9 * plan_of().peak_bytes
    monkeypatch.setattr(Compilations, "is_late", property(lambda compilations: len(compilations.peaks) > 0))
    compiler_peaks(monkeypatch, [limit])
    plan = plan_of(limit, prove=True)
    assert plan.choice == plan_of(limit).choice
    assert [trial.is_chosen for trial in plan.compiled] == [True]
    assert "not-all-compiled" in codes(plan)


def test_what_compilers_fail_at_is_returned_unless_something_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 0.98 * plan_of().peak_bytes
    answers = iter([CompileError("the compiler fails: INTERNAL"), 2 * limit])
    compile_plans(monkeypatch, lambda: next(answers, 3 * limit))
    plan = plan_of(limit, prove=True)
    assert plan.choice == plan_of(limit).choice
    assert not plan.is_compiled
    assert not any(trial.is_chosen for trial in plan.compiled)
    assert "as compiled of" not in str(plan)
    by_code = {finding.code: finding for finding in plan.findings}
    assert by_code["not-compiled"].message.startswith("the compiler failed at this plan, which is modelled to take")
    assert "others were compiled, and need " in by_code["not-compiled"].message
    assert "at 1 of 6 plans, of which nothing is proved: the compiler fails: INT" in by_code["compiler-failed"].message
    assert "does-not-fit" not in by_code


def test_what_is_proved_comes_before_what_compilers_fail_at(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 0.9 * plan_of().peak_bytes
    answers = iter([ZeroDivisionError("a kernel of another device\nand more")])
    compile_plans(monkeypatch, lambda: next(answers, limit))
    plan = plan_of(limit, prove=True)
    assert [trial.is_chosen for trial in plan.compiled] == [True]
    assert plan.choice == plan_of().choice
    (finding,) = [finding for finding in plan.findings if finding.code == "compiler-failed"]
    assert finding.message.endswith("ZeroDivisionError: a kernel of another device")


def test_a_compiler_that_always_fails_loses_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 0.9 * plan_of().peak_bytes
    compile_plans(monkeypatch, lambda: CompileError("the compiler fails"))
    plan, plain = plan_of(limit, prove=True), plan_of(limit)
    assert (plan.choice, plan.compiled, plan.peak_bytes) == (plain.choice, (), plain.peak_bytes)
    assert {"not-compiled", "compiler-failed"} <= set(codes(plan))


def test_flags_that_compilers_need_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CompilerMemory(0, 0, 0, 1, flag="xla_flag=false")
    monkeypatch.setattr("shardrules.programs.autoplan.answer.prove.compiled_memory", lambda *_: memory)
    (finding,) = [finding for finding in plan_of(prove=True).findings if finding.code == "compiled-with-flag"]
    assert "the compiler fails at 1 of 1 plans without --xla_flag=false" in finding.message


def test_others_are_compiled_where_a_factor_rules_out_all(monkeypatch: pytest.MonkeyPatch) -> None:
    free = plan_of()
    limit = free.peak_bytes
    met = attrs.evolve(free.result, candidates=free.result.patterns, patterns=())
    monkeypatch.setattr(Task, "within", lambda *_, **__: met)
    # All others are modelled to take more than the fastest, which by the compiler takes more than the limit.
    compiler_peaks(monkeypatch, [3 * limit, 2 * limit, 0.99 * limit])
    plan = plan_of(limit, prove=True)
    assert [trial.is_chosen for trial in plan.compiled] == [False, False, True]
    assert "does-not-fit" not in codes(plan)


def test_faster_plans_follow_that_only_the_factor_of_another_rules_out() -> None:
    free = plan_of()
    trials = {trial.origin: trial for trial in free.result.patterns}
    faster, slow = trials["data parallel, ZeRO-3"], trials["sequence parallel, ZeRO-3"]
    plan = plan_of(1.1 * slow.peak_bytes)
    limit = plan.memory_limit
    proof = _Proof.of(plan, train, sr.create_mesh("data:8"), NO_DEADLINE)
    for trial, nbytes in ((free.choice, 9 * limit), (slow.choice, limit)):
        proof.compilations.plans[trial] = attrs.evolve(plan, result=plan.task.with_choice(plan.result, trial))
        proof.compilations.peaks[trial] = nbytes
    proof.choices = dict.fromkeys([free.choice, slow.choice, faster.choice])
    corrected = proof.corrected(plan.task, free.choice)
    assert corrected.occupancy.peak(faster.choice) > limit
    assert proof.next_choice(corrected) == faster.choice
    # What hardly gains anything is not compiled.
    faster_plan = attrs.evolve(plan, result=plan.task.with_choice(plan.result, faster.choice))
    proof.compilations.plans[faster.choice], proof.compilations.peaks[faster.choice] = faster_plan, limit
    proof.choices |= dict.fromkeys([trials["data parallel, ZeRO-1"].choice])
    assert proof.next_choice(corrected) is None


def test_a_proof_that_time_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    free = plan_of()
    limit = free.peak_bytes * 1.05
    monkeypatch.setattr(Compilations, "is_late", property(lambda compilations: len(compilations.peaks) > 1))
    compiler_peaks(monkeypatch, [free.peak_bytes * 1.3, free.peak_bytes / 2])
    plan = plan_of(limit, prove=True)
    assert [trial.is_chosen for trial in plan.compiled] == [False, True]
    (finding,) = [finding for finding in plan.findings if finding.code == "not-all-compiled"]
    assert finding.message == "the time limit was reached when 2 plans were compiled; another may be faster"


def test_no_time_is_left_to_compile() -> None:
    plan = plan_of(time_limit=1e-3, prove=True)
    assert not plan.compiled
    assert "not-compiled" in codes(plan)
    assert plan.fits
    assert "may-not-fit" not in codes(plan)


def test_what_is_not_compiled_may_not_fit_either() -> None:
    free = plan_of()
    plan = plan_of(free.peak_bytes / 2, time_limit=1e-3, prove=True)
    assert not plan.compiled
    assert {"not-compiled", "may-not-fit"} <= set(codes(plan))
    # What experts would write is known without any time; everything on every device takes more.
    assert plan.peak_bytes < Trials(free.task.occupancy, 0).add((0,) * len(free.choice)).peak_bytes / 2


def test_plans_are_compiled_before_pins_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    search = Task.within

    def within(task: Task, *args: Any) -> Any:
        events.append("search")
        return search(task, *args)

    def compiled_memory(*_: Any) -> CompilerMemory:
        events.append("compile")
        return CompilerMemory(0, 0, 0, 1)

    monkeypatch.setattr(Task, "within", within)
    monkeypatch.setattr("shardrules.programs.autoplan.answer.prove.compiled_memory", compiled_memory)
    plan_of(prove=True, pins=sr.SpecTreeShardingRule(((None, None), P("data"))))
    assert events == ["search", "compile", "search"]


def test_without_a_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "entry_points", lambda **_: ())
    monkeypatch.setattr(targets, "_topology_devices", targets._topology_devices.__wrapped__)
    with pytest.raises(sr.errors.MissingCompilerError, match=r"shardrules\[cuda\]"):
        sr.autoplan(train, *ARGS, mesh=MESH, prove=True)


@pytest.mark.parametrize(("hardware", "cause"), [("tpu:v5e", "v5e slices have several shapes"), ("", "not a ready")])
def test_devices_that_are_not_known_are_an_error(hardware: str, cause: str) -> None:
    sheet = sr.Hardware.named(hardware or "cpu")
    sheet = sheet if hardware else attrs.evolve(sheet, name="our cluster")
    with pytest.raises(sr.errors.ConfigError, match=f"{cause}.*Pass a mesh of a target"):
        device_mesh(MESH, sheet)


def test_meshes_with_devices_are_compiled_for() -> None:
    mesh = sr.create_mesh("data:8")
    assert device_mesh(mesh, sr.Hardware.named("cuda:h100")) is mesh
