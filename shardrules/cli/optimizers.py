"""Optimizers by name, for the bytes that their state takes."""

import importlib
from types import ModuleType
from typing import Any

import equinox as eqx
import jax

from shardrules.cli.errors import UsageError, one_line
from shardrules.core.errors import ShardRulesError, suggest
from shardrules.core.tree import array_kind
from shardrules.rules.text import parse_op

OPTIMIZERS = (
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamaxw",
    "adamw",
    "adan",
    "amsgrad",
    "lamb",
    "lars",
    "lion",
    "momentum",
    "muon",
    "nadam",
    "nadamw",
    "novograd",
    "radam",
    "rmsprop",
    "sgd",
    "sm3",
    "yogi",
)
"""Those of optax that take a learning rate and nothing else that must be given; `momentum` is `sgd(momentum=0.9)`."""


def optimizer_state(text: str, params: Any) -> Any:
    """Returns the shapes of an optimizer's state.

    **Arguments:**

    - `text`: its name, with arguments if it is to have any: `"adamw"`, `"adafactor(min_dim_size_to_factor=64)"`.
    - `params`: the model.

    **Returns:**

    A tree of shapes.

    **Raises:**

    `UsageError` for a name that is not known, arguments that it does not take, or where optax is not installed.
    """
    try:
        name, args, named = parse_op(text)
    except ShardRulesError as error:
        raise UsageError(
            f"--optimizer {text}: write its name, with arguments if any: adamw(mu_dtype='bfloat16')"
        ) from error
    if name not in OPTIMIZERS:
        near = suggest(name, OPTIMIZERS)
        raise UsageError(f"--optimizer {text}: there is no optimizer {name!r}{near}; there are {', '.join(OPTIMIZERS)}")
    optax = _optax()
    if name == "momentum":
        name, named = "sgd", {"momentum": 0.9, **named}
    known = optax if hasattr(optax, name) else optax.contrib
    if not hasattr(known, name):
        raise UsageError(f"--optimizer {text}: the optax that is installed has no {name}: pip install -U optax")
    if not args:
        named = {"learning_rate": 1e-3, **named}
    weights = eqx.filter(
        params, lambda leaf: array_kind(leaf) is not None and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    )
    try:
        return eqx.filter_eval_shape(getattr(known, name)(*args, **named).init, weights)
    except Exception as error:  # optax checks little of what it is given
        raise UsageError(f"--optimizer {text} raised {type(error).__name__}: {one_line(error)}") from error


def _optax() -> ModuleType:
    try:
        return importlib.import_module("optax")
    except ImportError as error:
        raise UsageError('--optimizer needs optax: pip install "shardrules[examples]"') from error
