"""The effects of single equations on examples, and on sums over examples."""

from collections.abc import Sequence
from typing import Any

import attrs
from jax.extend.core import Literal

from shardrules.programs.compiling.fused_calls import BACKWARD, SCALED_DOTS
from shardrules.programs.traced.factors.grouped import ROWS_OPERAND, is_grouped
from shardrules.programs.traced.factors.table import Factors, op_factors
from shardrules.programs.traced.program import operation_name
from shardrules.programs.training.examples.facts import (
    EACH_ROUND,
    Fact,
    RefusalError,
    name_of_step,
    refuse_misfits,
    refused,
)
from shardrules.programs.training.examples.pairs import Counts

_SUMMING = (
    *("reduce_sum", "dot_general", "ragged_dot_general", "conv_general_dilated", "scatter-add", "scatter-sub"),
    *("region", "pallas_call", BACKWARD, *SCALED_DOTS),
)
"""Primitives whose results are sums over the factors that they reduce."""

_PASSING = ("sharding_constraint", "copy", "copy_p", "optimization_barrier")

ADDING = ("add", "add_any", "sub")
"""Primitives that add arrays up."""

_LINEAR = (
    "neg convert_element_type reduce_sum transpose reshape squeeze broadcast_in_dim copy copy_p real imag "
    "stop_gradient expand_dims slice split rev cumsum concatenate stack unstack tile device_put sharding_constraint "
    "optimization_barrier name reshard psum conj"
)
LINEAR = frozenset(_LINEAR.split())
"""Primitives that do to each part of a sum what they do to the sum, where all operands are sums or zeros."""

_VIEWS = "broadcast_in_dim reshape squeeze expand_dims transpose convert_element_type copy"
_KEEPING_INDICES = frozenset(_VIEWS.split())


def uses_sums(equation: Any, facts: Sequence[Fact]) -> Fact:
    """The fact of the results of an equation that reads sums over examples, or what is computed from them."""
    common: dict[str, Any] = {"is_trained": any(fact.is_trained for fact in facts), "from_batch": True}
    name = equation.primitive.name
    added = name in ADDING and all(fact.form == "sum" or fact.dim is EACH_ROUND for fact in facts)
    if added and any(fact.form == "examples" for fact in facts) and all(fact.form != "shared" for fact in facts):
        return Fact("sum", **common)  # in a loop over examples, each round adds its example's
    if any(fact.is_part_only for fact in facts):
        return refused(
            f"{name_of_step(equation)} uses a sum over the examples for single examples, as batch normalization and "
            "contrastive losses do",
            equation,
        )
    return Fact("sum" if _is_linear(equation, facts) else "result", **common)


def _is_linear(equation: Any, facts: Sequence[Fact]) -> bool:
    """The results of the parts of sums add up to the results of the sums."""
    name, forms = equation.primitive.name, [fact.form for fact in facts]
    if "result" in forms or any(fact.is_misfit for fact in facts) or "examples" in forms:
        return False
    is_sum = [fact.form == "sum" or fact.is_zero for fact in facts]
    dtypes = [var.aval.dtype for var in (*equation.invars, *equation.outvars)]
    # A sum of parts that is rounded to an integer, or true or false, is not the rounded sum.
    if name == "convert_element_type":
        return all(dtype.kind in "fcV" for dtype in dtypes) or dtypes[0].kind in "iu"
    if name in ADDING or name in LINEAR:
        return all(is_sum)
    # These are linear in each operand, but a product of two sums has the products of different examples.
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return forms.count("sum") == 1
    # A quotient of integers is rounded, and a sum of rounded parts is another.
    if name == "div":
        return forms == ["sum", "shared"] and dtypes[0].kind not in "iu"
    # Every part adds what it reads out of bounds, so that has to be 0.
    if name in ("dynamic_slice", "gather"):
        return forms[0] == "sum" and "sum" not in forms[1:] and equation.params.get("fill_value") in (None, 0)
    if name in ("select_n", "pad"):
        values, others = (is_sum[1:], forms[:1]) if name == "select_n" else (is_sum, [])
        return all(values) and "sum" not in others
    if name == "dynamic_update_slice":
        return all(is_sum[:2]) and "sum" not in forms[2:]
    return name == "scatter-add" and is_sum[0] and is_sum[2] and forms[1] == "shared"


def examples_rule(equation: Any, facts: Sequence[Fact], counts: Counts) -> list[Fact]:
    """The facts of the results of an equation with examples, and without sums, among its operands."""
    try:
        return _facts_by_example(equation, facts, counts)
    except RefusalError as error:
        return [refused(error.reason, equation, error.pieces)] * len(equation.outvars)


def _facts_by_example(equation: Any, facts: Sequence[Fact], counts: Counts) -> list[Fact]:
    common: dict[str, Any] = {
        "is_trained": any(fact.is_trained for fact in facts),
        "from_batch": any(fact.from_batch for fact in facts),
    }
    name, step, outvars = operation_name(equation), name_of_step(equation), equation.outvars
    batched = [index for index, fact in enumerate(facts) if fact.form == "examples"]
    refuse_misfits(equation, facts, counts)
    # In a loop over the examples an array has those of its round, and no dim of them.
    if any(facts[index].dim is EACH_ROUND for index in batched):
        if all(facts[index].dim is EACH_ROUND for index in batched):
            return [Fact("examples", EACH_ROUND, is_own=True, **common) for _ in outvars]
        raise RefusalError(f"{step} uses all examples in a loop over the examples")
    if name in _PASSING:
        return [attrs.evolve(fact, is_own=True, is_whole=False) for fact in facts]
    if equation.params.get("dropout_rate"):
        raise RefusalError(f"{step} drops elements out by one seed for all examples")
    if name == "custom_partitioning":
        raise RefusalError(f"{step} says how devices split it, not that it computes examples one by one")
    factors = op_factors(equation)
    if factors is None:
        raise RefusalError(f"{step} has no rule that says which dims it computes one by one")
    # Examples have to go along one dim that all their operands and results share. The exception is a lookup by an
    # example's own position in the batch.
    factor = _factor(factors, facts, batched)
    if factor is None:
        lookup = own_index_result(equation, facts, factors, counts)
        if lookup is None:
            raise RefusalError(f"{step} computes with several examples at once")
        return [attrs.evolve(lookup, **common)]
    if _is_ragged(equation, factor, factors):
        raise RefusalError(f"{step} has groups of rows of all examples")
    pieces = factors.sizes[factor]
    if pieces % counts.runs:
        raise RefusalError(f"{pieces} pieces of {step} do not divide into {counts.runs} parts", pieces)
    return [_result_fact(equation, index, factor, factors, facts, common) for index in range(len(outvars))]


def _factor(factors: Factors, facts: Sequence[Fact], batched: Sequence[int]) -> int | None:
    """The one factor that the examples of all operands go along."""
    along = {factors.operands[index][facts[index].dim or 0] for index in batched}
    factor = next(iter(along)) if len(along) == 1 else None
    others = (names for index, names in enumerate(factors.operands) if index not in batched)
    # What is shared and has all examples of a dim is read for other examples, too. And pieces that are exchanged are
    # computed from each other.
    if factor in (None, factors.exchange, *factors.positional) or any(factor in names for names in others):
        return None
    return factor


def _is_ragged(equation: Any, factor: int, factors: Factors) -> bool:
    """A factor is of rows in groups: of a part of them the groups have other sizes."""
    name, params = equation.primitive.name, equation.params
    if name == "ragged_dot_general":
        (dim,) = params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        return factors.operands[0][dim] == factor
    return name == "pallas_call" and is_grouped(params) and factors.operands[ROWS_OPERAND][0] == factor


def _result_fact(
    equation: Any, index: int, factor: int, factors: Factors, facts: Sequence[Fact], common: dict[str, Any]
) -> Fact:
    dims = [dim for dim, other in enumerate(factors.results[index]) if other == factor]
    name = operation_name(equation)
    if len(dims) == 1:
        columns = index_columns(equation, facts) if len(equation.outvars) == 1 else ()
        index_size = next((fact.index_size for fact in facts if fact.index), 0)
        false = name == "lt" and facts[0].index and facts[1].is_zero
        indices: dict[str, Any] = {"index_columns": columns, "index_size": index_size, "is_false": false}
        return Fact("examples", dims[0], is_own=True, **indices, **common)
    if dims:
        return refused(f"{name_of_step(equation)} has the examples in several dims", equation)
    if factor not in factors.summed(index):
        # Of several results, one that no operand with examples reaches.
        reaching = any(fact.is_trained for fact in facts if fact.form == "shared")
        return Fact("shared", is_trained=reaching, is_whole=True)
    # Other operands of a scatter are what the sum is added to.
    adds_to_zero = not name.startswith("scatter") or facts[0].is_zero
    if factor in factors.reduced and name in _SUMMING and adds_to_zero:
        return Fact("sum", **common)
    what = "reduces over the examples, and is not a sum" if name not in _SUMMING else "adds a sum to what is not zero"
    return refused(f"{name_of_step(equation)} {what}", equation)


def index_columns(equation: Any, facts: Sequence[Fact]) -> tuple[int, ...]:
    """The columns of a result in which each example still has its position in the batch."""
    name = equation.primitive.name
    if name in _KEEPING_INDICES and facts[0].index:
        return (-1,)
    # Indexing adds the size to indices below zero: the positions of examples are none.
    if name == "select_n" and facts[0].is_false and facts[1].index:
        return (-1,)
    ndim = len(equation.outvars[0].aval.shape)
    sizes = {fact.index_size for fact in facts if fact.index}
    if name == "concatenate" and equation.params["dimension"] == ndim - 1 and len(sizes) == 1:
        starts, columns = 0, []
        for var, fact in zip(equation.invars, facts, strict=True):
            width = var.aval.shape[-1]
            columns += range(starts, starts + width) if fact.index else []
            starts += width
        return tuple(columns)
    return ()


def own_index_result(equation: Any, facts: Sequence[Fact], factors: Factors, counts: Counts) -> Fact | None:
    """The result of looking up each example at its own position, as `x[jnp.arange(n), labels]` does.

    Or of writing there. The factors tell the dim that is looked up in and the indices apart; here they go together.
    """
    columns = own_columns(equation, facts, counts)
    if not columns:
        return None
    is_gather = equation.primitive.name == "gather"
    index_dim = facts[1].dim or 0
    along_index = factors.operands[1][index_dim]
    result_dims = [dim for dim, other in enumerate(factors.results[0]) if other == along_index]
    if is_gather:
        return Fact("examples", result_dims[0], is_own=True) if len(result_dims) == 1 else None
    updates = facts[2]
    if updates.form == "examples" and factors.operands[2][updates.dim or 0] != along_index:
        return None
    return Fact("examples", facts[0].dim, is_own=True)


def own_columns(equation: Any, facts: Sequence[Fact], counts: Counts) -> tuple[int, ...]:
    """The columns of indices, of a gather or a scatter, with which each example reads or writes what is its own."""
    name = equation.primitive.name
    if not (name == "gather" or name.startswith("scatter")) or any(isinstance(v, Literal) for v in equation.invars[:2]):
        return ()
    operand, indices = facts[0], facts[1]
    if operand.form != "examples" or indices.form != "examples" or not indices.index_columns:
        return ()
    numbers = equation.params["dimension_numbers"]
    targets = numbers.start_index_map if name == "gather" else numbers.scatter_dims_to_operand_dims
    inserted = numbers.collapsed_slice_dims if name == "gather" else numbers.inserted_window_dims
    if operand.dim not in targets or operand.dim not in inserted:
        return ()
    # Both dims have to have one element for each position.
    sizes = {equation.invars[0].aval.shape[operand.dim or 0], equation.invars[1].aval.shape[indices.dim or 0]}
    column = targets.index(operand.dim)
    width = equation.invars[1].aval.shape[-1]
    columns = tuple(range(width)) if indices.index else indices.index_columns
    return (column,) if sizes == {indices.index_size} and column in columns else ()
