"""`sharded_attention` is attention, on every mesh and in every way."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.errors import ConfigError, ConfigTypeError, NoMeshError, SplitError
from shardrules.programs.attention.kernels import plain_kernel
from shardrules.programs.attention.paired import as_kernel
from shardrules.programs.attention.shards import WAYS, attention_by_all_to_all, attention_by_gather, attention_by_ring
from tests.programs.attention.reference import assert_close, operands, packed, reference, value_and_gradients

MESHES = ("sequence:8", "data:2,sequence:4", "data:2,model:2,sequence:2")
TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}


def attend_on(mesh: Any, arrays: Any, attend: Any) -> Any:
    """Values and gradients on a mesh, with the batch split over `data` and the heads over `model`."""
    spec = P(*(name if name in mesh.axis_names else None for name in ("data", "", "model")))
    with jax.set_mesh(mesh):
        return value_and_gradients(attend)(*(jax.device_put(array, NamedSharding(mesh, spec)) for array in arrays))


# Every way on every mesh in both dtypes; masks, lengths and types of axes take turns.
CASES = [
    (
        how,
        mesh,
        dtype,
        index % 4 != 3,
        (index + index // 3) % 3 == 1,
        32 if index % 2 else 27,
        ("auto", "explicit")[index % 5 == 4],
    )
    for index, (dtype, mesh, how) in enumerate(itertools.product(TOLERANCES, MESHES, WAYS))
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "mesh", "dtype", "causal", "has_segments", "length", "axis_types"), CASES)
def test_every_way_on_every_mesh(
    how: Any, mesh: str, dtype: str, causal: bool, has_segments: bool, length: int, axis_types: Any
) -> None:
    arrays = operands(length, dtype=dtype)
    ids = packed(length) if has_segments else None
    options = {"causal": causal, "segment_ids": ids}
    devices = sr.create_mesh(mesh, axis_types=axis_types)
    actual = attend_on(
        devices, arrays, lambda q, k, v: sr.sharded_attention(q, k, v, **options, axis="sequence", how=how)
    )
    assert_close(actual, value_and_gradients(lambda q, k, v: reference(q, k, v, **options))(*arrays), TOLERANCES[dtype])


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", WAYS)
def test_every_way_on_two_devices(how: Any) -> None:
    arrays, ids = operands(7), packed(7)
    mesh = sr.create_mesh("sequence:2", devices=jax.devices()[:2])
    attend = jax.jit(
        lambda q, k, v: sr.sharded_attention(q, k, v, causal=True, axis="sequence", how=how, segment_ids=ids)
    )
    with jax.set_mesh(mesh):
        assert_close(attend(*arrays), reference(*arrays, causal=True, segment_ids=ids))


def test_without_a_mesh_it_is_attention() -> None:
    arrays, ids = operands(6), (packed(6), packed(6) + 1)
    attend, expected = (
        jax.jit(lambda *a, fn=fn: (fn(*a, causal=True), fn(*a, causal=False, segment_ids=ids)))
        for fn in (sr.sharded_attention, reference)
    )
    assert_close(attend(*arrays), expected(*arrays))


def test_keys_may_be_more_than_queries() -> None:
    (q, _, _), (_, k, v) = operands(3), operands(10)
    mesh = sr.create_mesh("sequence:2", devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        out = jax.jit(lambda *arrays: sr.sharded_attention(*arrays, causal=False, axis="sequence", how="gather"))(
            q, k, v
        )
    assert_close(out, reference(q, k, v, causal=False))


@pytest.mark.slow
def test_under_transformations() -> None:
    mesh = sr.create_mesh("sequence:2", devices=jax.devices()[:2])
    stacked = [jnp.stack([array, array[::-1]]) for array in operands(8)]

    def layers(attend: Any) -> Any:
        def run(q: Any, k: Any, v: Any) -> Any:
            def layer(x: Any, _: None) -> tuple[Any, None]:
                return x + jax.vmap(attend)(x, k, v), None

            return jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0]

        return value_and_gradients(run)

    with jax.set_mesh(mesh):
        actual = layers(lambda q, k, v: sr.sharded_attention(q, k, v, causal=False, axis="sequence", how="gather"))(
            *stacked
        )
    assert_close(actual, layers(lambda q, k, v: reference(q, k, v, causal=False))(*stacked), 1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(3, 4), (6, 2)])
def test_heads_of_keys_are_repeated_until_they_can_be_split(shape: tuple[int, int]) -> None:
    kv_heads, groups = shape
    arrays = operands(8, heads=kv_heads * groups, kv_heads=kv_heads)
    mesh = sr.create_mesh("sequence:4", devices=jax.devices()[:4])
    attend = jax.jit(lambda *a: sr.sharded_attention(*a, causal=True, axis="sequence", how="all_to_all"))
    with jax.set_mesh(mesh):
        assert_close(attend(*arrays), reference(*arrays, causal=True))


@pytest.mark.slow
def test_inside_of_a_shard_map() -> None:
    arrays = operands(8)
    mesh = sr.create_mesh("sequence:2", devices=jax.devices()[:2])
    attend = jax.shard_map(
        lambda *shards: sr.sharded_attention(*shards, causal=False, axis="sequence", how="gather"),
        mesh=mesh,
        in_specs=P(None, "sequence"),
        out_specs=P(None, "sequence"),
        check_vma=False,
    )
    assert_close(jax.jit(attend)(*arrays), reference(*arrays, causal=False))


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, "ring"])
def test_in_a_plan(how: Any) -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 512, 32)), jnp.float32)
    weights = [array[0, :32] for array in operands(32, width=16)]

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            q, k, v = (jnp.einsum("bse,ehd->bshd", x, weight) for weight in weights)
            return (sr.sharded_attention(q, k, v, causal=True, how=how) ** 2).mean()

        return jax.value_and_grad(loss)(weights)

    pins = sr.SpecTreeShardingRule(([None] * 3, P(None, "data")))
    plan = sr.autoplan(step, weights, x, mesh=sr.create_mesh("data:8"), pins=pins)
    assert plan.specs[-1] == P(None, "data")
    assert_close(plan.jit(step)(weights, x), jax.jit(step)(weights, x))


def test_wrong_arguments_are_listed() -> None:
    q, k, v = operands(8)
    wrong: Any = {"causal": 1, "axis": "heads", "how": "rings", "segment_ids": jnp.zeros((2, 8))}
    with jax.set_mesh(sr.create_mesh("sequence:8")):
        with pytest.raises(ConfigError, match="sharded_attention") as caught:
            sr.sharded_attention(q, k, v, **wrong)
        for text in ("causal must be", "'rings'", "unknown axis 'heads'; the mesh has", "must be integers (2, 8)"):
            assert text in str(caught.value)
        with pytest.raises(ConfigError, match="6 heads over the 8 devices of sequence; pass"):
            sr.sharded_attention(q[:, :, :6], k, v, causal=True, axis="sequence", how="all_to_all")
        with pytest.raises(ConfigError, match=r'the kernel "cudnn" returns no log-sum-exp.*pass how="all_to_all"'):
            sr.sharded_attention(q, k, v, causal=True, axis="sequence", how="ring", kernel="cudnn")
    with pytest.raises(ConfigError, match="7 heads of q must be a multiple of the 2 of k"):
        sr.sharded_attention(q[:, :, :7], k, v, causal=True)
    with pytest.raises(ConfigError, match=r"as many keys as queries.*pass causal=False"):
        sr.sharded_attention(q[:, :2], k, v, causal=True)
    with pytest.raises(NoMeshError, match=r"jax\.set_mesh"):
        sr.sharded_attention(q, k, v, causal=True, axis="sequence")
    with pytest.raises(ConfigTypeError, match='"xla", "cudnn" or None; got \'flash\''):
        sr.sharded_attention(q, k, v, causal=True, kernel="flash")


def on_shards(way: Any, kernel: Any) -> Any:
    """Attention of two devices, which exchange."""
    q, k, v = operands(8)
    mesh = sr.create_mesh("sequence:2", devices=jax.devices()[:2])
    attend = jax.shard_map(
        lambda q, k, v: way(q[:, :, :, None], k, v, axis_name=("sequence",), causal=True, kernel=kernel),
        mesh=mesh,
        in_specs=P(None, "sequence"),
        out_specs=P(None, "sequence"),
        check_vma=False,
    )
    return jax.jit(attend)(q[:, :, :2], k, v)


def without_log_sum_exp(q: Any, k: Any, v: Any, *, is_causal: bool, q_segment_ids: Any, kv_segment_ids: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernel", ["xla", without_log_sum_exp])
def test_kernels_without_log_sum_exp_need_all_keys(kernel: Any) -> None:
    q, k, v = operands(8)
    out = on_shards(attention_by_all_to_all, kernel)[:, :, :, 0]
    assert_close(out, reference(q[:, :, :2], k, v, causal=True))
    for way in (attention_by_ring, attention_by_gather):
        with pytest.raises(SplitError, match=r"returns no log-sum-exp.*pass how="):
            on_shards(way, kernel)


def attention_without_derivative(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return jax.lax.stop_gradient(plain_kernel(q, k, v, **options))


def attention_alone(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return plain_kernel(q, k, v, **options)[0]


@pytest.mark.slow
def test_pairs_of_kernels_have_the_gradients_of_a_whole_one() -> None:
    def results(kernel: Any) -> Any:
        def run(q: Any, k: Any, v: Any) -> Any:
            ids = {"q_segment_ids": packed(6), "kv_segment_ids": packed(6) + 1}
            out, log_sum_exp = as_kernel(kernel)(q, k, v, is_causal=True, **ids)
            return jnp.concatenate([out, jnp.where(log_sum_exp > -1e30, log_sum_exp, 0)[..., None]], axis=-1)

        return value_and_gradients(run)(*operands(6))

    assert_close(results((attention_alone, attention_without_derivative)), results(None))


def test_wrong_results_of_kernels_are_refused() -> None:
    def narrow(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return q, q[..., 0].astype(jnp.bfloat16)

    def transposed(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return q.swapaxes(1, 2)

    with pytest.raises(ConfigError, match="a log-sum-exp of bfloat16, too coarse"):
        sr.sharded_attention(*operands(8), causal=True, kernel=narrow)
    with pytest.raises(
        ConfigError, match=r"the kernel transposed returns an output of shape \(2, 8, 6, 4\) for queries"
    ):
        sr.sharded_attention(*operands(6), causal=True, kernel=transposed)


@pytest.mark.slow
def test_what_is_no_number_stays_so() -> None:
    q, k, v = operands(8, batch=1, heads=4)
    spoiled = [(q.at[0, 2].set(jnp.nan), k, v), (q, k.at[0, 1].set(jnp.nan), v), (q, k.at[0, 1].set(jnp.inf), v)]
    mesh = sr.create_mesh("sequence:2", devices=jax.devices()[:2])
    expected = [np.isnan(jax.nn.dot_product_attention(*arrays, is_causal=True)) for arrays in spoiled]
    assert [int(spots.sum()) for spots in expected[:2]] == [16, 112]
    ways: tuple[Any, ...] = (None, *WAYS)
    for how in ways:
        axis = None if how is None else "sequence"
        attend = jax.jit(lambda *a, axis=axis, how=how: sr.sharded_attention(*a, causal=True, axis=axis, how=how))
        with jax.set_mesh(mesh):
            for arrays, spots in zip(spoiled, expected, strict=True):
                np.testing.assert_array_equal(np.isnan(attend(*arrays)), spots)


@pytest.mark.slow
def test_wide_segment_ids_are_compared_whole() -> None:
    mesh = sr.create_mesh("sequence:2", devices=jax.devices()[:2])
    with jax.enable_x64(True), jax.set_mesh(mesh):
        arrays, ids = operands(7), packed(7).astype(jnp.int64) << 32
        attend = jax.jit(
            lambda *a: sr.sharded_attention(*a, causal=False, axis="sequence", how="gather", segment_ids=ids)
        )
        assert_close(attend(*arrays), reference(*arrays, causal=False, segment_ids=ids))


@pytest.mark.slow
def test_explicit_meshes_reshard_heads_and_order_axes() -> None:
    arrays = operands(16, batch=1)
    mesh = sr.create_mesh("a:2,b:2,model:2", axis_types="explicit")
    with jax.set_mesh(mesh):
        q = jax.device_put(arrays[0], P(None, "b", ("model", "a")))  # 4 devices, 2 heads of keys
        attend = jax.jit(lambda *a: sr.sharded_attention(*a, causal=True))
        out = attend(q, *arrays[1:])
        assert out.sharding.spec == P(None, "b", "model", None)
        assert_close(out, reference(*arrays, causal=True))
        reordered = jax.jit(lambda *a: sr.sharded_attention(*a, causal=False, axis=("b", "a"), how="gather"))(*arrays)
        assert reordered.sharding.spec == P(None, ("a", "b"), None, None)
        assert_close(reordered, reference(*arrays, causal=False))


@pytest.mark.slow
def test_explicit_meshes_keep_lengths_split_that_are_even() -> None:
    arrays = operands(6)
    mesh = sr.create_mesh("sequence:2", devices=jax.devices()[:2], axis_types="explicit")
    with jax.set_mesh(mesh):
        out = jax.jit(lambda *a: sr.sharded_attention(*a, causal=True, axis="sequence", how="gather"))(*arrays)
        assert out.sharding.spec == P(None, "sequence", None, None)
        assert_close(out, reference(*arrays, causal=True))


def test_without_keys_or_queries_there_is_nothing() -> None:
    q, k, v = operands(4)
    np.testing.assert_array_equal(sr.sharded_attention(q, k[:, :0], v[:, :0], causal=False), jnp.zeros_like(q))
    assert sr.sharded_attention(q[:, :0], k[:, :0], v[:, :0], causal=True).shape == (2, 0, 8, 4)


def test_what_no_way_can_split_is_refused_before_tracing() -> None:
    q, k, v = operands(8, heads=3, kv_heads=3)
    with (
        jax.set_mesh(sr.create_mesh("sequence:2", devices=jax.devices()[:2])),
        pytest.raises(ConfigError, match=r'the kernel "xla" returns no log-sum-exp.*3 cannot over.*pass kernel=None'),
    ):
        sr.sharded_attention(q, k, v, causal=True, axis="sequence", kernel="xla")
    for ids, kinds in (((packed(8), None), "ArrayImpl, NoneType"), ([[0] * 8] * 2, "list, list")):
        with pytest.raises(ConfigError, match=rf"an array or a pair of them, got \({kinds}\); jnp\.asarray"):
            sr.sharded_attention(q, k, v, causal=True, segment_ids=ids)
