"""Plans that are compiled, the one that is returned, and arrays in the memory of hosts."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.core.errors import CompileError, DoesNotFitError
from shardrules.programs.training.answer.make import proved_plan, training_plan
from shardrules.programs.training.answer.plan import TrainingPlan
from shardrules.programs.training.answer.prove import ProvedPlan, TrainingProof, plans_to_prove, prove_outcome
from shardrules.programs.training.cluster import Cluster
from shardrules.programs.training.search.problem import Outcome, TrainingProblem, plan_once
from shardrules.programs.training.search.search import TrainingSearch
from shardrules.programs.training.step import Recipe
from tests.programs.training.checks import problem_of

LAYERS, WIDTH, ROWS = 8, 1024, 262144


def loss(model: Any, x: Any) -> Any:
    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = (weight.astype(jnp.bfloat16) for weight in weights)
        return x + jnp.tanh(x @ up) @ down, None

    return jnp.mean(jax.lax.scan(layer, x, model)[0].astype(jnp.float32) ** 2)


def problem(
    target: str = "cuda:h100:8", layers: int = LAYERS, width: int = WIDTH, rows: int = ROWS, limit: int | None = None
) -> TrainingProblem:
    shape = jax.ShapeDtypeStruct
    model = shape((layers, width, 4 * width), jnp.float32), shape((layers, 4 * width, width), jnp.float32)
    return problem_of(loss, model, shape((rows, width), jnp.bfloat16), Cluster.of(target), limit=limit)


def test_plans_nearly_as_fast_that_differ_are_compiled_first() -> None:
    def outcome(shape: tuple[int, ...], seconds: float, microbatches: int = 1, host_bytes: int = 0) -> Outcome:
        return Outcome(shape, "", Recipe(microbatches), None, seconds, 0, True, host_bytes=host_bytes)

    best, same = outcome((4, 2), 1.0), outcome((4, 2), 1.001)
    parts, mesh, hosts = outcome((4, 2), 1.01, 2), outcome((8,), 1.02), outcome((4, 2), 1.025, 1, 2**30)
    slow = outcome((2, 4), 1.1)
    outcomes = [best, same, parts, mesh, hosts, slow]
    assert plans_to_prove(outcomes, 3) == [best, parts, mesh]
    assert plans_to_prove(outcomes, 9) == [best, parts, mesh, hosts, same, slow]
    assert plans_to_prove([], 2) == []


def proved_by(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[Outcome], Any], calls: list[Outcome] | None = None
) -> None:
    """Makes the compiler say that plans need this much, or fail with this error."""

    def prove(training: TrainingProblem, outcome: Outcome) -> ProvedPlan:
        if calls is not None:
            calls.append(outcome)
        needed = answer(outcome)
        if isinstance(needed, Exception):
            raise needed
        plan: Any = SimpleNamespace(
            memory=SimpleNamespace(peak_bytes=int(needed)), time=SimpleNamespace(seconds=outcome.seconds)
        )
        return ProvedPlan(
            outcome.mesh, str(outcome.recipe), outcome.seconds, outcome.peak_bytes, plan, training.limit_bytes
        )

    monkeypatch.setattr("shardrules.programs.training.answer.prove.prove_outcome", prove)


def small_search(limit: int | None = None) -> TrainingSearch:
    training = problem("cpu:8", layers=2, width=64, rows=2048, limit=limit)
    search = TrainingSearch(training, None, 1, NO_DEADLINE, lambda text: None)
    search.run()
    return search


@functools.cache
def searched() -> TrainingSearch:
    best = small_search().best
    assert best is not None
    return small_search(int(0.9 * best.peak_bytes))


def tight_search() -> TrainingSearch:
    """A search in which what is fastest does not fit by the model, and something else does."""
    search = searched()
    assert search.best is not None
    return attrs.evolve(
        search, free=dict(search.free), columns=dict(search.columns), outcomes=dict(search.outcomes), beaten={}
    )


def codes(plan: TrainingPlan) -> dict[str, str]:
    return {finding.code: finding.message for finding in plan.report.findings}


def test_the_plan_without_proof_is_compiled_first_and_the_fastest_whatever_the_model_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search, calls = tight_search(), list[Outcome]()
    unproved, limit = search.best, search.problem.limit_bytes
    assert unproved is not None
    proved_by(monkeypatch, lambda outcome: limit, calls)
    plan = proved_plan(search, 1)
    assert calls[0] is unproved
    assert not calls[1].fits
    assert calls[1].seconds < unproved.seconds
    assert plan.step_time.seconds == pytest.approx(calls[1].seconds)
    assert plan.step_time.seconds < unproved.seconds
    assert plan.candidates[0].fits
    assert plan.candidates[0].reason == ""
    assert sum(not candidate.reason for candidate in plan.candidates) == 1
    assert "fits" in codes(plan)["compiled"]


def test_the_plan_without_proof_is_kept_where_nothing_better_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    search = tight_search()
    unproved, limit = search.best, search.problem.limit_bytes
    assert unproved is not None
    proved_by(monkeypatch, lambda outcome: limit if outcome is unproved else 2 * limit)
    plan = proved_plan(search, 3)
    assert plan.step_time.seconds == pytest.approx(unproved.seconds)
    assert plan.report.mesh == unproved.mesh
    assert plan.compiled[0].fits
    assert len(plan.compiled) > 1


def test_what_compilers_fail_at_is_returned_unless_something_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    search = tight_search()
    unproved, limit = search.best, search.problem.limit_bytes
    assert unproved is not None
    failure = CompileError("the compiler fails")
    proved_by(monkeypatch, lambda outcome: failure if outcome is unproved else 2 * limit)
    plan = proved_plan(search, 2)
    assert plan.step_time.seconds == pytest.approx(unproved.seconds)
    assert codes(plan)["not-compiled"].startswith("the compiler failed at this plan, which is modelled to take")
    assert "compiled, and need" in codes(plan)["not-compiled"]
    assert "of which nothing is proved: the compiler fails" in codes(plan)["compiler-failed"]
    assert not any(proof.fits for proof in plan.compiled)
    proved_by(monkeypatch, lambda outcome: failure if outcome is unproved else limit)
    plan = proved_plan(tight_search(), 2)
    assert plan.compiled[0].fits
    assert "compiled" in codes(plan)


def test_a_peak_is_that_of_the_plan_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plan may have the same mesh, and the same recipe in words."""
    search = tight_search()
    unproved, proof = search.best, TrainingProof.of(search.problem)
    assert unproved is not None
    proved_by(monkeypatch, lambda outcome: 2 * search.problem.limit_bytes)
    proof.compilations.add(attrs.evolve(unproved))
    plan = training_plan(search, unproved, proof)
    assert (plan.compiled[0].mesh, plan.compiled[0].recipe) == (unproved.mesh, str(plan.recipe))
    assert plan.peak == plan.planned.peak


def test_a_compiler_that_always_fails_loses_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search = tight_search()
    proved_by(monkeypatch, lambda outcome: CompileError("the compiler fails"))
    plan = proved_plan(search, 2)
    assert plan.compiled == ()
    assert {"not-compiled", "compiler-failed"} <= codes(plan).keys()
    with pytest.raises(CompileError, match="the compiler fails"):
        plan.prove(1)


def test_what_compilers_refuse_for_its_size_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    search = tight_search()
    proved_by(monkeypatch, lambda outcome: DoesNotFitError("too large", 4 * search.problem.limit_bytes))
    plan = proved_plan(search, 1)
    assert "no plan that was compiled fits" in codes(plan)["does-not-fit"]
    assert "compiler-failed" not in codes(plan)
    assert plan.fits == "no"
    assert plan.peak.at_least == 4 * search.problem.limit_bytes


def test_plans_are_compiled_as_long_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    search, calls = tight_search(), list[Outcome]()
    search.deadline = Deadline.after(0)
    proved_by(monkeypatch, lambda outcome: search.problem.limit_bytes, calls)
    plan = proved_plan(search, 3)
    assert len(calls) == 1
    assert "not-all-compiled" in codes(plan)
    assert calls[0].mesh == plan.report.mesh


@pytest.mark.slow
def test_what_is_on_hosts_is_not_on_devices_by_the_compiler() -> None:
    training = problem()
    least, on_host = training.keeps(1)[-2:]
    assert on_host.host_bytes
    assert not least.host_bytes
    recipes = Recipe(keep=least), Recipe(keep=on_host), Recipe(keep=least, host_state=training.host_state(1.0))
    outcomes = [plan_once(training, (8,), recipe, float("inf"), is_free=True) for recipe in recipes]
    proofs = [prove_outcome(training, outcome) for outcome in outcomes]
    for proof in proofs:
        assert proof.seconds == pytest.approx(proof.modelled_seconds, rel=0.25)
    (_, activations, state), (_, offloaded, moved) = outcomes, proofs
    for outcome, proof in ((activations, offloaded), (state, moved)):
        assert saved_bytes(proofs[0], proof) > 0.8 * outcome.host_bytes
        assert saved_bytes(proofs[0], proof) == pytest.approx(modelled_saving(outcomes[0], outcome), rel=0.25)
        assert proof.audit.time.copy_seconds > 0
    assert moved.audit.memory.state_bytes < 1024


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 4])
def test_pairs_of_rounds_are_counted_as_the_compiler_has_them(groups: int) -> None:
    training = problem("cuda:h100:4 maxtext:gpu", layers=16, width=2048, rows=16384)
    recipe = Recipe(2, groups, training.keeps(2)[0])
    outcome = plan_once(training, (4,), recipe, float("inf"), is_free=True)
    proof = prove_outcome(training, outcome)
    assert outcome.peak_bytes - outcome.paired_bytes < proof.peak_bytes <= outcome.peak_bytes


def saved_bytes(before: ProvedPlan, after: ProvedPlan) -> int:
    return before.peak_bytes - after.peak_bytes


def modelled_saving(before: Outcome, after: Outcome) -> int:
    return before.peak_bytes - after.peak_bytes
