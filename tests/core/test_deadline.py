"""Deadlines, and how searches share them."""

import jax
import jax.numpy as jnp

import shardrules as sr
from shardrules.core.deadline import NO_DEADLINE, Deadline


def test_examples_are_split_even_without_any_time() -> None:
    w, x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((65536, 1024), jnp.float32)
    plan, hurried = (
        sr.autoplan(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), w, x, mesh=sr.mesh_shape("data:8"), time_limit=seconds)
        for seconds in (60, 1e-6)
    )
    assert hurried.cost < 1.01 * plan.cost


def test_a_deadline_is_shared() -> None:
    whole = Deadline.after(60)
    assert 19 < whole.share(3).seconds_left <= 20
    assert Deadline(0.0).share(3).seconds_left <= 0
    assert NO_DEADLINE.share(3) == NO_DEADLINE


def test_solvers_get_what_is_left_and_a_moment_at_least() -> None:
    assert NO_DEADLINE.solver_options() == {}
    assert 0 < Deadline(0.0).solver_options()["time_limit"] <= 0.2
    assert 50 < Deadline.after(60).solver_options()["time_limit"] <= 60


def test_a_deadline_is_over_once_its_moment_is_reached() -> None:
    assert Deadline.after(0).is_over
    assert not Deadline.after(60).is_over
    assert not NO_DEADLINE.is_over
