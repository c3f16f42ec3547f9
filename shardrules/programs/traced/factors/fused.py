"""The loops of the fused kernels that are primitives of JAX: cuDNN's attention, and matmuls with scales.

Each device runs a kernel of its own on its pieces: partitioners know these kernels in part, or not at all. Beside them
stands what says itself how it is split, `jax.experimental.custom_partitioning`, and is left to the partitioner.
"""

import math
from collections.abc import Hashable, Mapping, Sequence

from jax.experimental.custom_partitioning import BATCHING, ArrayMapping, SdyShardingRule

from shardrules.programs.compiling.fused_calls import BACKWARD, FORWARD, FP8_BACKWARD, FP8_FORWARD, head_dim_of
from shardrules.programs.traced.factors.linear import dot_names, without_dims
from shardrules.programs.traced.factors.loops import ANY, ONE, LoopRule, Loops, OpSignature, whole


def is_maximum(name: str, result_index: int) -> bool:
    """A result is the maximum over the pieces, instead of their sum: the largest elements in 8 bits."""
    return (name == FP8_FORWARD and result_index in (1, 2)) or (name == FP8_BACKWARD and result_index > 2)


def _attention(op: OpSignature) -> Loops | None:
    """Examples and heads may be split; groups of queries stay with the head of their keys. Lengths and pages are
    whole, and so are examples that are packed of several sequences, which are numbered through for the backward pass.
    Dropout has one seed: devices would all drop out what the first does.
    """
    if op.params.get("dropout_rate"):
        return None
    query, key, _, bias = op.operands[:4]
    per_example, rest = op.operands[4:10], op.operands[10:]
    residuals, modifiers = (rest[:3], rest[3:]) if op.name == BACKWARD else ((), rest)
    is_trained = op.name == BACKWARD or len(op.results) > 1
    is_packed = len(per_example[2]) == 2 and per_example[2][1] > 2
    is_paged = len(per_example[4]) == 4
    # What a function for scores reads may differ from example to example.
    is_split = all(math.prod(shape) == 1 for shape in modifiers)
    batch = "batch" if is_split and not (is_packed and is_trained) else None
    heads = "heads" if is_split else None
    head_dim = head_dim_of(op.params)
    queries = _dims(batch, heads, head_dim)
    # A single head of keys is for all queries: each device has it whole, and its gradient is a sum.
    keys = _dims(None if is_paged else batch, heads if key[head_dim] > 1 else None, head_dim)

    bias_names: list[Hashable] = list(whole(bias))
    if len(bias) == 4:
        bias_names[:2] = [batch if bias[0] > 1 else None, heads if bias[1] > 1 else None]
    statistics = [batch, heads, None]
    operands = [queries, keys, keys, bias_names]
    operands += [[batch if shape[0] == query[0] else None, *whole(shape[1:])] for shape in per_example]
    operands += [statistics, queries, queries] if residuals else []
    operands += [whole(shape) for shape in modifiers]
    results = [queries, keys, keys, bias_names] if op.name == BACKWARD else [queries, statistics]
    return _on_pieces(operands, results[: len(op.results)])


def _fp8_attention(op: OpSignature) -> Loops | None:
    """Examples and heads may be split; groups of queries stay with the head of their keys. The largest elements of all
    pieces are found."""
    head_dim = head_dim_of(op.params)
    queries = _dims("batch", "heads", head_dim)
    keys = _dims("batch", "heads" if op.operands[1][head_dim] > 1 else None, head_dim)
    statistics: list[Hashable] = ["batch", "heads", None]
    arrays = [queries, keys, keys, *([queries, queries, statistics] if op.name == FP8_BACKWARD else [])]
    operands = [*arrays, *(whole(shape) for shape in op.operands[len(arrays) :])]
    results = arrays[:3] if op.name == FP8_BACKWARD else [queries]
    largest = [whole(shape) for shape in op.results[len(results) :] if len(shape) == 4]
    results = [*results, *largest, statistics][: len(op.results)]
    return _on_pieces(operands, results)


def _dims(batch: Hashable, heads: Hashable, head_dim: int) -> list[Hashable]:
    return [batch, *(heads if dim == head_dim else None for dim in (1, 2)), None]


def _on_pieces(operands: Sequence[Sequence[Hashable]], results: Sequence[Sequence[Hashable]]) -> Loops:
    """Loops in which a result that lacks one is a sum over it."""
    loops = dict.fromkeys(name for names in operands for name in names if name is not None)
    reduced = [name for name in loops if not all(name in names for names in results)]
    return Loops(operands, results, reduced, is_local=True)


def _scaled_matmul(op: OpSignature) -> Loops | None:
    """Any dim may be split, the summed one into whole blocks of elements that share a scale."""
    left, right = ["batch", "left", "sum"], ["batch", "right", "sum"]
    return Loops([left, right, left, right], [["batch", "left", "right"]], ["sum"], is_local=True)


def _scaled_dot(op: OpSignature) -> Loops | None:
    """Any dim may be split, summed ones into whole blocks of elements that share a scale."""
    contracted, batch = op.params["dimension_numbers"]
    left, right = dot_names(op, contracted, batch)
    result = [left[dim] for dim in batch[0]] + without_dims(left, contracted[0], batch[0])
    result += without_dims(right, contracted[1], batch[1])
    # A scale for all elements along a dim is whole.
    scale_names = [
        [name if size > 1 else None for name, size in zip(names, shape, strict=True)]
        for names, shape in zip((left, right), op.operands[2:], strict=True)
    ]
    return Loops([left, right, *scale_names], [result], [left[dim] for dim in contracted[0]], is_local=True)


def _by_its_author(op: OpSignature) -> Loops | None:
    """The loops that the author of a function says may be split, in an einsum's letters (`sharding_rule`), which the
    compiler gets, too. Functions of the types of arrays are not asked."""
    rule = op.params["sharding_rule"]
    if not isinstance(rule, SdyShardingRule):
        return None
    whole_factors = (*rule.need_replication_factors, *rule.permutation_factors)

    def names(mapping: ArrayMapping, shape: tuple[int, ...]) -> list[Hashable] | None:
        leading = [term for term in mapping if str(term).startswith(BATCHING)]
        factors = [term for term in mapping if term not in leading]
        count = len(shape) - len(factors)
        if any(not isinstance(term, str) for term in factors) or count < 0 or (count and not leading):
            return None  # several factors of one dim
        batch: list[Hashable] = [(*leading, dim) for dim in range(count)]
        return [*batch, *(None if factor in whole_factors else factor for factor in factors)]

    sides = ((rule.operand_mappings, op.operands), (rule.result_mappings, op.results))
    if any(len(mappings) != len(shapes) for mappings, shapes in sides):
        return None
    every = [list(map(names, mappings, shapes)) for mappings, shapes in sides]
    operands, results = ([array for array in side if array is not None] for side in every)
    if len(operands) < len(op.operands) or len(results) < len(op.results):
        return None
    return Loops(operands, results, [name for name in rule.reduction_factors if name not in whole_factors])


_FOUR = range(4, 5)

FUSED_RULES: Mapping[str, LoopRule] = {
    FORWARD: LoopRule(_attention, range(10, ANY.stop), range(1, 3), ("layout",)),
    BACKWARD: LoopRule(_attention, range(13, ANY.stop), range(3, 5), ("layout",)),
    FP8_FORWARD: LoopRule(_fp8_attention, range(9, 10), range(3, 5), ("layout",)),
    FP8_BACKWARD: LoopRule(_fp8_attention, range(18, 19), range(7, 8), ("layout",)),
    "scaled_matmul_wrapper": LoopRule(_scaled_matmul, _FOUR, ONE),
    "custom_partitioning": LoopRule(_by_its_author, ANY, ANY, ("sharding_rule",)),
    "scaled_dot": LoopRule(_scaled_dot, _FOUR, ONE, ("dimension_numbers",)),
}
"""The rules of these operations, by primitive."""
