"""The text of plans: what is written, what is read back, and what is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.storage import codec

MESH = sr.mesh_shape("data:4,model:2")
KEYS = [jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype for impl in ("threefry2x32", "rbg")]
DTYPES: list[Any] = [
    *(jnp.bool_, jnp.int2, jnp.uint2, jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32),
    *(jnp.float4_e2m1fn, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64),
    *(np.int64, np.float64, np.complex128),
    *KEYS,
    jax.eval_shape(lambda: jax.random.key(0, impl="unsafe_rbg")).dtype,
]
NOTE = sr.Finding("note", "unmatched", "it is", "layers/0/w")
FINDING = sr.Finding("warning", "fitted", "dropped", "w", "Correct it", (8, 4), 1, "model", 3, "FittedShardingRule")

FINGERPRINT = "ed8ee059fe1246db95c58f7dc6ba4a48e451904baac466923397b3e6709c096e"

GOLDEN = """\
{
 "shardrules": 1,
 "fingerprint": "FINGERPRINT",
 "mesh": {
  "data": 4,
  "model": 2
 },
 "path_style": "attr",
 "leaves": [
  {
   "paths": [
    "layers/0/w",
    "layers/1/w"
   ],
   "shape": [
    8,
    4
   ],
   "dtype": "bfloat16",
   "axes": [
    "embed",
    [
     "mlp",
     "heads"
    ]
   ],
   "spec": [
    "data",
    null,
    [
     "model",
     "x"
    ],
    "?"
   ],
   "rule": "Rule",
   "reason": "because",
   "findings": [
    {
     "severity": "note",
     "code": "unmatched",
     "message": "it is",
     "path": "layers/0/w",
     "remedy": "",
     "shape": null,
     "dim": null,
     "axis": null,
     "count": 1,
     "rule": ""
    }
   ]
  },
  {
   "paths": [
    "b"
   ],
   "shape": [],
   "dtype": "int4",
   "axes": null,
   "spec": null,
   "rule": "-",
   "reason": "",
   "findings": []
  }
 ],
 "findings": [
  {
   "severity": "warning",
   "code": "fitted",
   "message": "dropped",
   "path": "w",
   "remedy": "Correct it",
   "shape": [
    8,
    4
   ],
   "dim": 1,
   "axis": "model",
   "count": 3,
   "rule": "FittedShardingRule"
  }
 ]
}""".replace("FINGERPRINT", FINGERPRINT)


def example() -> tuple[list[tuple[list[str], sr.Leaf, sr.Decision]], str]:
    weight = sr.Leaf("layers/0/w", (8, 4), np.dtype(jnp.bfloat16), MESH, axes=("embed", ("mlp", "heads")))
    bias = sr.Leaf("b", (), np.dtype(jnp.int4), MESH)
    spec = P("data", None, ("model", "x"), P.UNCONSTRAINED)
    groups = [
        (["layers/0/w", "layers/1/w"], weight, sr.Decision(spec, "because", "Rule", (NOTE,))),
        (["b"], bias, sr.Decision(None, "")),
    ]
    leaves = [codec.leaf_to_json(*group) for group in groups]
    return groups, codec.dumps({"data": 4, "model": 2}, leaves, [FINDING], "attr", FINGERPRINT)


def test_the_text_is_laid_out_for_diffs() -> None:
    assert example()[1] == GOLDEN


def test_what_was_written_is_read() -> None:
    groups, text = example()
    read = codec.loads(text)
    assert read == codec.SavedPlan(MESH, tuple(groups), (FINDING,), "attr", FINGERPRINT)
    assert codec.loads(text.replace('"attr"', '"index"')).path_style == "index"


def test_a_mesh_keeps_the_order_of_its_axes() -> None:
    mesh = codec.loads(codec.dumps({"z": 2, "a": 1, "m": 4}, [], [], "attr", "")).mesh
    assert mesh is not None
    assert (mesh.axis_names, mesh.axis_sizes) == (("z", "a", "m"), (2, 1, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: Any) -> None:
    shape = jax.ShapeDtypeStruct((8, 3), dtype)
    plan = sr.DimShardingRule("data", 0).plan({"x": shape}, MESH)
    read = sr.ShardingPlan.from_json(plan.to_json())
    assert read == plan
    assert read.fingerprint == plan.fingerprint
    assert read.leaves[0].dtype == plan.leaves[0].dtype
    assert read.memory() == plan.memory()
    assert sr.ShardingPlan.from_json(plan.to_json(), {"x": shape}) == plan


@pytest.mark.parametrize(
    "spec",
    [
        None,
        P(),
        P(None),
        P("data"),
        P(None, "data"),
        P(("data", "model"), None),
        P(P.UNCONSTRAINED, ("model",)),
        P(("data",)),
        P((), "data"),
    ],
    ids=str,
)
def test_every_spec_comes_back(spec: P | None) -> None:
    tree = {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    plan = sr.SpecTreeShardingRule({"x": spec}).plan(tree, MESH)
    assert sr.ShardingPlan.from_json(plan.to_json()) == plan
    assert sr.ShardingPlan.from_json(plan.to_json(), tree) == plan
    assert sr.ShardingPlan.from_json(plan.to_json()).decision("x").spec == spec


@pytest.mark.parametrize("path", ["w", "a b/ü", 'q"uote', "back\\slash", "line\nbreak", "tab\t|pipe", "\u2028", "?"])
def test_every_path_comes_back(path: str) -> None:
    plan = sr.DimShardingRule("data", 0).plan({path: np.ones(8)}, MESH)
    read = sr.ShardingPlan.from_json(plan.to_json())
    assert read == plan
    assert read.paths == (path,)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "this text is not a plan: JSONDecodeError"),
        ("{", "this text is not a plan: JSONDecodeError"),
        ("null", "this text is not a plan: TypeError"),
        ("[]", "this text is not a plan: TypeError"),
        ("{}", "this text is not a plan: KeyError: 'shardrules'"),
        ('{"shardrules": 2}', "this plan has format 2, and this version reads 1"),
        ('{"shardrules": "1"}', "this plan has format '1', and this version reads 1"),
        ('{"shardrules": 1}', "this text is not a plan: KeyError: 'mesh'"),
        (GOLDEN.replace('"bfloat16"', '"bfloat17"'), "this text is not a plan: .*bfloat17"),
        (GOLDEN.replace('"bfloat16"', '"key<abc>"'), r"unknown PRNG key type 'key<abc>'; JAX has key<fry>, key<rbg>"),
        (GOLDEN.replace('"data",\n    null', "3,\n    null"), "this text is not a plan: SpecError: .*got 3"),
        (GOLDEN.replace('"attr"', '"atr"'), "this text is not a plan: ValueError: unknown path style 'atr'"),
        (GOLDEN.replace(' "path_style": "attr",', ""), "this text is not a plan: KeyError: 'path_style'"),
        (GOLDEN.replace('"severity"', '"loudness"'), "this text is not a plan: LookupError: .*severity missing"),
        (GOLDEN.replace('[\n    "b"\n   ]', "[]"), "this text is not a plan: IndexError"),
        (GOLDEN.replace('"model": 2', '"model": 0'), "this text is not a plan: ValueError: .*a number below 1"),
        (GOLDEN.replace('"model": 2', '"model": "2"'), "this text is not a plan: TypeError: expected int, got '2'"),
        (
            GOLDEN.replace('"path": "w"', '"path": null'),
            r"this text is not a plan: TypeError: findings\[0\]\.path must be str, got None",
        ),
        (
            GOLDEN.replace('"warning"', '"fatal"'),
            "this text is not a plan: TypeError: .*severity must be 'error' or .*, got 'fatal'",
        ),
    ],
)
def test_what_is_no_plan_is_refused(text: str, match: str) -> None:
    with pytest.raises(sr.errors.PlanError, match=f"(?s){match}"):
        codec.loads(text)
    with pytest.raises(sr.errors.PlanError, match=f"(?s){match}"):
        sr.ShardingPlan.from_json(text)


def mangled(data: Any) -> Iterator[Any]:
    """Every way to replace one value inside `data` by one of another kind, or to leave it out."""
    strange: list[Any] = [None, True, -3, 1.5, "x", [], ["x"], [[3]], {}, {"x": 0}]
    yield from strange
    if isinstance(data, dict):
        for key, value in data.items():
            yield {other: value for other, value in data.items() if other != key}
            for changed in mangled(value):
                yield {**data, key: changed}
    elif isinstance(data, list):
        for place, value in enumerate(data):
            yield data[:place] + data[place + 1 :]
            for changed in mangled(value):
                yield [*data[:place], changed, *data[place + 1 :]]


def test_whatever_is_changed_in_a_text_is_a_plan_or_refused() -> None:
    accepted = refused = 0
    for data in mangled(json.loads(GOLDEN)):
        try:
            plan = sr.ShardingPlan.from_json(json.dumps(data))
            assert plan.fingerprint in plan.to_json()
            assert str(plan)
            assert plan.fingerprint == FINGERPRINT
            accepted += 1
        except sr.errors.PlanError:
            refused += 1
    assert accepted > 10
    assert refused > 100


def test_reading_starts_no_backend() -> None:
    shape = {"key": jax.ShapeDtypeStruct((8,), KEYS[0]), "w": jax.ShapeDtypeStruct((8, 4), jnp.int4)}
    text = sr.DimShardingRule("data", 0).plan(shape, sr.mesh_shape("data:4096")).to_json()
    script = (
        "import sys, jax, shardrules as sr\n"
        "plan = sr.ShardingPlan.from_json(sys.stdin.read())\n"
        "print(plan, plan.fingerprint, len(plan.to_json()))\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # refused once a backend is up\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", script], input=text, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "(8, 4)  int4" in done.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"bfloat16"', '"float16"'),
        ('    4\n   ],\n   "dtype', '    5\n   ],\n   "dtype'),
        ('"data",\n    null', 'null,\n    "data"'),
        ('"data": 4', '"data": 8'),
        ('"layers/1/w"', '"layers/2/w"'),
        (FINGERPRINT, "0" + FINGERPRINT[1:]),
    ],
)
def test_a_text_that_was_changed_by_hand_is_refused(old: str, new: str) -> None:
    assert sr.ShardingPlan.from_json(GOLDEN).fingerprint == FINGERPRINT
    assert GOLDEN.count(old) == 1
    with pytest.raises(
        sr.errors.PlanError, match=r"this plan was changed after it was written: its fingerprint is '\w{64}'"
    ):
        sr.ShardingPlan.from_json(GOLDEN.replace(old, new))


@pytest.mark.parametrize("index", ["1", "-1", "01", "w", "9" * 20])
def test_names_of_arguments_need_paths_that_begin_with_their_indices(index: str) -> None:
    weight = sr.Leaf("0/w", (8, 4), np.dtype(np.float32), MESH)

    def text(path: str) -> str:
        leaf = codec.leaf_to_json([path], weight, sr.Decision(P(), "", "Rule"))
        return codec.dumps({"data": 4}, [leaf], [], "attr", FINGERPRINT, ("x",))

    assert codec.loads(text("0/w")).argument_names == ("x",)
    with pytest.raises(sr.errors.PlanError, match="do not begin with the index of one of 1 arguments"):
        codec.loads(text(f"{index}/w"))


def test_names_of_several_axes_come_back() -> None:
    box = nn.Partitioned(np.ones((8, 4), np.float32), (("data", "model"), None))  # pyright: ignore[reportArgumentType]
    plan = sr.DimShardingRule("data", 0).plan({"w": box}, MESH)
    read = sr.ShardingPlan.from_json(plan.to_json())
    assert read == plan
    assert read.leaves[0].axes == (("data", "model"), None)


def test_findings_come_back_in_their_order() -> None:
    tree = {
        "a": np.ones((7, 3)),
        "layers": [{"w": np.ones((8, 6)), "b": np.ones(5)} for _ in range(3)],
        "z": np.ones(3),
    }
    inside = sr.RegexShardingRule([("w|a", P("data", "x")), ("z", P("data")), ("dead", P())])
    for rule in (
        sr.FittedShardingRule(inside),
        sr.RegexShardingRule([("layers/1/", P()), ("", sr.FittedShardingRule(inside))]),
    ):
        plan = rule.plan(tree, MESH)
        text = plan.to_json()
        for read in (sr.ShardingPlan.from_json(text), sr.ShardingPlan.from_json(text, tree)):
            assert str(read) == str(plan)
            assert read.findings == plan.findings
            assert read.to_json() == text
