"""What compilers put off."""

from typing import Any

import jax
import jax.numpy as jnp

from shardrules.programs.autoplan.traced.order import has_many_chains, late_matmul_count, late_order, program_order
from shardrules.programs.autoplan.traced.program import TracedProgram, read_jaxpr

W = [jnp.ones((16, 16))] * 3
X = jnp.ones((8, 16))


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


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


def test_chains_that_do_not_need_each_other_end_with_their_own_gradients_of_weights() -> None:
    """The gradient of one tower is complete before that of the other begins."""

    def towers(ws: Any, xs: Any) -> Any:
        first, second = (loss(w, x) for w, x in zip(ws, xs, strict=True))
        return first * second

    assert not has_many_chains(read(jax.grad(loss), W, X))
    program = read(jax.grad(towers), [W, [jnp.ones((12, 12))] * 3], [X, jnp.ones((5, 12))])
    assert has_many_chains(program)
    backward = matmuls(program, late_order(program))[6:]
    assert backward == [(5, 12)] * 2 + [(12, 12)] * 3 + [(8, 16)] * 2 + [(16, 16)] * 3


def test_gradients_of_weights_are_put_off_as_long_as_matmuls_beside_them_are_needed() -> None:
    """The gradient of an encoder needs that of the decoder's layers, though not that of what comes before them."""

    def decoded(encoder: Any, before: Any, decoder: Any, x: Any, memory: Any) -> Any:
        for w in encoder:
            memory = jnp.tanh(memory @ w)
        for w in before:
            x = jnp.tanh(x @ w)
        for w in decoder:
            x = jnp.tanh((x + jnp.mean(memory, 0)) @ w)
        return jnp.sum(x)

    encoder, decoder = [jnp.ones((12, 16)), *[jnp.ones((16, 16))] * 2], [jnp.ones((16, 16)), jnp.ones((16, 10))]
    before = [jnp.ones((14, 16)), jnp.ones((16, 16)), jnp.ones((16, 16))]
    args = encoder, before, decoder, jnp.ones((8, 14)), jnp.ones((5, 12))
    program = read(jax.grad(decoded, (0, 1, 2)), *args)
    assert has_many_chains(program)
    backward = matmuls(program, late_order(program))[8:]
    assert backward[:7] == [(8, 16)] * 4 + [(16, 16)] * 2 + [(16, 14)]
    assert backward[7:] == [(5, 16)] * 2 + [(10, 16)] + [(16, 16)] * 3 + [(16, 12)]


def test_what_goes_round_in_a_loop_is_one_chain() -> None:
    """The gradient of what goes round is a sum of matmuls, which the next round needs: none of them ends a chain."""

    def gated(x: Any, ws: Any) -> Any:
        return jnp.tanh(x @ ws[0]) * jax.nn.sigmoid(x @ ws[1]), None

    program = read(jax.grad(lambda ws, x: jnp.sum(jax.lax.scan(gated, x, ws)[0])), [jnp.ones((5, 16, 16))] * 2, X)
    assert matmuls(program, late_order(program)) == [(8, 16)] * 4 + [(16, 16)] * 2


def test_matmuls_that_nothing_waits_for_are_counted_as_often_as_they_run() -> None:
    assert late_matmul_count(read(jax.grad(loss), W, X)) == 3
    assert late_matmul_count(read(jax.grad(scanned), jnp.ones((5, 16, 16)), X)) == 5
    assert late_matmul_count(read(loss, W, X)) == 1


def test_what_only_gradients_of_weights_wait_for_comes_just_before_them() -> None:
    """The gradient of an attention's values runs after that of its scores, so that probabilities stay until then."""

    def attention(w: Any, x: Any) -> Any:
        return jnp.sum(jax.nn.softmax((x @ w["q"]) @ x.T) @ (x @ w["v"]) @ w["o"])

    w = {"q": jnp.ones((16, 16)), "v": jnp.ones((16, 5)), "o": jnp.ones((5, 3))}
    program = read(jax.grad(attention), w, X)
    products = {
        program.arrays[operation.results[0]].shape: op_index
        for op_index, operation in enumerate(program.operations)
        if operation.flops
    }
    of_values, of_queries, of_weights = products[5, 8], products[8, 16], products[5, 16]
    scores = program.operations[of_queries].operands[0]
    assert scores is not None
    before, after = program_order(program), late_order(program)
    assert before[of_values] < before[program.producers[scores]]
    assert after[program.producers[scores]] < after[of_values] < after[of_weights]


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
        positions = late_order(program)
        assert sorted(positions) == list(range(len(program.operations)))
        for op_index, operation in enumerate(program.operations):
            for operand in operation.operands if operation.role != "join" else operation.operands[:1]:
                if operand is not None and operand in program.producers:
                    assert positions[program.producers[operand]] < positions[op_index]


def test_updates_follow_their_gradients() -> None:
    """So that gradients are not all in memory at once: also where the rate of learning is computed last."""

    def step(state: Any, ids: Any) -> Any:
        tables, count = state

        def loss(tables: Any) -> Any:
            return sum(jnp.sum((table[ids] @ jnp.ones((8, 8))) ** 2) for table in tables)

        slopes = jax.grad(loss)(tables)
        rate = 1 / jnp.sqrt(count)
        return [table - rate * slope for table, slope in zip(tables, slopes, strict=True)], count + 1

    program = read_jaxpr(jax.make_jaxpr(step)(([jnp.ones((64, 8))] * 3, 1.0), jnp.arange(4)))
    positions = late_order(program)
    assert sorted(positions) == list(range(len(positions)))
    ordered = sorted(range(len(positions)), key=positions.__getitem__)
    kinds = [program.operations[op_index].name for op_index in ordered]
    assert [name for name in kinds if name in ("scatter-add", "sub")] == ["scatter-add", "sub"] * 3
    # Nothing runs before what it is computed from.
    for op_index, operation in enumerate(program.operations):
        for operand in operation.operands:
            if operand is not None and operand in program.producers:
                assert positions[program.producers[operand]] < positions[op_index]
