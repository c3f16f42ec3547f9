"""The shapes of matmuls, as dots and as the convolutions that TPUs write for them."""

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.compiled.flops import find_matmuls, total_flops
from shardrules.programs.compiled.products import Convolution, Product, dot_product
from shardrules.programs.compiled.program import read_program
from shardrules.programs.compiled.text import read_types
from tests.programs.examples import TARGETS, compiled, mesh_on

EINSUMS = [  # with the shape of the matmul. With more to contract, compilers for GPUs split that dim.
    ("mk,kn->mn", (512, 64), (64, 256), Product(1, 512, 256, 64)),
    ("bmk,bkn->bmn", (4, 256, 64), (4, 64, 512), Product(4, 256, 512, 64)),
    ("bsd,dhe->bshe", (4, 512, 64), (64, 8, 16), Product(1, 2048, 128, 64)),
    ("bqhd,bkhd->bhqk", (2, 256, 4, 64), (2, 512, 4, 64), Product(8, 256, 512, 64)),
    ("bsm,bse->me", (4, 16, 512), (4, 16, 256), Product(1, 512, 256, 64)),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("equation", "left", "right", "product"), EINSUMS)
def test_compiled_matmuls_keep_their_shapes(
    equation: str, left: tuple[int, ...], right: tuple[int, ...], product: Product, target: str
) -> None:
    mesh = mesh_on(target, "data:8")
    whole = jax.NamedSharding(mesh, jax.P())
    x, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in (left, right))
    matmuls = find_matmuls(read_program(compiled(lambda x, y: jnp.einsum(equation, x, y), x, y).as_text()))
    ((actual,),) = [matmul.products for matmul in matmuls]
    assert actual.flops == product.flops == total_flops(matmuls)
    # A compiler may swap the factors.
    assert (actual.batch, sorted((actual.m, actual.n)), actual.k) == (
        product.batch,
        sorted((product.m, product.n)),
        product.k,
    )


def test_dots_of_vectors_are_products_of_one_row() -> None:
    left, right = read_types("(f32[64], f32[64,8])")
    assert dot_product(left, right, [0], [0], []) == Product(1, 1, 8, 64)


def test_an_image_convolution_is_a_matmul_of_patches() -> None:
    image, kernel, result = read_types("(bf16[4,16,16,32], bf16[3,3,32,64], bf16[4,16,16,64])")
    attributes = {"dim_labels": "b01f_01io->b01f", "window": "{size=3x3 pad=1_1x1_1}"}
    convolution = Convolution(attributes, image, kernel, result)
    assert convolution.product() == Product(1, 4 * 16 * 16, 64, 32 * 9)
    # Products with the zeros around the image take time, but they are no work.
    assert 0.9 * convolution.product().flops < convolution.flops() < convolution.product().flops


RAGGED = [  # target, times the FLOPs of each row once: forward, then both gradients
    ("cpu:8", 8, (8, 8)),
    ("cuda:h100:8", 8, (8, 8)),
    ("tpu:v5e:4x2", 1, (1, 8)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "forward", "gradients"), RAGGED)
def test_ragged_matmuls_count_as_they_were_compiled(target: str, forward: int, gradients: tuple[int, int]) -> None:
    """Eight groups: as dense matmuls of all rows each, or in a kernel of its own."""
    mesh = mesh_on(target, "data:8")
    whole = jax.NamedSharding(mesh, jax.P())
    shapes = (((512, 256), jnp.bfloat16), ((8, 256, 128), jnp.bfloat16), ((8,), jnp.int32))
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in shapes]

    def gradient(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda x, w: jax.lax.ragged_dot(x, w, sizes).astype(jnp.float32).sum(), (0, 1))(x, w)

    once = 2 * 512 * 256 * 128
    for fn, times in ((jax.lax.ragged_dot, (forward,)), (gradient, gradients)):
        matmuls = find_matmuls(read_program(compiled(fn, *args).as_text()))
        assert sorted(matmul.total_flops // once for matmul in matmuls) == sorted(times)
