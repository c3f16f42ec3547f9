"""A traced function taken apart: which work is shared, which is not, and that the parts compute the whole."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardrules.placement.outline import Outline, outline

MANY = 10**12


def taken_apart(make: Callable[..., Any], *args: Any, marks: Any = None, program_bytes: int = MANY) -> Outline:
    closed, shapes, _ = eqx.filter_make_jaxpr(make)(*args)
    outputs = len(jax.tree.leaves(shapes))
    work = outline(closed, [0] * outputs if marks is None else marks, [0] * outputs, program_bytes)
    values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True))
    values |= dict(zip(work.seeds, work.seed_run(*[values[var] for var in work.seed_inputs]), strict=True))
    results: dict[int, Any] = {index: values[var] for var, index in work.passed}
    for program in work.programs:
        for call in program.calls:
            results |= dict(zip(call.outputs, program.run(*[values[var] for var in call.inputs]), strict=True))
    # Whatever it looks like, all of it together is what the function does, each output once.
    assert sorted(results) == list(range(outputs))
    assert sum(len(call.outputs) for program in work.programs for call in program.calls) + len(work.passed) == outputs
    for index, expected in enumerate(jax.tree.leaves(make(*args))):
        np.testing.assert_array_equal(results[index], expected)
    return work


def shape_of(work: Outline) -> list[tuple[int, int]]:
    """The number of outputs of each program in a call, and the number of calls."""
    return [(len(program.calls[0].outputs), len(program.calls)) for program in work.programs]


def normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape or (8, 4))


def pair(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[jax.Array], Any]:
    """Returns a function that draws twice, and computes something with each."""

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key)
        return first(normal(keys[0])), second(normal(keys[1]))

    return make


def layers(key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    return [(normal(subkey), jax.random.uniform(subkey, (8,))) for subkey in keys], normal(key, 16, 16)


@pytest.mark.parametrize(
    ("make", "marks", "expected"),
    [
        (lambda key: [normal(subkey) for subkey in jax.random.split(key, 5)], None, [(1, 5)]),
        (layers, None, [(1, 1), (2, 4)]),  # groups of equal size share a program
        (lambda key: [normal(key, 8, n) for n in range(1, 5)], None, [(4, 1)]),
        (pair(jnp.sin, jnp.sin), None, [(1, 2)]),
        (pair(jnp.sin, jnp.sin), ["x", "y"], [(2, 1)]),
        (pair(lambda x: 2 * x, lambda x: 3 * x), None, [(2, 1)]),
        (pair(jnp.sin, jnp.cos), None, [(2, 1)]),
        (lambda key: jnp.split(normal(key, 192, 64), 3), None, [(3, 1)]),  # large work is done once
        (lambda key: [normal(key)] * 2, None, [(1, 2)]),
    ],
)
def test_work_that_differs_in_keys_alone_shares_a_program(make: Any, marks: Any, expected: list[Any]) -> None:
    assert shape_of(taken_apart(make, jax.random.key(0), marks=marks)) == expected


def test_programs_stay_within_the_byte_limit() -> None:
    for program_bytes, count in ((8 * 5 * 4, 2), (1, 4)):
        work = taken_apart(
            lambda key: [normal(key, 8, n) for n in range(1, 5)], jax.random.key(0), program_bytes=program_bytes
        )
        assert len(work.programs) == count


def test_equal_constants_of_other_identity_are_told_apart() -> None:
    tables = [np.full((8, 8), n, np.float32) for n in range(2)]

    def make(key: jax.Array) -> Any:
        a, b = jax.random.split(key)
        return jax.random.normal(a, (8, 8)) + tables[0], jax.random.normal(b, (8, 8)) + tables[1]

    taken_apart(make, jax.random.key(0))  # which compares the values

    def inner(table: np.ndarray) -> Callable[[Any], Any]:
        return jax.jit(lambda x: x + table)

    def nested(key: jax.Array) -> Any:
        a, b = jax.random.split(key)
        return inner(tables[0])(jax.random.normal(a, (8, 8))), inner(tables[1])(jax.random.normal(b, (8, 8)))

    taken_apart(nested, jax.random.key(0))


def test_floats_are_not_cut_and_keys_and_small_integers_are() -> None:
    def make(key: jax.Array) -> Any:
        scale = jnp.sqrt(jnp.float32(3))
        order = jax.random.permutation(key, 8)
        return jax.random.normal(key, (8,)) / scale, jax.random.normal(key, (8, 2))[order]

    work = taken_apart(make, jax.random.key(0))
    assert all(not jnp.issubdtype(var.aval.dtype, jnp.floating) for var in work.seeds)
    assert work.seeds
    assert all(var.aval.shape == (8,) for var in work.seeds)


def test_small_constants_are_part_of_a_program() -> None:
    table = np.linspace(0, 1, 8, dtype=np.float32)

    def make(key: jax.Array) -> Any:
        return jax.random.normal(key, (8,)) * jnp.log(jnp.arange(1, 9)) + jnp.exp(table)

    work = taken_apart(make, jax.random.key(0))
    assert work.seeds == ()
    assert [[str(var.aval) for var in call.inputs] for program in work.programs for call in program.calls] == [
        ["key<fry>[]"]
    ]


def test_large_constants_are_inputs_of_programs() -> None:
    table = np.ones((2**22 + 1,), np.float32)
    work = taken_apart(lambda key: jax.random.normal(key, table.shape) + table, jax.random.key(0))
    assert len(work.programs[0].calls[0].inputs) == 2


def test_integers_from_large_work_are_not_seeds() -> None:
    def make(key: jax.Array) -> Any:
        largest = jnp.argmax(jax.random.normal(key, (128, 128)))
        return jax.random.normal(key, (8,)) + largest

    assert taken_apart(make, jax.random.key(0)).seeds == ()


def test_inputs_and_constants_that_are_outputs_are_passed() -> None:
    def make(key: jax.Array, x: jax.Array) -> Any:
        return x, jnp.float32(3), jax.random.normal(key, (2,)), x

    work = taken_apart(make, jax.random.key(0), jnp.ones(4))
    assert [index for _, index in work.passed] == [0, 3]


def test_a_function_with_effects_stays_in_one_piece(capfd: pytest.CaptureFixture[str]) -> None:
    def make(key: jax.Array) -> Any:
        jax.debug.print("made")
        return [jax.random.normal(subkey, (8,)) for subkey in jax.random.split(key, 3)]

    work = taken_apart(make, jax.random.key(0))
    assert shape_of(work) == [(3, 1)]
    jax.effects_barrier()
    assert "made" in capfd.readouterr().out


class Callback:
    """Says that it is equal to its like, whatever it adds."""

    def __init__(self, added: float) -> None:
        self.added = added

    def __call__(self, x: Any) -> Any:
        return np.asarray(x) + np.float32(self.added)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Callback)

    def __hash__(self) -> int:
        return 0


def test_values_with_their_own_equality_are_told_apart() -> None:
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key)
        pairs = zip(keys, (2.0, 3.0), strict=True)
        return [jax.pure_callback(Callback(added), shape, jax.random.normal(subkey, (8,))) for subkey, added in pairs]

    assert shape_of(taken_apart(make, jax.random.key(0))) == [(2, 1)]
