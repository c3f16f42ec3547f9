"""Each command as a process: output, files, exit code, and that no backend of JAX starts."""

import html
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import shardrules as sr
from benchmarks.headers import MIXTURE_RULES, experts, write_headers
from shardrules.cli.registry import COMMANDS, load_command
from shardrules.cli.terminal import failing
from shardrules.core.spec import spec_repr
from shardrules.rules.files.rules_file import Limits
from tests.cli.command import EXAMPLES, GPT, GPT_RULES, NO_BACKEND, shardrules
from tests.house.source import REPOSITORY

GOLDEN = Path(__file__).parent / "golden"
ON_EIGHT = ("--rules", GPT_RULES, "--mesh", "data:4,model:2")
LLAMA = (f"{EXAMPLES}/llama_405b.py:shapes", "--rules", f"{EXAMPLES}/llama_405b.toml")


def golden(name: str, text: str) -> None:
    """Compares a text with a golden file; SHARDRULES_UPDATE=1 writes it."""
    file = GOLDEN / f"{name}.txt"
    if "SHARDRULES_UPDATE" in os.environ:
        file.write_text(text)
    assert text == file.read_text(), f"SHARDRULES_UPDATE=1 pytest {__file__} accepts it"


ATTENTION = {"q_a_proj": [1536, 7168], "q_b_proj": [24576, 1536], "kv_b_proj": [32768, 512], "o_proj": [7168, 16384]}


def mixture(layers: int, count: int) -> dict[str, tuple[str, list[int]]]:
    tensors: dict[str, tuple[str, list[int]]] = {"model.embed_tokens.weight": ("BF16", [129280, 7168])}
    for layer in range(layers):
        for name, shape in ATTENTION.items():
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = ("BF16", shape)
        tensors |= experts(layer, count)
    return tensors


@pytest.fixture(scope="module")
def large_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "rules.toml").write_text(MIXTURE_RULES)
    return write_headers(folder, mixture(58, 258), 163)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "saved"
    layers = [{"up": jnp.ones((64, 32)), "down": jnp.ones((32, 64), jnp.bfloat16)} for _ in range(12)]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {"params": {"layers": layers, "embed": jnp.ones((128, 32))}, "step": 7})
    return folder


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two plans of the GPT as JSON."""
    folder = tmp_path_factory.mktemp("plans")
    before, after = folder / "before.json", folder / "after.json"
    other = "shard_dim('model', -1, ignore_ndim_error=True)"
    assert shardrules("plan", GPT, *ON_EIGHT, "-o", str(before)).returncode == 0
    assert shardrules("plan", GPT, "--rules", other, "--mesh", "data:4,model:2", "-o", str(after)).returncode == 0
    return before, after


def fine(*words: str, code: int = 0, starts_backend: bool = False, cwd: Path | None = None) -> str:
    """The output of a command that ends with `code` and prints nothing to stderr."""
    process = shardrules(*words, cwd=cwd, env={} if starts_backend else NO_BACKEND)
    assert (process.returncode, process.stderr) == (code, ""), process.stdout
    return process.stdout


def test_plan_of_the_example() -> None:
    golden("plan-gpt", fine("plan", GPT, *ON_EIGHT, "--optimizer", "adamw"))


@pytest.mark.slow
def test_plan_of_405_billion_parameters() -> None:
    golden("plan-llama", fine("plan", *LLAMA))


@pytest.mark.slow
def test_plan_of_a_large_index(large_index: Path) -> None:
    words = ("plan", str(large_index), "--rules", str(large_index.parent / "rules.toml"), "--mesh", "data:32,model:16")
    text = fine(*words)
    golden("plan-index", text)
    assert "45,125 arrays" in text


@pytest.mark.slow
def test_plan_of_an_orbax_checkpoint(checkpoint: Path) -> None:
    rules = "shard_dim('model', 0, ignore_ndim_error=True)"
    text = fine("plan", str(checkpoint), "--rules", rules, "--mesh", "data:4,model:2")
    golden("plan-orbax", text)
    golden(
        "explain-orbax",
        fine("explain", str(checkpoint), "layers/3/up", "--rules", rules, "--mesh", "data:4,model:2"),
    )


@pytest.mark.slow
def test_explain(large_index: Path) -> None:
    golden("explain-gpt", fine("explain", GPT, "blocks/0/up/weight", *ON_EIGHT))
    golden("explain-llama", fine("explain", LLAMA[0], "layers/7/mlp/down", *LLAMA[1:]))
    rules = ("--rules", str(large_index.parent / "rules.toml"), "--mesh", "data:32,model:16")
    golden("explain-index", fine("explain", str(large_index), "experts/7/up", *rules))
    state = fine("explain", GPT, "optimizer/0/mu/head/weight", *ON_EIGHT, "--optimizer", "adamw")
    assert "mirrors" in state


@pytest.mark.slow
def test_check_passes_and_fails(plans: tuple[Path, Path], large_index: Path, checkpoint: Path) -> None:
    before, after = plans
    text = fine("check", GPT, *ON_EIGHT, "--golden", str(before), "--budget", "1 MiB", "--optimizer", "adamw")
    golden("check-gpt", text)
    over = fine("check", *LLAMA, "--budget", "512 MiB", code=1)
    golden("check-llama", over)
    changed = fine("check", GPT, *ON_EIGHT, "--golden", str(after), code=1)
    golden("check-changed", changed.replace(str(after.parent), ""))
    rules = ("--rules", str(large_index.parent / "rules.toml"), "--mesh", "data:32,model:16")
    golden("check-index", fine("check", str(large_index), *rules))
    few = ("--rules", "replicate", "--mesh", "data:4,model:2")
    golden("check-orbax", fine("check", str(checkpoint), *few, code=1))
    assert "unused-axis" not in fine("check", str(checkpoint), *few, "--level", "error")


@pytest.mark.slow
def test_check_as_json_and_for_github(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def make():\n    return {'w': jnp.ones((6, 8)), 'layers': [jnp.ones((10, 3)) for _ in range(3)]}\n"
    )
    (tmp_path / "rules.toml").write_text('[[rules]]\npath = "."\nspec = ["data"]\n')
    words = ("check", "model.py:make", "--rules", "rules.toml", "--mesh", "data:4", "--format")
    lines = fine(*words, "github", code=1, cwd=tmp_path).splitlines()
    assert lines[0].startswith("::error file=rules.toml,title=indivisible::error indivisible: ")
    assert any("layers/* (10, 3) x3" in line for line in lines)
    assert all(line.startswith("::error ") for line in lines[:-1])
    data = json.loads(fine(*words, "json", code=1, cwd=tmp_path))
    assert {finding["code"] for finding in data["findings"]} == {"indivisible"}
    assert data["arrays"] == 4
    assert data["total_bytes"] == 4 * (48 + 90)


@pytest.mark.slow
def test_check_takes_what_the_rules_file_says(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import jax.numpy as jnp\ndef make():\n    return {'w': jnp.ones((8, 64))}\n")
    text = 'mesh = "data:4"\noptimizer = "adam"\nrule = "auto"\n[limits]\nbudget = "{}"\ngolden = "golden.json"\n'
    (tmp_path / "rules.toml").write_text(text.format("1GiB"))
    words = ("check", "model.py:make", "--rules", "rules.toml")
    assert "with adam" in fine(*words, "--update", cwd=tmp_path)
    assert sr.ShardingPlan.from_json((tmp_path / "golden.json").read_text()).paths
    (tmp_path / "rules.toml").write_text(text.format("1B").replace('"auto"', '"replicate"'))
    process = shardrules(*words, cwd=tmp_path)
    assert process.returncode == 1
    assert "model and adam together take" in process.stdout
    assert "error changed: " in process.stdout
    assert shardrules(*words, "--budget", "1GiB", "--level", "error", cwd=tmp_path).stdout.count("over-budget") == 0


@pytest.mark.slow
def test_diff(plans: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = map(str, plans)
    text = fine("diff", before, after)
    golden("diff-gpt", text)
    assert fine("diff", before, before, "--exit-code") == "no difference\n"
    assert fine("diff", before, after, "--exit-code", code=1) == text
    other = tmp_path / "other.json"
    fine("plan", before, "--rules", "fsdp('data')", "--mesh", "data:8", "-o", str(other))
    assert "to move from the old plan to the new, devices receive" in fine("diff", before, str(other))


@pytest.mark.slow
def test_diff_writes_a_page(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import numpy as np\ndef make():\n    return {'w': np.ones((8, 8))}\n")
    for name, rule in (("a", "replicate"), ("b", "shard_dim('data', 0)")):
        words = ("plan", "model.py:make", "--rules", rule, "--mesh", "data:4", "-o", f"{name}.json")
        fine(*words, cwd=tmp_path)
    text = fine("diff", "a.json", "b.json", cwd=tmp_path)
    for words, file in ((("--html",), "diff.html"), (("--exit-code", "--html", "my page.html"), "my page.html")):
        code = int("--exit-code" in words)
        shown = fine("diff", "a.json", "b.json", *words, cwd=tmp_path, code=code)
        assert shown == f"{text}{file}: the page of this difference\n"
        page = (tmp_path / file).read_text()
        assert "<h1>a.json → b.json</h1>" in page
        assert html.escape(shlex.join(["shardrules", "diff", "a.json", "b.json", *words])) in page
    before = (tmp_path / "a.json").read_text()
    process = shardrules("diff", "--html", "a.json", "b.json", cwd=tmp_path, env=NO_BACKEND)
    assert (process.returncode, (tmp_path / "a.json").read_text()) == (2, before)
    assert "a page ends in .html, 'a.json' does not; write OLD NEW --html" in process.stderr


def test_output_of_user_code_goes_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import jax.numpy as jnp\nprint('loading')\n"
        "def make():\n    print('making')\n    return {'w': jnp.ones((8, 8))}\n"
    )
    words = ("--rules", "fsdp('data', 0)", "--mesh", "data:4", "--format", "json")
    process = shardrules("check", "model.py:make", *words, cwd=tmp_path, env=NO_BACKEND)
    assert json.loads(process.stdout)["arrays"] == 1
    assert process.stderr == "loading\nmaking\n"


@pytest.mark.slow
def test_callable_models_keys_and_odd_paths(tmp_path: Path) -> None:
    folder = tmp_path / "my models (1), @home"
    folder.mkdir()
    (folder / "a b.py").write_text(
        "import equinox as eqx, jax, jax.numpy as jnp\n"
        "MODEL = eqx.nn.Linear(4, 4, key=jax.random.key(0))\n"
        "def only(key, /):\n    return jax.random.normal(key, (4, 4))\n"
        "def maybe(width, key=None):\n    return jax.random.normal(key, (width, 4))\n"
    )
    for name in ("MODEL", "only", "maybe(4)"):
        words = ("plan", f"{folder}/a b.py:{name}", "--rules", "replicate", "--mesh", "data:4")
        text = fine(*words, starts_backend=True, cwd=tmp_path)
        assert "(4, 4)" in text


def test_names_that_differ_in_a_dot_stay_apart(tmp_path: Path) -> None:
    write_headers(tmp_path, {"a.b": ("F32", [4]), "a/b": ("F32", [8])}, 1)
    text = fine("plan", str(tmp_path), "--rules", "replicate", "--mesh", "data:1")
    assert "2 arrays, 48 B in all" in text


@pytest.mark.slow
def test_devices_are_not_replaced(tmp_path: Path) -> None:
    fine("plan", GPT, *ON_EIGHT, "-o", "/dev/null")
    assert not Path("/dev/null").is_file()


def test_the_page_has_the_rules_and_the_command(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import numpy as np\ndef make():\n    return {'w': np.ones((8, 8))}\n")
    (tmp_path / "my rules.toml").write_text("# </script>\n[[rules]]\nrule = \"fsdp('data', 0)\"\n")
    words = ("report", "model.py:make", "--rules", "my rules.toml", "--mesh", "data:4")
    fine(*words, cwd=tmp_path)
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])
    assert data["command"] == "shardrules report model.py:make --rules 'my rules.toml' --mesh data:4"
    assert data["rules"] == "# </script>\n[[rules]]\nrule = \"fsdp('data', 0)\""


@pytest.mark.slow
def test_report_of_each_subject(plans: tuple[Path, Path], large_index: Path, checkpoint: Path, tmp_path: Path) -> None:
    rules = ("--rules", str(large_index.parent / "rules.toml"), "--mesh", "data:32,model:16")
    small = ("--rules", "shard_dim('model', 0, ignore_ndim_error=True)", "--mesh", "data:4,model:2")
    for words, summary in (
        ((str(plans[0]),), "41 arrays"),
        (LLAMA, "1,137 arrays"),
        ((str(large_index), *rules), "45,125 arrays"),
        ((str(checkpoint), *small), "26 arrays"),
    ):
        text = fine("report", *words, "-o", "page.html", cwd=tmp_path)
        assert text.startswith(f"page.html: {summary}")
        page = (tmp_path / "page.html").read_text()
        data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])
        assert data["totals"]["arrays"] == len(data["paths"]) == int(summary.split()[0].replace(",", ""))


@pytest.mark.slow
def test_autoplans_are_rules_for_their_step(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def make():\n"
        "    def step(w, x):\n        return jax.tree.map(lambda a: a - 1, w), jnp.mean((x @ w['up']) @ w['down'])\n"
        "    return step, {'up': jnp.ones((64, 256)), 'down': jnp.ones((256, 64))}, jnp.ones((512, 64))\n"
    )
    words = ("steps.py:make", "--mesh", "data:4,model:2")
    # On a GPU so little is computed that devices may repeat it, which the audit finds.
    planned = (*words, "--hardware", "cpu")
    text = fine(
        *("autoplan", *planned, "--frontier", "2", "-o", "auto.json", "--rules-out", "rules.toml"), cwd=tmp_path
    )
    assert "one more GiB saves" in text
    report = sr.reports.AutoPlanReport.from_json((tmp_path / "auto.json").read_text())
    fine("audit", *words, "--rules", "auto.json", "-o", "audit.json", cwd=tmp_path, starts_backend=True)
    assert len(report.frontier) == 2
    written = sr.load_rules(tmp_path / "rules.toml")
    step_args = (
        {name: jnp.ones(shape) for name, shape in (("up", (64, 256)), ("down", (256, 64)))},
        jnp.ones((512, 64)),
    )
    again = written.rules.plan(step_args, written.mesh)
    assert {path: again.decision(path).placement for path in again.paths} == {
        path: report.plan.decision(path).placement for path in report.plan.paths
    }
    requested = [
        array.requested for array in sr.reports.AuditReport.from_json((tmp_path / "audit.json").read_text()).arrays[:3]
    ]
    assert requested == [str(spec_repr(report.plan.decision(path).spec)) for path in ("0/down", "0/up", "1")]
    (tmp_path / "r.toml").write_text(
        '[[rules]]\npath = "up"\nspec = ["data"]\n[[rules]]\npath = "nowhere"\nspec = []\n'
    )
    process = shardrules("audit", *words, "--rules", "r.toml", "--batch", "data", cwd=tmp_path)
    assert "'nowhere'" in process.stderr
    (tmp_path / "pins.toml").write_text('[[rules]]\npath = "^0/up"\nspec = ["-", "model"]\n')
    text = fine("autoplan", *planned, "--pins", "pins.toml", cwd=tmp_path)
    assert re.search(r"^w/up +float32\[64, 256\] +P\(None, 'model'\)", text, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        ("autoplan", f"{EXAMPLES}/train_gpt.py:training", "--mesh", "8", "--time-limit", "1"),
        (
            *("train-plan", f"{EXAMPLES}/train_gpt.py:loss_of", "--model", f"{EXAMPLES}/train_gpt.py:GPT"),
            *("--batch", "uint8[64,65]", "--cluster", "cuda:h100:8", "--time-limit", "1"),
        ),
    ],
    ids=["autoplan", "train-plan"],
)
def test_what_cannot_fit_ends_a_command_before_it_searches(words: tuple[str, ...]) -> None:
    process = shardrules(*words, "--memory-limit", "1B", env=NO_BACKEND)
    assert process.returncode == 1
    assert process.stdout == ""
    error = process.stderr.splitlines()[-1]
    assert re.fullmatch(r"shardrules: error: \w+ does not fit in 1 B on .*: whatever its layouts, it needs .*", error)


@pytest.mark.slow
def test_golden_plans_must_be_sound_plans(tmp_path: Path, plans: tuple[Path, Path]) -> None:
    odd = ("check", GPT, "--rules", "shard_dim('data', 0)", "--mesh", "data:3", "--golden", "g.json", "--update")
    assert shardrules(*odd, cwd=tmp_path).returncode == 1
    assert not (tmp_path / "g.json").exists()
    (tmp_path / "other.json").write_text("{}")
    process = shardrules("check", GPT, *ON_EIGHT, "--golden", "other.json", "--update", cwd=tmp_path)
    assert process.returncode == 2
    assert (tmp_path / "other.json").read_text() == "{}"


@pytest.mark.slow
def test_audit_autoplan_and_report_work_together(tmp_path: Path) -> None:
    step = f"{EXAMPLES}/train_gpt.py:training"
    words = ("--mesh", "data:4,model:2")
    rules = ("--rules", GPT_RULES, "--params", "state/model")
    process = shardrules(
        "audit", step, *words, *rules, "--flags=--xla_cpu_enable_fast_math=false", "-o", "audit.json", cwd=tmp_path
    )
    assert process.returncode == 1
    assert "warning gathered: " in process.stdout
    assert (
        process.stderr == "shardrules: warning: text: whole on every device; --batch AXES splits the first dimension\n"
    )
    report = sr.reports.AuditReport.from_json((tmp_path / "audit.json").read_text())
    assert process.stdout == f"{report}\n"
    assert report.target == sr.Target("cpu", flags={"xla_cpu_enable_fast_math": False})
    requested = {array.path: array.requested for array in report.arrays}
    assert (
        requested["state/model/blocks/0/up/weight"]
        == requested["state/optimizer/0/mu/blocks/0/up/weight"]
        == "P('model', 'data')"
    )
    text = fine("autoplan", step, *words, "-o", "auto.json", cwd=tmp_path)
    assert text.startswith("step on data:4,model:2: ")
    auto_report = sr.reports.AutoPlanReport.from_json((tmp_path / "auto.json").read_text())
    assert f"{auto_report.status}, found in" in text
    assert fine("diff", "auto.json", "auto.json", cwd=tmp_path) == "no difference\n"
    assert "state/model" not in fine("diff", "audit.json", "audit.json", cwd=tmp_path)
    table = fine("plan", "auto.json", cwd=tmp_path)
    assert "0/model/blocks/*/up/weight" in table
    both = ("--audit", "audit.json", "--autoplan", "auto.json", "--optimizer", "adamw", "-o", "page.html")
    fine("report", GPT, *ON_EIGHT, *both, cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert '"hardware":"CPU (nominal)"' in page
    assert '"status":"optimal"' in page


@pytest.mark.slow
def test_plans_can_be_models(plans: tuple[Path, Path], tmp_path: Path) -> None:
    before = str(plans[0])
    same = fine("plan", before)
    assert same == fine("plan", GPT, *ON_EIGHT)
    moved = fine("plan", before, "--mesh", "data:2,model:2")
    assert "mesh data:2,model:2" in moved
    assert "pinned" in moved
    text = fine("plan", before, "--rules", "replicate", "--format", "json")
    again = sr.ShardingPlan.from_json(text)
    assert again.paths == sr.ShardingPlan.from_json(plans[0].read_text()).paths
    with_state = json.loads(fine("plan", before, "--optimizer", "adafactor", "--format", "json"))
    assert with_state.keys() == {"shardrules_plans", "model", "optimizer"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in ("80", "200"):
        monkeypatch.setenv("COLUMNS", width)
        lines = load_command(name).parser().format_help().splitlines()
        assert len(lines) <= {"plan": 24, "autoplan": 31, "train-plan": 35}.get(name, 30)
        assert max(map(len, lines)) <= 80
        assert "examples:" in lines
        (codes,) = re.findall(r"exit codes: (.*?)\n\n", "\n".join(lines), re.DOTALL)
        assert codes.startswith("0 success, ")
        assert codes.split()[-7:] == ["2", "invalid", "command,", "3", "bug,", "130", "Ctrl-C"]
        assert ("1 " in codes.replace("130", "")) == (name not in ("completion", "explain", "report"))


def test_check_and_audit_fail_from_warnings_up() -> None:
    for name in ("check", "audit"):
        parser = load_command(name).parser()
        assert "warning (default)" in " ".join(parser.format_help().split())
        warning = sr.Finding("warning", "slow", "it is slow")
        assert failing([warning], parser.parse_args(["x"]), Limits()) == [warning]
        assert failing([warning], parser.parse_args(["x"]), Limits(level="error")) == []
        assert failing([warning], parser.parse_args(["x", "--level", "note"]), Limits(level="error")) == [warning]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_the_help_run(name: str, plans: tuple[Path, Path], tmp_path: Path) -> None:
    """As written, from the root of the project."""
    for example in load_command(name).examples:
        words = shlex.split(example.replace("\\\n", " "))
        words = [str(plans[word == "after.json"]) if word in ("before.json", "after.json") else word for word in words]
        words = [str(tmp_path / word) if words[index - 1] == "-o" else word for index, word in enumerate(words)]
        # `init` writes into the folder that it is called in.
        if not (tmp_path / "docs").exists():
            (tmp_path / "docs").symlink_to(REPOSITORY / "docs")
        process = shardrules(*words, cwd=tmp_path)
        assert process.returncode == 0, process.stderr
        assert process.stdout


@pytest.mark.slow
def test_without_a_command_it_prints_the_help() -> None:
    text = fine()
    assert text == fine("--help")
    assert all(f"\n  {name:<12}{summary}\n" in text for name, summary in COMMANDS.items())
    assert fine("plan", "--help") == load_command("plan").parser().format_help()
    assert fine("--version") == f"shardrules {sr.__version__}\n"


def test_the_command_is_the_module(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("shardrules")
    process = subprocess.run([script, "--help"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert process.stdout == fine("--help")


def test_the_pre_commit_hook_runs_a_command() -> None:
    text = (REPOSITORY / ".pre-commit-hooks.yaml").read_text()
    assert re.findall(r"entry: shardrules (\w+)$", text, re.MULTILINE) == ["check"]
    assert "additional_dependencies: [rich]" in text  # a hook cannot ask for the extra `cli`
