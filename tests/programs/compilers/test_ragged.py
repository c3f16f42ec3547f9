"""Ragged matmuls as compilers have them."""

from typing import Any

import jax
import jax.numpy as jnp

import shardrules as sr
from shardrules.programs.compilers.ragged import expansions, group_count
from shardrules.programs.traced.program import read_jaxpr
from tests.programs.autoplan.compiled_peaks import EXPERTS, experts, half, whole

ROWS, GROUPS, WIDTH, HIDDEN = 4096, 8, 256, 512


def test_rows_are_copied_for_each_group_and_shared() -> None:
    program = read_jaxpr(jax.make_jaxpr(experts)(EXPERTS, half(ROWS, WIDTH), whole(GROUPS)))
    copies = expansions(program)
    shapes = [
        program.arrays[program.operations[copy.op_index].operands[copy.operand_index] or 0].shape for copy in copies
    ]
    assert shapes == [(ROWS, WIDTH), (ROWS, HIDDEN)]
    assert [len(copy.users) for copy in copies] == [2, 1]
    assert [copy.group_count for copy in copies] == [GROUPS, GROUPS]


def test_other_operations_stay_as_large_as_they_are() -> None:
    program = read_jaxpr(jax.make_jaxpr(lambda a: a @ a)(jnp.ones((4, 4))))
    assert [group_count(operation) for operation in program.operations] == [1, 1]
    assert expansions(program) == ()


def test_rows_may_be_a_batch_dim() -> None:
    numbers = jax.lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])

    def matmul(x: Any, w: Any) -> Any:
        return jax.lax.ragged_dot_general(x, w, jnp.full(4, 2, jnp.int32), numbers)

    x, w = jax.ShapeDtypeStruct((8, 64, 128), jnp.float32), jax.ShapeDtypeStruct((8, 128, 64), jnp.float32)
    assert sr.autoplan(matmul, x, w, mesh=sr.mesh_shape("data:8")).fits
