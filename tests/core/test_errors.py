"""Every public error works as an exception: it is raised, chained, given notes and pickled."""

import pickle

import jax
import numpy as np
import pytest

import shardrules as sr

ARGUMENTS = {"RuleError": ("FSDP()", "layers/0/w", (8, 6), "the axis does not divide", "Pad it", "data")}
"""What to build an error from, where that is not only a message."""

ERRORS = [name for name in sr.errors.__all__ if not name.endswith("Warning")]


def build(name: str) -> Exception:
    return getattr(sr.errors, name)(*ARGUMENTS.get(name, ("it does not fit: 3 of 4",)))


@pytest.mark.parametrize("name", ERRORS)
def test_errors_can_be_raised_with_causes_and_notes(name: str) -> None:
    error = build(name)
    error.add_note("from filter_shard")
    with pytest.raises(type(error), match="does not") as caught:
        raise error from KeyError("cause")
    assert caught.value is error
    assert isinstance(error.__cause__, KeyError)
    assert error.__notes__ == ["from filter_shard"]


@pytest.mark.parametrize("name", ERRORS)
def test_errors_pickle(name: str) -> None:
    error = build(name)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert (again.args, str(again)) == (error.args, str(error))


@pytest.mark.parametrize("name", ERRORS)
def test_errors_print_their_message(name: str) -> None:
    assert ("the axis does not divide" if name in ARGUMENTS else "it does not fit: 3 of 4") in str(build(name))


def test_errors_of_any_length_print_their_beginning() -> None:
    error = sr.errors.TreeError("x" * 10**6)
    assert str(error) == "x" * 20_000 + " ... and 980,000 more characters"
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_errors_list_the_first_of_many_faults_and_how_many_more_there_are() -> None:
    mesh = sr.mesh_shape("data:4")
    rule = sr.DimShardingRule("data", 0)
    # Each of another shape, so that none are merged.
    names = [f"{index:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for index in range(2_000)]
    tree = {f"{name}z": jax.ShapeDtypeStruct((7, index + 1), np.float32) for index, name in enumerate(names)}
    plan = rule.plan(tree, mesh)
    with pytest.raises(sr.errors.PlanError, match=r"\n  and 1,980 more$") as caught:
        plan.check()
    assert len(caught.value.findings) == 2_000
    assert len(str(caught.value)) < 10_000
    assert repr(caught.value) == f"PlanError({str(caught.value)!r})"
    assert len(repr(sr.errors.TreeError("x" * 10**6))) < 30_000
    assert len(str(sr.errors.RuleError("x" * 10**6, "w", (8,), "why"))) < 30_000
    sound = rule.plan({"w": jax.ShapeDtypeStruct((8, 8), np.float32)}, mesh)
    with pytest.raises(sr.errors.TreeError, match=r"\nand 1,981 more$"):
        sound.bind(tree)


def test_a_missing_mesh_is_a_failed_assertion_too() -> None:
    # eformer asserts that a mesh is in force, and code around it expects that.
    for call in (
        lambda: sr.meshes.get_incontext_mesh(),
        lambda: sr.meshes.get_mesh_axis_names(),
        lambda: sr.meshes.get_axes_size_in_mesh("dp"),
        lambda: sr.presets.eformer.make_shard_and_gather_fns({"w": jax.P("dp")}),
        lambda: sr.with_sharding_constraint(jax.numpy.ones(8), jax.P("dp")),
        lambda: sr.presets.eformer.analyze_sharding_strategy({"w": jax.numpy.ones(8)}, {"w": jax.P("dp")}),
    ):
        with pytest.raises(AssertionError, match="mesh"):
            call()
