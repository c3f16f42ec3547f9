"""`shardrules init`: what it writes, that `check` passes at once, and what it refuses."""

import json
import os
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.headers import write_headers
from tests.cli.command import EXAMPLES, GPT, NO_BACKEND, shardrules

MODEL = """\
import jax, jax.numpy as jnp
def make(depth=2):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    block = {"up": shape(256, 1024), "down": shape(1024, 256), "norm": shape(256)}
    return {"embed": shape(1000, 256), "blocks": [block] * depth}
"""
WORDS = ("init", "model.py:make", "--mesh", "data:4,model:2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def written(folder: Path) -> dict[str, str]:
    """The files of a folder as text, without the model."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_text() for path in files if path.name != "model.py"}


def test_what_is_written_passes_check_at_once(folder: Path) -> None:
    process = shardrules(*WORDS, cwd=folder, env=NO_BACKEND)
    assert (process.returncode, process.stderr) == (0, "")
    files = written(folder)
    assert [*files] == [".github/workflows/sharding.yml", "plan.json", "rules.toml"]
    for name in files:
        assert f"\n{name}: " in f"\n{process.stdout}"
    lines = [line.strip() for line in files[".github/workflows/sharding.yml"].splitlines()]
    command = next(line for line in lines if line.startswith("shardrules check"))
    assert command == "shardrules check model.py:make --rules rules.toml --format github"
    check = shardrules(*command.split()[1:], cwd=folder, env=NO_BACKEND)
    assert (check.returncode, check.stdout[:11]) == (0, "0 findings:")
    assert tomllib.loads(files["rules.toml"])["rules"] == [
        {"path": "/down$", "spec": ["model", "data"]},
        {"path": "/up$", "spec": ["data", "model"]},
        {"path": "^embed$", "spec": ["model", "data"]},
        {"path": "/norm$", "spec": []},
    ]
    comment = (
        "# Layers that narrow: dim 0 over model, dim 1 over data.\n# 2 arrays, 1.0 MiB in all, 128.0 KiB per device.\n"
    )
    assert comment in files["rules.toml"]
    assert "# Small arrays: splitting them would save nothing.\n# 2 arrays, 1.0 KiB in all" in files["rules.toml"]
    plan = sr.ShardingPlan.from_json(files["plan.json"])
    assert all(plan.decision(path).spec is not None for path in plan.paths)
    (folder / "model.py").write_text(MODEL.replace("1024, 256", "2048, 256"))
    changed = shardrules(*command.split()[1:], cwd=folder, env=NO_BACKEND)
    assert (changed.returncode, changed.stdout.count("title=changed")) == (1, 1)


def test_the_optimizer_is_in_the_rules(folder: Path) -> None:
    assert shardrules(*WORDS, "--optimizer", "adamw", cwd=folder, env=NO_BACKEND).returncode == 0
    assert sr.load_rules(folder / "rules.toml").optimizer == "adamw"
    assert "pip install 'shardrules[cli]' optax\n" in written(folder)[".github/workflows/sharding.yml"]
    check = shardrules("check", "model.py:make", "--rules", "rules.toml", cwd=folder, env=NO_BACKEND)
    assert (check.returncode, "with adamw" in check.stdout) == (0, True)
    assert (
        "unknown optimizer" in shardrules(*WORDS, "--optimizer", "adamx", "--force", cwd=folder, env=NO_BACKEND).stderr
    )


def test_existing_files_are_replaced_only_with_force(folder: Path) -> None:
    (folder / "rules.toml").write_text("mine")
    process = shardrules(*WORDS, cwd=folder, env=NO_BACKEND)
    assert process.returncode == 2
    assert "rules.toml exists: --force replaces what is there" in process.stderr
    assert written(folder) == {"rules.toml": "mine"}
    assert shardrules(*WORDS, "--force", cwd=folder, env=NO_BACKEND).returncode == 0
    files = written(folder)
    again = shardrules(*WORDS, cwd=folder, env=NO_BACKEND)
    assert "rules.toml, plan.json, .github/workflows/sharding.yml exist: --force replaces what is there" in again.stderr
    assert shardrules(*WORDS, "--force", cwd=folder, env=NO_BACKEND).returncode == 0
    assert written(folder) == files


@pytest.mark.slow
def test_files_are_the_same_under_every_hash_seed(folder: Path) -> None:
    texts = []
    for seed in ("0", "1", "2"):
        shardrules(*WORDS, "--force", cwd=folder, env={**NO_BACKEND, "PYTHONHASHSEED": seed})
        texts.append(written(folder))
    assert texts[0] == texts[1] == texts[2]


FLAX = """\
import flax.linen as nn, jax, jax.numpy as jnp
from flax import nnx
class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(256)(nn.relu(nn.Dense(1024)(nn.Embed(1000, 256)(x))))
def linen(key):
    return Linen().init(key, jnp.zeros((1, 8), jnp.int32))
class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.up = nnx.Embed(1000, 256, rngs=rngs), nnx.Linear(256, 1024, rngs=rngs)
def state():
    return nnx.state(Nnx())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (GPT, "data:4,model:2"),
        (GPT, "data:3,model:7"),
        (f"{EXAMPLES}/llama_405b.py:shapes", "data:64,model:16"),
        (f"{EXAMPLES}/llama_405b.py:shapes", "fsdp:512"),
        (f"{EXAMPLES}/llama_405b.py:shapes", "dcn:2,fsdp:32,sp:2,tp:8"),
        ("flaxes.py:linen", "data:4,model:2"),
        ("flaxes.py:state", "data:4,model:2"),
        ("weights", "data:4,model:2"),
        ("model.py:make(depth=40)", "x:2,y:2,z:2"),
    ],
)
def test_models_of_all_kinds(model: str, mesh: str, folder: Path) -> None:
    (folder / "flaxes.py").write_text(FLAX)
    (folder / "weights").mkdir()
    write_headers(folder / "weights", {f"layers.{index}.up_proj.weight": ("F32", [512, 128]) for index in range(4)}, 2)
    process = shardrules("init", model, "--mesh", mesh, cwd=folder, env=NO_BACKEND)
    divides = "7" not in mesh
    assert process.returncode == (0 if divides else 1), process.stdout + process.stderr
    words = ("check", model, "--rules", "rules.toml", "--format", "json")
    check = shardrules(*words, cwd=folder, env=NO_BACKEND)
    assert check.returncode == process.returncode
    codes = {finding["code"] for finding in json.loads(check.stdout)["findings"]}
    assert codes == (set() if divides else {"unused-axis"})


ODD = [
    "\x1b[31m",
    "b\n::error::x",
    "a\ud800",
    "c'd\"e",
    "# x",
    "\u202e",
    "größe",
    "a.b",
    "a+b",
    " ",
    "$",
    "(",
    "\\d",
    "^",
    "|",
]


def test_odd_names_are_matched_and_do_not_act(folder: Path) -> None:
    tree = {name: [64, 64] if index % 2 else [7] for index, name in enumerate(ODD)}
    (folder / "model.py").write_text(
        f"import numpy as np\ndef make():\n    return {{name: np.ones(shape) for name, shape in {tree!r}.items()}}\n"
    )
    process = shardrules(*WORDS, cwd=folder, env=NO_BACKEND)
    assert (process.returncode, process.stderr) == (0, "")
    assert shardrules("check", "model.py:make", "--rules", "rules.toml", cwd=folder, env=NO_BACKEND).returncode == 0
    text = written(folder)["rules.toml"] + process.stdout
    assert [char for char in text if not char.isprintable() and char != "\n"] == []


def test_findings_that_no_guess_avoids_are_printed(folder: Path) -> None:
    process = shardrules(*WORDS[:3], "data:4,model:7", cwd=folder, env=NO_BACKEND)
    assert process.returncode == 1
    assert process.stdout.startswith("warning unused-axis: no leaf is split over axis 'model' of size 7")
    assert (folder / "rules.toml").exists()


def test_the_workflow_is_at_the_top_of_the_repository(folder: Path) -> None:
    (folder / ".git").mkdir()
    inner = folder / "tiny lm"
    inner.mkdir()
    (inner / "pyproject.toml").touch()
    (inner / "requirements.txt").touch()
    (inner / "model.py").write_text(MODEL)
    process = shardrules("init", f"{inner}/model.py:make", "--mesh", "data:8", cwd=inner, env=NO_BACKEND)
    assert f"\n{os.path.join('..', '.github', 'workflows', 'sharding.yml')}: " in process.stdout
    text = (folder / ".github/workflows/sharding.yml").read_text()
    (job,) = yaml.safe_load(text)["jobs"].values()
    assert [step["name"] for step in job["steps"][2:]] == [
        "Install",
        "Check the plan",
        "Draw the page",
        "Keep the page",
    ]
    assert "working-directory: 'tiny lm'\n" in text
    assert "pip install 'shardrules[cli]' -r requirements.txt -e .\n" in text
    assert "shardrules check model.py:make --rules" in text
    assert "path: 'tiny lm/report.html'\n" in text


OPTIMIZER = "import optax\ndef make(rate=1e-3): return optax.adamw(rate)\n"


@pytest.mark.slow
def test_optimizers_may_be_objects_in_files(folder: Path) -> None:
    name = "sub-dir/opts.py:make(rate=0.1)"
    (folder / "sub-dir").mkdir()
    (folder / "sub-dir" / "opts.py").write_text(OPTIMIZER)
    process = shardrules(*WORDS, "--optimizer", name, cwd=folder, env=NO_BACKEND)
    assert (process.returncode, process.stderr) == (0, "")
    assert tomllib.loads((folder / "rules.toml").read_text())["optimizer"] == name
    check = shardrules("check", "model.py:make", "--rules", "rules.toml", cwd=folder, env=NO_BACKEND)
    assert (check.returncode, check.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["a file", "a folder"])
def test_what_cannot_be_written_leaves_nothing(kind: str, folder: Path) -> None:
    if kind == "a file":
        (folder / ".github").write_text("")
        message = "sharding.yml: .github is a file, not a folder; rename it"
    else:
        (folder / "rules.toml").mkdir()
        message = "rules.toml is a folder: name a file in it"
    before = {path.name for path in folder.iterdir()}
    process = shardrules(*WORDS, "--force", cwd=folder, env=NO_BACKEND)
    assert process.returncode == 2
    assert message in process.stderr
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


def test_the_rules_of_a_plan_are_a_beginning(folder: Path) -> None:
    make: dict[str, object] = {}
    exec(MODEL, make)
    model = make["make"]()  # pyright: ignore[reportCallIssue]
    specs = {"embed": P("data"), "blocks": [{"up": P(None, "model"), "down": P("model"), "norm": P()}] * 2}
    mesh = sr.mesh_shape("data:4,model:2")
    both = sr.SpecTreeShardingRule((specs, P("data"))).plan((model, jax.ShapeDtypeStruct((8,), jnp.int32)), mesh)
    (folder / "step.json").write_text(both.to_json())
    process = shardrules("init", "model.py:make", "--plan", "step.json", cwd=folder, env=NO_BACKEND)
    assert (process.returncode, process.stderr) == (0, "")
    assert "The rules are those of step.json. Next:" in process.stdout
    text = (folder / "rules.toml").read_text()
    assert 'mesh = "data:4,model:2"' in text
    assert "# 2 arrays, 1.0 MiB in all, 512.0 KiB per device; the largest is blocks/0/down." in text
    again, planned = sr.load_rules(folder / "rules.toml").rules.plan(model, mesh), sr.SpecTreeShardingRule(specs)
    assert again.placements() == planned.plan(model, mesh).placements()
    check = shardrules("check", "model.py:make", "--rules", "rules.toml", cwd=folder, env=NO_BACKEND)
    assert (check.returncode, check.stdout[:11]) == (0, "0 findings:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.py:make",), "no mesh: pass --mesh data:16,model:4, axes and sizes; or a --plan, which has one"),
        (("model.py:make", "--plan", "no-mesh.json"), "no-mesh.json has no mesh: pass --mesh"),
        (
            ("model.py:make", "--plan", "split.json", "--mesh", "x:8"),
            "split.json splits over data, which the mesh x:8 lacks: leave --mesh out, or plan for this mesh",
        ),
        (("model.py:make", "--plan", "other.json"), r"other.json has no plan for 3 of 7 arrays of the model, first "),
    ],
)
def test_plans_that_are_no_beginning_are_refused(folder: Path, words: tuple[str, ...], message: str) -> None:
    make: dict[str, object] = {}
    exec(MODEL, make)
    model = make["make"](1)  # pyright: ignore[reportCallIssue]
    (folder / "no-mesh.json").write_text(sr.ReplicateShardingRule().plan(model).to_json())
    other = sr.ReplicateShardingRule().plan(model, sr.mesh_shape("data:4"))
    (folder / "other.json").write_text(other.to_json())
    split = sr.FSDPShardingRule("data", 0).plan(model, sr.mesh_shape("data:4"))
    (folder / "split.json").write_text(split.to_json())
    process = shardrules("init", *words, cwd=folder, env=NO_BACKEND)
    assert process.returncode == 2
    assert message in process.stderr
    assert not written(folder).keys() - {"no-mesh.json", "other.json", "split.json"}
