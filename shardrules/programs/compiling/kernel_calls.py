"""The Pallas kernels of a traced function: their authors' estimates, and how much of a mask they visit.

Compilers for GPUs do not see a kernel's `cost_estimate`, and no compiler prints the constants that a kernel reads. Both
are in the function's jaxpr, where a constant is followed from the top into loops, remat and `shard_map`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardrules.programs.compiled.kernel_costs import KernelCall
from shardrules.programs.jaxprs.bodies import Body, bodies_of
from shardrules.programs.jaxprs.walk import open_jaxpr, programs_in


def find_kernel_calls(program: ClosedJaxpr) -> tuple[KernelCall, ...]:
    """Finds the Pallas kernels of a function, each with its name, shapes and costs."""
    return tuple(dict.fromkeys(_kernel_calls(program, {})))


def _kernel_calls(program: ClosedJaxpr | Jaxpr, constants: Mapping[Any, np.ndarray]) -> Iterator[KernelCall]:
    """Yields the kernels of a program; `constants` are the values of some of its variables."""
    jaxpr = open_jaxpr(program)
    array_values = dict(constants)
    if isinstance(program, ClosedJaxpr):
        array_values |= {
            variable: np.asarray(value)
            for variable, value in zip(jaxpr.constvars, program.consts, strict=True)
            if _may_be_mask(value)
        }
    for equation in jaxpr.eqns:
        values = [_value(variable, array_values) for variable in equation.invars]
        if equation.primitive.name == "pallas_call":
            yield _kernel_call(equation, values)
            continue
        # Carries and rows of arrays change from round to round.
        everything = tuple(range(len(values)))
        # Other programs inside are taken to have the operands of their equation, in the same order.
        bodies = bodies_of(equation) or [Body(each, everything, len(values)) for each in programs_in(equation)]
        for body in bodies:
            fixed = [values[index] for index in body.operands[: body.fixed_count]]
            yield from _kernel_calls(body.program, _inner_constants(body, fixed))


def _may_be_mask(value: Any) -> bool:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    is_integer = isinstance(dtype, np.dtype) and dtype.kind in "iub"
    # A mask has an element for each block of scores: a million for 512 thousand tokens in blocks of 512.
    return is_integer and len(shape) > 1 and math.prod(shape) <= 2**20


def _value(variable: Any, constants: Mapping[Any, np.ndarray]) -> np.ndarray | None:
    if isinstance(variable, Literal):
        return np.asarray(variable.val) if _may_be_mask(variable.val) else None
    return constants.get(variable)


def _inner_constants(body: Body, values: list[np.ndarray | None]) -> dict[Any, np.ndarray]:
    """The values of the variables of a program inside an equation."""
    jaxpr = open_jaxpr(body.program)
    if len(jaxpr.invars) != len(body.operands):
        return {}
    # Inside a `shard_map` a device has a part of the constant.
    shapes: list[tuple[int, ...]] = [getattr(variable.aval, "shape", ()) for variable in jaxpr.invars]
    return {
        variable: _largest_part(value, shape)
        for variable, shape, value in zip(jaxpr.invars, shapes, values, strict=False)
        if value is not None and len(shape) == len(value.shape)
    }


def _largest_part(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The part of a split array with the most entries that are not 0: the device that waits for no other."""
    if value.shape == shape or not all(shape):
        return value
    starts = itertools.product(*(range(0, whole, part) for whole, part in zip(value.shape, shape, strict=True)))
    parts = (
        value[tuple(slice(start, start + size) for start, size in zip(corner, shape, strict=True))] for corner in starts
    )
    return max(parts, key=np.count_nonzero)


def _kernel_call(equation: Any, values: list[np.ndarray | None]) -> KernelCall:
    params = equation.params
    estimate, kernel = params["cost_estimate"], params["jaxpr"]
    name = params.get("name") or kernel.debug_info.func_name
    # Splash attention reads where to go next, what to do with each block, and then its arrays.
    masks = [
        value
        for variable, value in zip(equation.invars, values, strict=True)
        if len(variable.aval.shape) == 3 and np.issubdtype(variable.aval.dtype, np.integer)
    ]
    mask = masks[1] if len(masks) > 1 else None
    return KernelCall(
        str(name),
        tuple(tuple(variable.aval.shape) for variable in equation.invars),
        tuple(tuple(variable.aval.shape) for variable in equation.outvars),
        None if estimate is None else int(estimate.flops),
        None if estimate is None else int(estimate.bytes_accessed),
        int(np.count_nonzero(mask)) if mask is not None and "splash" in str(name) else None,
        tuple(
            tuple(getattr(size, "block_size", 1) for size in block.block_shape)
            for block in params["grid_mapping"].block_mappings
        ),
    )
