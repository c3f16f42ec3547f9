"""The end of a loss, from sums over its examples."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.training.examples.tail import Tail, cut


def tail_of(fn: Callable[[Any, Any], Any]) -> Tail:
    """The tail of a function of a trained weight and a trained sum."""
    return Tail.of(jax.make_jaxpr(fn)(1.0, 1.0), 1, 1)


@pytest.mark.parametrize(
    ("fn", "step"),
    [
        (lambda w, s: jnp.exp(w) * s / 3 + w**2, ""),
        (lambda w, s: jnp.where(w > 0, s, -s), ""),
        (lambda w, s: jnp.log(s), "log"),
        (lambda w, s: 2 * s * (s + 1), "mul"),
        (lambda w, s: jnp.where(jnp.isfinite(s), s, 0.0), "is_finite"),
    ],
)
def test_steps_that_are_not_linear_in_sums_are_named(fn: Callable[[Any, Any], Any], step: str) -> None:
    assert tail_of(fn).nonlinear_step().partition(" ")[0] == step


def test_derivatives_by_sums_and_by_parameters_come_apart() -> None:
    tail = tail_of(lambda w, s: w * s + w**2)
    (weight,) = tail.coefficients([3.0], [5.0])
    assert (weight, tail.regularizer_gradients([3.0], [5.0])) == (3, [5 + 2 * 3])
    assert tail_of(lambda w, s: 2 * s).regularizer_gradients([3.0], [5.0]) is None


def test_a_program_is_cut_at_its_sums() -> None:
    program = jax.make_jaxpr(lambda x: jnp.log(jnp.sum(x)) + 1)(jnp.ones(3))
    total = program.eqns[0].outvars[0]
    rest = cut(program, [total], program.jaxpr.outvars)
    assert [equation.primitive.name for equation in rest.eqns] == ["log", "add"]
    assert len(rest.in_avals) == 2
