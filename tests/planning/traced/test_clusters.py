"""Arrays that are laid out alike because each is computed from the other place by place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.planning.traced.clusters import Clusters, find_clusters
from shardrules.planning.traced.program import TracedProgram, read_jaxpr


def found(fn: Callable[..., Any], *shapes: tuple[int, ...], wide: bool = False) -> tuple[TracedProgram, Clusters]:
    program = read_jaxpr(jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]))
    return program, find_clusters(program, [], wide)


def result(program: TracedProgram, name: str) -> int:
    (one,) = [operation.results[0] for operation in program.operations if operation.name == name]
    return one


def test_a_chain_is_one() -> None:
    program, own = found(lambda x: jnp.tanh(jnp.exp(jnp.sin(x))), (8, 16))
    roots = [own.roots[result(program, name)] for name in ("sin", "exp", "tanh")]
    assert roots == [(result(program, "sin"), (0, 1))] * 3
    assert own.sizes[roots[0][0]] == (8, 16)


def test_transposed_dims_are_followed() -> None:
    program, own = found(lambda x: jnp.tanh(jnp.exp(x).T), (8, 16))
    assert own.roots[result(program, "tanh")] == (result(program, "exp"), (1, 0))


def test_dims_of_one_have_no_partner() -> None:
    program, own = found(lambda x: jnp.tanh(jnp.exp(x)[:, None]), (8, 16))
    assert own.roots[result(program, "tanh")] == (result(program, "exp"), (0, None, 1))


def test_what_others_take_too_stays_by_itself() -> None:
    """To lay the two out apart may be cheaper."""

    def fn(x: Any) -> Any:
        y = jnp.exp(x)
        return jnp.tanh(y), jnp.sin(y)

    program, own = found(fn, (8, 16))
    assert len({own.roots[result(program, name)][0] for name in ("exp", "tanh", "sin")}) == 3
    program, own = found(fn, (8, 16), wide=True)
    assert len({own.roots[result(program, name)][0] for name in ("exp", "tanh", "sin")}) == 1


def test_of_two_operands_neither_decides() -> None:
    def fn(x: Any, y: Any) -> Any:
        return jnp.exp(x) + jnp.sin(y)

    program, own = found(fn, (8, 16), (8, 16))
    assert len({own.roots[result(program, name)][0] for name in ("exp", "sin", "add")}) == 3
    program, own = found(fn, (8, 16), (8, 16), wide=True)
    assert len({own.roots[result(program, name)][0] for name in ("exp", "sin", "add")}) == 1


@pytest.mark.parametrize("wide", [False, True])
def test_sums_and_their_operands_are_apart(wide: bool) -> None:
    program, own = found(lambda x: jnp.tanh(jnp.exp(x).sum(axis=0)), (8, 16), wide=wide)
    assert own.roots[result(program, "exp")][0] != own.roots[result(program, "reduce_sum")][0]
    assert own.roots[result(program, "tanh")] == (result(program, "reduce_sum"), (0,))


def test_what_grows_is_apart() -> None:
    program, own = found(lambda x: jnp.tanh(jnp.broadcast_to(jnp.exp(x)[:, None], (8, 32))), (8,))
    assert own.roots[result(program, "exp")][0] != own.roots[result(program, "tanh")][0]


@pytest.mark.parametrize("wide", [False, True])
def test_merged_dims_divide_as_both_do(wide: bool) -> None:
    program, own = found(lambda x: jnp.tanh(jnp.exp(x).reshape(8 * 6, 16)), (8, 6, 16), wide=wide)
    root, dims = own.roots[result(program, "tanh")]
    assert own.sizes[root][dims[0] if dims[0] is not None else 0] in (8, 48)
    assert own.roots[result(program, "exp")][0] != root  # 8 x 6 are not one dim


def test_results_of_the_function_are_places_of_their_own() -> None:
    program, own = found(lambda x: jnp.exp(x), (8, 16))
    assert program.results[0] not in own.roots
