"""`sr.audit` from end to end: its arguments, and its figures against the real compilers'."""

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import TreeError
from shardrules.programs.audits.report import AuditReport
from shardrules.programs.machine.targets import Target
from tests.programs.audits.audited import AXES, Program, audit, closed, codes, con, f32
from tests.programs.examples import (
    CLOSED_FORMS,
    CPU,
    CUDA,
    TARGETS,
    TPU,
    ClosedForm,
    arrays_moved,
    expected,
    mesh_on,
    ring_bytes,
)

targets = pytest.mark.parametrize("target", TARGETS)
OWN = sr.create_mesh(AXES)
SHAPE = sr.mesh_shape(AXES)
W, X = f32(64, 128), f32(32, 64)
IN = (P(None, "model"), P("data"))
PRODUCT = 2 * 32 * 64 * 128


def product(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


PLAIN = Program(product, (W, X), IN)


def specs(report: AuditReport) -> dict[str, str]:
    return {array.path: array.compiled for array in report.arrays}


def requested(report: AuditReport) -> dict[str, str]:
    return {array.path: array.requested for array in report.arrays}


def roles(report: AuditReport) -> dict[str, str]:
    return {array.path: array.role for array in report.arrays}


# ---- closed forms ----


HALVED = ("fully sharded", "sequence parallel", "scanned")
"""Programs that gather float32 in order to multiply it: TPUs multiply bfloat16, and cast before they gather."""


@targets
@pytest.mark.parametrize("case", CLOSED_FORMS, ids=lambda case: case.name)
def test_closed_forms(case: ClosedForm, target: str) -> None:
    """Wire bytes and FLOPs are as in the formulas, to the byte; on TPUs what is gathered for a matmul has half."""
    report = closed(case.name, target)
    moved = case.on_cpu if target == CPU else case.moved
    if target == TPU and case.name in HALVED:
        moved = tuple(
            attrs.evolve(move, payload_bytes=move.payload_bytes // (1 + (move.kind == "all-gather"))) for move in moved
        )
    assert arrays_moved(report.collectives) == expected(moved)
    assert report.wire_bytes == ring_bytes(moved, case.axes)
    assert (report.flops, report.model_flops) == (case.flops, case.flops * 8)


# ---- memory ----


class Dense(NamedTuple):
    """A model with weights in two types, and its optimizer's state."""

    w: Any
    b: Any


def adam_step(params: Any, state: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p.w) + p.b - y) ** 2))(params)
    updates, state = optax.adam(1e-3).update(grads, state)
    return optax.apply_updates(params, updates), state, loss


PARAMS = Dense(f32(64, 160), f32(160))
STATE = jax.eval_shape(optax.adam(1e-3).init, PARAMS)
DATA = f32(24, 64), f32(24, 160)
SPLIT = Dense(P("data", "model"), P("model"))
MOMENTS = jax.tree.map(
    lambda x: P() if x.shape == () else P("data", "model") if len(x.shape) == 2 else P("model"), STATE
)
STEP = Program(
    adam_step, (PARAMS, STATE, *DATA), (SPLIT, MOMENTS, P("data"), P("data")), out=(SPLIT, MOMENTS, None), donate=(0, 1)
)


def compiled_by_jax(program: Program, target: str) -> Any:
    """The compiler's memory figures for the same function, compiled by JAX alone."""
    mesh = mesh_on(target, AXES)

    def on_mesh(tree: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec or P()),
            tree,
            is_leaf=lambda node: node is None or isinstance(node, P),
        )

    structs = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        program.args,
        on_mesh(program.specs),
    )
    with jax.set_mesh(mesh):
        jitted = jax.jit(program.fn, out_shardings=on_mesh(program.out), donate_argnums=program.donate)
        return jitted.lower(*structs).compile().memory_analysis()


@targets
@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_memory_is_what_the_compiler_says(donate: tuple[int, ...], target: str) -> None:
    """Shards: w over 4 x 2 devices, b over 2, two moments of each and a count; rows of the batch over 4."""
    program = attrs.evolve(STEP, donate=donate)
    report, usage = program.audit(target), compiled_by_jax(program, target)
    memory, shard = report.memory, 4 * (64 * 160 // 8 + 160 // 2)
    assert memory.parameters_bytes == shard
    assert memory.state_bytes == 2 * shard + 4
    assert memory.batch_bytes == 4 * 24 * (64 + 160) // 4
    assert memory.padding_bytes > 0 if target == TPU else memory.padding_bytes == 0
    arguments = memory.parameters_bytes + memory.state_bytes + memory.batch_bytes + memory.padding_bytes
    assert arguments == usage.argument_size_in_bytes
    assert memory.outputs_bytes == usage.output_size_in_bytes - usage.alias_size_in_bytes
    assert memory.temporaries_bytes == usage.temp_size_in_bytes
    assert report.peak_bytes == sum(memory.shares().values())


@targets
def test_arrays_have_their_size_and_donated_ones_are_reused(target: str) -> None:
    report, kept = STEP.audit(target), attrs.evolve(STEP, donate=()).audit(target)
    donated = {array.path: array.donated for array in report.arrays if array.role != "result"}
    assert donated == {path: not path.startswith(("x", "y")) for path in donated}
    assert len(donated) == 2 + 5 + 2
    assert not any(array.donated for array in kept.arrays)
    assert report.peak_bytes < kept.peak_bytes
    sizes = {array.path: array.device_bytes for array in report.arrays}
    assert sizes["params/w"] == sizes["result/0/w"] == 64 * 160 * 4 // 8
    assert (sizes["params/b"], sizes["x"], sizes["result/2"]) == (160 * 4 // 2, 24 * 64 * 4 // 4, 4)
    assert requested(report)["params/w"] == specs(report)["params/w"] == "P('data', 'model')"
    assert requested(report)["result/2"] == ""


@pytest.mark.parametrize("target", [CUDA, TPU])
def test_memory_of_the_host_is_not_the_devices(target: str) -> None:
    offloaded = NamedSharding(SHAPE, P(None, "model"), memory_kind="pinned_host")

    def fn(w: Any, x: Any) -> Any:
        return product(jax.device_put(w, jax.memory.Space.Device), x)

    report = Program(fn, (W, X), (offloaded, P("data"))).audit(target)
    assert all(size >= 0 for size in report.memory.shares().values())


# ---- ways to say it ----

TREE = {"w": W, "x": X}
RULE = sr.RegexShardingRule([("w", P(None, "model")), ("x", P("data"))])


def of_tree(tree: Any) -> Any:
    return product(tree["w"], tree["x"])


@pytest.mark.parametrize("option", ["plan", "in_shardings"])
def test_shardings_of_the_only_argument(option: str) -> None:
    how: dict[str, Any] = {"plan": RULE.plan(TREE, SHAPE)} if option == "plan" else {"in_shardings": (RULE,)}
    report = audit(of_tree, TREE, target=CPU, **how)
    assert requested(report)["tree/w"] == specs(report)["tree/w"] == "P(None, 'model')"
    assert requested(report)["tree/x"] == specs(report)["tree/x"] == "P('data')"
    assert report.flops == PLAIN.audit(CPU).flops == PRODUCT // 8
    assert report.peak_bytes == PLAIN.audit(CPU).peak_bytes


MODEL = eqx.filter_eval_shape(lambda: eqx.nn.MLP(64, 32, 160, 2, key=jax.random.key(0)))
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "adam": optax.adam(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
}
WEIGHTS = sr.RegexShardingRule([("weight", P("model", "data")), ("bias", P("model"))])


def equinox_step(name: str) -> tuple[Callable[..., Any], Any]:
    optim = OPTIMIZERS[name]
    state = eqx.filter_eval_shape(lambda m: optim.init(eqx.filter(m, eqx.is_inexact_array)), MODEL)

    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(model: Any) -> Any:
            return jnp.mean((con(jax.vmap(model)(x), "data") - y) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    return step, state


def trained_equinox(name: str, target: str, **options: Any) -> AuditReport:
    step, state = equinox_step(name)
    return audit(step, MODEL, state, f32(24, 64), f32(24, 32), target=target, donate_argnums=(0, 1), **options)


@pytest.mark.parametrize(("name", "target"), [("adam", CPU), ("adafactor", TPU)])
def test_a_plan_of_the_model_is_mirrored_by_the_state(name: str, target: str) -> None:
    plan = WEIGHTS.plan(MODEL, SHAPE)
    report = trained_equinox(
        name,
        target,
        plan=plan,
        in_shardings=(None, None, P("data"), P("data")),
        out_shardings=(plan, plan.mirror, None),
    )
    arrays = {array.path: array for array in report.arrays}
    for path, array in arrays.items():
        if array.role != "optimizer state" or array.shape in ((), (1,)):
            continue
        _, _, tail = path.partition("/layers/")
        parameter = arrays[f"model/layers/{tail}"]
        if array.shape == parameter.shape:
            assert (array.requested, array.compiled) == (parameter.requested, parameter.compiled)
            assert array.donated
    assert (
        arrays["model/layers/0/weight"].compiled == arrays["result/0/layers/0/weight"].compiled == "P('model', 'data')"
    )
    assert {array.role for path, array in arrays.items() if path.startswith("state")} == {"optimizer state"}
    sizes = [(160, 64), (160, 160), (32, 160)]
    assert report.memory.parameters_bytes == sum(4 * (rows * columns // 8 + rows // 2) for rows, columns in sizes)
    assert "does-not-fit" not in codes(report)
    assert "donated-in-vain" not in codes(report)


def test_a_rule_for_all_arguments() -> None:
    everything = sr.RegexShardingRule([(r"weight", P("model", "data")), (r"^[23]$", P("data")), (".*", P())])
    report = trained_equinox("adam", CPU, plan=everything)
    compiled = specs(report)
    assert compiled["model/layers/0/weight"] == compiled["state/0/mu/layers/0/weight"] == "P('model', 'data')"
    assert compiled["x"] == compiled["y"] == "P('data')"
    assert compiled["model/layers/0/bias"] == "P()"


def test_out_shardings_that_ask_for_another_place() -> None:
    options: dict[str, Any] = {"in_shardings": IN, "target": CPU}
    report = audit(
        lambda w, x: (product(w, x), {"x": x, "n": 3}), W, X, out_shardings=(P("data", "model"), P()), **options
    )
    assert requested(report)["result/0"] == specs(report)["result/0"] == "P('data', 'model')"
    assert specs(report)["result/1/x"] == "P()"
    (gather,) = report.collectives
    assert (gather.kind, gather.axes, gather.arguments) == ("all-gather", ("data",), ("x",))
    assert report.problems == ()
    report_of_list = audit(lambda w, x: [product(w, x), x], W, X, out_shardings=P("data"), **options)
    assert [specs(report_of_list)[f"result/{index}"] for index in (0, 1)] == ["P('data')", "P('data')"]


# ---- what arguments may be ----


class Affine(eqx.Module):
    weight: Any
    scale: Any
    name: str = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x @ self.weight) * self.scale


KEY = jax.random.key(0)
ARGUMENTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "numpy": (product, (np.ones((64, 128), np.float32), np.ones((32, 64), np.float32)), IN),
    "wide numpy": (product, (np.ones((64, 128)), np.ones((32, 64))), IN),
    "arrays": (product, (jnp.ones((64, 128)), jnp.ones((32, 64))), IN),
    "keys": (lambda w, x, key: product(w, x) + jax.random.normal(key, (128,)), (W, X, KEY), (*IN, None)),
    "old keys": (
        lambda w, x, key: product(w, x) + jax.random.normal(key, (128,)),
        (W, X, jax.random.PRNGKey(0)),
        (*IN, None),
    ),
    "numbers": (lambda w, x, rate, n: product(w, x) * rate**n, (W, X, 0.5, 3), (*IN, None, None)),
    "scalars": (lambda w, x, rate: product(w, x) * rate, (W, X, np.float32(3)), (*IN, None)),
    "texts": (lambda w, x, name: getattr(jnp, name)(x @ w), (W, X, "tanh"), (*IN, None)),
    "nothing": (lambda w, x, none, act: act(x @ w), (W, X, None, jnp.tanh), (*IN, None, None)),
    "modules": (lambda model, x: model(x), (Affine(W, 2.0, "me"), X), (P(None, "model"), P("data"))),
    "lists": (lambda pair: product(*pair), ([W, X],), ([P(None, "model"), P("data")],)),
    "partial": (functools.partial(lambda n, w, x: product(w, x) * n, 2), (W, X), IN),
    "partial array": (functools.partial(lambda n, w, x: product(w, x) * n, jnp.arange(128.0)), (W, X), IN),
    "partial keyword": (functools.partial(lambda w, x, *, n: product(w, x) * n, n=2), (W, X), IN),
    "any number": (lambda *args: product(*args), (W, X), IN),
    "closure": (lambda w, x: product(w, x) * jnp.arange(128.0), (W, X), IN),
    "jit": (jax.jit(product), (W, X), IN),
    "static": (jax.jit(lambda w, x, n: product(w, x) * n, static_argnums=2), (W, X, 3), (*IN, None)),
    "static name": (jax.jit(lambda w, x, n: product(w, x) * n, static_argnames="n"), (W, X, 3), (*IN, None)),
    "sr.filter_jit": (sr.filter_jit(product), (W, X), IN),
    "eqx.filter_jit": (eqx.filter_jit(product), (W, X), IN),
    "eqx.filter_jit of a module": (
        eqx.filter_jit(lambda m, x: m(x)),
        (Affine(W, 2.0, "me"), X),
        (P(None, "model"), P("data")),
    ),
}


ELSEWHERE = ("numpy", "keys", "modules", "partial array", "closure", "jit", "eqx.filter_jit of a module")
"""Those that hold arrays, which are on CPUs while the function is compiled for another machine, and jitted ones."""


@pytest.mark.parametrize(
    ("name", "target"), [*((name, CPU) for name in ARGUMENTS), *((name, CUDA) for name in ELSEWHERE)]
)
def test_arguments_of_all_kinds(name: str, target: str) -> None:
    fn, args, shardings = ARGUMENTS[name]
    report = audit(fn, *args, in_shardings=shardings, target=target)
    assert report.flops == PRODUCT // 8
    assert report.model_flops == PRODUCT
    assert report.problems == ()
    matrices = [array for array in report.arrays if array.role != "result" and len(array.shape) == 2]
    assert [array.compiled for array in matrices] == ["P(None, 'model')", "P('data')"]
    assert sum(array.device_bytes for array in matrices) == 64 * 128 * 4 // 2 + 32 * 64 * 4 // 4


def test_a_module_that_is_the_function_itself() -> None:
    """Its weights are constants of the program: they are in no category of arguments."""
    linear = eqx.nn.Linear(64, 128, key=KEY)
    report = audit(jax.vmap(linear), X, in_shardings=P("data"), target=CPU)
    assert report.model_flops == PRODUCT
    assert [array.device_bytes for array in report.arrays] == [32 * 64 * 4 // 4, 32 * 128 * 4 // 4]
    alone = audit(linear, f32(64), target=CPU)
    assert (alone.name, [array.path for array in alone.arrays]) == ("Linear", ["x", "result"])


def test_placed_arrays_keep_their_shardings() -> None:
    w = jax.device_put(jnp.ones((64, 128)), NamedSharding(OWN, P(None, "model")))
    x = jax.device_put(jnp.ones((32, 64)), NamedSharding(OWN, P("data")))
    report = sr.audit(product, w, x, target=CPU)
    assert (specs(report)["w"], specs(report)["x"]) == ("P(None, 'model')", "P('data')")
    assert report.mesh == "data:4,model:2"
    assert (report.flops, report.problems) == (PRODUCT // 8, ())


@targets
def test_cpu_arrays_are_audited_for_other_targets(target: str) -> None:
    mesh_on(target, AXES)
    w = jax.device_put(jnp.ones((64, 128)), NamedSharding(OWN, P(None, "model")))
    closed_over = jax.device_put(jnp.ones((32, 64)), NamedSharding(OWN, P("data")))
    report = sr.audit(lambda w, x: product(w, x + closed_over), w, X, mesh=OWN, in_shardings=IN, target=target)
    assert report.flops == PRODUCT // 8
    assert specs(report)["w"] == "P(None, 'model')"


@targets
def test_functions_that_print_and_return_more_than_arrays(target: str) -> None:
    """Without a GPU its compiler cannot compile what calls back to Python. What only prints is left out for it."""

    def fn(w: Any, x: Any) -> Any:
        jax.debug.print("{}", x[0, 0])
        return {"y": product(w, x), "n": 3, "name": "me", "none": None, "act": jax.nn.relu}

    report = Program(fn, (W, X), IN).audit(target)
    assert report.flops == PRODUCT // 8
    assert [array.path for array in report.arrays if array.role == "result"] == ["result/y"]


@pytest.mark.slow
def test_callbacks_do_not_compile_without_a_gpu() -> None:
    def asks(w: Any, x: Any) -> Any:
        return product(w, jax.pure_callback(lambda x: x, X, x))

    with pytest.raises(RuntimeError, match="'gpu' requested") as caught:
        audit(asks, W, X, in_shardings=IN, target=CUDA)
    assert any("calls back to Python" in note for note in caught.value.__notes__)
    assert audit(asks, W, X, in_shardings=IN, target=CPU).model_flops == PRODUCT


def test_tokens_of_ordered_callbacks_are_no_arrays() -> None:
    def step(w: Any, x: Any) -> Any:
        y = product(w, x)
        return io_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), y, ordered=True), x + 1

    report = audit(step, W, X, in_shardings=IN, target=CPU, donate_argnums=1)
    assert [array.path for array in report.arrays] == ["w", "x", "result/0", "result/1"]
    assert [array.donated for array in report.arrays[:2]] == [False, True]
    assert [array.device_bytes for array in report.arrays[:2]] == [W.size * 4 // 2, X.size * 4 // 4]
    assert not any(finding.code == "donated-in-vain" for finding in report.findings)


def test_functions_without_arguments_or_results() -> None:
    assert audit(lambda: jnp.ones((8, 8)) @ jnp.ones((8, 8)), target=CPU).model_flops == 2 * 8**3
    nothing = audit(lambda x: None, X, in_shardings=P("data"), target=CPU)
    assert [array.path for array in nothing.arrays] == ["x"]
    assert nothing.memory.outputs_bytes == 0


def test_small_types_and_empty_arrays() -> None:
    dtypes = (jnp.int4, jnp.bfloat16, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn)
    args = [jax.ShapeDtypeStruct((64,), dtype) for dtype in dtypes]
    report = audit(lambda *args: args, *args, f32(0, 8), in_shardings=P(("data", "model")), target=CPU)
    sizes = [array.device_bytes for array in report.arrays if array.role != "result"]
    assert sizes == [4, 16, 8, 64, 8, 0]
    assert [array.dtype for array in report.arrays[:5]] == ["int4", "bfloat16", "bool", "complex64", "float8_e4m3fn"]


# ---- functions that are jitted already ----


@targets
def test_filter_jit_keeps_its_shardings(target: str) -> None:
    mesh_on(target, AXES)
    report = sr.audit(sr.filter_jit(product, in_shardings=IN, mesh=OWN), W, X, mesh=OWN, target=target)
    assert (specs(report)["w"], specs(report)["x"]) == ("P(None, 'model')", "P('data')")
    assert report.problems == ()


# ---- meshes ----


@targets
@pytest.mark.parametrize("mesh", [None, OWN], ids=["in force", "named"])
def test_shard_map(mesh: Mesh | None, target: str) -> None:
    """Half of the sum on each device, and an all-reduce of f32[8, 128] over the two of them."""
    mesh_on(target, AXES)
    shardings = (P("model"), P("data", "model"))
    by_hand = jax.shard_map(lambda w, x: lax.psum(x @ w, "model"), mesh=mesh, in_specs=shardings, out_specs=P("data"))
    report = sr.audit(by_hand, W, X, mesh=OWN, in_shardings=shardings, target=target)
    assert (report.flops, report.model_flops) == (PRODUCT // 8, PRODUCT)
    assert [(collective.kind, collective.axes) for collective in report.collectives] == [("all-reduce", ("model",))]
    assert report.wire_bytes == 8 * 128 * 4
    assert report.problems == ()


EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


@targets
def test_explicit_meshes(target: str) -> None:
    mesh_on(target, AXES)

    def fn(w: Any, x: Any) -> Any:
        hidden = jnp.einsum("bd,dh->bh", x, w, out_sharding=P("data", "model"))
        return jax.sharding.reshard(jnp.tanh(hidden), P("data", None))

    report = sr.audit(fn, W, X, mesh=EXPLICIT, in_shardings=IN, target=target, axis_types=None)
    assert report.flops == PRODUCT // 8
    (gather,) = report.collectives
    assert (gather.kind, gather.axes, gather.wire_bytes) == ("all-gather", ("model",), 8 * 128 * 4 // 2)
    assert specs(report)["result"] in ("P('data')", "P('data', None)")
    assert report.problems == ()


def test_the_target_is_cpus_by_default_as_many_as_are_asked_for() -> None:
    assert sr.audit(product, W, X, mesh=SHAPE, in_shardings=IN).target == Target.parse("cpu")
    assert sr.audit(product, W, X, mesh=sr.mesh_shape("data:2"), target="cpu:2").device_count == 2


def test_another_sheet_changes_times_only() -> None:
    slow = attrs.evolve(sr.Hardware.named("cuda:h100"), link_bytes_per_second=10**6)
    program = Program(lambda w, x: con(x @ w, "data", None), (W, X), (P("model"), P("data", "model")))
    plain, report = program.audit(CPU), program.audit(CPU, slow)
    assert report.hardware == slow
    assert (report.memory, report.flops, report.wire_bytes) == (plain.memory, plain.flops, plain.wire_bytes)
    assert report.step_time() > report.wire_bytes / 10**6


# ---- loops, branches, recomputation ----


def rounds(w: Any, x: Any) -> Any:
    def body(x: Any, _: Any) -> Any:
        return con(jnp.tanh(con(x, "data", "model") @ w), "data", "model"), None

    return lax.scan(body, x, None, length=5)[0]


def branches(flag: Any, w: Any, x: Any) -> Any:
    return con(lax.cond(flag, lambda: x @ w, lambda: jnp.sin(x @ w)), "data", "model")


def recomputed(w: Any, x: Any) -> Any:
    hidden = jax.checkpoint(lambda x: jnp.tanh(x @ w["a"]))(x)
    return jnp.sum(jnp.tanh(hidden @ w["b"]) ** 2)


FLAG, LAYERS = jax.ShapeDtypeStruct((), bool), {"a": f32(64, 96), "b": f32(96, 64)}
LAYER = 2 * 32 * 64 * 96
COUNTED: dict[str, tuple[Program, int, tuple[int, ...]]] = {
    # Row then row: the two halves of a sum are reduced in each round.
    "loop": (Program(rounds, (f32(64, 64), f32(48, 64)), (P("model"), P("data", "model"))), 20 * 48 * 32 * 64, ()),
    # Of two equal products a compiler may make one.
    "branches": (Program(branches, (FLAG, W, X), (None, *IN)), 2 * PRODUCT, (PRODUCT,)),
    # Two products forward, both gradients of each but one, and the first again.
    "recomputation": (Program(jax.grad(recomputed), (LAYERS, X), (P(), P(("data", "model")))), 6 * LAYER, (5 * LAYER,)),
}
"""Programs with their FLOPs, and what compilers may make of these."""


@targets
@pytest.mark.parametrize("name", COUNTED)
def test_loops_branches_and_recomputation_count(name: str, target: str) -> None:
    program, flops, fewer = COUNTED[name]
    report = program.audit(target)
    assert report.model_flops == flops
    assert report.flops * 8 in (flops, *fewer)
    assert report.problems == ()


@targets
def test_an_unknown_loop_counts_once(target: str) -> None:
    def fn(w: Any, x: Any) -> Any:
        return lax.while_loop(lambda x: jnp.max(x) > 3, lambda x: jnp.sin(x @ w), x)

    report = Program(fn, (f32(64, 64), X), (P(), P(("data", "model")))).audit(target)
    assert (report.flops, report.model_flops) == (2 * 32 * 64 * 64 // 8, None)
    assert codes(report, "note") == ["unknown-loop"]
    assert any(collective.times.unknown for collective in report.collectives)


# ---- laws ----


def random_spec(rng: random.Random) -> P:
    free = ["data", "model"]
    rng.shuffle(free)
    entries = [free.pop() if free and rng.random() < 0.4 else None for _ in range(2)]
    return P(tuple(free), None) if len(free) == 2 and rng.random() < 0.2 else P(*entries)


def summed(x: Any) -> Any:
    return lax.psum(x, "model")


def random_step(rng: random.Random, x: Any, w: Any) -> Any:
    """One of the things that people do to activations."""
    spec, dim = random_spec(rng), rng.randrange(2)
    steps: tuple[Callable[[], Any], ...] = (
        lambda: jnp.tanh(x @ w),
        lambda: con(x, *spec),
        lambda: lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=3)[0],
        lambda: lax.cond(x.sum() > 0, lambda: x @ w, lambda: x * 2),
        lambda: jax.checkpoint(lambda x: jnp.sin(x @ w))(x),
        lambda: jnp.sort(x, axis=dim),
        lambda: jnp.cumsum(x, axis=dim),
        lambda: jax.nn.softmax(x, axis=dim),
        lambda: x[::-1] + jnp.roll(x, 1, 1),
        lambda: x.reshape(16, 4, 64).sum(1).repeat(4, 0),
        lambda: lax.fori_loop(0, 2, lambda _, c: con(c, *spec) * 1.1, x),
        lambda: x @ (w.T @ w),
        lambda: jax.shard_map(summed, in_specs=P("data", "model"), out_specs=P("data"))(x).repeat(2, 1),
    )
    return rng.choice(steps)()


@pytest.mark.parametrize(("seed", "target"), [*((seed, CPU) for seed in range(8)), (8, CUDA), (10, TPU)])
def test_laws_of_any_program(seed: int, target: str) -> None:
    """Parts add up, nothing is negative, every move is along known axes, and the report is kept as it is."""
    rng = random.Random(seed)
    weights = [f32(64, 64)] * rng.randint(1, 4)
    shardings = [random_spec(rng) for _ in weights], random_spec(rng)
    choices = rng.random()

    def loss(weights: Any, x: Any) -> Any:
        again = random.Random(choices)
        for w in weights:
            x = random_step(again, x, w)
        return jnp.mean(x**2)

    def step(weights: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value

    report = Program(step, (weights, f32(64, 64)), shardings, out=(shardings[0], None), donate=0).audit(target)
    assert min(report.memory.shares().values()) >= 0
    assert sum(module.flops for module in report.modules) == report.flops
    assert sum(module.wire_bytes for module in report.modules) == report.wire_bytes
    assert all(collective.crossed for collective in report.collectives if collective.wire_bytes)
    assert all(finding.message for finding in report.findings)
    assert all(array.requested == array.compiled or not array.requested for array in report.arrays)
    assert AuditReport.from_json(report.to_json()) == report
    assert report.name in str(report)


# ---- other libraries' models ----


class Flax(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(32)(nn.relu(nn.Dense(160)(x)))


@pytest.mark.parametrize("target", [CPU, TPU])
def test_a_model_of_flax(target: str) -> None:
    model: Any = Flax()
    optim = optax.adam(1e-3)
    params = jax.eval_shape(model.init, KEY, f32(1, 64))
    state = jax.eval_shape(optim.init, params)

    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.square(model.apply(p, x))))(params)
        updates, state = optim.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    plan = sr.ReplicateShardingRule().plan(params, sr.mesh_shape("data:8"))
    report = audit(
        step,
        params,
        state,
        f32(24, 64),
        axes="data:8",
        plan=plan,
        in_shardings=(None, None, P("data")),
        out_shardings=(plan, plan.mirror, None),
        donate_argnums=(0, 1),
        target=target,
    )
    assert report.problems == ()
    size = 64 * 160 + 160 + 160 * 32 + 32
    assert report.memory.parameters_bytes == 4 * size
    assert report.memory.state_bytes == 2 * 4 * size + 4
    assert report.wire_bytes == 2 * 7 * (4 * size + 4) // 8  # all gradients and the loss, over all devices
    assert {collective.axes for collective in report.collectives} == {("data",)}


def nnx_step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    """A step of nnx, which writes to the model and the optimizer and returns the loss."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def test_what_a_step_of_nnx_writes_is_audited() -> None:
    model = nnx.eval_shape(lambda: nnx.Linear(64, 128, rngs=nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), model)
    plan = sr.RegexShardingRule([("kernel", P("data"))]).plan(model, SHAPE)
    where = (plan, plan.mirror, P("data"))
    report, jitted = [
        audit(step, model, optimizer, X, in_shardings=where, target=CPU) for step in (nnx_step, nnx.jit(nnx_step))
    ]
    kernel, bias = 4 * 64 * 128 // SHAPE.shape["data"], 4 * 128
    assert report.memory.outputs_bytes >= 3 * (kernel + bias) + 3 * 4  # model, moments, two counters and the loss
    assert specs(report)["optimizer/opt_state/0/mu/kernel"] == specs(report)["model/kernel"] == "P('data')"
    assert jitted.memory == report.memory


# ---- what is refused ----


class Pair(NamedTuple):
    """Named tuples are trees of their own to JAX."""

    a: Any
    b: Any


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"out_shardings": (P(), P())}, TreeError, "out_shardings"),
        ({"donate_argnums": 2}, sr.errors.ConfigError, "donate_argnums names argument 2, but there are 2"),
        ({"donate_argnums": (0, -3)}, sr.errors.ConfigError, "donate_argnums names argument -3"),
        ({"plan": P("data")}, sr.errors.ConfigTypeError, "Pass specs as in_shardings"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        audit(product, W, X, target=CPU, **options)


def test_errors_of_the_function_are_raised() -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        audit(lambda w, x: 1 / 0, W, X, target=CPU)
    assert any(__file__ in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        audit(lambda w: w, W, X, target=CPU)


def test_the_same_audit_twice_is_the_same_report() -> None:
    report = audit(product, W, X, in_shardings=IN, target=CPU)
    assert report == PLAIN.audit(CPU)
    assert not report.diff(PLAIN.audit(CPU))


def test_nothing_is_run() -> None:
    calls: list[int] = []

    def counted(w: Any, x: Any) -> Any:
        calls.append(1)
        jax.debug.callback(lambda: calls.append(2))
        return x @ w

    audit(counted, W, X, in_shardings=IN, target=CPU)
    assert calls == [1]


def test_a_negative_number_of_a_donated_argument_counts_from_the_end() -> None:
    report = Program(lambda w, x: (w.sum(), x + 1), (W, X), IN, out=(None, P("data")), donate=-1).audit(CPU)
    assert [array.donated for array in report.arrays[:2]] == [False, True]


def test_a_named_tuple_result_takes_one_spec() -> None:
    report = Program(lambda w, x: Pair(product(w, x), x), (W, X), IN, out=P("data")).audit(CPU)
    assert [array.compiled for array in report.arrays if array.role == "result"] == ["P('data')", "P('data')"]


def test_roles_as_the_caller_knows_them() -> None:
    report = audit(product, W, X, in_shardings=IN, roles=("optimizer state", "parameters"), target=CPU)
    assert roles(report) == {"w": "optimizer state", "x": "parameters", "result": "result"}
    assert report.memory.state_bytes == 64 * 128 * 4 // 2
    assert report.memory.parameters_bytes == 32 * 64 * 4 // 4
