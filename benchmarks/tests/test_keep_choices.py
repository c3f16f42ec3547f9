"""The benchmark of what is kept runs on toy models, compiled for a CPU. Its figures are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_compares_choices_with_experts_within_budgets() -> None:
    done = run("keep_choices.py", "--smoke", "--json", "--models", "gpt")
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)
    assert [row["name"] for row in answer["experts"]][:2] == ["no checkpoint", "checkpoint per layer"]
    assert [row["name"] for row in answer["choices"]] == ["choice 0", "choice 1", "choice 2"]
    limits = [budget["limit_bytes"] for budget in answer["budgets"]]
    assert limits == sorted(limits, reverse=True)
    assert all(budget["expert_ms"] > 0 for budget in answer["budgets"])


def test_an_unknown_model_is_refused_with_the_names_of_all() -> None:
    done = run("keep_choices.py", "--smoke", "--models", "unknown")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("gpt", "llama", "mixture", "encoder_decoder", "conv_net"))
