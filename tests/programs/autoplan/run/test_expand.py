"""Functions that are a primitive by themselves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

import shardrules as sr
from shardrules.programs.autoplan.run.call import read_call
from shardrules.programs.autoplan.run.expand import expanded
from shardrules.programs.jaxprs.walk import equations

TABLE, QUERIES = jnp.arange(8.0), jnp.array([0.5, 2.5, 7.0])


def looked_up(table: Any, queries: Any) -> Any:
    """By itself and in a loop."""
    first = jnp.searchsorted(table, queries)
    return first, lax.scan(lambda carry, query: (carry, jnp.searchsorted(table, query)), 0, queries)[1]


def test_functions_are_replaced_at_any_depth() -> None:
    call = read_call(looked_up, (TABLE, QUERIES), sr.mesh_shape("data:8"), "fn")
    assert [equation for equation in equations(call.jaxpr) if equation.primitive.name == "call_hi_primitive"] == []
    for result, other in zip(jaxpr_as_fun(call.jaxpr)(TABLE, QUERIES), looked_up(TABLE, QUERIES), strict=True):
        np.testing.assert_array_equal(result, other)


def test_other_programs_stay_as_they_are() -> None:
    program = jax.make_jaxpr(lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, jnp.sin(x)))(TABLE).jaxpr
    assert expanded(program) is program
