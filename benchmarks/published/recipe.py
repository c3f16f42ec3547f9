"""How a published step was run: what does not follow from the dimensions of its model."""

from typing import Any, final

import attrs
import jax

from published.attention import TpuKernel

_PROJECTIONS = ("query_proj", "key_proj", "value_proj", "qkv_proj")


def _names(*names: str) -> Any:
    return jax.checkpoint_policies.save_only_these_names(*names)


def _keeps_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keeps what the kernels of attention return: the output, and the sums that the backward kernel needs."""
    return str(primitive.name).startswith("dot_product_attention_fwd")


def _minimal_flash() -> Any:
    policies = jax.checkpoint_policies
    both = policies.save_from_both_policies(policies.checkpoint_dots_with_no_batch_dims, _names("context"))
    return policies.save_from_both_policies(both, _keeps_attention)


def _offloaded() -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["query_proj", "key_proj", "value_proj"],
        offload_src="device",
        offload_dst="pinned_host",
    )


POLICIES: dict[str, Any] = {
    "none": lambda: jax.checkpoint_policies.everything_saveable,
    "full": lambda: jax.checkpoint_policies.nothing_saveable,
    "minimal": lambda: jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "minimal_flash": _minimal_flash,
    "save_qkv_proj": lambda: _names(*_PROJECTIONS),
    "save_out_proj": lambda: _names("out_proj"),
    "save_dot_except_mlp": lambda: _names(*_PROJECTIONS, "out_proj"),
    "save_dot_except_mlpwi": lambda: _names(*_PROJECTIONS, "out_proj", "mlpwo"),
    "qkv_proj_offloaded": _offloaded,
}
"""What the backward pass keeps, by MaxText's names. `none` recomputes nothing, `full` all of a layer but its input."""

PLACES = ("remat", "device", "offload")
"""Where a tensor is until the backward pass, by MaxText's names: computed again, kept, or in the memory of the host."""


def policy_of(remat: str) -> Any:
    """The policy of a name in `POLICIES`, or of MaxText's `custom` with tensors: "custom out_proj=offload".

    An unknown policy or place raises `ValueError`.
    """
    name, *tensors = remat.split()
    if name != "custom":
        if remat not in POLICIES:
            raise ValueError(f"unknown remat {remat!r}; known are {', '.join(POLICIES)}, custom NAME=PLACE ...")
        return POLICIES[remat]()
    places = [tensor.partition("=")[::2] for tensor in tensors]
    if wrong := sorted({place for _, place in places} - set(PLACES)):
        raise ValueError(f"unknown place {', '.join(map(repr, wrong))}; known are {', '.join(PLACES)}")
    kept, offloaded = ([tensor for tensor, at in places if at == place] for place in PLACES[1:])
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=kept,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "fully_shard")
"""Of FSDP: the first gathers weights again for the backward pass, the second keeps them. `fully_shard`, its successor,
gathers them again; of several batches it adds up gradients of whole weights, and reduces them once."""


@final
@attrs.frozen
class Recipe:
    """How a program trains: what XLA is given besides the model."""

    scan: bool = True
    """Layers run in a loop; else each is written out."""

    eager: bool = False
    """Each operation is a kernel of its own, as PyTorch runs them: XLA may fuse nothing."""

    compiled: bool = False
    """What is eager is so outside of layers only: torch.compile fuses what is in them."""

    weight_dtype: str = "float32"
    """The dtype of weights and of Adam's states."""

    fused_adam: bool = False
    """Where operations are run one by one, Adam is one kernel."""

    loss_dtype: str = ""
    """The dtype in which PyTorch's kernels compute the cross entropy; by default XLA does so, in float32."""

    logged_losses: int = 0
    """How often PyTorch's kernels compute the cross entropy besides, in float32, only for a log."""

    sequence_parallel: bool = False
    """`tensor` splits the sequence between matmuls, by PyTorch's collectives, which nothing runs beside."""

    repeat_heads: bool = False
    """Keys and values are repeated for all heads in front of attention."""

    lora_rank: int = 0
    """The rank of the adapters of all matmuls of layers; other weights are not trained."""

    lora_dropout: bool = False
    """Elements of what adapters add are dropped."""

    fsdp: str = ""
    """The strategy of PyTorch's FSDP (`STRATEGIES`), which splits weights instead of XLA."""

    reduce_dtype: str = "bfloat16"
    """What FSDP reduces gradients in."""

    attention: str = ""
    """The kernels that attention runs as (`RATES`); by default those of the platform."""

    fused_qkv: bool = False
    fused_mlp: bool = False
    one_hot_lookup: bool = True
    """The embedding is a matmul with a one-hot matrix instead of a gather."""

    split_vocab: bool = False
    """`fsdp` splits the head and the logits over the vocabulary, and not over the model's width and the batch."""

    transposed: bool = False
    """`tensor` splits the width of the model in weights, where it splits no other dim but the MLP's, and not the MLP's:
    MaxText's axis `tensor_transpose`."""

    expert_block: int = 1024
    """The most that the kernel of experts multiplies at a time of the width before a matmul, and of that behind it."""

    split_residual: bool = True
    """Between layers the width of activations is split over `tensor`."""

    constraints: bool = True
    """The model says how XLA splits its activations."""

    gather_once: bool = False
    """The program gathers what queries, keys and values are computed from once in each pass. XLA of JAX 0.12 does so
    without being told, that of 0.10 gathers it again for the gradient of each."""

    clip: bool = True
    """Gradients are clipped by their global norm."""

    weight_decay: bool = True
    accumulations: int = 1
    """Batches of the row's size whose gradients one step adds up."""

    tpu_kernel: TpuKernel = TpuKernel()
    hidden_split: bool = False
    """`fsdp` splits the hidden width in the weights of MLPs, and not the model's: MaxText's axis `fsdp_transpose`."""

    vocab_tiles: int = 1
    """The parts of a batch whose logits are computed one after the other, with a table that is gathered once and in
    float32 (MaxText's `num_vocab_tiling`)."""

    moment_dtype: str = "float32"
    """Of Adam's first moment (MaxText's `mu_dtype`)."""

    flags: str = ""
    """Compiler flags, as `shardrules.Target` takes them."""

    network_bytes_per_second: float = 0.0
    """A device's share of its host's network, where it is not what the sheet of its chip says."""

    devices_per_host: int = 0
    """The GPUs of a host, where they are not as many as `shardrules.Target` assumes."""

    pair_bytes_per_second: float = 0.0
    """What two GPUs of a host send each other over links of their own, in each direction, where there is no switch."""

    machine: str = ""
    """The source of these three."""

    float32_logits: bool = False
    """The head multiplies in float32."""

    @property
    def problems(self) -> list[str]:
        """Why no program runs so."""
        differs = self.network_bytes_per_second or self.devices_per_host or self.pair_bytes_per_second
        if bool(self.machine) != bool(differs):
            return ["a network, hosts and links of pairs need `machine`, their source, and it needs one of them"]
        return []
