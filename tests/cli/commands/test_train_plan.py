"""`shardrules train-plan`: from a loss to a plan in a file."""

from pathlib import Path

import jax
import optax
import pytest

import shardrules as sr
from shardrules.cli.errors import UsageError
from shardrules.cli.main import main
from shardrules.cli.objects import load_shapes

CODE = """
import jax
import jax.numpy as jnp


def make(width: int = 16):
    return {"up": jnp.ones((width, 64)), "down": jnp.ones((64, width))}


def batch():
    return jnp.ones((64, 16))


def loss(model, x):
    return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"] - x) ** 2)


def wrong(model, x):
    raise KeyError("no such layer")
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    file = tmp_path / "small_train.py"
    file.write_text(CODE)
    return str(file)


def run(code: str, loss: str, *more: str) -> int:
    words = ["train-plan", f"{code}:{loss}", "--model", f"{code}:make", "--cluster", "cuda:h100:2", *more]
    return main(words)


def test_a_plan_is_written_as_rules(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan_file = tmp_path / "rules.toml", tmp_path / "train.json"
    words = ("--batch", "float32[64,16]", "-o", str(plan_file), "--rules-out", str(file))
    assert run(code, "loss", *words) == 0
    rules = sr.load_rules(file)
    assert rules.optimizer == "adamw"
    assert rules.mesh is not None
    report = sr.reports.TrainingPlanReport.from_json(plan_file.read_text())
    model, batch = load_shapes(f"{code}:make"), load_shapes("float32[64,16]")
    state = jax.eval_shape(optax.adamw(1e-3).init, model)
    again = rules.rules.plan((model, state, batch), rules.mesh)
    for path in report.plan.paths:
        if not path.startswith("2"):
            decided = again.decision(path).applied_spec
            assert sr.specs.same(decided, report.plan.decision(path).applied_spec), path
    alone = rules.rules.plan(model, rules.mesh)
    assert all(
        sr.specs.same(alone.decision(path).applied_spec, again.decision(f"0/{path}").applied_spec) for path in model
    )
    assert "next best: " in file.read_text()
    capsys.readouterr()
    # A file that exists is replaced only on request, and before a search it is said.
    written = file.read_text()
    assert run(code, "loss", *words) == 2
    assert "rules.toml exists: --force replaces what is there" in capsys.readouterr().err
    assert run(code, "loss", "--batch", "float32[64,16]", "--rules-out", str(tmp_path / "rules.json")) == 2
    assert "rules.json: rules are read from .toml files; name one" in capsys.readouterr().err
    one = str(tmp_path / "one.toml")
    assert run(code, "loss", "--batch", "float32[64,16]", "--rules-out", one, "-o", one) == 2
    assert "one.toml: name two" in capsys.readouterr().err
    file.write_text("")
    assert run(code, "loss", *words, "--force") == 0
    assert file.read_text() == written


def test_a_plan_is_written_and_shown(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.json"
    assert run(code, "loss", "--batch", "float32[64,16]", "-o", str(file)) == 0
    shown = capsys.readouterr()
    report = sr.reports.TrainingPlanReport.from_json(file.read_text())
    assert shown.out == f"{report}\n"
    assert shown.err.startswith("1 plans; data:2, whole batch")
    # A page has the plan's figures and all candidates.
    words = ["report", f"{code}:make", "--rules", "replicate()", "--mesh", "data:2", "--train-plan", str(file)]
    assert main([*words, "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert '"cluster":"cuda:h100:2"' in page
    assert report.candidates[-1].keep in page


def test_batches_may_be_functions(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--microbatches", "2", "--accumulate-dtype", "bfloat16", "--format", "json"]
    assert run(code, "loss", "--batch", f"{code}:batch", *words) == 0
    report = sr.reports.TrainingPlanReport.from_json(capsys.readouterr().out)
    assert (report.examples, report.gradient_dtype) == (64, "bfloat16")


@pytest.mark.parametrize(
    ("loss", "more", "message"),
    [
        ("wrong", (), "the loss raised KeyError: 'no such layer'"),
        ("loss", ("--optimizer", "adamm"), "unknown optimizer 'adamm' (did you mean 'adam'?)"),
        ("loss", ("--time-limit", "0"), "--time-limit must be"),
        ("loss", ("--microbatches", "0"), "must be positive"),
        ("loss", ("--accumulate-dtype", "float"), "accumulate_dtype"),
        ("loss", ("--example-dims", "first"), "--example-dims must be an integer, or JSON like the batch, got 'first'"),
        ("loss", ("--example-dims", "2"), "float32[64, 16] has no dim 2"),
        ("loss", ("--example-dims", "[0,1]", "--batch", "float32[64,16],float32[]"), "1 float32[] has no dim 1"),
        ("loss", ("--memory-limit", "1KiB"), "does not fit in 1.0 KiB on cuda:h100:2"),
    ],
)
def test_mistakes_are_one_line(
    code: str, loss: str, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(code, loss, "--batch", "float32[64,16]", *more) in (1, 2)
    error = capsys.readouterr().err
    assert message in error


def test_shapes_are_read_from_text() -> None:
    assert load_shapes("int32[8, 16]") == jax.ShapeDtypeStruct((8, 16), "int32")
    assert [leaf.shape for leaf in load_shapes("bfloat16[8],float32[]")] == [(8,), ()]
    for text in ("int32[8", "integer[8]", "int32[8] float32[8]"):
        with pytest.raises(UsageError, match="dtype and shape"):
            load_shapes(text)
