"""Which operations read and write memory, on functions whose fusions are obvious."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardrules.planning.traced.fusion import reads_operands, writes_result
from shardrules.planning.traced.program import TracedProgram, read_jaxpr

X, W = jnp.ones((8, 16)), jnp.ones((16, 16))


def read(fn: Callable[..., Any], *args: Any) -> TracedProgram:
    return read_jaxpr(jax.make_jaxpr(fn)(*args))


def reading(program: TracedProgram) -> list[str]:
    return [operation.name for operation in program.operations if reads_operands(operation)]


def writing(program: TracedProgram) -> list[str]:
    return [
        operation.name
        for op_index, operation in enumerate(program.operations)
        if any(writes_result(program, op_index, result) for result in operation.results)
    ]


def test_elementwise_operations_are_fused_into_a_matmul() -> None:
    """Only what the matmul reads is written, and what it writes is read by the result."""
    program = read(lambda x, w: jnp.tanh(jnp.exp(jnp.sin(x) @ w)), X, W)
    assert reading(program) == ["dot_general", "return"]
    assert writing(program) == ["sin", "dot_general", "tanh", "return"]


def test_operations_that_look_elsewhere_are_not_fused() -> None:
    program = read(lambda x: jnp.sin(lax.cumsum(jnp.cos(x), axis=1)), X)
    assert reading(program) == ["cumsum", "return"]
    assert writing(program) == ["cos", "cumsum", "sin", "return"]


def test_a_result_that_is_used_much_later_is_kept() -> None:
    def fn(x: Any, steps: int) -> Any:
        kept = y = jnp.exp(x)
        for _ in range(steps):
            y = jnp.sin(y)
        return y + kept

    assert "exp" not in writing(read(lambda x: fn(x, 40), X))
    assert "exp" in writing(read(lambda x: fn(x, 60), X))


def test_only_what_leaves_a_loop_is_written_at_its_edges() -> None:
    program = read(lambda x: lax.scan(lambda x, _: (jnp.sin(x), x), x, length=3), X)
    assert [name for name in writing(program) if name in ("enter", "join", "leave")] == ["leave"]
