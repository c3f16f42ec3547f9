"""Arrays that a function rounds to 8 bits or fewer.

Compilers may leave out a cast to 8 bits that is followed by one to a wider dtype, as XLA for GPUs does: the program
then computes, and sends, what was never rounded.
"""

from collections.abc import Iterator
from typing import final

import attrs
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from shardrules.core.source import equation_line
from shardrules.programs.compiled.text import ArrayType
from shardrules.programs.jaxprs.walk import equations

QUANTISED_BITS = 8
"""The widest dtype that arrays are quantised to. Wider ones are activations that compilers gather before a cast to
float32 by themselves."""


@final
@attrs.frozen
class Rounding:
    """A cast to a narrow dtype, and its line of code."""

    array: ArrayType
    line: str


def find_roundings(program: ClosedJaxpr) -> Iterator[Rounding]:
    """Yields the casts of floating-point arrays to dtypes of 8 bits or fewer in a function."""
    for equation in equations(program):
        if equation.primitive.name != "convert_element_type":
            continue
        before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        is_number = jnp.issubdtype(before, jnp.floating) and after != jnp.bool_
        if is_number and after.itemsize * 8 <= QUANTISED_BITS < before.itemsize * 8:
            shape = tuple(equation.outvars[0].aval.shape)
            yield Rounding(ArrayType(_xla_name(after.name), shape, QUANTISED_BITS), equation_line(equation))


def _xla_name(dtype: str) -> str:
    """XLA's name of a dtype: `"f8e4m3fn"`."""
    for name, letter in (("float", "f"), ("uint", "u"), ("int", "s")):
        dtype = dtype.replace(name, letter)
    return dtype.replace("_", "")
