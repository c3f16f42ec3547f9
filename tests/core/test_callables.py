"""Names of callables, and of the wrappers of Equinox, which lose theirs where they are copied."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import pytest

import shardrules as sr
from shardrules.core.callables import name_of, update_wrapper


def product(w: Any, x: Any) -> Any:
    """Multiplies."""
    return w * x


class Model(eqx.Module):
    def __call__(self, x: Any) -> Any:
        return x

    def method(self, x: Any) -> Any:
        return x


NAMES: tuple[tuple[Callable[..., Any], str], ...] = (
    (product, "product"),
    (lambda x: x, "<lambda>"),
    (functools.partial(product, 3), "product"),
    (functools.partial(functools.partial(product, 3), 4), "product"),
    (jax.tree_util.Partial(product, 3), "product"),
    (eqx.Partial(product, 3), "product"),
    (jax.jit(product), "product"),
    (eqx.filter_jit(product), "product"),
    (sr.filter_jit(product), "product"),
    (jax.vmap(product), "product"),
    (Model(), "Model"),
    (Model().method, "method"),
    (eqx.filter_vmap(Model()), "Model"),
    (eqx.filter_jit(eqx.filter_checkpoint(eqx.filter_vmap(Model()))), "Model"),
    (eqx.debug.assert_max_traces(eqx.Partial(Model()), max_traces=1), "Model"),
    (sr.filter_jit(eqx.filter_vmap(Model()).__call__), "__call__"),
)


@pytest.mark.parametrize(("fn", "name"), NAMES)
def test_names_are_of_what_is_wrapped_and_copies_keep_them(fn: Callable[..., Any], name: str) -> None:
    assert name_of(fn) == name
    copy = jax.tree.map(lambda x: x, fn)
    assert name_of(copy) == name
    assert name_of(sr.filter_jit(copy)) == name


@pytest.mark.parametrize("fn", [fn for fn, _ in NAMES])
def test_functions_get_only_what_a_function_may_have(fn: Callable[..., Any]) -> None:
    def wrapper(*args: Any) -> None: ...

    copy = jax.tree.map(lambda x: x, fn)
    assert update_wrapper(wrapper, copy).__wrapped__ is copy  # pyright: ignore[reportFunctionMemberAccess]
    assert isinstance(wrapper.__name__, str)


def test_functions_get_the_attributes_of_others() -> None:
    def wrapper(*args: Any) -> None: ...

    update_wrapper(wrapper, product)
    assert (wrapper.__name__, wrapper.__doc__, wrapper.__module__) == ("product", "Multiplies.", __name__)
