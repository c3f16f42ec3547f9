"""Optimizer states against optax: which leaf belongs to which parameter, and what a factored one really kept.

Two oracles, neither of which reads paths: `optax.tree_map_params` knows which leaves belong to parameters, and for
factored states an update on random gradients shows over which dimension each statistic was averaged.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.spec import entries, make_spec, same

MESH = sr.mesh_shape("a:2,b:2,c:2")
MESH_4 = sr.mesh_shape("a:2,b:2,c:2,d:2")
SPECS: dict[int, tuple[P, ...]] = {
    0: (P(),),
    1: (P("a"), P(), P(("b", "c"))),
    2: (P("a", "b"), P(None, "c"), P("c"), P(), P(("c", "a"), None), P("b", ("a", "c"))),
    3: (P(None, "a", "b"), P("c", None, "a"), P("b"), P(None, None, ("a", "c")), P("a", "b", "c")),
    4: (P("a", "b", None, "c"), P(None, "c"), P("c", "b", "a")),
}


def is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def pinned(params: Any) -> sr.ShardingPlan:
    """A plan in which neighbours of equal shape have different specs."""
    leaves, treedef = jax.tree.flatten(params)
    specs = [SPECS[x.ndim][number % len(SPECS[x.ndim])] for number, x in enumerate(leaves)]
    return sr.SpecTreeShardingRule(jax.tree.unflatten(treedef, specs)).plan(params, MESH).check()


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dicts() -> Any:
    """Equal shapes, names that end each other, names that optimizers use for themselves."""
    square, row = f32(8, 8), f32(8)
    return {
        "embed": f32(16, 8),
        "layers": [{"attn": {"q": square, "k": square, "v": square}, "w": square, "b": row} for _ in range(3)],
        "mu": {"w": square, "b": row},
        "v": {"q": square},
        "w": square,
        "b": row,
        "scale": f32(),
        "stack": f32(4, 8, 8),
    }


@functools.cache
def module() -> Any:
    """Equinox modules, some of them stacked, in the form in which optimizers see them."""

    def make() -> Any:
        keys = jax.random.split(jax.random.key(0), 4)
        return {
            "mlp": eqx.nn.MLP(8, 8, 8, 3, key=keys[0]),
            "attention": eqx.nn.MultiheadAttention(2, 8, key=keys[1]),
            "norm": eqx.nn.LayerNorm(8),
            "blocks": eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jax.random.split(keys[2], 4)),
            "cell": eqx.nn.GRUCell(8, 8, key=keys[3]),
        }

    return jax.tree.map(lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else None, eqx.filter_eval_shape(make))


def many_dims(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda x: "wide" if x.ndim > 1 else "narrow", params)


OPTIMIZERS: dict[str, optax.GradientTransformation | optax.GradientTransformationExtraArgs | optax.MultiSteps] = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3),
    "adamw with a mask": optax.adamw(1e-3, mask=many_dims),
    "amsgrad": optax.amsgrad(1e-3),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "rmsprop": optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "ema": optax.ema(0.99),
    "schedule free": optax.contrib.schedule_free_adamw(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "masked": optax.masked(optax.adam(1e-3), many_dims),
    "multi_transform": optax.multi_transform(
        {"wide": optax.adam(1e-3), "narrow": optax.sgd(1e-2, momentum=0.9)}, by_rank
    ),
    "multi_transform of masks": optax.multi_transform(
        {"wide": optax.masked(optax.lion(1e-3), many_dims), "narrow": optax.set_to_zero()}, by_rank
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), every_k_schedule=4),
    "MultiSteps of multi_transform": optax.MultiSteps(
        optax.multi_transform({"wide": optax.adam(1e-3), "narrow": optax.lion(1e-3)}, by_rank), every_k_schedule=2
    ),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(1e-2, mask=many_dims),
        optax.trace(0.9),
        optax.scale_by_schedule(optax.constant_schedule(1e-3)),
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
}
TREES: dict[str, Callable[[], Any]] = {"dicts": dicts, "module": module}


def adam_state(params: Any) -> Any:
    return jax.eval_shape(optax.adam(1e-3).init, params)


def described(leaves: Any) -> list[str]:
    """Specs in one canonical form, so that a failure shows them."""
    return [str(make_spec(entries(spec, 4))) for spec in jax.tree.leaves(leaves)]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_leaf_of_a_state_has_the_spec_of_its_parameter(name: str, tree: str) -> None:
    optimizer, params = OPTIMIZERS[name], TREES[tree]()
    plan = pinned(params)
    state = jax.eval_shape(optimizer.init, params)
    expected = optax.tree_map_params(
        optimizer,
        lambda leaf, spec: leaf if is_masked(leaf) else spec,
        state,
        plan.specs,
        transform_non_params=lambda _: P(),
        is_leaf=is_masked,
    )
    mirrored = plan.mirror(state).check()
    assert described(mirrored.specs) == described(expected)
    assert jax.tree.structure(mirrored.specs) == jax.tree.structure(state)
    assert mirrored.mesh == MESH


def test_a_real_state_has_the_plan_of_its_shapes() -> None:
    optimizer, params = OPTIMIZERS["adamw with a mask"], {"w": np.ones((8, 8)), "b": np.ones(8)}
    plan = pinned(params)
    real, shapes = plan.mirror(optimizer.init(params)), plan.mirror(jax.eval_shape(optimizer.init, params))
    assert real == shapes
    assert real.fingerprint == shapes.fingerprint


@pytest.mark.parametrize("tree", TREES)
def test_gradients_averages_and_train_states_mirror_too(tree: str) -> None:
    params = TREES[tree]()
    plan = pinned(params)
    assert plan.mirror(params).specs == plan.specs
    whole = {"step": 0, "params": params, "average": params, "rng": jax.random.key(0), "opt": (params, (params,))}
    specs = plan.mirror(whole).check().specs
    assert specs["step"] == specs["rng"] == P()
    assert [described(part) for part in (specs["params"], specs["average"], *specs["opt"][:1], *specs["opt"][1])] == [
        described(plan.specs)
    ] * 4


def test_the_plan_of_a_model_serves_the_state_of_its_arrays() -> None:
    # The model has callables and None among its leaves, what the optimizer sees has only arrays.
    model = eqx.filter_eval_shape(eqx.nn.MLP, 8, 8, 8, 2, key=jax.random.key(0))
    plan = sr.DimShardingRule("a", 0).plan(model, MESH)
    state = adam_state(eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct)))
    specs = plan.mirror(state).check().specs
    assert specs[0].mu.layers[1].weight == P("a", None)
    assert specs[0].nu.layers[2].bias == P("a")
    assert specs[0].count == P()


def test_a_single_array_is_mirrored() -> None:
    plan = sr.DimShardingRule("a", 0).plan(f32(8, 4), MESH)
    specs = plan.mirror(adam_state(f32(8, 4))).specs
    assert specs[0].mu == specs[0].nu == P("a", None)
    assert specs[0].count == P()


def test_a_list_of_arrays_is_mirrored() -> None:
    params = [f32(8, 8), f32(8, 8)]
    plan = sr.SpecTreeShardingRule([P("a"), P(None, "b")]).plan(params, MESH)
    specs = plan.mirror(adam_state(params)).specs
    assert specs[0].mu == specs[0].nu == [P("a"), P(None, "b")]


# ---- factored states ----


def averaged_dim(statistic: np.ndarray, squares: np.ndarray) -> int | None:
    """The one dimension of `squares` over which `statistic` is the mean; `None` when it is none."""
    matches = [
        dim
        for dim in range(squares.ndim)
        if squares.mean(dim).shape == statistic.shape and np.allclose(squares.mean(dim), statistic, rtol=1e-4)
    ]
    assert len(matches) <= 1
    return matches[0] if matches else None


SHAPES = (
    (8, 16),
    (16, 8),
    (8, 8),  # square: rows and columns have one shape
    (6, 8, 16),  # stacked
    (6, 16, 8),
    (6, 8, 8),  # stacked and square
    (16, 6, 8),
    (16, 8, 6),
    (8, 8, 16),  # the stack is as deep as the matrix is high
    (8, 16, 8),
    (16, 8, 8),
    (8, 8, 4),
    (8, 4, 8),
    (4, 8, 8),
    (8, 8, 8),
    (2, 4, 8, 8),
    (4, 2, 8, 16),
    (2, 2, 8, 8),
    (4, 4, 8, 16),
    (4, 4, 16, 8),
    (8, 8, 4, 16),
)


ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9)


def updated(params: Any) -> tuple[Any, Any]:
    """Random gradients of `params`, and what adafactor's statistics are after one step with them."""
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=4)  # what adafactor begins with
    step = jax.jit(lambda values: factored.update(values, factored.init(values), values)[1])
    return gradients, jax.device_get(step(gradients))


@functools.cache
def statistics() -> dict[tuple[int, ...], dict[str, int | None]]:
    """For each of `SHAPES`, the dimension that the rows and that the columns lack."""
    gradients, factored = updated({str(shape): f32(*shape) for shape in SHAPES})
    return {
        shape: {
            name: averaged_dim(getattr(factored, name)[str(shape)], np.square(gradients[str(shape)]))
            for name in ("v_row", "v_col")
        }
        for shape in SHAPES
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_factored_leaf_takes_the_entries_of_the_dims_it_kept(shape: tuple[int, ...]) -> None:
    params = {"layer": {"w": f32(*shape)}, "b": f32(8)}
    state = jax.eval_shape(ADAFACTOR.init, params)
    specs = [P(*["a" if dim == place else None for dim in range(len(shape))]) for place in range(len(shape))]
    for spec in (P(*"abcd"[: len(shape)]), *specs):
        plan = sr.SpecTreeShardingRule({"layer": {"w": spec}, "b": P("a")}).plan(params, MESH_4)
        mirrored_state = plan.mirror(state).check().specs[0]
        for name, out in statistics()[shape].items():
            assert out is not None
            kept = make_spec(tuple(entry for dim, entry in enumerate(entries(spec, len(shape))) if dim != out))
            mirrored = getattr(mirrored_state, name)["layer"]["w"]
            assert same(mirrored, kept), (name, spec, out)
            assert len(mirrored.partitions) <= len(shape) - 1
        # What is not factored is kept whole, and placeholders of one element are replicated.
        assert mirrored_state.v["b"] == P("a")
        assert same(mirrored_state.v["layer"]["w"], P())
        assert same(mirrored_state.v_row["b"], P())


@pytest.mark.parametrize("tree", TREES)
def test_adafactor_on_whole_trees(tree: str) -> None:
    params = TREES[tree]()
    plan = pinned(params)
    specs = plan.mirror(jax.eval_shape(ADAFACTOR.init, params)).check().specs
    gradients, factored = updated(params)
    for name in ("v_row", "v_col", "v"):
        parts = (plan.specs, gradients, getattr(factored, name), getattr(specs[0], name))
        for spec, gradient, statistic, mirrored_state in zip(*map(jax.tree.leaves, parts), strict=True):
            if statistic.shape == gradient.shape:
                assert same(mirrored_state, spec)
            elif statistic.shape == (1,):
                assert same(mirrored_state, P())
            else:
                out = averaged_dim(statistic, np.square(gradient))
                kept = [entry for dim, entry in enumerate(entries(spec, gradient.ndim)) if dim != out]
                assert same(mirrored_state, make_spec(tuple(kept)))
    momenta = [part.ema for part in specs if isinstance(part, optax.EmaState)]
    assert list(map(described, momenta)) == [described(plan.specs)]


def test_names_of_parameters_do_not_decide_what_a_factor_is() -> None:
    params = {"row_proj": f32(8, 8), "col_proj": f32(8, 8), "arrow": {"column": f32(8, 8)}}
    plan = sr.SpecTreeShardingRule(jax.tree.map(lambda _: P("a", "b"), params)).plan(params, MESH)
    state = jax.eval_shape(ADAFACTOR.init, params)
    specs = plan.mirror(state).specs[0]
    assert jax.tree.leaves(specs.v_row) == [P("a")] * 3
    assert jax.tree.leaves(specs.v_col) == [P("b")] * 3


def test_labels_of_a_multi_transform_do_not_decide_what_a_factor_is() -> None:
    params = {"w": f32(8, 8)}
    plan = sr.SpecTreeShardingRule({"w": P("a", "b")}).plan(params, MESH)
    optimizer = optax.multi_transform({"rows": ADAFACTOR}, {"w": "rows"})
    state_plan = plan.mirror(jax.eval_shape(optimizer.init, params))
    place = "inner_states/rows/inner_state/0"
    assert state_plan.decision(f"{place}/v_row/w").spec == P("a")
    assert state_plan.decision(f"{place}/v_col/w").spec == P("b")


def test_a_factor_that_could_be_either_is_replicated_with_a_note() -> None:
    plan = sr.SpecTreeShardingRule({"w": P("a", "b")}).plan({"w": f32(8, 8)}, MESH)
    state_plan = plan.mirror({"first": {"w": f32(8)}, "second": {"w": f32(8)}})
    assert state_plan.specs == {"first": {"w": P()}, "second": {"w": P()}}
    assert [(finding.code, finding.path) for finding in state_plan.findings if finding.code == "unmirrored"] == [
        ("unmirrored", "first/w"),
        ("unmirrored", "second/w"),
    ]


def test_a_factor_that_could_be_either_takes_what_both_would() -> None:
    plan = sr.SpecTreeShardingRule({"w": P("a", None, None)}).plan({"w": f32(4, 8, 8)}, MESH)
    assert same(plan.mirror({"any": {"w": f32(4, 8)}}).specs["any"]["w"], P("a"))


# ---- stacks, projections and preconditioners ----


def stacked(spec: P, ndim: int, *, depth: int = 1) -> P:
    return make_spec(((),) * depth + entries(spec, ndim))


STACKING: dict[str, Any] = {
    "lbfgs": optax.scale_by_lbfgs(),
    "lbfgs of 3 steps": optax.scale_by_lbfgs(memory_size=3),
    "chain": optax.chain(optax.clip(1.0), optax.scale_by_lbfgs()),
    "masked": optax.masked(optax.scale_by_lbfgs(), many_dims),
    "multi_transform": optax.multi_transform({"wide": optax.scale_by_lbfgs(), "narrow": optax.adam(1e-3)}, by_rank),
    "MultiSteps": optax.MultiSteps(optax.scale_by_lbfgs(), every_k_schedule=4),
    "apply_if_finite": optax.apply_if_finite(optax.scale_by_lbfgs(), 3),
    "average": optax.chain(optax.scale_by_lbfgs(), optax.ema(0.9)),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", STACKING)
def test_stacked_parameters_follow_them(name: str, tree: str) -> None:
    optimizer, params = STACKING[name], TREES[tree]()
    plan = pinned(params)
    state = jax.eval_shape(optimizer.init, params)

    def expected_spec(leaf: Any, param: Any, spec: P) -> Any:
        return leaf if is_masked(leaf) else stacked(spec, param.ndim, depth=leaf.ndim - param.ndim)

    expected = optax.tree_map_params(
        optimizer,
        expected_spec,
        state,
        params,
        plan.specs,
        transform_non_params=lambda _: P(),
        is_leaf=is_masked,
    )
    mirrored = plan.mirror(state).check()
    assert described(mirrored.specs) == described(expected)
    depths = [leaf.ndim - param.ndim for leaf, param in stacks(optimizer, state, params)]
    assert depths.count(1) >= 2 * sum(leaf.ndim > 1 for leaf in jax.tree.leaves(params))


def stacks(optimizer: Any, state: Any, params: Any) -> list[tuple[Any, Any]]:
    """The leaves of a state that belong to parameters, each with its parameter."""
    pairs: list[tuple[Any, Any]] = []

    def note(leaf: Any, param: Any) -> Any:
        if not is_masked(leaf):
            pairs.append((leaf, param))
        return leaf

    optax.tree_map_params(optimizer, note, state, params, is_leaf=is_masked)
    return pairs


def test_ensembles_and_histories_of_several_dims_follow_too() -> None:
    params = module()
    plan = pinned(params)

    def copies(*sizes: int, behind: bool = False) -> Any:
        return jax.tree.map(lambda x: f32(*x.shape, *sizes) if behind else f32(*sizes, *x.shape), params)

    state = {"ensemble": copies(5), "both": {"history": copies(3, 5)}, "behind": copies(7, behind=True)}
    specs = plan.mirror(state).check().specs
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(plan.specs), strict=True))
    assert described(specs["ensemble"]) == described([stacked(spec, x.ndim) for x, spec in pairs])
    assert described(specs["both"]["history"]) == described([stacked(spec, x.ndim, depth=2) for x, spec in pairs])
    assert described(specs["behind"]) == described(plan.specs)
    assert described(plan.mirror(copies(5)).check().specs) == described(specs["ensemble"])


def test_stacks_of_factored_states_keep_what_the_factors_keep() -> None:
    params = {"layer": {"w": f32(8, 16), "square": f32(8, 8)}}
    plan = sr.SpecTreeShardingRule({"layer": {"w": P("a", "b"), "square": P("a", "b")}}).plan(params, MESH)
    state = jax.eval_shape(ADAFACTOR.init, params)
    ensemble = jax.tree.map(lambda x: f32(5, *x.shape), state)
    specs = plan.mirror(ensemble).check().specs[0]
    assert specs.v_row["layer"] == {"w": P(None, "a"), "square": P(None, "a")}
    assert specs.v_col["layer"] == {"w": P(None, "b"), "square": P(None, "b")}


def test_low_rank_projections_follow_the_sizes_they_kept() -> None:
    params = {"layer": {"up": f32(64, 256), "down": f32(256, 64), "square": f32(64, 64)}}
    plan = sr.SpecTreeShardingRule(jax.tree.map(lambda _: P("a", "b"), params)).plan(params, MESH)
    specs = plan.mirror(jax.eval_shape(optax.contrib.galore(1e-3, rank=8).init, params)).check().specs[0]
    moments = specs.base_optimizer_state.mu["layer"]
    assert moments == {"up": P("a", None), "down": P(None, "b"), "square": P(None, "b")}
    assert [specs.projector["layer"][name] for name in ("up", "down")] == [P("b", None), P("a", None)]


def test_a_container_for_each_parameter_has_its_path_inside() -> None:
    params = {"layers": [{"w": f32(8, 16)}], "square": f32(8, 8)}
    plan = sr.SpecTreeShardingRule({"layers": [{"w": P("a", "b")}], "square": P("a", "b")}).plan(params, MESH)
    kept = {
        "w": {"momentum": f32(8, 16), "rows": f32(8), "statistics": [f32(8, 8), f32(16, 16)], "steps": f32()},
    }
    state = {
        "stats": {"layers": [kept], "square": {"statistics": [f32(4, 8, 8), f32(4, 8, 8)]}},
    }
    specs = plan.mirror(state).check().specs["stats"]
    assert specs["layers"][0]["w"] == {
        "momentum": P("a", "b"),
        "rows": P("a"),
        "statistics": [P("a", None), P("b", None)],
        "steps": P(),
    }
    # Blocks of a preconditioner are stacks of the square parameter itself.
    assert specs["square"]["statistics"] == [P(None, "a", "b")] * 2


def test_a_batch_does_not_follow_parameters_that_share_its_path() -> None:
    for params, batch in (((f32(64, 16), f32(16)), (f32(4, 64), f32(4, 16))), (f32(16), f32(4, 16))):
        plan = sr.SpecTreeShardingRule(jax.tree.map(lambda _: P("a"), params)).plan(params, MESH)
        batch_plan = plan.mirror(batch)
        assert jax.tree.leaves(batch_plan.specs) == [P()] * len(jax.tree.leaves(batch))
        assert {finding.code for finding in batch_plan.findings} >= {"unmirrored"}


LARGE = 4096  # a matrix of this many rows and columns takes 64 MiB


def large_findings(plan: sr.ShardingPlan) -> dict[str, sr.Finding]:
    return {finding.path: finding for finding in plan.findings if finding.code == "large-replicated"}


def test_whatever_large_a_mirror_leaves_whole_is_a_warning() -> None:
    params = {"w": f32(LARGE, LARGE), "whole": f32(LARGE), "split": f32(LARGE, 2)}
    specs = {"w": P("a", "b"), "whole": P(), "split": P(None, "a")}
    plan = sr.SpecTreeShardingRule(specs).plan(params, MESH)
    state = {
        "mu": params,
        "extra": f32(LARGE, LARGE),
        "history": {"whole": f32(LARGE, LARGE)},
        "flat": {"split": f32(LARGE * LARGE)},
        "small": f32(LARGE),
    }
    state_plan = plan.mirror(state)
    findings = large_findings(state_plan)
    assert sorted(findings) == ["extra", "flat/split", "history/whole"]
    for finding in findings.values():
        assert finding.severity == "warning"
        assert "64.0 MiB on every device" in finding.message
        assert "before the mirror" in finding.remedy
        assert finding.shape is not None
    rule = sr.CompositeShardingRule(sr.ReplicateShardingRule(), sr.MirrorShardingRule(plan))
    assert large_findings(rule.plan(state, MESH)) == {}


def test_a_copy_of_a_replicated_parameter_is_no_warning() -> None:
    params = {"w": f32(LARGE, LARGE)}
    plan = sr.ReplicateShardingRule().plan(params, MESH)
    assert large_findings(plan.mirror(adam_state(params))) == {}


LEARNING_RATES = """
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad lamb lars lion nadam nadamw novograd
    optimistic_adam_v2 radam rmsprop rprop signum sm3 yogi lbfgs
"""
CONTRIBUTED = """
    acprop ademamix adopt dadapt_adamw dog dowg galore madgrad momo momo_adam muon prodigy schedule_free_adamw
    schedule_free_sgd simplified_ademamix sophia
"""
EVERY_OPTIMIZER: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(getattr(optax, name), 1e-3) for name in LEARNING_RATES.split()},
    **{name: functools.partial(getattr(optax.contrib, name), 1e-3) for name in CONTRIBUTED.split()},
    "cocob": optax.contrib.cocob,
    "mechanize": lambda: optax.contrib.mechanize(optax.adamw(1e-3)),
    "sam": lambda: optax.contrib.sam(optax.sgd(1e-3), optax.adam(1e-3), opaque_mode=True),
    "apply_every": lambda: optax.chain(optax.apply_every(4), optax.adam(1e-3)),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(1e-3), lambda step, **_: jnp.greater(step, 1)
    ),
    **{f"{name} of lbfgs": functools.partial(lambda value: value, STACKING[name]) for name in ("masked", "MultiSteps")},
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_no_optimizer_keeps_a_large_array_whole(name: str) -> None:
    params = {
        "embed": f32(LARGE, LARGE * 2),
        "layers": [{"q": f32(LARGE, 32, 128), "up": f32(LARGE, LARGE * 2), "square": f32(LARGE, LARGE)}],
        "stack": f32(4, LARGE, LARGE),
    }
    rule = sr.DimShardingRule("a", -1) | sr.DimShardingRule(("b", "c"), 0)
    plan = rule.plan(params, MESH).check()
    state_plan = plan.mirror(jax.eval_shape(EVERY_OPTIMIZER[name]().init, params)).check()
    assert large_findings(state_plan) == {}
    # Projections of a low rank may lose one of the two dims that are split.
    largest = max(state_plan.memory().total_bytes // (2 if name == "galore" else 8), 2**20)
    assert state_plan.memory().device_bytes <= largest * 1.05


# ---- which planned leaf ----


def test_the_longest_path_wins() -> None:
    params = {"w": f32(8, 8), "layer": {"w": f32(8, 8), "layer": {"w": f32(8, 8)}}}
    specs = {"w": P("a"), "layer": {"w": P("b"), "layer": {"w": P("c")}}}
    plan = sr.SpecTreeShardingRule(specs).plan(params, MESH)
    assert plan.mirror({"mu": params, "nu": [params]}).specs == {"mu": specs, "nu": [specs]}


def test_a_name_of_the_optimizer_may_be_a_name_of_the_model() -> None:
    # "0/mu/w" ends in "mu/w", which is a parameter too, of the same shape; but the moments of "mu/w" are elsewhere.
    params = {"w": f32(8, 8), "mu": {"w": f32(8, 8)}, "nu": {"w": f32(8, 8)}}
    specs = {"w": P("a"), "mu": {"w": P("b")}, "nu": {"w": P("c")}}
    plan = sr.SpecTreeShardingRule(specs).plan(params, MESH)
    state_plan = plan.mirror(adam_state(params)).specs[0]
    assert state_plan.mu == state_plan.nu == specs


def test_a_namesake_of_another_shape_is_passed_over() -> None:
    params = {"w": f32(8, 4), "head": {"w": f32(16, 8)}}
    plan = sr.SpecTreeShardingRule({"w": P("a"), "head": {"w": P("b")}}).plan(params, MESH)
    # The longest ending has another shape, a shorter one fits.
    assert plan.mirror({"x": {"head": {"w": f32(8, 4)}}}).specs == {"x": {"head": {"w": P("a")}}}


def test_what_mirrors_nothing_is_replicated_with_a_note_that_tells_why() -> None:
    plan = sr.SpecTreeShardingRule({"w": P("a")}).plan({"w": f32(8, 4)}, MESH)
    state_plan = plan.mirror({"mu": {"w": f32(3, 5)}, "extra": f32(7), "one": f32(1), "count": 0})
    assert state_plan.specs == {"mu": {"w": P()}, "extra": P(), "one": P(), "count": P()}
    notes = {finding.path: finding for finding in state_plan.findings if finding.code == "unmirrored"}
    assert list(notes) == ["extra", "mu/w"]
    assert {finding.severity for finding in notes.values()} == {"note"}
    assert notes["mu/w"].message == "the planned leaf of that name has shape (8, 4), so it is replicated"
    assert notes["extra"].message == "mirrors no planned leaf, so it is replicated"
    assert "put another rule before the mirror" in notes["extra"].remedy


LINEN = {
    "batch_stats": {"BatchNorm_0": {"mean": f32(8)}},
    "params": {"BatchNorm_0": {"scale": f32(8)}, "Dense": [{"kernel": f32(8, 4)}, {"kernel": f32(8, 4)}]},
}


@pytest.mark.parametrize("make", [optax.adam, optax.adafactor])
def test_a_state_of_one_collection_mirrors_it_without_its_name(make: Any) -> None:
    rule = sr.DimShardingRule("a", 0)
    state = jax.eval_shape(make(1e-3).init, LINEN["params"])
    mirrored = rule.plan(LINEN, MESH).mirror(state)
    assert mirrored.specs == rule.plan(LINEN["params"], MESH).mirror(state).specs
    if make is optax.adam:
        decision = mirrored.decision("0/mu/Dense/1/kernel")
        assert (decision.spec, decision.reason) == (
            P("a", None),
            "mirrors a planned leaf of equal shape, below 'params'",
        )


def test_a_train_state_has_collections_with_and_without_their_names() -> None:
    plan = sr.DimShardingRule("a", 0).plan(LINEN, MESH)
    specs = plan.mirror({**LINEN, "opt_state": adam_state(LINEN["params"])}).specs
    assert {name: specs[name] for name in LINEN} == plan.specs
    assert specs["opt_state"][0].mu == plan.specs["params"]


def test_part_of_a_collection_without_its_name_proves_nothing() -> None:
    plan = sr.DimShardingRule("a", 0).plan(LINEN, MESH)
    state = {"x": {"BatchNorm_0": {"scale": f32(8)}}}
    assert plan.mirror(state).specs == {"x": {"BatchNorm_0": {"scale": P()}}}


def test_a_path_of_two_collections_mirrors_neither() -> None:
    params = {"kernel": f32(8, 4)}
    plan = sr.DimShardingRule("a", 0).plan({"params": params, "lora": params}, MESH)
    decision = plan.mirror(adam_state(params)).decision("0/mu/kernel")
    assert (decision.spec, decision.reason) == (P(), "has its path below 'lora' and 'params' of the plan")


def test_part_of_a_name_is_no_ending() -> None:
    plan = sr.SpecTreeShardingRule({"w": P("a")}).plan({"w": f32(8)}, MESH)
    assert plan.mirror({"mu": {"raw": f32(8)}}).specs == {"mu": {"raw": P()}}


def test_every_note_stands_for_its_leaf_and_equal_layers_share_one() -> None:
    plan = sr.SpecTreeShardingRule({"w": P("a")}).plan({"w": f32(8)}, MESH)
    state_plan = plan.mirror({"extra": [f32(7) for _ in range(5)]})
    assert [(finding.path, finding.count) for finding in state_plan.findings if finding.code == "unmirrored"] == [
        ("extra/*", 5)
    ]


def test_a_leaf_without_an_opinion_is_mirrored_as_replicated() -> None:
    plan = sr.RegexShardingRule([("w", P("a"))]).plan({"w": f32(8), "b": f32(8)}, MESH)
    state = plan.mirror(adam_state({"w": f32(8), "b": f32(8)}))
    assert state.specs[0].mu == {"w": P("a"), "b": P()}


def test_a_rule_of_ones_own_may_come_before_the_mirror() -> None:
    plan = sr.SpecTreeShardingRule({"w": P("a")}).plan({"w": f32(8)}, MESH)
    rule = sr.CompositeShardingRule(sr.RegexShardingRule([("nu/", P("b"))]), sr.MirrorShardingRule(plan))
    assert rule.plan(adam_state({"w": f32(8)}), MESH).specs[0].nu == {"w": P("b")}
    assert rule.plan(adam_state({"w": f32(8)}), MESH).specs[0].mu == {"w": P("a")}


def test_the_rule_is_a_value_that_prints_as_code() -> None:
    plan = sr.SpecTreeShardingRule({"w": P("a")}).plan({"w": f32(8)}, MESH)
    rule = sr.MirrorShardingRule(plan)
    assert rule == sr.MirrorShardingRule((("w", (8,), P(("a",))),))
    assert hash(rule) == hash(sr.MirrorShardingRule(plan))
    assert eval(repr(rule), {"MirrorShardingRule": sr.MirrorShardingRule, "P": P}) == rule


# ---- in a chain, in other path styles, and arguments that are not plans ----


def test_in_a_chain_the_mirror_refines_and_may_conflict() -> None:
    plan = sr.RegexShardingRule([("w", P("a"))]).plan({"w": f32(8, 8)}, MESH)
    both = sr.DimShardingRule("b", 1) | sr.MirrorShardingRule(plan)
    assert both.plan({"mu": {"w": f32(8, 8)}}, MESH).specs == {"mu": {"w": P("a", "b")}}
    clash = sr.DimShardingRule("b", 0) | sr.MirrorShardingRule(plan)
    with pytest.raises(
        sr.errors.PlanError, match=r"mu/w \(8, 8\): P\('a'\) and P\('b', None\), decided before, disagree"
    ):
        clash.plan({"mu": {"w": f32(8, 8)}}, MESH)


def test_in_a_chain_what_mirrors_nothing_keeps_what_was_decided() -> None:
    plan = sr.SpecTreeShardingRule({"w": P("a")}).plan({"w": f32(8, 8)}, MESH)
    state = {"mu": {"w": f32(8, 8)}, "history": f32(10, 8, 8), "step": f32()}
    rule = sr.RegexShardingRule([("history", P(None, "b", "c"))]) | sr.MirrorShardingRule(plan)
    state_plan = rule.plan(state, MESH)
    assert state_plan.specs == {"mu": {"w": P("a")}, "history": P(None, "b", "c"), "step": P()}
    assert "unmirrored" not in [finding.code for finding in state_plan.findings]
    assert plan.mirror(state).specs["history"] == P()
    assert [finding.path for finding in plan.mirror(state).findings if finding.code == "unmirrored"] == ["history"]


@pytest.mark.parametrize("read_again", [False, True])
def test_a_plan_with_fields_by_position_mirrors_as_one_with_names(read_again: bool) -> None:
    params = adam_state({"w": f32(8, 8)})  # what has named tuples in it
    rule = sr.DimShardingRule("a", 0, ignore_ndim_error=True)
    named, plan = rule.plan(params, MESH), rule.plan(params, MESH, path_style="index")
    if read_again:
        plan = sr.ShardingPlan.from_json(plan.to_json(), params)
    state = {"ema": params, "other": f32(3)}
    assert plan.mirror(state).specs == named.mirror(state).specs
    assert plan.mirror(state).specs["ema"][0].mu == {"w": P("a", None)}
    assert plan.mirror(state).paths == ("ema/0/0", "ema/0/1/w", "ema/0/2/w", "other")
    assert plan.planned() == named.planned()


def test_a_factor_is_known_by_the_name_of_its_field_in_plans_of_either_style() -> None:
    params = {"w": f32(8, 8)}
    plan = sr.SpecTreeShardingRule({"w": P("a", "b")}).plan(params, MESH, path_style="index")
    specs = plan.mirror(jax.eval_shape(ADAFACTOR.init, params)).specs[0]
    assert (specs.v_row, specs.v_col) == ({"w": P("a")}, {"w": P("b")})


@pytest.mark.parametrize("plan", [{"w": P()}, None, "w", (("w", P()),)], ids=str)
def test_what_is_no_plan_is_not_mirrored(plan: Any) -> None:
    with pytest.raises(sr.errors.ConfigTypeError, match=r"takes a plan, or its \(path, shape, spec\) triples; got"):
        sr.MirrorShardingRule(plan)
