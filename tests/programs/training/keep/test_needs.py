"""Arrays of the forward pass that derivatives of equations need."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.jaxprs.inline import flattened
from shardrules.programs.training.keep.needs import EquationNeeds, NeedsReader

X, W = jnp.ones((2, 4)), jnp.ones((4, 4))


def needs_of(function: Callable[..., Any], *args: Any, traced: tuple[bool, ...] | None = None) -> list[EquationNeeds]:
    program = flattened(jax.make_jaxpr(function)(*args)).jaxpr
    return NeedsReader().program_needs(program, traced or (True,) * len(program.invars))


@pytest.mark.parametrize(
    ("function", "traced", "operands"),
    [
        (lambda x, w: x @ w, (True, True), (0, 1)),
        (lambda x, w: x @ w, (True, False), (1,)),
        (lambda x, w: x @ w, (False, True), (0,)),
        (lambda x, w: x @ w, (False, False), ()),
        (lambda x, w: x + w[0], (True, True), ()),
    ],
)
def test_only_gradients_that_are_asked_for_need_operands(
    function: Callable[..., Any], traced: tuple[bool, ...], operands: tuple[int, ...]
) -> None:
    assert needs_of(function, X, W, traced=traced)[-1].operands == operands


def test_an_exponential_needs_its_result_and_a_sine_its_operand() -> None:
    exponential, sine = (needs_of(function, X)[0] for function in (jnp.exp, jnp.sin))
    assert (exponential.operands, exponential.results) == ((), (0,))
    assert (sine.operands, sine.results, sine.is_inner_dear) == ((0,), (), False)
    assert [aval.shape for aval in sine.inner] == [X.shape]  # the cosine


def test_what_no_gradient_reaches_needs_nothing() -> None:
    needs = needs_of(lambda x: x - jax.lax.stop_gradient(jnp.max(jnp.exp(x))), X)
    assert all(not each.operands and not each.results for each in needs)


def test_loops_hold_what_only_they_return() -> None:
    needs = needs_of(lambda x, w: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0], X, W)
    assert needs[-1].is_inner_dear


def test_checkpointed_parts_need_their_operands_and_what_their_policies_keep() -> None:
    def part(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sin(x @ w) @ w)

    (plain,) = needs_of(jax.checkpoint(part), X, W)
    assert (plain.operands, plain.inner) == ((0, 1), ())
    (dots,) = needs_of(jax.checkpoint(part, policy=jax.checkpoint_policies.dots_saveable), X, W)
    assert dots.is_inner_dear
    assert len(dots.inner) == 2
