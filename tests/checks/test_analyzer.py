"""The reports of the analyzer on trees and specs, sound and unsound."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.presets import eformer
from tests.zoo import f32

MESH = sr.mesh_shape("dp:2,tp:4")
ANALYZER = sr.ShardingAnalyzer(MESH)


# ---- validate_partition_specs ----


@pytest.mark.parametrize(
    "spec",
    [
        P(),
        P(None),
        P(None, None),
        P("dp", "tp"),
        P("tp", "dp"),
        P(("dp", "tp")),
        P(None, ("tp", "dp")),
        P(P.UNCONSTRAINED, "tp"),
        None,
        NamedSharding(MESH, P("tp")),
    ],
)
def test_sound_specs_have_no_issues(spec: Any) -> None:
    assert ANALYZER.validate_partition_specs({"a": f32(8, 16)}, {"a": spec}) == []


UNSOUND: tuple[tuple[tuple[int, ...], Any, str], ...] = (
    (
        (8, 15),
        P("dp", "tp"),
        "w/0: Array shape (8, 15) not divisible by mesh axis tp size 4: dimension 1 is 15, remainder 3",
    ),
    (
        (12, 4),
        P(("dp", "tp")),
        "w/0: Array shape (12, 4) not divisible by mesh axis dp x tp size 8: dimension 0 is 12, remainder 4",
    ),
    ((8,), P("dpp"), "w/0: unknown axis 'dpp' (did you mean 'dp'?); the mesh has dp, tp"),
    ((8,), P("dp", "tp"), "w/0: P('dp', 'tp') has 2 entries, the array has 1 dimensions"),
    ((), P("dp"), "w/0: P('dp') has 1 entries, the array has 0 dimensions"),
    (
        (8, 8),
        P("dp", "dp"),
        "w/0: P('dp', 'dp') uses axis 'dp' twice (duplicate entries for `dp`): dimensions 0 and 1",
    ),
    ((8,), P(3), "w/0: an entry of a PartitionSpec must be None, an axis or a tuple of axes, got 3"),
    ((8,), "dp", "w/0: expected a PartitionSpec, a NamedSharding or None, got str 'dp'"),
)


@pytest.mark.parametrize(("shape", "spec", "issue"), UNSOUND)
def test_an_issue_has_path_and_numbers(shape: tuple[int, ...], spec: Any, issue: str) -> None:
    assert ANALYZER.validate_partition_specs({"w": [f32(*shape)]}, {"w": [spec]}) == [issue]


def test_issues_are_in_tree_order() -> None:
    tree = {f"w{index}": f32(*shape) for index, (shape, *_) in enumerate(UNSOUND)}
    specs = {f"w{index}": spec for index, (_, spec, _) in enumerate(UNSOUND)}
    expected = [f"w{index}{issue.removeprefix('w/0')}" for index, (*_, issue) in enumerate(UNSOUND)]
    assert ANALYZER.validate_partition_specs(tree, specs) == expected
    several = ANALYZER.validate_partition_specs(f32(7, 8), P("tp", ("dp", "dp"), "zz"))
    assert [issue.split(":")[0] for issue in several] == ["the tree"] * 3
    assert [len([issue for issue in several if word in issue]) for word in ("3 entries", "divisible", "twice")] == [
        1,
        1,
        1,
    ]


def test_another_structure_is_an_issue() -> None:
    issues = ANALYZER.validate_partition_specs({"a": f32(8), "b": f32(8)}, {"a": P("dp")})
    assert len(issues) == 1
    assert "does not have the structure of the tree" in issues[0]
    assert "'b'" in issues[0]


def test_static_leaves_are_skipped() -> None:
    model = eqx.nn.MLP(4, 8, 16, 2, key=jax.random.key(0))
    specs = sr.FSDPShardingRule("tp", min_size_mb=0).plan(model, MESH).specs
    assert ANALYZER.validate_partition_specs(model, specs) == []
    assert ANALYZER.validate_partition_specs({"step": 3, "act": jax.nn.relu}, {"step": P(), "act": None}) == []


# ---- estimate_memory_usage ----


def test_usage_is_in_bytes() -> None:
    tree = {"a": f32(8, 16), "b": f32(16), "i": jax.ShapeDtypeStruct((6, 2), jnp.int4)}
    usage = ANALYZER.estimate_memory_usage(tree, {"a": P(("dp", "tp")), "b": P(), "i": P("dp")})
    # i: 12 elements of 4 bits are 6 bytes, 6 elements on a device are 3.
    assert usage == {
        "total_size": 512 + 64 + 6,
        "size_per_device": 64 + 64 + 3,
        "sharded_size": 64 + 3,
        "replicated_size": 64,
        "device_count": 8,
    }


def test_the_largest_of_uneven_shards_counts_and_nothing_takes_nothing() -> None:
    assert ANALYZER.estimate_memory_usage(f32(10), P("tp"))["size_per_device"] == 3 * 4
    assert ANALYZER.estimate_memory_usage(f32(3), P("tp"))["size_per_device"] == 4
    names = ("total_size", "size_per_device", "sharded_size", "replicated_size")
    assert ANALYZER.estimate_memory_usage({}, {}) == dict.fromkeys(names, 0) | {"device_count": 8}


def test_an_optimizer_state_counts_like_any_tree() -> None:
    params = {"w": f32(8, 16), "b": f32(16)}
    plan = sr.FSDPShardingRule("tp", min_size_mb=0).plan(params, MESH)
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    usage = ANALYZER.estimate_memory_usage(state, plan.mirror(state).specs)
    assert usage["size_per_device"] == 2 * (8 * 16 + 16) * 4 // 4 + 4


def test_an_error_lists_all_leaves_that_are_not_specs() -> None:
    with pytest.raises(
        sr.errors.ConfigTypeError, match=r"(?s)w: expected a PartitionSpec.*got str 'dp'.*z: .*got int 3"
    ):
        ANALYZER.estimate_memory_usage({"w": f32(8), "y": f32(8), "z": f32(8)}, {"w": "dp", "y": P(), "z": 3})
    with pytest.raises(sr.errors.TreeError, match="structure of the tree"):
        ANALYZER.estimate_memory_usage({"w": f32(8)}, {"v": P()})


def test_the_arrays_mesh_comes_before_the_mesh_in_force() -> None:
    analyzer = sr.ShardingAnalyzer()
    tree = {"w": jax.device_put(np.ones((8, 4), np.float32), NamedSharding(sr.create_mesh("dp:8"), P()))}
    with jax.set_mesh(sr.create_mesh("set:8")):
        assert analyzer.validate_partition_specs(tree, {"w": P("dp")}) == []
        assert analyzer.estimate_memory_usage(tree, {"w": P("dp")})["size_per_device"] == 16
        assert eformer.analyze_sharding_strategy(tree, {"w": P("dp")})["memory_per_device"] == 16
        assert analyzer.analyze(tree, {"w": P()}).mesh == "dp:8"
        assert analyzer.analyze({"w": np.ones(8)}, {"w": P("set")}).mesh == "set:8"
        assert ANALYZER.analyze(tree, {"w": P()}).mesh == "dp:2,tp:4"
    with pytest.raises(sr.errors.NoMeshError, match=r"the analysis needs a mesh: pass ShardingAnalyzer\(mesh\)"):
        analyzer.estimate_memory_usage(f32(8), P("dp"))


# ---- analyze ----


def tree_and_specs() -> tuple[Any, Any]:
    tree = {
        "embed": f32(64, 16),
        "head": f32(16, 64),
        "layers": [{"w": f32(16, 16), "norm": f32(16)} for _ in range(3)],
        "scale": f32(),
    }
    specs = {
        "embed": P("tp", "dp"),
        "head": P(),
        "layers": [{"w": P(None, "tp"), "norm": P()} for _ in range(3)],
        "scale": P(),
    }
    return tree, specs


def test_a_report_adds_up() -> None:
    report = ANALYZER.analyze(*tree_and_specs())
    embed, head, weights, norms = 4096, 4096, 3 * 1024, 3 * 64
    assert report.mesh == "dp:2,tp:4"
    assert (report.device_count, report.array_count, report.sharded_array_count) == (8, 9, 4)
    assert report.element_count == 1024 + 1024 + 768 + 48 + 1
    assert report.sharded_element_count == 1024 + 768
    assert report.total_bytes == embed + head + weights + norms + 4
    assert report.sharded_bytes == embed + weights
    assert report.device_bytes == embed // 8 + head + weights // 4 + norms + 4
    assert report.stored_bytes == embed + 8 * head + 2 * weights + 8 * norms + 8 * 4
    assert report.sharded_share == report.sharded_bytes / report.total_bytes
    assert report.redundancy == report.stored_bytes / report.total_bytes
    assert report.balance == 1.0
    assert report.axes == (sr.reports.AxisUse("dp", 2, 1, 4096), sr.reports.AxisUse("tp", 4, 4, 4096 + 3 * 1024))
    assert eformer.analyze_sharding_strategy(*tree_and_specs(), MESH) == {
        "total_parameters": report.element_count,
        "sharded_parameters": report.sharded_element_count,
        "memory_per_device": report.device_bytes,
        "balance_score": 1.0,
        "partition_stats": {
            "dp": {"size": 2, "arrays": 1, "bytes": 4096},
            "tp": {"size": 4, "arrays": 4, "bytes": 7168},
        },
        "communication_cost": report.total_bytes - report.device_bytes,
    }
    nothing = ANALYZER.analyze({}, {})
    assert (nothing.sharded_share, nothing.balance, nothing.redundancy) == (0.0, 1.0, 1.0)


def test_a_report_lists_the_largest_replicated_arrays() -> None:
    report = ANALYZER.analyze(*tree_and_specs())
    assert report.replicated == (
        sr.reports.ReplicatedLeaf("head", (16, 64), 1, 4096),
        sr.reports.ReplicatedLeaf("layers/*/norm", (16,), 3, 192),
        sr.reports.ReplicatedLeaf("scale", (), 1, 4),
    )
    many = {f"w{index}": f32(index) for index in range(12)}
    assert [leaf.path for leaf in ANALYZER.analyze(many, jax.tree.map(lambda _: P(), many)).replicated] == [
        f"w{index}" for index in range(11, 1, -1)
    ]
    assert ANALYZER.analyze(*tree_and_specs(), largest=1).replicated == report.replicated[:1]
    assert ANALYZER.analyze(*tree_and_specs(), largest=0).replicated == ()


PAGE = """\
mesh          dp:2,tp:4 (8 devices)
arrays        9, 4 of them split
bytes         11.2 KiB in total, 62.5% in split arrays
per device    5.4 KiB, balance 1.000, 3.89 copies
axis 'dp'     size 2, splits 1 arrays, 4.0 KiB
axis 'tp'     size 4, splits 4 arrays, 7.0 KiB
largest replicated:
     4.0 KiB  head  (16, 64)
       192 B  layers/*/norm  x3  (16,)
         4 B  scale  ()"""


def test_a_report_prints_as_a_page() -> None:
    assert str(ANALYZER.analyze(*tree_and_specs())) == PAGE


@pytest.mark.parametrize(
    ("shape", "dtype", "spec", "per_device"),
    [
        ((8, 16), jnp.float32, P(("tp", "dp")), [64] * 8),
        ((10,), jnp.float32, P("tp"), [12, 12, 12, 12, 12, 12, 4, 4]),
        ((2,), jnp.float32, P("tp"), [4, 4, 4, 4, 0, 0, 0, 0]),
        ((6,), jnp.int4, P("dp"), [2] * 8),  # 3 elements of 4 bits: two bytes on each
        ((3, 5), jnp.int4, P("dp", "tp"), [2, 2, 1, 0, 1, 1, 1, 0]),
        ((0, 5), jnp.float32, P("dp", "tp"), [0] * 8),
        ((5,), jnp.float32, P(), [20] * 8),
    ],
)
def test_balance_is_average_over_fullest(shape: tuple[int, ...], dtype: Any, spec: P, per_device: list[int]) -> None:
    report = ANALYZER.analyze(jax.ShapeDtypeStruct(shape, dtype), spec)
    assert report.device_bytes == max(per_device)
    assert report.stored_bytes == sum(per_device)
    assert report.balance == (sum(per_device) / 8 / max(per_device) if max(per_device) else 1.0)


def test_a_duplicate_axis_keeps_one_copy() -> None:
    # 64 elements over 16 parts of 4 bytes each, on 4 devices: at least each part is stored once.
    report = sr.ShardingAnalyzer(sr.mesh_shape("data:4")).analyze({"w": f32(16, 16)}, {"w": P("data", "data")})
    assert report.stored_bytes == 1024
