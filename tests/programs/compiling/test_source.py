"""The line of the user's code behind errors and equations."""

import inspect
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.source import Source, called_from, equation_line, is_library, short_line, user_frames, user_line
from shardrules.programs.compiling.source import naming_lines
from tests.programs.audits.audited import findings_of

MESH = sr.create_mesh("data:4,model:2")
X = jnp.ones((16, 32))


def here(marker: str) -> str:
    """The line of this file that ends in a comment with a marker: `# <marker>`."""
    lines, _ = inspect.findsource(here)
    line_numbers = [line_number for line_number, line in enumerate(lines, 1) if line.rstrip().endswith(f"# <{marker}>")]
    assert len(line_numbers) == 1, f"marker {marker!r} is on lines {line_numbers}"
    return f"{__file__}:{line_numbers[0]}"


# ---- whose file it is ----


@pytest.mark.parametrize("module", [jax, eqx, np, optax, nn, sr, os, re])
def test_installed_code_is_a_library(module: Any) -> None:
    assert is_library(module.__file__)


@pytest.mark.parametrize(
    "file", [f"{sysconfig.get_path('stdlib')}{os.sep}abc.py", "<string>", "<attrs generated init>"]
)
def test_code_without_a_file_is_a_library(file: str) -> None:
    assert is_library(file)


@pytest.mark.parametrize("file", [__file__, "model.py", "/home/me/jax/model.py", "/home/me/equinox_models/a.py"])
def test_all_other_code_is_the_users(file: str) -> None:
    assert not is_library(file)


def test_the_innermost_line_of_the_user() -> None:
    library, inner, outer = Source(jax.__file__, 7), Source("model.py", 12), Source("train.py", 30)
    assert user_line([library, inner, outer]) == "model.py:12"
    assert user_line([outer, library, inner]) == "train.py:30"
    assert user_line([library, Source(eqx.__file__, 9)]) == f"{eqx.__file__}:9"
    assert user_line([library]) == ""
    assert user_frames([library, inner, outer]) == [inner, outer]
    assert user_line([]) == ""


def test_short_lines() -> None:
    assert short_line("/home/me/models/llama.py:12") == "models/llama.py:12"
    assert short_line("llama.py:12") == "llama.py:12"
    assert short_line("") == ""


def test_the_caller_of_a_helper_is_named() -> None:
    library, inner, outer = Source(jax.__file__, 7), Source("/me/model.py", 12, "constrain"), Source("/me/train.py", 30)
    assert called_from([inner, library, outer]) == " (called at me/train.py:30)"
    assert called_from([library, inner]) == called_from([]) == ""


# ---- equations ----


def lines_of(fn: Callable[..., Any], *args: Any) -> dict[str, str]:
    """The line of each operation of a function."""
    with jax.set_mesh(MESH):
        return {equation.primitive.name: equation_line(equation) for equation in jax.make_jaxpr(fn)(*args).eqns}


def test_an_equation_is_on_the_line_that_calls_jax() -> None:
    def layer(x: Any) -> Any:
        x = jnp.tanh(x)  # <tanh>
        return lax.with_sharding_constraint(
            jnp.sin(x),  # <sin>
            P("data"),
        )

    lines = lines_of(layer, X)
    assert (lines["tanh"], lines["sin"]) == (here("tanh"), here("sin"))
    assert lines["sharding_constraint"] in (here("sin"), *(f"{__file__}:{int(here('sin').rpartition(':')[2]) - 1}",))


def test_a_library_equation_is_on_the_calling_line() -> None:
    linear = eqx.nn.Linear(32, 8, key=jax.random.key(0))

    def model(x: Any) -> Any:
        return jax.vmap(linear)(x)  # <linear>

    assert lines_of(model, X)["dot_general"] == here("linear")


def test_a_gradients_equations_are_on_the_forward_line() -> None:
    def loss(x: Any) -> Any:
        return jnp.sum(lax.cos(x) * 2)  # <cos>

    lines = lines_of(jax.grad(loss), X)
    assert lines["sin"] == here("cos")


# ---- errors ----


def refused(fn: Callable[..., Any]) -> sr.errors.PlanError:
    with (
        pytest.raises(sr.errors.PlanError, match="the function cannot be traced") as caught,
        jax.set_mesh(MESH),
        naming_lines(),
    ):
        jax.eval_shape(fn, X)
    return caught.value


def unknown(x: Any) -> Any:
    return lax.with_sharding_constraint(x, P("modle"))  # <unknown>


def unknown_named(x: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(None, "dta")))  # <named>


def unknown_in_a_tuple(x: Any) -> Any:
    return eqx.filter_shard(x, P(("data", "modell")))  # <tuple>


@pytest.mark.parametrize(
    ("fn", "marker", "axis", "meant"),
    [
        (unknown, "unknown", "modle", "model"),
        (unknown_named, "named", "dta", "data"),
        (unknown_in_a_tuple, "tuple", "modell", "model"),
    ],
)
def test_an_unknown_axis_names_the_line(fn: Callable[..., Any], marker: str, axis: str, meant: str) -> None:
    error = refused(fn)
    (finding,) = findings_of(error)
    assert (finding.severity, finding.code, finding.axis, finding.source) == (
        "error",
        "unknown-axis",
        axis,
        here(marker),
    )
    assert f"(did you mean {meant!r}?)" in finding.message
    assert "(data, model)" in finding.message
    assert f"at {here(marker)}" in str(error)


def constrain(x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, P(*spec))  # <constrain>


def block(x: Any) -> Any:
    return jnp.sin(constrain(x, "dta"))  # <block>


def test_a_typo_in_a_helper_names_its_caller() -> None:
    (finding,) = findings_of(refused(block))
    assert finding.source == here("constrain")
    assert f"(called at {short_line(here('block'))})" in finding.message


def twice(x: Any) -> Any:
    return lax.with_sharding_constraint(x, P("data", "data"))  # <twice>


def twice_in_a_tuple(x: Any) -> Any:
    return lax.with_sharding_constraint(x, P(("model", "model")))  # <twice-tuple>


@pytest.mark.parametrize(
    ("fn", "marker", "axis"), [(twice, "twice", "data"), (twice_in_a_tuple, "twice-tuple", "model")]
)
def test_an_axis_that_is_used_twice(fn: Callable[..., Any], marker: str, axis: str) -> None:
    (finding,) = findings_of(refused(fn))
    assert (finding.code, finding.axis, finding.source) == ("duplicate-axis", axis, here(marker))
    assert "more than once" in finding.message


def test_other_errors_get_a_note() -> None:
    def fails(x: Any) -> Any:
        return x @ jnp.ones((3, 3))  # <shapes>

    with pytest.raises(TypeError, match="contracting dimensions") as caught, naming_lines():
        jax.eval_shape(fails, X)
    assert f"while tracing {here('shapes')}" in caught.value.__notes__


def test_an_error_of_this_package_stays_what_it_is() -> None:
    error = sr.errors.PlanError("Resource axis: a of P('a',) is not found in mesh: ('b',)", ())
    with pytest.raises(sr.errors.PlanError, match="Resource axis") as caught, naming_lines():
        raise error
    assert caught.value is error


def test_without_errors_nothing_happens() -> None:
    with naming_lines():
        assert jax.eval_shape(jnp.sum, X).shape == ()


def test_interrupts_pass_by() -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^$") as caught, naming_lines():
        raise KeyboardInterrupt
    assert not getattr(caught.value, "__notes__", [])


def test_installed_code_is_recognised_by_its_folder() -> None:
    assert is_library(str(Path("venv", "lib", "site-packages", "mine", "model.py")))
    assert is_library("/usr/lib/python3/dist-packages/mine/model.py")
