"""Layers that a loop of Python calls, as one loop: the same values and gradients, or no loop at all."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from shardrules import Hardware
from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.training.keep.apply import with_kept
from shardrules.programs.training.keep.choices import keep_choices
from shardrules.programs.training.stages import rolled as rolled_module
from shardrules.programs.training.stages.rolled import rolled

LAYERS, EXAMPLES, WIDTH = 5, 4, 8


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape) / 3, jnp.float32)


WEIGHTS = [numbers(WIDTH, WIDTH, seed=seed) for seed in range(LAYERS)]
X = numbers(EXAMPLES, WIDTH)


def plain(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def sliced(stacked: Any, x: Any) -> Any:
    """Weights are stacked, and each layer has a constant of its own."""
    for index in range(LAYERS):
        x = x + jax.nn.silu(x @ stacked[index]) * (index + 1)
    return x


def dropped(weights: Any, x: Any, key: Any) -> Any:
    """Each layer draws what it drops, and all of them return something besides."""
    extra = []
    for index, w in enumerate(weights):
        y = jax.nn.relu(x @ w)
        x = x + y * jr.bernoulli(jr.fold_in(key, index), 0.5, y.shape)
        extra.append(jnp.mean(y))
    return x, sum(extra)


def fed_by_the_input(weights: Any, x: Any) -> Any:
    first, states = x, []
    for w in weights:
        x = x + first + jnp.tanh(x @ w)
        states.append(x)
    return x, states[1], states[-1]


def tied(weights: Any, x: Any) -> Any:
    """All layers have the same weights."""
    for _ in weights:
        x = jnp.tanh(x @ weights[0])
    return x


def with_windows(weights: Any, x: Any) -> Any:
    """Each layer has a mask of its own, which is made from a constant."""
    for index, w in enumerate(weights):
        rows = jnp.arange(EXAMPLES)
        x = jnp.tanh(jnp.where(rows[:, None] - rows < index + 1, 1.0, 0.5) @ x @ w)
    return x


def checkpointed(weights: Any, x: Any) -> Any:
    for w in weights:
        policy = jax.checkpoint_policies.save_only_these_names("none")
        x = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w), policy=policy)(x, w)
    return x


def with_rule(scale: float = 2.0) -> Callable[..., Any]:
    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (scale * g @ kept[1].T, kept[0].T @ g))
    return product


def of_rules(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(with_rule()(x, w))
    return x


def by_pairs(weights: Any, x: Any) -> Any:
    for index, w in enumerate(weights[:4]):
        x = jnp.tanh(x @ w) if index % 2 else x + jnp.sin(x @ w)
    return x


def of_other_rules(weights: Any, x: Any) -> Any:
    for index, w in enumerate(weights):
        x = jnp.tanh(with_rule(index + 1.0)(x, w))
    return x


def of_other_constants(weights: Any, x: Any) -> Any:
    for index, w in enumerate(weights):
        x = jax.checkpoint(lambda x, w, scale=index + 1.0: x * scale + jnp.tanh(x @ w))(x, w)
    return x


def over_two_layers(weights: Any, x: Any) -> Any:
    before = x
    for w in weights:
        x, before = jnp.tanh(x @ w) + before, x
    return x


def printed(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
        jax.debug.print("{}", x[0, 0])
    return x


def all_different(weights: Any, x: Any) -> Any:
    for w, function in zip(weights, (jnp.tanh, jnp.sin, jnp.cos, jnp.exp, jnp.abs), strict=True):
        x = function(x @ w)
    return x


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key: Any) -> None:
        keys = jr.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, dropout_p=0.1, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=keys[1])
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: Any, key: Any) -> Any:
        y = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(y, y, y, mask=mask, key=key)
        return x + jax.vmap(self.mlp)(x)


ARRAYS, STATIC = eqx.partition([Block(key) for key in jr.split(jr.key(0), LAYERS)], eqx.is_array)


def blocks(arrays: Any, x: Any, key: Any) -> Any:
    for block, own_key in zip(eqx.combine(arrays, STATIC), jr.split(key, LAYERS), strict=True):
        x = block(x, own_key)
    return x


def adding_up(weights: Any, x: Any) -> Any:
    """Results of layers besides are added up, from a constant on."""
    total = 0.0
    for w in weights:
        x = x + jnp.tanh(x @ w)
        total = total + jnp.mean(x**2)
    return x, total


def narrowed(pairs: Any, x: Any) -> Any:
    """Fewer bytes go from one half of a layer to the other than from layer to layer."""
    for up, down in pairs:
        x = jnp.tanh(x @ up) @ down
    return x


PAIRS = [(numbers(WIDTH, 4, seed=seed), numbers(4, WIDTH, seed=seed)) for seed in range(LAYERS)]


def with_a_table(weights: Any, x: Any) -> Any:
    """The rule of a derivative closes over an array."""
    table = np.arange(1.0, WIDTH + 1, dtype=np.float32)

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return x * table

    scaled.defvjp(lambda x: (x * table, ()), lambda kept, g: (g * table,))
    for w in weights:
        x = scaled(jnp.tanh(x @ w)) / WIDTH
    return x


def before_others(weights: Any, x: Any) -> Any:
    """A run of more FLOPs is no loop: each of its layers reads two before it."""
    for w in weights:
        x = x + jnp.sin(x @ w)
    y = before = jnp.concatenate([x, x], -1)
    for w in weights:
        wide = jnp.kron(jnp.eye(2), w)
        y, before = jnp.tanh(y @ wide) + before, y
    return y


def traced(fn: Any, *args: Any) -> ClosedJaxpr:
    return flattened(jax.make_jaxpr(fn)(*args))


def lengths(program: ClosedJaxpr) -> list[int]:
    return [equation.params["length"] for equation in program.eqns if equation.primitive.name == "scan"]


def values_and_gradients(program: ClosedJaxpr, args: Any) -> Any:
    leaves = jax.tree.leaves(args)
    floats = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def run(trained: Any) -> Any:
        rest = iter(trained)
        results = jaxpr_as_fun(program)(
            *(next(rest) if flag else leaf for leaf, flag in zip(leaves, floats, strict=True))
        )
        return sum(jnp.sum(jnp.sin(result)) for result in results), results

    return jax.value_and_grad(run, has_aux=True)([leaf for leaf, flag in zip(leaves, floats, strict=True) if flag])


def assert_computes_the_same(program: ClosedJaxpr, other: ClosedJaxpr, args: Any) -> None:
    results = (jax.tree.leaves(values_and_gradients(each, args)) for each in (program, other))
    for array, expected in zip(*results, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fn", "args", "length"),
    [
        (plain, (WEIGHTS, X), LAYERS),
        (sliced, (jnp.stack(WEIGHTS), X), LAYERS),
        (dropped, (WEIGHTS, X, jr.key(0)), LAYERS),
        (fed_by_the_input, (WEIGHTS, X), LAYERS),
        (with_windows, (WEIGHTS, X), LAYERS),
        (checkpointed, (WEIGHTS, X), LAYERS),
        (of_rules, (WEIGHTS, X), LAYERS),
        (by_pairs, (WEIGHTS, X), 2),
        pytest.param(blocks, (ARRAYS, X, jr.key(1)), LAYERS, marks=pytest.mark.slow),
        (blocks, (ARRAYS, X, jr.PRNGKey(1)), LAYERS),
        (adding_up, (WEIGHTS, X), LAYERS),
        (narrowed, (PAIRS, X), LAYERS),
        (with_a_table, (WEIGHTS, X), LAYERS),
        (before_others, (WEIGHTS, X), LAYERS),
    ],
)
@pytest.mark.sample(5)
def test_equal_layers_become_a_loop(fn: Any, args: Any, length: int) -> None:
    program = traced(fn, *args)
    loop = rolled(program)
    assert loop is not None
    assert lengths(loop) == [length]
    assert_computes_the_same(loop, program, args)


@pytest.mark.parametrize(
    "fn", [of_other_rules, of_other_constants, over_two_layers, printed, tied, all_different, lambda weights, x: x]
)
def test_other_layers_stay_as_they_are(fn: Any) -> None:
    assert rolled(traced(fn, WEIGHTS, X)) is None


def equations_of(*functions: Callable[..., Any], args: Any = (X, X)) -> list[Any]:
    """The last equation of each function: the call of what is compared."""
    return [traced(function, *args).eqns[-1] for function in functions]


def ruled(backward: Callable[..., Any]) -> Callable[..., Any]:
    function = jax.custom_vjp(lambda a, b: a * b)
    function.defvjp(lambda a, b: (a * b, (a, b)), backward)
    return lambda a, b: function(a, b)


def scaling(scale: Any) -> Callable[..., Any]:
    """A rule with an array in a call inside of it."""
    return ruled(lambda kept, g: (jax.jit(lambda g: g * scale)(g), g))


def computing(scale: float) -> Callable[..., Any]:
    """A rule whose forward pass computes something else than the function."""
    function = jax.custom_vjp(lambda a, b: a * b)
    function.defvjp(lambda a, b: (scale * a * b, ()), lambda kept, g: (g, g))
    return lambda a, b: function(a, b)


def calling_itself(scale: float) -> Callable[..., Any]:
    """A rule that calls its function for the result."""

    @jax.custom_jvp
    def exponential(x: Any) -> Any:
        return jnp.exp(x)

    def rule(primals: Any, tangents: Any) -> Any:
        y = exponential(primals[0])
        return y, scale * y * tangents[0]

    exponential.defjvp(rule)
    return lambda a, b: exponential(a)


def keeping_by_default(name: str) -> Callable[..., Any]:
    def policy(primitive: Any, *_: Any, name: str = name, **params: Any) -> bool:
        return params.get("name") == name

    return lambda a, b: jax.checkpoint(lambda a, b: jnp.tanh(a * b), policy=policy)(a, b)


def keeping(*names: str) -> Callable[..., Any]:
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return lambda a, b: jax.checkpoint(lambda a, b: jnp.tanh(a * b), policy=policy)(a, b)


def gated(by: str) -> Callable[..., Any]:
    def layer(a: Any, b: Any) -> Any:
        gate = jnp.tanh(b)
        return a + gate * {"a": a, "b": b, "gate": gate}[by]

    return lambda a, b: jax.checkpoint(layer)(a, b)


def looped(of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: lax.fori_loop(0, 3, lambda _, x: of(x, b), a)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (gated("a"), gated("a"), True),
        (gated("a"), gated("b"), False),
        (gated("b"), gated("gate"), False),
        (gated("a"), gated("gate"), False),
        (keeping("x", "y"), keeping("x", "y"), True),
        (keeping("x"), keeping("y"), False),
        (scaling(np.ones(WIDTH)), scaling(np.ones(WIDTH)), True),
        (scaling(np.ones(WIDTH)), scaling(2 * np.ones(WIDTH)), False),
        (scaling(np.float32(2)), scaling(np.float32(3)), False),
        (ruled(lambda kept, g: (g * kept[1], g)), ruled(lambda kept, g: (g * kept[1], g)), True),
        (ruled(lambda kept, g: (g * kept[1], g)), ruled(lambda kept, g: (g * kept[0], g)), False),
        (computing(2.0), computing(2.0), True),
        (computing(2.0), computing(3.0), False),
        (calling_itself(2.0), calling_itself(2.0), True),
        (calling_itself(2.0), calling_itself(3.0), False),
        (keeping_by_default("x"), keeping_by_default("x"), True),
        (keeping_by_default("x"), keeping_by_default("y"), False),
        (looped(lambda x, b: x * b), looped(lambda x, b: x * b), True),
        (looped(lambda x, b: x * b), looped(lambda x, b: x * x), False),
    ],
)
def test_equations_are_compared_by_what_they_compute(first: Any, second: Any, expected: bool) -> None:
    assert rolled_module._is_same(equations_of(first, second)) is expected


def test_constants_of_other_dtypes_are_others() -> None:
    def key(zero: Any) -> Any:
        (equation,) = traced(lambda x: x + zero, jnp.ones(3, zero.dtype)).eqns
        return rolled_module._key(tuple(var for var in equation.invars if isinstance(var, Literal)))

    assert key(np.int32(0)) != key(np.uint32(0)) != ()


def test_rules_that_cannot_be_traced_alone_are_like_no_other() -> None:
    def loss(weights: Any, x: Any) -> Any:
        shift = jnp.linspace(0, 1, WIDTH) * x[0]

        @jax.custom_jvp
        def shifted(x: Any) -> Any:
            return x + shift

        shifted.defjvp(lambda primals, tangents: (shifted(*primals), tangents[0] * shift))
        for w in weights:
            x = shifted(jnp.tanh(x @ w))
        return x

    assert rolled(traced(loss, WEIGHTS, X)) is None


def test_the_backward_pass_may_keep_what_it_may_in_a_scan() -> None:
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.sin(3 * jnp.tanh(x @ w))

    def called(weights: Any, x: Any) -> Any:
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x)

    def scanned(stacked: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, stacked)[0])

    hardware, args = Hardware.named("cuda:h100"), (WEIGHTS, numbers(64, WIDTH))
    program = traced(called, *args)
    loop = rolled(program)
    assert loop is not None
    keeps = keep_choices(loop, hardware)
    expected = keep_choices(traced(scanned, jnp.stack(WEIGHTS), args[1]), hardware)
    assert [keep.kept_bytes for keep in keeps] == [keep.kept_bytes for keep in expected]
    assert_computes_the_same(with_kept(loop, keeps[-1]), program, args)


def with_kernels(*strides: int) -> ClosedJaxpr:
    """Layers with a kernel each, whose positions share blocks of rows, so many of them one."""

    def kernel(stride: int) -> Any:
        def double(x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = 2 * x_ref[...]

        in_spec = pl.BlockSpec((1, WIDTH), lambda i: (i // stride, 0))
        out_spec, shape = pl.BlockSpec((1, WIDTH), lambda i: (i, 0)), jax.ShapeDtypeStruct(X.shape, X.dtype)
        return pl.pallas_call(double, shape, grid=(EXAMPLES,), in_specs=[in_spec], out_specs=out_spec, interpret=True)

    def called(weights: Any, x: Any) -> Any:
        for w, stride in zip(weights, strides, strict=True):
            x = kernel(stride)(x @ w)
        return x

    return traced(called, WEIGHTS, X)


def test_layers_with_equal_kernels_are_a_loop() -> None:
    program = with_kernels(*[2] * LAYERS)
    loop = rolled(program)
    assert loop is not None
    assert lengths(loop) == [LAYERS]
    for result, expected in zip(*(jaxpr_as_fun(each)(*WEIGHTS, X) for each in (loop, program)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_layers_with_other_maps_of_blocks_are_no_loop() -> None:
    assert rolled(with_kernels(1, 2, 1, 4, 2)) is None
