"""Functions of one operation each, on which factors are tested."""

from collections.abc import Callable
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives


@final
@attrs.frozen
class Case:
    """A function that is one operation, and its arguments.

    `converges`: it is a loop that ends when all elements have converged, so devices ask each other in every round.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    converges: bool = False


# Arrays are NumPy's: making JAX's compiles, and modules of tests are imported in each run of tests.
def real(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers between 0.1 and 0.9, no two the same: all functions that are tested here are defined there."""
    size = int(np.prod(shape))
    values = np.random.default_rng(seed).permutation(size).reshape(shape)
    return np.asarray(0.1 + 0.8 * (values + 0.5) / size, np.float32)


def integers(*shape: int, below: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape).astype(np.int32)


def matrices(*batch: int) -> np.ndarray:
    """Symmetric and positive definite."""
    x = real(*batch, 4, 4)
    return x @ np.swapaxes(x, -1, -2) + np.eye(4, dtype=np.float32)


def keys(count: int, impl: str = "threefry2x32") -> jax.Array:
    words = 2 if impl == "threefry2x32" else 4
    data = np.random.default_rng(0).integers(0, 2**32, (count, words), dtype=np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)


def bound(primitive: Any, **params: Any) -> Callable[..., Any]:
    """A primitive as a function, without what `jax.lax` does around it."""
    return lambda *args: primitive.bind(*args, **params)


def mapped(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective over the axis of a `vmap`."""
    return jax.vmap(lambda x: collective(x, "rows"), axis_name="rows", out_axes=None)


def reshard(x: jax.Array) -> jax.Array:
    """As tracing adds it on a mesh of Auto axes."""
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.reshard(x, jax.P(None, None))


X, Y, N = real(8, 16), real(8, 16, seed=1), integers(8, 16)
IMAGE, SMALL = real(4, 8, 8, 6), real(4, 4, 4, 6)
CACHE = real(4, 8, 2, 6)
TABLE, ROWS = real(16, 8), integers(4, 6, 1, below=16)
GROUPS = np.array([2, 2, 3, 1], np.int32)
I0, I3 = np.int32(0), np.int32(3)

HALF = np.float32(0.5)

POINTWISE = (
    Case("add", lax.add, (X, Y)),
    Case("add a scalar", lambda x: lax.add_p.bind(x, HALF), (X,)),
    Case("add a dim of one", lax.add_p.bind, (X, real(1, 16))),
    Case("tanh", lax.tanh, (X,)),
    Case("erf_inv", lax.erf_inv, (X,)),
    Case("digamma", lax.digamma, (X,)),
    Case("zeta", lax.zeta, (X + 1, Y)),
    Case("igamma", lax.igamma, (X, Y), converges=True),
    Case("betainc", lax.betainc, (X, Y, X), converges=True),
    Case("select", lax.select, (X > 0.5, X, Y)),
    Case("select by a scalar", lax.select_n_p.bind, (np.array(True), X, Y)),
    Case("clamp", lambda x: lax.clamp_p.bind(np.float32(0.2), x, HALF), (X,)),
    Case("integer_pow", lambda x: lax.integer_pow(x, 3), (X,)),
    Case("convert", lambda x: lax.convert_element_type(x, jnp.bfloat16), (X,)),
    Case("reduce_precision", lambda x: lax.reduce_precision(x, 8, 7), (X,)),
    Case("complex", lax.complex, (X, Y)),
    Case("population_count", lax.population_count, (N,)),
    Case("barrier", lambda x, y: lax.optimization_barrier((x, y)), (X, real(4, 2))),
    Case("device_put", jax.device_put, (X,)),
    Case("stop_gradient", bound(lax.stop_gradient_p), (X,)),
)

SHAPED = (
    Case("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 6), 0), ()),
    Case("broadcast", lambda x: lax.broadcast_in_dim(x, (4, 8, 6), (1,)), (real(8),)),
    Case("broadcast a dim of one", lambda x: lax.broadcast_in_dim(x, (8, 6), (0, 1)), (real(8, 1),)),
    Case("broadcast a scalar", lambda x: lax.broadcast(x, (8, 6)), (HALF,)),
    Case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (real(4, 6, 8),)),
    Case("reshape: heads", lambda x: lax.reshape(x, (8, 4, 4)), (X,)),
    Case("reshape: one dim", lambda x: lax.reshape(x, (128,)), (X,)),
    Case("reshape: merge the last", lambda x: lax.reshape(x, (4, 48)), (real(4, 6, 8),)),
    Case("reshape: regroup", lambda x: lax.reshape(x, (8, 3)), (real(6, 4),)),
    Case("reshape: regroup more", lambda x: lax.reshape(x, (4, 2, 2, 1, 12)), (real(4, 1, 4, 12),)),
    Case("reshape: ones", lambda x: lax.reshape(x, (1, 8, 1, 16)), (X,)),
    Case("squeeze", lambda x: lax.squeeze(x, (1,)), (real(8, 1, 6),)),
    Case("rev", lambda x: lax.rev(x, (1,)), (X,)),
    Case("reshape: transposed", lambda x: lax.reshape(x, (24, 8), (1, 2, 0)), (real(8, 4, 6),)),
    Case("reshard", reshard, (X,)),
    Case("slice", lambda x: lax.slice(x, (0, 2), (8, 10)), (X,)),
    Case("slice with steps", lambda x: lax.slice(x, (0, 0), (8, 16), (1, 2)), (X,)),
    Case("dynamic_slice", bound(lax.dynamic_slice_p, slice_sizes=(8, 4)), (X, I0, I3)),
    Case("dynamic_slice beyond", bound(lax.dynamic_slice_p, slice_sizes=(8, 4)), (X, I3, I3 * 9)),
    Case("dynamic_update_slice", lax.dynamic_update_slice_p.bind, (X, real(8, 4), I0, I3)),
    Case("dynamic_update_slice of one", lax.dynamic_update_slice_p.bind, (CACHE, real(4, 1, 2, 6), I0, I3, I0, I0)),
    Case("dynamic_update_slice beyond", lax.dynamic_update_slice_p.bind, (CACHE, real(4, 1, 2, 6), I3, I3 * 9, I0, I0)),
    Case("pad", lambda x: lax.pad(x, HALF, ((0, 0, 0), (1, 1, 0))), (X,)),
    Case("concatenate", lambda x, y: lax.concatenate((x, y), 1), (X, Y)),
    Case("split", lambda x: lax.split(x, (4, 12), 1), (X,)),
    Case("stack", bound(lax.stack_p, axis=1), (X, Y)),
    Case("unstack", bound(lax.unstack_p, axis=1), (real(8, 4),)),
    Case("tile", bound(lax.tile_p, reps=(1, 2)), (X,)),
    Case("bitcast", lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
    Case("bitcast to bytes", lambda x: lax.bitcast_convert_type(x, jnp.int8), (X,)),
    Case("bitcast of bytes", lambda x: lax.bitcast_convert_type(x, jnp.float32), (integers(8, 6, 4).astype(np.int8),)),
)

REDUCING = (
    Case("reduce_sum", lambda x: lax.reduce_sum(x, (1,)), (real(4, 6, 8),)),
    Case("reduce_sum of all", lambda x: lax.reduce_sum(x, (0, 1)), (X,)),
    Case("reduce_max", lambda x: lax.reduce_max(x, (0,)), (X,)),
    Case("reduce_min", lambda x: lax.reduce_min(x, (0,)), (X,)),
    Case("reduce_prod", lambda x: lax.reduce_prod(x, (0,)), (X,)),
    Case("psum under vmap", mapped(lax.psum), (X,)),
    Case("pmax under vmap", mapped(lax.pmax), (X,)),
    Case("pmin under vmap", mapped(lax.pmin), (X,)),
    Case("reduce_and", lambda x: lax.reduce_and(x, (0,)), (X > 0.2,)),
    Case("reduce_or", lambda x: lax.reduce_or(x, (0,)), (X > 0.8,)),
    Case("reduce_xor", lambda x: lax.reduce_xor(x, (0,)), (N,)),
    Case("reduce by any function", lambda x: lax.reduce(x, HALF, lambda a, b: a * b + b, (1,)), (X,)),
    Case("argmax", lambda x: lax.argmax(x, 1, jnp.int32), (X,)),
    Case("argmin", lambda x: lax.argmin(x, 0, jnp.int32), (X,)),
    Case("sort", lambda x: lax.sort(x, dimension=1), (X,)),
    Case("sort several", lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (X, Y)),
    Case("cumsum", lambda x: lax.cumsum(x, 1), (X,)),
    Case("cumprod", lambda x: lax.cumprod(x, 0), (X,)),
    Case("cummax", lambda x: lax.cummax(x, 1, reverse=True), (X,)),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), (X,)),
)

SQUARES = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": ((0, 0),) * 4}
DENSE = {"base_dilation": (1,) * 4, "window_dilation": (1,) * 4}


def ragged(contracted: tuple[int, int], rows: int, *groups: int) -> Callable[..., Any]:
    dots = (((contracted[0],), (contracted[1],)), ((), ()))
    numbers = lax.RaggedDotDimensionNumbers(dots, (rows,), groups)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


def conv(space: str, **params: Any) -> Callable[..., Any]:
    names = (f"N{space}C", f"{space}IO", f"N{space}C")
    return lambda x, kernel: lax.conv_general_dilated(
        x, kernel, (1,) * len(space), "SAME", dimension_numbers=names, **params
    )


def channels_first(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (2, 2), "SAME")


def kernel_gradient(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """Of a convolution of separate channels, for its kernel."""
    kernel = jax.ShapeDtypeStruct((3, 1, x.shape[-1]), x.dtype)
    (result,) = jax.linear_transpose(lambda k: conv("W", feature_group_count=x.shape[-1])(x, k), kernel)(gradient)
    return result


LINEAR = (
    Case("dot", jnp.dot, (X, real(16, 4))),
    Case("dot with a vector", jnp.dot, (X, real(16))),
    Case(
        "dot in batches",
        lambda x, y: lax.dot_general(x, y, (((3,), (3,)), ((0, 2), (0, 2)))),
        (real(4, 6, 2, 8), real(4, 10, 2, 8)),
    ),
    Case(
        "dot of two sums",
        lambda x, y: lax.dot_general(x, y, (((1, 2), (0, 1)), ((), ()))),
        (real(8, 4, 2), real(4, 2, 6)),
    ),
    Case("ragged_dot", ragged((1, 1), 0, 0), (X, real(4, 16, 6), GROUPS)),
    Case("ragged_dot, transposed", ragged((1, 2), 0, 0), (X, real(4, 6, 16), GROUPS)),
    Case("ragged_dot, its gradient", ragged((0, 0), 0), (X, real(8, 6), GROUPS)),
    Case("conv", conv("HW"), (IMAGE, real(3, 3, 6, 4))),
    Case("conv of one dim", conv("W"), (real(4, 8, 6), real(3, 6, 4))),
    Case("conv, channels first", channels_first, (real(4, 6, 8, 8), real(8, 6, 3, 3))),
    Case("conv of separate channels", conv("HW", feature_group_count=6), (IMAGE, real(3, 3, 1, 6))),
    Case("conv of groups of channels", conv("W", feature_group_count=2), (real(4, 8, 8), real(3, 4, 6))),
    Case("conv of groups of the batch", conv("W", batch_group_count=4), (real(8, 8, 6), real(3, 6, 8))),
    Case("conv of separate channels, its gradient", kernel_gradient, (real(4, 8, 6), real(4, 8, 6))),
    Case("conv of each channel to two", conv("W", feature_group_count=6), (real(4, 8, 6), real(3, 1, 12))),
    Case("fft", bound(lax.fft_p, fft_type=lax.FftType.FFT, fft_lengths=(8,)), (real(4, 6, 8).astype(np.complex64),)),
    Case(
        "fft of two dims",
        bound(lax.fft_p, fft_type=lax.FftType.RFFT, fft_lengths=(6, 8)),
        (real(4, 6, 8),),
    ),
    Case("top_k", lambda x: lax.top_k(x, 3), (X,)),
    Case("approx_max_k", lambda x: lax.approx_max_k(x, 3), (X,)),
    Case("reduce_window_sum", bound(lax.reduce_window_sum_p, **SQUARES, **DENSE), (IMAGE,)),
    Case("reduce_window_max", bound(lax.reduce_window_max_p, **SQUARES, **DENSE), (IMAGE,)),
    Case(
        "select_and_scatter_add",
        bound(lax.select_and_scatter_add_p, select_prim=lax.ge_p, **SQUARES),
        (SMALL, IMAGE),
    ),
    Case(
        "select_and_gather_add",
        bound(lax.select_and_gather_add_p, select_prim=lax.ge_p, **SQUARES, **DENSE),
        (real(4, 8, 8, 6, seed=3), IMAGE),
    ),
    Case("cholesky", bound(lax.linalg.cholesky_p), (matrices(4, 2),)),
    Case(
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (matrices(4), real(4, 4, 2)),
    ),
    Case("lu", lax.linalg.lu, (matrices(4),)),
    Case("qr", lambda a: lax.linalg.qr(a, full_matrices=False), (matrices(4),)),
    Case(
        "svd",
        bound(lax.linalg.svd_p, full_matrices=False, compute_uv=True, subset_by_index=None, algorithm=None),
        (matrices(4),),
    ),
    Case("householder_product", lax.linalg.householder_product, (matrices(4), real(4, 4))),
    Case(
        "tridiagonal_solve",
        bound(lax.linalg.tridiagonal_solve_p, perturb_singular=False),
        (real(4, 6), real(4, 6) + 3, real(4, 6), real(4, 6, 2)),
    ),
    Case(
        "pivots",
        lambda p: lax.linalg.lu_pivots_to_permutation(p, 4),
        (np.tile(np.arange(4, dtype=np.int32), (4, 1)),),
    ),
)

BITS = bound(primitives.random_bits_p, bit_width=32, shape=(8, 6))
GAMMA = bound(primitives.random_gamma_p, log_space=True)
FOLD_IN = bound(primitives.random_fold_in_p)
SPLIT = bound(primitives.random_split_p, shape=(8,))
COUNTS = np.arange(4, dtype=np.uint32)

RANDOM = (
    Case("random_bits", BITS, (jax.random.key(1),)),
    Case("random_bits of keys", BITS, (keys(4),)),
    Case("random_bits, rbg", BITS, (jax.random.key(1, impl="rbg"),)),
    Case("random_bits of keys, rbg", BITS, (keys(4, "rbg"),)),
    Case("random_split", SPLIT, (jax.random.key(1),)),
    Case("random_split of keys", SPLIT, (keys(4),)),
    Case("random_split of keys, rbg", SPLIT, (keys(4, "rbg"),)),
    Case("random_fold_in", FOLD_IN, (keys(4), COUNTS)),
    Case("random_unwrap", jax.random.key_data, (keys(4),)),
    Case("random_wrap", jax.random.wrap_key_data, (np.arange(8, dtype=np.uint32).reshape(4, 2),)),
    Case("random_gamma", GAMMA, (keys(8), real(8)), converges=True),
    Case("random_gamma of one key", GAMMA, (jax.random.key(1), real(8)), converges=True),
    Case("random_gamma of rows", GAMMA, (keys(4), real(4, 8)), converges=True),
    Case(
        "threefry2x32",
        bound(primitives.threefry2x32_p),
        tuple(N.astype(np.uint32) + np.uint32(offset) for offset in range(4)),
    ),
)


def gather(
    offset: tuple[int, ...],
    collapsed: tuple[int, ...],
    index: tuple[int, ...],
    sizes: tuple[int, ...],
    *,
    batched: bool = False,
    mode: str = "fill",
) -> Callable[..., Any]:
    """`batched`: whether the first dim of all arrays is a batch."""
    numbers = lax.GatherDimensionNumbers(offset, collapsed, index, *([(0,)] * 2 if batched else []))
    return lambda x, indices: lax.gather(x, indices, numbers, sizes, mode=mode)


def scatter(
    fn: Callable[..., Any],
    window: tuple[int, ...],
    inserted: tuple[int, ...],
    index: tuple[int, ...],
    *,
    batched: bool = False,
    mode: str = "drop",
) -> Callable[..., Any]:
    """`batched`: whether the first dim of all arrays is a batch."""
    numbers = lax.ScatterDimensionNumbers(window, inserted, index, *([(0,)] * 2 if batched else []))
    return lambda x, indices, updates: fn(x, indices, updates, numbers, mode=mode)


MODES = ("fill", "clip", "promise_in_bounds")
SCATTERS = (lax.scatter_add, lax.scatter_sub, lax.scatter_mul, lax.scatter_min, lax.scatter_max, lax.scatter)
PLACES = np.concatenate([integers(4, 1), np.zeros((4, 2), np.int32)], 1)
"""The positions that a dynamic slice under `vmap` reads. It takes all of the last two dims, with indices."""

INDEXED = (
    *(Case(f"gather rows, {mode}", gather((2,), (0,), (0,), (1, 8), mode=mode), (TABLE, ROWS)) for mode in MODES),
    Case("gather rows beyond", gather((2,), (0,), (0,), (1, 8)), (TABLE, ROWS * 2)),
    Case("gather columns", gather((0,), (1,), (1,), (16, 1)), (TABLE, integers(6, 1))),
    Case("gather elements", gather((), (0, 1), (0, 1), (1, 1)), (TABLE, integers(4, 6, 2))),
    Case("gather a window", gather((0, 1), (), (0,), (3, 8)), (TABLE, integers(1))),
    Case("gather windows", gather((1, 2), (), (0,), (4, 8)), (TABLE, integers(6, 1))),
    Case("gather windows of one", gather((1, 2), (), (0,), (1, 8)), (TABLE, integers(6, 1))),
    Case("gather in batches", gather((2,), (1,), (1,), (1, 1, 6), batched=True), (real(4, 8, 6), integers(4, 10, 1))),
    Case("gather along an axis", gather((), (1,), (1,), (1, 1), batched=True), (X, integers(8, 6, 1, below=16))),
    *(
        Case(
            f"dynamic_slice in batches, {name}",
            gather((1, 2, 3), (), (1, 2, 3), (1, 1, 2, 6), batched=True, mode=mode),
            (CACHE, places),
        )
        for name, mode, places in (
            ("clip", "clip", PLACES),
            ("clip beyond", "clip", PLACES + 1),
            ("fill beyond", "fill", PLACES + 1),
        )
    ),
    *(Case(f"{fn.__name__} rows", scatter(fn, (2,), (0,), (0,)), (TABLE, ROWS, real(4, 6, 8))) for fn in SCATTERS),
    *(
        Case(f"{fn.__name__} elements", scatter(fn, (), (0, 1), (0, 1)), (TABLE, integers(6, 2), real(6)))
        for fn in SCATTERS
    ),
    *(
        Case(
            f"{fn.__name__} in batches",
            scatter(fn, (2,), (1,), (1,), batched=True),
            (real(4, 8, 6), integers(4, 10, 1), real(4, 10, 6)),
        )
        for fn in SCATTERS
    ),
    *(
        Case(
            f"scatter_add rows, {mode}",
            scatter(lax.scatter_add, (2,), (0,), (0,), mode=mode),
            (TABLE, ROWS, real(4, 6, 8)),
        )
        for mode in MODES[1:]
    ),
    Case("scatter_add rows beyond", scatter(lax.scatter_add, (2,), (0,), (0,)), (TABLE, ROWS * 2, real(4, 6, 8))),
    Case("scatter_add columns", scatter(lax.scatter_add, (0,), (1,), (1,)), (TABLE, integers(6, 1), real(16, 6))),
    Case("scatter a window", scatter(lax.scatter, (0, 1), (), (0,)), (TABLE, integers(1), real(3, 8))),
    Case("scatter_add windows", scatter(lax.scatter_add, (1, 2), (), (0,)), (TABLE, integers(6, 1), real(6, 3, 8))),
    Case(
        "scatter_add windows of one", scatter(lax.scatter_add, (1, 2), (), (0,)), (TABLE, integers(6, 1), real(6, 1, 8))
    ),
    *(
        Case(
            f"dynamic_update_slice in batches, {name}",
            scatter(lax.scatter, (1, 2, 3), (), (1, 2, 3), batched=True, mode=mode),
            (CACHE, places, real(4, 1, 2, 6)),
        )
        for name, mode, places in (
            ("clip", "clip", PLACES),
            ("clip beyond", "clip", PLACES + 1),
            ("drop beyond", "drop", PLACES + 1),
        )
    ),
)

UNSPLIT = (
    Case("random_fold_in, rbg", FOLD_IN, (keys(4, "unsafe_rbg"), COUNTS)),
    Case("rng_bit_generator", lambda key: lax.rng_bit_generator(key, (8, 6)), (COUNTS,)),
)
"""XLA gathers the operands of these, however they are split."""

CASES = (*POINTWISE, *SHAPED, *REDUCING, *LINEAR, *RANDOM, *INDEXED)
"""All other operations."""
