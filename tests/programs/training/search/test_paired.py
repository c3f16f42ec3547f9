"""Memory of loops over microbatches whose rounds run in pairs."""

import attrs
import pytest

from shardrules.programs.training.search.paired import pairs_rounds
from shardrules.programs.training.search.problem import Outcome, plan_once
from shardrules.programs.training.step import Recipe
from tests.programs.training.search.test_search import problem_on

FLAG = "--xla_gpu_enable_while_loop_double_buffering"
GRADIENT_BYTES = 2 * 4 * 64 * 256 * 4
"""Of the model of `problem_on`."""


def planned(cluster: str, recipe: Recipe, limit: float | None = None) -> Outcome:
    problem = problem_on(cluster)
    recipe = attrs.evolve(recipe, keep=problem.keeps(recipe.microbatches)[0])
    return plan_once(problem, (2,), recipe, float("inf") if limit is None else limit, is_free=limit is None)


@pytest.mark.parametrize("recipe", [Recipe(2), Recipe(4), Recipe(2, 2)], ids=["two", "four", "reduced once"])
def test_gradients_of_microbatches_count_again_in_pairs_of_rounds(recipe: Recipe) -> None:
    plain, paired = (planned(cluster, recipe) for cluster in ("cuda:h100:2", f"cuda:h100:2 {FLAG}=true"))
    more = paired.peak_bytes - plain.peak_bytes
    assert more == paired.paired_bytes
    assert 2 * GRADIENT_BYTES <= more <= 4 * GRADIENT_BYTES + 64  # split over the two devices, or whole on each
    assert paired.seconds == plain.seconds


@pytest.mark.slow
def test_limits_leave_room_for_pairs_of_rounds() -> None:
    cluster = f"cuda:h100:2 {FLAG}=true"
    free = planned(cluster, Recipe(2))
    assert planned(cluster, Recipe(2), free.peak_bytes + 2**16).fits
    # Without pairs, this limit would leave room for the same plan.
    tight = planned(cluster, Recipe(2), free.peak_bytes - free.paired_bytes // 2)
    assert not tight.fits or tight.peak_bytes < free.peak_bytes - free.paired_bytes // 2


@pytest.mark.parametrize("flags", ["", f" {FLAG}=false", " maxtext:gpu"])
def test_flags_of_the_target_say_what_runs_in_pairs(flags: str) -> None:
    cluster = problem_on(f"cuda:h100:2{flags}").cluster
    assert pairs_rounds(cluster, Recipe(2)) is (flags == " maxtext:gpu")
    assert not pairs_rounds(cluster, Recipe(1))
