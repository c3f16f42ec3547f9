"""Programs that calls, loops and branches run, their operands, and the number of runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardrules.programs.jaxprs.bodies import Loop, bodies_of, scan_of, with_bodies
from shardrules.programs.jaxprs.rewrite import rewritten
from shardrules.programs.jaxprs.walk import open_jaxpr, runs

ROWS = jnp.ones((3, 4))


def scanned(x: Any, shift: Any) -> Any:
    return lax.scan(lambda carry, row: (carry + shift, row * shift), x[0], x)


def looped(x: Any, shift: Any) -> Any:
    return lax.while_loop(lambda carry: carry.sum() < shift.sum(), lambda carry: carry + x, x)


def branched(x: Any, shift: Any) -> Any:
    return lax.cond(shift[0] > 0, jnp.sin, jnp.cos, x)


def recomputed(x: Any, shift: Any) -> Any:
    return jax.checkpoint(lambda x: jnp.sin(x + shift))(x)


CASES = (scanned, looped, branched, recomputed)


def equation_of(fn: Callable[..., Any]) -> Any:
    return next(each for each in jax.make_jaxpr(fn)(ROWS, ROWS[0]).eqns if bodies_of(each))


@pytest.mark.parametrize("fn", CASES)
def test_each_input_of_a_body_is_an_operand(fn: Callable[..., Any]) -> None:
    equation = equation_of(fn)
    for body in bodies_of(equation):
        inputs: Any = open_jaxpr(body.program).invars
        operands = [equation.invars[index] for index in body.operands]
        assert len(inputs) == len(operands)
        assert all(
            var.aval.shape in (each.aval.shape, each.aval.shape[1:]) for var, each in zip(inputs, operands, strict=True)
        )


@pytest.mark.parametrize("fn", CASES)
def test_bodies_are_put_back_where_they_were(fn: Callable[..., Any]) -> None:
    equation = equation_of(fn)
    bodies = [open_jaxpr(body.program) for body in bodies_of(equation)]
    assert str(with_bodies(equation, bodies)) == str(equation)
    emptied = [body.replace(eqns=[]) for body in bodies]
    assert [open_jaxpr(body.program).eqns for body in bodies_of(with_bodies(equation, emptied))] == [[]] * len(bodies)


def test_loops_say_what_changes_from_round_to_round() -> None:
    scan, loop = scan_of(equation_of(scanned)), Loop.of(equation_of(looped))
    assert loop is not None
    assert (scan.length, scan.test, scan.const_count, scan.carry_count) == (3, None, 1, 1)
    assert (loop.length, loop.const_count, loop.carry_count) == (None, 1, 1)
    assert [body.fixed_count for body in bodies_of(equation_of(looped))] == [1, 1]
    assert Loop.of(equation_of(branched)) is None


def test_equations_run_as_often_as_the_loops_around_them() -> None:
    nested = jax.make_jaxpr(lambda x: lax.scan(lambda c, y: (scanned(x, y)[0], y), x[0], x))(ROWS)
    times = [run.times for run in runs(nested.eqns) if run.equation.primitive.name == "mul"]
    assert times == [9]
    assert [run.times for run in runs(nested.eqns, lambda each: True)] == [1] * len(nested.eqns)


def test_equations_are_replaced_at_any_depth_and_keep_the_others() -> None:
    program = jax.make_jaxpr(scanned)(ROWS, ROWS[0])
    assert rewritten(program, lambda equation: None) is program

    def as_product(equation: Any) -> list[Any] | None:
        return [equation.replace(primitive=lax.mul_p)] if equation.primitive is lax.add_p else None

    changed = rewritten(program, as_product)
    names = [run.equation.primitive.name for run in runs(changed.eqns)]
    assert "add" not in names
    assert names.count("mul") == 2
