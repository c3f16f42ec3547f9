"""Roles of arguments: guessed for the usual ways to keep models, states and batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.errors import ConfigError, TreeError
from shardrules.programs.compiling.arguments import read_arguments
from shardrules.programs.compiling.roles import BATCH, PARAMETERS, STATE, read_roles
from tests.programs.audits.audited import f32, i32

MESH = sr.mesh_shape("data:4,model:2")


def step(a: Any, b: Any, c: Any, d: Any) -> Any:
    raise AssertionError("it is never called: the roles are for its arguments")


def step_of_any(*args: Any) -> Any:
    raise AssertionError("never called either")


def roles_of(*args: Any, plan: Any = None, roles: Any = None) -> list[dict[str, None]]:
    """The roles that are found in each argument, in order of appearance."""
    arguments = read_arguments(step, args, MESH, plan)
    by_owner: list[dict[str, None]] = [{} for _ in args]
    for role, owner in zip(read_roles(arguments, roles), arguments.owners, strict=True):
        by_owner[owner][role] = None
    return by_owner


def by_path(*args: Any, **options: Any) -> dict[str, str]:
    arguments = read_arguments(step, args, MESH)
    return {
        array.path.partition("/")[2]: role
        for array, role in zip(arguments.arrays, read_roles(arguments, **options), strict=True)
    }


def only(*roles: str) -> list[dict[str, None]]:
    return [{role: None} for role in roles]


LAYER = {"kernel": f32(8, 16), "bias": f32(16)}
PARAMS: dict[str, Any] = {"embed": f32(32, 8), "layers": [LAYER, LAYER], "head": f32(16, 32)}
BATCHES: tuple[Any, ...] = (i32(16, 8), f32(16, 8), {"x": f32(16, 4, 4, 3), "y": i32(16)}, (f32(16, 8), i32(16)))

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-3, 100)),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.ema(0.99)),
    "accumulated": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "masked": optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "two": optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)},
        lambda params: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", params),
    ),
    "hyper": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}


def state_of(name: str, params: Any) -> Any:
    return jax.eval_shape(OPTIMIZERS[name].init, params)


@pytest.mark.parametrize("batch", BATCHES, ids=["tokens", "floats", "dict", "pair"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_state_and_batch(name: str, batch: Any) -> None:
    assert roles_of(PARAMS, state_of(name, PARAMS), batch) == only(PARAMETERS, STATE, BATCH)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_another_order(name: str) -> None:
    state = state_of(name, PARAMS)
    assert roles_of(state, PARAMS, i32(16, 8), jax.random.key(0)) == only(STATE, PARAMETERS, BATCH, BATCH)
    assert roles_of(i32(16, 8), PARAMS, state) == only(BATCH, PARAMETERS, STATE)


@pytest.mark.parametrize("name", ["adam", "adafactor", "accumulated"])
def test_an_equinox_model(name: str) -> None:
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)))
    state = eqx.filter_eval_shape(lambda m: OPTIMIZERS[name].init(eqx.filter(m, eqx.is_inexact_array)), model)
    assert roles_of(model, state, f32(32, 8), f32(32, 8)) == only(PARAMETERS, STATE, BATCH, BATCH)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_of_the_parameters_changes_nothing(name: str) -> None:
    plan = sr.RegexShardingRule([("kernel", P("data")), (".*", P())]).plan(PARAMS, MESH)
    roles = roles_of(PARAMS, state_of(name, PARAMS), i32(16, 8), plan=plan)
    assert roles == only(PARAMETERS, STATE, BATCH)


class Steps(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


@dataclasses.dataclass
class Training:
    params: Any
    opt_state: Any
    step: Any


jtu.register_dataclass(Training, ["params", "opt_state", "step"], [])


class Learner(eqx.Module):
    model: Any
    moments: Any
    step: Any


CONTAINERS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "named tuple": lambda state: (Steps(i32(), PARAMS, state), "params"),
    "dataclass": lambda state: (Training(PARAMS, state, i32()), "params"),
    "dict": lambda state: ({"params": PARAMS, "opt": state, "step": i32()}, "params"),
    "module": lambda state: (Learner(PARAMS, state, i32()), "model"),
    "tuple": lambda state: ((PARAMS, state, i32()), "0"),
    "list": lambda state: ([PARAMS, state], "0"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_one_argument_that_holds_both(kind: str, name: str) -> None:
    both, model = CONTAINERS[kind](state_of(name, PARAMS))
    assert roles_of(both, i32(16, 8))[1] == {BATCH: None}
    wrong = {
        path: role
        for path, role in by_path(both, i32(16, 8)).items()
        if path and role != (PARAMETERS if path.split("/")[0] == model else STATE)
    }
    assert wrong == {}


def test_a_train_state_of_flax() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(8)(nn.relu(nn.Dense(16)(x)))

    model = Model()

    def init() -> Any:
        params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    state = jax.eval_shape(init)
    by_leaf = by_path(state, f32(16, 8))
    assert {path for path, role in by_leaf.items() if role == PARAMETERS} == {
        f"params/Dense_{layer}/{name}" for layer in (0, 1) for name in ("kernel", "bias")
    }
    assert {path for path, role in by_leaf.items() if role == BATCH} == {""}
    assert by_leaf["step"] == by_leaf["opt_state/0/count"] == STATE


def test_hand_written_moments() -> None:
    assert roles_of(PARAMS, {"m": PARAMS, "v": PARAMS}, i32(16, 8)) == only(PARAMETERS, STATE, BATCH)
    assert roles_of(PARAMS, PARAMS, PARAMS, i32(16, 8)) == only(PARAMETERS, STATE, STATE, BATCH)
    by_leaf = by_path((PARAMS, PARAMS, PARAMS), i32(16, 8))
    assert {path.split("/")[0]: role for path, role in by_leaf.items() if path} == {
        "0": PARAMETERS,
        "1": STATE,
        "2": STATE,
    }


def test_a_moving_average_is_state() -> None:
    roles = roles_of(PARAMS, PARAMS, state_of("adam", PARAMS), i32(16, 8))
    assert roles == only(PARAMETERS, STATE, STATE, BATCH)
    nested = by_path({"model": PARAMS, "ema": PARAMS, "opt": state_of("adam", PARAMS)}, i32(16, 8))
    assert {path.split("/")[0]: role for path, role in nested.items() if path}["opt"] == STATE
    assert sorted({path.split("/")[0] for path, role in nested.items() if role == PARAMETERS}) in (["ema"], ["model"])


EQUAL = {"up": f32(8, 16), "down": f32(16, 8)}


@pytest.mark.parametrize("model", [[EQUAL] * 4, (EQUAL, EQUAL), {"a": EQUAL, "b": EQUAL}, [f32(8, 8)] * 4])
def test_equal_layers_are_not_moments(model: Any) -> None:
    assert roles_of(model, f32(16, 8)) == only(PARAMETERS, BATCH)
    assert roles_of(model, f32(16, 8), i32(16)) == only(PARAMETERS, BATCH, BATCH)
    assert roles_of(model, jax.eval_shape(optax.adam(1e-3).init, model), f32(16, 8)) == only(PARAMETERS, STATE, BATCH)


def test_a_single_matrix() -> None:
    """Its copies have no path below the argument: the plan or the caller has to say so."""
    assert roles_of(f32(8, 8), f32(16, 8)) == only(PARAMETERS, BATCH)
    state = jax.eval_shape(optax.adam(1e-3).init, f32(8, 8))
    roles = (PARAMETERS, STATE, BATCH)
    assert roles_of(f32(8, 8), state, f32(16, 8), roles=roles) == only(*roles)


WITHOUT_OPTIMIZER: tuple[tuple[tuple[Any, ...], tuple[str, ...]], ...] = (
    ((PARAMS, i32(16, 8)), (PARAMETERS, BATCH)),
    ((PARAMS, f32(16, 8), f32(16)), (PARAMETERS, BATCH, BATCH)),
    ((PARAMS, f32(16, 8), jax.random.key(0)), (PARAMETERS, BATCH, BATCH)),
    ((PARAMS, jax.random.key(0), f32(16, 8)), (PARAMETERS, BATCH, BATCH)),
    ((jax.random.key(0), PARAMS, f32(16, 8)), (BATCH, PARAMETERS, BATCH)),
    ((np.zeros(2, np.uint32), PARAMS, f32(16, 8)), (BATCH, PARAMETERS, BATCH)),
    ((PARAMS, {"x": f32(16, 8), "y": i32(16)}), (PARAMETERS, BATCH)),
    ((f32(8, 16), f32(16, 8), f32(4, 8)), (PARAMETERS, PARAMETERS, BATCH)),  # two weights and the batch
    ((PARAMS, f32(8, 32), f32(16, 8), i32(16)), (PARAMETERS, PARAMETERS, BATCH, BATCH)),
    ((PARAMS,), (PARAMETERS,)),
    ((i32(16, 8),), (BATCH,)),
)


@pytest.mark.parametrize(("args", "roles"), WITHOUT_OPTIMIZER)
def test_without_an_optimizer(args: tuple[Any, ...], roles: tuple[str, ...]) -> None:
    assert roles_of(*args) == only(*roles)


def test_without_an_optimizer_planned_arrays_are_parameters() -> None:
    plan = sr.ReplicateShardingRule().plan(PARAMS, MESH)
    arguments = read_arguments(step, (PARAMS, {"a": f32(8, 3), "b": f32(5)}), MESH, plan)
    roles = dict(zip(arguments.owners, read_roles(arguments), strict=True))
    assert roles == {0: PARAMETERS, 1: BATCH}


def test_integers_in_a_single_argument_are_data() -> None:
    assert by_path({"w": f32(8, 8), "tokens": i32(16, 8)}) == {"w": PARAMETERS, "tokens": BATCH}


# ---- roles from the caller ----


def test_the_callers_roles_come_first() -> None:
    assert roles_of(PARAMS, f32(16, 8), roles=(BATCH, PARAMETERS)) == only(BATCH, PARAMETERS)
    prefix = ({"embed": BATCH, "layers": PARAMETERS, "head": STATE}, BATCH)
    by_leaf = by_path(PARAMS, f32(16, 8), roles=prefix)
    assert (by_leaf["embed"], by_leaf["layers/1/kernel"], by_leaf["head"], by_leaf[""]) == (
        BATCH,
        PARAMETERS,
        STATE,
        BATCH,
    )
    assert roles_of(PARAMS, f32(16, 8), roles=BATCH) == only(BATCH, BATCH)


def test_none_is_guessed() -> None:
    assert roles_of(PARAMS, f32(16, 8), i32(16), roles=(BATCH, None, None)) == only(BATCH, BATCH, BATCH)
    assert roles_of(PARAMS, f32(16, 8), roles=(None, PARAMETERS)) == only(PARAMETERS, PARAMETERS)


@pytest.mark.parametrize(
    ("roles", "error", "message"),
    [
        (
            ("prameters", BATCH),
            ConfigError,
            r"unknown role 'prameters'; roles are 'parameters', 'optimizer state', 'batch'",
        ),
        ((PARAMETERS,), TreeError, "roles"),
        (({"embed": BATCH}, BATCH), TreeError, "roles"),
        ((PARAMETERS, 3), ConfigError, "unknown role 3"),
    ],
)
def test_wrong_roles_are_refused(roles: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        roles_of(PARAMS, f32(16, 8), roles=roles)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_names_of_arguments_do_not_matter(kind: str) -> None:
    """Positional arguments without names of their own have a number besides."""
    both, _ = CONTAINERS[kind](state_of("adam", PARAMS))
    for args in ((both, i32(16, 8)), (PARAMS, state_of("adafactor", PARAMS), i32(16, 8)), (PARAMS, f32(16, 8))):
        named, unnamed = read_arguments(step, args, MESH), read_arguments(step_of_any, args, MESH)
        assert [array.path.removeprefix("args/") for array in unnamed.arrays] != [array.path for array in named.arrays]
        assert read_roles(named) == read_roles(unnamed)


def test_numbers_and_texts_have_no_role() -> None:
    arguments = read_arguments(step_of_any, (PARAMS, 3, "relu", None, f32(16, 8)), MESH)
    assert len(read_roles(arguments)) == len(arguments.arrays) == 7
