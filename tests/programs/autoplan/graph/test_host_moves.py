"""Moves between devices and hosts, and the time that devices wait for them."""

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

import shardrules as sr
from shardrules.programs.autoplan.graph.host_moves import EXPOSED_ARGUMENTS, host_move
from shardrules.programs.traced.program import read_jaxpr

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
ROWS = ShapedArray((8, 4), jnp.dtype("float32"))


def test_arguments_and_results_on_hosts_are_waited_for_longer() -> None:
    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = jax.device_put(jnp.sin(x), HOST)
        state, _ = jax.lax.optimization_barrier((state, kept))
        new = jax.device_put(state, DEVICE) + x
        return jax.device_put(new, HOST), jax.device_put(kept, DEVICE) * 2

    program = read_jaxpr(jax.make_jaxpr(step)(ROWS.update(memory_space=HOST), ROWS))
    assumptions = sr.Assumptions()
    moves = [host_move(program, index, assumptions) for index in range(len(program.operations))]
    host_moves = [move for move in moves if move is not None]
    assert [(move.to_host, move.is_lasting) for move in host_moves] == [
        (True, False),
        (False, True),
        (True, True),
        (False, False),
    ]
    assert {move.nbytes for move in host_moves} == {8 * 4 * 4}
    exposed = {move.is_lasting: move.exposed for move in host_moves}
    assert exposed == {True: EXPOSED_ARGUMENTS, False: 1 - assumptions.hidden}
