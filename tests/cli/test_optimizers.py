"""Optimizers by the names of optax, and in the user's code."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from shardrules.cli.errors import UsageError
from shardrules.cli.optimizers import optimizer_state

PARAMS = {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16), "steps": jax.ShapeDtypeStruct((), jnp.int32)}

CODE = """\
import optax

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
WIDTH = 8

def make(rate=1e-3):
    return optax.sgd(rate, momentum=0.9)

class Own:
    def init(self, params):
        print("starting")
        return {"velocity": params}

def raises():
    raise ValueError("no such rate")
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "optimizers_of_a_test.py").write_text(CODE)
    return f"{tmp_path}/optimizers_of_a_test.py"


def shapes(state: object) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("OPTIMIZER", [(), (8, 4), (8, 4)]),
        ("make", [(8, 4)]),
        ("make(rate=0.1)", [(8, 4)]),
        ("Own", [(8, 4)]),
    ],
)
def test_optimizers_of_the_user(
    name: str, expected: list[tuple[int, ...]], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shapes(optimizer_state(f"{code}:{name}", PARAMS)) == expected
    assert capsys.readouterr().out == ""


def test_optimizers_in_modules() -> None:
    expected = jax.eval_shape(optax.adam(1e-3).init, {"w": PARAMS["w"]})
    assert shapes(optimizer_state("optax:adam(1e-3)", PARAMS)) == shapes(expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WIDTH", "is a int: name an optax.GradientTransformation"),
        ("raises", r"raises raised ValueError: no such rate \(at optimizers_of_a_test.py:15\)"),
        ("mkae", r"has no 'mkae' \(did you mean 'make'"),
        ("make(rat=1)", r"raised TypeError: .*unexpected keyword argument 'rat'"),
    ],
)
def test_other_objects_are_errors(name: str, message: str, code: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimizer_state(f"{code}:{name}", PARAMS)
