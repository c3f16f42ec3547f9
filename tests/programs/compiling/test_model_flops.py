"""The FLOPs of a function against counts by hand and by brute force, before any compiler has seen it."""

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.programs.compiling.model_flops import equation_flops, model_flops, model_matmuls
from shardrules.programs.jaxprs.walk import without_dead_code

BATCH, WIDTH, HIDDEN = 4, 8, 16
PRODUCT = 2 * BATCH * WIDTH * HIDDEN
"""FLOPs of one product of a batch and a matrix."""

X, W, BACK = jnp.ones((BATCH, WIDTH)), jnp.ones((WIDTH, HIDDEN)), jnp.ones((HIDDEN, WIDTH))
SQUARE = jnp.ones((WIDTH, WIDTH))
TURN = 2 * BATCH * WIDTH * WIDTH


def flops(fn: Callable[..., Any], *args: Any) -> int:
    return model_flops(jax.make_jaxpr(fn)(*args))


EINSUMS = (
    ("bd,dh->bh", (4, 8), (8, 16)),
    ("bd,bd->b", (4, 8), (4, 8)),
    ("bqhd,bkhd->bhqk", (2, 3, 5, 7), (2, 4, 5, 7)),
    ("d,d->", (8,), (8,)),
    ("abc,bcd->ad", (2, 3, 4), (3, 4, 5)),
    ("ab,cd->abcd", (2, 3), (4, 5)),
    ("gbd,gdh->gbh", (3, 4, 8), (3, 8, 2)),
    ("ab,b->a", (3, 0), (0,)),
)


@pytest.mark.parametrize(("text", "left", "right"), EINSUMS)
def test_two_for_each_product_that_is_summed(text: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Brute force: every combination of the values of all letters is one product and one sum."""
    letters = dict(zip(text.split("->")[0].replace(",", ""), (*left, *right), strict=True))
    products = sum(1 for _ in itertools.product(*map(range, letters.values())))
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (left, right))
    assert flops(lambda a, b: jnp.einsum(text, a, b), a, b) == 2 * products


def brute_force(image: int, kernel: int, out: int, stride: int, hole: int, channels: tuple[int, int, int]) -> int:
    """One dimension of a convolution without padding, position by position."""
    batch, inputs, outputs = channels
    touched = [(position * stride + element * hole, element) for position in range(out) for element in range(kernel)]
    assert all(0 <= index < image for index, _ in touched)
    return 2 * len(touched) * batch * inputs * outputs


@pytest.mark.parametrize(("stride", "hole"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_convolutions_without_padding(stride: int, hole: int) -> None:
    image, kernel = jnp.ones((2, 3, 17)), jnp.ones((5, 3, 4))

    def fn(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (stride,), "VALID", rhs_dilation=(hole,))

    out = jax.eval_shape(fn, image, kernel).shape[-1]
    assert flops(fn, image, kernel) == brute_force(17, 4, out, stride, hole, (2, 3, 5))


def test_grouped_convolutions_multiply_within_groups() -> None:
    image, kernel = jnp.ones((2, 6, 10)), jnp.ones((4, 3, 3))

    def grouped(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=2)

    assert flops(grouped, image, kernel) == brute_force(10, 3, 8, 1, 1, (2, 3, 4))

    def many(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (1,), "VALID", batch_group_count=2)

    assert flops(many, image, jnp.ones((4, 6, 3))) == brute_force(10, 3, 8, 1, 1, (1, 6, 4))


def test_convolution_layouts_have_equal_flops() -> None:
    nchw = flops(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME"), jnp.ones((2, 3, 9, 7)), jnp.ones((5, 3, 3, 3))
    )
    nhwc = flops(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        jnp.ones((2, 9, 7, 3)),
        jnp.ones((3, 3, 3, 5)),
    )
    assert nchw == nhwc == 2 * 2 * 9 * 7 * 5 * 3 * 9  # products with the padding are counted


def test_a_kernels_gradient_costs_as_much_as_the_convolution() -> None:
    image, kernel = jnp.ones((2, 3, 16)), jnp.ones((5, 3, 4))

    def forward(k: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, k, (2,), "VALID")

    forward_flops = flops(forward, kernel, image)
    assert forward_flops == brute_force(16, 4, 7, 2, 1, (2, 3, 5))
    assert flops(lambda k, x: jax.vjp(lambda k: forward(k, x), k)[1](forward(k, x)), kernel, image) == 3 * forward_flops


def test_zeros_of_a_dilated_image_are_not_multiplied() -> None:
    """A transposed convolution: 4 inputs become 7 with zeros between, and a kernel of 4 meets two of them."""
    image, kernel = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 4))

    def spread(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (1,), [(0, 0)], lhs_dilation=(2,))

    filled = [index % 2 == 0 for index in range(7)]
    met = sum(filled[start + element] for start in range(4) for element in range(4))
    assert flops(spread, image, kernel) == 2 * met


def test_gradients() -> None:
    """A product in `dense` has two in its gradient, but the gradient of the input is not computed."""

    def dense(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w))

    assert flops(dense, W, X) == PRODUCT
    assert flops(jax.grad(dense), W, X) == 2 * PRODUCT
    assert flops(jax.grad(dense, argnums=(0, 1)), W, X) == 3 * PRODUCT
    assert flops(lambda w, x: jax.jvp(lambda w: dense(w, x), (w,), (w,)), W, X) == 2 * PRODUCT
    assert flops(lambda w, x: jax.linearize(lambda w: dense(w, x), w)[1](w), W, X) == 2 * PRODUCT


def test_recomputed_products_count_again() -> None:
    def two(w: Any, v: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ v)

    plain = flops(jax.grad(lambda *args: two(*args).sum(), argnums=(0, 1)), W, BACK, X)
    again = flops(jax.grad(lambda *args: jax.checkpoint(two)(*args).sum(), argnums=(0, 1)), W, BACK, X)
    assert plain == 5 * PRODUCT  # two forward, three back: the gradient of x is not computed
    assert again in (6 * PRODUCT, 7 * PRODUCT)  # the last product need not be recomputed


def test_jit_inside_jit_and_custom_rules() -> None:
    @jax.custom_vjp
    def cube(x: Any) -> Any:
        return x @ SQUARE

    cube.defvjp(lambda x: (cube(x), None), lambda _, g: (g @ SQUARE.T,))
    assert flops(jax.jit(jax.jit(lambda x: cube(x) @ SQUARE)), X) == 2 * TURN
    assert flops(jax.grad(lambda x: cube(x).sum()), X) == 2 * TURN
    assert flops(eqx.filter_jit(lambda x: jax.nn.relu(x @ SQUARE)), X) == TURN


def test_loops() -> None:
    def scanned(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ SQUARE), None), x, None, length=12)[0]

    assert flops(scanned, X) == 12 * TURN

    def nested(x: Any) -> Any:
        return lax.fori_loop(0, 5, lambda _, c: scanned(c), x)

    assert flops(nested, X) == 60 * TURN
    assert flops(jax.grad(lambda x: nested(x).sum()), X) == 120 * TURN
    assert flops(jax.vmap(scanned), jnp.ones((3, BATCH, WIDTH))) == 36 * TURN
    assert flops(lambda x: lax.map(lambda row: row @ SQUARE, x), X) == TURN


def test_an_unknown_loop_counts_once_with_its_condition() -> None:
    def loop(x: Any) -> Any:
        return lax.while_loop(lambda c: jnp.sum(c @ SQUARE) < 9, lambda c: c @ SQUARE @ SQUARE, x)

    assert flops(loop, X) == 3 * TURN


def test_all_branches_count() -> None:
    def both(p: Any, x: Any) -> Any:
        return lax.cond(p, lambda: x @ SQUARE, lambda: jnp.tanh(x @ SQUARE @ SQUARE))

    assert flops(both, True, X) == 3 * TURN

    def many(i: Any, x: Any) -> Any:
        return lax.switch(i, [lambda: x @ SQUARE, lambda: x, lambda: x @ SQUARE @ SQUARE @ SQUARE])

    assert flops(many, 1, X) == 4 * TURN


def test_an_equation_of_each_product() -> None:
    """A scan counts its products as often as it goes round, one of a step counts once."""
    program = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (c @ SQUARE, None), x @ SQUARE, None, length=7)[0])(X)
    assert [(matmul.equation.primitive.name, matmul.flops) for matmul in model_matmuls(program)] == [
        ("dot_general", TURN),
        ("dot_general", 7 * TURN),
    ]
    assert model_flops(program.jaxpr) == model_flops(program) == 8 * TURN


@pytest.mark.parametrize(("manual", "work"), [(("data", "model"), 8), (("model",), 2), (("data",), 4)])
def test_the_program_of_a_shard_is_run_by_every_device(manual: tuple[str, ...], work: int) -> None:
    """A manual axis is split by hand: a program of half the columns is run twice. The others stay whole."""
    mesh = sr.create_mesh("data:4,model:2")
    mapped = jax.shard_map(
        lambda x, w: lax.psum(x @ w, manual),
        mesh=mesh,
        in_specs=(P(None, manual), P(manual)),
        out_specs=P(),
        axis_names=set(manual),
    )
    with jax.set_mesh(mesh):
        assert flops(jax.jit(mapped), X, W) == work * (PRODUCT // work) == PRODUCT
        doubled = jax.shard_map(lambda x, w: x @ w, in_specs=(P(), P()), out_specs=P(), axis_names=set(manual))
        assert flops(jax.jit(doubled), X, W) == work * PRODUCT


def test_flops_of_one_equation() -> None:
    (dot,) = jax.make_jaxpr(jnp.matmul)(jnp.ones((4, 8)), jnp.ones((8, 16))).eqns
    assert equation_flops(dot) == 2 * 4 * 8 * 16
    (tanh,) = jax.make_jaxpr(jnp.tanh)(jnp.ones(4)).eqns
    assert equation_flops(tanh) == 0


def test_a_model_of_many_layers() -> None:
    """Per example and layer: forward, gradient of the weight, gradient of the input, but for the first layer's."""
    mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 2, key=jax.random.key(0))
    sizes = [(WIDTH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, WIDTH)]
    forward = sum(2 * BATCH * a * b for a, b in sizes)
    arrays, static = eqx.partition(mlp, eqx.is_array)

    def loss(arrays: Any, x: Any) -> Any:
        return jax.vmap(eqx.combine(arrays, static))(x).sum()

    assert flops(loss, arrays, X) == forward
    assert flops(jax.grad(loss), arrays, X) == 3 * forward - 2 * BATCH * WIDTH * HIDDEN


def test_rows_in_groups() -> None:
    """Every row is multiplied with the matrix of its own group alone, and so it is in both gradients."""

    def grouped(w: Any, x: Any, sizes: Any) -> Any:
        return jnp.sum(jnp.tanh(lax.ragged_dot(x, w, sizes)))

    weights = jax.ShapeDtypeStruct((3, WIDTH, HIDDEN), jnp.float32)
    sizes = np.array([1, 2, 1], np.int32)
    assert flops(grouped, weights, X, sizes) == PRODUCT
    assert flops(jax.grad(grouped, argnums=(0, 1)), weights, X, sizes) == 3 * PRODUCT


def test_dead_code_is_left_out() -> None:
    """Not in a loop either, nor in a function inside."""

    def loses(x: Any) -> Any:
        lost = x @ SQUARE @ SQUARE
        kept, _ = lax.scan(lambda c, _: (jnp.tanh(c @ SQUARE), c @ SQUARE), x, None, length=3)
        return jax.jit(lambda a, b: (a @ SQUARE, b @ SQUARE))(kept, lost)[0]

    program = jax.make_jaxpr(loses)(X)
    assert model_flops(program) == (2 + 2 * 3 + 2) * TURN
    assert model_flops(without_dead_code(program)) == (3 + 1) * TURN
    whole = jax.make_jaxpr(lambda x: jnp.tanh(x @ SQUARE))(X)
    assert model_flops(without_dead_code(whole)) == TURN


def test_uncertain_flops_are_marked() -> None:
    def step(x: Any) -> Any:
        x = lax.while_loop(lambda x: x.sum() < 9, lambda x: lax.map(lambda row: row @ SQUARE, x), x @ SQUARE)
        return lax.ragged_dot(x, jnp.ones((2, WIDTH, WIDTH)), jnp.array([1, 3])) @ SQUARE

    matmuls = list(model_matmuls(jax.make_jaxpr(step)(X)))
    assert [(matmul.flops, matmul.is_certain) for matmul in matmuls] == [
        (TURN, True),
        (TURN, False),
        (TURN, False),
        (TURN, True),
    ]


def test_elementwise_operations_have_no_flops() -> None:
    assert flops(lambda x: jnp.sort(jnp.tanh(x) * x + x.sum()), X) == 0
