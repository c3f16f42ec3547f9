"""The scripts in docs/examples run as a user starts them, without a warning, and do what the pages say they do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import REPOSITORY
from tests.house.startup import beyond_startup

EXAMPLES = REPOSITORY / "docs" / "examples"

OWN_TO_TESTS = ("XLA_FLAGS", "JAX_PLATFORMS")
"""What the tests set for themselves: an example has to see to its devices alone."""

ON_CPU = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
"""How JAX starts on CPU devices where the environment does not ask for them."""

SENT_BY_KERNELS = {"attention": set(), "cross_entropy": {"all-reduce"}, "ffi_call": set(), "matmul": {"all-reduce"}}


def printed(script: str, *arguments: str, start: str, folder: Path, **variables: str) -> str:
    """Runs an example in a process of its own, and returns what it printed; to stderr it adds nothing to `start`."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN_TO_TESTS}
    environment |= {"PYTHONPATH": str(REPOSITORY), **variables}
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert (run.returncode, beyond_startup(run.stderr, start, environment)[-4000:]) == (0, "")
    assert list(folder.iterdir()) == []
    return run.stdout


def test_every_example_is_run_here() -> None:
    # Llama 405B is planned in tests/cli.
    scripts = ["first_plan.py", "llama_405b.py", "load_llama.py", "plan_llama.py", "train_gpt.py", "train_nnx.py"]
    scripts += ["train_planned_gpt.py", *(f"declared_{kernel}.py" for kernel in SENT_BY_KERNELS)]
    assert sorted(script.name for script in EXAMPLES.glob("*.py")) == sorted(scripts)


def test_readme_shows_the_first_plan(tmp_path: Path) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert (EXAMPLES / "first_plan.py").read_text() in readme
    output = printed("first_plan.py", start="import jax; jax.devices()", folder=tmp_path, JAX_PLATFORMS="cpu")
    assert "\n".join(line.rstrip() for line in output.splitlines()) in readme


@pytest.mark.slow
def test_plan_llama_stacked_or_not_takes_the_same_memory(tmp_path: Path) -> None:
    lines = printed("plan_llama.py", start="import jax", folder=tmp_path).splitlines()
    assert lines[-1].startswith("unrolled: 291 arrays, ")
    assert lines[-1].endswith(": the same")


@pytest.mark.slow
def test_load_llama_gives_the_logits_of_one_device(tmp_path: Path) -> None:
    text = printed("load_llama.py", start=ON_CPU, folder=tmp_path)
    assert re.search(r"^layers/\*/mlp/up_proj/weight  x4 .* P\('model', 'data'\) ", text, re.MULTILINE)
    lines = text.splitlines()
    for line, shape in (
        (lines[-2], r"\(160, 64\) as P\('model', 'data'\)"),
        (lines[-1], r"\(4, 160, 64\) as P\(None, "),
    ):
        match = re.fullmatch(rf"split.*: up_proj {shape}.*, logits differ by at most (.*)", line)
        assert match is not None
        assert float(match[1]) < 1e-5


@pytest.mark.slow
def test_train_planned_gpt_learns(tmp_path: Path) -> None:
    text = printed("train_planned_gpt.py", "--smoke", start=ON_CPU, folder=tmp_path)
    assert text.startswith("loss_of on 8 cpu devices: ")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)$", text, re.MULTILINE)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_train_gpt_learns_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    text = printed("train_gpt.py", "--smoke", start=ON_CPU, folder=tmp_path)
    plan, training = text.split("\nlearning ")
    assert re.search(r"^blocks/\*/down/weight  x3 .* P\('data', 'model'\) ", plan, re.MULTILINE)

    lines = re.findall(r"^(\w+) +held-out loss ([\d.]+); .*: (\(.*\) on \d devices) and (.*)$", training, re.MULTILINE)
    assert lines[:4] == lines[4:]  # printed during training, and again at the end
    assert [when for when, *_ in lines[:4]] == ["untrained", "saved", "restored", "trained"]
    assert [weight for *_, weight, _ in lines[:4]] == ["(256, 32) on 8 devices"] * 2 + ["(256, 64) on 4 devices"] * 2
    assert all(weight == moment for *_, weight, moment in lines)
    untrained, saved, restored, trained = [float(loss) for _, loss, *_ in lines[:4]]
    assert 4.5 < untrained < 5.5
    assert saved < untrained - 1
    assert abs(restored - saved) < 0.01
    assert trained < restored

    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step +(\d+)/.* loss ([\d.]+),", training)]
    assert [step for step, _ in steps] == [*range(2, 21, 2), *range(21, 31)]
    assert max(loss for step, loss in steps if step > 20) < untrained - 1  # it did not start again
    assert "\r" not in text
    assert "\nReturn a new " in training


@pytest.mark.slow
def test_train_nnx_learns_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    text = printed("train_nnx.py", "--steps", "45", start=ON_CPU, folder=tmp_path)
    assert re.search(r"^blocks/\*/up/kernel  x2 .* P\('data', 'model'\) ", text, re.MULTILINE)
    reports = re.findall(r"^(.*): blocks/0/up/kernel is (.*) devices, its moment (.*)$", text, re.MULTILINE)
    assert [shards for _, shards, _ in reports] == ["(256, 128) on 8", "(512, 128) on 4", "(512, 128) on 4"]
    assert all(shards == moment for _, shards, moment in reports)
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step +(\d+)/.* loss ([\d.]+)", text)]
    assert [step for step, _ in steps] == [10, 20, 30, 40]
    losses = [loss for _, loss in steps]
    assert losses == sorted(losses, reverse=True)  # it did not start again
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SENT_BY_KERNELS)
def test_declared_kernels_gather_nothing(kernel: str, tmp_path: Path) -> None:
    sent, differs = printed(f"declared_{kernel}.py", start=ON_CPU, folder=tmp_path).splitlines()
    assert set(re.findall(r"\('([a-z-]+)', \(", sent)) == SENT_BY_KERNELS[kernel]
    assert float(differs.removeprefix("differs by: ")) < 1e-4
