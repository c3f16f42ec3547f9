"""`place_batch`: in one process it is `filter_shard`; over several, see the tests of processes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import ConfigTypeError, NoMeshError, PlanError, TreeError
from shardrules.placement.batches import batch as batch_module
from shardrules.placement.batches.batch import LocalBatch, Placer, agree


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return sr.create_mesh("data:4,model:2")


def batch() -> dict[str, Any]:
    return {
        "x": np.arange(32.0).reshape(8, 4),
        "labels": [np.arange(8), np.arange(16).reshape(8, 2)],
        "key": jax.random.split(jax.random.key(0), 8),
        "weight": 0.5,
        "activation": jax.nn.relu,
    }


HOWS: dict[str, Any] = {
    "spec": P("data"),
    "specs": {
        "x": P("data", "model"),
        "labels": P("data"),
        "key": P(("data", "model")),
        "weight": None,
        "activation": None,
    },
    "rule": sr.DimShardingRule("data", 0),
    "function": lambda tree: jax.tree.map(lambda _: P("data"), tree),
}


@pytest.mark.parametrize("name", HOWS)
def test_a_batch_is_placed_as_filter_shard_places_it(name: str, mesh: jax.sharding.Mesh) -> None:
    placed = sr.place_batch(batch(), HOWS[name], mesh)
    expected = sr.filter_shard(batch(), HOWS[name], mesh)
    assert jax.tree.structure(placed) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(placed), jax.tree.leaves(expected), strict=True):
        if isinstance(right, jax.Array):
            assert (left.dtype, left.shape, left.sharding) == (right.dtype, right.shape, right.sharding)
            assert (left == right).all()
        else:
            assert left == right


def test_a_plan_and_the_mesh_in_force_place_it(mesh: jax.sharding.Mesh) -> None:
    plan = sr.DimShardingRule("data", 0).plan(batch(), mesh)
    assert sr.place_batch(batch(), plan)["x"].sharding == jax.NamedSharding(mesh, P("data", None))
    with jax.set_mesh(mesh):
        assert sr.place_batch(batch(), P("data"))["x"].sharding == jax.NamedSharding(mesh, P("data"))
    with pytest.raises(NoMeshError, match="place_batch needs a mesh"):
        sr.place_batch(batch(), P("data"))


def test_all_that_is_wrong_is_listed(mesh: jax.sharding.Mesh) -> None:
    tree = {"a": np.ones((6, 2)), "b": np.ones(4), "c": np.ones((8, 3)), "d": np.ones(8)}
    how = {"a": P("data"), "b": P("daat"), "c": P("data", "model"), "d": P("data", "model")}
    with pytest.raises(PlanError, match="place_batch: 4 arrays cannot be placed") as raised:
        sr.place_batch(tree, how, mesh)
    for line in ("indivisible: a (6, 2)", "unknown-axis: b (4,)", "indivisible: c (8, 3)", "rank-overflow: d (8,)"):
        assert f"error {line}" in str(raised.value)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jax.ShapeDtypeStruct((8,), np.float32), "it has a shape and no values"),
        (sr.ArraySource((8,), np.float32, lambda _: np.ones(8)), "it is an ArraySource, which filter_shard reads"),
    ],
)
def test_what_has_no_values_is_refused(leaf: Any, message: str, mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(PlanError, match=rf"not-local: x \(8,\): {message}"):
        sr.place_batch({"x": leaf}, P("data"), mesh)


def test_inside_jit_there_is_nothing_to_place(mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(ConfigTypeError, match="call it outside of jit"):
        jax.jit(lambda x: sr.place_batch(x, P("data"), mesh))(jnp.ones(8))


def test_a_plan_for_another_batch_is_refused(mesh: jax.sharding.Mesh) -> None:
    plan = sr.DimShardingRule("data", 0).plan({"x": np.ones((16, 4))}, mesh)
    with pytest.raises(TreeError, match="x"):
        sr.place_batch({"x": np.ones((8, 4))}, plan, mesh)


def test_batches_of_one_shape_are_planned_once(mesh: jax.sharding.Mesh) -> None:
    calls = []

    def how(tree: Any) -> P:
        calls.append(tree)
        return P("data")

    placer = Placer(how, mesh)
    for rows in (8, 8, 8, 16, 16):
        placer.place(LocalBatch.of({"x": np.ones((rows, 2))}))
    assert len(calls) == 2 * 2  # for the shapes of the whole, and for the checks


def test_processes_compare_no_addresses_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["tokenizer"])
    @dataclasses.dataclass
    class Rows:
        x: np.ndarray
        tokenizer: object

    sent: list[str] = []

    def exchange(text: str, *_: object) -> list[str]:
        sent.append(text)
        return [text, text]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(batch_module, "exchange", exchange)
    tokenizers = [object(), object()]
    trees = [*(Rows(np.ones(8), tokenizer) for tokenizer in tokenizers), Rows(np.ones(4), None), {"x": np.ones(8)}]
    for tree in [*trees, {"y": np.ones(8)}]:
        assert agree(LocalBatch.of(tree), 1)
    assert sent[0] == sent[1]
    assert len(set(sent[2:])) == 3


def test_a_mesh_as_text_is_refused() -> None:
    for function in (sr.place_batch, sr.filter_shard):
        with pytest.raises(TypeError, match="a mesh must be a Mesh or an AbstractMesh, got 'data:8'"):
            function(np.ones(8), P("data"), "data:8")  # pyright: ignore[reportArgumentType]
