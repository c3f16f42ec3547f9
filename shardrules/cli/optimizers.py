"""Optimizers by name, for the bytes of their state."""

from typing import Any

import equinox as eqx
import jax

from shardrules.cli.errors import UsageError
from shardrules.cli.objects import import_extra, load_object, user_code
from shardrules.core.errors import ShardRulesError, suggest
from shardrules.core.tree import array_kind
from shardrules.rules.text import is_object_name, parse_op

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
"""The optimizers of optax that need only a learning rate; `momentum` is `sgd(momentum=0.9)`."""


def optimizer_state(text: str, params: Any) -> Any:
    """Returns the shapes of an optimizer's state.

    The optimizer is named with its arguments, `"adamw(mu_dtype='bfloat16')"`, or as the user's own, `"train.py:make"`.
    """
    # Only floating-point arrays are trained, and have state.
    weights = eqx.filter(
        params, lambda leaf: array_kind(leaf) is not None and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    )
    init = load_optimizer(text).init
    with user_code(f"--optimizer {text}"):
        return eqx.filter_eval_shape(init, weights)


def load_optimizer(text: str) -> Any:
    """Returns the optimizer that a text names: something with an `init`, and nearly always an `update`."""
    return _optimizer_of_object(text) if is_object_name(text) else _optimizer_of_optax(text)


def _optimizer_of_object(text: str) -> Any:
    """An optimizer in the user's code: an object with an `init`, or what a function returns."""
    named = load_object(text)
    has_init = not isinstance(named.value, type) and callable(getattr(named.value, "init", None))
    value = named.value if has_init else named.call()
    if not callable(getattr(value, "init", None)):
        raise UsageError(
            f"--optimizer {text} is a {type(value).__name__}: name an optax.GradientTransformation, or a function that "
            "returns one"
        )
    return value


def _optimizer_of_optax(text: str) -> Any:
    try:
        name, args, kwargs = parse_op(text)
    except ShardRulesError as error:
        raise UsageError(
            f"--optimizer {text}: write its name, with arguments if any, adamw(mu_dtype='bfloat16'), or module:name"
        ) from error
    if name not in OPTIMIZERS:
        near = suggest(name, OPTIMIZERS)
        raise UsageError(
            f"--optimizer {text}: unknown optimizer {name!r}{near}; the optimizers are {', '.join(OPTIMIZERS)}, or "
            "module:name for your own"
        )
    optax = import_extra("optax", "--optimizer", "examples")
    if name == "momentum":
        name, kwargs = "sgd", {"momentum": 0.9, **kwargs}
    # New optimizers begin in optax.contrib.
    module = optax if hasattr(optax, name) else optax.contrib
    if not hasattr(module, name):
        raise UsageError(f"--optimizer {text}: the installed optax has no {name}: pip install -U optax")
    # A positional argument is the learning rate, whose value does not change the shapes.
    if not args:
        kwargs = {"learning_rate": 1e-3, **kwargs}
    with user_code(f"--optimizer {text}"):  # optax checks few of its arguments
        return getattr(module, name)(*args, **kwargs)
