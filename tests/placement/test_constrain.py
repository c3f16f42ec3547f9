"""Sharding constraints: by mesh axes and by logical ones, on axes of any type, inside and outside of jit."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.presets import eformer

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TYPES = [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)]
U = P.UNCONSTRAINED


def mesh_of(types: tuple[AxisType, AxisType] = (AUTO, AUTO)) -> Mesh:
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=types)


MESH = mesh_of()
ONES = jnp.ones((8, 8))


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("spec", [P("dp", "tp"), P("tp", "dp"), P(None, "tp"), P("dp"), P()], ids=str)
def test_sound_specs_hold_inside_and_outside_jit(types: tuple[AxisType, AxisType], spec: P) -> None:
    mesh = mesh_of(types)
    constrain = functools.partial(sr.with_sharding_constraint, sharding=spec)
    with jax.set_mesh(mesh):
        for result in (constrain(ONES), jax.jit(lambda x: constrain(x * 1))(ONES), constrain(np.ones((8, 8)))):
            assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
            np.testing.assert_array_equal(result, ONES)


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_unconstrained_dimensions_keep_their_sharding(types: tuple[AxisType, AxisType]) -> None:
    mesh = mesh_of(types)
    placed = jax.device_put(ONES, NamedSharding(mesh, P("dp")))
    with jax.set_mesh(mesh):
        outside = sr.with_sharding_constraint(placed, P(U, "tp"))
        inside = jax.jit(lambda x: sr.with_sharding_constraint(x, P(U, "tp")))(placed)
    assert outside.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), 2)
    if types != (AUTO, EXPLICIT):  # there XLA decides otherwise for the dimension that is left to it
        assert inside.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), 2)


def test_a_named_sharding_brings_its_own_mesh_and_memory() -> None:
    sharding = NamedSharding(MESH, P("dp"), memory_kind="pinned_host")
    assert sr.with_sharding_constraint(ONES, sharding).sharding == sharding
    inside = jax.jit(lambda x: sr.with_sharding_constraint(x, sharding))(ONES)
    assert inside.sharding.memory_kind == "pinned_host"
    assert inside.sharding.is_equivalent_to(sharding, 2)


def test_trees_and_prefixes_are_taken_and_other_leaves_stay() -> None:
    tree = {"a": [ONES, np.ones((8, 4))], "b": ONES, "n": 3, "f": jax.nn.relu}
    with jax.set_mesh(MESH):
        constrained = sr.with_sharding_constraint(tree, {"a": P("dp"), "b": P("tp"), "n": P(), "f": P()})
        assert [x.sharding.spec for x in (*constrained["a"], constrained["b"])] == [P("dp"), P("dp"), P("tp")]
        assert (constrained["n"], constrained["f"]) == (3, jax.nn.relu)
        assert sr.with_sharding_constraint("text", P("dp")) == "text"
        with pytest.raises(sr.errors.TreeError, match="do not have the structure of the tree"):
            sr.with_sharding_constraint(tree, {"a": P()})
        with pytest.raises(sr.errors.ConfigTypeError, match="takes a PartitionSpec or a sharding, got 'dp'"):
            sr.with_sharding_constraint(ONES, "dp")


def test_it_sees_a_legacy_mesh() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with MESH:
            assert sr.with_sharding_constraint(ONES, P("dp")).sharding.spec == P("dp")
            assert jax.jit(lambda x: sr.with_sharding_constraint(x * 1, P("dp", "tp")))(ONES).sharding.spec == P(
                "dp", "tp"
            )


def test_without_a_mesh_it_is_refused() -> None:
    with pytest.raises(sr.errors.NoMeshError, match="no mesh is in force"):
        sr.with_sharding_constraint(ONES, P("dp"))


def test_gradients_and_vmap_go_through() -> None:
    with jax.set_mesh(MESH):
        gradient = jax.jit(jax.grad(lambda x: (sr.with_sharding_constraint(x, P("dp", "tp")) ** 2).sum()))(ONES)
        np.testing.assert_array_equal(gradient, 2 * ONES)
        mapped = jax.jit(jax.vmap(lambda x: sr.with_sharding_constraint(x * 1, P("tp"))))(ONES)
        assert mapped.sharding.spec[1] == "tp"


def test_a_mesh_that_is_not_in_force_is_refused_inside_jit() -> None:
    other = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AUTO, AUTO))
    shards = (
        lambda x: sr.with_sharding_constraint(2 * x, NamedSharding(other, P("dp"))),
        lambda x: sr.filter_shard(2 * x, P("dp"), other),
    )
    for shard in shards:
        assert jax.jit(shard)(ONES).sharding.is_equivalent_to(NamedSharding(other, P("dp")), 2)
        with jax.set_mesh(MESH):
            assert shard(ONES).sharding.is_equivalent_to(NamedSharding(other, P("dp")), 2)
            with pytest.raises(sr.errors.MeshError, match="on the mesh dp:4,tp:2, while dp:2,tp:4 is in force"):
                jax.jit(shard)(ONES)


# ---- unavailable axes ----


def test_unknown_axes_skip_the_constraint_with_a_warning() -> None:
    with jax.set_mesh(MESH):
        with pytest.warns(
            sr.errors.ShardingWarning, match=r"x \(8, 8\): P\('zz', 'tp'\) was skipped: unknown axis 'zz'"
        ) as caught:
            assert sr.with_sharding_constraint(ONES, P("zz", "tp")) is ONES
        assert caught[0].filename == __file__
        with pytest.warns(sr.errors.ShardingWarning, match="was skipped"):
            inside = jax.jit(lambda x: sr.with_sharding_constraint(x, P("zz", "tp")))(ONES)
        assert inside.sharding.is_fully_replicated


def test_dropping_leaves_out_that_axis_only() -> None:
    with jax.set_mesh(MESH), pytest.warns(sr.errors.ShardingWarning, match=r"\(did you mean 'tp'\?\)"):
        constrained = sr.with_sharding_constraint(ONES, P(("dp", "tpp"), "tp"), missing="drop")
    assert constrained.sharding.spec == P("dp", "tp")


def test_missing_axes_can_be_an_error_that_lists_all_arrays() -> None:
    with (
        jax.set_mesh(MESH),
        pytest.raises(
            sr.errors.UnknownAxisError, match=r"(?s)a \(8, 8\).*unknown axis 'xx'.*b \(8, 8\).*unknown axis 'xx'"
        ),
    ):
        sr.with_sharding_constraint({"a": ONES, "b": ONES}, P("xx"), missing="error")


@pytest.mark.parametrize(("missing", "spec"), [("skip", P("dp")), ("drop", P("dp", "tp"))])
def test_manual_axes_are_skipped_or_dropped_inside_shard_map(missing: Any, spec: P) -> None:
    def inner(x: Any) -> Any:
        return sr.with_sharding_constraint(x, P("dp", "tp"), missing=missing)

    with jax.set_mesh(MESH):
        mapped = jax.jit(jax.shard_map(inner, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}))
        with pytest.warns(sr.errors.ShardingWarning, match="axis 'dp' is Manual here, inside shard_map"):
            result = mapped(ONES)
    assert result.sharding.is_equivalent_to(NamedSharding(MESH, spec), 2)


def test_manual_axes_can_be_an_error() -> None:
    def inner(x: Any) -> Any:
        return sr.with_sharding_constraint(x, P("dp"), missing="error")

    with jax.set_mesh(MESH), pytest.raises(sr.errors.UnknownAxisError, match="axis 'dp' is Manual here"):
        jax.jit(jax.shard_map(inner, in_specs=P("dp"), out_specs=P("dp")))(ONES)


def test_the_other_axes_are_constrained_inside_shard_map() -> None:
    for mesh in (MESH, mesh_of((EXPLICIT, EXPLICIT))):
        with jax.set_mesh(mesh):
            mapped = jax.shard_map(
                lambda x: sr.with_sharding_constraint(x, P(None, "tp")),
                in_specs=P("dp"),
                out_specs=P("dp"),
                axis_names={"dp"},
            )
            # Newer JAX refuses to split an argument of another sharding, where axes are Explicit.
            result = jax.jit(mapped)(jax.device_put(ONES, NamedSharding(mesh, P("dp"))))
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), 2)


# ---- dimensions that do not divide ----


@pytest.mark.parametrize("types", [(AUTO, AUTO), (EXPLICIT, EXPLICIT)], ids=str)
@pytest.mark.parametrize("inside", [True, False])
def test_indivisible_dimensions_are_errors(types: tuple[AxisType, AxisType], inside: bool) -> None:
    def constrain(x: Any) -> Any:
        return sr.with_sharding_constraint({"h": x}, P(("dp", "tp")))

    with (
        jax.set_mesh(mesh_of(types)),
        pytest.raises(
            sr.errors.IndivisibleError,
            match=r"h \(10, 8\): array axis 0 is partitioned 8 times, but the dimension size is 10 \(mesh axis dp x",
        ),
    ):
        (jax.jit(constrain) if inside else constrain)(jnp.ones((10, 8)))


def test_jax_itself_would_weaken_it() -> None:
    """The reason for the error: if JAX starts to refuse, the words that say so can go."""
    with jax.set_mesh(MESH):
        result = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 1, P(("dp", "tp"))))(jnp.ones((10, 8)))
    assert not result.sharding.is_equivalent_to(NamedSharding(MESH, P(("dp", "tp"))), 2)


@pytest.mark.parametrize(
    ("shape", "spec", "becomes"),
    [
        ((7, 12), P("dp", "tp"), P(None, "tp")),
        ((8,), P("dp", "tp"), P("dp")),
        ((10, 8), P(("dp", "tp")), P("dp")),
    ],
    ids=str,
)
def test_dropping_keeps_what_divides_with_a_warning(shape: tuple[int, ...], spec: P, becomes: P) -> None:
    with jax.set_mesh(MESH), pytest.warns(sr.errors.ShardingWarning, match="which fits"):
        constrained = sr.with_sharding_constraint(jnp.ones(shape), spec, indivisible="drop")
    assert constrained.sharding.is_equivalent_to(NamedSharding(MESH, becomes), len(shape))


@pytest.mark.parametrize(
    ("spec", "message"),
    [(P("dp", None, "tp"), "has 3 entries, the array has 2 dimensions"), (P("dp", "dp"), "uses axis 'dp' twice")],
)
def test_other_unsound_specs_are_errors(spec: P, message: str) -> None:
    with jax.set_mesh(MESH), pytest.raises(sr.errors.SpecError, match=message):
        sr.with_sharding_constraint(ONES, spec)


@pytest.mark.parametrize("word", [{"missing": "ignore"}, {"indivisible": "skip"}])
def test_unknown_policies_are_refused(word: Any) -> None:
    with jax.set_mesh(MESH), pytest.raises(sr.errors.ConfigError, match="must be one of"):
        sr.with_sharding_constraint(ONES, P("dp"), **word)


# ---- logical axes ----


def test_logical_names_mean_what_logical_axes_says() -> None:
    with jax.set_mesh(MESH), sr.logical_axes({"batch": "dp", "embed": ("tp",), "norm": None}):
        assert sr.constrain(ONES, "batch", "embed").sharding.spec == P("dp", "tp")
        assert sr.constrain(ONES, None, "embed").sharding.spec == P(None, "tp")
        assert sr.constrain(ONES, "batch", "norm").sharding.is_equivalent_to(NamedSharding(MESH, P("dp")), 2)
        assert sr.constrain(np.ones((8, 8)), "batch", None).sharding.spec[0] == "dp"


def test_constrain_does_nothing_without_logical_axes() -> None:
    assert sr.constrain(ONES, "batch", "embed") is ONES
    with jax.set_mesh(MESH):
        assert sr.constrain(ONES, "whatever") is ONES


def test_functions_are_traced_again_under_other_logical_axes() -> None:
    traces: list[int] = []

    @jax.jit
    def double(x: Any) -> Any:
        traces.append(1)
        return sr.constrain(2 * x, "batch", "embed")

    with jax.set_mesh(MESH):
        with sr.logical_axes({"batch": "dp", "embed": "tp"}):
            assert double(ONES).sharding.spec == P("dp", "tp")
            double(ONES)
            with sr.logical_axes({"batch": "tp", "embed": "dp"}):
                assert double(ONES).sharding.spec == P("tp", "dp")
            assert double(ONES).sharding.spec == P("dp", "tp")
        assert double(ONES).sharding.is_fully_replicated
    assert len(traces) == 3


def test_a_partition_axis_gives_meaning_by_mode() -> None:
    axes = eformer.PartitionAxis(
        data_parallel_axis="dp",
        batch_axis="dp",
        hidden_state_axis="tp",
        sequence_axis=None,
        query_sequence_axis=None,
        generation_batch_axis=None,
    )
    hidden = jnp.ones((8, 4, 8))
    with jax.set_mesh(MESH):
        with sr.logical_axes(axes):
            assert sr.constrain(hidden, eformer.BATCH, eformer.LENGTH, eformer.EMBED).sharding.spec == P(
                "dp", None, "tp"
            )
            assert sr.constrain(hidden, eformer.HiddenStateSharding).sharding.spec == P("dp", None, "tp")
        with sr.logical_axes(axes, mode=eformer.MODE_DECODE):
            assert sr.constrain(hidden, eformer.BATCH, eformer.LENGTH, None).sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (
            ("bacth", "embed"),
            sr.errors.UnknownAxisError,
            r"unknown logical axis 'bacth' \(did you mean 'batch'\?\) for dimension 0 of \(8, 8\)",
        ),
        (("batch",), sr.errors.SpecError, r"1 logical axes \('batch',\) for an array of shape \(8, 8\)"),
        (("batch", "rows"), sr.errors.SpecError, "'dp' would split both 'batch' and 'rows'"),
    ],
)
def test_wrong_logical_names_are_refused(names: Any, error: Any, message: str) -> None:
    with (
        jax.set_mesh(MESH),
        sr.logical_axes({"batch": "dp", "embed": "tp", "rows": "dp"}),
        pytest.raises(error, match=message),
    ):
        sr.constrain(ONES, *names)


def test_policies_hold_for_logical_names_too() -> None:
    with jax.set_mesh(MESH), sr.logical_axes({"batch": "dp", "seq": "sp"}):
        with pytest.warns(sr.errors.ShardingWarning, match=r"constrain: .* unknown axis 'sp'"):
            assert sr.constrain(ONES, "batch", "seq", missing="drop").sharding.spec[0] == "dp"
        with pytest.raises(sr.errors.IndivisibleError, match=r"constrain: .*dimension size is 7"):
            sr.constrain(jnp.ones((7, 8)), "batch", None)
