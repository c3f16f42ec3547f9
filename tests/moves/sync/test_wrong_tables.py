"""Wrong tables: each is refused with all that is wrong, with paths, shapes and nearest names, and nothing moves."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

Shape = tuple[tuple[int, ...], Any]

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32

LAYERS = {f"layers/{index}/q": ((8, 4), F32) for index in range(3)}

WRONG: dict[str, tuple[dict[str, Shape], dict[str, Shape], Any, Sequence[str]]] = {
    "a renamed parameter": (
        {"wq": ((8,), F32)},
        {"w_q": ((8,), F32)},
        None,
        [
            "no-target: wq: line 1",
            "the target lacks it (did you mean 'w_q'?)",
            "missing: w_q (8,)",
            "(did you mean 'wq'?)",
        ],
    ),
    "a line that matches nothing": (
        {"attention/q": ((8,), F32)},
        {"q": ((8,), F32)},
        [("attn/q", "q")],
        ["line 1 (attn/q -> q) matches no array (did you mean 'attention/q'?)", "unused: attention/q (8,)"],
    ),
    "a pattern of a list that matches nothing": (
        {"a/q": ((8,), F32)},
        {"qk": ((16,), F32)},
        [(["a/q", "a/k"], "qk", "concat(0)")],
        ["'a/k' of line 1", "(did you mean 'a/q'?)", "match 1, 0 arrays"],
    ),
    "an array of the source without a line": (
        {"a": ((8,), F32), "b": ((8, 2), F32)},
        {"a": ((8,), F32)},
        [("a", "a")],
        ["unused: b (8, 2): no line of the table uses this array", "name it as unused: 'b'"],
    ),
    "many arrays of the source without a line": (
        {**LAYERS, "a": ((8,), F32)},
        {"a": ((8,), F32)},
        [("a", "a")],
        ["unused: layers/*/q (8, 4) x3"],
    ),
    "an array of the target without a line": (
        {"a": ((8,), F32)},
        {"a": ((8,), F32), "bias": ((4,), F32)},
        [("a", "a")],
        ["missing: bias (4,): no line of the table makes this array"],
    ),
    "a target that two lines make": (
        {"a": ((8,), F32), "b": ((8,), F32)},
        {"x": ((8,), F32)},
        [("a", "x"), ("b", "x")],
        ["twice: x: line 2 (b -> x) makes it, and line 1 does, too"],
    ),
    "a target that one line makes twice": (
        LAYERS,
        {"q": ((8, 4), F32)},
        [("layers/{i}/q", "q")],
        ["the source has {i}, which the target lacks: stack it"],
    ),
    "a capture of the target alone": (
        {"q": ((3, 8), F32)},
        {"layers/0": ((8,), F32)},
        [("q", "layers/{i}")],
        ["the target has {i}, which the source lacks: unstack makes it"],
    ),
    "captures with different names": (
        LAYERS,
        {f"l{index}": ((8, 4), F32) for index in range(3)},
        [("layers/{layer}/q", "l{layr}")],
        ["{layer}, which the target lacks", "{layr}, which the source lacks (did you mean 'layer'?)"],
    ),
    "other shapes": (
        {"a": ((8, 4), F32)},
        {"a": ((4, 8), F32)},
        None,
        ["shape: a: line 1", "makes float32[8, 4] (float32[8, 4]), the target has float32[4, 8]"],
    ),
    "other dtypes": (
        {"a": ((8,), F32)},
        {"a": ((8,), BF16)},
        None,
        ["the target has bfloat16[8]", "Add cast('bfloat16')"],
    ),
    "a transposition of another rank": (
        {"a": ((8, 4), F32)},
        {"a": ((4, 8), F32)},
        [("a", "a", "transpose(2, 1, 0)")],
        ["transpose(2, 1, 0) after float32[8, 4]: shape (8, 4) has no permutation (2, 1, 0)"],
    ),
    "an impossible reshape, after other steps": (
        {"a": ((8, 4), F32)},
        {"a": ((5, 7), F32)},
        [("a", "a", "transpose(1, 0) | reshape(5, -1)")],
        ["after float32[8, 4] -> transpose(1, 0) float32[4, 8]: shape (4, 8), 32 elements, cannot become (5, -1)"],
    ),
    "a split into sizes that do not add up": (
        {"qkv": ((12, 4), F32)},
        dict.fromkeys("qkv", ((4, 4), F32)),
        [("qkv", list("qkv"), "split(0, [4, 4, 5])")],
        ["dim 0 of shape (12, 4) cannot be split into sizes [4, 4, 5]"],
    ),
    "a split into parts that are not equal": (
        {"qkv": ((13, 4), F32)},
        dict.fromkeys("qkv", ((4, 4), F32)),
        [("qkv", list("qkv"), "split(0)")],
        ["cannot be split into 3 equal parts"],
    ),
    "a split for one pattern": (
        {"qkv": ((12, 4), F32)},
        {"q": ((12, 4), F32)},
        [("qkv", "q", "split(0)")],
        ["the target has one pattern, and split needs a list of them"],
    ),
    "a list without split": (
        {"qkv": ((12, 4), F32)},
        dict.fromkeys("qkv", ((4, 4), F32)),
        [("qkv", list("qkv"))],
        ["1 patterns of the source for 3 of the target", "make one with split"],
    ),
    "a concat of one": (
        {"q": ((4,), F32)},
        {"q": ((4,), F32)},
        [("q", "q", "concat(0)")],
        ["there is one pattern, and concat needs a list of them"],
    ),
    "a concat of other shapes": (
        {"q": ((4, 3), F32), "k": ((4, 2), F32)},
        {"qk": ((8, 3), F32)},
        [(["q", "k"], "qk", "concat(0)")],
        ["shapes (4, 3), (4, 2) cannot be joined along dim 0"],
    ),
    "a concat of other dtypes": (
        {"q": ((4, 3), F32), "k": ((4, 3), BF16)},
        {"qk": ((8, 3), F32)},
        [(["q", "k"], "qk", "concat(0)")],
        ["dtypes float32, bfloat16 cannot be joined; cast them"],
    ),
    "a concat of different layers": (
        {**LAYERS, "layers/0/k": ((8, 4), F32)},
        {f"layers/{index}/qk": ((16, 4), F32) for index in range(3)},
        [(["layers/{i}/q", "layers/{i}/k"], "layers/{i}/qk", "concat(0)")],
        ["the patterns of the list match 3, 1 arrays, which should be the same ones"],
    ),
    "a stack along an unknown capture": (
        LAYERS,
        {"q": ((3, 8, 4), F32)},
        [("layers/{layer}/q", "q", "stack('layr')")],
        ["the source has no capture {layr} (did you mean 'layer'?)"],
    ),
    "a stack with a gap": (
        {f"l/{index}": ((4,), F32) for index in (0, 1, 3)},
        {"l": ((3, 4), F32)},
        [("l/{i}", "l", "stack('i')")],
        ["{i} lacks 2"],
    ),
    "a stack that begins late": (
        {f"l/{index}": ((4,), F32) for index in (3, 4, 5)},
        {"l": ((3, 4), F32)},
        [("l/{i}", "l", "stack('i')")],
        ["{i} lacks 0, 1, 2", "write {i:3-5} if those are all"],
    ),
    "a stack of a range that is not complete": (
        {f"l/{index}": ((4,), F32) for index in (3, 4)},
        {"l": ((3, 4), F32)},
        [("l/{i:3-5}", "l", "stack('i')")],
        ["{i} lacks 5"],
    ),
    "a stack of numbers without end": (
        {f"l/{index}": ((4,), F32) for index in (10**15, 10**15 + 2)},
        {"l": ((2, 4), F32)},
        [("l/{i}", "l", "stack('i')")],
        ["{i} lacks 0, 1, 2, 3, 4 and 999999999999996 more of 1000000000000003 numbers"],
    ),
    "a stack of names": (
        {"l/a": ((4,), F32), "l/b": ((4,), F32)},
        {"l": ((2, 4), F32)},
        [("l/{i}", "l", "stack('i')")],
        ["{i} is not a number in all paths, so they have no order"],
    ),
    "a stack of different shapes": (
        {"l/0": ((4,), F32), "l/1": ((5,), F32)},
        {"l": ((2, 4), F32)},
        [("l/{i}", "l", "stack('i')")],
        ["arrays along {i} differ: float32[4] and float32[5]"],
    ),
    "an unstack into another number": (
        {"l": ((4, 8), F32)},
        {f"l/{index}": ((8,), F32) for index in range(3)},
        [("l", "l/{i:0-2}", "unstack('i')")],
        ["dim 0 of shape (4, 8) has 4 positions, and {i} 3 numbers"],
    ),
    "an unstack into too many": (
        {"l": ((4, 8), F32)},
        {f"l/{index}": ((8,), F32) for index in range(3)},
        [("l", "l/{i}", "unstack('i')")],
        ["no-target: l/3: line 1 (l -> l/{i}: unstack('i')) makes it, and the target lacks it"],
    ),
    "a dim that is not there": (
        {"l": ((4, 8), F32)},
        {f"l/{index}": ((8,), F32) for index in range(4)},
        [("l", "l/{i}", "unstack('i', 2)")],
        ["shape (4, 8) has no dim 2"],
    ),
    "an interleaving that does not divide": (
        {"a": ((9,), F32)},
        {"a": ((9,), F32)},
        [("a", "a", "interleave(0, 2)")],
        ["dim 0 of shape (9,) does not divide by 2"],
    ),
    "a crop beyond the end": (
        {"a": ((9,), F32)},
        {"a": ((9,), F32)},
        [("a", "a", "crop(0, 4, 12)")],
        ["dim 0 of shape (9,) has no positions 4 to 12"],
    ),
    "a cast that loses": (
        {"a": ((9,), F32)},
        {"a": ((9,), I32)},
        [("a", "a", "cast('int32')")],
        ["float32 has values that int32 has no near ones for"],
    ),
    "padding of other integers": (
        {"a": ((9,), jnp.uint8)},
        {"a": ((10,), jnp.uint8)},
        [("a", "a", "pad(0, 0, 1, 256)")],
        ["pad(0, 0, 1, 256) after uint8[9]: uint8 has no value 256"],
    ),
    "padding of halves": (
        {"a": ((9,), I32)},
        {"a": ((10,), I32)},
        [("a", "a", "pad(0, 0, 1, 0.5)")],
        ["int32 has no value 0.5"],
    ),
    "a scale that overflows": (
        {"a": ((9,), jnp.float16)},
        {"a": ((9,), jnp.float16)},
        [("a", "a", "scale(1e6)")],
        ["float16 has no value 1000000.0"],
    ),
    "a cast of keys": (
        {"a": ((), jax.random.key(0).dtype)},
        {"a": ((), F32)},
        [("a", "a", "cast('float32')")],
        ["key<fry> is not a number (source)", "key<fry> has values that float32 has no near ones for"],
    ),
    "scaled integers": (
        {"a": ((9,), I32)},
        {"a": ((9,), I32)},
        [("a", "a", "scale(0.5)")],
        ["int32 cannot be scaled; cast it to floats first"],
    ),
    "a head that is tied without saying so": (
        {"embed": ((8, 4), F32)},
        {"embed": ((8, 4), F32), "head": ((8, 4), F32)},
        [("embed", "embed"), ("embed", "head")],
        ["line 2 (embed -> head) matches no array", "is used by line 1; tied() uses it again"],
    ),
    "unused arrays that do not exist": (
        {"a": ((8,), F32)},
        {"a": ((8,), F32)},
        sr.reports.NameTable([("a", "a")], ["opt/{*rest}"]),
        ["'opt/{*rest}' of unused matches no array of the source"],
    ),
    "unused arrays that a line needs": (
        {"a": ((8,), F32)},
        {"a": ((8,), F32)},
        sr.reports.NameTable([("a", "a")], ["a"]),
        ["line 1 (a -> a) matches no array"],
    ),
    "several faults": (
        {"a": ((8,), F32), "b": ((4,), F32), "c": ((2,), F32)},
        {"a": ((9,), F32), "b": ((4,), BF16), "d": ((2,), F32)},
        None,
        ["makes float32[8]", "Add cast('bfloat16')", "no-target: c: line 1", "missing: d (2,)"],
    ),
    "faults of several lines": (
        {"a": ((8,), F32), "b": ((4,), F32), "c": ((2,), F32)},
        {"a": ((8,), F32), "b": ((4,), F32), "c": ((2,), F32)},
        [("a", "a", "crop(0, 1, 99)"), ("b", "b", "transpose(1)"), ("c", "c", "stack('i')")],
        ["no positions 1 to 99", "no permutation (1,)", "no capture {i}"],
    ),
}


def shapes(tree: dict[str, Shape], mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = NamedSharding(mesh, P())
    return {path: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for path, (shape, dtype) in tree.items()}


@pytest.mark.parametrize("name", list(WRONG))
def test_all_that_is_wrong_is_listed(name: str) -> None:
    source, target, lines, texts = WRONG[name]
    old, new = (sr.create_mesh("a:4", devices=jax.devices()[first : first + 4]) for first in (0, 4))
    with pytest.raises(sr.errors.PlanError, match="plan_sync") as caught:
        sr.plan_sync(shapes(source, old), shapes(target, new), names=lines)
    message = str(caught.value)
    assert [text for text in texts if text not in message] == [], message


UNREADABLE: dict[str, tuple[Any, str]] = {
    "an unknown operation": ([("a", "a", "transpse(1, 0)")], r"line 1: unknown operation 'transpse' \(did you mean"),
    "an operation that is none": ([("a", "a", "transpose")], r"has a part that is not an operation"),
    "a text that is no operation": (
        [("a", "a", "transpose(1,")],
        r"line 1: 'transpose\(1,' is not a list of operations",
    ),
    "arguments that are missing": ([("a", "a", "crop(0)")], r"line 1: crop\(0\) is not crop\(dim, start, stop\)"),
    "arguments that are no literals": ([("a", "a", "pad(0, x, 1)")], r"line 1: pad: the arguments must be literals"),
    "arguments of another type": ([("a", "a", "scale('x')")], r"line 1: scale: expected a finite number, got 'x'"),
    "an unknown dtype": ([("a", "a", "cast('bfloat61')")], r"line 1: cast: expected .*, got 'bfloat61'"),
    "a dtype of objects": ([("a", "a", "cast('O')")], r"line 1: cast: expected the name of a dtype of numbers"),
    "a brace": ([("a/{i", "a")], r"line 1: 'a/\{i' has a brace that is not part of a capture"),
    "a capture twice": ([("a/{i}/{i}", "a")], r"has the capture 'i' twice"),
    "a range backwards": ([("a/{i:5-3}", "a")], r"expected \{name:first-last\} with first <= last"),
    "an empty list": ([([], "a")], r"line 1: expected a pattern of paths or a list of them, got \[\]"),
    "a line of one": ([("a",)], r"line 1: expected \(source, target\)"),
    "an unknown key": ([{"source": "a", "target": "a", "step": ""}], r"line 1: unknown key 'step'"),
    "a missing key": ([{"source": "a"}], r"line 1: it has no 'target'"),
    "two wrong lines": ([("a", "a", "x()"), ("b", "b"), ("c", "c", "y()")], r"line 1: .*\n.*line 3: "),
}


@pytest.mark.parametrize("name", list(UNREADABLE))
def test_a_table_that_cannot_be_read_is_refused(name: str) -> None:
    lines, text = UNREADABLE[name]
    with pytest.raises(sr.errors.ConfigError, match=text):
        sr.reports.NameTable(lines)


def test_sides_that_cannot_be_planned_are_listed() -> None:
    mesh = sr.create_mesh("a:4", devices=jax.devices()[:4])
    source = {
        "key": jax.random.key(0),
        "numpy": jnp.zeros(3).__array__(),
        "odd": jax.ShapeDtypeStruct((6,), F32, sharding=NamedSharding(sr.mesh_shape("a:4"), P("a"))),
    }
    source["key"] = jax.device_put(source["key"], NamedSharding(mesh, P()))
    with pytest.raises(sr.errors.PlanError, match="plan_sync") as caught:
        sr.plan_sync(source, {"x": jax.ShapeDtypeStruct((3,), F32)}, names=[("{*path}", "{*path}")])
    message = str(caught.value)
    for text in (
        "is not a number (source)",
        "numpy (3,): it has no sharding (source)",
        "x (3,): it has no sharding (target)",
    ):
        assert text in message, message
    assert "odd (6,): " in message


def test_nothing_moves_when_arrays_differ_from_the_plan() -> None:
    old, new = (sr.create_mesh("a:4", devices=jax.devices()[first : first + 4]) for first in (0, 4))
    source = {name: jax.device_put(jnp.ones((8, 4)), NamedSharding(old, P("a"))) for name in "abcd"}
    target = {name: jax.ShapeDtypeStruct((8, 4), F32, sharding=NamedSharding(new, P("a"))) for name in "abcd"}
    plan = sr.plan_sync(source, target)
    wrong = {
        "a": jax.device_put(jnp.ones((8, 4)), NamedSharding(old, P(None, "a"))),
        "b": jnp.ones((8, 4), jnp.int32),
        "c": 3.0,
        "d": source["d"],
    }
    with pytest.raises(sr.errors.PlanError, match="run: arrays differ") as caught:
        plan.run(wrong, donate=True)
    for text in ("its sharding is P(None, 'a') on a:4", "it is int32[8, 4]", "its type is float"):
        assert text in str(caught.value)
    assert not source["d"].is_deleted()
    with pytest.raises(sr.errors.TreeError, match="structure of the plan's source"):
        plan.run({"a": source["a"]})
    same = sr.plan_sync(source, source)
    with pytest.raises(sr.errors.ConfigError, match="`into` has arrays of the source"):
        same.run(source, into=source)
    with pytest.raises(sr.errors.ConfigError, match="check must be 'sums' or None"):
        plan.run(source, check="sum")  # pyright: ignore[reportArgumentType]
    planned = sr.plan_sync(
        source,
        {
            name: jax.ShapeDtypeStruct((8, 4), F32, sharding=NamedSharding(sr.mesh_shape("a:2"), P("a")))
            for name in "abcd"
        },
    )
    with pytest.raises(sr.errors.NoMeshError, match="2 of 6 of this plan's are made up"):
        planned.run(source)
    with pytest.raises(sr.errors.ConfigError, match="max_bytes_in_flight must be 8 or more"):
        sr.plan_sync(source, target, max_bytes_in_flight=3)
    with pytest.raises(sr.errors.ConfigTypeError, match="hardware must be a Hardware"):
        sr.plan_sync(source, target, hardware="cuda:h100")
