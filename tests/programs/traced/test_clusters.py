"""Arrays that are laid out alike because each is computed elementwise from the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardrules.programs.traced.clusters import Clusters, find_clusters
from shardrules.programs.traced.program import TracedProgram, read_jaxpr


def read(fn: Callable[..., Any], *shapes: tuple[int, ...], wide: bool = False) -> tuple[TracedProgram, Clusters]:
    program = read_jaxpr(jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]))
    return program, find_clusters(program, [], wide)


def result(program: TracedProgram, name: str) -> int:
    (array,) = [operation.results[0] for operation in program.operations if operation.name == name]
    return array


def test_a_chain_is_one_cluster() -> None:
    program, clusters = read(lambda x: jnp.tanh(jnp.exp(jnp.sin(x))), (8, 16))
    roots = [clusters.roots[result(program, name)] for name in ("sin", "exp", "tanh")]
    assert roots == [(result(program, "sin"), (0, 1))] * 3
    assert clusters.sizes[roots[0][0]] == (8, 16)


@pytest.mark.parametrize(
    ("fn", "dims"),
    [(lambda x: jnp.tanh(jnp.exp(x).T), (1, 0)), (lambda x: jnp.tanh(jnp.exp(x)[:, None]), (0, None, 1))],
    ids=["transposed", "of size one"],
)
def test_dims_are_followed(fn: Any, dims: tuple[int | None, ...]) -> None:
    program, clusters = read(fn, (8, 16))
    assert clusters.roots[result(program, "tanh")] == (result(program, "exp"), dims)


def test_an_array_with_two_uses_stays_by_itself() -> None:
    """To lay out the two results differently may be cheaper."""

    def fn(x: Any) -> Any:
        y = jnp.exp(x)
        return jnp.tanh(y), jnp.sin(y)

    program, clusters = read(fn, (8, 16))
    assert len({clusters.roots[result(program, name)][0] for name in ("exp", "tanh", "sin")}) == 3
    program, clusters = read(fn, (8, 16), wide=True)
    assert len({clusters.roots[result(program, name)][0] for name in ("exp", "tanh", "sin")}) == 1


def test_two_operands_are_joined_only_in_the_wide_form() -> None:
    def fn(x: Any, y: Any) -> Any:
        return jnp.exp(x) + jnp.sin(y)

    program, clusters = read(fn, (8, 16), (8, 16))
    assert len({clusters.roots[result(program, name)][0] for name in ("exp", "sin", "add")}) == 3
    program, clusters = read(fn, (8, 16), (8, 16), wide=True)
    assert len({clusters.roots[result(program, name)][0] for name in ("exp", "sin", "add")}) == 1


@pytest.mark.parametrize("wide", [False, True])
def test_sums_and_their_operands_are_apart(wide: bool) -> None:
    program, clusters = read(lambda x: jnp.tanh(jnp.exp(x).sum(axis=0)), (8, 16), wide=wide)
    assert clusters.roots[result(program, "exp")][0] != clusters.roots[result(program, "reduce_sum")][0]
    assert clusters.roots[result(program, "tanh")] == (result(program, "reduce_sum"), (0,))


def test_an_array_that_grows_is_apart() -> None:
    program, clusters = read(lambda x: jnp.tanh(jnp.broadcast_to(jnp.exp(x)[:, None], (8, 32))), (8,))
    assert clusters.roots[result(program, "exp")][0] != clusters.roots[result(program, "tanh")][0]


@pytest.mark.parametrize("wide", [False, True])
def test_merged_dims_are_not_joined(wide: bool) -> None:
    program, clusters = read(lambda x: jnp.tanh(jnp.exp(x).reshape(8 * 6, 16)), (8, 6, 16), wide=wide)
    root, dims = clusters.roots[result(program, "tanh")]
    assert clusters.sizes[root][dims[0] if dims[0] is not None else 0] in (8, 48)
    assert clusters.roots[result(program, "exp")][0] != root  # 8 and 6 are not one dim


def test_results_of_the_function_are_in_no_cluster() -> None:
    program, clusters = read(lambda x: jnp.exp(x), (8, 16))
    assert program.results[0] not in clusters.roots
