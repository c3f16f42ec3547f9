"""Steps with an accident that people published, and the same steps without it; small, for any compiler.

Each function returns what to audit, with the accident if `is_bad`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P

from tests.programs.audits.audited import Program, con, cross_entropy, f32, i32

BF16, F8 = jnp.bfloat16, jnp.float8_e4m3fn


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, BF16)


MODEL, TRAINED = ("parameters", "batch"), ("parameters", "optimizer state", "batch")


def head(is_bad: bool, target: str) -> Program:
    """A head whose rows are split over an axis that does not split the batch, or whose columns are."""

    def step(head: Any, x: Any, labels: Any) -> Any:
        return jax.value_and_grad(lambda head, x: cross_entropy(x @ head, labels), (0, 1))(head, x)

    specs = (P("tensor"), P("data", None, "tensor")) if is_bad else (P(None, "tensor"), P("data"))
    args, roles = (f32(256, 8192), f32(16, 128, 256), i32(16, 128)), ("parameters", "batch", "batch")
    return Program(step, args, (*specs, P("data")), "data:4,tensor:2", out=(None, specs), roles=roles)


def head_over_batch(is_bad: bool, target: str) -> Program:
    """A head whose rows are split over the axis of the batch, and logits that nothing keeps on that axis."""

    def step(head: Any, x: Any, labels: Any) -> Any:
        def loss(head: Any) -> Any:
            return cross_entropy(x @ head if is_bad else con(x @ head, "fsdp"), labels)

        return jax.value_and_grad(loss)(head)

    x = P(None, None, "fsdp") if is_bad else P("fsdp")
    args, roles = (f32(256, 4096), f32(16, 64, 256), i32(16, 64)), ("parameters", "batch", "batch")
    return Program(step, args, (P("fsdp"), x, P("fsdp")), "fsdp:8", out=(None, P("fsdp")), roles=roles)


def regathered(is_bad: bool, target: str) -> Program:
    """Layers under remat with few tokens on a device, or with many."""

    def layer(x: Any, w: Any) -> Any:
        return con(jnp.tanh(x @ w.astype(x.dtype)), "shard"), None

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)[0].astype(jnp.float32))

    few, many, array = {"cpu": (16, 2**12, f32), "cud": (256, 2**17, bf16)}.get(target[:3], (256, 2**15, bf16))
    args = (f32(8, 1024, 1024), array(few if is_bad else many, 1024))
    specs = (P(None, "shard"), P("shard"))
    return Program(jax.grad(loss), args, specs, "shard:8", out=P(None, "shard"))


def narrow(is_bad: bool, target: str) -> Program:
    """A projection of heads whose last dimension is split into rows of 256 bytes, or whose first is split."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(con(jnp.einsum("bshd,hde->bse", jnp.sin(x), w), "fsdp")) ** 2)

        return w - jax.grad(loss)(w)

    spec = P(None, None, "fsdp") if is_bad else P("fsdp")
    return Program(step, (f32(64, 64, 512), f32(8, 16, 64, 64)), (spec, P("fsdp")), "fsdp:8", out=spec, roles=MODEL)


def small(is_bad: bool, target: str) -> Program:
    """A hundred small arrays, all of them split, or whole."""

    def step(scales: Any, x: Any) -> Any:
        for scale in scales:
            # A barrier keeps the compiler for GPUs from combining what it can see at once.
            x, scale = lax.optimization_barrier((x, scale))
            x = con(jnp.tanh(x * scale), "fsdp")
        return x

    spec = P("fsdp") if is_bad else P()
    return Program(step, ([f32(1024)] * 128, f32(64, 1024)), (spec, P("fsdp")), "fsdp:8", out=P("fsdp"), roles=MODEL)


def kernel(is_bad: bool, target: str) -> Program:
    """A kernel that XLA cannot split, called as it is, or inside of shard_map."""

    def call(x: Any) -> Any:
        if target.startswith("cpu"):
            rows, batch = jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32), jax.ShapeDtypeStruct(x.shape[:-2], jnp.int32)
            return jax.ffi.ffi_call("lapack_sgetrf_ffi", (jax.ShapeDtypeStruct(x.shape, x.dtype), rows, batch))(x)[0]

        def double(source: Any, result: Any) -> None:
            result[...] = source[...] * 2

        block = pl.BlockSpec((1, *x.shape[1:]), lambda index: (index, 0, 0))
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
        params = triton.CompilerParams()
        grid = (x.shape[0],)
        return pl.pallas_call(double, struct, grid=grid, in_specs=[block], out_specs=block, compiler_params=params)(x)

    def step(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        split = jax.shard_map(call, in_specs=P("batch"), out_specs=P("batch"), check_vma=False)
        return con((call if is_bad else split)(y), "batch")  # <kernel>

    return Program(step, (f32(64, 64), f32(512, 64, 64)), (P(), P("batch")), "batch:8", out=P("batch"), roles=MODEL)


def names(is_bad: bool, target: str) -> Program:
    """A policy that saves by name, where an array has the name, or a slightly different one."""
    policy = jax.checkpoint_policies.save_only_these_names("hiden" if is_bad else "hidden")

    def layer(x: Any, w: Any) -> Any:
        hidden = checkpoint_name(jnp.tanh(x @ w[0]), "hidden")  # <named>
        return con(jnp.tanh(hidden @ w[1]), "data"), None

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0])

    weights = (f32(4, 512, 1024), f32(4, 1024, 512))
    return Program(jax.grad(loss), (weights, f32(2048, 512)), (P(), P("data")), "data:8", out=P())


def muon(is_bad: bool, target: str) -> Program:
    """Newton-Schulz on matrices that are split by rows, or on a stack that is split by matrix."""
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    optimizer = optax.contrib.muon(1e-3) if is_bad else optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for index in range(8):
                w = params[f"w{index}"] if is_bad else params[index]
                y = con(jnp.tanh(y @ w), "data")
            return jnp.mean(y)

        updates, new_state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), new_state

    params = {f"w{index}": f32(256, 256) for index in range(8)} if is_bad else f32(8, 256, 256)
    state = jax.eval_shape(optimizer.init, params)
    specs = jax.tree.map(lambda array: P("data") if len(array.shape) > 1 else P(), (params, state))
    return Program(step, (params, state, f32(256, 256)), (*specs, P("data")), "data:8", out=specs, roles=TRAINED)


def microbatches(is_bad: bool, target: str, stacks: bool = False) -> Program:
    """Gradients that are summed over devices for each of four microbatches, or once."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def accumulated(w: Any, xs: Any) -> Any:
        def gradient(x: Any) -> Any:
            return jax.grad(loss)(w, x if not is_bad else con(x, "data"))

        if stacks:
            return jnp.sum(lax.map(gradient, xs), 0)
        return lax.scan(lambda total, x: (total + gradient(x), None), jnp.zeros_like(w), xs)[0]

    def of_device(w: Any, xs: Any) -> Any:
        # Gathered outside of the loss, whose gradient is then of this device alone.
        w = lax.all_gather(w, "data", tiled=True)
        return lax.psum_scatter(accumulated(w, xs), "data", tiled=True)

    specs = (P("data"), P(None, "data"))
    once = jax.shard_map(of_device, in_specs=specs, out_specs=P("data"), check_vma=False)
    args = (f32(1024, 1024), f32(4, 256, 1024))
    return Program(accumulated if is_bad else once, args, specs, "data:8", out=P("data"), roles=MODEL)


def stacked_microbatches(is_bad: bool, target: str) -> Program:
    """The same gradients, which are stacked and added up in the end."""
    return microbatches(is_bad, target, stacks=True)


def _product(step: Callable[[Any, Any], Any], weights: Any, axis: str) -> Program:
    specs = (P(axis), P(axis))
    return Program(step, (weights, bf16(512, 4096)), specs, f"{axis}:8", out=P(axis), roles=MODEL)


def float8(is_bad: bool, target: str) -> Program:
    """A weight that is scaled and cast to 8 bits after it is gathered, or before."""

    def step(w: Any, x: Any) -> Any:
        scale = jnp.max(jnp.abs(w)) / 448
        narrow = (con(w) / scale).astype(F8) if is_bad else con(con((w / scale).astype(F8), "fsdp"))
        return con(x @ narrow.astype(BF16), "fsdp") * scale

    return _product(step, bf16(4096, 4096), "fsdp")


def quantised(is_bad: bool, target: str) -> Program:
    """A weight that is rounded to 8 bits, and gathered after it is widened again, or before."""

    def step(w: Any, x: Any) -> Any:
        scale = jnp.max(jnp.abs(w), axis=1, keepdims=True) / 448
        narrow = con((w / scale).astype(F8), "fsdp")
        return con(x @ con((narrow if is_bad else con(narrow)).astype(BF16) * scale), "fsdp")

    return _product(step, bf16(4096, 4096), "fsdp")


def bfloat16(is_bad: bool, target: str) -> Program:
    """A float32 weight that is scaled and cast to bfloat16 after it is gathered, or before."""

    def step(w: Any, x: Any) -> Any:
        scale = jnp.max(jnp.abs(w))
        narrow = (con(w) / scale).astype(BF16) if is_bad else con(con((w / scale).astype(BF16), "rows"))
        return con(x @ narrow, "rows")

    return _product(step, f32(4096, 4096), "rows")


def zero(is_bad: bool, target: str) -> Program:
    """Adam's state, constrained in the step to be split over the batch, and whole where it comes in, or split."""
    optimizer = optax.adam(1e-3)

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda params: jnp.mean(con(jnp.tanh(x @ params["w"]), "data") ** 2))(params)
        state = jax.tree.map(lambda array: con(array, "data") if array.ndim else array, state)  # <split>
        updates, new_state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), new_state

    params = {"w": f32(1024, 1024)}
    state = jax.eval_shape(optimizer.init, params)
    specs = jax.tree.map(lambda array: P("data") if array.shape and not is_bad else P(), state)
    return Program(
        step, (params, state, f32(512, 1024)), (P(), specs, P("data")), "data:8", out=(P(), None), roles=TRAINED
    )


def table(is_bad: bool, target: str) -> Program:
    """Rotary angles that every layer computes, or that are an argument of the step."""

    def angles(length: int, size: int) -> Any:
        return jnp.arange(length)[:, None] / 10_000 ** (jnp.arange(size) / size)

    def layer(x: Any, w: Any, sin: Any, cos: Any) -> Any:
        first, second = jnp.split(x @ w, 2, -1)
        return con(x + jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1), "data")

    def step(weights: Any, x: Any, tables: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            if is_bad:
                angle = angles(x.shape[1], x.shape[2] // 2)
                return layer(x, w, jnp.sin(angle), jnp.cos(angle)), None  # <angles>
            return layer(x, w, *tables), None

        return lax.scan(body, x, weights)[0]

    tables = (f32(8192, 64), f32(8192, 64))
    args = (f32(16, 128, 128), f32(8, 8192, 128), tables)
    specs = (P(), P("data"), P())
    return Program(step, args, specs, "data:8", out=P("data"), roles=("parameters", "batch", "parameters"))


ACCIDENTS: Mapping[Callable[[bool, str], Program], str] = MappingProxyType(
    {
        head: "partial-sums",
        head_over_batch: "partial-sums",
        regathered: "gathered-twice",
        narrow: "reduced-whole",
        small: "small-collectives",
        kernel: "gathered-for-kernel",
        names: "unmatched-names",
        muon: "replicated-update",
        microbatches: "reduced-in-loop",
        stacked_microbatches: "reduced-in-loop",
        float8: "wide-on-the-wire",
        quantised: "wide-on-the-wire",
        bfloat16: "wide-on-the-wire",
        zero: "state-left-whole",
        table: "recomputed-table",
    }
)
"""Each accident with the code of its finding."""
