"""Objects of flax nnx through the placement functions: they stay one object where they were, and nothing is lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.boxes import refuse_cycles
from tests import zoo

RULES = sr.RegexShardingRule(
    [(r"up/kernel$", P(None, "model")), (r"down/kernel$", P("model")), (r"embed|head", P("model"))]
)


@pytest.fixture
def mesh() -> Mesh:
    return sr.create_mesh("data:4,model:2")


def spec(variable: Any) -> Any:
    return variable[...].sharding.spec


def draws(model: Any) -> int:
    """Returns the number of keys that the first dropout layer has drawn."""
    return int(model.blocks[0].dropout.rngs.count[...])


class Tied(nnx.Module):
    """A model whose head is the table of its embedding, and whose parts have one stream of keys."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.head = self.embed.embedding
        self.rngs = rngs


# ---- placing ----


def test_a_module_is_placed_as_its_state_is(mesh: Mesh) -> None:
    model = zoo.nnx_model(2)
    placed = sr.filter_shard(model, RULES, mesh)
    assert type(placed) is zoo.NnxModel
    assert (spec(placed.blocks[0].up.kernel), spec(placed.norm.scale)) == (P(None, "model"), P())
    assert isinstance(model.blocks[0].up.kernel[...].sharding, jax.sharding.SingleDeviceSharding)
    state = sr.filter_shard(nnx.state(model), RULES, mesh)
    nnx.update(model, state)
    assert spec(model.blocks[0].up.kernel) == P(None, "model")
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    merged = nnx.merge(graph, sr.filter_shard(params, P(), mesh), rest)
    assert spec(merged.blocks[0].up.kernel) == P()


def test_specs_of_flax_place_a_state(mesh: Mesh) -> None:
    init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "model"), eager_sharding=False)
    state = nnx.state(nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0)))
    for how in (nnx.get_partition_spec(state), nnx.get_named_sharding(state, mesh)):
        assert spec(sr.filter_shard(state, how, mesh).kernel) == P(None, "model")


def test_a_variable_that_occurs_twice_stays_one(mesh: Mesh) -> None:
    model = Tied(nnx.Rngs(0))
    placed = sr.filter_shard(model, RULES, mesh)
    moved = sr.reshard(placed, jax.tree.map(lambda leaf: NamedSharding(mesh, P("data") if leaf.ndim else P()), placed))
    initialized = sr.filter_init(Tied, RULES, mesh)(nnx.Rngs(0))
    for other in (placed, moved, initialized, sr.filter_gather(placed)):
        assert other.head is other.embed.embedding
        np.testing.assert_allclose(other.head[...], model.head[...], rtol=1e-6)
    assert (spec(placed.head), spec(moved.head), spec(initialized.head)) == (P("model"), P("data"), P("model"))


def test_a_variable_cannot_be_placed_in_two_ways(mesh: Mesh) -> None:
    rules = sr.RegexShardingRule([("head", P("model"))])
    message = (
        r"shared-variable: head \(16, 8\): this variable is also at embed/embedding.*\n.*place nnx\.state\(model\)"
    )
    with pytest.raises(sr.errors.PlanError, match=message):
        sr.filter_shard(Tied(nnx.Rngs(0)), rules, mesh)
    with pytest.raises(sr.errors.PlanError, match="shared-variable: head"):
        sr.filter_init(Tied, rules, mesh)(nnx.Rngs(0))
    state = sr.filter_shard(nnx.state(Tied(nnx.Rngs(0))), RULES, mesh)
    assert "head" not in state


# ---- making ----


def test_a_constructor_makes_the_model_in_its_shards(mesh: Mesh) -> None:
    model = sr.filter_init(zoo.NnxModel, RULES, mesh)(rngs=nnx.Rngs(0))
    expected = zoo.nnx_model()
    assert (spec(model.blocks[2].up.kernel), spec(model.norm.mean)) == (P(None, "model"), P())
    params, expected_params = nnx.state(model, nnx.Param), nnx.state(expected, nnx.Param)
    assert jax.tree.structure(params) == jax.tree.structure(expected_params)
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6)


def test_streams_of_keys_go_on_after_a_model_was_made(mesh: Mesh) -> None:
    rngs, expected = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)

    def make(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(8, 16, rngs=rngs)

    init = sr.filter_init(make, P(), mesh)
    models, expected_models = [init(rngs), init(rngs)], [make(expected), make(expected)]
    assert rngs.default.count[...] == expected.default.count[...] > 0
    assert not rngs.default.count[...].committed
    for model, other in zip(models, expected_models, strict=True):
        np.testing.assert_allclose(model.kernel[...], other.kernel[...], rtol=1e-6)
    placed = sr.filter_shard(nnx.Rngs(0), P(), mesh)
    init(placed)
    assert placed.default.count[...].sharding == NamedSharding(mesh, P())


def test_an_optimizer_is_made_as_its_model_is_split(mesh: Mesh) -> None:
    model = sr.filter_shard(zoo.nnx_model(2), RULES, mesh)
    plan = RULES.plan(nnx.state(model, nnx.Param), mesh)
    make = sr.filter_init(lambda model: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), plan.mirror, mesh)
    optimizer = make(model)
    assert type(optimizer) is nnx.Optimizer
    assert spec(optimizer.opt_state[0].mu.blocks[1].down.kernel) == P("model")
    assert plan.mirror(optimizer).decision("opt_state/0/nu/blocks/0/up/kernel").spec == P(None, "model")
    assert plan.mirror(nnx.state(optimizer)).check().paths == plan.mirror(optimizer).paths
    assert "unmirrored" not in [finding.code for finding in plan.mirror(optimizer).findings]


def test_attributes_that_are_added_while_a_model_is_made_are_an_error(mesh: Mesh) -> None:
    def make(rngs: Any) -> nnx.Linear:
        rngs.extra = nnx.Param(jnp.ones(3))
        return nnx.Linear(8, 8, rngs=rngs)

    with pytest.raises(
        sr.errors.TreeError, match=r"filter_init: the function adds, .* return the object, or use nnx\.jit"
    ):
        sr.filter_init(make, P(), mesh)(nnx.Rngs(0))


def test_names_that_flax_takes_for_axes_say_what_to_set(mesh: Mesh) -> None:
    def make() -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", "mlp"))
        return nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0))

    rule = sr.LogicalShardingRule({"embed": None, "mlp": "model"})
    with pytest.raises(ValueError, match="embed") as caught:
        sr.filter_init(make, rule, mesh)()
    assert "nnx.use_eager_sharding(False) leaves it to the rules" in "".join(caught.value.__notes__)
    with nnx.use_eager_sharding(False):
        assert spec(sr.filter_init(make, rule, mesh)().kernel) == P(None, "model")


# ---- training ----


def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
    """A loss of the model, with an activation whose split is constrained."""
    assert callable(model)
    return jnp.mean(sr.with_sharding_constraint(model(x), P("data")) ** 2)


def train_step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """A step as nnx programs write it: it returns the loss, and changes model and optimizer."""
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


def training(mesh: Mesh | None) -> tuple[Any, nnx.Optimizer]:
    """A model and its optimizer, placed if there is a mesh."""
    model = zoo.nnx_model(1)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    if mesh is not None:
        plan = RULES.plan(nnx.state(model, nnx.Param), mesh)
        nnx.update(model, sr.filter_shard(nnx.state(model), RULES, mesh))
        nnx.update(optimizer, sr.filter_shard(nnx.state(optimizer), plan.mirror, mesh))
    return model, optimizer


X: Any = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def test_nnx_jit_trains_what_was_placed(mesh: Mesh) -> None:
    model, optimizer = training(mesh)
    step = nnx.jit(train_step)
    with jax.set_mesh(mesh):
        losses = [float(step(model, optimizer, sr.filter_shard(X, P("data"), mesh))) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert spec(model.blocks[0].up.kernel) == P(None, "model")
    assert spec(optimizer.opt_state[0].trace.blocks[0].up.kernel) == P(None, "model")


@pytest.mark.slow
def test_shardings_of_plans_are_shardings_of_nnx_jit(mesh: Mesh) -> None:
    model, optimizer = training(None)
    plan = RULES.plan(nnx.state(model), mesh)
    shardings = [nnx.StateSharding(each.shardings()) for each in (plan, plan.mirror(nnx.state(optimizer)))]
    step = nnx.jit(train_step, in_shardings=(*shardings, NamedSharding(mesh, P("data"))))
    with jax.set_mesh(mesh):
        step(model, optimizer, X)
    assert spec(model.blocks[0].up.kernel) == P(None, "model")


# ---- filter_jit ----


@pytest.mark.sample(1)
@pytest.mark.parametrize("donate", ["none", "all", (0, 1)], ids=str)
def test_filter_jit_writes_to_modules_as_nnx_jit_does(mesh: Mesh, donate: Any) -> None:
    model, optimizer = training(None)
    plan = RULES.plan(model, mesh)
    step = sr.filter_jit(train_step, mesh=mesh, in_shardings=(plan, plan.mirror, P("data")), donate=donate)
    losses = [float(step(model, optimizer, X)) for _ in range(3)]
    expected_model, expected_optimizer = training(None)
    expected_step = nnx.jit(train_step)
    with jax.set_mesh(mesh):
        expected = [float(expected_step(expected_model, expected_optimizer, jnp.asarray(X))) for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert (int(optimizer.step[...]), draws(model)) == (3, 3)
    assert spec(model.blocks[0].up.kernel) == spec(optimizer.opt_state[0].trace.blocks[0].up.kernel) == P(None, "model")
    assert spec(model.blocks[0].up.bias) == P()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((model, optimizer)))


def test_filter_jit_without_shardings_writes_to_modules() -> None:
    model = zoo.nnx_model(1)
    for count in (1, 2):
        sr.filter_jit(lambda model, x: model(x))(model, X)
        assert draws(model) == count
    before = np.asarray(model.norm.mean[...])
    sr.filter_jit(model)(X + 1)  # a module that is called is an argument, too
    assert not np.array_equal(before, model.norm.mean[...])


def test_a_variable_that_occurs_twice_is_one_inside_of_filter_jit(mesh: Mesh) -> None:
    def clear(model: Tied) -> tuple[jax.Array, Tied]:
        model.head[...] = 0 * model.head[...]
        return jnp.sum(jnp.abs(model.embed.embedding[...])), model

    model = Tied(nnx.Rngs(0))
    for call in (sr.filter_jit(clear), sr.filter_jit(clear, mesh=mesh, in_shardings=RULES)):
        total, result = call(model)
        assert float(total) == 0
        for each in (model, result):
            assert each.head is each.embed.embedding
            assert not np.asarray(each.head[...]).any()
    untied = Tied(nnx.Rngs(0))
    untied.head = nnx.Param(jnp.ones((16, 8)))
    assert float(sr.filter_jit(clear)(untied)[0]) > 0  # the same structure, and not the same call


def test_a_compiled_function_writes_to_the_modules_it_is_called_with(mesh: Mesh) -> None:
    model, other = zoo.nnx_model(1), zoo.nnx_model(1)
    compiled = (
        sr.filter_jit(lambda model, x: model(x), mesh=mesh, in_shardings=(RULES, P("data"))).lower(model, X).compile()
    )
    compiled(other, X)
    counts = [draws(each) for each in (model, other)]
    assert counts == [0, 1]


def test_wrappers_of_a_function_of_modules_trace_it_once(mesh: Mesh) -> None:
    traces: list[int] = []

    def apply(model: Any, x: jax.Array) -> jax.Array:
        traces.append(1)
        return model(x)

    model = sr.filter_shard(zoo.nnx_model(1), RULES, mesh)
    for _ in range(3):
        sr.filter_jit(apply, mesh=mesh, in_shardings=(RULES, P("data")))(model, X)
    assert len(traces) == 1


def test_a_state_is_a_value_to_filter_jit() -> None:
    def double(state: Any) -> Any:
        state["kernel"][...] = 2 * state["kernel"][...]
        return state

    state = nnx.state(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    before = np.asarray(state["kernel"][...])
    np.testing.assert_array_equal(sr.filter_jit(double)(state)["kernel"][...], 2 * before)
    np.testing.assert_array_equal(state["kernel"][...], before)


class Opaque(nnx.Module, pytree=False):
    """A module that JAX does not look into."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(8))


def test_filter_jit_refuses_what_would_be_lost(mesh: Mesh) -> None:
    def add(model: Any) -> None:
        model.extra = nnx.Param(jnp.ones(3))

    for jit_mesh in (None, mesh):
        with pytest.raises(sr.errors.TreeError, match=r"filter_jit: the function adds, .* or use nnx\.jit"):
            sr.filter_jit(add, mesh=jit_mesh)(zoo.nnx_model(1))
        with pytest.raises(sr.errors.TreeError, match=r"JAX sees no arrays in .*\(Opaque\)"):
            sr.filter_jit(lambda model: model.scale.sum(), mesh=jit_mesh)(Opaque())


# ---- arrays outside of variables, ties, cycles ----


class Plain(nnx.Module):
    """A module with arrays that are in no variable."""

    def __init__(self) -> None:
        self.x = jnp.zeros(3)
        self.parts = nnx.List([jnp.zeros(2)])
        self.pair = nnx.data({"a": jnp.zeros(2), "scale": nnx.Param(jnp.ones(2))})


@pytest.mark.parametrize("donate", ["none", "all"])
def test_writes_to_arrays_outside_of_variables_are_kept(donate: Any) -> None:
    def step(model: Any) -> None:
        model.x = model.x + 1
        model.parts[0] = model.parts[0] + 2
        model.pair["scale"][...] = 3 * model.pair["scale"][...]

    model = Plain()
    jitted = sr.filter_jit(step, donate=donate)
    for _ in range(2):
        jitted(model)
    values = [float(leaf[0]) for leaf in (model.x, model.parts[0], model.pair["a"], model.pair["scale"])]
    assert values == [2, 4, 0, 9]


def test_writes_to_an_array_of_an_object_that_occurs_twice_are_refused() -> None:
    part = Plain()

    def step(parts: Any) -> None:
        parts[0].x = parts[0].x + 1

    with pytest.raises(
        sr.errors.TreeError, match=r"writes to the array 'x' .*\(Plain\) that is in its arguments twice"
    ):
        sr.filter_jit(step)([part, part])


def test_ties_that_a_step_changes_are_an_error() -> None:
    def tie(model: Tied) -> None:
        model.head = model.embed.embedding

    def untie(model: Tied) -> None:
        model.head = nnx.Param(0 * model.head[...])

    untied = Tied(nnx.Rngs(0))
    untied.head = nnx.Param(jnp.ones((16, 8)))
    for step, model in ((tie, untied), (untie, Tied(nnx.Rngs(0)))):
        with pytest.raises(sr.errors.TreeError, match="or ties between their variables"):
            sr.filter_jit(step)(model)


class Scaled(nnx.Module):
    """A module with a method that is no `__call__`."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(8))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def apply(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.scale[...] * x


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
def test_a_compiled_method_reads_and_writes_its_module(mesh: Mesh, is_sharded: bool) -> None:
    model = Scaled()
    apply = sr.filter_jit(model.apply, **({"mesh": mesh, "in_shardings": P("data")} if is_sharded else {}))
    apply(jnp.ones(8))
    model.scale[...] = 3 * model.scale[...]
    np.testing.assert_array_equal(apply(jnp.ones(8)), np.full(8, 3))
    assert int(model.calls[...]) == 2


class Parent(nnx.Module):
    """A module whose child holds it."""

    def __init__(self) -> None:
        self.child = nnx.List([Plain()])
        child: Any = self.child[0]
        child.parent = nnx.data(self)


def test_long_rings_of_modules_are_refused() -> None:
    parents = [Parent() for _ in range(3000)]
    for index, parent in enumerate(parents):
        child: Any = parent.child[0]
        child.parent = nnx.data(parents[index - 1])
    with pytest.raises(sr.errors.TreeError, match="holds itself, through"):
        refuse_cycles(parents[0])


def test_modules_that_hold_themselves_are_refused(mesh: Mesh) -> None:
    model = Parent()
    calls: list[Any] = [
        lambda: RULES.plan(model, mesh),
        lambda: sr.filter_shard(model, P(), mesh),
        lambda: sr.filter_gather(model),
        lambda: sr.filter_init(lambda model: model.child[0].x, P(), mesh)(model),
        lambda: sr.filter_jit(lambda model: model.child[0].x)(model),
        lambda: sr.filter_jit(lambda model: model.child[0].x, mesh=mesh, in_shardings=P())(model),
    ]
    for call in calls:
        with pytest.raises(sr.errors.TreeError, match=r"holds itself, through .*nnx\.split\(model\)"):
            call()
