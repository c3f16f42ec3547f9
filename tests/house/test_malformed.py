"""Every reader of text answers what it cannot read with its documented error, wherever in the text it stands."""

import copy
import functools
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.cli.checkpoints import load_safetensors_shapes
from shardrules.cli.errors import UsageError, byte_option
from shardrules.cli.objects import load_shapes
from shardrules.cli.subject import read_mesh
from shardrules.core.errors import (
    CheckpointError,
    ConfigError,
    HardwareError,
    MeshError,
    PatternError,
    PlanError,
    ReportError,
    RulesFileError,
    ShardRulesError,
    TargetError,
    TreeError,
    UnknownOpError,
)
from shardrules.core.fields import read_bytes
from shardrules.presets import big_vision, eformer
from shardrules.programs.profiles.comparison import TraceComparison
from tests.programs.audits.sample_report import REPORT
from tests.programs.profiles.planes import tpu_trace
from tests.programs.profiles.test_compare import compare

HUGE = "9" * 5000
DEPTH = 1000
VALUES = {
    "null": "null",
    "true": "true",
    "float": "0.0",
    "negative": "-1",
    "text": '"x"',
    "surrogate": '"\\ud800"',
    "empty list": "[]",
    "list": "[1]",
    "nested list": "[[1]]",
    "object": '{"a": 1}',
    "empty object": "{}",
    "64 bits": str(2**63 - 1),
    "4000 digits": HUGE[:4000],
    "5000 digits": HUGE,
    "text of 5000 digits": f'"{HUGE}"',
    "exponent": "1e999",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "cut off": "[" * 100_000,
    "deep list": "[" * DEPTH + "]" * DEPTH,
    "deep object": '{"a":' * DEPTH + "1" + "}" * DEPTH,
}
"""What is put at each place of a text, as JSON."""

_HOLE = "a hole in a text of JSON"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in JSON, the whole first; of equal rows the first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`data` with another value at a path; without the key where the value is `...`."""
    if not path:
        return value
    result = copy.deepcopy(data)
    node = result
    for key in path[:-1]:
        node = node[key]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return result


@final
@attrs.frozen
class JsonReader:
    """A reader of JSON: a text that it reads, and the errors that its documentation names."""

    read: Callable[[str], Any]
    sample: Callable[[], str]
    errors: tuple[type[ShardRulesError], ...]


def _plan() -> str:
    rule = sr.RegexShardingRule([("w", P("data", ("model",))), ("x", P("nope"))]) | sr.FSDPShardingRule("data")
    tree = {"w": [np.ones((8, 4))] * 2, "key": jax.random.key(0), "x": jnp.ones(3)}
    return rule.plan(tree, sr.mesh_shape("data:4,model:2")).to_json()


@functools.cache
def _comparison() -> str:
    return compare(tpu_trace(steps=4, devices=1)).to_json()


@functools.cache
def _autoplan() -> str:
    planned = sr.autoplan(lambda w, x: x @ w, jnp.ones((64, 64)), jnp.ones((512, 64)), mesh=sr.mesh_shape("data:4"))
    return sr.reports.AutoPlanReport.of(planned).to_json()


def _config() -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100}
    blocks = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    return json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", **sizes, "quantization_config": blocks})


def _in_folder(name: str, read: Callable[[Path], Any], text: str, **others: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for file, content in {name: text, **others}.items():
            Path(folder, file).write_text(content, errors="surrogatepass")
        return read(Path(folder, name))


_NAMES = ("embed_tokens.weight", "layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight_scale_inv")
_INDEX = {"metadata": {"total_size": 21024}, "weight_map": {f"model.{name}": "a.safetensors" for name in _NAMES}}


def _read_index(text: str) -> Any:
    return _in_folder("model.safetensors.index.json", load_safetensors_shapes, text, **{"config.json": _config()})


def _read_config_file(text: str) -> Any:
    return _in_folder(
        "config.json",
        lambda file: load_safetensors_shapes(file.parent),
        text,
        **{"model.safetensors.index.json": json.dumps(_INDEX)},
    )


def _header() -> str:
    return json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"a": "b"}})


def _read_header(text: str) -> Any:
    data = text.encode(errors="surrogatepass")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        file.write_bytes(len(data).to_bytes(8, "little") + data + bytes(16))
        like = {"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
        return sr.load_safetensors(file, like, P(), sr.create_mesh("data:8"))


JSON_READERS = {
    "plan": JsonReader(lambda text: str(sr.ShardingPlan.from_json(text)), _plan, (PlanError,)),
    "audit": JsonReader(sr.reports.AuditReport.from_json, REPORT.to_json, (ReportError,)),
    "comparison": JsonReader(
        TraceComparison.from_json, lambda: compare(tpu_trace(steps=4, devices=1)).to_json(), (ReportError,)
    ),
    "autoplan": JsonReader(sr.reports.AutoPlanReport.from_json, _autoplan, (ReportError,)),
    "config.json": JsonReader(_read_config_file, _config, (UsageError,)),
    "index": JsonReader(_read_index, lambda: json.dumps(_INDEX), (UsageError,)),
    "header": JsonReader(_read_header, _header, (CheckpointError, PlanError)),
}


def complaints(reader: JsonReader, draws: int | None) -> list[str]:
    """The changes that a reader answers with an error that is not documented."""
    data = json.loads(reader.sample())
    reader.read(reader.sample())
    changes = [(path, name) for path in places(data) for name in [*VALUES, "missing"] if path or name != "missing"]
    if draws is not None and len(changes) > draws:
        changes = random.Random(0).sample(changes, draws)
    result = []
    for path, name in changes:
        text = json.dumps(changed(data, path, _HOLE if name in VALUES else ...))
        text = text.replace(json.dumps(_HOLE), VALUES.get(name, ""))
        try:
            reader.read(text)
        except reader.errors as error:
            str(error)
        except Exception as error:  # noqa: BLE001  each is a complaint
            result.append(f"{'/'.join(map(str, path))} {name}: {type(error).__name__}: {error!s:.200}")
    return result


SOME_OR_ALL = pytest.mark.parametrize("draws", [60, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])
"""Values at places: a sample, or each at each."""


@SOME_OR_ALL
@pytest.mark.parametrize("name", JSON_READERS)
def test_readers_of_json_refuse_what_they_cannot_read(name: str, draws: int | None) -> None:
    assert not complaints(JSON_READERS[name], draws)


TEXTS = [
    *("", " ", "\x00", "\ud800", "a\nb", *"'()[{", "x" * 100_000, HUGE, f"-{HUGE}", f"0x{HUGE}", f"{HUGE}.5"),
    *("(" * DEPTH, "(" * DEPTH + "x" + ")" * DEPTH, "[" * DEPTH + "]" * DEPTH, "-" * DEPTH + "1", "a." * DEPTH + "b"),
    *("|".join(["replicate"] * DEPTH), "replicate|(" * 150 + "replicate" + ")" * 150, "(" * 40 + "a" + "+)+" * 40),
    *(f"fsdp({'(' * DEPTH}'a'{')' * DEPTH})", f"fsdp({'[' * 150}{']' * 150})", f"fsdp({'-' * DEPTH}1)"),
    *(f"shard_dim('a', {HUGE})", f"shard_dim('a', 0x{HUGE})", f"shard_dim('a', -0x{HUGE})", "shard_dim('a', 1e999)"),
    *(f"fsdp('a', min_size_mb={HUGE})", "fsdp('a', min_size_mb=1e999)"),
    *("fsdp('\ud800')", "fsdp(**{'a': 1})", "fsdp(*[1])"),
    *(f"a{{{HUGE}}}", "a{99999999999}", f"(?P<{HUGE}>a)", f"\\{HUGE}", "(?P=a)", "[z-a]", "(?i", "a" * 5000 + "*"),
    *(f"data:{HUGE}", f"data:{HUGE[:4000]},model:{HUGE[:4000]}", f"data:0x{HUGE}", "data:1e9", "data:\ud800", "data:²"),
    *(f"{target}{HUGE}" for target in ("tpu:v5e:", "tpu:v5e:4x", "cuda:h100:", "cpu:", "tpu:v5e:4x4:")),
    "cuda:\ud800:8",
    *(f"{HUGE}GiB", f"{HUGE}.{HUGE}kB", f"float32[{HUGE}]", f"float32[8,{HUGE}]", f"x->{HUGE}", f"{'(' * DEPTH}->a"),
]

TEXT_READERS: dict[str, tuple[Callable[[str], Any], tuple[type[ShardRulesError], ...]]] = {
    "parse_rule": (lambda text: repr(sr.parse_rule(text)), (ConfigError, UnknownOpError)),
    "parse_name": (big_vision.parse_name, (ConfigError,)),
    "pattern": (lambda text: sr.RegexShardingRule([(text, P())]).plan({"a": jnp.ones(2)}), (PatternError,)),
    "masks": (lambda text: big_vision.make_mask_trees({"a": 1.0}, [text]), (PatternError,)),
    "match_partition_rules": (
        lambda text: eformer.match_partition_rules([(text, P()), (".*", P())], {"a": 1.0}),
        (PatternError,),
    ),
    "pattern spec": (lambda text: eformer.create_pattern_based_partition_spec(text)("a", None), (PatternError,)),
    "explain": (
        lambda text: sr.ReplicateShardingRule().plan({"a": jnp.ones(2)}).explain(text),
        (PatternError, TreeError),
    ),
    "mesh_shape": (lambda text: repr(sr.mesh_shape(text)), (MeshError,)),
    "create_mesh": (sr.create_mesh, (MeshError,)),
    "parse_mesh_from_string": (lambda text: sr.meshes.parse_mesh_from_string(text, ["data"]), (MeshError,)),
    "sizes": (lambda text: sr.create_mesh((int(text, 16), 8), ("a", "b")) if text.isdecimal() else None, (MeshError,)),
    "target": (lambda text: str(sr.Target.parse(text)), (TargetError,)),
    "bytes": (lambda text: read_bytes("budget", text), (ConfigError,)),
    "--budget": (lambda text: byte_option("--budget", text), (UsageError,)),
    "--mesh": (read_mesh, (UsageError,)),
    "shapes": (lambda text: load_shapes(f"float32[{text}]"), (UsageError,)),
    "rules file": (lambda text: _in_folder("rules.toml", sr.load_rules, text), (RulesFileError,)),
    "sheet": (lambda text: _in_folder("sheet.toml", sr.Hardware.load, text), (HardwareError, ConfigError)),
}


def text_complaints(name: str, texts: list[str]) -> list[str]:
    """The texts that a reader answers with an error that is not documented."""
    read, errors = TEXT_READERS[name]
    result = []
    for text in texts:
        try:
            read(text)
        except errors as error:
            str(error)
        except Exception as error:  # noqa: BLE001  each is a complaint
            result.append(f"{text[:60]!r}: {type(error).__name__}: {error!s:.200}")
    return result


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")  # Python's, of patterns with "[["
@pytest.mark.parametrize("name", TEXT_READERS)
def test_readers_of_text_refuse_what_they_cannot_read(name: str) -> None:
    assert not text_complaints(name, TEXTS)


_VALUES_OF_TOML = [
    *("1", "-1", "0.0", "1e999", "nan", "inf", "true", "'x'", "[]", "[[]]", "[1]", "{}", "1979-05-27"),
    *("'\ud800'", "9223372036854775808"),
    *("{a = 1}", HUGE, f"-{HUGE}", f"0x{'f' * 5000}"),
    *("[" * DEPTH + "]" * DEPTH, "{a = " * DEPTH + "1" + "}" * DEPTH),
    *("{rule = " * 300 + "'fsdp'" + "}" * 300, "[" * 90 + "'a'" + "]" * 90, f"'fsdp(0x{HUGE})'", f"'{'(' * DEPTH}'"),
]


def toml_texts(sample: str) -> list[str]:
    """The sample with each value in turn replaced by each other one."""
    lines = sample.splitlines()
    return [
        "\n".join([*lines[:index], f"{line.partition('=')[0]}= {value}", *lines[index + 1 :]])
        for index, line in enumerate(lines)
        if "=" in line
        for value in _VALUES_OF_TOML
    ]


RULES = """
mesh = "data:4,model:2"
optimizer = "adamw"
[limits]
budget = "16GiB"
level = "error"
[[rules]]
path = "norm"
spec = ["data", ["model"]]
[[rules]]
rule = "fsdp('data')"
[[rules]]
type = "auto"
mesh = "data:8"
axis_names = ["data"]
min_shard_size = 4
[[rules]]
type = "memory"
max_memory_per_device = 1024
[[rules]]
type = "stacked"
dims = 1
rule = { type = "shard_dim", axis = "data", dim = 0 }
[[rules]]
type = "shape"
patterns = [{ shape = ["*", 8], spec = ["data"] }]
[[rules]]
type = "logical"
mapping = { embed = "data" }
[[rules]]
type = "hf"
head_dim = 64
"""


@SOME_OR_ALL
@pytest.mark.parametrize("name", ["rules file", "sheet"])
def test_readers_of_toml_refuse_what_they_cannot_read(name: str, draws: int | None, tmp_path: Path) -> None:
    sr.Hardware.named("tpu:v5e").save(tmp_path / "sheet.toml")
    texts = toml_texts(RULES if name == "rules file" else (tmp_path / "sheet.toml").read_text())
    assert not text_complaints(name, texts if draws is None else random.Random(0).sample(texts, 150))


def test_a_reader_that_lets_an_error_through_is_reported() -> None:
    reader = JsonReader(lambda text: json.loads(text)["a"].upper(), lambda: '{"a": "b"}', (ReportError,))
    assert any("AttributeError" in line for line in complaints(reader, draws=None))
