"""The costs of moves of arrays beside their bytes: latency that they share or not, and copies around them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardrules as sr
from shardrules.programs.autoplan.graph.machine import COLLECTIVE_KINDS, Machine
from shardrules.programs.autoplan.graph.problem import Edge, Problem
from shardrules.programs.autoplan.graph.restrict import restrict
from shardrules.programs.autoplan.run.call import read_call
from shardrules.programs.autoplan.solve.search import Task
from shardrules.programs.traced.program import read_jaxpr

B, T, H, D = 8, 2048, 16, 64
LATENCY_SHARED = sr.Assumptions().combined_bytes


def problem_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Problem:
    mesh = sr.mesh_shape("data:8")
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    call = read_call(fn, tuple(args), mesh, "fn")
    machine = Machine.of(mesh, sr.Hardware.named("cuda:h100"))
    return Task.of(read_jaxpr(call.jaxpr), machine, call.paths, call.feedback, {}).problem


def edges_of(problem: Problem, name: str, result: bool) -> list[Edge]:
    """The edges along which operations of a name get their operands, or give their results."""
    return [
        problem.edges[edge]
        for (op_index, index), edge in problem.edge_indices.items()
        if problem.program.operations[op_index].name == name and (index < 0) == result
    ]


def test_arrays_that_matmuls_wait_for_pay_their_latency_alone() -> None:
    problem = problem_of(lambda x, first, last: jnp.tanh(x @ first) @ last, (B, 64), (64, 128), (128, 64))
    operands, (between, last) = edges_of(problem, "dot_general", False), edges_of(problem, "dot_general", True)
    assert [edge.combined_bytes < LATENCY_SHARED for edge in operands].count(True) == 1  # the result of tanh
    assert between.combined_bytes < LATENCY_SHARED == last.combined_bytes
    small = np.isfinite(between.seconds) & (between.moves.fixed > 0)
    np.testing.assert_allclose(
        between.seconds[small] / between.moves.fixed[small], between.nbytes / between.combined_bytes, atol=1.5
    )


def test_what_is_broadcast_to_results_of_matmuls_pays_its_latency_alone() -> None:
    """The logarithm of a softmax's sum, which only the loss needs: to move it is not free, even if it is small."""

    def loss(x: jax.Array, head: jax.Array) -> jax.Array:
        logits = x @ head
        return logits - jnp.log(jnp.exp(logits).sum(1, keepdims=True))

    problem = problem_of(loss, (B, 64), (64, 128))
    total = next(edge for edge in edges_of(problem, "sub", False) if edge.moves.fixed.any() and edge.nbytes == 2 * B)
    assert total.combined_bytes < LATENCY_SHARED
    step = problem_of(lambda x, y, w: w - x.T @ y, (B, 64), (B, 128), (64, 128))
    (updated,) = edges_of(step, "return", False)  # parameters, computed from the result of a matmul
    assert updated.combined_bytes == LATENCY_SHARED


def test_exchanges_are_never_combined() -> None:
    problem = problem_of(lambda x: jnp.max(jnp.sort(x, 1), 0), (64, 64))
    exchanges = [(edge, edge.moves.sent[COLLECTIVE_KINDS.index("all-to-all")] > 0) for edge in problem.edges]
    assert any(exchanged.any() for _, exchanged in exchanges)
    for edge, exchanged in exchanges:
        assert (edge.seconds[exchanged] >= edge.moves.fixed[exchanged]).all()


def attend(q: jax.Array, keys: jax.Array, out: jax.Array) -> jax.Array:
    scores = jnp.einsum("bhd,bthd->bht", q, keys)
    return jnp.einsum("bht,bthd->bhd", jnp.exp(scores), keys).reshape(B, H * D) @ out


def test_gathering_heads_of_one_query_copies_what_they_attend_to() -> None:
    """Heads come first in memory then, and keys are read in the same order: later, too, if reshaped before."""
    problem = problem_of(attend, (B, H, D), (B, T, H, D), (H * D, 64))
    costly = [edge for edge in problem.edges if edge.is_between and edge.relayout_seconds.any()]
    copy_seconds = 2 * 2 * B * T * H * D / 8 / 2.9e12
    assert costly
    for edge in costly:
        assert edge.relayout_seconds.max() > 0.9 * copy_seconds
        assert not edge.relayout_seconds[(edge.from_layouts <= 0).all(axis=1)].any()
    keep = [np.arange(len(node.layouts)) for node in problem.nodes]
    kept = restrict(problem, keep)
    assert sum(edge.is_between and edge.relayout_seconds.any() for edge in kept.edges) == len(costly)
    keep[costly[0].start] = np.arange(1)
    assert restrict(problem, keep).edges  # tables are cut with the layouts
