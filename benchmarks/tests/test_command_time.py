"""The benchmark of the command line runs. Its times are not checked here."""

import json

from benchmarks.tests.smoke import run


def test_smoke_run_times_a_command_and_the_floor() -> None:
    done = run("command_time.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    floor, plan = json.loads(done.stdout)["rows"]
    assert (floor["name"], floor["over_floor"]) == ("import jax", 1)
    assert plan["seconds"] > 0
