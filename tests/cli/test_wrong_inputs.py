"""Invalid commands: one line that says what is wrong, where, and how to fix it; exit code 2; no traceback."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from shardrules.cli.main import main
from shardrules.cli.terminal import complain
from tests.cli.command import GPT, NO_BACKEND, shardrules

MODEL = """\
import sys

import attrs
import jax
import jax.numpy as jnp

import shardrules as sr

WIDTH = 8
TREE = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
PAIRS = [("w", "fsdp('data')", 3)]

def make(depth=2):
    return [jnp.ones((WIDTH, 8)) for _ in range(depth)]

def raises():
    weights = make()
    raise RuntimeError("no such width:\\n  9")

def nothing():
    return {}

def needs(width, key):
    return jnp.ones(width)

def forgets():
    make()

def leaves():
    raise SystemExit(0)

@attrs.frozen
class Broken(sr.LeafShardingRule):
    def decide(self, leaf):
        return {}[leaf.path]

BROKEN = Broken()

def leaving_step():
    return (lambda w: sys.exit(0)), jnp.ones((8, 8))

def step():
    return make(), 3

def bad_step():
    return (lambda w: w @ jnp.ones(9)), jnp.ones((8, 8))
"""

MESH = ("--mesh", "data:4,model:2")
AUTO = ("--rules", "auto", *MESH)


@attrs.frozen
class Wrong:
    """The words of an invalid command, and a part of the expected message."""

    words: tuple[str, ...]
    message: str
    prepare: Callable[[Path], object] = lambda folder: None


def large(folder: Path) -> None:
    with (folder / "large.json").open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no space


def truncated(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**9) + b"{}")


def index_without_files(folder: Path) -> None:
    (folder / "m.safetensors.index.json").write_text('{"weight_map": {"w": "gone.safetensors"}}')


def strange_dtype(folder: Path) -> None:
    header = b'{"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def text_of(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def bytes_of(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


WRONG = {
    "an unknown command": Wrong(
        ("plna",), "unknown command 'plna' (did you mean 'plan'?); the commands are init, plan"
    ),
    "an option before it": Wrong(
        ("--rules", "auto", "plan"), "--rules must follow a command: shardrules COMMAND --rules"
    ),
    "no model": Wrong(("plan",), "the following arguments are required: MODEL; see shardrules plan --help"),
    "an unknown option": Wrong(
        ("plan", "model.py:make", "--rulse", "auto"), "unrecognized arguments: --rulse auto (did you mean '--rules'?)"
    ),
    "an unknown format": Wrong(("plan", "model.py:make", "--format", "yaml"), "invalid choice: 'yaml'"),
    "a missing file": Wrong(
        ("plan", "modle.py:make", *AUTO), "file modle.py does not exist (did you mean 'model.py'?)"
    ),
    "a missing module": Wrong(("plan", "modle:make", *AUTO), "module 'modle' is neither installed nor in this folder"),
    "a missing name": Wrong(("plan", "model.py:mkae", *AUTO), "model.py has no 'mkae' (did you mean 'make'?)"),
    "an empty name": Wrong(("plan", "", *AUTO), "the name of the model is empty: a model is module:function"),
    "a missing model": Wrong(("plan", "model.sft", *AUTO), "model.sft does not exist: a model is module:function"),
    "a file without a name": Wrong(
        ("plan", "model.py", *AUTO), "name a function in it that returns the model, model.py:make"
    ),
    "not a factory": Wrong(
        ("plan", "model.py:WIDTH", *AUTO), "model.py:WIDTH is a value of type int, with no array in it"
    ),
    "a factory that returns nothing": Wrong(
        ("plan", "model.py:forgets", *AUTO), "model.py:forgets returns None, with no array"
    ),
    "an empty model": Wrong(
        ("plan", "model.py:nothing", *AUTO), "model.py:nothing returns a value of type dict, with no array"
    ),
    "a factory that raises": Wrong(
        ("plan", "model.py:raises", *AUTO), "model.py:raises raised RuntimeError: no such width: 9 (at model.py:18)"
    ),
    "a factory that ends the process": Wrong(
        ("check", "model.py:leaves", *AUTO), "model.py:leaves raised SystemExit: 0"
    ),
    "rules that end the process": Wrong(
        ("check", "model.py:make", "--rules", "model.py:leaves", *MESH), "model.py:leaves raised SystemExit: 0"
    ),
    "a step that ends the process": Wrong(("audit", "model.py:leaving_step", *MESH), "the step raised SystemExit: 0"),
    "a rule that raises": Wrong(
        ("check", "model.py:make", "--rules", "model.py:BROKEN", *MESH), "--rules: a rule raised KeyError: "
    ),
    "a factory that takes arguments": Wrong(
        ("plan", "model.py:needs", *AUTO), "model.py:needs has required arguments: write model.py:needs(width=...)"
    ),
    "unknown arguments": Wrong(
        ("plan", "model.py:make(width=3)", *AUTO),
        "cannot call model.py:make(width=3): got an unexpected keyword",
    ),
    "arguments that are not literals": Wrong(("plan", "model.py:make(WIDTH)", *AUTO), "the arguments must be literals"),
    "a module that raises": Wrong(
        ("plan", "bad.py:make", *AUTO),
        "importing bad.py raised ZeroDivisionError: division by zero (at bad.py:1)",
        text_of("bad.py", "1 / 0"),
    ),
    "a module with a syntax error": Wrong(
        ("plan", "bad.py:make", *AUTO),
        "importing bad.py raised SyntaxError: '(' was never closed (at bad.py:2)",
        text_of("bad.py", "\nx = ("),
    ),
    "a module that ends the process": Wrong(
        ("plan", "bad.py:make", *AUTO),
        "importing bad.py raised SystemExit: 3",
        text_of("bad.py", "raise SystemExit(3)"),
    ),
    "no rules": Wrong(("plan", "model.py:make", *MESH), "no rules: pass --rules file.toml"),
    "no mesh": Wrong(("plan", "model.py:make", "--rules", "auto"), "no mesh: pass --mesh data:16,model:4"),
    "a bad mesh": Wrong(
        ("plan", "model.py:make", "--rules", "auto", "--mesh", "data4"),
        "--mesh: mesh shape 'data4': 'data4' is not name:size",
    ),
    "an empty mesh": Wrong(
        ("plan", "model.py:make", "--rules", "auto", "--mesh", ""), "--mesh is empty: write axes and sizes"
    ),
    "an unknown rule": Wrong(
        ("plan", "model.py:make", "--rules", "fdsp", *MESH),
        "--rules: rule text 'fdsp': unknown op 'fdsp' (did you mean 'fsdp'?)",
    ),
    "a rule that is called wrongly": Wrong(
        ("plan", "model.py:make", "--rules", "fsdp()", *MESH), "missing 1 required positional argument: 'axis'"
    ),
    "an unknown axis in a text": Wrong(
        ("plan", "model.py:make", "--rules", "fsdp('modle')", *MESH),
        "unknown axis 'modle' (did you mean 'model'?); the mesh is data:4,model:2. The rules use it for 2 arrays",
    ),
    "an unknown axis in a file": Wrong(
        ("plan", "model.py:make", "--rules", "r.toml", *MESH),
        "r.toml: rules[0].spec[0]: unknown axis 'dta' (did you mean 'data'?); the mesh is data:4,model:2",
        text_of("r.toml", '[[rules]]\npath = "."\nspec = ["dta"]\n'),
    ),
    "an int for rules": Wrong(
        ("plan", "model.py:make", "--rules", "model.py:WIDTH", *MESH), "is a int, not a ShardingRule"
    ),
    "triples for rules": Wrong(
        ("plan", "model.py:make", "--rules", "model.py:PAIRS", *MESH), "is a list, not a ShardingRule"
    ),
    "a class of rules": Wrong(
        ("plan", "model.py:make", "--rules", "shardrules:FSDPShardingRule", *MESH),
        "is a class, not a rule: name an instance",
    ),
    "a missing file of rules": Wrong(
        ("plan", "model.py:make", "--rules", "rule.toml", *MESH),
        "file rule.toml does not exist (did you mean 'rules.toml'?)",
        text_of("rules.toml", ""),
    ),
    "bad TOML": Wrong(
        ("plan", "model.py:make", "--rules", "r.toml", *MESH),
        "r.toml: invalid TOML: ",
        text_of("r.toml", "[[rules]]\npath = norm\n"),
    ),
    "TOML that nests too deeply": Wrong(
        ("plan", "model.py:make", "--rules", "r.toml", *MESH),
        "r.toml: invalid TOML",
        text_of("r.toml", f"rule = {'[' * 5000}"),
    ),
    "an index that nests too deeply": Wrong(
        ("plan", "m.safetensors.index.json", *AUTO),
        "it is not an index of safetensors",
        text_of("m.safetensors.index.json", "[" * 100_000),
    ),
    "a name that no file can have": Wrong(
        ("plan", "model.py:make", "--rules", "r.toml", *MESH),
        "r.toml: rule.file: cannot read a\\x00b: ",  # the cause is worded by Python, in each version in its own way
        text_of("r.toml", 'rule = {type = "plan", file = "a\\u0000b"}'),
    ),
    "a mesh without axes in a file": Wrong(
        ("plan", "model.py:make", "--rules", "r.toml"),
        "r.toml: mesh: the mesh is empty",
        text_of("r.toml", 'mesh = ""\nrule = "auto"'),
    ),
    "an unknown axis in a text in a file": Wrong(
        ("plan", "model.py:make", "--rules", "r.toml", *MESH),
        "r.toml: rules[0].rule: unknown axis 'dta' (did you mean 'data'?); the mesh is data:4,model:2",
        text_of("r.toml", "[[rules]]\npath = '.'\nrule = \"auto|shard_dim('dta', 0)\"\n"),
    ),
    "TOML that is not UTF-8": Wrong(
        ("plan", "model.py:make", "--rules", "r.toml", *MESH),
        "r.toml is not UTF-8 text (byte 2 is 0xff)",
        bytes_of("r.toml", b"# \xff"),
    ),
    "a folder for a file": Wrong(
        ("plan", "model.py:make", "--rules", "r.toml", *MESH),
        "r.toml is a folder, not a file",
        lambda folder: (folder / "r.toml").mkdir(),
    ),
    "an empty folder": Wrong(
        ("plan", "empty", *AUTO),
        "the folder empty is empty: neither .safetensors nor an orbax checkpoint",
        lambda folder: (folder / "empty").mkdir(),
    ),
    "a huge file": Wrong(("plan", "large.json", *AUTO), "large.json has 1.0 TiB, too much for a text file", large),
    "JSON that is not a plan": Wrong(
        ("plan", "p.json", *AUTO),
        "p.json is not a plan: it is JSON, but not what shardrules plan -o writes",
        text_of("p.json", "{}"),
    ),
    "an index of another name": Wrong(
        ("plan", "i.json", *AUTO),
        "an index of safetensors ends in .safetensors.index.json",
        text_of("i.json", '{"weight_map": {}}'),
    ),
    "a truncated header": Wrong(
        ("plan", "model.safetensors", *AUTO), "model.safetensors: it has 10 bytes, and its header alone", truncated
    ),
    "an index without files": Wrong(
        ("plan", "m.safetensors.index.json", *AUTO), "gone.safetensors: the index m.safetensors", index_without_files
    ),
    "a dtype that JAX lacks": Wrong(
        ("plan", "model.safetensors", *AUTO),
        "has tensors of dtypes that JAX arrays cannot have: F4 (w)",
        strange_dtype,
    ),
    "an unknown optimizer": Wrong(
        ("plan", "model.py:make", *AUTO, "--optimizer", "adamm"),
        "--optimizer adamm: unknown optimizer 'adamm' (did you mean 'adam",
    ),
    "an optimizer with wrong arguments": Wrong(
        ("plan", "model.py:make", *AUTO, "--optimizer", "adamw(beta=1)"), "--optimizer adamw(beta=1) raised TypeError: "
    ),
    "an unknown path": Wrong(
        ("explain", "model.py:make", "7", *AUTO), "the plan has no leaf at '7', and no path matches it as a pattern"
    ),
    "an invalid pattern": Wrong(
        ("explain", "model.py:make", "(7", *AUTO), "the plan has no leaf at '(7', and it is not a valid pattern"
    ),
    "an invalid budget": Wrong(
        ("check", "model.py:make", *AUTO, "--budget", "lots"),
        "--budget must be a number of bytes, or a string like '80GB'",
    ),
    "a missing golden plan": Wrong(
        ("check", "model.py:make", *AUTO, "--golden", "g.json"), "file g.json does not exist; --update"
    ),
    "an update of nothing": Wrong(
        ("check", "model.py:make", *AUTO, "--update"), "--update needs the name of the golden plan"
    ),
    "a diff of an audit and a plan": Wrong(
        ("diff", "a.json", "b.json"),
        "a.json is an audit and b.json is not",
        lambda folder: (text_of("a.json", '{"shardrules_audit": 1}')(folder), text_of("b.json", "{}")(folder)),
    ),
    "a diff of no JSON": Wrong(("diff", "model.py", "model.py"), "model.py is not JSON: "),
    "no step": Wrong(("audit", "model.py:make", *MESH), "must return a step and its arguments, but returns a list"),
    "a step that is not a function": Wrong(("audit", "model.py:step", *MESH), "must return a step and its arguments"),
    "a step that is a value": Wrong(
        ("audit", "model.py:WIDTH", *MESH), "name a function that returns (step, *arguments)"
    ),
    "an unknown target": Wrong(
        ("audit", "model.py:bad_step", *MESH, "--target", "cuda:h10:8"), "unknown GPU 'h10' (did you mean 'h100'?)"
    ),
    "an unknown set of flags": Wrong(
        ("audit", "model.py:bad_step", *MESH, "--flags", "maxtext:v5f"), "--flags: unknown set of flags 'maxtext:v5f'"
    ),
    "a flag that the compiler lacks": Wrong(
        ("audit", "model.py:bad_step", *MESH, "--flags=--xla_nonsense=1"), "unknown flag 'xla_nonsense'"
    ),
    "unknown parameters": Wrong(
        ("audit", "model.py:bad_step", *AUTO, "--params", "v"), "--params v: unknown argument 'v'; the arguments are w"
    ),
    "a batch over an unknown axis": Wrong(
        ("audit", "model.py:bad_step", *AUTO, "--batch", "dat"),
        "--batch dat: unknown axis 'dat' (did you mean 'data'?)",
    ),
    "pins over an unknown axis": Wrong(
        ("autoplan", "model.py:bad_step", *MESH, "--pins", "fsdp('dta', 0)"),
        "unknown axis 'dta' (did you mean 'data'?)",
    ),
    "pins over an unknown axis for every mesh": Wrong(
        ("autoplan", "nothing.py:step", "--mesh", "8", "--pins", "fsdp('dta', 0)"),
        "unknown axis 'dta' (did you mean 'data'?); meshes of 8 devices have data and model",
    ),
    "pins of training over an unknown axis": Wrong(
        (
            *("train-plan", "nothing.py:loss", "--model", "nothing.py:model", "--batch", "float32[8]"),
            *("--cluster", "cpu:8", "--pins", "shard_dim('tp', 0)"),
        ),
        "unknown axis 'tp'; the meshes of a cluster have stage, replica, data, model, minor",
    ),
    "pins of nothing": Wrong(
        ("autoplan", "model.py:bad_step", *MESH, "--pins", "r.toml"),
        "--pins r.toml matches no array: paths begin with",
        text_of("r.toml", '[[rules]]\npath = "^nothing"\nspec = ["data"]\n'),
    ),
    "a dash for a file": Wrong(
        ("plan", "model.py:make", *AUTO, "-o", "-"), "cannot write to -: --format json prints to the standard output"
    ),
    "unknown hardware": Wrong(
        ("autoplan", "model.py:bad_step", *MESH, "--hardware", "cuda:h1000"),
        "--hardware: unknown hardware 'cuda:h1000' (did you mean 'cuda:h100'?)",
    ),
    "no time": Wrong(
        ("autoplan", "model.py:bad_step", *MESH, "--time-limit", "nan"),
        "--time-limit must be a number of seconds above 0",
    ),
    "a step that raises": Wrong(
        ("autoplan", "model.py:bad_step", *MESH), "model.py:bad_step: the step raised TypeError: "
    ),
    "JSON that is not an audit": Wrong(
        ("report", "model.py:make", *AUTO, "--audit", "a.json"),
        "--audit: a.json is not what shardrules audit -o writes",
        text_of("a.json", "{}"),
    ),
    "a folder for the page": Wrong(("report", "model.py:make", *AUTO, "-o", "."), ". is a folder: name a file in it"),
    "an unknown shell": Wrong(("completion", "cmd"), "invalid choice: 'cmd'"),
}


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", WRONG)
def test_errors_are_one_line(name: str, tmp_path: Path) -> None:
    wrong = WRONG[name]
    (tmp_path / "model.py").write_text(MODEL)
    wrong.prepare(tmp_path)
    if wrong.words[0] == "audit":  # audit may start a backend
        process = shardrules(*wrong.words, cwd=tmp_path)
    else:
        process = shardrules(*wrong.words, cwd=tmp_path, env=NO_BACKEND)
    assert process.returncode == 2, process.stdout + process.stderr
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert line.startswith("shardrules: error: ")
    assert wrong.message in line


def test_traceback_shows_the_traceback() -> None:
    process = shardrules("plan", "no_such:thing", "--rules", "auto", "--mesh", "data:2", "--traceback", env=NO_BACKEND)
    assert process.returncode == 2
    assert "Traceback (most recent call last)" in process.stderr
    assert process.stderr.splitlines()[-1].startswith("shardrules: error: module 'no_such' is neither")


def test_unsound_plans_list_every_array(tmp_path: Path) -> None:
    """The command is valid then: the exit code is 1, and every array is named."""
    (tmp_path / "model.py").write_text(MODEL)
    process = shardrules(
        "plan", "model.py:make", "--rules", "shard_dim('data', 5)", *MESH, cwd=tmp_path, env=NO_BACKEND
    )
    assert process.returncode == 1
    assert "2 leaves cannot be decided" in process.stderr
    odd = ("--rules", "shard_dim('data', 0)", "--mesh", "data:3")
    process = shardrules("plan", "model.py:make", *odd, cwd=tmp_path, env=NO_BACKEND)
    assert process.returncode == 1
    assert "indivisible" in process.stdout


def test_without_rich_it_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['rich'] = None; from shardrules.cli.start import start; start()"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert (
        process.stderr.splitlines()[-1]
        == 'shardrules: error: the command line needs rich: pip install "shardrules[cli]"'
    )


def test_closed_pipes_are_not_errors(tmp_path: Path) -> None:
    for command, code in (("plan", 0), ("check --budget 1B", 1)):  # the exit code is as without the pipe
        words = (
            f"{sys.executable} -m shardrules {command} {GPT} --rules auto --mesh data:4 | true; exit ${{PIPESTATUS[0]}}"
        )
        process = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
        assert process.returncode == code
    assert "Traceback" not in process.stderr
    assert "BrokenPipe" not in process.stderr


@pytest.mark.parametrize("options", [(), ("--traceback",)])
@pytest.mark.parametrize("variable", ["NO_COLOR", "FORCE_COLOR"])
def test_a_closed_stderr_ends_no_command(
    variable: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not rich takes it for a terminal."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setenv(variable, "1")
        monkeypatch.setattr(sys, "stderr", stderr)
        if not options:
            complain("the first of several", "warning")
        assert main(["plan", str(tmp_path / "nosuch.json"), *options]) == 2
