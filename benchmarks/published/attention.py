"""Attention as the published steps ran it: a kernel of the platform, which never writes the scores to memory."""

import itertools
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BATCH = ("data", "fsdp")
"""The mesh axes that split a batch."""

LENGTH = "context"
"""The mesh axis that splits sequences."""

Layout: TypeAlias = Literal["HEAD_DIM_MINOR", "SEQ_MINOR"]
"""Which dim of queries, keys or values is the minor one in memory."""

_BLOCK = 512
"""The rows of a block, as in splash attention."""

_FLASH_ROWS = MappingProxyType({"fwd": 512, "dq": 1024, "dkv": 512})
"""The queries of a block of `flash_attention`: layers/attentions.py of MaxText at 76bd53b0f (December 2023)."""

RATES = MappingProxyType(
    {
        "flash2": ((346e12, 380), (330e12, 275)),
        "flash1-triton": ((346e12 / 1.4, 380), (330e12 / 2, 275)),
    }
)
"""The FLOP/s of other kernels on an H100 for heads of 128, forward and backward: at infinite length, and the length at
which half of it is reached. FlashAttention-2 reaches 191, 260, 298, 319, 333 and 335 TFLOP/s forward with a causal
mask, and 214, 260, 291, 310, 318 and 322 backward without one, for lengths of 512, twice as many, and so on to 16
thousand (arXiv 2407.08608, figures 5 and 6). It is 1.3 to 1.5 times as fast as the first FlashAttention in Triton
forward, and twice backward (arXiv 2307.08691, section 4.1)."""


@final
@attrs.frozen
class TpuKernel:
    """The Pallas kernel of attention on TPUs, by MaxText's names (`sa_block_q` and so on) and defaults.

    Its blocks are rows of queries (`q`) and of keys and values (`kv`), of which `compute` are computed at once:
    forward, for the gradients of keys and values (`dkv`), and for those of queries (`dq`).
    """

    block_q: int = 512
    block_kv: int = 512
    block_kv_compute: int = 512
    block_q_dkv: int = 512
    block_kv_dkv: int = 512
    block_kv_dkv_compute: int = 512
    block_q_dq: int = 512
    block_kv_dq: int = 512
    use_fused_bwd_kernel: bool = False
    """One kernel computes all gradients."""

    q_layout: Layout = "HEAD_DIM_MINOR"
    k_layout: Layout = "HEAD_DIM_MINOR"
    v_layout: Layout = "HEAD_DIM_MINOR"

    is_splash: bool = True
    """Splash attention, which leaves out blocks of a mask; else `flash_attention`, in MaxText's blocks of 2023."""


def attend(platform: str, settings: TpuKernel, query: Any, key: Any, value: Any, window: int = 0) -> Any:
    """Causal attention of (batch, length, heads, head_dim); keys and values may have fewer heads.

    Values may be narrower than queries and keys. Each token sees the `window` before it, or all if there is none. On
    TPUs queries have been scaled: MaxText does so in the initial values of their weights.
    """
    if platform == "cuda":
        sides = (window, 0) if window else None
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, local_window_size=sides, implementation="cudnn"
        )
    if platform == "tpu":
        run = _splash if settings.is_splash else _flash
        return run(settings, query, key, value, window)
    # Toys on CPUs, for which JAX takes values as wide as keys.
    size = value.shape[-1]
    value = jnp.pad(value, [(0, 0)] * 3 + [(0, key.shape[-1] - size)])
    if platform == "blocks":
        return _blockwise(query, key, value, window)
    sides = (window, 0) if window else None
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=sides)[..., :size]


def _blockwise(query: Any, key: Any, value: Any, window: int) -> Any:
    """Attention of blocks of queries, each with its part of the scores, which the backward pass computes again."""
    batch, length, heads, size = query.shape
    rows = min(_BLOCK, length)
    repeats = heads // key.shape[2]
    key, value = jnp.repeat(key, repeats, 2), jnp.repeat(value, repeats, 2)
    blocks = jnp.moveaxis(query.reshape(batch, length // rows, rows, heads, size), 1, 0)
    starts = jnp.arange(length // rows) * rows

    @jax.checkpoint
    def attend_block(block: Any, start: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", block, key, preferred_element_type=jnp.float32) * size**-0.5
        distance = start + jnp.arange(rows)[:, None] - jnp.arange(length)
        seen = (distance >= 0) & (distance <= (window or length))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(value.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    _, results = jax.lax.scan(lambda carry, item: (carry, attend_block(*item)), None, (blocks, starts))
    return jnp.moveaxis(results, 0, 1).reshape(batch, length, heads, value.shape[-1])


@final
class _BalancedMask(masks.Mask):
    """A causal mask whose rows are in the order in which `balanced` deals sequences out to devices."""

    def __init__(self, length: int, devices: int) -> None:
        self._rows = balanced(np.arange(length), devices)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self._rows), len(self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, columns = self._rows[index[0]], np.arange(len(self._rows))[index[1]]
        size = (len(rows), len(columns))
        # Most blocks are seen as a whole, or not at all.
        if rows.min() >= columns.max() or rows.max() < columns.min():
            return np.broadcast_to(rows.min() >= columns.max(), size)
        return rows[:, None] >= columns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BalancedMask) and np.array_equal(self._rows, other._rows)

    def __hash__(self) -> int:
        return hash((type(self), self._rows.tobytes()))


def _balanced_order(devices: int) -> list[int]:
    """Of twice as many parts as devices, an early and a late one for each, which see as much together as any other."""
    return list(itertools.chain.from_iterable((device, 2 * devices - 1 - device) for device in range(devices)))


def balanced(rows: Any, devices: int, axis: int = 0) -> Any:
    """Rows in the order in which they are dealt out to devices."""
    parts = np.split(rows, 2 * devices, axis)
    return np.concatenate([parts[index] for index in _balanced_order(devices)], axis)


def _contiguous(rows: Any, devices: int, axis: int) -> Any:
    """The rows of all devices in their own order again."""
    parts = jnp.split(rows, 2 * devices, axis)
    return jnp.concatenate([parts[index] for index in np.argsort(_balanced_order(devices))], axis)


def _splash(settings: TpuKernel, query: Any, key: Any, value: Any, window: int) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    mesh = jax.sharding.get_abstract_mesh()
    devices, length = mesh.shape[LENGTH], query.shape[1]
    shape = (length, length)
    mask: Any = _BalancedMask(length, devices) if devices > 1 else splash.CausalMask(shape)
    if window:
        mask &= splash.LocalMask(shape, (window, window), 0)
    names = [name for name in attrs.asdict(settings) if name.startswith("block_")]
    blocks: dict[str, Any] = {name: min(getattr(settings, name), length) for name in names}
    if settings.use_fused_bwd_kernel:
        blocks |= {"block_q_dq": None, "block_kv_dq": None}
    layouts = {name: splash.QKVLayout[getattr(settings, name)] for name in ("q_layout", "k_layout", "v_layout")}
    kernel: Any = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * query.shape[2]),
        head_shards=mesh.shape["tensor"],
        q_seq_shards=devices,
        block_sizes=splash.BlockSizes(**blocks, **layouts, use_fused_bwd_kernel=settings.use_fused_bwd_kernel),
        # The name lets a policy keep the output together with the sums that the backward kernels need.
        residual_checkpoint_name="context",
    )

    def local(kernel: Any, query: Any, key: Any, value: Any) -> Any:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        if devices > 1:
            key, value = (_contiguous(x, devices, 2) for x in (key, value))
        return jnp.swapaxes(jax.vmap(kernel)(query, key, value), 1, 2)

    split, whole = P(BATCH, LENGTH, "tensor"), P(BATCH, None, "tensor")
    of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, P("tensor", LENGTH)))
    specs = (of_kernel, split, whole, whole)
    return jax.shard_map(local, in_specs=specs, out_specs=split, check_vma=False)(kernel, query, key, value)


def causal_share(products: int, length: int) -> float:
    """How many of its blocks `flash_attention` computes, by the number of its matmuls. Their text does not say."""
    rows = _FLASH_ROWS[{2: "fwd", 3: "dq", 4: "dkv"}[products]]
    seen = sum(-(-end // _BLOCK) for end in range(rows, length + 1, rows))
    return seen / ((length // rows) * (length // _BLOCK))


def _flash(settings: TpuKernel, query: Any, key: Any, value: Any, window: int) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    assert not window, "flash_attention has no window"

    def local(query: Any, key: Any, value: Any) -> Any:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        sizes = flash.BlockSizes(
            block_q=_FLASH_ROWS["fwd"],
            block_k_major=_BLOCK,
            block_k=_BLOCK,
            block_b=min(2, query.shape[0]),
            block_q_major_dkv=_FLASH_ROWS["dkv"],
            block_k_major_dkv=_BLOCK,
            block_q_dkv=_FLASH_ROWS["dkv"],
            block_k_dkv=_BLOCK,
            block_q_dq=_FLASH_ROWS["dq"],
            block_k_dq=256,
            block_k_major_dq=_BLOCK,
        )
        return jnp.swapaxes(flash.flash_attention(query, key, value, causal=True, block_sizes=sizes), 1, 2)

    spec = P(BATCH, None, "tensor")
    return jax.shard_map(local, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)(query, key, value)
