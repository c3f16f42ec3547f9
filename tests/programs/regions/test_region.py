"""Regions compute what their functions compute, under every transformation and on every mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.errors import ConfigError, ConfigTypeError, SpecError
from shardrules.programs.regions.region import RegionFunction

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("bhsd,bhtd->bhst", q, k))
    return jnp.einsum("bhst,bhtd->bhsd", scores, v)


def normalise(x: Any, weight: Any) -> Any:
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True)) * weight


SHARDED_ATTENTION = sr.region("b h s d, b h t d, b h t d -> b h s d", split="b h")(attention)
SHARDED_NORM = sr.region("r d, d -> r d", split="r")(normalise)
SHARDED_MATMUL = sr.region("m k, k n -> m n", split="m k n")(jnp.matmul)


def real(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def mesh_of(axis_type: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def place(mesh: Mesh, array: jax.Array, spec: P) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, spec))


def heads() -> list[jax.Array]:
    return [real(8, 4, 6, 4, seed=seed) for seed in range(3)]


def sent(compiled: Any) -> list[str]:
    return [name for name in COLLECTIVES if f"{name}(" in compiled.as_text()]


def close(actual: Any, expected: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), actual, expected)


def gradients(fn: Callable[..., Any], count: int) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: (fn(*arrays) ** 2).sum(), argnums=tuple(range(count)))


def test_the_partitioner_gathers_nothing() -> None:
    mesh, arrays = mesh_of(AxisType.Auto), heads()
    placed = [place(mesh, array, P("data", "model")) for array in arrays]
    compiled = jax.jit(lambda *qkv: (SHARDED_ATTENTION(*qkv), gradients(SHARDED_ATTENTION, 3)(*qkv))).lower(*placed)
    compiled = compiled.compile()
    assert sent(compiled) == []
    close(compiled(*placed), (attention(*arrays), gradients(attention, 3)(*arrays)))


def test_letters_that_may_not_be_split_are_gathered() -> None:
    mesh, arrays = mesh_of(AxisType.Auto), heads()
    placed = [place(mesh, array, P(None, None, "model")) for array in arrays]
    compiled = jax.jit(SHARDED_ATTENTION).lower(*placed).compile()
    assert sent(compiled) == ["all-gather"]
    close(compiled(*placed), attention(*arrays))


def test_sums_over_split_letters_are_completed() -> None:
    mesh, a, b = mesh_of(AxisType.Auto), real(8, 16), real(16, 4, seed=1)
    placed = place(mesh, a, P("data", "model")), place(mesh, b, P("model"))
    compiled = jax.jit(SHARDED_MATMUL).lower(*placed).compile()
    assert sent(compiled) == ["all-reduce"]
    assert compiled.output_shardings.spec == P("data")
    close(compiled(*placed), a @ b)


def test_gradients_of_what_is_whole_are_summed() -> None:
    mesh, x, weight = mesh_of(AxisType.Auto), real(16, 4), real(4, seed=1)
    placed = place(mesh, x, P(("data", "model"))), place(mesh, weight, P())
    compiled = jax.jit(gradients(SHARDED_NORM, 2)).lower(*placed).compile()
    assert sent(compiled) == ["all-reduce"]
    close(compiled(*placed), gradients(normalise, 2)(x, weight))


@pytest.mark.sample(3)
@pytest.mark.parametrize("transform", ["vmap", "scan", "numpy", "checkpoint", "eager"])
def test_transformations(transform: str) -> None:
    x, weight = real(4, 8, 6), real(6, seed=1)

    def apply(norm: Callable[..., Any]) -> Callable[..., Any]:
        if transform == "vmap":
            return jax.vmap(norm, (0, None))
        if transform == "scan":
            return lambda x, weight: lax.scan(lambda carry, row: (carry + norm(row, weight).sum(), row * 2), 0.0, x)[0]
        if transform == "checkpoint":
            return lambda x, weight: jax.checkpoint(norm)(x[0], weight)
        return lambda x, weight: norm(np.asarray(x[1]) if transform == "numpy" else x[1], weight)

    def both(norm: Callable[..., Any]) -> Any:
        return apply(norm)(x, weight), None if transform == "numpy" else gradients(apply(norm), 2)(x, weight)

    close(both(SHARDED_NORM), both(normalise))


def test_examples_of_vmap_may_be_split() -> None:
    mesh, x, weight = mesh_of(AxisType.Auto), real(8, 3, 6), real(6, seed=1)
    placed = place(mesh, x, P("data"))
    compiled = jax.jit(jax.vmap(SHARDED_NORM, (0, None))).lower(placed, weight).compile()
    assert sent(compiled) == []
    assert compiled.output_shardings.spec == P("data")


def test_explicit_meshes_run_shards() -> None:
    mesh, arrays = mesh_of(AxisType.Explicit), heads()
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, P("data", "model")) for array in arrays]
        compiled = jax.jit(lambda *qkv: (SHARDED_ATTENTION(*qkv), gradients(SHARDED_ATTENTION, 3)(*qkv)))
        result, grads = compiled(*placed)
    assert result.sharding.spec == grads[0].sharding.spec == P("data", "model", None, None)
    close((result, grads), (attention(*arrays), gradients(attention, 3)(*arrays)))


def test_examples_of_vmap_are_split_on_explicit_meshes() -> None:
    mesh, x, weight = mesh_of(AxisType.Explicit), real(8, 16, 4), real(4, seed=1)
    mapped, placed = jax.vmap(SHARDED_NORM, (0, None)), place(mesh, x, P("data", "model"))
    with jax.set_mesh(mesh):
        compiled = jax.jit(mapped).lower(placed, weight).compile()
        grads = jax.jit(gradients(mapped, 2))(placed, weight)
    assert sent(compiled) == []
    close((compiled(placed, weight), grads), (normalise(x, weight), gradients(normalise, 2)(x, weight)))


def test_types_say_how_operands_are_split_without_set_mesh() -> None:
    mesh, x, weight = mesh_of(AxisType.Explicit), real(16, 4), place(mesh_of(AxisType.Explicit), real(4), P())
    assert jax.jit(SHARDED_NORM)(place(mesh, x, P("data")), weight).sharding.spec == P("data", None)
    with pytest.raises(SpecError, match=r"split as P\('data', 'model'\); reshard it"):
        jax.jit(SHARDED_NORM)(place(mesh, x, P("data", "model")), weight)


def test_what_is_whole_is_sliced_on_explicit_meshes() -> None:
    scaled = sr.region("r d, r -> r d", split="r")(lambda x, y: x * y[:, None])
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        assert scaled(jax.device_put(real(16, 4), P("data")), jnp.ones(16)).sharding.spec == P("data", None)


def test_meshes_of_several_types_are_refused() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match="axes of several types"):
        SHARDED_NORM(jax.device_put(real(16, 4), P("data")), real(4))
    mesh = mesh_of(AxisType.Auto)
    part = jax.shard_map(
        SHARDED_NORM, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match=r"inside a jax\.shard_map over some axes"):
        jax.jit(part)(real(16, 4), real(4))


def test_what_partitioners_cannot_split_is_refused() -> None:
    mesh = mesh_of(AxisType.Auto)

    def called(x: Any) -> Any:
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def printed(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    def drawn(x: Any, key: Any) -> Any:
        return x * jax.random.normal(key)

    x = place(mesh, real(8), P("data"))
    with pytest.raises(ConfigError, match="calls back to Python"):
        jax.jit(sr.region("r -> r", split="r")(called))(x)
    with pytest.raises(ConfigError, match="has effects"):
        jax.jit(sr.region("r -> r", split="r")(printed))(x)
    with pytest.raises(ConfigError, match="cannot split typed keys"):
        jax.jit(sr.region("r, -> r", split="r")(drawn))(x, jax.random.key(0))


def test_splits_over_part_of_an_axis_are_refused() -> None:
    region = sr.region("a b -> a b", split="a b")(jnp.sin)
    x = place(sr.create_mesh("data:8"), real(64, 8), P("data"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"shape \(4, 128\) is split over part of a mesh axis"):
        jax.jit(lambda x: region(x.reshape(4, 128)))(x)


def test_truth_cannot_be_added_up() -> None:
    with pytest.raises(ConfigError, match="result 0 is a sum over 'r', and bool cannot be added up"):
        sr.region("r ->", split="r")(jnp.any)(jnp.ones(8, bool))


def test_weak_types_stay_weak() -> None:
    double = sr.region("->", split="")(lambda x: x * 2)
    assert (double(2.0) * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_explicit_meshes_refuse_splits_of_whole_letters() -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)), pytest.raises(SpecError, match="region attention") as caught:
        SHARDED_ATTENTION(*(jax.device_put(array, P(None, None, "model")) for array in heads()))
    message = str(caught.value)
    assert all(f"operand {index} of shape (8, 4, 6, 4)" in message for index in range(3))
    assert "jax.reshard(x, P(None, None, None, None))" in message


def test_in_shard_map_it_runs_on_the_shard() -> None:
    mesh, x, weight = mesh_of(AxisType.Auto), real(16, 4), real(4, seed=1)

    def on_shard(x: Any, weight: Any) -> Any:
        return SHARDED_NORM(x, weight)

    mapped = jax.shard_map(on_shard, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    close(gradients(jax.jit(mapped), 2)(x, weight), gradients(normalise, 2)(x, weight))


def test_keyword_arguments_are_static() -> None:
    @sr.region("r -> r", split="r")
    def scale(x: Any, *, by: float) -> Any:
        return x * by

    close(jax.jit(lambda x: scale(x, by=2.0) + scale(x, by=3.0))(jnp.ones(4)), jnp.full(4, 5.0))
    assert [scale(jnp.arange(4), by=by).dtype for by in (2, 2.0)] == [jnp.int32, jnp.float32]
    with pytest.raises(ConfigTypeError, match="static and must be hashable"):
        scale(jnp.ones(4), by=jnp.ones(()))


@pytest.mark.parametrize(("rule", "result"), [("r -> r, r", jnp.ones), ("r -> r", lambda x: [x])])
def test_functions_return_as_many_arrays_as_declared(rule: str, result: Any) -> None:
    region = sr.region(rule, split="r")(lambda x: result(x.shape) if result is jnp.ones else result(x))
    with pytest.raises(ConfigError, match=r"must return (one array|a tuple of 2 arrays)"):
        region(jnp.ones(4))


def test_traced_arrays_have_to_be_arguments() -> None:
    def outer(x: Any, weight: Any) -> Any:
        return sr.region("r d -> r d", split="r")(lambda x: x * weight)(x)

    with pytest.raises(ConfigError, match="uses arrays that are traced outside of it; pass them as arguments"):
        jax.jit(outer)(jnp.ones((4, 2)), jnp.ones(2))


def test_constants_of_a_region_are_on_all_devices() -> None:
    table = np.arange(6.0, dtype=np.float32)
    shifted = sr.region("r d -> r d", split="r")(lambda x: x + table)
    x = place(mesh_of(AxisType.Auto), real(8, 6), P("data"))
    close(jax.jit(gradients(shifted, 1))(x), (2 * (np.asarray(x) + table),))


def test_wrong_uses_of_the_decorator() -> None:
    with pytest.raises(ConfigTypeError, match="decorates a function, got 3"):
        sr.region("r -> r", split="r")(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigTypeError, match="cost must be a function"):
        sr.region("r -> r", split="r", cost=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigTypeError, match=r"Layer\.run is a method: call a region from it"):

        class Layer:  # pyright: ignore[reportUnusedClass]
            @sr.region("r -> r", split="r")
            def run(self, x: Any) -> Any:
                return x


def test_operands_that_are_no_arrays_are_refused() -> None:
    with pytest.raises(
        ConfigTypeError, match=r"operand 1 must be an array, got \{'scale'.*leaves of a tree one by one"
    ):
        SHARDED_NORM(real(4, 2), {"scale": real(2)})


def test_shards_of_other_shapes_are_refused_where_they_run() -> None:
    padded = sr.region("r d -> r d", split="r")(lambda x: jnp.resize(x, (8, 6)))
    line = r"on shards of shapes \(2, 6\) result 0 is float32\[8, 6\], and float32\[2, 6\] is declared"
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match=line):
        jax.jit(padded)(place(mesh, real(8, 6), P("data")))
    with pytest.raises(ConfigError, match="result 0 is float32"):
        sr.autoplan(padded, real(8, 6), mesh=sr.mesh_shape("data:4"))


def test_a_region_keeps_name_and_docstring() -> None:
    assert isinstance(SHARDED_NORM, RegionFunction)
    assert SHARDED_NORM.__wrapped__ is normalise
