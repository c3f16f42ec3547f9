"""Moves that compilers can make while matmuls run."""

from typing import Any

import jax
import jax.numpy as jnp

from shardrules.programs.compilers.waiting import Waiting
from shardrules.programs.traced.program import TracedProgram, read_jaxpr

W = [jnp.ones((16, 16))] * 3
X = jnp.ones((8, 16))


def read(fn: Any, *args: Any) -> TracedProgram:
    return read_jaxpr(jax.make_jaxpr(fn)(*args))


def forward(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def test_parameters_come_while_others_are_multiplied() -> None:
    program = read(forward, W, X)
    waiting = Waiting.of(program)
    parameters = [waiting.has_time(matmul, program.operations[matmul].operands[1] or 0) for matmul in waiting.matmuls]
    assert parameters == [False, True, True]  # nothing runs before the first


def test_activations_between_matmuls_are_waited_for() -> None:
    program = read(forward, W, X)
    waiting = Waiting.of(program)
    second = waiting.matmuls[1]
    activation = program.operations[second].operands[0] or 0
    assert waiting.is_between(second, activation)
    assert not waiting.has_time(second, activation)


def test_gradients_leave_something_to_do_meanwhile() -> None:
    program = read(jax.grad(forward), W, X)
    waiting = Waiting.of(program)
    last = [matmul for matmul in waiting.matmuls if matmul not in waiting.before]
    assert [program.arrays[program.operations[matmul].results[0]].shape for matmul in last] == [(16, 16)] * 3
    assert waiting.has_time(last[0], program.operations[last[0]].results[0])
    second = waiting.matmuls[1]
    assert waiting.has_time(second, program.operations[second].operands[0] or 0)


def test_what_goes_round_a_loop_is_between_its_matmuls() -> None:
    program = read(lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], jnp.stack(W), X)
    waiting = Waiting.of(program)
    (matmul,) = waiting.matmuls
    assert waiting.is_between(matmul, program.operations[matmul].operands[0] or 0)
