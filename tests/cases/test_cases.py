"""The acceptance cases of `seed_cases.json`: what the systems that shardrules learnt from answer, one test per id.

The file holds inputs and results; a check here is only the glue from one to the other. Where a case says what
shardrules should do instead (`desired_in_shardrules`), the check asserts that.
"""

import ast
import contextlib
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.presets import big_vision, eformer, pathways
from tests.mesh.cluster import run_processes

Case = dict[str, Any]

FILE = pathlib.Path(__file__).with_name("seed_cases.json")
CASES: dict[str, Case] = {case["id"]: case for case in json.loads(FILE.read_text(encoding="utf-8"))["cases"]}

CHECKS: dict[str, Callable[[Case], None]] = {}


def check(*case_ids: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Names the cases that the decorated function checks."""

    def register(function: Callable[[Case], None]) -> Callable[[Case], None]:
        for case_id in case_ids:
            assert case_id not in CHECKS, f"{case_id} has two checks"
            CHECKS[case_id] = function
        return function

    return register


# ---- from the file's notation to values, and back ----


def encode(value: Any) -> Any:
    """Writes specs, shardings and containers of them in the notation of the file."""
    match value:
        case P():
            return [encode(entry) for entry in value]
        case NamedSharding():
            return encode(value.spec)
        case dict():
            return {key: encode(item) for key, item in value.items()}
        case list() | tuple():
            return [encode(item) for item in value]
    return value


def decode(entries: list[Any]) -> P:
    """Reads a spec in the notation of the file."""
    return P(*(tuple(entry) if isinstance(entry, list) else entry for entry in entries))


def mesh_of(case: Case) -> AbstractMesh:
    """The mesh of the case. Its shape is enough for all of these."""
    return sr.mesh_shape(",".join(f"{axis}:{size}" for axis, size in case["mesh"].items()))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tree_of(shapes: dict[str, Any]) -> dict[str, Any]:
    """Builds `{"a": {"b": leaf}}` from `{"a/b": shape}`; two leaves of the file are written in words."""
    tree: dict[str, Any] = {}
    for path, shape in shapes.items():
        *parents, name = path.split("/")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        match shape:
            case "python int 3":
                branch[name] = 3
            case "scalar []":
                branch[name] = f32()
            case list():
                branch[name] = f32(*shape)
            case _:
                branch[name] = shape
    return tree


def arguments(case: Case, function: str) -> tuple[list[Any], dict[str, Any]]:
    """Reads the literal arguments of the first call of `function` in the text of the case.

    An argument that is not a literal (a mesh, a tree in short hand) comes out as its source text.
    """

    def read(node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Name(id="P")):
                return P(*map(read, node.args))
            case ast.List() | ast.Tuple():
                items = [read(item) for item in node.elts]
                return items if isinstance(node, ast.List) else tuple(items)
            case ast.Dict():
                return {read(key): read(value) for key, value in zip(node.keys, node.values, strict=True) if key}
        try:
            return ast.literal_eval(node)
        except ValueError:
            return ast.unparse(node)

    text = case["call"][case["call"].index(function + "(") :]
    # The text may go on after the call, or turn into short hand inside it: the longest part that parses is read.
    for end in range(len(text), len(function), -1):
        for candidate in (text[:end], text[:end] + ")"):
            try:
                node = ast.parse(candidate, mode="eval").body
            except SyntaxError:
                continue
            # `f(x).apply(tree)` and `f(x)(y)` start with the call that is meant.
            while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Call):
                node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            if isinstance(node, ast.Call):
                return [read(arg) for arg in node.args], {str(kw.arg): read(kw.value) for kw in node.keywords}
    raise AssertionError(f"{case['id']}: no call of {function} in {case['call']!r}")


def first(case: Case, function: str) -> Any:
    """The first of the literal arguments of a call."""
    return arguments(case, function)[0][0]


def shapes_in(case: Case) -> list[tuple[int, ...]]:
    return [ast.literal_eval(text) for text in re.findall(r"\(\d[\d,]*\)", case["call"])]


def tokens_in(case: Case) -> list[Any]:
    """The logical axes of `[BATCH,HEAD]`: tokens are exported under the names which the file writes."""
    text = re.findall(r"\[(.*?)\]", case["call"])[0]
    return [getattr(eformer, name.strip()) for name in text.split(",")]


def adam_of(kernel: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(optax.adam(1e-3).init, {"w": {"kernel": kernel}})


def shape_of(mesh: Mesh) -> dict[str, Any]:
    return {"axis_names": list(mesh.axis_names), "shape": list(mesh.shape.values())}


def devices_of(case: Case) -> Mesh:
    """The mesh of the case, on devices."""
    sizes = case["mesh"]
    return Mesh(np.array(jax.devices()).reshape(*sizes.values()), tuple(sizes))


def names_all(*parts: object) -> str:
    """A pattern that finds every part, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(part))})" for part in parts)


# ---- E: rules by path, and the helpers around specs ----


@check("E02")
def _e02(case: Case) -> None:
    (rules, _), _ = arguments(case, "match_partition_rules")
    tree = tree_of(case["inputs"]["tree"])
    assert encode(eformer.match_partition_rules(rules, tree)) == case["expected"]
    assert (
        encode(eformer.match_partition_rules(rules, tree, min_size=case["inputs"]["MIN_SHARDING_SIZE"]))
        == case["expected"]
    )


@check("E24")
def _e24(case: Case) -> None:
    ones = jnp.ones((8, 8))
    with jax.set_mesh(devices_of(case)):
        with pytest.warns(sr.errors.ShardingWarning, match="was skipped"):
            array = sr.with_sharding_constraint(ones, P("zz", "tp"))
        assert array is ones
        with pytest.warns(sr.errors.ShardingWarning, match="became P"):
            array = sr.with_sharding_constraint(ones, P("zz", "tp"), missing="drop")
        assert array.sharding.spec == P(None, "tp")
        with pytest.raises(ValueError, match="unknown axis 'zz'"):
            sr.with_sharding_constraint(ones, P("zz", "tp"), missing="error")


@check("E25")
def _e25(case: Case) -> None:
    with (
        jax.set_mesh(devices_of(case)),
        pytest.raises(ValueError, match=re.escape(case["expected"]["message_contains"])) as caught,
    ):
        sr.with_sharding_constraint(jnp.ones((7, 12)), P("dp", "tp"))
    assert type(caught.value).__name__ == case["expected"]["error"]


@check("E27")
def _e27(case: Case) -> None:
    mesh = devices_of(case)
    shard_fns, _ = eformer.make_shard_and_gather_fns({"a": P("dp", "tp")}, mesh)
    placed = shard_fns["a"](np.ones((8, 8)))
    assert isinstance(placed, jax.Array)
    assert placed.sharding == NamedSharding(mesh, P("dp", "tp"))


@check("U01")
def _u01(case: Case) -> None:
    *first, _ = case["expected"]  # desired: of the last one's tuple the known part stays
    requests = [
        ((8, 12), P("zz", "tp")),
        ((7, 12), P("dp", "tp")),
        ((8,), P("dp", "tp")),
        ((8, 12), P(("dp", "zz"), "tp")),
    ]
    with jax.set_mesh(devices_of(case)):
        arrays = []
        for shape, spec in requests:
            with pytest.warns(sr.errors.ShardingWarning, match="became P"):
                arrays.append(sr.with_sharding_constraint(jnp.ones(shape), spec, missing="drop", indivisible="drop"))
    assert [encode(array.sharding.spec) for array in arrays] == [*first, ["dp", "tp"]]


@check("B30")
def _b30(case: Case) -> None:
    sharding = NamedSharding(devices_of(case), P("data", "model"))
    for move in (sr.reshard, sr.filter_shard):
        placed = move({"a": np.ones((8, 8))}, sharding)
        again = move(placed, {"a": sharding})
        assert [again["a"] is placed["a"], encode(placed["a"].sharding.spec)] == case["expected"]


@check("B31")
def _b31(case: Case) -> None:
    whole = NamedSharding(devices_of(case), P())
    array = sr.reshard({"a": 3.0}, whole)["a"]
    assert isinstance(array, jax.Array)
    assert (array.sharding, array.shape, float(array)) == (whole, (), 3.0)


@check("E11")
def _e11(case: Case) -> None:
    (spec,), _ = arguments(case, "get_names_from_partition_spec")
    # Desired: in the order of first appearance, so nothing is sorted here.
    assert list(sr.specs.get_names_from_partition_spec(spec)) == case["expected"]


@check("E12")
def _e12(case: Case) -> None:
    (specs,), _ = arguments(case, "get_names_from_partition_spec")
    assert sorted(sr.specs.get_names_from_partition_spec(specs)) == case["expected"]


@check("E31")
def _e31(case: Case) -> None:
    tree = {"a": f32(8, 16), "s": f32(3)}
    (_, specs, _), _ = arguments(case, "analyze_sharding_strategy")
    analysis = eformer.analyze_sharding_strategy(tree, specs, mesh_of(case))
    assert {key: analysis[key] for key in case["expected"]} == case["expected"]
    # The original left these two at 0.0 and {} whatever it was given.
    assert 0 < analysis["balance_score"] <= 1
    assert analysis["partition_stats"]


# ---- H: rule objects and the analyzer ----


@check("H10")
def _h10(case: Case) -> None:
    (limit, _), _ = arguments(case, "MemoryConstrainedShardingRule")
    spec = sr.MemoryConstrainedShardingRule(limit, mesh_of(case)).apply({"a": f32(64, 32)})["a"]
    # Desired: an axis of size 1 saves nothing, so it is not spent.
    assert case["desired_in_shardrules"].startswith("['fsdp', null]")
    assert encode(spec) == ["fsdp", None]


@check("H12")
def _h12(case: Case) -> None:
    rules = (
        sr.ShapeBasedShardingRule({(64, 64): P()}),
        sr.MemoryConstrainedShardingRule(16, mesh_of(case)),
    )
    # Desired: an intended "replicate this" wins. The original's reading stays within reach.
    assert encode(sr.CompositeShardingRule(*rules).apply({"w": f32(64, 64)})) == {"w": []}
    literal = sr.CompositeShardingRule(*rules, empty_is_opinion=False)
    assert encode(literal.apply({"w": f32(64, 64)})) == case["expected"]


@check("H14")
def _h14(case: Case) -> None:
    specs = {"a": P("dp", "tp"), "b": P("dp", "tp")}
    issues = sr.ShardingAnalyzer(mesh_of(case)).validate_partition_specs({"a": f32(8, 15), "b": f32(8, 16)}, specs)
    # The original's sentence, and the path which it lacks.
    assert len(issues) == len(case["expected"])
    assert issues[0].startswith("a: ")
    assert case["expected"][0] in issues[0]


@check("H15")
def _h15(case: Case) -> None:
    analyzer = sr.ShardingAnalyzer(mesh_of(case))
    for (shape, spec), expected in zip(case["inputs"]["cases"], case["expected"], strict=True):
        (*entries,), _ = arguments({"id": case["id"], "call": spec}, "P")
        tree = {"block": {"weight": f32(*ast.literal_eval(shape))}}
        issues = analyzer.validate_partition_specs(tree, {"block": {"weight": P(*entries)}})
        assert len(issues) == int(expected.split()[0]), (spec, issues)
        assert all("block/weight" in issue for issue in issues)
        if "axis" in expected:
            assert "'zz'" in issues[0]


# ---- U: logical axes, and shardings that are worked out ----


@check("U08")
def _u08(case: Case) -> None:
    axes = tokens_in(case)
    # Desired: an error that names both logical axes and the mesh axis they share.
    with pytest.raises(ValueError, match=names_all("HEAD", "EMBED", "'tp'")):
        eformer.PartitionAxis().resolve_spec(axes, eformer.MODE_TRAIN)


# ---- B: strategies of (pattern, ops) ----


def _params(case: Case) -> dict[str, Any]:
    return tree_of(case["inputs"]["params (f32)"])


def _strategy(case: Case) -> list[tuple[str, str]]:
    (_, strategy, *_), _ = arguments(case, "infer_sharding")
    return strategy


@check("B05")
def _b05(case: Case) -> None:
    assert encode(big_vision.infer_sharding(_params(case), _strategy(case), mesh_of(case))) == case["expected"]
    # Desired: the same spec, and an entry in the report.
    plan = sr.RegexShardingRule(_strategy(case), match="fullmatch").plan(_params(case), mesh_of(case))
    assert any(finding.path == "a" for finding in plan.findings)
    assert re.search(names_all("1023", "2047", "data"), str(plan.explain("a")))


@check("B13")
def _b13(case: Case) -> None:
    # Desired: refused when the rule runs, with the leaf's name.
    with pytest.raises(ValueError, match=names_all("block/kernel", "(4, 7)", "7", "model", "4")):
        big_vision.infer_sharding({"block": {"kernel": _params(case)["a"]}}, _strategy(case), mesh_of(case))


@check("B15")
def _b15(case: Case) -> None:
    # Desired: a ValueError that names leaf, op and axis. JAX's own error names only the axis.
    op = "DimShardingRule(axis='model', dim=1"
    with pytest.raises(ValueError, match=names_all("block/kernel", "(4, 8)", op, "axis 'model'")):
        big_vision.infer_sharding({"block": {"kernel": _params(case)["a"]}}, _strategy(case), mesh_of(case))


@check("B18")
def _b18(case: Case) -> None:
    ops = ("replicate", "fsdp", "shard_dim", "logical_partitioning")
    with pytest.raises(KeyError, match=names_all(case["expected"]["message_contains"], *ops)):
        big_vision.infer_sharding(_params(case), _strategy(case), mesh_of(case))
    # Desired: close matches too. "foo" is close to nothing.
    with pytest.raises(KeyError, match=r"did you mean 'shard_dim'\?"):
        big_vision.infer_sharding(_params(case), [("zzz", "shard_dims('model', 0)")], mesh_of(case))


def _boxed(*names: str) -> nn.LogicallyPartitioned:
    return nn.LogicallyPartitioned(f32(8, 16), names=names)


@check("B23")
def _b23(case: Case) -> None:
    params = {"a": _boxed("embed", "mlp"), "b": f32(4, 4)}
    with nn.logical_axis_rules([("embed", "data"), ("mlp", "model")]):
        shardings = big_vision.infer_sharding(params, [(".*", "logical_partitioning")], mesh_of(case))
    assert encode(shardings) == case["expected"]
    without_rules = big_vision.infer_sharding(params, [(".*", "logical_partitioning")], mesh_of(case))
    assert encode(without_rules) == {"a": [None, None], "b": [None, None]}


@check("B23b")
def _b23b(case: Case) -> None:
    tactic = 'logical_partitioning|fsdp(axis="data",min_size_to_shard_mb=0)'
    assert tactic in case["call"]
    with nn.logical_axis_rules([("mlp", "model")]):
        shardings = big_vision.infer_sharding({"a": _boxed("embed", "mlp")}, [(".*", tactic)], mesh_of(case))
    assert encode(shardings) == case["expected"]


@check("B24")
def _b24(case: Case) -> None:
    state = adam_of(f32(1024, 2048))
    assert [name for name, _ in big_vision.tree_flatten_with_names(state)[0]] == case["expected"]
    # Desired: both styles can be chosen.
    assert list(sr.leaf_paths(state, "index")) == case["expected"]
    assert list(sr.leaf_paths(state, "attr")) == CASES["E10"]["expected"]


@check("B29")
def _b29(case: Case) -> None:
    (prefix, target), _ = arguments(case, "tree_broadcast")
    assert case["expected"]["error"] == "ValueError"
    with pytest.raises(ValueError, match=r"(?s)not a prefix.*\by\b"):
        big_vision.tree_broadcast(prefix, target)


# ---- meshes: the axes of one, and how it is made ----


def _pod(case: Case) -> list[sr.meshes.DeviceInfo]:
    """The devices of "16 fake devices, 2 slices": numbered through, slice after slice."""
    count, slices = map(int, re.findall(r"[0-9]+", case["mesh"]))
    assert "slice" in case["mesh"]
    return [sr.meshes.DeviceInfo(number, slice_index=number // (count // slices)) for number in range(count)]


def _laid_out(case: Case, dcn_mesh_dims: tuple[int, ...] | None = None) -> sr.meshes.Layout:
    match = re.search(r"create_mesh\(\(([0-9,]+)\)", case["call"])
    assert match
    sizes = tuple(map(int, match[1].split(",")))
    return sr.meshes.lay_out(sizes, ("dp", "tp", "sp")[: len(sizes)], _pod(case), dcn_mesh_dims=dcn_mesh_dims)


@check("E14")
def _e14(case: Case) -> None:
    with pytest.raises(sr.errors.NoMeshError, match=names_all(case["expected"]["message_contains"], "jax.set_mesh")):
        sr.meshes.get_incontext_mesh()
    # Desired: whatever way a mesh is set is seen.
    mesh = sr.create_mesh("dp:2,tp:4")
    with jax.set_mesh(mesh):
        assert sr.meshes.get_incontext_mesh() is mesh
    with pytest.warns(DeprecationWarning, match="with mesh"), mesh:
        assert sr.meshes.get_incontext_mesh() is mesh
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert sr.meshes.get_incontext_mesh() == mesh.abstract_mesh


@check("E16")
def _e16(case: Case) -> None:
    with pytest.raises(KeyError, match=names_all(case["expected"]["message_contains"], "dp:2,tp:4")):
        sr.meshes.get_axes_size_in_mesh("zz", devices_of(case))


@check("M04")
def _m04(case: Case) -> None:
    for sizes in ((3, -1), (2, 2)):
        assert re.sub(" ", "", str(sizes)) in case["call"]
        text = ",".join(f"{name}:{size}" for name, size in zip(("dp", "tp"), sizes, strict=True))
        with pytest.raises(ValueError, match=names_all(case["expected"]["message_contains"], text, "8 devices")):
            sr.create_mesh(sizes, ("dp", "tp"))
    # Desired: a subset of the devices can be asked for.
    assert sr.create_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4]).size == 4


@check("M20", "M21", "M22", "M23")
def _m20(case: Case) -> None:
    dcn_dims = re.search(r"dcn_mesh_dims=(\(.*?\))", case["call"])
    layout = _laid_out(case, ast.literal_eval(dcn_dims[1]) if dcn_dims else None)
    assert {"shape": list(layout.ids.shape), "ids": layout.ids.ravel().tolist()} == case["expected"]
    if case["id"] == "M21":  # desired: a warning, where a tensor-parallel axis crosses the slow network
        with pytest.warns(sr.errors.MeshWarning, match=r"axis 'tp' of size 12 spans 3 slices: .* \(slow\) .* \(fast\)"):
            mesh = sr.create_mesh((2, 12), ("dp", "tp"), devices=_pod(case))
        assert [device.id for device in mesh.devices.flat] == case["expected"]["ids"]


@check("M24")
def _m24(case: Case) -> None:
    for dcn_dims, message in zip(((-1, -1), (3, 1), (0, 1)), case["expected"], strict=True):
        assert re.sub(" ", "", str(dcn_dims)) in case["call"]
        with pytest.raises(ValueError, match=names_all(message, "these work: (2, 1), (1, 2)")):
            _laid_out(case, dcn_mesh_dims=dcn_dims)


@check("M25")
def _m25(case: Case) -> None:
    # Desired: the slices are split over two axes, unless they are pinned to one.
    assert _laid_out(case).outer == (2, 2, 1)
    with pytest.raises(ValueError, match=names_all("do not divide", "these work: (2, 2, 1), (2, 1, 2), (1, 2, 2)")):
        _laid_out(case, dcn_mesh_dims=(4, 1, 1))


@check("M26")
def _m26(case: Case) -> None:
    assert case["expected"]["error"] == "ValueError"
    with pytest.raises(ValueError, match="dcn_mesh_dims product 77 must equal 1"):
        sr.create_mesh((2, 4), ("dp", "tp"), dcn_mesh_dims=(77, 1))


# ---- R: moves between meshes ----

FIND = """
import json
import math
from jax.sharding import Mesh
from shardrules.presets import pathways

def placed(sizes, spec, first):
    devices = jax.devices()[first : first + math.prod(sizes.values())]
    return NamedSharding(Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes)), spec)

results = {}
for name, (before, source, after, target) in json.loads(QUESTIONS).items():
    first = math.prod(before.values())
    try:
        start, goal = placed(before, eval(source), 0), placed(after, eval(target), first)
        between, axes = pathways.find_intermediate_sharding(start, goal)
        spec = list(between.spec.partitions)
        results[name] = {"mesh": dict(between.mesh.shape), "spec": spec, "replicated_axes": axes}
    except ValueError as error:
        results[name] = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(results))
"""


@functools.cache
def _intermediates() -> dict[str, Any]:
    """What is found for all of them, in one process with as many devices as the largest of them takes."""
    questions = {}
    for case_id, case in CASES.items():
        match = re.match(r"find_intermediate_sharding\(src (P\(.*?\)), dst (P\(.*\))\)$", case["call"])
        if match:
            before, after = case["mesh"].values()
            questions[case_id] = before, match[1], after, match[2]
    (ended,) = run_processes(f"QUESTIONS = {json.dumps(questions)!r}\n{FIND}", processes=1, devices=24)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@check("R01", "R02", "R05", "R06", "R07", "R08", "R11")
def _r01(case: Case) -> None:
    result, expected = dict(_intermediates()[case["id"]]), dict(case["expected"])
    assert expected.pop("message_contains", "") in result.pop("message", "")
    assert result == expected


@check("R04")
def _r04(case: Case) -> None:
    assert case["desired_in_shardrules"] == "normalise both specs to the array's ndim"
    assert _intermediates()["R04"] == _intermediates()["R02"]


@check("R09")
def _r09(case: Case) -> None:
    assert case["desired_in_shardrules"] == "support it: split the tuple's axes (8 -> 4 x 2)"
    result = _intermediates()["R09"]
    assert math.prod(result["mesh"][axis] for axis in result["replicated_axes"]) == 2
    assert math.prod(result["mesh"][axis] for axis in result["spec"][0]) == 4


@check("R10")
def _r10(case: Case) -> None:
    assert case["expected"]["property"].startswith("product(replica axes)==2 and product(shard counts")
    result = _intermediates()["R10"]
    assert math.prod(result["mesh"][axis] for axis in result["replicated_axes"]) == 2
    assert math.prod(result["mesh"][axis] for axis in result["spec"] if axis) == 4


@check("R14")
def _r14(case: Case) -> None:
    source = jax.make_mesh(tuple(case["mesh"].values()), tuple(case["mesh"]), axis_types=(AxisType.Explicit,) * 2)
    target = sr.create_mesh("tp:4", devices=jax.devices()[:4])
    between, _ = pathways.find_intermediate_sharding(
        NamedSharding(source, P("fsdp", "tp")), NamedSharding(target, P(None, "tp"))
    )
    assert [kind.name for kind in between.mesh.axis_types] == case["expected"]


@check("R19")
def _r19(case: Case) -> None:
    mesh = devices_of(case)
    x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("fsdp")))
    moved = sr.reshard(x, NamedSharding(mesh, P(*case["expected"])))
    assert encode(moved.sharding.spec) == case["expected"]
    np.testing.assert_array_equal(moved, x)


def _told(array: jax.Array) -> list[Any]:
    assert isinstance(array.sharding, NamedSharding)
    return [list(array.shape), encode(array.sharding.spec), sorted(device.id for device in array.devices())]


@check("R20")
def _r20(case: Case) -> None:
    x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(devices_of(case), P("fsdp", None)))
    assert [_told(part) for part in pathways.split_by_mesh_axis(x, "fsdp", 2)] == case["expected"]


@check("R22")
def _r22(case: Case) -> None:
    x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(devices_of(case), P("fsdp", None)))
    boundaries = [1]
    parts = pathways.split_by_mesh_axis(x, "fsdp", boundaries)
    assert [[_told(part) for part in parts], boundaries] == case["expected"]
    assert [_told(part) for part in pathways.split_by_mesh_axis(x, "fsdp", (1,))] == case["expected"][0]


@check("R23")
def _r23(case: Case) -> None:
    x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(devices_of(case), P("fsdp", None)))
    requests = (("fsdp", 3), ("fsdp", [8]), ("fsdp", [4, 2]), ("fdsp", 2))
    for (axis, sections), error in zip(requests, case["expected"], strict=True):
        assert error == "ValueError"
        with pytest.raises(ValueError, match=r"split_by_mesh_axis"):
            pathways.split_by_mesh_axis(x, axis, sections)


@check("R24")
def _r24(case: Case) -> None:
    where, equal = case["expected"]
    x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(devices_of(case), P("fsdp", None)))
    joined = pathways.concatenate_by_mesh_axis(pathways.split_by_mesh_axis(x, "fsdp", 4), "fsdp")
    assert {"mesh": dict(joined.sharding.mesh.shape), "spec": encode(joined.sharding.spec)} == where
    assert np.array_equal(joined, x) == equal


# ---- one call each ----


def placed_by_jit(case: Case) -> Any:
    return jax.jit(lambda a: sr.with_sharding_constraint(a * 2, P("dp", "tp")))(jnp.ones((8, 8))).sharding


def axis_indices(case: Case) -> Any:
    names, split = first(case, "get_submesh_device_index"), P(("dp", "tp"))
    index = lambda x: x + sr.meshes.get_submesh_device_index(names)  # noqa: E731
    return jax.shard_map(index, in_specs=split, out_specs=split)(np.zeros(8)).tolist()


def axis_sizes(case: Case) -> Any:
    size = jax.shard_map(lambda x: x + sr.meshes.get_mesh_axis_size(("dp", "tp")), in_specs=P(), out_specs=P())
    return [float(size(np.zeros(()))), sr.meshes.get_mesh_axis_size(()), sr.meshes.get_submesh_device_index(())]


def stacked_rules(case: Case) -> sr.ShardingRule:
    return sr.CompositeShardingRule(
        sr.ShapeBasedShardingRule({(None, 1024): P("tp")}), sr.MemoryConstrainedShardingRule(16, mesh_of(case))
    )


def axis_after_axis(case: Case) -> sr.ShardingRule:
    rules = [sr.AutoShardingRule(mesh_of(case), axis_names=[axis], min_shard_size=1) for axis in ("tp", "dp")]
    return sr.CompositeShardingRule(*rules)


def registered(case: Case) -> Any:
    axes = eformer.PartitionAxis()
    # Registering gives a new value here: nothing of the process changes.
    for name, rule in re.findall(r"register\('(\w+)','(\w+)'\)", case["call"]):
        axes = axes.register(name, rule)
    return axes.resolve_spec(["__A__"], eformer.MODE_TRAIN)


def resolved_shapes(case: Case) -> Any:
    manager = eformer.PartitionManager(eformer.PartitionAxis(**arguments(case, "PartitionAxis")[1]))
    return [manager.resolve(eformer.HiddenStateSharding, shape=shape) for shape in shapes_in(case)]


def resolved_names(case: Case) -> Any:
    manager = eformer.PartitionManager(eformer.PartitionAxis())
    return [manager.resolve(getattr(eformer, name)) for name in case["call"].rpartition("(")[2].rstrip(")").split("|")]


def specs_of_names(case: Case) -> Any:
    (shape, *_), mesh = shapes_in(case), mesh_of(case)
    choices = map(ast.literal_eval, case["call"].partition("names=")[2].removesuffix(")").split(" | "))
    return [eformer.auto_partition_spec(f32(*shape), mesh, names=names) for names in choices]


def inferred(case: Case, params: Any = None) -> Any:
    shardings = big_vision.infer_sharding(_params(case) if params is None else params, _strategy(case), mesh_of(case))
    assert all(isinstance(leaf, NamedSharding) for leaf in jax.tree.leaves(shardings))
    return shardings


def layer_shardings(case: Case) -> Any:
    shardings = inferred(case, eqx.filter_eval_shape(eqx.nn.Linear, 8, 8, key=jax.random.key(0)))
    return {"weight": shardings.weight, "bias": shardings.bias}


def of_carrier(case: Case) -> Any:
    class Carrier:
        sharding = P("dp")

    sharding = sr.specs.extract_shardings({"a": Carrier()}, mesh_of(case))["a"]
    return {"a": {"mesh": dict(sharding.mesh.shape), "spec": sharding.spec}}


def usage(case: Case, **arrays: tuple[jax.ShapeDtypeStruct, P]) -> Any:
    tree, specs = ({name: pair[index] for name, pair in arrays.items()} for index in (0, 1))
    used = sr.ShardingAnalyzer(mesh_of(case)).estimate_memory_usage(tree, specs)
    return {key: used[key] for key in case["expected"]}


MATCHES = "match_partition_rules"
ANSWERS: dict[str, Callable[[Case], Any]] = {
    "E01": lambda case: eformer.match_partition_rules(
        [(pattern, decode(spec)) for pattern, spec in case["inputs"]["rules"]], tree_of(case["inputs"]["tree"])
    ),
    **dict.fromkeys(
        ("E03", "E04", "E05", "E06"),
        lambda case: eformer.match_partition_rules(first(case, MATCHES), tree_of(case["inputs"]["tree"])),
    ),
    "E09": lambda case: eformer.match_partition_rules(
        first(case, MATCHES), {"layers": [{"w": f32(*case["inputs"]["shapes"])}] * 2}
    ),
    "E10": lambda _: sr.leaf_paths(adam_of(f32(256, 256)), "attr"),
    "E13": lambda _: [sr.meshes.names_in_current_mesh(*names) for names in (("dp",), ("dp", "zz"), ())],
    "E15": lambda _: [sr.meshes.get_axes_size_in_mesh(name) for name in ("dp", ("dp", "tp"), ())],
    "E18": lambda _: sr.meshes.get_mesh_axis_names(),
    **dict.fromkeys(("E19", "E20"), axis_indices),
    "E21": axis_sizes,
    "E23": lambda _: sr.with_sharding_constraint(jnp.ones((8, 8)), P("dp", "tp")).sharding,
    "E30": lambda case: eformer.create_pattern_based_partition_spec(
        first(case, "create_pattern_based_partition_spec"), mesh_of(case)
    )("hidden", f32(8, 8)),
    "E34": of_carrier,
    "E36": lambda _: sr.specs.get_partition_spec({"b": np.zeros(3)}),
    "E38": lambda case: {
        name: getattr(eformer.PartitionAxis(**arguments(case, "PartitionAxis")[1]), name) for name in case["expected"]
    },
    "H01": lambda case: sr.AutoShardingRule(mesh_of(case), **arguments(case, "AutoShardingRule")[1]).apply(
        {"a": f32(8, 16), "s": f32(), "v": f32(7)}
    ),
    "H02": lambda case: sr.AutoShardingRule(mesh_of(case)).apply({"a": f32(7), "b": f32(2, 4)}),
    "H05": lambda case: sr.AutoShardingRule(mesh_of(case)).apply({"a": f32(8, 8)}),
    "H06": lambda case: sr.ShapeBasedShardingRule(first(case, "ShapeBasedShardingRule")).apply(
        {"e": f32(32000, 1024), "b": f32(1024), "t": f32(2, 3, 1024)}
    ),
    "H08": lambda case: [
        sr.MemoryConstrainedShardingRule(int(limit), mesh_of(case)).apply({"a": f32(32, 32)})["a"]
        for limit in case["call"].rpartition("limit ")[2].split(",")
    ],
    "H11": lambda case: stacked_rules(case).apply({"e": f32(32000, 1024), "w": f32(64, 64)}),
    "H13": lambda case: axis_after_axis(case).apply({"w": f32(6, 10)}),
    "U02": lambda _: (
        sr.with_sharding_constraint(sr.with_sharding_constraint(jnp.ones((8, 8)), P("dp", "tp")), P()).sharding
    ),
    "U03": placed_by_jit,
    **dict.fromkeys(
        ("U04", "U05"),
        lambda case: eformer.PartitionAxis().resolve_spec(
            tokens_in(case), getattr(eformer, re.findall(r"MODE_\w+", case["call"])[0])
        ),
    ),
    "U06": resolved_shapes,
    "U07": resolved_names,
    "U11": registered,
    "U12": lambda case: [eformer.auto_partition_spec(f32(*shape), mesh_of(case)) for shape in shapes_in(case)],
    "U13": specs_of_names,
    "U14": lambda case: eformer.auto_partition_spec(
        f32(*first(case, "auto_partition_spec")), mesh_of(case), **arguments(case, "auto_partition_spec")[1]
    ),
    **dict.fromkeys(("B01", "B03", "B04", "B06", "B07", "B08", "B09", "B11", "B12", "B20"), inferred),
    "B16": lambda case: inferred(case, {"a": {"k": f32(4, 8), "b": f32(8)}}),
    "B23c": lambda case: big_vision.infer_sharding({"a": _boxed("embed", "mlp")}, [(".*", "replicate")], mesh_of(case)),
    "B28": lambda case: [
        big_vision.tree_broadcast(prefix, arguments(case, "tree_broadcast")[0][1])
        for prefix in (first(case, "tree_broadcast"), 100)
    ],
    "B33": lambda case: [
        big_vision.parse_name(ast.literal_eval(text)) for text in re.findall(r"parse_name\(('.*?')\)", case["call"])
    ],
    "B34": layer_shardings,
    "H16": lambda case: usage(case, a=(f32(8, 16), P("dp", "tp"))),
    "H17": lambda case: usage(case, a=(f32(8, 16), P(("dp", "tp"))), b=(f32(16), P())),
    **dict.fromkeys(("M01", "M02", "M03"), lambda case: shape_of(sr.create_mesh(*arguments(case, "create_mesh")[0]))),
    "M05": lambda _: sr.create_mesh((2, 4), ("dp", "tp")) is sr.create_mesh([2, 4], ["dp", "tp"]),
    **dict.fromkeys(
        ("M06", "M09", "M10"),
        lambda case: shape_of(sr.meshes.parse_mesh_from_string(*arguments(case, "parse_mesh_from_string")[0])),
    ),
    **dict.fromkeys(
        ("M14", "M15"),
        lambda case: sr.meshes.calculate_host_mesh_shape(*arguments(case, "calculate_host_mesh_shape")[0]),
    ),
    "M17": lambda _: sr.create_mesh((2, 4), ("dp", "tp"), axis_types="foo"),
    "M18": lambda _: sr.create_mesh((2, 4), ("dp", "tp"), axis_types=("auto",) * 3),
    "R16": lambda _: sr.reshard({"a": np.ones((8, 8))}, {"a": P()}),
}
"""The calls whose result, or error, is the one in the file."""

NEED_MESH = ("E13", "E15", "E18", "E19", "E20", "E21", "E23", "U02", "U03")
"""Cases that run with their mesh set."""


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_case(case_id: str) -> None:
    case = CASES[case_id]
    expected = case["expected"]
    with jax.set_mesh(devices_of(case)) if case_id in NEED_MESH else contextlib.nullcontext():
        if case_id in CHECKS:
            CHECKS[case_id](case)
        elif isinstance(expected, dict) and "message_contains" in expected:
            with pytest.raises(ValueError, match=re.escape(expected["message_contains"])):
                ANSWERS[case_id](case)
        else:
            assert encode(ANSWERS[case_id](case)) == expected


def test_every_case_is_tested() -> None:
    assert sorted((*CHECKS, *ANSWERS)) == sorted(CASES)
