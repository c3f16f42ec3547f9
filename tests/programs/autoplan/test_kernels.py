"""Plans of functions with fused kernels: how they are split, what runs, and what is said of those that are not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.autoplan.run.local import LocalSplit, local_jaxpr
from shardrules.programs.jaxprs.walk import equations
from tests.programs.autoplan.models import FAST
from tests.programs.autoplan.shipped import OPS, SHIPPED, kernels_in, let_jax_find_cudnn, loaded, struct
from tests.programs.examples import mesh_on

NUMBERS = np.random.default_rng(0)
H100 = sr.Hardware.named("cuda:h100")
MESH = "data:4,model:2"


def real(*shape: int) -> jax.Array:
    return jnp.asarray(NUMBERS.normal(size=shape), jnp.float32)


Attention = Callable[[Any, Any, Any], Any]


def loss_with(attend: Attention) -> Callable[..., Any]:
    """The loss of a decoder of two layers, which are scanned and computed again."""

    def loss(params: Any, tokens: Any) -> Any:
        def block(x: Any, layer: Any) -> tuple[Any, None]:
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, layer[name]) for name in "qkv")
            x = x + jnp.einsum("btnh,nhd->btd", attend(q, k, v), layer["o"])
            return x + jax.nn.relu(x @ layer["up"]) @ layer["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(block), params["embed"][tokens], params["layers"])
        logits = (x @ params["out"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return loss


def model(dim: int, heads: int, hidden: int, words: int, dtype: Any = jnp.bfloat16) -> Any:
    size = dim // heads
    shapes = dict.fromkeys("qkv", (2, dim, heads, size))
    shapes |= {"o": (2, heads, size, dim), "up": (2, dim, hidden), "down": (2, hidden, dim)}
    layers = {name: struct(*shape, dtype=dtype) for name, shape in shapes.items()}
    return {"embed": struct(words, dim, dtype=dtype), "layers": layers, "out": struct(dim, words, dtype=dtype)}


def cudnn(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def written_out(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def test_a_step_with_cudnns_attention_takes_no_longer_than_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device computes the attention of its own examples, and none of it twice."""
    let_jax_find_cudnn(monkeypatch)
    params, tokens = model(1024, 8, 4096, 8192), struct(32, 2048, dtype=jnp.int32)

    def planned(attend: Attention) -> Any:
        step = jax.value_and_grad(loss_with(attend))
        return sr.autoplan(step, params, tokens, mesh=sr.mesh_shape("data:16"), hardware=H100)

    fused = planned(cudnn)
    assert not [finding for finding in fused.findings if finding.code == "unknown-operation"]
    assert fused.step_time.compute_seconds < planned(written_out).step_time.compute_seconds
    # Four heads cannot be split over 16 devices, so that it is the examples.
    assert "data" in str(next(dim for dim in fused.split_dims if str(dim).startswith("tokens[0]")))


def test_microbatches_and_stages_are_possible_with_cudnns_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    let_jax_find_cudnn(monkeypatch)
    params, tokens = model(64, 4, 128, 256), struct(16, 128, dtype=jnp.int32)
    options: dict[str, Any] = {"cluster": "cuda:h100:2", "microbatches": 4, "time_limit": 20}
    plan = sr.plan_training(loss_with(cudnn), params, optax.sgd(0.1), tokens, **options)
    assert plan.report.microbatches == 4
    assert "no rule" not in str(plan)
    plan = sr.plan_training(loss_with(cudnn), params, optax.sgd(0.1), tokens, stages=2, **options)
    assert plan.report.stages == 2


def test_dropout_of_cudnns_attention_has_no_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    module = let_jax_find_cudnn(monkeypatch)

    def dropping(q: Any, k: Any, v: Any) -> Any:
        return module.dot_product_attention(q, k, v, dropout_rate=0.1)

    params, tokens = model(64, 4, 128, 256), struct(16, 128, dtype=jnp.int32)
    with pytest.raises(sr.errors.MicrobatchError, match="drops elements out by one seed for all examples"):
        sr.plan_training(loss_with(dropping), params, optax.sgd(0.1), tokens, cluster="cuda:h100:2", microbatches=2)


def test_the_largest_elements_of_pieces_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    module = let_jax_find_cudnn(monkeypatch)
    q = struct(4, 128, 4, 128, dtype=jnp.float8_e4m3fn)
    scales = {name: jnp.ones((1, 1, 1, 1)) for name in module.fp8_params_keys}
    program = jax.make_jaxpr(lambda q: module.dot_product_attention(q, q, q, use_fp8=True, fp8_params=scales))(q)
    ((equation, _),) = kernels_in(program)
    spec = P("data", None, "model")
    split = LocalSplit((*(spec,) * 3, *(P(),) * 6), (spec, P(), P()), ((), ("data", "model"), ("data", "model")))
    names = [each.primitive.name for each in equations(local_jaxpr(equation, split, sr.create_mesh(MESH)))]
    assert names.count("reduce_max") == 2
    assert "reduce_sum" not in names


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_planned_kernel_computes_what_it_computes_alone(axis_type: AxisType) -> None:
    mha = loaded(f"{OPS}gpu.attention").mha

    def attend(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, each) for each in w)
        return mha(q, k, v, None, causal=True, interpret=True)

    w, x = real(3, 16, 2, 16), real(16, 32, 16)
    mesh = sr.create_mesh("data:8", axis_types=axis_type)
    pins = sr.SpecTreeShardingRule((P(), P("data")))
    plan = sr.autoplan(attend, w, x, mesh=mesh, hardware=FAST, pins=pins)
    assert [finding for finding in plan.findings if finding.code == "unknown-operation"] == []
    result = plan.jit(attend)(*sr.filter_shard((w, x), plan.plan, mesh))
    np.testing.assert_allclose(result, jax.jit(attend)(w, x), rtol=1e-4, atol=1e-4)
    assert plan.result_specs[0][0] == "data"


def counting(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * pl.program_id(0)


def test_the_first_line_says_what_a_kernel_without_a_rule_takes() -> None:
    rows = pl.BlockSpec((8, 4096), lambda i: (i, 0))
    call = pl.pallas_call(counting, struct(4096, 4096, dtype=jnp.float32), grid=(512,), in_specs=[rows], out_specs=rows)

    def fn(x: Any) -> Any:
        return jnp.tanh(call(x))

    x = struct(4096, 4096, dtype=jnp.float32)
    plan = sr.autoplan(fn, x, mesh=sr.mesh_shape("data:8"), hardware=H100, pins=sr.SpecTreeShardingRule((P("data"),)))
    first = str(plan).splitlines()[0]
    assert "no rule for pallas_call counting, used 1 time: every device holds its operands and results whole" in first
    assert "which takes at least" in first
    assert "and sends 56.0 MiB for it" in first
    trained = jax.custom_vjp(call)
    trained.defvjp(lambda x: (call(x), None), lambda _, gradient: (gradient,))
    training = sr.plan_training(lambda w, x: jnp.mean(trained(x @ w)), x, optax.sgd(0.1), x, cluster="cuda:h100:8")
    assert "no rule for pallas_call counting" in str(training).splitlines()[0]


def test_what_says_how_it_is_split_is_left_to_the_compiler() -> None:
    @custom_partitioning
    def sines(x: Any, y: Any) -> Any:
        return jnp.sin(x) @ y

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        shardings = NamedSharding(mesh, P(result.sharding.spec[0])), NamedSharding(mesh, P())
        return mesh, lambda x, y: jnp.sin(x) @ y, result.sharding, shardings

    sines.def_partition(partition, sharding_rule="m k, k n -> m n", need_replication_factors=("k", "n"))
    x, y = real(64, 32), real(32, 16)
    mesh = sr.create_mesh("data:8", axis_types=AxisType.Auto)
    pins = sr.SpecTreeShardingRule((P("data"), P()))
    plan = sr.autoplan(lambda x, y: 2 * sines(x, y), x, y, mesh=mesh, hardware=FAST, pins=pins)
    assert plan.findings == ()
    step = plan.jit(lambda x, y: 2 * sines(x, y))
    np.testing.assert_allclose(step(x, y), 2 * jnp.sin(x) @ y, rtol=1e-4, atol=1e-4)
    assert plan.result_specs == (P("data"),)
    assert "all-gather" not in (step.lower(x, y).compile().as_text() or "")


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradients_of_norms_run_in_a_plan(name: str) -> None:
    """Each device has its own rows, and gradients of weights are added up."""
    norm = getattr(loaded(f"{OPS}gpu.{name}"), name)

    def gradients(scale: Any, bias: Any, x: Any) -> Any:
        return jax.grad(lambda *args: jnp.sum(norm(*args, interpret=True) ** 3), (0, 1, 2))(x, scale, bias)

    arrays = real(16), real(16), real(8, 4, 16)
    mesh = sr.create_mesh("data:8")
    pins = sr.SpecTreeShardingRule((P(), P(), P("data")))
    plan = sr.autoplan(gradients, *arrays, mesh=mesh, hardware=FAST, pins=pins)
    assert [finding for finding in plan.findings if finding.code == "unknown-operation"] == []
    step, pieces = plan.jit(gradients), sr.filter_shard(arrays, plan.plan, mesh)
    for result, expected in zip(step(*pieces), jax.jit(gradients)(*arrays), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)
    assert "all-gather" not in (step.lower(*pieces).compile().as_text() or "")


def test_paged_attention_runs_in_a_plan() -> None:
    def decode(w: Any, x: Any, *args: Any) -> Any:
        q = jnp.einsum("bd,dnh->bnh", x, w)
        return loaded(f"{OPS}tpu.paged_attention").paged_attention(q, *args, pages_per_compute_block=2)

    pages = jnp.asarray(NUMBERS.integers(0, 12, (8, 4)), jnp.int32)
    lengths = jnp.array([0, 5, 16, 1, 0, 0, 7, 0], jnp.int32)
    arrays = real(32, 8, 16), real(8, 32), real(2, 12, 4, 16), real(2, 12, 4, 16), lengths, pages
    mesh = sr.create_mesh(MESH)
    specs = P(None, "model"), P("data"), P("model"), P("model"), P("data"), P("data")
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        plan = sr.autoplan(decode, *arrays, mesh=mesh, hardware=FAST, pins=sr.SpecTreeShardingRule(specs))
        result = plan.jit(decode)(*sr.filter_shard(arrays, plan.plan, mesh))
        np.testing.assert_allclose(result, jax.jit(decode)(*arrays), rtol=1e-4, atol=1e-4)
    assert plan.findings == ()
    assert plan.result_specs == (P("data", "model"),)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "target", "axes", "specs", "kinds"),
    [
        ("paged", "tpu:v5e:2x4", MESH, (P("data", "model"), P("model"), P("model"), P("data"), P("data")), []),
        ("ragged paged", "tpu:v5e:2x4", MESH, (P(None, "model"), P(None, None, "model"), *[P()] * 4), []),
        ("layer norm", "cuda:h100:2", "data:2", (P("data"), P(), P()), ["all-reduce"]),
        ("rms norm", "cuda:h100:2", "data:2", (P("data"), P(), P()), ["all-reduce"]),
    ],
)
def test_compilers_take_kernels_for_pieces(name: str, target: str, axes: str, specs: Any, kinds: list[str]) -> None:
    """Nothing is gathered, and gradients of weights are added up."""
    shipped, mesh = SHIPPED[name], mesh_on(target, axes)
    plan = sr.autoplan(shipped.fn, *shipped.args, mesh=mesh, pins=sr.SpecTreeShardingRule(specs))
    report = sr.audit(plan.jit(shipped.fn), *shipped.args, mesh=mesh, target=target)
    assert [collective.kind for collective in report.collectives] == kinds
    assert "custom-call" in (report.hlo_text or "")


def test_gradients_of_grouped_matmuls_run_in_a_plan() -> None:
    x, w, sizes = real(64, 8), real(4, 8, 16), jnp.array([16, 0, 25, 23], jnp.int32)

    def gradients(x: Any, w: Any, sizes: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            return jnp.sum(gmm(x, w, sizes, jnp.float32, (8, 8, 8), interpret=True) ** 2)

        return jax.grad(loss, (0, 1))(x, w)

    mesh = sr.create_mesh("data:8", axis_types=AxisType.Auto)
    pins = sr.SpecTreeShardingRule((P("data"), P(), P()))
    plan = sr.autoplan(gradients, x, w, sizes, mesh=mesh, hardware=FAST, pins=pins)
    assert [finding for finding in plan.findings if finding.code == "unknown-operation"] == []
    results = plan.jit(gradients)(*sr.filter_shard((x, w, sizes), plan.plan, mesh))
    for result, expected in zip(results, jax.jit(gradients)(x, w, sizes), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)
