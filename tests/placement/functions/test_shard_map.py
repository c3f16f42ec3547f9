"""`filter_shard_map`: modules split by rules, plans and specs, under every transformation, and what it refuses."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardrules as sr

MESH = sr.create_mesh("data:4,model:2")
MESHES = {
    "auto": MESH,
    "explicit": sr.create_mesh("data:4,model:2", axis_types="explicit"),
    "mixed": sr.create_mesh("data:4,model:2", axis_types=("explicit", "auto")),
}
RULE = sr.DimShardingRule("data", 0)
LAYER = eqx.nn.Linear(8, 16, key=jax.random.key(0))
X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


def forward(model: Any, x: Any) -> Any:
    return jax.vmap(model)(x)


def loss(model: Any, x: Any) -> Any:
    return jax.lax.pmean(jnp.mean(forward(model, x) ** 2), ("data", "model"))


def whole_loss(model: Any, x: Any) -> Any:
    return jnp.mean(forward(model, x) ** 2)


@pytest.mark.parametrize("jit", [lambda fn: fn, sr.filter_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES.keys())
def test_arrays_in_modules_are_split_and_the_rest_passes_through(mesh: Any, jit: Any) -> None:
    seen: list[Any] = []

    def local(model: Any, x: Any, scale: float = 2.0) -> Any:
        seen.append((model.weight.shape, x.shape, scale))
        y = forward(model, jax.lax.all_gather(x, "model", axis=1, tiled=True))
        return {"y": y * scale, "model": model, "name": "local"}

    specs = {"y": P("model"), "model": P("data"), "name": None}
    layer = sr.filter_shard(LAYER, P(), mesh)
    x = sr.filter_shard(X, P(), mesh)
    mapped = jit(sr.filter_shard_map(local, mesh, (RULE, P(None, "model")), specs, check_vma=False))
    result = mapped(layer, x)
    assert seen[-1] == ((4, 8), (8, 4), 2.0)
    assert result["name"] == "local"
    assert (result["model"].in_features, result["model"].weight.shape) == (8, (16, 8))
    np.testing.assert_array_equal(result["model"].weight, LAYER.weight)
    assert result["y"].shape == (16, 4)
    assert result["model"].weight.sharding.spec[0] == "data"


def test_decorators_methods_keywords_and_none_work() -> None:
    @sr.filter_shard_map(mesh=MESH, in_specs=(None, P("data")), out_specs=P("data"))
    def scale(factor: Any, x: Any, *, shift: Any = 0) -> Any:
        assert x.shape == (2, 8)
        return factor * x + shift

    np.testing.assert_array_equal(scale(jnp.float32(2), X), 2 * X)
    np.testing.assert_array_equal(scale(x=X, factor=3, shift=np.float32(1)), 3 * X + 1)
    assert vars(scale)["__name__"] == "scale"

    class Model(eqx.Module):
        w: jax.Array

        @sr.filter_shard_map(mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data"))
        def __call__(self, x: Any) -> Any:
            return x * self.w

    np.testing.assert_array_equal(Model(jnp.float32(2))(X), 2 * X)
    mapped = sr.filter_shard_map(eqx.nn.Linear(8, 4, key=jax.random.key(0)), MESH, P(), None)
    assert mapped(X[0]).shape == (4,)
    assert len(jax.tree.leaves(eqx.filter(mapped, eqx.is_array))) == 2


def test_plans_and_mirrors_are_specs_of_arguments_and_results() -> None:
    mesh = MESHES["auto"]
    optim = optax.adam(0.1)
    params = eqx.filter(LAYER, eqx.is_array)
    plan = RULE.plan(params, mesh)

    @sr.filter_jit
    @sr.filter_shard_map(
        mesh=mesh, in_specs=(plan, plan.mirror, P("model")), out_specs=(plan, plan.mirror, P("data"), None)
    )
    def step(params: Any, state: Any, batch: Any) -> Any:
        whole = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "data", tiled=True), params)

        def loss_of(params: Any) -> Any:
            return jax.lax.pmean(whole_loss(eqx.combine(params, LAYER), batch), "model")

        grads = jax.tree.map(lambda g: jax.lax.psum_scatter(g, "data", tiled=True) / 4, jax.grad(loss_of)(whole))
        updates, state = optim.update(grads, state, params)
        return optax.apply_updates(params, updates), state, params.weight, "done"

    state: Any = optim.init(params)
    params, state, old, word = step(params, state, X)
    params, state, old, word = step(params, state, X)
    assert (word, old.shape) == ("done", (16, 8))
    assert params.weight.sharding.spec == P("data")
    assert state[0].mu.weight.sharding.spec == P("data")
    assert state[0].mu.weight.shape == (16, 8)
    assert not np.allclose(params.weight, LAYER.weight)


@pytest.mark.slow
def test_a_plan_may_be_for_results_that_depend_on_sizes_of_axes() -> None:
    model = eqx.nn.MLP(8, 8, 8, 1, use_bias=False, key=jax.random.key(0))
    plan = RULE.plan(model, MESH)

    def quarter(model: Any) -> Any:
        index = jax.lax.axis_index("data")
        arrays, rest = eqx.partition(model, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index * 2, 2), arrays), rest)

    result = sr.filter_shard_map(quarter, MESH, None, plan)(model)
    assert eqx.tree_equal(result, model)
    with pytest.raises(TypeError, match="reshape") as caught:
        sr.filter_shard_map(lambda x: x[:2].reshape(2, 8) + x[:1].reshape(2, 8), MESH, P(), RULE)(X)
    assert "jax.lax.axis_size" in caught.value.__notes__[-1]
    assert eqx.tree_equal(sr.filter_shard_map(lambda model: model, MESH, RULE, RULE)(model), model)


def test_a_rule_decides_on_whole_results() -> None:
    rule = sr.RegexShardingRule([("rows", P("data")), ("columns", P(None, ("data", "model"))), (".*", P())])

    def local(x: Any) -> Any:
        summed = jax.lax.psum_scatter(
            jax.lax.all_gather(x, "data", tiled=True), ("data", "model"), scatter_dimension=1, tiled=True
        )
        return {"rows": x * 2, "columns": summed, "total": jax.lax.psum(x.sum(), "data"), "kind": "toy"}

    mapped = sr.filter_shard_map(local, MESH, P("data"), rule, check_vma=False)
    for run in (mapped, sr.filter_jit(mapped)):
        result = run(X)
        np.testing.assert_array_equal(result["rows"], 2 * X)
        np.testing.assert_allclose(result["columns"], 8 * X)
        np.testing.assert_allclose(result["total"], X.sum(), rtol=1e-6)
        assert result["columns"].sharding.spec == P(None, ("data", "model"))
        assert result["kind"] == "toy"


@pytest.mark.parametrize("mesh", [MESHES["auto"], MESHES["explicit"]], ids=["auto", "explicit"])
def test_gradients_are_those_of_the_whole_function(mesh: Any) -> None:
    mapped = sr.filter_shard_map(loss, mesh, in_specs=(None, P(("data", "model"))), out_specs=P())
    layer, x = sr.filter_shard(LAYER, P(), mesh), sr.filter_shard(X, P(), mesh)
    expected = eqx.filter_grad(whole_loss)(LAYER, X)
    actual = sr.filter_jit(eqx.filter_grad(mapped), mesh=mesh, axis_types=None)(layer, x)
    np.testing.assert_allclose(actual.weight, expected.weight, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(actual.bias, expected.bias, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_it_works_eagerly_under_grad_vmap_scan_and_checkpoint() -> None:
    mapped = sr.filter_shard_map(loss, MESH, in_specs=(None, P(("data", "model"))), out_specs=P())
    expected = eqx.filter_grad(whole_loss)(LAYER, X).weight
    np.testing.assert_allclose(eqx.filter_grad(mapped)(LAYER, X).weight, expected, rtol=1e-5, atol=1e-7)
    batched = jax.jit(jax.vmap(lambda x: mapped(LAYER, x)))(jnp.stack([X, 2 * X]))
    np.testing.assert_allclose(batched, [whole_loss(LAYER, X), whole_loss(LAYER, 2 * X)], rtol=1e-5)

    @sr.filter_jit
    def losses(model: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda total, x: (total + jax.checkpoint(mapped)(model, x), None), 0.0, xs)[0]

    np.testing.assert_allclose(losses(LAYER, jnp.stack([X, 2 * X])), batched.sum(), rtol=1e-5)
    grads = sr.filter_jit(eqx.filter_grad(losses))(LAYER, X[None])
    np.testing.assert_allclose(grads.weight, expected, rtol=1e-5, atol=1e-7)


def test_arrays_that_the_function_closes_over_are_whole() -> None:
    @sr.filter_jit
    def run(model: Any, x: Any) -> Any:
        inner = sr.filter_shard_map(lambda x: forward(model, x), MESH, P("data"), P("data"))
        return inner(x)

    np.testing.assert_allclose(run(LAYER, X), forward(LAYER, X), rtol=1e-5, atol=1e-6)
    outside = sr.filter_shard_map(lambda x: forward(LAYER, x), MESH, P("data"), P("data"))
    np.testing.assert_allclose(outside(X), forward(LAYER, X), rtol=1e-5, atol=1e-6)


def test_the_mesh_comes_from_the_plan_the_arrays_or_the_context() -> None:
    def local(x: Any) -> Any:
        return x + jax.lax.axis_index("data")

    expected = X + np.arange(8)[:, None] // 2
    np.testing.assert_array_equal(sr.filter_shard_map(local, None, RULE.plan(X, MESH), P("data"))(X), expected)
    placed = sr.filter_shard(X, P(), MESH)
    np.testing.assert_array_equal(sr.filter_shard_map(local, None, P("data"), P("data"))(placed), expected)
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(sr.filter_shard_map(local, None, P("data"), P("data"))(X), expected)
        np.testing.assert_array_equal(jax.jit(sr.filter_shard_map(local, None, P("data"), P("data")))(X), expected)
    shape = sr.mesh_shape("data:4,model:2")
    np.testing.assert_array_equal(sr.filter_shard_map(local, shape, P("data"), P("data"))(placed), expected)
    with pytest.raises(sr.errors.NoMeshError, match="filter_shard_map needs a mesh and there is none"):
        sr.filter_shard_map(local, None, P("data"), P("data"))(X)


def test_axes_that_are_not_mapped_are_left_to_the_compiler() -> None:
    def local(x: Any) -> Any:
        return sr.with_sharding_constraint(2 * x, P(None, "model")) + jax.lax.psum(x.sum(), "data")

    mapped = sr.filter_shard_map(local, MESH, P("data"), P("data"), axis_names=["data"])
    with jax.set_mesh(MESH):
        np.testing.assert_allclose(jax.jit(mapped)(X), 2 * X + X.sum(), rtol=1e-6)
    with pytest.raises(sr.errors.PlanError, match=r"(?s)argument 0: .*axis 'model' is not mapped"):
        sr.filter_shard_map(local, MESH, P("model"), P("data"), axis_names=["data"])(X)
    with pytest.raises(sr.errors.UnknownAxisError, match=r"unknown axis 'dta' \(did you mean 'data'\?\)"):
        sr.filter_shard_map(local, MESH, P("data"), P("data"), axis_names=["dta"])(X)


@pytest.mark.parametrize(
    ("in_specs", "out_specs", "error", "message"),
    [
        (P("data"), P("data"), sr.errors.PlanError, r"(?s)argument 0: 2 arrays .*b \(3,\).*w \(6, 8\).*data size 4"),
        (P("dat"), P(), sr.errors.PlanError, r"argument 0: (?s:.*)unknown axis 'dat'"),
        (P(None, None, "data"), P(), sr.errors.PlanError, r"argument 0: (?s:.*)\(6, 8\)"),
        (P.UNCONSTRAINED, P(), sr.errors.PlanError, "expected a PartitionSpec"),
        (P(P.UNCONSTRAINED), P(), sr.errors.PlanError, "UNCONSTRAINED"),
        ((P(), P()), P(), sr.errors.TreeError, "in_specs has 2 items, and the call has 1 positional"),
        ({"w": P()}, P(), sr.errors.TreeError, "argument 0"),
        (None, {"w": P()}, sr.errors.TreeError, "the result"),
        (None, {"w": P("dat"), "b": P()}, sr.errors.PlanError, r"out_specs: (?s:.*)w .*unknown axis 'dat'"),
        (None, {"w": P(), "b": P(None, "data")}, sr.errors.PlanError, r"the result: (?s:.*)b (?s:.*)\(3,\)"),
        (None, (sr.ReplicateShardingRule(),), None, ""),
        (None, sr.RegexShardingRule([("w", P(None, "model")), ("b", P())]), sr.errors.PlanError, r"shards of \(6, 8\)"),
    ],
)
def test_what_does_not_fit_is_listed_with_its_path(in_specs: Any, out_specs: Any, error: Any, message: str) -> None:
    tree = {"w": np.ones((6, 8), np.float32), "b": np.ones(3, np.float32)}
    mapped = sr.filter_shard_map(lambda tree: tree, MESH, in_specs, out_specs)
    if error is None:
        return
    for run in (mapped, sr.filter_jit(mapped)):
        with pytest.raises(error, match=message):
            run(tree)


def test_wrong_functions_and_promises_are_refused() -> None:
    with pytest.raises(sr.errors.ConfigTypeError, match="filter_shard_map maps a function"):
        sr.filter_shard_map(RULE, MESH)  # pyright: ignore[reportArgumentType, reportCallIssue]
    promise = sr.filter_shard_map(lambda x: x, MESH, P("data"), P())
    with pytest.raises(ValueError, match="check_vma"):
        promise(X)
    pair = sr.filter_shard_map(lambda x: (x, x, x), MESH, None, (RULE, P()))
    with pytest.raises(sr.errors.TreeError, match="out_specs has 2 items, the function returns 3"):
        pair(X)


def test_writes_to_objects_are_refused_and_returned_objects_are_not() -> None:
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def double(layer: Any) -> Any:
        layer.kernel[...] = 2 * layer.kernel[...]
        return layer.kernel[...]

    mapped = sr.filter_shard_map(double, MESH, RULE, P("data"))
    with pytest.raises(sr.errors.TreeError, match="writes to variables of flax nnx objects"):
        mapped(layer)
    read = sr.filter_shard_map(lambda layer: layer.kernel[...] * 2, MESH, RULE, P("data"))
    np.testing.assert_array_equal(read(layer), 2 * layer.kernel[...])
