"""Factors: how the dims of an operation's operands and results go together.

An operation is a nest of loops, as an einsum is. Splitting a loop over devices splits every dim that goes with it. If
all of them are split alike, the devices need nothing from each other, or one all-reduce at the end where the loop is
summed over. The rules promise no more than XLA's partitioner does: a loop that it splits only by moving data is not a
factor here. What it does was observed on compilers for CPUs and GPUs, from JAX 0.10 to 0.12.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
from jax import Device
from jax.core import ShapedArray
from jax.sharding import AxisType, Sharding

from shardrules.programs.traced.factors.fused import FUSED_RULES
from shardrules.programs.traced.factors.grouped import kernel_loops
from shardrules.programs.traced.factors.index import INDEX_RULES
from shardrules.programs.traced.factors.linear import LINEAR_RULES
from shardrules.programs.traced.factors.loops import (
    ANY,
    ONE,
    TWO,
    LoopRule,
    Loops,
    OpSignature,
    leading_dims,
    loop_sizes,
    whole,
)
from shardrules.programs.traced.factors.shape import SHAPE_RULES

EXCHANGE = "exchange of shards"
"""The loop over whose pieces the function of a region communicates. No letter of a region has spaces."""


@final
@attrs.frozen
class Factors:
    """The factors that the dims of an operation's operands and results belong to.

    A factor of operands and results is parallel: split alike everywhere, it needs no communication. A factor of results
    only is free: nothing in the operands has to be split. A factor of operands only is in `reduced`.

    ```python
    from shardrules.programs.traced.factors.table import Factors, op_factors

    (dot,) = jax.make_jaxpr(jnp.matmul)(jnp.ones((8, 16)), jnp.ones((16, 4))).eqns
    assert op_factors(dot) == Factors(((0, 1), (1, 2)), ((0, 2),), sizes=(8, 16, 4), reduced=(1,))
    ```
    """

    operands: tuple[tuple[int | None, ...], ...]
    """For each operand and dim the index of its factor, or `None` where the dim has to be whole."""
    results: tuple[tuple[int | None, ...], ...]
    sizes: tuple[int, ...]
    """For each factor the size that the number of pieces has to divide."""
    reduced: tuple[int, ...] = ()
    """Factors over which the results that lack them are sums, maxima or the like: one all-reduce completes them."""
    is_local: bool = False
    """XLA would gather the operands, unless each device is given an operation of its own on its pieces."""
    shared: tuple[tuple[int, ...], ...] = ()
    """For each result the factors in `reduced` that it is not computed from; empty where there are none."""
    exchange: int | None = None
    """The factor over whose pieces the function of a region communicates, if it does."""
    joint: tuple[int, ...] = ()
    """Factors whose dims are split by `exchange`, too."""
    positional: tuple[int, ...] = ()
    """Factors along which the operation does another thing at each position, so that an array of fewer elements gives
    others."""

    def summed(self, result_index: int) -> tuple[int, ...]:
        """The factors over which a result is a sum, or the like."""
        others = (*self.results[result_index], *(self.shared[result_index] if self.shared else ()))
        return tuple(factor for factor in self.reduced if factor not in others)


def op_factors(equation: Any, unused: Sequence[bool] = ()) -> Factors | None:
    """The factors of an equation; `None` where no rule covers its primitive, or this form of it. Of kernels whose
    results are `unused` more may be split.
    """
    rule, op = RULES.get(equation.primitive.name), op_signature(equation, unused)
    if rule is None or op is None or not rule.covers(op):
        return None
    loops = rule.find_loops(op)
    return None if loops is None else _number_loops(loops, op)


def op_signature(equation: Any, unused: Sequence[bool] = ()) -> OpSignature | None:
    """An equation without its variables; `None` where not all operands and results are arrays of known shapes."""
    # Tokens, references and dims of unknown size occur in few functions, and no rule is written for them.
    operands, results = ([var.aval for var in side] for side in (equation.invars, equation.outvars))
    for aval in (*operands, *results):
        if not isinstance(aval, ShapedArray) or not all(isinstance(size, int) for size in aval.shape):
            return None
    return OpSignature(
        equation.primitive.name,
        tuple(tuple(aval.shape) for aval in operands),
        tuple(tuple(aval.shape) for aval in results),
        tuple(str(aval.dtype) for aval in operands),
        equation.params,
        tuple(unused) or (False,) * len(results),
    )


def _number_loops(loops: Loops, op: OpSignature) -> Factors:
    sizes, result_names = loop_sizes(loops, op), [name for names in loops.results for name in names]
    if loops.exchange is not None:
        sizes[loops.exchange] = loops.sizes[loops.exchange]
        result_names.append(loops.exchange)
    # A dim of operands only has to be whole unless it is reduced. And there is no way to split zero elements.
    kept = [name for name, size in sizes.items() if size > 0 and (name in result_names or name in loops.reduced)]
    factors = {name: factor for factor, name in enumerate(kept)}
    operands, results = (
        tuple(tuple(factors.get(name) for name in names) for names in side) for side in (loops.operands, loops.results)
    )
    reduced = tuple(factors[name] for name in loops.reduced if name in factors)
    shared = tuple(tuple(factors[name] for name in names if name in factors) for names in loops.shared)
    return Factors(
        operands,
        results,
        tuple(sizes[name] for name in kept),
        reduced,
        loops.is_local and bool(kept),
        shared,
        factors.get(loops.exchange),
        tuple(factors[name] for name in loops.joint if name in factors),
        tuple(factors[name] for name in loops.positional if name in factors),
    )


def _pointwise(op: OpSignature) -> Loops | None:
    """Any dim may be split. Operands that have it are split with the result; scalars and dims of size 1 are whole."""
    shape = op.results[0]
    if any(other != shape for other in op.results) or any(not _broadcasts(other, shape) for other in op.operands):
        return None
    dims = list(range(len(shape)))
    operands = [[dim if size == shape[dim] else None for dim, size in enumerate(other)] for other in op.operands]
    return Loops(operands, [dims] * len(op.results))


def _broadcasts(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    return not shape or (
        len(shape) == len(result) and all(size in (1, other) for size, other in zip(shape, result, strict=True))
    )


def _passed_on(op: OpSignature) -> Loops | None:
    """Every operand is a result: whatever is split, the others need not be."""
    names = [[(index, dim) for dim in range(len(shape))] for index, shape in enumerate(op.operands)]
    return Loops(names, names) if op.operands == op.results else None


def _device_put(op: OpSignature) -> Loops | None:
    """Between kinds of memory any dim may be split. A sharding among the devices has no rule."""
    is_placement = any(isinstance(device, Sharding | Device) for device in op.params["devices"])
    return None if is_placement else _passed_on(op)


def _from_keys(op: OpSignature) -> Loops | None:
    """Threefry: every key gives its own bits, and each device computes those that it needs. Others: keys are whole."""
    (shape,), (result,) = op.operands, op.results
    is_per_key = op.dtypes[0] == "key<fry>" and result[: len(shape)] == shape
    return Loops([range(len(shape)) if is_per_key else whole(shape)], [range(len(result))])


def _with_keys(op: OpSignature) -> Loops | None:
    """Threefry: there is one result for each key, computed by itself. Others: everything is whole."""
    is_per_key = op.dtypes[0] == "key<fry>" or not op.results[0]
    return _pointwise(op) if is_per_key else _whole(op)


def _gamma(op: OpSignature) -> Loops | None:
    """Threefry: one key draws for its elements by their positions, and each device computes those that it needs. What
    each of several keys draws is whole, since compilers gather it. Others: everything is whole."""
    keys, result = op.operands[0], op.results[0]
    if op.dtypes[0] != "key<fry>" and result:
        return _whole(op)
    if keys:
        dims = [*range(len(keys)), *([None] * (len(result) - len(keys)))]
        return Loops([dims[: len(keys)], dims], [dims])
    dims = range(len(result))
    return Loops([[], dims], [dims], positional=dims)


def _key_data(op: OpSignature) -> Loops | None:
    """Dims of keys may be split; the numbers of one key are whole."""
    return leading_dims(op, min(len(op.operands[0]), len(op.results[0])))


def _reshard(op: OpSignature) -> Loops | None:
    """Tracing adds it on a mesh. It asks for nothing on Auto axes, which are all that a planned function has."""
    types = op.params["dst_sharding"].mesh.axis_types
    return _passed_on(op) if all(axis_type == AxisType.Auto for axis_type in types) else None


def _region(op: OpSignature) -> Loops | None:
    """The letters that `shardrules.region` declares to be split. Devices run the function on their shards."""
    declaration = op.params["function"].declaration

    def name(letter: str) -> str | None:
        return letter if letter in declaration.split else EXCHANGE if letter in declaration.exchange else None

    operands, results = (
        [[name(letter) for letter in term] for term in terms] for terms in (declaration.operands, declaration.results)
    )
    sums = [
        [*declaration.summed(index), *([EXCHANGE] if declaration.sums_exchange(index) else [])]
        for index in range(len(results))
    ]
    reduced = list(dict.fromkeys(loop for loops in sums for loop in loops))
    shared = [[loop for loop in reduced if loop not in loops] for loops in sums]
    letter_sizes = declaration.sizes(op.operands, op.results)
    return Loops(
        operands,
        results,
        reduced,
        sizes={EXCHANGE: math.gcd(*(letter_sizes[letter] for letter in declaration.exchange))},
        is_local=True,
        shared=shared if any(shared) else (),
        exchange=EXCHANGE if declaration.exchange else None,
        joint=[letter for letter in declaration.exchange if letter in declaration.split],
    )


def _whole(op: OpSignature) -> Loops | None:
    """One state gives all bits, on every device."""
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
converged. To find out, devices exchange one byte in each round: splitting them is worth that."""


def is_whole(rule: LoopRule) -> bool:
    """A rule splits nothing, whatever the operation."""
    return rule.find_loops is _whole


def is_elementwise(name: str) -> bool:
    """Each element of a primitive's result comes from the same element of its operands."""
    return name in RULES and RULES[name].find_loops is _pointwise


RULES: Mapping[str, LoopRule] = {
    **dict.fromkeys(_POINTWISE.split(), LoopRule(_pointwise, ANY)),
    **dict.fromkeys(("optimization_barrier", "pvary", "relayout", "stage"), LoopRule(_passed_on, ANY, ANY)),
    "reshard": LoopRule(_reshard, ONE, ONE, ("dst_sharding",)),
    "device_put": LoopRule(_device_put, ANY, ANY, ("devices",)),
    **dict.fromkeys(("random_bits", "random_split"), LoopRule(_from_keys, ONE, ONE)),
    "random_fold_in": LoopRule(_with_keys, TWO, ONE),
    "random_gamma": LoopRule(_gamma, TWO, ONE),
    **dict.fromkeys(("random_wrap", "random_unwrap"), LoopRule(_key_data, ONE, ONE)),
    **dict.fromkeys(("rng_bit_generator", "rng_uniform"), LoopRule(_whole, ANY, ANY)),
    "region": LoopRule(_region, ANY, ANY, ("function",)),
    **SHAPE_RULES,
    **INDEX_RULES,
    **LINEAR_RULES,
    **FUSED_RULES,
    "pallas_call": LoopRule(kernel_loops, ANY, ANY, ("grid_mapping", "jaxpr")),
}
"""The rules of all primitives that are known."""
