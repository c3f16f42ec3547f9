"""The benchmark of steps on a device runs on a toy. Its times are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_compares_steps_with_their_profiles() -> None:
    done = run("device_step_time.py", "--smoke", "--json", "--calibrate", "2", "--compare", "conv_net")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [row["name"] for row in figures["rows"]] == ["conv_net", "sorted_experts"]
    assert all(row["measured"] > 0 and row["modelled"] > 0 and row["matched"] > 0.9 for row in figures["rows"])
    # The nominal sheet of a CPU has little in common with what is measured.
    assert all(row["calibrated"] > 0 and row["calibrated"] != row["modelled"] for row in figures["rows"])
    assert figures["own"] > 0
    assert "measured" in done.stderr


def test_unknown_models_are_named() -> None:
    done = run("device_step_time.py", "--smoke", "--models", "gpt9")
    assert done.returncode == 2
    assert "no model gpt9; the models are gpt2, llama" in done.stderr
