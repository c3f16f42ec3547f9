"""Byte limits: for each array by itself, and for a whole tree, against every possible assignment."""

import itertools
import math
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.zoo import f32

MIB = 2**20
MESH = sr.mesh_shape("data:4,model:2")
Memory = sr.MemoryConstrainedShardingRule


def device_bytes(plan: sr.ShardingPlan) -> int:
    return plan.memory().device_bytes


def cost(plan: sr.ShardingPlan) -> int:
    """The bytes of all arrays that a device does not hold."""
    return plan.memory().total_bytes - device_bytes(plan)


def codes(plan: sr.ShardingPlan) -> list[str]:
    return [finding.code for finding in plan.findings]


# ---- each array by itself ----


@pytest.mark.parametrize(
    ("limit", "spec", "reason"),
    [
        (4096, P(), "fits 4.0 KiB"),
        (4095, P("data", None), "1.0 KiB per device for a limit of 4.0 KiB"),
        (1024, P("data", None), "1.0 KiB per device for a limit of 1.0 KiB"),
        (1023, P("data", "model"), "512 B per device for a limit of 1,023 B"),
        (512, P("data", "model"), "512 B per device for a limit of 512 B"),
    ],
)
def test_the_largest_axis_splits_the_largest_dim(limit: int, spec: P, reason: str) -> None:
    plan = Memory(limit).plan({"w": f32(32, 32)}, MESH).check()
    assert plan.decision("w") == sr.Decision(spec, reason, Memory(limit))
    assert device_bytes(plan) <= limit


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 64), P("model", "data")),  # biggest dim first
        ((6, 64), P("model", "data")),
        ((64, 6), P("data", "model")),
        ((64, 7), P("data", None)),  # one axis for each dimension
        ((62, 8), P("model", "data")),  # the biggest dim that it divides
        ((7, 9), None),  # none divides
        ((64,), P("data")),
        ((), None),
        ((8, 8, 8), P("data", "model", None)),  # ties: lowest dim first
    ],
)
def test_axes_go_to_the_largest_dims_they_divide(shape: tuple[int, ...], spec: P | None) -> None:
    decision = Memory(0).plan({"w": f32(*shape)}, MESH).decision("w")
    assert decision.spec == spec
    if spec is None:
        assert decision.reason.startswith("no free axis divides a free dimension; ")


@pytest.mark.parametrize(
    ("rule", "shape", "mesh", "spec"),
    [
        (Memory(0), (8, 4), "b:2,a:2", P("b", "a")),  # equal axes keep the order of the mesh
        (Memory(0, axis_names=["a", "b"]), (8, 4), "b:2,a:2", P("a", "b")),
        (Memory(0), (8, 4), "one:1,data:2", P("data", None)),
        (Memory(0, axis_names=["model"]), (8, 4), "data:4,model:2", P("model", None)),
        (Memory(0, axis_names=[("data", "model")]), (8, 16), "data:4,model:2", P(None, ("data", "model"))),
        (Memory(0, axis_names=[("data", "model"), "data"]), (4, 4), "data:4,model:2", P("data", None)),
        (Memory(64, scope="tree"), (8, 8), "b:2,c:2,a:4", P("a", None)),  # as few axes as possible
        (Memory(32, scope="tree"), (64, 1), "data:4,model:2", P(("data", "model"), None)),
        (Memory(2048, scope="tree"), (32, 32), "data:4,model:2", P("model", None)),  # as few parts as possible
        (sr.ReplicateShardingRule() | Memory(1024, scope="tree"), (32, 32), "data:4", P("data", None)),
        (Memory(256, axis_names=["model"], scope="tree"), (16, 8), "data:4,model:2", P("model", None)),
        (
            Memory(64, axis_names=[("data", "model")], scope="tree"),
            (4, 32),
            "data:4,model:2",
            P(None, ("data", "model")),
        ),
    ],
    ids=str,
)
def test_the_axes_of_an_array(rule: sr.ShardingRule, shape: tuple[int, ...], mesh: str, spec: P) -> None:
    assert rule.plan(f32(*shape), sr.mesh_shape(mesh)).specs == spec


@pytest.mark.parametrize("limit", [0, 10**9])
@pytest.mark.parametrize("scope", ["array", "tree"])
def test_a_missing_axis_is_an_error_even_if_all_fits(limit: int, scope: Any) -> None:
    rule = Memory(limit, axis_names=["data", "modle"], scope=scope)
    with pytest.raises(
        sr.errors.PlanError,
        match=r"(?s)^2 leaves .*v .*unknown axis 'modle' \(did you mean 'model'\?\).*'modle'\).*w \(8",
    ):
        rule.plan({"w": f32(8, 4), "v": f32(8, 4)}, MESH)


def test_an_array_that_cannot_fit_suggests_a_limit() -> None:
    shapes = {"fits": (64, 64), "w": (7, 8), "v": (9, 9), "x": (12, 3)}
    mesh = sr.mesh_shape("a:3,b:2")
    plan = Memory(30).plan({name: f32(*shape) for name, shape in shapes.items()}, mesh)
    findings = {finding.path: finding for finding in plan.findings if finding.code == "over-budget"}
    assert set(findings) == {"fits", "w", "v", "x"}
    with pytest.raises(sr.errors.PlanError, match="the plan has 4 errors"):
        plan.check()
    for path, finding in findings.items():
        limit = re.search(r"Raise max_memory_per_device to ([\d,]+) or more", finding.remedy)
        assert limit is not None
        least = int(limit[1].replace(",", ""))
        assert "over-budget" not in codes(Memory(least).plan({path: f32(*shapes[path])}, mesh))
        assert "over-budget" in codes(Memory(least - 1).plan({path: f32(*shapes[path])}, mesh))


def test_an_array_in_a_chain_keeps_earlier_decisions() -> None:
    rule = sr.DimShardingRule("model", 0) | Memory(64)
    plan = rule.plan({"w": f32(8, 16), "b": f32(8)}, MESH)
    assert plan.specs == {"w": P("model", "data"), "b": P("model")}
    assert plan.decision("b").reason == "dim 0 over 'model'; fits 64 B"
    assert codes(plan) == []


def test_sub_byte_arrays_and_keys_count_as_in_xla() -> None:
    tree = {
        "i": jax.ShapeDtypeStruct((8, 16), jnp.int4),
        "k": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)),
    }
    assert Memory(64).plan(tree, MESH).specs == {"i": P(), "k": P()}
    assert Memory(63).plan(tree, MESH).specs == {"i": P(None, "data"), "k": P("data")}


# ---- the whole tree ----


def test_a_hundred_arrays_of_4_mib_fit_64_mib() -> None:
    tree = [f32(1024, 1024) for _ in range(100)]
    alone = Memory(5 * MIB).plan(tree, MESH).check()
    assert device_bytes(alone) == 400 * MIB  # each array is below 5 MiB, so each is replicated
    together = Memory(64 * MIB, scope="tree").plan(tree, MESH).check()
    assert device_bytes(together) <= 64 * MIB
    # Whatever a device does not hold it must receive, and no byte of the limit is unused: no choice costs less.
    assert cost(together) == (400 - 64) * MIB
    whole = [spec for spec in together.specs if spec == P()]
    assert len(whole) == 4
    assert codes(together) == []


def assignments(shape: tuple[int, ...], bits: int, mesh: dict[str, int]) -> set[int]:
    """The bytes that a device may hold, over every way to give each axis to one dimension or to none."""
    sizes = set()
    for dims in itertools.product(range(-1, len(shape)), repeat=len(mesh)):
        ways = [
            math.prod(size for size, axis_dim in zip(mesh.values(), dims, strict=True) if axis_dim == dim)
            for dim in range(len(shape))
        ]
        if all(dim % way == 0 for dim, way in zip(shape, ways, strict=True)):
            elements = math.prod(dim // way for dim, way in zip(shape, ways, strict=True))
            sizes.add(-(-elements * bits // 8))
    return sizes


def least_cost(options: list[set[int]], wholes: list[int], budget: int) -> int | None:
    """The least cost over all assignments of all leaves within the budget."""
    sums = {0}
    for choices in options:
        sums = {total + choice for total in sums for choice in choices}
    fitting = [total for total in sums if total <= budget]
    return sum(wholes) - max(fitting) if fitting else None


MESHES = ("data:8", "data:4,model:2", "a:2,b:2,c:2", "a:3,b:2", "a:4,one:1,b:3", "a:2,b:4,c:3")
DTYPES: tuple[tuple[Any, int], ...] = (
    (jnp.float32, 32),
    (jnp.bfloat16, 16),
    (jnp.int8, 8),
    (jnp.int4, 4),
    (jnp.uint2, 2),
    (jnp.complex64, 64),
)


def random_tree(rng: random.Random) -> tuple[AbstractMesh, dict[str, Any], list[set[int]], list[int]]:
    """A mesh, a tree of up to 6 leaves, some equal and some hard to divide, and what each may hold."""
    mesh = sr.mesh_shape(rng.choice(MESHES))
    tree: dict[str, Any] = {}
    options: list[set[int]] = []
    wholes: list[int] = []
    while len(tree) < rng.randint(1, 6):
        shape = tuple(rng.choice((1, 2, 3, 4, 6, 8, 12, 24, 7, 0)) for _ in range(rng.choice((0, 1, 2, 2, 3))))
        dtype, bits = rng.choice(DTYPES)
        choices = assignments(shape, bits, dict(mesh.shape))
        for _ in range(rng.choice((1, 1, 2))):
            tree[f"w{len(tree)}"] = jax.ShapeDtypeStruct(shape, dtype)
            options.append(choices)
            wholes.append(-(-math.prod(shape) * bits // 8))
    return mesh, tree, options, wholes


@pytest.mark.parametrize("seed", range(60))
def test_the_cost_is_the_least_of_all_assignments(seed: int) -> None:
    rng = random.Random(seed)
    mesh, tree, options, wholes = random_tree(rng)
    least, most = sum(map(min, options)), sum(wholes)
    for budget in [least, most, most - 1, *(rng.randint(least, most) for _ in range(4))]:
        best = least_cost(options, wholes, budget)
        if best is None:
            continue
        plan = Memory(budget, scope="tree").plan(tree, mesh).check()
        assert device_bytes(plan) <= budget
        assert best <= cost(plan) <= best * 1.01
        if budget >= most:
            assert set(jax.tree.leaves(plan.specs)) <= {P()}


def named_limit(rule: sr.ShardingRule, tree: Any, mesh: AbstractMesh) -> int:
    pattern = r"scope='tree'\): no assignment fits .* The smallest limit that works on this mesh is ([\d,]+) bytes .*: "
    with pytest.raises(sr.errors.PlanError, match=f"{pattern}raise max_memory_per_device to that, use") as caught:
        rule.plan(tree, mesh)
    limit = re.search(pattern, str(caught.value))
    assert limit is not None
    return int(limit[1].replace(",", ""))


@pytest.mark.parametrize("seed", range(60, 90))
def test_an_infeasible_limit_names_the_smallest_feasible(seed: int) -> None:
    mesh, tree, options, _ = random_tree(random.Random(seed))
    least = sum(map(min, options))
    if least:
        assert named_limit(Memory(0, scope="tree"), tree, mesh) == least
        assert named_limit(Memory(least - 1, scope="tree"), tree, mesh) == least
    assert device_bytes(Memory(least, scope="tree").plan(tree, mesh).check()) == least


def test_some_of_several_equal_leaves_are_split() -> None:
    tree = {"layers": [{"w": f32(64, 64)} for _ in range(6)]}
    plan = Memory(6 * 16384 - 12288, scope="tree").plan(tree, MESH).check()
    specs = [layer["w"] for layer in plan.specs["layers"]]
    assert [spec == P() for spec in specs] == [True] * 5 + [False]
    assert cost(plan) == 12288
    assert plan.decision("layers/0/w").reason == "stays as it is: the tree fits 84.0 KiB"
    assert plan.decision("layers/5/w").reason == "split so that the tree fits 84.0 KiB"


# ---- with other rules ----


def test_leaves_with_equal_choices_are_one_group() -> None:
    tree = {"a": f32(64, 32), "b": jax.ShapeDtypeStruct((64, 32), jnp.int32), "c": f32(64, 32)}
    plan = Memory(20000, scope="tree").plan(tree, sr.mesh_shape("data:4")).check()
    assert plan.specs == {"a": P(), "b": P(), "c": P("data", None)}


def test_settled_leaves_count_in_nested_composites() -> None:
    tree = {"a": f32(64, 64), "b": [f32(64, 64) for _ in range(3)], "c": f32(64, 64)}
    whole = 64 * 64 * 4
    inner = sr.CompositeShardingRule(sr.RegexShardingRule([("b/", P("data"))]), Memory(2 * whole, scope="tree"))
    plan = sr.CompositeShardingRule(sr.RegexShardingRule([("a", P("model"))]), inner).plan(tree, MESH).check()
    assert plan.specs["a"] == P("model")
    assert plan.specs["b"] == [P("data")] * 3
    # The others take 1/2 and 3/4 of 2 arrays. That leaves room for 3/4 of an array, so the last must be halved.
    assert plan.specs["c"] == P("model", None)
    assert device_bytes(plan) == whole // 2 + 3 * whole // 4 + whole // 2


WHOLE = 64 * 64 * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda rule: sr.CompositeShardingRule(sr.RegexShardingRule([("embed", P())]), rule),
        lambda rule: sr.RegexShardingRule([("w", rule), ("embed", P())]),
    ],
    ids=["composite", "regex"],
)
def test_leaves_that_others_decide_count(make: Any) -> None:
    tree = {"embed": f32(64, 64), "layers": [{"w": f32(64, 64)} for _ in range(10)]}
    least = WHOLE + 10 * WHOLE // 8
    assert named_limit(make(Memory(WHOLE, scope="tree")), tree, MESH) == least
    for limit in (least, 5 * WHOLE):
        plan = make(Memory(limit, scope="tree")).plan(tree, MESH).check()
        assert plan.specs["embed"] == P()
        assert device_bytes(plan) == limit


def test_a_chain_keeps_earlier_splits_and_adds_more() -> None:
    tree = {"w": f32(64, 64), "v": f32(64, 64), "b": f32(64)}
    rule = sr.DimShardingRule("model", -1) | Memory(64 * 64 * 4 // 2, scope="tree")
    plan = rule.plan(tree, MESH).check()
    assert device_bytes(plan) <= 64 * 64 * 4 // 2
    assert [spec.partitions[-1] for spec in jax.tree.leaves(plan.specs)] == ["model"] * 3
    names = [name for spec in jax.tree.leaves(plan.specs) for name in spec.partitions]
    assert names.count("data") == 1 or names.count("data") == 2
    enough = sr.DimShardingRule("model", -1) | Memory(64 * 64 * 4 + 128, scope="tree")
    assert jax.tree.leaves(enough.plan(tree, MESH).specs) == [P("model"), P(None, "model"), P(None, "model")]


@pytest.mark.parametrize("seed", range(20))
def test_in_a_chain_the_cost_is_the_least(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(rng.choice((8, 12, 16)), rng.choice((2, 4, 6, 8, 7))) for _ in range(rng.randint(1, 5))]
    tree = {f"w{index}": f32(*shape) for index, shape in enumerate(shapes)}
    mesh = sr.mesh_shape("x:4,a:2,b:3")
    # Dimension 0 is split over "x" before; "a" and "b" are free, for dimension 1 only.
    options = [{nbytes // 4 for nbytes in assignments((cols,), 32 * rows, {"a": 2, "b": 3})} for rows, cols in shapes]
    wholes = [math.prod(shape) * 4 for shape in shapes]
    least, most = sum(map(min, options)), sum(map(max, options))
    for budget in [least, most, rng.randint(least, most), rng.randint(least, most)]:
        best = least_cost(options, wholes, budget)
        assert best is not None
        plan = (sr.DimShardingRule("x", 0) | Memory(budget, scope="tree")).plan(tree, mesh).check()
        assert device_bytes(plan) <= budget
        assert best <= cost(plan) <= best * 1.01
        assert all(spec.partitions[0] == "x" for spec in jax.tree.leaves(plan.specs))
    assert named_limit(sr.DimShardingRule("x", 0) | Memory(least - 1, scope="tree"), tree, mesh) == least


def test_leaves_that_cannot_be_split_are_decided() -> None:
    plan = Memory(10**6, scope="tree").plan({"s": f32(), "z": f32(0, 8), "n": 3, "f": jax.nn.relu}, MESH).check()
    assert plan.specs == {"s": P(), "z": P(), "n": P(), "f": jax.nn.relu}
    for scope in ("array", "tree"):
        assert Memory(0, scope=scope).plan({}, MESH).check().specs == {}
        assert Memory(0, scope=scope).plan({"z": f32(0, 8)}, MESH).check().specs == {"z": P()}


# ---- the mesh, many leaves ----


def test_the_mesh_of_the_rule_comes_first() -> None:
    rule = Memory(512, sr.mesh_shape("x:8"), scope="tree")
    assert rule.apply({"w": f32(32, 32)}) == {"w": P("x", None)}
    assert rule.plan({"w": f32(32, 32)}, MESH).specs == {"w": P("x", None)}
    for scope in ("array", "tree"):
        with pytest.raises(sr.errors.NoMeshError, match="this rule needs a mesh"):
            Memory(512, scope=scope).apply({"w": f32(32, 32)})


def test_many_leaves_use_the_limit() -> None:
    tree = {"layers": [{n: f32(1024, 64 * k) for k, n in enumerate("qkvodugn", 1)} for _ in range(140)]}
    whole = sr.ReplicateShardingRule().plan(tree, MESH).memory().total_bytes
    plan = Memory(whole // 3, scope="tree").plan(tree, MESH)
    assert 0.995 * whole / 3 < device_bytes(plan) <= whole / 3


def test_grouping_of_leaves_does_not_matter() -> None:
    tree = {"layers": [{"w": f32(64, 64), "b": f32(64)} for _ in range(12)]}
    rule = Memory(80_000, scope="tree")
    by_index = sr.CompositeShardingRule(sr.RegexShardingRule([("never/0", P())]), rule)
    assert by_index.plan(tree, MESH).specs == rule.plan(tree, MESH).specs


def test_a_large_mesh_keeps_the_limit() -> None:
    plan = Memory(40 * MIB, scope="tree").plan([f32(4096, 4096)] * 50, sr.mesh_shape("pod:16,data:64,model:64"))
    assert device_bytes(plan.check()) <= 40 * MIB
