"""The words for the dimensions of a transformer's arrays: logical axes, runtime modes, and ready lists of both.

Model code says what a dimension *is* (a batch, a sequence, heads), and a `PartitionAxis` says which mesh axis splits
it. The words are plain strings that no mesh axis would be called by, so that lists may mix both.
"""

from typing import Final, final

import attrs

from shardrules.core.errors import ConfigError, suggest
from shardrules.rules.logical import MODE_TRAIN, DimNames, LogicalAxis

BATCH: Final = "__BATCH__"
"""The examples of a batch."""

LENGTH: Final = "__LENGTH__"
"""The positions of a sequence, where queries and keys are not distinguished."""

QUERY_LENGTH: Final = "__QUERY_LENGTH__"
"""The positions of the queries. One at a time while decoding."""

KV_LENGTH: Final = "__KV_LENGTH__"
"""The positions of the keys and values."""

EMBED: Final = "__EMBED__"
"""The features of the hidden state."""

HEAD: Final = "__HEAD__"
"""The heads of the queries."""

KV_HEAD: Final = "__KV_HEAD__"
"""The heads of the keys and values."""

MLP_INTERMEDIATE: Final = "__MLP_INTERMEDIATE__"
"""The inner features of a feed-forward layer."""

VOCAB: Final = "__VOCAB__"
"""The entries of the vocabulary."""

EXPERT: Final = "__EXPERT__"
"""The experts of a mixture."""

EXPERT_GATE: Final = "__EXPERT_GATE__"
"""The gates that choose among experts."""

HEAD_DIM: Final = "__HEAD_DIM__"
"""The features of one query head."""

KV_HEAD_DIM: Final = "__KV_HEAD_DIM__"
"""The features of one key or value head."""

BIAS_HEAD_SEQ: Final = "__BIAS_HEAD_SEQ__"
"""The heads of an attention bias."""

BIAS_KV_SEQ: Final = "__BIAS_KV_SEQ__"
"""The key positions of an attention bias."""

EMPTY: Final = "_"
"""A dimension that is not split. In a group of axes it adds nothing."""

DP: Final = "__DATA_PARALLEL__"
"""The mesh dimension for data parallelism."""

FSDP: Final = "__FULLY_SHARDED_DATA_PARALLEL__"
"""The mesh dimension for fully sharded data parallelism."""

TP: Final = "__TENSOR_PARALLEL__"
"""The mesh dimension for tensor parallelism."""

EP: Final = "__EXPERT_PARALLEL__"
"""The mesh dimension for expert parallelism."""

SP: Final = "__SEQUENCE_PARALLEL__"
"""The mesh dimension for sequence parallelism."""

MODE_PREFILL: Final = "__prefill__"
"""The first pass over a prompt: whole sequences, and the ordinary fields apply."""

MODE_DECODE: Final = "__autoregressive__"
"""Generation, one position at a time: the `generation_*` fields apply."""

MODE_INSERT: Final = "__insert__"
"""A finished prefill is put into the running cache: the `generation_*` fields apply."""

MODES: Final = (MODE_TRAIN, MODE_PREFILL, MODE_DECODE, MODE_INSERT)
"""Every runtime mode."""

GENERATION_MODES: Final = (MODE_DECODE, MODE_INSERT)
"""The modes in which the `generation_*` fields apply."""


def check_mode(mode: str) -> str:
    """Returns `mode` if it is a runtime mode."""
    if mode not in MODES:
        hint = suggest(mode, MODES) if isinstance(mode, str) else ""
        raise ConfigError(
            f"unknown runtime mode {mode!r}{hint}; the modes are MODE_TRAIN, MODE_PREFILL, MODE_DECODE and MODE_INSERT"
        )
    return mode


def as_logical(axes: object) -> LogicalAxis:
    """Returns a logical axis in its normal form: a name, `None`, or a tuple of these."""
    if isinstance(axes, list | tuple):
        return tuple(as_logical(axis) for axis in axes)
    if axes is None or (isinstance(axes, str) and axes):
        return axes
    raise ConfigError(f"a logical axis is a name, None or a sequence of these, got {axes!r}")


def as_dims(axes: object) -> tuple[LogicalAxis, ...]:
    """Returns the logical axes of an array as a tuple, one for each dimension."""
    dims = as_logical(axes)
    # A bare name is refused: its letters would pass for axes.
    if not isinstance(dims, tuple):
        raise ConfigError(f"logical axes are a list with one item for each dimension: [{axes!r}], not {axes!r}")
    return dims


def _as_mode(mode: str | int) -> str | int:
    return mode if isinstance(mode, int) else check_mode(mode)


@final
@attrs.frozen
class DynamicShardingAxes(DimNames):
    """The logical axes of an array, one for each dimension, together with the mode in which to resolve them.

    `mode` is a runtime mode, or a dimension as an int: where that dimension has length 1 the mode is `MODE_DECODE`,
    else `MODE_TRAIN`.

    ```python
    from shardrules.presets import eformer

    scores = eformer.DynamicShardingAxes((eformer.BATCH, eformer.HEAD, eformer.QUERY_LENGTH, eformer.KV_LENGTH), mode=2)
    axes = eformer.PartitionAxis(key_sequence_axis=None, generation_key_sequence_axis=None)
    manager = eformer.PartitionManager(axes)
    assert manager.resolve(scores, shape=(8, 16, 512, 512)) == P(("fsdp", "dp"), "tp", "sp", None)
    assert manager.resolve(scores, shape=(8, 16, 1, 512)) == P(("fsdp", "dp"), "tp", None, None)
    ```
    """

    axes: tuple[LogicalAxis, ...] = attrs.field(converter=as_dims)
    mode: str | int = attrs.field(default=MODE_TRAIN, converter=_as_mode)


HiddenStateSharding: Final = DynamicShardingAxes((BATCH, QUERY_LENGTH, EMBED), 1)
"""Hidden states: batch, position, feature."""

AttnQSharding: Final = DynamicShardingAxes((BATCH, QUERY_LENGTH, HEAD, HEAD_DIM), 1)
"""Queries of attention."""

AttnKVSharding: Final = DynamicShardingAxes((BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM), 1)
"""Keys and values of attention."""

Replicated: Final = DynamicShardingAxes((EMPTY,))
"""A whole copy everywhere."""

ColumnWise: Final = DynamicShardingAxes(((FSDP, SP), TP))
"""A kernel (in, out) whose outputs are split over tensor parallelism."""

RowWise: Final = DynamicShardingAxes((TP, (FSDP, SP)))
"""A kernel (in, out) whose inputs are split over tensor parallelism."""

SColumnWise: Final = DynamicShardingAxes(((FSDP, SP),))
"""A vector that goes with the first dimension of a `ColumnWise` kernel."""

SRowWise: Final = DynamicShardingAxes((TP,))
"""A vector that goes with the first dimension of a `RowWise` kernel."""

ExpertColumnWise: Final = DynamicShardingAxes((EP, FSDP, TP))
"""Kernels of experts (expert, in, out), outputs split over tensor parallelism."""

ExpertRowWise: Final = DynamicShardingAxes((EP, TP, FSDP))
"""Kernels of experts (expert, in, out), inputs split over tensor parallelism."""

ExpertColumnWiseAlt: Final = DynamicShardingAxes((EP, (FSDP, SP), TP))
"""As `ExpertColumnWise`, with sequence parallelism on the inputs too."""

ExpertRowWiseAlt: Final = DynamicShardingAxes((EP, TP, (FSDP, SP)))
"""As `ExpertRowWise`, with sequence parallelism on the outputs too."""

UnifiedExpertColumnWise: Final = DynamicShardingAxes(((FSDP, SP, EP), EMPTY, TP))
"""Kernels of experts (expert, in, out): experts over all but tensor parallelism, which splits the outputs."""

UnifiedExpertRowWise: Final = DynamicShardingAxes(((FSDP, SP, EP), TP, EMPTY))
"""Kernels of experts (expert, in, out): experts over all but tensor parallelism, which splits the inputs."""

ExpertTensorParallel: Final = DynamicShardingAxes((TP, EMPTY, EMPTY))
"""Kernels of experts: the experts themselves over tensor parallelism."""

ExpertActivations: Final = DynamicShardingAxes((DP, SP, EP, TP))
"""Activations of experts: batch, position, expert, feature."""

ExpertActivationsAlt: Final = DynamicShardingAxes((DP, SP, (TP, FSDP)))
"""Activations of experts without a dimension for them: batch, position, feature."""
