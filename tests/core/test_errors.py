"""Every public error works as an exception: it is raised, chained, given notes and pickled."""

import pickle

import jax
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
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_print_their_message(name: str) -> None:
    assert ("the axis does not divide" if name in ARGUMENTS else "it does not fit: 3 of 4") in str(build(name))


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
