"""Equations and programs that compute the same: of two traces of one function, or of one layer after another."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import AbstractValue, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardrules.core.keys import is_key
from shardrules.programs.jaxprs.calls import has_custom_derivative
from shardrules.programs.jaxprs.walk import open_jaxpr

Derivative: TypeAlias = Callable[[Any], ClosedJaxpr | None] | None
"""Returns an equation with its derivative as a program, `None` where it is like no other. Without it, only what
functions compute is compared."""

_POLICY_DEPTH = 4
"""The most policies of `jax.checkpoint` that are made of each other and compared: chosen by hand."""


def equal_params(equation: Any, other: Any, derivative: Derivative = None) -> bool:
    """Returns whether equations have equal parameters, and the same derivatives.

    ```python
    from shardrules.programs.jaxprs.equality import equal_params

    first, second, third = jax.make_jaxpr(lambda x: (x[:2], x[:2], x[1:3]))(jnp.ones(4)).eqns
    assert equal_params(first, second) and not equal_params(first, third)
    ```
    """
    params, others = equation.params, other.params
    if params.keys() != others.keys():
        return False
    if has_custom_derivative(equation):
        # Rules for derivatives are other functions in each call: what they compute decides.
        names = [name for name, value in params.items() if isinstance(value, ClosedJaxpr | int)]
        derivatives = () if derivative is None else (derivative(equation), derivative(other))
        if derivatives and (None in derivatives or not equal_values(*derivatives)):
            return False
    else:
        names = list(params)
    return all(
        _equal_policies(params[name], others[name])
        if name == "policy"
        else equal_values(params[name], others[name], derivative)
        for name in names
    )


def equal_values(value: Any, other: Any, derivative: Derivative = None) -> bool:
    """Returns whether parameters are equal; programs are if all of their equations are."""
    if value is other:
        return True
    # A tracer has no value to compare.
    if type(value) is not type(other) or isinstance(value, Tracer):
        return False
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(
            equal_values(item, other_item, derivative) for item, other_item in zip(value, other, strict=True)
        )
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(equal_values(value[key], other[key], derivative) for key in value)
    if isinstance(value, ClosedJaxpr | Jaxpr):
        has_same_constants = equal_values(getattr(value, "consts", []), getattr(other, "consts", []))
        return has_same_constants and _equal_programs(open_jaxpr(value), open_jaxpr(other), derivative)
    if hasattr(value, "block_mappings") or hasattr(value, "index_map_jaxpr"):
        # The grids and blocks of Pallas kernels are equal to themselves only: each holds programs.
        return equal_values(vars(value), vars(other), derivative)
    if isinstance(value, AbstractValue):
        return bool(value == other)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if value.dtype != other.dtype:
            return False
        if is_key(value.dtype):
            value, other = jax.random.key_data(value), jax.random.key_data(other)
        # Arrays with NaNs count as different, which is safe: no more than an equal layer is missed.
        return np.array_equal(value, other)
    return bool(value == other)


def literal_value(literal: Any) -> Any:
    """The shape, dtype and bytes of a constant."""
    return literal.aval.shape, literal.aval.dtype, np.asarray(literal.val).tobytes()


def _equal_policies(policy: Any, other: Any, depth: int = _POLICY_DEPTH) -> bool:
    """Policies are equal if one function makes both of equal values."""
    code = getattr(policy, "__code__", None)
    if policy is other or code is None:
        return equal_values(policy, other)
    # A closure may refer to itself, so its values are followed only so deep.
    if not depth or getattr(other, "__code__", None) is not code:
        return False
    made_of, other_of = _values_of(policy), _values_of(other)
    return len(made_of) == len(other_of) and all(
        _equal_policies(value, other_value, depth - 1) if callable(value) else equal_values(value, other_value)
        for value, other_value in zip(made_of, other_of, strict=True)
    )


def _values_of(function: Any) -> list[Any]:
    """The values that a function closes over, and its defaults."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell is empty until its variable is set
            values.append(cell.cell_contents)
    return values


def _equal_programs(program: Jaxpr, other: Jaxpr, derivative: Derivative) -> bool:
    numbers: list[dict[Any, int]] = [{}, {}]

    def is_same_operand(var: Any, other: Any) -> bool:
        if isinstance(var, Literal) or isinstance(other, Literal):
            return type(var) is type(other) and literal_value(var) == literal_value(other)
        return numbers[0].get(var) == numbers[1].get(other)

    def add(variables: Sequence[Any], others: Sequence[Any]) -> None:
        for each, names in zip((variables, others), numbers, strict=True):
            for var in each:
                names[var] = len(names)

    def is_alike(variables: Sequence[Any], others: Sequence[Any]) -> bool:
        return [str(var.aval) for var in variables] == [str(var.aval) for var in others]

    if len(program.eqns) != len(other.eqns) or not is_alike(program.invars, other.invars):
        return False
    if len(program.outvars) != len(other.outvars) or len(program.constvars) != len(other.constvars):
        return False
    # Variables are equal if they are bound at the same place: each is numbered as it appears.
    add((*program.constvars, *program.invars), (*other.constvars, *other.invars))
    for equation, another in zip(program.eqns, other.eqns, strict=True):
        is_same = equation.primitive is another.primitive and len(equation.invars) == len(another.invars)
        if not is_same or not all(map(is_same_operand, equation.invars, another.invars)):
            return False
        if not is_alike(equation.outvars, another.outvars) or not equal_params(equation, another, derivative):
            return False
        add(equation.outvars, another.outvars)
    return all(map(is_same_operand, program.outvars, other.outvars))
