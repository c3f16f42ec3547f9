"""Factors: how the dims of an operation's operands and results go together.

An operation is a nest of loops, as an einsum is. Splitting a loop over devices splits every dim that goes with it. If
all of them are split alike, the devices need nothing of one another, or, where the loop is summed over, one all-reduce
at the end. The rules promise no more than what XLA's partitioner does: a loop that it splits only by moving data is
none here. What it does was seen on compilers for CPUs and GPUs, from JAX 0.10 to 0.12.
"""

from collections.abc import Mapping
from typing import Any, final

import attrs
from jax import Device
from jax.core import ShapedArray
from jax.sharding import Sharding

from shardrules.planning.traced.factors.index import INDEX_RULES
from shardrules.planning.traced.factors.linear import LINEAR_RULES
from shardrules.planning.traced.factors.loops import Loops, Op, Rule, leading, sizes_of, whole
from shardrules.planning.traced.factors.shape import SHAPE_RULES


@final
@attrs.frozen
class Factors:
    """How the dims of an operation's operands and results go together.

    A factor that is in operands and results is parallel: split everywhere alike, it needs no communication. One that is
    in results only is free: nothing of the operands need be split. One that is in operands only is in `reduced`.

    **Arguments:**

    - `operands`, `results`: for each array and dim the number of its factor, or `None` where the dim has to be whole.
    - `sizes`: of each factor. It can be split into `n` pieces if `n` divides its size.
    - `reduced`: the factors over which results are sums, products, maxima or the like of what the pieces give: one
        all-reduce completes them.

    ```python
    (dot,) = jax.make_jaxpr(jnp.matmul)(jnp.ones((8, 16)), jnp.ones((16, 4))).eqns
    assert op_factors(dot) == Factors(((0, 1), (1, 2)), ((0, 2),), sizes=(8, 16, 4), reduced=(1,))
    ```
    """

    operands: tuple[tuple[int | None, ...], ...]
    results: tuple[tuple[int | None, ...], ...]
    sizes: tuple[int, ...]
    reduced: tuple[int, ...] = ()


def op_factors(equation: Any) -> Factors | None:
    """Returns the factors of an operation.

    **Arguments:**

    - `equation`: one of the `eqns` of a jaxpr.

    **Returns:**

    The `Factors`; `None` where the primitive, or this form of it, is not known. Those that hold a program of their own,
    and those that are about shardings, are none of these.

    ```python
    (one,) = jax.make_jaxpr(lambda x: x.reshape(32, 4, 8))(jnp.ones((32, 32))).eqns
    assert op_factors(one) == Factors(((0, 1),), ((0, 1, None),), sizes=(32, 4))
    ```
    """
    rule, op = RULES.get(equation.primitive.name), _op(equation)
    if rule is None or op is None:
        return None
    try:
        loops = rule(op)
        return None if loops is None else _numbered(loops, op)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None  # a form that the rule was not written for: another version of JAX may name parameters otherwise


def _op(equation: Any) -> Op | None:
    avals = [[one.aval for one in side] for side in (equation.invars, equation.outvars)]
    for aval in (*avals[0], *avals[1]):
        if not isinstance(aval, ShapedArray) or not all(isinstance(size, int) for size in aval.shape):
            return None
    operands, results = (tuple(tuple(aval.shape) for aval in side) for side in avals)
    return Op(equation.primitive.name, operands, results, tuple(str(a.dtype) for a in avals[0]), equation.params)


def _numbered(loops: Loops, op: Op) -> Factors:
    sizes, given = sizes_of(loops, op), [name for names in loops.results for name in names]
    # What only operands have has to be whole where nothing is summed over it. Nor is there a way to split no elements.
    kept = [name for name, size in sizes.items() if size > 0 and (name in given or name in loops.reduced)]
    numbers = {name: number for number, name in enumerate(kept)}
    operands, results = (
        tuple(tuple(numbers.get(name) for name in names) for names in side) for side in (loops.operands, loops.results)
    )
    reduced = tuple(numbers[name] for name in loops.reduced if name in numbers)
    return Factors(operands, results, tuple(sizes[name] for name in kept), reduced)


def _pointwise(op: Op) -> Loops | None:
    """Operands have the shape of the result, but for dims of size 1, or are scalars."""
    shape = op.results[0]
    if any(other != shape for other in op.results) or any(not _fits(other, shape) for other in op.operands):
        return None
    dims = list(range(len(shape)))
    operands = [[dim if size == shape[dim] else None for dim, size in enumerate(other)] for other in op.operands]
    return Loops(operands, [dims] * len(op.results))


def _fits(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    return not shape or (
        len(shape) == len(result) and all(one in (1, size) for one, size in zip(shape, result, strict=True))
    )


def _handed_on(op: Op) -> Loops | None:
    """Every operand is a result: whatever is split, the others need not be."""
    names = [[(number, dim) for dim in range(len(shape))] for number, shape in enumerate(op.operands)]
    return Loops(names, names) if op.operands == op.results else None


def _device_put(op: Op) -> Loops | None:
    """Between kinds of memory. A sharding among the devices is a constraint, which is for the caller."""
    return None if any(isinstance(one, Sharding | Device) for one in op.params["devices"]) else _handed_on(op)


def _keys(op: Op) -> Loops | None:
    """Every key gives its own bits, and each device computes those that it needs.

    So it is with Threefry. Other generators take one key for all of the bits, wherever it is.
    """
    (shape,), (result,) = op.operands, op.results
    own = op.dtypes[0] == "key<fry>" and result[: len(shape)] == shape
    return Loops([range(len(shape)) if own else whole(shape)], [range(len(result))])


def _by_keys(op: Op) -> Loops | None:
    """Of each key and number one: as above, where keys are Threefry's."""
    own = op.dtypes[0] == "key<fry>" or not op.results[0]
    return _pointwise(op) if own else _whole(op)


def _key_data(op: Op) -> Loops | None:
    """Between keys and the numbers that they are."""
    return leading(op, min(len(op.operands[0]), len(op.results[0])))


def _whole(op: Op) -> Loops | None:
    """XLA brings the operands together, along whatever dim they are split.

    So it is with the greatest `k`, on CPUs and GPUs, though rows have nothing to do with each other, and with Fourier
    transforms before JAX 0.12.
    """
    return Loops([whole(shape) for shape in op.operands], [whole(shape) for shape in op.results])


_POINTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name
ne neg nextafter not one_minus_square or polygamma polynomial population_count pow random_clone random_seed real
reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
"""
"""Of these `igamma*` and `regularized_incomplete_beta` are, as `random_gamma` is, loops that end when all elements have
converged. To know, devices exchange one byte each time: splitting them is worth that."""

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_POINTWISE.split(), _pointwise),
    **dict.fromkeys(("optimization_barrier", "pvary"), _handed_on),
    "device_put": _device_put,
    **dict.fromkeys(("random_bits", "random_split"), _keys),
    **dict.fromkeys(("random_fold_in", "random_gamma"), _by_keys),
    **dict.fromkeys(("random_wrap", "random_unwrap"), _key_data),
    **dict.fromkeys(("top_k", "approx_top_k", "fft", "rng_bit_generator", "rng_uniform"), _whole),
    **SHAPE_RULES,
    **INDEX_RULES,
    **LINEAR_RULES,
}
"""The rules of all operations that are known, by primitive."""
