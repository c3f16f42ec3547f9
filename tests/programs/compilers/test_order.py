"""The order in which compilers run matmuls."""

from typing import Any

import jax
import jax.numpy as jnp

from shardrules.programs.compilers.order import early_order, has_many_chains, late_order, program_order
from shardrules.programs.traced.program import TracedProgram, read_jaxpr
from tests.programs.autoplan.compiled_peaks import chained as loss
from tests.programs.autoplan.compiled_peaks import towers

W = [jnp.ones((16, 16))] * 3
X = jnp.ones((8, 16))


def scanned(ws: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])


def read(fn: Any, *args: Any) -> TracedProgram:
    return read_jaxpr(jax.make_jaxpr(fn)(*args))


def matmuls(program: TracedProgram, positions: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of the results of matmuls, in order."""
    order = sorted(range(len(positions)), key=lambda op_index: positions[op_index])
    operations = [program.operations[op_index] for op_index in order]
    return [program.arrays[operation.results[0]].shape for operation in operations if operation.flops]


def test_gradients_of_weights_come_last() -> None:
    program = read(jax.grad(loss), W, X)
    forward, cotangents, weights = [(8, 16)] * 3, [(8, 16)] * 2, [(16, 16)] * 3
    assert matmuls(program, late_order(program)) == forward + cotangents + weights
    assert matmuls(program, program_order(program)) != forward + cotangents + weights


def test_chains_that_do_not_need_each_other_are_several() -> None:
    assert not has_many_chains(read(jax.grad(loss), W, X))
    assert has_many_chains(read(jax.grad(towers), [W, [jnp.ones((12, 12))] * 3], [X, jnp.ones((5, 12))]))


def test_what_goes_round_in_a_loop_is_one_chain() -> None:
    """The gradient of what goes round is a sum of matmuls, which the next round needs: none of them ends a chain."""

    def gated(x: Any, ws: Any) -> Any:
        return jnp.tanh(x @ ws[0]) * jax.nn.sigmoid(x @ ws[1]), None

    program = read(jax.grad(lambda ws, x: jnp.sum(jax.lax.scan(gated, x, ws)[0])), [jnp.ones((5, 16, 16))] * 2, X)
    assert matmuls(program, late_order(program)) == [(8, 16)] * 4 + [(16, 16)] * 2


def test_loops_stay_together_and_are_ordered_inside() -> None:
    program = read(jax.grad(scanned), jnp.stack(W), X)
    positions = late_order(program)
    for region in dict.fromkeys(operation.region for operation in program.operations if operation.run_count > 1):
        inside = [
            positions[op_index] for op_index, operation in enumerate(program.operations) if operation.region == region
        ]
        assert max(inside) - min(inside) == len(inside) - 1
    assert matmuls(program, positions) == [(8, 16), (8, 16), (16, 16)]


def test_nothing_runs_before_what_it_takes() -> None:
    def both(ws: Any, us: Any, x: Any, mask: Any) -> Any:
        """Gradients of two nets, one after the other, with a gate that both take."""
        slopes = jax.grad(loss)(ws, x)
        gate = jnp.tanh(mask)
        return [slope @ gate for slope in slopes], jax.grad(loss)(us, x @ gate)

    for fn, args in ((jax.grad(loss), (W, X)), (jax.grad(scanned), (jnp.stack(W), X)), (both, (W, W, X, W[0]))):
        program = read(fn, *args)
        for positions in (early_order(program), late_order(program)):
            assert sorted(positions) == list(range(len(program.operations)))
            for op_index, operation in enumerate(program.operations):
                for operand in operation.operands if operation.role != "join" else operation.operands[:1]:
                    if operand is not None and operand in program.producers:
                        assert positions[program.producers[operand]] < positions[op_index]


def test_updates_run_right_after_their_gradients() -> None:
    def step(ws: Any, x: Any) -> Any:
        return [w - slope for w, slope in zip(ws, jax.grad(loss)(ws, x), strict=True)]

    program = read(step, W, X)
    updates = [
        index
        for index, operation in enumerate(program.operations)
        if operation.name == "sub" and program.arrays[operation.results[0]].shape == (16, 16)
    ]
    gradients = [program.producers[program.operations[index].operands[1] or 0] for index in updates]
    early, written = early_order(program), program_order(program)
    assert [early[update] - early[gradient] for update, gradient in zip(updates, gradients, strict=True)] == [1, 1, 1]
    assert max(written[update] - written[gradient] for update, gradient in zip(updates, gradients, strict=True)) > 1
