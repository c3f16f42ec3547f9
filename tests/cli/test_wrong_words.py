"""Invalid words of commands: each message names the cause and the way out. In this process, since there are many."""

import json
import os
import shlex
import struct
from pathlib import Path

import numpy as np
import pytest

import shardrules as sr
from shardrules.cli.main import main

CODE = """\
import sys, attrs, jax.numpy as jnp, shardrules as sr
WIDTH = 8
NOTHING = None
PAIRS = [("w", "fsdp('data')", 3)]
def make(depth=2): return {"w": jnp.ones((8, 8))}
def needs(width, key): return jnp.ones(width)
def raises(): raise RuntimeError("no such width:\\n  9")
def leaves(): raise SystemExit(0)
def step(): return (lambda p, x: p["w"] @ x), make(), jnp.ones((8, 8))
def bad_step(): return (lambda w: w @ jnp.ones(9)), jnp.ones((8, 8))
def leaving_step(): return (lambda w: sys.exit(0)), jnp.ones((8, 8))
def alone(): return (lambda p: p),
def forgets(): pass
def listed(): return [make(), jnp.ones((8, 8))]
def endless(): return endless()
class Empty: pass
@attrs.frozen
class Broken(sr.LeafShardingRule):
    def decide(self, leaf): return {}[leaf.path]
BROKEN = Broken()
"""


def safetensors(header: str, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header.encode()


PLAN = sr.AutoShardingRule().plan({"w": np.ones((8, 8), np.float32)}, sr.mesh_shape("data:4")).to_json()
FILES: dict[str, str | bytes] = {
    "p.json": PLAN,
    "m.py": CODE,
    "empty.json": "",
    "cut.json": PLAN[:200],
    "string.json": '{"a": "b',
    "list.json": "[1]",
    "null.json": "null",
    "newer-plans.json": f'{{"shardrules_plans": 99, "model": {PLAN}, "optimizer": {PLAN}}}',
    "newer-autoplan.json": f'{{"shardrules_autoplan": 99, "plan": {PLAN}}}',
    "newer.json": '{"shardrules": 9}',
    "config.json": '{"model_type": "llama"}',
    "audit.json": '{"shardrules_audit": 1}',
    "changed.json": PLAN.replace('"w"', '"v"'),
    "answer.json": '{"shardrules_check": 1}',
    "deep.json": "[" * 10_000,
    "merge.json": f"<<<<<<< HEAD\n{PLAN}",
    "notes.txt": "hello",
    "empty.toml": "",
    "empty.safetensors": "",
    "größe.json": "[1]",
    "index.json": '{"weight_map": {}}',
    "division.py": "1 / 0",
    "syntax.py": "\nx = (",
    "exit.py": "raise SystemExit(3)",
    "axis.toml": '[[rules]]\npath = "."\nspec = ["dta"]\n',
    "axis_in_text.toml": "[[rules]]\npath = '.'\nrule = \"auto|shard_dim('dta', 0)\"\n",
    "bad.toml": "[[rules]]\npath = norm\n",
    "deep.toml": f"rule = {'[' * 5000}",
    "null.toml": 'rule = {type = "plan", file = "a\\u0000b"}',
    "no_axes.toml": 'mesh = ""\nrule = "auto"',
    "bytes.toml": b"# \xff",
    "nothing.toml": '[[rules]]\npath = "^nothing"\nspec = ["data"]\n',
    "deep.safetensors.index.json": "[" * 100_000,
    "lonely.safetensors.index.json": '{"weight_map": {"w": "gone.safetensors"}}',
    "cut.safetensors": safetensors("{}", 10**9),
    "dtype.safetensors": safetensors('{"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}'),
}

SHORT = {
    "RULES": "plan m.py:make MESH --rules",
    "TRAIN": "train-plan m.py:step --model m.py:make --cluster cpu:8 --batch",
    "AUTO": "--rules auto MESH",
    "MESH": "--mesh data:4",
    "CUDA": "--target cuda:h100:4",
}

WRONG = [
    # Commands and options
    ("RULES --", "argument --rules: expected one argument"),
    ("report p.json --autoplan p.json", "p.json is a plan, not what shardrules autoplan -o writes"),
    ("report p.json --audit p.json", "p.json is a plan, not what shardrules audit -o writes"),
    ("plan newer-plans.json", "newer-plans.json has format 99 of shardrules_plans, and this version reads 1"),
    ("plan newer-autoplan.json", "has format 99 of shardrules_autoplan, and this version reads 2"),
    ("PLAN", "unknown command 'PLAN' (did you mean 'plan'?)"),
    ("plan p.json --optimiser adam", "(did you mean '--optimizer'?); see shardrules plan --help"),
    ("plan p.json --level note", "unrecognized arguments: --level note; see shardrules plan --help"),
    ("plan m.py:make --rules", "argument --rules: expected one argument"),
    ("plan m.py:make --rules MESH", "argument --rules: expected one argument"),
    ("plan m.py:make m.py AUTO", "unrecognized arguments: m.py"),
    ("explain p.json", "the following arguments are required: PATH"),
    ("check p.json --format yaml", "invalid choice: 'yaml'"),
    ("check p.json --level ERROR", "invalid choice: 'ERROR'"),
    ("completion cmd", "invalid choice: 'cmd'"),
    ("completion bash zsh", "unrecognized arguments: zsh"),
    ("diff p.json", "the following arguments are required: NEW"),
    ("--rules auto plan", "--rules must follow a command: shardrules COMMAND --rules"),
    ("plan", "the following arguments are required: MODEL; see shardrules plan --help"),
    # Initial rules
    ("init m.py:make", "no mesh: pass --mesh data:16,model:4, axes and sizes; or a --plan, which has one"),
    # Models
    ("plan '' AUTO", "the name of the model is empty: a model is module:function"),
    ("plan m.py AUTO", "name a function in it that returns the model, m.py:make"),
    ("plan n.py:make AUTO", "file n.py does not exist (did you mean 'm.py'?)"),
    ("plan m.py:mkae AUTO", "m.py has no 'mkae' (did you mean 'make'?)"),
    ("plan m.py:raises AUTO", "m.py:raises raised RuntimeError: no such width: 9 (at m.py:7)"),
    ("check m.py:leaves AUTO", "m.py:leaves raised SystemExit: 0"),
    ("plan m.py:needs AUTO", "m.py:needs has required arguments: write m.py:needs(width=...)"),
    ("plan division.py:make AUTO", "importing division.py raised ZeroDivisionError: division by zero (at division"),
    ("plan syntax.py:make AUTO", "importing syntax.py raised SyntaxError: '(' was never closed (at syntax.py:2)"),
    ("plan exit.py:make AUTO", "importing exit.py raised SystemExit: 3"),
    ("plan deep.safetensors.index.json AUTO", "it is not an index of safetensors"),
    ("plan lonely.safetensors.index.json AUTO", "config.json: its dtype, None, is not one of bfloat16"),
    ("plan cut.safetensors AUTO", "cut.safetensors: it has 10 bytes, and its header alone"),
    ("plan dtype.safetensors AUTO", "has tensors of dtypes that JAX arrays cannot have: F4 (w)"),
    ("plan m.py: AUTO", "m.py: does not exist: a model is module:function"),
    ("plan :make AUTO", ":make does not exist: a model is module:function"),
    ("plan m.py::make AUTO", "module 'm.py:' is neither installed nor in this folder"),
    ("plan 'm.py:make(' AUTO", "m.py:make( has parentheses that do not match"),
    ("plan 'm.py:make(depth)' AUTO", "the arguments must be literals"),
    ("plan 'm.py:make(1, 2)' AUTO", "cannot call m.py:make(1, 2): too many positional arguments"),
    ("plan 'm.py:make(width=3)' AUTO", "cannot call m.py:make(width=3): got an unexpected keyword"),
    ("plan m.py:forgets AUTO", "m.py:forgets returns None, with no array"),
    ("plan m.py:WIDTH AUTO", "m.py:WIDTH is a value of type int, with no array in it"),
    ("plan m.py:Empty AUTO", "returns a value of type Empty, with no array in it"),
    ("plan m.py:NOTHING AUTO", "is None, with no array in it"),
    ("plan m.py:endless AUTO", "raised RecursionError: maximum recursion depth exceeded"),
    ("plan '~nobody-here/m.py:make' AUTO", "there is no such user, so the folder ~nobody-here is unknown"),
    ("plan '~nobody-here/plan.json'", "there is no such user"),
    ("plan https://example.org/m.safetensors AUTO", "is an address: download the file"),
    ("plan folder AUTO", "the folder folder is empty: neither .safetensors nor an orbax checkpoint"),
    ("plan notes.txt AUTO", "cannot read notes.txt as a model: a model is"),
    # JSON
    ("plan empty.json", "empty.json is empty; shardrules plan -o empty.json writes a plan"),
    ("plan cut.json", "cut.json is cut off after 200 characters: write or download it again"),
    ("plan string.json", "string.json is cut off after 8 characters"),
    ("plan null.json", "null.json is not a plan"),
    ("plan changed.json", "this plan was changed after it was written"),
    ("plan list.json", "list.json is not a plan: it is JSON, but not what shardrules plan -o writes"),
    ("plan newer.json", "newer.json: this plan has format 9, and this version reads 1"),
    ("plan config.json", "config.json is not a plan: it is the configuration of a model: name its checkpoint"),
    ("plan audit.json", "audit.json is not a plan: it is an audit, which shardrules diff compares"),
    ("plan answer.json", "answer.json is not a plan: it is the answer of shardrules check"),
    ("plan deep.json", "deep.json is not JSON: it nests too deeply"),
    ("plan merge.json", "merge.json is not JSON: Expecting value in line 1, column 1"),
    ("plan 'größe.json'", "größe.json is not a plan"),
    ("plan m.json", "file m.json does not exist (did you mean 'p.json'?)"),
    ("diff p.json folder", "folder is a folder, not a file"),
    ("diff p.json audit.json", "audit.json is an audit and p.json is not: compare two audits, or two plans"),
    ("report p.json --audit list.json", "list.json is not what shardrules audit -o writes"),
    ("plan index.json AUTO", "an index of safetensors ends in .safetensors.index.json"),
    ("plan large.json AUTO", "large.json has 1.0 TiB, too much for a text file"),
    # Rules
    ("plan m.py:make MESH", "no rules: pass --rules file.toml"),
    ("RULES m.py:leaves", "m.py:leaves raised SystemExit: 0"),
    ("RULES m.py:BROKEN", "--rules: a rule raised KeyError: "),
    ("RULES m.py:PAIRS", "is a list, not a ShardingRule"),
    ("RULES shardrules:FSDPShardingRule", "is a class, not a rule: name an instance"),
    ("RULES fdsp", "--rules: rule text 'fdsp': unknown op 'fdsp' (did you mean 'fsdp'?)"),
    ("RULES 'fsdp()'", "missing 1 required positional argument: 'axis'"),
    (
        "RULES 'fsdp('\"'\"'daat'\"'\"')'",
        "unknown axis 'daat' (did you mean 'data'?); the mesh is data:4. The rules use it for 1",
    ),
    ("RULES axis.toml", "axis.toml: rules[0].spec[0]: unknown axis 'dta' (did you mean 'data'?); the mesh is data:4"),
    ("RULES axis_in_text.toml", "axis_in_text.toml: rules[0].rule: unknown axis 'dta' (did you mean 'data'?)"),
    ("RULES emty.toml", "file emty.toml does not exist (did you mean 'empty.toml'?)"),
    ("RULES bad.toml", "bad.toml: invalid TOML: "),
    ("RULES deep.toml", "deep.toml: invalid TOML"),
    ("RULES null.toml", "null.toml: rule.file: cannot read a\\x00b: "),
    ("RULES bytes.toml", "bytes.toml is not UTF-8 text (byte 2 is 0xff)"),
    ("RULES folder.toml", "folder.toml is a folder, not a file"),
    ("plan m.py:make --rules no_axes.toml", "no_axes.toml: mesh: the mesh is empty"),
    ("RULES ''", "--rules is empty; rules are a .toml file"),
    ("RULES folder", "--rules folder: this is a folder; rules are"),
    ("RULES notes.txt", "--rules notes.txt: this is a file of another kind; rules are"),
    ("RULES none.txt", "--rules none.txt: this is not a file; rules are"),
    ("RULES 'fsdp('", "'fsdp(' at column 5: '(' was never closed; write op|op(args)"),
    ("RULES 'fsdp('\"'\"'data'\"'\"''", "at column 5: '(' was never closed"),
    ("RULES 'fsdp('\"'\"'data'", "at column 6: unterminated string literal"),
    ("RULES 'fsdp('\"'\"'data'\"'\"'))'", "unmatched ')'"),
    ("RULES '|auto'", "invalid rule text '|auto' at column 1: write op|op(args)"),
    ("RULES 'auto||auto'", "invalid rule text 'auto||auto' at column 6"),
    ("RULES 3", "'3' is not an op; write op|op(args)"),
    ("RULES 'fsdp(3)'", "a mesh axis must be a name or a tuple of names, got 3"),
    ("RULES 'memory(-1)'", "must be a number of bytes, 0 or more; got -1"),
    ("RULES empty.toml", "empty.toml: the file has no rules: write tables"),
    ("RULES cut.json", "cut.json is cut off after 200 characters"),
    ("RULES m.py:WIDTH", "is a int, not a ShardingRule"),
    # Meshes
    ("plan m.py:make --rules auto", "no mesh: pass --mesh data:16,model:4"),
    ("plan m.py:make --rules auto --mesh ''", "--mesh is empty: write axes and sizes"),
    ("plan m.py:make --rules auto --mesh 0", "--mesh 0: a mesh has named axes, each of size 1 or more"),
    ("plan m.py:make --rules auto --mesh 8", "--mesh 8: a mesh has named axes, each of size 1 or more; "),
    ("plan m.py:make --rules auto --mesh -4", "--mesh -4: a mesh has named axes"),
    ("plan m.py:make --rules auto --mesh 'data:4;model:2'", "separate axes with commas"),
    ("plan m.py:make --rules auto --mesh data:0", "'data:0' is not name:size with a size of 1 or more"),
    ("plan m.py:make --rules auto --mesh data:4.5", "'data:4.5' is not name:size"),
    ("plan m.py:make --rules auto --mesh 'data:4 model:2'", "separate axes with commas"),
    ("plan m.py:make --rules auto --mesh data:4,data:2", "axis 'data' occurs twice"),
    ("autoplan m.py:step --mesh 1.5", "'1.5' is not name:size"),
    ("autoplan m.py:step --mesh 0", "--mesh 0: a number of devices is 1 or more"),
    ("autoplan m.py:step --mesh -8", "--mesh -8: a number of devices is 1 or more"),
    # Numbers
    ("check p.json --budget -5GiB", "--budget must be a number of bytes, 0 or more; got '-5GiB'"),
    ("check p.json --budget -5", "--budget must be a number of bytes, 0 or more; got '-5'"),
    ("check p.json --budget 5gib", "got '5gib' (did you mean '5GiB'?)"),
    ("check p.json --budget infGiB", "--budget must be a number of bytes, or a string like '80GB'"),
    ("check p.json --budget ''", "--budget must be a number of bytes"),
    ("autoplan m.py:step --mesh 8 --memory-limit x", "--memory-limit must be a number of bytes"),
    ("autoplan m.py:step --mesh 8 --memory-limit -1", "--memory-limit must be a number"),
    ("autoplan m.py:step --mesh 8 --time-limit x", "--time-limit: invalid float value: 'x'"),
    ("autoplan m.py:step --mesh 8 --time-limit -1", "--time-limit must be a number of seconds"),
    ("autoplan m.py:step --mesh 8 --frontier -1", "--frontier must be 2 budgets or more"),
    ("autoplan m.py:step --mesh 8 --hardware h100", "(did you mean 'cuda:h100'?)"),
    # Golden plans
    ("check p.json --golden none.json", "file none.json does not exist"),
    ("check p.json --golden folder", "--golden: folder is a folder, not a file"),
    ("check p.json --golden changed.json", "this plan was changed after it was written"),
    ("check p.json --golden cut.json", "cut.json is cut off after 200 characters: write or download"),
    ("check p.json --golden m.py", "--golden: m.py is not JSON"),
    ("check p.json --update", "--update needs the name of the golden plan"),
    # Files that are written
    ("plan p.json -o folder", "folder is a folder: name a file in it"),
    ("plan p.json -o no/such/plan.json", "the folder no/such does not exist; make it first"),
    ("plan p.json -o p.json/x.json", "cannot write p.json/x.json: p.json is a file, not a folder"),
    ("report p.json -o no/page.html", "the folder no does not exist; make it first"),
    ("plan p.json -o -", "cannot write to -: --format json prints"),
    ("plan p.json -o /dev/full", "cannot write /dev/full: No space left on device"),
    # Optimizers
    ("plan p.json --optimizer ''", "write its name, with arguments if any"),
    ("plan p.json --optimizer Adam", "unknown optimizer 'Adam' (did you mean 'adam'?)"),
    ("plan p.json --optimizer 'adamw('", "write its name, with arguments if any"),
    ("plan p.json --optimizer optax:adamw", "missing 1 required positional argument: 'learning_rate'"),
    ("plan p.json --optimizer nowhere:adam", "module 'nowhere' is neither installed nor in this folder"),
    ("plan p.json --optimizer m.py:make", "is a dict: name an optax.GradientTransformation"),
    ("plan p.json --optimizer 'adamw(beta=1)'", "--optimizer adamw(beta=1) raised TypeError: "),
    # Steps
    ("audit m.py:WIDTH MESH CUDA", "name a function that returns (step, *arguments)"),
    ("audit m.py:step MESH CUDA --flags maxtext:v5f", "--flags: unknown set of flags 'maxtext:v5f'"),
    ("audit m.py:bad_step AUTO CUDA --params v", "--params v: unknown argument 'v'; the arguments are w"),
    ("audit m.py:bad_step AUTO CUDA --batch dat", "--batch dat: unknown axis 'dat' (did you mean 'data'?)"),
    ("autoplan m.py:bad_step MESH", "m.py:bad_step: the step raised TypeError: "),
    ("autoplan m.py:leaving_step MESH", "the step raised SystemExit: 0"),
    ("autoplan m.py:step MESH --time-limit nan", "--time-limit must be a number of seconds above 0"),
    ("autoplan m.py:step MESH --pins 'fsdp('\"'\"'dta'\"'\"', 0)'", "unknown axis 'dta' (did you mean 'data'?)"),
    ("autoplan m.py:step --mesh 8 --pins 'fsdp('\"'\"'dta'\"'\"', 0)'", "meshes of 8 devices have data and model"),
    ("autoplan m.py:step MESH --pins nothing.toml", "--pins nothing.toml matches no array: paths begin"),
    ("audit m.py:step", "no mesh: pass --mesh data:4,model:2"),
    ("audit m.py:step MESH --target gpu", "unknown platform 'gpu' (did you mean 'cuda'?)"),
    ("audit m.py:step MESH CUDA --batch data", "--batch says what rules are for"),
    ("audit m.py:step MESH CUDA --params p", "--params says what rules are for"),
    ("audit m.py:step AUTO CUDA --batch data,data", "can be named only once"),
    ("audit m.py:step AUTO CUDA --params p/q", "unknown part 'q'; the parts are w"),
    ("audit m.py:step AUTO CUDA --donate q", "unknown argument 'q'; "),
    ("audit m.py:step MESH --target cuda:h100", "the number of GPUs is missing. Write cuda:"),
    ("audit m.py:listed AUTO CUDA", "must return a step and its arguments, but returns a list"),
    ("audit m.py:alone AUTO CUDA", "must return a step and its arguments"),
    ("audit p.json AUTO CUDA", "'p.json' does not name a Python object"),
    # Training plans
    ("TRAIN foo", "'foo' has no arrays: write"),
    ("TRAIN 'int32[8]' -o no/plan.json", "the folder no does not exist; make it first"),
    (
        "TRAIN 'f32[8]' --pins 'shard_dim('\"'\"'tp'\"'\"', 0)'",
        "unknown axis 'tp'; the meshes of a cluster have stage, replica",
    ),
    # Explanations
    ("explain p.json nope", "the plan has no leaf at 'nope', and no path matches it as a pattern"),
    ("explain p.json '('", "it is not a valid pattern: missing ), unterminated subpattern"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wrong")
    for name in ("folder", "folder.toml"):
        (path / name).mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with (path / "large.json").open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no space
    return path


@pytest.mark.sample(8)
@pytest.mark.parametrize(("command", "message"), WRONG, ids=[command for command, _ in WRONG])
def test_messages_name_the_cause(
    command: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in SHORT.items():
        command = command.replace(name, text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    files = sorted(os.listdir(folder))
    assert main(shlex.split(command)) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (out, line.startswith("shardrules: error: ")) == ("", True)
    assert message in line
    assert [name for name in sorted(os.listdir(folder)) if name not in (*files, "__pycache__")] == []


def test_values_may_begin_with_a_dash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse would take them for options."""
    monkeypatch.chdir(folder)
    assert main(["report", "p.json", "--title", "-- draft --", "-o", "draft.html"]) == 0
    assert "-- draft --" in (folder / "draft.html").read_text()
    assert json.loads((folder / "p.json").read_text())["shardrules"] == 1


@pytest.mark.parametrize("name", ["hf", "auto", "replicate"])
def test_folders_and_files_do_not_hide_rules(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.json").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    words = ["plan", "p.json", "--rules", name, "--mesh", "data:4"]
    code = main(words)
    (tmp_path / name).mkdir()
    assert main(words) == code != 2
    (tmp_path / name).rmdir()
    (tmp_path / name).write_text("")
    assert main(words) == code
