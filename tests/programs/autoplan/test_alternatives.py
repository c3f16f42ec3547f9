"""Plans choose among alternatives of a region: by their time, by what they send, and by what they keep in memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardrules as sr
from tests.programs.regions.test_region import close, real

RULE = "s h d, t h d -> s h d"


def weights(q: Any, k: Any) -> Any:
    scores = jnp.einsum("shd,thd->hst", q, k) / q.shape[-1]
    return jnp.einsum("hst,thd->shd", jax.nn.softmax(scores), k)


@sr.region(RULE, split="h")
def by_heads(q: Any, k: Any) -> Any:
    return weights(q, k)


@sr.region(RULE, split="h", exchange="s t")
def gathered(q: Any, k: Any, *, axis_name: Any) -> Any:
    return weights(q, lax.all_gather(k, axis_name, tiled=True) if axis_name else k)


@sr.region(RULE, split="h", exchange="s t")
def in_rounds(q: Any, k: Any, *, axis_name: Any) -> Any:
    """Keys go round: only one piece of them, and of the scores, is in memory at a time."""
    count = lax.axis_size(axis_name) if axis_name else 1

    def step(carry: Any, _: Any) -> Any:
        keys, total, result = carry
        terms = jnp.exp(jnp.einsum("shd,thd->hst", q, keys) / q.shape[-1])
        total, result = total + terms.sum(-1), result + jnp.einsum("hst,thd->shd", terms, keys)
        pairs = [(device, (device + 1) % count) for device in range(count)]
        return (lax.ppermute(keys, axis_name, pairs) if axis_name else keys, total, result), None

    start = k, jnp.zeros((q.shape[1], q.shape[0])), jnp.zeros(q.shape)
    (_, total, result), _ = lax.scan(step, start, length=count)
    return result / total.T[..., None]


ATTEND = sr.alternatives(by_heads, gathered, in_rounds)
MACHINE = sr.Hardware.named("cuda:h100")


def shapes(length: int, heads: int) -> tuple:
    return (jax.ShapeDtypeStruct((length, heads, 64), jnp.float32),) * 2


def plan_of(function: Any, *arguments: Any, mesh: str = "seq:8", **options: Any) -> Any:
    return sr.autoplan(function, *arguments, mesh=sr.mesh_shape(mesh), hardware=MACHINE, **options)


def test_what_sends_nothing_is_taken_where_it_can_be_split() -> None:
    (use,) = plan_of(ATTEND, *shapes(4096, 8)).regions
    assert (use.name, use.axes, use.exchange, use.wire_bytes) == ("by_heads", (("h", ("seq",)),), (), 0)


def test_what_exchanges_is_taken_where_nothing_else_can_be_split() -> None:
    plan = plan_of(ATTEND, *shapes(8192, 1))
    (use,) = plan.regions
    assert use.name in ("gathered", "in_rounds")
    assert use.exchange == ("seq",)
    piece = 8192 // 8 * 64 * 4
    sends = {"gathered": 7 * piece, "in_rounds": 8 * piece}
    assert use.wire_bytes == sends[use.name] == plan.wire_bytes
    (other,) = use.alternatives
    assert {other[0], use.name} == {*sends}
    assert other[1] > use.seconds
    assert str(use) in str(plan)
    assert f"region {use.name}" in plan.explain("q")
    assert f"; {other[0]} " in plan.explain("q")
    whole = plan_of(by_heads, *shapes(8192, 1))
    assert plan.cost < whole.cost


def test_the_alternative_that_keeps_less_is_taken_where_memory_is_short() -> None:
    free = plan_of(ATTEND, *shapes(8192, 1))
    (use,) = free.regions
    assert use.name == "gathered"
    limited = plan_of(ATTEND, *shapes(8192, 1), memory_limit=int(0.6 * free.peak_bytes))
    (other,) = limited.regions
    assert other.name == "in_rounds"
    assert limited.fits
    assert limited.peak_bytes < 0.6 * free.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["seq:8", "seq:4,model:2", "a:2,b:2,c:2"])
def test_planned_alternatives_compute_the_same(mesh: str) -> None:
    q, k = real(64, 2, 8), real(64, 2, 8, seed=1)

    def step(q: Any, k: Any) -> Any:
        return jax.value_and_grad(lambda q, k: (ATTEND(q, k) ** 2).sum(), (0, 1))(q, k)

    plan = sr.autoplan(step, q, k, mesh=sr.create_mesh(mesh))
    assert {use.name for use in plan.regions} <= {
        f"{name}{ending}" for name in ("by_heads", "gathered", "in_rounds") for ending in ("", "_backward")
    }
    close(plan.jit(step)(q, k), jax.value_and_grad(lambda q, k: (weights(q, k) ** 2).sum(), (0, 1))(q, k))


def test_layouts_that_a_region_refuses_are_not_planned() -> None:
    @sr.region("t d -> t d", split="t")
    def of_pairs(x: Any) -> Any:
        if len(x) < 8:
            raise sr.errors.SplitError("it takes 8 rows at least")
        return 2 * x

    x = real(16, 4)
    plan = sr.autoplan(of_pairs, x, mesh=sr.create_mesh("data:4,model:2"))
    assert {*plan.regions[0].axes} <= {("t", ("model",))}
    np.testing.assert_allclose(plan.jit(of_pairs)(x), 2 * x)


def test_calls_that_declare_alike_on_one_line_are_told_apart() -> None:
    double = sr.region("t d -> t d", split="t")(lambda x: 2 * x)
    triple = sr.region("t d -> t d", split="t")(lambda x: 3 * x)
    x = real(16, 4)
    plan = sr.autoplan(lambda x: [run(x) for run in (double, triple)], x, mesh=sr.create_mesh("data:8"))
    np.testing.assert_allclose(plan.jit(lambda x: [run(x) for run in (double, triple)])(x), [2 * x, 3 * x])


def test_what_fails_on_shards_says_how_to_refuse_them() -> None:
    @sr.region("t d -> t d", split="t")
    def of_fours(x: Any) -> Any:
        assert x.shape[0] % 4 == 0, "blocks of 4 rows"
        return 2 * x

    message = (
        r"of_fours .* cannot run on shards of shapes \(2, 4\): AssertionError: blocks of 4 rows.* Raise shardrules"
    )
    with pytest.raises(sr.errors.ConfigError, match=message):
        plan_of(of_fours, jax.ShapeDtypeStruct((16, 4), jnp.float32))


def test_alternatives_of_scalars() -> None:
    either = sr.alternatives(*(sr.region(", -> ", whole="")(run) for run in (jnp.add, lambda a, b: b + a)))
    x = real(16, 4)
    plan = sr.autoplan(lambda x: either(x.sum(), x.max()), x, mesh=sr.create_mesh("data:8"))
    close(plan.jit(lambda x: either(x.sum(), x.max()))(x), x.sum() + x.max())


def test_equal_times_with_less_memory_are_kept() -> None:
    def cost(q: Any, k: Any) -> float:
        return 4 * q.size * k.shape[0]

    def in_blocks(q: Any, k: Any) -> Any:
        return jax.lax.map(lambda rows: weights(rows, k), q.reshape(8, -1, *q.shape[1:])).reshape(q.shape)

    whole, blocks = (sr.region(RULE, split="s h", cost=cost)(run) for run in (weights, in_blocks))
    limit = int(1.3 * plan_of(blocks, *shapes(8192, 1)).peak_bytes)
    plan = plan_of(sr.alternatives(whole, blocks), *shapes(8192, 1), memory_limit=limit)
    assert plan.fits
    assert [use.name for use in plan.regions] == ["in_blocks"]


def test_batches_of_ragged_matmuls_are_whole() -> None:
    x, w, sizes = real(3, 64, 8), real(3, 8, 8, 8, seed=1), jnp.full((3, 8), 8)
    ragged = jax.vmap(jax.lax.ragged_dot)
    plan = sr.autoplan(ragged, x, w, sizes, mesh=sr.create_mesh("e:4", devices=jax.devices()[:4]))
    close(plan.jit(ragged)(x, w, sizes), ragged(x, w, sizes))
