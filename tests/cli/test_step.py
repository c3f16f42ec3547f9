"""How the command line shards the arguments of a step, and what they are for."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules.cli.errors import UsageError
from shardrules.cli.rules import load_rules
from shardrules.cli.step import Step
from shardrules.programs.compiling.arguments import read_arguments
from shardrules.programs.compiling.roles import BATCH, PARAMETERS, STATE, read_roles

MESH = sr.mesh_shape("data:8")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"up": f32(256, 1024), "down": f32(1024, 256)}
MOMENTS = {"count": jax.ShapeDtypeStruct((), jnp.int32), "mu": f32(256, 1024)}


def step(a: Any, b: Any, c: Any = None) -> Any:
    raise AssertionError("never called: the shardings are for its arguments")


@pytest.mark.parametrize(
    ("args", "params_path", "roles"),
    [
        ((PARAMS, f32(512, 256)), None, [PARAMETERS, BATCH]),  # inference, or SGD without momentum
        ((f32(512, 256), PARAMS), "b", [BATCH, PARAMETERS]),
        (({"model": PARAMS}, f32(512, 256)), "a/model", [PARAMETERS, BATCH]),
        ((PARAMS, {"mu": PARAMS, "nu": PARAMS}, f32(512, 256)), None, [PARAMETERS, STATE, BATCH]),
        ((f32(256, 1024), MOMENTS, f32(512, 256)), None, [PARAMETERS, STATE, BATCH]),  # a single matrix
    ],
)
def test_arguments_have_the_roles_of_a_step(args: tuple[Any, ...], params_path: str | None, roles: list[str]) -> None:
    loaded = Step("step.py:training", step, args)
    _, shardings, whole = loaded.shardings(load_rules("fsdp('data')"), MESH, params_path, "data")
    arguments = read_arguments(step, args, MESH, in_shardings=shardings)
    by_owner: dict[int, list[str]] = {}
    for owner, array, role in zip(arguments.owners, arguments.arrays, read_roles(arguments), strict=True):
        if array.shape:
            by_owner.setdefault(owner, []).append(role)
    assert not whole
    assert [set(of_argument) for of_argument in by_owner.values()] == [{role} for role in roles]


def test_arguments_of_a_variadic_step_have_names_with_a_slash() -> None:
    def variadic(*args: Any) -> Any:
        raise AssertionError("never called")

    step = Step("step.py:training", variadic, ({"model": PARAMS}, PARAMS, f32(512, 256)))
    assert step.parameters("args/1") == (1, PARAMS)
    assert step.parameters("args/0/model") == (None, PARAMS)
    with pytest.raises(UsageError, match=r"--params args/3: unknown argument 'args' .*; the arguments are args/0"):
        step.parameters("args/3")


@pytest.mark.parametrize("fn", [max, lambda a: a], ids=["no signature", "one argument"])
def test_arguments_that_a_signature_does_not_name_have_indices(fn: Any) -> None:
    step = Step("step.py:training", fn, (PARAMS, f32(512, 256)))
    assert step.names == ("0", "1")
    assert step.parameters("0/up") == (None, PARAMS["up"])
