"""The axis algebra, against what JAX makes of the same specs on eight devices."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core import spec as algebra
from shardrules.core.axes import as_axis, axis_tuple, mesh_sizes

SIZES = {"a": 2, "b": 2, "one": 1, "c": 2}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return sr.create_mesh(",".join(f"{axis}:{size}" for axis, size in SIZES.items()))


@st.composite
def specs(draw: st.DrawFn, most: int = 4) -> P:
    """Specs in every way of writing: names, lists, tuples of one, `None`, trailing `None`s."""
    names = draw(st.permutations(list(SIZES)))
    parts: list[Any] = []
    for _ in range(draw(st.integers(0, most))):
        axes = [names.pop() for _ in range(draw(st.integers(0, min(3, len(names)))))]
        plain = len(axes) == 1 and draw(st.booleans())
        parts.append(None if not axes else axes[0] if plain else tuple(axes))
    return P(*parts)


SHAPES = st.lists(st.integers(1, 4).map(lambda size: 4 * size), min_size=4, max_size=4).map(tuple)


@given(specs(), specs())
def test_specs_are_the_same_where_jax_places_arrays_alike(mesh: jax.sharding.Mesh, spec: P, other: P) -> None:
    alike = NamedSharding(mesh, spec).is_equivalent_to(NamedSharding(mesh, other), 4)
    # JAX looks through axes of size 1, which split nothing; as a spec they are still something else.
    bare = [
        P(*(tuple(axis for axis in entry if axis != "one") for entry in algebra.entries(spec)))
        for spec in (spec, other)
    ]
    assert sr.specs.same(*bare) == alike
    assert sr.specs.same(spec, other) == (sr.specs.canonical(spec) == sr.specs.canonical(other))


@given(specs())
def test_the_canonical_form_is_one_and_means_the_same(mesh: jax.sharding.Mesh, spec: P) -> None:
    short = sr.specs.canonical(spec)
    assert sr.specs.canonical(short) == short
    assert NamedSharding(mesh, short).is_equivalent_to(NamedSharding(mesh, spec), 4)
    assert not short.partitions or short.partitions[-1] is not None
    assert all(not isinstance(part, tuple) or len(part) > 1 for part in short.partitions)
    assert sr.specs.same(spec, algebra.make_spec(algebra.entries(spec)))
    assert sr.specs.same(spec, algebra.pad(spec, 4))
    assert len(algebra.pad(spec, 4).partitions) == 4
    assert algebra.spec_from_json(algebra.spec_to_json(spec)) == spec
    assert sr.specs.same(eval(algebra.spec_repr(spec)), spec)


@given(specs(), SHAPES)
def test_shards_are_those_of_jax(mesh: jax.sharding.Mesh, spec: P, shape: tuple[int, ...]) -> None:
    assume(
        all(size % algebra.part_count(P(part), SIZES) == 0 for size, part in zip(shape, spec.partitions, strict=False))
    )
    sharding = NamedSharding(mesh, spec)
    assert sr.specs.shard_shape(shape, spec, mesh_sizes(mesh)) == sharding.shard_shape(shape)
    distinct = {str(index) for index in sharding.devices_indices_map(shape).values()}
    assert algebra.part_count(spec, SIZES) == len(distinct)
    shard_bytes = sr.specs.shard_bytes(shape, jnp.bfloat16, spec, SIZES)
    assert shard_bytes == 2 * math.prod(sharding.shard_shape(shape))
    assert list(algebra.axis_names(spec)) == [
        axis for part in spec.partitions if part for axis in axis_tuple(as_axis(part))
    ]


@pytest.mark.parametrize(
    ("entry", "size", "prefix"),
    [
        (("a", "b", "c"), 8, ("a", "b", "c")),
        (("a", "b", "c"), 4, ("a", "b")),
        (("a", "b", "c"), 6, ("a",)),
        (("a", "b"), 7, ()),
        (("one", "a"), 7, ("one",)),
        (("a", "nope", "b"), 8, ("a",)),
        ((), 7, ()),
        (("a",), 0, ("a",)),
    ],
)
def test_the_prefix_that_divides(entry: tuple[str, ...], size: int, prefix: tuple[str, ...]) -> None:
    assert algebra.divisible_prefix(entry, size, SIZES) == prefix


@pytest.mark.parametrize(
    ("shape", "spec", "largest"),
    [((7,), P("a"), (4,)), ((1, 3), P(None, ("a", "b")), (1, 1)), ((0, 4), P("a", "b"), (0, 2)), ((), P(), ())],
)
def test_of_uneven_shards_the_largest_counts(shape: tuple[int, ...], spec: P, largest: tuple[int, ...]) -> None:
    assert sr.specs.shard_shape(shape, spec, SIZES) == largest


def test_unconstrained_is_kept_and_splits_nothing() -> None:
    spec = P(P.UNCONSTRAINED, ("a",), None)
    assert sr.specs.canonical(spec) == P(P.UNCONSTRAINED, "a")
    assert not sr.specs.same(spec, P(None, "a"))
    assert sr.specs.canonical(P(None, P.UNCONSTRAINED)) == P(None, P.UNCONSTRAINED)
    assert algebra.part_count(spec, SIZES) == 2
    assert algebra.axis_names(spec) == ("a",)
    assert algebra.spec_from_json(algebra.spec_to_json(spec)) == spec


def test_padding_and_trimming() -> None:
    assert algebra.pad(P("a"), 3) == P("a", None, None)
    assert algebra.trim(P("a", "b"), 1) == P("a")
    assert algebra.trim(P(None, "b"), 1) == P(None)
    assert algebra.trim(P("a"), 3) == P("a")
    with pytest.raises(sr.errors.SpecError, match="2 entries"):
        algebra.pad(P("a", "b"), 1)


def test_keys_of_specs_tell_them_apart() -> None:
    assert algebra.spec_key(P("a", ("b", "c"))) == algebra.spec_key(P("a", ("b", "c")))
    assert algebra.spec_key(P("a")) != algebra.spec_key(P(None, "a"))
    assert algebra.spec_key(P()) != algebra.spec_key(None)


DTYPES = [jnp.bool_, jnp.int4, jnp.uint2, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64, np.float64, np.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (0, 3)], ids=str)
def test_bytes_are_those_that_xla_takes(dtype: Any, shape: tuple[int, ...]) -> None:
    used = jax.jit(lambda x: x, keep_unused=True).lower(np.zeros(shape, dtype)).compile().memory_analysis()
    assert used is not None
    assert algebra.array_bytes(shape, np.dtype(dtype), packed=True) == used.argument_size_in_bytes


@pytest.mark.parametrize("axis", [(), "", ["a", "a"], 3, ("a", 3), None, ("a", "")], ids=str)
def test_what_is_no_axis_is_refused(axis: Any) -> None:
    with pytest.raises(sr.errors.ConfigError, match="mesh axis"):
        as_axis(axis)
